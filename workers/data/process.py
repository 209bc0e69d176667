"""What runs in the processes that load micro-batches. Its classes are pickled where these are spawned."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from elaunch.workers.data.batches import Collate, collated
from elaunch.workers.data.source import Renumbered
from elaunch.workers.random.rng import generators_drawn_from, pack_generators, seed_micro_batch

_PR_SET_PDEATHSIG = 1

Answer = tuple[int, Any, bytes]
"""The number of the request, its batch, and where the generators stand after it (see `generators_drawn_from`)."""


@dataclass(frozen=True)
class BatchRequest:
    """Asks for a micro-batch: `ids` in this order, random numbers begun from `seeds`; without ids, for nothing."""

    number: int
    ids: Sequence[int] = ()
    seeds: tuple[int, int, int] = (0, 0, 0)


class Remote(Dataset[Any]):
    """Answers requests; DataLoader takes it for the data set.

    Args:
        dataset: of the samples.
        collate: makes a batch of a list of samples; None: torch's default.
        dropped: shared: at its number modulo the length, a request that is not wanted any more.
    """

    def __init__(self, dataset: Any, collate: Collate | None, dropped: Any) -> None:
        self.dataset = dataset
        self._collate, self._dropped = collate, dropped

    def __getitems__(self, request: BatchRequest) -> Answer:
        """Returns the batch; None instead of it where it is not wanted."""
        number = request.number
        if not request.ids or self._is_dropped(number):
            return number, None, b""
        seed_micro_batch(*request.seeds)
        before = pack_generators()
        if getattr(self.dataset, "__getitems__", None) is not None:
            samples = self.dataset.__getitems__(list(request.ids))
        else:
            samples = []
            for index in request.ids:
                samples.append(self.dataset[index])
                if self._is_dropped(number):
                    return number, None, b""
        return number, collated(samples, self._collate), generators_drawn_from(before)

    def _is_dropped(self, number: int) -> bool:
        return bool(self._dropped[number % len(self._dropped)] == number)


class StartLoading:
    """Prepares a process, then calls what the script gave DataLoader for it."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        """Prepares the process that loads for `worker_id`."""
        end_with_parent()
        info = get_worker_info()
        assert info is not None
        dataset = info.dataset.dataset  # type: ignore[attr-defined]
        while isinstance(dataset, Renumbered):
            dataset = dataset.below
        # Scripts open files anew through it; WorkerInfo refuses a plain assignment.
        object.__setattr__(info, "dataset", dataset)
        if self._then is not None:
            self._then(worker_id)


def end_with_parent() -> None:
    """Ties this process to its parent: the kernel ends it when the parent is killed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os._exit(1)


def unchanged(answer: Any) -> Any:
    """Returns its argument: batches have been collated already."""
    return answer
