"""What a schedule puts right before it decides anything: nodes that cannot be used, devices that are gone, limits.

That a node cannot be used counts for jobs on their way to another allocation, too: they would never arrive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from elaunch.scheduler.draft import Draft, JobDraft
from elaunch.scheduler.model import devices_of
from elaunch.scheduler.pool import devices_text


def repair(draft: Draft, quotas: Mapping[str, int]) -> None:
    """Takes jobs off nodes that cannot be used and growths beyond what a job or a user may have.

    A job whose basic demand is affected gets another place for it: what it has beyond that, else what is free. If there
    is no such place, it stops and has to find one among those that wait.
    """
    for job in draft.running:
        lost = {name for name in job.allocation if name not in draft.pool.free}
        if lost:
            _leave(draft, job, lost, f"{_names(lost)} cannot be used")
    for name in draft.overfull():
        _thin_out(draft, name)
    for job in draft.running:
        _keep_limit(draft, job)
    for user, quota in quotas.items():
        keep_quota(draft, user, quota)


def keep_quota(draft: Draft, user: str, quota: int) -> None:
    """Takes back growths of a user's jobs, those of the least benefit first, until the user has no more than that."""
    while draft.used_by(user) > quota:
        found = lowest(draft, [job for job in draft.running if job.job.user == user and not job.job.settling])
        if found is None:
            return
        draft.reclaim(*found, f"user {user} has a quota of {devices_text(quota)}")


def lowest(draft: Draft, jobs: Collection[JobDraft], on: Collection[str] | None = None) -> tuple[JobDraft, int] | None:
    """Returns the growth of the least benefit and whose it is, of equal ones the latest; None if there is none.

    Args:
        draft: of the schedule.
        jobs: whose growths may be chosen.
        on: nodes, of which the growth has to have a device; None: any.
    """
    best: tuple[float, float, str, int] | None = None
    found: tuple[JobDraft, int] | None = None
    for job in jobs:
        for index, (growth, benefit) in enumerate(zip(job.growths, job.benefits(draft.pool), strict=True)):
            key = (round(benefit, 9), -growth.at_s, job.job.name, -index)
            if (best is None or key < best) and (on is None or any(name in on for name in growth.devices)):
                best, found = key, (job, index)
    return found


def _leave(draft: Draft, job: JobDraft, lost: Collection[str], why: str) -> None:
    """Takes a job off some nodes."""
    for index in range(len(job.growths) - 1, -1, -1):
        devices = job.growths[index].devices
        rest = {name: n for name, n in devices.items() if name not in lost}
        if len(rest) < len(devices):
            if rest and devices_of(rest) % job.job.unit == 0:
                draft.pool.give({name: n for name, n in devices.items() if name in lost})
                job.replace_growth(index, rest)
                job.note(why)
            else:
                draft.reclaim(job, index, why)
    if not any(name in lost for name in job.base):
        return
    job.note(why)
    growths, kept = job.growths, {name: n for name, n in job.base.items() if name not in lost}
    own = [name for name in job.allocation if name not in lost]
    others = {name: None for name in draft.pool.free if name not in lost}
    draft.stop(job)
    base = draft.pool.place(job.job, own)
    if base is None and kept:
        draft.pool.take(kept)
        base = draft.pool.complete(job.job, kept, others)
        draft.pool.give(kept)
    base = base or draft.pool.place(job.job, others)
    if base is None:
        return
    draft.place(job, base)
    for growth in growths:
        if draft.pool.fits(growth.devices):
            draft.pool.take(growth.devices)
            job.grow(growth)


def _thin_out(draft: Draft, name: str) -> None:
    """Takes growths, then jobs of the lowest priority, off a node that has fewer devices than they have of it."""
    why = f"{name} has only {devices_text(draft.pool.nodes[name].devices)}"
    while draft.pool.free[name] < 0:
        here = [job for job in draft.running if name in job.allocation]
        found = lowest(draft, here, [name])
        if found is not None:
            draft.reclaim(*found, why)
        else:
            _leave(draft, min(here, key=_weakest), [name], why)


def _weakest(job: JobDraft) -> tuple[int, float, str]:
    return job.job.priority, -(job.job.started_s or 0.0), job.job.name


def _keep_limit(draft: Draft, job: JobDraft) -> None:
    if job.job.settling:
        return
    while job.growths and job.devices > job.job.most:
        draft.reclaim(job, len(job.growths) - 1, f"it can use no more than {devices_text(job.job.most)}")


def _names(nodes: Collection[str]) -> str:
    names = sorted(nodes)
    return " and ".join(names) if len(names) <= 2 else f"{names[0]} and {len(names) - 1} more nodes"
