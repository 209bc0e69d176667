"""A schedule while it is being made: what every job has so far, what is free, and what changed it. Without effects.

Suika's batch reconfiguration: all decisions are made here, one after the other, and only the outcome is carried out.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import itemgetter

from elaunch.scheduler.model import (
    Allocation,
    ClusterNode,
    ClusterSchedule,
    Growth,
    JobState,
    Placement,
    Reason,
    Speed,
    devices_of,
    merged,
)
from elaunch.scheduler.pool import Pool, devices_text, where

ROUNDING = 1e-9
"""Benefits that differ by less are equal: the sum of floats depends on their order."""


def marginal_benefit(power: float, more_power: float, rate: float, more_rate: float) -> float:
    """Returns B = ||R0|| / ||Rδ|| x (T(R0 + Rδ) - T(R0)) / T(R0) (Suika 3.2.3): 1 if the job scales linearly.

    Args:
        power: ||R0||, of what a job has.
        more_power: ||Rδ||, of what it would get.
        rate: T(R0); if it is 0, so is the benefit: nothing is known of a job that cannot run on what it has.
        more_rate: T(R0 + Rδ).
    """
    return power / more_power * (more_rate - rate) / rate if rate > 0 else 0.0


JobDraftState = tuple[Allocation, list[tuple[int, Growth]], dict[str, None]]
"""Base, numbered growths and notes of a job."""


class JobDraft:
    """What a job has so far."""

    def __init__(self, job: JobState, speed: Speed | None) -> None:
        """Begins with what the job has now."""
        self.job, self.speed = job, speed
        self.base: Allocation = dict(job.base) if job.running else {}
        self._growths = list(enumerate(job.growths)) if job.running else []
        self._next = len(job.growths)
        self._allocation: dict[str, int] | None = None
        self._rate: float | None = None
        self._benefits: list[float] | None = None
        self.notes: dict[str, None] = {}
        self.waits = ""

    @property
    def running(self) -> bool:
        """Whether it has its basic demand."""
        return bool(self.base)

    @property
    def growths(self) -> list[Growth]:
        """Its growths, the oldest first."""
        return [growth for _, growth in self._growths]

    @property
    def allocation(self) -> dict[str, int]:
        """All that it has."""
        if self._allocation is None:
            self._allocation = merged([self.base, *(growth.devices for growth in self.growths)])
        return self._allocation

    @property
    def devices(self) -> int:
        """How many devices it has."""
        return devices_of(self.allocation)

    def rate(self) -> float:
        """Returns its samples per second on what it has; 0 if nobody knows."""
        if self._rate is None:
            self._rate = self.speed.rate(self.allocation) if self.speed is not None and self.running else 0.0
        return self._rate

    def benefits(self, pool: Pool) -> list[float]:
        """Returns the marginal benefit that each of its growths has now, over the base and the growths before it.

        Without a speed, that for which it was given.
        """
        if self._benefits is None:
            self._benefits = []
            here = dict(self.base)
            rate = self.speed.rate(here) if self.speed is not None and self._growths else 0.0
            for growth in self.growths:
                more = merged([here, growth.devices])
                if self.speed is None:
                    self._benefits.append(growth.benefit)
                else:
                    more_rate = self.speed.rate(more)
                    powers = pool.power(here), pool.power(growth.devices)
                    self._benefits.append(marginal_benefit(*powers, rate, more_rate))
                    rate = more_rate
                here = more
        return self._benefits

    def place(self, base: Allocation) -> None:
        """Gives it another basic demand."""
        self.base = dict(base)
        self._changed()

    def grow(self, growth: Growth) -> None:
        """Gives it a growth."""
        self._growths.append((self._next, growth))
        self._next += 1
        self._changed()

    def take_back(self, index: int) -> tuple[int, Growth]:
        """Takes a growth; what is returned is for `give_back`."""
        taken = self._growths.pop(index)
        self._changed()
        return taken

    def give_back(self, taken: tuple[int, Growth]) -> None:
        """Gives a growth back, in its former place."""
        insort(self._growths, taken, key=itemgetter(0))
        self._changed()

    def replace_growth(self, index: int, devices: Allocation) -> None:
        """Leaves it a part of a growth."""
        number, growth = self._growths[index]
        self._growths[index] = number, replace(growth, devices=dict(devices))
        self._changed()

    def clear(self) -> None:
        """Takes all that it has."""
        self.base, self._growths = {}, []
        self._changed()

    def note(self, text: str) -> None:
        """Keeps a cause of what changes, for the reason."""
        self.notes.setdefault(text)

    def state(self) -> JobDraftState:
        """Returns what `reset` needs."""
        return self.base, list(self._growths), dict(self.notes)

    def reset(self, state: JobDraftState) -> None:
        """Goes back to a former state."""
        self.base, growths, notes = state
        self._growths, self.notes = list(growths), dict(notes)
        self._changed()

    def _changed(self) -> None:
        self._allocation = self._rate = self._benefits = None


class Draft:
    """Jobs and free devices; all of its methods keep the two in agreement."""

    def __init__(
        self,
        jobs: Iterable[JobState],
        nodes: Iterable[ClusterNode],
        speeds: Mapping[str, Speed],
        now_s: float,
        tflops: Mapping[str, float],
    ) -> None:
        """Begins with what the jobs have now; more than a node has is left to `Draft.overfull`."""
        self.now_s = now_s
        nodes = tuple(nodes)
        self.pool, self._empty = Pool(nodes, tflops), Pool(nodes, tflops)
        self._possible: dict[tuple[object, ...], bool] = {}
        self.jobs = {job.name: JobDraft(job, speeds.get(job.name)) for job in sorted(jobs, key=lambda job: job.name)}
        for draft in self.jobs.values():
            self.pool.withdraw(draft.allocation)

    @property
    def running(self) -> list[JobDraft]:
        """Those that have their basic demand, by name."""
        return [job for job in self.jobs.values() if job.running]

    def possible(self, job: JobState) -> bool:
        """Returns whether a job would find a place if there were no others."""
        key = job.basic, job.unit, job.whole_nodes, job.kinds
        if key not in self._possible:
            self._possible[key] = self._empty.place(job) is not None
        return self._possible[key]

    def overfull(self) -> list[str]:
        """Returns the nodes that have fewer devices than jobs have of them: some have broken."""
        return [name for name, free in self.pool.free.items() if free < 0]

    def reclaim(self, job: JobDraft, index: int, why: str) -> tuple[int, Growth]:
        """Takes a growth from a job."""
        taken = job.take_back(index)
        self.pool.give(taken[1].devices)
        job.note(why)
        return taken

    def restore(self, job: JobDraft, taken: tuple[int, Growth]) -> None:
        """Gives a growth back to a job."""
        self.pool.take(taken[1].devices)
        job.give_back(taken)

    def grow(self, job: JobDraft, devices: Allocation, benefit: float) -> None:
        """Gives a job a growth."""
        self.pool.take(devices)
        job.grow(Growth(dict(devices), benefit, self.now_s))

    def place(self, job: JobDraft, base: Allocation) -> None:
        """Gives a job its basic demand, in the place of what it had for it."""
        self.pool.give(job.base)
        self.pool.take(base)
        job.place(base)

    def stop(self, job: JobDraft) -> None:
        """Takes all that a job has."""
        self.pool.give(job.allocation)
        job.clear()

    def save(self) -> SavedDraft:
        """Returns what `back_to` needs."""
        return SavedDraft(dict(self.pool.free), {name: job.state() for name, job in self.jobs.items()})

    def back_to(self, saved: SavedDraft) -> None:
        """Undoes all since `save`."""
        self.pool.reset(dict(saved.free))
        for name, state in saved.jobs.items():
            self.jobs[name].reset(state)

    def used_by(self, user: str) -> int:
        """Returns how many devices a user's jobs have."""
        return sum(job.devices for job in self.jobs.values() if job.job.user == user)

    def schedule(self, about: str) -> ClusterSchedule:
        """Returns the outcome; `about` ends the reason of each growth."""
        placements = {name: Placement(job.base, tuple(job.growths)) for name, job in self.jobs.items()}
        found = (self._reason(job, about) for job in self.jobs.values())
        return ClusterSchedule(placements, tuple(reason for reason in found if reason is not None))

    def _reason(self, draft: JobDraft, about: str) -> Reason | None:
        job, after = draft.job, draft.allocation
        before = dict(job.allocation) if job.running else {}
        notes = "; ".join(draft.notes)
        given = [growth for growth in draft.growths if growth not in job.growths] if job.running else draft.growths
        benefit = min((growth.benefit for growth in given), default=None)
        growing = "" if benefit is None else f"marginal benefit {benefit:.3g}, {about}"
        if not job.running and after:
            more = f", {devices_of(after) - job.basic} more than its basic demand: {growing}" if given else ""
            waited_s = max(0.0, self.now_s - job.submitted_s)
            text = f"starts on {devices_text(devices_of(after))} ({where(after)}) after {waited_s:.0f} s{more}"
            return Reason(job.name, "start", text + (f"; {notes}" if notes else ""), benefit)
        if not job.running:
            return Reason(job.name, "wait", draft.waits)
        if not after:
            return Reason(job.name, "stop", f"stops: {notes}; {draft.waits}")
        if after == before:
            return None
        n_before, n_after = devices_of(before), devices_of(after)
        sizes = f"from {n_before} to {devices_text(n_after)} ({where(after)})"
        if n_after > n_before and _within(before, after):
            costs = "" if draft.speed is None else f", the change costs {draft.speed.change_s(before, after):.3g} s"
            return Reason(job.name, "grow", f"grows {sizes}: {growing}{costs}", benefit)
        if n_after < n_before and _within(after, before):
            taken = [growth.benefit for growth in job.growths if growth not in draft.growths]
            return Reason(job.name, "shrink", f"shrinks {sizes}: {notes}", min(taken, default=None))
        text = f"moves from {devices_text(n_before)} ({where(before)}) to {devices_text(n_after)} ({where(after)})"
        causes = "; ".join(filter(None, (notes, growing)))
        return Reason(job.name, "move", f"{text}: {causes}", benefit)


class SavedDraft:
    """A former state of a draft."""

    def __init__(
        self,
        free: Mapping[str, int],
        jobs: Mapping[str, JobDraftState],
    ) -> None:
        self.free, self.jobs = free, jobs


def _within(some: Allocation, more: Allocation) -> bool:
    return all(more.get(name, 0) >= devices for name, devices in some.items())
