"""Scheduling policies that Suika is compared with, which are not elastic; `sia`, `pollux` and `rubick` are.

They see what `Suika` sees, and keep what `SchedulingPolicy` promises: a job has its basic demand or nothing. The
`interval_s` of a policy is how often it wants to be asked, whatever happens; 0: after each event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from elaunch.scheduler.draft import Draft, JobDraft
from elaunch.scheduler.model import Allocation, ClusterNode, ClusterSchedule, Growth, JobState, Speed, devices_of
from elaunch.scheduler.repair import repair
from elaunch.scheduler.room import start_waiting
from elaunch.scheduler.settings import SuikaSettings


class Fifo:
    """Without elasticity: a job gets its basic demand when its turn comes, and keeps it to its end (Suika 5.1).

    The queue is Suika's, with all of its settings: order, priorities, aging, backfilling, quotas and preemption. Nobody
    is moved.
    """

    interval_s = 0.0

    def __init__(self, settings: SuikaSettings | None = None) -> None:
        """Makes a policy; of the settings those of growth have no effect."""
        self.settings = replace(settings or SuikaSettings(), most_moved=0)

    def schedule(
        self, jobs: Iterable[JobState], nodes: Iterable[ClusterNode], speeds: Mapping[str, Speed], now_s: float
    ) -> ClusterSchedule:
        """Returns what every job is to have; see `SchedulingPolicy`."""
        draft = Draft(jobs, nodes, speeds, now_s, self.settings.tflops)
        repair(draft, self.settings.quotas)
        shrink_to_basic(draft)
        start_waiting(draft, self.settings)
        return draft.schedule("")


class Static:
    """Fixed shares: each job gets an equal part of the cluster for its whole life, as if it had been cut into parts.

    A part has as many devices as all usable nodes have, divided by the number of parts; a job gets no less than its
    basic demand and no more than it can use, in whole units. It waits until its share is free, and keeps it whatever
    the others do. This is no policy of a paper; it shows what fixed shares cost.
    """

    interval_s = 0.0

    def __init__(self, parts: int, settings: SuikaSettings | None = None) -> None:
        """Makes a policy that cuts the cluster into so many parts."""
        self.parts = parts
        self.settings = replace(settings or SuikaSettings(), most_moved=0)

    def schedule(
        self, jobs: Iterable[JobState], nodes: Iterable[ClusterNode], speeds: Mapping[str, Speed], now_s: float
    ) -> ClusterSchedule:
        """Returns what every job is to have; see `SchedulingPolicy`."""
        nodes = tuple(nodes)
        total = sum(node.devices for node in nodes if node.usable)
        jobs = tuple(jobs)
        draft = Draft(jobs, nodes, speeds, now_s, self.settings.tflops)
        repair(draft, self.settings.quotas)
        # The queue decides on whole shares; what is beyond the basic demand is a growth afterwards.
        shares = Draft(
            (replace(job, basic=self._share(job, total), base=job.allocation, growths=()) for job in jobs),
            nodes,
            speeds,
            now_s,
            self.settings.tflops,
        )
        for name, job in shares.jobs.items():
            shares.pool.give(job.allocation)
            job.place(draft.jobs[name].allocation)
            shares.pool.withdraw(job.allocation)
        start_waiting(shares, self.settings)
        for name, job in shares.jobs.items():
            draft.jobs[name].waits = job.waits
            draft.jobs[name].notes.update(job.notes)
            if not job.running:
                draft.stop(draft.jobs[name])
        for name, job in shares.jobs.items():
            if job.running and not draft.jobs[name].running:
                give(draft, draft.jobs[name], job.allocation)
        return draft.schedule(f"a share of a cluster in {self.parts} parts")

    def _share(self, job: JobState, total: int) -> int:
        most = min(job.most, max(job.basic, total // self.parts))
        return most - (most - job.basic) % job.unit


def shrink_to_basic(draft: Draft) -> None:
    """Takes back all growths but those of jobs on their way."""
    for job in draft.running:
        while job.growths and not job.job.settling:
            draft.reclaim(job, len(job.growths) - 1, "jobs have no more than their basic demand")


def give(draft: Draft, job: JobDraft, allocation: Allocation, benefit: float = 0.0) -> None:
    """Gives a job an allocation, in the place of all that it has: its basic demand where that was, as far as possible,
    and the rest as one growth.
    """
    if dict(allocation) == job.allocation:
        return
    former = dict(job.base)
    draft.stop(job)
    base: dict[str, int] = {}
    left = job.job.basic
    for name in sorted(allocation, key=lambda name: name not in former):
        n = min(allocation[name], left)
        if n:
            base[name] = n
            left -= n
    draft.place(job, base)
    rest = {name: n - base.get(name, 0) for name, n in allocation.items() if n > base.get(name, 0)}
    if rest:
        draft.pool.take(rest)
        job.grow(Growth(rest, benefit, draft.now_s))
    assert devices_of(job.base) == job.job.basic
