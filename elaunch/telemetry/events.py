"""Events as the log has them, and their fields. Workers write some of them, so nothing is taken for granted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from elaunch.wire import MOST

Event = Mapping[str, Any]
"""A line of the event log: `t`, `kind`, `node`, `generation`, and what its kind has."""

EventListener = Callable[[Event], None]

PHASES = ("detect", "connect", "agree", "plan", "transfer", "resume")
"""Of a transition, in their order; each is a field with `_s` behind its name."""


def number(value: object) -> float | None:
    """Returns a number that a document can hold, None for anything else."""
    if type(value) is int and abs(value) < MOST:
        return float(value)
    return value if isinstance(value, float) and math.isfinite(value) else None


def seconds(value: object) -> float:
    """Returns a time that is not negative; 0 for anything else."""
    return max(0.0, number(value) or 0.0)


def count(value: object) -> int:
    """Returns a number of things; 0 for anything else."""
    return value if type(value) is int and 0 <= value < MOST else 0


def phases_of(event: Event) -> dict[str, float]:
    """Returns the seconds of each phase of a transition, in order."""
    given = event.get("phases")
    found = given if isinstance(given, Mapping) else {}
    return {phase: seconds(found.get(f"{phase}_s")) for phase in PHASES}
