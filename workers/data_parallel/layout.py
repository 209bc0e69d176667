"""Which samples a step has, how a plan cuts them, and what of them falls to one worker; pure."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaunch.plan.build import data_parallel
from elaunch.plan.shares import even_shares
from elaunch.plan.tiling import Plan, count_units, n_rows
from elaunch.plan.views import units_of
from elaunch.workers.barrier import coverage_of
from elaunch.workers.data.order import SampleOrder


@dataclass(frozen=True, slots=True)
class SampleLayout:
    """What the samples of a step depend on; the same on all members.

    Attributes:
        order: digest of a sampler's own order by which the samples are numbered; empty: there is none.
        n_shards: of a stream; 0: the samples have numbers, from 0 to `n_samples` - 1.
    """

    global_batch_size: int
    micro_batch_size: int
    whole_shares: bool
    n_samples: int
    seed: int
    shuffle: bool
    order: str = ""
    n_shards: int = 0

    @property
    def unit_sizes(self) -> tuple[int, ...]:
        """Samples of each unit of a step."""
        whole, rest = divmod(self.global_batch_size, self.micro_batch_size)
        return (self.micro_batch_size,) * whole + (rest,) * (rest > 0)

    @property
    def cursor(self) -> dict[str, Any]:
        """What a number of steps means."""
        if self.n_shards:
            sizes = {"global_batch_size": self.global_batch_size, "micro_batch_size": self.micro_batch_size}
            return {**sizes, "shards of the stream": self.n_shards, "seed": self.seed}
        order = SampleOrder(self.n_samples, self.seed, self.shuffle)
        sampler = {"order of the sampler": self.order} if self.order else {}
        return {"global_batch_size": self.global_batch_size, **order.described(), **sampler}

    def code(self) -> int:
        """Returns a digest, for members to compare."""
        return zlib.crc32(repr(self).encode())

    def plan(self, shares: Mapping[str, int]) -> Plan:
        """Returns the plan of a step by which each member does so many units."""
        return data_parallel(self.global_batch_size, self.micro_batch_size, shares, whole_shares=self.whole_shares)

    def even_plan(self, members: tuple[str, ...]) -> Plan:
        """Returns the plan by which all members do equally many units, or nearly so."""
        return self.plan(even_shares(count_units(self.global_batch_size, self.micro_batch_size), members))

    def fits(self, plan: Plan) -> bool:
        """Returns whether a plan is of such steps."""
        sizes = plan.global_batch_size, plan.micro_batch_size
        if self.whole_shares:
            cut_so = all(len(tile.micro_batches) == 1 for tile in plan.tiles)
        else:
            cut_so = all(n_rows(tile.micro_batches[0]) <= self.micro_batch_size for tile in plan.tiles)
        return cut_so and sizes == (self.global_batch_size, self.micro_batch_size)

    def usual_samples(self, n_members: int) -> int:
        """Returns the samples of most micro-batches, relative to which gradients are weighted.

        So most of them need no multiplication.
        """
        return -(-self.global_batch_size // n_members) if self.whole_shares else self.micro_batch_size


@dataclass(frozen=True, slots=True)
class Share:
    """What one worker does of a step.

    Attributes:
        units: the micro-batches that count, by number.
        micro_batches: the samples of each that it computes, by their places in the step.
        coverage: digest of `units`, for the commit barrier.
        whole_coverage: that of all units of the step.
    """

    units: range
    micro_batches: tuple[range, ...]
    coverage: int
    whole_coverage: int

    @classmethod
    def of(cls, plan: Plan, worker: str) -> Share:
        """Returns the share of a worker by a plan.

        A worker without units, or without a place in the plan, computes a micro-batch that does not count, so that the
        script's own code between backward and step (clipping, logging) runs alike on all members.
        """
        units = units_of(plan, worker) if worker in plan.workers else range(0)
        own = [run for tile in plan.tiles_of(worker) for (run,) in plan.tiles[tile].micro_batches]
        micro_batches = tuple(own or [plan.unit(0)])
        return cls(units, micro_batches, coverage_of(units), coverage_of(range(plan.n_units)))

    @property
    def counts(self) -> bool:
        """Whether what the worker computes goes into the step."""
        return bool(self.units)
