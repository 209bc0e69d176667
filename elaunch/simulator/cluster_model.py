"""What a simulated cluster is given, and what has become of it and of its jobs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elaunch.scheduler.model import Allocation, JobState, Speed


@dataclass(frozen=True)
class ClusterJob:
    """A job as it is submitted.

    Attributes:
        state: what the scheduler is told: name, time of submission, demands.
        samples: that it has to do.
        speed: how fast it is, in truth.
        told: how fast the scheduler takes it to be; None: as it is.
    """

    state: JobState
    samples: float
    speed: Speed
    told: Speed | None = None


@dataclass(frozen=True)
class ClusterSettings:
    """What a cluster takes.

    Attributes:
        interval_s: the policy is asked at multiples of it, if there was an event; 0: at each event.
        always: with an interval: it is asked each time.
        start_s: from when a job is given its basic demand until its first step begins: the queue of the cluster itself,
            processes, imports.
        join_s: from when a job is given more devices until they take part; it goes on with the others meanwhile.
        leave_s: from when devices are to be given back, or their job ends, until others can have them.
        detect_s: from the loss of a node until its jobs know.
        checkpoint_every_s: with the loss of a node a job goes back to its last checkpoint, so far apart; 0: it loses
            nothing.
    """

    interval_s: float = 0.0
    always: bool = False
    start_s: float = 0.0
    join_s: float = 0.0
    leave_s: float = 0.0
    detect_s: float = 3.94
    checkpoint_every_s: float = 0.0


@dataclass(frozen=True)
class DecidedChange:
    """What a job is to have from then on, and has not had until then.

    Attributes:
        at_s: when it was decided.
        job: its name.
        action: "start", "grow", "shrink", "move" or "stop".
        allocation: that it is to have.
        text: the reason.
    """

    at_s: float
    job: str
    action: str
    allocation: Allocation
    text: str


@dataclass
class JobOutcome:
    """What has become of a job.

    Attributes:
        name: its name.
        basic: devices that it asked for.
        submitted_s: when it came.
        started_s: when it began; None: it never did.
        ended_s: when it was done; None: it is not.
        samples: that it has done.
        undone: samples that it did and lost.
        device_s: that it held.
        stopped_s: in which it held devices and did not train.
        changes: of its allocation, after its start.
        change_s: seconds of training that each of them cost.
    """

    name: str
    basic: int
    submitted_s: float
    started_s: float | None = None
    ended_s: float | None = None
    samples: float = 0.0
    undone: float = 0.0
    device_s: float = 0.0
    stopped_s: float = 0.0
    changes: int = 0
    change_s: list[float] = field(default_factory=list)

    @property
    def jct_s(self) -> float:
        """Returns the seconds from submission to end; infinity if it has not ended."""
        return math.inf if self.ended_s is None else self.ended_s - self.submitted_s


@dataclass(frozen=True)
class ClusterRun:
    """What has become of a cluster.

    Attributes:
        policy: its name.
        devices: of all nodes.
        end_s: of the last job, or of the simulation.
        jobs: by name.
        usage: (seconds, allocated devices, usable devices, jobs that run, jobs that wait) from then on.
        decision_s: of the processor clock that each decision took; not part of what is the same each time.
        unplaced: jobs that wait and could never start.
        decided: all changes of what jobs are to have, in their order.
    """

    policy: str
    devices: int
    end_s: float
    jobs: Mapping[str, JobOutcome]
    usage: Sequence[tuple[float, int, int, int, int]]
    decision_s: Sequence[float]
    unplaced: Sequence[str]
    decided: Sequence[DecidedChange] = ()

    @property
    def ended(self) -> list[JobOutcome]:
        """Returns the jobs that have ended."""
        return [job for job in self.jobs.values() if job.ended_s is not None]

    @property
    def jct_s(self) -> float:
        """Returns the mean seconds from submission to end."""
        found = [job.jct_s for job in self.ended]
        return sum(found) / len(found) if found else math.nan

    @property
    def wjct_s(self) -> float:
        """Returns the same, weighted by the devices that each job asked for."""
        weight = sum(job.basic for job in self.ended)
        return sum(job.basic * job.jct_s for job in self.ended) / weight if weight else math.nan

    @property
    def waited_s(self) -> float:
        """Returns the mean seconds from submission to start."""
        found = [job.started_s - job.submitted_s for job in self.jobs.values() if job.started_s is not None]
        return sum(found) / len(found) if found else math.nan

    @property
    def utilisation(self) -> float:
        """Returns the device-seconds that jobs held, of those that the nodes had until the end."""
        ends = [at_s for at_s, *_ in self.usage[1:]] + [self.end_s]
        had = sum((end_s - at_s) * usable for (at_s, _, usable, _, _), end_s in zip(self.usage, ends))
        return sum(job.device_s for job in self.jobs.values()) / had if had else 0.0

    @property
    def change_s(self) -> float:
        """Returns the mean seconds of training that a change cost."""
        found = [cost_s for job in self.jobs.values() for cost_s in job.change_s]
        return sum(found) / len(found) if found else 0.0

    @property
    def changes(self) -> int:
        """Returns the changes of allocation of all jobs."""
        return sum(job.changes for job in self.jobs.values())

    def document(self) -> dict[str, Any]:
        """Returns all of it in JSON values."""
        return {
            "policy": self.policy,
            "devices": self.devices,
            "end_s": self.end_s,
            "jct_s": self.jct_s,
            "wjct_s": self.wjct_s,
            "waited_s": self.waited_s,
            "utilisation": self.utilisation,
            "change_s": self.change_s,
            "changes": self.changes,
            "unplaced": list(self.unplaced),
            "decision_s": list(self.decision_s),
            "jobs": [vars(job) for job in self.jobs.values()],
            "usage": [list(line) for line in self.usage],
            "decided": [vars(one) for one in self.decided],
        }
