"""The line about a job that waits for nodes. Pure."""

from __future__ import annotations

from elaunch.rendezvous.membership import names_text
from elaunch.rendezvous.view import View


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
