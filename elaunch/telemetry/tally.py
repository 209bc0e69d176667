"""What one agent has seen of its job, counted from the events that it writes."""

from __future__ import annotations

import bisect
import signal
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

from elaunch.telemetry.events import PHASES, Event, count, number, phases_of, seconds

FINE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets of a distribution: a phase of a recovery takes a millisecond, a step up to minutes."""


MOST_NAMES = 50
"""Values that a label may have: what goes beyond, which no worker of ours writes, counts as "other"."""


class Distribution:
    """How often which durations occurred."""

    def __init__(self) -> None:
        self._counts = [0] * (len(FINE_S) + 1)
        self.sum_s = 0.0

    def add(self, duration_s: float) -> None:
        """Counts a duration."""
        self._counts[bisect.bisect_left(FINE_S, duration_s)] += 1
        self.sum_s += duration_s

    @property
    def count(self) -> int:
        """Returns how many there were."""
        return sum(self._counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Returns the upper bound of each bucket, and how many durations were not above it."""
        bounds = [*map(str, FINE_S), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self._counts)), strict=True))


def _count(counter: Counter[str], name: object, by: int = 1) -> None:
    text = str(name)[:MOST_NAMES]
    counter[text if text in counter or len(counter) < MOST_NAMES else "other"] += by


def end_of(event: Event) -> str:
    """Returns the name of the signal that ended a worker, or its exit code."""
    if event.get("signal") is None:
        return str(count(event.get("exitcode")))
    try:
        return signal.Signals(count(event["signal"])).name
    except ValueError:
        return f"signal {count(event['signal'])}"


def _by_kind() -> dict[bool, Distribution]:
    return {True: Distribution(), False: Distribution()}


@dataclass
class StepTally:
    """Steps, as far as this agent has logged them.

    Attributes:
        count, samples: how many have committed, and their samples.
        training_s: their time, without what recoveries and other changes took, the newest step not counted yet.
        durations: from commit to commit.
        newest: number and Unix time of the commit of the newest step; None before one.
        loss: of that step; None: it has none.
        copy_lag: by how many steps copies of the state in memory were behind it; None: there were none.
    """

    count: int = 0
    samples: int = 0
    training_s: float = 0.0
    durations: Distribution = field(default_factory=Distribution)
    newest: tuple[int, float] | None = None
    loss: float | None = None
    copy_lag: int | None = None
    _open: tuple[int, float] | None = None  # generation and seconds of a step whose transition may still be told

    def take(self, event: Event) -> None:
        """Counts a step."""
        self._close()
        self.count += 1
        self.samples += count(event.get("samples"))
        took_s = seconds(event.get("seconds"))
        self.durations.add(took_s)
        self._open = (count(event.get("generation")), took_s)
        self.newest = (count(event.get("step")), seconds(event.get("t")))
        self.loss = number(event.get("loss"))
        self.copy_lag = count(event["copy_lag"]) if event.get("copy_lag") is not None else None

    def take_transition(self, event: Event) -> None:
        """Counts what a transition took as none of the time of the step that ended it, which is told before it.

        Of an interrupted step only its repetition counts; of one before which the members changed over, what is left.
        """
        if self._open is not None and self._open[0] == event.get("generation"):
            phases, took_s = phases_of(event), self._open[1]
            change_s = phases["connect"] + phases["plan"] + phases["transfer"]
            left_s = phases["resume"] if event.get("interrupted") is True else took_s - change_s
            self._open = (self._open[0], min(took_s, max(0.0, left_s)))
        self._close()

    def _close(self) -> None:
        if self._open is not None:
            self.training_s += self._open[1]
            self._open = None


@dataclass
class Tally:
    """The figures.

    Steps and transitions are counted by the agent of the first member, which changes: the job's are the sum of all
    agents'.

    Attributes:
        steps: that have committed.
        changes: what transitions took, by whether they interrupted a step.
        phases: the same of each of their phases, by phase and that.
        moved_bytes: of state that moved to members, by how it went.
        saves: what checkpoints took.
        saved_bytes: of them.
        exits: of workers, by exit code or signal.
        decisions: by policy.
        verdicts: of health events.
        kinds: of all events.
        unreachable: nodes that this one cannot reach.
    """

    steps: StepTally = field(default_factory=StepTally)
    changes: dict[bool, Distribution] = field(default_factory=_by_kind)
    phases: dict[tuple[str, bool], Distribution] = field(
        default_factory=lambda: {(phase, kind): Distribution() for phase in PHASES for kind in (True, False)}
    )
    moved_bytes: Counter[str] = field(default_factory=Counter)
    saves: Distribution = field(default_factory=Distribution)
    saved_bytes: int = 0
    exits: Counter[str] = field(default_factory=Counter)
    decisions: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    unreachable: int = 0

    def take(self, event: Event) -> None:
        """Counts an event."""
        kind = str(event.get("kind"))
        _count(self.kinds, kind)
        match kind:
            case "step":
                self.steps.take(event)
            case "transition":
                self._take_transition(event)
            case "worker_exited":
                _count(self.exits, end_of(event))
            case "checkpoint":
                self.saves.add(seconds(event.get("seconds")))
                self.saved_bytes += count(event.get("bytes"))
            case "decision":
                _count(self.decisions, event.get("policy"))
            case "health":
                _count(self.verdicts, event.get("verdict"))
            case "restored":
                _count(self.moved_bytes, "links", count(event.get("bytes_moved")))
            case "cut":
                nodes = event.get("nodes")
                self.unreachable = len(nodes) if isinstance(nodes, list) else 0

    def _take_transition(self, event: Event) -> None:
        interrupted = event.get("interrupted") is True
        self.changes[interrupted].add(seconds(event.get("total_s")))
        for phase, took_s in phases_of(event).items():
            self.phases[phase, interrupted].add(took_s)
        _count(self.moved_bytes, event.get("moved_over") or "links", count(event.get("bytes_moved")))
        self.steps.take_transition(event)
