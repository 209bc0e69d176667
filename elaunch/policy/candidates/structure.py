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
    for span in spans:
        placed: list[tuple[str, ...]] = [()] * dp_size
        for dp_rank, workers in _by_dp_rank(plan, found[span], dp_size).items():
            placed[dp_rank] = workers if gone.isdisjoint(workers) else ()
        stages.append(Stage(range(*span), tuple(placed)))
    return stages


def _by_dp_rank(plan: Plan, tiles: Sequence[Tile], dp_size: int) -> dict[int, tuple[str, ...]]:
    """Puts each TP group in the DP rank of which it does the most rows, as far as that is free."""
    rows: dict[tuple[str, ...], list[int]] = {}
    first: dict[tuple[str, ...], int] = {}
    size = plan.micro_batch_size
    shares = [share(plan.n_units, dp_size, dp_rank) for dp_rank in range(dp_size)]
    ends = [units.stop * size for units in shares]
    for tile in tiles:
        done = rows.setdefault(tile.workers, [0] * dp_size)
        for run in (run for runs in tile.micro_batches for run in runs):
            first[tile.workers] = min(first.get(tile.workers, run.start), run.start)
            for dp_rank in range(bisect_right(ends, run.start), dp_size):
                start, stop = max(run.start, shares[dp_rank].start * size), min(run.stop, ends[dp_rank])
                if start >= stop:
                    break
                done[dp_rank] += stop - start
    found: dict[int, tuple[str, ...]] = {}
    for workers in sorted(rows, key=lambda workers: (-max(rows[workers]), first[workers])):
        free = [dp_rank for dp_rank in range(dp_size) if dp_rank not in found]
        found[max(free, key=lambda dp_rank: (rows[workers][dp_rank], -dp_rank))] = workers
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
