"""State on its way while its workers do something else: the messages of a change in the background of a traffic.

What moves must not change meanwhile: the values of a step, until it commits. Nothing old is let go before the end, so
an interruption leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.device import use_large_pages
from elaunch.workers.state.chunks import ChunkedState, copy_box
from elaunch.workers.state.reshard import TensorChunk, by_peer, messages_of, view_of
from elaunch.workers.state.routes import ChunkTransfer, Routes
from elaunch.workers.state.space import Item
from elaunch.workers.state.staging import Buffer

MESSAGE_BYTES = 1 << 20
"""What the traffic itself wants to send may have to wait for so much."""


@dataclass(eq=False)
class _Coming:
    """A message: who sends it, under which number, and where it goes when it is there."""

    source: str
    number: int
    buffer: Buffer
    places: list[Tensor]
    items: frozenset[str]


class BackgroundMove:
    """One worker's part of a change.

    Args:
        items: the space. What comes first in it leaves first.
        routes: of this worker, without relays.
        held: what it has.
        places: of what it needs and has not, or not in this place.
        first_number: of the parts under which the messages of a pair travel.
    """

    def __init__(
        self, items: Mapping[str, Item], routes: Routes, held: ChunkedState, places: ChunkedState, first_number: int
    ) -> None:
        self._items, self._routes, self._held, self._places = items, routes, held, places
        self._first_number = first_number
        self._coming: list[_Coming] = []
        self._traffic: Traffic | None = None

    def begin(self, traffic: Traffic) -> None:
        """Lets it flow; what this worker has already is put in its place."""
        self._traffic = traffic
        use_large_pages(tensor for chunks in self._places.values() for chunk in chunks for tensor in chunk.tensors)
        for source, pieces in by_peer(lambda piece: piece.source, self._routes.receive).items():
            for number, message in self._numbered(pieces):
                places = [view_of(self._places[part.item], part) for part in message]
                buffer = Buffer(places)
                traffic.post(source, number, buffer.bytes)
                self._coming.append(_Coming(source, number, buffer, places, frozenset(part.item for part in message)))
        for to, pieces in by_peer(lambda piece: piece.to, self._routes.send).items():
            traffic.feed(to, self._leaving(pieces))
        for piece in self._routes.retain:
            copy_box(self._held[piece.item], self._places[piece.item], piece.box)

    def wait(self, items: Collection[str] | None = None) -> None:
        """Returns when all that this worker needs of some items, or of all, is in its place."""
        assert self._traffic is not None
        later = []
        for one in self._coming:
            if items is None or not one.items.isdisjoint(items):
                self._traffic.wait(one.source, one.number)
                one.buffer.unpack(one.places)
            else:
                later.append(one)
        self._coming = later

    def _leaving(self, pieces: Sequence[ChunkTransfer]) -> Iterator[tuple[int, memoryview]]:
        for number, message in self._numbered(pieces):
            buffer = Buffer(views := [view_of(self._held[part.item], part) for part in message])
            buffer.pack(views)
            yield number, buffer.bytes

    def _numbered(self, pieces: Sequence[ChunkTransfer]) -> Iterator[tuple[int, tuple[TensorChunk, ...]]]:
        return enumerate(messages_of(pieces, self._items, MESSAGE_BYTES), self._first_number)
