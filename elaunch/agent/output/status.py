"""How far the training is, as the reports of this node's workers show it. `elaunch ctl status` reads it from the store.

No input or output happens here: reports come in, and now and then a document goes out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elaunch.rendezvous.status import LastRecovery, TrainingStatus
from elaunch.telemetry.events import count, number, phases_of
from elaunch.telemetry.events import seconds as seconds_of
from elaunch.wire import Report

PERIOD_S = 2.0
"""Between two documents: the store keeps each for a while."""

STEPS = 32
"""Of the last so many the mean time counts."""

MAX_CAUSE = 300  # characters


class StatusBoard:
    """Makes the status of the job from what the first member reports, where that one is a worker of this node."""

    def __init__(self) -> None:
        self._status: TrainingStatus | None = None
        self._recovery: LastRecovery | None = None
        self._steps_s: deque[float] = deque(maxlen=STEPS)
        self._shown: TrainingStatus | None = None
        self._due_s = -math.inf

    def take(self, report: Report, now_t: float) -> None:
        """Takes a report that came at this Unix time; most kinds of them change nothing.

        It is a worker's, so nothing is taken for granted: what is no number counts as not reported.
        """
        fields = report.fields
        if report.kind == "step":
            self._take_step(fields, now_t)
        elif report.kind == "transition" and fields.get("interrupted") is True:
            phases = tuple(phases_of(fields).items())
            self._recover(str(fields.get("cause", "")), now_t, seconds_of(fields.get("total_s")), phases)
        elif report.kind == "resume":
            self._recover(
                f"resumed from the checkpoint after {count(fields.get('step'))} steps",
                now_t,
                seconds_of(fields.get("seconds")),
            )

    def due(self, now_s: float) -> TrainingStatus | None:
        """Returns what is to be shown at this time of the monotonic clock; None while it is too soon, or not new."""
        status = self._status
        if status is None or status == self._shown or now_s < self._due_s:
            return None
        self._shown, self._due_s = status, now_s + PERIOD_S
        return status

    def _take_step(self, fields: Mapping[str, Any], now_t: float) -> None:
        loss = fields.get("loss")
        seconds = seconds_of(fields.get("seconds"))
        if seconds > 0:
            self._steps_s.append(seconds)
        self._status = TrainingStatus(
            generation=count(fields.get("generation")),
            step=count(fields.get("step")),
            t=now_t,
            members=count(fields.get("members")),
            steps_per_s=len(self._steps_s) / sum(self._steps_s) if self._steps_s else 0.0,
            loss=number(loss),
            has_diverged=isinstance(loss, float) and not math.isfinite(loss),
            recovery=self._recovery,
            copy_lag=count(lag) if (lag := fields.get("copy_lag")) is not None else None,
        )

    def _recover(self, cause: str, now_t: float, seconds: float, phases: tuple[tuple[str, float], ...] = ()) -> None:
        self._recovery = LastRecovery(" ".join(cause.split())[:MAX_CAUSE], now_t, seconds, phases)
        self._steps_s.clear()  # the step that was repeated took longer
        self._due_s = -math.inf
        if self._status is not None:
            self._status = replace(self._status, recovery=self._recovery)
