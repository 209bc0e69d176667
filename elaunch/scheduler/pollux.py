"""A scheduling policy after Pollux (Qiao et al., OSDI 2021), as far as it can be had for jobs of a fixed batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elaunch.scheduler.draft import Draft
from elaunch.scheduler.model import ClusterNode, ClusterSchedule, JobState, Speed
from elaunch.scheduler.pool import devices_text
from elaunch.scheduler.repair import repair
from elaunch.scheduler.sia import Configuration, Options, carry_out, free_by_kind, solved

LEAST_SPEEDUP = 1e-3
"""Of a job that gets nothing, so that its inverse is a number."""


class PolluxLike:
    """Every round all jobs are allocated anew, such that the power mean of their speedups is greatest.

    Taken from the paper and from `policy/pollux.py` of Sia's artifacts, which hold a copy of it: a job's speedup is its
    goodput on what it gets, as a multiple of that on a fair share (all devices, divided by the number of jobs); the
    factor (age - restarts x S) / (age + S) on what needs a restart; the power mean with p = -1, which is greatest where
    the sum of the inverse speedups is least; rounds of 60 s.

    Not taken: the genetic search, for the sum is minimised exactly, with any number of devices on the fewest nodes; the
    batch size that adapts and the noise scale of gradients, which are what Pollux is about: with a fixed batch goodput
    is throughput; the avoidance of interference between jobs on one node, and the size of the cluster that follows the
    load. Pollux knows one kind of device; here a job gets devices of one kind. S is what `Speed.change_s` says. A job
    has no less than its basic demand, so some wait where Pollux would give each of them a device. Meant for clusters of
    some hundred devices.
    """

    interval_s = 60.0

    def schedule(
        self, jobs: Iterable[JobState], nodes: Iterable[ClusterNode], speeds: Mapping[str, Speed], now_s: float
    ) -> ClusterSchedule:
        """Returns what every job is to have; see `SchedulingPolicy`.

        Raises:
            UsageError: scipy is not installed.
        """
        draft = Draft(jobs, nodes, speeds, now_s, {})
        repair(draft, {})
        options = [
            Options(draft, job, every=True) for job in draft.jobs.values() if not (job.running and job.job.settling)
        ]
        free = free_by_kind(draft, [one.job for one in options])
        share = sum(free.values()) / max(1, len(options))
        for one in options:
            fair = one.rates[self._fair(one, share)] if one.rates else 1.0
            for choice, rate in one.rates.items():
                one.costs[choice] = 1 / max(one.factors[choice] * rate / fair, LEAST_SPEEDUP)
        chosen = solved(options, free, 1 / LEAST_SPEEDUP)
        carry_out(draft, {one.job.job.name: choice for one, choice in zip(options, chosen, strict=True)})
        for job in draft.jobs.values():
            if not job.running:
                job.waits = f"waits for {devices_text(job.job.basic)}: the mean over all jobs is best so"
            elif job.allocation != dict(job.job.allocation):
                job.note("the mean over all jobs is best so")
        return draft.schedule("by Pollux's mean of speedups")

    @staticmethod
    def _fair(one: Options, share: float) -> Configuration:
        """Returns the configuration that is nearest to a fair share."""
        return min(one.rates, key=lambda choice: (abs(choice.devices - share), choice.devices, choice.kind))
