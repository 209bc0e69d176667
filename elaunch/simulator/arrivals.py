"""Jobs that are made up: they come as in a shared cluster, more by day than by night, small and short ones mostly."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence

from elaunch.simulator.traces import Arrival

SIZES: Mapping[int, float] = {1: 0.55, 2: 0.1, 4: 0.12, 8: 0.15, 16: 0.06, 32: 0.02}
"""Devices that a job asks for, and the part of the jobs that ask for so many."""

DAY_S = 86_400.0


def philly_like(
    count: int,
    within_s: float,
    seed: int,
    median_s: float = 900.0,
    spread: float = 1.6,
    longest_s: float = 6 * 3600.0,
    waves: float = 0.5,
    sizes: Mapping[int, float] = SIZES,
    users: int = 12,
) -> list[Arrival]:
    """Returns jobs in the manner of Microsoft's Philly cluster: log-normal durations, sizes of powers of two.

    Args:
        count: of jobs.
        within_s: they come from 0 until then, at random, by a rate that goes up and down with the day.
        seed: the same gives the same jobs.
        median_s: of their durations.
        spread: sigma of the logarithm of their durations.
        longest_s: a longer one is cut.
        waves: by how much of its mean the rate goes up and down.
        sizes: devices and their parts.
        users: to whom they belong, some to more than others.
    """
    chance = random.Random(seed)
    times: list[float] = []
    while len(times) < count:
        at_s = chance.uniform(0.0, within_s)
        if chance.random() * (1 + waves) <= 1 - waves * math.cos(2 * math.pi * at_s / DAY_S):
            times.append(at_s)
    found = []
    for number, at_s in enumerate(sorted(times)):
        devices = chance.choices(list(sizes), list(sizes.values()))[0]
        duration_s = min(longest_s, chance.lognormvariate(math.log(median_s), spread))
        user = f"u{min(int(chance.expovariate(0.4)), users - 1)}"
        found.append(Arrival(f"job{number}", at_s, max(1.0, duration_s), devices, user=user))
    return found


def scaled_to(arrivals: Sequence[Arrival], device_s: float) -> list[Arrival]:
    """Returns the same jobs, all longer or shorter by one factor, so that they take so many device-seconds in all."""
    now = sum(one.duration_s * one.devices for one in arrivals)
    return [Arrival(**{**vars(one), "duration_s": one.duration_s * device_s / now}) for one in arrivals]
