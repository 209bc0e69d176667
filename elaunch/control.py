"""The channel between an agent and its workers: a Unix socket in a directory that only this user may enter."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import tempfile
from collections.abc import Callable

from elaunch.errors import ProtocolError
from elaunch.wire import Attach, LineBuffer, Message, decode, encode

MAX_FDS = 4  # in one message; two come with the first
FOLDER_LIMIT_BYTES = 80  # the path of a socket, here /elaunch-xxxxxxxx/agent longer, has at most 107 bytes


class Connection:
    """One worker's end. Sends never block: what the socket does not take waits."""

    def __init__(self, server: ControlServer, link: socket.socket) -> None:
        self._server = server
        self._link = link
        self._lines = LineBuffer()
        self._unsent = b""
        self._fds: list[int] = []
        self.worker = ""

    def send(self, message: Message) -> None:
        self._unsent += encode(message)
        self.flush()

    def flush(self) -> None:
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
        """Return the messages that have come; close the connection at its end or at a message that is none."""
        try:
            data, fds, _, _ = socket.recv_fds(self._link, 1 << 16, MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            self._fds += fds
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.close()
            return []
        messages = []
        try:
            for line in self._lines.feed(data):
                message = decode(line)
                if isinstance(message, Attach):
                    self.worker = message.worker
                    self._server.connections[self.worker] = self
                messages.append(message)
        except ProtocolError as error:
            self._server.complain(f"worker {self.worker or '?'}: {error}")
            self.close()
        return messages

    def take_fds(self) -> list[int]:
        """The descriptors that have come; whoever takes them closes them."""
        taken, self._fds = self._fds, []
        return taken

    def close(self) -> None:
        for fd in self.take_fds():
            os.close(fd)
        if self._link.fileno() >= 0:
            self._server.selector.unregister(self._link)
            self._link.close()
        if self._server.connections.get(self.worker) is self:
            del self._server.connections[self.worker]


class ControlServer:
    """Listens for the workers of one agent.

    Args:
        selector: of the agent's loop; connections are registered in it with themselves as data.
        complain: told in a line of a worker that speaks another protocol.
    """

    def __init__(self, selector: selectors.BaseSelector, complain: Callable[[str], None]) -> None:
        self.selector = selector
        self.complain = complain
        self.connections: dict[str, Connection] = {}
        folder = tempfile.gettempdir()
        if len(os.fsencode(folder)) > FOLDER_LIMIT_BYTES:
            folder = "/tmp"
        self.directory = tempfile.mkdtemp(prefix="elaunch-", dir=folder)  # mode 0700
        self.path = os.path.join(self.directory, "agent")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(128)
        self._socket.setblocking(False)
        selector.register(self._socket, selectors.EVENT_READ, self)

    def accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            link, _ = self._socket.accept()
            link.setblocking(False)
            self.selector.register(link, selectors.EVENT_READ, Connection(self, link))

    def close(self) -> None:
        for connection in list(self.connections.values()):
            connection.close()
        self._socket.close()
        shutil.rmtree(self.directory, ignore_errors=True)
