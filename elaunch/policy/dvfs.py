"""DVFS: up-clock a plan's stragglers to the lowest frequency at which nobody waits for them (ElasWave 4.3, alg. 2).

Stragglers are the workers that compute for longer in a step than their peers do. The target is the step time at which
they would be as busy as these. Their clocks follow from one level: the seconds that any of them may compute in a step.
The highest level that meets the target is found by bisection; for a single straggler that is algorithm 2. It differs
from the paper in three places:

- Trials are estimates: none changes a device.
- A straggler is fast enough at t <= T* + ε. The paper's |t - T*| <= ε refuses one that is faster than the target.
- Where even the highest frequency misses the target, the paper returns with the device left there. Here clocks rise
  only as far as it makes the step faster, and not at all for a gain below LEAST_GAIN.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from elaunch.errors import ClockError
from elaunch.plan.tiling import Plan, n_rows
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import Profile, WorkerProfile
from elaunch.rendezvous.membership import names_text, slot_of

TOLERANCE = 1e-3
"""ε of algorithm 2, as a part of the target."""

ROUNDING = 1e-9
"""Seconds that differ by a smaller part are equal."""

LEAST_GAIN = 0.01
"""Clocks stay as they are for less than this part of a step."""


@dataclass(frozen=True)
class ClockRange:
    """The clocks of a worker's device, in MHz.

    Attributes:
        base_mhz: at which it computes if nobody asks for another; need not be a supported one.
        supported_mhz: that it can be locked at, ascending.
        measured_mhz: at which the profile's speed of the worker was measured; 0: the base.

    Raises:
        ClockError: there are none, they do not ascend, or a clock is outside of their range.
    """

    base_mhz: int
    supported_mhz: tuple[int, ...]
    measured_mhz: int = 0

    def __post_init__(self) -> None:
        clocks = self.supported_mhz
        if not clocks or clocks[0] <= 0 or any(one >= other for one, other in pairwise(clocks)):
            raise ClockError(f"supported clocks must be above 0 and ascend, got {span_text(clocks)}")
        for name, mhz in (("base", self.base_mhz), ("measured", self.measured_mhz or self.base_mhz)):
            if not self.min_mhz <= mhz <= self.max_mhz:
                raise ClockError(f"the {name} clock must be within the supported {span_text(clocks)}, got {mhz} MHz")

    @property
    def min_mhz(self) -> int:
        """Returns the lowest supported clock."""
        return self.supported_mhz[0]

    @property
    def max_mhz(self) -> int:
        """Returns the highest supported clock."""
        return self.supported_mhz[-1]

    @property
    def above_base_mhz(self) -> tuple[int, ...]:
        """Returns the clocks that are higher than the base, ascending."""
        return self.supported_mhz[bisect_right(self.supported_mhz, self.base_mhz) :]


@dataclass(frozen=True)
class Clocking:
    """Which devices to lock at which clock, and why.

    Attributes:
        clocks_mhz: by slot; the devices of all others run as they do if nobody asks.
        before_s: of a step without it, estimated.
        after_s: of a step with it.
        target_s: of a step if the stragglers were as fast as their peers.
        reason: for people.
    """

    clocks_mhz: Mapping[str, int]
    before_s: float
    after_s: float
    target_s: float
    reason: str

    @property
    def reached(self) -> bool:
        """Returns whether nobody waits for a straggler any more."""
        return self.after_s <= _at_most(self.target_s)

    def clock_mhz(self, worker: str) -> int | None:
        """Returns the clock at which to lock a worker's device; None: it is not to be locked."""
        return self.clocks_mhz.get(slot_of(worker))


def slowdown(mhz: float, base_mhz: float, memory_bound: float = 0.0) -> float:
    """Returns the factor from seconds of computing at `base_mhz` to those at `mhz`.

    Args:
        mhz: above 0.
        base_mhz: above 0.
        memory_bound: the part of the seconds at `base_mhz` that does not depend on the clock, 0..1; 0 is linear.
    """
    return memory_bound + (1 - memory_bound) * base_mhz / mhz


def clocked(profile: Profile, clocks_mhz: Mapping[str, int], devices: Mapping[str, ClockRange]) -> Profile:
    """Returns the profile with devices at other clocks.

    Args:
        profile: measured at each device's `measured_mhz`.
        clocks_mhz: by slot; the other devices are at their base.
        devices: by slot; workers without an entry stay as they are.
    """
    speeds = {}
    for slot, device in devices.items():
        now, then = device.measured_mhz or device.base_mhz, clocks_mhz.get(slot, device.base_mhz)
        if now != then:
            factors = [slowdown(mhz, device.base_mhz, profile.memory_bound) for mhz in (now, then)]
            speeds[slot] = profile.speed(slot) * factors[0] / factors[1]
    return _with_speeds(profile, speeds)


def upclocked(plan: Plan, profile: Profile, devices: Mapping[str, ClockRange]) -> Clocking:
    """Returns the lowest clocks of stragglers at which a step takes as long as their peers allow, or nearly so.

    A worker's peers are as busy as the median worker; if that one is among the busiest, as the busiest of the others.
    One step is estimated for each halving of the stragglers' clocks: O(log(stragglers x clocks)) of them.

    Args:
        plan: valid.
        profile: of the model.
        devices: by slot; those without an entry cannot be clocked.

    Raises:
        NotPossible: clocks would not help; says why.
        PlanError: the profile is of another model.
    """
    base = clocked(profile, {}, devices)
    before_s = estimate_step(plan, base).step_s
    busy_s = _busy_s(plan, base)
    peers_s = _peers_s(busy_s.values())
    stragglers = {slot: seconds for slot, seconds in busy_s.items() if seconds > _at_most(peers_s)}
    names = names_text(sorted(stragglers))
    if not any(devices[slot].above_base_mhz for slot in stragglers if slot in devices):
        raise NotPossible(f"the clocks of {names}, for whom the others wait, cannot be raised")
    matched = {slot: base.speed(slot) * seconds / peers_s for slot, seconds in stragglers.items()}
    target_s = estimate_step(plan, _with_speeds(base, matched)).step_s

    def clocks_at(level_s: float) -> dict[str, int]:
        return _lowest_clocks(level_s, stragglers, devices, profile.memory_bound)

    @cache
    def step_s(level_s: float) -> float:
        return estimate_step(plan, clocked(profile, clocks_at(level_s), devices)).step_s

    best_s = step_s(peers_s)
    if best_s > (1 - LEAST_GAIN) * before_s:
        raise NotPossible(
            f"with {names} at higher clocks a step would take {best_s:.4g} s instead of {before_s:.4g} s: "
            "it is not their computing that the others wait for"
        )
    goal_s = _at_most(target_s if best_s <= _at_most(target_s) else best_s)
    levels = _levels(peers_s, stragglers, devices, profile.memory_bound)
    level_s = levels[bisect_left(levels, True, key=lambda level_s: step_s(level_s) <= goal_s)]
    clocks_mhz, after_s = clocks_at(level_s), step_s(level_s)
    for slot, mhz in clocks_mhz.items():
        assert mhz in devices[slot].above_base_mhz, (slot, mhz, devices[slot])
    assert after_s <= goal_s, (after_s, goal_s)
    found = Clocking(clocks_mhz, before_s, after_s, target_s, "")
    return replace(found, reason=_reason(found, len(busy_s)))


def _busy_s(plan: Plan, profile: Profile) -> dict[str, float]:
    """Returns, by slot, the seconds that a worker computes in a step, not counting waits in its TP group."""
    found: dict[str, float] = defaultdict(float)
    for tile in plan.tiles:
        sizes = Counter(n_rows(runs) for runs in tile.micro_batches)
        seconds = sum(n * profile.turn_s(tile.layers, rows, len(tile.workers)) for rows, n in sizes.items())
        for worker in tile.workers:
            found[slot_of(worker)] += seconds / profile.speed(worker)
    return dict(found)


def _peers_s(busy_s: Iterable[float]) -> float:
    some = sorted(busy_s)
    if _at_most(median_s := statistics.median_low(some)) < some[-1]:
        return median_s
    below = [seconds for seconds in some if _at_most(seconds) < some[-1]]
    if not below:
        raise NotPossible("all workers compute equally long: nobody waits for a straggler")
    return below[-1]


def _lowest_clocks(
    level_s: float, stragglers: Mapping[str, float], devices: Mapping[str, ClockRange], memory_bound: float
) -> dict[str, int]:
    """Returns, by slot, the lowest clock at which it computes for at most `level_s`, or the highest there is."""
    found = {}
    enough_s = level_s * (1 + ROUNDING)
    for slot, busy_s in stragglers.items():
        higher = devices[slot].above_base_mhz if slot in devices else ()
        if not higher or busy_s <= enough_s:
            continue
        known = _seconds(busy_s, devices[slot].base_mhz, higher, memory_bound)
        found[slot] = higher[min(bisect_left(known, True, key=lambda seconds: seconds <= enough_s), len(higher) - 1)]
    return found


def _levels(
    peers_s: float, stragglers: Mapping[str, float], devices: Mapping[str, ClockRange], memory_bound: float
) -> list[float]:
    """Returns every level at which the clock of some straggler changes, highest first; the peers' is the last."""
    found = {peers_s}
    for busy_s, device in {(busy_s, devices[slot]) for slot, busy_s in stragglers.items() if slot in devices}:
        clocks_mhz = (device.base_mhz, *device.above_base_mhz)
        found.update(_seconds(busy_s, device.base_mhz, clocks_mhz, memory_bound))
    return sorted((level_s for level_s in found if level_s >= peers_s), reverse=True)


def _seconds(busy_s: float, base_mhz: int, clocks_mhz: Sequence[int], memory_bound: float) -> list[float]:
    return [busy_s * slowdown(mhz, base_mhz, memory_bound) for mhz in clocks_mhz]


def _with_speeds(profile: Profile, speeds: Mapping[str, float]) -> Profile:
    """Returns the profile with other speeds of workers, by slot."""
    if not speeds:
        return profile
    usual = WorkerProfile()
    changed = {slot: replace(profile.workers.get(slot, usual), speed=speed) for slot, speed in speeds.items()}
    return replace(profile, workers={**profile.workers, **changed})


def _at_most(target_s: float) -> float:
    return target_s * (1 + TOLERANCE)


def span_text(clocks_mhz: Sequence[int]) -> str:
    """Returns the lowest and the highest of ascending clocks, as text."""
    return f"{clocks_mhz[0]}..{clocks_mhz[-1]} MHz" if clocks_mhz else "none"


def _reason(found: Clocking, n_workers: int) -> str:
    clocks = sorted(set(found.clocks_mhz.values()))
    at = f"{clocks[0]} MHz" if len(clocks) == 1 else span_text(clocks)
    who = f"{names_text(sorted(found.clocks_mhz))} ({len(found.clocks_mhz)} of {n_workers}) at {at}"
    rest = "as long as their peers allow" if found.reached else f"where their peers would allow {found.target_s:.4g} s"
    return f"{who}: a step takes {found.after_s:.4g} s instead of {found.before_s:.4g} s, {rest}"
