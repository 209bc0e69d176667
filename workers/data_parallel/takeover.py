"""The optimizers, schedulers and scalers of a script act when the step commits, wherever the script calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from elaunch.errors import StateError
from elaunch.workers.data_parallel.scaler import guard, take_over_scaler

CLOSURES = (
    "it would evaluate the model again after the gradients of the step were summed over the members: call backward() "
    "before optimizer.step(), without a closure, and use an optimizer that needs none"
)


def take_over(
    objects: Iterable[Any],
    takes_effect: Callable[[], bool],
    owns_gradients: Callable[[], bool],
    has_sums: Callable[[], bool],
) -> None:
    """Takes over what there is of optimizers, schedulers and gradient scalers.

    Args:
        objects: of the script.
        takes_effect: returns whether a call of `step` that the script makes now is to act.
        owns_gradients: returns whether the gradients are the job's, which zeroes them itself.
        has_sums: returns whether they are those of a whole step.

    Raises:
        StateError: an optimizer works by closures only.
    """
    for thing in objects:
        if isinstance(thing, torch.optim.LBFGS):
            raise StateError(f"LBFGS cannot be used: {CLOSURES}")
        if isinstance(thing, torch.optim.Optimizer):
            guard(thing)
            _take_over_optimizer(thing, takes_effect, owns_gradients)
        elif isinstance(thing, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
            _take_over_scheduler(thing, takes_effect)
        elif isinstance(thing, torch.amp.GradScaler):
            take_over_scaler(thing, takes_effect, has_sums)


def trained_bytes(objects: Iterable[Any]) -> int:
    """Returns the bytes of all parameters that the optimizers among some objects train."""
    groups = (group for one in objects if isinstance(one, torch.optim.Optimizer) for group in one.param_groups)
    return sum(parameter.nbytes for group in groups for parameter in group["params"])


def _take_over_optimizer(
    optimizer: torch.optim.Optimizer, takes_effect: Callable[[], bool], owns_gradients: Callable[[], bool]
) -> None:
    original = optimizer.step

    @functools.wraps(original)
    def step(closure: Any = None) -> Any:
        if closure is not None:
            raise StateError(f"optimizer.step(closure) cannot be used: {CLOSURES}")
        return original() if takes_effect() else None

    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def zero(set_to_none: bool = True) -> None:
        if not owns_gradients():
            zero_grad(set_to_none)

    optimizer.step = step  # type: ignore[method-assign]
    optimizer.zero_grad = zero  # type: ignore[method-assign]


def _take_over_scheduler(scheduler: Any, takes_effect: Callable[[], bool]) -> None:
    """Does the same through a subclass, because a scheduler's state_dict is all of its attributes."""
    kind = type(scheduler)

    def step(this: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.step(this, *args, **kwargs) if this is not scheduler or takes_effect() else None

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": functools.wraps(kind.step)(step)})
