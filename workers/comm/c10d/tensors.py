"""What operations of `torch.distributed` do with tensors and options before these go over links."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from elaunch.workers.comm.group import Reduction

_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "sum"),
    (ReduceOp.PRODUCT, "product"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.MIN, "min"),
)


def reduction_of(opts: Any) -> tuple[Reduction, bool]:
    """Returns the reduction that `opts` names, and whether it is an average."""
    wanted = getattr(opts, "reduceOp", opts)
    if wanted is None:
        return "sum", False
    for op, reduction in _REDUCTIONS:
        if wanted == op:
            return reduction, bool(op == ReduceOp.AVG)
    raise ValueError(f"reduction {wanted} is not supported: use SUM, AVG, PRODUCT, MAX or MIN")


def refuse_layout(tensor: Tensor) -> None:
    """Raises `ValueError` for a tensor that has no memory of its own for each element."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"a {tensor.layout} tensor cannot be sent: hand over tensor.to_dense()")


@contextmanager
def flat_of(tensor: Tensor) -> Iterator[Tensor]:
    """Returns the tensor as a contiguous 1-D one; what is written to it ends up in the tensor."""
    refuse_layout(tensor)
    plain = tensor.detach()
    flat = plain.contiguous().view(-1)
    yield flat
    if not plain.is_contiguous():
        plain.copy_(flat.view(plain.shape))
