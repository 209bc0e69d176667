"""One job over a trace of nodes, event by event.

Between events the job trains under its plan, in steps of the seconds that the estimator gives. When a worker is lost,
the step is done again: the loss is noticed, a plan is chosen, state moves. When one joins, or is seen to be slow, the
change comes between two steps. A loss meanwhile begins the recovery anew, from the state as it was distributed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elaunch.plan import Plan, holders
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.decision import History
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import Profile, WorkerProfile
from elaunch.rendezvous.membership import incarnation, node_of, slot_of, worker_id
from elaunch.simulator.clock import EventQueue
from elaunch.simulator.model import ChangeRecord, JobModel, JobRun, JobSituation, RunSpan, SpanKind, Timings, Way
from elaunch.simulator.strategies import Strategy
from elaunch.simulator.traces import NodeChange

EXACT = 1e-9
"""A step that ends within this part of itself has ended."""


def simulate_job(
    job: JobModel,
    strategy: Strategy,
    changes: Iterable[NodeChange],
    until_s: float,
    timings: Timings | None = None,
) -> JobRun:
    """Plays a job through.

    Args:
        job: that is trained.
        strategy: by which it goes on.
        changes: of the nodes that it may use, by time.
        until_s: the end.
        timings: of what is not in the plans.
    """
    return _Simulation(job, strategy, changes, until_s, timings or Timings()).run()


_SAVE, _SLOW = -1, -2


@dataclass(frozen=True)
class _Told:
    """Nodes are to leave."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class _Ready:
    """The workers of nodes can join."""

    nodes: tuple[str, ...]


@dataclass(frozen=True)
class _Due:
    """Something that the job has begun is done, unless it has begun something else since; or _SAVE, _SLOW."""

    number: int
    what: str


class _Simulation:
    def __init__(
        self, job: JobModel, strategy: Strategy, changes: Iterable[NodeChange], until_s: float, timings: Timings
    ) -> None:
        self._job, self._strategy, self._until_s, self._timings = job, strategy, until_s, timings
        self._queue: EventQueue[NodeChange | _Ready | _Told | _Due] = EventQueue()
        for change in changes:
            if change.left and timings.notice_s:
                self._queue.add(max(0.0, change.at_s - timings.notice_s), _Told(change.left))
            if change.at_s < until_s:
                self._queue.add(change.at_s, change)
        self._there: dict[str, int] = {}  # nodes, and how often they have come
        self._came: dict[str, int] = {}
        self._ready: list[str] = []
        self._leaving: set[str] = set()
        self._members: tuple[str, ...] = ()
        self._speeds: dict[str, float] = {}  # as they are
        self._seen: dict[str, float] = {}  # as the job knows them
        self._now: Plan | None = None  # under which the state is distributed
        self._preferred: Plan | None = None
        self._history = History(0.0)
        self._steps = self._saved = self._undone = 0
        self._kind: SpanKind = "wait"
        self._from_s = 0.0  # where the next span begins
        self._since_s = 0.0  # where the step began that is being done
        self._begun_s = 0.0  # since when it has not trained
        self._step_s = math.inf
        self._next: Way | None = None
        self._number = 0  # of what it has begun last
        self._at_step = False  # a change comes at the end of this step
        self._late = False  # a change is to follow the one that is going on
        self._note = ""
        self._spans: list[RunSpan] = []
        self._records: list[ChangeRecord] = []

    def run(self) -> JobRun:
        """Plays all events."""
        self._queue.add(self._timings.checkpoint_every_s, _Due(_SAVE, "save"))
        while self._queue.next_s < self._until_s:
            self._happen(self._queue.take_all())
        self._queue.now_s = self._until_s
        self._span(self._kind)
        return JobRun(
            self._strategy.name,
            self._until_s,
            self._job.batch,
            self._job.devices_of_worker,
            tuple(self._spans),
            tuple(self._records),
            self._undone,
            self._note,
        )

    # -- events --------------------------------------------------------------------------------------------------

    def _happen(self, events: Sequence[NodeChange | _Ready | _Told | _Due]) -> None:
        """Takes note of everything of one time first, and then acts on it once."""
        lost = changed = False
        for event in events:
            if isinstance(event, NodeChange):
                lost |= self._nodes(event)
            elif isinstance(event, _Ready):
                here = [f"{node}#{count}" for node, count in self._there.items()]
                self._ready += [one for one in event.nodes if one in here and one not in self._ready]
            elif isinstance(event, _Told):
                self._leaving |= {f"{node}#{self._there[node]}" for node in event.nodes if node in self._there}
            elif event.number == _SAVE:
                self._save()
            elif event.number == _SLOW:
                changed |= self._seen != self._speeds
                self._seen = dict(self._speeds)
        if lost:
            self._recover()
            return
        if not self._at_step and (changed or set(self._wanted()) != set(self._members)):
            self._plan_soon()
        for event in events:
            if isinstance(event, _Due) and event.number == self._number:
                self._done(event.what)

    def _nodes(self, change: NodeChange) -> bool:
        """Returns whether a member is lost."""
        for node in change.left:
            if node in self._there:
                self._leaving.discard(f"{node}#{self._there.pop(node)}")
        for node in change.joined:
            self._came[node] = self._there[node] = self._came.get(node, -1) + 1
        if change.joined:
            # The job begins with those who are there.
            first = self._now is None and not self._spans
            at_s = self._queue.now_s + (0.0 if first else self._timings.join_s)
            self._queue.add(at_s, _Ready(tuple(f"{node}#{self._there[node]}" for node in change.joined)))
        if change.speeds:
            self._slowed(change)
        self._ready = [one for one in self._ready if self._there.get(_name(one)) == _count(one)]
        left = tuple(worker for worker in self._members if self._there.get(node_of(worker)) == incarnation(worker))
        if left == self._members:
            return False
        if self._kind == "train":
            # The whole steps count; the rest is done again.
            self._span("train", min(self._queue.now_s, self._since_s + self._whole_steps() * self._step_s))
            self._span("redo")
        else:
            self._span(self._kind)
        self._members = left
        return True

    def _wanted(self) -> tuple[str, ...]:
        """Returns the members that the job can have now: its own ones before those that have waited."""
        mine = {f"{node_of(worker)}#{incarnation(worker)}" for worker in self._members}
        nodes = sorted((one for one in self._ready if one not in self._leaving), key=lambda one: one not in mine)
        return tuple(
            worker_id(_name(one), rank, _count(one))
            for one in nodes[: self._job.max_nodes]
            for rank in range(self._job.per_node)
        )

    def _slowed(self, change: NodeChange) -> None:
        """Goes on at the new speed, with the part of the step that is done."""
        if self._kind != "train":
            self._speeds |= change.speeds
            self._seen = dict(self._speeds)
            self._late = True
            return
        now_s = self._queue.now_s
        self._span("train")
        self._speeds |= change.speeds
        part = (now_s - self._since_s) / self._step_s
        self._step_s = self._seconds()
        self._since_s = now_s - part * self._step_s
        if self._strategy.sees_slow:
            self._queue.add(now_s + self._timings.slow_steps * self._step_s, _Due(_SLOW, "slow"))
        if self._at_step:
            self._plan_soon()

    def _save(self) -> None:
        if self._kind == "train":
            self._saved = self._steps + self._whole_steps()
        self._queue.add(self._queue.now_s + self._timings.checkpoint_every_s, _Due(_SAVE, "save"))

    # -- what follows ---------------------------------------------------------------------------------------------

    def _recover(self) -> None:
        """Begins to go on without members that are lost."""
        if self._kind in ("train", "wait"):
            self._begun_s = self._queue.now_s
        self._next = None
        if self._kind == "wait":
            self._decide()
        else:
            self._enter("detect", self._timings.detect_s)

    def _plan_soon(self) -> None:
        """Has the next change come at the end of this step, or after the change that is going on."""
        if self._kind == "wait":
            self._span("wait")
            self._begun_s = self._queue.now_s
            self._decide()
        elif self._kind == "train":
            self._number += 1
            self._at_step = True
            end_s = self._since_s + (self._whole_steps() + 1) * self._step_s
            self._queue.add(max(self._queue.now_s, end_s), _Due(self._number, "step"))
        elif self._kind in ("change", "restart"):
            self._late = True

    def _done(self, what: str) -> None:
        """Goes on after something has taken its time."""
        if what == "step":
            self._span("train")
            self._begun_s = self._queue.now_s
            self._decide()
        elif what == "detect":
            self._span("detect")
            self._enter("decide", self._decide_s())
        elif what == "decide":
            self._span("decide")
            self._decide()
        else:
            self._arrive()

    def _decide_s(self) -> float:
        """Returns how long the choice takes that is made now."""
        if self._timings.decide_s is not None:
            return self._timings.decide_s
        began_s = time.perf_counter()
        try:
            measured_s = self._way(self._wanted()).decide_s
        except NotPossible:
            measured_s = None
        return time.perf_counter() - began_s if measured_s is None else measured_s

    def _decide(self) -> None:
        """Chooses how to go on, and begins to."""
        members = self._members = self._wanted()
        try:
            if len(members) < self._job.min_nodes * self._job.per_node:
                nodes = len(members) // self._job.per_node
                raise NotPossible(f"{nodes} of the {self._job.min_nodes} nodes that it needs are there")
            self._next = self._way(members)
        except NotPossible as error:
            self._note = str(error)
            self._kind, self._at_step = "wait", False
            self._number += 1
            return
        self._note = ""
        self._enter("restart" if self._next.restarts else "change", self._next.stall_s)

    def _way(self, members: tuple[str, ...]) -> Way:
        if self._now is None or self._preferred is None:
            plan = self._strategy.first(self._job, members)
            return Way(plan, plan, "first", 0.0, 0, reason="the job begins")
        there = {f"{node}#{count}" for node, count in self._there.items()}
        lost = tuple(one for one in self._now.workers if f"{node_of(one)}#{incarnation(one)}" not in there)
        if not set(members) & set(self._now.workers):
            plan = self._strategy.first(self._job, members)
            stall_s = self._timings.restart_of(self._job)
            return Way(plan, plan, "first", stall_s, 0, True, True, "nobody is left of those before")
        history = self._history.after(self._now.workers, members)
        next_s = history.next_s(self._queue.now_s)
        profile = self._profile(self._seen)
        copies = self._job.copies if self._strategy.has_copies else None
        way = self._strategy.next(JobSituation(self._job, self._now, self._preferred, members, profile, next_s, lost))
        if way.restarts or not is_lost(self._now, lost, copies):
            return way
        stall_s = way.stall_s + self._timings.load_of(self._job)
        return replace(way, stall_s=stall_s, loses=True, reason=f"{way.reason}; state was lost with its copies")

    def _arrive(self) -> None:
        """Goes on training under the new plan."""
        way, now_s = self._next, self._queue.now_s
        assert way is not None
        self._span(self._kind)
        undone = self._steps - self._saved if way.loses else 0
        self._steps -= undone
        self._undone += undone
        before = self._now.workers if self._now is not None else ()
        members = self._members
        if before:
            self._history = self._history.after(before, members)
        self._now, self._preferred, self._next = way.plan, way.preferred_plan, None
        self._kind, self._since_s, self._at_step = "train", now_s, False
        self._step_s = self._seconds()
        self._records.append(
            ChangeRecord(
                now_s,
                way.policy,
                len(members),
                len(set(before) - set(members)),
                len(set(members) - set(before)),
                now_s - self._begun_s,
                way.moved_bytes,
                self._step_s,
                undone,
                way.reason,
                str(way.plan),
            )
        )
        late, self._late = self._late, False
        if late or set(self._wanted()) != set(members):
            self._number += 1
            self._at_step = True
            self._queue.add(now_s, _Due(self._number, "step"))

    # -- keeping the books ---------------------------------------------------------------------------------------

    def _seconds(self) -> float:
        """Returns the seconds of a step under the plan, with the speeds that workers have."""
        assert self._now is not None
        return estimate_step(self._now, self._profile(self._speeds)).step_s

    def _profile(self, speeds: dict[str, float]) -> Profile:
        profile = self._timings.known_to(self._job.profile)
        slow = {node: speed for node, speed in speeds.items() if speed != 1.0 and node in self._there}
        if not slow:
            return profile
        workers = dict(profile.workers)
        for node, speed in slow.items():
            for rank in range(self._job.per_node):
                slot = slot_of(worker_id(node, rank, 0))
                here = workers.get(slot, WorkerProfile())
                workers[slot] = replace(here, speed=here.speed * speed)
        return replace(profile, workers=workers)

    def _whole_steps(self, end_s: float | None = None) -> int:
        end_s = self._queue.now_s if end_s is None else end_s
        return math.floor((end_s - self._since_s) / self._step_s + EXACT)

    def _enter(self, kind: SpanKind, length_s: float) -> None:
        self._kind, self._at_step = kind, False
        self._number += 1
        self._queue.add(self._queue.now_s + length_s, _Due(self._number, kind))

    def _span(self, kind: SpanKind, end_s: float | None = None) -> None:
        """Notes what the job has done since the last note, until now or another time."""
        end_s = self._queue.now_s if end_s is None else end_s
        busy = steps = 0
        if kind == "train" and self._now is not None:
            steps = max(0, self._whole_steps(end_s))
            busy = len(self._now.workers) - len(self._now.idle)
            self._since_s += steps * self._step_s
        if end_s > self._from_s or steps:
            self._spans.append(RunSpan(self._from_s, max(end_s, self._from_s), kind, len(self._members), busy, steps))
            self._from_s = max(end_s, self._from_s)
        self._steps += steps


def _name(ready: str) -> str:
    return ready.rpartition("#")[0]


def _count(ready: str) -> int:
    return int(ready.rpartition("#")[2])


def is_lost(plan: Plan, lost: Sequence[str], copies: int | None) -> bool:
    """Returns whether with these workers all is lost of some part of the state.

    Args:
        plan: under which it is distributed.
        lost: workers that are gone.
        copies: of each worker's part, on the next workers of other nodes (of one node alone, on the next ones); None:
            there are none, but each holder of a layer has all of its state.
    """
    gone = set(lost)
    if not gone:
        return False
    if copies is None:
        return any(all(not gone.isdisjoint(workers) for workers in some) for some in holders(plan))
    idle = set(plan.idle)
    workers = [worker for worker in plan.workers if worker not in idle]
    for place, worker in enumerate(workers):
        if worker in gone:
            others = workers[place + 1 :] + workers[:place]
            keepers = [one for one in others if node_of(one) != node_of(worker)] or others
            if gone.issuperset(keepers[:copies]):
                return True
    return False
