"""What `elaunch schedule status` and the file of figures show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from elaunch.scheduler.model import ClusterNode, devices_of, merged
from elaunch.scheduler.service.changes import JobNow
from elaunch.scheduler.service.documents import (
    FINAL,
    AgentStage,
    JobProgress,
    JobSpec,
    JobStage,
    PlacementDoc,
    by_name,
    count_text,
    devices_text,
)
from elaunch.scheduler.service.stored import Stored


def as_values(stored: Stored) -> dict[str, Any]:
    """Returns all of it for programs, as JSON values; times are Unix times."""
    placements = by_name(stored.schedule.placements)
    return {
        "leader": stored.leader or None,
        "policy": stored.schedule.policy or None,
        "nodes": [asdict(node) for node in stored.schedule.nodes],
        "unreadable": stored.unreadable,
        "jobs": [
            {
                "job": spec.name,
                **_without(asdict(spec), "name", "profile"),
                **_without(asdict(stored.progress_of(spec)), "next_number", "begun_step"),
                "allocation": dict(placements.get(spec.name, PlacementDoc(spec.name)).allocation),
                "holds": held(stored.progress_of(spec)),
                "why": _why(spec, stored, placements),
            }
            for spec in stored.jobs
        ],
    }


def describe(stored: Stored) -> str:
    """Returns a line for the daemon, one for each node, and two for each job: what it has, and why."""
    placements = by_name(stored.schedule.placements)
    lines = [f"daemon {stored.leader} leads" if stored.leader else "no daemon leads: jobs go on, nothing is decided"]
    users: dict[str, list[str]] = {}
    for spec in stored.jobs:
        for name, devices in held(stored.progress_of(spec)).items():
            users.setdefault(name, []).append(f"{spec.name} {devices}")
    for node in stored.schedule.nodes:
        kind = f" of kind {node.kind}" if node.kind else ""
        remark = "" if node.usable else ", not usable"
        lines.append(
            f"node {node.name}: {count_text(node.devices)}{kind}{remark}: {', '.join(users.get(node.name, []))}"
        )
    for spec in stored.jobs:
        progress = stored.progress_of(spec)
        has = held(progress)
        step = f", step {progress.step:,}" if progress.step >= 0 else ""
        size = str(spec.basic) if spec.most == spec.basic else f"{spec.basic} to {spec.most}"
        has_text = f" on {count_text(devices_of(has))} ({devices_text(has)})" if has else ""
        lines.append(f"job {spec.name}: {_stage_text(progress)}{has_text}, of {size}{step}")
        if why := _why(spec, stored, placements):
            lines.append(f"    {why}")
    lines += [f"{key} is passed over: {why}" for key, why in stored.unreadable.items()]
    return "\n".join(line.rstrip(": ") for line in lines)


def metrics(jobs: Iterable[JobNow], nodes: Iterable[ClusterNode]) -> Iterator[str]:
    """Yields figures in Prometheus's text format."""
    jobs, nodes = list(jobs), list(nodes)
    stages = Counter(job.progress.stage for job in jobs)
    yield "# TYPE elaunch_schedule_jobs gauge"
    for stage in JobStage:
        yield f'elaunch_schedule_jobs{{stage="{stage}"}} {stages[stage]}'
    used = merged(held(job.progress) for job in jobs)
    yield "# TYPE elaunch_schedule_devices gauge"
    for node in nodes:
        usable = "true" if node.usable else "false"
        yield f'elaunch_schedule_devices{{node="{node.name}",usable="{usable}"}} {node.devices}'
    yield "# TYPE elaunch_schedule_devices_used gauge"
    for node in nodes:
        yield f'elaunch_schedule_devices_used{{node="{node.name}"}} {used.get(node.name, 0)}'
    for what, values in (
        ("job_devices", {job.spec.name: devices_of(held(job.progress)) for job in jobs}),
        ("job_attempts", {job.spec.name: job.progress.attempt - job.spec.first_attempt + 1 for job in jobs}),
        ("job_step", {job.spec.name: job.progress.step for job in jobs if job.progress.step >= 0}),
    ):
        yield f"# TYPE elaunch_schedule_{what} gauge"
        for name, value in values.items():
            yield f'elaunch_schedule_{what}{{job="{name}"}} {value}'


def held(progress: JobProgress) -> dict[str, int]:
    """Returns the devices that a job has, and those that it still waits for."""
    return merged({agent.node: agent.devices} for agent in progress.agents)


def _stage_text(progress: JobProgress) -> str:
    if progress.stage is JobStage.RUNNING:
        joined = sum(agent.stage is AgentStage.JOINED for agent in progress.agents)
        return "running" if joined == len(progress.agents) else f"running, {joined} of {len(progress.agents)} agents in"
    if progress.stage is JobStage.ENDING:
        return f"ending, then {progress.outcome}"
    return str(progress.stage)


def _why(spec: JobSpec, stored: Stored, placements: dict[str, PlacementDoc]) -> str:
    progress = stored.progress_of(spec)
    if progress.stage in FINAL or progress.stage is JobStage.ENDING:
        return progress.message
    parts = []
    if spec.name in stored.cancelled:
        parts.append("is to be cancelled")
    if progress.stage is JobStage.WAITING and progress.message:
        parts.append(progress.message)
    if progress.frozen:
        parts.append(f"does not grow: {progress.frozen}")
    if (placement := placements.get(spec.name)) is not None and placement.reason:
        parts.append(f"{placement.action}: {placement.reason}")
    return "; ".join(parts)


def _without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}
