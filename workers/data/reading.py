"""Reads the shards of a stream on one worker, and keeps what it has read until the step that uses it has committed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from elaunch.workers.data.dealing import Mark, SampleRun, ShardInPass, StreamPosition
from elaunch.workers.data.stream import StreamShards
from elaunch.workers.random.rng import seed_micro_batch

_OFFSET_BITS = 40  # of a sample's number, above which stands its shard


@dataclass(slots=True)
class _OpenShard:
    """An iterator, the pass that it is for, and how many samples have come from it or been left out."""

    turn: int
    samples: Iterator[Any]
    count: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """Samples to be read.

    Attributes:
        run: of a pass that is not over.
        mark: of the shard.
        is_noted: whether to note where the shard stands after them.
        is_first: whether no other worker uses samples of this shard that come before these in the step.
        counts: whether they are used; a worker without a part of the step reads what it only computes with.
    """

    run: SampleRun
    mark: Mark | None = None
    is_noted: bool = False
    is_first: bool = True
    counts: bool = True


class Readers(Protocol):
    """Who reads the samples of a stream on one worker.

    Attributes:
        noted: where shards stood after runs for which that was wanted.
        have_positions: whether shards have a `state_dict` that can be sent; None: that is not known yet.
    """

    noted: dict[ShardInPass, Mark]
    have_positions: bool | None

    def begin(self, position: StreamPosition) -> None:
        """Begins a step, or begins it again: what is not needed from this position on is forgotten."""

    def fetch(self, wanted: Wanted) -> int | None:
        """Reads what is not here of a run; returns the samples of its shard where that ends before the run does."""

    def samples(self, runs: Iterable[SampleRun]) -> list[Any]:
        """Returns samples that have been fetched."""

    def close(self) -> None:
        """Closes all shards."""


class ShardReaders:
    """Reads any samples of a stream that repeats itself; those that follow on each other fastest.

    A shard that has been read beyond what is wanted is opened again, at the last mark before that, and samples between
    are left out. Before each sample the random numbers begin anew from its number: they belong to it, and not to who
    reads it.

    Args:
        shards: of the stream.
        seed: of the random numbers.
        progress: called before each sample.
    """

    def __init__(self, shards: StreamShards, seed: int, progress: Callable[[], None]) -> None:
        self._shards, self._seed, self._progress = shards, seed, progress
        self._open: dict[int, _OpenShard] = {}
        self._kept: dict[tuple[int, int, int], Any] = {}
        self.noted: dict[ShardInPass, Mark] = {}
        self._position = StreamPosition(0, (), 0, {})
        self.have_positions: bool | None = None

    def begin(self, position: StreamPosition) -> None:
        """Begins a step, or begins it again: what is not needed from this position on is forgotten."""
        self._position = position
        self.noted = {key: mark for key, mark in self.noted.items() if position.used_of(*key) is not None}
        self._kept = {key: sample for key, sample in self._kept.items() if self._is_needed(*key)}
        for shard, one in list(self._open.items()):
            if position.used_of(one.turn, shard) is None:
                self._close(shard)

    def fetch(self, wanted: Wanted) -> int | None:
        """Reads what is not here of a run; returns the samples of its shard where that ends before the run does."""
        run = wanted.run
        missing = next((at for at in range(run.start, run.stop) if (run.turn, run.shard, at) not in self._kept), None)
        if missing is None:
            return None
        reader = self._at(run.turn, run.shard, missing, wanted.mark)
        while reader.count < run.stop:
            key = run.turn, run.shard, reader.count
            self._progress()
            self._seed_sample(*key)
            try:
                sample = next(reader.samples)
            except StopIteration:
                self._close(run.shard)
                return reader.count
            reader.count += 1
            if self.have_positions is None:
                self.have_positions = _state_of(reader.samples) is not None
            if self._is_needed(*key):
                self._kept[key] = sample
        if wanted.is_noted and (state := _state_of(reader.samples)) is not None:
            self.noted[run.turn, run.shard] = reader.count, state
        return None

    def samples(self, runs: Iterable[SampleRun]) -> list[Any]:
        """Returns samples that have been fetched."""
        return [self._kept[run.turn, run.shard, at] for run in runs for at in range(run.start, run.stop)]

    def close(self) -> None:
        """Closes all shards."""
        for shard in list(self._open):
            self._close(shard)
        self._kept.clear()

    def _at(self, turn: int, shard: int, count: int, mark: Mark | None) -> _OpenShard:
        """Returns the shard, opened, at a number of samples or before."""
        reader = self._open.get(shard)
        marked, state = mark if mark is not None and mark[0] <= count else (0, None)
        if reader is None or reader.turn != turn or not marked <= reader.count <= count:
            self._close(shard)
            self._seed_sample(turn, shard, marked)
            reader = self._open[shard] = _OpenShard(turn, opened(self._shards, turn, shard, state), marked)
        return reader

    def _close(self, shard: int) -> None:
        reader = self._open.pop(shard, None)
        if reader is not None:
            close(reader.samples)

    def _is_needed(self, turn: int, shard: int, at: int) -> bool:
        used = self._position.used_of(turn, shard)
        return used is not None and at >= used

    def _seed_sample(self, turn: int, shard: int, at: int) -> None:
        # Steps have numbers from 0.
        seed_micro_batch(self._seed, -1 - turn, shard << _OFFSET_BITS | at)


def opened(shards: StreamShards, turn: int, shard: int, state: Any = None) -> Iterator[Any]:
    """Returns an iterator over a shard in a pass, from its first sample, or from where a `state_dict` says."""
    if hasattr(shards, "set_epoch"):
        shards.set_epoch(turn)
    return shards.open(shard, state)


def close(samples: Iterator[Any]) -> None:
    """Closes an iterator over a shard, if it is one that can be closed."""
    if hasattr(samples, "close"):
        samples.close()


def _state_of(samples: Iterator[Any]) -> Any:
    """Returns the `state_dict` of an iterator; None if it has none, or one that JSON changes."""
    if not hasattr(samples, "state_dict"):
        return None
    try:
        state = samples.state_dict()
        text = json.dumps(state)
    except (TypeError, ValueError):
        return None
    alike: bool = json.loads(text) == state
    # A copy: the iterator may change its own.
    return json.loads(text) if alike else None
