"""How fast jobs are, as far as it is known: from rates or a profile that came with them, or from what they measure."""

from __future__ import annotations

from collections.abc import Iterable

from elaunch.scheduler.model import Speed
from elaunch.scheduler.service.documents import JobSpec
from elaunch.scheduler.service.reports import JobReport
from elaunch.scheduler.speeds import TableSpeed


class KnownSpeeds:
    """Keeps the speed of each job until it is known anew."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[object, Speed]] = {}

    def of(self, jobs: Iterable[tuple[JobSpec, JobReport]]) -> dict[str, Speed]:
        """Returns the speeds of those jobs of which something is known."""
        found = {}
        for spec, _ in jobs:
            if spec.rates:
                key = spec.rates
                if self._made.get(spec.name, (None,))[0] != key:
                    self._made[spec.name] = key, TableSpeed(dict(spec.rates))
                found[spec.name] = self._made[spec.name][1]
        return found
