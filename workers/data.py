"""Which samples a step uses, in an order that does not depend on the membership, and how a batch is made of them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, default_collate

from elaunch.workers import heartbeat

Collate = Callable[[list[Any]], Any]


class SampleOrder:
    """The endless stream of passes over a data set: position q belongs to pass q // n_samples.

    Every pass holds each sample exactly once, permuted by a generator that is seeded with (seed, pass). Any worker
    computes any part of the stream without the rest. At most two passes' permutations are kept in memory, 4 bytes
    per sample each.

    Args:
        n_samples: size of the data set.
        seed: 0 or more.
        shuffle: False gives each pass in the order of the data set.

    All workers of a job need the same numpy, whose permutations may differ between versions (NEP 19).
    """

    def __init__(self, n_samples: int, seed: int, shuffle: bool = True) -> None:
        if n_samples < 1:
            raise ValueError(f"the data set must hold at least one sample, got {n_samples}")
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        self.n_samples = n_samples
        self.seed = seed
        self.shuffle = shuffle
        self._permutations: dict[int, np.ndarray[Any, Any]] = {}

    def ids(self, start: int, count: int) -> list[int]:
        """Returns the sample ids at positions start, …, start + count - 1 of the stream, which may span passes."""
        if start < 0 or count < 0:
            raise ValueError(f"start and count must be 0 or more, got start {start} and count {count}")
        found: list[int] = []
        while len(found) < count:
            number, offset = divmod(start + len(found), self.n_samples)
            stop = min(offset + count - len(found), self.n_samples)
            found.extend(self._permutation(number)[offset:stop].tolist() if self.shuffle else range(offset, stop))
        return found

    def _permutation(self, number: int) -> np.ndarray[Any, Any]:
        if number not in self._permutations:
            kept = {n: order for n, order in self._permutations.items() if abs(n - number) == 1}
            order = np.arange(self.n_samples, dtype=np.uint32 if self.n_samples < 2**32 else np.uint64)
            entropy = np.random.SeedSequence(self.seed, spawn_key=(number,))
            np.random.Generator(np.random.PCG64(entropy)).shuffle(order)
            newest = {max(kept): kept[max(kept)]} if kept else {}
            self._permutations = {**newest, number: order}
        return self._permutations[number]


def digest(ids: Iterable[int]) -> str:
    """Returns SHA-256 (hex) of the sorted ids, each as 8 bytes little-endian: the event log names samples by it."""
    return hashlib.sha256(np.sort(np.fromiter(ids, dtype="<i8")).tobytes()).hexdigest()


def count_samples(dataset: Any) -> int:
    """Returns the size of a map-style data set.

    Raises:
        TypeError: the data set is an iterable one, or has no length.
    """
    lacks = [name for name in ("__len__", "__getitem__", "__getitems__") if not hasattr(dataset, name)]
    if isinstance(dataset, IterableDataset) or "__len__" in lacks or {"__getitem__", "__getitems__"} <= set(lacks):
        raise TypeError(
            f"{type(dataset).__name__} is not a map-style data set: `len(dataset)` and `dataset[index]` must work, "
            "so that every sample is used exactly once whichever workers are there. Wrap a stream in a data set that "
            "knows its length and finds a sample by its index."
        )
    return len(dataset)


def load(dataset: Any, ids: Sequence[int], collate: Collate | None = None) -> Any:
    """Returns the batch of the samples `ids`, in that order, in host memory.

    `dataset.__getitems__` (all samples in one call) is used where the data set has it, as DataLoader does.
    `collate` makes a batch of the list of samples; by default torch's `default_collate`.
    """
    with heartbeat.script_code():
        if getattr(dataset, "__getitems__", None) is not None:
            samples = dataset.__getitems__(list(ids))
        else:
            samples = [dataset[index] for index in ids]
        return (collate or default_collate)(samples)


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Returns the same structure with each tensor, and anything else that has a `to` method, on `device`.

    Goes into tuples, named tuples, lists and mappings; other values stay as they are.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        return batch.to(device)
    if isinstance(batch, tuple):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
    if isinstance(batch, list):
        return [to_device(value, device) for value in batch]
    if isinstance(batch, dict):
        moved_dict = copy.copy(batch)
        moved_dict.update((key, to_device(value, device)) for key, value in batch.items())
        return moved_dict
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    return batch
