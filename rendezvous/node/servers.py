"""What a node does because it leads so that the right nodes serve the store; `cluster.servers` has the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Protocol

from elaunch.errors import LaunchError, StoreUnavailable
from elaunch.rendezvous.cluster.servers import (
    CATCH_UP_S,
    AddServer,
    EtcdMember,
    EtcdServer,
    EtcdServers,
    PromoteServer,
    RemoveServer,
    ServerOffer,
    ServerStep,
    next_step,
)
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.node.replica import Replica
from elaunch.rendezvous.node.reporter import Reporter
from elaunch.rendezvous.node.session import Session

STEP_S = 0.05
LOST_S = 0.5
AGAIN_S = 5.0


class StoreMembers(Protocol):
    """Changes the members of the store's cluster, as `cluster.members.ClusterMembers` does."""

    def list(self) -> tuple[EtcdMember, ...]:
        """Returns all of them, those that do not live any more included."""

    def add(self, peer: str) -> None:
        """Adds a learner."""

    def promote(self, member: str) -> bool:
        """Gives a learner a vote; returns False as long as it has not caught up."""

    def remove(self, member: str) -> None:
        """Removes a server."""

    def answers(self, client: str) -> bool:
        """Returns whether somebody listens at a server's address for agents."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """How several nodes serve the store.

    Attributes:
        most: how many.
        patience_s: for how long no present node has had a server before it is removed, in seconds.
        members: of the cluster that the store that is open connects to.
        use: has the store that is open, and those that are opened later, connect to servers at these addresses.
    """

    most: int
    patience_s: float
    members: Callable[[], StoreMembers]
    use: Callable[[Sequence[str]], None]


class ServerKeeper:
    """Looks at the cluster when nodes have come or gone, and takes one step at a time.

    Args:
        session: reads and writes.
        replica: of the documents.
        settings: how many servers there may be.
        reporter: for lines to the user.
        clock: in seconds.

    Attributes:
        due_s: when to look again at the latest.
    """

    def __init__(
        self,
        session: Session,
        replica: Replica,
        settings: ServerSettings,
        reporter: Reporter,
        clock: Callable[[], float],
    ) -> None:
        self.due_s = 0.0
        self._session = session
        self._replica = replica
        self._settings = settings
        self._reporter = reporter
        self._clock = clock
        self._used = EtcdServers()
        self._offers: tuple[ServerOffer, ...] = ()
        self._lost_since_s: dict[str, float] = {}
        self._learner_since_s: dict[str, float] = {}
        self._late: set[str] = set()

    def follow(self) -> None:
        """Goes over to the servers that there are now; every node does."""
        if self._replica.servers != self._used:
            self._used = self._replica.servers
            if self._used.clients:
                self._settings.use(self._used.clients)

    def turn(self) -> None:
        """Takes the next step where nodes have come or gone since the last one, or when it is time to."""
        nodes = sorted(self._replica.nodes.values(), key=lambda doc: doc.order)
        offers = tuple(ServerOffer(doc.node, doc.store_address, doc.draining) for doc in nodes if doc.store_address)
        now_s = self._clock()
        if self._replica.view.result is not None or (offers == self._offers and now_s < self.due_s):
            return
        self._offers, self.due_s = offers, inf
        if len(offers) < self._settings.most and not self._replica.servers.servers:
            return  # there is one server, and that is right
        try:
            self._look(self._settings.members(), now_s)
        except StoreUnavailable:
            self.due_s = now_s
            raise
        except LaunchError as error:
            self.due_s = now_s + AGAIN_S
            self._reporter.tell_setback(error, "the store is served by the same nodes as before; this is tried again")

    def _look(self, cluster: StoreMembers, now_s: float) -> None:
        members = cluster.list()
        known = {offer.peer for offer in self._offers}
        self._lost_since_s = {
            one.peer: self._lost_since_s.get(one.peer, now_s) for one in members if one.peer not in known
        }
        self._learner_since_s = {
            one.peer: self._learner_since_s.get(one.peer, now_s) for one in members if not one.votes
        }
        self._late &= known
        self._late |= {peer for peer, since_s in self._learner_since_s.items() if now_s > since_s + CATCH_UP_S}
        lost = {peer: now_s - since_s for peer, since_s in self._lost_since_s.items()}
        settings = self._settings
        step = next_step(self._offers, members, settings.most, lost, settings.patience_s, self._late)
        if step is None:
            self._write(members)
            is_new = any(not one.client for one in members)  # etcd hears of it when the server serves
            self.due_s = now_s + STEP_S if is_new else now_s + LOST_S if lost else inf
            return
        if isinstance(step, RemoveServer) and not self._can_spare(cluster, members, step.member):
            self.due_s = now_s + LOST_S
            return
        self._take(cluster, members, step)
        self.due_s = now_s + STEP_S

    def _can_spare(self, cluster: StoreMembers, members: tuple[EtcdMember, ...], member: EtcdMember) -> bool:
        """Returns whether the others are a quorum: a node may be dead although its lease has not run out yet."""
        others = [one for one in members if one.votes and one != member]
        return sum(cluster.answers(one.client) for one in others) > len(others) // 2

    def _take(self, cluster: StoreMembers, members: tuple[EtcdMember, ...], step: ServerStep) -> None:
        match step:
            case AddServer():
                cluster.add(step.offer.peer)
                self._write(cluster.list())
            case PromoteServer():
                self._write(members)
                if cluster.promote(step.member.id):
                    self._write(tuple(replace(one, votes=True) if one == step.member else one for one in members))
            case RemoveServer():
                # First the nodes hear of it, so that nobody takes the end of that server for an accident.
                self._write(tuple(one for one in members if one != step.member))
                where = step.member.client or step.member.peer
                self._reporter.warn(f"the server of the store at {where} is removed: {step.why}")
                cluster.remove(step.member.id)

    def _write(self, members: tuple[EtcdMember, ...]) -> None:
        """Tells all nodes which servers there are, if they do not know it."""
        names = {offer.peer: offer.node for offer in self._offers}
        names = {one.peer: one.node for one in self._replica.servers.servers} | names
        servers = EtcdServers(
            tuple(EtcdServer(names.get(one.peer, ""), one.peer, one.client, one.votes) for one in members)
        )
        if servers == self._replica.servers:
            return
        entry = self._session.get("servers")
        self._session.replace("servers", to_json(servers), entry.revision if entry is not None else 0)
        entry = self._session.get("servers")
        if entry is not None:  # the watch will say so too
            self._replica.take(entry.as_event())
