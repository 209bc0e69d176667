"""What a worker keeps: its own layers, its share of the optimizer states, and what 1F1B has in flight."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elaunch.plan import Plan, symmetric
from elaunch.workers.comm.group import Group
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.meter import ActivationMeter
from tests.unit.comm_crew import crew, together
from tests.unit.engine_crew import Block, Sentences, loss, model

pytestmark = pytest.mark.job

BLOCK_BYTES = 4 * sum(parameter.numel() for parameter in Block().parameters())


def engines(plan: Plan, layers: list[Any] | None = None, steps: int = 1, **settings: Any) -> list[tuple[Engine, int]]:
    """Each worker's engine after some steps, and the most bytes of activations that it had."""
    with crew(len(plan.workers)) as transports:

        def work(place: int) -> tuple[Engine, int]:
            made = Engine(
                layers or model(plan.n_layers),
                loss,
                lambda named: torch.optim.AdamW(named, lr=0.01),
                plan,
                dataset=Sentences(),
                group=Group(transports[place], 1, plan.workers),
                **settings,
            )
            with ActivationMeter([p for layer in made.layers.values() for p in layer.module.parameters()]) as meter:
                for _ in range(steps):
                    made.train_step()
            assert meter.now_bytes == 0, "activations outlive their step"
            return made, meter.peak_bytes

        return together([lambda place=place: work(place) for place in range(len(transports))])  # type: ignore[misc]


def workers(count: int) -> list[str]:
    return [f"a/{number}#0" for number in range(count)]


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("zero", ["interleaved", "contiguous"])
def test_optimizer_states_and_masters_shrink_with_the_replicas(replicas: int, zero: Any) -> None:
    ((alone, _),) = engines(symmetric(workers(1), 4, 8, 2))
    made = engines(symmetric(workers(replicas), 4, 8, 2, dp=replicas, zero=zero))
    whole = alone.memory_bytes()
    for kind in ("masters", "optimizer"):
        parts = [engine.memory_bytes()[kind] for engine, _ in made]
        # AdamW keeps a number of steps for each part of a parameter; cuts are at multiples of 64 elements.
        assert max(parts) <= whole[kind] / replicas + 4096
        assert sum(parts) == pytest.approx(whole[kind], rel=0.05)
    assert all(engine.memory_bytes()["parameters"] == whole["parameters"] for engine, _ in made)


def test_a_worker_has_its_own_layers_only() -> None:
    made = engines(symmetric(workers(3), 5, 8, 2, pp=3))
    assert [sorted(layer for layer, _ in engine.layers) for engine, _ in made] == [[0, 1], [2, 3], [4]]


def test_tensor_parallelism_cuts_parameters_masters_and_states() -> None:
    layers = [model(3)[0], Block, Block, model(3)[2]]
    ((alone, _),) = engines(symmetric(workers(1), 4, 8, 2), layers)
    made = [engine.memory_bytes() for engine, _ in engines(symmetric(workers(2), 4, 8, 2, tp=2), layers)]
    whole = alone.memory_bytes()
    assert sum(one["optimizer"] for one in made) == pytest.approx(whole["optimizer"], rel=0.05)
    # Norms, biases of row-parallel layers and the head are whole on both.
    assert all(one["parameters"] < 0.7 * whole["parameters"] for one in made)


def test_the_stages_of_a_pipeline_keep_as_many_micro_batches_as_1f1b_has_in_flight() -> None:
    plan = symmetric(workers(4), 6, 16, 2, pp=4)
    of_one = [peak for _, peak in engines(symmetric(workers(4), 6, 2, 2, pp=4))]
    of_many = [peak for _, peak in engines(plan)]
    in_flight = [many / one for one, many in zip(of_one, of_many, strict=True)]
    assert in_flight == pytest.approx([4, 3, 2, 1], rel=0.02)


def test_recomputed_layers_keep_their_inputs_only() -> None:
    plan = symmetric(workers(2), 6, 16, 2, pp=2)
    kept = [peak for _, peak in engines(plan)]
    again = [peak for _, peak in engines(plan, recompute=True)]
    # At a time one layer of one micro-batch is there.
    assert again[0] < 0.3 * kept[0]
    assert again[1] < 0.7 * kept[1]
