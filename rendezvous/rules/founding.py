"""What nodes do that have lost the store of their job: wait, go over to another one, or found it. Pure.

Each asks the agents of all seats how they stand (`Standing`). The store counts as lost where

- nobody listens at the addresses of its servers, or of too many for a quorum, and the agents of those machines have
  ended: it is certain; or
- this node's lease has run out by its own clock: the others count it as lost by now.

A majority of the seats may then found another store (`quorum.may_go_on`), or all whose agents have not ended. The
second rests on what an agent may have agreed to before its end. It cannot have agreed to leave a node behind whose
lease was valid at that time, so its end counts only where each node of the group saw it before its own lease ran out.
In a store that is there it can have lost its own lease, and then have founded another one with a majority: the leader
tells all whom it misses (`Absent`), and their ends do not count.

Each store that is founded has a higher epoch than all that its founder knew of, and generations that are made in it
have numbers that no former store gives out. Nodes go over to the highest epoch. Only where nothing was decided in it,
since too few came, or nobody serves it any more, they return to those that could do without them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from elaunch.rendezvous.membership import Generation, names_text
from elaunch.rendezvous.rules.quorum import NUMBERS, may_go_on
from elaunch.rendezvous.view import View


@dataclass(frozen=True, slots=True)
class Founding:
    """Written into a store when it is founded in the stead of one that was lost.

    Attributes:
        epoch: 1 for the first one; a store that no other had to replace has none.
        node: who has founded it.
        ended: liveness addresses of agents that were known to have ended.
        gone: nodes whose agents have ended, or did not answer for long.
    """

    epoch: int
    node: str
    ended: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Absent:
    """Which agents a store has lost, while those that still use it are too few to go on without them.

    They may have founded another store without these, so their end does not prove that nobody has gone on.

    Attributes:
        addresses: at which they can be seen to live.
    """

    addresses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Standing:
    """How a node stands to the store, as its agent tells whoever asks.

    Attributes:
        node: its name.
        epoch: of its store; 0: that which the job began with.
        newest: the highest epoch that it knows of.
        store: where its store is.
        founder: who has founded that; empty: nobody had to.
        generation: the newest of which it knows.
        away: whether it cannot reach the store.
        serves: whether it hosts a server of the store that votes, and runs or is started again.
        votes: whether it has a say in what becomes of the job.
        founds: whether it can found a store.
        ended: liveness addresses of agents that it saw ended while its own lease was valid, and that the store had.
    """

    node: str
    epoch: int = 0
    newest: int = 0
    store: str = ""
    founder: str = ""
    generation: int = 0
    away: bool = False
    serves: bool = False
    votes: bool = False
    founds: bool = False
    ended: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stay:
    """Go on trying to reach the store.

    Attributes:
        why: for people.
        is_news: whether the user has to know.
    """

    why: str
    is_news: bool = False


@dataclass(frozen=True, slots=True)
class GoOver:
    """Go over to the store that another node has founded, or has gone over to."""

    store: str
    epoch: int


@dataclass(frozen=True, slots=True)
class FoundStore:
    """Found a store, and write this into it."""

    founding: Founding


Move = Stay | GoOver | FoundStore


@dataclass(frozen=True, slots=True)
class Loss:
    """What a node knows of the servers of the store that it cannot reach.

    Attributes:
        servers: how many there are.
        listening: at the addresses of how many somebody listens.
        ended: at how many nobody does, on a machine whose agent has ended.
        lapsed: whether this node's lease has run out by its own clock.
        learners: how many more there are that did not vote when this node heard of them last.
    """

    servers: int
    listening: int
    ended: int
    lapsed: bool
    learners: int = 0

    @property
    def is_certain(self) -> bool:
        """Returns whether too few servers are left to agree on anything, ever."""
        return 2 * (self.servers - self.ended) <= self.servers


def next_move(
    own: Standing,
    generation: Generation,
    others: Mapping[str, Standing | None],
    loss: Loss,
    paused: Collection[str] = (),
    entered: bool = True,
) -> Move:
    """Returns what a node does that cannot reach the store.

    Args:
        own: how it stands; `ended` has what it saw just now, too.
        generation: the newest that it knows.
        others: how others stand, by node; None: they did not answer.
        loss: what it knows of the store.
        paused: nodes that did not answer just now, and may in a moment: their absence stays in doubt for a lease.
        entered: whether it has been in the store that it cannot reach, and is not still on its way there.
    """
    answers = [one for one in others.values() if one is not None]
    if (better := better_store(own, generation, answers, entered)) is not None:
        return better
    order = _order(generation)
    same = [one for one in (own, *answers) if one.epoch == own.epoch]
    using = [one.node for one in same if not one.away]
    if using:
        return Stay(f"{names_text(sorted(using))} can reach it")
    # A learner may have been given a vote that nobody has heard of. Without its host the others have no quorum then.
    most = loss.servers + loss.learners
    if 2 * sum(one.serves for one in same) > most:
        return Stay("the agents that host it are there, and start it again")
    if 2 * loss.listening > most:
        return Stay("its servers can be reached")
    if not (loss.is_certain or loss.lapsed):
        return Stay("its machine does not answer")
    voters = [one for one in (own, *answers) if one.votes and one.away]
    if own not in voters:
        return Stay("this node holds no state: the others may found another one")
    ended = set(own.ended).intersection(*(one.ended for one in voters))
    group = {one.node for one in voters}
    if not may_go_on(group, ended, generation):
        seated = {*generation.seats, *generation.former_seats}
        missing = sorted(node for node, address in seated if node not in group and address not in ended)
        why = f"without {names_text(missing)} the nodes that are left are no majority, and those may have gone on"
        return Stay(why, True)
    newest = max(one.generation for one in voters)
    able = [one for one in voters if one.generation == newest and one.founds]
    if not able:
        return Stay("none of the nodes that are left can serve it", True)
    founder = min(able, key=lambda one: (order.get(one.node, len(order)), one.node))
    if founder is not own:
        return Stay(f"{founder.node} founds another one")
    epoch = 1 + max(max(one.epoch, one.newest) for one in (own, *answers))
    here = {own.node, *paused, *(one.node for one in answers)}
    gone = tuple(sorted(node for node in order if node not in here))
    return FoundStore(Founding(epoch, own.node, tuple(sorted(ended)), gone))


def better_store(
    own: Standing, generation: Generation, answers: Collection[Standing], entered: bool = True
) -> GoOver | None:
    """Returns where a node goes over to whose store is lost, or has too few of the job's nodes; None: nowhere.

    Args:
        own, generation, entered: as for `next_move`.
        answers: how others stand.
    """
    has_decided = own.generation >= own.epoch * NUMBERS
    is_given_up = not entered and not any(one.serves and one.store == own.store for one in (own, *answers))

    def is_better(other: Standing) -> bool:
        if not other.store or other.store == own.store:
            return False
        if other.epoch > own.epoch:
            return True
        if is_given_up:
            return not other.away
        # Its founder has given it up; or too few have come to it, and others go on where they were.
        return (own.epoch > 0 and not has_decided) and (other.node == own.founder or not other.away)

    better = [one for one in answers if is_better(one)]
    if not better:
        return None
    order = _order(generation)
    best = min(better, key=lambda one: (-one.epoch, order.get(one.node, len(order)), one.node))
    return GoOver(best.store, best.epoch)


def _order(generation: Generation) -> dict[str, int]:
    """Returns the places of nodes in the order by which one of them is chosen."""
    nodes = dict.fromkeys(node for node, _ in (*generation.seats, *generation.former_seats))
    return {node: index for index, node in enumerate(nodes)}


def absent_agents(view: View, missing: Collection[str]) -> frozenset[str]:
    """Returns the liveness addresses of those of the missing nodes that the store has lost.

    Args:
        view: what its leader knows.
        missing: nodes without which the others may not go on.
    """
    generation = view.generation
    if generation is None or not missing:
        return frozenset()
    here = {doc.liveness_address for doc in view.nodes}
    seated = (*generation.seats, *generation.former_seats)
    return frozenset(address for node, address in seated if node in missing and address not in here)


def may_have_paused(address: str, silent: Collection[str], lapsed: bool) -> bool:
    """Returns whether an agent that did not answer just now may do so in a moment.

    It may not where the store's server on its machine was not heard for a lease, and does not answer either.

    Args:
        address: the agent's.
        silent: addresses of the servers of the store that do not answer.
        lapsed: whether the lease of the node that asks has run out.
    """
    return not (lapsed and seen_ended(silent, (address,)))


def seen_ended(addresses: Collection[str], ended: Collection[str]) -> int:
    """Returns how many of these addresses are on machines of agents that have ended."""
    hosts = {address.rpartition(":")[0] for address in ended}
    return sum(address.rpartition(":")[0] in hosts for address in addresses)
