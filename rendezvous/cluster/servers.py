"""Which nodes of a job serve its etcd, and the next step that leads there. Pure.

With three nodes or more there are three servers: the first three nodes that offer it. With fewer there is one: of two,
either's loss would stop etcd. Steps are taken one at a time, each by what etcd says of its cluster:

    a learner has caught up            -> it is given a vote
    a learner's node is gone, or it does not catch up -> it is removed
    a server's node is gone            -> it is removed, as long as those that are left can agree on it
    there are too few servers          -> the next node is added as a learner
    there are too many, or one's node is about to leave -> that one is removed
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

CATCH_UP_S = 20.0
"""How long a learner may take to start and to catch up."""


@dataclass(frozen=True, slots=True)
class EtcdServer:
    """A node that serves the job's etcd, or is about to.

    Attributes:
        node: its name; empty: nobody knows.
        peer: where it listens for other servers, host:port.
        client: where it listens for agents; empty: it does not serve yet.
        votes: whether it counts for the quorum; else it is a learner.
    """

    node: str
    peer: str
    client: str = ""
    votes: bool = False


@dataclass(frozen=True, slots=True)
class EtcdServers:
    """The servers of a job, as its leader has written them down for the other nodes."""

    servers: tuple[EtcdServer, ...] = ()

    @property
    def clients(self) -> tuple[str, ...]:
        """Returns the addresses at which agents are served."""
        return tuple(one.client for one in self.servers if one.votes and one.client)

    @property
    def n_learners(self) -> int:
        """Returns how many of them have no vote, as far as is known."""
        return sum(not one.votes for one in self.servers)

    def find(self, peer: str) -> EtcdServer | None:
        """Returns the server that listens for others at this address."""
        return next((one for one in self.servers if one.peer == peer), None)


@dataclass(frozen=True, slots=True)
class EtcdMember:
    """A server as etcd lists it.

    Attributes:
        id: hexadecimal.
        peer: see `EtcdServer`, as `client` and `votes`.
        leads: whether it leads the others; its removal costs an election.
    """

    id: str
    peer: str
    client: str
    votes: bool
    leads: bool = False


@dataclass(frozen=True, slots=True)
class ServerOffer:
    """A node that may serve: its name, where it would listen for other servers, and whether it is about to leave."""

    node: str
    peer: str
    leaves: bool = False


@dataclass(frozen=True, slots=True)
class AddServer:
    """Adds the node as a learner."""

    offer: ServerOffer


@dataclass(frozen=True, slots=True)
class PromoteServer:
    """Gives a learner a vote once it has caught up."""

    member: EtcdMember


@dataclass(frozen=True, slots=True)
class RemoveServer:
    """Removes a server, and why."""

    member: EtcdMember
    why: str


ServerStep = AddServer | PromoteServer | RemoveServer


def next_step(
    offers: Sequence[ServerOffer],
    members: Sequence[EtcdMember],
    most: int,
    lost: Mapping[str, float],
    patience_s: float,
    late: Collection[str] = (),
) -> ServerStep | None:
    """Returns what to do next so that the right nodes serve; None: nothing.

    Args:
        offers: of the nodes that are present, in the order in which they joined.
        members: of etcd's cluster.
        most: how many servers there may be.
        lost: for how long no present node has had a member's address, in seconds, by that address.
        patience_s: for how long that may be so before the member is removed.
        late: addresses of learners that have not caught up in time; they are not asked again.
    """
    by_peer = {offer.peer: offer for offer in offers if offer.peer}
    usable = [peer for peer, offer in by_peer.items() if not offer.leaves and peer not in late]
    for member in members:
        if not member.votes:
            if member.peer in late or member.peer not in by_peer:
                return RemoveServer(member, "it has not caught up" if member.peer in late else "its node is gone")
            return PromoteServer(member)
    voters = {member.peer: member for member in members}
    present = [peer for peer in by_peer if peer in voters]
    goal = most if len(usable) >= most else 1
    for peer, member in voters.items():
        if peer not in by_peer:
            if lost.get(peer, 0.0) < patience_s:
                return None
            return RemoveServer(member, "its node is gone") if len(present) > len(voters) // 2 else None
    chosen = sorted((peer for peer in usable if peer in voters), key=lambda peer: not voters[peer].leads)[:goal]
    free = [peer for peer in usable if peer not in voters]
    if len(chosen) < goal:
        return AddServer(by_peer[free[0]]) if free else None
    surplus = [peer for peer in present if peer not in chosen]
    if surplus:
        leaving = [peer for peer in surplus if by_peer[peer].leaves]
        peer = sorted(leaving or surplus, key=lambda peer: not voters[peer].leads)[-1]
        why = "its node leaves" if leaving else f"{len(usable)} nodes are left, and one server is safer than two"
        return RemoveServer(voters[peer], why)
    return None
