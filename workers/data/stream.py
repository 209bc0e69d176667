"""Data that comes in order, from shards: what a script may hand over, and how a shard of it is opened."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset


class StreamShards(Protocol):
    """A stream that is cut into shards. It may have `set_epoch`, which gets the number of the pass before `open`.

    Attributes:
        num_shards: their number.
    """

    num_shards: int

    def open(self, shard: int, position: Any) -> Iterator[Any]:
        """Returns an iterator over the samples of a shard, the same ones in the same order each time.

        Args:
            shard: its number, from 0.
            position: what `state_dict` of an iterator over this shard returned, which may have been one of another
                process: go on after the sample that it had given last. None: begin at the first sample.
        """


@dataclass(frozen=True)
class Stream:
    """Data to be read in order, for `Job.steps` and `Job.batches`: what they take for one pass may be given bare.

    Attributes:
        data: a torch `IterableDataset`, a function that returns an iterator, a `datasets.IterableDataset`, anything
            else that can be iterated anew, or an object with `num_shards` and `open(shard, position)`.
        passes: how often all of it is used; None: until the steps of the job are done.
        shards: into so many the data cuts itself by `torch.utils.data.get_worker_info`, as in a DataLoader with so many
            workers; without it, an `IterableDataset` into the `num_workers` of the DataLoader or of `steps`. Other data
            knows its shards.
        repeatable: whether a shard gives the same samples, in the same order, each time it is opened. Otherwise a
            worker that takes one over begins it again and uses all of it: each sample is used at least once in a pass,
            and all is read in the training thread.
    """

    data: Any
    passes: int | None = 1
    shards: int | None = None
    repeatable: bool = True

    def __post_init__(self) -> None:
        for name, value in (("passes", self.passes), ("shards", self.shards)):
            if value is not None and value < 1:
                raise ValueError(f"Stream({name}={value}): it must be 1 or more")


def is_stream(data: Any) -> bool:
    """Returns whether data is read in order; otherwise its samples must have numbers."""
    if isinstance(data, (Stream, IterableDataset)) or _is_generator(data):
        return True
    return not hasattr(data, "__getitem__") and hasattr(data, "num_shards")


def shards_of(stream: Stream, workers: int = 0, prepare: Callable[[int], None] | None = None) -> StreamShards:
    """Returns the shards of a stream.

    Args:
        stream: as the script has given it.
        workers, prepare: `num_workers` and `worker_init_fn`, as DataLoader has them.

    Raises:
        TypeError: it cannot be read in order, or only once.
        ValueError: it is cut already.
    """
    data = stream.data
    if hasattr(data, "num_shards"):
        if stream.shards is not None:
            raise ValueError(f"{type(data).__name__} has {data.num_shards} shards: leave out shards={stream.shards}")
        if hasattr(data, "open"):
            shards: StreamShards = data
            return shards
        if hasattr(data, "shard"):
            return _Datasets(data)
    if isinstance(data, Iterator):
        raise TypeError(
            f"{type(data).__name__} can be read only once, and a worker that joins must read it, too: hand over the "
            "function that makes it, without calling it"
        )
    if not callable(data) and not hasattr(data, "__iter__"):
        raise TypeError(
            f"{type(data).__name__} is no stream: it needs `__iter__`, or `num_shards` and `open(shard, position)`"
        )
    cuts = workers if isinstance(data, IterableDataset) else 0
    return _Iterables(data, stream.shards or cuts or 1, prepare)


def _is_generator(data: Any) -> bool:
    while isinstance(data, functools.partial):
        data = data.func
    return inspect.isgeneratorfunction(data)


class _Datasets:
    """A `datasets.IterableDataset`, whose files are its shards."""

    def __init__(self, dataset: Any) -> None:
        if getattr(dataset, "_distributed", None) is not None:
            raise ValueError(
                "the data set was given to split_dataset_by_node, and elaunch deals it out: leave that out"
            )
        self._dataset = dataset
        self.num_shards = int(dataset.num_shards)
        self._epoch = 0
        # Its state_dict does not have what is in a buffer.
        self._has_positions = not _has_buffer(dataset)

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def open(self, shard: int, position: Any) -> Iterator[Any]:
        part = self._dataset.shard(num_shards=self.num_shards, index=shard, contiguous=False)
        part.set_epoch(self._epoch)
        if position is not None:
            part.load_state_dict(position)
        return _Positioned(iter(part), part.state_dict) if self._has_positions else iter(part)


def _has_buffer(dataset: Any) -> bool:
    """Returns whether samples of a `datasets.IterableDataset` wait in a buffer, or that cannot be seen."""
    unseen = [getattr(dataset, "_ex_iterable", None)]
    while unseen:
        one = unseen.pop()
        if one is None or "Shuffled" in type(one).__name__:
            return True
        below = vars(one)
        unseen += [below["ex_iterable"]] if "ex_iterable" in below else below.get("ex_iterables", [])
    return False


class _Positioned:
    """An iterator, and where it stands."""

    def __init__(self, samples: Iterator[Any], state_dict: Callable[[], Any]) -> None:
        self._samples, self.state_dict = samples, state_dict

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._samples)


class _Iterables:
    """What can be iterated anew, or a function that returns an iterator; it may cut itself by `get_worker_info`."""

    def __init__(self, data: Any, num_shards: int, prepare: Callable[[int], None] | None) -> None:
        self._data, self.num_shards, self._prepare = data, num_shards, prepare
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def open(self, shard: int, position: Any) -> Iterator[Any]:
        # What it keeps in attributes while it is iterated is then this shard's own.
        data: Any = copy.copy(self._data) if hasattr(self._data, "__iter__") else None
        worker = self._as_worker(shard, data)
        if hasattr(data, "set_epoch"):
            data.set_epoch(self._epoch)
        with worker():
            if self._prepare is not None:
                self._prepare(shard)
            if position is not None and _is_stateful(data):
                data.load_state_dict(position)
            samples: Any = iter(self._data() if data is None else data)
            if position is not None and _is_stateful(samples):
                samples.load_state_dict(position)
        return _shard_iterator(samples, next((one for one in (samples, data) if _is_stateful(one)), None), worker)

    def _as_worker(self, shard: int, data: Any) -> Callable[[], Any]:
        """Returns contexts in which torch's `get_worker_info` says that this is worker number `shard` of a loader."""
        info = None
        if self.num_shards > 1 or self._prepare is not None:
            info = torch_worker.WorkerInfo(id=shard, num_workers=self.num_shards, seed=shard, dataset=data)

        @contextmanager
        def worker() -> Iterator[None]:
            before, torch_worker._worker_info = torch_worker._worker_info, info
            try:
                yield
            finally:
                torch_worker._worker_info = before

        return worker


def _is_stateful(thing: Any) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _shard_iterator(samples: Iterator[Any], stateful: Any, worker: Callable[[], Any]) -> Iterator[Any]:
    def each() -> Iterator[Any]:
        while True:
            with worker():
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            yield sample

    return each() if stateful is None else _Positioned(each(), stateful.state_dict)
