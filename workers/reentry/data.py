"""Batches for whoever is a member, in an order that does not depend on the members.

The position counts samples of the endless stream of passes (`SampleOrder`), over all members; it is part of the state.
Each step takes the next samples of it, as many for each member as the loader has in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from elaunch.errors import UsageError
from elaunch.workers.data.order import SampleOrder
from elaunch.workers.data.source import DataSource
from elaunch.workers.reentry.sampler import MemberBatch, StepSampler


class Batches:
    """The batches of one member from a position on.

    Args:
        loader: a DataLoader of a data set with a length.
        global_batch_size: samples of a step over all members; None: the loader's batch size for each member.
        epochs: passes over the data set.

    Raises:
        UsageError: the loader cannot be dealt out; says why.
    """

    def __init__(self, loader: Any, global_batch_size: int | None, epochs: int) -> None:
        if not isinstance(loader, DataLoader):
            raise UsageError(f"state.steps() takes a DataLoader, got {type(loader).__name__}")
        try:
            self._source = DataSource.of(loader)
        except (TypeError, ValueError) as error:
            raise UsageError(f"state.steps(): {error}") from error
        if self._source.shards is not None:
            raise UsageError(
                "state.steps() takes a DataLoader of a data set with a length; a stream has no place to go back to: "
                "iterate over it yourself, and bind something whose state_dict has its position"
            )
        assert self._source.batch_size is not None
        self._loader, self._per_member, self._global = loader, self._source.batch_size, global_batch_size
        self._order = SampleOrder(self._source.n_samples, self._source.seed, self._source.shuffle)
        self._end = epochs * self._source.n_samples

    @property
    def n_samples(self) -> int:
        """Returns the number of samples of the data set."""
        return self._source.n_samples

    def steps(self, position: int, size: int) -> Iterator[tuple[int, list[int]]]:
        """Yields for each step of `size` members, from a position on, the position after it, and its samples."""
        whole = self._global or self._per_member * size
        if whole < size:
            raise UsageError(f"global_batch_size={whole} is less than one sample for each of {size} members")
        while position < self._end:
            left = self._source.n_samples - position % self._source.n_samples
            if left < whole and self._loader.drop_last:
                position += left
                continue
            count = min(left, whole)
            ids = self._order.ids(position, count)
            position += count
            yield position, ids

    def load(self, position: int, rank: int, size: int) -> Iterator[tuple[int, MemberBatch, Any]]:
        """Yields for each step the position after it, and this member's batch with its content.

        The content is loaded as the loader loads.
        """
        source = self._source
        more: dict[str, Any] = {}
        if source.num_workers:
            more = {
                "prefetch_factor": source.prefetch_factor,
                "worker_init_fn": source.worker_init_fn,
                "multiprocessing_context": source.multiprocessing_context,
            }
        sampler = _FromPosition(self, position, rank, size)
        loader = DataLoader(
            source.dataset,
            batch_sampler=sampler,
            num_workers=source.num_workers,
            collate_fn=source.collate,
            pin_memory=source.pin_memory and torch.accelerator.is_available(),
            timeout=source.timeout,
            generator=torch.Generator(),  # or it draws from the script's own
            **more,
        )
        return sampler.beside(loader)


class _FromPosition(StepSampler):
    """The batch sampler of a member; the number of a step is the position after it."""

    def __init__(self, batches: Batches, position: int, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._batches, self._position = batches, position

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Yields the position after each step, and its samples."""
        return self._batches.steps(self._position, self.size)
