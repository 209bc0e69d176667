"""Paces what fails again and again in a node of the job: one line for each text, and ever longer pauses. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

MOST_TOLD = 50
FIRST_PAUSE_S = 0.2


@dataclass(slots=True)
class Setbacks:
    """Keeps what was told, and how often in a row something failed.

    Attributes:
        longest_s: the longest pause, in seconds.
    """

    longest_s: float
    _told: set[str] = field(default_factory=set)
    _count: int = 0
    _since_s: float | None = None
    _calm_s: float = 0.0

    @property
    def under_way(self) -> bool:
        """Returns whether something failed of late."""
        return self._since_s is not None

    def is_new(self, text: str) -> bool:
        """Returns whether this is to be told: it was not yet, and few others were."""
        if text in self._told or len(self._told) >= MOST_TOLD:
            return False
        self._told.add(text)
        return True

    def meet(self, now_s: float) -> float:
        """Counts one more setback; returns the seconds to pause."""
        pause_s = min(self.longest_s, FIRST_PAUSE_S * 2.0 ** min(self._count, 20))
        self._count += 1
        if self._since_s is None:
            self._since_s = now_s
        self._calm_s = now_s + 3 * pause_s
        return pause_s

    def end(self, now_s: float) -> float | None:
        """Returns how long things failed, in seconds, once nothing has failed for a while; else None."""
        if self._since_s is None or now_s < self._calm_s:
            return None
        lasted_s, self._since_s, self._count = now_s - self._since_s, None, 0
        return lasted_s
