"""The estimate of a worker's memory beside what torch's allocators count."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from elaunch.plan import Plan, symmetric
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import Profile
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.layers.timing import Stopwatch
from tests.devices import needs_gpu

pytestmark = pytest.mark.job

WIDTH, DEPTH = 128, 4


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Vectors, and the sums that are to be told of them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.sin(torch.arange(WIDTH) * (index + 1.0)).repeat(32, 1)
        return x, x.sum(-1, keepdim=True)


class Block(nn.Module):
    """(rows, 32, WIDTH) -> the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def loss_fn(y: Tensor, sums: Tensor) -> Tensor:
    return (y.sum(-1, keepdim=True) - sums).square().mean()


def made(plan: Plan, device: str, **settings: Any) -> tuple[Engine, Profile]:
    """An engine after a step, and the profile that a job would have of it."""
    chosen = EngineSettings(dataset=Rows(), device=device, snapshots=0, **settings)
    engine = Engine(
        [Block] * DEPTH,
        lambda y, sums: (y.sum(-1, keepdim=True) - sums).square().mean(),
        torch.optim.AdamW,
        plan,
        chosen,
    )
    watch = Stopwatch(torch.device(device), meter=True)
    engine.train_step(watch=watch)
    layers, _ = engine.builder.described()
    known = (
        dataclasses.replace(layer, forward_s_per_row=1.0, backward_s_per_row=2.0, activation_bytes_per_row=round(kept))
        for layer, kept in zip(layers, (watch.kept_bytes[index] for index in range(DEPTH)), strict=True)
    )
    return engine, Profile("test", tuple(known), 1, 1e9, 0.0)


@pytest.mark.parametrize("units", [2, 8])
@pytest.mark.parametrize("consistency", ["bitwise", "fast"])
def test_a_peak_is_within_a_twentieth_of_what_the_allocator_counts(units: int, consistency: str) -> None:
    plan = symmetric(["w0"], DEPTH, 2 * units, 2)
    gc.collect()  # what other tests have left is not to be freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced:
        engine, known = made(plan, "cpu", consistency=consistency)
        engine.train_step()
    now = peak = 0
    for one in sorted(traced.profiler.kineto_results.events(), key=lambda one: one.start_ns()):
        if one.name() == "[memory]":
            now += one.nbytes()
            peak = max(peak, now)
    assert estimate_step(plan, known).peak_bytes["w0"] == pytest.approx(peak, rel=0.05)


@needs_gpu
@pytest.mark.parametrize("units", [2, 8])
@pytest.mark.parametrize("consistency", ["bitwise", "fast"])
def test_a_peak_on_an_accelerator_is_within_a_twentieth_of_what_its_allocator_counts(
    units: int, consistency: str
) -> None:
    plan = symmetric(["w0"], DEPTH, 2 * units, 2)
    before = torch.cuda.memory_allocated()
    engine, known = made(plan, "cuda", consistency=consistency)
    torch.cuda.reset_peak_memory_stats()
    engine.train_step()
    # Matrix products keep a workspace of their own from the first one on, which no plan changes.
    workspace = torch.cuda.memory_allocated() - before - sum(engine.memory_bytes().values())
    peak = torch.cuda.max_memory_allocated() - before - max(0, workspace)
    assert estimate_step(plan, known).peak_bytes["w0"] == pytest.approx(peak, rel=0.05)
