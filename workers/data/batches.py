"""How a batch is made of samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

Collate = Callable[[list[Any]], Any]


def count_samples(dataset: Any) -> int:
    """Returns the size of a map-style data set.

    Raises:
        TypeError: the data set is an iterable one, or has no length.
    """
    lacks = [name for name in ("__len__", "__getitem__", "__getitems__") if not hasattr(dataset, name)]
    if isinstance(dataset, IterableDataset) or "__len__" in lacks or {"__getitem__", "__getitems__"} <= set(lacks):
        raise TypeError(
            f"{type(dataset).__name__} is not a map-style data set: `len(dataset)` and `dataset[index]` must work, "
            "so that every sample is used exactly once whichever workers are there. Jobs of `elaunch.init()` also take "
            "what comes in order: an `IterableDataset`, a generator function, or `elaunch.Stream(data)`."
        )
    return len(dataset)


def load(dataset: Any, ids: Sequence[int], collate: Collate | None = None) -> Any:
    """Returns the batch of the samples `ids`, in that order, in host memory.

    `collate` makes a batch of the list of samples; by default torch's `default_collate`.
    """
    return collated(samples_of(dataset, ids), collate)


def collated(samples: Any, collate: Collate | None = None) -> Any:
    """Returns the batch of a list of samples."""
    return (collate or default_collate)(samples)


def samples_of(dataset: Any, ids: Sequence[int]) -> Any:
    """Returns the samples `ids`, in that order: by one call if the data set has `__getitems__`, as DataLoader does."""
    if getattr(dataset, "__getitems__", None) is not None:
        return dataset.__getitems__(list(ids))
    return [dataset[index] for index in ids]


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
