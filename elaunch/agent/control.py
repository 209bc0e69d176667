"""The channel between an agent and its workers: a Unix socket in a directory that only this user may enter.

Other processes of this user may enter too. Whatever a connection sends, or does not send, ends that connection at most.
"""

from __future__ import annotations

import os
import select
import selectors
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable

from elaunch.accepting import Accepting
from elaunch.errors import ProtocolError
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.membership import Generation
from elaunch.rendezvous.rules.edit import edit_between
from elaunch.wire import Announce, AnnounceEdit, LineBuffer, Message, decode, encode

MAX_FDS = 2
"""They come with the first message; the kernel drops what is more."""

FOLDER_LIMIT_BYTES = 80  # the path of a socket, here /elaunch-xxxxxxxx/agent longer, has at most 107 bytes

FIRST_LINE_BYTES = 4096
"""How long the first message may be, which names the worker."""

MAX_STRANGERS = 64
"""How many connections may have named no worker yet; with one more, the oldest is closed."""

STRANGER_S = 30.0
"""How long a connection may take to name its worker."""

MAX_UNSENT_BYTES = 256 << 20
"""How much may wait for a worker that does not read."""

_CREDENTIALS = struct.Struct("3i")


class ControlConnection:
    """One worker's end. Sends never block: what the socket does not take waits.

    Attributes:
        worker: who it is; empty until it has said so, and the server knows of it (`ControlServer.attach`).
        pid: the process at the other end, as the kernel says; 0 where this process cannot see it.
        since_s: when it was accepted, by `time.monotonic`.
    """

    def __init__(self, server: ControlServer, link: socket.socket, pid: int) -> None:
        self._server = server
        self._link = link
        self._lines = LineBuffer(FIRST_LINE_BYTES)
        self._unsent = b""
        self._fds: list[int] = []
        self._announced: Generation | None = None
        self.worker = ""
        self.pid = pid
        self.since_s = time.monotonic()

    @property
    def closed(self) -> bool:
        """Returns whether this end has been closed."""
        return self._link.fileno() < 0

    @property
    def hung_up(self) -> bool:
        """Returns whether the other end has been closed."""
        poll = select.poll()
        poll.register(self._link, 0)
        return any(events & select.POLLHUP for _, events in poll.poll(0))

    @property
    def has_input(self) -> bool:
        """Returns whether there is something to receive, be it the end."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        return bool(poll.poll(0))

    def attached(self, worker: str) -> None:
        """Notes that the connection is this worker's: its messages may be long."""
        self.worker = worker
        self._lines.limit_bytes = None

    def send(self, message: Message) -> None:
        """Sends a message, or what of it the socket takes now; the rest follows when the socket takes more."""
        self._unsent += encode(message)
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self._server.complain(f"{self}: it does not read what it is sent; its connection is closed")
            self.close()
        self.flush()

    def announce(self, generation: Generation) -> None:
        """Sends a generation, or what has changed since the one that was sent before."""
        edit = edit_between(self._announced, generation)
        self._announced = generation
        self.send(AnnounceEdit(to_json(edit).decode()) if edit.former else Announce(to_json(generation).decode()))

    def flush(self) -> None:
        """Sends more of what waits. A connection that is broken is closed."""
        if self.closed:
            return
        if self._unsent:
            try:
                self._unsent = self._unsent[self._link.send(self._unsent) :]
            except BlockingIOError:
                pass
            except OSError:
                self.close()
                return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._server.selector.modify(self._link, events, self)

    def receive(self) -> list[Message]:
        """Returns the messages that have come; closes the connection at its end.

        Raises:
            ProtocolError: what has come is no message, or brings descriptors that do not belong there.
        """
        if self.closed:
            return []
        try:
            data, fds, _, _ = socket.recv_fds(self._link, 1 << 16, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return []
        except OSError:
            data, fds = b"", []
        self._fds += fds
        if not data:
            self.close()
            return []
        if fds and (self.worker or len(self._fds) > MAX_FDS):
            raise ProtocolError(f"{len(self._fds)} descriptors; only the first message brings some, at most {MAX_FDS}")
        return [decode(line) for line in self._lines.feed(data)]

    def take_fds(self) -> list[int]:
        """Returns the descriptors that have come; whoever takes them closes them."""
        taken, self._fds = self._fds, []
        return taken

    def close(self) -> None:
        """Closes this end; again does nothing."""
        for fd in self.take_fds():
            os.close(fd)
        if not self.closed:
            self._server.selector.unregister(self._link)
            self._link.close()
        self._server.forget(self)

    def __str__(self) -> str:
        return f"worker {self.worker}" if self.worker else f"a connection of process {self.pid}"


class ControlServer:
    """Listens for the workers of one agent.

    Args:
        selector: of the agent's loop; connections are registered in it with themselves as data.
        complain: told in a line of a connection that is closed for what it does.
    """

    def __init__(self, selector: selectors.BaseSelector, complain: Callable[[str], None]) -> None:
        self.selector = selector
        self.complain = complain
        self.connections: dict[str, ControlConnection] = {}
        self._strangers: dict[ControlConnection, None] = {}  # that have named no worker yet, the oldest first
        self._complained = False
        folder = tempfile.gettempdir()
        if len(os.fsencode(folder)) > FOLDER_LIMIT_BYTES:
            folder = "/tmp"
        self.directory = tempfile.mkdtemp(prefix="elaunch-", dir=folder)  # mode 0700
        self.path = os.path.join(self.directory, "agent")
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(self.path)
        listening.listen(128)
        self._accepting = Accepting(selector, listening, self, complain)

    def accept(self) -> None:
        """Takes the next connection. Those that have named no worker are bounded, so none of these stays for ever."""
        link = self._accepting.accept()
        if link is None:
            return
        try:
            link.setblocking(False)
            credentials = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            connection = ControlConnection(self, link, _CREDENTIALS.unpack(credentials)[0])
            self.selector.register(link, selectors.EVENT_READ, connection)
        except OSError as error:
            link.close()
            self._accepting.pause(error)
            return
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            if not self._complained:
                self._complained = True
                self.complain(f"more than {MAX_STRANGERS} connections have named no worker; the oldest are closed")
            next(iter(self._strangers)).close()

    def attach(self, connection: ControlConnection, worker: str) -> None:
        """Gives a connection to this worker from now on, and closes the one that it had before."""
        former = self.connections.get(worker)
        if former is not None and former is not connection:
            former.close()
        self._strangers.pop(connection, None)
        connection.attached(worker)
        self.connections[worker] = connection

    def forget(self, connection: ControlConnection) -> None:
        """Notes that a connection has been closed."""
        self._strangers.pop(connection, None)
        if self.connections.get(connection.worker) is connection:
            del self.connections[connection.worker]

    @property
    def due_s(self) -> float | None:
        """Returns when `on_time` has something to do, by `time.monotonic`; None: never."""
        times_s = [next(iter(self._strangers)).since_s + STRANGER_S] if self._strangers else []
        return min([*times_s, *filter(None, [self._accepting.due_s])], default=None)

    def on_time(self, now_s: float) -> None:
        """Accepts again after a pause, and closes what has named no worker in time."""
        self._accepting.on_time(now_s)
        for connection in [one for one in self._strangers if now_s - one.since_s >= STRANGER_S]:
            self.complain(f"{connection} has named no worker in {STRANGER_S:g} s; it is closed")
            connection.close()

    def close(self) -> None:
        """Closes all connections, and removes the socket and its directory."""
        for connection in [*self.connections.values(), *self._strangers]:
            connection.close()
        self._accepting.close()
        shutil.rmtree(self.directory, ignore_errors=True)
