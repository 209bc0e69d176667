"""The same training under any plan: bit by bit where no tensor is cut, up to rounding where one is."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from elaunch.plan import Pipeline, Plan, Stage, pipelines, stages, symmetric
from elaunch.workers.layers.change.held_state import StepReport
from tests.helpers import ROOT, scaled, soak
from tests.unit.engine_crew import train
from tests.unit.plan_strategies import valid_plans

pytestmark = pytest.mark.job

BFLOAT16_STEPS = scaled(3, 10)
W = [f"a/{number}#0" for number in range(8)]
LAYERS, BATCH, UNIT = 6, 16, 2
STEPS = scaled(4, 50)


def even(dp: int = 1, pp: int = 1, tp: int = 1, **settings: Any) -> Plan:
    return symmetric(W[: dp * pp * tp], LAYERS, BATCH, UNIT, dp=dp, pp=pp, tp=tp, **settings)


def parsed(*lines: str) -> Plan:
    return Plan.parse("\n".join([f"plan layers {LAYERS} batch {BATCH} micro-batch {UNIT} zero interleaved", *lines]))


WHOLE = {
    "two replicas": even(dp=2),
    "three replicas, of which two have three units": even(dp=3),
    "three stages": even(pp=3),
    "two replicas of two stages": even(dp=2, pp=2),
    "the same, optimizer states contiguous": even(dp=2, pp=2, zero="contiguous"),
    # Chameleon fig. 4, Oobleck
    "pipelines of three and of two stages": pipelines(
        LAYERS,
        BATCH,
        UNIT,
        [
            Pipeline(range(5), ((range(2), (W[0],)), (range(2, 4), (W[1],)), (range(4, 6), (W[2],)))),
            Pipeline(range(5, 8), ((range(3), (W[3],)), (range(3, 6), (W[4],)))),
        ],
    ),
    # ReCycle
    "micro-batches of a lost worker go to its peer": parsed(
        f"layers 0:3 samples 0:8/2 workers {W[0]}",
        f"layers 0:3 samples 8:12/2 workers {W[0]}",
        f"layers 0:3 samples 12:16/2 workers {W[1]}",
        f"layers 3:6 samples 0:8/2 workers {W[2]}",
        f"layers 3:6 samples 8:16/2 workers {W[3]}",
    ),
    # ElasWave 6.2
    "a layer on its way to the next stage": parsed(
        f"layers 0:4 samples 0:6/2 workers {W[0]}",
        f"layers 0:3 samples 6:16/2 workers {W[0]}",
        f"layers 4:6 samples 0:6/2 workers {W[1]}",
        f"layers 3:6 samples 6:16/2 workers {W[1]}",
    ),
    "stages of unequal length, forwards first": Plan.parse(
        f"""plan layers {LAYERS} batch {BATCH} micro-batch {UNIT} zero interleaved order forward
        costs 0 4*8 3
        layers 0:4 samples 0:8/2 workers {W[0]}
        layers 0:4 samples 8:16/2 workers {W[1]}
        layers 4:6 samples 0:16/2 workers {W[2]}"""
    ),
    "stages that alternate between two workers": parsed(
        f"layers 0:2 samples 0:16/2 workers {W[0]}",
        f"layers 2:3 samples 0:16/2 workers {W[1]}",
        f"layers 3:5 samples 0:16/2 workers {W[0]}",
        f"layers 5:6 samples 0:16/2 workers {W[1]}",
    ),
    "stages with one, two and four replicas": parsed(
        f"layers 0:1 samples 0:16/2 workers {W[0]}",
        f"layers 1:4 samples 0:8/2 workers {W[1]}",
        f"layers 1:4 samples 8:16/2 workers {W[2]}",
        *(f"layers 4:6 samples {4 * i}:{4 * i + 4}/2 workers {W[3 + i]}" for i in range(4)),
    ),
}

CUT = {
    # ElasWave fig. 3
    "a stage that lost one of three replicas": stages(
        LAYERS,
        BATCH,
        UNIT,
        [
            Stage(range(3), ((W[0],), (W[1],), (W[2],))),
            Stage(range(3, 6), ((W[3],), (W[4],), ())),
        ],
    ),
    # Suika fig. 3
    "a replica that gets three rows of four": stages(
        LAYERS,
        BATCH,
        UNIT,
        [
            Stage(range(3), ((W[0],), (W[1],)), (3, 1)),
            Stage(range(3, 6), ((W[2],),)),
        ],
    ),
    "tensor parallelism of two": even(tp=2),
    "two replicas of two stages of two": even(dp=2, pp=2, tp=2),
    "tensor parallelism of four beside none": parsed(
        f"layers 0:6 samples 0:8/2 workers {W[0]},{W[1]},{W[2]},{W[3]}",
        f"layers 0:2 samples 8:16/2 workers {W[4]}",
        f"layers 2:6 samples 8:16/2 workers {W[1]}",
    ),
}

WIDE = ("two replicas of two stages of two", "tensor parallelism of four beside none")
"""Those that take seconds a run."""


@pytest.fixture(scope="module")
def gpt() -> Iterator[dict[str, Any]]:
    """The example's model, small, and its data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples"))
        example = importlib.import_module("train_gpt_hybrid")
        args = example.parse(["--layers=4", "--width=16", "--heads=4", "--context=12", "--dropout=0.2"])
        yield {
            "layers": example.gpt(args),
            "loss_fn": example.loss_fn,
            "optimizer": partial(example.adamw, lr=5e-3),
            "scheduler": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=STEPS),
            "dataset": example.Sources(20_000, args.context),
            "clip_norm": 1.0,
        }


Result = tuple[list[float], dict[str, Tensor]]
_alone: dict[torch.dtype, Result] = {}


def alone(gpt: dict[str, Any], dtype: torch.dtype) -> Result:
    """The undisturbed run of a single worker."""
    if dtype not in _alone:
        _alone[dtype] = run(gpt, even(), dtype)
    return _alone[dtype]


def run(gpt: dict[str, Any], plan: Plan, dtype: torch.dtype, steps: int = STEPS, **settings: Any) -> Result:
    reports, parameters = train(plan, steps, dtype=dtype, **gpt, **settings)
    return [report.loss for report in reports], parameters


@pytest.mark.parametrize("plan", WHOLE.values(), ids=WHOLE)
def test_without_cut_tensors_all_losses_and_parameters_are_bitwise_the_same(gpt: dict[str, Any], plan: Plan) -> None:
    losses, parameters = run(gpt, plan, torch.float32)
    expected, reference = alone(gpt, torch.float32)
    assert losses == expected
    assert all(torch.equal(parameters[name], reference[name]) for name in reference)


@pytest.mark.parametrize(("dp", "pp"), [(3, 1), (1, 3), (2, 2)])
def test_nor_does_it_matter_who_does_a_shorter_last_micro_batch(gpt: dict[str, Any], dp: int, pp: int) -> None:
    plan = symmetric(W[: dp * pp], LAYERS, 15, 4, dp=dp, pp=pp)
    lone = symmetric(W[:1], LAYERS, 15, 4)
    losses, parameters = run(gpt, plan, torch.float32, 4)
    expected, reference = run(gpt, lone, torch.float32, 4)
    assert losses == expected
    assert all(torch.equal(parameters[name], reference[name]) for name in reference)


def test_recomputed_activations_change_nothing(gpt: dict[str, Any]) -> None:
    assert run(gpt, even(dp=2, pp=2), torch.float32, recompute=True)[0] == alone(gpt, torch.float32)[0]


# Threads that wait for each other's sums take long to change places, so the slowest plans do fewer steps in float64.
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("cut", "dtype", "within", "steps"),
    [
        *((cut, torch.float64, 1e-10, scaled(STEPS, 20)) for cut in CUT),
        *((soak if cut in WIDE else pytest.param)(cut, torch.float32, 1e-3, STEPS) for cut in CUT),
    ],
)
def test_with_cut_tensors_losses_differ_by_rounding_only(
    gpt: dict[str, Any], cut: str, dtype: torch.dtype, within: float, steps: int
) -> None:
    losses, _ = run(gpt, CUT[cut], dtype, steps)
    expected, _ = alone(gpt, dtype)
    assert losses == pytest.approx(expected[:steps], rel=within, abs=0)
    assert losses[-1] < 0.95 * losses[0]


def test_the_fast_order_differs_by_rounding_only(gpt: dict[str, Any]) -> None:
    losses, _ = run(gpt, even(dp=2, pp=2), torch.float64, consistency="fast")
    assert losses == pytest.approx(alone(gpt, torch.float64)[0], rel=1e-10, abs=0)


def test_bfloat16_with_master_weights_is_bitwise_the_same_too(gpt: dict[str, Any]) -> None:
    reference, _ = train(even(), BFLOAT16_STEPS, dtype=torch.bfloat16, **gpt)
    assert train(even(dp=2, pp=2), BFLOAT16_STEPS, dtype=torch.bfloat16, **gpt)[0] == reference


DESCENT: dict[str, Any] = {"optimizer": lambda named: torch.optim.SGD(named, lr=1.0), "clip_norm": 1e9}


@cache
def descended_alone(*sizes: int) -> tuple[list[StepReport], dict[str, Tensor]]:
    return train(symmetric(["alone"], *sizes), 2, **DESCENT)


@pytest.mark.timeout(300)
@settings(max_examples=scaled(10, 200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(valid_plans(max_layers=4, max_units=4, max_workers=5, tp=(1, 2)))
def test_no_random_plan_deadlocks_and_all_give_the_same_gradients(plan: Plan) -> None:
    """Plain gradient descent with rate 1: the parameters after a step show the gradient of the whole batch."""
    reports, parameters = train(plan, 2, **DESCENT)
    expected, reference = descended_alone(plan.n_layers, plan.global_batch_size, plan.micro_batch_size)
    assert [one.loss for one in reports] == pytest.approx([one.loss for one in expected], rel=1e-12)
    assert reports[0].gradient_norm == pytest.approx(expected[0].gradient_norm, rel=1e-12)
    for name, value in reference.items():
        torch.testing.assert_close(parameters[name], value, rtol=1e-10, atol=1e-12)
