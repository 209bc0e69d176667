"""Lines about a job that waits for nodes: when one is due, and what it says. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elaunch.rendezvous.membership import names_text
from elaunch.rendezvous.view import View

WAITED_S = 3.0  # what takes less is not worth a line
LONGEST_PAUSE_S = 10.0


@dataclass(slots=True)
class Pace:
    """Says when the next line about waiting is due: after `WAITED_S`, and then ever more rarely.

    Attributes:
        due_s: when the next line is due.
        pause_s: how long after that the line after it would be, if this were halved.
    """

    due_s: float
    pause_s: float

    @classmethod
    def begin(cls, now_s: float) -> Pace:
        """Returns the pace of a wait that begins now."""
        return cls(now_s + WAITED_S, WAITED_S)

    @property
    def has_told(self) -> bool:
        """Returns whether a line was due since the wait began."""
        return self.pause_s > WAITED_S

    def reset(self, now_s: float) -> None:
        """Notes that nothing is waited for now."""
        self.due_s, self.pause_s = now_s + WAITED_S, WAITED_S

    def is_due(self, now_s: float) -> bool:
        """Returns whether a line is due; if so, the next one is due after twice the time."""
        if now_s < self.due_s:
            return False
        self.pause_s = min(LONGEST_PAUSE_S, 2 * self.pause_s)
        self.due_s = now_s + self.pause_s
        return True


def waiting_text(view: View, reason: str, min_nodes: int, left_s: float | None) -> str:
    """Returns the line that says who is here, how many are missing and how long this may still take.

    Args:
        view: what the leader knows.
        reason: what its rule waits for.
        min_nodes: the fewest nodes that the job may have.
        left_s: until the wait ends, in seconds; None: it has no end.
    """
    nodes = sorted(view.nodes, key=lambda doc: (doc.rank, doc.order))
    names = names_text([doc.node for doc in nodes])
    missing = min_nodes - len(nodes)
    lack = f", at least {missing} missing" if missing > 0 else ""
    left = f", {max(0.0, left_s):.0f} s left" if left_s is not None else ""
    return f"waiting: {reason} (here: {names}{lack}{left})"
