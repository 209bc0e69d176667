"""Random clusters and jobs for tests of schedulers, and what holds for every schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st
from hypothesis.strategies import DataObject, DrawFn

from elaunch.scheduler.model import ClusterNode, ClusterSchedule, JobState, SchedulingPolicy, Speed, devices_of
from elaunch.scheduler.speeds import MoveCost, TableSpeed

KINDS = ("fast", "slow")


@dataclass
class World:
    """A cluster, its jobs, and how fast they are, from one decision to the next."""

    nodes: list[ClusterNode]
    jobs: dict[str, JobState] = field(default_factory=dict)
    speeds: dict[str, Speed] = field(default_factory=dict)
    now_s: float = 0.0

    def decide(self, policy: SchedulingPolicy) -> ClusterSchedule:
        """Returns the schedule after checking it."""
        found = policy.schedule(list(self.jobs.values()), self.nodes, self.speeds, self.now_s)
        check(found, self.jobs, self.nodes)
        return found

    def carry_out(self, schedule: ClusterSchedule) -> None:
        """Gives every job what the schedule says."""
        for name, placement in schedule.placements.items():
            job = self.jobs[name]
            started_s = (self.now_s if job.started_s is None else job.started_s) if placement.base else None
            changes = job.running and placement.allocation != dict(job.allocation)
            self.jobs[name] = replace(
                job,
                base=placement.base,
                growths=placement.growths,
                started_s=started_s,
                changed_s=self.now_s if changes or not job.running else job.changed_s,
                changes=job.changes + changes,
                settling=job.settling and bool(placement.base),
            )

    def running(self) -> set[str]:
        """Returns the names of those that run."""
        return {name for name, job in self.jobs.items() if job.running}


def check(schedule: ClusterSchedule, jobs: Mapping[str, JobState], nodes: Sequence[ClusterNode]) -> None:
    """Checks what `SchedulingPolicy` promises."""
    assert set(schedule.placements) == set(jobs)
    by_name = {node.name: node for node in nodes}
    used: dict[str, int] = {}
    reasons = [reason.job for reason in schedule.reasons]
    assert len(reasons) == len(set(reasons)), "one reason for a job"
    for name, placement in schedule.placements.items():
        job, has = jobs[name], placement.allocation
        assert devices_of(placement.base) in (0, job.basic)
        assert placement.base or not placement.growths
        assert devices_of(has) <= job.most or job.settling
        assert all(devices_of(growth.devices) % job.unit == 0 for growth in placement.growths)
        for node, devices in has.items():
            assert devices > 0
            assert by_name[node].usable, f"{name} is on {node}, which cannot be used"
            assert not job.kinds or by_name[node].kind in job.kinds
            assert not job.whole_nodes or devices == by_name[node].devices
            used[node] = used.get(node, 0) + devices
        before = dict(job.allocation) if job.running else {}
        assert (name in reasons) == (has != before or not has)
        if job.settling and has != before:
            assert any(not by_name[node].usable for node in before if node in by_name)
    for node, devices in used.items():
        assert devices <= by_name[node].devices
    for reason in schedule.reasons:
        assert reason.text
        assert "\n" not in reason.text


@st.composite
def clusters(draw: DrawFn, kinds: Sequence[str] = ("",), sizes: Sequence[int] = (1, 2, 4)) -> list[ClusterNode]:
    """Draws one to six nodes in up to two racks; nodes of one kind are equally large."""
    size = {kind: draw(st.sampled_from(sizes)) for kind in kinds}
    drawn = draw(st.lists(st.tuples(st.sampled_from(kinds), st.sampled_from("rs")), min_size=1, max_size=6))
    return [ClusterNode(f"n{place}", size[kind], kind, rack) for place, (kind, rack) in enumerate(drawn)]


@st.composite
def speeds(draw: DrawFn, most: int) -> TableSpeed:
    """Draws how fast a job is: usually faster with more devices, not always concave, sometimes with no plan at all."""
    steps = draw(st.lists(st.integers(0, 8), min_size=most, max_size=most))
    rates, total = {}, 0.0
    for devices, step in enumerate(steps, 1):
        total += step / 8
        rates[devices] = total
    return TableSpeed(rates, MoveCost(draw(st.sampled_from([0.0, 5.0, 200.0]))))


@st.composite
def arrivals(draw: DrawFn, name: str, now_s: float, plain: bool, kinds: Sequence[str] = ("",)) -> JobState:
    """Draws a job that comes; a plain one can be put on any devices."""
    unit = 1 if plain else draw(st.sampled_from([1, 1, 2, 4]))
    basic = unit * draw(st.integers(1, 4 // unit))
    return JobState(
        name,
        now_s,
        basic,
        basic + unit * draw(st.integers(0, 6)),
        unit=unit,
        whole_nodes=not plain and draw(st.integers(0, 3)) == 0,
        kinds=() if plain or draw(st.booleans()) else (draw(st.sampled_from(kinds)),),
        priority=0 if plain else draw(st.integers(0, 2)),
        user=draw(st.sampled_from(["ann", "bob"])),
        left_s=draw(st.sampled_from([None, 10.0, 1000.0])),
    )


def happens(data: DataObject, world: World, number: int, plain: bool) -> None:
    """Lets time pass and something happen: jobs come, end, settle or freeze, nodes fail and return."""
    world.now_s += data.draw(st.sampled_from([0.0, 20.0, 100.0]))
    for more in range(data.draw(st.integers(0, 2))):
        job = data.draw(arrivals(f"j{number}.{more}", world.now_s, plain, () if plain else KINDS))
        world.jobs[job.name] = job
        if data.draw(st.integers(0, 5)):
            world.speeds[job.name] = data.draw(speeds(job.most))
    running = sorted(world.running())
    if data.draw(st.booleans()) and running:
        del world.jobs[data.draw(st.sampled_from(running))]
    if plain:
        return
    for name in sorted(world.running()):
        settling, frozen = data.draw(st.sampled_from([(False, ""), (False, ""), (True, ""), (False, "no profile yet")]))
        world.jobs[name] = replace(world.jobs[name], settling=settling, frozen=frozen)
    if data.draw(st.integers(0, 3)) == 0:
        place = data.draw(st.integers(0, len(world.nodes) - 1))
        node = world.nodes[place]
        world.nodes[place] = replace(node, usable=not node.usable)
