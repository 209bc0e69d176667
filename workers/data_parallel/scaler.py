"""A script's GradScaler as part of the step transaction: it acts once in a step, and its scale follows the commit.

The gradients that it unscales are the sums over all members, bitwise the same everywhere. So all members find the same
infinities, and skip the update of the same steps.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from elaunch.errors import StateError

_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""The registered optimizers of this process: a scaler may act on them only if it is registered, too."""


class _TakenOver:
    """Marks the classes of registered scalers."""


def take_over_scaler(
    scaler: torch.amp.GradScaler, takes_effect: Callable[[], AbstractContextManager[bool]], has_sums: Callable[[], bool]
) -> None:
    """Takes over a scaler through a subclass, so that it can still be copied and pickled.

    Args:
        scaler: of the script.
        takes_effect: returns a context for a call of `update`, which settles the step and says whether that is to act.
        has_sums: returns whether the gradients are those of a whole step.
    """
    kind = type(scaler)

    def unscale_(this: Any, optimizer: torch.optim.Optimizer) -> None:
        if this is not scaler or has_sums():
            kind.unscale_(this, optimizer)

    def step(this: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return kind.step(this, optimizer, *args, **kwargs) if this is not scaler or has_sums() else None

    def update(this: Any, new_scale: Any = None) -> None:
        if this is not scaler:
            kind.update(this, new_scale)
            return
        with takes_effect() as acts:
            if acts:
                kind.update(this, new_scale)
            else:
                this._per_optimizer_states.clear()  # the step is dropped, and so is what was found in its gradients

    methods: dict[str, Any] = {"unscale_": unscale_, "step": step, "update": update}
    wrapped: dict[str, Any] = {name: functools.wraps(getattr(kind, name))(of) for name, of in methods.items()}
    scaler.__class__ = type(kind.__name__, (kind, _TakenOver), wrapped)


def guard(optimizer: torch.optim.Optimizer) -> None:
    """Has scalers that are not registered refuse a registered optimizer, instead of unscaling parts of a step."""
    _optimizers.add(optimizer)
    for name in ("unscale_", "step"):
        original = getattr(torch.amp.GradScaler, name)
        if not hasattr(original, "refuses"):
            setattr(torch.amp.GradScaler, name, _refusing(original))


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(this: Any, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if optimizer in _optimizers and this.is_enabled() and not isinstance(this, _TakenOver):
            raise StateError(
                "this GradScaler is not registered, so its scale would differ between members: name it beside the "
                "optimizer, job.register(..., scaler=scaler)"
            )
        return original(this, optimizer, *args, **kwargs)

    call.refuses = True  # type: ignore[attr-defined]
    return call
