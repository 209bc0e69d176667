"""What metrics tell of a node beside its events: the state in which it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from elaunch.rendezvous.membership import Generation, NodeDoc, WorkerState


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node as its agent sees it.

    Attributes:
        generation: the newest that it has heard of.
        workers: how many it has in each state.
        slots: how many it may have.
        is_draining: whether it is to leave.
        spares: nodes that hold workers ready for when another one goes.
        is_spare: whether this node is one of them.
        saved: how many steps are in the newest checkpoint; None: there is none, or this node has not heard of it.
        profile: what the job has measured, in its JSON form, where the first member is of this node; empty: nothing.
    """

    generation: Generation | None = None
    workers: Mapping[WorkerState, int] = field(default_factory=dict)
    slots: int = 0
    is_draining: bool = False
    spares: int = 0
    is_spare: bool = False
    saved: int | None = None
    profile: str = ""


def view_of(doc: NodeDoc, generation: Generation | None, profile: str, spares: Collection[str] = ()) -> NodeView:
    """Returns the view of a node.

    Args:
        doc: its report.
        generation: the newest that it has heard of.
        profile: that a worker of it has sent last.
        spares: the nodes that hold workers ready.
    """
    return NodeView(
        generation=generation,
        workers=Counter(worker.state for worker in doc.workers),
        slots=doc.slots,
        is_draining=doc.draining,
        spares=len(spares),
        is_spare=doc.node in spares,
        saved=doc.progress.saved,
        profile=profile if generation is not None and generation.nodes[:1] == (doc.node,) else "",
    )
