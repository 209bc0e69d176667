"""The sending half of a link: frames out, in the order in which they were posted."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elaunch.workers.comm import wire
from elaunch.workers.comm.connection import Connection
from elaunch.workers.comm.here import OFFERED_BYTES, OfferMark, address_of

_WRITES = select.POLLRDHUP | select.POLLOUT


@dataclass(eq=False, slots=True)
class _Frame:
    """One that waits to leave, or was offered under a number and waits for the answer."""

    header: wire.Header
    body: memoryview
    left: Callable[[], None] | None
    may_offer: bool
    number: int = 0


class Outgoing:
    """What an operation sends over one connection, and what an earlier one still owes the peer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        # What an earlier operation still owes, the frame being sent, the frames after it.
        self._owed: list[bytes | memoryview] = []
        self._sending: list[bytes | memoryview] = []
        self._begun = False
        self._frames: deque[_Frame] = deque()
        self._left: Callable[[], None] | None = None
        # Answers to the peer's offers go before all frames. The peer answers those of this side in their order.
        self._answers: deque[bytes] = deque()
        self._offered: deque[_Frame] = deque()
        self._offers = 0
        self._mark: OfferMark | None = None
        self._may_offer = connection.process is not None

    @property
    def awaits_answer(self) -> bool:
        """Whether the peer may still be reading what was offered."""
        return bool(self._offered)

    def events(self) -> int:
        """Returns the poll events that let it go on; 0 when nothing of this operation waits to leave."""
        waits = self._sending or self._answers or self._frames or self._connection.has_unsent
        return _WRITES if waits else 0

    def post(
        self,
        generation: int,
        op: int,
        part: int,
        body: memoryview,
        left: Callable[[], None] | None,
        may_offer: bool = False,
    ) -> bool:
        """Queues `body`, cut into frames, and calls `left` when the kernel, or the peer, has all of it.

        Returns whether some of it may be offered, so that answers are to be read.
        """
        total = len(body)
        may_offer = may_offer and self._may_offer and not body.readonly and total >= OFFERED_BYTES
        for lo in range(0, max(total, 1), wire.SEGMENT_BYTES):
            hi = min(lo + wire.SEGMENT_BYTES, total)
            kind = wire.LAST if hi == total else wire.MORE
            header = wire.Header(kind, part, generation, op, hi - lo)
            self._frames.append(_Frame(header, body[lo:hi], left if hi == total else None, may_offer))
        return may_offer

    def tell_entered(self, generation: int, left: Callable[[], None]) -> None:
        """Queues the news that this worker has entered a generation, and calls `left` when the kernel has it."""
        header = wire.Header(wire.ENTERED, 0, generation, 0, 0)
        self._frames.append(_Frame(header, memoryview(b""), left, may_offer=False))

    def answer(self, number: int, fetched: bool) -> None:
        """Tells the peer what became of its offer."""
        kind = wire.FETCHED if fetched else wire.REFUSED
        self._answers.append(wire.pack_header(wire.Header(kind, 0, 0, number, 0)))

    def answered(self, number: int, fetched: bool) -> None:
        """Takes in what became of an offer: its bytes are there; or this one and all after it are sent."""
        if not fetched:
            self._may_offer = False
        if not self._offered or self._offered[0].number != number:
            return  # of an operation that was given up, or of an offer after the first that was refused
        if fetched:
            frame = self._offered.popleft()
            if frame.left is not None:
                frame.left()
        else:
            self._frames.extendleft(reversed(self._offered))
            self._offered.clear()

    def push(self) -> None:
        """Moves out what the socket takes now; raises `LinkLost` when the connection breaks."""
        if not self._connection.flush():
            return
        while self._sending or self._answers or self._frames:
            if self._owed:
                buffers = self._owed
            else:
                if not self._sending:
                    self._begin_next()
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
        """Forgets the operation, but for the rest of a frame that the peer has got a part of.

        The caller's buffers change from here on: whoever reads them just now finds out that they are worthless.
        """
        self._frames.clear()
        self._answers.clear()
        if self._offered:
            assert self._mark is not None
            self._mark.withdraw(self._offers + 1)
            self._offered.clear()
        if self._begun:
            # The caller's buffer changes from here on, so the rest is copied.
            self._owed = [b"".join(self._sending)]
        self._sending, self._begun, self._left = [], False, None

    def _begin_next(self) -> None:
        """Takes the next frame to send."""
        if self._answers:
            self._sending, self._left = [self._answers.popleft()], None
            return
        frame = self._frames.popleft()
        header, body = frame.header, frame.body
        if not (frame.may_offer and self._may_offer):
            self._sending, self._left = [wire.pack_header(header), body], frame.left
            return
        self._mark = self._mark or OfferMark()
        self._offers += 1
        frame.number = self._offers
        self._offered.append(frame)
        kind = wire.OFFER_LAST if header.kind == wire.LAST else wire.OFFER_MORE
        offer = wire.Offer(address_of(body), len(body), self._mark.address, self._mark.secret, frame.number)
        announced = header._replace(kind=kind, nbytes=wire.OFFER_BYTES)
        self._sending, self._left = [wire.pack_header(announced), wire.pack_offer(offer)], None
