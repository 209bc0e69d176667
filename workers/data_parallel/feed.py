"""The samples of a data-parallel job: their order, how they are dealt out, and who loads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from elaunch.plan.tiling import size_findings
from elaunch.workers.data.loader import Loader, MicroBatches, loader_of
from elaunch.workers.data.order import SampleOrder
from elaunch.workers.data.source import DataSource
from elaunch.workers.data_parallel.layout import SampleLayout
from elaunch.workers.random.rng import seed_micro_batch

BEFORE, AFTER = 0, 1
"""The micro-batches of a step: where all members draw the same random numbers."""


@dataclass(frozen=True)
class SampleFeed:
    """What `Job.batches` and `Job.steps` are given.

    Attributes:
        source: of the samples.
        layout: what a step consists of.
        order: of the samples.
    """

    source: DataSource
    layout: SampleLayout
    order: SampleOrder

    @classmethod
    def of(cls, source: DataSource, global_batch_size: int, micro_batch_size: int | None, steps: int) -> SampleFeed:
        """Checks the sizes.

        Raises:
            ValueError: one is too small.
        """
        unit = micro_batch_size or source.batch_size or 1
        whole_shares = (micro_batch_size or source.batch_size) is None
        if wrong := size_findings(1, global_batch_size, unit):
            raise ValueError(wrong[0])
        if steps < 0:
            raise ValueError(f"steps must be 0 or more, got {steps}")
        count, seed, shuffle = source.n_samples, source.seed, source.shuffle
        layout = SampleLayout(global_batch_size, unit, whole_shares, count, seed, shuffle, source.order)
        return cls(source, layout, SampleOrder(count, seed, shuffle))

    def loader(self, steps: int, device: torch.device) -> Loader:
        """Returns who loads this worker's micro-batches."""
        sizes = self.layout.global_batch_size, self.layout.micro_batch_size
        return loader_of(MicroBatches(self.source, self.order, *sizes, steps, device))

    def ids(self, step: int) -> list[int]:
        """Returns the samples of a step, over all members."""
        size = self.layout.global_batch_size
        return self.order.ids(step * size, size)

    def seed_alike(self, step: int, place: int) -> None:
        """Starts the random numbers of what all members do alike, `BEFORE` or `AFTER` the micro-batches of a step."""
        seed_micro_batch(self.layout.seed, step, -1 - place)
