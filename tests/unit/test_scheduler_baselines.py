"""The policies that Suika is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from elaunch.errors import UsageError
from elaunch.scheduler.baselines import Fifo, Static
from elaunch.scheduler.model import JobState, Node, SchedulingPolicy, devices_of
from elaunch.scheduler.pollux import PolluxLike
from elaunch.scheduler.rubick import RubickLike
from elaunch.scheduler.sia import SiaLike
from elaunch.scheduler.speeds import RestartCost, TableSpeed
from elaunch.scheduler.suika import Suika
from tests.helpers import scaled
from tests.unit.scheduler_worlds import World, clusters, happens

POLICIES: dict[str, SchedulingPolicy] = {
    "fifo": Fifo(),
    "static": Static(3),
    "sia": SiaLike(),
    "pollux": PolluxLike(),
    "rubick": RubickLike(),
}


def powers(exponent: float, most: int = 16, restart_s: float = 30.0) -> TableSpeed:
    return TableSpeed({n: n**exponent for n in range(1, most + 1)}, RestartCost(restart_s))


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=scaled(15, 200))
@given(data=st.data())
def test_whatever_happens_they_keep_the_promises_of_a_policy(name: str, data: DataObject) -> None:
    policy = POLICIES[name]
    world = World(data.draw(clusters(("fast", "slow"))))
    for number in range(data.draw(st.integers(1, 4))):
        happens(data, world, number, plain=False)
        found = world.decide(policy)
        assert world.decide(policy) == found
        world.carry_out(found)
        # A job that Sia or Pollux has stopped needs no restart any more to start, so they may choose it next.
        if name not in ("sia", "pollux"):
            assert world.decide(policy).placements == found.placements


@settings(max_examples=scaled(15, 200))
@given(st.data())
def test_without_elasticity_those_that_run_are_those_that_run_under_suika(data: DataObject) -> None:
    nodes = data.draw(clusters())
    elastic, rigid = World(list(nodes)), World(list(nodes))
    for number in range(data.draw(st.integers(1, 5))):
        happens(data, elastic, number, plain=True)
        for name in list(rigid.jobs):
            if name not in elastic.jobs:
                del rigid.jobs[name]
        rigid.jobs = {name: rigid.jobs.get(name, job) for name, job in elastic.jobs.items()}
        rigid.now_s = elastic.now_s
        elastic.carry_out(elastic.decide(Suika()))
        rigid.carry_out(rigid.decide(Fifo()))
        assert elastic.running() == rigid.running()
        assert all(devices_of(job.allocation) in (0, job.basic) for job in rigid.jobs.values())


def test_a_static_share_is_a_part_of_the_cluster_within_what_a_job_can_use() -> None:
    world = World([Node(f"n{place}", 4) for place in range(3)])
    world.jobs = {
        "a": JobState("a", 0.0, 1, 16),
        "b": JobState("b", 1.0, 1, 2),
        "c": JobState("c", 2.0, 4, 8, unit=2),
        "d": JobState("d", 3.0, 2, 8),
    }
    world.carry_out(world.decide(Static(2)))
    assert {name: devices_of(job.allocation) for name, job in world.jobs.items()} == {"a": 6, "b": 2, "c": 0, "d": 0}
    del world.jobs["a"]
    world.carry_out(world.decide(Static(2)))
    assert {name: devices_of(job.allocation) for name, job in world.jobs.items()} == {"b": 2, "c": 6, "d": 0}


def test_sia_stops_a_job_where_others_gain_more_than_the_penalty_for_that() -> None:
    world = World([Node("n0", 8)])
    world.jobs = {name: JobState(name, 0.0, 1, 8) for name in ("a", "b")}
    world.speeds = {"a": powers(0.95), "b": powers(0.3)}
    world.carry_out(world.decide(SiaLike()))
    held = {name: devices_of(job.allocation) for name, job in world.jobs.items()}
    assert held == {"a": 4, "b": 4}  # with 8 for a, b would get nothing: 0.37 + 1.1 instead of 0.52 + 0.81
    world.now_s = 10_000.0
    world.jobs["c"] = JobState("c", 10_000.0, 2, 8)
    world.speeds["c"] = powers(0.9)
    # With 4 for c and nothing for b 0.52 + 0.73 + 1.11; with 2 for a and b 0.74 + 0.92 + 0.73.
    reasons = world.decide(SiaLike()).reasons
    assert [(reason.job, reason.action) for reason in reasons] == [("b", "stop"), ("c", "start")]
    world.carry_out(world.decide(SiaLike(waiting_penalty=2.0)))
    assert {name: devices_of(job.allocation) for name, job in world.jobs.items()} == {"a": 2, "b": 2, "c": 4}


def test_sia_lets_young_jobs_be_that_would_have_to_restart() -> None:
    world = World([Node("n0", 8)], now_s=20.0)
    world.jobs = {"a": JobState("a", 0.0, 1, 8, base={"n0": 1}, started_s=0.0)}
    world.speeds = {"a": powers(0.5, restart_s=100.0)}
    assert not world.decide(SiaLike()).reasons  # 8**0.5 times as fast, times 20 / 120
    world.now_s = 1000.0
    (reason,) = world.decide(SiaLike()).reasons
    assert reason.action == "grow"
    # One that has restarted often has to be older.
    world.jobs["a"] = replace(world.jobs["a"], changes=9)
    assert not world.decide(SiaLike()).reasons


@settings(max_examples=scaled(15, 150))
@given(st.data())
def test_the_programme_finds_what_trying_all_configurations_finds(data: DataObject) -> None:
    world = World([Node(f"n{place}", 4, "a" if place < 2 else "b") for place in range(3)])
    exponents = data.draw(st.lists(st.sampled_from([0.2, 0.5, 0.8, 1.0]), min_size=1, max_size=3))
    for number, exponent in enumerate(exponents):
        name = f"j{number}"
        world.jobs[name] = JobState(name, 0.0, data.draw(st.sampled_from([1, 2, 4])), 8)
        world.speeds[name] = powers(exponent)
    found = world.decide(SiaLike()).placements
    sizes = [(0, "a"), *product((1, 2, 4), "ab"), (8, "a")]
    best = float("inf")
    for choice in product(sizes, repeat=len(exponents)):
        fit = all(sum(n for n, kind in choice if kind == one) <= total for one, total in (("a", 8), ("b", 4)))
        jobs = list(zip(choice, world.jobs.values(), exponents, strict=True))
        if fit and all(n == 0 or n >= job.basic for (n, _), job, _ in jobs):
            costs = (((n / job.basic) ** exponent) ** -0.5 if n else 1.1 for (n, _), job, exponent in jobs)
            best = min(best, sum(costs))
    total = 0.0
    for (name, placement), exponent in zip(found.items(), exponents, strict=True):
        n = devices_of(placement.allocation)
        total += (n / world.jobs[name].basic) ** (-0.5 * exponent) if n else 1.1
    assert total == pytest.approx(best)


@settings(max_examples=scaled(10, 100))
@given(st.data())
def test_pollux_makes_the_mean_of_speedups_as_great_as_trying_all_shares_does(data: DataObject) -> None:
    world = World([Node("n0", 6)])
    exponents = data.draw(st.lists(st.sampled_from([0.2, 0.5, 0.8, 1.0]), min_size=1, max_size=3))
    for number, exponent in enumerate(exponents):
        world.jobs[f"j{number}"] = JobState(f"j{number}", 0.0, data.draw(st.sampled_from([1, 2])), 6)
        world.speeds[f"j{number}"] = powers(exponent)
    fair = 6 // len(exponents)

    def inverse(sizes: Sequence[int]) -> float:
        return sum((fair / n) ** exponent if n else 1000.0 for n, exponent in zip(sizes, exponents, strict=True))

    jobs = list(world.jobs.values())
    shares = product(range(7), repeat=len(jobs))
    possible = [
        sizes
        for sizes in shares
        if sum(sizes) <= 6 and all(n in (0, *range(one.basic, 7)) for n, one in zip(sizes, jobs))
    ]
    found = world.decide(PolluxLike()).placements
    chosen = [devices_of(placement.allocation) for placement in found.values()]
    assert inverse(chosen) == pytest.approx(min(map(inverse, possible)))


def test_rubick_leaves_who_has_changed_too_often_as_it_is_unless_somebody_waits_too_long() -> None:
    """A change costs 30 s, which is 3 percent of 1000 s."""
    world = World([Node("n0", 4)], now_s=999.0)
    world.jobs = {"a": JobState("a", 0.0, 1, 4, base={"n0": 1}, started_s=0.0)}
    world.speeds = {"a": powers(0.5)}
    assert not world.decide(RubickLike()).reasons
    world.now_s = 1001.0
    world.carry_out(world.decide(RubickLike()))
    assert devices_of(world.jobs["a"].allocation) == 4  # whatever the load
    world.jobs["b"] = JobState("b", 1001.0, 2, 2)
    (reason,) = world.decide(RubickLike()).reasons
    assert (reason.job, reason.action) == ("b", "wait")
    world.now_s = 1201.0
    assert [reason.action for reason in world.decide(RubickLike()).reasons] == ["shrink", "start"]
    world.carry_out(world.decide(RubickLike()))
    assert devices_of(world.jobs["b"].allocation) == 2


def test_a_fairness_that_is_no_penalty_is_refused() -> None:
    with pytest.raises(UsageError, match="make it less than 0"):
        SiaLike(fairness=0.5)


def test_jobs_without_speeds_have_their_basic_demand() -> None:
    world = World([Node("n0", 8)])
    world.jobs = {"a": JobState("a", 0.0, 3, 8)}
    world.carry_out(world.decide(SiaLike()))
    assert devices_of(world.jobs["a"].allocation) == 3
