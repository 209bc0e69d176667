"""The sending half of a link: frames out, in the order in which they were posted."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable

from elaunch.workers.comm import wire
from elaunch.workers.comm.connection import Connection

_WRITES = select.POLLRDHUP | select.POLLOUT


class Outgoing:
    """What an operation sends over one connection, and what an earlier one still owes the peer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # What an earlier operation still owes, the frame being sent, the frames after it.
        self._owed: list[bytes | memoryview] = []
        self._sending: list[bytes | memoryview] = []
        self._begun = False
        self._frames: deque[tuple[bytes, memoryview, Callable[[], None] | None]] = deque()
        self._left: Callable[[], None] | None = None

    def events(self) -> int:
        """Returns the poll events that let it go on; 0 when nothing of this operation waits to leave."""
        return _WRITES if self._sending or self._frames else 0

    def post(self, generation: int, op: int, part: int, body: memoryview, left: Callable[[], None] | None) -> None:
        """Queues `body`, cut into frames, and calls `left` when the kernel has all of it."""
        total = len(body)
        for lo in range(0, max(total, 1), wire.SEGMENT_BYTES):
            hi = min(lo + wire.SEGMENT_BYTES, total)
            kind = wire.LAST if hi == total else wire.MORE
            header = wire.pack_header(wire.Header(kind, part, generation, op, hi - lo))
            self._frames.append((header, body[lo:hi], left if hi == total else None))

    def push(self) -> None:
        """Moves out what the socket takes now; raises `LinkLost` when the connection breaks."""
        while self._sending or self._frames:
            if self._owed:
                buffers = self._owed
            else:
                if not self._sending:
                    header, body, self._left = self._frames.popleft()
                    self._sending = [header, body]
                buffers = self._sending
            sent = self._connection.send(buffers)
            if not sent:
                return
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
        """Forgets the operation, but for the rest of a frame that the peer has got a part of."""
        self._frames.clear()
        if self._begun:
            # The caller's buffer changes from here on, so the rest is copied.
            self._owed = [b"".join(self._sending)]
        self._sending, self._begun, self._left = [], False, None
