"""Layers that are differentiated together give what each alone gives, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from elaunch.workers.layers.chain.chain import Chain
from elaunch.workers.layers.model import Draw, Layer, build, describe
from elaunch.workers.layers.tensor_parallel import TPRank

ROWS, WIDTH = 4, 6
DRAW = Draw(seed=3, step=0, rows_by_unit=((0, range(ROWS), 0),), micro_batch_size=ROWS)


class Block(nn.Module):
    """A parameter of each kind: used once, used twice, never used, not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.unused = nn.Parameter(torch.ones(2))
        self.fixed = nn.Parameter(torch.full((WIDTH,), 0.1), requires_grad=False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(torch.tanh(self.linear(x) * self.scale)) * self.scale + x + self.fixed
        return y


class Words(nn.Module):
    """Its input is numbers, which have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.embedding(x)
        return y


class Doubled(nn.Module):
    """Without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Cut(Block):
    """Its output does not depend on its input as far as autograd knows."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


def made(factories: Sequence[type[nn.Module]], x: Tensor, recompute: Sequence[int]) -> list[Layer]:
    specs = describe(factories, x[:1], ROWS, torch.float64)
    device = torch.device("cpu")
    return [
        build(spec, factory, 3, device, torch.float64, TPRank(), spec.index in recompute)
        for spec, factory in zip(specs, factories, strict=True)
    ]


Found = tuple[Tensor, Tensor | None, list[tuple[int, list[Tensor]]]]


def through(chains: Sequence[Chain], x: Tensor) -> Found:
    """Output, gradient of the input, and the layers with their gradients in the order in which they were given."""
    saved = []
    for chain in chains:
        x, kept = chain.forward(x, DRAW)
        saved.append(kept)
    given: list[tuple[int, list[Tensor]]] = []
    dy: Tensor | None = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    for chain in reversed(chains):
        assert dy is not None
        dy = chain.backward(saved.pop(), dy, DRAW, lambda layer, grads: given.append((layer.spec.index, grads)))
    return x, dy, given


@pytest.mark.parametrize("recompute", [(), (1,), (0, 1, 2, 3)])
@pytest.mark.parametrize(
    "factories", [(Block, Block, Doubled, Block), (Words, Block, Block, Block), (Block, Block, Cut, Block)]
)
def test_a_chain_gives_what_its_layers_give_one_by_one(
    factories: Sequence[type[nn.Module]], recompute: Sequence[int]
) -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64) if factories[0] is Block else torch.arange(ROWS)
    layers = made(factories, x, recompute)
    y, dx, given = through([Chain(layers)], x)
    expected_y, expected_dx, expected = through([Chain([layer]) for layer in made(factories, x, ())], x)
    assert torch.equal(y, expected_y)
    assert (dx is None) == (expected_dx is None)
    if dx is not None and expected_dx is not None:
        assert torch.equal(dx, expected_dx)
    assert [layer for layer, _ in expected] == [3, 2, 1, 0]
    by_layer = dict(given)
    assert len(given) == 4
    for layer, grads in expected:
        shapes = [parameter.shape for parameter in layers[layer].parameters.values()]
        assert [grad.shape for grad in by_layer[layer]] == shapes
        assert all(torch.equal(one, other) for one, other in zip(by_layer[layer], grads, strict=True))
    assert all(parameter.grad is None for layer in layers for parameter in layer.module.parameters())


class Simple(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def test_gradients_of_later_layers_are_there_before_backward_reaches_the_first() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    order: list[str] = []

    class Watched(Simple):
        def forward(self, input: Tensor) -> Tensor:
            y = super().forward(input)
            if y.requires_grad:
                y.register_hook(lambda grad: order.append("first layer begins"))
            return y

    chain = Chain(made([Watched, Simple, Simple], x, ()))
    y, saved = chain.forward(x, DRAW)
    chain.backward(saved, torch.ones_like(y), DRAW, lambda layer, grads: order.append(f"layer {layer.spec.index}"))
    assert order == ["layer 2", "layer 1", "first layer begins", "layer 0"]


def test_an_error_in_what_takes_the_gradients_comes_out() -> None:
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    chain = Chain(made([Simple, Simple], x, ()))

    def fails(layer: Layer, grads: list[Tensor]) -> None:
        raise ZeroDivisionError

    y, saved = chain.forward(x, DRAW)
    with pytest.raises(ZeroDivisionError):
        chain.backward(saved, torch.ones_like(y), DRAW, fails)
