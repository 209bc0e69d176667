"""The receiving half of a link: frames in, each to where its part was posted."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from elaunch.errors import GenerationChanged, LinkLost, ProtocolError
from elaunch.workers.comm import wire
from elaunch.workers.comm.connection import DISCARD, Connection
from elaunch.workers.comm.here import fetch
from elaunch.workers.comm.outgoing import Outgoing

_WAITS = select.POLLRDHUP
_READS = select.POLLRDHUP | select.POLLIN

Destination = memoryview | bytearray
"""A writable view that a part must fill exactly, or a bytearray that grows to whatever comes."""


class Incoming:
    """What an operation receives over one connection.

    Attributes:
        wanted: where the rest of each part goes that was posted, or is coming, and is not complete.
        early: parts of an open operation that came, or are coming, before they were posted.
        parked: nothing is read until more is posted: the peer is in a later operation already.
    """

    def __init__(self, connection: Connection, outgoing: Outgoing) -> None:
        self._connection, self._outgoing = connection, outgoing
        self._position = (0, 0)  # generation and number of the operation
        self.wanted: dict[int, Destination] = {}
        # The header, and where the body goes (None: it is discarded).
        self._header = memoryview(bytearray(wire.HEADER_BYTES))
        self._header_bytes = 0
        self._frame: wire.Header | None = None
        self._aimed = False
        self.parked = False
        self._target: memoryview | None = None
        self._left_bytes = 0
        # An offer of the peer's, and whether it was told to send instead.
        self._offer = memoryview(bytearray(wire.OFFER_BYTES))
        self._refuses = connection.process is None
        # Of an open operation; `_late` has where the early parts go that were posted while they came.
        self._open = False
        self._arrived: Callable[[int], None] | None = None
        self.early: dict[int, bytearray] = {}
        self._late: dict[int, Destination] = {}

    def events(self) -> int:
        """Returns the poll events that let it go on; 0 when nothing may come that this operation takes."""
        if not self._reads:
            return 0
        return _WAITS if self.parked else _READS

    @property
    def _reads(self) -> bool:
        return self._open or bool(self.wanted) or self._outgoing.awaits_answer

    def expect_answers(self, generation: int, op: int) -> None:
        """Says of which operation the answers are that are awaited, if nothing else is."""
        if not self._reads:
            self._position = (generation, op)
            self.parked = False

    def open(self, generation: int, op: int, arrived: Callable[[int], None]) -> None:
        """Begins an open operation; `arrived` gets the number of each complete part."""
        self._position = (generation, op)
        self.parked = False
        self._open, self._arrived = True, arrived

    def settle(self) -> None:
        """Nothing more will be posted; raises `LinkLost` when a part came that never was."""
        self._open = False
        unposted = sorted(self.early.keys() - self._late.keys())
        if unposted:
            raise self._connection.fail(
                f"protocol: parts {unposted} of operation {self._position[1]} came, but were never posted"
            )

    def post(self, generation: int, op: int, part: int, destination: Destination) -> None:
        """Says where the bytes of this part go when they come."""
        if part in self.early:
            self._late[part] = destination
            if part not in self.wanted:
                self._hand_over(part)
            return
        assert part not in self.wanted, f"part {part} from {self._connection.peer} is posted twice"
        self._position = (generation, op)
        self.wanted[part] = destination
        self.parked = False

    def pull(self) -> bool:
        """Takes in what has come of one frame; returns whether anything is awaited that can be read.

        Raises:
            LinkLost: the connection breaks, or what came is not what was posted.
            GenerationChanged: the peer, which still owes a part, has gone on to a newer generation.
        """
        if self.parked or not self._reads:
            return False
        if self._frame is None:
            self._header_bytes += self._connection.receive(self._header[self._header_bytes :])
            if self._header_bytes < wire.HEADER_BYTES:
                return True
            self._header_bytes = 0
            try:
                self._frame = wire.unpack_header(bytes(self._header))
            except ProtocolError as error:
                raise self._connection.fail(str(error)) from None
            if self._frame.kind in wire.ANSWERS:
                self._outgoing.answered(self._frame.op, self._frame.kind == wire.FETCHED)
                self._frame = None
                return True
            if self._frame.kind == wire.ENTERED:
                generation, self._frame = self._frame.generation, None
                if generation > self._position[0]:
                    raise GenerationChanged(generation)
                return True
            self._left_bytes = self._frame.nbytes
            self._aimed = False
        if not self._aimed and not self._aim(self._frame):
            return True
        if self._left_bytes:
            target = DISCARD if self._target is None else self._target
            got = self._connection.receive(target[: self._left_bytes])
            self._left_bytes -= got
            if self._target is not None:
                self._target = self._target[got:]
        if not self._left_bytes:
            self._complete(self._frame)
        return True

    def finish(self) -> None:
        """Forgets the operation, but for the rest of a frame, which is discarded when it comes."""
        self.wanted.clear()
        self._target = None
        self._open, self._arrived = False, None
        self.early.clear()
        self._late.clear()

    def _aim(self, frame: wire.Header) -> bool:
        """Decides where the body of a frame goes; returns False where that is not known yet, and parks it."""
        generation, op = self._position
        if frame.generation < generation:
            self._target, self._aimed = None, True
            return True
        # In an open operation the peer may be done, and be in one whose number, from another group, is any.
        if (frame.generation, frame.op) > (generation, op) or (self._open and frame.op != op):
            self.parked = True
            if frame.generation > generation:
                # The peer has gone on to a newer generation: what is awaited here of the older one never comes.
                raise GenerationChanged(frame.generation)
            return False
        destination = self.wanted.get(frame.part) if frame.op == op else None
        if destination is None and self._open:
            destination = self.early[frame.part] = self.wanted[frame.part] = bytearray()
        if destination is None:
            have = f"operation {frame.op} part {frame.part} of generation {frame.generation}"
            raise self._connection.fail(f"protocol: got {have}, expected operation {op} parts {sorted(self.wanted)}")
        offered = frame.kind in wire.OFFERS
        self._target = self._offer if offered else self._room(frame.part, frame.nbytes, frame.kind == wire.LAST)
        self._aimed = True
        return True

    def _room(self, part: int, n_bytes: int, last: bool) -> memoryview:
        """Returns where the next bytes of a part go; raises `LinkLost` where they do not fit."""
        destination = self.wanted[part]
        if isinstance(destination, bytearray):
            size = len(destination)
            destination.extend(bytes(n_bytes))
            return memoryview(destination)[size:]
        room = len(destination)
        if n_bytes > room or (last and n_bytes != room):
            raise self._misfit(part, n_bytes, room)
        return destination[:n_bytes]

    def _fetch(self, frame: wire.Header) -> int | None:
        """Fetches what the peer offers, and answers; returns how many bytes came, None if none did.

        Raises:
            LinkLost: the peer's process has ended, or what it offers does not fit.
        """
        try:
            offer = wire.unpack_offer(bytes(self._offer))
        except ProtocolError as error:
            raise self._connection.fail(str(error)) from None
        process, found = self._connection.process, "refused"
        if process is not None and not self._refuses:
            target = self._room(frame.part, offer.nbytes, frame.kind == wire.OFFER_LAST)
            begin_s = time.perf_counter()
            found = fetch(process, offer, target)
            target.release()
            if found == "fetched":
                self._connection.has_read(offer.nbytes, time.perf_counter() - begin_s)
                self._outgoing.answer(offer.number, fetched=True)
                return offer.nbytes
            destination = self.wanted[frame.part]
            if isinstance(destination, bytearray):
                del destination[-offer.nbytes :]
        if found == "gone":
            raise self._connection.fail("its process has ended")
        if found == "refused":
            self._refuses = True
            self._outgoing.answer(offer.number, fetched=False)
        return None  # withdrawn: the peer has given the operation up, and what is awaited never comes

    def _complete(self, frame: wire.Header) -> None:
        wanted, self._target, self._frame = self._target is not None, None, None
        if not wanted:
            return
        n_bytes: int | None = frame.nbytes
        if frame.kind in wire.OFFERS:
            n_bytes = self._fetch(frame)
            if n_bytes is None:
                return
        destination = self.wanted[frame.part]
        if frame.kind in (wire.LAST, wire.OFFER_LAST):
            del self.wanted[frame.part]
            if frame.part not in self.early:
                if self._arrived is not None:
                    self._arrived(frame.part)
            elif frame.part in self._late:
                self._hand_over(frame.part)
        elif isinstance(destination, memoryview):
            self.wanted[frame.part] = destination[n_bytes:]

    def _hand_over(self, part: int) -> None:
        """Copies a part that had begun to come before it was posted."""
        early, destination = self.early.pop(part), self._late.pop(part)
        if isinstance(destination, bytearray):
            destination += early
        elif len(early) == len(destination):
            destination[:] = early
        else:
            raise self._misfit(part, len(early), len(destination))
        if self._arrived is not None:
            self._arrived(part)

    def _misfit(self, part: int, came: int, room: int) -> LinkLost:
        what = f"part {part} of operation {self._position[1]}"
        return self._connection.fail(f"protocol: {what}: {came} bytes came, {room} expected")
