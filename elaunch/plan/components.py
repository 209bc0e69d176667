"""The connected components of a plan: tiles that share no micro-batch and no worker, such as separate pipelines.

The order of a step and its price are found component by component, and once only for components that are alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from elaunch.plan.tiling import MicroBatch, Plan
from elaunch.plan.views import once_per_plan


@dataclass(frozen=True)
class Component:
    """Tiles that share neither micro-batches nor workers with any other tile.

    Attributes:
        plan: of these tiles alone; it does not cover all samples.
        tiles: their indices in the whole plan, ascending.
        shape: equal for components that differ only in who and which samples they are, in order.
    """

    plan: Plan
    tiles: tuple[int, ...]
    shape: Hashable


@once_per_plan
def components(plan: Plan) -> tuple[Component, ...]:
    """Returns the components of a valid plan, ordered by their first tile."""
    return tuple(_part(plan, tiles) for tiles in _apart(plan))


def _apart(plan: Plan) -> list[list[int]]:
    """Groups the tiles: tiles that share a unit or a worker are in the same list."""
    leader = list(range(len(plan.tiles)))
    first: dict[Hashable, int] = {}
    cuts: dict[int, int] = {}

    def find(tile: int) -> int:
        while (other := leader[tile]) != tile:
            leader[tile] = tile = leader[other]
        return tile

    def join(one: int, other: int) -> None:
        leader[find(one)] = find(other)

    size = plan.micro_batch_size
    for index, tile in enumerate(plan.tiles):
        for worker in tile.workers:
            if (before := first.setdefault(worker, index)) != index:
                join(index, before)
        # The stages of a pipeline mostly have the very same micro-batches.
        same = cuts.setdefault(id(tile.micro_batches), index)
        if same != index:
            join(index, same)
            continue
        for micro_batch in tile.micro_batches:
            for run in micro_batch:
                for unit in range(run.start // size, (run.stop - 1) // size + 1):
                    if (before := first.setdefault(unit, index)) != index:
                        join(index, before)
    found: dict[int, list[int]] = {}
    for index in range(len(plan.tiles)):
        found.setdefault(find(index), []).append(index)
    return list(found.values())


def _part(plan: Plan, tiles: Sequence[int]) -> Component:
    component = plan
    if plan.idle or len(tiles) < len(plan.tiles):
        # Else it keeps what was derived of it.
        component = replace(plan, tiles=tuple(plan.tiles[index] for index in tiles), idle=())
    size = plan.micro_batch_size
    cuts = {id(tile.micro_batches): tile.micro_batches for tile in component.tiles}
    units = {run.start // size for cut in cuts.values() for runs in cut for run in runs}
    # Units and workers count by their order only.
    first = {unit: place * size for place, unit in enumerate(sorted(units))}
    numbers = {worker: number for number, worker in enumerate(component.workers)}
    shapes: dict[Hashable, int] = {}
    kinds = {}
    for key, cut in cuts.items():
        shape = tuple(_shape(runs, first, size) for runs in cut)
        kinds[key] = shapes.setdefault(shape, len(shapes))
    here = tuple(
        (
            tile.layers.start,
            tile.layers.stop,
            tuple(numbers[worker] for worker in tile.workers),
            kinds[id(tile.micro_batches)],
        )
        for tile in component.tiles
    )
    return Component(component, tuple(tiles), (here, tuple(shapes)))


def _shape(runs: MicroBatch, first: Mapping[int, int], size: int) -> tuple[int, ...]:
    if len(runs) == 1:
        run = runs[0]
        return first[run.start // size] + run.start % size, len(run)
    return tuple(n for run in runs for n in (first[run.start // size] + run.start % size, len(run)))
