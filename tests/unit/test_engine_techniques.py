"""What scripts do with gradients, where the model is in layers: the column `elaunch.hybrid()` of docs/running.md.

What works trains as in plain torch, by one worker and by a pipeline of two; all else is refused with the cure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from elaunch.errors import StateError
from elaunch.plan import Plan, symmetric
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings
from tests.unit.engine_crew import train
from tests.unit.test_techniques import POINTS, Samples, distributed

STEPS, BATCH, MICRO = 4, 8, 4
W = ["n0/0#0", "n0/1#0"]
Named = Iterable[tuple[str, Tensor]]


class Inward(nn.Module):
    """A class of its own: torch compiles no forward of its own modules in place."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 6), dropout

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        return nn.functional.dropout(y, self.dropout) if self.dropout else y


def inward() -> nn.Module:
    return Inward()


def dropping() -> nn.Module:
    return Inward(0.2)


def outward() -> nn.Module:
    return nn.Linear(6, 1)


def compiled() -> nn.Module:
    layer = inward()
    layer.compile(backend="aot_eager")
    return layer


def compiled_beside() -> nn.Module:
    made: Any = torch.compile(inward(), backend="aot_eager")
    assert isinstance(made, nn.Module)
    return made


class Checkpointed(nn.Module):
    """A layer whose activations are computed again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = inward(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant and not x.requires_grad:
            x = x.detach().requires_grad_()  # when it is tried on the meta device
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return y


class Forces(nn.Module):
    """A layer with the gradient of its own output in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            y: Tensor = self.linear(torch.tanh(x))
            (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.square().sum(1, keepdim=True)


def loss(y: Tensor, values: Tensor) -> Tensor:
    return (y - values).square().mean()


def penalized(y: Tensor, values: Tensor) -> Tensor:
    y = y if y.requires_grad else y.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(y, values), y, create_graph=True)
    return loss(y, values) + gradient.square().sum()


def sgd(named: Named) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, momentum=0.9)


def in_groups(named: Named) -> torch.optim.Optimizer:
    named = list(named)
    biases = [pair for pair in named if ".bias[" in pair[0]]
    weights = [pair for pair in named if ".weight[" in pair[0]]
    groups = [{"params": some, "lr": lr} for some, lr in ((biases, 0.2), (weights, 0.05)) if some]
    return torch.optim.SGD(groups)


def rates(name: str) -> float:
    return 0.2 if name.endswith("bias") else 0.05


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(
    ("layers", "settings"),
    [
        pytest.param([inward, outward], {"clip_norm": 0.5}, id="clip_norm"),
        pytest.param([inward, outward], {"optimizer": in_groups}, id="groups by name"),
        pytest.param([compiled, outward], {}, id="torch.compile in place"),
        pytest.param([compiled_beside, outward], {}, id="torch.compile"),
        pytest.param([partial(Checkpointed, False), outward], {}, id="checkpoint"),
        pytest.param([partial(Checkpointed, True), outward], {}, id="reentrant checkpoint"),
        pytest.param([inward, outward], {"recompute": True}, id="recompute"),
        pytest.param([inward, Forces], {}, id="create_graph in a layer"),
        pytest.param([inward, outward], {"loss_fn": penalized}, id="create_graph in the loss"),
    ],
)
def test_a_technique_trains_as_in_plain_torch(
    layers: list[Callable[[], nn.Module]], settings: dict[str, Any], stages: int
) -> None:
    given = {"dataset": Samples(), "shuffle": False, "layers": layers, "loss_fn": loss, "optimizer": sgd, **settings}
    plan = symmetric(W[:stages], 2, BATCH, MICRO, pp=stages)
    _, first = train(plan, 0, **given)
    reports, found = train(plan, STEPS, **given)

    twin = nn.Sequential(*(make() for make in layers)).double()
    twin.load_state_dict(first)
    grouped, clip = given["optimizer"] is in_groups, settings.get("clip_norm")
    if grouped:
        optimizer = torch.optim.SGD([{"params": [one], "lr": rates(name)} for name, one in twin.named_parameters()])
    else:
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    samples, norms = Samples(), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for start in range(step * BATCH, (step + 1) * BATCH, MICRO):
            points, values = zip(*(samples[index % len(POINTS)] for index in range(start, start + MICRO)))
            (given["loss_fn"](twin(torch.stack(points)), torch.stack(values)) / 2).backward()
        if clip is not None:
            norms.append(nn.utils.clip_grad_norm_(twin.parameters(), clip).item())
        optimizer.step()
    for name, expected in twin.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-10, atol=1e-12)
        assert not torch.equal(first[name], expected), "it has been trained"
    if clip is not None:
        assert max(norms) > clip
        assert [report.gradient_norm for report in reports] == pytest.approx(norms)


class Placed(nn.Sequential):
    """A layer that says how it is cut."""

    placements: ClassVar = {"0.weight": Shard(0), "0.bias": Shard(0)}


def placed() -> nn.Module:
    made: Any = torch.compile(Placed(nn.Linear(4, 6)), backend="aot_eager")
    assert isinstance(made, nn.Module)
    return made


def sparse() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Embedding(3, 2, sparse=True))


@pytest.mark.parametrize(
    ("layer", "settings", "message"),
    [
        pytest.param(
            inward,
            {"optimizer": lambda named: [torch.optim.SGD([one], lr=0.1) for one in named]},
            "one torch optimizer for all .* pairs .*, not a list: sort the pairs by name into groups",
            id="several optimizers",
        ),
        pytest.param(inward, {"optimizer": torch.optim.LBFGS}, "LBFGS does not update each element .* use", id="LBFGS"),
        pytest.param(sparse, {}, r"1 is Embedding with sparse=True.*sparse=False", id="sparse embeddings"),
        pytest.param(partial(distributed, "FSDP"), {}, r"layer 0 .* is in FSDP.*the module itself", id="FSDP"),
        pytest.param(
            partial(distributed, "DistributedDataParallel"),
            {},
            r"layer 0 .* is in DistributedDataParallel.*give the engine the module itself",
            id="DistributedDataParallel",
        ),
        pytest.param(
            inward, {"scaler": torch.amp.GradScaler("cpu")}, r"no GradScaler: use dtype=torch.bfloat16", id="GradScaler"
        ),
        pytest.param(
            placed, {}, r"places '0.weight', which is none .*compile it in place, by layer.compile\(\)", id="compile"
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_cure_when_the_engine_is_made(
    layer: Callable[[], nn.Module], settings: dict[str, Any], message: str
) -> None:
    settings = {"dataset": Samples(), "dtype": torch.float64, **settings}
    optimizer = settings.pop("optimizer", sgd)
    with pytest.raises(StateError, match=message):
        Engine([layer, outward], loss, optimizer, symmetric(W[:1], 2, BATCH, MICRO), EngineSettings.of(**settings))


@pytest.mark.parametrize(
    ("samples", "layer", "n_compiled"),
    [
        ("0:8/4", inward, 2),
        ("0:8/4", dropping, 2),
        ("0:4/2 4:8/4", inward, 3),
        ("0:4/2 4:8/4", dropping, 1),  # the rows of a cut micro-batch are drawn one operation after the other
    ],
)
def test_a_compiled_layer_runs_compiled_unless_a_plan_cuts_what_it_draws(
    samples: str, layer: Callable[[], nn.Module], n_compiled: int
) -> None:
    runs = []

    def backend(module: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            runs.append(len(args[-1]))
            return module(*args)

        return run

    def made() -> nn.Module:
        found = layer()
        found.compile(backend=backend)
        return found

    torch._dynamo.reset()
    plan = Plan.parse(
        f"plan layers 2 batch 8 micro-batch 4 zero interleaved\nlayers 0:2 samples {samples} workers {W[0]}"
    )
    settings = EngineSettings(dataset=Samples(), shuffle=False, dtype=torch.float64)
    trained, plain = (Engine([make, outward], loss, sgd, plan, settings) for make in (made, layer))
    for step in range(2):
        assert trained.train_step() == plain.train_step()
        assert len(runs) == n_compiled * (step + 1)
