"""A layer whose values come from others is built without drawing any, unless that would change what does not come."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from elaunch.workers.layers.model import Layer, build, describe
from elaunch.workers.layers.tensor_parallel import TPRank

WIDTH = 8


def block(make: Callable[[nn.Module], object], drawn: list[bool]) -> Callable[[], nn.Module]:
    """A layer of which a part is made so; notes for each time whether random numbers were drawn for that."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            before = torch.random.get_rng_state()
            make(self)
            drawn.append(not torch.equal(before, torch.random.get_rng_state()))
            self.weight = nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    return Block


def built(make: Callable[[nn.Module], object], values: bool) -> tuple[Layer, list[bool]]:
    drawn: list[bool] = []
    factory = block(make, drawn)
    (spec,) = describe([factory], torch.zeros(1, WIDTH), 1, None)
    drawn.clear()
    layer = build(spec, factory, 3, torch.device("cpu"), None, TPRank(0, 1), values=values)
    return layer, drawn


def truncated(module: nn.Module) -> None:
    module.table = nn.Parameter(torch.full((4, WIDTH), 9.0))  # out of bounds, so it would be drawn until it is not
    nn.init.trunc_normal_(module.table, std=0.02)


def as_transformers_do(module: nn.Module) -> None:
    module.linear = nn.Linear(WIDTH, WIDTH)
    module.linear.weight.data.normal_(mean=0.0, std=0.02)
    module.linear.bias.data.zero_()


def buffer(module: nn.Module) -> None:
    module.linear = nn.Linear(WIDTH, WIDTH)
    module.register_buffer("features", torch.randn(WIDTH, WIDTH))


def attribute(module: nn.Module) -> None:
    module.linear = nn.Linear(WIDTH, WIDTH)
    module.features = torch.randn(WIDTH, WIDTH)  # neither a parameter nor a buffer, so it never comes


def in_place(module: nn.Module) -> None:
    module.linear = nn.Linear(WIDTH, WIDTH)
    module.features = nn.init.normal_(torch.empty(WIDTH))


def by_a_generator(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    module.linear = nn.Linear(WIDTH, WIDTH)
    nn.init.normal_(module.linear.weight, generator=generator)
    module.features = torch.randn(WIDTH, generator=generator)


@pytest.mark.parametrize(
    "make",
    [
        lambda module: setattr(module, "part", nn.Linear(WIDTH, WIDTH)),
        lambda module: setattr(module, "part", nn.Embedding(9, WIDTH, padding_idx=2)),
        lambda module: setattr(module, "part", nn.MultiheadAttention(WIDTH, 2)),
        lambda module: setattr(module, "part", nn.Conv2d(3, 4, 3)),
        lambda module: setattr(module, "part", nn.LSTM(WIDTH, WIDTH)),
        lambda module: setattr(module, "part", nn.TransformerEncoderLayer(WIDTH, 2)),
        truncated,
        as_transformers_do,
    ],
)
def test_no_values_are_drawn_that_come_from_others(make: Callable[[nn.Module], object]) -> None:
    assert built(make, values=True)[1] == [True]
    layer, drawn = built(make, values=False)
    assert drawn == [False]
    assert {name: value.shape for name, value in layer.parameters.items()} == {
        name: value.shape for name, value in built(make, values=True)[0].parameters.items()
    }


@pytest.mark.parametrize("make", [buffer, attribute, in_place, by_a_generator])
def test_what_else_a_layer_draws_is_the_same_without_values(make: Callable[[nn.Module], object]) -> None:
    expected, found = (built(make, values)[0].module.features for values in (True, False))
    assert isinstance(expected, torch.Tensor)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(expected, found)
