"""Move state from one layout to another along its routes, memory to memory (DynaTran 4.3, algorithm 1).

What a worker keeps is copied, or stays where it is if its box is the same. What travels between two workers is a fixed
sequence of messages that both derive from the routes: small parts are packed together, large ones cut, and what is one
run of memory is sent from it and received into it without a copy. What carries them is a path (`paths`): the links, of
which each has one message of each direction under way and all of a stage work at the same time, or something that is
quicker. Without a bound on memory there is
one stage. With one, the pairs of workers are taken in the order of the XOR schedule, as many steps of it at a time as
their buffers fit: in step s worker i is paired with worker i ^ s and with nobody else. The steps run to the next power
of two, since fewer miss pairs (docs/papers.md, error 1).

Slabs that receivers pass on go hop by hop: all stages for what comes from those who had it, then again for what those
pass on to whom it has come, out of their new chunks. A worker begins a hop when all that it sends and receives in the
one before is done; no barrier is needed. Nobody can wait in a circle: everybody goes through the same sequence of
operations (window, hop, stage), and in each one all links and both directions of a link move by themselves. So whoever
is in the earliest operation waits only for others that are in it too or have still to come, whom nothing holds up, or
for bytes that those who are further have left in the kernel.

Under a bound the items, too, are taken in *windows*: of each the new chunks are allocated, filled, and the old ones
let go, before the next begins. An interruption leaves the items of completed windows in the new layout and all others,
those of the window under way included, in the old one. So what a worker holds is always described by its chunks, and
the next attempt starts from there. What one worker alone would have if the old chunks were let go goes to host memory
instead, until the end: whoever dies, nothing is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from elaunch.workers.comm.group import Group
from elaunch.workers.comm.paths import Parcel, StatePath
from elaunch.workers.device import use_large_pages
from elaunch.workers.state.boxes import Box, intersect, n_elements, slabs
from elaunch.workers.state.chunks import Chunk, ChunkedState, copy_box, covering
from elaunch.workers.state.paths.links import MESSAGE_BYTES, LinkPath
from elaunch.workers.state.paths.packing import packed_bytes
from elaunch.workers.state.routes import HOPS, ChunkTransfer, Router, Routes
from elaunch.workers.state.space import Item
from elaunch.workers.state.staging import ALIGN, aligned, copies_of

SMALLEST_MESSAGE_BYTES = 64 << 10
"""Under a tight bound fewer links work at a time, rather than with smaller messages."""

Allocate = Callable[[str, Box], tuple[Tensor, ...]]
"""Makes the tensors of a chunk, by item and box; their content is arbitrary."""


class TensorChunk(NamedTuple):
    """A box of one tensor of an item."""

    item: str
    box: Box
    tensor: int
    snapshot: bool
    hop: int


@dataclass(frozen=True)
class TransferStage:
    """Steps of the XOR schedule that run at the same time, and the size of their messages."""

    steps: range
    message_bytes: int


@dataclass
class Moved:
    """What a worker took part in.

    Attributes:
        received_bytes: from others.
        sent_bytes: to others.
        kept_bytes: that were needed and there, copied or not.
        guarded_bytes: old chunks that were put into host memory, because one worker alone would have had them.
        peak_extra_bytes: the most memory held at a time beside the old state: new chunks, less the old ones let go or
            guarded, and buffers.
    """

    received_bytes: int = 0
    sent_bytes: int = 0
    kept_bytes: int = 0
    guarded_bytes: int = 0
    peak_extra_bytes: int = 0
    _chunks_bytes: int = 0
    _buffers_bytes: int = 0

    def hold(self, chunks_bytes: int = 0, buffers_bytes: int = 0) -> None:
        """Counts what is allocated; negative: what is let go."""
        self._chunks_bytes += chunks_bytes
        self._buffers_bytes += buffers_bytes
        self.peak_extra_bytes = max(self.peak_extra_bytes, self._chunks_bytes + self._buffers_bytes)


def reshard(
    group: Group,
    router: Router,
    state: dict[str, list[Chunk]],
    allocate: Allocate,
    *,
    snapshots: dict[str, list[Chunk]] | None = None,
    max_extra_bytes: int | None = None,
    checksum: bool = False,
) -> tuple[dict[str, list[Chunk]], Moved]:
    """Takes part in a change of layout. All members of the group call it, with the same router and settings.

    Args:
        group: of all workers of the router.
        router: from what is held to what is needed.
        state: of this worker, as the router has it. Under a bound, completed windows are taken out of it and put back
            in the new layout; without one it is left as it was.
        allocate: makes the new chunks.
        snapshots: what this worker has in host memory besides, as the router has it. Under a bound, old chunks are
            added to it that nobody but one worker would have otherwise; of no use any more after the end.
        max_extra_bytes: bound of the memory beside the old state that a worker takes at any time; at least what the
            largest item needs on some worker, and two messages of 64 KiB. None: the old state is kept until the end.
        checksum: whether each message is checked to have come as it was sent.

    Returns:
        The new state, and what was moved.

    Raises:
        StateError: somebody needs what nobody has, or something arrived damaged.
        StepInterrupted: a peer was lost, or the generation changed.
    """
    worker = group.members[group.rank]
    routes = router.of(worker)
    moved = Moved()
    snapshots = {} if snapshots is None else snapshots
    is_bounded = max_extra_bytes is not None
    windows = [list(router.needed)] if max_extra_bytes is None else _windows(router, max_extra_bytes // 2)
    max_buffer_bytes = None if max_extra_bytes is None else max_extra_bytes // 2
    for_items = {
        kind: {name: list(pieces) for name, pieces in groupby(getattr(routes, kind), key=lambda piece: piece.item)}
        for kind in ("retain", "send", "receive")
    }
    new: dict[str, list[Chunk]] = state if is_bounded else {}
    path: StatePath | None = None
    begin_s = time.monotonic()
    try:
        for window in windows:
            part = Routes(*(tuple(p for name in window for p in for_items[kind].get(name, ())) for kind in for_items))
            needed = {name: router.needed[name].get(worker, ()) for name in window}
            filled = _Window(group, router.items, part, needed, state, snapshots, allocate, moved, checksum)
            if path is None:
                path = _path(group, routes, router.items, filled.devices(), is_bounded)
                stages = plan_stages(group.size, max_buffer_bytes, path.message_bytes)
                begin_s = time.monotonic()
            filled.run(stages, path)
            path.finish()
            if is_bounded:
                # Nobody lets go before everybody has what it needs.
                group.barrier()
            for name in window:
                if is_bounded:
                    _let_go(router, name, worker, state, filled.chunks[name], snapshots, moved)
                if filled.chunks[name]:
                    new[name] = filled.chunks[name]
    finally:
        if path is not None:
            path.close()
    if path is not None and group.paths is not None:
        group.paths.took(path, max(moved.sent_bytes, moved.received_bytes), time.monotonic() - begin_s)
    for name in new.keys() - router.needed.keys():
        del new[name]  # nobody needs it any more
    return new, moved


class _Window:
    """Some items on their way into the new layout."""

    def __init__(
        self,
        group: Group,
        items: Mapping[str, Item],
        routes: Routes,
        needed: Mapping[str, Sequence[Box]],
        state: ChunkedState,
        snapshots: ChunkedState,
        allocate: Allocate,
        moved: Moved,
        checksum: bool,
    ) -> None:
        self._group, self._items, self._routes = group, items, routes
        self._state, self._snapshots = state, snapshots
        self._moved, self._checksum = moved, checksum
        self.chunks = {name: [self._chunk(name, box, allocate) for box in boxes] for name, boxes in needed.items()}

    def devices(self) -> set[torch.device]:
        """Returns where the tensors are that this worker has and needs."""
        states = self._state, self.chunks
        return {one.device for state in states for held in state.values() for chunk in held for one in chunk.tensors}

    def run(self, stages: Sequence[TransferStage], path: StatePath) -> None:
        """Fills the new chunks."""
        for piece in self._routes.retain:
            self._keep(piece)
        for hop in range(HOPS):
            send = by_peer(lambda piece: piece.to, self._routes.send, hop)
            receive = by_peer(lambda piece: piece.source, self._routes.receive, hop)
            for stage in stages:
                ranks = [self._group.rank ^ step for step in stage.steps]
                peers = {rank: self._group.members[rank] for rank in ranks if rank < self._group.size}
                size = stage.message_bytes
                path.move(
                    {rank: self._leaving(send[peer], size) for rank, peer in peers.items() if peer in send},
                    {rank: self._coming(receive[peer], size) for rank, peer in peers.items() if peer in receive},
                    self._checksum,
                    self._hold_buffers,
                )

    def _chunk(self, name: str, box: Box, allocate: Allocate) -> Chunk:
        for old in self._state.get(name, ()):
            if old.box == box:
                return old
        chunk = Chunk(box, allocate(name, box))
        use_large_pages(chunk.tensors)
        self._moved.hold(chunks_bytes=sum(tensor.nbytes for tensor in chunk.tensors))
        return chunk

    def _keep(self, piece: ChunkTransfer) -> None:
        sources = self._snapshots if piece.snapshot else self._state
        self._moved.kept_bytes += n_elements(piece.box) * self._items[piece.item].element_bytes
        copy_box(sources[piece.item], self.chunks[piece.item], piece.box)

    def _leaving(self, pieces: Sequence[ChunkTransfer], message_bytes: int) -> Iterator[Parcel]:
        for message in messages_of(pieces, self._items, message_bytes):
            views = [self._held(part) for part in message]
            self._moved.sent_bytes += packed_bytes(views)
            yield Parcel(_name_of(message[0]), views)

    def _coming(self, pieces: Sequence[ChunkTransfer], message_bytes: int) -> Iterator[Parcel]:
        for message in messages_of(pieces, self._items, message_bytes):
            views = [self._place(part) for part in message]
            self._moved.received_bytes += packed_bytes(views)
            yield Parcel(_name_of(message[0]), views)

    def _hold_buffers(self, n_bytes: int) -> None:
        self._moved.hold(buffers_bytes=n_bytes)

    def _held(self, part: TensorChunk) -> Tensor:
        sources = self.chunks if part.hop else self._snapshots if part.snapshot else self._state
        return view_of(sources[part.item], part)

    def _place(self, part: TensorChunk) -> Tensor:
        return view_of(self.chunks[part.item], part)


def _name_of(part: TensorChunk) -> str:
    return f"{part.item} {list(part.box)}"


def _path(
    group: Group, routes: Routes, items: Mapping[str, Item], devices: set[torch.device], is_bounded: bool
) -> StatePath:
    """The path of a move, the same on all members of the group."""
    device = next((one for one in devices if one.type != "cpu"), torch.device("cpu"))
    if group.paths is not None:
        ways = routes.send, routes.receive
        most = max(sum(n_elements(one.box) * items[one.item].element_bytes for one in way) for way in ways)
        path = group.paths.choose(group, most, device if devices else None, is_bounded)
        if path is not None:
            return path
    return LinkPath(group, copies_of(device, is_bounded))


def messages_of(
    pieces: Sequence[ChunkTransfer], items: Mapping[str, Item], message_bytes: int
) -> Iterator[tuple[TensorChunk, ...]]:
    """Returns what travels from one worker to another, in messages; it depends on sizes alone, so both ends find the
    same.

    Parts of half a message or more travel alone, so that they need no packing.
    """
    together: list[TensorChunk] = []
    size = 0
    for piece in pieces:
        for tensor, dtype in enumerate(items[piece.item].dtypes):
            n_bytes = n_elements(piece.box) * dtype.itemsize
            for box in _cut(piece.box, -(-n_bytes // message_bytes)):
                part = TensorChunk(piece.item, box, tensor, piece.snapshot, piece.hop)
                part_bytes = aligned(n_elements(box) * dtype.itemsize)
                if 2 * part_bytes >= message_bytes:
                    yield (part,)
                    continue
                if together and size + part_bytes > message_bytes:
                    yield tuple(together)
                    together, size = [], 0
                together.append(part)
                size += part_bytes
    if together:
        yield tuple(together)


def plan_stages(members: int, max_buffer_bytes: int | None, most_bytes: int = MESSAGE_BYTES) -> list[TransferStage]:
    """Returns how many steps of the XOR schedule run at a time, so that two buffers each fit, and their messages.

    Args:
        members: number of workers.
        max_buffer_bytes: for all buffers of a worker; None: as much as there is.
        most_bytes: of a message.
    """
    steps = 1 << (members - 1).bit_length()
    if max_buffer_bytes is None:
        return [TransferStage(range(1, steps), most_bytes)] if members > 1 else []
    at_a_time = max(1, min(steps - 1, max_buffer_bytes // (2 * SMALLEST_MESSAGE_BYTES)))
    message_bytes = max(SMALLEST_MESSAGE_BYTES, min(most_bytes, max_buffer_bytes // (2 * at_a_time)))
    return [
        TransferStage(range(first, min(first + at_a_time, steps)), message_bytes // ALIGN * ALIGN)
        for first in range(1, steps, at_a_time)
    ]


def by_peer(
    peer_of: Callable[[ChunkTransfer], str], pieces: Sequence[ChunkTransfer], hop: int = 0
) -> dict[str, list[ChunkTransfer]]:
    """Returns the messages of a hop, by peer."""
    found: dict[str, list[ChunkTransfer]] = {}
    for piece in pieces:
        if piece.hop == hop:
            found.setdefault(peer_of(piece), []).append(piece)
    return found


def _windows(router: Router, max_bytes: int) -> list[list[str]]:
    """The items in runs whose new chunks fit the bound on every worker; an item alone may not."""
    found: list[list[str]] = []
    size = 0
    for name, by_worker in router.needed.items():
        item = router.items[name]
        most = max((sum(map(n_elements, boxes)) for boxes in by_worker.values()), default=0) * item.element_bytes
        if not found or size + most > max_bytes:
            found.append([])
            size = 0
        found[-1].append(name)
        size += most
    return found


def _cut(box: Box, parts: int) -> list[Box]:
    """Slabs of a box, none larger than one of `parts` even parts unless it is a single element."""
    most = -(-n_elements(box) // max(1, parts))
    found: list[Box] = []
    for slab in slabs(box, parts):
        found += _cut(slab, -(-n_elements(slab) // most)) if n_elements(slab) > most else [slab]
    return found


def view_of(chunks: Sequence[Chunk], part: TensorChunk) -> Tensor:
    """Returns a part, as a view of the chunk that has it: no piece exceeds the boxes it comes from or goes to."""
    for chunk, common in covering(chunks, part.box):
        if common == part.box:
            return chunk.view(part.box, part.tensor)
    raise AssertionError(f"{part} is not within one of {[chunk.box for chunk in chunks]}")


def _let_go(
    router: Router,
    name: str,
    worker: str,
    state: dict[str, list[Chunk]],
    new: Sequence[Chunk],
    snapshots: dict[str, list[Chunk]],
    moved: Moved,
) -> None:
    """Takes the old chunks of an item out of the state, and guard what one worker alone would have."""
    lonely = router.lonely(name, worker)
    for old in state.pop(name, []):
        if any(chunk is old for chunk in new):
            continue
        n_bytes = sum(tensor.nbytes for tensor in old.tensors)
        moved.hold(chunks_bytes=-n_bytes)
        if any(intersect(old.box, box) for box in lonely):
            snapshots.setdefault(name, []).append(Chunk(old.box, tuple(tensor.cpu() for tensor in old.tensors)))
            moved.guarded_bytes += n_bytes
