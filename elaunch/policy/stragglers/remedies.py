"""What is done about a slow worker, as the user wants it (`--slow-policy`). The first member decides, all hear it.

    rebalance   the selector looks for a plan by which it has less to do
    replace     its process ends, and another one takes its slot; once for each slot, then as `rebalance`
    exclude     it leaves, and nobody takes its slot, if the others are faster than all are now, and not slower than all
                would be re-balanced, and enough nodes are left; else as `rebalance`
    report      nothing

A slow link is never a reason to leave: which of its ends is at fault it does not tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elaunch.policy.measuring.profile_fields import Expected, are_texts, checked
from elaunch.policy.settings import SlowPolicy
from elaunch.policy.stragglers.track import Change
from elaunch.rendezvous.membership import names_text, node_of, slot_of

_EVICTION = {
    "workers": Expected("names", are_texts),
    "replace": Expected("true or false", lambda value: isinstance(value, bool)),
    "why": Expected("a text", lambda value: isinstance(value, str)),
}


@dataclass(frozen=True)
class Eviction:
    """A request that members leave at a step boundary.

    Attributes:
        workers: their names.
        replace: whether other processes take their slots.
        why: for people.
    """

    workers: tuple[str, ...]
    replace: bool
    why: str

    def to_json(self) -> dict[str, Any]:
        """Returns JSON values; `from_json` reads them."""
        return {"workers": list(self.workers), "replace": self.replace, "why": self.why}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Eviction:
        """Reads the fields from JSON values.

        Raises:
            ProtocolError: they are none of a request.
        """
        found = checked(fields, _EVICTION, "the request that members leave")
        return cls(tuple(found["workers"]), found["replace"], found["why"])


class Remedies:
    """What is being done about slow workers, and what was done.

    Args:
        policy: what the user wants.
        min_nodes: so many are to be left.

    Attributes:
        replaced: slots whose workers were replaced because they were slow.
    """

    def __init__(self, policy: SlowPolicy = "rebalance", min_nodes: int = 1) -> None:
        self._policy, self._min_nodes = policy, min_nodes
        self.replaced: set[str] = set()
        self._next: Eviction | None = None
        self._weighed: Change | None = None
        self._leaving: frozenset[str] = frozenset()
        self._why = ""

    @property
    def rebalances(self) -> bool:
        """Returns whether other speeds are a reason for another plan now; not while somebody is about to leave."""
        return self._policy != "report" and self._weighed is None and not self._leaving

    @property
    def weighed(self) -> tuple[str, ...]:
        """Returns the workers without which the others may be faster, which is to be found out."""
        return () if self._weighed is None else self._weighed.workers

    def weighs(self, change: Change, members: Sequence[str]) -> bool:
        """Returns whether to call `decide` about a change, since only an estimate tells what to do."""
        if self._refused(change, members):
            return False
        self._weighed = change
        return True

    def answer(self, change: Change) -> dict[str, Any]:
        """Returns what is done about a change at once, as fields of the `slow` event."""
        if self._policy == "report" or change.state == "recovered" or change.kind == "link":
            return {"action": "report" if self._policy == "report" else "rebalance"}
        if self._policy == "replace":
            again = sorted(slot for worker in change.workers if (slot := slot_of(worker)) in self.replaced)
            if again or self._leaving:
                why = (
                    f"{names_text(again)} had another process already" if again else "another worker is being replaced"
                )
                return {"action": "rebalance", "reason": why}
            self._begin(Eviction(change.workers, True, str(change)))
            return {"action": "replace"}
        return {"action": "rebalance"} | ({"reason": self._why} if self._policy == "exclude" else {})

    def decide(self, stay: float | None, best: float | None, without: float | None, gain: float) -> dict[str, Any]:
        """Returns what is done about the weighed workers, as fields of the `slow` event.

        They leave if the others are faster than all are by the present plan, and as fast as all are by the best one.

        Args:
            stay: samples a second by the present plan, with them as slow as they are; None: it cannot go on.
            best: by the best plan with them; None: there is none.
            without: of the others by their best plan; None: there is none.
            gain: the part by which rates must differ to count.
        """
        change, self._weighed = self._weighed, None
        assert change is not None
        if without is None:
            return change.fields() | {"action": "rebalance", "reason": "there is no plan without them"}
        known = [f"{text} {rate:.4g}" for text, rate in (("as it is", stay), ("re-balanced", best)) if rate is not None]
        rates = ", ".join([f"{without:.4g} samples/s without", *known])
        if without <= (1 + gain) * (stay or 0.0) or without < (1 - gain) * (best or 0.0):
            return change.fields() | {"action": "rebalance", "reason": f"it is not worth it: {rates}"}
        self._begin(Eviction(change.workers, False, f"{change}; {rates}"))
        return change.fields() | {"action": "exclude", "reason": rates}

    def take(self) -> Eviction | None:
        """Returns the request for members to leave until all have heard it: an interrupted step tells nobody."""
        return self._next

    def heard(self, eviction: Eviction) -> None:
        """Notes that all members have heard it."""
        self._next, self._leaving = None, frozenset(eviction.workers)
        if eviction.replace:
            self.replaced |= set(map(slot_of, eviction.workers))

    def entered(self, members: Sequence[str]) -> dict[str, Any] | None:
        """Notes the members that go on; returns event fields of a change that is no longer weighed."""
        self._leaving &= frozenset(members)
        if self._next is not None and not self._leaving >= set(self._next.workers):
            self._next = None  # who was to leave has gone by itself
        change, self._weighed = self._weighed, None
        if change is None:
            return None
        return change.fields() | {"action": "rebalance", "reason": "the members changed meanwhile"}

    def _begin(self, eviction: Eviction) -> None:
        self._next, self._leaving = eviction, frozenset(eviction.workers)

    def _refused(self, change: Change, members: Sequence[str]) -> bool:
        """Returns whether nobody may leave, whatever an estimate says; `_why` gets the reason, if there is one."""
        self._why = ""
        if self._policy != "exclude" or change.state == "recovered" or change.kind == "link":
            return True
        left = {node_of(member) for member in members if member not in change.workers}
        if self._weighed is not None or self._leaving:
            self._why = "another worker is about to leave"
        elif len(left) < max(1, self._min_nodes):
            self._why = f"{len(left)} of at least {self._min_nodes} nodes would be left"
        return bool(self._why)
