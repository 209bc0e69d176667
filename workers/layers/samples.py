"""Inputs and targets of any rows of a step, alike whoever loads them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from elaunch.errors import StateError
from elaunch.plan.tiling import MicroBatch, Plan
from elaunch.plan.views import rows_by_unit
from elaunch.workers import heartbeat
from elaunch.workers.data.batches import Collate, count_samples, load, to_device
from elaunch.workers.data.order import SampleOrder
from elaunch.workers.random.rng import seed_micro_batch
from elaunch.workers.random.trace import GENERATORS


class Samples:
    """Loads (input, target) for samples of a step.

    Whole logical micro-batches are loaded, and the rows taken from them, so that transforms with random numbers, which
    are seeded for each, give the same samples under every plan.

    Args:
        dataset: map-style, its items (input, target).
        seed: of the order of samples, and of the random numbers of their transforms.
        shuffle: whether each pass has an order of its own.
        collate_fn: makes a batch of a list of items; default: torch's.
        device: where the batches go.
    """

    def __init__(
        self, dataset: Any, seed: int, shuffle: bool, collate_fn: Collate | None, device: torch.device
    ) -> None:
        self._dataset, self._seed, self._collate, self._device = dataset, seed, collate_fn, device
        self.order = SampleOrder(count_samples(dataset), seed, shuffle)
        self._units: dict[tuple[int, int], Any] = {}

    def described(self) -> dict[str, Any]:
        """Returns what decides which samples a step uses, beside the size of its batch."""
        return self.order.described()

    def example(self) -> Tensor:
        """Returns one row of input (1, …).

        Raises:
            StateError: the data set does not give pairs of a tensor and something.
        """
        x, _ = self._pair(load(self._dataset, self.order.ids(0, 1), self._collate), 1)
        return x

    def load(self, plan: Plan, step: int, samples: MicroBatch) -> tuple[Tensor, Any]:
        """Returns the inputs and targets of these samples, in their order."""
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
        """A logical micro-batch; the parts of one are loaded in turn, so the last is kept."""
        found = self._units.get((step, unit))
        if found is None:
            samples = plan.unit(unit)
            with GENERATORS:
                seed_micro_batch(self._seed, step, unit)
                ids = self.order.ids(step * plan.global_batch_size + samples.start, len(samples))
                with heartbeat.script_code():
                    loaded = load(self._dataset, ids, self._collate)
                found = self._pair(loaded, len(samples))
            self._units = {(step, unit): found}
        pair: tuple[Tensor, Any] = found
        return pair

    def _pair(self, batch: Any, rows: int) -> tuple[Tensor, Any]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2 or not isinstance(batch[0], Tensor):
            raise StateError(
                f"the items of {type(self._dataset).__name__} must be pairs (input, target) whose inputs make one "
                f"tensor; a batch of them is {_kinds(batch)}. A collate_fn can make such pairs"
            )
        for one in pytree.tree_leaves(batch):
            if isinstance(one, Tensor) and (one.dim() == 0 or one.shape[0] != rows):
                raise StateError(
                    f"a batch of {rows} items of {type(self._dataset).__name__} has a tensor of shape "
                    f"{tuple(one.shape)}; the first dimension must be {rows}"
                )
        return batch[0], batch[1]


def _rows(one: Any, rows: range) -> Any:
    return one[rows.start : rows.stop] if isinstance(one, Tensor) else one


def _kinds(batch: Any) -> str:
    if isinstance(batch, (tuple, list)):
        return f"a {type(batch).__name__} of {', '.join(type(one).__name__ for one in batch) or 'nothing'}"
    return f"a {type(batch).__name__}"
