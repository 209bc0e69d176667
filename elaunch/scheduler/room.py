"""Room for the basic demand of jobs that wait, which goes before all growth (Suika 3.2.3, algorithm 2, line 2).

What is free is taken first; then growths are taken back, those of the least benefit first; then running jobs move so
that the free devices lie together; and last, where that is permitted, jobs of lower priority stop.
"""

from __future__ import annotations

import math

from elaunch.scheduler.draft import Draft, JobDraft, JobDraftState
from elaunch.scheduler.model import Allocation, Growth
from elaunch.scheduler.pool import devices_text
from elaunch.scheduler.repair import keep_quota, lowest
from elaunch.scheduler.settings import SuikaSettings


def start_waiting(draft: Draft, settings: SuikaSettings) -> None:
    """Gives each job that waits its basic demand, as far as that is possible, in the order of the queue."""
    while _start_some(draft, settings):
        # Somebody had to stop, and has to look for another place, or to move: what is free now may do for others.
        pass


def queue(draft: Draft, settings: SuikaSettings) -> list[JobDraft]:
    """Returns those that wait: by priority, which grows while they wait; then those that ran until now; then in the
    order of the queue.
    """

    def key(draft_: JobDraft) -> tuple[float, bool, float, float, str]:
        job = draft_.job
        aged = 0 if math.isinf(settings.aging_s) else (draft.now_s - job.submitted_s) // settings.aging_s
        left_s = 0.0 if settings.queue == "fifo" else math.inf if job.left_s is None else job.left_s
        return -(job.priority + max(0, aged)), not job.running, left_s, job.submitted_s, job.name

    return sorted((job for job in draft.jobs.values() if not job.running), key=key)


def _start_some(draft: Draft, settings: SuikaSettings) -> bool:
    """Goes through the queue once; returns whether a job that ran had to stop or to move."""
    disturbed, before = False, ""
    for job in queue(draft, settings):
        basic = devices_text(job.job.basic)
        refused = _over_quota(draft, job, settings)
        if not draft.possible(job.job):
            kinds = f" of kind {' or '.join(job.job.kinds)}" if job.job.kinds else ""
            job.waits = f"waits for {basic}{kinds}: all nodes that can be used are too few or too small for it"
        elif refused:
            job.waits = refused
        elif before:
            job.waits = f"waits for {basic} behind {before}"
        else:
            bases = [(other, other.base) for other in draft.running]
            if _start(draft, job, settings):
                disturbed |= any(other.base != base for other, base in bases)
                continue
            free = draft.pool.free_for(job.job)
            job.waits = (
                f"waits for {basic}: {free} are free, and what jobs have beyond their basic demand is too little"
            )
            if draft.now_s - job.job.submitted_s >= settings.backfill_s:
                before = job.job.name
    return disturbed


def _over_quota(draft: Draft, job: JobDraft, settings: SuikaSettings) -> str:
    user = job.job.user
    quota = settings.quotas.get(user)
    if quota is None:
        return ""
    fixed = sum(
        other.devices if other.job.settling else other.job.basic for other in draft.running if other.job.user == user
    )
    if fixed + job.job.basic <= quota:
        return ""
    return f"waits for {devices_text(job.job.basic)}: user {user} has {fixed} of a quota of {devices_text(quota)}"


def _start(draft: Draft, job: JobDraft, settings: SuikaSettings) -> bool:
    """Gives a job its basic demand if that is possible, whatever has to be taken from others for it."""
    why = f"job {job.job.name} needs {devices_text(job.job.basic)}"
    place = draft.pool.place(job.job)
    if place is not None:
        draft.place(job, place)
    else:
        saved = draft.save()
        taken = _take_growths(draft, job)
        if draft.pool.place(job.job) is None and settings.most_moved:
            _move_together(draft, job, settings.most_moved, why)
        stopped: list[_Stopped] = []
        if draft.pool.place(job.job) is None and settings.preempt:
            stopped = _stop_lower(draft, job)
        place = draft.pool.place(job.job)
        if place is None:
            draft.back_to(saved)
            return False
        draft.place(job, place)
        for other, allocation, state in reversed(stopped):
            if draft.pool.fits(allocation):
                draft.pool.take(allocation)
                other.reset(state)
            else:
                other.note(f"{why} and has priority {job.job.priority} over {other.job.priority}")
        for other, growth in reversed(taken):
            if other.running and draft.pool.fits(growth[1].devices):
                draft.restore(other, growth)
            else:
                other.note(why)
    if job.job.user in settings.quotas:
        keep_quota(draft, job.job.user, settings.quotas[job.job.user])
    return True


def _take_growths(draft: Draft, job: JobDraft) -> list[tuple[JobDraft, tuple[int, Growth]]]:
    """Takes growths back until there is room, or none is left; returns them."""
    pool = draft.pool
    useful = {name for name in pool.free if pool.allows(job.job, name)}
    others = [other for other in draft.running if not other.job.settling]
    free = pool.free_for(job.job)
    taken: list[tuple[JobDraft, tuple[int, Growth]]] = []
    while free < job.job.basic or pool.place(job.job) is None:
        found = lowest(draft, others, useful)
        if found is None:
            break
        other, index = found
        growth = other.take_back(index)
        pool.give(growth[1].devices)
        free += sum(n for name, n in growth[1].devices.items() if name in useful)
        taken.append((other, growth))
    return taken


_Stopped = tuple[JobDraft, Allocation, JobDraftState]


def _stop_lower(draft: Draft, job: JobDraft) -> list[_Stopped]:
    """Stops jobs of lower priority until there is room, or none is left; returns them."""
    lower = [other for other in draft.running if other.job.priority < job.job.priority and not other.job.settling]
    lower = [other for other in lower if any(draft.pool.allows(job.job, name) for name in other.base)]
    stopped: list[_Stopped] = []
    for other in sorted(lower, key=lambda one: (one.job.priority, -(one.job.started_s or draft.now_s), one.job.name)):
        if draft.pool.place(job.job) is not None:
            break
        stopped.append((other, other.allocation, other.state()))
        draft.stop(other)
    return stopped


def _move_together(draft: Draft, job: JobDraft, most_moved: int, why: str) -> None:
    """Moves the basic demand of other jobs off the nodes that have the least of it, if that makes room for a job."""
    pool = draft.pool
    if pool.free_for(job.job) < job.job.basic:
        return
    fixed = {name for other in draft.running if other.job.settling for name in other.allocation}
    fixed |= {name for other in draft.running for growth in other.growths for name in growth.devices}
    unit = pool.unit_on_node(job.job) if job.job.basic % job.job.unit == 0 else 1
    targets: dict[str, None] = {}
    left = job.job.basic
    used = {name: pool.nodes[name].devices - free for name, free in pool.free.items()}
    for name in sorted(used, key=lambda name: used[name]):
        n = pool.nodes[name].devices
        n -= 0 if job.job.whole_nodes else n % unit
        if (
            left > 0
            and n
            and name not in fixed
            and pool.allows(job.job, name)
            and (n <= left or not job.job.whole_nodes)
        ):
            targets[name] = None
            left -= n
    movers = [other for other in draft.running if any(name in targets for name in other.base)]
    if left > 0 or len(movers) > most_moved:
        return
    saved = draft.save()
    others = {name: None for name in pool.free if name not in targets}
    for other in sorted(movers, key=lambda one: (-one.job.basic, one.job.name)):
        kept = {name: n for name, n in other.base.items() if name not in targets}
        base = pool.complete(other.job, kept, others) if kept else None
        if base is None:
            pool.give(other.base)
            base = pool.place(other.job, others)
            pool.take(other.base)
        if base is None or (other.speed is not None and not other.speed.rate(base) > 0):
            draft.back_to(saved)
            return
        draft.place(other, base)
        other.note(f"{why} that lie together")
    if pool.place(job.job) is None:
        draft.back_to(saved)
