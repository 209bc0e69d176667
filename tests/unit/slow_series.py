"""Series of seconds that workers take for a step's work, and a detector that looks at them as a job does."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elaunch.policy.stragglers.slow import Detector
from elaunch.policy.stragglers.track import Change

EVERY = 4
DENSE = 12
TOLD = 3

DATA = Path(__file__).parent.parent / "data"


def recorded(busy: bool = False) -> dict[str, list[float]]:
    """Seconds of the same work in each step, by worker: what was recorded of real runs (see the file's first line).

    `busy`: with many more processes than cores; else each had a core.
    """
    found: dict[str, list[float]] = {}
    for line in (DATA / ("step_times_busy.jsonl" if busy else "step_times.jsonl")).read_text().splitlines()[1:]:
        entry = json.loads(line)
        found[entry["worker"]] = entry["seconds"]
    return found


Noise = Callable[[random.Random, int, int], float]
"""A factor on a worker's seconds, of (draws, its number, the step)."""


def gaussian(sigma: float) -> Noise:
    return lambda draw, worker, step: max(0.2, 1 + draw.gauss(0, sigma))


def heavy(sigma: float) -> Noise:
    """Log-normal, and one in a hundred of ten times the width."""
    return lambda draw, worker, step: math.exp(draw.gauss(0, sigma if draw.random() > 0.01 else 10 * sigma))


@dataclass
class Bursts:
    """Now and then a worker takes up to five times as long, for up to `steps` steps, and not again for some time."""

    sigma: float = 0.03
    steps: int = 8
    chance: float = 0.005
    apart: int = 20
    _left: dict[int, tuple[int, float]] = field(default_factory=dict)

    def __call__(self, draw: random.Random, worker: int, step: int) -> float:
        left, factor = self._left.get(worker, (0, 1.0))
        if left <= -self.apart and draw.random() < self.chance:
            left, factor = draw.randint(1, self.steps), draw.uniform(1.2, 5)
        self._left[worker] = left - 1, factor
        return (factor if left > 0 else 1.0) * math.exp(draw.gauss(0, self.sigma))


def collecting(period: int, factor: float = 1.8, sigma: float = 0.03) -> Noise:
    """Every so many steps each worker collects garbage, or evaluates, at a time of its own."""
    return lambda draw, worker, step: (
        (factor if (step + 7 * worker) % period == 0 else 1.0) * math.exp(draw.gauss(0, sigma))
    )


def drifting(steps: int, by: float = 0.5, sigma: float = 0.03) -> Noise:
    """All become slower alike, by and by."""
    return lambda draw, worker, step: (1 + by * step / steps) * math.exp(draw.gauss(0, sigma))


class Job:
    """Workers whose steps are looked at: every fourth, and every one while there is a doubt.

    Args:
        workers: their names.
        works: the kind of work of each; by default all do the same.
        step_s: seconds of a step.
    """

    def __init__(self, workers: Sequence[str], works: Mapping[str, str] | None = None, step_s: float = 1.0) -> None:
        self.workers, self.step_s = list(workers), step_s
        self.works = works or dict.fromkeys(workers, "layer")
        self.detector = Detector()
        self.detector.entered(workers)
        self.changes: list[Change] = []
        self.looks = 0
        self.step_number = 0
        self._dense = 0
        self._heard: dict[str, float] | None = None
        self._told: dict[str, list[float]] = {worker: [] for worker in workers}

    def step(self, seconds: Mapping[str, float]) -> list[Change]:
        """A step in which the work of each took so long; what is found in it, by looks at the steps before."""
        number, found = self.step_number, list[Change]()
        self.step_number += 1
        if self._heard is not None:
            found = self.detector.look(number, number * self.step_s, self._heard)
            self.changes += found
            self._heard = None
            # The first member asks in the next step, and all look from the one after it on.
            if self.detector.doubts and self._dense <= number:
                self._dense = number + 2 + DENSE
        dense = self._dense - DENSE <= number < self._dense
        if number < 1 or not (number <= 4 or number % EVERY == 1 or dense):
            return found
        self.looks += 1
        told = self._told
        for worker, spent in seconds.items():
            slot = worker.partition("#")[0]
            if len(told[worker]) < TOLD:
                told[worker].append(spent)
                self.detector.told(slot, {self.works[worker]: sorted(told[worker])[len(told[worker]) // 2]})
        self._heard = {
            worker.partition("#")[0]: spent / sorted(told[worker])[len(told[worker]) // 2]
            for worker, spent in seconds.items()
        }
        return found

    def run(
        self,
        steps: int,
        noise: Noise,
        slow: Callable[[str, int], float] = lambda worker, step: 1.0,
        seed: int = 0,
        until: Callable[[], bool] = lambda: False,
    ) -> list[Change]:
        """So many steps more, or until something is found; what was found in all."""
        draw = random.Random(seed)
        for _ in range(steps):
            step = self.step_number
            self.step(
                {worker: slow(worker, step) * noise(draw, number, step) for number, worker in enumerate(self.workers)}
            )
            if until():
                break
        return self.changes
