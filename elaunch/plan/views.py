"""What follows from a plan: who feeds whom, who reduces with whom, who owns which optimizer state.

All of these are pure functions of a *valid* plan. Those that look at the whole plan are computed once per plan object.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import accumulate, pairwise
from typing import TypeVar

from elaunch.plan.sums import Node, nodes
from elaunch.plan.tiling import MicroBatch, Plan, PlanError, Tile, n_rows

T = TypeVar("T")


@dataclass(frozen=True)
class Feed:
    """Activation rows between a micro-batch of one tile and one of the next layers' tiles.

    Attributes:
        tile: index of the tile at the other end.
        micro_batch: index of the micro-batch of that tile.
        runs: (first row in the source micro-batch, first row in the fed one, rows), in the order of the fed rows. It is
            the same at both ends, so it can be the layout of a message.
    """

    tile: int
    micro_batch: int
    runs: tuple[tuple[int, int, int], ...]

    @property
    def n_rows(self) -> int:
        """Returns the rows of all its runs together."""
        return sum(run[2] for run in self.runs)


Feeds = tuple[tuple[tuple[Feed, ...], ...], ...]
"""For [tile][micro-batch] its feeds."""

Ends = tuple[tuple[tuple[tuple[int, int, int], ...], ...], ...]
"""For [tile][micro-batch] the (tile, micro-batch, rows) of its feeds."""


@dataclass(frozen=True)
class GradientGroup:
    """Layers that are held by the same replicas, whose gradients are reduced together.

    Attributes:
        layers: ascending, not always next to each other.
        replicas: tensor-parallel groups; one alone needs no reduction.
    """

    layers: tuple[int, ...]
    replicas: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ShardRange:
    """Elements [start, stop) of a layer's flat vector, owned by replica `replica` of the holders of that layer."""

    replica: int
    start: int
    stop: int


def once_per_plan(view: Callable[[Plan], T]) -> Callable[[Plan], T]:
    """Caches a view beside the plan's fields, as `functools.cached_property` does: hashing a large plan is slow."""
    key = f"{view.__module__}.{view.__name__}"

    @wraps(view)
    def kept(plan: Plan) -> T:
        values = vars(plan)
        if key not in values:
            values[key] = view(plan)
        found: T = values[key]
        return found

    return kept


@once_per_plan
def inputs(plan: Plan) -> Feeds:
    """Returns [tile][micro-batch] -> the feeds that give its input rows, in row order; none for tiles that begin at
    layer 0.

    The `tile` of a feed is the one that does the layer before for those samples.
    """
    starts = {tile.layers.start for tile in plan.tiles}
    sources = {start: _samples_of_layer(plan, start - 1) for start in starts}
    return tuple(
        tuple(_feeds(sources[tile.layers.start], micro_batch) for micro_batch in tile.micro_batches)
        if tile.layers.start
        else ((),) * len(tile.micro_batches)
        for tile in plan.tiles
    )


@once_per_plan
def outputs(plan: Plan) -> Feeds:
    """Returns the reverse of `inputs`: [tile][micro-batch] -> the feeds that take its output rows; none at the model's
    end.

    The `tile` of a feed is the one that takes the rows. Feeds are ordered by their first row here, then by tile and
    micro-batch.
    """
    found: list[list[list[Feed]]] = [[[] for _ in tile.micro_batches] for tile in plan.tiles]
    for tile, by_micro_batch in enumerate(inputs(plan)):
        for micro_batch, feeds in enumerate(by_micro_batch):
            for feed in feeds:
                found[feed.tile][feed.micro_batch].append(Feed(tile, micro_batch, feed.runs))
    return tuple(tuple(tuple(sorted(feeds, key=_by_source_row)) for feeds in tile) for tile in found)


@once_per_plan
def rows_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Returns [tile][micro-batch] -> its number of rows."""
    # The stages of a pipeline mostly have the very same micro-batches.
    known = {id(tile.micro_batches): tuple(map(n_rows, tile.micro_batches)) for tile in plan.tiles}
    return tuple(known[id(tile.micro_batches)] for tile in plan.tiles)


@once_per_plan
def sources(plan: Plan) -> Ends:
    """Returns `inputs` without the places of the rows."""
    return _ends(plan)[0]


@once_per_plan
def takers(plan: Plan) -> Ends:
    """Returns `outputs` without the places of the rows."""
    return _ends(plan)[1]


@once_per_plan
def _ends(plan: Plan) -> tuple[Ends, Ends]:
    """Finds both together. Most micro-batches are fed by the same rows of the layers before, in one piece."""
    ending: dict[int, list[int]] = {}
    for index, tile in enumerate(plan.tiles):
        ending.setdefault(tile.layers.stop, []).append(index)
    rows = rows_of(plan)
    given: list[list[tuple[tuple[int, int, int], ...]]] = [[()] * len(some) for some in rows]
    # With the first row in the source before the end.
    taken: list[list[list[tuple[int, int, int, int]]]] = [[[] for _ in some] for some in rows]
    for start in dict.fromkeys(tile.layers.start for tile in plan.tiles if tile.layers.start):
        before = ending.get(start, [])
        whole = {id(plan.tiles[index].micro_batches): index for index in before}
        exact: dict[MicroBatch, tuple[int, int]] = {}
        samples: list[_Source] = []
        for index, tile in enumerate(plan.tiles):
            if tile.layers.start != start:
                continue
            source = whole.get(id(tile.micro_batches))
            if source is not None:
                for number, n in enumerate(rows[index]):
                    given[index][number] = ((source, number, n),)
                    taken[source][number].append((0, index, number, n))
                continue
            if not exact:
                exact = {
                    runs: (one, number) for one in before for number, runs in enumerate(plan.tiles[one].micro_batches)
                }
            for number, runs in enumerate(tile.micro_batches):
                found = exact.get(runs)
                if found is not None:
                    given[index][number] = ((*found, rows[index][number]),)
                    taken[found[0]][found[1]].append((0, index, number, rows[index][number]))
                    continue
                samples = samples or _samples_of_layer(plan, start - 1)
                feeds = _feeds(samples, runs)
                given[index][number] = tuple((feed.tile, feed.micro_batch, feed.n_rows) for feed in feeds)
                for feed in feeds:
                    first = min(run[0] for run in feed.runs)
                    taken[feed.tile][feed.micro_batch].append((first, index, number, feed.n_rows))
    takers = tuple(tuple(tuple(one[1:] for one in sorted(some)) for some in tile) for tile in taken)
    return tuple(map(tuple, given)), takers


@once_per_plan
def holders(plan: Plan) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Returns, for each layer, the distinct tensor-parallel groups that hold it, ordered by their first sample."""
    found: list[list[tuple[int, tuple[str, ...]]]] = [[] for _ in range(plan.n_layers)]
    first: dict[int, int] = {}
    for tile in plan.tiles:
        key = id(tile.micro_batches)
        if key not in first:
            first[key] = min(run.start for micro_batch in tile.micro_batches for run in micro_batch)
        for layer in tile.layers:
            found[layer].append((first[key], tile.workers))
    # Layers of one stage are held alike: the same object for all of them.
    known: dict[tuple[tuple[int, tuple[str, ...]], ...], tuple[tuple[str, ...], ...]] = {}
    alike = [tuple(of_layer) for of_layer in found]
    for here in dict.fromkeys(alike):
        known[here] = tuple(dict.fromkeys(workers for _, workers in sorted(here)))
    return tuple(known[here] for here in alike)


@once_per_plan
def gradient_groups(plan: Plan) -> tuple[GradientGroup, ...]:
    """Groups the layers by their holders (the same ones in the same order), ordered by first layer."""
    found: dict[tuple[tuple[str, ...], ...], list[int]] = {}
    for layer, replicas in enumerate(holders(plan)):
        found.setdefault(replicas, []).append(layer)
    return tuple(GradientGroup(tuple(layers), replicas) for replicas, layers in found.items())


def rounds(groups: Sequence[GradientGroup]) -> tuple[tuple[int, ...], ...]:
    """Puts the indices of the groups into rounds such that no worker has two reductions in the same round.

    Greedy colouring in the order of the groups (Chameleon IV-B): each goes to the first round without its workers. So
    there are at most d + 1 rounds if no group shares workers with more than d others. Groups of one replica need no
    reduction and are left out.
    """
    found: list[list[int]] = []
    busy: list[set[str]] = []
    for index, group in enumerate(groups):
        if len(group.replicas) < 2:
            continue
        workers = {worker for replica in group.replicas for worker in replica}
        at = next((number for number, taken in enumerate(busy) if taken.isdisjoint(workers)), len(busy))
        if at == len(busy):
            busy.append(set())
            found.append([])
        busy[at] |= workers
        found[at].append(index)
    return tuple(map(tuple, found))


def optimizer_shards(plan: Plan, elements: Sequence[int], align: int = 64) -> tuple[tuple[ShardRange, ...], ...]:
    """Returns, for each layer, who owns which optimizer state: disjoint, non-empty shards of its flat vector,
    ascending.

    interleaved: each layer is cut evenly over its holders, replica j owns the j-th cut (ElasWave 6.3).
    contiguous: the layers of a gradient group, one after the other, are cut evenly over its replicas; a shard may be a
    whole layer. It exists for comparison.

    Args:
        plan: a valid plan.
        elements: the length of each layer's flat vector.
        align: cuts inside a layer are multiples of it, in elements; the last shard of a layer takes what is left.

    Raises:
        PlanError: `elements` does not fit the plan, or `align` is not positive.
    """
    if len(elements) != plan.n_layers or min(elements) < 0 or align < 1:
        raise PlanError(
            f"expected {plan.n_layers} lengths of 0 or more, one per layer, and an align of 1 or more; "
            f"got the lengths {list(elements)} and align {align}"
        )
    found: list[tuple[ShardRange, ...]] = [()] * plan.n_layers
    for group in gradient_groups(plan):
        together = [group.layers] if plan.zero == "contiguous" else [(layer,) for layer in group.layers]
        for layers in together:
            for layer, shards in zip(layers, _cut([elements[la] for la in layers], len(group.replicas), align)):
                found[layer] = shards
    return tuple(found)


def rows_by_unit(plan: Plan, micro_batch: MicroBatch) -> tuple[tuple[int, range, int], ...]:
    """Returns the parts of units of which a micro-batch consists: (unit, rows inside it, first row in the micro-batch).

    In row order; parts of a unit that follow each other in both are put together.
    """
    size = plan.micro_batch_size
    found: list[tuple[int, range, int]] = []
    row = 0
    for run in micro_batch:
        for unit in range(run.start // size, -(-run.stop // size)):
            rows = range(max(run.start - unit * size, 0), min(run.stop - unit * size, size))
            if found and found[-1][0] == unit and found[-1][1].stop == rows.start:
                found[-1] = unit, range(found[-1][1].start, rows.stop), found[-1][2]
            else:
                found.append((unit, rows, row))
            row += len(rows)
    return tuple(found)


def units_of(plan: Plan, worker: str) -> range:
    """Returns the units of a worker that does a contiguous run of them, ascending; none if it is idle.

    Raises:
        PlanError: the worker is not in the plan, or does something else than such a run.
    """
    if worker not in plan.workers:
        raise PlanError(f"worker {worker!r} is not in this plan of {', '.join(plan.workers)}")
    runs = [run for tile in plan.tiles_of(worker) for rows in plan.tiles[tile].micro_batches for run in rows]
    if not runs:
        return range(0)
    size, start, stop = plan.micro_batch_size, runs[0].start, runs[-1].stop
    if any(one.stop != other.start for one, other in pairwise(runs)):
        raise PlanError(
            f"the samples {', '.join(f'{run.start}:{run.stop}' for run in runs)} of {worker} are not one run"
        )
    if start % size or (stop % size and stop != plan.global_batch_size):
        batch = plan.global_batch_size
        raise PlanError(
            f"samples {start}:{stop} of {worker} are not whole micro-batches of {size} in a batch of {batch}"
        )
    return range(start // size, -(-stop // size))


def shares_of(plan: Plan) -> dict[str, int]:
    """Returns, for each worker of a plan of one stage, how many units' rows it does."""
    return {
        worker: -(-sum(sum(rows_of(plan)[tile]) for tile in plan.tiles_of(worker)) // plan.micro_batch_size)
        for worker in plan.workers
    }


def unit_of(plan: Plan, micro_batch: MicroBatch) -> int | None:
    """Returns the unit whose rows, all and in order, a micro-batch has; None if it has any other rows."""
    parts = rows_by_unit(plan, micro_batch)
    return parts[0][0] if len(parts) == 1 and len(parts[0][1]) == len(plan.unit(parts[0][0])) else None


@once_per_plan
def tiles_by_group(plan: Plan) -> dict[tuple[str, ...], list[Tile]]:
    """Returns the tiles of each tensor-parallel group."""
    found: dict[tuple[str, ...], list[Tile]] = {}
    for tile in plan.tiles:
        found.setdefault(tile.workers, []).append(tile)
    return found


def partial_sums(plan: Plan, layer: int, tiles: Sequence[Tile], in_tree: bool) -> tuple[Node | None, ...]:
    """Returns the sums of a layer's gradient that are left of what these tiles add.

    Args:
        plan: of the tiles.
        layer: others than the tiles of this one add nothing.
        tiles: of one worker.
        in_tree: whether whole units are summed along one tree over all of them; else, and of other micro-batches, there
            is one sum, None.
    """
    units = [
        unit_of(plan, micro_batch) if in_tree else None
        for tile in tiles
        if layer in tile.layers
        for micro_batch in tile.micro_batches
    ]
    whole = nodes(plan.n_units, [unit for unit in units if unit is not None])
    return (*whole, None) if None in units else whole


_Source = tuple[int, int, int, int, int]
"""First sample, end, tile, micro-batch, and the row of the first sample in the micro-batch."""


def _samples_of_layer(plan: Plan, layer: int) -> list[_Source]:
    """Returns who does which samples of a layer, in their order; each comes once, because the plan is valid."""
    found: list[_Source] = []
    for index, tile in enumerate(plan.tiles):
        if layer not in tile.layers:
            continue
        for number, micro_batch in enumerate(tile.micro_batches):
            rows = accumulate(map(len, micro_batch), initial=0)
            found += [(run.start, run.stop, index, number, row) for run, row in zip(micro_batch, rows)]
    return sorted(found)


def _feeds(sources: list[_Source], micro_batch: MicroBatch) -> tuple[Feed, ...]:
    found: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    here = 0
    for run in micro_batch:
        sample = run.start
        at = bisect_right(sources, sample, key=lambda source: source[0]) - 1
        while sample < run.stop:
            start, stop, tile, number, row = sources[at]
            runs = found.setdefault((tile, number), [])
            there, n_rows = row + sample - start, min(stop, run.stop) - sample
            if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (there, here):
                runs[-1] = runs[-1][0], runs[-1][1], runs[-1][2] + n_rows
            else:
                runs.append((there, here, n_rows))
            sample, here, at = sample + n_rows, here + n_rows, at + 1
    return tuple(Feed(tile, number, tuple(runs)) for (tile, number), runs in found.items())


def _by_source_row(feed: Feed) -> tuple[int, int, int]:
    return min(run[0] for run in feed.runs), feed.tile, feed.micro_batch


def _cut(lengths: Sequence[int], n_replicas: int, align: int) -> Iterator[tuple[ShardRange, ...]]:
    """Yields the shards of each of these vectors, padded to `align` and joined, under an even cut of the whole."""
    ends = list(accumulate((-(-length // align) for length in lengths), initial=0))
    cuts = [replica * ends[-1] // n_replicas for replica in range(n_replicas + 1)]
    for length, (first, last) in zip(lengths, pairwise(ends)):
        edges = [min(length, (min(max(cut, first), last) - first) * align) for cut in cuts]
        yield tuple(ShardRange(replica, *ends) for replica, ends in enumerate(pairwise(edges)) if ends[0] < ends[1])
