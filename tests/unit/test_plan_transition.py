"""The plan of the step between two plans."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from elaunch.plan import Plan, symmetric
from elaunch.plan.schedule import schedule
from elaunch.plan.tiling import n_rows
from elaunch.plan.transition import transitional
from elaunch.plan.views import holders
from tests.helpers import scaled
from tests.unit.plan_strategies import valid_plans

W = ["a/0", "a/1", "b/0", "b/1"]


def members_of(*plans: Plan) -> tuple[str, ...]:
    return tuple(dict.fromkeys(worker for plan in plans for worker in plan.workers))


def test_a_layer_moves_in_the_middle_of_the_step() -> None:
    old = Plan.parse("plan layers 4 batch 8 micro-batch 1 zero interleaved\n"
                     "layers 0:2 samples 0:8/1 workers a\nlayers 2:4 samples 0:8/1 workers b")  # fmt: skip
    new = Plan.parse(str(old).replace("0:2", "0:1", 1).replace("2:4", "1:4"))
    between = transitional(old, new, ("a", "b"))
    assert str(between).splitlines() == [
        "plan layers 4 batch 8 micro-batch 1 zero interleaved",
        "layers 0:2 samples 0:4/1 workers a",
        "layers 2:4 samples 0:4/1 workers b",
        "layers 0:1 samples 4:8/1 workers a",
        "layers 1:4 samples 4:8/1 workers b",
    ]
    assert between is not None
    for worker in ("a", "b"):
        forwards = [action for action in schedule(between).by_worker[worker] if action.kind == "F"]
        samples = [between.tiles[one.tile].micro_batches[one.micro_batch][0].start for one in forwards]
        assert samples == list(range(8)), "what is done under the old plan comes first"


def test_who_joins_begins_with_the_second_half() -> None:
    old, new = symmetric(W[:1], 2, 8, 1), symmetric(W[:2], 2, 8, 1, dp=2)
    between = transitional(old, new, tuple(W))
    assert str(between).splitlines()[1:] == [
        "layers 0:2 samples 0:4/1 workers a/0",
        "layers 0:2 samples 4:8/1 workers a/1",
        "idle b/0,b/1",
    ]


def test_tuples_that_share_workers_have_no_step_between_them() -> None:
    assert transitional(symmetric(W, 2, 8, 1, dp=2, tp=2), symmetric(W, 2, 8, 1, tp=4), tuple(W)) is None


def test_a_single_micro_batch_is_done_under_the_new_plan() -> None:
    new = symmetric(W[1:2], 2, 2, 2)
    between = transitional(symmetric(W[:1], 2, 2, 2), new, tuple(W[:2]))
    assert between is not None
    assert between.tiles == new.tiles


@settings(max_examples=scaled(70, 200), deadline=None)
@given(st.data())
def test_every_slot_is_done_as_in_one_of_the_two(data: DataObject) -> None:
    plans = valid_plans(4, 4, 4, tp=(1, 2), max_unit_rows=3, exact=True)
    old, new = data.draw(plans), data.draw(plans)
    members = members_of(old, new)
    between = transitional(old, new, members)
    if between is None:
        shared = [{tile.workers for tile in plan.tiles if len(tile.workers) > 1} for plan in (old, new)]
        assert any(set(one) & set(other) and one != other for one in shared[0] for other in shared[1])
        return
    between.validate(members)
    for layer, tp_groups in enumerate(holders(new)):
        assert set(tp_groups) <= set(holders(between)[layer]), "an owner under the new plan holds the layer"
    rows = {plan: {(tile.layers, tile.workers): 0 for tile in plan.tiles} for plan in (old, new)}
    for tile in between.tiles:
        parts = [plan for plan in (old, new) if (tile.layers, tile.workers) in rows[plan]]
        assert parts, f"{tile} is of neither plan"
    total = sum(n_rows(runs) * len(tile.layers) for tile in between.tiles for runs in tile.micro_batches)
    assert total == old.n_layers * old.global_batch_size
