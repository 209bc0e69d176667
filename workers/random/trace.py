"""Which random operations a layer does, found by running it without data.

A layer maps (rows, ...) to (rows, ...), whichever dimension holds the rows. Running it on the meta device for two
different numbers of rows shows, for each random operation, which dimension that is, and the shape of what the whole
layer draws. With this a worker that has some rows, or a shard of the layer, knows what to cut its numbers out of.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from elaunch.errors import StateError

# Default generators belong to the process, while its workers may be threads: whoever seeds or swaps one holds this.
GENERATORS = threading.RLock()

# These draw one number per element, and the same however they are cut: in place, `_like` and `_functional` too.
_ELEMENTWISE = frozenset(
    ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "native_dropout", "normal")
    + ("rand", "randint", "randn", "random", "uniform")
)
_ADVICE = {
    "rnn": "set its dropout to 0 and put nn.Dropout between single-layer RNNs",
    "attention": "run it under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
}


@dataclass(frozen=True)
class RandomOp:
    """One random operation of a layer, as the whole layer does it.

    Attributes:
        name: such as `bernoulli_.float`.
        shape: of what it draws for one row.
        batch_dim: the dimension that is `shape[batch_dim]` times the number of rows, rows outermost. None: its shape
            does not depend on the rows, so it draws once per unit.
        stride: of what it draws for one unit. It decides which element gets which number, and parts may lie otherwise.
        obstacle: why some rows alone cannot be drawn and what to do about it; empty if they can.
    """

    name: str
    shape: tuple[int, ...]
    batch_dim: int | None
    stride: tuple[int, ...]
    obstacle: str = ""

    def shape_of(self, rows: int) -> tuple[int, ...]:
        """Returns the shape of what the whole layer draws for `rows` rows."""
        return tuple(size * rows if dim == self.batch_dim else size for dim, size in enumerate(self.shape))


@dataclass(frozen=True)
class RandomTrace:
    """The random operations of one layer, in order.

    Attributes:
        ops: empty if the layer draws nothing.
        micro_batch_size: rows in a unit.
        fused: it has attention with dropout. Fused kernels draw other numbers than the plain formula, which parts of a
            unit have to use. So for the same numbers under every plan, whole units must run under `math_attention` too.
    """

    ops: tuple[RandomOp, ...]
    micro_batch_size: int
    fused: bool = False

    @property
    def obstacles(self) -> tuple[str, ...]:
        """Returns why the layer can only run whole units without tensor parallelism; empty if it can run any rows."""
        return tuple(f"{op.name}: {op.obstacle}" for op in self.ops if op.obstacle)


@dataclass(frozen=True, eq=False)
class RandomCall:
    """A call of a random operation: an overload of torch's, and its arguments by name."""

    func: Any
    arguments: dict[str, Any]

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RandomCall | None:
        """Returns the call of `func`, or None if it draws nothing."""
        if not _is_random(func):
            return None
        parameters = func._schema.arguments
        given = {parameter.name: value for parameter, value in zip(parameters, args)}
        call = {p.name: p.default_value for p in parameters if p.has_default_value()} | given | dict(kwargs)
        # Fused attention and RNNs without dropout, and layers that are not in training.
        if 0 in (call.get("dropout_p"), call.get("dropout")) or call.get("train", call.get("training")) is False:
            return None
        return cls(func, call)

    @property
    def name(self) -> str:
        """Returns the operation's name with its overload, as torch writes it: `aten::bernoulli_.float`."""
        return f"{self._packet}.{self.func._overloadname or 'default'}"

    @property
    def in_place(self) -> bool:
        """Returns whether it writes into its first tensor."""
        return self._packet.endswith("_")

    @property
    def ignores_values(self) -> bool:
        """Returns whether what it draws is independent of what its first tensor holds."""
        return self._packet.endswith(("_", "_like"))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns those of its arguments that are tensors, by name."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, torch.Tensor)}

    @property
    def subject(self) -> torch.Tensor:
        """Returns a tensor with the shape and layout of what is drawn: its first one, or one of the given size."""
        for tensor in self.tensors.values():
            return tensor
        return torch.empty(self.arguments.get("size", [self.arguments.get("n", 0)]), device="meta")

    @property
    def device(self) -> torch.device:
        """Returns where it draws."""
        return self.subject.device if self.tensors else torch.device(self.arguments.get("device") or "cpu")

    def output_like(self, output: torch.Tensor) -> torch.Tensor:
        """Returns an empty tensor for what this call returns, with the dtype and device of `output`."""
        memory_format = self.arguments.get("memory_format") or torch.preserve_format
        return torch.empty_like(self.subject, dtype=output.dtype, device=output.device, memory_format=memory_format)

    @property
    def obstacle(self) -> str:
        """Returns why some rows alone cannot be drawn and what to do about it; empty if they can."""
        base = self._packet.removesuffix("_").removesuffix("_like").removesuffix("_functional")
        if self.arguments.get("generator") is not None:
            return "it draws from a generator of its own; use torch's default generator"
        if any(argument.is_out for argument in self.func._schema.arguments):
            return "it writes to out=; leave that argument out"
        if base not in _ELEMENTWISE:
            advice = next((text for key, text in _ADVICE.items() if key in base), "make it of rand, randn or bernoulli")
            return f"it does not draw one number for each element; {advice}"
        shape = self.subject.shape
        if torch.broadcast_shapes(shape, *(value.shape for value in self.tensors.values())) != shape:
            return "its first tensor is broadcast; expand it before"
        return ""

    @property
    def _packet(self) -> str:
        return str(self.func._schema.name).partition("::")[2]


def trace_random(
    layer: nn.Module,
    example: Callable[[int], torch.Tensor | tuple[torch.Tensor, ...]],
    micro_batch_size: int,
    name: str = "",
) -> RandomTrace:
    """Returns what `layer` draws, found by running it on the meta device for a unit and for one row more.

    Args:
        layer: the whole layer, unsharded, built on the meta device, in the mode (train or eval) in which it will run.
        example: from a number of rows to the layer's arguments, on the meta device.
        micro_batch_size: rows in a unit.
        name: of the layer, for messages.

    Raises:
        StateError: it cannot run on the meta device, draws from a generator of its own, does other random operations
            for other numbers of rows, or draws numbers of which no single dimension is proportional to the rows.
    """
    name = name or type(layer).__name__
    few, many = (_record(layer, example, rows, name) for rows in (micro_batch_size, micro_batch_size + 1))
    if [drawn.name for drawn in few.drawn] != [drawn.name for drawn in many.drawn]:
        raise StateError(
            f"layer {name} draws {[drawn.name for drawn in few.drawn]} for {micro_batch_size} rows but "
            f"{[drawn.name for drawn in many.drawn]} for one more: a layer has to do the same random operations for "
            "any rows"
        )
    ops = tuple(_per_row(*pair, micro_batch_size, name) for pair in zip(few.drawn, many.drawn))
    return RandomTrace(ops, micro_batch_size, few.fused)


class _Recorder(TorchDispatchMode):
    """Notes each random operation, and the operation that failed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drawn: list[RandomOp] = []
        self.fused = False
        self.failed = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = RandomCall.of(func, args, kwargs)
        if call is not None:
            if call.arguments.get("generator") is not None:
                self.failed = f"{call.name}, which draws from a generator of its own (use torch's default generator)"
                raise RuntimeError("a layer's random numbers have to belong to rows")
            obstacle = call.obstacle or _checkpointed()
            self.drawn.append(RandomOp(call.name, tuple(call.subject.shape), None, _stride(call.subject), obstacle))
        try:
            return func(*args, **kwargs)
        except Exception:
            self.failed = self.failed or str(func)
            raise


class _AttentionFinder(TorchFunctionMode):
    """Notes attention with dropout, which has become other operations where a `_Recorder` looks."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.found |= (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
        elif func is torch.nn.functional.multi_head_attention_forward:  # calls the former where no mode sees it
            bound = inspect.signature(func).bind(*args, **kwargs)
            bound.apply_defaults()
            call = bound.arguments
            self.found |= call["dropout_p"] > 0 and call["training"] and not call["need_weights"]
        return func(*args, **kwargs)


def _record(layer: nn.Module, example: Callable[[int], Any], rows: int, name: str) -> _Recorder:
    arguments = example(rows)
    arguments = arguments if isinstance(arguments, tuple) else (arguments,)
    elsewhere = {str(t.device) for t in (*arguments, *layer.parameters(), *layer.buffers()) if t.device.type != "meta"}
    if elsewhere:
        raise StateError(
            f"layer {name} or its example is on {', '.join(sorted(elsewhere))}; to trace its random numbers both have "
            'to be made under torch.device("meta")'
        )
    recorder, finder = _Recorder(), _AttentionFinder()
    try:
        with GENERATORS, torch.random.fork_rng(devices=[]), finder, recorder:
            layer(*arguments)
    except Exception as error:
        where = f" at {recorder.failed}" if recorder.failed else ""
        raise StateError(
            f"layer {name} cannot run without data for {rows} rows{where}: {error}. Its random numbers are found on "
            "the meta device: its operations need meta kernels, tensors that it makes have to be where its inputs are, "
            "and what it does may not depend on values"
        ) from error
    recorder.fused = finder.found
    return recorder


def _per_row(few: RandomOp, many: RandomOp, rows: int, name: str) -> RandomOp:
    differing = [dim for dim, (a, b) in enumerate(zip(few.shape, many.shape)) if a != b]
    if len(few.shape) == len(many.shape) and not differing:
        return few
    if len(few.shape) == len(many.shape) and len(differing) == 1:
        dim = differing[0]
        size, rest = divmod(few.shape[dim], rows)
        if rest == 0 and many.shape[dim] == size * (rows + 1):
            return replace(few, shape=(*few.shape[:dim], size, *few.shape[dim + 1 :]), batch_dim=dim)
    raise StateError(
        f"layer {name} draws {few.name} of shape {few.shape} for {rows} rows and {many.shape} for one "
        "more: one dimension has to be proportional to the rows, and the others the same"
    )


def _stride(tensor: torch.Tensor) -> tuple[int, ...]:
    if 0 in tensor.stride():  # an expanded tensor, which random operations follow as empty_like does
        tensor = torch.empty_like(tensor, device="meta")
    return tensor.stride()


def _checkpointed() -> str:
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return "it runs in torch.utils.checkpoint, whose second run draws other numbers; checkpoint whole layers"
        frame = frame.f_back
    return ""


@cache
def _is_random(func: Any) -> bool:
    arguments = func._schema.arguments
    return torch.Tag.nondeterministic_seeded in func.tags or any("Generator" in str(a.type) for a in arguments)
