"""Batches as Lightning deals them out among the first members, for any number of members.

Lightning gives each of R workers every R-th sample of an order that all of them know, so step b uses the samples from
b * batch size * R on. Here a step uses the same samples, whoever is there; every size-th of them is one member's.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from elaunch.errors import UsageError
from elaunch.integrations.loaders import loading_of
from elaunch.workers.reentry.sampler import MemberBatch, StepSampler


def whole_order(sampler: Any, replicas: int) -> Any:
    """Returns a sampler of all that a DistributedSampler deals out among `replicas` workers, in its order."""
    whole = copy.copy(sampler)
    count = len(sampler.dataset)
    if sampler.drop_last and count % replicas:
        per_replica = math.ceil((count - replicas) / replicas)
    else:
        per_replica = math.ceil(count / replicas)
    whole.num_replicas, whole.rank = 1, 0
    whole.num_samples = whole.total_size = per_replica * replicas
    return whole


class Dealer(StepSampler):
    """The batch sampler of one member.

    Args:
        sampler: a DistributedSampler, whatever number of replicas it was made for.
        batch_size: samples of a step for each of the first members.
        drop_last: whether an incomplete last step is left out.
        replicas: number of the first members.
        rank: of this member.
        size: number of members.

    Attributes:
        sampler: of all samples.
        start: the step to begin with.
        epoch: of the loop around passes; like the pass, it changes what a sampler of the script's own draws.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, replicas: int, rank: int, size: int) -> None:
        super().__init__(rank, size, interleaved=True)
        self.sampler = whole_order(sampler, replicas)
        self.start = self.epoch = 0
        self._whole = batch_size * replicas
        self._drop_last = drop_last

    def __len__(self) -> int:
        """Returns the number of steps of a pass."""
        count = int(self.sampler.total_size)
        return count // self._whole if self._drop_last else math.ceil(count / self._whole)

    def steps(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields the number and the samples of each step, from `start` on."""
        order = self._order()
        for step in range(self.start, len(self)):
            yield step, order[step * self._whole : (step + 1) * self._whole]

    def _order(self) -> tuple[int, ...]:
        if type(self.sampler) is DistributedSampler:
            return tuple(self.sampler)
        # A sampler of the script's own draws from the generators of the process, in which members may differ.
        with isolate_rng():
            seed = f"{self.sampler.seed} {self.sampler.epoch} {self.epoch}"
            random.seed(seed)
            torch.manual_seed(random.getrandbits(32))
            np.random.seed(random.getrandbits(32))
            return tuple(self.sampler)


class DealtLoader(DataLoader[Any]):
    """A loader of one member's shares, which loads as another one does.

    It reads its order when the first batch is asked for, so where it begins can be said after `iter`.

    Args:
        loader: the other one, with a DistributedSampler.
        replicas: number of the first members.
        rank: of this member.
        size: number of members.

    Attributes:
        position: steps that have been handed out in this pass.
        share: the last one.
    """

    def __init__(self, loader: DataLoader[Any], replicas: int, rank: int, size: int) -> None:
        assert loader.batch_size is not None
        dealer = Dealer(loader.sampler, loader.batch_size, loader.drop_last, replicas, rank, size)
        super().__init__(loader.dataset, batch_sampler=dealer, generator=loader.generator, **loading_of(loader))
        self.dealer = dealer
        self.position = 0
        self.share: MemberBatch | None = None

    def __iter__(self) -> Any:
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        self.position = self.dealer.start
        try:
            for _, batch, content in self.dealer.beside(super().__iter__()):
                self.share = batch
                self.position += 1
                yield content
        finally:
            self.dealer.start = 0


def dealt(loader: object, replicas: int, rank: int, size: int, trains: bool) -> object:
    """Returns a loader that deals out global batches, in place of one that Lightning has prepared.

    Args:
        loader: with Lightning's DistributedSampler.
        replicas: number of the first members.
        rank: of this member.
        size: number of members.
        trains: whether its position is part of the state; others are left as they are if they cannot be dealt out.

    Raises:
        UsageError: it cannot be dealt out; says why.
    """
    reason = None
    if isinstance(loader, DealtLoader):
        return loader
    if not isinstance(loader, DataLoader):
        reason = f"it is a {type(loader).__name__}, not a DataLoader"
    elif type(loader.batch_sampler) is not BatchSampler or loader.batch_size is None:
        reason = f"it has no batches of a fixed size, but a {type(loader.batch_sampler).__name__}"
    elif not isinstance(loader.sampler, DistributedSampler):
        reason = f"its order comes from a {type(loader.sampler).__name__}, not from a DistributedSampler"
    if reason is None:
        assert isinstance(loader, DataLoader)
        return DealtLoader(loader, replicas, rank, size)
    if not trains:
        return loader
    raise UsageError(
        f"the training data cannot be dealt out anew when members change: {reason}. Expected a DataLoader with "
        "batch_size= of a data set that has a length, with Lightning's own sampler (use_distributed_sampler=True)"
    )
