"""A script that writes its own checkpoints goes on from them: at the step of the last one, with the same samples."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.errors import StateError
from elaunch.workers.agent_client import StaticClient
from elaunch.workers.data_parallel.job import Job
from tests.unit.test_techniques import BATCH, MICRO, Samples, net, squares

STEPS, SAVED = 5, 2


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Job]]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    made: list[Job] = []
    yield made
    for job in made:
        job.close()


def trained(job: Job, saved: dict[str, Any] | None) -> tuple[nn.Module, list[int], dict[str, Any]]:
    """Trains from the beginning, or on from what was saved; returns the model, the steps, and what a script saves."""
    model = job.wrap(net())
    optimizer = torch.optim.AdamW(model.parameters())
    if saved is not None:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        job.step = saved["step"]
    job.register(model=model, optimizer=optimizer)
    numbers, state = [], {}
    for step in job.steps(Samples(), global_batch_size=BATCH, micro_batch_size=MICRO, steps=STEPS):
        if step.number == SAVED and saved is None:
            whole = {"step": job.step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state = copy.deepcopy(whole)
        numbers.append(step.number)
        for points, values in step:
            squares(model, points, values).backward()
        optimizer.step()
    return model, numbers, state


def test_it_goes_on_as_if_it_had_never_ended(jobs: list[Job]) -> None:
    jobs += [Job(StaticClient()), Job(StaticClient())]
    model, numbers, saved = trained(jobs[0], None)
    again, rest, _ = trained(jobs[1], saved)
    assert (numbers, rest) == (list(range(STEPS)), list(range(SAVED, STEPS)))
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_step_is_refused_where_it_cannot_count(jobs: list[Job]) -> None:
    jobs += [Job(StaticClient())]
    with pytest.raises(ValueError, match=r"job.step must be 0 or more, got -1"):
        jobs[0].step = -1
    jobs[0].register(model=net())
    with pytest.raises(StateError, match=r"job.step = 7 comes too late.* before job.register\(...\)"):
        jobs[0].step = 7
    assert jobs[0].step == 0
