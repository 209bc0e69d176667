"""The constructors of plans."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.plan import (
    Pipeline,
    Plan,
    PlanError,
    Stage,
    n_rows,
    pipelines,
    share,
    stages,
    symmetric,
    unit_of,
)

repeatable = settings(deadline=None, derandomize=True)

WORKERS = [f"n{index}" for index in range(8)]


def rows_of(plan: Plan, worker: str) -> list[int]:
    return [n_rows(micro_batch) for index in plan.tiles_of(worker) for micro_batch in plan.tiles[index].micro_batches]


def test_a_symmetric_plan_places_workers_as_megatron_does() -> None:
    assert (
        str(symmetric(WORKERS, 5, 10, 2, dp=2, pp=2, tp=2))
        == """\
plan layers 5 batch 10 micro-batch 2 zero interleaved
layers 0:3 samples 0:6/2 workers n0,n1
layers 0:3 samples 6:10/2 workers n2,n3
layers 3:5 samples 0:6/2 workers n4,n5
layers 3:5 samples 6:10/2 workers n6,n7"""
    )


@repeatable
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 9), st.integers(1, 3))
def test_each_place_of_a_symmetric_plan_follows_from_the_rank(dp: int, pp: int, tp: int, extra: int, size: int) -> None:
    names = [f"n{rank}" for rank in range(dp * pp * tp)]
    n_layers, n_units = pp + extra, dp + extra
    plan = symmetric(names, n_layers, n_units * size, size, dp=dp, pp=pp, tp=tp, zero="contiguous")
    assert plan.workers == tuple(names)
    assert plan.zero == "contiguous"
    for rank, name in enumerate(names):
        (index,) = plan.tiles_of(name)
        tile = plan.tiles[index]
        assert tile.workers.index(name) == rank % tp
        assert tile.layers == share(n_layers, pp, rank // tp // dp)
        units = [unit_of(plan, micro_batch) for micro_batch in tile.micro_batches]
        assert units == list(share(n_units, dp, rank // tp % dp))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: symmetric(WORKERS, 8, 8, 1, dp=2, pp=2), r"dp 2 \* pp 2 \* tp 1 is 4, but there are 8 workers"),
        (lambda: symmetric(WORKERS, 8, 8, 1, dp=-2, pp=-4), "choose degrees of 1 or more"),
        (
            lambda: symmetric(WORKERS, 7, 8, 1, pp=8),
            "pp 8 stages need a layer each, but there are 7: make pp 7",
        ),
        (
            lambda: symmetric(WORKERS, 8, 12, 2, dp=8),
            "dp is 8, but a step has 6 micro-batches of 2 for them: make it 1 to 6, or micro_batch_size smaller",
        ),
        (
            lambda: symmetric(WORKERS, 8, 13, 2, dp=8),
            "dp is 8, but a step has 7 micro-batches of 2 for them: make it 1 to 7, or micro_batch_size smaller",
        ),
        (lambda: symmetric(["a", "a"], 2, 2, 1, tp=2), r"tile 0 \(a,a\) has worker a twice"),
        (lambda: pipelines(2, 4, 2, [Pipeline(range(1), ((range(2), ("a",)),))]), "samples 2:4 are done by nobody"),
        (lambda: pipelines(2, 4, 3, [Pipeline(range(1), ((range(2), ("a",)),))]), "samples 3:4 are done by nobody"),
        (lambda: stages(2, 4, 2, []), "the widest stage's number of replicas is 0"),
        (lambda: stages(2, 4, 2, [Stage(range(2), ((),))]), "no workers are left for layers 0:2"),
        (lambda: stages(2, 4, 2, [Stage(range(1), (("a",),))]), "layers 1:2 samples 0:4 are done by nobody"),
        (
            lambda: stages(2, 4, 2, [Stage(range(2), (("a",), ("b",)), (1,))]),
            r"layers 0:2 need a share of 0 or more for each of their 2 replicas, and one above 0; got \(1,\)",
        ),
        (lambda: stages(2, 4, 2, [Stage(range(2), (("a",),), (0,))]), r"got \(0,\)"),
        (lambda: stages(2, 4, 2, [Stage(range(2), (("a",), ("b",)), (2, -1))]), r"got \(2, -1\)"),
        (lambda: stages(2, 4, 2, [Stage(range(2), (("a",), ()), (2, 1))]), "must have share 0, got 1 for DP rank 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_what_would(make: Callable[[], Plan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


def crew(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple((name,) if name else () for name in names)


present_ranks = st.lists(st.booleans(), min_size=1, max_size=5).filter(any)


@repeatable
@given(first=present_ranks, second=present_ranks, extra=st.integers(0, 12), size=st.integers(1, 5))
def test_stages_level_the_rows_of_each_turn(first: list[bool], second: list[bool], extra: int, size: int) -> None:
    dp = max(len(first), len(second))
    n_units = dp + extra
    replicas = [
        crew(*(f"{name}{dp_rank}" * here for dp_rank, here in enumerate(present)))
        for name, present in (("a", first), ("b", second))
    ]
    plan = stages(2, n_units * size, size, [Stage(range(1), replicas[0]), Stage(range(1, 2), replicas[1])])
    for layer, row in enumerate(replicas):
        tiles = {tile.workers: tile for tile in plan.tiles if layer in tile.layers}
        here = [(dp_rank, tiles[workers]) for dp_rank, workers in enumerate(row) if workers]
        for turn in range(n_units // dp):
            sizes = [n_rows(tile.micro_batches[turn]) for _, tile in here]
            assert sum(sizes) == dp * size
            assert max(sizes) - min(sizes) <= 1
        for dp_rank, tile in here:
            units = share(n_units, dp, dp_rank)
            for unit, micro_batch in zip(units, tile.micro_batches):
                own = range(unit * size, (unit + 1) * size)
                assert list(chain(*micro_batch))[:size] == list(own)
            assert len(tile.micro_batches) <= -(-n_units // dp)
        if n_units % dp == 0:
            totals = [sum(map(n_rows, tile.micro_batches)) for _, tile in here]
            assert max(totals) - min(totals) <= 1


def test_a_stage_with_a_replica_at_every_dp_rank_does_whole_units() -> None:
    plan = stages(2, 24, 2, [Stage(range(1), crew("a", "b")), Stage(range(1, 2), crew("c", "d", "e"))])
    wide = [tile for tile in plan.tiles if 1 in tile.layers]
    assert [unit_of(plan, micro_batch) for tile in wide for micro_batch in tile.micro_batches] == list(range(12))


def test_in_a_short_last_turn_those_without_a_unit_take_the_rows_first() -> None:
    plan = stages(1, 8, 2, [Stage(range(1), crew("", "b", "c"))])
    # DP ranks: units 0 1, 2, 3. In turn 1 only the lost rank has a unit.
    assert rows_of(plan, "b") == [3, 1]
    assert rows_of(plan, "c") == [3, 1]
    plan = stages(1, 10, 2, [Stage(range(1), crew("a", "", "c"))])
    # DP ranks: units 0 1, 2 3, 4. In turn 1 a has unit 1; c takes the lost unit 3.
    assert rows_of(plan, "a") == [3, 2]
    assert rows_of(plan, "c") == [3, 2]


@repeatable
@given(st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any), st.integers(0, 20), st.integers(1, 4))
def test_rows_follow_the_shares_over_the_step(weights: list[int], extra: int, size: int) -> None:
    n_units = len(weights) + extra
    names = [f"a{dp_rank}" for dp_rank in range(len(weights))]
    plan = stages(1, n_units * size, size, [Stage(range(1), crew(*names), tuple(weights))])
    done = [sum(rows_of(plan, name)) for name in names]
    # Sainte-Laguë: no row would be better placed elsewhere, by (rows - half) / weight.
    for weight, rows in zip(weights, done):
        assert (rows == 0) if weight == 0 else True
        for other, others_rows in zip(weights, done):
            if weight and other:
                assert (2 * rows - 1) * other <= (2 * others_rows + 1) * weight
    assert set(plan.idle) == {name for name, rows in zip(names, done) if not rows}
    assert set(plan.workers) == set(names)


def test_equal_shares_are_as_good_as_none() -> None:
    replicas = crew("a", "b", "c")
    assert stages(1, 18, 2, [Stage(range(1), replicas, (3, 3, 3))]) == stages(1, 18, 2, [Stage(range(1), replicas)])


def test_a_replica_without_rows_in_a_turn_has_no_micro_batch_there() -> None:
    plan = stages(1, 8, 1, [Stage(range(1), crew("a", "b"), (7, 1))])
    assert rows_of(plan, "a") == [2, 2, 1, 2]
    assert rows_of(plan, "b") == [1]


def test_idle_members_are_passed_on() -> None:
    assert stages(1, 2, 1, [Stage(range(1), crew("a", "b"), (1, 0))], idle=("c",)).idle == ("b", "c")
    assert pipelines(1, 1, 1, [Pipeline(range(1), ((range(1), ("a",)),))], idle=["c"]).idle == ("c",)
