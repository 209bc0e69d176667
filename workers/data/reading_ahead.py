"""Has processes of its own read the samples of a stream, before the steps that use them begin."""

from __future__ import annotations

import multiprocessing
import pickle
import queue
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import RawValue
from typing import Any

import torch
from torch._utils import ExceptionWrapper

from elaunch.workers.data.dealing import Mark, SampleRun, ShardInPass, StreamPosition
from elaunch.workers.data.process import end_with_parent
from elaunch.workers.data.reading import ShardReaders, Wanted
from elaunch.workers.data.source import DataSource

LOOK_S = 1.0  # so often a worker that waits looks whether the process lives
END_S = 5.0  # so long a process may take to end: it is at a sample
ALL = 1 << 62


@dataclass(frozen=True)
class _Request:
    number: int
    position: StreamPosition
    wanted: Wanted


@dataclass(frozen=True)
class _Answer:
    """What a process has read.

    Attributes:
        samples: of the run; empty if the shard ends before that does.
        end: the samples of the shard, in this case.
        mark: of the shard, if it was wanted and there is one.
    """

    number: int
    samples: list[Any]
    end: int | None
    mark: Mark | None
    have_positions: bool | None


class AheadReaders:
    """Reads a stream that repeats itself in some processes, each of which has every n-th shard.

    A run of samples is asked for when it is expected, and kept here from then until it is not needed any more.

    Args:
        source: the stream; `num_workers` processes read it, or as many as it has shards, if these are fewer.
    """

    def __init__(self, source: DataSource) -> None:
        self._source = source
        self._processes: list[_Reader] = []
        self._dropped = RawValue("q", 0)
        self._n_asked = 0
        self._coming: dict[SampleRun, int] = {}
        self._here: dict[SampleRun, list[Any] | int | ExceptionWrapper] = {}
        self.noted: dict[ShardInPass, Mark] = {}
        self._position = StreamPosition(0, (), 0, {})
        self.have_positions: bool | None = None

    def begin(self, position: StreamPosition) -> None:
        """Begins a step, or begins it again: what is not needed from this position on is forgotten."""
        self._position = position
        self._here = {run: found for run, found in self._here.items() if self._is_needed(run)}
        self.noted = {key: mark for key, mark in self.noted.items() if position.used_of(*key) is not None}

    def drop(self) -> None:
        """Forgets what is on its way: this worker has another part of the steps from now on."""
        self._dropped.value = self._n_asked
        self._coming.clear()

    def expect(self, wanted: Wanted) -> None:
        """Has a run read that will be fetched."""
        if wanted.run in self._here or wanted.run in self._coming:
            return
        if not self._processes:
            assert self._source.shards is not None
            n_processes = min(self._source.num_workers, self._source.shards.num_shards)
            self._processes = [_Reader(self._source, self._dropped) for _ in range(n_processes)]
        self._n_asked += 1
        self._coming[wanted.run] = self._n_asked
        self._reader(wanted.run).requests.send(_Request(self._n_asked, self._position, wanted))

    def fetch(self, wanted: Wanted) -> int | None:
        """Waits for a run; returns the samples of its shard where that ends before the run does.

        Raises:
            RuntimeError: the process has ended, or takes longer than the `timeout` of the DataLoader.
        """
        self.expect(wanted)
        while wanted.run not in self._here:
            self._take_in(self._reader(wanted.run).next(self._source.timeout))
        found = self._here[wanted.run]
        if isinstance(found, ExceptionWrapper):
            found.reraise()
        return found if isinstance(found, int) else None

    def samples(self, runs: Iterable[SampleRun]) -> list[Any]:
        """Returns samples that have been fetched, in the runs in which they were."""
        return [sample for run in runs for sample in self._here[run]]  # type: ignore[union-attr]

    def close(self) -> None:
        """Ends the processes; each finishes the sample that it is at first."""
        self._dropped.value = ALL
        for process in self._processes:
            process.stop()
        for process in self._processes:
            process.join()
        self._processes = []

    def _reader(self, run: SampleRun) -> _Reader:
        return self._processes[run.shard % len(self._processes)]

    def _is_needed(self, run: SampleRun) -> bool:
        used = self._position.used_of(run.turn, run.shard)
        return used is not None and run.stop > used

    def _take_in(self, answer: _Answer | tuple[int, ExceptionWrapper]) -> None:
        number = answer.number if isinstance(answer, _Answer) else answer[0]
        run = next((run for run, asked in self._coming.items() if asked == number), None)
        if run is None:
            return
        del self._coming[run]
        if not isinstance(answer, _Answer):
            self._here[run] = answer[1]
            return
        self._here[run] = answer.samples if answer.end is None else answer.end
        if answer.mark is not None:
            self.noted[run.turn, run.shard] = answer.mark
        if answer.have_positions is not None:
            self.have_positions = answer.have_positions


class _Reader:
    """A process that reads, seen from the worker."""

    def __init__(self, source: DataSource, dropped: Any) -> None:
        given = source.multiprocessing_context
        context: Any = given if hasattr(given, "Process") else multiprocessing.get_context(given)
        theirs, self.requests = context.Pipe(duplex=False)
        self._answers = context.Queue()
        self._process = context.Process(
            target=_serve, args=(source.shards, source.seed, theirs, self._answers, dropped), daemon=True
        )
        self._process.start()
        theirs.close()

    def next(self, timeout_s: float) -> _Answer | tuple[int, ExceptionWrapper]:
        """Waits for its next answer; 0: for however long."""
        waited_s = 0.0
        while True:
            try:
                answer: _Answer | tuple[int, ExceptionWrapper] = pickle.loads(self._answers.get(timeout=LOOK_S))  # noqa: S301
                return answer
            except queue.Empty:
                waited_s += LOOK_S
            if not self._process.is_alive():
                raise RuntimeError(
                    f"the process that reads the stream (pid {self._process.pid}) has ended with exit code "
                    f"{self._process.exitcode}"
                )
            if timeout_s and waited_s >= timeout_s:
                raise RuntimeError(f"the stream has given no sample for {timeout_s:g} s, the timeout of the DataLoader")

    def stop(self) -> None:
        """Asks the process to end."""
        with suppress(OSError):  # it has ended
            self.requests.send(None)

    def join(self) -> None:
        """Waits for its end, and kills it if that does not come."""
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._answers.close()
        self.requests.close()


def _serve(shards: Any, seed: int, requests: Connection, answers: Any, dropped: Any) -> None:
    """Answers requests in a process of its own, until there is none."""
    end_with_parent()
    torch.set_num_threads(1)
    answers.cancel_join_thread()
    readers = ShardReaders(shards, seed, lambda: None)
    position: StreamPosition | None = None
    request: _Request | None
    while (request := requests.recv()) is not None:
        if request.number > dropped.value:
            try:
                if request.position != position:
                    position = request.position
                    readers.begin(position)
                run, end = request.wanted.run, readers.fetch(request.wanted)
                samples = readers.samples([run]) if end is None else []
                mark = readers.noted.pop((run.turn, run.shard), None)
                packed = pickle.dumps(_Answer(request.number, samples, end, mark, readers.have_positions))
            except Exception:
                packed = pickle.dumps((request.number, ExceptionWrapper(where="in the process that reads the stream")))
            answers.put(packed)
    readers.close()
