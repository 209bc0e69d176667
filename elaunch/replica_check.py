"""How often workers that hold the same state compare it, and what happens where it differs: the setting alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elaunch.errors import UsageError

NAME = "ELAUNCH_CHECK_REPLICAS"
CHECK = "elaunch.check_replicas"
"""Among the facts of a vote: the voter's setting. All go by that of the first member, for all must compare alike."""
DEFAULT_EVERY = 500
OFF = "off"
REPAIR = "repair"


@dataclass(frozen=True, slots=True)
class ReplicaCheck:
    """When replicas are compared.

    Attributes:
        every: steps from one comparison to the next; 0: never.
        repair: where they differ, the state of most of them is copied to the others; else the job ends.
    """

    every: int = DEFAULT_EVERY
    repair: bool = False

    def is_due(self, step: int, saving: bool) -> bool:
        """Returns whether to compare at a step boundary: by the number of steps, or since state is saved there."""
        return self.every > 0 and step > 0 and (saving or step % self.every == 0)

    def __str__(self) -> str:
        return f"{self.every}{f',{REPAIR}' if self.repair else ''}" if self.every else OFF


def parse(text: str | None, name: str = NAME) -> ReplicaCheck:
    """Reads the setting: "off", or a number of steps, with ",repair" after it or not.

    Args:
        text: as given; none or empty: the default.
        name: what it is called in messages.

    Raises:
        UsageError: it is none of these.
    """
    if not text:
        return ReplicaCheck()
    if text == OFF:
        return ReplicaCheck(every=0)
    every, comma, action = text.partition(",")
    if not every.isdecimal() or int(every) < 1 or (comma and action != REPAIR):
        raise UsageError(
            f"{name}={text}: expected {OFF}, or a number of steps of at least 1, such as {DEFAULT_EVERY}, or "
            f"{DEFAULT_EVERY},{REPAIR} to copy the state of most workers to the others where it differs"
        )
    return ReplicaCheck(int(every), bool(comma))


def from_environment(environment: Mapping[str, str]) -> ReplicaCheck:
    """Returns the setting of a worker.

    Raises:
        UsageError: as `parse`.
    """
    return parse(environment.get(NAME))


def agreed(facts: Sequence[Mapping[str, Any]], own: ReplicaCheck) -> ReplicaCheck:
    """Returns the setting of the first member, from the facts of all votes; `own` if it has told none."""
    told = facts[0].get(CHECK) if facts else None
    return parse(told) if isinstance(told, str) else own
