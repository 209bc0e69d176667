"""Reads a stream whose shards do not give the same samples each time they are opened: each sample at least once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from elaunch.errors import StateError
from elaunch.workers.data.dealing import Mark, SampleRun, ShardInPass, StreamPosition
from elaunch.workers.data.reading import Wanted, close, opened
from elaunch.workers.data.stream import StreamShards


class UnrepeatableReaders:
    """Reads shards that cannot be gone on with from a position: whoever opens one uses all that it then gives.

    A place in such a shard is not one sample, but whatever its reader has next. Of the workers that read a shard, the
    one whose samples come first in a step ends it, when it has used all samples; the others begin the shard again. So
    one of them has used the whole shard when it ends, and where a worker takes it over, that one has.

    Samples of a step that has not committed are used in the next one, in the same order.

    Args:
        shards: of the stream.
        progress: called before each sample.
    """

    def __init__(self, shards: StreamShards, progress: Callable[[], None]) -> None:
        self._shards, self._progress = shards, progress
        self._open: dict[ShardInPass, Iterator[Any]] = {}
        self._unused: dict[ShardInPass, deque[Any]] = {}
        self._fetched: dict[tuple[int, int, int], Any] = {}
        self._taken: set[tuple[int, int, int]] = set()
        self._counts = True
        self.noted: dict[ShardInPass, Mark] = {}
        self.have_positions: bool | None = False

    def begin(self, position: StreamPosition) -> None:
        """Begins a step, or begins it again: what has not been used comes next."""
        for key in sorted(self._fetched, reverse=True):
            turn, shard, at = key
            used = position.used_of(turn, shard)
            if key not in self._taken or (used is not None and at >= used):
                self._unused[turn, shard].appendleft(self._fetched[key])
        self._fetched.clear()
        self._taken.clear()
        for turn, shard in [one for one in self._open if position.used_of(*one) is None]:
            close(self._open.pop((turn, shard)))
            del self._unused[turn, shard]

    def fetch(self, wanted: Wanted) -> int | None:
        """Gives samples to the places of a run; returns the samples of its shard where this worker ends it."""
        run, self._counts = wanted.run, wanted.counts
        for at in range(run.start, run.stop):
            if (run.turn, run.shard, at) in self._fetched:
                continue
            found = self._next(run.turn, run.shard)
            if not found and wanted.is_first:
                return at
            # Another worker ends the shard; this one begins it again.
            found = found or self._next(run.turn, run.shard, again=True)
            if not found:
                return None
            self._fetched[run.turn, run.shard, at] = found[0]
        return None

    def samples(self, runs: Iterable[SampleRun]) -> list[Any]:
        """Returns samples that have been fetched.

        Raises:
            StateError: a shard has none, where another worker has found some.
        """
        keys = [(run.turn, run.shard, at) for run in runs for at in range(run.start, run.stop)]
        if empty := next((key for key in keys if key not in self._fetched), None):
            raise StateError(f"shard {empty[1]} of the stream is empty here; another worker has found samples in it")
        if self._counts:
            self._taken.update(keys)
        return [self._fetched[key] for key in keys]

    def close(self) -> None:
        """Closes all shards."""
        for samples in self._open.values():
            close(samples)
        self._open.clear()

    def _next(self, turn: int, shard: int, again: bool = False) -> tuple[Any, ...]:
        """Returns the next sample of a shard, which may begin again; empty if there is none."""
        key = turn, shard
        if key not in self._open or again:
            self._open[key] = opened(self._shards, turn, shard)
            self._unused.setdefault(key, deque())
        if self._unused[key]:
            return (self._unused[key].popleft(),)
        self._progress()
        try:
            return (next(self._open[key]),)
        except StopIteration:
            return ()
