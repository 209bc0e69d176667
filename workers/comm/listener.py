"""The thread that makes connections: accepts those of peers and dials where it is told to.

Both directions are handshakes on non-blocking sockets in one poll loop, so a silent stranger delays nobody.
When two workers dial each other at the same time, the connection dialled by the greater identity stays.

Anybody may connect. Whatever comes on a connection ends that connection at most: a line is bounded, so is its time, so
is the number of connections that have not proved to know the job's token; of these the oldest goes first. Whoever shows
a proof of a generation that all members have left behind hears how far they are, and gets no link.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elaunch import threads
from elaunch.accepting import Accepting, most_strangers
from elaunch.errors import GenerationChanged, ProtocolError
from elaunch.rendezvous.membership import split_address
from elaunch.rendezvous.security.contexts import explain
from elaunch.workers import fatal
from elaunch.workers.comm import wire
from elaunch.workers.comm.here import connect_here, listen_here
from elaunch.workers.comm.link import Floors
from elaunch.workers.comm.secure.security import FIRST_BYTE, LinkSecurity, secured_within
from elaunch.workers.comm.secure.sockets import SecureSocket

ANSWER_TIMEOUT_S = 10.0
"""How long a stranger may take for its lines before the connection is dropped, and a machine to let one be made."""

REDIAL_S = 0.02
"""A dial that a busy peer dropped is repeated after this time; a dead peer refuses it then."""

_CROSSED = "crossed: this worker dials as well"


class HungUp(ProtocolError):
    """The other side closed the connection before the handshake was over."""


@dataclass(frozen=True, slots=True)
class _Order:
    """Dial `peer`, give up at `deadline_s`, and begin no sooner than `begin_s`."""

    peer: str
    address: str
    deadline_s: float
    begin_s: float = 0.0


@dataclass(eq=False)
class _Handshake:
    """A connection on its way to becoming a link.

    Attributes:
        order: that of one which this side dialled.
        shown: the generation of whose proof the end that dials has shown.
        is_judged: it is known whether it is encrypted.
        is_securing: encryption is agreed on just now.
    """

    socket: socket.socket
    deadline_s: float
    peer: str = ""
    order: _Order | None = None
    shown: int = 0
    connected: bool = True
    line: bytes = b""
    is_mail: bool = False
    is_judged: bool = False
    is_securing: bool = False

    @property
    def dialled(self) -> bool:
        return self.order is not None


def _end_worker(error: BaseException) -> None:
    fatal.end_process("thread that makes its links", error)


class Listener:
    """Listens on (`host`, a free port), and for workers of this machine on a Unix socket.

    `joined(peer, socket, shown)` is called, on the listener's thread, for each connection that passed the handshake in
    either direction, with the generation of which whoever dialled has shown a proof, `failed(peer, why)` for each dial
    that did not; without a reason where this worker has not heard of a generation that the peer's links need, as
    `floors.peers` tells. `linked(peer)` says whether a dial is needed at all.
    Whoever dials is told `floors.own`; `floors.peers` takes what is heard of those that are dialled, before `joined`.
    `mail(peer, socket)` gets the connections that carry messages to this worker, which are no links (`c10d.mail`).
    `died(error)` is called if the thread fails; by default that ends the process, since a worker that no peer can
    reach must be replaced. `security` says which connections are encrypted; None: none is.
    """

    def __init__(
        self,
        worker: str,
        token: str,
        host: str,
        linked: Callable[[str], bool],
        joined: Callable[[str, socket.socket, int], None],
        failed: Callable[[str, str | None], None],
        died: Callable[[BaseException], None] = _end_worker,
        mail: Callable[[str, socket.socket], None] | None = None,
        floors: Floors | None = None,
        security: LinkSecurity | None = None,
    ) -> None:
        self._security = security
        self._worker, self._token = worker, token
        self._floors = Floors() if floors is None else floors
        self._linked, self._joined, self._failed, self._mail = linked, joined, failed, mail
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.create_server((host, 0), family=family, backlog=1024)
        port = server.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._orders: deque[_Order] = deque()
        self._later: list[_Order] = []
        self._handshakes: set[_Handshake] = set()
        self._strangers: dict[_Handshake, None] = {}  # accepted, without a valid first line; the oldest first
        self._most_strangers = most_strangers(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._told_defect = False
        self._selector = selectors.DefaultSelector()
        servers = [server, *filter(None, [listen_here(self.address)])]
        self._accepting = {server: Accepting(self._selector, server, None, self._say) for server in servers}
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._closing = False
        self._thread = threads.start(f"elaunch-listener {worker}", self._run, died)

    def dial(self, peer: str, address: str, timeout_s: float) -> None:
        """Starts to connect to `peer` in the background, unless there is a link or one on its way."""
        self._orders.append(_Order(peer, address, time.monotonic() + timeout_s))
        os.eventfd_write(self._wake, 1)

    def ask_name(self, sock: socket.socket, deadline_s: float) -> str:
        """Asks the worker at the other end of a connection for its identity, and closes it. From any thread.

        Args:
            sock: just dialled; it blocks.
            deadline_s: by `time.monotonic`.

        Raises:
            ProtocolError: it is no worker of this job.
            HungUp: it has hung up; so `ConnectionError`.
            OSError: it does not answer in time.
        """
        with sock, secured_within(self._security, sock, deadline_s) as secured:
            return greet(secured, self._token, wire.Hello(self._worker, "probe", self._floors.heard), deadline_s).worker

    def close(self) -> None:
        """Stops the thread and closes what has not become a link."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def close_in_child(self) -> None:
        """Drops the child's copies after a fork, so that the port dies with the parent."""
        for sock in (*self._accepting, *(handshake.socket for handshake in self._handshakes)):
            sock.close()

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._wait_s()):
                    if key.fd == self._wake:
                        self._take_orders()
                    elif key.fileobj in self._accepting:
                        self._accept(self._accepting[key.fileobj])
                    elif key.data in self._handshakes:
                        self._advance(key.data)
                self._on_time(time.monotonic())
        finally:
            for handshake in list(self._handshakes):
                self._drop(handshake, None)
            for accepting in self._accepting.values():
                accepting.close()
            self._selector.close()

    def _wait_s(self) -> float | None:
        """Returns the seconds until something is due; None: nothing is."""
        due_s = [handshake.deadline_s for handshake in self._handshakes]
        due_s += [order.begin_s for order in self._later]
        due_s += [accepting.due_s for accepting in self._accepting.values() if accepting.due_s is not None]
        return max(0.0, min(due_s) - time.monotonic()) if due_s else None

    def _on_time(self, now_s: float) -> None:
        """Does whatever is due by now."""
        for handshake in [late for late in self._handshakes if late.deadline_s <= now_s]:
            self._drop(handshake, "it did not answer in time")
        if due := [order for order in self._later if order.begin_s <= now_s]:
            self._later = [order for order in self._later if order.begin_s > now_s]
            self._orders.extend(due)
            self._take_orders()
        for accepting in self._accepting.values():
            accepting.on_time(now_s)

    def _take_orders(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while self._orders:
            order = self._orders.popleft()
            # Asked here and not before: a connection may have come since the order was given, and it is in use.
            if not self._linked(order.peer) and all(one.peer != order.peer or one.is_mail for one in self._handshakes):
                self._dial(order)

    def _dial(self, order: _Order) -> None:
        try:
            host, port = split_address(order.address)
            here = connect_here(order.address)
            sock = here or socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, ValueError) as error:
            self._failed(order.peer, str(error))
            return
        sock.setblocking(False)
        soon_s = min(order.deadline_s, time.monotonic() + ANSWER_TIMEOUT_S)
        handshake = _Handshake(sock, soon_s, order.peer, order, connected=False)
        self._handshakes.add(handshake)
        try:
            self._selector.register(sock, selectors.EVENT_WRITE, handshake)
            if here is None:
                sock.connect((host, port))
        except BlockingIOError:
            pass
        except (OSError, OverflowError, ValueError) as error:
            self._drop(handshake, getattr(error, "strerror", None) or str(error))

    def _accept(self, accepting: Accepting) -> None:
        sock = accepting.accept()
        if sock is not None:
            sock.setblocking(False)
            handshake = _Handshake(sock, time.monotonic() + ANSWER_TIMEOUT_S)
            self._handshakes.add(handshake)
            self._strangers[handshake] = None
            try:
                self._selector.register(sock, selectors.EVENT_READ, handshake)
            except OSError as error:
                accepting.pause(error)
        most = self._most_strangers if accepting.due_s is None else 0
        while len(self._strangers) > most:
            self._drop(next(iter(self._strangers)), None)

    def _advance(self, handshake: _Handshake) -> None:
        """Goes on with one handshake. Whatever goes wrong in it ends this connection, and nothing else."""
        try:
            self._step(handshake)
        except HungUp as error:
            self._hung_up(handshake, str(error))
        except ConnectionError as error:
            if handshake.connected:
                self._hung_up(handshake, error.strerror or str(error))
            else:
                self._drop(handshake, error.strerror or str(error))
        except (OSError, ProtocolError) as error:
            self._drop(handshake, getattr(error, "strerror", None) or str(error))
        except Exception as error:
            self._drop(handshake, repr(error))
            if not self._told_defect:
                self._told_defect = True
                line = f"worker {self._worker} dropped a connection because of a defect in elaunch, and goes on"
                threads.tell(line, error)

    def _step(self, handshake: _Handshake) -> None:
        if handshake.order is not None and not handshake.connected:
            error = handshake.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            handshake.connected, handshake.deadline_s = True, handshake.order.deadline_s
            if self._security is None or not self._security.covers(handshake.socket):
                self._greet(handshake)
                return
            self._secure(handshake, self._security)
        elif not handshake.dialled and not handshake.is_judged and not self._judge(handshake):
            return
        if handshake.is_securing and not self._shake(handshake):
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

    def _greet(self, handshake: _Handshake) -> None:
        handshake.shown = self._floors.heard
        hello = wire.Hello(self._worker, "link", handshake.shown)
        handshake.socket.send(wire.hello_line(self._token, hello))
        self._selector.modify(handshake.socket, selectors.EVENT_READ, handshake)

    def _judge(self, handshake: _Handshake) -> bool:
        """Returns whether what has come says if an accepted connection is encrypted.

        Raises:
            ProtocolError: it is not, and must be.
        """
        if self._security is not None and handshake.socket.family != socket.AF_UNIX:
            try:
                first = handshake.socket.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return False
            if first == FIRST_BYTE:
                self._secure(handshake, self._security)
            elif first and self._security.covers(handshake.socket):
                why = "this worker wants encrypted links: --link-encryption must be the same on all nodes"
                handshake.socket.recv(wire.LINE_BYTES)  # what is left unread would destroy the answer
                handshake.socket.send(wire.refusal_line(why))
                raise ProtocolError(why)
        handshake.is_judged = True
        return True

    def _secure(self, handshake: _Handshake, security: LinkSecurity) -> None:
        self._selector.unregister(handshake.socket)
        handshake.socket = security.wrap(handshake.socket, is_server=not handshake.dialled)
        handshake.is_securing = True
        self._selector.register(handshake.socket, selectors.EVENT_READ, handshake)

    def _shake(self, handshake: _Handshake) -> bool:
        """Goes on with the handshake of TLS; returns whether the other end's first line can be read."""
        assert isinstance(handshake.socket, SecureSocket)
        try:
            handshake.socket.do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as wants:
            events = selectors.EVENT_READ if isinstance(wants, ssl.SSLWantReadError) else selectors.EVENT_WRITE
            self._selector.modify(handshake.socket, events, handshake)
            return False
        except ssl.SSLError as error:
            raise ProtocolError(explain(error)) from error
        handshake.is_securing = False
        if handshake.dialled:
            self._greet(handshake)
            return False
        self._selector.modify(handshake.socket, selectors.EVENT_READ, handshake)
        return True

    def _hung_up(self, handshake: _Handshake, why: str) -> None:
        """The peer, or a busy system in its place, dropped a connection; a dial is worth repeating."""
        order, now_s = handshake.order, time.monotonic()
        again = order is not None and now_s + REDIAL_S < order.deadline_s
        self._drop(handshake, None if again else why)
        if order is not None and again:
            self._later.append(_Order(order.peer, order.address, order.deadline_s, now_s + REDIAL_S))

    def _greeted(self, handshake: _Handshake, line: bytes) -> None:
        try:
            hello = wire.read_hello(line, self._token)
            own = [one for one in self._handshakes if one.dialled and one.peer == hello.worker]
            if hello.purpose == "link" and own and self._worker > hello.worker:
                raise ProtocolError(_CROSSED)
            if hello.purpose == "mail" and self._mail is None:
                raise ProtocolError("this worker takes no messages")
        except ProtocolError as error:
            handshake.socket.send(wire.refusal_line(str(error)))
            raise
        ack = wire.Ack(self._worker, self._floors.own, self._floors.settled)
        handshake.socket.send(wire.ack_line(ack))
        if hello.purpose == "probe" or hello.generation < ack.settled:
            self._drop(handshake, None)
            return
        handshake.peer, handshake.shown = hello.worker, hello.generation
        self._strangers.pop(handshake, None)
        handshake.is_mail = hello.purpose == "mail"
        for crossed in own if hello.purpose == "link" else ():
            self._drop(crossed, None)

    def _acknowledged(self, handshake: _Handshake, line: bytes) -> None:
        try:
            ack = wire.read_ack(line)
        except ProtocolError as error:
            # The peer's own dial is about to arrive.
            self._drop(handshake, None if str(error) == _CROSSED else str(error))
            return
        if ack.worker != handshake.peer:
            raise ProtocolError(f"{ack.worker} answered at this address")
        try:
            is_link = self._floors.heed(ack, handshake.shown)
        except GenerationChanged:
            self._drop(handshake, None)
            self._failed(handshake.peer, None)
            return
        if not is_link:
            raise HungUp(f"its links need a proof of generation {ack.settled}")
        handshake.socket.send(wire.go_line())
        self._settle(handshake)

    def _settle(self, handshake: _Handshake) -> None:
        """Hands the connection over and drops the others with this peer, which it makes obsolete."""
        self._forget(handshake)
        if not handshake.is_mail:
            for other in [one for one in self._handshakes if one.peer == handshake.peer and not one.is_mail]:
                self._drop(other, None)
        try:
            if handshake.is_mail:
                assert self._mail is not None
                self._mail(handshake.peer, handshake.socket)
            else:
                self._joined(handshake.peer, handshake.socket, handshake.shown)
        except BaseException:
            handshake.socket.close()
            raise

    def _drop(self, handshake: _Handshake, why: str | None) -> None:
        self._forget(handshake)
        handshake.socket.close()
        if handshake.dialled and why is not None:
            self._failed(handshake.peer, why)

    def _say(self, text: str) -> None:
        print(f"[elaunch] worker {self._worker}: {text}", file=sys.stderr, flush=True)

    def _forget(self, handshake: _Handshake) -> None:
        self._handshakes.discard(handshake)
        self._strangers.pop(handshake, None)
        with contextlib.suppress(KeyError, ValueError):  # it was never registered, or is not any more
            self._selector.unregister(handshake.socket)


def greet(sock: socket.socket, token: str, hello: wire.Hello, deadline_s: float) -> wire.Ack:
    """Says who dials on a connection that blocks, and returns what the other end answers.

    Raises:
        ProtocolError: it does not want the connection.
        HungUp: it has hung up; so `ConnectionError`.
        OSError: it does not answer in time.
    """
    line = b""
    sock.settimeout(max(1e-3, deadline_s - time.monotonic()))
    sock.sendall(wire.hello_line(token, hello))
    while not line.endswith(b"\n"):
        sock.settimeout(max(1e-3, deadline_s - time.monotonic()))
        line += read_line(sock, len(line))
    return wire.read_ack(line)


def read_line(sock: socket.socket, have_bytes: int = 0) -> bytes:
    """Returns more of a handshake line, of which `have_bytes` were read before; what follows the newline stays in the
    socket.

    Raises `HungUp` when the peer closed the connection, `ProtocolError` when the line is too long, `OSError` when the
    connection broke.
    """
    try:
        if isinstance(sock, SecureSocket):
            line = sock.line(wire.LINE_BYTES - have_bytes + 1)
            return _checked(line, have_bytes)
        seen = sock.recv(wire.LINE_BYTES, socket.MSG_PEEK)
    except ssl.SSLError as error:
        raise ProtocolError(explain(error)) from error
    except BlockingIOError:
        return b""
    return _checked(sock.recv(seen.find(b"\n") + 1 or len(seen)) if seen else b"", have_bytes)


def _checked(line: bytes, have_bytes: int) -> bytes:
    if not line:
        raise HungUp("the connection closed in the handshake")
    if have_bytes + len(line) > wire.LINE_BYTES:
        raise ProtocolError("a handshake line is too long")
    return line
