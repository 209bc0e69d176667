"""Sums over the members of a tensor-parallel group."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from elaunch.workers.layers.carry.carrier import Carrier
from elaunch.workers.layers.messages import Kind, tag
from elaunch.workers.layers.timing import Stopwatch

SMALL_BYTES = 32 << 10
"""Up to this size a sum over a tensor-parallel group takes one round instead of two."""


class TPGroupSum:
    """Sums over the members of a tensor-parallel group, in the order of their ranks if that is to be fixed."""

    def __init__(self, workers: tuple[str, ...], worker: str) -> None:
        self._workers, self._rank = workers, workers.index(worker)
        self._carrier: Carrier | None = None
        self._watch: Stopwatch | None = None
        self._number = 0

    def begin(self, carrier: Carrier, watch: Stopwatch | None = None) -> None:
        """Uses the messages of this step; `watch` is told how long they were waited for."""
        self._carrier, self._watch, self._number = carrier, watch, 0

    def __call__(self, x: Tensor) -> Tensor:
        """The sum over all members, bitwise the same on each."""
        assert self._carrier is not None
        flat = x.detach().contiguous().view(-1)
        begin_s = time.perf_counter()
        total = self._carrier.all_reduce(self._workers, flat)
        if total is not None:
            self._waited(begin_s)
            return total.view(x.shape)
        if len(self._workers) == 2 or flat.nbytes <= SMALL_BYTES:
            parts = self._round([flat] * len(self._workers), [flat.numel()] * len(self._workers))
            parts[self._rank] = flat
            return added(parts).view(x.shape)
        cuts = list(flat.tensor_split(len(self._workers)))
        counts = [cut.numel() for cut in cuts]
        parts = self._round(cuts, [counts[self._rank]] * len(cuts))
        parts[self._rank] = cuts[self._rank]
        own = added(parts)
        wholes = self._round([own] * len(cuts), counts)
        wholes[self._rank] = own
        return torch.cat(wholes).view(x.shape)

    def _round(self, outgoing: Sequence[Tensor], incoming: Sequence[int]) -> list[Tensor]:
        """Sends each member its tensor and receives one from each."""
        assert self._carrier is not None
        found = [outgoing[0].new_empty(count) for count in incoming]
        begin_s = time.perf_counter()
        self._carrier.exchange(self._workers, tag(Kind.TENSOR, self._number), outgoing, found)
        self._number += 1
        self._waited(begin_s)
        return found

    def _waited(self, begin_s: float) -> None:
        if self._watch is not None:
            self._watch.waited_s += time.perf_counter() - begin_s


def added(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the parts in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
