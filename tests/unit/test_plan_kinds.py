"""The asymmetric plans of the papers, as text that a reviewer can read."""

from __future__ import annotations

from itertools import chain

import pytest

from elaunch.plan import (
    Feed,
    GradientGroup,
    Pipeline,
    Plan,
    Stage,
    gradient_groups,
    holders,
    inputs,
    n_rows,
    pipelines,
    rounds,
    stages,
    symmetric,
)
from elaunch.plan.schedule import in_flight_limits

# ElasWave 4.1 and fig. 3: of three replicas one is lost; the others' micro-batches of 2 grow to 3.
RESIZED = """\
plan layers 8 batch 12 micro-batch 2 zero interleaved
layers 0:4 samples 0:2+4:5 2:4+6:7 workers a0
layers 0:4 samples 8:10+5:6 10:12+7:8 workers a2
layers 4:8 samples 0:4/2 workers b0
layers 4:8 samples 4:8/2 workers b1
layers 4:8 samples 8:12/2 workers b2"""

# ElasWave 4.2 and fig. 3: then the stage that lost a replica gives a layer to the next one.
RESIZED_AND_MOVED = RESIZED.replace("layers 0:4", "layers 0:3").replace("layers 4:8", "layers 3:8")

# Suika fig. 3: two more devices make a third replica of the second stage, which takes a layer from the first.
EXPANDED = """\
plan layers 8 batch 12 micro-batch 2 zero interleaved
layers 0:3 samples 0:2+8:9 2:4+10:11 workers n0/0#0,n0/1#0
layers 0:3 samples 4:6+9:10 6:8+11:12 workers n0/2#0,n0/3#0
layers 3:8 samples 0:4/2 workers n1/0#0,n1/1#0
layers 3:8 samples 4:8/2 workers n1/2#0,n1/3#0
layers 3:8 samples 8:12/2 workers n1/4#0,n1/5#0"""

# Chameleon fig. 4: one of two pipelines has lost a stage, so the cuts of the layers no longer meet.
UNEVEN_DEPTHS = """\
plan layers 12 batch 8 micro-batch 1 zero interleaved
layers 0:3 samples 0:5/1 workers p0
layers 3:6 samples 0:5/1 workers p1
layers 6:9 samples 0:5/1 workers p2
layers 9:12 samples 0:5/1 workers p3
layers 0:4 samples 5:8/1 workers q0
layers 4:8 samples 5:8/1 workers q1
layers 8:12 samples 5:8/1 workers q2"""

# ElasWave 6.2: while layer 3 moves from a to b, the early micro-batches meet it on a, the late ones on b.
IN_MIGRATION = """\
plan layers 6 batch 8 micro-batch 2 zero interleaved
layers 0:4 samples 0:4/2 workers a
layers 0:3 samples 4:8/2 workers a
layers 4:6 samples 0:4/2 workers b
layers 3:6 samples 4:8/2 workers b"""

# Each worker has two tiles, an early and a late one (interleaved stages of Megatron).
TWO_TILES_EACH = """\
plan layers 4 batch 4 micro-batch 1 zero contiguous
layers 0:1 samples 0:4/1 workers a
layers 1:2 samples 0:4/1 workers b
layers 2:3 samples 0:4/1 workers a
layers 3:4 samples 0:4/1 workers b"""

# ReCycle, Chameleon 4.A: p1 is lost, its micro-batches go whole to q1, which has the same layers.
REROUTED = """\
plan layers 4 batch 8 micro-batch 2 zero interleaved
layers 0:2 samples 0:4/2 workers p0
layers 0:2 samples 4:8/2 workers q0
layers 2:4 samples 4:6 0:2 6:8 2:4 workers q1
idle spare"""


def crew(*names: str) -> tuple[tuple[str, ...], ...]:
    return tuple((name,) if name else () for name in names)


@pytest.mark.parametrize(
    "text", [RESIZED, RESIZED_AND_MOVED, EXPANDED, UNEVEN_DEPTHS, IN_MIGRATION, TWO_TILES_EACH, REROUTED]
)
def test_each_kind_of_plan_is_valid_and_reads_back(text: str) -> None:
    plan = Plan.parse(text)
    plan.validate()
    assert str(plan) == text


def test_a_lost_replica_is_made_up_for_by_larger_micro_batches() -> None:
    below = crew("b0", "b1", "b2")
    plan = stages(8, 12, 2, [Stage(range(4), crew("a0", "", "a2")), Stage(range(4, 8), below)])
    assert str(plan) == RESIZED
    assert [n_rows(micro_batch) for tile in plan.tiles[:2] for micro_batch in tile.micro_batches] == [3, 3, 3, 3]
    assert inputs(plan)[3][0] == (Feed(0, 0, ((2, 0, 1),)), Feed(1, 0, ((2, 1, 1),)))
    moved = stages(8, 12, 2, [Stage(range(3), crew("a0", "", "a2")), Stage(range(3, 8), below)])
    assert str(moved) == RESIZED_AND_MOVED
    assert holders(moved)[3] == below


def test_a_stage_may_have_more_replicas_than_the_one_before() -> None:
    first = (("n0/0#0", "n0/1#0"), ("n0/2#0", "n0/3#0"))
    second = (("n1/0#0", "n1/1#0"), ("n1/2#0", "n1/3#0"), ("n1/4#0", "n1/5#0"))
    assert str(stages(8, 12, 2, [Stage(range(3), first), Stage(range(3, 8), second)])) == EXPANDED
    assert rounds(gradient_groups(Plan.parse(EXPANDED))) == ((0, 1),)


def test_pipelines_of_different_depth_need_six_reductions_in_two_rounds_instead_of_four_in_one() -> None:
    before = symmetric([f"{name}{stage}" for stage in range(4) for name in "pq"], 12, 8, 1, dp=2, pp=4)
    assert rounds(gradient_groups(before)) == ((0, 1, 2, 3),)
    long = Pipeline(range(5), tuple((range(3 * i, 3 * i + 3), (f"p{i}",)) for i in range(4)))
    short = Pipeline(range(5, 8), tuple((range(4 * i, 4 * i + 4), (f"q{i}",)) for i in range(3)))
    plan = pipelines(12, 8, 1, [long, short])
    assert str(plan) == UNEVEN_DEPTHS
    groups = gradient_groups(plan)
    assert [group.layers for group in groups] == [(0, 1, 2), (3,), (4, 5), (6, 7), (8,), (9, 10, 11)]
    assert groups[1] == GradientGroup((3,), (("p1",), ("q0",)))
    assert rounds(groups) == ((0, 2, 4), (1, 3, 5))
    assert in_flight_limits(plan) == (4, 3, 2, 1, 3, 2, 1)


def test_the_gradient_of_a_layer_in_migration_is_merged_from_both_of_its_holders() -> None:
    plan = Plan.parse(IN_MIGRATION)
    groups = gradient_groups(plan)
    assert groups == (
        GradientGroup((0, 1, 2), (("a",),)),
        GradientGroup((3,), (("a",), ("b",))),
        GradientGroup((4, 5), (("b",),)),
    )
    assert rounds(groups) == ((1,),)
    assert plan.tiles_of("a") == (0, 1)
    assert [feed.tile for feeds in inputs(plan)[3] for feed in feeds] == [1, 1]


def test_a_worker_may_feed_itself_through_another() -> None:
    plan = Plan.parse(TWO_TILES_EACH)
    assert in_flight_limits(plan) == (4, 3, 2, 1)
    assert [feeds[0].tile for feeds in chain(*(inputs(plan)[1:]))] == [0] * 4 + [1] * 4 + [2] * 4
    assert [group.layers for group in gradient_groups(plan)] == [(0, 2), (1, 3)]


def test_rerouted_micro_batches_stay_whole() -> None:
    plan = Plan.parse(REROUTED)
    assert [[feed.tile for feed in feeds] for feeds in inputs(plan)[2]] == [[1], [0], [1], [0]]
    assert all(feed.runs == ((0, 0, 2),) for feeds in inputs(plan)[2] for feed in feeds)
