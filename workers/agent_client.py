"""A worker's end of the channel to its agent, and its stand-in where there is no agent."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType
from typing import Any, Protocol

from elaunch import threads
from elaunch.detect import hang
from elaunch.errors import JobFailed, ProtocolError
from elaunch.failures import ERROR_FILE, record_own_error
from elaunch.rendezvous.codec import from_json
from elaunch.rendezvous.membership import Generation, GenerationStage, Master, Worker
from elaunch.rendezvous.rules.edit import GenerationEdit, follow
from elaunch.wire import (
    Announce,
    AnnounceEdit,
    Attach,
    LineBuffer,
    Logged,
    Message,
    Ready,
    Welcome,
    decode,
    encode,
)
from elaunch.workers import heartbeat
from elaunch.workers.comm.here import let_read, process_of
from elaunch.workers.comm.secure.security import LinkSecurity, security_of
from elaunch.workers.fatal import end_process

WELCOME_TIMEOUT_S = 30.0
STORE_S = 300.0
"""torch's limit for what it waits for in a store."""

GONE_S = 5.0
"""How long the script may take to end when its agent has hung up. Then its process ends: it would never hear of another
generation, and nobody would replace it."""


class Client(Protocol):
    """What a session needs of its agent."""

    worker: str
    token: str
    host: str
    security: LinkSecurity | None
    local_rank: int
    min_nodes: int
    elastic: bool
    """Whether the membership can change."""
    logged: Logged | None
    """The last step that this worker reported and its agent has written into the event log; None: of none yet."""

    def listen(self, on_generation: Callable[[Generation], None]) -> None:
        """Calls `on_generation`, from any thread, with each new training generation."""

    def newest(self) -> Generation | None:
        """Returns the newest training generation that was announced; None before the first."""

    def wait_beyond(self, generation: int, timeout_s: float | None) -> Generation | None:
        """Returns a training generation above `generation`; None when none came within `timeout_s` (None: no limit).

        Raises:
            JobFailed: there will be none.
        """

    def wait_logged(self, generation: int, step: int, timeout_s: float) -> None:
        """Waits until the agent has written a step that was reported in a generation, if it does so in time."""

    def ready(self, address: str, takes_plans: bool = False) -> None:
        """Reports that this worker accepts links at `address`, and whether it takes plans made for it."""

    def send(self, message: Message) -> None:
        """Sends a message to the agent, without blocking."""

    def close(self) -> None:
        """Hangs up, after what was sent before."""


class AgentClient:
    """Talks to the agent over its control socket. Sends never block the training thread.

    Args:
        path: of the socket.
        worker: identity of this worker.
        fds: files that the agent gets with the first message (`elaunch.wire.Attach`).

    Raises:
        JobFailed: the agent does not answer.
    """

    elastic = True

    def __init__(self, path: str, worker: str, fds: Sequence[int] = ()) -> None:
        self.worker = worker
        self._on_generation: Callable[[Generation], None] = lambda generation: None
        self._changed = threading.Condition()
        self._newest: Generation | None = None
        self._announced: Generation | None = None  # of whichever stage
        self.logged: Logged | None = None
        self._ended = False
        self._closing = threading.Event()
        self._outbox: deque[bytes] = deque()
        self._sending = threading.Lock()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lines = LineBuffer()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(WELCOME_TIMEOUT_S)
        early: list[Message] = []
        try:
            with threads.telling(_say, f"the agent of worker {worker} to answer", WELCOME_TIMEOUT_S):
                self._socket.connect(path)
                # It is short, and the first: the socket takes all of it.
                socket.send_fds(self._socket, [encode(Attach(worker, os.getpid()))], fds)
                while not early:
                    data = self._socket.recv(1 << 16)
                    if not data:
                        raise JobFailed(f"the agent does not know worker {worker}; was ELAUNCH_WORKER copied by hand?")
                    early.extend(decode(line) for line in self._lines.feed(data))
        except OSError as error:
            self._socket.close()
            raise JobFailed(f"the agent at {path} does not answer: {error}") from error
        welcome = early.pop(0)
        assert isinstance(welcome, Welcome)
        self.token, self.host, self.node, self.local_rank = (
            welcome.token,
            welcome.host,
            welcome.node,
            welcome.local_rank,
        )
        self.min_nodes = welcome.min_nodes
        self.security = security_of(welcome.tls, welcome.always_tls)
        let_read(process_of(self._socket))
        self._take(early)
        self._socket.setblocking(False)
        self._thread = threads.start("elaunch-agent-client", self._run, self._died)

    def listen(self, on_generation: Callable[[Generation], None]) -> None:
        """Calls `on_generation`, from the client's thread, with each new training generation."""
        self._on_generation = on_generation

    def newest(self) -> Generation | None:
        """Returns the newest training generation that the agent has announced."""
        return self._newest

    def wait_beyond(self, generation: int, timeout_s: float | None) -> Generation | None:
        """Waits for a training generation above `generation`; None when none came in time.

        Raises:
            JobFailed: the agent has gone.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._generation() > generation, timeout_s)
            if self._generation() > generation:
                return self._newest
            if self._ended:
                raise JobFailed("the agent of this worker has gone")
            return None

    def wait_logged(self, generation: int, step: int, timeout_s: float) -> None:
        """Waits until the agent has written a step that was reported in a generation, if it does so in time."""
        said = Logged(generation, step)
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self.logged == said, timeout_s)

    def ready(self, address: str, takes_plans: bool = False) -> None:
        """Reports that this worker accepts links at `address`, and whether it takes plans made for it."""
        self.send(Ready(address, takes_plans))

    def send(self, message: Message) -> None:
        """Sends a message to the agent, behind those before it. What its socket does not take now, its thread sends."""
        self._outbox.append(encode(message))
        if self._sending.acquire(blocking=False):
            try:
                self._send_queued()
            finally:
                self._sending.release()
        if self._outbox:
            os.eventfd_write(self._wake, 1)

    def close(self, timeout_s: float = 5.0) -> None:
        """Delivers what is queued, then hangs up."""
        end_s = time.monotonic() + timeout_s
        while self._outbox and not self._ended and time.monotonic() < end_s:
            time.sleep(0.001)
        self._closing.set()
        with self._changed:
            self._ended = True
        os.eventfd_write(self._wake, 1)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)

    def _generation(self) -> int:
        return self._newest.number if self._newest is not None else 0

    def _run(self) -> None:
        try:
            self._exchange()
        finally:
            self._end()
            self._socket.close()
        if not self._closing.wait(GONE_S):
            raise ConnectionError("the agent has hung up")

    def _died(self, error: BaseException) -> None:
        if not self._closing.is_set():
            end_process("connection to its agent", error)

    def _exchange(self) -> None:
        """Receives and sends until either end hangs up."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._ended:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._outbox else 0))
            for fd, events in poll.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif events & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._receive()
            with self._sending:
                if not self._send_queued():
                    self._end()

    def _send_queued(self) -> bool:
        """Sends what the socket takes of what is queued, under `_sending`; returns False when the agent has hung up."""
        try:
            while self._outbox:
                left = self._outbox[0][self._socket.send(self._outbox[0]) :]
                if left:
                    self._outbox[0] = left
                else:
                    self._outbox.popleft()
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def _receive(self) -> None:
        try:
            data = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end()
            return
        self._take([decode(line) for line in self._lines.feed(data)])

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Logged):
                with self._changed:
                    self.logged = message
                    self._changed.notify_all()
            if isinstance(message, Announce):
                generation = from_json(Generation, message.generation.encode())
            elif isinstance(message, AnnounceEdit):
                generation = self._edited(message)
            else:
                continue
            self._announced = generation
            if generation.stage is GenerationStage.TRAIN and generation.number > self._generation():
                with self._changed:
                    self._newest = generation
                    self._changed.notify_all()
                self._on_generation(generation)

    def _edited(self, message: AnnounceEdit) -> Generation:
        """Returns the generation that follows from the one before.

        Raises:
            ProtocolError: it does not.
        """
        generation = follow(self._announced, from_json(GenerationEdit, message.edit.encode()))
        if generation is None:
            known = "none" if self._announced is None else str(self._announced.number)
            raise ProtocolError(f"the agent has announced what does not follow from generation {known}")
        return generation

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class StaticClient:
    """A membership that never changes: under torchrun, or in a single process.

    The workers find each other through the store that torchrun's variables name. A failure is an error, as it is for
    any script under torchrun.
    """

    elastic = False
    logged: Logged | None = None

    def __init__(self) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.worker = f"rank/{self.rank}#0"
        self.token = "static"
        self.security: LinkSecurity | None = None  # nobody hands out certificates
        self.min_nodes = 1
        self.host = "127.0.0.1"
        self._store: Any = None
        self._master = Master()
        self._generation: Generation | None = None
        if self.size > 1:
            self._master = Master(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
            self.host, self._store = _join_store(self._master, self.rank, self.size)

    def listen(self, on_generation: Callable[[Generation], None]) -> None:
        """Does nothing: the one generation is known before anybody could be told of it."""

    def newest(self) -> Generation | None:
        """Returns the one generation; None before `ready`."""
        return self._generation

    def wait_beyond(self, generation: int, timeout_s: float | None) -> Generation | None:
        """Returns the one generation if it is above `generation`, without waiting.

        Raises:
            JobFailed: a second generation would be needed.
        """
        if self._generation is not None and self._generation.number > generation:
            return self._generation
        if generation > 0:
            raise JobFailed("a worker was lost, and without elaunch there is nobody to go on with")
        return None

    def wait_logged(self, generation: int, step: int, timeout_s: float) -> None:
        """Does nothing: no agent writes."""

    def ready(self, address: str, takes_plans: bool = False) -> None:
        """Exchanges addresses; then the one generation exists."""
        addresses = [address]
        if self._store is not None:
            self._store.set(f"address/{self.rank}", address)
            with telling_of(self._master):
                addresses = [self._store.get(f"address/{rank}").decode() for rank in range(self.size)]
        workers = tuple(Worker(f"rank/{rank}#0", "static", rank, where) for rank, where in enumerate(addresses))
        start = Generation(1, GenerationStage.TRAIN, workers, cause="start", aborts_step_before=1, master=self._master)
        self._generation = replace(start, attempt=_attempt())

    def send(self, message: Message) -> None:
        """Drops the message: no agent is there to take it."""

    def close(self) -> None:
        """Does nothing: no agent is connected."""


def telling_of(master: Master) -> AbstractContextManager[None]:
    """Returns a context in which a worker without an agent waits for all others to come to torch's store."""
    return threads.telling(_say, f"the other workers, at {master.addr}:{master.port}", STORE_S)


def _say(line: str) -> None:
    print(f"[elaunch] {line}", file=sys.stderr, flush=True)


def _join_store(master: Master, rank: int, size: int) -> tuple[str, Any]:
    """The job's TCPStore, and this machine's address on the route to it."""
    from torch.distributed import PrefixStore, TCPStore

    host, port = master.addr, master.port
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    with telling_of(master):
        store = TCPStore(host, port, size, rank == 0 and not agent_store)
    with socket.create_connection((host, port), 10) as probe:
        own: str = probe.getsockname()[0]
    return own, PrefixStore(f"elaunch/{_attempt()}", store)


def _attempt() -> int:
    """How often torchrun has started all workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _write_down_what_ends_it() -> None:
    """Has an exception that ends this process written into its error file, as torch's `record` does for a function."""
    former = sys.excepthook

    def write_down(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        path = os.environ.get(ERROR_FILE)
        if path and not os.path.exists(path) and not issubclass(kind, KeyboardInterrupt):
            record_own_error(error)
        former(kind, error, trace)

    sys.excepthook = write_down


def has_agent() -> bool:
    """Returns whether an agent of elaunch has started this process: then the members of its job can change."""
    return bool(os.environ.get("ELAUNCH_CONTROL") and os.environ.get("ELAUNCH_WORKER"))


def connect() -> Client:
    """Returns the client that suits this process's environment."""
    if not has_agent():
        return StaticClient()
    path, worker = os.environ["ELAUNCH_CONTROL"], os.environ["ELAUNCH_WORKER"]
    _write_down_what_ends_it()
    if hang.parse(os.environ.get(hang.VARIABLE, ""), hang.VARIABLE).mode == "off":
        return AgentClient(path, worker)
    shown = heartbeat.open_heartbeat()
    return AgentClient(path, worker, (shown.fd, shown.stacks_fd))
