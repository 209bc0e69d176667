"""The optimizers, schedulers and scalers of a script act when the step commits, wherever the script calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from elaunch.errors import StateError
from elaunch.workers.data_parallel.scaler import guard, take_over_scaler

CLOSURES = (
    "it would evaluate the model again after the gradients of the step were summed over the members: call backward() "
    "before optimizer.step(), without a closure, and use an optimizer that needs none"
)

TakesEffect = Callable[[], AbstractContextManager[bool]]
"""Gives a context for a call of `step`, which says whether that is to act."""


def take_over(
    objects: Mapping[str, Any],
    takes_effect: Callable[[str, Any], AbstractContextManager[bool]],
    owns_gradients: Callable[[], bool],
    has_sums: Callable[[], bool],
) -> None:
    """Takes over what there is of optimizers, schedulers and gradient scalers.

    Args:
        objects: of the script, by the name under which it registers them.
        takes_effect: returns a context for a call of `step` of an object, given with its name: whether that is to act.
        owns_gradients: returns whether the gradients are the job's, which zeroes them itself.
        has_sums: returns whether they are those of a whole step.

    Raises:
        StateError: an optimizer works by closures only.
    """
    for name, thing in objects.items():
        acts = functools.partial(takes_effect, name, thing)
        if isinstance(thing, torch.optim.LBFGS):
            raise StateError(f"LBFGS cannot be used: {CLOSURES}")
        if isinstance(thing, torch.optim.Optimizer):
            guard(thing)
            _take_over_optimizer(thing, acts, owns_gradients)
        elif isinstance(thing, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
            _take_over_scheduler(thing, acts)
        elif isinstance(thing, torch.amp.GradScaler):
            take_over_scaler(thing, acts, has_sums)


def trained_bytes(objects: Iterable[Any]) -> int:
    """Returns the bytes of all parameters that the optimizers among some objects train."""
    groups = (group for one in objects if isinstance(one, torch.optim.Optimizer) for group in one.param_groups)
    return sum(parameter.nbytes for group in groups for parameter in group["params"])


def _take_over_optimizer(
    optimizer: torch.optim.Optimizer, takes_effect: TakesEffect, owns_gradients: Callable[[], bool]
) -> None:
    original = optimizer.step

    @functools.wraps(original)
    def step(closure: Any = None) -> Any:
        if closure is not None:
            raise StateError(f"optimizer.step(closure) cannot be used: {CLOSURES}")
        with takes_effect() as acts:
            return original() if acts else None

    zero_grad = optimizer.zero_grad

    @functools.wraps(zero_grad)
    def zero(set_to_none: bool = True) -> None:
        if not owns_gradients():
            zero_grad(set_to_none)

    optimizer.step = step  # type: ignore[method-assign]
    optimizer.zero_grad = zero  # type: ignore[method-assign]


def _take_over_scheduler(scheduler: Any, takes_effect: TakesEffect) -> None:
    """Does the same through a subclass, because a scheduler's state_dict is all of its attributes."""
    kind = type(scheduler)

    def step(this: Any, *args: Any, **kwargs: Any) -> Any:
        if this is not scheduler:
            return kind.step(this, *args, **kwargs)
        with takes_effect() as acts:
            return kind.step(this, *args, **kwargs) if acts else None

    scheduler.__class__ = type(kind.__name__, (kind,), {"step": functools.wraps(kind.step)(step)})
