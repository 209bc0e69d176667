"""A simulated cluster: in closed form for one job, by hand in small cases, and beside a twin that goes in ticks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.scheduler.model import (
    ClusterNode,
    ClusterSchedule,
    JobState,
    Placement,
    SchedulingPolicy,
    Speed,
    devices_of,
)
from elaunch.scheduler.settings import SuikaSettings
from elaunch.scheduler.speeds import MoveCost, RestartCost, TableSpeed
from elaunch.scheduler.suika import Suika
from elaunch.simulator.arrivals import philly_like
from elaunch.simulator.cluster import simulate_cluster
from elaunch.simulator.cluster_model import ClusterJob, ClusterRun, ClusterSettings
from elaunch.simulator.jobs import cluster_nodes, scaling_jobs
from elaunch.simulator.policies import POLICIES
from elaunch.simulator.traces import Arrival, NodeChange
from tests.helpers import scaled

NODES = cluster_nodes(3, 4, per_rack=2)
COST = MoveCost(fixed_s=5.0)


def jobs_of(given: Iterable[tuple[float, float, int]], most: int = 3, scaling: float = 0.95) -> list[ClusterJob]:
    """Jobs of (seconds of submission, seconds on what they ask for, devices that they ask for)."""
    arrivals = [Arrival(f"job{number}", *one) for number, one in enumerate(given)]
    return scaling_jobs(arrivals, 4, most, scaling, COST)


def no_clock() -> float:
    return 0.0


def check_books(run: ClusterRun, jobs: Iterable[ClusterJob]) -> None:
    """Each job has done its work exactly, nobody holds more than there is, and device-seconds add up."""
    work = {job.state.name: job.samples for job in jobs}
    assert {job.name for job in run.ended} | set(run.unplaced) >= set(run.jobs) - {"?"}
    for job in run.ended:
        assert job.samples == work[job.name]
        assert job.started_s is not None
        assert job.ended_s is not None
        assert job.submitted_s <= job.started_s < job.ended_s
    assert all(allocated <= usable for _, allocated, usable, _, _ in run.usage)
    ends = [*(at_s for at_s, *_ in run.usage[1:]), run.end_s]
    held = sum((end_s - at_s) * allocated for (at_s, allocated, *_), end_s in zip(run.usage, ends))
    assert held == pytest.approx(sum(job.device_s for job in run.jobs.values()), rel=1e-9)


def test_a_job_alone_takes_its_duration() -> None:
    jobs = jobs_of([(7.0, 100.0, 4)], most=1)
    run = simulate_cluster(jobs, NODES, Suika(), settings=ClusterSettings(start_s=3.0))
    (job,) = run.ended
    assert (job.started_s, job.ended_s, job.jct_s, job.device_s) == (7.0, 110.0, 103.0, 412.0)
    assert run.jct_s == run.wjct_s == 103.0
    check_books(run, jobs)


def test_a_job_alone_that_can_grow_takes_what_it_can_use() -> None:
    jobs = jobs_of([(0.0, 100.0, 4)], most=2)
    (job,) = simulate_cluster(jobs, NODES, Suika()).ended
    # On twice its devices it is 1.9 times as fast.
    assert job.jct_s == pytest.approx(100 / 1.9)
    assert job.changes == 0


def test_growth_and_shrinking_by_hand() -> None:
    """The second job comes when the first has all; the third needs more than is left by both."""
    jobs = jobs_of([(0.0, 100.0, 4), (10.0, 50.0, 8)], most=3)
    run = simulate_cluster(jobs, NODES, Suika(SuikaSettings(horizon_s=math.inf)))
    first, second = run.jobs["job0"], run.jobs["job1"]
    rate = 3 ** (1 + math.log2(0.95))
    # It grows at its start, without a change; shrinks at 10 s, for 5 s; has 4 devices until the other ends.
    assert first.changes >= 1
    assert second.started_s == 10.0
    assert second.ended_s == 60.0
    done = 10 * rate + (60 - 15) * 1.0
    assert first.ended_s is not None
    if first.changes == 2:
        assert first.ended_s == pytest.approx(60 + 5 + (100 - done) / rate)
    check_books(run, jobs)


def test_first_come_first_served_waits_in_line() -> None:
    jobs = [POLICIES["none"].job(job) for job in jobs_of([(0.0, 100.0, 12), (1.0, 10.0, 12), (2.0, 10.0, 1)])]
    run = simulate_cluster(jobs, NODES, POLICIES["none"].make(SuikaSettings()))
    assert [run.jobs[name].started_s for name in ("job0", "job1", "job2")] == [0.0, 100.0, 110.0]
    assert run.utilisation == pytest.approx((1200 + 120 + 10) / (12 * 120))
    assert run.waited_s == pytest.approx((0 + 99 + 108) / 3)
    check_books(run, jobs)


def test_a_job_that_never_fits_is_named_and_holds_up_nobody_for_ever() -> None:
    jobs = jobs_of([(0.0, 10.0, 64)])
    run = simulate_cluster(jobs, NODES, Suika())
    assert run.unplaced == ["job0"]
    assert math.isnan(run.jct_s)


def test_a_lost_node_stops_its_jobs_for_as_long_as_it_takes_to_notice_and_change() -> None:
    jobs = jobs_of([(0.0, 100.0, 4)], most=1)
    (first,) = Suika().schedule([jobs[0].state], NODES, {}, 0.0).placements["job0"].base
    changes = [NodeChange(30.0, left=(first,)), NodeChange(500.0, joined=(first,))]
    run = simulate_cluster(jobs, NODES, Suika(), changes=changes, settings=ClusterSettings(detect_s=4.0))
    (job,) = run.ended
    assert job.jct_s == pytest.approx(100 + 4 + 5)
    assert (job.changes, job.undone) == (1, 0.0)
    # By way of checkpoints every 20 s, what it did since the last one is lost, too.
    settings_s = ClusterSettings(detect_s=4.0, checkpoint_every_s=20.0)
    (job,) = simulate_cluster(jobs, NODES, Suika(), changes=changes, settings=settings_s).ended
    assert job.undone == pytest.approx(10.0)
    assert job.jct_s == pytest.approx(100 + 4 + 5 + 10)


def test_a_policy_that_is_asked_in_rounds_is_asked_at_their_times() -> None:
    asked: list[float] = []

    class Asked:
        def schedule(
            self, jobs: Iterable[JobState], nodes: Iterable[ClusterNode], speeds: Mapping[str, Speed], now_s: float
        ) -> ClusterSchedule:
            asked.append(now_s)
            return Suika().schedule(jobs, nodes, speeds, now_s)

    policy: SchedulingPolicy = Asked()
    jobs = jobs_of([(0.0, 50.0, 4), (61.0, 50.0, 4)], most=1)
    run = simulate_cluster(jobs, NODES, policy, settings=ClusterSettings(interval_s=60.0))
    assert asked == [0.0, 60.0, 120.0]
    assert run.jobs["job1"].started_s == 120.0
    asked.clear()
    simulate_cluster(jobs, NODES, policy, settings=ClusterSettings(interval_s=60.0, always=True))
    assert asked == [0.0, 60.0, 120.0]


SLOW_TO_MOVE = ClusterSettings(start_s=5.0, join_s=3.0, leave_s=2.0, detect_s=4.0)


def job_of(name: str, at_s: float, samples: float, rates: Mapping[int, float], basic: int, most: int) -> ClusterJob:
    told = TableSpeed(rates)
    return ClusterJob(JobState(name, at_s, basic, most), samples, replace(told, cost=MoveCost(fixed_s=1.0)), told)


@pytest.mark.parametrize("interval_s", [0.0, 1.0])
def test_a_job_goes_on_until_devices_join_and_others_wait_until_they_are_given_back(interval_s: float) -> None:
    """By hand: a trains from 6 s on with two devices; b comes at 20 s, gets one of them at 22 s and ends at 37 s."""
    jobs = [job_of("a", 0.0, 100.0, {1: 1.0, 2: 2.0}, 1, 2), job_of("b", 20.0, 10.0, {1: 1.0}, 1, 1)]
    settings = replace(SLOW_TO_MOVE, interval_s=interval_s)
    run = simulate_cluster(jobs, cluster_nodes(2, 1, per_rack=2), Suika(), settings=settings)
    assert [(one.at_s, one.job, one.action, one.allocation) for one in run.decided] == [
        (0.0, "a", "start", {"n1": 1, "n2": 1}),
        (20.0, "a", "shrink", {"n1": 1}),
        (20.0, "b", "start", {"n2": 1}),
        (37.0, "a", "grow", {"n1": 1, "n2": 1}),
    ]
    a, b = run.jobs["a"], run.jobs["b"]
    assert (b.started_s, b.ended_s) == (20.0, 37.0)
    # 14 s at 2 until b comes, 1 s of change, 21 s at 1; 39 s: the device is free; 42 s: it takes part; 1 s of change.
    assert a.ended_s == pytest.approx(43 + (100 - 28 - 21) / 2)
    assert (a.changes, a.change_s) == (2, [1.0, 1.0, 1.0])
    assert a.stopped_s == pytest.approx(5 + 3 * 1.0)
    check_books(run, jobs)


@pytest.mark.parametrize("drained", [True, False])
def test_a_job_moves_off_a_drained_node_when_the_new_one_has_joined_and_off_a_lost_one_at_once(drained: bool) -> None:
    jobs = [job_of("a", 0.0, 100.0, {2: 2.0}, 2, 2)]
    changes = [NodeChange(30.0, drained=("n2",)) if drained else NodeChange(30.0, left=("n2",))]
    run = simulate_cluster(jobs, cluster_nodes(3, 1, per_rack=3), Suika(), changes=changes, settings=SLOW_TO_MOVE)
    (job,) = run.ended
    assert [dict(one.allocation) for one in run.decided] == [{"n1": 1, "n2": 1}, {"n1": 1, "n3": 1}]
    # Drained: it trains until n3 joins at 33 s, and stops for the arrival and for the departure. Lost: what is left is
    # too little, and has not noticed before 35 s; then n3 comes in.
    assert job.ended_s == pytest.approx(35 + (100 - 56) / 2 if drained else 36 + (100 - 50) / 2)
    check_books(run, jobs)


def test_what_the_scheduler_is_told_may_be_wrong_and_the_work_is_done_all_the_same() -> None:
    (job,) = jobs_of([(0.0, 100.0, 4)], most=3)
    pessimist = TableSpeed({4: 1.0, 8: 1.01, 12: 1.02}, COST)
    (outcome,) = simulate_cluster([replace(job, told=pessimist)], NODES, Suika(SuikaSettings(aggressiveness=0.1))).ended
    assert outcome.jct_s == 100.0


JOBS = st.lists(
    st.tuples(st.floats(0.0, 400.0), st.floats(5.0, 200.0), st.sampled_from([1, 2, 4, 8])),
    min_size=1,
    max_size=8,
)


@hypothesis.settings(max_examples=scaled(15, 100), deadline=None)
@given(
    made=JOBS,
    name=st.sampled_from(sorted(POLICIES)),
    losses=st.booleans(),
    settings=st.sampled_from([ClusterSettings(), SLOW_TO_MOVE, replace(SLOW_TO_MOVE, interval_s=1.1)]),
)
def test_whatever_comes_the_books_are_right_and_the_same_each_time(
    made: list[tuple[float, float, int]], name: str, losses: bool, settings: ClusterSettings
) -> None:
    way = POLICIES[name]
    jobs = [way.job(job) for job in jobs_of(made)]
    changes = [NodeChange(100.0, left=("n1",)), NodeChange(300.0, joined=("n1",))] if losses else []
    changes += [NodeChange(150.0, drained=("n2",)), NodeChange(350.0, joined=("n2",))] if losses else []
    runs = [
        simulate_cluster(jobs, NODES, way.make(SuikaSettings()), name, changes, settings=settings, clock=no_clock)
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    if not settings.interval_s:  # else devices count as held until the next look
        check_books(runs[0], jobs)
    assert len(runs[0].ended) == len(jobs)


@hypothesis.settings(max_examples=scaled(8, 60), deadline=None)
@given(made=JOBS, name=st.sampled_from(["none", "suika"]))
def test_a_twin_in_small_ticks_ends_its_jobs_at_the_same_times(made: list[tuple[float, float, int]], name: str) -> None:
    """Where two events fall into one tick the policy may decide otherwise, so no two jobs come in one."""
    times = sorted(round(at_s / 7.0) * 7.0 + number for number, (at_s, _, _) in enumerate(made))
    jobs = [
        POLICIES[name].job(job) for job in jobs_of((at_s, length_s, n) for at_s, (_, length_s, n) in zip(times, made))
    ]
    policy = Suika(SuikaSettings(horizon_s=math.inf))
    run = simulate_cluster(jobs, NODES, policy)
    twin = ticked(jobs, policy)
    mean_s = sum(twin.values()) / len(twin)
    found_s = sum(job.ended_s or 0.0 for job in run.ended) / len(run.ended)
    assert found_s == pytest.approx(mean_s, rel=0.05, abs=3.0)


def ticked(jobs: list[ClusterJob], policy: Suika, tick_s: float = 0.25) -> dict[str, float]:
    """Returns when each job ends, in small ticks."""
    coming = sorted(jobs, key=lambda job: job.state.submitted_s)
    speeds = {job.state.name: job.speed for job in jobs}
    states: dict[str, JobState] = {}
    left = {job.state.name: job.samples for job in jobs}
    stopped_until_s: dict[str, float] = {}
    ended: dict[str, float] = {}
    now_s = 0.0
    while len(ended) < len(jobs):
        ask = False
        while coming and coming[0].state.submitted_s <= now_s:
            job = coming.pop(0)
            states[job.state.name], ask = job.state, True
        for name in [name for name in states if left[name] <= 0]:
            ended[name], ask = now_s, True
            del states[name]
        for name, state in states.items():
            if state.settling and stopped_until_s[name] <= now_s:
                states[name], ask = replace(state, settling=False), True
        if ask:
            placements: Mapping[str, Placement] = policy.schedule(states.values(), NODES, speeds, now_s).placements
            for name, placement in placements.items():
                state = states[name]
                before, after = dict(state.allocation) if state.running else {}, dict(placement.allocation)
                if before == after:
                    continue
                stall_s = speeds[name].change_s(before, after) if before and after else 0.0
                stopped_until_s[name] = now_s + stall_s
                states[name] = replace(
                    state,
                    base=placement.base,
                    growths=placement.growths,
                    started_s=now_s if after else None,
                    settling=stall_s > 0,
                    changed_s=now_s,
                )
        for name, state in states.items():
            if state.running and stopped_until_s.get(name, 0.0) <= now_s:
                left[name] -= tick_s * speeds[name].rate(state.allocation)
        now_s += tick_s
    return ended


def test_elasticity_helps_and_restarts_cost() -> None:
    arrivals = philly_like(60, 4 * 3600.0, seed=2, sizes={1: 1.0, 2: 1.0, 4: 1.0})
    found = {}
    for name, way in POLICIES.items():
        cost = MoveCost(1.0) if way.moves else RestartCost(120.0)
        jobs = [way.job(job) for job in scaling_jobs(arrivals, 4, 4, 0.9, cost)]
        found[name] = simulate_cluster(jobs, NODES, way.make(SuikaSettings()), name)
        check_books(found[name], jobs)
    assert found["suika"].jct_s < found["suika-restart"].jct_s < found["none"].jct_s
    assert found["suika"].utilisation > found["none"].utilisation


def test_jobs_grow_by_what_they_ask_for_up_to_what_they_can_use() -> None:
    small, told = scaling_jobs([Arrival("a", 0.0, 10.0, 2), Arrival("b", 0.0, 10.0, 8, most=20)], 4, 4, 0.9, COST)
    assert (small.state.unit, small.state.most) == (2, 8)
    assert (told.state.unit, told.state.most) == (4, 20)
    assert [small.speed.rate({"n0": n}) for n in (1, 2)] == [0.0, 1.0]
    assert small.speed.rate({"n0": 4}) == pytest.approx(1.8)
    assert devices_of({"n0": 4, "n1": 2}) == 6
