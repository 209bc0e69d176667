"""From the scheduler's documents to what a policy is told, and from its answer to the next `ScheduleDoc`. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from elaunch.scheduler.model import ClusterNode, ClusterSchedule, JobState, SchedulingPolicy, Speed
from elaunch.scheduler.service.advance import WaitLimits
from elaunch.scheduler.service.changes import JobNow
from elaunch.scheduler.service.documents import GrowthDoc, JobStage, NodeRow, PlacementDoc, ScheduleDoc, pairs


def takes_part(job: JobNow, now_t: float) -> bool:
    """Returns whether a policy decides about this job now."""
    progress = job.progress
    if progress.stage is JobStage.WAITING:
        return now_t >= progress.not_before_t
    return progress.stage is JobStage.RUNNING


def job_state(job: JobNow, now_t: float, limits: WaitLimits) -> JobState:
    """Returns what a policy is told of a job.

    What a job that must not grow was given, and does not have, is taken back.
    """
    spec, progress, placement = job.spec, job.progress, job.placement.placement
    counts = job.placement.attempt == progress.attempt and bool(job.placement.base)
    growths = placement.growths if counts else ()
    if progress.frozen:
        there = {agent.node for agent in progress.staying}
        growths = tuple(growth for growth in growths if set(growth.devices) <= there)
    return JobState(
        name=spec.name,
        submitted_s=spec.submitted_t,
        basic=spec.basic,
        most=spec.most,
        unit=spec.unit,
        whole_nodes=spec.whole_nodes,
        kinds=spec.kinds,
        priority=spec.priority,
        user=spec.user,
        started_s=job.placement.started_t if counts else None,
        base=placement.base if counts else {},
        growths=growths,
        changed_s=job.placement.changed_t if counts else float("-inf"),
        changes=progress.changes,
        settling=progress.asked_t > 0 and now_t < progress.asked_t + limits.move_s,
        frozen=progress.frozen,
    )


def next_schedule(
    policy: SchedulingPolicy,
    jobs: Sequence[JobNow],
    nodes: Sequence[ClusterNode],
    speeds: Mapping[str, Speed],
    now_t: float,
    limits: WaitLimits,
) -> tuple[ScheduleDoc, ClusterSchedule]:
    """Asks a policy, and returns the document of its answer and the answer."""
    asked = [job for job in jobs if takes_part(job, now_t)]
    states = {job.spec.name: job_state(job, now_t, limits) for job in asked}
    schedule = policy.schedule(states.values(), nodes, speeds, now_t)
    reasons = {reason.job: reason for reason in schedule.reasons}
    placements = []
    for job in asked:
        name, before = job.spec.name, job.placement
        answer = schedule.placements[name]
        after = PlacementDoc(
            job=name,
            attempt=job.progress.attempt,
            base=pairs(answer.base),
            growths=tuple(
                GrowthDoc(pairs(growth.devices), _finite(growth.benefit), growth.at_s) for growth in answer.growths
            ),
            started_t=_started_t(states[name], answer.base, now_t),
            changed_t=before.changed_t,
            action=before.action,
            reason=before.reason,
        )
        if reason := reasons.get(name):
            after = replace(after, action=reason.action, reason=reason.text)
        if dict(after.allocation) != dict(states[name].allocation) or not before.base:
            after = replace(after, changed_t=now_t)
        placements.append(after)
    rows = tuple(NodeRow(node.name, node.devices, node.kind, node.rack, node.usable) for node in nodes)
    return ScheduleDoc(type(policy).__name__, now_t, tuple(placements), rows), schedule


def same(first: ScheduleDoc, second: ScheduleDoc) -> bool:
    """Returns whether two documents say the same, whenever that was."""
    return replace(first, changed_t=0.0) == replace(second, changed_t=0.0)


def in_order(jobs: Iterable[JobNow]) -> list[JobNow]:
    """Returns jobs in the order in which they get free devices: higher priority first, then who came earlier."""
    return sorted(jobs, key=lambda job: (-job.spec.priority, job.spec.submitted_t, job.spec.name))


def _started_t(state: JobState, base: Mapping[str, int], now_t: float) -> float | None:
    if not base:
        return None
    return now_t if state.started_s is None else state.started_s


def _finite(number: float) -> float:
    return max(-1e300, min(1e300, number))
