"""The events of a job as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show.

The format is Chrome's trace event format: a list of objects with `ph` (X: from `ts` for `dur` microseconds, i: at `ts`,
C: a figure from `ts` on, M: a name), `pid` and `tid`. Here a process is the job, a node, or the schedule of a plan, and
a thread is a track of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elaunch.plan.executed import ExecutedAction, ExecutedStep, digest_of_plan
from elaunch.plan.schedule import schedule
from elaunch.plan.tiling import Plan, PlanError
from elaunch.plan.timeline import Kind, timeline
from elaunch.rendezvous.membership import node_of, slot_of
from elaunch.telemetry.events import Event, count, number, phases_of, seconds
from elaunch.telemetry.tally import end_of

TraceEvent = dict[str, Any]

JOB, FIRST_NODE, FIRST_SCHEDULE = 1, 2, 1_000_000
GENERATIONS, STEPS, RECOVERIES, CHECKPOINTS, NOTES = range(1, 6)
JOB_TRACKS = {
    GENERATIONS: "generations",
    STEPS: "steps",
    RECOVERIES: "recoveries",
    CHECKPOINTS: "checkpoints",
    NOTES: "decisions and notes",
}
AGENT = 0  # the track of a node itself; those of its workers have their local rank and 1

RELATIVE: Mapping[Kind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""What a forward pass, a whole backward pass and its two parts take beside each other: schedules assume no more."""

COMMON = ("v", "t", "kind", "node", "generation")


@dataclass
class _Lifetime:
    """Of a worker: where it is drawn, when it began and ended (Unix seconds), and how."""

    pid: int
    tid: int
    begin_t: float
    end_t: float
    args: dict[str, Any] = field(default_factory=dict)


class _Trace:
    """Collects the parts of a trace, in microseconds from its beginning."""

    def __init__(self, begin_t: float) -> None:
        self._begin_t = begin_t
        self.events: list[TraceEvent] = []

    def at(self, t: float) -> int:
        return max(0, round((t - self._begin_t) * 1e6))

    def name(self, pid: int, name: str, tracks: Mapping[int, str]) -> None:
        for kind, tid, text in [("process_name", 0, name), *(("thread_name", *track) for track in tracks.items())]:
            self.events.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": {"name": text}})

    def span(self, pid: int, tid: int, name: str, begin_t: float, end_t: float, args: Mapping[str, Any]) -> None:
        begin = self.at(begin_t)
        self.events.append(
            {
                "ph": "X",
                "name": name,
                "cat": "elaunch",
                "pid": pid,
                "tid": tid,
                "ts": begin,
                "dur": max(0, self.at(end_t) - begin),
                "args": dict(args),
            }
        )

    def instant(self, pid: int, tid: int, name: str, t: float, args: Mapping[str, Any]) -> None:
        self.events.append(
            {
                "ph": "i",
                "s": "t",
                "name": name,
                "cat": "elaunch",
                "pid": pid,
                "tid": tid,
                "ts": self.at(t),
                "args": dict(args),
            }
        )

    def figure(self, name: str, t: float, value: float) -> None:
        self.events.append({"ph": "C", "name": name, "pid": JOB, "tid": 0, "ts": self.at(t), "args": {name: value}})


def trace_of(events: Sequence[Event]) -> dict[str, Any]:
    """Returns the trace of a job, as a JSON value.

    Args:
        events: of one or more of its nodes, in the order of their times.
    """
    if not events:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    # A step and a transition are told when they are over.
    begin_t = min(float(event["t"]) - _told_after_s(event) for event in events)
    trace, end_t = _Trace(begin_t), float(events[-1]["t"])
    nodes = {node: FIRST_NODE + place for place, node in enumerate(dict.fromkeys(str(one["node"]) for one in events))}
    lives = _lifetimes(events, nodes, end_t)
    trace.name(JOB, "job", JOB_TRACKS)
    for node, pid in nodes.items():
        slots = {life.tid: slot_of(worker) for worker, life in lives.items() if life.pid == pid}
        trace.name(pid, f"node {node}", {AGENT: "agent", **dict(sorted(slots.items()))})
    for worker, life in lives.items():
        trace.span(life.pid, life.tid, worker, life.begin_t, life.end_t, life.args)
    _draw_generations(trace, events, nodes, end_t)
    _draw_steps(trace, events)
    _draw_changes(trace, events, lives)
    _draw_notes(trace, events, nodes, lives)
    _draw_schedules(trace, events)
    return {"traceEvents": trace.events, "displayTimeUnit": "ms", "otherData": {"begin": begin_t, "source": "elaunch"}}


def _told_after_s(event: Event) -> float:
    match event["kind"]:
        case "transition":
            return seconds(event.get("total_s"))
        case "step" | "checkpoint" | "resume" | "restored":
            return seconds(event.get("seconds"))
        case "actions" if (begin_t := number(event.get("begin_t"))) is not None:
            return max(0.0, float(event["t"]) - begin_t)
    return 0.0


def _own(event: Event) -> dict[str, Any]:
    return {name: value for name, value in event.items() if name not in COMMON}


def _lifetimes(events: Sequence[Event], nodes: Mapping[str, int], end_t: float) -> dict[str, _Lifetime]:
    """Returns the lifetimes of all workers whose start is in the logs; those that have not ended last to the end."""
    found: dict[str, _Lifetime] = {}
    for event in events:
        worker = str(event.get("worker"))
        if event["kind"] == "worker_started":
            track = 1 + count(event.get("local_rank"))
            found[worker] = _Lifetime(nodes[event["node"]], track, event["t"], end_t, {"pid": event.get("pid")})
        elif event["kind"] == "worker_exited" and worker in found:
            life = found[worker]
            life.end_t = max(life.begin_t, event["t"])
            life.args |= {name: event[name] for name in ("exitcode", "signal") if name in event}
    latest: dict[tuple[int, int], _Lifetime] = {}
    for life in found.values():  # one at a time in a slot, whatever the clock says
        before = latest.get((life.pid, life.tid))
        if before is not None:
            before.end_t = min(before.end_t, life.begin_t)
        latest[life.pid, life.tid] = life
    return found


def _draw_generations(trace: _Trace, events: Sequence[Event], nodes: Mapping[str, int], end_t: float) -> None:
    heard = [event for event in events if event["kind"] == "generation"]
    for event in heard:
        trace.instant(nodes[event["node"]], AGENT, f"hears of generation {event['generation']}", event["t"], {})
    first = list({event["generation"]: event for event in reversed(heard)}.values())[::-1]
    for event, until_t in zip(first, [*(one["t"] for one in first[1:]), end_t]):
        workers = event.get("workers")
        size = len(workers) if isinstance(workers, list) else 0
        name = f"generation {event['generation']}: {size} members"
        trace.span(JOB, GENERATIONS, name, event["t"], until_t, _own(event))
        trace.figure("members", event["t"], size if event.get("stage") == "train" else 0)


def _draw_steps(trace: _Trace, events: Sequence[Event]) -> None:
    before_t = -float("inf")
    for event in events:
        if event["kind"] != "step":
            continue
        took_s = seconds(event.get("seconds"))
        begin_t = max(event["t"] - took_s, min(before_t, event["t"]))
        trace.span(JOB, STEPS, f"step {count(event.get('step'))}", begin_t, event["t"], _own(event))
        before_t = event["t"]
        if took_s:
            trace.figure("samples per second", event["t"], count(event.get("samples")) / took_s)
        if (loss := number(event.get("loss"))) is not None:
            trace.figure("loss", event["t"], loss)


def _draw_changes(trace: _Trace, events: Sequence[Event], lives: Mapping[str, _Lifetime]) -> None:
    """Draws each transition with its phases, as the first member has timed them, and that all members were in it."""
    members: Mapping[object, Sequence[str]] = {
        event["generation"]: event["workers"]
        for event in events
        if event["kind"] == "generation" and isinstance(event.get("workers"), list)
    }
    before_t = -float("inf")
    for event in events:
        if event["kind"] != "transition":
            continue
        end_t = event["t"]
        begin_t = max(end_t - seconds(event.get("total_s")), min(before_t, end_t))
        before_t = end_t
        what = "recovery" if event.get("interrupted") is True else "change"
        name, args = f"{what}: {event.get('cause')}", _own(event) | {"generation": event["generation"]}
        trace.span(JOB, RECOVERIES, name, begin_t, end_t, args)
        _draw_phases(trace, JOB, RECOVERIES, event, begin_t, end_t)
        for rank, worker in enumerate(members.get(event["generation"], ())):
            life = lives.get(worker)
            if life is None or not life.begin_t < end_t <= life.end_t:
                continue
            trace.span(life.pid, life.tid, what, max(begin_t, life.begin_t), end_t, {"generation": event["generation"]})
            if rank == 0:
                _draw_phases(trace, life.pid, life.tid, event, max(begin_t, life.begin_t), end_t)


def _draw_phases(trace: _Trace, pid: int, tid: int, event: Event, begin_t: float, end_t: float) -> None:
    at_t = end_t - seconds(event.get("total_s"))
    for phase, took_s in phases_of(event).items():
        since_t, at_t = at_t, at_t + took_s
        if took_s and at_t > begin_t:
            trace.span(pid, tid, phase, max(since_t, begin_t), min(at_t, end_t), {"seconds": took_s})


def _draw_notes(
    trace: _Trace, events: Sequence[Event], nodes: Mapping[str, int], lives: Mapping[str, _Lifetime]
) -> None:
    before_t = -float("inf")
    for event in events:
        kind, t = event["kind"], event["t"]
        life = lives.get(str(event.get("worker")))
        match kind:
            case "generation" | "step" | "transition" | "worker_started" | "actions":
                continue
            case "checkpoint" | "resume" | "restored":
                begin_t = max(t - seconds(event.get("seconds")), min(before_t, t))
                before_t = t
                trace.span(JOB, CHECKPOINTS, f"{kind} {count(event.get('step'))}", begin_t, t, _own(event))
            case "decision":
                trace.instant(JOB, NOTES, f"decision: {event.get('policy')}", t, _own(event))
            case "worker_exited":
                how = end_of(event) if event.get("signal") is not None else f"exit code {end_of(event)}"
                pid, tid = (life.pid, life.tid) if life is not None else (nodes[event["node"]], AGENT)
                trace.instant(pid, tid, f"ends: {how}", t, _own(event))
            case _ if life is not None:
                trace.instant(life.pid, life.tid, kind, t, _own(event))
            case _:
                trace.instant(JOB, NOTES, f"{kind} on {event['node']}", t, _own(event))


_Executed = dict[tuple[int, str], dict[int, dict[str, ExecutedStep]]]
"""By generation and digest of a plan: by step, what its workers did in it."""


def _draw_schedules(trace: _Trace, events: Sequence[Event]) -> None:
    """Draws the schedule of each plan that a decision tells of.

    That is the one of a step as executed, where workers have told it. Else it is the planned one, over the second step
    after the decision, for the first may be slower: logs tell no more of that step than its length, to which the
    schedule is scaled. Steps whose decision is in the log of a node that is not here are drawn, too.
    """
    executed, pid = _executed(events), FIRST_SCHEDULE - 1
    decided = set[tuple[int, str]]()
    for event in (one for one in events if one["kind"] == "decision"):
        pid += 1
        try:
            plan = Plan.parse(str(event.get("plan")))
        except PlanError:
            continue
        generation, key = event["generation"], (event["generation"], digest_of_plan(plan))
        decided.add(key)
        if told := executed.get(key):
            _draw_executed(trace, pid, plan.workers, generation, told.pop(_best_known(told)))
            continue
        steps = [
            one for one in events if one["kind"] == "step" and one["generation"] == generation and one["t"] > event["t"]
        ]
        if len(steps) > 1:
            _draw_schedule(trace, pid, plan, steps[1], f"planned schedule of generation {generation}")
    for key, told in executed.items():
        if key not in decided:
            pid += 1
            _draw_executed(trace, pid, None, key[0], told[_best_known(told)])


def _best_known(told: Mapping[int, Mapping[str, ExecutedStep]]) -> int:
    """Returns the step of which most workers have told, the first one of several."""
    return max(told, key=lambda step: len(told[step]))


def _executed(events: Sequence[Event]) -> _Executed:
    """Returns what workers have told of the steps of their plans; of one step, what each told first."""
    found: _Executed = {}
    for event in events:
        told = ExecutedStep.from_fields(event) if event["kind"] == "actions" else None
        if told is not None:
            steps = found.setdefault((event["generation"], told.plan), {})
            steps.setdefault(told.step, {}).setdefault(told.worker, told)
    return found


def _draw_executed(
    trace: _Trace, pid: int, workers: Sequence[str] | None, generation: int, told: Mapping[str, ExecutedStep]
) -> None:
    """Draws what workers did in a step, and when, each in a track of its own.

    Args:
        trace: to which it is added.
        pid: of the schedule.
        workers: of the plan, in its order; None: only those are known that have told.
        generation: of the step.
        told: what each did.
    """
    tids = {worker: tid for tid, worker in enumerate(workers or sorted(told), start=1) if worker in told}
    step, n_workers = next(iter(told.values())).step, "?" if workers is None else str(len(workers))
    some = "" if str(len(tids)) == n_workers else f", {len(tids)} of {n_workers} workers"
    tracks = {tid: worker for worker, tid in tids.items()}
    trace.name(pid, f"executed schedule of generation {generation}, step {step}{some}", tracks)
    for worker, tid in tids.items():
        one = told[worker]
        args = {"node": node_of(worker), "step": step}
        for action in one.actions:
            _draw_action(trace, pid, tid, one.begin_t, action, args)
        for phase in one.phases:
            trace.span(pid, tid, phase.name, one.begin_t + phase.begins_s, one.begin_t + phase.ends_s, args)
        if one.left_out:
            after_t = one.begin_t + max((action.ends_s for action in one.actions), default=0.0)
            trace.instant(pid, tid, f"{one.left_out} more actions are not in the log", after_t, args)


def _draw_action(
    trace: _Trace, pid: int, tid: int, begin_t: float, done: ExecutedAction, common: Mapping[str, Any]
) -> None:
    """Draws an action, before it how its rows were waited for, and within it how its rows were sent."""
    args = {**common, "tile": done.action.tile, "micro_batch": done.action.micro_batch}
    if done.awaits_s < done.begins_s:
        trace.span(pid, tid, f"receive for {done.action}", begin_t + done.awaits_s, begin_t + done.begins_s, args)
    trace.span(pid, tid, str(done.action), begin_t + done.begins_s, begin_t + done.ends_s, args)
    if done.sends_s < done.sent_s:
        trace.span(pid, tid, f"send of {done.action}", begin_t + done.sends_s, begin_t + done.sent_s, args)


def _draw_schedule(trace: _Trace, pid: int, plan: Plan, step: Event, name: str) -> None:
    drawn = schedule(plan)
    costs = [sum(plan.costs[tile.layers.start : tile.layers.stop]) or len(tile.layers) for tile in plan.tiles]
    played = timeline(plan, drawn, lambda kind, tile, rows: RELATIVE[kind] * rows * costs[tile])
    if not played.step_s:
        return
    took_s = seconds(step.get("seconds"))
    scale, begin_t = took_s / played.step_s, step["t"] - took_s
    trace.name(pid, f"{name}, scaled to step {step.get('step')}", dict(enumerate(plan.workers, start=1)))
    tids = {worker: tid for tid, worker in enumerate(plan.workers, start=1)}
    for worker, actions in drawn.by_worker.items():
        for action in actions:
            since_s, until_s = played.starts_s[action] * scale, played.ends_s[action] * scale
            args = {"node": node_of(worker), "tile": action.tile, "micro_batch": action.micro_batch}
            trace.span(pid, tids[worker], str(action), begin_t + since_s, begin_t + until_s, args)
