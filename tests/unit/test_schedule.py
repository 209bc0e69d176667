"""The order of a step: 1F1B where that is known, no deadlock and bounded memory everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elaunch.plan import Pipeline, Plan, Stage, Tile, pipelines, stages, symmetric
from elaunch.plan.components import components
from elaunch.plan.schedule import _board, _played_alone, _row_costs, _Run, in_flight_limits, in_parts, schedule
from elaunch.plan.tiling import Order
from elaunch.plan.timeline import Action, ActionPrice, Kind, by_workers, crews_of, timeline
from elaunch.plan.views import inputs, outputs
from tests.helpers import scaled
from tests.unit.plan_strategies import valid_plans


def one_f_one_b(stage: int, stages: int, n: int) -> list[str]:
    """The twin: what each stage of a pipeline does, from the definition of 1F1B."""
    warm_up = min(stages - 1 - stage, n)
    order = [f"F{i}" for i in range(warm_up)]
    for i in range(n - warm_up):
        order += [f"F{warm_up + i}", f"B{i}"]
    return order + [f"B{i}" for i in range(n - warm_up, n)]


@pytest.mark.parametrize(("depth", "units"), [(1, 3), (2, 4), (4, 8), (4, 2), (5, 5), (8, 24)])
def test_a_pipeline_does_1f1b(depth: int, units: int) -> None:
    plan = symmetric([f"w{i}" for i in range(depth)], depth, 2 * units, 2, pp=depth)
    order = schedule(plan).by_worker
    for stage in range(depth):
        assert [f"{action.kind}{action.micro_batch}" for action in order[f"w{stage}"]] == one_f_one_b(
            stage, depth, units
        )


def test_the_limits_of_a_pipeline_are_those_of_1f1b() -> None:
    assert in_flight_limits(symmetric(["a", "b", "c", "d"], 4, 16, 2, pp=4)) == (4, 3, 2, 1)


def test_a_stage_that_takes_several_micro_batches_at_once_gets_them() -> None:
    plan = Plan.parse(
        """plan layers 2 batch 16 micro-batch 2 zero interleaved
        layers 0:1 samples 0:16/2 workers a
        layers 1:2 samples 0:8 8:16 workers b"""
    )
    assert in_flight_limits(plan) == (5, 1)
    assert str(schedule(plan)).splitlines()[1] == "b F1.0 B1.0 F1.1 B1.1"


def test_two_tiles_of_a_worker_share_their_limit_where_they_share_layers() -> None:
    plan = Plan.parse(
        """plan layers 2 batch 8 micro-batch 1 zero interleaved
        layers 0:1 samples 0:6/1 workers a
        layers 0:1 samples 6:8/1 workers a
        layers 1:2 samples 0:8/1 workers b"""
    )
    assert most_in_flight(plan, schedule(plan).by_worker["a"], {0, 1}) == 2


def test_a_tensor_parallel_pair_has_one_order() -> None:
    order = schedule(symmetric(["a", "b", "c", "d"], 2, 8, 2, pp=2, tp=2)).by_worker
    assert order["a"] == order["b"]
    assert order["c"] == order["d"]


@settings(max_examples=scaled(50, 150), deadline=None)
@given(valid_plans(tp=(1, 2)))
def test_every_action_comes_once_and_after_those_that_it_needs(plan: Plan) -> None:
    order = schedule(plan)
    place = {action: number for number, action in enumerate(order.sequence)}
    kinds = ["FIW" if plan.deferred and tile.layers.start else "FB" for tile in plan.tiles]
    expected = {
        Action(kind, number, micro_batch)  # type: ignore[arg-type]
        for number, tile in enumerate(plan.tiles)
        for kind in kinds[number]
        for micro_batch in range(len(tile.micro_batches))
    }
    assert len(place) == len(order.sequence)
    assert place.keys() == expected
    for action in order.sequence:
        tile, micro_batch = action.tile, action.micro_batch
        if action.kind == "F":
            needs = [Action("F", feed.tile, feed.micro_batch) for feed in inputs(plan)[tile][micro_batch]]
        elif action.kind == "W":
            needs = [Action("I", tile, micro_batch)]
        else:
            feeds = outputs(plan)[tile][micro_batch]
            needs = [Action("I" if "I" in kinds[feed.tile] else "B", feed.tile, feed.micro_batch) for feed in feeds]
            needs.append(Action("F", tile, micro_batch))
        assert all(place[need] < place[action] for need in needs)
    for worker, actions in order.by_worker.items():
        assert list(actions) == sorted(actions, key=place.__getitem__)
        assert {action.tile for action in actions} == set(plan.tiles_of(worker))


def most_in_flight(plan: Plan, actions: Sequence[Action], tiles: set[int]) -> int:
    now = most = 0
    for action in actions:
        if action.tile in tiles:
            now += 1 if action.kind == "F" else -1
            most = max(most, now)
    return most


@pytest.mark.parametrize(("depth", "units"), [(2, 4), (4, 8), (4, 16), (8, 16)])
def test_the_step_of_a_pipeline_takes_as_long_as_the_closed_form_says(depth: int, units: int) -> None:
    # Chameleon eq. 9: (m + p - 1) times the forward and backward of a stage.
    plan = symmetric([f"w{i}" for i in range(depth)], depth, units, 1, pp=depth)
    found = timeline(plan, schedule(plan), lambda kind, tile, rows: 1.0 if kind == "F" else 2.0)
    assert found.step_s == 3.0 * (units + depth - 1)
    assert found.bubble == pytest.approx((depth - 1) / (units + depth - 1))


def test_transfers_lengthen_the_critical_path() -> None:
    plan = symmetric(["a", "b"], 2, 1, 1, pp=2)
    found = timeline(plan, schedule(plan), lambda kind, tile, rows: 1.0, lambda source, target, rows: 0.5)
    assert found.step_s == 5.0
    assert found.starts_s[Action("B", 0, 0)] == 4.0


@settings(max_examples=scaled(40, 100), deadline=None)
@given(valid_plans(tp=(1, 2)))
def test_a_timeline_starts_each_action_when_its_workers_and_its_rows_are_there(plan: Plan) -> None:
    def seconds(kind: Kind, tile: int, rows: int) -> float:
        return (1 if kind == "F" else 2) * rows + tile

    def told(source: int, target: int, rows: int) -> float:
        return 0.5 * rows + 0.25 * source + 0.125 * target

    order = schedule(plan)
    found = timeline(plan, order, seconds, told)
    ends: dict[Action, float] = {}
    busy = dict.fromkeys(plan.workers, 0.0)
    gives: dict[object, Action] = {(one.passes, one.tile, one.micro_batch): one for one in order.sequence}
    for action in order.sequence:
        kind, tile, number = action
        feeds = () if kind == "W" else (inputs if kind == "F" else outputs)(plan)[tile][number]
        ready = [
            ends[gives[action.passes, feed.tile, feed.micro_batch]] + told(feed.tile, tile, feed.n_rows)
            for feed in feeds
        ]
        before = [
            ends[other]
            for worker in plan.tiles[tile].workers
            for other in order.by_worker[worker]
            if other in ends
        ]  # fmt: skip
        assert found.starts_s[action] == max([0.0, *ready, *before])
        takes = seconds(kind, tile, sum(map(len, plan.tiles[tile].micro_batches[number])))
        ends[action] = found.starts_s[action] + takes
        for worker in plan.tiles[tile].workers:
            busy[worker] += takes
    assert found.ends_s == ends
    assert found.step_s == max(ends.values())
    assert found.busy_s == busy


def test_stages_of_unequal_length_start_forwards_first() -> None:
    """Backwards first would let the second stage run dry after every second micro-batch."""
    plan = stages(4, 32, 2, [Stage(range(3), (("a",), ("b",))), Stage(range(3, 4), (("c",), ()))])
    found = timeline(plan, schedule(plan), price(plan))
    assert found.step_s == on_one_order(plan, "F") < on_one_order(plan, "B")


def test_a_plan_may_ask_for_an_order() -> None:
    plan = stages(4, 32, 2, [Stage(range(3), (("a",), ("b",))), Stage(range(3, 4), (("c",), ()))])
    orders: dict[Order, Kind] = {"backward": "B", "forward": "F"}
    for order, first in orders.items():
        asked = replace(plan, order=order)
        assert schedule(asked).sequence == _Run(plan, first).play()[1]
        assert timeline(asked, schedule(asked), price(asked)).step_s == on_one_order(plan, first)


def test_an_order_is_made_for_what_the_layers_cost() -> None:
    """An embedding that takes no time, in the stage that lost a replica: without costs this stage seems the slowest."""
    cut = [Stage(range(2), (("a",), ())), *(Stage(range(n, n + 2), ((f"b{n}",), (f"c{n}",))) for n in (2, 4))]
    plan = stages(6, 48, 1, cut)
    told = replace(plan, costs=(0, 1, 1, 1, 1, 1))
    told_s, untold_s = (timeline(plan, schedule(one), price(told)).step_s for one in (told, plan))
    assert told_s < 0.6 * untold_s


def test_equal_costs_change_nothing() -> None:
    plan = stages(4, 32, 2, [Stage(range(3), (("a",), ("b",))), Stage(range(3, 4), (("c",), ()))])
    assert schedule(replace(plan, costs=(5,) * 4)) == schedule(plan)


def test_layers_may_cost_nothing() -> None:
    plan = replace(symmetric(["a", "b"], 2, 8, 2, pp=2), costs=(0, 0))
    assert len(schedule(plan).sequence) == 16


def price(plan: Plan) -> ActionPrice:
    costs = _row_costs(plan, plan.costs)

    def seconds(kind: Kind, tile: int, rows: int) -> float:
        return (2 if kind == "B" else 1) * costs[tile] * rows

    return seconds


def on_one_order(plan: Plan, first: Kind) -> int:
    return _Run(plan, first, plan.costs, plan.deferred).play()[0]


# All actions of a kind take equally long, but one worker has several tiles, and its order matters.
ALMOST_ALONE = Plan(
    3,
    2,
    2,
    tuple(
        Tile(range(layer, layer + 1), ((range(row, row + 1),),), ("b" if (layer, row) == (2, 1) else "a",))
        for layer in range(3)
        for row in range(2)
    ),
)


@settings(max_examples=scaled(40, 100), deadline=None)
@example(ALMOST_ALONE)
@given(valid_plans(tp=(1, 2)))
def test_the_order_that_is_asked_for_or_the_faster_one_is_taken_in_each_part(plan: Plan) -> None:
    found = timeline(plan, schedule(plan), price(plan))
    firsts: dict[str, tuple[Kind, ...]] = {"auto": ("B", "F"), "backward": ("B",), "forward": ("F",)}
    # On the clocks a worker may wait although it could begin; a timeline never does.
    assert found.step_s <= max(
        min(on_one_order(component.plan, first) for first in firsts[plan.order]) for component in components(plan)
    )


# -- deferred weight gradients --------------------------------------------------------------------------------------


def pipeline(depth: int, units: int, deferred: int) -> Plan:
    return replace(symmetric([f"w{i}" for i in range(depth)], depth, units, 1, pp=depth), deferred=deferred)


def test_a_plan_that_defers_weight_gradients_fills_its_bubble_with_them() -> None:
    """Two stages, by hand: of the bubble of 3, that of the last stage's first forward stays."""
    plan = pipeline(2, 4, 2)
    assert str(schedule(plan)).splitlines() == [
        "w0 F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "w1 F1.0 I1.0 F1.1 I1.1 F1.2 W1.0 I1.2 F1.3 W1.1 I1.3 W1.2 W1.3",
    ]
    assert timeline(plan, schedule(plan), price(plan)).step_s == 3 * 4 + 1


@pytest.mark.parametrize(("depth", "units"), [(2, 4), (4, 8), (4, 16), (8, 24)])
def test_a_third_of_the_bubble_of_1f1b_is_left_as_in_zero_bubble_h1(depth: int, units: int) -> None:
    """Zero Bubble, table 2, ZB-H1: (p - 1)(F + B - W), where 1F1B has (p - 1)(F + B + W)."""
    plan = pipeline(depth, units, depth)
    assert timeline(plan, schedule(plan), price(plan)).step_s == 3 * units + depth - 1


def test_micro_batches_of_a_lost_replica_go_into_the_bubbles() -> None:
    """ReCycle: the second of three stages has lost a replica, and its peer does 8 micro-batches instead of 4."""
    text = """plan layers 3 batch 8 micro-batch 1 zero interleaved
        layers 0:1 samples 0:4/1 workers a0
        layers 0:1 samples 4:8/1 workers b0
        layers 1:2 samples 0:8/1 workers a1
        layers 2:3 samples 0:4/1 workers a2
        layers 2:3 samples 4:8/1 workers b2"""
    plan = Plan.parse(text)
    coupled_s, deferred_s = (
        timeline(one, schedule(one), price(one)).step_s for one in (plan, replace(plan, deferred=8))
    )
    # The least that can be: its own 24, after the first forward of the stage before it and before that one's backward.
    assert deferred_s == 1 + 24
    assert coupled_s >= 28


@settings(max_examples=scaled(60, 300), deadline=None)
@given(valid_plans(tp=(1, 2)))
def test_deferring_makes_no_step_slower_on_its_clocks(plan: Plan) -> None:
    plan = replace(plan, order="auto")
    coupled = replace(plan, deferred=0)
    before = timeline(coupled, schedule(coupled), price(coupled))
    most = max(len(tile.micro_batches) for tile in plan.tiles)
    for deferred in (1, 2, most):
        found = replace(plan, deferred=deferred)
        took = timeline(found, schedule(found), price(found))
        assert took.step_s <= before.step_s
        assert took.busy_s == before.busy_s


FIRST: tuple[Kind, ...] = ("B", "F")


@settings(max_examples=scaled(40, 200), deadline=None)
@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 6))
def test_a_tile_keeps_as_few_micro_batches_as_its_limits_say(depth: int, units: int, deferred: int) -> None:
    plan = pipeline(depth, units, deferred)
    for first in FIRST:
        order = _Run(plan, first, (), deferred).play()[1]
        for tile, limit in enumerate(in_flight_limits(plan)):
            here = [action.kind for action in order if action.tile == tile]
            for place in range(len(here) + 1):
                so_far = here[:place]
                gone = so_far.count("W") + so_far.count("B")
                assert so_far.count("F") - gone <= limit + deferred
                if tile:
                    assert so_far.count("F") - so_far.count("I") <= limit
                    assert so_far.count("I") - so_far.count("W") <= deferred


@settings(max_examples=scaled(40, 100), deadline=None)
@given(valid_plans(tp=(1, 2)), st.data())
def test_in_two_parts_and_in_place_no_action_ends_later_whatever_it_costs(plan: Plan, data: st.DataObject) -> None:
    plan = replace(plan, deferred=0)
    seconds = st.floats(0, 5)
    costs = {tile: [data.draw(seconds) for _ in range(3)] for tile in range(len(plan.tiles))}

    def action_s(kind: Kind, tile: int, rows: int) -> float:
        forward_s, input_s, weights_s = costs[tile]
        return rows * {"F": forward_s, "B": input_s + weights_s, "I": input_s, "W": weights_s}[kind]

    def told_s(source: int, target: int, rows: int) -> float:
        return 0.5 * rows

    order = schedule(plan)
    before = timeline(plan, order, action_s, told_s)
    split = by_workers(plan, in_parts(plan, order.sequence))
    after = timeline(plan, split, action_s, told_s)
    for action, end_s in before.ends_s.items():
        now = action._replace(kind="W") if action._replace(kind="W") in after.ends_s else action
        assert after.ends_s[now if action.kind == "B" else action] <= end_s + 1e-9


# -- parts of a plan --------------------------------------------------------------------------------------------------


@settings(max_examples=scaled(40, 100), deadline=None)
@given(valid_plans(tp=(1, 2)))
def test_parts_share_neither_units_nor_workers(plan: Plan) -> None:
    found = components(plan)
    assert sorted(tile for component in found for tile in component.tiles) == list(range(len(plan.tiles)))
    seen: set[object] = set()
    for component in found:
        mine: set[object] = set(component.plan.workers)
        mine |= {
            sample // plan.micro_batch_size
            for t in component.plan.tiles
            for runs in t.micro_batches
            for run in runs
            for sample in run
        }
        assert seen.isdisjoint(mine)
        seen |= mine


def test_equal_pipelines_have_one_shape_and_unequal_ones_have_not() -> None:
    def plan(*cuts: int) -> Plan:
        made = [
            Pipeline(range(2 * n, 2 * n + 2), ((range(cut), (f"a{n}",)), (range(cut, 4), (f"b{n}",))))
            for n, cut in enumerate(cuts)
        ]
        return pipelines(4, 4 * len(cuts), 2, made)

    assert len({component.shape for component in components(plan(2, 2, 2))}) == 1
    assert len({component.shape for component in components(plan(2, 3, 2))}) == 2
    assert [str(order) for order in schedule(plan(2, 2)).by_worker["b1"]] == ["F3.0", "B3.0", "F3.1", "B3.1"]


@settings(max_examples=scaled(60, 300), deadline=None)
@given(valid_plans(tp=(1, 2)), st.sampled_from(FIRST))
def test_tiles_with_workers_of_their_own_are_played_as_any_others(plan: Plan, first: Kind) -> None:
    for component in components(plan):
        alone = len({worker for crew in crews_of(component.plan) for worker in crew}) == len(component.plan.tiles)
        assert _board(component.plan).alone == (alone and not _board(component.plan).shared)
        if _board(component.plan).alone:
            expected = _Run(component.plan, first, plan.costs).play()
            assert _played_alone(component.plan, first, plan.costs) == expected
