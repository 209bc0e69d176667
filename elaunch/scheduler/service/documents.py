"""The scheduler's documents in etcd, under ``/elaunch-schedule/<scheduler>/``: frozen values in the form of `codec`.

leader           leased; which daemon leads                     text
jobs/<job>       created once by who submits it                 JobSpec
cancel/<job>     by who wants it to end                         text: who
progress/<job>   compare-and-swap by the leading daemon         JobProgress
schedule         the same: what each job is to have, and why    ScheduleDoc
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from elaunch.errors import UsageError
from elaunch.scheduler.model import Allocation, Growth, Placement, merged

PREFIX = "/elaunch-schedule/"
NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")
_AGENT_NAME = re.compile(rf"({NAME.pattern})\.([0-9]{{1,18}})\.([0-9]{{1,18}})")
OWN_FLAGS = (
    *("--nnodes", "--nproc-per-node", "--node-name", "--standalone"),
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id"),
)
"""Flags of `elaunch` that the scheduler gives, and a job may not."""

Devices = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A job as it was submitted.

    Attributes:
        name: unique, of letters, digits, `-` and `_`.
        command: arguments of `elaunch`: its flags, the script and the script's arguments.
        folder: in which it runs.
        basic: devices that it needs to run at all.
        most: devices that it can use.
        unit: it grows by so many.
        whole_nodes: it takes all devices of a node or none.
        kinds: of devices that it can run on; empty: any.
        priority: higher goes first.
        user: whose quota counts.
        profile: the text of a profile; empty: it is measured while it trains.
        rates: samples per second by number of devices, if somebody knows them; they go before a profile.
        global_batch_size, micro_batch_size: samples of a step and of a micro-batch; 0: no profile is of use.
        pp, tp: stages of a pipeline and workers of a tensor-parallel group, on the basic demand.
        options: for the cluster's command (`sbatch`).
        attempts: how often it may fail in a row without progress.
        start_s: how long it may take until its first step.
        leave_s: how long an agent that was asked to leave may take.
        submitted_t: Unix time.
        first_attempt: one more than the last of a former job of this name.
    """

    name: str
    command: tuple[str, ...]
    folder: str
    basic: int
    most: int
    unit: int = 1
    whole_nodes: bool = False
    kinds: tuple[str, ...] = ()
    priority: int = 0
    user: str = ""
    profile: str = ""
    rates: tuple[tuple[int, float], ...] = ()
    global_batch_size: int = 0
    micro_batch_size: int = 0
    pp: int = 1
    tp: int = 1
    options: tuple[str, ...] = ()
    attempts: int = 3
    start_s: float = 1800.0
    leave_s: float = 120.0
    submitted_t: float = 0.0
    first_attempt: int = 0

    def check(self) -> None:
        """Raises `UsageError` where a value cannot be used."""
        if not NAME.fullmatch(self.name):
            raise UsageError(f"name {self.name!r}: expected 1 to 60 letters, digits, '-' and '_'")
        if not 1 <= self.basic <= self.most:
            raise UsageError(f"basic {self.basic}, most {self.most}: expected 1 <= basic <= most devices")
        if self.unit < 1 or self.attempts < 1:
            raise UsageError("unit and attempts must be 1 or more")
        if self.pp < 1 or self.tp < 1 or self.basic % (self.pp * self.tp):
            raise UsageError(
                f"basic {self.basic}, pp {self.pp}, tp {self.tp}: expected whole pipelines of pp × tp devices"
            )
        if not (0 < self.micro_batch_size <= self.global_batch_size or self.global_batch_size == 0):
            raise UsageError(
                "global_batch_size and micro_batch_size go together: how many samples a step has, and how "
                "many of them a worker does at once"
            )
        if any(devices < 1 or rate < 0 for devices, rate in self.rates):
            raise UsageError("rates: expected samples per second, 0 or more, by number of devices, 1 or more")
        if not (self.start_s > 0 and self.leave_s > 0):
            raise UsageError("start and leave must be more than 0 seconds")
        if not self.command:
            raise UsageError("the job has no command: give `elaunch`'s arguments, such as train.py --steps 100")
        for word in self.command:
            if not word.startswith("-"):
                break
            flag = word.partition("=")[0].replace("_", "-")
            if flag in OWN_FLAGS:
                raise UsageError(f"{flag} is given by the scheduler: leave it out of the job's command")


class JobStage(enum.StrEnum):
    """What becomes of a job. The last three are final; an ending job goes to what its `outcome` says."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


FINAL = (JobStage.DONE, JobStage.FAILED, JobStage.CANCELLED)


class AgentStage(enum.StrEnum):
    """How far an agent is. Each stage begins by being written; then the cluster or the job is asked."""

    STARTING = "starting"
    QUEUED = "queued"
    RUNNING = "running"
    JOINED = "joined"
    LEAVING = "leaving"
    STOPPING = "stopping"
    KILLED = "killed"


GOING = (AgentStage.LEAVING, AgentStage.STOPPING, AgentStage.KILLED)


@dataclass(frozen=True, slots=True)
class AgentDoc:
    """An agent that has not ended, as far as is known.

    Attributes:
        number: unique in its attempt.
        node: where.
        devices: that it has.
        stage: how far it is.
        since_t: Unix time at which that stage began.
    """

    number: int
    node: str
    devices: int
    stage: AgentStage
    since_t: float

    @property
    def member(self) -> str:
        """Returns its name among the nodes of its job: agents on one machine are several nodes."""
        return f"{self.node}-{self.number}"

    @property
    def going(self) -> bool:
        """Returns whether it was asked to leave."""
        return self.stage in GOING


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job is; the leading daemon writes it.

    Attributes:
        stage: what becomes of it.
        outcome: of one that is ending: what it is when its agents have ended.
        message: why it is so, for people.
        attempt: how often it was started before.
        agents: that have not ended.
        next_number: of the next agent of this attempt.
        least_nodes: agents with which it started: fewer keep the state and wait; given to all agents of the attempt.
        started_t: Unix time at which this attempt began.
        first_step_t: Unix time at which this attempt was known to have committed a step; 0: it has not.
        step: newest step known to have committed in any attempt, -1 before one; `begun_step` is that before this one.
        failures: attempts in a row that ended without progress.
        arrivals: agents in a row that ended before they joined.
        frozen: why it is not to grow.
        not_before_t: Unix time until which it is not to start, or, with `frozen`, not to grow.
        asked_t: Unix time at which its placement began to differ from what it has; 0: it does not.
        changes: how often its placement has changed since it first started, attempts that began anew counted.
        ended_t: Unix time at which it became final.
    """

    stage: JobStage = JobStage.WAITING
    outcome: JobStage = JobStage.WAITING
    message: str = ""
    attempt: int = 0
    agents: tuple[AgentDoc, ...] = ()
    next_number: int = 0
    least_nodes: int = 1
    started_t: float = 0.0
    first_step_t: float = 0.0
    step: int = -1
    begun_step: int = -1
    failures: int = 0
    arrivals: int = 0
    frozen: str = ""
    not_before_t: float = 0.0
    asked_t: float = 0.0
    changes: int = 0
    ended_t: float = 0.0

    @property
    def staying(self) -> tuple[AgentDoc, ...]:
        """Returns the agents that were not asked to leave."""
        return tuple(agent for agent in self.agents if not agent.going)


@dataclass(frozen=True, slots=True)
class GrowthDoc:
    """A growth, as `model.Growth`."""

    devices: Devices
    benefit: float
    at_t: float


@dataclass(frozen=True, slots=True)
class PlacementDoc:
    """What a job is to have.

    Attributes:
        job: its name.
        attempt: of the job, for which it counts.
        base: its basic demand; empty: it waits.
        growths: beyond that.
        started_t: Unix time at which it was first given its basic demand; None: it waits.
        changed_t: Unix time of the last change.
        action, reason: the scheduler's newest reason about it.
    """

    job: str
    attempt: int = 0
    base: Devices = ()
    growths: tuple[GrowthDoc, ...] = ()
    started_t: float | None = None
    changed_t: float = 0.0
    action: str = ""
    reason: str = ""

    @property
    def placement(self) -> Placement:
        """Returns the same for the policies."""
        growths = [Growth(dict(one.devices), one.benefit, one.at_t) for one in self.growths]
        return Placement(dict(self.base), tuple(growths))

    @property
    def allocation(self) -> Allocation:
        """Returns all of it."""
        return merged([dict(self.base), *(dict(one.devices) for one in self.growths)])


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node as it was at the last decision, for people."""

    name: str
    devices: int
    kind: str
    rack: str
    usable: bool


@dataclass(frozen=True, slots=True)
class ScheduleDoc:
    """The newest decision of the scheduler, and what it was made of: placements of all jobs change at once."""

    policy: str = ""
    changed_t: float = 0.0
    placements: tuple[PlacementDoc, ...] = ()
    nodes: tuple[NodeRow, ...] = ()


def devices_text(allocation: Allocation) -> str:
    """Returns an allocation for people, such as `2 on n1, 1 on n3`."""
    return ", ".join(f"{devices} on {node}" for node, devices in sorted(allocation.items())) or "nothing"


def count_text(devices: int) -> str:
    """Returns a number of devices for people."""
    return f"{devices} device{'' if devices == 1 else 's'}"


def pairs(allocation: Allocation) -> Devices:
    """Returns an allocation as documents have it."""
    return tuple(sorted(allocation.items()))


def agent_name(job: str, attempt: int, number: int) -> str:
    """Returns the name of an agent for the cluster."""
    return f"{job}.{attempt}.{number}"


def read_agent_name(name: str) -> tuple[str, int, int] | None:
    """Returns job, attempt and number of an agent; None: it is no such name."""
    found = _AGENT_NAME.fullmatch(name)
    return (found[1], int(found[2]), int(found[3])) if found else None


def by_name(placements: Iterable[PlacementDoc]) -> dict[str, PlacementDoc]:
    """Returns placements by their jobs."""
    return {one.job: one for one in placements}
