"""What Suika decides, case by case, and what it says about it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from elaunch.errors import UsageError
from elaunch.scheduler.model import Allocation, ClusterNode, Growth, JobState, Reason, devices_of
from elaunch.scheduler.settings import SuikaSettings
from elaunch.scheduler.speeds import MoveCost, TableSpeed
from elaunch.scheduler.suika import Suika
from tests.unit.scheduler_worlds import World

FREE = SuikaSettings(horizon_s=math.inf)


def scaling(exponent: float, cost_s: float = 0.0) -> TableSpeed:
    return TableSpeed({n: n**exponent for n in range(1, 65)}, MoveCost(cost_s))


def cluster(*sizes: int, racks: Sequence[str] = (), kinds: Sequence[str] = ()) -> World:
    return World(
        [
            ClusterNode(f"n{place}", size, kinds[place] if kinds else "", racks[place] if racks else "")
            for place, size in enumerate(sizes)
        ]
    )


def running(name: str, base: Allocation, *growths: Growth, most: int = 64, **more: object) -> JobState:
    job = JobState(name, 0.0, devices_of(base), most, started_s=0.0, base=base, growths=growths)
    return replace(job, **more)  # type: ignore[arg-type]


def run(world: World, settings: SuikaSettings = FREE) -> Mapping[str, Reason]:
    """Decides, carries it out and returns the reasons by job."""
    found = world.decide(Suika(settings))
    world.carry_out(found)
    return {reason.job: reason for reason in found.reasons}


def held(world: World) -> dict[str, int]:
    return {name: devices_of(job.allocation) for name, job in world.jobs.items()}


def test_what_is_free_goes_where_it_is_of_most_use_until_the_threshold() -> None:
    """U is 4/16; the second growth of b is below it, if the exponent is small enough."""
    world = cluster(8, 8)
    world.jobs = {"a": running("a", {"n0": 2}, most=6), "b": running("b", {"n1": 2})}
    world.speeds = {"a": scaling(0.9), "b": scaling(0.4)}
    said = run(world)
    assert held(world)["a"] == 6
    benefits = [growth.benefit for growth in world.jobs["b"].growths]
    assert all(benefit >= 0.25 - 1e-9 for benefit in benefits)
    n = held(world)["b"]
    rate = scaling(0.4).rate
    assert n == 10 or n / 1 * (rate({"": n + 1}) - rate({"": n})) / rate({"": n}) < 0.25
    assert said["a"].action == "grow"
    assert said["a"].text.startswith("grows from 2 to 6 devices (n0: 6): marginal benefit 0.")
    assert "threshold 0.25 at a load of 25%" in said["a"].text
    assert said["a"].benefit == min(growth.benefit for growth in world.jobs["a"].growths)


def test_a_new_job_takes_back_the_growth_of_least_benefit_and_no_other() -> None:
    world = cluster(8)
    world.jobs = {
        "good": running("good", {"n0": 2}, Growth({"n0": 2}, 0.9, 1.0)),
        "bad": running("bad", {"n0": 2}, Growth({"n0": 2}, 0.5, 2.0)),
        "new": JobState("new", 5.0, 2, 2),
    }
    world.speeds = {"good": scaling(0.95), "bad": scaling(0.8)}
    world.now_s = 10.0
    said = run(world)
    assert held(world) == {"good": 4, "bad": 2, "new": 2}
    assert said["new"].text == "starts on 2 devices (n0: 2) after 5 s"
    assert said["bad"].text == "shrinks from 4 to 2 devices (n0: 2): job new needs 2 devices"
    assert said["bad"].benefit == 0.5
    assert set(said) == {"new", "bad"}


def test_growths_are_taken_back_when_the_load_makes_them_too_poor() -> None:
    world = cluster(8, 8)
    poor = running("poor", {"n0": 2}, Growth({"n0": 2}, 0.4, 0.0), most=4)
    world.jobs = {"poor": poor}
    world.speeds = {"poor": scaling(0.5)}
    assert run(world) == {}  # U = 2/16
    world.jobs["other"] = JobState("other", 0.0, 8, 8)
    said = run(world)
    assert said["poor"].action == "shrink"
    assert said["poor"].text.endswith("2 devices have a marginal benefit of 0.414, below the threshold 0.625")
    # A greater lambda makes the threshold lower.
    world.jobs["poor"] = poor
    assert run(world, replace(FREE, aggressiveness=4.0)) == {}


def test_devices_of_the_own_node_come_first_then_of_the_rack() -> None:
    world = cluster(2, 2, 2, 2, racks=["r", "s", "r", "s"])
    world.jobs = {"a": running("a", {"n2": 1})}
    world.speeds = {"a": TableSpeed({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})}
    run(world)
    assert dict(world.jobs["a"].allocation) == {"n2": 2, "n0": 2}


def test_slower_devices_count_less() -> None:
    """Twice as many devices that are half as fast give a benefit of 1 if the job scales."""
    world = cluster(2, 4, kinds=["fast", "slow"])
    world.jobs = {"a": running("a", {"n0": 2})}
    world.speeds = {"a": TableSpeed({n: float(n) for n in range(1, 7)}, weights={"n1": 0.5})}
    said = run(world, replace(FREE, tflops={"fast": 2.0, "slow": 1.0}))
    assert held(world) == {"a": 6}
    assert said["a"].benefit == pytest.approx(1.0)
    # By the number of devices it would be 0.5; the threshold is 1/3 then, so it would grow, too.
    world.jobs = {"a": running("a", {"n0": 2})}
    assert run(world)["a"].benefit == pytest.approx(0.5)


def test_units_and_whole_nodes_stay_whole() -> None:
    world = cluster(4, 4, 4, 3)
    world.jobs = {
        "units": running("units", {"n0": 2}, unit=2, most=6),
        "nodes": running("nodes", {"n1": 4}, unit=4, whole_nodes=True, most=8),
        "one": running("one", {"n3": 1}, most=1),
    }
    world.speeds = {name: TableSpeed({n: float(n) for n in range(1, 20)}) for name in ("units", "nodes")}
    run(world)
    assert dict(world.jobs["nodes"].allocation) == {"n1": 4, "n2": 4}
    assert dict(world.jobs["units"].allocation) == {"n0": 4, "n3": 2}


def test_a_growth_that_does_not_pay_for_its_change_is_not_made() -> None:
    """From 2 to 4 devices by n**0.5: 0.41 times as fast, so over 100 s it makes up for 29 s."""
    world = cluster(4)
    for cost_s, left_s, grows in ((28.0, None, True), (30.0, None, False), (28.0, 50.0, False), (5.0, 50.0, True)):
        world.jobs = {"a": running("a", {"n0": 2}, left_s=left_s, unit=2)}
        world.speeds = {"a": scaling(0.5, cost_s)}
        said = run(world, SuikaSettings(aggressiveness=2.0, horizon_s=100.0))
        assert bool(said) == grows, (cost_s, left_s)
        if grows:
            assert f"the change costs {cost_s:.3g} s" in said["a"].text


def test_several_growths_at_once_pay_for_one_change() -> None:
    world = cluster(8)
    world.jobs = {"a": running("a", {"n0": 2})}
    world.speeds = {"a": scaling(0.8, 10.0)}
    run(world, SuikaSettings(aggressiveness=2.0, horizon_s=100.0))
    assert len(world.jobs["a"].growths) > 1
    assert held(world) == {"a": 8}


def test_who_is_frozen_on_the_way_at_rest_or_without_a_speed_does_not_grow() -> None:
    for more, settings, known in (
        ({"frozen": "does not shrink"}, FREE, True),
        ({"settling": True}, FREE, True),
        ({"changed_s": -5.0}, replace(FREE, rest_s=10.0), True),
        ({}, FREE, False),
    ):
        world = cluster(4)
        world.jobs = {"a": running("a", {"n0": 2}, **more)}
        world.speeds = {"a": scaling(1.0)} if known else {}
        assert run(world, settings) == {}
    world.speeds = {"a": scaling(1.0)}
    assert run(world)["a"].action == "grow"


def test_the_queue_goes_by_priority_then_by_arrival_or_by_length() -> None:
    world = cluster(2)
    world.jobs = {
        "long": JobState("long", 0.0, 2, 2, left_s=100.0),
        "short": JobState("short", 1.0, 2, 2, left_s=10.0),
        "urgent": JobState("urgent", 2.0, 2, 2, priority=1, left_s=1000.0),
    }
    world.now_s = 10.0
    waiting = dict(world.jobs)
    assert run(world)["urgent"].action == "start"
    del waiting["urgent"]
    for queue, first in (("fifo", "long"), ("sjf", "short")):
        world.jobs = dict(waiting)
        said = run(world, replace(FREE, queue=queue))  # type: ignore[arg-type]
        assert [name for name, reason in said.items() if reason.action == "start"] == [first]


def test_waiting_raises_the_priority() -> None:
    world = cluster(2)
    world.now_s = 250.0
    jobs = {"old": JobState("old", 0.0, 2, 2), "urgent": JobState("urgent", 250.0, 2, 2, priority=1)}
    for aging_s, first in ((300.0, "urgent"), (100.0, "old")):
        world.jobs = dict(jobs)
        run(world, replace(FREE, aging_s=aging_s))
        assert world.running() == {first}


def test_jobs_start_before_one_that_does_not_fit_only_for_as_long_as_permitted() -> None:
    world = cluster(4)
    jobs = {"a": running("a", {"n0": 2}), "large": JobState("large", 0.0, 4, 4), "small": JobState("small", 1.0, 1, 1)}
    world.now_s = 10.0
    world.jobs = dict(jobs)
    said = run(world)
    assert said["small"].text == "waits for 1 device behind large"
    assert said["large"].text.startswith("waits for 4 devices: 2 are free, and what jobs have beyond their basic")
    world.jobs = dict(jobs)
    assert run(world, replace(FREE, backfill_s=60.0))["small"].action == "start"
    # Who could never start keeps nobody waiting.
    world.jobs = {**jobs, "large": JobState("large", 0.0, 5, 5, kinds=("h100",))}
    said = run(world)
    assert said["small"].action == "start"
    assert said["large"].text.startswith("waits for 5 devices of kind h100: all nodes that can be used are too few")


def test_a_user_has_no_more_than_the_quota() -> None:
    world = cluster(8)
    world.jobs = {
        "a": running("a", {"n0": 2}, Growth({"n0": 2}, 1.0, 0.0), user="ann"),
        "b": JobState("b", 0.0, 2, 8, user="ann"),
        "c": JobState("c", 0.0, 2, 2, user="ann"),
        "d": JobState("d", 1.0, 2, 2, user="bob"),
    }
    world.speeds = {"a": scaling(0.99), "b": scaling(0.99)}
    said = run(world, replace(FREE, quotas={"ann": 4}))
    assert held(world) == {"a": 2, "b": 2, "c": 0, "d": 2}
    assert said["c"].text == "waits for 2 devices: user ann has 4 of a quota of 4 devices"
    assert "user ann has a quota of 4 devices" in said["a"].text
    assert run(world, replace(FREE, quotas={"ann": 5}))["c"].action == "wait"
    assert held(world)["a"] + held(world)["b"] == 5


def test_a_node_that_is_drained_loses_growths_and_its_jobs_move() -> None:
    world = cluster(2, 2, 2)
    world.jobs = {"a": running("a", {"n0": 2}, Growth({"n1": 2}, 1.0, 0.0), most=4)}
    world.speeds = {"a": scaling(1.0)}
    world.nodes[1] = replace(world.nodes[1], usable=False)
    said = run(world)
    assert dict(world.jobs["a"].allocation) == {"n0": 2, "n2": 2}
    assert said["a"].action == "move"
    assert "n1 cannot be used" in said["a"].text
    # What it has beyond its basic demand becomes its basic demand: nothing else moves.
    world.nodes[0] = replace(world.nodes[0], usable=False)
    said = run(world)
    assert world.jobs["a"].base == {"n2": 2}
    assert said["a"].text.startswith("shrinks from 4 to 2 devices (n2: 2): n0 cannot be used")
    world.nodes[2] = replace(world.nodes[2], usable=False)
    said = run(world)
    assert said["a"].action == "stop"
    assert "n2 cannot be used" in said["a"].text
    assert not world.jobs["a"].running
    world.nodes[1] = replace(world.nodes[1], usable=True)
    assert run(world)["a"].action == "start"


def test_a_part_of_a_basic_demand_that_is_lost_is_replaced_nearby_or_taken_from_growths() -> None:
    world = cluster(2, 2, 2, 2, racks=["r", "s", "r", "s"])
    world.jobs = {
        "a": running("a", {"n0": 2, "n1": 2}, most=4),
        "b": running("b", {"n3": 1}, Growth({"n2": 2}, 1.0, 0.0), Growth({"n3": 1}, 0.9, 0.0)),
    }
    world.speeds = {"b": scaling(1.0)}
    world.nodes[1] = replace(world.nodes[1], usable=False)
    said = run(world)
    assert dict(world.jobs["a"].base) == {"n0": 2, "n2": 2}
    assert said["a"].action == "move"
    assert said["b"].action == "shrink"
    assert "job a needs 4 devices" in said["b"].text


def test_devices_that_have_broken_are_taken_from_growths_first() -> None:
    world = cluster(4)
    world.jobs = {
        "a": running("a", {"n0": 2}, Growth({"n0": 1}, 0.9, 0.0)),
        "b": running("b", {"n0": 1}, started_s=1.0),
    }
    world.nodes = [ClusterNode("n0", 3)]
    said = run(world)
    assert held(world) == {"a": 2, "b": 1}
    assert "n0 has only 3 devices" in said["a"].text
    world.nodes = [ClusterNode("n0", 2)]
    said = run(world)
    assert held(world) == {"a": 2, "b": 0}
    assert said["b"].action == "stop"


def test_lower_priority_stops_only_where_that_is_permitted() -> None:
    world = cluster(4)
    jobs = {
        "low": running("low", {"n0": 2}, started_s=1.0),
        "lower": running("lower", {"n0": 2}, priority=-1),
        "high": JobState("high", 5.0, 2, 2, priority=3),
    }
    world.jobs = dict(jobs)
    assert {name: reason.action for name, reason in run(world).items()} == {"high": "wait"}
    world.jobs = dict(jobs)
    said = run(world, replace(FREE, preempt=True))
    assert {name: reason.action for name, reason in said.items()} == {"high": "start", "lower": "stop"}
    assert "job high needs 2 devices and has priority 3 over -1" in said["lower"].text
    world.jobs = {**jobs, "high": replace(jobs["high"], priority=-1)}
    assert run(world, replace(FREE, preempt=True))["high"].action == "wait"


def test_jobs_move_together_for_one_that_needs_whole_nodes() -> None:
    world = cluster(4, 4, 4)
    world.jobs = {
        "a": running("a", {"n0": 2}),
        "b": running("b", {"n1": 1}),
        "c": running("c", {"n2": 3}),
        "whole": JobState("whole", 5.0, 4, 4, whole_nodes=True),
    }
    jobs = dict(world.jobs)
    said = run(world)
    assert world.jobs["whole"].base == {"n1": 4}
    assert said["b"].action == "move"
    assert "job whole needs 4 devices that lie together" in said["b"].text
    assert set(said) == {"b", "whole"}
    world.jobs = dict(jobs)
    assert run(world, replace(FREE, most_moved=0))["whole"].action == "wait"
    # Who is on the way stays.
    world.jobs = {name: replace(job, settling=job.running) for name, job in jobs.items()}
    assert run(world)["whole"].action == "wait"


def test_room_that_a_move_makes_goes_to_the_first_in_the_queue() -> None:
    """It cannot move others for its whole node; one behind it can, for two devices, and would have to stop at once."""
    world = cluster(4, 1, 1, 1, 4)
    world.nodes[0] = replace(world.nodes[0], usable=False)
    world.jobs = {
        "whole": running("whole", {"n0": 4}, whole_nodes=True, priority=1),
        "moves": running("moves", {"n4": 3}, most=3, priority=1),
        "pair": JobState("pair", 0.0, 2, 2, unit=2),
    }
    settings = replace(FREE, preempt=True, backfill_s=math.inf)
    said = run(world, settings)
    assert world.jobs["whole"].base == {"n4": 4}
    assert world.jobs["moves"].base == {"n1": 1, "n2": 1, "n3": 1}
    assert said["pair"].action == "wait"
    assert {reason.action for reason in run(world, settings).values()} == {"wait"}


def test_settings_that_cannot_be_meant_are_refused() -> None:
    for wrong, expected in (
        ({"queue": "lifo"}, "fifo or sjf"),
        ({"aggressiveness": -1.0}, "aggressiveness is -1"),
        ({"horizon_s": math.nan}, "horizon_s is nan"),
        ({"aging_s": 0.0}, "more than 0"),
        ({"tflops": {"a": 0.0}}, "kind a have a speed of 0"),
        ({"quotas": {"ann": -1}}, "user ann has a quota of -1"),
    ):
        with pytest.raises(UsageError, match=expected):
            SuikaSettings(**wrong)
