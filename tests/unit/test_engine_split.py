"""A backward in two parts gives what a whole one gives, bit by bit; where it would not, it is not split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaunch.plan import Plan, symmetric
from elaunch.workers.layers.chain.chain import Chain
from elaunch.workers.layers.chain.split import Splitter
from elaunch.workers.layers.model import Draw, Layer, build, describe
from elaunch.workers.layers.tensor_parallel import TPRank
from elaunch.workers.layers.timing import Stopwatch
from tests.unit.engine_crew import train
from tests.unit.test_engine_plans import WHOLE, gpt  # noqa: F401

ROWS, WIDTH = 4, 6
DRAW = Draw(seed=3, step=0, rows_by_unit=((0, range(ROWS), 0),), micro_batch_size=ROWS)


class Block(nn.Module):
    """A parameter of each kind: used once, used twice, never used, not trained, and one that only shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        self.unused = nn.Parameter(torch.ones(2))
        self.fixed = nn.Parameter(torch.full((WIDTH,), 0.1), requires_grad=False)
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.2))
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(torch.tanh(self.linear(self.norm(x)) * self.scale)) * self.scale + x + self.fixed
        return y + torch.sin(self.shift)


class Viewed(Block):
    """Its output is a view."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(-1).squeeze(-1)


class Hooked(Block):
    """A script's own hook, which would scale twice if it ran in both parts."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if y.requires_grad:
            y.register_hook(lambda grad: 3 * grad)
        return y


class Apart(Block):
    """A parameter whose way to the output does not meet that of the input but at the end, as the input is cut."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Product(torch.autograd.Function):
    """Computes both of its gradients whichever is wanted."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.T, x.T @ grads[0]


class Custom(Block):
    """A script's own function of a parameter."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Product.apply(x, self.linear.weight)  # type: ignore[no-untyped-call]
        return y + x


class Doubled(nn.Module):
    """Without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def made(factories: Sequence[type[nn.Module]], recompute: Sequence[int] = ()) -> list[Layer]:
    x = torch.zeros(1, WIDTH, dtype=torch.float64)
    specs = describe(factories, x, ROWS, torch.float64)
    device = torch.device("cpu")
    return [
        build(spec, factory, 3, device, torch.float64, TPRank(), spec.index in recompute)
        for spec, factory in zip(specs, factories, strict=True)
    ]


Grads = dict[int, list[Tensor]]


def both_ways(chain: Chain, seed: int, split: bool, watch: Stopwatch | None = None) -> tuple[Tensor | None, Grads, int]:
    """Gradient of the input, those of the layers, and how many of these were left for later."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator) for _ in range(2))
    grads: Grads = {}

    def done(layer: Layer, given: list[Tensor]) -> None:
        assert layer.spec.index not in grads
        grads[layer.spec.index] = given

    _, saved = chain.forward(x, DRAW, watch)
    if not split:
        return chain.backward(saved, dy, DRAW, done), grads, 0
    dx, left = chain.input_gradient(saved, dy, DRAW, done)
    at_once = len(grads)
    for one in left:
        for layer, given in one.layers():
            done(layer, given)
    return dx, grads, len(grads) - at_once


@pytest.mark.parametrize(
    ("factories", "recompute", "later"),
    [
        ([Block], (), 1),
        ([Block, Block, Viewed], (), 3),
        ([Block, Doubled, Block], (), 3),
        ([Block, Block, Block], (1,), 2),
        ([Doubled], (), 0),
        ([Hooked], (), 0),
        ([Custom], (), 0),
        ([Block], (0,), 0),
    ],
)
def test_both_parts_together_give_the_same_bits(
    factories: Sequence[type[nn.Module]], recompute: Sequence[int], later: int
) -> None:
    chain = Chain(made(factories, recompute))
    # The first time both are done and compared.
    for seed in range(3):
        expected_dx, expected, _ = both_ways(chain, seed, split=False)
        dx, grads, found = both_ways(chain, seed, split=True)
        assert expected_dx is not None
        assert dx is not None
        assert torch.equal(dx, expected_dx)
        assert grads.keys() == expected.keys()
        for index, some in expected.items():
            assert all(map(torch.equal, grads[index], some))
        assert found == (later if seed else 0)


def test_a_layer_that_cuts_its_input_off_is_not_split() -> None:
    chain = Chain(made([Block, Apart]))
    for seed in range(2):
        expected_dx, expected, _ = both_ways(chain, seed, split=False)
        dx, grads, later = both_ways(chain, seed, split=True)
        assert later == 0
        assert torch.equal(dx, expected_dx)  # type: ignore[arg-type]
        assert all(torch.equal(*pair) for index in expected for pair in zip(grads[index], expected[index], strict=True))


def test_what_differs_by_rounding_is_split_only_if_it_may() -> None:
    for exact in (True, False):
        splitter = Splitter(made([Block]), exact)
        one = torch.tensor([1.0, 2.0])
        assert splitter._alike(one, one * (1 + 1e-6)) is not exact
        assert not splitter._alike(one, one * 1.5)
        assert splitter._alike(one * torch.nan, one * torch.nan)


def test_both_parts_are_measured() -> None:
    chain = Chain(made([Block, Block]))
    both_ways(chain, 0, split=True)
    watch = Stopwatch(torch.device("cpu"))
    both_ways(chain, 1, split=True, watch=watch)
    weights = watch.weights()
    assert weights.keys() == {0, 1}
    assert all(0 < part < 1 for part, _ in weights.values())
    # The gradients of six outputs or so, of which each is a row's features.
    assert all(WIDTH * 8 <= n_bytes <= 10 * WIDTH * 8 for _, n_bytes in weights.values())
    (turn, _) = watch.turns()
    span = watch._spans[0]
    assert turn.backward_s == pytest.approx(sum(span.ends[kind] - span.begins[kind] for kind in ("B", "W")))
    hooked, refused = Chain(made([Hooked])), Stopwatch(torch.device("cpu"))
    both_ways(hooked, 0, split=True)
    both_ways(hooked, 1, split=True, watch=refused)
    assert refused.weights()[0][0] == pytest.approx(0, abs=0.2), "all of it was in the first part"


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many backwards were split so far."""
    count = [0]
    real = Splitter.input_gradient

    def counted(self: Splitter, *given: Any) -> Tensor:
        count[0] += 1
        return real(self, *given)

    monkeypatch.setattr(Splitter, "input_gradient", counted)
    return lambda: count[0]


DEFERRED = {
    "two replicas of two stages": 2,
    "micro-batches of a lost worker go to its peer": 9,
    "stages of unequal length, forwards first": 3,
    "stages that alternate between two workers": 1,
}


@pytest.mark.job
@pytest.mark.parametrize("name", DEFERRED)
def test_a_job_that_defers_weight_gradients_gets_the_same_bits(
    name: str,
    gpt: dict[str, Any],  # noqa: F811
    splits: Callable[[], int],
) -> None:
    plan = WHOLE[name]
    reference, expected = train(plan, 3, dtype=torch.float32, **gpt)
    assert not splits()
    reports, parameters = train(replace(plan, deferred=DEFERRED[name]), 3, dtype=torch.float32, **gpt)
    assert reports == reference
    assert all(torch.equal(parameters[key], value) for key, value in expected.items())
    # Of each tile that does not begin the model, each micro-batch of each step.
    assert splits() >= 3 * sum(len(tile.micro_batches) for tile in plan.tiles if tile.layers.start)


@pytest.mark.job
def test_tensor_parallel_groups_split_too(gpt: dict[str, Any], splits: Callable[[], int]) -> None:  # noqa: F811
    plan: Plan = symmetric([f"a/{number}#0" for number in range(4)], 6, 8, 2, pp=2, tp=2)
    reference, expected = train(plan, 2, dtype=torch.float64, **gpt)
    reports, parameters = train(replace(plan, deferred=2), 2, dtype=torch.float64, **gpt)
    assert reports == reference
    assert all(torch.equal(parameters[key], value) for key, value in expected.items())
    assert splits() == 2 * 2 * 4, "two members, two steps, four micro-batches, of which the first is the trial"
