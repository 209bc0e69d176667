"""How fast jobs are, as far as it is known: from rates or a profile that came with them, or from what they measure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elaunch.errors import ProtocolError, UsageError
from elaunch.policy.profile import Profile
from elaunch.scheduler.model import ClusterNode, Speed
from elaunch.scheduler.plan_speed import DefaultPlan, PlanSpeed
from elaunch.scheduler.service.documents import JobSpec
from elaunch.scheduler.service.reports import JobReport
from elaunch.scheduler.speeds import TableSpeed

ENOUGH_STEPS = 100  # after which figures that still move, as on busy machines, are taken as they are
FRESH_S = 600.0  # for so long what a job has measured counts, although it has measured anew by then


@dataclass(frozen=True, slots=True)
class _Known:
    """A speed, when the job came, the rates or the profile that it was made of, and when it was made."""

    submitted_t: float
    source: object
    speed: Speed
    made_t: float


class KnownSpeeds:
    """Keeps the speed of each job: finding out what an allocation brings takes time, and answers should not waver."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}

    def of(
        self, jobs: Iterable[tuple[JobSpec, JobReport]], nodes: Sequence[ClusterNode], now_t: float
    ) -> dict[str, Speed]:
        """Returns the speeds of those jobs of which something is known.

        Args:
            jobs: all of them.
            nodes: of the cluster.
            now_t: Unix time.
        """
        jobs = list(jobs)
        for name in self._known.keys() - {spec.name for spec, _ in jobs}:
            del self._known[name]
        for spec, report in jobs:
            self._learn(spec, report, now_t)
        for known in self._known.values():
            if isinstance(known.speed, PlanSpeed):
                known.speed.know(nodes)
        return {name: known.speed for name, known in self._known.items()}

    def _learn(self, spec: JobSpec, report: JobReport, now_t: float) -> None:
        before = self._known.get(spec.name)
        if before is not None and before.submitted_t != spec.submitted_t:
            del self._known[spec.name]
            before = None
        text = spec.profile or report.profile
        source = spec.rates or text
        if before is not None and (before.source == source or now_t < before.made_t + FRESH_S):
            return
        speed = TableSpeed(dict(spec.rates)) if spec.rates else _from_profile(spec, text, report.step)
        if speed is not None:
            self._known[spec.name] = _Known(spec.submitted_t, source, speed, now_t)


def _from_profile(spec: JobSpec, text: str, step: int) -> Speed | None:
    """Returns the speed by a profile; None while measured figures still move, or where the job's plan is not known."""
    if not (text and spec.global_batch_size):
        return None
    try:
        profile = Profile.from_json(text)
        dp = spec.basic // (spec.pp * spec.tp)
        plan = DefaultPlan(spec.pp, dp, spec.tp, spec.global_batch_size, spec.micro_batch_size)
        moves = profile.unstable and not spec.profile and step < ENOUGH_STEPS
        return None if moves else PlanSpeed(profile, plan)
    except (ProtocolError, UsageError):
        return None
