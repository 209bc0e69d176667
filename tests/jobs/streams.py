"""A job whose data comes in order. On request slot 1 kills itself, and waits for its replacement a few steps later.

`--die-drawing STEP:MOMENT` ends the first worker of slot 1 by SIGKILL while the members draw that step:

    before    before it has told the others anything
    after     when all of them know the step, or that the stream ends there
    half      likewise, but slot 2 has not heard it, and is interrupted

Each worker writes what it has used of a step that has committed to a file of its own: a line with the step and the
samples.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elaunch
from elaunch.errors import GenerationChanged
from elaunch.workers.data import streaming
from elaunch.workers.data.dealing import StreamNews
from elaunch.workers.data.streaming import Reduce, StreamLoader
from tests.jobs import come_late, say
from tests.jobs.eager import compile_nothing

N_SAMPLES = 150
PATIENCE_S = 30.0


def generator() -> Iterator[int]:
    yield from range(N_SAMPLES)


class Cutting(torch.utils.data.IterableDataset[int]):
    """Cuts itself, in parts of different lengths."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for at in range(N_SAMPLES):
            if at % 10 % info.num_workers == info.id:
                yield at


class Files:
    """Ten shards of different lengths, which know their positions."""

    num_shards = 10

    def open(self, shard: int, position: Any) -> Iterator[int]:
        return File(list(range(shard * shard + shard, (shard + 1) * (shard + 2))), position)


class File:
    def __init__(self, samples: list[int], position: Any) -> None:
        self.samples, self.at = samples, position or 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.at == len(self.samples):
            raise StopIteration
        self.at += 1
        return self.samples[self.at - 1]

    def state_dict(self) -> int:
        return self.at


def live() -> Iterator[int]:
    """Comes in another order each time."""
    yield from random.Random(os.getpid()).sample(range(N_SAMPLES), N_SAMPLES)


def data_of(kind: str) -> Any:
    if kind == "live":
        return elaunch.Stream(live, passes=2, repeatable=False)
    if kind == "files":
        return elaunch.Stream(Files(), passes=2)
    if kind == "cutting":
        return elaunch.Stream(Cutting(), passes=2, shards=7)
    if kind == "generator":
        return elaunch.Stream(generator, passes=2)
    from datasets import Dataset

    rows = Dataset.from_dict({"number": list(range(N_SAMPLES))}).to_iterable_dataset(num_shards=7)
    if kind == "shuffled":
        rows = rows.shuffle(seed=3, buffer_size=16)
    return elaunch.Stream(rows, passes=2)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_drawing(job: elaunch.Job, slot: str, at: int, moment: str) -> None:
    """Make the draw of a step fail."""
    draw = StreamLoader.draw
    first = job.generation

    def drawn(loader: StreamLoader, reduce: Reduce, step: int, *share: Any) -> Any:
        def reduced(packed: bytes, combine: Callable[[Sequence[bytes]], bytes]) -> bytes:
            hurt = step == at and job.generation == first
            if hurt and (slot, moment) == ("1", "before"):
                die()
            whole = reduce(packed, combine)
            if hurt and StreamNews.unpack(whole).settled:
                if slot == "1" and moment != "before":
                    time.sleep(0.1 if moment == "half" else 0.0)  # the first one goes on meanwhile
                    die()
                if (slot, moment) == ("2", "half"):
                    wait_until(lambda: is_changing(job), "nobody has died")
                    raise GenerationChanged(job._member._recovery.newest_generation())
            return whole

        return draw(loader, reduced, step, *share)

    StreamLoader.draw = drawn  # type: ignore[method-assign, assignment]


def is_changing(job: elaunch.Job) -> bool:
    return job._member._recovery.newest_generation() > job.generation


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)


def main() -> None:
    come_late()
    compile_nothing()
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="generator")
    parser.add_argument("--batches", action="store_true", help="one loop over micro-batches")
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--used", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--die-at", type=int, nargs="*", default=[], help="steps in which slot 1 kills itself")
    parser.add_argument("--die-drawing", default="")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds in each micro-batch")
    parser.add_argument("--gather-at", type=int, nargs="*", default=[], help="steps that wait for who is missing")
    args = parser.parse_args()
    streaming.MARK_STEPS = 3
    job = elaunch.init()
    torch.manual_seed(1)
    model = job.wrap(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    job.register(model=model, optimizer=optimizer)
    _, _, name = job.worker.partition("/")
    slot, _, incarnation = name.partition("#")
    log = (args.used / name).open("a")
    if args.die_drawing and incarnation == "0":
        at, _, moment = args.die_drawing.partition(":")
        die_drawing(job, slot, int(at), moment)

    sizes: Any = {"global_batch_size": 12, "micro_batch_size": 2, "num_workers": args.num_workers}
    if args.batches:
        for place, numbers in enumerate(job.batches(data_of(args.data), seed=7, steps=args.steps, **sizes)):
            if slot == "1" and place and job.step == (args.die_at + [-1] * 9)[int(incarnation)]:
                die()
            points = numbers.double()[:, None] / N_SAMPLES
            loss = (model(points) - points.sin()).square().mean()
            loss.backward()
            job.report(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    for step in job.steps(data_of(args.data), seed=7, steps=args.steps, **sizes):
        used: list[int] = []
        generation = 0
        for place, batch in enumerate(step):
            if job.generation != generation:
                generation, used = job.generation, []  # the step is done again
            if slot == "1" and place and step.number == (args.die_at + [-1] * 9)[int(incarnation)]:
                die()
            if step.number in args.gather_at:
                wait_until(lambda: job.size == 3 or is_changing(job), "nobody has come")
            time.sleep(args.sleep)
            numbers = batch["number"] if isinstance(batch, dict) else batch
            if job._in_flight.n_samples:  # a worker without a part of the step computes something that does not count
                used = used + numbers.tolist()
            points = numbers.double()[:, None] / N_SAMPLES
            loss = (model(points) - points.sin()).square().mean()
            loss.backward()
            job.report(loss=loss)
        optimizer.step()
        log.write(f"{step.number} {used}\n")
        log.flush()
    norm = sum(parameter.detach().square().sum().item() for parameter in model.parameters())
    say(f"{job.worker} ended after {job.step} steps, norm {norm:.12e}")


if __name__ == "__main__":
    main()
