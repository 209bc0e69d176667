"""The steps of a job as a curve of bounded length, however many there are."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from elaunch.telemetry.events import Event, count, number, seconds

MOST_POINTS = 2000
"""Beyond these, neighbouring points become one; afterwards half as many are left."""

RECENT = 512
"""So many of the last steps are remembered by number: two logs may have a line of the same one."""

LONGEST_S, LARGEST_LOSS = 1e9, 1e200
"""Sums of these stay finite."""


@dataclass
class Point:
    """Some consecutive steps.

    Attributes:
        first, last: their numbers.
        t: Unix time of the last commit.
        n: how many they are.
        sum_s: what they took together.
        most_s: what the slowest took.
        loss_sum, losses: of those that had a loss, and how many these are.
        members: of the last one.
    """

    first: int
    last: int
    t: float
    n: int
    sum_s: float
    most_s: float
    loss_sum: float
    losses: int
    members: int

    def add(self, later: Point) -> None:
        """Takes the steps of the next point into this one."""
        self.last, self.t, self.members = later.last, later.t, later.members
        self.n += later.n
        self.sum_s += later.sum_s
        self.most_s = max(self.most_s, later.most_s)
        self.loss_sum += later.loss_sum
        self.losses += later.losses

    def values(self) -> list[Any]:
        """Returns what the page gets: first, last, t, mean seconds, most seconds, mean loss or None, members."""
        loss = round(self.loss_sum / self.losses, 6) if self.losses else None
        mean_s = round(self.sum_s / self.n, 6)
        return [self.first, self.last, round(self.t, 3), mean_s, round(self.most_s, 6), loss, self.members]


class StepCurve:
    """Adds up steps.

    Attributes:
        count: how many have committed.
        newest: the last event of one; None before the first.
    """

    def __init__(self) -> None:
        self.count = 0
        self.newest: Event | None = None
        self._points: list[Point] = []
        self._per_point = 1
        self._order: deque[int] = deque()
        self._known: set[int] = set()
        self._rates: deque[tuple[float, int]] = deque(maxlen=32)

    def take(self, event: Event) -> None:
        """Adds a step, unless it is known."""
        step = count(event.get("step"))
        if step in self._known:
            return
        self._known.add(step)
        self._order.append(step)
        if len(self._order) > RECENT:
            self._known.discard(self._order.popleft())
        self.count += 1
        self.newest = event
        loss, took_s, t = number(event.get("loss")), min(seconds(event.get("seconds")), LONGEST_S), float(event["t"])
        loss = None if loss is None or abs(loss) > LARGEST_LOSS else loss
        self._rates.append((t, count(event.get("samples"))))
        point = Point(step, step, t, 1, took_s, took_s, loss or 0.0, int(loss is not None), count(event.get("members")))
        if self._points and self._points[-1].n < self._per_point:
            self._points[-1].add(point)
        else:
            self._points.append(point)
        if len(self._points) > MOST_POINTS:
            self._thin()

    def go_back(self) -> None:
        """Forgets which steps are known: the job repeats some from a checkpoint."""
        self._known.clear()
        self._order.clear()

    def _thin(self) -> None:
        pairs = iter(self._points)
        thinned: list[Point] = []
        for first in pairs:
            if (second := next(pairs, None)) is not None:
                first.add(second)
            thinned.append(first)
        self._points = thinned
        self._per_point *= 2

    def rate(self) -> tuple[float, float] | None:
        """Returns steps and samples a second over the last steps; None: too few have committed."""
        if len(self._rates) < 2 or (passed_s := self._rates[-1][0] - self._rates[0][0]) <= 0:
            return None
        samples = sum(one for _, one in self._rates) - self._rates[0][1]
        return (len(self._rates) - 1) / passed_s, samples / passed_s

    def document(self) -> dict[str, Any]:
        """Returns the curve as JSON."""
        return {
            "count": self.count,
            "per_point": self._per_point,
            "points": [point.values() for point in self._points],
        }
