"""The thread that makes connections: accepts those of peers and dials where it is told to.

Both directions are handshakes on non-blocking sockets in one poll loop, so a silent stranger delays nobody.
When two workers dial each other at the same time, the connection dialled by the greater identity stays.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elaunch.errors import ProtocolError
from elaunch.rendezvous.membership import split_address
from elaunch.workers.comm import wire

ANSWER_TIMEOUT_S = 10.0
"""How long a stranger may take for its lines before the connection is dropped, and a machine to let one be made."""

_CROSSED = "crossed: this worker dials as well"


@dataclass(eq=False)
class _Handshake:
    """A connection on its way to becoming a link."""

    socket: socket.socket
    deadline_s: float
    answer_s: float = 0.0  # of one that is being dialled: its deadline when the peer's machine has answered
    peer: str = ""
    dialled: bool = False
    connected: bool = True
    line: bytes = b""


class Door:
    """Listens on (`host`, a free port).

    `joined(peer, socket)` is called, on the door's thread, for each connection that passed the handshake in either
    direction, `failed(peer, why)` for each dial that did not. `linked(peer)` says whether a dial is needed at all.
    """

    def __init__(
        self,
        worker: str,
        token: str,
        host: str,
        linked: Callable[[str], bool],
        joined: Callable[[str, socket.socket], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self._worker, self._token = worker, token
        self._linked, self._joined, self._failed = linked, joined, failed
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders: deque[tuple[str, str, float]] = deque()
        self._handshakes: set[_Handshake] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"door of {worker}", daemon=True)
        self._thread.start()

    def dial(self, peer: str, address: str, timeout_s: float) -> None:
        """Starts to connect to `peer` in the background, unless there is a link or one on its way."""
        self._orders.append((peer, address, time.monotonic() + timeout_s))
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stops the thread and closes what has not become a link."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def close_in_child(self) -> None:
        """After a fork: drops the child's copies, so that the port dies with the parent."""
        for sock in (self._listener, *(handshake.socket for handshake in self._handshakes)):
            sock.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                deadlines = [handshake.deadline_s for handshake in self._handshakes]
                wait_s = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
                for key, _ in self._selector.select(wait_s):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fd == self._wake:
                        self._take_orders()
                    elif key.data in self._handshakes:
                        self._advance(key.data)
                now_s = time.monotonic()
                for handshake in [late for late in self._handshakes if late.deadline_s <= now_s]:
                    self._drop(handshake, "it did not answer in time")
        finally:
            for handshake in list(self._handshakes):
                self._drop(handshake, None)
            self._selector.close()
            self._listener.close()

    def _take_orders(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._orders:
            peer, address, deadline_s = self._orders.popleft()
            # Asked here and not before: a connection may have come since the order was given, and it is in use.
            if not self._linked(peer) and all(handshake.peer != peer for handshake in self._handshakes):
                self._dial(peer, address, deadline_s)

    def _dial(self, peer: str, address: str, deadline_s: float) -> None:
        try:
            host, port = split_address(address)
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, ValueError) as error:
            self._failed(peer, str(error))
            return
        sock.setblocking(False)
        soon_s = min(deadline_s, time.monotonic() + ANSWER_TIMEOUT_S)
        handshake = _Handshake(sock, soon_s, deadline_s, peer, dialled=True, connected=False)
        self._handshakes.add(handshake)
        self._selector.register(sock, selectors.EVENT_WRITE, handshake)
        try:
            sock.connect((host, port))
        except BlockingIOError:
            pass
        except OSError as error:
            self._drop(handshake, error.strerror or str(error))

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        handshake = _Handshake(sock, time.monotonic() + ANSWER_TIMEOUT_S)
        self._handshakes.add(handshake)
        self._selector.register(sock, selectors.EVENT_READ, handshake)

    def _advance(self, handshake: _Handshake) -> None:
        try:
            if not handshake.connected:
                error = handshake.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error:
                    raise OSError(error, os.strerror(error))
                handshake.connected, handshake.deadline_s = True, handshake.answer_s
                handshake.socket.send(wire.hello_line(self._token, wire.Hello(self._worker, "link")))
                self._selector.modify(handshake.socket, selectors.EVENT_READ, handshake)
                return
            handshake.line += read_line(handshake.socket, len(handshake.line))
            if not handshake.line.endswith(b"\n"):
                return
            line, handshake.line = handshake.line, b""
            if handshake.dialled:
                self._acknowledged(handshake, line)
            elif handshake.peer:
                wire.read_go(line)
                self._settle(handshake)
            else:
                self._greeted(handshake, line)
        except (OSError, ProtocolError) as error:
            self._drop(handshake, getattr(error, "strerror", None) or str(error))

    def _greeted(self, handshake: _Handshake, line: bytes) -> None:
        try:
            hello = wire.read_hello(line, self._token)
            own = [one for one in self._handshakes if one.dialled and one.peer == hello.worker]
            if hello.purpose == "link" and own and self._worker > hello.worker:
                raise ProtocolError(_CROSSED)
        except ProtocolError as error:
            handshake.socket.send(wire.refusal_line(str(error)))
            raise
        handshake.socket.send(wire.ack_line(self._worker))
        if hello.purpose == "probe":
            self._drop(handshake, None)
            return
        handshake.peer = hello.worker
        for crossed in own:
            self._drop(crossed, None)

    def _acknowledged(self, handshake: _Handshake, line: bytes) -> None:
        try:
            worker = wire.read_ack(line)
        except ProtocolError as error:
            # The peer's own dial is about to arrive.
            self._drop(handshake, None if str(error) == _CROSSED else str(error))
            return
        if worker != handshake.peer:
            raise ProtocolError(f"{worker} answered at this address")
        handshake.socket.send(wire.go_line())
        self._settle(handshake)

    def _settle(self, handshake: _Handshake) -> None:
        """Hands the connection over and drops the others with this peer, which it makes obsolete."""
        self._handshakes.discard(handshake)
        self._selector.unregister(handshake.socket)
        for other in [one for one in self._handshakes if one.peer == handshake.peer]:
            self._drop(other, None)
        self._joined(handshake.peer, handshake.socket)

    def _drop(self, handshake: _Handshake, why: str | None) -> None:
        self._handshakes.discard(handshake)
        self._selector.unregister(handshake.socket)
        handshake.socket.close()
        if handshake.dialled and why is not None:
            self._failed(handshake.peer, why)


def read_line(sock: socket.socket, have_bytes: int = 0) -> bytes:
    """More of a handshake line, of which `have_bytes` were read before; what follows its newline stays in the socket.

    Raises `ProtocolError` when the peer closed the connection or the line is too long, `OSError` when it broke.
    """
    try:
        seen = sock.recv(wire.LINE_BYTES, socket.MSG_PEEK)
    except BlockingIOError:
        return b""
    if not seen:
        raise ProtocolError("the connection closed in the handshake")
    line = sock.recv(seen.find(b"\n") + 1 or len(seen))
    if have_bytes + len(line) > wire.LINE_BYTES:
        raise ProtocolError("a handshake line is too long")
    return line
