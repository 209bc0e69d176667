"""Batches for whoever is a member, in an order that does not depend on the members.

The position counts samples of the endless stream of passes (`SampleOrder`), over all members; it is part of the state.
Each step takes the next samples of it, as many for each member as the loader has in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from elaunch.errors import UsageError
from elaunch.plan.shares import share
from elaunch.workers.data.order import SampleOrder
from elaunch.workers.data.source import DataSource


@dataclass(frozen=True)
class Batch:
    """The samples of one member in a step.

    Attributes:
        ids: of the samples.
        weight: how much the mean over them counts: members x its samples / all samples of the step.
        stop: the position after the step.
    """

    ids: tuple[int, ...]
    weight: float
    stop: int


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

    def ids(self, start: int, stop: int) -> list[int]:
        """Returns the samples of all members between two positions."""
        return self._order.ids(start, stop - start)

    def parts(self, position: int, rank: int, size: int) -> Iterator[Batch]:
        """Yields the batches of member `rank` of `size` from a position on."""
        whole = self._global or self._per_member * size
        if whole < size:
            raise UsageError(f"global_batch_size={whole} is less than one sample for each of {size} members")
        while position < self._end:
            left = self._source.n_samples - position % self._source.n_samples
            if left < whole and self._loader.drop_last:
                position += left
                continue
            count = min(left, whole)
            stop = position + count
            # Each member takes part in each step; the last samples of a pass may have to do for several.
            taken = max(count, size)
            mine = share(taken, size, rank)
            ids = self._order.ids(position, count)
            picked = tuple(ids[place % count] for place in range(mine.start, mine.stop))
            yield Batch(picked, len(picked) * size / taken, stop)
            position = stop

    def load(self, position: int, rank: int, size: int) -> Iterator[tuple[Batch, Any]]:
        """Yields the batches of a member with their content, loaded as the loader loads."""
        source = self._source
        more: dict[str, Any] = {}
        if source.num_workers:
            more = {
                "prefetch_factor": source.prefetch_factor,
                "worker_init_fn": source.worker_init_fn,
                "multiprocessing_context": source.multiprocessing_context,
            }
        loader = DataLoader(
            source.dataset,
            batch_sampler=_Ids(self, position, rank, size),
            num_workers=source.num_workers,
            collate_fn=source.collate,
            pin_memory=source.pin_memory and torch.accelerator.is_available(),
            timeout=source.timeout,
            generator=torch.Generator(),  # or it draws from the script's own
            **more,
        )
        return zip(self.parts(position, rank, size), loader, strict=True)


class _Ids:
    """The batch sampler of a member."""

    def __init__(self, batches: Batches, position: int, rank: int, size: int) -> None:
        self._arguments = batches, position, rank, size

    def __iter__(self) -> Iterator[list[int]]:
        batches, position, rank, size = self._arguments
        for part in batches.parts(position, rank, size):
            yield list(part.ids)
