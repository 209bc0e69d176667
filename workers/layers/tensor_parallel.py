"""Layers cut over the members of a tensor-parallel group, as Megatron does.

A layer says how its parameters are cut by an attribute `placements`, a mapping from parameter names to
`torch.distributed.tensor` placements; what it does not name is replicated:

    class Block(nn.Module):
        placements = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}

`nn.Linear` with its weight at Shard(0) is column-parallel: its input is whole, its output features are this member's.
With Shard(1) it is row-parallel: its input features are this member's, its output is the sum over the members, whole.
`nn.Embedding` with Shard(0) holds this member's rows of the vocabulary; its output is whole. Between a column-parallel
layer and the row-parallel one after it, the code of a layer sees fewer features, so it should ask for `-1` where it
unflattens them. Layers with parameters of their own cut otherwise call `copy` and `reduce` themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from elaunch.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

AllReduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class TPRank:
    """A place in a tensor-parallel group: member `rank` of `size`, and the sum over the members."""

    rank: int = 0
    size: int = 1
    all_reduce: AllReduce | None = None


_ALONE = TPRank()
_current = threading.local()


def current() -> TPRank:
    """Returns where the layer that runs in this thread is placed."""
    found: TPRank = getattr(_current, "value", _ALONE)
    return found


@contextmanager
def placed(tp_rank: TPRank) -> Iterator[None]:
    """Places the layers that run inside."""
    before = current()
    _current.value = tp_rank
    try:
        yield
    finally:
        _current.value = before


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.tp_rank = current()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _sum(ctx.tp_rank, grads[0])


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _sum(current(), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def copy(x: Tensor) -> Tensor:
    """Gives each member the same tensor; in backward the members' gradients of it are summed."""
    return x if current().size == 1 else _CopyToGroup.apply(x)  # type: ignore[no-untyped-call]


def reduce(x: Tensor) -> Tensor:
    """Sums the members' tensors; in backward each member gets the same gradient."""
    return x if current().size == 1 else _Reduce.apply(x)  # type: ignore[no-untyped-call]


def _sum(tp_rank: TPRank, x: Tensor) -> Tensor:
    return x if tp_rank.all_reduce is None else tp_rank.all_reduce(x)


class ColumnLinear(nn.Linear):
    """A linear layer that computes this member's output features."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns this member's output features, (..., out / size), of an input, (..., in), that is the same on all."""
        return F.linear(copy(input), self.weight, self.bias)


class RowLinear(nn.Linear):
    """A linear layer that gets this member's input features; the bias is added once, to the sum."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns all output features, (..., out), on each member, of its own input features, (..., in / size)."""
        output = reduce(F.linear(input, self.weight))
        return output if self.bias is None else output + self.bias


class VocabularyEmbedding(nn.Embedding):
    """An embedding with this member's rows of the vocabulary."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns the embeddings, (..., embedding_dim), of token numbers of the whole vocabulary."""
        rows = self.weight.shape[0]
        place = input - current().rank * rows
        here = (place >= 0) & (place < rows)
        found = F.embedding(torch.where(here, place, 0), self.weight)
        return reduce(found * here.unsqueeze(-1).to(found.dtype))


def cuts_of(layer: nn.Module, name: str) -> dict[str, int]:
    """Returns the dimension along which each parameter of a layer is cut; those that are not in it stay whole.

    Args:
        layer: with or without an attribute `placements`.
        name: of the layer, for messages.

    Raises:
        StateError: a placement of something that is no parameter, or one that cannot be done.
    """
    declared: Mapping[str, Placement] = getattr(layer, "placements", {})
    parameters = dict(layer.named_parameters())
    cuts: dict[str, int] = {}
    for parameter, placement in declared.items():
        # Most jobs have no such layer, and torch's DTensor takes a second to import.
        from torch.distributed.tensor import Replicate, Shard

        if parameter not in parameters:
            compiled = "; compile it in place, by layer.compile(), which keeps their names"
            raise StateError(
                f"{name} places {parameter!r}, which is none of its parameters: "
                f"{', '.join(parameters) or 'it has none'}{compiled if name.endswith('(OptimizedModule)') else ''}"
            )
        n_dims = parameters[parameter].dim()
        dim = placement.dim if isinstance(placement, Shard) else 0
        if not isinstance(placement, (Shard, Replicate)) or not -n_dims <= dim < n_dims:
            raise StateError(
                f"{name} places {parameter} {tuple(parameters[parameter].shape)} as {placement}; "
                "Replicate() and Shard(dim) of one of its dimensions can be used"
            )
        if isinstance(placement, Shard):
            cuts[parameter] = dim % n_dims
    return cuts


def cut(layer: nn.Module, cuts: Mapping[str, int], rank: int, size: int, name: str) -> None:
    """Leaves only member `rank`'s part of each parameter, in place, and makes the parts of the layer work together.

    Raises:
        StateError: a dimension does not divide by `size`, or a part of the layer is cut in a way it cannot work in.
    """
    if size == 1:
        return
    for parameter, dim in cuts.items():
        owner, _, attribute = parameter.rpartition(".")
        module = layer.get_submodule(owner)
        _adapt(module, attribute, dim, f"{name}: {parameter}")
        value = module.get_parameter(attribute)
        if value.shape[dim] % size:
            raise StateError(
                f"{name}: {parameter} {tuple(value.shape)} cannot be cut into {size} along dimension {dim}; "
                f"use a tensor-parallel degree that divides {value.shape[dim]}"
            )
        value.data = value.data.chunk(size, dim)[rank].clone(memory_format=torch.contiguous_format)
    for module in layer.modules():
        if isinstance(module, RowLinear) and module.bias is not None and module.bias.shape[0] != module.weight.shape[0]:
            raise StateError(f"{name}: the bias of a row-parallel linear layer is added once; place it as Replicate()")
        if (
            isinstance(module, ColumnLinear)
            and module.bias is not None
            and module.bias.shape[0] != module.weight.shape[0]
        ):
            raise StateError(
                f"{name}: the bias of a column-parallel linear layer is cut like its output; place it as Shard(0)"
            )


def _adapt(module: nn.Module, attribute: str, dim: int, what: str) -> None:
    kinds: dict[tuple[type, str, int], type] = {
        (nn.Linear, "weight", 0): ColumnLinear,
        (nn.Linear, "weight", 1): RowLinear,
        (nn.Embedding, "weight", 0): VocabularyEmbedding,
    }
    kind = kinds.get((type(module), attribute, dim))
    if kind is not None:
        module.__class__ = kind
    elif type(module) is nn.Embedding:
        raise StateError(f"{what}: an embedding can be cut along dimension 0, its vocabulary, only")
