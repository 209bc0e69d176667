"""Routes: what each worker keeps, sends and receives so that everybody ends up with what it needs (DynaTran 4.2).

Pure, and the same wherever it is computed: a worker finds its own part without asking anybody. What a worker needs and
has stays. The rest comes from those who have it: from the same node if any of them is there, cut evenly among them; in
device memory if it is, else from a snapshot in host memory. What nobody has is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elaunch.errors import StateError
from elaunch.workers.state.boxes import Box, intersect, n_elements, slabs, subtract, subtract_all
from elaunch.workers.state.space import Holdings, Item

CUT_BYTES = 256 << 10
"""A smaller piece comes from one source as a whole; the sources take turns."""

_MOST_NAMES = 8


@dataclass(frozen=True)
class Piece:
    """A box of an item on its way.

    Attributes:
        source, to: workers; the same one for what stays.
        snapshot: whether it is in the source's snapshot, in host memory.
    """

    item: str
    box: Box
    source: str
    to: str
    snapshot: bool = False


@dataclass(frozen=True)
class Routes:
    """One worker's part of a change. All in the same order on everybody: by item, then by receiver."""

    retain: tuple[Piece, ...]
    send: tuple[Piece, ...]
    receive: tuple[Piece, ...]


@dataclass(frozen=True)
class Missing:
    """Boxes that somebody needs and nobody has."""

    item: str
    boxes: tuple[Box, ...]


Sources = tuple[tuple[str, bool], ...]
"""Workers, and whether it is in their snapshot."""

Move = tuple[str, Box, Sources, int]
"""Receiver, box, who can send it, and where in this list the turn begins."""

Stay = tuple[str, Box, bool]
"""Worker, box, and whether it is in its snapshot."""

_Held = Mapping[str, tuple[Box, ...]]
_Solved = tuple[list[Stay], list[Move], list[Box]]


class Router:
    """Finds the routes from what is held to what is needed.

    Args:
        items: the space; what is held or needed of anything else is an error.
        before: by surviving worker, what it holds; like the others in the same order on everybody.
        after: by worker, what it needs.
        snapshots: by surviving worker, what it has in host memory besides.
        node_of: gives the node of a worker; default: what precedes the slash of its identity.

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
    ) -> None:
        self.items = items
        self._node_of = node_of or (lambda worker: worker.partition("/")[0])
        tables = [_by_item(held, items) for held in (before, after, snapshots or {})]
        self._before, self._after, self._snapshots = tables
        self._turns = {name: turn for turn, name in enumerate(items)}
        self._solved: dict[tuple[Any, ...], _Solved] = {}

    @property
    def needed(self) -> dict[str, Mapping[str, tuple[Box, ...]]]:
        """Items that somebody needs, in the order of the space, and by worker the boxes."""
        return {name: self._after[name] for name in self.items if name in self._after}

    def missing(self) -> tuple[Missing, ...]:
        """What somebody needs and nobody has, in the order of the space."""
        found = ((name, self._solve(name)[2]) for name in self.items if name in self._after)
        return tuple(Missing(name, tuple(boxes)) for name, boxes in found if boxes)

    def of(self, worker: str) -> Routes:
        """The part of one worker.

        Raises:
            StateError: names what nobody has.
        """
        missing = self.missing()
        if missing:
            names = ", ".join(one.item for one in missing[:_MOST_NAMES])
            more = f" and {len(missing) - _MOST_NAMES} more" if len(missing) > _MOST_NAMES else ""
            raise StateError(f"no surviving worker has all of {names}{more}; go on from the last checkpoint")
        retain: list[Piece] = []
        send: list[Piece] = []
        receive: list[Piece] = []
        for name in self.items:
            if name not in self._after or not self._concerns(name, worker):
                continue
            kept, moved, _ = self._solve(name)
            retain += [Piece(name, box, worker, worker, snapshot) for to, box, snapshot in kept if to == worker]
            for to, box, sources, first in moved:
                source, snapshot = sources[(first + self._turns[name]) % len(sources)]
                if worker in (source, to):
                    (receive if to == worker else send).append(Piece(name, box, source, to, snapshot))
        return Routes(tuple(retain), tuple(send), tuple(receive))

    def lonely(self, name: str, worker: str) -> list[Box]:
        """What `worker` holds of an item and will not hold, and only one worker will have, in whatever memory.

        Were `worker` to let go of it, the death of that one before the end of the change would lose it.
        """
        found: list[Box] = []
        after, snapshots = self._after.get(name, {}), self._snapshots.get(name, {})
        for held in self._before.get(name, {}).get(worker, ()):
            parts = subtract_all([held], (*after.get(worker, ()), *snapshots.get(worker, ())))
            for owner in dict.fromkeys((*after, *snapshots)):
                mine = (*after.get(owner, ()), *snapshots.get(owner, ()))
                here = [common for part in parts for box in mine if (common := intersect(part, box)) is not None]
                for other in (*after, *snapshots):
                    if other != owner and here:
                        here = subtract_all(here, (*after.get(other, ()), *snapshots.get(other, ())))
                found += subtract_all(here, found)
        return found

    def _concerns(self, name: str, worker: str) -> bool:
        return any(worker in table.get(name, ()) for table in (self._before, self._after, self._snapshots))

    def _solve(self, name: str) -> _Solved:
        """What stays, what moves and what is missing of an item; items that are alike are solved once."""
        item = self.items[name]
        before, after, snapshots = (table.get(name, {}) for table in (self._before, self._after, self._snapshots))
        geometry = (item.shape, item.element_bytes, *(tuple(held.items()) for held in (before, after, snapshots)))
        if geometry not in self._solved:
            self._solved[geometry] = _solved(item.element_bytes, before, after, snapshots, self._node_of)
        return self._solved[geometry]


def _by_item(held: Mapping[str, Holdings], items: Mapping[str, Item]) -> dict[str, dict[str, tuple[Box, ...]]]:
    found: dict[str, dict[str, tuple[Box, ...]]] = {}
    for worker, holdings in held.items():
        for name, boxes in holdings.items():
            if name not in items:
                raise StateError(f"{worker} has {name}, which is not in the space of {len(items)} items")
            found.setdefault(name, {})[worker] = tuple(boxes)
    return found


def _solved(
    element_bytes: int, before: _Held, after: _Held, snapshots: _Held, node_of: Callable[[str], str]
) -> _Solved:
    devices, hosts = _grouped(before, False), _grouped(snapshots, True)
    kept: list[Stay] = []
    moved: list[Move] = []
    missing: list[Box] = []
    turns: dict[tuple[Box, Sources], int] = {}
    for to, boxes in after.items():
        rest = list(boxes)
        # Its own snapshot, too, is nearer than any peer.
        for snapshot, own in ((False, before.get(to, ())), (True, snapshots.get(to, ()))):
            for box in own:
                kept += [(to, common, snapshot) for part in rest if (common := intersect(part, box)) is not None]
                rest = [left for part in rest for left in subtract(part, box)]
        for groups in (devices, hosts):
            rest = _taken(element_bytes, to, rest, groups, node_of, turns, moved)
        missing += subtract_all(rest, missing)
    return kept, moved, missing


def _taken(
    element_bytes: int,
    to: str,
    boxes: Sequence[Box],
    groups: Mapping[Box, Sources],
    node_of: Callable[[str], str],
    turns: dict[tuple[Box, Sources], int],
    moved: list[Move],
) -> list[Box]:
    """Add what `to` gets of `boxes` from these groups to `moved`; return what they do not have."""
    rest = [box for box in boxes if n_elements(box)]
    here = node_of(to)
    near = {box: tuple(one for one in sources if node_of(one[0]) == here) for box, sources in groups.items()}
    for box in sorted(groups, key=lambda box: not near[box]):
        sources = near[box] or groups[box]
        for part in rest:
            common = intersect(part, box)
            if common is None:
                continue
            first = turns.get((common, sources), 0)
            turns[common, sources] = first + 1
            n_parts = min(len(sources), max(1, n_elements(common) * element_bytes // CUT_BYTES))
            moved += [(to, slab, sources, first + number) for number, slab in enumerate(slabs(common, n_parts))]
        rest = [left for part in rest for left in subtract(part, box)]
        if not rest:
            break
    return rest


def _grouped(held: Mapping[str, tuple[Box, ...]], snapshot: bool) -> dict[Box, Sources]:
    """The distinct boxes and who holds each."""
    found: dict[Box, list[tuple[str, bool]]] = {}
    for worker, boxes in held.items():
        for box in boxes:
            found.setdefault(box, []).append((worker, snapshot))
    return {box: tuple(sources) for box, sources in found.items()}


def n_bytes(items: Mapping[str, Item], pieces: Sequence[Piece]) -> int:
    """Size of some pieces together."""
    return sum(n_elements(piece.box) * items[piece.item].element_bytes for piece in pieces)
