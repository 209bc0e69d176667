"""What the first member's agent shows of the training that goes on, for `elaunch ctl status`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LastRecovery:
    """The newest repair of the job: from its `cause` to the next commit, at Unix time `t`, it took `seconds`.

    `phases` are their names and seconds, in order; none where a checkpoint was loaded.
    """

    cause: str
    t: float
    seconds: float
    phases: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """How far the training is, for people. The agent of the first member writes it, every few seconds at most.

    Attributes:
        generation: number of the generation in which the last step committed.
        step: number of that step, from 0.
        t: Unix time of its commit.
        members: how many did it.
        steps_per_s: over the last steps; 0: not known yet.
        loss: of the step, as the script has reported it; None: it has reported none, or no finite number.
        has_diverged: the script has reported a loss that is no finite number.
        recovery: the newest one that the writer knows of.
        copy_lag: by how many steps the oldest copy of a worker's state in another worker's memory is behind; None:
            there are no copies.
    """

    generation: int
    step: int
    t: float
    members: int = 0
    steps_per_s: float = 0.0
    loss: float | None = None
    has_diverged: bool = False
    recovery: LastRecovery | None = None
    copy_lag: int | None = None


def speeds_of(profile: str) -> dict[str, float]:
    """Returns the speeds of slots whose workers are slow or fast, from the JSON form of a profile."""
    try:
        workers = json.loads(profile)["workers"]
        speeds = {slot: float(one.get("speed", 1.0)) for slot, one in workers.items()}
        return {slot: speed for slot, speed in speeds.items() if speed > 0}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return {}


def slow_slots(speeds: Mapping[str, float]) -> dict[str, float]:
    """Returns how many times as long as others the slow slots take, the slowest first."""
    slow = {slot: 1 / speed for slot, speed in speeds.items() if speed < 1}
    return dict(sorted(slow.items(), key=lambda one: (-one[1], one[0])))
