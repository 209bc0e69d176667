"""Inputs and targets of any rows of a step, alike whoever loads them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from elaunch.errors import StateError
from elaunch.plan.tiling import MicroBatch, Plan
from elaunch.plan.views import rows_by_unit
from elaunch.workers import heartbeat
from elaunch.workers.data.batches import count_samples, load, to_device
from elaunch.workers.data.loader import Loader, MicroBatches, loader_of
from elaunch.workers.data.order import SampleOrder
from elaunch.workers.data.source import DataSource
from elaunch.workers.random.trace import GENERATORS

Load = Callable[[MicroBatch], tuple[Tensor, Any]]
"""Returns inputs and targets of some samples of the step under way, in their order and on this worker's device."""


class Samples:
    """Loads (input, target) for samples of a step.

    Whole logical micro-batches are loaded, and the rows taken from them, so that transforms with random numbers, which
    are seeded for each, give the same samples under every plan.

    Args:
        source: of the samples, whose items are (input, target).
        device: where the batches go.
    """

    def __init__(self, source: DataSource, device: torch.device) -> None:
        self._source, self._device = source, device
        if source.shards is not None:
            count_samples(source.dataset.data)  # it tells what a stream lacks
            raise TypeError("elaunch.Stream is for jobs of elaunch.init(); give elaunch.hybrid() the data set itself")
        self.order = SampleOrder(source.n_samples, source.seed, source.shuffle)
        self._steps = sys.maxsize
        self._loader: Loader | None = None
        self._units: dict[int, Any] = {}
        self._uses: Counter[int] = Counter()

    def described(self) -> dict[str, Any]:
        """Returns what decides which samples a step uses, beside the size of its batch."""
        sampler = {"order of the sampler": self._source.order} if self._source.order else {}
        return {**self.order.described(), **sampler}

    def example(self) -> Tensor:
        """Returns one row of input (1, …).

        Raises:
            StateError: the data set does not give pairs of a tensor and something.
        """
        x, _ = self._pair(load(self._source.dataset, self.order.ids(0, 1), self._source.collate), 1)
        return x

    @contextmanager
    def until(self, steps: int) -> Iterator[None]:
        """Loads nothing for steps after so many while it is open, and ends all loading when it is closed."""
        self.close()
        self._steps = steps
        try:
            yield
        finally:
            self.close()
            self._steps = sys.maxsize

    def close(self) -> None:
        """Ends all that was loaded ahead, until a step begins."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def begin(self, plan: Plan, step: int, micro_batches: Iterable[MicroBatch]) -> Load:
        """Begins a step; returns what loads each of these micro-batches, to be called in their order."""
        self._units = {}
        self._uses = Counter(unit for one in micro_batches for unit, _, _ in rows_by_unit(plan, one))
        if self._loader is None:
            sizes = plan.global_batch_size, plan.micro_batch_size
            self._loader = loader_of(MicroBatches(self._source, self.order, *sizes, self._steps, self._device))
        with heartbeat.script_code():
            self._loader.begin(step, tuple(plan.unit(unit) for unit in self._uses))
        return partial(self._load, plan, step)

    def _load(self, plan: Plan, step: int, samples: MicroBatch) -> tuple[Tensor, Any]:
        parts = []
        for unit, rows, _ in rows_by_unit(plan, samples):
            pair = self._unit(plan, step, unit)
            whole = len(rows) == len(plan.unit(unit))
            parts.append(pair if whole else pytree.tree_map(lambda one, rows=rows: _rows(one, rows), pair))
        if len(parts) > 1:
            parts = [pytree.tree_map(lambda *ones: torch.cat(ones) if isinstance(ones[0], Tensor) else ones[0], *parts)]
        moved: tuple[Tensor, Any] = to_device(parts[0], self._device)
        return moved

    def _unit(self, plan: Plan, step: int, unit: int) -> tuple[Tensor, Any]:
        """A logical micro-batch, which is kept for as long as further rows of it will be asked for in the step."""
        pair = self._units.pop(unit, None)
        if pair is None:
            assert self._loader is not None, "begin() comes first"
            samples = plan.unit(unit)
            with GENERATORS, heartbeat.script_code():
                loaded = self._loader.take(step, samples)
            pair = self._pair(loaded, len(samples))
        self._uses[unit] -= 1
        if self._uses[unit] > 0:
            self._units[unit] = pair
        found: tuple[Tensor, Any] = pair
        return found

    def _pair(self, batch: Any, rows: int) -> tuple[Tensor, Any]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[0], Tensor):
            raise StateError(
                f"the items of {self._source.kind} must be pairs (input, target) whose inputs make one "
                f"tensor; a batch of them is {_kinds(batch)}. A collate_fn can make such pairs"
            )
        for one in pytree.tree_leaves(batch):
            if isinstance(one, Tensor) and (one.dim() == 0 or one.shape[0] != rows):
                raise StateError(
                    f"a batch of {rows} items of {self._source.kind} has a tensor of shape "
                    f"{tuple(one.shape)}; the first dimension must be {rows}"
                )
        return batch[0], batch[1]


def _rows(one: Any, rows: range) -> Any:
    return one[rows.start : rows.stop] if isinstance(one, Tensor) else one


def _kinds(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {', '.join(type(one).__name__ for one in batch) or 'nothing'}"
    return f"a {type(batch).__name__}"
