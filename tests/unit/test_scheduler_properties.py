"""What holds for Suika's schedules whatever comes: against a scheduler without elasticity, and against trying all."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from elaunch.scheduler.model import ClusterNode, JobState, devices_of, merged
from elaunch.scheduler.pool import Pool
from elaunch.scheduler.settings import SuikaSettings
from elaunch.scheduler.suika import Suika
from tests.helpers import scaled
from tests.unit.scheduler_worlds import KINDS, World, arrivals, clusters, happens, speeds

suika_settings = st.builds(
    SuikaSettings,
    queue=st.sampled_from(["fifo", "sjf"]),
    aggressiveness=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    aging_s=st.sampled_from([100.0, float("inf")]),
    backfill_s=st.sampled_from([0.0, 50.0, float("inf")]),
    quotas=st.sampled_from([dict[str, int](), {"ann": 4}]),
    preempt=st.booleans(),
    most_moved=st.sampled_from([0, 2]),
    horizon_s=st.sampled_from([10.0, 600.0, float("inf")]),
    tflops=st.just({"fast": 2.0, "slow": 1.0}),
)


@settings(max_examples=scaled(25, 400))
@given(st.data(), suika_settings)
def test_whatever_happens_the_schedule_keeps_its_promises_and_a_second_one_changes_nothing(
    data: DataObject, given_settings: SuikaSettings
) -> None:
    policy = Suika(given_settings)
    world = World(data.draw(clusters(KINDS)))
    for number in range(data.draw(st.integers(1, 5))):
        happens(data, world, number, plain=False)
        found = world.decide(policy)
        again = policy.schedule(list(reversed(world.jobs.values())), world.nodes, world.speeds, world.now_s)
        assert again.placements == found.placements
        assert set(again.reasons) == set(found.reasons)
        world.carry_out(found)
        for user, quota in given_settings.quotas.items():
            held = [job for job in world.jobs.values() if job.user == user and job.running]
            if not any(job.settling for job in held):
                assert sum(devices_of(job.allocation) for job in held) <= quota
        settled = world.decide(policy)
        assert settled.placements == found.placements, "nothing changed, so nothing is to change"


@settings(max_examples=scaled(25, 400))
@given(st.data())
def test_growth_never_keeps_a_job_waiting_that_would_start_without_elasticity(data: DataObject) -> None:
    """The twin: the same jobs in the same order, first come first served, on nothing but a number of devices."""
    world = World(data.draw(clusters()))
    total = sum(node.devices for node in world.nodes)
    policy, twin = Suika(SuikaSettings(aggressiveness=0.5)), dict[str, int]()
    for number in range(data.draw(st.integers(1, 6))):
        happens(data, world, number, plain=True)
        twin = {name: basic for name, basic in twin.items() if name in world.jobs}
        for job in sorted(world.jobs.values(), key=lambda job: (job.submitted_s, job.name)):
            if job.name not in twin and job.basic <= total:
                if sum(twin.values()) + job.basic > total:
                    break
                twin[job.name] = job.basic
        world.carry_out(world.decide(policy))
        assert world.running() == set(twin)


@settings(max_examples=scaled(25, 400))
@given(st.data(), st.booleans())
def test_a_job_that_is_first_in_the_queue_waits_only_if_it_would_not_fit_beside_basic_demand_alone(
    data: DataObject, preempt: bool
) -> None:
    policy = Suika(SuikaSettings(preempt=preempt))
    world = World(data.draw(clusters(KINDS)))
    for number in range(data.draw(st.integers(1, 5))):
        happens(data, world, number, plain=False)
        world.carry_out(world.decide(policy))
        empty = Pool(world.nodes, {})
        waiting = [job for job in world.jobs.values() if not job.running and empty.place(job) is not None]
        if waiting:
            first = min(waiting, key=lambda job: (-job.priority, job.submitted_s, job.name))
            pool = Pool(world.nodes, {})
            for job in world.jobs.values():
                pool.take(job.allocation if job.settling else job.base)
            assert pool.place(first) is None


def best_by_trying(nodes: list[ClusterNode], job: JobState, world: World, tflops: Mapping[str, float]) -> float:
    """Returns the best marginal benefit of the prefixes of a job's affinity order, written out anew."""
    held = dict(job.allocation)
    used = merged(one.allocation for one in world.jobs.values())
    racks = {node.rack for node in nodes if node.name in held}
    order = sorted(
        (node for node in nodes), key=lambda node: (node.name not in held, node.rack not in racks, node.rack)
    )
    power = {node.name: tflops.get(node.kind, 1.0) for node in nodes}
    speed, best = world.speeds[job.name], 0.0
    own = {node.kind for node in nodes if node.name in held}
    for only_own in (False, True):
        devices = [
            node.name
            for node in order
            for _ in range(node.devices - used.get(node.name, 0))
            if node.usable and (not only_own or node.kind in own)
        ]
        for n in range(1, min(len(devices), job.most - devices_of(held)) + 1):
            more = merged({name: 1} for name in devices[:n])
            rate, more_rate = speed.rate(held), speed.rate(merged([held, more]))
            if rate > 0:
                norms = [sum(count * power[name] for name, count in some.items()) for some in (held, more)]
                best = max(best, norms[0] / norms[1] * (more_rate - rate) / rate)
    return best


@settings(max_examples=scaled(25, 400))
@given(st.data())
def test_the_first_growth_has_the_greatest_marginal_benefit_of_all(data: DataObject) -> None:
    """And if none was made, none of those that could have been reaches the threshold."""
    tflops = {"fast": 2.0, "slow": 1.0}
    nodes = sorted(data.draw(clusters(KINDS)), key=lambda node: node.rack)
    world = World(nodes)
    for number in range(data.draw(st.integers(1, 3))):
        job = data.draw(arrivals(f"j{number}", 0.0, True))
        world.jobs[job.name] = job
        world.speeds[job.name] = data.draw(speeds(job.most))
    fixed = Suika(SuikaSettings(aggressiveness=0.0, horizon_s=float("inf"), tflops=tflops))
    # First without growth: nobody has a speed.
    world.carry_out(fixed.schedule(list(world.jobs.values()), nodes, {}, 0.0))
    runs = [job for job in world.jobs.values() if job.running]
    best = max((best_by_trying(nodes, job, world, tflops) for job in runs), default=0.0)
    total = sum(node.devices * tflops[node.kind] for node in nodes)
    kinds = {node.name: node.kind for node in nodes}
    load = sum(devices * tflops[kinds[name]] for job in runs for name, devices in job.base.items())
    policy = Suika(SuikaSettings(aggressiveness=1.0, horizon_s=float("inf"), tflops=tflops))
    growths = [growth for placed in world.decide(policy).placements.values() for growth in placed.growths]
    if best < load / total - 1e-9:
        assert not growths
    elif best > max(load / total, 1e-9) + 1e-9:
        assert max(growth.benefit for growth in growths) >= best - 1e-6
