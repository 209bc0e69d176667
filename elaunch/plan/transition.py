"""The plan of the one step in which a job goes over from a plan to another without a pause (ElasWave 6.2).

The first micro-batches of the step are done under the old plan, the others under the new one. So whoever gets layers
has until its first micro-batch under the new plan to receive them, and until the end of the step for what the optimizer
keeps of them. The gradients of both parts are reduced together, as those of any tiling: what the old holders computed
is the paper's payback gradient.
"""

from __future__ import annotations

from dataclasses import replace

from elaunch.plan.tiling import MicroBatch, Plan, PlanError, Tile
from elaunch.plan.views import holders


def transitional(old: Plan, new: Plan, members: tuple[str, ...]) -> Plan | None:
    """Returns a plan between two; None if there is none, because tensor-parallel groups of both share only some
    workers.

    Each pipeline does the first half of its units under the old plan. A TP group that holds a layer under the new one
    holds it here. Order and costs are those of the new one.

    Args:
        old: valid.
        new: valid, for the same layers and samples.
        members: of the generation; those of both plans are among them.
    """
    early = _first_halves(old)
    while True:
        plan = _joined(old, new, early)
        homeless = _homeless(plan, new)
        if homeless is None:
            break
        early -= homeless
    plan = replace(plan, idle=tuple(member for member in members if not plan.tiles_of(member)))
    try:
        plan.validate(members)
    except PlanError:
        return None
    return plan


def _first_halves(plan: Plan) -> set[int]:
    """Returns the units that the tiles of the first layer do first."""
    found: set[int] = set()
    for tile in plan.tiles:
        if tile.layers.start == 0:
            units = list(dict.fromkeys(unit for runs in tile.micro_batches for unit in _units(plan, runs)))
            found.update(units[: len(units) // 2])
    return found


def _joined(old: Plan, new: Plan, early: set[int]) -> Plan:
    late = set(range(old.n_units)) - early
    found: dict[tuple[range, tuple[str, ...]], tuple[MicroBatch, ...]] = {}
    for plan, units in ((old, early), (new, late)):
        for tile in plan.tiles:
            micro_batches = tuple(some for runs in tile.micro_batches if (some := _within(plan, runs, units)))
            if micro_batches:
                key = tile.layers, tile.workers
                found[key] = (*found.get(key, ()), *micro_batches)
    return replace(new, tiles=tuple(Tile(layers, some, workers) for (layers, workers), some in found.items()), idle=())


def _homeless(plan: Plan, new: Plan) -> set[int] | None:
    """Returns the last units of a TP group that else would hold nothing of one of its layers; None if none does."""
    here = [set(tp_groups) for tp_groups in holders(plan)]
    for tile in new.tiles:
        if any(tile.workers not in here[layer] for layer in tile.layers):
            return set(_units(new, tile.micro_batches[-1]))
    return None


def _units(plan: Plan, runs: MicroBatch) -> list[int]:
    size = plan.micro_batch_size
    return [unit for run in runs for unit in range(run.start // size, -(-run.stop // size))]


def _within(plan: Plan, runs: MicroBatch, units: set[int]) -> MicroBatch:
    """Returns the rows of a micro-batch that belong to some units, with adjacent runs joined."""
    size = plan.micro_batch_size
    found: list[range] = []
    for run in runs:
        for unit in range(run.start // size, -(-run.stop // size)):
            if unit not in units:
                continue
            part = range(max(run.start, unit * size), min(run.stop, (unit + 1) * size))
            if found and found[-1].stop == part.start:
                found[-1] = range(found[-1].start, part.stop)
            else:
                found.append(part)
    return tuple(found)
