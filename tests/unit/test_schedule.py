"""The order of a step: 1F1B where that is known, no deadlock and bounded memory everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings

from elaunch.plan import Pipeline, Plan, Stage, Tile, pipelines, stages, symmetric
from elaunch.plan.components import components
from elaunch.plan.schedule import (
    Action,
    ActionPrice,
    Kind,
    _row_costs,
    _Run,
    in_flight_limits,
    schedule,
    timeline,
)
from elaunch.plan.tiling import Order
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
    assert len(place) == len(order.sequence) == 2 * sum(len(tile.micro_batches) for tile in plan.tiles)
    for action in order.sequence:
        tile, micro_batch = action.tile, action.micro_batch
        if action.kind == "F":
            needs = [Action("F", feed.tile, feed.micro_batch) for feed in inputs(plan)[tile][micro_batch]]
        else:
            needs = [Action("B", feed.tile, feed.micro_batch) for feed in outputs(plan)[tile][micro_batch]]
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
    for action in order.sequence:
        kind, tile, number = action
        feeds = (inputs if kind == "F" else outputs)(plan)[tile][number]
        ready = [
            ends[Action(kind, feed.tile, feed.micro_batch)] + told(feed.tile, tile, sum(run[2] for run in feed.runs))
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
        return (1 if kind == "F" else 2) * costs[tile] * rows

    return seconds


def on_one_order(plan: Plan, first: Kind) -> int:
    return _Run(plan, first, plan.costs).play()[0]


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
