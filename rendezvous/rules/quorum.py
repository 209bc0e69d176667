"""Who may go on where the job's own store may be founded anew, so that never two parts of a job do. Pure.

Where an agent of the job hosts the store, others that lose it may found another one (`founding`). Both stores may live,
in two parts of a network, so no store may let a part go on that the other could let go on too. A generation names the
*seats* of its nodes. A new one, in the old store or in a new one, may leave nodes behind where

- the nodes that go on are a majority of the seats, or half of them with the first seat; or
- the agents of all others are known to have ended.

Two parts of one list of seats are never both a majority. What the end of an agent proves, though, depends on what it
had agreed to before: `founding` says when it counts. Nodes without members, or that leave, have no say: they count for
whoever goes on, and take no part in founding a store, until they hear of a newer generation. One that has live workers
counts so only once it has heard of the generation that leaves them out: until then it may found a store with others.

Of a generation that was just written some may not have heard yet. So it keeps the seats of the one before, by which
those would go, and whatever follows it has to suit both; once all have heard of it, it is written anew without those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from elaunch.rendezvous.membership import Generation, GenerationStage, NodeDoc, Result, WorkerState, names_text
from elaunch.rendezvous.view import LeaderDecision, MembershipSettings, View

Seats = tuple[tuple[str, str], ...]
"""Nodes, those that serve the store first, else in the order of the job; and where their agents can be seen to live."""

NUMBERS = 1_000_000
"""So many numbers of generations belong to each store that is founded: what the former one may still write is lower."""


def is_majority(group: Collection[str], seats: Seats) -> bool:
    """Returns whether these nodes are a majority of the seats, or half of them with the first."""
    among = sum(node in group for node, _ in seats)
    return 2 * among > len(seats) or (2 * among == len(seats) and (not seats or seats[0][0] in group))


def may_go_on(group: Collection[str], ended: Collection[str], generation: Generation) -> bool:
    """Returns whether a group of nodes may go on from a generation without the others.

    Args:
        group: those that go on, or have no say.
        ended: liveness addresses of agents that have ended.
        generation: the newest that they know.
    """
    return all(
        is_majority(group, seats) or all(node in group or address in ended for node, address in seats)
        for seats in (generation.seats, generation.former_seats)
    )


def has_say(doc: NodeDoc, generation: Generation) -> bool:
    """Returns whether a node may go on without hearing of a newer generation than this one, as its report tells.

    Otherwise it waits for one in any case, so it goes along with any part of the job: it has given its say away.
    """
    if doc.draining:
        return False
    if generation.stage is GenerationStage.ASSEMBLE:
        return True
    if generation.stage is GenerationStage.START:
        return bool(_staying(doc)) or not doc.summary.elastic  # a plain script is started again
    return any(worker in generation.ids for worker in _staying(doc))


def _staying(doc: NodeDoc) -> list[str]:
    live = [worker.id for worker in doc.workers if worker.state is not WorkerState.DONE]
    return [worker for worker in live if worker not in doc.departure.evicted]


def _gave_say_away(doc: NodeDoc, generation: Generation) -> bool:
    """Returns whether a node has no say, by this generation and by any other that it may have heard of last."""
    has_heard = doc.progress.generation >= generation.number
    has_nobody = not _staying(doc) and doc.progress.attempt == generation.attempt
    return (doc.draining or has_heard or has_nobody) and not has_say(doc, generation)


def bind(decision: LeaderDecision, view: View, now_s: float, settings: MembershipSettings) -> LeaderDecision:
    """Holds a decision back that leaves too many nodes behind, and gives a new generation its seats.

    Args:
        decision: what the rule says otherwise.
        view: what the leader knows.
        now_s: its clock.
        settings: for how long it waits for nodes that are missing.
    """
    after, former = decision.generation, view.generation
    if after is None:
        return decision
    present = {doc.node: doc for doc in view.nodes}
    if former is None:
        return replace(decision, generation=replace(after, seats=_seats(after.nodes, view.nodes, ())))
    seated = {*former.seats, *former.former_seats}
    here = {node for node, address in seated if node in present and present[node].liveness_address == address}
    # A node that is only believed to come back may have gone on elsewhere, by a newer generation than this store has.
    going = here if after.stage is GenerationStage.ASSEMBLE else here.intersection(after.nodes)
    group = going | {node for node in here if _gave_say_away(present[node], former)}
    if not may_go_on(group, view.ended, former):
        missing = sorted(node for node, address in seated if node not in group and address not in view.ended)
        return _wait(tuple(missing), view, now_s, settings)
    seats = former.seats if after.stage is GenerationStage.ASSEMBLE else _seats(after.nodes, view.nodes, former.seats)
    binding = former.seats if is_settled(view, former) or not former.former_seats else former.former_seats
    return replace(decision, generation=replace(after, seats=seats, former_seats=binding))


def settle(view: View) -> Generation | None:
    """Returns the present generation with what has come to be known since it was written; None: nothing has.

    Once all have heard of it, the seats of the one before count no more. And once a worker was seen to hold state, the
    next leader has to know: it may come when all that held some are gone.
    """
    generation = view.generation
    if generation is None:
        return None
    has_former = generation.former_seats not in ((), generation.seats)
    seats = () if has_former and is_settled(view, generation) else generation.former_seats
    begun = generation.begun or (view.begun and generation.stage is GenerationStage.TRAIN)
    settled = replace(generation, former_seats=seats, begun=begun)
    return settled if settled != generation else None


def is_settled(view: View, generation: Generation) -> bool:
    """Returns whether everybody who may act by an older generation has heard of this one, or is none of its nodes."""
    docs = {doc.node: doc for doc in view.nodes}
    nodes = {node for node, _ in generation.seats}

    def has_heard(node: str, address: str) -> bool:
        doc = docs.get(node)
        if doc is None or doc.liveness_address != address:
            return address in view.ended or node not in nodes
        return doc.progress.generation >= generation.number or address in view.ended

    return all(has_heard(*seat) for seat in {*generation.seats, *generation.former_seats})


def _seats(nodes: Iterable[str], docs: Iterable[NodeDoc], former: Seats) -> Seats:
    known = {doc.node: doc for doc in docs}
    addresses = dict(former) | {doc.node: doc.liveness_address for doc in known.values()}
    first = sorted(nodes, key=lambda node: not (node in known and known[node].serves))
    return tuple((node, addresses.get(node, "")) for node in first)


def _wait(missing: tuple[str, ...], view: View, now_s: float, settings: MembershipSettings) -> LeaderDecision:
    """Waits for nodes that may go on elsewhere, and fails where that takes too long."""
    end_s = view.changed_s + settings.join_s
    text = f"without {names_text(missing)} the nodes that are here are no majority, and those may have gone on"
    if now_s < end_s:
        return LeaderDecision(text, wake_s=min(end_s, now_s + 0.5), asks=missing)
    message = f"{text}; nothing was heard of them for {settings.join_s:g} s"
    return LeaderDecision(message, result=Result(False, message))
