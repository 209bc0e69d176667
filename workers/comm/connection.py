"""One connection to one peer: bytes out, bytes in, what its kernel knows of it, and that it breaks once."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from elaunch.errors import LinkLost
from elaunch.workers import heartbeat
from elaunch.workers.comm.here import SEND_BUFFER_BYTES, process_of
from elaunch.workers.comm.secure.sockets import SecureSocket

HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR

MEASURED_BYTES = 1 << 20
"""A connection that has carried less tells nothing of its bandwidth."""

HERE_LATENCY_S = 1e-5
"""Of a message between two processes of one machine, about."""

# Of struct tcp_info in linux/tcp.h: bytes_acked, delivery_rate and min_rtt, by their places; then rtt, busy_time and
# rwnd_limited, the microseconds in which data were on their way and those of them in which the receiver took none.
_TCP_INFO_BYTES = 168
_TCP_BUSY_BYTES = 184
_U64 = struct.Struct("=Q")
_U32 = struct.Struct("=I")

LOOK_S = 0.02  # in which who waits for a machine to answer notices that it need not
KEEPALIVE_S = 1
ZERO_WINDOW_PROBES = 4
"""So many unanswered questions whether the peer takes data again count as silence, however rarely they are asked."""

DISCARD = memoryview(bytearray(1 << 18))
"""Where unwanted bytes go; shared by all connections, because nobody reads it."""


def connect_unless(is_over: Callable[[], bool], where: tuple[str, int], deadline_s: float) -> socket.socket | None:
    """Connects to an address, as long as nobody answers there; None once `is_over` says that it is of no use.

    Args:
        is_over: asked every `LOOK_S`.
        where: host and port.
        deadline_s: by `time.monotonic`.

    Raises:
        OSError: it is refused, or not accepted in time (`TimeoutError`).
    """
    failed = OSError()
    for family, kind, protocol, _, address in socket.getaddrinfo(*where, type=socket.SOCK_STREAM):
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, kind, protocol))
            try:
                if not _reaches(sock, address, is_over, deadline_s):
                    return None
            except OSError as error:
                failed = error
                continue
            stack.pop_all()
            return sock
    raise failed


def _reaches(sock: socket.socket, address: Any, is_over: Callable[[], bool], deadline_s: float) -> bool:
    sock.setblocking(False)
    error = sock.connect_ex(address)
    answer = select.poll()
    answer.register(sock, select.POLLOUT)
    while error == errno.EINPROGRESS:
        if is_over():
            return False
        if (left_s := deadline_s - time.monotonic()) <= 0:
            raise TimeoutError(f"{address} does not answer")
        if answer.poll(1e3 * min(left_s, LOOK_S)):
            error = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        raise OSError(error, os.strerror(error))
    sock.setblocking(True)
    return True


class Connection:
    """A non-blocking socket to a peer. Once it is broken it stays so, and says why.

    Args:
        peer: whose it is.
        sock: connected.
        timeout_s: how long nothing may come on it, not even an acknowledgement, before `check` takes it for broken.

    Attributes:
        broken: why it carries nothing any more; None: it works.
        process: of the peer, where it is one of this user on this machine, so that its memory may be read; else None.
    """

    def __init__(self, peer: str, sock: socket.socket, timeout_s: float = inf) -> None:
        sock.setblocking(False)
        self._here = sock.family == socket.AF_UNIX
        self._secure = sock if isinstance(sock, SecureSocket) else None
        self.process = process_of(sock) if self._here else None
        if self._here:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
            # Whether it is silent, `check` finds out; without anybody who waits for it, the kernel breaks it later.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 30)
        self.peer = peer
        self.socket = sock
        self.broken: str | None = None
        self._timeout_s = timeout_s
        self._sent_bytes, self._sending_s = 0, 0.0  # of a connection within this machine

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Gives the kernel the bytes of these buffers, one after the other; returns how many it took, at once.

        Of an encrypted connection, the last of them may wait in this process: see `flush`.

        Raises:
            LinkLost: the connection has just broken.
        """
        try:
            if self._secure is not None:
                return self._secure.take(buffers)
            if not self._here:
                return self.socket.sendmsg(buffers)
            begin_s = time.perf_counter()
            sent = self.socket.sendmsg(buffers)
            self._sending_s += time.perf_counter() - begin_s
            self._sent_bytes += sent
            return sent
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.fail(error.strerror or str(error)) from None

    def flush(self) -> bool:
        """Gives the kernel what waits in this process; returns whether nothing waits any more.

        Raises:
            LinkLost: the connection has just broken.
        """
        if self._secure is None:
            return True
        try:
            return self._secure.flush()
        except OSError as error:
            raise self.fail(error.strerror or str(error)) from None

    @property
    def has_unsent(self) -> bool:
        """Whether something that `send` took waits in this process."""
        return self._secure is not None and self._secure.has_unsent

    @property
    def has_pending(self) -> bool:
        """Whether something has come that the kernel has given away, so that polling does not tell of it."""
        return self._secure is not None and self.broken is None and self._secure.pending() > 0

    def receive(self, target: memoryview) -> int:
        """Fills the beginning of `target` with what has come; returns how many bytes that was, 0 if none.

        Raises:
            LinkLost: the connection has just broken, or the peer has closed it.
        """
        try:
            got = self.socket.recv_into(target) if self._secure is None else self._secure.fill(target)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.fail(error.strerror or str(error)) from None
        if got == 0:
            raise self.fail("closed by the peer")
        heartbeat.moved()
        return got

    def has_read(self, n_bytes: int, seconds: float) -> None:
        """Counts bytes that this side has read from the memory of the peer."""
        self._sent_bytes += n_bytes
        self._sending_s += seconds / 2  # one copy; see `rate`
        heartbeat.moved()

    def ensure_works(self) -> None:
        """Raises `LinkLost` when the connection is broken."""
        if self.broken is not None:
            raise LinkLost(self.peer, self.broken)

    def hung_up(self) -> bool:
        """Whether the peer has closed the connection, or it broke."""
        if self.broken is not None:
            return True
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return any(events & HANG_UP for _, events in poll.poll(0))

    def silent_s(self) -> float:
        """Seconds since anything came from the peer's machine, if something had to come meanwhile; else 0.

        The kernel asks an idle link for a sign of life every KEEPALIVE_S, and sends again what is not acknowledged. The
        peer's kernel answers, whatever its process does. A link on which the peer takes nothing is asked ever more
        rarely; it counts as silent after ZERO_WINDOW_PROBES. 0 as well where the kernel does not tell.
        """
        told = self._kernel_info(_TCP_INFO_BYTES)
        if told is None:
            return 0.0
        probes, (unacked,), (unsent,) = told[3], _U32.unpack_from(told, 24), _U32.unpack_from(told, 144)
        if unsent and not unacked and probes < ZERO_WINDOW_PROBES:
            return 0.0
        (data_ms,), (ack_ms,) = _U32.unpack_from(told, 52), _U32.unpack_from(told, 56)
        return float(min(data_ms, ack_ms)) / 1e3

    def check(self) -> None:
        """Raises when the link is silent."""
        if self.broken is None and (silent_s := self.silent_s()) > self._timeout_s:
            raise self.fail(f"silent: its machine has acknowledged nothing for {silent_s:.1f} s")

    def fail(self, why: str) -> LinkLost:
        """Severs the connection, which wakes whoever polls it; returns the error to raise."""
        if self.broken is None:
            self.broken = why
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        return LinkLost(self.peer, self.broken)

    def rate(self) -> tuple[float, float] | None:
        """Bytes per second and seconds of latency, as the kernel has seen them; None if too little was sent.

        Within a machine the kernel tells nothing: each byte is copied in and out again, at the rate seen here.
        """
        if self._here:
            enough = self._sent_bytes >= MEASURED_BYTES
            return (self._sent_bytes / (2 * self._sending_s), HERE_LATENCY_S) if enough else None
        told = self._kernel_info(_TCP_INFO_BYTES)
        if told is None:
            return None
        (acked,), (rate,), (rtt_us,) = (
            _U64.unpack_from(told, 120),
            _U64.unpack_from(told, 160),
            _U32.unpack_from(told, 148),
        )
        return (float(rate), rtt_us / 2e6) if rate and acked >= MEASURED_BYTES else None

    def carried(self) -> tuple[int, float, float] | None:
        """What it has carried so far: bytes that the peer has, seconds in which they were on their way, and the seconds
        of a round trip now. Time in which the peer's process took nothing does not count. None: an older kernel, or a
        connection within this machine, which cannot be slower than others.
        """
        told = self._kernel_info(_TCP_BUSY_BYTES)
        if told is None:
            return None
        (acked,), (rtt_us,) = _U64.unpack_from(told, 120), _U32.unpack_from(told, 68)
        (busy_us,), (limited_us,) = _U64.unpack_from(told, 168), _U64.unpack_from(told, 176)
        return acked, max(0, busy_us - limited_us) / 1e6, rtt_us / 1e6

    def close(self) -> None:
        """Leaves in order: the peer still gets all that was sent. Only while no operation runs."""
        if self.broken is None:
            self.broken = "closed by this worker"
            # Closing over unread data would reset the connection and destroy what the peer has not read yet.
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
                while self.socket.recv_into(DISCARD):
                    pass
        self.socket.close()

    def _kernel_info(self, n_bytes: int) -> bytes | None:
        """The first bytes of struct tcp_info; None where the kernel is too old to have as many, or tells nothing."""
        try:
            told = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, n_bytes)
        except OSError:
            return None
        return told if len(told) == n_bytes else None
