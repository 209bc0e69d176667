"""What a script hands over to be trained on: a data set, or a DataLoader of it; and how its batches are loaded."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypedDict

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from elaunch.workers.data.batches import Collate, count_samples, samples_of
from elaunch.workers.data.stream import Stream, StreamShards, is_stream, shards_of

Context = Any
"""What DataLoader takes as `multiprocessing_context`: the name of a start method, a context, or None."""


class Loading(TypedDict, total=False):
    """How batches are loaded: arguments of torch's DataLoader, with its meanings and defaults.

    `persistent_workers` has no effect: the processes stay as long as `batches` yields.
    """

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: Context
    persistent_workers: bool


@dataclass(frozen=True)
class DataSource:
    """Samples by number, and how batches of them are loaded.

    Attributes:
        dataset: map-style, or a `Stream`.
        n_samples: its length; of a stream, 0.
        collate: makes a batch of a list of samples; None: torch's default.
        batch_size: of a DataLoader, else None.
        seed, shuffle: of the order, as its sampler has them, or by default.
        order: digest of a sampler's own fixed order, by which `dataset` is numbered; empty: there is none.
        num_workers, prefetch_factor, pin_memory, timeout, worker_init_fn, multiprocessing_context, in_order: as
            DataLoader has them.
        shards: of a stream; None: the data set is map-style.
    """

    dataset: Any
    n_samples: int
    collate: Collate | None = None
    batch_size: int | None = None
    seed: int = 0
    shuffle: bool = True
    order: str = ""
    num_workers: int = 0
    prefetch_factor: int = 2
    pin_memory: bool = False
    timeout: float = 0
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Context = None
    in_order: bool = True
    shards: StreamShards | None = None

    @classmethod
    def of(
        cls,
        data: Any,
        *,
        seed: int | None = None,
        shuffle: bool | None = None,
        collate_fn: Collate | None = None,
        loading: Loading | None = None,
    ) -> DataSource:
        """Returns the source for what was handed over; an argument that is not None replaces what a DataLoader has.

        Raises:
            TypeError: it is neither map-style nor a stream, or an argument is unknown.
            ValueError: samples would be used more than once, or on some members only; or an argument is out of range.
        """
        if isinstance(data, DataLoader):
            source = _of_loader(data, shuffle)
        else:
            source = cls(data, 0 if is_stream(data) else count_samples(data))
        changes: dict[str, Any] = _checked(loading or {})
        given: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "collate": collate_fn}
        source = replace(source, **{name: value for name, value in given.items() if value is not None}, **changes)
        return _streamed(source, shuffle) if is_stream(source.dataset) else source

    @property
    def kind(self) -> str:
        """The name of the class of the script's data set."""
        dataset = self.dataset
        while isinstance(dataset, Renumbered):
            dataset = dataset.below
        return type(dataset).__name__


class Renumbered(Dataset[Any]):
    """A data set in another order: sample i is sample `numbers[i]` of the one below."""

    def __init__(self, dataset: Any, numbers: Sequence[int]) -> None:
        self.below, self._numbers = dataset, np.array(numbers, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> Any:
        return self.below[int(self._numbers[index])]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Returns several samples, by one call of the data set where it has such a call."""
        samples: list[Any] = samples_of(self.below, self._numbers[list(indices)].tolist())
        return samples


def _checked(loading: Loading) -> dict[str, Any]:
    unknown = sorted(set(loading) - set(Loading.__annotations__))
    if unknown:
        raise TypeError(f"batches() has no argument {unknown[0]!r}; of DataLoader's it takes {', '.join(_TAKEN)}")
    changes = {name: value for name, value in loading.items() if name != "persistent_workers"}
    if changes.get("prefetch_factor", 0) is None:
        del changes["prefetch_factor"]
    for name, least in (("num_workers", 0), ("prefetch_factor", 1), ("timeout", 0)):
        value: Any = changes.get(name, least)
        if value < least:
            raise ValueError(f"{name} must be {least} or more, got {value}")
    return changes


_TAKEN = (*Loading.__annotations__, "collate_fn")


def _streamed(source: DataSource, shuffle: bool | None) -> DataSource:
    if shuffle:
        raise ValueError("shuffle=True: a stream has an order of its own; shuffle it where it is made, with a seed")
    stream = source.dataset if isinstance(source.dataset, Stream) else Stream(source.dataset)
    shards = shards_of(stream, source.num_workers, source.worker_init_fn)
    return replace(source, dataset=stream, shuffle=False, shards=shards)


def _of_loader(loader: DataLoader[Any], shuffle: bool | None) -> DataSource:
    streams = is_stream(loader.dataset)
    n_samples = 0 if streams else count_samples(loader.dataset)
    batches, sampler, size = loader.batch_sampler, loader.sampler, loader.batch_size
    if size is None and type(batches) is BatchSampler:
        sampler, size = batches.sampler, batches.batch_size
    if size is None:
        kind = "batch_size=None" if batches is None else f"the batch sampler {type(batches).__name__}"
        raise ValueError(
            f"a DataLoader with {kind} chooses its batches itself, and elaunch deals them out: "
            "give it a batch_size, or hand over its data set"
        )
    source = DataSource(
        loader.dataset,
        n_samples,
        loader.collate_fn,
        size,
        num_workers=loader.num_workers,
        prefetch_factor=loader.prefetch_factor or 2,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        in_order=getattr(loader, "in_order", True),
    )
    return source if streams or (shuffle is not None and not _is_subset(sampler)) else _ordered_by(source, sampler)


def _is_subset(sampler: Any) -> bool:
    return type(sampler) is SubsetRandomSampler


def _ordered_by(source: DataSource, sampler: Any) -> DataSource:
    """Returns the source in the order of a sampler, or in ours where that is what the sampler stands for."""
    if type(sampler) is SequentialSampler:
        return replace(source, shuffle=False)
    if type(sampler) is DistributedSampler:
        return replace(source, shuffle=sampler.shuffle, seed=sampler.seed)
    if type(sampler) is RandomSampler or _is_torchdatas(sampler, "RandomSampler"):
        if sampler.replacement or sampler.num_samples != source.n_samples:
            raise ValueError(
                f"RandomSampler(replacement={sampler.replacement}, num_samples={sampler.num_samples}) of "
                f"{source.n_samples} samples draws some of them twice or never in a pass, and elaunch uses each once: "
                "leave both arguments out"
            )
        return replace(source, shuffle=True)
    name = type(sampler).__name__
    if _is_subset(sampler):
        return _renumbered(source, _numbers(sampler.indices, source, name), shuffle=True)
    if any(hasattr(sampler, one) for one in ("num_replicas", "set_epoch")):
        raise ValueError(
            f"the sampler {name} shares out its samples among ranks, or changes its order by set_epoch; elaunch does "
            "both itself: hand over the DataLoader without this sampler, or say shuffle=True or shuffle=False"
        )
    # One that never ends is cut off, and refused with those that change their order.
    most = len(sampler) if hasattr(sampler, "__len__") else source.n_samples
    numbers = _numbers(islice(sampler, most + 1), source, name)
    if len(numbers) > most or numbers != _numbers(islice(sampler, most + 1), source, name):
        raise ValueError(
            f"the sampler {name} gives another order each time, or no end, which members cannot share: hand over the "
            "DataLoader without it, or say shuffle=True for elaunch's own random order"
        )
    return _renumbered(source, numbers, shuffle=False)


def _is_torchdatas(sampler: Any, name: str) -> bool:
    """Returns whether it is torchdata's sampler of a name, as a StatefulDataLoader has in place of torch's."""
    kind = type(sampler)
    return kind.__name__ == name and kind.__module__.partition(".")[0] == "torchdata"


def _numbers(given: Iterable[Any], source: DataSource, name: str) -> list[int]:
    found = []
    for one in given:
        try:
            number = operator.index(one)
        except TypeError:
            number = -1
        if not 0 <= number < source.n_samples:
            raise ValueError(
                f"the sampler {name} gives {one!r}; expected numbers of samples, 0 to {source.n_samples - 1}: hand "
                "over the DataLoader without it, or say shuffle=True for elaunch's own random order"
            )
        found.append(number)
    if not found:
        raise ValueError(f"the sampler {name} gives no samples: hand over the DataLoader without it")
    return found


def _renumbered(source: DataSource, numbers: list[int], shuffle: bool) -> DataSource:
    dataset = Renumbered(source.dataset, numbers)
    order = hashlib.sha256(np.array(numbers, dtype="<i8").tobytes()).hexdigest()[:16]
    return replace(source, dataset=dataset, n_samples=len(numbers), order=order, shuffle=shuffle)
