"""A scheduling policy after Rubick (Zhang et al., MLSys 2025), as Suika is compared with it (Suika 2.2 and 5.1)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from elaunch.scheduler.draft import ROUNDING, Draft
from elaunch.scheduler.growing import grow
from elaunch.scheduler.model import ClusterNode, ClusterSchedule, JobState, Speed
from elaunch.scheduler.repair import repair
from elaunch.scheduler.room import start_waiting
from elaunch.scheduler.settings import SuikaSettings


class RubickLike:
    """Devices go to the job whose throughput rises most with them, whatever the load, as long as jobs change rarely.

    Rubick's paper was not at hand. Taken from what Suika says of it, and from the public abstract: a curve for each job
    of the best throughput under equal parts in each dimension ("symmetric" of `PlanSpeed`) by the number of devices;
    everybody has the minimum before anybody has more; what is left goes where the curve is steepest; a job is changed
    only if that leaves it k_reconfig = 0.97 of its time so far for training, which is (age - changes x S) / age; who
    has waited for k_queue = 200 s starts whatever has to change for that.

    Not taken: CPUs and memory of hosts as resources of their own, ZeRO and recomputation as dimensions of a plan
    (Suika 5.1 leaves ZeRO out, too), jobs without guarantee. The order in which Rubick visits nodes and victims is not
    known: growth goes in the rounds of `Suika` without a threshold, and what is taken back has the least benefit. S is
    what `Speed.change_s` says, so give it the cost of a restart.
    """

    interval_s = 0.0

    def __init__(self, k_reconfig: float = 0.97, k_queue_s: float = 200.0) -> None:
        """Makes a policy with Rubick's two thresholds."""
        self.k_reconfig, self.k_queue_s = k_reconfig, k_queue_s
        self._settings = SuikaSettings(most_moved=0, backfill_s=k_queue_s, horizon_s=math.inf)

    def schedule(
        self, jobs: Iterable[JobState], nodes: Iterable[ClusterNode], speeds: Mapping[str, Speed], now_s: float
    ) -> ClusterSchedule:
        """Returns what every job is to have; see `SchedulingPolicy`."""
        jobs = tuple(jobs)
        draft = Draft(jobs, nodes, speeds, now_s, {})
        repair(draft, {})
        late = any(not job.running and now_s - job.submitted_s >= self.k_queue_s for job in jobs)
        for job in draft.running:
            # As if it were on its way: nothing is given to it and nothing taken.
            if not job.job.settling and not late and not self._may_change(job.job, speeds.get(job.job.name), now_s):
                job.job = replace(job.job, settling=True)
        start_waiting(draft, self._settings)
        for job in draft.running:
            if late and not self._may_change(job.job, speeds.get(job.job.name), now_s):
                job.job = replace(job.job, settling=True)
        grow(draft, ROUNDING, self._settings)
        return draft.schedule("the steepest curve")

    def _may_change(self, job: JobState, speed: Speed | None, now_s: float) -> bool:
        """Returns whether a job that changes once more has trained for most of its time."""
        if not job.running or speed is None:
            return True
        age_s = now_s - job.submitted_s
        # Any other allocation will do: the state is written and read again whatever changes.
        restart_s = speed.change_s(job.allocation, {**job.allocation, "": 1})
        return age_s > 0 and (age_s - (job.changes + 1) * restart_s) / age_s >= self.k_reconfig
