"""Routes: what each worker keeps, sends and receives so that everybody ends up with what it needs (DynaTran 4.2).

Pure, and the same wherever it is computed: a worker finds its own part without asking anybody. What a worker needs and
has stays. The rest comes from those who have it: from the same node if any of them is there, cut evenly among them; in
device memory if it is, else from a snapshot in host memory. What nobody has is named.

Where more workers need a box than have it, or several of a node that has it nowhere, it is broadcast: scattered over
them in slabs, each of which its first receiver passes on (DynaTran 4.3, lines 37-47; van de Geijn's scatter and
allgather). So those who have it send it once, however many need it, and a receiver sends about what it receives. A slab
comes to a node once, to another of its workers each time, and is passed on there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from elaunch.errors import StateError, StateLost
from elaunch.workers.state.boxes import Box, intersect, n_elements, slabs, subtract, subtract_all
from elaunch.workers.state.space import Holdings, Item

CUT_BYTES = 256 << 10
"""A smaller piece comes from one source as a whole; the sources take turns. No slab of a broadcast is smaller."""

HOPS = 3
"""Of the longest way: from who has it to a first receiver, from there to another node, and on within it."""

_MOST_NAMES = 8


@dataclass(frozen=True)
class ChunkTransfer:
    """A box of an item on its way.

    Attributes:
        source, to: workers; the same one for what stays.
        snapshot: whether it is in the source's snapshot, in host memory.
        hop: how many receivers it has been at. Above 0 the source needs it itself, and passes on what came to it by a
            piece of a lower hop.
    """

    item: str
    box: Box
    source: str
    to: str
    snapshot: bool = False
    hop: int = 0


@dataclass(frozen=True)
class Routes:
    """One worker's part of a change. By item; in an item, too, all workers have their pieces in the same order."""

    retain: tuple[ChunkTransfer, ...]
    send: tuple[ChunkTransfer, ...]
    receive: tuple[ChunkTransfer, ...]


@dataclass(frozen=True)
class Missing:
    """Boxes that somebody needs and nobody has."""

    item: str
    boxes: tuple[Box, ...]


Sources = tuple[tuple[str, bool], ...]
"""Workers, and whether it is in their snapshot."""

_Held = Mapping[str, tuple[Box, ...]]
_Wanted = dict[tuple[Box, Sources, bool], list[str]]
"""By box, sources, and whether these are on the receivers' node: the receivers."""


class _Crowd:
    """Workers that need the same box, by node."""

    def __init__(self, receivers: Sequence[str], node_of: Callable[[str], str]) -> None:
        by_node: dict[str, list[str]] = {}
        for worker in receivers:
            by_node.setdefault(node_of(worker), []).append(worker)
        self.nodes = [tuple(workers) for workers in by_node.values()]
        self.workers = tuple(worker for node in self.nodes for worker in node)
        self.node_of = {worker: node for node in self.nodes for worker in node}


@dataclass(frozen=True)
class _Way:
    """A slab's way from one of those who have it to all who need it.

    It comes to a first receiver, from there to one of each other node and to those of its own, and from these ones to
    the rest of theirs. Who is first, and who is the one of a node, goes by turns.
    """

    slab: Box
    sources: Sources
    crowd: _Crowd
    number: int

    def pieces(self, worker: str, item: str, turn: int) -> Iterator[ChunkTransfer]:
        """Those that a worker sends or receives."""
        number = self.number + turn
        source, snapshot = self.sources[number % len(self.sources)]
        first = self.crowd.workers[number % len(self.crowd.workers)]
        if worker in (source, first):
            yield ChunkTransfer(item, self.slab, source, first, snapshot)
        here = self.crowd.node_of.get(worker)
        if here is None:
            return
        entry, hop = (first, 1) if first in here else (here[number % len(here)], 2)
        if worker != entry:
            yield ChunkTransfer(item, self.slab, entry, worker, hop=hop)
            return
        if worker != first:
            yield ChunkTransfer(item, self.slab, first, worker, hop=1)
        else:
            others = (node for node in self.crowd.nodes if node is not here)
            yield from (ChunkTransfer(item, self.slab, first, node[number % len(node)], hop=1) for node in others)
        yield from (ChunkTransfer(item, self.slab, entry, to, hop=hop) for to in here if to != entry)


@dataclass(frozen=True)
class _Solved:
    """Of items that are alike: by worker, what stays and whether it is in its snapshot; the ways; what nobody has."""

    stay: Mapping[str, Sequence[tuple[Box, bool]]]
    ways: Mapping[str, Sequence[_Way]]
    missing: Sequence[Box]


class Router:
    """Finds the routes from what is held to what is needed.

    Args:
        items: the space; what is held or needed of anything else is an error.
        before: by surviving worker, what it holds; like the others in the same order on everybody.
        after: by worker, what it needs.
        snapshots: by surviving worker, what it has in host memory besides.
        node_of: gives the node of a worker; default: what precedes the slash of its identity.
        relays: whether receivers pass on what others need too; without it all comes straight from who has it.

    Attributes:
        items: the space.

    Raises:
        StateError: something outside the space.
    """

    def __init__(
        self,
        items: Mapping[str, Item],
        before: Mapping[str, Holdings],
        after: Mapping[str, Holdings],
        snapshots: Mapping[str, Holdings] | None = None,
        node_of: Callable[[str], str] | None = None,
        relays: bool = True,
    ) -> None:
        self.items = items
        self._node_of = node_of or (lambda worker: worker.partition("/")[0])
        tables = [_by_item(held, items) for held in (before, after, snapshots or {})]
        self._before, self._after, self._snapshots = tables
        self._relays = relays

    @property
    def needed(self) -> dict[str, Mapping[str, tuple[Box, ...]]]:
        """Returns items that somebody needs, in the order of the space, and by worker the boxes."""
        return {name: self._after[name] for name in self.items if name in self._after}

    def missing(self) -> tuple[Missing, ...]:
        """Returns what somebody needs and nobody has, in the order of the space."""
        return tuple(
            Missing(name, tuple(solved.missing)) for name, (solved, _) in self._solved.items() if solved.missing
        )

    def of(self, worker: str) -> Routes:
        """Returns the part of one worker.

        Raises:
            StateLost: names what nobody has.
        """
        missing = self.missing()
        if missing:
            names = ", ".join(one.item for one in missing[:_MOST_NAMES])
            more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
            raise StateLost(f"no surviving worker has all of {names}{more}; go on from the last checkpoint")
        retain: list[ChunkTransfer] = []
        send: list[ChunkTransfer] = []
        receive: list[ChunkTransfer] = []
        for name, (solved, turn) in self._solved.items():
            retain += [
                ChunkTransfer(name, box, worker, worker, snapshot) for box, snapshot in solved.stay.get(worker, ())
            ]
            for way in solved.ways.get(worker, ()):
                for piece in way.pieces(worker, name, turn):
                    (receive if piece.to == worker else send).append(piece)
        return Routes(tuple(retain), tuple(send), tuple(receive))

    def lonely(self, name: str, worker: str) -> list[Box]:
        """Returns what `worker` holds of an item and will not hold, and only one worker will have, in whatever memory.

        Were `worker` to let go of it, the death of that one before the end of the change would lose it.
        """
        found: list[Box] = []
        after, snapshots = self._after.get(name, {}), self._snapshots.get(name, {})
        for held in self._before.get(name, {}).get(worker, ()):
            parts = subtract_all([held], (*after.get(worker, ()), *snapshots.get(worker, ())))
            for owner in dict.fromkeys((*after, *snapshots)):
                kept = (*after.get(owner, ()), *snapshots.get(owner, ()))
                here = [common for part in parts for box in kept if (common := intersect(part, box)) is not None]
                for other in (*after, *snapshots):
                    if other != owner and here:
                        here = subtract_all(here, (*after.get(other, ()), *snapshots.get(other, ())))
                found += subtract_all(here, found)
        return found

    @cached_property
    def _solved(self) -> dict[str, tuple[_Solved, int]]:
        """Of each item that somebody needs, what becomes of it, and its turn; items that are alike are solved once."""
        found: dict[str, tuple[_Solved, int]] = {}
        kinds: dict[tuple[Any, ...], _Solved] = {}
        turns: dict[tuple[Any, ...], int] = {}
        for name in self.needed:
            size = self.items[name].element_bytes
            held, needed, hosted = (table.get(name, {}) for table in (self._before, self._after, self._snapshots))
            kind = (self.items[name].shape, size, *(tuple(one.items()) for one in (held, needed, hosted)))
            if kind not in kinds:
                turns[kind] = len(kinds)
                kinds[kind] = _solve(size, held, needed, hosted, self._node_of, self._relays)
            found[name] = kinds[kind], turns[kind]
            turns[kind] += 1
        return found


def _by_item(held: Mapping[str, Holdings], items: Mapping[str, Item]) -> dict[str, dict[str, tuple[Box, ...]]]:
    found: dict[str, dict[str, tuple[Box, ...]]] = {}
    for worker, holdings in held.items():
        for name, boxes in holdings.items():
            if name not in items:
                raise StateError(f"{worker} has {name}, which is not in the space of {len(items)} items")
            found.setdefault(name, {})[worker] = tuple(boxes)
    return found


def _solve(
    element_bytes: int, before: _Held, after: _Held, snapshots: _Held, node_of: Callable[[str], str], relays: bool
) -> _Solved:
    devices, hosts = _grouped(before, False), _grouped(snapshots, True)
    stay: dict[str, list[tuple[Box, bool]]] = {}
    missing: list[Box] = []
    wanted: _Wanted = {}
    for to, boxes in after.items():
        rest = [box for box in boxes if n_elements(box)]
        # Its own snapshot, too, is nearer than any peer.
        for snapshot, own in ((False, before.get(to, ())), (True, snapshots.get(to, ()))):
            for box in own:
                kept = [(common, snapshot) for part in rest if (common := intersect(part, box)) is not None]
                stay.setdefault(to, []).extend(kept)
                rest = [left for part in rest for left in subtract(part, box)]
        for groups in (devices, hosts):
            rest = _taken(to, rest, groups, node_of, wanted)
        missing += subtract_all(rest, missing)
    ways: dict[str, list[_Way]] = {}
    for (box, sources, near), receivers in wanted.items():
        for way in _ways(box, n_elements(box) * element_bytes, sources, near, receivers, node_of, relays):
            for worker in (*(source for source, _ in sources), *way.crowd.workers):
                ways.setdefault(worker, []).append(way)
    return _Solved(stay, ways, missing)


def _taken(
    to: str, boxes: Sequence[Box], groups: Mapping[Box, Sources], node_of: Callable[[str], str], wanted: _Wanted
) -> list[Box]:
    """Adds what `to` gets of `boxes` from these groups to what is wanted of them; returns what they do not have."""
    rest, here = list(boxes), node_of(to)
    near = {box: tuple(one for one in sources if node_of(one[0]) == here) for box, sources in groups.items()}
    for box in sorted(groups, key=lambda box: not near[box]):
        if not rest:
            break
        for part in rest:
            common = intersect(part, box)
            if common is not None:
                wanted.setdefault((common, near[box] or groups[box], bool(near[box])), []).append(to)
        rest = [left for part in rest for left in subtract(part, box)]
    return rest


def _ways(
    box: Box,
    box_bytes: int,
    sources: Sources,
    near: bool,
    receivers: Sequence[str],
    node_of: Callable[[str], str],
    relays: bool,
) -> list[_Way]:
    """How a box comes from the sources, which are on the receivers' node or on others, to all who need it."""
    crowd = _Crowd(receivers, node_of)
    most = max(len(sources), len(receivers))
    # So many that all sources send alike and all receivers pass on alike, unless that were far more than there are.
    n_slabs = min(math.lcm(len(sources), len(receivers)), 4 * most, box_bytes // CUT_BYTES)
    pays = len(receivers) > len(sources) or (not near and len(receivers) > len(crowd.nodes))
    if relays and pays and n_slabs:
        return [_Way(slab, sources, crowd, number) for number, slab in enumerate(slabs(box, n_slabs))]
    parts = slabs(box, min(len(sources), box_bytes // CUT_BYTES))
    return [
        _Way(part, sources, _Crowd([to], node_of), first + number)
        for first, to in enumerate(receivers)
        for number, part in enumerate(parts)
    ]


def _grouped(held: Mapping[str, tuple[Box, ...]], snapshot: bool) -> dict[Box, Sources]:
    """The distinct boxes and who holds each."""
    found: dict[Box, list[tuple[str, bool]]] = {}
    for worker, boxes in held.items():
        for box in boxes:
            found.setdefault(box, []).append((worker, snapshot))
    return {box: tuple(sources) for box, sources in found.items()}


def n_bytes(items: Mapping[str, Item], pieces: Sequence[ChunkTransfer]) -> int:
    """Returns the size of some pieces together."""
    return sum(n_elements(piece.box) * items[piece.item].element_bytes for piece in pieces)
