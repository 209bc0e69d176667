"""The random numbers of some rows of a micro-batch, or of a shard of a layer: a cut of what the whole would have drawn.

The rows of one logical micro-batch are a *unit*. Where a worker has other rows than one whole unit, or a shard of the
layer, `RandomRows` does each random operation for the whole of every unit that is touched, with that unit's generator,
and takes the rows and the slice that are here. So a plan can cut and join micro-batches without changing any random
number (ElasWave 4.4, by rows instead of ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.attention
from torch.utils._python_dispatch import TorchDispatchMode

from elaunch.errors import StateError
from elaunch.workers.random.trace import (
    GENERATORS,
    RandomCall,
    RandomOp,
    RandomTrace,
)

RowsOfUnit = tuple[int, range, int]  # unit, rows inside the unit, first row in the micro-batch
_DROPOUT = ("bernoulli_.float", "native_dropout.default")


def default_generator(device: torch.device) -> torch.Generator:
    """Returns the generator that operations on `device` draw from; a device without a number is the current one."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    generator: torch.Generator = module.default_generators[
        module.current_device() if device.index is None else device.index
    ]
    return generator


@contextmanager
def math_attention(trace: RandomTrace, device: torch.device) -> Iterator[None]:
    """Computes attention with dropout by its plain formula, which draws by element; only where `trace` says that there
    is any.

    On the CPU attention with dropout always runs so. Elsewhere this is a setting of the whole process.
    """
    if trace.fused and device.type != "cpu":
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    else:
        yield


class RandomRows(TorchDispatchMode):
    """While it is entered, a layer's random operations draw their rows, and their slice, of what whole units draw.

    torch's default generators are as before after each operation. One instance serves one call of the layer.

    Args:
        trace: of the whole layer.
        number: from a unit to the number that its generators start from in this layer and step.
        layer: for messages.
        rows_by_unit: (unit, rows inside the unit, first row in the micro-batch), in the order of the rows.
        tp_rank, tp_size: this worker holds the slice `tp_rank` of `tp_size` of each sharded dimension.
    """

    def __init__(
        self,
        trace: RandomTrace,
        number: Callable[[int], int],
        layer: int,
        rows_by_unit: tuple[RowsOfUnit, ...],
        tp_rank: int = 0,
        tp_size: int = 1,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._trace, self._number, self._layer = trace, number, layer
        self._rows_by_unit, self._micro_batch_size = rows_by_unit, trace.micro_batch_size
        self._tp_rank, self._tp_size = tp_rank, tp_size
        self._n_rows = sum(len(rows) for _, rows, _ in rows_by_unit)
        self._units = tuple(dict.fromkeys(unit for unit, _, _ in rows_by_unit))
        self._states: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._n_drawn = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = RandomCall.of(func, args, kwargs)
        return func(*args, **kwargs) if call is None else self._draw(call)

    def finish(self) -> None:
        """Checks that the layer, which has returned, has drawn all that it drew when it was traced."""
        if self._n_drawn != len(self._trace.ops):
            raise self._mismatch("nothing more")

    def _draw(self, call: RandomCall) -> Any:
        op, subject = self._next_op(call), call.subject
        sharded_dim = self._sharded_dim(op, subject)
        self._n_drawn += 1
        shape = op.shape_of(self._micro_batch_size)
        parts: tuple[torch.Tensor, ...] = (subject,) if call.in_place else ()
        for unit in self._units:
            segments = [(rows, first) for owner, rows, first in self._rows_by_unit if owner == unit]
            cut = _Cut(op, segments, self._n_rows, self._micro_batch_size, sharded_dim, self._tp_rank)
            whole = dict(call.arguments)
            if "size" in whole:
                whole["size"] = shape
            for name, tensor in call.tensors.items():
                if tensor.dim() == 0 < subject.dim():
                    continue
                whole[name] = torch.empty_strided(shape, op.stride, dtype=tensor.dtype, device=tensor.device)
                if tensor is not subject or not call.ignores_values:
                    cut.put(tensor.expand(subject.shape), whole[name].zero_())
            with self._drawing(unit, call.device):
                drawn = call.func(**whole)
            drawn = drawn if isinstance(drawn, tuple) else (drawn,)
            parts = parts or tuple(call.output_like(tensor) for tensor in drawn)
            for tensor, part in zip(drawn, parts, strict=True):
                cut.take(tensor, part)
        return parts[0] if len(parts) == 1 else parts

    def _next_op(self, call: RandomCall) -> RandomOp:
        op = self._trace.ops[self._n_drawn] if self._n_drawn < len(self._trace.ops) else None
        obstacle = call.obstacle or (op.obstacle if op else "")
        if obstacle:
            raise StateError(
                f"{call.name} in layer {self._layer} cannot draw for {self._rows_text()} what whole micro-batches of "
                f"{self._micro_batch_size} rows draw: {obstacle}"
            )
        # On accelerators dropout is one operation of its own, on the meta device and the CPU it fills a mask.
        if op is None or (op.name != call.name and (op.name, call.name) != _DROPOUT):
            raise self._mismatch(f"{call.name} {tuple(call.subject.shape)}")
        if op.batch_dim is None and len(self._units) > 1:
            raise StateError(
                f"{call.name} {op.shape} in layer {self._layer} draws once per micro-batch, but here are "
                f"{self._rows_text()}: draw a number for each row, or give this worker whole micro-batches one by one"
            )
        return op

    def _sharded_dim(self, op: RandomOp, subject: torch.Tensor) -> int | None:
        """The dimension of which a slice is here; None if all of it is."""
        whole, here = op.shape_of(self._n_rows), tuple(subject.shape)
        if whole == here:
            return None
        differing = [dim for dim, (a, b) in enumerate(zip(whole, here)) if a != b]
        if len(whole) == len(here) and len(differing) == 1:
            dim = differing[0]
            if op.shape[dim] % self._tp_size == 0 and here[dim] * self._tp_size == whole[dim]:
                return dim
        raise self._mismatch(f"{op.name} {here}")

    @contextmanager
    def _drawing(self, unit: int, device: torch.device) -> Iterator[None]:
        generator = default_generator(device)
        key = (unit, generator.device)
        with GENERATORS:
            before = generator.get_state()
            try:
                if key in self._states:
                    generator.set_state(self._states[key])
                else:
                    generator.manual_seed(self._number(unit))
                yield
                self._states[key] = generator.get_state()
            finally:
                generator.set_state(before)

    def _mismatch(self, here: str) -> StateError:
        ops = [f"{op.name} {op.shape_of(self._n_rows)}" for op in self._trace.ops]
        return StateError(
            f"layer {self._layer} draws {here} as number {self._n_drawn} for {self._rows_text()}, with tensor "
            f"parallelism of {self._tp_size}, but when traced the whole layer drew {', '.join(ops)}: which random "
            "operations a layer does may not depend on data, and a shard may divide one dimension of each"
        )

    def _rows_text(self) -> str:
        cuts = ", ".join(f"{rows.start}:{rows.stop} of {unit}" for unit, rows, _ in self._rows_by_unit)
        return f"the rows {cuts}" + (f" (slice {self._tp_rank} of {self._tp_size})" if self._tp_size > 1 else "")


@dataclass(frozen=True)
class _Cut:
    """Which elements of a whole unit's tensor are which elements of the tensor here."""

    op: RandomOp
    segments: list[tuple[range, int]]  # rows of the unit, first row here
    n_rows: int
    micro_batch_size: int
    sharded_dim: int | None
    tp_rank: int

    def take(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        for of_whole, of_part in self._pairs(whole, part):
            of_part.copy_(of_whole)

    def put(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        for of_whole, of_part in self._pairs(whole, part):
            of_whole.copy_(of_part)

    def _pairs(self, whole: torch.Tensor, part: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        batch, sharded = self.op.batch_dim, self.sharded_dim
        segments = self.segments
        if batch is None:
            batch, segments = 0, [(range(1), 0)]
            whole, part = whole.unsqueeze(0), part.unsqueeze(0)
            sharded = None if sharded is None else sharded + 1
        else:
            # A dimension may fold rows and, say, heads: then rows are outermost, and a shard divides the heads.
            whole = whole.unflatten(batch, (self.micro_batch_size, -1))
            part = part.unflatten(batch, (self.n_rows, -1))
            sharded = None if sharded is None else sharded + (sharded >= batch)
        if sharded is not None:
            size = part.shape[sharded]
            whole = whole.narrow(sharded, self.tp_rank * size, size)
        for rows, first in segments:
            yield whole.narrow(batch, rows.start, len(rows)), part.narrow(batch, first, len(rows))
