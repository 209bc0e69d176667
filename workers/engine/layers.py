"""The layers of a model: described without being built, built alone, run with their own random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement

from elaunch.errors import StateError
from elaunch.workers.engine import tensor_parallel
from elaunch.workers.engine.random_rows import RowsOfUnit, math_attention
from elaunch.workers.engine.random_trace import GENERATORS, RandomTrace, trace_random
from elaunch.workers.engine.rng import layer_randomness, mix

Factory = Callable[[], nn.Module]


@dataclass(frozen=True)
class LayerSpec:
    """What every worker knows of every layer.

    Attributes:
        index: of the layer.
        name: for messages.
        shapes: of the parameters that are trained, whole, in registration order.
        dtypes: of them.
        placements: of them.
        output: shape of a row of its output, and its dtype.
        trace: the random numbers it draws.
    """

    index: int
    name: str
    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    placements: Mapping[str, Placement]
    output: tuple[torch.Size, torch.dtype]
    trace: RandomTrace


def describe(
    factories: Sequence[Factory], example: Tensor, micro_batch_size: int, dtype: torch.dtype | None
) -> tuple[LayerSpec, ...]:
    """Find out shapes and random numbers of all layers on the meta device: nothing is allocated or computed.

    Args:
        factories: of the layers.
        example: one row of input of the first layer (1, …), on any device.
        micro_batch_size: rows of a logical micro-batch.
        dtype: of the parameters; None leaves them as they are.

    Raises:
        StateError: a layer cannot be built or run, or its output does not fit the next.
    """
    specs = []
    row: tuple[torch.Size, torch.dtype] = (example.shape[1:], example.dtype)
    source = "the data set"
    for index, factory in enumerate(factories):
        with torch.device("meta"):
            layer = _made(index, factory, dtype)
        name = layer_name(index, layer)
        shape, kind = row

        def inputs(rows: int, shape: torch.Size = shape, kind: torch.dtype = kind) -> Tensor:
            return torch.empty((rows, *shape), dtype=kind, device="meta")

        row = _output(layer, inputs, name, f"{source} gives rows of shape {tuple(shape)} and {kind}")
        trace = trace_random(layer, inputs, micro_batch_size, name.removeprefix("layer "))
        placements = tensor_parallel.placements_of(layer, name)
        trained = {key: value for key, value in layer.named_parameters() if value.requires_grad}
        specs.append(
            LayerSpec(
                index,
                name,
                {key: value.shape for key, value in trained.items()},
                {key: value.dtype for key, value in trained.items()},
                {key: placements[key] for key in trained},
                row,
                trace,
            )
        )
        source = name
    return tuple(specs)


def layer_name(index: int, layer: nn.Module) -> str:
    return f"layer {index} ({type(layer).__name__})"


def _made(index: int, factory: Factory, dtype: torch.dtype | None) -> nn.Module:
    layer = factory()
    if not isinstance(layer, nn.Module):
        raise StateError(
            f"layers[{index}] must be a function that makes an nn.Module; it returned {type(layer).__name__}"
        )
    for module in layer.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise StateError(
                f"{layer_name(index, layer)} has {type(module).__name__}, whose statistics would depend on how the "
                "batch is divided; use LayerNorm, RMSNorm or GroupNorm"
            )
    return layer if dtype is None else layer.to(dtype=dtype)


def _output(layer: nn.Module, inputs: Callable[[int], Tensor], name: str, given: str) -> tuple[torch.Size, torch.dtype]:
    found = []
    for rows in (2, 3):
        try:
            with torch.no_grad():
                output = layer(inputs(rows))
        except StateError:
            raise
        except Exception as error:
            raise StateError(f"{name} cannot be run: {given}; {type(error).__name__}: {error}") from error
        if not isinstance(output, Tensor):
            raise StateError(f"{name} returns {type(output).__name__}; a layer must return one tensor (rows, …)")
        if output.dim() == 0 or output.shape[0] != rows:
            raise StateError(
                f"{name} returns shape {tuple(output.shape)} for {rows} rows; the first dimension must be {rows}"
            )
        found.append((output.shape[1:], output.dtype))
    if found[0] != found[1]:
        raise StateError(
            f"{name}: the shape of an output row depends on the number of rows: {found[0][0]}, {found[1][0]}"
        )
    return found[0]


@dataclass(eq=False)
class Saved:
    """What the backward of one layer on one micro-batch needs."""

    x: Tensor
    y: Tensor | None


@dataclass(eq=False)
class Layer:
    """A layer on this worker, or this worker's part of it.

    Attributes:
        module: with its parameters.
        spec: of the whole layer.
        recompute: whether its activations are computed again in backward.
        parameters: those that are trained, this worker's part, by name.
    """

    module: nn.Module
    spec: LayerSpec
    membership: tensor_parallel.Membership
    recompute: bool = False
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._buffers = dict(self.module.named_buffers())

    def forward(self, x: Tensor, draw: Draw) -> tuple[Tensor, Saved]:
        """Run on `x` (rows, …); the output is detached."""
        if self.recompute:
            with torch.no_grad():
                y = self._run(x, draw)
            return y, Saved(x, None)
        leaf = _leaf(x)
        y = self._run(leaf, draw)
        return y.detach(), Saved(leaf, y)

    def backward(self, saved: Saved, dy: Tensor, draw: Draw) -> tuple[Tensor | None, list[Tensor]]:
        """Gradients of the input (None for one that has none) and of each of `parameters`, in their order."""
        leaf, y = saved.x, saved.y
        if y is None:
            leaf = _leaf(leaf)
            y = self._run(leaf, draw)
        inputs = [*self.parameters.values()]
        if leaf.requires_grad:
            inputs.append(leaf)  # type: ignore[arg-type]
        if not inputs or not y.requires_grad:
            return None, [torch.zeros_like(parameter) for parameter in self.parameters.values()]
        with tensor_parallel.placed(self.membership):
            found = list(torch.autograd.grad(y, inputs, dy, allow_unused=True))
        dx = found.pop() if leaf.requires_grad else None
        if leaf.requires_grad and dx is None:
            dx = torch.zeros_like(leaf)
        return dx, [
            torch.zeros_like(parameter) if grad is None else grad
            for grad, parameter in zip(found, self.parameters.values(), strict=True)
        ]

    def _run(self, x: Tensor, draw: Draw) -> Tensor:
        here = self.membership
        # Parts of a micro-batch need the plain formula of attention, so whole ones have to draw the same numbers.
        with (
            tensor_parallel.placed(here),
            math_attention(self.spec.trace, x.device),
            draw.layer(self.spec, here.rank, here.size, x.device),
        ):
            versions = [buffer._version for buffer in self._buffers.values()]
            y: Tensor = self.module(x)
        if versions != [buffer._version for buffer in self._buffers.values()]:
            raise StateError(
                f"{self.spec.name} changes a buffer in forward (of {', '.join(self._buffers)}); "
                "what it came to would depend on how the batch is divided, so layers must not keep such a state"
            )
        shape, dtype = self.spec.output
        if y.shape != (x.shape[0], *shape) or y.dtype != dtype:
            raise StateError(
                f"{self.spec.name} returned {tuple(y.shape)} {y.dtype}, and {(x.shape[0], *shape)} {dtype} when it was "
                "tried on the meta device"
            )
        return y


@dataclass(frozen=True)
class Draw:
    """Whose random numbers a layer uses: those of some rows of a step."""

    seed: int
    step: int
    rows_by_unit: tuple[RowsOfUnit, ...]
    micro_batch_size: int

    def layer(self, spec: LayerSpec, tp_rank: int, tp_size: int, device: torch.device) -> Any:
        """A context in which the layer runs."""
        return layer_randomness(
            spec.trace,
            seed=self.seed,
            step=self.step,
            layer=spec.index,
            rows_by_unit=self.rows_by_unit,
            micro_batch_size=self.micro_batch_size,
            tp_rank=tp_rank,
            tp_size=tp_size,
            device=device,
        )


def build(
    spec: LayerSpec,
    factory: Factory,
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    membership: tensor_parallel.Membership,
    recompute: bool = False,
) -> Layer:
    """Make a layer, or this worker's part of it; its initial values depend on (seed, layer) only.

    Raises:
        StateError: it cannot be cut as it says.
    """
    with GENERATORS, torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(seed, spec.index))
        module = _made(spec.index, factory, dtype)
    placements = tensor_parallel.placements_of(module, spec.name)
    tensor_parallel.cut(module, placements, membership.rank, membership.size, spec.name)
    module.to(device).train()
    parameters = dict(module.named_parameters())
    return Layer(module, spec, membership, recompute, {name: parameters[name] for name in spec.shapes})


def _leaf(x: Tensor) -> Tensor:
    x = x.detach()
    return x.requires_grad_() if x.is_floating_point() or x.is_complex() else x
