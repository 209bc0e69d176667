"""The samples of a data-parallel job: their order, how they are dealt out, and who loads them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from elaunch.detect.heartbeat import Phase
from elaunch.plan.tiling import size_findings
from elaunch.workers import heartbeat
from elaunch.workers.comm.group import Group
from elaunch.workers.data.loader import Loader, MicroBatches, loader_of
from elaunch.workers.data.order import SampleOrder
from elaunch.workers.data.source import DataSource
from elaunch.workers.data.streaming import StreamLoader, StreamState
from elaunch.workers.data_parallel.layout import SampleLayout
from elaunch.workers.data_parallel.plans import Plans
from elaunch.workers.data_parallel.registered import RegisteredState
from elaunch.workers.random.rng import seed_micro_batch

BEFORE, AFTER = 0, 1
"""The micro-batches of a step: where all members draw the same random numbers."""


@dataclass(frozen=True)
class SampleFeed:
    """What `Job.batches` and `Job.steps` are given.

    Attributes:
        source: of the samples.
        layout: what a step consists of.
        order: of the samples; None: they come from a stream.
        stream: how far that has been used.
    """

    source: DataSource
    layout: SampleLayout
    order: SampleOrder | None
    stream: StreamState

    @classmethod
    def of(
        cls, source: DataSource, global_batch_size: int, micro_batch_size: int | None, steps: int, stream: StreamState
    ) -> SampleFeed:
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
        n_shards = source.shards.num_shards if source.shards is not None else 0
        layout = SampleLayout(global_batch_size, unit, whole_shares, count, seed, shuffle, source.order, n_shards)
        return cls(source, layout, None if n_shards else SampleOrder(count, seed, shuffle), stream)

    def loader(self, steps: int, device: torch.device) -> Loader:
        """Returns who loads this worker's micro-batches."""
        if self.order is None:
            progress = partial(heartbeat.enter, Phase.SCRIPT)
            return StreamLoader(self.source, self.layout.unit_sizes, self.stream, device, progress)
        sizes = self.layout.global_batch_size, self.layout.micro_batch_size
        return loader_of(MicroBatches(self.source, self.order, *sizes, steps, device))

    def draw(self, loader: Loader, plans: Plans, state: RegisteredState, group: Group) -> None:
        """All members draw the step that begins, if its samples come from a stream; or find that this has ended.

        Raises:
            StepInterrupted: a peer was lost, or the generation changed.
            StateError: the stream does not give the same samples each time.
        """
        if not isinstance(loader, StreamLoader):
            return
        share = plans.share(self.layout)
        heartbeat.enter(Phase.SCRIPT, state.step)
        dealt = loader.draw(group.reduce_bytes, state.step, share.micro_batches, share.counts)
        heartbeat.enter(Phase.BETWEEN)
        if group.rank == 0:
            loader.tell(group.size, state.step, dealt)

    def ids(self, step: int) -> list[int]:
        """Returns the samples of a step, over all members; of a stream, that of the last one."""
        if self.order is None:
            return self.stream.sample_ids(self.layout.n_shards)
        size = self.layout.global_batch_size
        return self.order.ids(step * size, size)

    def seed_alike(self, step: int, place: int) -> None:
        """Starts the random numbers of what all members do alike, `BEFORE` or `AFTER` the micro-batches of a step."""
        seed_micro_batch(self.layout.seed, step, -1 - place)
