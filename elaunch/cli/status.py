"""What `elaunch ctl status` shows: the documents of a job as values for programs (`--json`) and as lines for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from elaunch.cli.request_plan import still_changing
from elaunch.rendezvous.membership import (
    Generation,
    GenerationStage,
    NodeDoc,
    NodeWorker,
    WorkerState,
    job_prefix,
    names_text,
    slot_of,
)
from elaunch.rendezvous.observer import Documents
from elaunch.rendezvous.rules.spares import standby_nodes
from elaunch.rendezvous.status import TrainingStatus, slow_slots, speeds_of

STATES = {
    "succeeded": "ended well",
    "failed": "ended with a failure",
    "meeting": "its nodes meet",
    "restarting": "its nodes meet again",
    "deserted": "none of its nodes is here",
    "training": "trains",
    "waiting": "waits for nodes",
    "starting": "its workers start",
    "plain": "runs, but no worker has called elaunch.init() or elaunch.hybrid()",
}
"""What a job can be doing: for programs, and in words."""


def state_of(documents: Documents) -> str:
    """Returns what the job is doing, a key of `STATES`."""
    generation = documents.generation
    if documents.result is not None:
        return "succeeded" if documents.result.succeeded else "failed"
    if generation is None:
        return "meeting"
    if not documents.nodes:
        return "deserted"
    if generation.stage is GenerationStage.TRAIN:
        return "waiting" if generation.hold else "training"
    if generation.stage is GenerationStage.ASSEMBLE:
        return "restarting"
    return "starting" if any(doc.summary.elastic for doc in documents.nodes) else "plain"


def as_values(documents: Documents, job: str, endpoint: str, now_t: float) -> dict[str, Any]:
    """Returns the same as `describe` for programs, as JSON values; `now_t` is the Unix time.

    What is not known is null; times are in seconds.
    """
    generation, status, result = documents.generation, documents.status, documents.result
    speeds = speeds_of(documents.profile)
    values: dict[str, Any] = {
        "job": job,
        "endpoint": endpoint,
        "state": state_of(documents),
        "message": None if result is None else result.message,
        "generation": None,
        "attempt": None,
        "cause": None,
        "training": None,
        "slow": slow_slots(speeds),
        "nodes": [
            {"node": doc.node, "host": doc.host, "remark": _mark(doc, documents).strip(" ()")}
            for doc in documents.nodes
        ],
        "spares": {
            "wanted": documents.config.spares if documents.config is not None else 0,
            "nodes": list(documents.spares),
            "ready": [doc.node for doc in documents.nodes if _is_ready_spare(doc, documents)],
        },
        "workers": [],
        "unreadable": [{"key": job_prefix(job) + name, "why": why} for name, why in documents.unreadable],
    }
    if generation is not None:
        values |= {"generation": generation.number, "attempt": generation.attempt, "cause": generation.cause}
        values["workers"] = [
            {
                "rank": rank,
                "worker": worker.id,
                "state": state,
                "address": address,
                "times_as_long": _factor(worker.id, speeds),
            }
            for rank, worker, state, address in _workers(documents, generation)
        ]
    if status is not None and result is None:
        values["training"] = {**asdict(status), "ago_s": max(0.0, now_t - status.t)}
        if status.recovery is not None:
            values["training"]["recovery"]["phases"] = dict(status.recovery.phases)
    return values


def describe(documents: Documents, now_t: float) -> str:
    """Returns a few words, then a line each for the training, the generation, the plan, the nodes and every worker.

    `now_t` is the Unix time, which tells how long ago something was.
    """
    generation = documents.generation
    words = STATES[state_of(documents)]
    if documents.result is not None:
        return f"{words}: {documents.result.message}"
    if generation is None:
        return f"{words}\n{_nodes_line(documents)}"
    lines = [words]
    if documents.status is not None:
        lines += _training_lines(documents.status, now_t)
    if slow := slow_slots(speeds_of(documents.profile)):
        shown = [f"{slot} ({factor:.2f} times as long as others)" for slot, factor in slow.items()]
        lines.append(f"slow: {names_text(shown)}")
    lines.append(f"generation {generation.number}, attempt {generation.attempt}: {generation.cause}")
    if generation.plan_request:
        left = still_changing(documents)
        lines.append(
            f"plan: asked for; {f'still to change over: {names_text(left)}' if left else 'all have changed over'}"
        )
    if documents.config is not None and documents.config.spares:
        n_ready = sum(_is_ready_spare(doc, documents) for doc in documents.nodes)
        lines.append(f"spares: {n_ready} of {documents.config.spares} ready")
    lines += [_nodes_line(documents), *_worker_lines(documents, generation)]
    return "\n".join(lines)


# -- the training -----------------------------------------------------------------------------------------------------


def _training_lines(status: TrainingStatus, now_t: float) -> list[str]:
    parts = [f"step {status.step:,} committed {ago_text(now_t - status.t)} ago"]
    if status.steps_per_s > 0:
        parts.append(f"{status.steps_per_s:.3g} steps/s")
    if status.has_diverged:
        parts.append("loss is not a finite number")
    elif status.loss is not None:
        parts.append(f"loss {status.loss:.6g}")
    lines = [", ".join(parts)]
    if status.copy_lag:
        lines.append(f"copies of the state: {_steps(status.copy_lag)} behind")
    if (last := status.recovery) is not None:
        lines.append(f"last recovery {ago_text(now_t - last.t)} ago, in {last.seconds:.3g} s: {last.cause}")
    return lines


def _steps(number: int) -> str:
    return f"{number:,} step{'' if number == 1 else 's'}"


def ago_text(seconds: float) -> str:
    """Returns a duration as people say it; a negative one, from the clock of another machine, is none."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} days {hours % 24} h"


# -- nodes and workers ------------------------------------------------------------------------------------------------


def _nodes_line(documents: Documents) -> str:
    present = [f"{doc.node}{_mark(doc, documents)}" for doc in documents.nodes]
    return f"nodes: {', '.join(present) or 'none'}"


def _is_ready_spare(doc: NodeDoc, documents: Documents) -> bool:
    """Returns whether a node is a spare whose workers can all take places; on standby, they have the state."""
    wanted = WorkerState.MEMBER if _is_on_standby(doc, documents) else WorkerState.READY
    ready = [worker for worker in doc.workers if worker.state is wanted]
    return (doc.node in documents.spares or _is_on_standby(doc, documents)) and len(ready) == doc.slots


def _is_on_standby(doc: NodeDoc, documents: Documents) -> bool:
    """Returns whether a node is a spare whose workers are members, so that they hold the state."""
    return documents.generation is not None and doc.node in standby_nodes(documents.generation)


def _mark(doc: NodeDoc, documents: Documents) -> str:
    generation = documents.generation
    if doc.draining:
        return " (leaves)"
    if doc.peers.cut:
        return f" (does not reach {', '.join(one.node for one in doc.peers.cut)})"
    if doc.peers.stalled:
        return " (all its workers wait for others)"
    if _is_on_standby(doc, documents):
        return f" (spare, {'holds' if _is_ready_spare(doc, documents) else 'gets'} the state)"
    if generation is None or doc.node in generation.nodes:
        return ""
    if doc.node in documents.spares:
        return " (spare, ready)" if _is_ready_spare(doc, documents) else " (spare, starts)"
    return " (waits)"


def _workers(documents: Documents, generation: Generation) -> list[tuple[int | None, NodeWorker, str, str]]:
    """Rank, worker, state and address: of the members by rank, then of the workers that are none."""
    reported = [(doc.node, worker) for doc in documents.nodes for worker in doc.workers]
    # Before training, a generation names slots, not the workers in them.
    known = {key: worker for node, worker in reversed(reported) for key in (f"{node}/{worker.local_rank}", worker.id)}
    found: list[tuple[int | None, NodeWorker, str, str]] = []
    members: set[str] = set()
    for rank, place in enumerate(generation.workers):
        worker = known.get(place.id)
        state = worker.state.value if worker is not None else "not here"
        worker = worker or NodeWorker(place.id, place.local_rank, WorkerState.STARTING)
        members.add(worker.id)
        found.append((rank, worker, state, place.address))
    found += [(None, worker, worker.state.value, worker.address) for _, worker in reported if worker.id not in members]
    return found


def _worker_lines(documents: Documents, generation: Generation) -> list[str]:
    rows = [
        ("no rank" if rank is None else f"rank {rank}", worker.id, state, address)
        for rank, worker, state, address in _workers(documents, generation)
    ]
    speeds = speeds_of(documents.profile)
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths)), row[3], _slow(row[1], speeds)]).rstrip()
        for row in rows
    ]


def _slow(worker: str, speeds: Mapping[str, float]) -> str:
    """What is said of a slow worker; empty of others. After a replacement it is of the slot, until it is found anew."""
    factor = _factor(worker, speeds)
    return f"slow: {factor:.2f} times as long as others" if factor > 1 else ""


def _factor(worker: str, speeds: Mapping[str, float]) -> float:
    return 1 / speeds.get(slot_of(worker), 1.0)
