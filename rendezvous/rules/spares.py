"""Spares: nodes that hold workers ready although the job has no place for them, and whose places they take. Pure.

The workers of a spare have registered and wait. When a node is lost or leaves, they are among those that can join, so
the generation that goes on without that node has them already.

Where spares hold the state, they are members, too, on *standby*: they take part in each step with samples that do not
count, and receive the state when they join, not when another node is lost. The first `max_nodes` nodes of a generation
work, and the others are on standby, so whoever takes a place does so by coming before them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elaunch.rendezvous.membership import Generation, GenerationStage, NodeDoc, Worker, WorkerState, node_of
from elaunch.rendezvous.view import MembershipSettings, View

STATE_FLAG, STATE_VARIABLE = "--spare-state", "ELAUNCH_SPARE_STATE"
"""Whether spares hold the state: "1" or "0", the same on all nodes."""


@dataclass(frozen=True, slots=True)
class HeldSpares:
    """The nodes for which the job has no place, and that are to hold workers ready, in the order in which they join."""

    nodes: tuple[str, ...] = ()


def held(view: View, settings: MembershipSettings) -> tuple[str, ...]:
    """Returns the nodes without a member that are to hold workers ready: first those that do, then by their order.

    Nodes on which all workers have failed come last, so that they keep no other node from being a spare; those that
    have finished are none. Nor is any before the job trains: only then is it known that its script uses elaunch.

    Args:
        view: the documents.
        settings: for the numbers of nodes.
    """
    generation = view.generation
    if not settings.spares or generation is None or generation.stage is not GenerationStage.TRAIN:
        return ()
    others = [doc for doc in view.nodes if doc.node not in generation.nodes and _can_join(doc)]
    others.sort(key=lambda doc: (not doc.workers, bool(doc.summary.failed), doc.rank, doc.order, doc.node))
    room = max(0, settings.max_nodes - len(generation.nodes))  # these join as soon as they can
    wanted = max(0, settings.spares - len(standby_nodes(generation)))
    return tuple(doc.node for doc in others[room : room + wanted])


def _can_join(doc: NodeDoc) -> bool:
    return not (doc.draining or doc.departure.sick or doc.summary.finished)


def all_spares(view: View, settings: MembershipSettings) -> tuple[str, ...]:
    """Returns all spares: those that are members on standby, then those that are held.

    Args:
        view: the documents.
        settings: for the numbers of nodes.
    """
    return (*(() if view.generation is None else standby_nodes(view.generation)), *held(view, settings))


def n_ready(view: View, settings: MembershipSettings) -> int:
    """Returns how many spares that are no members have a worker that can join."""
    spares = held(view, settings)
    return sum(
        doc.node in spares and any(worker.state is WorkerState.READY for worker in doc.workers) for doc in view.nodes
    )


def standby_nodes(generation: Generation) -> tuple[str, ...]:
    """Returns the nodes whose workers are on standby."""
    return tuple(dict.fromkeys(map(node_of, generation.standby)))


def in_order(workers: Sequence[Worker], settings: MembershipSettings) -> tuple[tuple[Worker, ...], tuple[str, ...]]:
    """Returns the members by rank, and those of them that are on standby: they come last.

    Args:
        workers: who goes on, the nodes in the order in which they have places.
        settings: for the numbers of nodes, and whether spares hold the state.
    """
    if not settings.spare_state:
        return tuple(workers), ()
    working = set(list(dict.fromkeys(worker.node for worker in workers))[: settings.max_nodes])
    by_rank = tuple(sorted(workers, key=lambda worker: worker.node not in working))
    return by_rank, tuple(worker.id for worker in by_rank if worker.node not in working)


def placed(
    before: Sequence[Worker], survivors: Sequence[Worker], joiners: Sequence[Worker], standby: Collection[str] = ()
) -> tuple[Worker, ...]:
    """Returns who goes on, by rank.

    A node that joins as another one goes takes its places, worker for worker, so that each rank has a worker again and
    what was planned for the ranks still fits. A node on standby does so before one that joins, for it has the state
    already. All others come last.

    Args:
        before: the members of the generation that ends.
        survivors: those that stay, in their order.
        joiners: those that come.
        standby: the members that were on standby in the generation that ends.
    """
    staying, here = set(survivors), {worker.node for worker in survivors}
    idle = list(dict.fromkeys(worker.node for worker in survivors if worker.id in standby))
    gone = list(dict.fromkeys(one.node for one in before if one.node not in here and one.id not in standby))
    fresh = list(dict.fromkeys(worker.node for worker in joiners if worker.node not in here))
    # Who is back takes its own places, but waits for the next ones where somebody has the state for them.
    orphaned = [*(node for node in gone if node not in fresh), *(node for node in gone if node in fresh)]
    heirs = dict(zip(orphaned, idle, strict=False))
    left = [node for node in gone if node not in heirs]
    heirs |= {node: node for node in left if node in fresh}
    rest = [node for node in fresh if node not in heirs.values()]
    heirs |= dict(zip([node for node in left if node not in heirs], rest, strict=False))
    promoted = set(heirs.values()) & set(idle)
    slots = {(worker.node, worker.local_rank): worker for worker in (*joiners, *survivors)}
    places = [
        slots.get((heirs[worker.node], worker.local_rank))
        if worker.node in heirs
        else worker
        if worker in staying and worker.node not in promoted
        else None
        for worker in before
    ]
    kept = [worker for worker in places if worker is not None]
    return tuple(dict.fromkeys((*kept, *survivors, *joiners)))


def taken_over(generation: Generation, standby: Sequence[str], workers: Sequence[Worker]) -> str:
    """Says who of those on standby has a place from now on; "" if nobody.

    Args:
        generation: the one that ends.
        standby: who is on standby after it.
        workers: the members after it.
    """
    ids = {worker.id for worker in workers}
    names = [worker for worker in generation.standby if worker in ids and worker not in standby]
    return f"{', '.join(names)} take{'s' if len(names) == 1 else ''} over" if names else ""
