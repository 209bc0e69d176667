"""State on its way while its workers do something else: the messages of a change in the background of a traffic.

What moves must not change meanwhile: the values of a step, until it commits. Nothing old is let go before the end, so
an interruption leaves everything as it was.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from elaunch.workers import heartbeat
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.paths import Parcel, StepPath
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
    """One worker's part of a change, over links.

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
        self.keep()
        self.flow(traffic)

    def keep(self) -> None:
        """Puts what this worker has already in its place."""
        use_large_pages(tensor for chunks in self._places.values() for chunk in chunks for tensor in chunk.tensors)
        for piece in self._routes.retain:
            copy_box(self._held[piece.item], self._places[piece.item], piece.box)

    def flow(self, traffic: Traffic) -> None:
        """Lets the messages flow. From any thread."""
        self._traffic = traffic
        for source, pieces in by_peer(lambda piece: piece.source, self._routes.receive).items():
            for number, message in self._numbered(pieces):
                places = [view_of(self._places[part.item], part) for part in message]
                buffer = Buffer(places)
                traffic.post(source, number, buffer.bytes)
                self._coming.append(_Coming(source, number, buffer, places, frozenset(part.item for part in message)))
        for to, pieces in by_peer(lambda piece: piece.to, self._routes.send).items():
            traffic.feed(to, self._leaving(pieces))

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

    def leave(self) -> None:
        """Does nothing: the traffic is over."""

    def outgoing(self, message_bytes: int) -> dict[str, Iterator[Parcel]]:
        """Returns what leaves, by worker, in messages of up to so many bytes."""
        pieces_to = by_peer(lambda piece: piece.to, self._routes.send)
        return {to: self._parcels(pieces, self._held, message_bytes) for to, pieces in pieces_to.items()}

    def incoming(self, message_bytes: int) -> dict[str, Iterator[Parcel]]:
        """Returns the same of what comes, with the places where it goes."""
        pieces_from = by_peer(lambda piece: piece.source, self._routes.receive)
        return {source: self._parcels(pieces, self._places, message_bytes) for source, pieces in pieces_from.items()}

    def incoming_items(self, message_bytes: int) -> dict[str, deque[frozenset[str]]]:
        """Returns the items of which each of these messages has some, by worker."""
        return {
            source: deque(
                frozenset(part.item for part in message) for message in messages_of(pieces, self._items, message_bytes)
            )
            for source, pieces in by_peer(lambda piece: piece.source, self._routes.receive).items()
        }

    def _parcels(self, pieces: Sequence[ChunkTransfer], state: ChunkedState, message_bytes: int) -> Iterator[Parcel]:
        for message in messages_of(pieces, self._items, message_bytes):
            yield Parcel(message[0].item, [view_of(state[part.item], part) for part in message])

    def _leaving(self, pieces: Sequence[ChunkTransfer]) -> Iterator[tuple[int, memoryview]]:
        for number, message in self._numbered(pieces):
            buffer = Buffer(views := [view_of(self._held[part.item], part) for part in message])
            buffer.pack(views)
            yield number, buffer.bytes

    def _numbered(self, pieces: Sequence[ChunkTransfer]) -> Iterator[tuple[int, tuple[TensorChunk, ...]]]:
        return enumerate(messages_of(pieces, self._items, MESSAGE_BYTES), self._first_number)


class BackgroundPathMove:
    """The same over another path if that stands on all members, else over links.

    Args:
        links: this worker's part of the change.
        path: it begins to be opened.
        group: of all members.
        part: under which they tell each other whether it stands.
    """

    def __init__(self, links: BackgroundMove, path: StepPath, group: Group, part: int) -> None:
        self._links, self._path, self._group, self._part = links, path, group, part
        self._items_of = links.incoming_items(path.message_bytes)
        self._thread: threading.Thread | None = None
        # Under this condition: how many messages with some of an item are to come, what has ended the move, and whether
        # it is over, or goes over links.
        self._changed = threading.Condition()
        self._left = Counter(item for messages in self._items_of.values() for items in messages for item in items)
        self._failure: BaseException | None = None
        self._is_over = self._is_over_links = False

    def begin(self, traffic: Traffic) -> None:
        """Lets it flow; what this worker has already is put in its place."""
        self._links.keep()
        self._thread = self._path.start(lambda: self._run(traffic))

    def wait(self, items: Collection[str] | None = None) -> None:
        """Returns when all that this worker needs of some items, or of all, is in its place."""
        peers = self._group.others

        def is_here() -> bool:
            return self._is_over or (items is not None and not any(self._left[item] for item in items))

        with heartbeat.waiting(peers, self._group.generation), self._changed:
            self._changed.wait_for(is_here)
            if self._failure is not None:
                raise self._failure.with_traceback(None)
        if self._is_over_links:
            self._links.wait(items)

    def leave(self) -> None:
        """Returns when nothing writes into the places any more; the path is over."""
        if self._thread is not None:
            self._thread.join()
            self._path.leave()

    def _run(self, traffic: Traffic) -> None:
        """In a thread of its own, which never raises: whoever waits gets what has ended the move."""
        try:
            if self._path.stands(traffic, self._part):
                members, size = self._group.members, self._path.message_bytes
                outgoing = {members.index(to): parcels for to, parcels in self._links.outgoing(size).items()}
                incoming = {members.index(source): parcels for source, parcels in self._links.incoming(size).items()}
                self._path.move(traffic, outgoing, incoming, self._came)
            else:
                self._links.flow(traffic)
                self._is_over_links = True
        except BaseException as error:
            self._failure = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _came(self, rank: int) -> None:
        with self._changed:
            self._left.subtract(self._items_of[self._group.members[rank]].popleft())
            self._changed.notify_all()
