"""What looks at one worker or link say of it: robust statistics, and confirmation before anything is said. Pure.

A *look* is what one measured step has shown; its *score* is a logarithm, 0 for what is usual. The modules `slow` and
`slow_links` beside this one make the scores.

A look *votes* for slow where its score is above THRESHOLD, above NOISE times the worker's own spread (MAD of its past
scores), and above what one in ten of its past scores is: on a machine that is too busy these come in groups. A state
changes when CONFIRMING of the looks in a window agree, which has at least LOOKS of them and covers SPAN_STEPS steps and
SPAN_S seconds. So

- what lasts for fewer than 9 steps is never an event, whatever it costs;
- where looks that vote by chance are independent and one in 20 does, 7 in 8 do with a probability below 8 * 0.05**7,
  less than one in 10**8. With 24 workers at 900 looks an hour that is less than one false alarm in 5000 hours.

Median and MAD: F. R. Hampel, "The influence curve and its role in robust estimation", JASA 1974.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

THRESHOLD = math.log(1.1)
"""Who is slower by less is as fast as the others."""

NOISE = 2.5
"""Times its usual deviation a worker must be slower."""

BACK = 0.7
"""Who was slow is so until it is below this part of what made it slow."""

LOOKS = 8
CONFIRMING = 7 / 8
SPAN_STEPS = 12
SPAN_S = 0.25
"""See above. SPAN_S matters where steps take milliseconds: there a system's hiccup lasts for many of them."""

LEARN = 8
"""Looks that make the usual of work that nobody else does."""

PAST = 128
"""Of a worker's looks, those by which its noise is known."""

MAD_TO_SIGMA = 1.4826

SpeedState = Literal["slow", "recovered"]


class Look(NamedTuple):
    """One look at something: in which step, when (seconds), and its score."""

    step: int
    time_s: float
    score: float


@dataclass(frozen=True)
class Change:
    """A worker, node or link has become slow, or is as fast as before again.

    Attributes:
        state: which of it.
        kind: of what.
        names: the worker, the node or the two ends of the link.
        workers: those that it is about: one, all of the node, or the ends of the link.
        factor: how many times as long its work takes now.
        step: in which it was found.
        since_step: the first of the looks that made it.
        evidence: figures, as fields of the `slow` event.
    """

    state: SpeedState
    kind: Literal["worker", "node", "link"]
    names: tuple[str, ...]
    workers: tuple[str, ...]
    factor: float
    step: int
    since_step: int
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the `slow` event."""
        named: dict[str, Any] = {"worker": self.names[0]}
        if self.kind == "node":
            named = {"slow_node": self.names[0], "workers": list(self.workers)}
        elif self.kind == "link":
            named = {"link": list(self.names)}
        return {
            "state": self.state,
            **named,
            "factor": round(self.factor, 3),
            "step": self.step,
            "since_step": self.since_step,
            **self.evidence,
        }

    def __str__(self) -> str:
        """Returns a few words for people."""
        what = (
            f"the link from {self.names[0]} to {self.names[1]}"
            if self.kind == "link"
            else f"{self.kind} {self.names[0]}"
        )
        if self.state == "recovered":
            return f"{what} is as fast as before"
        return f"{what} takes {self.factor:.2f} times as long as usual since step {self.since_step}"


class Track:
    """The looks at one worker or link, and its side: slow (1), fast (-1) or neither (0).

    Args:
        threshold: a score that is further from 0 votes for a side.
    """

    __slots__ = ("_past", "_threshold", "_turned_step", "level", "limit", "looks", "side")

    def __init__(self, threshold: float = THRESHOLD) -> None:
        self.side = 0
        self.level = 0.0
        self.limit = self._threshold = threshold
        self.looks: deque[Look] = deque()
        # Scores of looks that have left the window: those in it may be about to show something else.
        self._past: deque[float] = deque(maxlen=PAST)
        self._turned_step = -1

    def votes(self, score: float) -> int:
        """Returns the side for which a look counts, in the present state: leaving a side takes more than staying."""
        up, down = (BACK if self.side == side else 1.0 for side in (1, -1))
        return 1 if score > up * self.limit else -1 if score < -down * self.limit else 0

    @property
    def noise(self) -> float | None:
        """Returns the usual deviation of its scores while it was neither slow nor fast; None: too few were seen."""
        return spread(self._past) if len(self._past) >= LEARN else None

    @property
    def tail(self) -> float:
        """Returns the value that one in ten of its past scores exceeds, on either side."""
        far = sorted(map(abs, self._past))
        return far[len(far) * 9 // 10] if len(far) >= PAST // 4 else 0.0

    def begin(self, past: Iterable[float]) -> None:
        """Takes scores from before its looks, by which its noise is known."""
        self._past.extend(past)
        self.expect(0.0)

    def expect(self, noise: float) -> None:
        """Allows scores to deviate by so much, whatever its own past says."""
        self.limit = max(self._threshold, NOISE * max(noise, self.noise or 0.0), self.tail)

    @property
    def doubtful(self) -> bool:
        """Returns whether two of the last three looks count for another side than the present one."""
        last = [self.votes(self.looks[-n].score) for n in range(1, min(3, len(self.looks)) + 1)]
        return bool(last) and last[0] != self.side and last.count(last[0]) >= 2

    def add(self, look: Look) -> bool:
        """Takes a look; returns whether the side has changed."""
        self.looks.append(look)
        while self._covers(1):
            left = self.looks.popleft()
            if self.side == 0 and left.step > self._turned_step:
                self._past.append(left.score)
        wanted = self.votes(look.score)
        if wanted == self.side or not self.sure:
            if self.side and self.sure and wanted == self.side:
                self._settle()
            return False
        agreeing = sum(self.votes(one.score) == wanted for one in self.looks)
        if agreeing < CONFIRMING * len(self.looks):
            return False
        self.side, self._turned_step = wanted, look.step
        self._settle()
        return True

    def restart(self) -> None:
        """Starts again for somebody else: its state is to be found anew, and until then stays as it was."""
        self.looks.clear()

    @property
    def sure(self) -> bool:
        """Returns whether its looks make a window."""
        return self._covers(0)

    @property
    def agreeing(self) -> tuple[int, int]:
        """Returns how many looks of the window count for its side, and the step of the first of these."""
        here = [look for look in self.looks if self.votes(look.score) == self.side]
        return len(here), here[0].step if here else self.looks[-1].step

    def _settle(self) -> None:
        """Finds its level; while that moves from one to another, the former stands."""
        if not self.side:
            self.level = 0.0
            return
        level = statistics.median(look.score for look in self.looks)
        near = sum(abs(look.score - level) < self.limit for look in self.looks)
        if near >= CONFIRMING * len(self.looks) or self._turned_step == self.looks[-1].step:
            self.level = level

    def _covers(self, first: int) -> bool:
        """Returns whether the looks from this one on make a window."""
        if len(self.looks) - first < LOOKS:
            return False
        begin, end = self.looks[first], self.looks[-1]
        return end.step - begin.step >= SPAN_STEPS and end.time_s - begin.time_s >= SPAN_S


def describe(fields: Mapping[str, Any]) -> str:
    """Returns a line for people from the fields of a `slow` event; empty if their subject is unknown."""
    ends = fields.get("link", [])
    if "worker" in fields:
        what = f"worker {fields['worker']}"
    elif "slow_node" in fields:
        what = f"node {fields['slow_node']}"
    elif len(ends) == 2:
        what = f"the link from {ends[0]} to {ends[1]}"
    else:
        return ""
    reason = f" ({fields['reason']})" if "reason" in fields else ""
    if fields.get("state") == "recovered":
        return f"{what} is as fast as before"
    return f"{what} is {fields.get('factor')} times as slow as usual: {fields.get('action')}{reason}"


def centre(values: Iterable[float], before: float | None = None) -> float:
    """Returns the median (the lower one of two) of the values near the one before, if a third of all is; else of all.

    So a change of more than half does not become what is usual, as long as others are as they were.

    Args:
        values: logarithms, at least one.
        before: what the centre was; None: nothing is known.
    """
    some = list(values)
    near = [value for value in some if before is not None and abs(value - before) < THRESHOLD]
    return statistics.median_low(near if 3 * len(near) >= len(some) else some)


def mad(values: Collection[float]) -> float:
    """Returns the median of the absolute deviations from the median; 0 without values."""
    if not values:
        return 0.0
    middle = statistics.median(values)
    return statistics.median(abs(value - middle) for value in values)


def spread(values: Collection[float]) -> float:
    """Returns the standard deviation that a normal distribution with this MAD has."""
    return MAD_TO_SIGMA * mad(values)


def short(number: float) -> float:
    """Returns the number with four digits, for events."""
    return float(f"{number:.4g}")
