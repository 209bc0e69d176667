"""Suika's scheduling between jobs (3.2.3, algorithm 2). Pure.

Basic demand goes before growth, growths below a threshold that rises with the load are taken back, and what is free
goes to the jobs that have the best marginal benefit of it. All of that is decided at once and only the outcome is
returned. Beside the paper: priorities, aging, quotas, nodes that cannot be used, and growths that have to pay for their
cost. A job moves before any is stopped for another; the paper stops none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elaunch.scheduler.draft import Draft
from elaunch.scheduler.growing import grow, load, take_back_below
from elaunch.scheduler.model import ClusterNode, ClusterSchedule, JobState, Speed
from elaunch.scheduler.repair import repair
from elaunch.scheduler.room import start_waiting
from elaunch.scheduler.settings import SuikaSettings


class Suika:
    """The scheduling policy of the paper."""

    interval_s = 0.0

    def __init__(self, settings: SuikaSettings | None = None) -> None:
        """Makes a policy; it keeps nothing from one call to the next."""
        self.settings = settings or SuikaSettings()

    def schedule(
        self, jobs: Iterable[JobState], nodes: Iterable[ClusterNode], speeds: Mapping[str, Speed], now_s: float
    ) -> ClusterSchedule:
        """Returns what every job is to have; see `SchedulingPolicy`."""
        draft = Draft(jobs, nodes, speeds, now_s, self.settings.tflops)
        repair(draft, self.settings.quotas)
        start_waiting(draft, self.settings)
        used = load(draft)
        threshold = used**self.settings.aggressiveness
        take_back_below(draft, threshold)
        grow(draft, threshold, self.settings)
        return draft.schedule(f"threshold {threshold:.3g} at a load of {used:.0%}")
