"""How fast jobs are on what they might get, from tables, and what it costs to get there."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from elaunch.scheduler.model import Allocation, devices_of


class ChangeCost(Protocol):
    """The seconds of training that a change costs."""

    def seconds(self, before: Allocation, after: Allocation) -> float:
        """Returns the seconds; 0 if nothing changes, or if the job has not started."""


@dataclass(frozen=True)
class MoveCost:
    """The processes stay, and only what is missing is moved: agreement and links, then the state of newcomers.

    Attributes:
        fixed_s: of a change, whatever moves.
        state_bytes: parameters and optimizer of the whole job.
        bandwidth_bytes_per_s: at which a newcomer receives its part of them.
    """

    fixed_s: float = 0.0
    state_bytes: float = 0.0
    bandwidth_bytes_per_s: float = math.inf

    def seconds(self, before: Allocation, after: Allocation) -> float:
        """Returns the seconds; each newcomer receives an even part of the state, all at once."""
        if not before or not after or before == after:
            return 0.0
        new = any(n > before.get(name, 0) for name, n in after.items())
        part = self.state_bytes / devices_of(after) / self.bandwidth_bytes_per_s if new else 0.0
        return self.fixed_s + part


@dataclass(frozen=True)
class RestartCost:
    """The job stops with a checkpoint and starts from it, as under the schedulers that Suika is compared with.

    Attributes:
        restart_s: to stop and to start, without the state.
        state_bytes: parameters and optimizer of the whole job, written and read.
        storage_bytes_per_s: of the storage, all devices together.
    """

    restart_s: float
    state_bytes: float = 0.0
    storage_bytes_per_s: float = math.inf

    def seconds(self, before: Allocation, after: Allocation) -> float:
        """Returns the seconds; all state is written and read, whatever changes."""
        if not before or not after or before == after:
            return 0.0
        return self.restart_s + 2 * self.state_bytes / self.storage_bytes_per_s


@dataclass(frozen=True)
class TableSpeed:
    """The speed of a job by its number of devices, wherever they are; between two entries it is interpolated.

    Attributes:
        rates: samples per second by number of devices. With fewer than the least, the job cannot run; more than the
            most are of no use.
        cost: of a change.
        weights: by node, how many devices of the table one of its devices is worth; 1 if it is not named.
    """

    rates: Mapping[int, float]
    cost: ChangeCost = field(default_factory=MoveCost)
    weights: Mapping[str, float] = field(default_factory=dict)

    def rate(self, allocation: Allocation) -> float:
        """Returns samples per second; 0 if there are too few devices."""
        devices = (
            sum(n * self.weights.get(name, 1.0) for name, n in allocation.items())
            if self.weights
            else devices_of(allocation)
        )
        sizes = self._sizes
        if not sizes or devices < sizes[0]:
            return 0.0
        place = bisect_left(sizes, devices)
        if place == len(sizes):
            return self.rates[sizes[-1]]
        if sizes[place] == devices:
            return self.rates[sizes[place]]
        low, high = sizes[place - 1], sizes[place]
        part = (devices - low) / (high - low)
        return self.rates[low] + part * (self.rates[high] - self.rates[low])

    @cached_property
    def _sizes(self) -> list[int]:
        return sorted(self.rates)

    def change_s(self, before: Allocation, after: Allocation) -> float:
        """Returns the seconds of training that the change costs."""
        return self.cost.seconds(before, after)
