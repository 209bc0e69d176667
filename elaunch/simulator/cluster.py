"""Many jobs on a cluster, event by event: they come, wait, train, grow, shrink and end; nodes fail and come back.

At each event the scheduling policy is asked, as `elaunch schedule` asks it, and its answer is carried out. A job whose
allocation changes does not train for the seconds that its `Speed` says; between changes it does so many samples a
second. Work is counted in samples and ends when all of a job's are done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elaunch.scheduler.model import Allocation, ClusterNode, JobState, Placement, SchedulingPolicy, Speed, devices_of
from elaunch.simulator.clock import EventQueue
from elaunch.simulator.traces import NodeChange


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
        start_s: from a job's start until its first sample.
        detect_s: from the loss of a node until its jobs know.
        checkpoint_every_s: with the loss of a node a job goes back to its last checkpoint, so far apart; 0: it loses
            nothing.
    """

    interval_s: float = 0.0
    always: bool = False
    start_s: float = 0.0
    detect_s: float = 3.94
    checkpoint_every_s: float = 0.0


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
    """

    policy: str
    devices: int
    end_s: float
    jobs: Mapping[str, JobOutcome]
    usage: Sequence[tuple[float, int, int, int, int]]
    decision_s: Sequence[float]
    unplaced: Sequence[str]

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
        }


@dataclass(frozen=True)
class _Arrives:
    job: ClusterJob


@dataclass(frozen=True)
class _Ends:
    name: str
    number: int


@dataclass(frozen=True)
class _Settles:
    name: str
    number: int


@dataclass(frozen=True)
class _Tick:
    pass


class _Live:
    """A job that has come and has not ended."""

    def __init__(self, job: ClusterJob) -> None:
        self.job, self.state = job, job.state
        self.outcome = JobOutcome(job.state.name, job.state.basic, job.state.submitted_s)
        self.rate = self.basic_rate = 0.0
        self.since_s = self.resumes_s = 0.0
        self.number = 0
        self.saved = 0.0  # samples of its last checkpoint
        self.allocation: dict[str, int] = {}
        self.hit = False  # it has lost a node and does not know yet

    def advance(self, now_s: float, checkpoint_every_s: float) -> None:
        """Counts what it has done until now."""
        trained_s = max(0.0, now_s - max(self.since_s, self.resumes_s))
        held_s = now_s - self.since_s
        if self.allocation:
            self.outcome.device_s += held_s * devices_of(self.allocation)
            self.outcome.stopped_s += held_s - trained_s
            if checkpoint_every_s and self.outcome.started_s is not None:
                last_s = (now_s - self.outcome.started_s) // checkpoint_every_s * checkpoint_every_s
                at_s = self.outcome.started_s + last_s
                if at_s > self.since_s:
                    self.saved = self.outcome.samples + self.rate * max(0.0, at_s - max(self.since_s, self.resumes_s))
        self.outcome.samples += self.rate * trained_s
        self.since_s = now_s

    def ends_s(self) -> float:
        """Returns when it will have done its work, if nothing happens."""
        left = self.job.samples - self.outcome.samples
        return max(self.since_s, self.resumes_s) + left / self.rate if self.rate > 0 else math.inf


def simulate_cluster(
    jobs: Iterable[ClusterJob],
    nodes: Sequence[ClusterNode],
    policy: SchedulingPolicy,
    name: str = "",
    changes: Iterable[NodeChange] = (),
    until_s: float = math.inf,
    settings: ClusterSettings | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> ClusterRun:
    """Plays a cluster through, until all jobs have ended or nothing more can happen.

    Args:
        jobs: that are submitted.
        nodes: of the cluster.
        policy: that shares them out.
        name: of the policy, for the result.
        changes: nodes that leave and come back, and that get slow.
        until_s: the end at the latest.
        settings: of the cluster.
        clock: in seconds, for how long decisions take.
    """
    return _Cluster(jobs, nodes, policy, changes, until_s, settings or ClusterSettings(), clock).run(name)


class _Cluster:
    def __init__(
        self,
        jobs: Iterable[ClusterJob],
        nodes: Sequence[ClusterNode],
        policy: SchedulingPolicy,
        changes: Iterable[NodeChange],
        until_s: float,
        settings: ClusterSettings,
        clock: Callable[[], float],
    ) -> None:
        self._policy, self._until_s, self._settings, self._clock = policy, until_s, settings, clock
        self._nodes = {node.name: node for node in nodes}
        self._queue: EventQueue[_Arrives | _Ends | _Settles | _Tick | NodeChange] = EventQueue()
        self._to_come = 0
        for job in jobs:
            self._queue.add(job.state.submitted_s, _Arrives(job))
            self._to_come += 1
        for change in changes:
            self._queue.add(change.at_s, change)
        self._live: dict[str, _Live] = {}
        self._outcomes: dict[str, JobOutcome] = {}
        self._usage: list[tuple[float, int, int, int, int]] = []
        self._decision_s: list[float] = []
        self._ticking = False

    def run(self, name: str) -> ClusterRun:
        """Plays all events."""
        while self._queue and self._queue.next_s < self._until_s and (self._live or self._to_come):
            happened = [self._happen(event) for event in self._queue.take_all()]
            if any(happened):
                self._ask()
        # Nothing ends any more, unless it is stopped here.
        if (self._live or self._to_come) and not math.isinf(self._until_s):
            self._queue.now_s = self._until_s
        end_s = self._queue.now_s
        for live in self._live.values():
            live.advance(end_s, self._settings.checkpoint_every_s)
        unplaced = [live.state.name for live in self._live.values() if not live.state.running]
        devices = sum(node.devices for node in self._nodes.values())
        return ClusterRun(name, devices, end_s, self._outcomes, self._usage, self._decision_s, unplaced)

    def _happen(self, event: _Arrives | _Ends | _Settles | _Tick | NodeChange) -> bool:
        """Returns whether the policy is to be asked."""
        now_s = self._queue.now_s
        if isinstance(event, _Arrives):
            live = self._live[event.job.state.name] = _Live(event.job)
            self._outcomes[live.state.name] = live.outcome
            live.since_s = now_s
            self._to_come -= 1
        elif isinstance(event, _Ends):
            live_or_none = self._live.get(event.name)
            if live_or_none is None or live_or_none.number != event.number:
                return False
            live_or_none.advance(now_s, 0.0)
            live_or_none.outcome.samples = live_or_none.job.samples
            live_or_none.outcome.ended_s = now_s
            del self._live[event.name]
        elif isinstance(event, _Settles):
            live_or_none = self._live.get(event.name)
            if live_or_none is None or live_or_none.number != event.number:
                return False
            live_or_none.state = replace(live_or_none.state, settling=False)
        elif isinstance(event, NodeChange):
            self._change_nodes(event)
        else:
            self._ticking = False
        return True

    def _change_nodes(self, change: NodeChange) -> None:
        for names, usable in ((change.joined, True), (change.left, False)):
            for name in names:
                if name in self._nodes:
                    self._nodes[name] = replace(self._nodes[name], usable=usable)
        gone = set(change.left)
        for live in self._live.values():
            if not gone.isdisjoint(live.allocation):
                live.hit = True
                live.state = replace(live.state, settling=False)

    def _ask(self) -> None:
        """Asks the policy now, or at the next multiple of the interval."""
        now_s, interval_s = self._queue.now_s, self._settings.interval_s
        if interval_s and now_s % interval_s:
            self._tick()
            # A lost node is not used until then.
            for live in self._live.values():
                if live.hit:
                    self._set(live, live.allocation, math.inf)
            return
        states = [live.state for live in self._live.values()]
        speeds = {name: live.job.told or live.job.speed for name, live in self._live.items()}
        for index, live in enumerate(self._live.values()):
            live.advance(now_s, self._settings.checkpoint_every_s)
            if live.basic_rate > 0:
                left_s = (live.job.samples - live.outcome.samples) / live.basic_rate
                states[index] = live.state = replace(live.state, left_s=left_s)
        began_s = self._clock()
        schedule = self._policy.schedule(states, tuple(self._nodes.values()), speeds, now_s)
        self._decision_s.append(self._clock() - began_s)
        for name, placement in schedule.placements.items():
            self._carry_out(self._live[name], placement)
        self._note_usage()
        if interval_s and self._settings.always and self._live:
            self._tick()

    def _tick(self) -> None:
        if not self._ticking:
            interval_s = self._settings.interval_s
            self._queue.add((self._queue.now_s // interval_s + 1) * interval_s, _Tick())
            self._ticking = True

    def _carry_out(self, live: _Live, placement: Placement) -> None:
        now_s = self._queue.now_s
        after = dict(placement.allocation)
        before = live.allocation
        if placement.base != live.state.base or placement.growths != live.state.growths:
            live.state = replace(live.state, base=placement.base, growths=placement.growths)
            live.basic_rate = (live.job.told or live.job.speed).rate(placement.base) if placement.base else 0.0
        if after == before and not live.hit:
            return
        if not after:
            live.state = replace(live.state, started_s=None, settling=False)
            self._set(live, {}, 0.0)
            return
        if not before:
            again = live.outcome.started_s is not None
            stall_s = self._settings.start_s
            if again:
                live.outcome.changes += 1
            else:
                live.outcome.started_s = now_s
        else:
            stall_s = live.job.speed.change_s(before, after)
            live.outcome.changes += 1
            live.outcome.change_s.append(stall_s)
            if live.hit:
                stall_s += self._settings.detect_s
        if live.hit and self._settings.checkpoint_every_s:
            lost = live.outcome.samples - live.saved
            live.outcome.samples -= lost
            live.outcome.undone += lost
        live.state = replace(
            live.state,
            started_s=now_s if live.state.started_s is None else live.state.started_s,
            changed_s=now_s,
            changes=live.outcome.changes,
            settling=stall_s > 0,
        )
        self._set(live, after, stall_s)

    def _set(self, live: _Live, allocation: Allocation, stall_s: float) -> None:
        """Has a job go on with an allocation after a stall; an infinite one lasts until the next change."""
        now_s = self._queue.now_s
        live.advance(now_s, self._settings.checkpoint_every_s)
        live.allocation = dict(allocation)
        live.number += 1
        if math.isinf(stall_s):
            live.rate = 0.0
            return
        live.hit = False
        live.rate = live.job.speed.rate(allocation) if allocation else 0.0
        live.resumes_s = now_s + stall_s
        if live.state.settling:
            self._queue.add(now_s + stall_s, _Settles(live.state.name, live.number))
        if not math.isinf(ends_s := live.ends_s()):
            self._queue.add(ends_s, _Ends(live.state.name, live.number))

    def _note_usage(self) -> None:
        allocated = sum(devices_of(live.allocation) for live in self._live.values())
        usable = sum(node.devices for node in self._nodes.values() if node.usable)
        running = sum(live.state.running for live in self._live.values())
        line = (self._queue.now_s, allocated, usable, running, len(self._live) - running)
        if self._usage and self._usage[-1][0] == line[0]:
            self._usage.pop()
        self._usage.append(line)
