"""Messages between two workers that go their way while both do something else: what `isend` and `irecv` need.

Links carry one operation at a time. So messages have connections of their own, one for each direction between two
workers, made at the first message, with a thread at each end. What comes before it is asked for is kept in memory. They
belong to a generation: the next one begins with new connections.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

from elaunch import threads
from elaunch.errors import GenerationChanged, LinkLost, ProtocolError, StepInterrupted
from elaunch.rendezvous.membership import split_address
from elaunch.workers import heartbeat
from elaunch.workers.comm import wire
from elaunch.workers.comm.here import connect_here
from elaunch.workers.comm.link import Floors
from elaunch.workers.comm.listener import REDIAL_S, HungUp, greet
from elaunch.workers.comm.secure.security import LinkSecurity, secured_within
from elaunch.workers.comm.secure.sockets import SecureSocket

CONNECT_TIMEOUT_S = 10.0
LOOK_S = 1.0
"""How often whoever waits looks whether the link to the peer has broken."""

_NEVER = 1 << 62  # above every generation's number
_HEADER = struct.Struct("<4sQIqQ")
_MAGIC = b"eLm1"


@dataclass(frozen=True, slots=True)
class Channel:
    """Messages of one channel, from one worker to another, arrive in the order in which they were sent.

    Attributes:
        generation: of the group.
        number: of the group among those of a worker.
        tag: as `torch.distributed` has them.
    """

    generation: int
    number: int
    tag: int


class Letter:
    """A message on its way, at one of its ends.

    Args:
        peer: who is at the other end.
        generation: of the group.
        memory: the bytes to send, or the place for them.
        keep: what that memory belongs to.
        look: called now and then with the peer while somebody waits; what it raises ends the wait.
    """

    def __init__(
        self, peer: str, generation: int, memory: memoryview, keep: object, look: Callable[[str], None]
    ) -> None:
        self.peer, self.generation, self.memory, self.keep = peer, generation, memory, keep
        self._look = look
        self.error: StepInterrupted | ValueError | None = None
        self._over = threading.Event()
        self._then: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    @property
    def is_over(self) -> bool:
        """Whether it has left, or come, or will not."""
        return self._over.is_set()

    def ends(self, error: StepInterrupted | ValueError | None = None) -> None:
        """Tells whoever waits that it has left, or come; or what has gone wrong."""
        with self._lock:
            if self._over.is_set():
                return
            self.error, self.keep = error, None
            self._over.set()
            then, self._then = self._then, []
        for call in then:
            call()

    def then(self, call: Callable[[], None]) -> None:
        """Has a function called when it is over, in whichever thread ends it."""
        with self._lock:
            if not self._over.is_set():
                self._then.append(call)
                return
        call()

    def wait(self, timeout_s: float = inf) -> bool:
        """Returns whether it is over, at the latest after so many seconds.

        Raises:
            StepInterrupted: the generation is over, or a connection with the peer broke.
            ValueError: what came is not as long as the place for it.
        """
        end_s = time.monotonic() + timeout_s
        if not self.is_over:
            with heartbeat.waiting([self.peer], self.generation):
                while not self._over.wait(min(LOOK_S, max(0.0, end_s - time.monotonic()))):
                    if time.monotonic() >= end_s:
                        break
                    self._look(self.peer)
        if self.error is not None:
            raise self.error.with_traceback(None)
        return self.is_over


@dataclass(eq=False)
class _Early:
    """A message that comes, or came, before anybody asked for it."""

    body: bytearray
    is_whole: bool = False
    letter: Letter | None = None


@dataclass(eq=False)
class _Mailbox:
    """Messages of one channel from one peer: those that are asked for, or those that came before that."""

    asked: deque[Letter] = field(default_factory=deque)
    early: deque[_Early] = field(default_factory=deque)


class Letters:
    """All messages of one worker.

    Args:
        worker: identity of this worker, and `token` is the job's secret.
        find: returns the address of a peer of the present generation; None: there is no such peer.
        look: raises what is known to be wrong with a peer that somebody waits for.
        security: says which connections are encrypted; None: none is.
        floors: which generations this worker knows.
    """

    def __init__(
        self,
        worker: str,
        token: str,
        find: Callable[[str], str | None],
        look: Callable[[str], None],
        security: LinkSecurity | None = None,
        floors: Floors | None = None,
    ) -> None:
        self._security = security
        self._floors = Floors() if floors is None else floors
        self._worker, self._token, self._find, self._look = worker, token, find, look
        # Under this lock: also every write into the memory of whoever has asked, so that none comes after `interrupt`.
        self._lock = threading.Lock()
        self._floor = 0
        self._senders: dict[str, _Sender] = {}
        self._receivers: set[_Receiver] = set()
        self._open: set[Letter] = set()
        self._boxes: defaultdict[tuple[str, Channel], _Mailbox] = defaultdict(_Mailbox)

    def send(self, peer: str, channel: Channel, body: memoryview, keep: object = None) -> Letter:
        """Begins to send; the bytes stay unchanged until the letter is over.

        Raises:
            GenerationChanged: the generation of the channel is over.
        """
        with self._lock:
            letter = self._letter(peer, channel, body, keep)
            if peer != self._worker:
                sender = self._senders.get(peer)
                if sender is None:
                    sender = self._senders[peer] = _Sender(self, peer)
                sender.put(channel, letter)
                return letter
        found = self.begins(peer, channel, len(body))
        place = found.memory if isinstance(found, Letter) else memoryview(found.body)
        if isinstance(found, _Early) or found.error is None:
            place[:] = body
        self.has_come(found)
        letter.ends()
        return letter

    def receive(self, peer: str, channel: Channel, place: memoryview, keep: object = None) -> Letter:
        """Asks for the next message of a channel, which must be as long as the place for it.

        Raises:
            GenerationChanged: the generation of the channel is over.
        """
        with self._lock:
            letter = self._letter(peer, channel, place, keep)
            box = self._boxes[peer, channel]
            if not box.early:
                box.asked.append(letter)
                return letter
            early = box.early.popleft()
            if not early.is_whole:
                early.letter = letter
                return letter
        _open(early.body, letter)
        return letter

    def interrupt(self, generation: int) -> None:
        """Ends the messages of older generations: whoever waits for one gets `GenerationChanged`. From any thread."""
        with self._lock:
            if generation <= self._floor:
                return
            self._floor = generation
            senders, self._senders = list(self._senders.values()), {}
            for stale in [key for key in self._boxes if key[1].generation < generation]:
                del self._boxes[stale]
            letters = [letter for letter in self._open if letter.generation < generation]
            for receiver in self._receivers:
                receiver.leave(generation)
        error = GenerationChanged(generation)
        for sender in senders:
            sender.close(error)
        for letter in letters:
            letter.ends(error)

    def accept(self, peer: str, sock: socket.socket) -> None:
        """Takes over a connection on which a peer sends messages."""
        receiver = _Receiver(self, peer, sock)
        with self._lock:
            self._receivers.add(receiver)
        threads.start(f"elaunch-mail from {peer}", receiver.run, lambda _: None)

    def close(self) -> None:
        """Ends all connections. What waits to leave does not leave: whoever sends waits for it before."""
        self.interrupt(_NEVER)
        with self._lock:
            for receiver in self._receivers:
                receiver.close()

    def close_in_child(self) -> None:
        """Drops the child's copies after a fork."""
        ends: list[_Sender | _Receiver] = [*self._senders.values(), *self._receivers]
        for end in ends:
            if end.socket is not None:
                end.socket.close()

    # -- for both kinds of threads ------------------------------------------------------------------------------

    def dial(self, peer: str) -> socket.socket:
        """Returns a connection for messages to a peer.

        Raises:
            OSError, ProtocolError: it cannot be made.
            GenerationChanged: the peer has gone on to a generation that this worker has not heard of.
        """
        end_s = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            try:
                return self._dial(peer)
            except (HungUp, ConnectionError):
                # It has just ended, and then it refuses the next one; or it has no place for this one.
                if time.monotonic() + REDIAL_S >= end_s:
                    raise
                time.sleep(REDIAL_S)

    def _dial(self, peer: str) -> socket.socket:
        address = self._find(peer)
        if address is None:
            raise ProtocolError("its address is not known")
        sock = connect_here(address) or socket.create_connection(split_address(address), CONNECT_TIMEOUT_S)
        deadline_s, shown = time.monotonic() + CONNECT_TIMEOUT_S, self._floors.heard
        try:
            sock = secured_within(self._security, sock, deadline_s)
            ack = greet(sock, self._token, wire.Hello(self._worker, "mail", shown), deadline_s)
            if ack.worker != peer:
                raise ProtocolError(f"{ack.worker} answers at {address}")
            if not self._floors.heed(ack, shown):
                raise HungUp(f"its connections need a proof of generation {ack.settled}")
            sock.sendall(wire.go_line())
            sock.settimeout(None)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock

    def begins(self, peer: str, channel: Channel, n_bytes: int) -> Letter | _Early:
        """Returns where a message goes that begins to come.

        Raises:
            GenerationChanged: nowhere.
        """
        with self._lock:
            self._check(channel.generation)
            box = self._boxes[peer, channel]
            if not box.asked:
                box.early.append(_Early(bytearray(n_bytes)))
                return box.early[-1]
            letter = box.asked.popleft()
        if len(letter.memory) != n_bytes:
            letter.ends(_misfit(letter, n_bytes))
        return letter

    def has_come(self, found: Letter | _Early) -> None:
        """Takes note that the whole message is there."""
        if isinstance(found, Letter):
            found.ends()
            return
        with self._lock:
            found.is_whole, letter = True, found.letter
        if letter is not None:
            _open(found.body, letter)

    def take(self, sock: socket.socket, generation: int, target: memoryview) -> int:
        """Waits for some bytes and puts them into their place; returns how many.

        Raises:
            GenerationChanged: the generation is over, and nothing was put there.
            OSError: the connection is over.
        """
        _await_input(sock)
        with self._lock:
            self._check(generation)
            got = (
                sock.fill(target) if isinstance(sock, SecureSocket) else sock.recv_into(target, 0, socket.MSG_DONTWAIT)
            )
        if not got:
            raise ConnectionError("closed by the peer")
        return got

    def forget(self, receiver: _Receiver) -> None:
        """A receiver has ended."""
        with self._lock:
            self._receivers.discard(receiver)

    def _letter(self, peer: str, channel: Channel, memory: memoryview, keep: object) -> Letter:
        """Under the lock."""
        self._check(channel.generation)
        letter = Letter(peer, channel.generation, memory, keep, self._look)
        self._open.add(letter)
        letter.then(lambda: self._open.discard(letter))
        return letter

    def _check(self, generation: int) -> None:
        if self._floor > generation:
            raise GenerationChanged(self._floor)


class _Sender:
    """Sends the messages to one peer, in a thread of its own, which connects first."""

    def __init__(self, mail: Letters, peer: str) -> None:
        self._mail, self._peer = mail, peer
        self._waiting: queue.SimpleQueue[tuple[Channel, Letter] | None] = queue.SimpleQueue()
        self._error: StepInterrupted | None = None
        self.socket: socket.socket | None = None
        threads.start(f"elaunch-mail to {peer}", self._run, lambda _: self.close(LinkLost(peer, "its thread has died")))

    def put(self, channel: Channel, letter: Letter) -> None:
        self._waiting.put((channel, letter))

    def close(self, error: StepInterrupted) -> None:
        """Ends it; what has not left yet does not leave."""
        self._error = error
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        self._waiting.put(None)

    def _run(self) -> None:
        heartbeat.in_background()
        try:
            for channel, letter in self._letters():
                if self._error is None:
                    self._send(channel, letter)
                letter.ends(self._error)
        finally:
            if self.socket is not None:
                self.socket.close()

    def _letters(self) -> Iterator[tuple[Channel, Letter]]:
        """Yields what is to be sent; at the end, what was left."""
        while (found := self._waiting.get()) is not None:
            yield found
        while not self._waiting.empty():
            if (found := self._waiting.get()) is not None:
                yield found

    def _send(self, channel: Channel, letter: Letter) -> None:
        try:
            if self.socket is None:
                self.socket = self._mail.dial(self._peer)
            header = _HEADER.pack(_MAGIC, channel.generation, channel.number, channel.tag, len(letter.memory))
            if self._error is None:
                self.socket.sendall(header)
                self.socket.sendall(letter.memory)
        except GenerationChanged as error:
            self._error = self._error or error
        except Exception as error:  # whatever it is, nobody waits for this letter any longer
            if self._error is None:
                self._error = LinkLost(self._peer, f"a message did not leave: {error}")


class _Receiver:
    """Takes in the messages of one peer that come on one connection, in a thread of its own."""

    def __init__(self, mail: Letters, peer: str, sock: socket.socket) -> None:
        self._mail, self._peer = mail, peer
        self._generation: int | None = None  # of the message that comes
        self.socket: socket.socket | None = sock
        # What is under way when a generation ends must not be waited for under the lock.
        sock.setblocking(not isinstance(sock, SecureSocket))

    def leave(self, generation: int) -> None:
        """Ends it if what comes is of an older generation."""
        if self._generation is not None and self._generation < generation:
            self.close()

    def close(self) -> None:
        """Ends it."""
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Takes in messages until the connection is closed."""
        heartbeat.in_background()
        sock = self.socket
        assert sock is not None
        try:
            with sock, contextlib.suppress(OSError, GenerationChanged):
                while self._take_one(sock):
                    pass
        finally:
            self._mail.forget(self)
            self.socket = None

    def _take_one(self, sock: socket.socket) -> bool:
        header = bytearray(_HEADER.size)
        if not _fill(sock, memoryview(header)):
            return False
        magic, generation, number, tag, n_bytes = _HEADER.unpack(header)
        if magic != _MAGIC:
            return False
        self._generation = generation
        found = self._mail.begins(self._peer, Channel(generation, number, tag), n_bytes)
        misfit = isinstance(found, Letter) and found.is_over
        place = memoryview(bytearray(n_bytes)) if misfit else _place(found)
        while place:
            with contextlib.suppress(BlockingIOError):
                place = place[self._mail.take(sock, generation, place) :]
                heartbeat.moved()
        if not misfit:
            self._mail.has_come(found)
        self._generation = None
        return True


def _place(found: Letter | _Early) -> memoryview:
    return found.memory if isinstance(found, Letter) else memoryview(found.body)


def _fill(sock: socket.socket, place: memoryview) -> bool:
    """Fills memory from a connection; returns whether that went on for long enough."""
    while place:
        _await_input(sock)
        with contextlib.suppress(BlockingIOError):
            got = sock.fill(place) if isinstance(sock, SecureSocket) else sock.recv_into(place)
            if not got:
                return False
            place = place[got:]
    return True


def _await_input(sock: socket.socket) -> None:
    """Returns when something has come, or the connection is over."""
    if isinstance(sock, SecureSocket):
        sock.await_input()
    else:
        sock.recv_into(memoryview(bytearray(1)), 1, socket.MSG_PEEK)


def _open(body: bytearray, letter: Letter) -> None:
    """Copies an early message to where it was asked for."""
    if len(body) == len(letter.memory):
        letter.memory[:] = body
        letter.ends()
    else:
        letter.ends(_misfit(letter, len(body)))


def _misfit(letter: Letter, n_bytes: int) -> ValueError:
    return ValueError(
        f"{letter.peer} has sent {n_bytes} bytes where this worker receives {len(letter.memory)}: give both ends "
        "tensors of the same shape and type"
    )
