"""Many jobs on a cluster, event by event: they come, wait, train, grow, shrink and end; nodes fail and come back.

At each event the scheduling policy is asked, as `elaunch schedule` asks it, and its answer is carried out. A job whose
allocation changes does not train for the seconds that its `Speed` says; between changes it does so many samples a
second. Work is counted in samples and ends when all of a job's are done.

Where it takes time to join a job or to leave it (`ClusterSettings.join_s`, `leave_s`), a job goes on with what it has
until its new devices take part, and others wait for devices until they are given back, as under the real daemon.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elaunch.scheduler.model import Allocation, ClusterNode, Placement, SchedulingPolicy, devices_of, merged
from elaunch.simulator.clock import EventQueue
from elaunch.simulator.cluster_model import ClusterJob, ClusterRun, ClusterSettings, DecidedChange, JobOutcome
from elaunch.simulator.traces import NodeChange


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
class _Joins:
    """Devices that a job was given take part in it."""

    name: str
    life: int
    devices: Allocation


@dataclass(frozen=True)
class _Frees:
    """Devices that somebody has given back are there for others; `lives` of their nodes."""

    devices: Allocation
    lives: Mapping[str, int]


@dataclass(frozen=True)
class _Tick:
    pass


EXACT = 1e-9
"""Rounding, as a part of an interval."""

_Event = _Arrives | _Ends | _Settles | _Joins | _Frees | _Tick | NodeChange


class _Live:
    """A job that has come and has not ended.

    Attributes:
        allocation: what it is to have.
        here: what takes part; the same, where joining and leaving takes no time.
        coming: what it was given and does not take part yet.
        life: how often it has stopped: what comes for a former one does not join.
        on_its_way: whether it was not to be changed when the policy was asked last.
    """

    def __init__(self, job: ClusterJob) -> None:
        self.job, self.state = job, job.state
        self.outcome = JobOutcome(job.state.name, job.state.basic, job.state.submitted_s)
        self.rate = self.basic_rate = 0.0
        self.since_s = self.begins_s = 0.0
        self.resumes_s = math.inf
        self.number = self.life = 0
        self.saved = 0.0  # samples of its last checkpoint
        self.allocation: dict[str, int] = {}
        self.here: dict[str, int] = {}
        self.coming: dict[str, int] = {}
        self.on_its_way = False
        self.hit = False  # it has lost a node and does not know yet

    @property
    def missing(self) -> dict[str, int]:
        """Returns what it is to have and was not given yet."""
        return _less(self.allocation, merged([self.here, self.coming]))

    @property
    def leaving(self) -> dict[str, int]:
        """Returns what takes part and is to leave."""
        return _less(self.here, self.allocation)

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
        self._queue: EventQueue[_Event] = EventQueue()
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
        self._decided: list[DecidedChange] = []
        self._ticking = False
        self._takes_time = self._settings.join_s > 0 or self._settings.leave_s > 0
        self._taken: Counter[str] = Counter()  # devices of nodes that jobs have, or have not given back yet
        self._lives: Counter[str] = Counter()  # how often a node was lost

    def run(self, name: str) -> ClusterRun:
        """Plays all events."""
        while self._queue and self._queue.next_s < self._until_s and (self._live or self._to_come):
            events = self._queue.take_all()
            happened = [self._happen(event) for event in events]
            if any(happened):
                self._ask(any(isinstance(event, _Tick) for event in events))
        # Nothing ends any more, unless it is stopped here.
        if (self._live or self._to_come) and not math.isinf(self._until_s):
            self._queue.now_s = self._until_s
        end_s = self._queue.now_s
        for live in self._live.values():
            live.advance(end_s, self._settings.checkpoint_every_s)
        unplaced = [live.state.name for live in self._live.values() if not live.state.running]
        devices = sum(node.devices for node in self._nodes.values())
        return ClusterRun(
            name, devices, end_s, self._outcomes, self._usage, self._decision_s, unplaced, tuple(self._decided)
        )

    def _happen(self, event: _Event) -> bool:
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
            self._give_back(merged([live_or_none.here, live_or_none.coming]))
            del self._live[event.name]
        elif isinstance(event, _Settles):
            live_or_none = self._live.get(event.name)
            if live_or_none is None or live_or_none.number != event.number:
                return False
            live_or_none.state = replace(live_or_none.state, settling=False)
        elif isinstance(event, _Joins):
            return self._join(event)
        elif isinstance(event, _Frees):
            self._taken.subtract(
                {node: n for node, n in event.devices.items() if self._lives[node] == event.lives[node]}
            )
        elif isinstance(event, NodeChange):
            self._change_nodes(event)
        else:
            self._ticking = False
        return True

    def _change_nodes(self, change: NodeChange) -> None:
        for names, usable in ((change.joined, True), (change.left, False), (change.drained, False)):
            for name in names:
                if name in self._nodes:
                    self._nodes[name] = replace(self._nodes[name], usable=usable)
        gone = set(change.left)
        for name in gone:
            self._lives[name] += 1
            self._taken[name] = 0
        for live in self._live.values():
            if self._takes_time:
                self._lose(live, gone)
            elif not gone.isdisjoint(live.allocation):
                live.hit = True
                live.state = replace(live.state, settling=False)

    # -- decisions ------------------------------------------------------------------------------------------------

    def _ask(self, is_tick: bool) -> None:
        """Asks the policy now, or at the next multiple of the interval."""
        now_s, interval_s = self._queue.now_s, self._settings.interval_s
        if interval_s and now_s % interval_s and not is_tick:
            self._tick()
            # A lost node is not used until then.
            for live in self._live.values():
                if live.hit:
                    self._set(live, live.here, math.inf)
            return
        # In the order in which the daemon goes through them: of one priority, as they have come.
        ordered = sorted(self._live.values(), key=lambda live: -live.state.priority)
        for live in ordered:
            live.advance(now_s, self._settings.checkpoint_every_s)
            if live.basic_rate > 0:
                left_s = (live.job.samples - live.outcome.samples) / live.basic_rate
                live.state = replace(live.state, left_s=left_s)
        on_their_way = [live.on_its_way for live in ordered]
        states = [replace(live.state, settling=True) if live.on_its_way else live.state for live in ordered]
        speeds = {name: live.job.told or live.job.speed for name, live in self._live.items()}
        began_s = self._clock()
        schedule = self._policy.schedule(states, tuple(self._nodes.values()), speeds, now_s)
        self._decision_s.append(self._clock() - began_s)
        reasons = {reason.job: reason for reason in schedule.reasons}
        for name, placement in schedule.placements.items():
            live = self._live[name]
            if dict(placement.allocation) != live.allocation:
                action, text = (reasons[name].action, reasons[name].text) if name in reasons else ("", "")
                self._decided.append(DecidedChange(now_s, name, action, dict(placement.allocation), text))
            self._carry_out(live, placement)
        if self._takes_time:
            for live in ordered:
                self._arrange(live)
        self._note_usage()
        waits = self._settings.always or any(on_their_way) or any(live.on_its_way for live in ordered)
        if interval_s and waits and self._live:
            self._tick()

    def _tick(self) -> None:
        if not self._ticking:
            interval_s = self._settings.interval_s
            self._queue.add((math.floor(self._queue.now_s / interval_s + EXACT) + 1) * interval_s, _Tick())
            self._ticking = True

    def _carry_out(self, live: _Live, placement: Placement) -> None:
        now_s = self._queue.now_s
        after = dict(placement.allocation)
        before, live.allocation = live.allocation, after
        if placement.base != live.state.base or placement.growths != live.state.growths:
            live.state = replace(live.state, base=placement.base, growths=placement.growths)
            live.basic_rate = (live.job.told or live.job.speed).rate(placement.base) if placement.base else 0.0
        if after == before and not live.hit:
            return
        if not after:
            live.state = replace(live.state, started_s=None)
            live.life += 1
            self._give_back(merged([live.here, live.coming]))
            live.coming = {}
            self._set(live, {}, 0.0)
            return
        stall_s = 0.0
        if before or live.outcome.started_s is not None:
            live.outcome.changes += 1
        else:
            live.outcome.started_s = now_s
        if not before:
            stall_s = self._settings.start_s
        elif not self._takes_time:
            stall_s = live.job.speed.change_s(before, after)
            live.outcome.change_s.append(stall_s)
            if live.hit:
                stall_s += self._settings.detect_s
        if live.hit:
            self._undo(live)
        live.state = replace(
            live.state,
            started_s=now_s if live.state.started_s is None else live.state.started_s,
            changed_s=now_s,
            changes=live.outcome.changes,
        )
        if not self._takes_time:
            self._set(live, after, stall_s)

    def _undo(self, live: _Live) -> None:
        """Takes a job that has lost a node back to its last checkpoint, if it goes on by way of checkpoints."""
        if self._settings.checkpoint_every_s:
            lost = live.outcome.samples - live.saved
            live.outcome.samples -= lost
            live.outcome.undone += lost

    def _set(self, live: _Live, here: Allocation, stall_s: float) -> None:
        """Has a job go on with what takes part after a stall; an infinite one lasts until the next change."""
        now_s = self._queue.now_s
        live.advance(now_s, self._settings.checkpoint_every_s)
        live.here = dict(here)
        live.number += 1
        if math.isinf(stall_s):
            live.rate = 0.0
            return
        live.hit = False
        live.rate = live.job.speed.rate(here) if here else 0.0
        live.resumes_s = now_s + stall_s if here else math.inf
        live.state = replace(live.state, settling=bool(here) and stall_s > 0)
        if live.state.settling:
            self._queue.add(now_s + stall_s, _Settles(live.state.name, live.number))
        if not math.isinf(ends_s := live.ends_s()):
            self._queue.add(ends_s, _Ends(live.state.name, live.number))

    # -- devices, where joining and leaving takes time ---------------------------------------------------------------

    def _arrange(self, live: _Live) -> None:
        """Gives a job what is free of what it is to have; what it is not to have leaves when the rest takes part."""
        now_s, settings = self._queue.now_s, self._settings
        if not live.allocation:
            live.on_its_way = False
            return
        unwanted = _less(live.coming, _less(live.allocation, live.here))
        if unwanted:
            live.coming = _less(live.coming, unwanted)
            self._give_back(unwanted)
        live.on_its_way = bool(live.missing or live.leaving or live.coming)
        more = live.missing
        if not live.here and not live.coming:
            base = live.state.base
            if any(self._free_on(node) < n for node, n in base.items()):
                return
            live.begins_s = now_s + settings.start_s
            self._take(live, base, live.begins_s)
            # The daemon asks for the rest when it looks again.
            more = {} if settings.interval_s else live.missing
        found = {node: n for node, n in more.items() if self._free_on(node) >= n}
        if found:
            self._take(live, found, max(now_s + settings.join_s, live.begins_s))
        leaving = live.leaving
        if leaving and not live.coming and devices_of(live.here) > devices_of(leaving):
            self._give_back(leaving)
            self._go_on(live, _less(live.here, leaving))
        if not settings.interval_s:
            live.on_its_way = bool(live.missing or live.coming)

    def _go_on(self, live: _Live, here: Allocation, more_s: float = 0.0) -> None:
        """Has a job train on other devices after the change, which takes so much longer, and those before it."""
        stall_s = 0.0
        if live.here and here:
            stall_s = live.job.speed.change_s(live.here, here)
            live.outcome.change_s.append(stall_s)
            more_s += max(0.0, live.resumes_s - self._queue.now_s)
        self._set(live, here, stall_s + more_s)

    def _lose(self, live: _Live, gone: set[str]) -> None:
        """Has a job go on without nodes that are lost, whatever the scheduler will say."""
        live.coming = {node: n for node, n in live.coming.items() if node not in gone}
        rest = {node: n for node, n in live.here.items() if node not in gone}
        if rest != live.here:
            live.advance(self._queue.now_s, self._settings.checkpoint_every_s)
            self._undo(live)
            self._go_on(live, rest, self._settings.detect_s)

    def _join(self, event: _Joins) -> bool:
        live = self._live.get(event.name)
        if live is None or live.life != event.life:
            return False
        arrived = {node: min(n, live.coming[node]) for node, n in event.devices.items() if node in live.coming}
        if not arrived:
            return False
        live.coming = _less(live.coming, arrived)
        self._go_on(live, merged([live.here, arrived]))
        return True

    def _take(self, live: _Live, devices: Allocation, at_s: float) -> None:
        self._taken.update(devices)
        live.coming = merged([live.coming, devices])
        self._queue.add(at_s, _Joins(live.state.name, live.life, devices))

    def _give_back(self, devices: Allocation) -> None:
        if devices and self._takes_time:
            lives = {node: self._lives[node] for node in devices}
            self._queue.add(self._queue.now_s + self._settings.leave_s, _Frees(devices, lives))

    def _free_on(self, name: str) -> int:
        node = self._nodes[name]
        return node.devices - self._taken[name] if node.usable else 0

    def _note_usage(self) -> None:
        allocated = sum(devices_of(live.allocation) for live in self._live.values())
        usable = sum(node.devices for node in self._nodes.values() if node.usable)
        running = sum(live.state.running for live in self._live.values())
        line = (self._queue.now_s, allocated, usable, running, len(self._live) - running)
        if self._usage and self._usage[-1][0] == line[0]:
            self._usage.pop()
        self._usage.append(line)


def _less(some: Allocation, others: Allocation) -> dict[str, int]:
    """Returns what some have and others do not."""
    return {node: n - others.get(node, 0) for node, n in some.items() if n > others.get(node, 0)}
