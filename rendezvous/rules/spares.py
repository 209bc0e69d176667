"""Spares: nodes that hold workers ready although the job has no place for them, and whose places they take. Pure.

The workers of a spare have registered and wait. When a node is lost or leaves, they are among those that can join, so
the generation that goes on without that node has them already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elaunch.rendezvous.membership import GenerationStage, Worker, WorkerState
from elaunch.rendezvous.view import MembershipSettings, View


@dataclass(frozen=True, slots=True)
class HeldSpares:
    """The nodes for which the job has no place, and that are to hold workers ready, in the order in which they join."""

    nodes: tuple[str, ...] = ()


def held(view: View, settings: MembershipSettings) -> tuple[str, ...]:
    """Returns the nodes that are to hold workers ready: those that do already, then by the order in which they came.

    None before the job trains: only then is it known that its script uses elaunch.

    Args:
        view: the documents.
        settings: for the numbers of nodes.
    """
    generation = view.generation
    if not settings.spares or generation is None or generation.stage is not GenerationStage.TRAIN:
        return ()
    others = [
        doc for doc in view.nodes if doc.node not in generation.nodes and not doc.draining and not doc.departure.sick
    ]
    others.sort(key=lambda doc: (not doc.workers, doc.rank, doc.order, doc.node))
    room = max(0, settings.max_nodes - len(generation.nodes))  # these join as soon as they can
    return tuple(doc.node for doc in others[room : room + settings.spares])


def n_ready(view: View, settings: MembershipSettings) -> int:
    """Returns how many spares have a worker that can join."""
    spares = held(view, settings)
    return sum(
        doc.node in spares and any(worker.state is WorkerState.READY for worker in doc.workers) for doc in view.nodes
    )


def placed(before: Sequence[Worker], survivors: Sequence[Worker], joiners: Sequence[Worker]) -> tuple[Worker, ...]:
    """Returns who goes on, by rank.

    A node that joins as another one goes takes its places, worker for worker, so that each rank has a worker again and
    what was planned for the ranks still fits. All other joiners come last.

    Args:
        before: the members of the generation that ends.
        survivors: those that stay, in their order.
        joiners: those that come.
    """
    staying, here = set(survivors), {worker.node for worker in survivors}
    gone = list(dict.fromkeys(worker.node for worker in before if worker.node not in here))
    fresh = list(dict.fromkeys(worker.node for worker in joiners if worker.node not in here))
    heirs = {node: node for node in gone if node in fresh}
    rest = [node for node in fresh if node not in heirs]
    heirs |= dict(zip([node for node in gone if node not in heirs], rest, strict=False))
    slots = {(worker.node, worker.local_rank): worker for worker in joiners}
    places = [
        worker if worker in staying else slots.get((heirs.get(worker.node, ""), worker.local_rank)) for worker in before
    ]
    kept = [worker for worker in places if worker is not None]
    return tuple(dict.fromkeys((*kept, *survivors, *joiners)))
