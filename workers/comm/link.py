"""One connection to one peer: frames out, frames in.

A link is driven by whoever runs the operation (`drive`); nothing in it blocks. Between operations it remembers at most
three things: the rest of a frame that was partly sent, the rest of a body that nobody wants any more, and the header of
a frame whose operation has not been posted yet (*parked*; its body stays in the kernel, which holds the sender back).
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from math import inf

from elaunch.errors import GenerationChanged, LinkLost, ProtocolError
from elaunch.workers import heartbeat
from elaunch.workers.comm import wire

HANG_UP = select.POLLRDHUP | select.POLLHUP | select.POLLERR

MEASURED_BYTES = 1 << 20
"""A link that has carried less tells nothing of its bandwidth."""

# Of struct tcp_info in linux/tcp.h: bytes_acked, delivery_rate and min_rtt, by their places; then rtt, busy_time and
# rwnd_limited, the microseconds in which data were on their way and those of them in which the receiver took none.
_TCP_INFO_BYTES = 168
_TCP_BUSY_BYTES = 184
_U64 = struct.Struct("=Q")
_U32 = struct.Struct("=I")

KEEPALIVE_S = 1
ZERO_WINDOW_PROBES = 4
"""So many unanswered questions whether the peer takes data again count as silence, however rarely they are asked."""

Destination = memoryview | bytearray
"""A writable view that a part must fill exactly, or a bytearray that grows to whatever comes."""

_DISCARD = memoryview(bytearray(1 << 18))
"""Where unwanted bodies go; shared by all links, because nobody reads it."""


class Link:
    """A non-blocking socket that carries frames.

    `post_send` and `post_receive` say what an operation needs, `advance` moves what can be moved now, and `finish`
    follows however the operation ended. All but `finish` raise `LinkLost` when the connection is broken. `advance`
    raises `GenerationChanged` when the peer, which still owes a part, has gone on to a newer generation.

    Between `open` and `settle` an operation is open: parts that nobody has posted yet are accepted as well.

    Args:
        peer: whose it is.
        sock: connected.
        timeout_s: how long nothing may come on it, not even an acknowledgement, before `check` takes it for broken.
    """

    def __init__(self, peer: str, sock: socket.socket, timeout_s: float = inf) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
            # Whether it is silent, `check` finds out; without anybody who waits for it, the kernel breaks it later.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 30)
        self.peer = peer
        self.socket = sock
        self._timeout_s = timeout_s
        self.broken: str | None = None
        # Outgoing: what an earlier operation still owes, the frame being sent, the frames after it.
        self._owed: list[bytes | memoryview] = []
        self._sending: list[bytes | memoryview] = []
        self._begun = False
        self._frames: deque[tuple[bytes, memoryview, Callable[[], None] | None]] = deque()
        self._left: Callable[[], None] | None = None
        # Incoming: the operation and its parts, the header, and where the body goes (None: it is discarded).
        self._position = (0, 0)
        self._wanted: dict[int, Destination] = {}
        self._header = memoryview(bytearray(wire.HEADER_BYTES))
        self._header_bytes = 0
        self._frame: wire.Header | None = None
        self._aimed = False
        self._parked = False
        self._target: memoryview | None = None
        self._left_bytes = 0
        # Of an open operation: parts that came, or are coming, before they were posted, and where they go in the end.
        self._open = False
        self._arrived: Callable[[int], None] | None = None
        self._early: dict[int, bytearray] = {}
        self._late: dict[int, Destination] = {}

    def open(self, generation: int, op: int, arrived: Callable[[int], None]) -> None:
        """Begins an open operation: the link is read from now on. `arrived` gets the number of each complete part."""
        self._check()
        self._position = (generation, op)
        self._parked = False
        self._open, self._arrived = True, arrived

    def settle(self) -> None:
        """Nothing more will be posted: the open operation ends like any other, with the last part posted until now."""
        self._check()
        self._open = False
        unposted = sorted(self._early.keys() - self._late.keys())
        if unposted:
            raise self.fail(f"protocol: parts {unposted} of operation {self._position[1]} came, but were never posted")

    def post_send(
        self, generation: int, op: int, part: int, body: memoryview, left: Callable[[], None] | None = None
    ) -> None:
        """Queues `body`, cut into frames, and calls `left` when the kernel has all of it.

        The caller leaves it unchanged until then, or until the operation has ended.
        """
        self._check()
        total = len(body)
        for lo in range(0, max(total, 1), wire.SEGMENT_BYTES):
            hi = min(lo + wire.SEGMENT_BYTES, total)
            kind = wire.LAST if hi == total else wire.MORE
            header = wire.pack_header(wire.Header(kind, part, generation, op, hi - lo))
            self._frames.append((header, body[lo:hi], left if hi == total else None))

    def post_receive(self, generation: int, op: int, part: int, destination: Destination) -> None:
        """Says where the bytes of this part go when they come."""
        self._check()
        if part in self._early:
            self._late[part] = destination
            if part not in self._wanted:
                self._hand_over(part)
            return
        assert part not in self._wanted, f"part {part} from {self.peer} is posted twice"
        self._position = (generation, op)
        self._wanted[part] = destination
        self._parked = False

    @property
    def receiving(self) -> bool:
        """Whether a part that was posted has not come yet."""
        return bool(self._wanted)

    @property
    def sending(self) -> bool:
        """Whether something of this operation waits to leave."""
        return bool(self._sending or self._frames)

    def wants(self) -> int:
        """The poll events that let this link go on; 0 when its share of the operation is done."""
        receiving = self._open or bool(self._wanted)
        if not (receiving or self._sending or self._frames):
            return 0
        events = select.POLLRDHUP
        if self._sending or self._frames:
            events |= select.POLLOUT
        if receiving and not self._parked:
            events |= select.POLLIN
        return events

    def advance(self, events: int = 0) -> None:
        """Moves what the socket takes and gives now. `events` is what poll reported; 0 when it was not asked."""
        self.push()
        if (self._wanted or self._open) and not self._parked:
            self._pull()
        elif events & HANG_UP and self.wants():
            raise self.fail("closed by the peer")

    def push(self) -> None:
        """Moves out what the socket takes now."""
        self._check()
        while self._sending or self._frames:
            if self._owed:
                buffers = self._owed
            else:
                if not self._sending:
                    header, body, self._left = self._frames.popleft()
                    self._sending = [header, body]
                buffers = self._sending
            try:
                sent = self.socket.sendmsg(buffers)
            except BlockingIOError:
                return
            except OSError as error:
                raise self.fail(error.strerror or str(error)) from None
            while buffers and sent >= len(buffers[0]):
                sent -= len(buffers.pop(0))
            if buffers:
                buffers[0] = memoryview(buffers[0])[sent:]
            if buffers is self._sending:
                self._begun = bool(buffers)
                if self._left is not None and not buffers:
                    self._left()
                    self._left = None
            if buffers:
                return

    def finish(self) -> None:
        """Forgets the operation, keeping what the peer must still get and what it must still be relieved of."""
        self._frames.clear()
        if self._begun:
            # The caller's buffer changes from here on, so the rest is copied.
            self._owed = [b"".join(self._sending)]
        self._sending, self._begun, self._left = [], False, None
        self._wanted.clear()
        self._target = None
        self._open, self._arrived = False, None
        self._early.clear()
        self._late.clear()

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
        """Bytes per second and seconds of latency, as the kernel has seen them; None if too little was sent."""
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
        of a round trip now. Time in which the peer's process took nothing does not count. None: an older kernel.
        """
        told = self._kernel_info(_TCP_BUSY_BYTES)
        if told is None:
            return None
        (acked,), (rtt_us,) = _U64.unpack_from(told, 120), _U32.unpack_from(told, 68)
        (busy_us,), (limited_us,) = _U64.unpack_from(told, 168), _U64.unpack_from(told, 176)
        return acked, max(0, busy_us - limited_us) / 1e6, rtt_us / 1e6

    def _kernel_info(self, n_bytes: int) -> bytes | None:
        """The first bytes of struct tcp_info; None where the kernel is too old to have as many, or tells nothing."""
        try:
            told = self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, n_bytes)
        except OSError:
            return None
        return told if len(told) == n_bytes else None

    def close(self) -> None:
        """Leaves in order: the peer still gets all that was sent. Only while no operation runs."""
        if self.broken is None:
            self.broken = "closed by this worker"
            # Closing over unread data would reset the connection and destroy what the peer has not read yet.
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_WR)
                while self.socket.recv_into(_DISCARD):
                    pass
        self.socket.close()

    def _check(self) -> None:
        if self.broken is not None:
            raise LinkLost(self.peer, self.broken)

    def _pull(self) -> None:
        if self._frame is None:
            self._header_bytes += self._receive(self._header[self._header_bytes :])
            if self._header_bytes < wire.HEADER_BYTES:
                return
            self._header_bytes = 0
            try:
                self._frame = wire.unpack_header(bytes(self._header))
            except ProtocolError as error:
                raise self.fail(str(error)) from None
            self._left_bytes = self._frame.nbytes
            self._aimed = False
        if not self._aimed:
            self._aim(self._frame)
            if self._parked:
                return
        if self._left_bytes:
            target = _DISCARD if self._target is None else self._target
            got = self._receive(target[: self._left_bytes])
            self._left_bytes -= got
            if self._target is not None:
                self._target = self._target[got:]
        if not self._left_bytes:
            self._complete(self._frame)

    def _aim(self, frame: wire.Header) -> None:
        """Decides where the body of a frame goes."""
        generation, op = self._position
        if frame.generation < generation:
            self._target, self._aimed = None, True
            return
        # In an open operation the peer may be done, and be in one whose number, from another group, is any.
        if (frame.generation, frame.op) > (generation, op) or (self._open and frame.op != op):
            self._parked = True
            if frame.generation > generation:
                # The peer has gone on to a newer generation: what is awaited here of the older one never comes.
                raise GenerationChanged(frame.generation)
            return
        destination = self._wanted.get(frame.part) if frame.op == op else None
        if destination is None and self._open:
            destination = self._early[frame.part] = self._wanted[frame.part] = bytearray()
        if destination is None:
            have = f"operation {frame.op} part {frame.part} of generation {frame.generation}"
            raise self.fail(f"protocol: got {have}, expected operation {op} parts {sorted(self._wanted)}")
        if isinstance(destination, bytearray):
            size = len(destination)
            destination.extend(bytes(frame.nbytes))
            self._target = memoryview(destination)[size:]
        else:
            room = len(destination)
            if frame.nbytes > room or (frame.kind == wire.LAST and frame.nbytes != room):
                raise self._misfit(frame.part, frame.nbytes, room)
            self._target = destination[: frame.nbytes]
        self._aimed = True

    def _complete(self, frame: wire.Header) -> None:
        wanted, self._target, self._frame = self._target is not None, None, None
        if not wanted:
            return
        destination = self._wanted[frame.part]
        if frame.kind == wire.LAST:
            del self._wanted[frame.part]
            if frame.part not in self._early:
                if self._arrived is not None:
                    self._arrived(frame.part)
            elif frame.part in self._late:
                self._hand_over(frame.part)
        elif isinstance(destination, memoryview):
            self._wanted[frame.part] = destination[frame.nbytes :]

    def _hand_over(self, part: int) -> None:
        """Copies a part that had begun to come before it was posted."""
        early, destination = self._early.pop(part), self._late.pop(part)
        if isinstance(destination, bytearray):
            destination += early
        elif len(early) == len(destination):
            destination[:] = early
        else:
            raise self._misfit(part, len(early), len(destination))
        if self._arrived is not None:
            self._arrived(part)

    def _misfit(self, part: int, came: int, room: int) -> LinkLost:
        return self.fail(f"protocol: part {part} of operation {self._position[1]}: {came} bytes came, {room} expected")

    def _receive(self, target: memoryview) -> int:
        try:
            got = self.socket.recv_into(target)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.fail(error.strerror or str(error)) from None
        if got == 0:
            raise self.fail("closed by the peer")
        heartbeat.moved()
        return got
