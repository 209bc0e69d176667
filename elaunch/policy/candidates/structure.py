"""What kind of plan a plan is, for policies that change it within its kind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import pairwise

from elaunch.plan.build import Stage
from elaunch.plan.shares import share
from elaunch.plan.tiling import Plan, PlanError, Tile
from elaunch.rendezvous.membership import by_node


class NotPossible(PlanError):
    """A policy has no plan for what has happened; the message says why."""


def stages_of(plan: Plan, lost: Collection[str] = ()) -> list[Stage]:
    """Returns the stages of a plan in which all pipelines cut the layers alike, each replica in its DP rank.

    Replicas with somebody lost are empty. A stage may have fewer replicas than DP ranks.

    Raises:
        NotPossible: the plan is of another kind.
    """
    gone = set(lost)
    found: dict[tuple[int, int], list[Tile]] = {}
    for tile in plan.tiles:
        found.setdefault((tile.layers.start, tile.layers.stop), []).append(tile)
    spans = sorted(found)
    if spans[0][0] != 0 or any(one[1] != other[0] for one, other in pairwise(spans)):
        raise NotPossible("its pipelines do not cut the layers at the same places")
    replicas = [{tile.workers for tile in tiles} for tiles in found.values()]
    if len(set().union(*replicas)) < sum(map(len, replicas)):
        raise NotPossible("a worker has layers of several stages")
    dp_size = max(map(len, replicas))
    stages = []
    done = _RowsDone(plan, dp_size)
    for span in spans:
        placed: list[tuple[str, ...]] = [()] * dp_size
        for dp_rank, workers in _by_dp_rank(found[span], done).items():
            placed[dp_rank] = workers if gone.isdisjoint(workers) else ()
        stages.append(Stage(range(*span), tuple(placed)))
    return stages


class _RowsDone:
    """How many rows of each DP rank a tile does, and which sample it does first."""

    def __init__(self, plan: Plan, dp_size: int) -> None:
        size = plan.micro_batch_size
        shares = [share(plan.n_units, dp_size, dp_rank) for dp_rank in range(dp_size)]
        self.dp_size = dp_size
        self._starts, self._ends = [units.start * size for units in shares], [units.stop * size for units in shares]
        self._known: dict[int, tuple[list[int], int]] = {}

    def of(self, tile: Tile) -> tuple[list[int], int]:
        """Returns both for a tile; the stages of a pipeline mostly have the very same micro-batches."""
        key = id(tile.micro_batches)
        if key not in self._known:
            rows = [0] * self.dp_size
            for run in (run for runs in tile.micro_batches for run in runs):
                for dp_rank in range(bisect_right(self._ends, run.start), self.dp_size):
                    start, stop = max(run.start, self._starts[dp_rank]), min(run.stop, self._ends[dp_rank])
                    if start >= stop:
                        break
                    rows[dp_rank] += stop - start
            self._known[key] = rows, min(run.start for runs in tile.micro_batches for run in runs)
        return self._known[key]


def _by_dp_rank(tiles: Sequence[Tile], done: _RowsDone) -> dict[int, tuple[str, ...]]:
    """Puts each TP group in the DP rank of which it does the most rows, as far as that is free."""
    rows: dict[tuple[str, ...], list[int]] = {}
    first: dict[tuple[str, ...], int] = {}
    for tile in tiles:
        here, begins = done.of(tile)
        before = rows.get(tile.workers)
        rows[tile.workers] = here if before is None else [one + other for one, other in zip(before, here, strict=True)]
        first[tile.workers] = min(first.get(tile.workers, begins), begins)
    most = {workers: max(some) for workers, some in rows.items()}
    found: dict[int, tuple[str, ...]] = {}
    for workers in sorted(rows, key=lambda workers: (-most[workers], first[workers])):
        best = rows[workers].index(most[workers])
        if best in found:
            free = [dp_rank for dp_rank in range(done.dp_size) if dp_rank not in found]
            best = max(free, key=lambda dp_rank: (rows[workers][dp_rank], -dp_rank))
        found[best] = workers
    return found


def width_of(plan: Plan) -> int:
    """Returns the number of workers of its tensor-parallel groups; the least, if they differ, with which `expand`
    began.
    """
    return min(len(tile.workers) for tile in plan.tiles)


def tp_groups_of(plan: Plan, members: Sequence[str], width: int = 0) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns the members in tensor-parallel groups of one width (0: that of the plan's), and those that are left over.

    TP groups of that width that are whole stay as they are; of the others' members new ones are made, each on one node.
    """
    width, here = width or width_of(plan), set(members)
    whole = [tile.workers for tile in plan.tiles if len(tile.workers) == width and here.issuperset(tile.workers)]
    found = list(dict.fromkeys(whole))
    taken = {worker for workers in found for worker in workers}
    rest: list[str] = []
    for some in by_node(worker for worker in members if worker not in taken).values():
        end = len(some) - len(some) % width
        found += [tuple(some[place : place + width]) for place in range(0, end, width)]
        rest += some[end:]
    return found, rest
