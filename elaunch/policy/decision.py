"""What the members of a job tell each other of its plan: the decision by which all go on, and the changes so far."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elaunch.errors import ProtocolError
from elaunch.plan.tiling import Plan
from elaunch.policy.dvfs import Clocking
from elaunch.policy.measuring.profile_fields import Expected, are_texts, checked, is_number, is_whole
from elaunch.policy.select import Choice
from elaunch.rendezvous.membership import slot_of

FIRST_GUESS_S = 3600.0
"""Seconds to the next change, before there was any."""


def _are_factors(value: Any) -> bool:
    return isinstance(value, dict) and all(is_number(factor) and factor > 0 for factor in value.values())


_HISTORY = {
    "since_t": Expected("a time", is_number),
    "changes": Expected("a whole number of 0 or more", lambda value: is_whole(value) and value >= 0),
    "last_lost": Expected("names of workers", are_texts),
    "factors": Expected("numbers above 0, by slot", _are_factors),
    "replaced": Expected("slots", are_texts),
}


@dataclass(frozen=True)
class Decision:
    """What the members go on by; the same on all of them.

    Attributes:
        plan: for exactly them.
        preferred_plan: to which the job returns when everybody is back.
        event: fields of the `decision` event; of `clocks_mhz`, by slot, those that devices are to be locked at.
    """

    plan: Plan
    preferred_plan: Plan
    event: Mapping[str, Any]

    @classmethod
    def of(cls, choice: Choice, clocking: Clocking | None = None, more: str = "") -> Decision:
        """Returns the decision for a choice; `more` is added to the reason."""
        event = choice.event()
        if clocking is not None:
            more = f"; {clocking.reason}{more}"
            event["clocks_mhz"] = dict(clocking.clocks_mhz)
        return cls(choice.plan, choice.preferred_plan, {**event, "reason": event["reason"] + more})

    def clock_mhz(self, worker: str) -> int | None:
        """Returns the clock at which to lock a worker's device; None: the device chooses."""
        clocks: Mapping[str, int] = self.event.get("clocks_mhz", {})
        return clocks.get(slot_of(worker))

    @classmethod
    def given(cls, plan: Plan, policy: str, reason: str) -> Decision:
        """Returns a decision in which nothing was chosen."""
        return cls(plan, plan, {"policy": policy, "reason": reason, "candidates": [], "plan": str(plan)})

    def with_idle(self, workers: Sequence[str]) -> Decision:
        """Returns the same with more workers, which have nothing to do."""
        if not workers:
            return self
        plan = replace(self.plan, idle=(*self.plan.idle, *workers))
        return replace(self, plan=plan, event={**self.event, "plan": str(plan)})

    def to_bytes(self) -> bytes:
        """Returns the bytes that the other members get."""
        return json.dumps({"preferred_plan": str(self.preferred_plan), "event": self.event}).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> Decision:
        """Reverses `to_bytes`.

        Raises:
            ProtocolError: it is none.
        """
        try:
            fields = json.loads(text)
            return cls(Plan.parse(fields["event"]["plan"]), Plan.parse(fields["preferred_plan"]), fields["event"])
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise ProtocolError(f"expected the decision of a plan, found {text[:80]!r} ({error})") from error


@dataclass(frozen=True)
class History:
    """The changes of a job so far, as its members tell them to those that join.

    Attributes:
        since_t: when it began, in Unix seconds.
        changes: of membership.
        last_lost: workers that were lost together, the last ones; without those whose slot has a worker again.
        factors: of slots that are slow or fast: how many times as long their work takes.
        replaced: slots whose slow workers were replaced.
    """

    since_t: float
    changes: int = 0
    last_lost: tuple[str, ...] = ()
    factors: Mapping[str, float] = field(default_factory=dict)
    replaced: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, fields: Mapping[str, Any] | None) -> History | None:
        """Reads the fields from JSON values.

        Raises:
            ProtocolError: they are none of a history.
        """
        if fields is None:
            return None
        found = checked(fields, _HISTORY, "the changes of the job")
        return cls(**{**found, "last_lost": tuple(found["last_lost"]), "replaced": tuple(found["replaced"])})

    def after(self, before: Sequence[str], members: Sequence[str]) -> History:
        """Returns the history with one more change, from some members to others."""
        if set(before) == set(members):
            return self
        here, slots = set(members), set(map(slot_of, members))
        lost = [worker for worker in before if worker not in here] or self.last_lost
        return History(self.since_t, self.changes + 1, tuple(one for one in lost if slot_of(one) not in slots))

    def next_s(self, now_t: float) -> float:
        """Returns the expected seconds to the next change: the mean so far, with one at FIRST_GUESS_S assumed."""
        return (max(0.0, now_t - self.since_t) + FIRST_GUESS_S) / (self.changes + 1)
