"""What counts as a worker's own part of a step, by which the policy selector tells slow workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.policy.profile import LayerProfile
from elaunch.policy.selector import make_selector
from elaunch.workers import moments
from elaunch.workers.agent_client import StaticClient
from elaunch.workers.data_parallel.job import Job

LOADING_S, COMPUTING_S, WAITING_S, UPDATING_S, UPLOADING_S = 1.0, 2.0, 30.0, 400.0, 5000.0
STEPS, MICRO_BATCHES = 4, 2


class Clock:
    """Time passes where the test says so."""

    now_s = 0.0

    def passes(self, seconds: float, then: Callable[..., Any] = lambda: None) -> Callable[..., Any]:
        def passing(*args: Any, **kwargs: Any) -> Any:
            self.now_s += seconds
            return then(*args, **kwargs)

        return passing


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __init__(self, load: Callable[[], Any]) -> None:
        self.load = load

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        self.load()
        return torch.ones(2)


class Updating(torch.optim.SGD):
    update: Callable[[], Any]

    def step(self, closure: Any = None) -> Any:
        self.update()
        return super().step(closure)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(moments, "time", SimpleNamespace(perf_counter=lambda: made.now_s))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return made


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job(StaticClient())
    yield made
    made.close()


@pytest.mark.parametrize("loop", ["batches", "steps"])
def test_neither_waiting_for_others_nor_what_follows_the_commit_counts(
    loop: str, job: Job, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    member, took = job._member, []
    monkeypatch.setattr(member.policy, "measured", lambda seconds, rows: took.append((seconds, rows)))
    monkeypatch.setattr(member, "pass_barrier", clock.passes(WAITING_S, member.pass_barrier))
    member.policy.selector = make_selector(job.worker, [LayerProfile(0, 0, 8, 8, 0, 0)], [1], "a job", 1.0, 1)
    model = job.wrap(nn.Linear(2, 1))
    optimizer = Updating(model.parameters(), lr=0.1)
    optimizer.update = clock.passes(UPDATING_S)
    job.register(model=model, optimizer=optimizer)
    compute, upload = clock.passes(COMPUTING_S), clock.passes(UPLOADING_S)
    sizes: dict[str, Any] = {"global_batch_size": MICRO_BATCHES, "micro_batch_size": 1, "steps": STEPS}
    samples = Samples(clock.passes(LOADING_S))

    def does(batch: torch.Tensor) -> None:
        model(batch).sum().backward()
        compute()

    if loop == "steps":
        for step in job.steps(samples, **sizes):
            for batch in step:
                does(batch)
            optimizer.step()
            upload()
    else:
        for batch in job.batches(samples, **sizes):
            does(batch)
            is_last = job.last_micro_batch
            optimizer.step()
            if is_last:
                upload()
    assert clock.now_s > STEPS * UPLOADING_S
    # The first step is not measured.
    assert took == [(LOADING_S + COMPUTING_S, 1)] * (STEPS - 1)
