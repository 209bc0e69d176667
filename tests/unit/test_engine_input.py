"""What cannot be trained is refused before anybody waits, in words that say what to change."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from elaunch.errors import ElaunchError, LinkLost, StateError, StepInterrupted
from elaunch.plan import Plan, PlanError, symmetric
from elaunch.workers.comm.group import Group
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.layers.zero import ZeroOptimizer
from tests.unit.comm_crew import crew, outcomes
from tests.unit.engine_crew import WIDTH, WORDS, Block, Head, Sentences, Words, loss, model, train


class Plain(nn.Module):
    """Whatever it is given goes through one linear layer."""

    def __init__(self, features: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(features, WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class Whole(Words):
    placements: ClassVar = {}


class Summed(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).sum()


class Pair(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class InPlace(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.mul_(2))


class Counts(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.seen.add_(1)
        return super().forward(x)


class Other(Plain):
    """What it returns is not what it returned on the meta device."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).to(x.dtype if x.is_meta else torch.float16)


class Misplaced(Plain):
    placements: ClassVar = {"weight": Shard(0)}


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed


class Odd(nn.Module):
    """Three features cannot be cut into two."""

    placements: ClassVar = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3)
        self.down = nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x))
        return y


def engine(layers: list[Any], plan: Plan | None = None, group: Group | None = None, **settings: Any) -> Engine:
    plan = plan or symmetric(["a/0#0"], len(layers), 8, 2)
    settings = {"dataset": Sentences(), **settings}
    loss_fn = settings.pop("loss", loss)
    return Engine(layers, loss_fn, torch.optim.AdamW, plan, EngineSettings(**settings), group=group)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (lambda: Plain(WIDTH + 1), r"layer 1 \(Plain\) cannot be run: layer 0 \(Words\) gives rows of shape \(5, 16\)"),
        (Summed, r"layer 1 \(Summed\) returns shape \(\) for 2 rows; the first dimension must be 2"),
        (Pair, r"layer 1 \(Pair\) returns tuple; a layer must return one tensor"),
        (InPlace, r"layer 1 \(InPlace\) changes its input in place"),
        (Misplaced, r"layer 1 \(Misplaced\) places 'weight', which is none of its parameters: linear.weight, linear.b"),
        (Norm, r"layer 1 \(Norm\) has BatchNorm1d, whose statistics would depend .*; use LayerNorm"),
        (lambda: "a layer", r"layers\[1\] must be a function that makes an nn.Module; it returned str"),
    ],
)
def test_a_layer_that_does_not_fit_is_named(layer: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        engine([Words, layer, Head])


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Counts, r"layer 1 \(Counts\) changes seen in forward"),
        (
            Other,
            r"layer 1 \(Other\) returned \(2, 5, 16\) torch.float16, and \(2, 5, 16\) torch.float32 when it was tried",
        ),
    ],
)
def test_a_layer_that_behaves_otherwise_when_it_runs_is_named(layer: Any, message: str) -> None:
    made = engine([Words, layer, Head])
    with pytest.raises(StateError, match=message):
        made.train_step()
    made.close()


def test_a_dimension_that_cannot_be_cut_is_named() -> None:
    with pytest.raises(StateError, match=r"layer 1 \(Odd\): up.weight \(3, 16\) .* into 2 along dimension 0"):
        train(symmetric(["a", "b"], 3, 8, 2, tp=2), 1, layers=[Words, Odd, Head])


def test_widths_that_tuples_may_get_are_tried_when_the_job_begins() -> None:
    made = engine([Words, Odd])
    made.builder.check_widths([1, 3])
    with pytest.raises(StateError, match=r"--tp=2: layer 1 \(Odd\): up.weight \(3, 16\) cannot be cut into 2"):
        made.builder.check_widths([3, 2])
    with pytest.raises(StateError, match=r"--tp=2: no layer says how it is cut, .* attribute `placements`"):
        engine([Whole, Plain]).builder.check_widths([2])


def test_the_number_of_layers_must_be_that_of_the_plan() -> None:
    with pytest.raises(StateError, match="the plan is for 4 layers, and 3 are given"):
        engine(model(3), symmetric(["a/0#0"], 4, 8, 2))


@pytest.mark.parametrize("batch", [9, 10, 11])
def test_a_shorter_last_micro_batch_counts_by_its_samples(batch: int) -> None:
    """Without random numbers and at rate 1, parameters after a step show the gradient of the mean over the batch."""
    layers = [lambda: torch.nn.Embedding(WORDS, WIDTH), Head]
    settings: Any = {"layers": layers, "optimizer": lambda named: torch.optim.SGD(named, lr=1.0)}
    expected, reference = train(symmetric(["a"], 2, batch, batch), 2, **settings)
    for plan in (symmetric(["a", "b"], 2, batch, 4, dp=2), symmetric(["a", "b"], 2, batch, 4, pp=2)):
        reports, parameters = train(plan, 2, **settings)
        assert [one.loss for one in reports] == pytest.approx([one.loss for one in expected], rel=1e-12)
        for name, value in reference.items():
            torch.testing.assert_close(parameters[name], value, rtol=1e-10, atol=1e-12)


def test_a_plan_for_other_workers_is_refused() -> None:
    with crew(2) as transports:
        group = Group(transports[0], 1, ["a/0#0", "a/1#0"])
        with pytest.raises(PlanError, match=r"a/1#0 must have a tile or be idle"):
            engine(model(3), group=group)


def test_a_loss_must_be_one_number() -> None:
    made = engine(model(3), loss=lambda y, target: y)
    with pytest.raises(StateError, match="loss_fn must return one number"):
        made.train_step()
    made.close()


@pytest.mark.parametrize("optimizer", [torch.optim.LBFGS, torch.optim.Adafactor])
def test_an_optimizer_that_is_not_elementwise_is_refused(optimizer: Any) -> None:
    with pytest.raises(StateError, match=f"{optimizer.__name__} does not update each element by itself"):
        Engine(
            model(3),
            loss,
            lambda named: optimizer([part for _, part in named]),
            symmetric(["a"], 3, 8, 2),
            EngineSettings(dataset=Sentences()),
        )


def test_workers_with_different_settings_say_so_before_anybody_trains() -> None:
    plan = symmetric(["a/0#0", "a/1#0"], 3, 8, 2, pp=2)
    with crew(2) as transports:

        def make(place: int) -> Engine:
            group = Group(transports[place], 1, plan.workers)
            return engine(model(3), plan, group=group, seed=place)

        for outcome in outcomes([lambda: make(0), lambda: make(1)]):
            assert isinstance(outcome, StateError)
            assert "a/0#0 and a/1#0 were given different settings: (0, 'bitwise', None) and (1, 'b" in str(outcome)


class Fails(Block):
    """Raises in the third micro-batch that it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 2

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            self.left -= 1
            if self.left < 0:
                raise ZeroDivisionError("the layer that breaks")
        return super().forward(x)


@pytest.mark.parametrize("where", [1, 3])
def test_a_layer_that_raises_wakes_all_others(where: int) -> None:
    layers = model(5)
    layers[where] = Fails
    plan = symmetric([f"a/{number}#0" for number in range(4)], 5, 16, 2, dp=2, pp=2)
    with crew(4) as transports:

        def work(place: int) -> None:
            group = Group(transports[place], 1, plan.workers)
            try:
                engine(layers, plan, group=group).train_step()
            except ZeroDivisionError:
                transports[place].close()  # as when the process ends
                raise
            except StepInterrupted:
                transports[place].close()
                raise

        found = outcomes([lambda place=place: work(place) for place in range(4)])  # type: ignore[misc]
    kinds = [type(error) for error in found]
    assert ZeroDivisionError in kinds
    assert set(kinds) <= {ZeroDivisionError, LinkLost}
    assert issubclass(StateError, ElaunchError)


def test_a_step_that_committed_is_known_even_if_the_new_values_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: object) -> None:
        raise LinkLost("b/0#0", "closed by the peer")

    made = engine(model(3))
    monkeypatch.setattr(ZeroOptimizer, "share", lost)
    with pytest.raises(LinkLost):
        made.train_step()
    assert made.step == 1
    assert made.report is not None
    assert made.report.step == 0
