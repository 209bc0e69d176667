"""What training scripts do with gradients, under `elaunch.init()`: docs/running.md has the table.

Each technique trains a model in steps of two micro-batches, once as a job and once in plain torch, which must agree.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from elaunch.errors import StateError
from elaunch.workers import refusals
from elaunch.workers.agent_client import StaticClient
from elaunch.workers.data_parallel.gradients import DataParallel
from elaunch.workers.data_parallel.job import Job

STEPS, BATCH, MICRO = 4, 8, 4
POINTS = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(16, 4)
Backward = Callable[[nn.Module, torch.Tensor, torch.Tensor], None]
NOTHING = contextlib.nullcontext


class Samples(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of a function."""

    def __len__(self) -> int:
        return len(POINTS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return POINTS[index], POINTS[index].sin().sum().reshape(1)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    made = Job(StaticClient())
    yield made
    made.close()


def batches(job: Job, steps: int = STEPS) -> Iterator[Any]:
    return job.batches(Samples(), global_batch_size=BATCH, micro_batch_size=MICRO, steps=steps, shuffle=False)


def plain_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """The same micro-batches without a job, and whether each is the last of its step."""
    samples = Samples()
    for start in range(0, STEPS * BATCH, MICRO):
        points, values = zip(*(samples[index % len(samples)] for index in range(start, start + MICRO)))
        yield torch.stack(points), torch.stack(values), (start + MICRO) % BATCH == 0


def squares(model: nn.Module, points: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(points) - values).square().mean()
    return loss


def simple(model: nn.Module, points: torch.Tensor, values: torch.Tensor) -> None:
    squares(model, points, values).backward()


def penalty_of_inputs(model: nn.Module, points: torch.Tensor, values: torch.Tensor) -> None:
    points = points.clone().requires_grad_()
    out = model(points)
    (gradient,) = torch.autograd.grad(out.sum(), points, create_graph=True)
    ((out - values).square().mean() + gradient.square().sum(1).mean()).backward()


def penalty_of_parameters(model: nn.Module, points: torch.Tensor, values: torch.Tensor) -> None:
    loss = squares(model, points, values)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + 0.01 * sum(gradient.square().sum() for gradient in gradients)).backward()


def twice(model: nn.Module, points: torch.Tensor, values: torch.Tensor) -> None:
    with model.no_sync() if isinstance(model, DataParallel) else NOTHING():
        (squares(model, points, values) / 2).backward()
    (squares(model, points, values) / 2).backward()


class Checkpointed(nn.Module):
    """A model whose activations are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = checkpoint(self.layers[:2], points, use_reentrant=False)
        out: torch.Tensor = self.layers[2](hidden)
        return out


def compiled() -> nn.Module:
    made: Any = torch.compile(net(), backend="aot_eager")
    assert isinstance(made, nn.Module)
    return made


@pytest.mark.parametrize(
    ("make", "backward", "clip"),
    [
        pytest.param(net, simple, 0.5, id="clip_grad_norm_"),
        pytest.param(net, penalty_of_inputs, None, id="a penalty on gradients of the inputs"),
        pytest.param(net, penalty_of_parameters, None, id="a penalty on gradients of the parameters"),
        pytest.param(net, twice, None, id="no_sync"),
        pytest.param(Checkpointed, simple, None, id="activation checkpointing"),
        pytest.param(compiled, simple, None, id="torch.compile"),
    ],
)
def test_a_technique_trains_as_in_plain_torch(
    job: Job, make: Callable[[], nn.Module], backward: Backward, clip: float | None
) -> None:
    twin, norms = make(), []
    first, second = [list(twin.parameters())[part] for part in (slice(2), slice(2, None))]
    optimizers = [torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(second)]
    for points, values, is_last in plain_batches():
        for parameter in twin.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad * 2
        backward(twin, points, values)
        for parameter in twin.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2
        if is_last:
            if clip is not None:
                norms.append(nn.utils.clip_grad_norm_(twin.parameters(), clip).item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    model, found = job.wrap(make()), []
    first, second = [list(model.parameters())[part] for part in (slice(2), slice(2, None))]
    one, other = torch.optim.SGD(first, lr=0.1, momentum=0.9), torch.optim.AdamW(second)
    job.register(model=model, one=one, other=other)
    for points, values in batches(job):
        backward(model, points, values)
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            if job.last_micro_batch:
                found.append(norm.item())
        one.step()
        other.step()
        one.zero_grad()
        other.zero_grad()
    assert found == pytest.approx(norms)
    if clip is not None:
        assert max(norms) > clip
    for own, expected in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-14)


def test_gradients_can_be_seen_in_the_last_micro_batch_until_the_next_step_begins(job: Job) -> None:
    model = job.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.register(model=model, optimizer=optimizer)
    seen = []
    for points, values in batches(job, 2):
        simple(model, points, values)
        before = [parameter.grad is not None for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen.append((job.last_micro_batch, set(before), {p.grad is not None for p in model.parameters()}))
    assert seen == [(False, {False}, {False}), (True, {True}, {True})] * 2


def scaled(job: Job, infinite: int | None = None, register: bool = True, steps: int = 6) -> list[float]:
    """Trains with a scaler; returns its scale after each step."""
    model = job.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    job.register(model=model, optimizer=optimizer, **({"scaler": scaler} if register else {}))
    scales = []
    for points, values in batches(job, steps):
        before = copy.deepcopy(list(model.parameters()))
        step = job.step
        loss = squares(model, points, values)
        # In the micro-batch that is not the last: its infinity reaches the sum.
        scaler.scale(loss * float("inf") if step == infinite and not job.last_micro_batch else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        changed = any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        assert changed == (job.last_micro_batch and step != infinite)
        if job.last_micro_batch:
            assert job.step == step + 1, "a step that the scaler skips commits, too"
            scales.append(scaler.get_scale())
    return scales


def test_a_scaler_acts_once_a_step(job: Job) -> None:
    assert scaled(job) == [1024.0, 2048.0, 2048.0, 4096.0, 4096.0, 8192.0]


def test_a_step_that_a_scaler_skips_commits_without_an_update(job: Job) -> None:
    assert scaled(job, infinite=2) == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0, 2048.0]


def test_a_step_that_is_dropped_leaves_the_scale_as_it_was(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    model = job.wrap(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    job.register(model=model, optimizer=optimizer, scaler=scaler)
    scales: list[tuple[int, float]] = []
    for points, values in batches(job, 2):
        if not scales:
            monkeypatch.setattr(job, "_resolve", lambda: False)
        scaler.scale(squares(model, points, values)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if job.last_micro_batch:
            scales.append((job.step, scaler.get_scale()))
            monkeypatch.undo()
            if len(scales) == 1:
                job._in_flight.committed = False  # as the agreement would say
    assert scales == [(0, 1024.0), (1, 2048.0), (2, 4096.0)]


def test_a_registered_scaler_can_be_copied_and_saved(job: Job) -> None:
    scaled(job)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    assert copy.deepcopy(scaler).state_dict() == scaler.state_dict()
    assert pickle.loads(pickle.dumps(scaler)).get_scale() == 2.0


def test_a_scaler_that_is_not_registered_is_refused_where_it_would_act(job: Job) -> None:
    with pytest.raises(StateError, match=r"GradScaler is not registered.*scaler=scaler"):
        scaled(job, register=False)


def test_a_scaler_of_another_model_is_left_alone(job: Job) -> None:
    scaled(job, steps=1)
    other = nn.Linear(1, 1)
    optimizer, scaler = torch.optim.SGD(other.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(other(torch.ones(1)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_an_optimizer_that_is_not_registered_is_refused_at_its_first_step(job: Job) -> None:
    model = job.wrap(net())
    optimizer, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())
    job.register(model=model, optimizer=optimizer)
    for points, values in batches(job):
        simple(model, points, values)
        with pytest.raises(StateError, match=r"this Adam trains the job's model and is not registered.*register"):
            other.step()
        break
    free = nn.Linear(1, 1)
    free(torch.ones(1)).sum().backward()
    torch.optim.Adam(free.parameters()).step()
    job.close()
    other.step()


def test_closures_are_refused_with_the_cure(job: Job) -> None:
    model = net()
    with pytest.raises(StateError, match=r"LBFGS cannot be used: .* without a closure"):
        job.register(model=model, optimizer=torch.optim.LBFGS(model.parameters()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.register(model=model, optimizer=optimizer)
    with pytest.raises(StateError, match=r"step\(closure\) cannot be used"):
        optimizer.step(lambda: 0.0)


def test_sparse_embeddings_are_refused_where_they_are_wrapped(job: Job) -> None:
    with pytest.raises(StateError, match=r"1 is EmbeddingBag with sparse=True.*sparse=False"):
        job.wrap(nn.Sequential(nn.Linear(2, 2), nn.EmbeddingBag(3, 2, sparse=True)))


class _Wrapper(nn.Module):
    """A class of torch.distributed.fsdp, as far as its name says."""


_Wrapper.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"


def distributed(kind: str) -> nn.Module:
    if kind == "FSDP":
        return _Wrapper()
    made = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(made)
    return made


@pytest.mark.parametrize("kind", ["DistributedDataParallel", "FSDP"])
def test_a_model_that_somebody_else_distributes_is_refused(job: Job, kind: str) -> None:
    model = nn.Sequential(nn.Linear(1, 1), distributed(kind))
    for call in (lambda: job.wrap(model), lambda: job.register(model=model)):
        with pytest.raises(StateError, match=rf"the model is in {kind}.*job.wrap\(model\)"):
            call()


def test_a_process_group_of_the_script_is_told_and_refused(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals.warn_of_own_group()
    refusals.refuse_own_group()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        refusals.warn_of_own_group()
        with pytest.raises(StateError, match=r"calls torch.distributed.init_process_group\(\).*leave that call out"):
            refusals.refuse_own_group()
    finally:
        torch.distributed.destroy_process_group()
    assert capfd.readouterr().err.count("warning: this script calls") == 1
