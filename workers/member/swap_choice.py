"""Whether the members wait for their new native group before the first step of a generation; pure.

    waits = twice the slowest opening <= the least that a step over links takes beyond one in the group

All members tell all others what they have measured, so all choose alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

MARGIN = 2.0
"""An opening may take so many times what the last one took; then links serve.

Members wait only where the step would gain more than that. So also a wait that ends at its bound, and was in vain,
costs no more than what they stood to gain.
"""

FEW, LEAST = 5, 2
"""Of each kind of step so many of the newest count, and so many must have been measured."""

WARM_UP_STEPS = 2
"""Steps that do not count after somebody has joined: all wait while it allocates memory and chooses kernels.

It does so in its first update too, which falls into the second step.
"""

MOST_SIZES = 4
"""Numbers of members whose steps are remembered."""

Opened = tuple[int, float]
"""How many members opened a group, and the seconds that it took on one of them."""


@dataclass(frozen=True, slots=True)
class SwapReport:
    """What one member has measured in its process, or of steps has heard of the others.

    Attributes:
        openings: the newest of groups of all members, the newest last.
        links_s: seconds of a step over links, and `native_s` of one in a native group of as many members.
    """

    openings: tuple[Opened, ...]
    links_s: float
    native_s: float

    @property
    def gain_s(self) -> float:
        """What a step over links takes beyond one in the group."""
        return self.links_s - self.native_s

    def open_s(self, size: int) -> float | None:
        """Returns what opening a group of so many members takes: as long as the newest that had no fewer.

        None: all had fewer, which says nothing of it.
        """
        return next((seconds for members, seconds in reversed(self.openings) if members >= size), None)

    def to_json(self) -> dict[str, Any]:
        """Returns what `of` makes it of again, within a microsecond."""
        openings = [[members, round(seconds, 6)] for members, seconds in self.openings]
        return {"openings": openings, "links_s": round(self.links_s, 6), "native_s": round(self.native_s, 6)}

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> SwapReport:
        """Returns the report that another member made `to_json` of."""
        openings = tuple((int(members), float(seconds)) for members, seconds in fields["openings"])
        return cls(openings, float(fields["links_s"]), float(fields["native_s"]))


@dataclass(frozen=True, slots=True)
class SwapChoice:
    """Whether the members wait, and what follows from their reports.

    Attributes:
        waits: whether they do; else links serve the first step.
        open_s: seconds of the slowest opening.
        links_s, native_s: seconds of both kinds of step, of the member that gains least.
    """

    waits: bool
    open_s: float
    links_s: float
    native_s: float

    @property
    def longest_s(self) -> float:
        """How long they wait at most."""
        return MARGIN * self.open_s

    def fields(self) -> dict[str, float]:
        """Returns the estimate, for the event log."""
        return {"open_s": self.open_s, "links_s": self.links_s, "native_s": self.native_s}


def choose(reports: Sequence[SwapReport | None], size: int) -> SwapChoice | None:
    """Returns whether the members wait; None: a member knows not all of it, and links serve.

    Args:
        reports: of all members.
        size: how many they are.
    """
    told = [one for one in reports if one is not None]
    openings = [seconds for one in told if (seconds := one.open_s(size)) is not None]
    if size < 2 or len(openings) < len(reports):
        return None
    slowest_s, least = max(openings), _gaining_least(told)
    return SwapChoice(MARGIN * slowest_s <= least.gain_s, slowest_s, least.links_s, least.native_s)


def _gaining_least(told: Sequence[SwapReport]) -> SwapReport:
    return min(told, key=lambda one: (one.gain_s, one.links_s))


class StepTimes:
    """Seconds of this worker's newest steps, by how many members there were, and whether they used a native group.

    Only steps of as many members are compared: among fewer, each does more.
    """

    def __init__(self) -> None:
        self._taken: dict[int, dict[bool, deque[float]]] = {}  # the size of the newest step is the last
        self._left_out = 0
        self._heard: tuple[float, float] | None = None

    def hear(self, reports: Sequence[SwapReport | None]) -> None:
        """Takes over what the members have told, as long as this worker has not measured both kinds of step itself.

        A step takes all of them equally long. Whoever has joined would else keep the others from an estimate for long:
        it may see no step over links before the next change.
        """
        if told := [one for one in reports if one is not None]:
            least = _gaining_least(told)
            self._heard = least.links_s, least.native_s

    def leave_out(self, steps: int) -> None:
        """Has so many steps from now on not count."""
        self._left_out = steps

    def add(self, size: int, natively: bool, seconds: float) -> None:
        """Takes note of a step that has committed, from its begin to its commit.

        The time between two commits would not do: where a group opens within a step, the only steps over links are
        those that follow a change, and the time since the commit before is that of the change.
        """
        if self._left_out:
            self._left_out -= 1
            return
        of_size = self._taken.pop(size, None) or {natively: deque(maxlen=FEW) for natively in (False, True)}
        of_size[natively].append(seconds)
        self._taken[size] = of_size
        if len(self._taken) > MOST_SIZES:
            del self._taken[next(iter(self._taken))]

    def figures(self) -> tuple[float, float] | None:
        """Returns the seconds of a step over links, and of one in a native group; None: not both are known.

        Of those over links it is the least that counts. Most follow a change, and memory is allocated in them and
        kernels are chosen, for which links are not to blame.
        """
        for taken in reversed(self._taken.values()):
            if all(len(steps) >= LEAST for steps in taken.values()):
                return min(taken[False]), median(taken[True])
        return self._heard
