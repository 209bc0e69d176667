"""Which steps are measured, and when the job's profile is told: counts and times, without what is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from elaunch.policy.stragglers.track import SPAN_STEPS

WARM_UP = 1
"""Steps at the start and after each change that are not measured: memory is allocated in them, kernels are chosen."""

FIRST = 8
"""Steps after them that are: enough to know what is usual (`elaunch.policy.stragglers.track.LEARN`)."""

EVERY = 4
"""Of the steps after those, one in so many is."""

PUBLISH_S = 5.0
"""From one account of the profile to the next, if there is news."""

REPEAT_S = 60.0
"""If there is none: figures that stay as they are become stable."""


@dataclass
class Cadence:
    """The steps of a worker, counted from the start and from the last change of plan or members.

    All members count from the same change, those that join included, so all of them measure the same steps.

    Attributes:
        steps: that have committed here.
        since_change: of these, those since the last change.
        clock_s: seconds of all of them.
        closer_until: before so many steps since the change, every one is measured.
        metered: whether the kept bytes have been counted: once is enough.
    """

    steps: int = 0
    since_change: int = 0
    clock_s: float = 0.0
    closer_until: int = 0
    metered: bool = False

    def measures(self) -> bool:
        """Returns whether to measure the coming step."""
        step = self.since_change - WARM_UP
        return step >= 0 and (step < FIRST or step % EVERY == 0 or self.looks_closer)

    @property
    def looks_closer(self) -> bool:
        """Returns whether every step is measured, because a member is in doubt about a straggler."""
        return self.since_change < self.closer_until

    def look_closer(self) -> None:
        """Measures every step from now on, for as many as a straggler is tracked."""
        self.closer_until = self.since_change + SPAN_STEPS

    def committed(self, seconds: float) -> None:
        """Counts a step that has committed, so many seconds after the one before."""
        self.steps += 1
        self.since_change += 1
        self.clock_s += seconds

    def changed(self) -> None:
        """Counts anew: the plan or the members have changed."""
        self.since_change = self.closer_until = 0


@dataclass
class Publishing:
    """When the profile is told: soon after news, and now and then without any.

    Attributes:
        at_once: whether it is due whatever the time.
        clock: seconds that never go back.
    """

    at_once: bool = False
    clock: Callable[[], float] = time.monotonic
    _told_s: float = field(default=-REPEAT_S)

    def due(self, news: bool) -> bool:
        """Returns whether to tell the profile, if `news` says whether somebody has measured something."""
        return self.at_once or self.clock() - self._told_s >= (PUBLISH_S if news else REPEAT_S)

    def told(self) -> None:
        """Notes that it is being told."""
        self.at_once, self._told_s = False, self.clock()
