"""Gradients of several micro-batches, summed in flat buckets that are handed on while backward still runs.

Unlike DistributedDataParallel's reducer, whose layout is rebuilt from what the first backward saw, the buckets depend
on the parameters alone. So a worker that joins late, or has no samples in a step, has the same buckets as its peers.
Nor can that reducer be used again after an interrupted backward: it divides by the former number of members, or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

MIB = 1 << 20
Launch = Callable[[int, torch.Tensor], None]
_Named = tuple[str, nn.Parameter]


@dataclass(eq=False, slots=True)
class _Slot:
    """The place of one parameter's gradient."""

    name: str
    parameter: nn.Parameter
    view: torch.Tensor
    bucket: int
    final: bool = False


@dataclass(eq=False, slots=True)
class _Bucket:
    flat: torch.Tensor
    slots: list[_Slot] = field(default_factory=list)
    n_pending: int = 0


class GradientBuckets:
    """Owns `.grad` of the parameters: views of flat buffers in which the gradients of micro-batches add up in place.

    Per step: `zero()`; for each micro-batch set `weight` and run backward; before the last backward `arm()`; at the
    end `flush()`. A worker without micro-batches only calls `zero()` and `flush()`.

    The buckets are filled in reverse order of the parameters (about the order in which backward finishes them), each
    with one dtype and device. The first one is small, so that the first hand-over comes early. They are numbered in the
    order in which they fill up.

    After a backward that is not the last one, `.grad` is None until the next backward, while the sum so far waits in
    the buckets: what a script does with gradients after each backward (clip, unscale, zero) must see whole steps only,
    or the result would depend on how many micro-batches a worker happens to do. A parameter that takes no part in
    a step has the gradient zero, not None.

    Args:
        parameters: in registration order; those that need no gradient are left out.
        launch: called with a bucket's number and its flat gradient, always in the order 0, 1, 2, …, each once
            per step. It may run on a thread of autograd's, with the stream current on which the gradient was computed;
            it should start the reduction and return. What it raises comes out of backward or `flush`.
        first_bucket_bytes: size that the first bucket should not exceed.
        bucket_bytes: size that the others should not exceed; a larger parameter has a bucket of its own.
        names: of `parameters`, for messages.
        finished: called when the last backward of the step is about to return, after all buckets were launched. If it
            waits for the reductions, `.grad` is the sum over all members once backward has returned.
        computing: told True when the model's forward, or a backward, begins to make gradients, False when the backward
            is about to return.

    Attributes:
        weight: each gradient of a backward is multiplied by it before it is added (a micro-batch's part of the mean).
            With 0 the backward adds nothing, even where its gradient is not finite.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        launch: Launch,
        first_bucket_bytes: int = MIB,
        bucket_bytes: int = 25 * MIB,
        names: Sequence[str] | None = None,
        finished: Callable[[], None] | None = None,
        computing: Callable[[bool], None] | None = None,
    ) -> None:
        if names is None:
            names = [f"parameter {index}" for index in range(len(parameters))]
        if len(names) != len(parameters):
            raise ValueError(f"got {len(names)} names for {len(parameters)} parameters")
        self.weight = 1.0
        self._launch = launch
        self._finished = finished
        self._computing = computing
        self._armed = False
        self._held = False
        self._next = 0
        self._backward = -1
        named = list(dict(zip(parameters, names)).items())  # a parameter that comes twice has one place
        self._frozen = [(name, parameter) for parameter, name in named if not parameter.requires_grad]
        trained = [(name, parameter) for parameter, name in named if parameter.requires_grad]
        self._buckets = [
            _allocate(number, group) for number, group in enumerate(_group(trained, first_bucket_bytes, bucket_bytes))
        ]
        self._slots = [slot for bucket in self._buckets for slot in bucket.slots]
        self._nodes = [_gradient_node(slot.parameter) for slot in self._slots]
        for slot, node in zip(self._slots, self._nodes):
            # Not Tensor.register_hook, which also runs in torch.autograd.grad, where no gradient is accumulated.
            node.register_prehook(partial(self._incoming, slot))
            slot.parameter.register_post_accumulate_grad_hook(partial(self._accumulated, slot))
        self.zero()

    @property
    def parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters whose gradients it owns."""
        return tuple(slot.parameter for slot in self._slots)

    @property
    def flats(self) -> tuple[torch.Tensor, ...]:
        """The flat gradient of each bucket, by number."""
        return tuple(bucket.flat for bucket in self._buckets)

    @property
    def n_launched(self) -> int:
        """How many buckets were handed to `launch` in this step."""
        return self._next

    def arm(self) -> None:
        """The next backward is the last one of the step: hand each bucket over as soon as it is final.

        Raises:
            RuntimeError: a parameter that needed no gradient when the buckets were made needs one now.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise RuntimeError(
                    f"{name} was frozen when the model was wrapped and needs a gradient now; "
                    "wrap the model while requires_grad is on, and freeze it afterwards"
                )
        for bucket in self._buckets:
            bucket.n_pending = len(bucket.slots)
            for slot in bucket.slots:
                slot.final = False
        self._next = 0
        self._armed = True

    def flush(self) -> None:
        """Hand over the buckets that are not yet: the step has no further backward."""
        self._armed = True
        while self._armed and self._next < len(self._buckets):
            self._launch_next()

    def zero(self) -> None:
        """Starts a step: all gradients are zero, nothing was handed over."""
        self.disarm()
        self._next = 0
        for bucket in self._buckets:
            bucket.flat.zero_()
        for slot in self._slots:
            if slot.parameter.grad is not slot.view:
                slot.parameter.grad = slot.view

    def disarm(self) -> None:
        """The step was interrupted: nothing more is handed over, and gradients that still arrive do no harm."""
        self._armed = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """A backward inside is not the last one of the step, even if `arm` was called."""
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def _incoming(self, slot: _Slot, grads: tuple[torch.Tensor | None]) -> tuple[torch.Tensor] | None:
        """Autograd is about to add a gradient to the parameter's."""
        (grad,) = grads
        if grad is None:
            return None
        if grad.layout is not torch.strided:
            raise RuntimeError(
                f"the gradient of {slot.name} is {grad.layout}, but only dense gradients can be synchronised; "
                "use sparse=False in its embedding"
            )
        if self._armed and slot.bucket < self._next:
            raise RuntimeError(
                f"{slot.name} got a further gradient after its sum had been sent: the last micro-batch of a step may "
                "run backward once. Run all but its last backward inside `with model.no_sync():`, and checkpoint "
                "activations with use_reentrant=False"
            )
        if slot.parameter.grad is None:
            slot.parameter.grad = slot.view
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            self.note_computing(True)
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_ends)
        if self.weight == 1:
            return None
        return (grad * self.weight if self.weight else torch.zeros_like(grad),)

    def _accumulated(self, slot: _Slot, parameter: torch.Tensor) -> None:
        """Autograd has added all that this backward gives to the parameter's gradient."""
        if parameter.grad is not slot.view:
            _take_back(slot)
        if self._armed and not self._held and not slot.final:
            slot.final = True
            self._buckets[slot.bucket].n_pending -= 1
            while self._armed and self._next < len(self._buckets) and not self._buckets[self._next].n_pending:
                self._launch_next()

    def _backward_ends(self) -> None:
        if self._armed and not self._held:
            self.flush()
            if self._finished is not None:
                self._finished()
        else:
            for slot in self._slots:
                slot.parameter.grad = None
        self.note_computing(False)

    def note_computing(self, is_under_way: bool) -> None:
        """Tells that a forward or a backward of the model begins, or that a backward has ended."""
        if self._computing is not None:
            self._computing(is_under_way)

    def _launch_next(self) -> None:
        bucket = self._buckets[self._next]
        for slot in bucket.slots:
            if slot.parameter.grad is not slot.view:
                _take_back(slot)
        self._next += 1
        self._launch(self._next - 1, bucket.flat)


class DataParallel(nn.Module):
    """A model whose gradients are summed over the members of a job; looks like DistributedDataParallel.

    A copy of it (deepcopy, pickle, AveragedModel) has the model only and takes no part in the synchronisation.

    Attributes:
        module: the model itself.
    """

    def __init__(self, module: nn.Module, buckets: GradientBuckets | None = None) -> None:
        super().__init__()
        self.module = module
        self._gradients = buckets

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model returns."""
        if self._gradients is not None and torch.is_grad_enabled():
            self._gradients.note_computing(True)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """A backward inside does not synchronise; a later one does, with the gradients of both."""
        if self._gradients is None:
            yield
        else:
            with self._gradients.hold():
                yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing while the job owns the gradients: it zeroes them itself when a step starts, not before."""
        if self._gradients is None:
            super().zero_grad(set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gradients": None}


def _group(named: Sequence[_Named], first_bucket_bytes: int, bucket_bytes: int) -> list[list[_Named]]:
    """The parameters of each bucket; the buckets in the order in which their last parameters come."""
    full: list[tuple[int, list[_Named]]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[_Named]] = {}
    bytes_of: dict[tuple[torch.dtype, torch.device], int] = {}
    last: dict[tuple[torch.dtype, torch.device], int] = {}
    for place, (name, parameter) in enumerate(reversed(named)):
        kind = (parameter.dtype, parameter.device)
        limit = bucket_bytes if full else first_bucket_bytes
        if kind in filling and bytes_of[kind] + parameter.nbytes > limit:
            full.append((last[kind], filling.pop(kind)))
        bytes_of[kind] = parameter.nbytes + (bytes_of[kind] if kind in filling else 0)
        filling.setdefault(kind, []).append((name, parameter))
        last[kind] = place
    full.extend((last[kind], group) for kind, group in filling.items())
    return [group for _, group in sorted(full, key=lambda item: item[0])]


def _allocate(number: int, group: Sequence[_Named]) -> _Bucket:
    first = group[0][1]
    bucket = _Bucket(torch.zeros(sum(p.numel() for _, p in group), dtype=first.dtype, device=first.device))
    offset = 0
    for name, parameter in group:
        # Optimizers' fused kernels want the gradient's strides to be the parameter's (channels_last, for one).
        strides = torch.empty_like(parameter, device="meta").stride()
        view = bucket.flat.as_strided(parameter.size(), strides, offset)
        bucket.slots.append(_Slot(name, parameter, view, number))
        offset += parameter.numel()
    return bucket


def _gradient_node(parameter: nn.Parameter) -> Any:
    """The node of the graph that adds a gradient to `parameter.grad`; it lives as long as somebody refers to it."""
    with torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    assert function is not None
    return function.next_functions[0][0]


def _take_back(slot: _Slot) -> None:
    """Makes `.grad` the view again; if somebody put a tensor in its place, the value of that counts."""
    grad = slot.parameter.grad
    if grad is not None:
        with torch.no_grad():
            slot.view.copy_(grad)
    slot.parameter.grad = slot.view
