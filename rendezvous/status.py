"""What the first member's agent shows of the training that goes on, for `elaunch ctl status`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LastRecovery:
    """The newest repair of the job: from its `cause` to the next commit, at Unix time `t`, it took `seconds`."""

    cause: str
    t: float
    seconds: float


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
    """

    generation: int
    step: int
    t: float
    members: int = 0
    steps_per_s: float = 0.0
    loss: float | None = None
    has_diverged: bool = False
    recovery: LastRecovery | None = None
