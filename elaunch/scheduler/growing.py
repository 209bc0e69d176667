"""Growth: what is free goes, round by round, to the job that has the best marginal benefit of it (Suika 3.2.3).

Of the devices that a job might get only the prefixes of its affinity order are looked at (3.2.1), up to as many as it
has, and on a node several at a time if it is large (3.2.2, the first and the third pruning).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from elaunch.scheduler.draft import ROUNDING, Draft, JobDraft, marginal_benefit
from elaunch.scheduler.model import devices_of, merged
from elaunch.scheduler.pool import devices_text
from elaunch.scheduler.settings import SuikaSettings

GROUPS = 16
"""w = N / 16 devices of a node are added at a time, at most 8."""

MOST_GROUP = 8


@dataclass(frozen=True)
class GrowthOffer:
    """What a job would get next.

    Attributes:
        devices: that it would get; none: nothing.
        benefit: B of them.
        looked_at: nodes on which it depends.
    """

    devices: Mapping[str, int]
    benefit: float
    looked_at: frozenset[str]


def load(draft: Draft) -> float:
    """Returns U: the basic demand of the running jobs, as a part of what all usable nodes have."""
    total = draft.pool.total_power()
    return sum(draft.pool.power(job.base) for job in draft.running) / total if total else 0.0


def take_back_below(draft: Draft, threshold: float) -> None:
    """Takes back the growths whose benefit is below a threshold now (algorithm 2, line 3)."""
    for job in draft.running:
        while job.growths and not job.job.settling:
            benefits = job.benefits(draft.pool)
            index = min(range(len(benefits)), key=lambda index: (benefits[index], -index))
            if benefits[index] >= threshold - ROUNDING:
                break
            n = devices_text(devices_of(job.growths[index].devices))
            draft.reclaim(
                job, index, f"{n} have a marginal benefit of {benefits[index]:.3g}, below the threshold {threshold:.3g}"
            )


def grow(draft: Draft, threshold: float, settings: SuikaSettings) -> None:
    """Gives free devices away until no offer reaches the threshold (algorithm 2, lines 4 to 8).

    The best offer is taken in each round. Where others lose a node that they counted on, their offers are made anew
    when they are the best, and all of them before the last round.
    """
    offers: dict[str, GrowthOffer] = {}
    stale = {job.job.name for job in draft.running}
    heap: list[tuple[float, int, str]] = []
    watchers: dict[str, set[str]] = {}

    def renew(name: str) -> None:
        stale.discard(name)
        offer = offers[name] = best_offer(draft, draft.jobs[name], threshold, settings)
        for node in offer.looked_at:
            watchers.setdefault(node, set()).add(name)
        if offer.devices:
            heappush(heap, (-offer.benefit, -devices_of(offer.devices), name))

    while heap or stale:
        if not heap:
            for name in sorted(stale):
                renew(name)
            continue
        _, _, name = heappop(heap)
        if name in stale:
            renew(name)
            continue
        offer = offers[name]
        job = draft.jobs[name]
        draft.grow(job, offer.devices, offer.benefit)
        for node in offer.devices:
            stale |= watchers.pop(node, set())
        if job.job.user in settings.quotas:
            stale |= {other.job.name for other in draft.running if other.job.user == job.job.user}
        renew(name)


def best_offer(draft: Draft, job: JobDraft, threshold: float, settings: SuikaSettings) -> GrowthOffer:
    """Returns the growth of a job that has the best marginal benefit, of equal ones the largest.

    It has no devices if no growth reaches the threshold and pays for its cost.
    """
    most = _most(draft, job, settings)
    if most < job.job.unit or job.speed is None or not job.rate() > 0:
        return GrowthOffer({}, 0.0, frozenset())
    found: list[tuple[float, int, dict[str, int], float]] = []
    looked_at: set[str] = set()
    power = draft.pool.power(job.allocation)
    for own_kinds in (False, True):
        for devices in _prefixes(draft, job, most, own_kinds):
            looked_at.update(devices)
            more_rate = job.speed.rate(merged([job.allocation, devices]))
            benefit = marginal_benefit(power, draft.pool.power(devices), job.rate(), more_rate)
            if benefit > ROUNDING and benefit >= threshold - ROUNDING / 2:
                found.append((round(benefit, 9), devices_of(devices), devices, more_rate))
        if draft.pool.one_kind(job.job):
            break
    for benefit, _, devices, more_rate in sorted(found, key=lambda one: (-one[0], -one[1])):
        if _pays(job, devices, more_rate, settings):
            return GrowthOffer(devices, benefit, frozenset(looked_at))
    return GrowthOffer({}, 0.0, frozenset(looked_at))


def _most(draft: Draft, job: JobDraft, settings: SuikaSettings) -> int:
    """Returns by how many devices a job may grow in a round."""
    state = job.job
    if state.settling or state.frozen or (state.running and draft.now_s - state.changed_s < settings.rest_s):
        return 0
    most = min(state.most - job.devices, max(job.devices, settings.window_units * state.unit))
    quota = settings.quotas.get(state.user)
    return most if quota is None else min(most, quota - draft.used_by(state.user))


def _prefixes(draft: Draft, job: JobDraft, most: int, own_kinds: bool) -> Iterator[dict[str, int]]:
    """Yields what a job might get: the nearest devices, more and more of them."""
    unit, pool = job.job.unit, draft.pool
    on_node = pool.unit_on_node(job.job)
    step = unit * max(1, min(math.ceil(job.devices / unit / GROUPS), MOST_GROUP))
    added: dict[str, int] = {}
    total = 0
    for name, n in pool.nearest(job.job, job.allocation, own_kinds):
        if job.job.whole_nodes:
            if n > most - total:
                continue
            counts = [n]
        else:
            n = min(n, most - total)
            n -= n % on_node
            counts = [*range(min(step, n), n, step), n] if n else []
        for count in counts:
            if (total + count) % unit == 0:
                yield {**added, name: count}
        if n:
            added[name] = n
            total += n
        if total >= most:
            return


def _pays(job: JobDraft, devices: Mapping[str, int], more_rate: float, settings: SuikaSettings) -> bool:
    """Returns whether a growth makes up for what its change costs, until the next change or the job's end.

    What a job has to change in any case is not counted, nor that of one that has not started.
    """
    if job.speed is None or not job.job.running or math.isinf(settings.horizon_s):
        return True
    horizon_s = settings.horizon_s
    if job.job.left_s is not None:
        horizon_s = min(horizon_s, job.job.left_s * job.speed.rate(job.base) / job.rate())
    before, here = job.job.allocation, job.allocation
    cost_s = job.speed.change_s(before, merged([here, devices]))
    if here != before:
        cost_s -= job.speed.change_s(before, here)
    return (more_rate - job.rate()) * horizon_s > more_rate * max(0.0, cost_s)
