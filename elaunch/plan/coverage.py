"""Which tiles lie on which part of the rectangle layers × samples: what validation and drawings look at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from elaunch.plan.tiling import Plan, Tile


class Patch(NamedTuple):
    """Slots [start, stop) of a band of layers, and the indices of the tiles that cover them, ascending.

    No tile is a gap, several are an overlap; a tile that does the samples twice is there twice.
    """

    start: int
    stop: int
    tiles: tuple[int, ...]


def bands(plan: Plan) -> Iterator[tuple[range, tuple[Patch, ...]]]:
    """Returns the bands of layers in which no tile begins or ends, in order, each with its patches in sample order.

    The bands partition the layers and the patches of a band the samples; neighbouring patches have other tiles. What
    lies outside the rectangle is left out. Any plan will do, also an invalid one. The cost grows with the number of
    runs in each band, not with the number of samples.
    """
    inside = {edge for tile in plan.tiles for edge in (tile.layers.start, tile.layers.stop) if 0 < edge < plan.n_layers}
    # The stages of a pipeline mostly have the very same micro-batches.
    known = {id(tile.micro_batches): tile for tile in plan.tiles}
    joined = {key: tuple(runs_of(tile, plan.global_batch_size)) for key, tile in known.items()}
    runs = [joined[id(tile.micro_batches)] for tile in plan.tiles]
    for first, stop in pairwise(sorted({0, *inside, max(0, plan.n_layers)})):
        here = (i for i, tile in enumerate(plan.tiles) if tile.layers.start <= first and stop <= tile.layers.stop)
        boxes = ((start, end, index) for index in here for start, end in runs[index])
        yield range(first, stop), tuple(_patches(boxes, plan.global_batch_size))


def runs_of(tile: Tile, batch: int) -> Iterator[tuple[int, int]]:
    """Returns the runs of a tile inside the batch, with adjacent ones joined."""
    start = stop = 0
    for run in (run for micro_batch in tile.micro_batches for run in micro_batch if run):
        if run.start != stop:
            if start < stop:
                yield start, stop
            start = max(0, run.start)
        stop = min(batch, run.stop)
    if start < stop:
        yield start, stop


def _patches(boxes: Iterable[tuple[int, int, int]], batch: int) -> list[Patch]:
    """Sweeps over the samples and returns the patches; `boxes` are (start, stop, tile)."""
    edges = [(sample, tile, begins) for start, stop, tile in boxes for sample, begins in ((start, True), (stop, False))]
    patches: list[Patch] = []
    active: list[int] = []
    done = 0
    for sample, tile, begins in sorted([*edges, (batch, -1, True)]):
        if sample > done:
            tiles = tuple(sorted(active))
            start = patches.pop().start if patches and patches[-1].tiles == tiles else done
            patches.append(Patch(start, sample, tiles))
            done = sample
        if begins:
            active.append(tile)
        else:
            active.remove(tile)
    return patches
