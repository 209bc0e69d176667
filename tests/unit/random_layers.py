"""Layers that draw random numbers in many ways, and a way to run cuts of their micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from elaunch.workers.random.rng import layer_randomness
from elaunch.workers.random.rows import RowsOfUnit
from elaunch.workers.random.trace import RandomTrace, trace_random

CPU = torch.device("cpu")


class Fn(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Attention(nn.Module):
    """Attention with dropout, in whole numbers where its input is zero but for the values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = x.transpose(1, 2)  # as heads usually come about
        zero = torch.zeros_like(values)
        return F.scaled_dot_product_attention(zero, zero, values, dropout_p=0.5).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x, x, x, need_weights=False)[0]
        return result


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)[0]
        return result


def gaps(x: torch.Tensor) -> torch.Tensor:
    x[:, :, :2].bernoulli_(0.5)
    x[:, 1:].transpose(1, 2).normal_()
    return x


def as_on_accelerators(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5) if x.is_meta else torch.native_dropout(x, 0.5, True)[0]


@dataclass(frozen=True)
class Case:
    """`make` gives a layer on the current default device; a row has `shape`; rows lie in dimension `batch_dim`."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 4)
    batch_dim: int = 0
    exact: bool = True  # parts compute bit by bit what the whole does, given the same random numbers

    def example(self, rows: int) -> torch.Tensor:
        return torch.zeros(*self.shape[: self.batch_dim], rows, *self.shape[self.batch_dim :], device="meta")

    def trace(self, micro_batch_size: int = 2) -> RandomTrace:
        with torch.device("meta"):
            layer = self.make()
        return trace_random(layer, self.example, micro_batch_size)

    def input(self, rows: int) -> torch.Tensor:
        numbers = torch.arange(self.example(rows).numel()) % 7 + 1.0
        return numbers.view(rows, *self.shape).movedim(0, self.batch_dim).contiguous()


CASES = {
    "dropout": Case(lambda: nn.Dropout(0.3)),
    "half precision": Case(lambda: Fn(lambda x: F.dropout(x.bfloat16(), 0.3))),
    "several in a row": Case(lambda: nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.3), nn.AlphaDropout(0.5))),
    "feature dropout": Case(lambda: nn.Dropout2d(0.5), (3, 2, 2)),
    "dropout in place": Case(lambda: nn.Dropout(0.3, inplace=True)),
    "one operation on accelerators": Case(lambda: Fn(as_on_accelerators)),
    "native dropout": Case(lambda: Fn(lambda x: torch.native_dropout(x.transpose(1, 2), 0.4, True)[0].transpose(1, 2))),
    "attention": Case(Attention, (4, 2, 3)),
    "multi-head attention": Case(SelfAttention, (3, 4), exact=False),
    "encoder layer": Case(lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.3, batch_first=True), (3, 4), exact=False),
    "recurrent": Case(Recurrent, (3, 4), exact=False),
    "sequence first": Case(lambda: nn.Dropout(0.3), (5, 3), batch_dim=1),
    "permuted": Case(lambda: Fn(lambda x: F.dropout(x.permute(2, 0, 1), 0.5).permute(1, 2, 0)), (3, 4)),
    "permuted noise": Case(lambda: Fn(lambda x: x + torch.randn_like(x.transpose(1, 2)).transpose(1, 2)), (5, 4)),
    "gaps in memory": Case(lambda: Fn(gaps), (3, 4)),
    "noise over a slice": Case(lambda: Fn(lambda x: torch.rand_like(x.transpose(0, 2)[1:]).transpose(0, 2)), (3, 4)),
    "noise over an expanded tensor": Case(lambda: Fn(lambda x: torch.rand_like(x[:, :1].expand(-1, 3, -1))), (1, 4)),
    "channels last": Case(
        lambda: Fn(lambda x: x + torch.rand_like(x.contiguous(memory_format=torch.channels_last))), (3, 2, 2)
    ),
    "rows and heads folded": Case(lambda: Fn(lambda x: F.dropout(x.flatten(0, 1), 0.5).view_as(x)), (3, 4)),
    "a number per row": Case(lambda: Fn(lambda x: x * torch.rand(x.shape[0], 1, 1, device=x.device))),
    "tensors of a size": Case(
        lambda: Fn(lambda x: x + torch.randn(x.shape, device=x.device) + torch.rand(4, device=x.device))
    ),
    "integers": Case(lambda: Fn(lambda x: torch.randint_like(x, 9) + torch.randint(9, x.shape, device=x.device))),
    "normal of a size": Case(lambda: Fn(lambda x: x + torch.normal(0.0, 2.0, x.shape, device=x.device)), (17,)),
    "fills": Case(
        lambda: Fn(
            lambda x: sum(
                (
                    torch.empty_like(x).exponential_(),
                    torch.empty_like(x).geometric_(0.5),
                    torch.empty_like(x).cauchy_(),
                    torch.empty_like(x).log_normal_(),
                    torch.empty_like(x).random_(0, 9),
                    torch.empty_like(x).uniform_(-1, 1),
                ),
                start=x,
            )
        )
    ),
    "probabilities": Case(
        lambda: Fn(
            lambda x: torch.bernoulli(x / 9) + torch.empty_like(x).bernoulli_(x[:, :1] / 9) + torch.bernoulli(x, 0.5)
        )
    ),
    "means": Case(lambda: Fn(lambda x: torch.normal(x, 2.0) + torch.normal(x, x) + torch.normal(1.0, x.mT).mT)),
}


def run(
    layer: nn.Module,
    trace: RandomTrace,
    x: torch.Tensor,
    rows_by_unit: tuple[RowsOfUnit, ...],
    tp: tuple[int, int] = (0, 1),
) -> torch.Tensor:
    with layer_randomness(
        trace,
        seed=5,
        step=6,
        layer=7,
        rows_by_unit=rows_by_unit,
        micro_batch_size=trace.micro_batch_size,
        tp_rank=tp[0],
        tp_size=tp[1],
        device=CPU,
    ):
        result: torch.Tensor = layer(x.clone())
        return result
