"""Which sick nodes leave a job: as many as it can do without. Pure.

A node that is about to fail asks to leave. It does not decide that by itself: two that do so at once would each count
on the other to stay.
"""

from __future__ import annotations

from collections.abc import Collection

from elaunch.rendezvous.membership import GenerationStage
from elaunch.rendezvous.view import View


def sick_to_leave(view: View, min_nodes: int, asked: Collection[str], ready: int = 0) -> dict[str, str]:
    """Returns the sick nodes that are to leave now, and why each is; the last to join first.

    Args:
        view: the documents.
        min_nodes: how many nodes must be left. One is, in any case.
        asked: nodes that were asked to leave before, for whatever reason. Those that are sick stay in the result until
            they leave.
        ready: how many spares are there to take the places of nodes that leave.
    """
    generation = view.generation
    if generation is None or generation.stage is not GenerationStage.TRAIN or view.result is not None:
        return {}
    members = [doc for doc in view.nodes if doc.node in generation.node_set and not doc.draining]
    leaving = [doc for doc in members if doc.node in asked]
    staying = sorted((doc for doc in members if doc.node not in asked), key=lambda doc: (doc.rank, doc.order, doc.node))
    spared = max(0, len(staying) + ready - max(min_nodes, 1))
    chosen = [doc for doc in reversed(staying) if doc.departure.sick][:spared]
    return {doc.node: doc.departure.sick for doc in (*leaving, *chosen) if doc.departure.sick}
