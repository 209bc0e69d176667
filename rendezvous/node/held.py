"""What a node holds in the store: its lease, and the leader's key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class HeldLease:
    """The node's lease in the store.

    Attributes:
        id: the store's; None: there is none.
        renewed_s: when it was granted or renewed last.
        due_s: when it is to be renewed next.
        figures_id: the lease under which the figures of the node's check stand.
    """

    id: int | None = None
    renewed_s: float = 0.0
    due_s: float = 0.0
    figures_id: int | None = None


@dataclass(slots=True)
class Leadership:
    """Whether this node leads. The leader's key is bound to the lease, so both end together.

    Attributes:
        leads: whether it leads.
        is_due: whether it is to try to, since nobody may be leading.
    """

    leads: bool = False
    is_due: bool = False
