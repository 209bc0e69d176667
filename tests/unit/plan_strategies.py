"""Random plans for property tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from elaunch.plan import (
    MicroBatch,
    OptimizerLayout,
    Pipeline,
    Plan,
    Stage,
    Tile,
    n_rows,
    pipelines,
    stages,
    symmetric,
)
from elaunch.plan.tiling import ORDERS

LAYOUTS: tuple[OptimizerLayout, ...] = ("interleaved", "contiguous")


class _Most(NamedTuple):
    layers: int
    units: int
    workers: int
    tp: tuple[int, ...]
    unit_rows: int
    exact: bool = False


class _Sizes(NamedTuple):
    n_layers: int
    n_units: int
    unit_rows: int
    zero: OptimizerLayout
    short: int = 0
    """Rows that the last unit lacks."""

    @property
    def batch(self) -> int:
        return self.n_units * self.unit_rows - min(self.short, self.unit_rows - 1)


def valid_plans(
    max_layers: int = 6,
    max_units: int = 6,
    max_workers: int = 8,
    tp: Sequence[int] = (1,),
    max_unit_rows: int = 3,
    exact: bool = False,
) -> SearchStrategy[Plan]:
    """Valid plans of every kind: symmetric ones, pipelines of different depth, stages with different numbers of
    replicas, and tilings that nobody would choose: uneven rows, micro-batches of several runs in any order, workers
    with several tiles, idle workers. They ask for any order, may say what layers cost, and may defer weight gradients.

    `tp` holds the degrees of tensor parallelism that a tile may have; only the last kind mixes them in a plan, and then
    a worker may also have a tile of its own beside its group's. With `exact` all have as many layers, units and
    rows of a unit as is said. Without, the last unit may be shorter.
    """
    most = _Most(max_layers, max_units, max_workers, tuple(tp), max_unit_rows, exact)
    return st.one_of(_symmetric(most), _pipelines(most), _stages(most), _tilings(most)).flatmap(_with_any_order)


def well_formed_plans() -> SearchStrategy[Plan]:
    """Anything that has a text form, mostly nonsense."""
    run = st.builds(range, st.integers(0, 9), st.integers(0, 9))
    micro_batch = st.lists(run, min_size=1, max_size=3).map(tuple)
    worker = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"], exclude_characters=","), min_size=1)
    workers = st.lists(worker, max_size=3).map(tuple)
    tile = st.builds(Tile, run, st.lists(micro_batch, max_size=9).map(tuple), workers.filter(bool))
    size = st.integers(0, 9)
    tiles, costs = st.lists(tile, max_size=4).map(tuple), st.lists(size, max_size=9).map(tuple)
    orders = st.sampled_from(ORDERS)
    return st.builds(Plan, size, size, size, tiles, st.sampled_from(LAYOUTS), workers, orders, costs, size)


def _with_any_order(plan: Plan) -> SearchStrategy[Plan]:
    costs = st.lists(st.integers(0, 3), min_size=plan.n_layers, max_size=plan.n_layers).map(tuple)
    deferred = st.sampled_from([0, 0, 1, 3])
    return st.builds(
        replace, st.just(plan), order=st.sampled_from(ORDERS), costs=st.just(()) | costs, deferred=deferred
    )


@st.composite
def _symmetric(draw: DrawFn, most: _Most) -> Plan:
    tp = draw(st.sampled_from(most.tp))
    pp = draw(st.integers(1, min(most.layers, most.workers // tp)))
    dp = draw(st.integers(1, min(most.units, most.workers // tp // pp)))
    sizes = draw(_sizes(most, layers=pp, units=dp))
    names = _names(dp * pp * tp)
    return symmetric(names, sizes.n_layers, sizes.batch, sizes.unit_rows, dp=dp, pp=pp, tp=tp, zero=sizes.zero)


@st.composite
def _pipelines(draw: DrawFn, most: _Most) -> Plan:
    sizes, free = draw(_sizes(most)), draw(_tuples(most))
    parts = draw(_runs(sizes.n_units, most=len(free)))
    made = []
    for to_come, units in zip(reversed(range(len(parts))), parts):
        layers = draw(_runs(sizes.n_layers, most=len(free) - to_come))
        made.append(Pipeline(units, tuple((run, free.pop(0)) for run in layers)))
    idle = tuple(chain(*free))
    return pipelines(sizes.n_layers, sizes.batch, sizes.unit_rows, made, zero=sizes.zero, idle=idle)


@st.composite
def _stages(draw: DrawFn, most: _Most) -> Plan:
    sizes, free = draw(_sizes(most)), draw(_tuples(most))
    cut = draw(_runs(sizes.n_layers, most=len(free)))
    made = []
    for to_come, layers in zip(reversed(range(len(cut))), cut):
        n_replicas = draw(st.integers(1, min(sizes.n_units, len(free) - to_come)))
        replicas = [free.pop(0) for _ in range(n_replicas)]
        if n_replicas < sizes.n_units and draw(st.booleans()):
            replicas.insert(draw(st.integers(0, n_replicas)), ())
        shares = tuple(draw(st.integers(0, 5)) if workers else 0 for workers in replicas)
        made.append(Stage(layers, tuple(replicas), shares if any(shares) and draw(st.booleans()) else None))
    idle = tuple(chain(*free))
    return stages(sizes.n_layers, sizes.batch, sizes.unit_rows, made, zero=sizes.zero, idle=idle)


@st.composite
def _tilings(draw: DrawFn, most: _Most) -> Plan:
    """The rectangle cut again and again, along the layers or the samples."""
    sizes = draw(_sizes(most))
    parts: list[tuple[range, MicroBatch]] = [(range(sizes.n_layers), (range(sizes.batch),))]
    for _ in range(draw(st.integers(0, 2 * most.workers))):
        which = draw(st.integers(0, len(parts) - 1))
        layers, samples = parts[which]
        if len(layers) > 1 and (n_rows(samples) == 1 or draw(st.booleans())):
            at = draw(st.integers(1, len(layers) - 1))
            parts[which : which + 1] = [(layers[:at], samples), (layers[at:], samples)]
        else:
            # Every second piece is one part and the others the other, so both may be of many runs.
            pieces = draw(_pieces(samples))
            parts[which : which + 1] = [(layers, part) for part in (pieces[::2], pieces[1::2]) if part]
    pool = draw(_mixed_tuples(most))
    tiles = tuple(Tile(layers, draw(_micro_batches(samples)), draw(st.sampled_from(pool))) for layers, samples in parts)
    busy = {worker for tile in tiles for worker in tile.workers}
    idle = tuple(worker for worker in _names(most.workers) if worker not in busy)
    plan = Plan(sizes.n_layers, sizes.batch, sizes.unit_rows, tiles, sizes.zero, idle)
    plan.validate()
    return plan


def _sizes(most: _Most, layers: int = 1, units: int = 1) -> SearchStrategy[_Sizes]:
    zero = st.sampled_from(LAYOUTS)
    if most.exact:
        return zero.map(lambda layout: _Sizes(most.layers, most.units, most.unit_rows, layout))
    rows = st.integers(1, most.unit_rows)
    n_layers, n_units, short = st.integers(layers, most.layers), st.integers(units, most.units), st.integers(0, 2)
    return st.builds(_Sizes, n_layers, n_units, rows, zero, short)


@st.composite
def _runs(draw: DrawFn, size: int, most: int) -> list[range]:
    """0..size-1 in at most so many runs, none of them empty."""
    edges = draw(st.sets(st.integers(1, size - 1), max_size=most - 1)) if size > 1 else set()
    return [range(*ends) for ends in pairwise([0, *sorted(edges), size])]


@st.composite
def _pieces(draw: DrawFn, samples: MicroBatch) -> MicroBatch:
    return tuple(run[piece.start : piece.stop] for run in samples for piece in draw(_runs(len(run), most=len(run))))


@st.composite
def _micro_batches(draw: DrawFn, samples: MicroBatch) -> tuple[MicroBatch, ...]:
    """All of the samples in pieces, in any order, some of them together in one micro-batch."""
    pieces = draw(st.permutations(draw(_pieces(samples))))
    return tuple(tuple(pieces[run.start : run.stop]) for run in draw(_runs(len(pieces), most=len(pieces))))


def _tuples(most: _Most) -> SearchStrategy[list[tuple[str, ...]]]:
    """As many tensor-parallel groups of the same degree as there can be."""
    names = _names(most.workers)
    return st.sampled_from(most.tp).map(
        lambda tp: [tuple(names[first : first + tp]) for first in range(0, len(names) - len(names) % tp, tp)]
    )


@st.composite
def _mixed_tuples(draw: DrawFn, most: _Most) -> list[tuple[str, ...]]:
    free, found = _names(most.workers), list[tuple[str, ...]]()
    while degrees := [degree for degree in most.tp if degree <= len(free)]:
        tp = draw(st.sampled_from(degrees))
        found.append(tuple(free[:tp]))
        free = free[tp:]
        if tp > 1 and 1 in most.tp:
            found.append(found[-1][:1])
    return found


def _names(count: int) -> list[str]:
    return [f"n{index // 2}/{index % 2}#0" for index in range(count)]
