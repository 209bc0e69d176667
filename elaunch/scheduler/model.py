"""What a scheduler is told and what it answers: nodes, jobs, allocations, reasons. Pure.

    (jobs, nodes, speeds, now_s, settings) -> ClusterSchedule(allocations, reasons)

Every policy (`Suika`, and those that it is compared with) has this one interface, so that the daemon, the simulator
and the tests call the same functions. Times are seconds of one clock, the caller's; none is read here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

Allocation = Mapping[str, int]
"""Devices by the name of their node, each at least one; empty: the job holds nothing."""


def devices_of(allocation: Allocation) -> int:
    """Returns how many devices an allocation has."""
    return sum(allocation.values())


@dataclass(frozen=True)
class ClusterNode:
    """A node of the cluster.

    Attributes:
        name: unique.
        devices: how many it has.
        kind: of its devices; devices of one kind are equally fast.
        rack: nodes of one rack are nearer to each other than to others.
        usable: False while it is drained or down: nothing new is placed there, and what is there leaves.
    """

    name: str
    devices: int
    kind: str = ""
    rack: str = ""
    usable: bool = True


@dataclass(frozen=True)
class Growth:
    """One step by which a job has grown beyond its basic demand.

    Attributes:
        devices: that it brought.
        benefit: the marginal benefit B that it was given for.
        at_s: when it was given.
    """

    devices: Allocation
    benefit: float
    at_s: float


@dataclass(frozen=True)
class JobState:
    """What a scheduler knows of a job.

    Attributes:
        name: unique.
        submitted_s: when it came.
        basic: devices that it needs to run at all, as a job that cannot grow asks for.
        most: devices that it can use; equal to `basic` if it is not elastic.
        unit: it grows and shrinks by so many devices.
        whole_nodes: it takes all devices of a node or none.
        kinds: of devices that it can run on; empty: any.
        priority: higher goes first, and may take the basic demand of lower ones where settings permit that.
        user: whose quota counts.
        started_s: when it got its basic demand; None: it waits.
        base: its basic demand, where it runs.
        growths: what it has beyond that, in the order in which it got it.
        changed_s: when its allocation changed last.
        changes: how often its allocation has changed since it started.
        left_s: seconds that it still needs at its basic demand, if somebody knows.
        settling: it is on its way to another allocation and is not to be changed before it has arrived.
        frozen: why it must not grow; empty if it may ("no profile yet", "does not shrink").
    """

    name: str
    submitted_s: float
    basic: int
    most: int
    unit: int = 1
    whole_nodes: bool = False
    kinds: tuple[str, ...] = ()
    priority: int = 0
    user: str = ""
    started_s: float | None = None
    base: Allocation = field(default_factory=dict)
    growths: tuple[Growth, ...] = ()
    changed_s: float = float("-inf")
    changes: int = 0
    left_s: float | None = None
    settling: bool = False
    frozen: str = ""

    @property
    def running(self) -> bool:
        """Whether it has its basic demand."""
        return self.started_s is not None

    @property
    def allocation(self) -> Allocation:
        """All that it holds."""
        return merged([self.base, *(growth.devices for growth in self.growths)])


class Speed(Protocol):
    """How fast one job is on what it might get: from its profile, from a table, or from what it has reported.

    An implementation answers the same question in the same way each time, and keeps what is expensive to find.
    """

    def rate(self, allocation: Allocation) -> float:
        """Returns samples per second under the best plan for these devices; 0 if there is none."""

    def change_s(self, before: Allocation, after: Allocation) -> float:
        """Returns the seconds of training that the way from one allocation to the other costs the job."""


@dataclass(frozen=True)
class Reason:
    """Why a job gets what it gets, for users: one line in `text`, which names the values.

    Attributes:
        job: whose.
        action: "start", "grow", "shrink", "move", "stop", "keep" or "wait".
        text: without the name of the job.
        benefit: the marginal benefit B of a growth, or of what is taken back.
    """

    job: str
    action: str
    text: str
    benefit: float | None = None


@dataclass(frozen=True)
class Placement:
    """What a job is to have.

    Attributes:
        base: its basic demand; empty: it waits.
        growths: beyond that.
    """

    base: Allocation = field(default_factory=dict)
    growths: tuple[Growth, ...] = ()

    @property
    def allocation(self) -> Allocation:
        """All of it."""
        return merged([self.base, *(growth.devices for growth in self.growths)])


@dataclass(frozen=True)
class ClusterSchedule:
    """What every job is to have from now on.

    Attributes:
        placements: of each job that was given, by name.
        reasons: one for each job whose allocation changes, and for each that waits.
    """

    placements: Mapping[str, Placement]
    reasons: tuple[Reason, ...] = ()


class SchedulingPolicy(Protocol):
    """Decides what every job gets."""

    def schedule(
        self, jobs: Iterable[JobState], nodes: Iterable[ClusterNode], speeds: Mapping[str, Speed], now_s: float
    ) -> ClusterSchedule:
        """Returns what every job is to have; a job without a speed does not grow.

        Holds for every schedule: no node has more devices allocated than it has, nothing is placed on a node that is
        not usable, a job has its basic demand whole or nothing, and nobody has more than `most`.
        """


def merged(allocations: Iterable[Allocation]) -> dict[str, int]:
    """Returns the sum of allocations, nodes in the order in which they come first."""
    total: dict[str, int] = {}
    for allocation in allocations:
        for node, devices in allocation.items():
            total[node] = total.get(node, 0) + devices
    return total
