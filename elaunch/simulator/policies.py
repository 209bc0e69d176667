"""The scheduling policies that a simulated cluster can have, by name, and how each of them is run.

none            every job has its basic demand until it ends; the first that came starts first
suika           Suika; a change moves state between devices, and processes stay
suika-restart   the same decisions, but each change goes by way of a checkpoint
sia             after Sia, rubick after Rubick, pollux after Pollux: by way of a checkpoint, too
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elaunch.scheduler.baselines import Fifo
from elaunch.scheduler.model import SchedulingPolicy
from elaunch.scheduler.pollux import PolluxLike
from elaunch.scheduler.rubick import RubickLike
from elaunch.scheduler.settings import SuikaSettings
from elaunch.scheduler.sia import SiaLike
from elaunch.scheduler.suika import Suika
from elaunch.simulator.cluster_model import ClusterJob


@dataclass(frozen=True)
class PolicyRun:
    """How a policy is run.

    Attributes:
        make: returns a policy of its own for a simulation.
        elastic: whether jobs may have more than their basic demand.
        moves: whether a change moves state between devices; else it goes by way of a checkpoint.
        interval_s: it is asked so often; 0: at each event.
    """

    make: Callable[[SuikaSettings], SchedulingPolicy]
    elastic: bool = True
    moves: bool = True
    interval_s: float = 0.0

    def job(self, job: ClusterJob) -> ClusterJob:
        """Returns a job as this policy has it."""
        if self.elastic:
            return job
        return replace(job, state=replace(job.state, most=job.state.basic))


POLICIES: Mapping[str, PolicyRun] = {
    "none": PolicyRun(Fifo, elastic=False),
    "suika": PolicyRun(Suika),
    "suika-restart": PolicyRun(Suika, moves=False),
    "sia": PolicyRun(lambda _: SiaLike(), moves=False, interval_s=SiaLike.interval_s),
    "rubick": PolicyRun(lambda _: RubickLike(), moves=False, interval_s=RubickLike.interval_s),
    "pollux": PolicyRun(lambda _: PolluxLike(), moves=False, interval_s=PolluxLike.interval_s),
}
