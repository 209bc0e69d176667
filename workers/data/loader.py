"""Who loads the micro-batches: the training thread, or torch's DataLoader with processes of its own.

A micro-batch is the same whoever loads it. Its random numbers begin anew before it is loaded, and when it is taken the
generators of this process stand where the loading has left them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from elaunch.workers.data import process
from elaunch.workers.data.ahead import LoadedAhead, Place
from elaunch.workers.data.batches import load
from elaunch.workers.data.order import SampleOrder
from elaunch.workers.data.source import DataSource
from elaunch.workers.random.rng import continue_generators, seed_micro_batch


@dataclass(frozen=True)
class MicroBatches:
    """What every micro-batch of a job is made of.

    Attributes:
        source: of the samples.
        order: of the samples.
        global_batch_size: samples of a step.
        micro_batch_size: samples to which a number of the micro-batch belongs, and with it its random numbers.
        steps: of the job.
        device: where the batches go; they are pinned only on the way to an accelerator.
    """

    source: DataSource
    order: SampleOrder
    global_batch_size: int
    micro_batch_size: int
    steps: int
    device: torch.device

    @property
    def pinned(self) -> bool:
        """Whether batches go through pinned memory."""
        return self.source.pin_memory and self.device.type != "cpu"

    def ids(self, place: Place) -> list[int]:
        """Returns the samples of a micro-batch."""
        return self.order.ids(place.step * self.global_batch_size + place.start, place.stop - place.start)

    def seeds(self, place: Place) -> tuple[int, int, int]:
        """Returns what the random numbers of a micro-batch begin from: the arguments of `seed_micro_batch`."""
        return self.order.seed, place.step, place.start // self.micro_batch_size


class Loader(Protocol):
    """Loads this worker's micro-batches."""

    def begin(self, step: int, share: tuple[range, ...]) -> None:
        """Begins a step, or begins it again: this worker does these samples of it."""

    def take(self, step: int, samples: range) -> Any:
        """Returns the next micro-batch of the step, in host memory, and starts its random numbers."""

    def close(self) -> None:
        """Ends all that was loaded ahead."""


def loader_of(batches: MicroBatches) -> Loader:
    """Returns who loads these micro-batches."""
    return ProcessLoader(batches) if batches.source.num_workers else ThreadLoader(batches)


class ThreadLoader:
    """Loads each micro-batch when it is taken, in the training thread."""

    def __init__(self, batches: MicroBatches) -> None:
        self._batches = batches

    def begin(self, step: int, share: tuple[range, ...]) -> None:
        """Does nothing: nothing is loaded ahead."""

    def take(self, step: int, samples: range) -> Any:
        """Loads a micro-batch."""
        place = Place(step, samples.start, samples.stop)
        seed_micro_batch(*self._batches.seeds(place))
        batch = load(self._batches.source.dataset, self._batches.ids(place), self._batches.source.collate)
        return pin_memory(batch) if self._batches.pinned else batch

    def close(self) -> None:
        """Does nothing."""


class ProcessLoader:
    """Has the processes of a DataLoader load micro-batches ahead of their turn.

    The DataLoader's batch sampler never ends: it gives the requests of `LoadedAhead`, and empty ones after the last
    step, so that the same processes serve whatever is dealt out later. A request that is not wanted any more is marked
    in memory that the processes share; they answer it at once, or after the sample that they are at.
    """

    def __init__(self, batches: MicroBatches) -> None:
        source = batches.source
        self._batches = batches
        self._ahead = LoadedAhead(batches.steps)
        self._iterator: Iterator[process.Answer] | None = None
        self._dropped = RawArray("q", source.num_workers * source.prefetch_factor)

    def begin(self, step: int, share: tuple[range, ...]) -> None:
        """Begins a step; what was asked for, and is another member's now, is dropped."""
        self._drop(self._ahead.begin(step, share))
        if self._iterator is None and share:
            self._iterator = iter(self._data_loader())

    def take(self, step: int, samples: range) -> Any:
        """Returns a micro-batch of the step that has begun, waiting for it if it is not here yet."""
        place = Place(step, samples.start, samples.stop)
        assert self._iterator is not None, "begin() comes first"
        while not self._ahead.has(place):
            number, *answer = next(self._iterator)
            self._ahead.arrived(number, answer)
        batch, generators = self._ahead.take(place)
        seed_micro_batch(*self._batches.seeds(place))
        continue_generators(generators)
        return batch

    def close(self) -> None:
        """Ends the processes; each finishes the sample that it is loading first."""
        self._drop(self._ahead.coming)
        if self._iterator is not None:
            # DataLoader does this when nothing refers to its iterator any more; the traceback of an error may.
            self._iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._iterator = None

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self._dropped[number % len(self._dropped)] = number

    def _requests(self) -> Iterator[process.BatchRequest]:
        while True:
            number, place = self._ahead.ask()
            if place is None:
                yield process.BatchRequest(number)
            else:
                yield process.BatchRequest(number, self._batches.ids(place), self._batches.seeds(place))

    def _data_loader(self) -> DataLoader[Any]:
        source = self._batches.source
        more: dict[str, Any] = {} if source.in_order else {"in_order": False}
        return DataLoader(
            process.Remote(source.dataset, source.collate, self._dropped),
            batch_sampler=_Endless(self._requests()),
            collate_fn=process.unchanged,
            num_workers=source.num_workers,
            prefetch_factor=source.prefetch_factor,
            pin_memory=self._batches.pinned,
            timeout=source.timeout,
            worker_init_fn=process.StartLoading(source.worker_init_fn),
            multiprocessing_context=source.multiprocessing_context,
            generator=torch.Generator(),  # it draws a seed, and the script's generator is not to notice
            **more,
        )


class _Endless:
    """A batch sampler for DataLoader, which wants something that it can iterate."""

    def __init__(self, requests: Iterator[process.BatchRequest]) -> None:
        self._requests = requests

    def __iter__(self) -> Iterator[Any]:
        return self._requests
