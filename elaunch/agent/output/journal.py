"""What this agent tells of itself and its workers: lines for the user, and events."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

from elaunch.agent.output.events import EventLog
from elaunch.policy.stragglers import track
from elaunch.wire import AGAIN, THROUGH, Report


class Journal:
    """Tells the user, and the event log.

    Args:
        node: name of this node, which stands before each line.
        events: the log.
        generation: returns the number of the newest generation; 0 before the first.
    """

    def __init__(self, node: str, events: EventLog, generation: Callable[[], int]) -> None:
        self._node = node
        self._events = events
        self._generation = generation

    def say(self, text: str) -> None:
        """Tells the user, in a line; may be called from any thread."""
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            print(f"[elaunch {self._node}] {text}", file=sys.stderr, flush=True)

    def log(self, kind: str, *, t: float | None = None, **fields: Any) -> None:
        """Appends an event of the newest generation; `t` is its Unix time in seconds, None: now."""
        self._events.write(kind, self._generation(), t, **fields)

    def forward(self, report: Report) -> None:
        """Appends a worker's event; it may bring its own time and generation."""
        fields = dict(report.fields)
        if report.kind == "step":
            for name in (AGAIN, THROUGH):  # what agents need to know of it
                fields.pop(name, None)
        t, number = fields.pop("t", None), fields.pop("generation", None)
        self._events.write(
            report.kind,
            number if type(number) is int else self._generation(),
            t if isinstance(t, int | float) and math.isfinite(t) else None,
            **fields,
        )
        if report.kind == "slow" and (line := track.describe(report.fields)):
            self.say(line)

    def close(self) -> None:
        """Ends the event log; lines can still be told."""
        self._events.close()
