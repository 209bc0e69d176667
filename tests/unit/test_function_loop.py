"""The loops of training functions that are entered again: each batch once, in its epoch, whatever was interrupted."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from elaunch.integrations.passes import FunctionEntry, FunctionLoop

PASS = 4


class Died(Exception):
    """Interrupts a function at a commit, or between two."""


class StubJob:
    """A job of one member: what is committed, and the state that each entry sees."""

    def __init__(self, deaths: set[int]) -> None:
        self.deaths, self.commits = deaths, 0
        self.last: dict[str, Any] = {}
        self.values: dict[str, Any] = {}
        self.bound, self.size, self.used = False, 1, list[Any]()
        self.model: Any = None

    def bind(self, **objects: Any) -> None:
        self.model, self.bound = objects["model"], True
        if self.commits:
            self.values = json.loads(json.dumps(self.last["values"]))
            torch.nn.init.constant_(self.model.weight, self.last["weight"])

    def check(self) -> None:
        """Nothing interrupts a batch."""

    def commit(self, loss: float | None, sample_ids: list[Any]) -> None:
        if self.commits in self.deaths:
            self.deaths.remove(self.commits)
            raise Died
        self.commits += 1
        self.last = {"values": json.loads(json.dumps(self.values)), "weight": self.model.weight.item()}
        self.used.append(tuple(sample_ids))


def run(job: StubJob, function: Callable[[FunctionLoop, Any], None]) -> list[Any]:
    """Returns the samples of each commit of a function, which is entered until it comes to its end."""
    while True:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        job.bound, job.values = False, {}
        stub: Any = job
        entry: Any = FunctionEntry(stub, stub, {})
        objects = {"model": model, "optimizer": optimizer}
        loop = FunctionLoop(entry, functools.partial(lambda objects: (objects, {}), objects))

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            model.weight.grad = -torch.ones_like(model.weight)
            optimizer.step()

        try:
            function(loop, step)
        except Died:
            continue
        assert model.weight.item() == len(job.used)  # each update once
        return job.used


def batches(passed: int, start: int) -> Iterator[tuple[float, list[int], int]]:
    for number in range(start, PASS):
        yield 1.0, [10 * passed + number], number


def plain(loop: FunctionLoop, step: Any) -> None:
    place = loop.add_loader()
    for _ in loop.epochs(range(3)):
        for _ in loop.train(place, batches):
            step()


def accumulating(loop: FunctionLoop, step: Any) -> None:
    place = loop.add_loader()
    for _ in loop.epochs(range(1, 4)):
        for _ in loop.train(place, batches):
            assert loop.batch is not None
            if loop.batch % 2 == 0:  # not at the end of a pass
                step()


def breaking(loop: FunctionLoop, step: Any) -> None:
    place = loop.add_loader()
    for _ in loop.epochs(range(3)):
        held = loop.train(place, batches)  # a generator that lives on, as one in a progress bar
        for _ in held:
            if loop.batch == 2:
                break
            step()


def without_a_loader(loop: FunctionLoop, step: Any) -> None:
    for _ in loop.epochs(range(5)):
        step()


def two_passes(loop: FunctionLoop, step: Any) -> None:
    place = loop.add_loader()
    for _ in loop.epochs(range(2)):
        for _ in range(2):
            for _ in loop.train(place, batches):
                step()


def two_loops(loop: FunctionLoop, step: Any) -> None:
    place = loop.add_loader()
    for _ in range(2):
        for _ in loop.epochs(range(2)):
            for _ in loop.train(place, batches):
                step()


def folds(loop: FunctionLoop, step: Any) -> None:
    for epoch in loop.epochs(range(2)):
        for fold in range(2):
            place = loop.add_loader()
            for _ in loop.train(place, functools.partial(batches_of, 2 * epoch + fold)):
                step()


def batches_of(fold: int, passed: int, start: int) -> Iterator[tuple[float, list[int], int]]:
    return batches(10 * fold + passed, start)


@pytest.mark.parametrize(
    ("function", "updates"),
    [
        (plain, 12),
        (accumulating, 6),
        (breaking, 6),
        (without_a_loader, 5),
        (two_passes, 16),
        (two_loops, 16),
        (folds, 16),
    ],
)
def test_every_interruption_leaves_the_updates_and_samples_of_an_undisturbed_run(function: Any, updates: int) -> None:
    calm = run(StubJob(set()), function)
    assert len(calm) == updates
    samples = [sample for update in calm for sample in update]
    assert len(set(samples)) == len(samples)
    for deaths in itertools.chain(*(itertools.combinations(range(updates), count) for count in (1, 2))):
        assert run(StubJob(set(deaths)), function) == calm, deaths


def test_a_batch_that_a_loop_was_left_with_belongs_to_no_update() -> None:
    used = run(StubJob(set()), breaking)
    assert used == [(0,), (1,), (10,), (11,), (20,), (21,)]
