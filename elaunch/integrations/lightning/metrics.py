"""Metrics of torchmetrics that add up over an epoch: what all members have added up is part of a commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_max, dim_zero_min, dim_zero_sum

REDUCTIONS: dict[Any, Any] = {
    dim_zero_sum: dist.ReduceOp.SUM,
    dim_zero_max: dist.ReduceOp.MAX,
    dim_zero_min: dist.ReduceOp.MIN,
}
"""How states over all members follow from those of each. Others, as lists of predictions, do not come back."""

COUNT = "_update_count"


def metrics_of(module: torch.nn.Module) -> dict[str, Metric]:
    """Returns the metrics of a module whose states can be added up, by name."""
    return {
        name or "metric": one
        for name, one in module.named_modules()
        if isinstance(one, Metric)
        and one._defaults
        and all(
            isinstance(default, Tensor) and one._reductions[state] in REDUCTIONS
            for state, default in one._defaults.items()
        )
    }


class EpochMetrics:
    """What metrics have added up over all members, as of the last commit.

    Args:
        metrics: by name.
        is_first: whether this member gets the sums of all members when they come back; the others have none then.
    """

    def __init__(self, metrics: Mapping[str, Metric], is_first: bool) -> None:
        self._metrics, self._is_first = metrics, is_first
        self._totals: list[Tensor] = []

    def add_up(self, device: torch.device) -> None:
        """Takes the present states, over all members. All members call it.

        Args:
            device: where members compute.
        """
        self._totals = []
        for operation in REDUCTIONS.values():
            states = self._states(operation)
            if states:
                total = torch.cat([one.detach().to(device, torch.float64).reshape(-1) for one in states])
                if dist.is_initialized():
                    dist.all_reduce(total, operation)
                self._totals.append(total.cpu())

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as of `add_up`."""
        return {"totals": list(self._totals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Gives the metrics what all members had added up."""
        self._totals = list(state["totals"])
        for metric in self._metrics.values():
            metric.reset()
        totals = iter(self._totals)
        for operation in REDUCTIONS.values():
            states = self._states(operation)
            if not states:
                continue
            parts = next(totals).split([one.numel() for one in states])
            is_sum = operation == dist.ReduceOp.SUM
            for present, part in zip(states, parts, strict=True):
                if self._is_first or not is_sum:
                    present.copy_(part.reshape(present.shape))
            if is_sum:
                for metric, count in zip(self._metrics.values(), parts, strict=False):
                    setattr(metric, COUNT, int(count > 0))

    def _states(self, operation: Any) -> list[Tensor]:
        """Returns the states that are reduced by one operation; the numbers of updates come before all sums."""
        sums = operation == dist.ReduceOp.SUM
        counts = [torch.tensor(float(getattr(one, COUNT))) for one in self._metrics.values()] if sums else []
        return counts + [
            getattr(metric, state)
            for metric in self._metrics.values()
            for state in metric._defaults
            if REDUCTIONS.get(metric._reductions[state]) == operation
        ]
