"""What has become of a job, from its events one after the other, and the document of it that the page shows.

Nothing here grows with the length of a job: steps are thinned, and of all else the newest are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elaunch.rendezvous.membership import node_of, slot_of
from elaunch.telemetry.events import Event, count, number, phases_of, seconds
from elaunch.telemetry.tally import end_of
from elaunch.telemetry.ui.steps import StepCurve
from elaunch.telemetry.ui.texts import (
    MOST_CANDIDATES,
    MOST_NAME,
    by_name,
    candidate,
    incarnation,
    listed,
    name,
    text,
    told,
)

MOST_CHANGES = 200
MOST_HANGS = 50
MOST_NOTES = 200
MOST_SLOTS = 5000
MOST_REMARKS = 20
LATE_S = 30.0
"""By how much one node may hear of a generation later than another; a lower number after that is another job's."""

STAGES = {"start": "starting", "train": "training", "assemble": "meeting again"}


@dataclass
class SlotHistory:
    """A worker's place, and the newest worker in it."""

    worker: str
    node: str
    local_rank: int | None = None
    pid: int | None = None
    rank: int | None = None
    since_t: float | None = None
    ended_t: float | None = None
    end: str = ""
    restarts: int = 0
    has_been_member: bool = False
    remarks: dict[str, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """Returns one of member, starting, left, done, failed."""
        if self.end:
            return "done" if self.end == "0" else "failed"
        if self.rank is not None:
            return "member"
        return "left" if self.has_been_member else "starting"

    def document(self, slot: str, is_spare: bool) -> dict[str, Any]:
        """Returns it as JSON; `is_spare`: the node holds its workers ready for when another one goes."""
        return {
            "slot": slot,
            "worker": self.worker,
            "node": self.node,
            "rank": self.rank,
            "state": "spare" if is_spare and self.state in ("starting", "member") else self.state,
            "pid": self.pid,
            "since_t": self.since_t,
            "ended_t": self.ended_t,
            "end": "" if self.end == "0" else self.end,
            "restarts": self.restarts,
            "remarks": list(self.remarks.values()),
        }


@dataclass
class JobChange:
    """A generation, and what came of it; `run` tells jobs apart that have written into one log after the other."""

    generation: int
    t: float
    cause: str
    stage: str
    size: int
    run: int
    recovery: dict[str, Any] | None = None
    decision: dict[str, Any] | None = None
    plan: str = ""


class JobHistory:
    """Adds up the events of a job.

    Args:
        job: its name; empty: not known.
        source: where the events come from: `logs`, `agent` or `status`.
    """

    def __init__(self, job: str = "", source: str = "logs") -> None:
        self._job, self._source = job, source
        self._steps = StepCurve()
        self._slots: dict[str, SlotHistory] = {}
        self._nodes: dict[str, str] = {}
        self._spares: tuple[str, ...] = ()
        self._changes: deque[JobChange] = deque(maxlen=MOST_CHANGES)
        self._hangs: deque[dict[str, Any]] = deque(maxlen=MOST_HANGS)
        self._stacks: deque[str] = deque(maxlen=MOST_HANGS)
        self._notes: deque[dict[str, Any]] = deque(maxlen=MOST_NOTES)
        self._recoveries = self._events = self._all_hangs = self._all_changes = 0
        self._span_t: tuple[float, float] | None = None
        self._stage = ""
        self._generation = self._run = 0

    def take(self, event: Event) -> None:
        """Adds an event."""
        t = number(event.get("t"))
        if t is None:
            return
        self._events += 1
        begin_t, end_t = self._span_t or (t, t)
        self._span_t = min(begin_t, t), max(end_t, t)
        node = name(event.get("node"))
        if node not in self._nodes and len(self._nodes) < MOST_SLOTS:
            self._nodes[node] = ""
        match event.get("kind"):
            case "step":
                self._steps.take(event)
            case "generation":
                self._take_generation(event, t)
            case "worker_started":
                self._take_start(event, t)
            case "worker_exited":
                self._take_end(event, t)
            case "decision":
                self._take_decision(event, t)
            case "transition":
                self._take_transition(event, t)
            case "hang":
                self._take_hang(event, t)
            case "actions":
                pass  # for `elaunch trace`: every worker tells it, for each plan
            case kind:
                self._take_note(str(kind), event, t)

    # -- members --------------------------------------------------------------------------------------------------

    def _slot(self, worker: str) -> SlotHistory:
        slot = slot_of(worker)
        found = self._slots.get(slot)
        if found is None:
            if len(self._slots) >= MOST_SLOTS:  # none is that large
                return SlotHistory(worker, node_of(worker))
            found = self._slots[slot] = SlotHistory(worker, node_of(worker))
        if worker != found.worker and "#" in worker:
            if "#" in found.worker:
                if incarnation(worker) < incarnation(found.worker):
                    return SlotHistory(worker, found.node)  # told late: another has its place by now
                rest = SlotHistory(worker, found.node, found.local_rank, restarts=found.restarts + 1)
                found = self._slots[slot] = rest
            else:
                found.worker = worker
        return found

    def _take_start(self, event: Event, t: float) -> None:
        worker = name(event.get("worker"))
        if self._slot(worker).end:  # one of this name has ended in an earlier run
            self._slots.pop(slot_of(worker), None)
        slot = self._slot(worker)
        slot.pid, slot.since_t, slot.local_rank = count(event.get("pid")), t, count(event.get("local_rank"))

    def _take_end(self, event: Event, t: float) -> None:
        slot = self._slot(name(event.get("worker")))
        slot.end, slot.ended_t, slot.rank = end_of(event), t, None

    def _take_generation(self, event: Event, t: float) -> None:
        generation, stage = count(event.get("generation")), name(event.get("stage"))
        if generation < self._generation:
            known = next((one for one in reversed(self._changes) if self._is_change(one, generation)), None)
            is_late = known is not None and t - known.t < LATE_S and not self._is_over()
            if stage != "start" or is_late:
                return  # another node's line
            self._begin_again()
        change = self._change(generation, t)
        if change.stage:
            return  # another node's line of the same one
        self._generation, self._stage = generation, stage
        workers = [name(one) for one in listed(event.get("workers"))[:MOST_SLOTS]]
        if stage == "train":
            for slot in self._slots.values():
                slot.rank = None
            for rank, worker in enumerate(workers):
                member = self._slot(worker)
                if not member.end:
                    member.rank, member.has_been_member = rank, True
        else:
            for worker in workers:
                self._slot(worker)
        change.t, change.cause, change.stage, change.size = t, text(event.get("cause")), stage, len(workers)

    def _begin_again(self) -> None:
        """Begins with the next job in the same log, or the same job started anew."""
        self._run += 1
        self._slots.clear()
        self._steps.go_back()

    # -- changes --------------------------------------------------------------------------------------------------

    def _change(self, generation: int, t: float) -> JobChange:
        known = next((one for one in reversed(self._changes) if self._is_change(one, generation)), None)
        return known or self._add(JobChange(generation, t, "", "", 0, self._run))

    def _is_change(self, change: JobChange, generation: int) -> bool:
        return change.run == self._run and change.generation == generation

    def _add(self, change: JobChange) -> JobChange:
        self._all_changes += 1
        self._changes.append(change)
        return change

    def _take_decision(self, event: Event, t: float) -> None:
        generation = count(event.get("generation"))
        change = self._change(generation, t)
        if change.decision is not None and change.plan:  # another plan in the same generation
            change = self._add(JobChange(generation, t, change.cause, change.stage, change.size, self._run))
        plan = event.get("plan")
        change.plan = plan if isinstance(plan, str) else ""
        change.decision = {
            "t": t,
            "policy": name(event.get("policy")),
            "reason": text(event.get("reason")),
            "candidates": [
                candidate(one) for one in listed(event.get("candidates"))[:MOST_CANDIDATES] if isinstance(one, Mapping)
            ],
        }
        change.cause = change.cause or change.decision["reason"]

    def _take_transition(self, event: Event, t: float) -> None:
        generation = count(event.get("generation"))
        if self._source == "status":  # these documents do not tell to which generation a recovery belongs
            change = self._add(JobChange(generation, t, "", "", 0, self._run))
        else:
            change = self._change(generation, t)
        interrupted = event.get("interrupted") is True
        self._recoveries += interrupted
        change.recovery = {
            "t": t,
            "cause": text(event.get("cause")),
            "interrupted": interrupted,
            "total_s": seconds(event.get("total_s")),
            "phases": {phase: took_s for phase, took_s in phases_of(event).items() if took_s > 0},
            "bytes_moved": count(event.get("bytes_moved")),
            "moved_over": name(event.get("moved_over") or ""),
        }
        change.cause = change.cause or change.recovery["cause"]

    # -- trouble --------------------------------------------------------------------------------------------------

    def _take_hang(self, event: Event, t: float) -> None:
        self._all_hangs += 1
        stacks = event.get("stacks")
        self._stacks.append(stacks if isinstance(stacks, str) else "")
        doing = event.get("doing")
        if event.get("state") is not None:
            doing = f"stopped for {seconds(event.get('stopped_s')):.3g} s"
        elif event.get("timer") is not None:
            doing = f"its own timer {text(event.get('timer'))} has expired"
        self._hangs.append(
            {
                "number": self._all_hangs - 1,
                "t": t,
                "worker": name(event.get("worker")),
                "step": number(event.get("step")),
                "doing": text(doing or "no progress"),
                "since_s": number(event.get("since_s")),
                "limit_s": number(event.get("limit_s")),
                "place": text(event.get("place") or ""),
                "waits": [text(one) for one in listed(event.get("waits"))[:MOST_CANDIDATES]],
                "stacks": text(self._stacks[-1]),
                "node": name(event.get("node")),
            }
        )

    def stacks_path(self, hang: int) -> str:
        """Returns the file of a hang's stacks, by its number; empty: it has none, or is no longer kept."""
        place = hang - (self._all_hangs - len(self._stacks))
        return self._stacks[place] if 0 <= place < len(self._stacks) else ""

    def _take_note(self, kind: str, event: Event, t: float) -> None:
        if kind == "resume":
            self._steps.go_back()
        words, is_bad = told(kind, event)
        worker = name(event.get("worker") or "")
        if kind == "spares":
            self._spares = tuple(name(one) for one in listed(event.get("nodes"))[:MOST_SLOTS])
        elif kind == "cut":
            self._nodes[name(event.get("node"))] = words if is_bad else ""
        elif worker and kind in ("slow", "health"):
            remarks, about = self._slot(worker).remarks, f"{kind} {name(event.get('subject') or '')}"
            remarks.pop(about, None)
            if is_bad and len(remarks) < MOST_REMARKS:
                remarks[about] = words
        self._notes.append(
            {
                "t": t,
                "kind": kind[:MOST_NAME],
                "node": name(event.get("node")),
                "worker": worker,
                "text": words,
                "bad": is_bad,
            }
        )

    # -- what the page shows --------------------------------------------------------------------------------------

    def plan_of(self, change: int) -> str:
        """Returns the text of a change's plan, by the change's number; empty: there is none."""
        place = change - (self._all_changes - len(self._changes))
        return self._changes[place].plan if 0 <= place < len(self._changes) else ""

    def document(self) -> dict[str, Any]:
        """Returns what the page shows, as JSON."""
        newest, rate = self._steps.newest, self._steps.rate()
        first = self._all_changes - len(self._changes)
        slots = [(slot, one) for slot, one in self._slots.items() if one.rank is not None or "#" in one.worker]
        if not slots:
            slots = list(self._slots.items())
        slots.sort(key=lambda one: by_name(one[0]))
        nodes = dict.fromkeys((one.node for _, one in slots), "") | self._nodes
        return {
            "job": self._job,
            "source": self._source,
            "state": self._state(),
            "begin_t": None if self._span_t is None else self._span_t[0],
            "end_t": None if self._span_t is None else self._span_t[1],
            "generation": self._generation,
            "events": self._events,
            "members": sum(one.rank is not None for _, one in slots),
            "recoveries": self._recoveries,
            "step": None if newest is None else count(newest.get("step")),
            "step_t": None if newest is None else newest["t"],
            "loss": None if newest is None else number(newest.get("loss")),
            "copy_lag": None if newest is None or newest.get("copy_lag") is None else count(newest["copy_lag"]),
            "steps_per_s": None if rate is None else rate[0],
            "samples_per_s": None if rate is None else rate[1],
            "nodes": [
                {"node": node, "remark": remark or ("spare" if node in self._spares else "")}
                for node, remark in sorted(nodes.items(), key=lambda one: by_name(one[0]))
            ],
            "slots": [one.document(slot, one.node in self._spares) for slot, one in slots],
            "steps": self._steps.document(),
            "changes": self._change_documents(first),
            "hangs": list(self._hangs),
            "notes": list(self._notes),
            "left_off": {"changes": first, "hangs": self._all_hangs - len(self._hangs)},
        }

    def _change_documents(self, first: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        before = None
        for place, change in enumerate(self._changes):
            found.append(
                {
                    "number": first + place,
                    "generation": change.generation,
                    "t": change.t,
                    "cause": change.cause,
                    "stage": change.stage,
                    "members": change.size,
                    "recovery": change.recovery,
                    "decision": change.decision,
                    "plan": first + place if change.plan else None,
                    "plan_before": before,
                }
            )
            if change.plan:
                before = first + place
        return found

    def _is_over(self) -> bool:
        """Returns whether all workers have ended that are known to have started."""
        started = [one for one in self._slots.values() if one.pid is not None]
        return (
            bool(started)
            and all(one.end for one in started)
            and not any(one.rank is not None for one in self._slots.values())
        )

    def _state(self) -> str:
        if not self._is_over():
            return STAGES.get(self._stage, "")
        failed = any(one.state == "failed" for one in self._slots.values())
        return "over, with workers that failed" if failed else "over"


def history_of(events: Iterable[Event], job: str = "", source: str = "logs") -> JobHistory:
    """Returns the history that these events make, in the order of their times."""
    history = JobHistory(job, source)
    for event in events:
        history.take(event)
    return history
