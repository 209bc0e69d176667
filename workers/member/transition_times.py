"""How long a change of members, or of their plan, takes: what the event `transition` is made of; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class TransitionTimes:
    """The change under way, as one member has timed it.

    Attributes:
        cause: for people.
        begin_t: when the cause came, and `told_t` when this member heard of the generation, in Unix seconds.
        interrupted: it came in mid-step.
        phases: their seconds.
        bytes_moved: of tensors that all receivers got together, and `moved_over` the path that they took.
        unsettled: members of the agreements that did not come to an end here.
        freed_s: the longest time from the news until a member waited no more; None: no member has told of any.
        first_step: what carried the first step after it, and the estimate by which that was chosen; empty: there was
            none.
    """

    cause: str = ""
    begin_t: float = 0.0
    told_t: float = 0.0
    interrupted: bool = False
    phases: dict[str, float] = field(default_factory=dict)
    bytes_moved: int = 0
    moved_over: str | None = None
    unsettled: set[str] = field(default_factory=set)
    freed_s: float | None = None
    first_step: Mapping[str, Any] = field(default_factory=dict)

    def freed(self, told_s: Iterable[float | None]) -> None:
        """Takes note of how long members, of which some tell nothing, still waited after the news."""
        self.freed_s = max((one for one in (self.freed_s, *told_s) if one is not None), default=None)

    @property
    def fixed_s(self) -> float:
        """The seconds that do not depend on what moves: detection, links and the plan."""
        # Clocks of two machines may differ.
        return sum(max(0.0, self._all.get(name, 0.0)) for name in ("detect_s", "connect_s", "plan_s"))

    def event(self, now_t: float) -> dict[str, Any]:
        """Returns the fields of the event: all phases, of which the last is over at `now_t`, add up to `total_s`."""
        total_s = now_t - self.begin_t
        phases = self._all | {"resume_s": max(0.0, total_s - sum(self._all.values()))}
        moved_over = {"moved_over": self.moved_over} if self.moved_over and self.bytes_moved else {}
        freed = {"freed_s": round(self.freed_s, 6)} if self.freed_s is not None else {}
        return {
            "cause": self.cause,
            "interrupted": self.interrupted,
            "bytes_moved": self.bytes_moved,
            **moved_over,
            **freed,
            **({"first_step": dict(self.first_step)} if self.first_step else {}),
            "phases": {name: round(seconds, 6) for name, seconds in phases.items()},
            "total_s": round(total_s, 6),
        }

    @property
    def _all(self) -> dict[str, float]:
        return {"detect_s": self.told_t - self.begin_t, **self.phases}
