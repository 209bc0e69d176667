"""A toy etcd of one server or several on simulated nodes: a quorum, data, and members that change one at a time.

What decides is real: `HostedEtcd` keeps the server of a node, `ServerKeeper` takes the steps of `servers.next_step`,
and `StoreOpener` knows where the servers are. Raft is taken for granted, as far as one can see it from outside: a write
needs a majority of those that vote, who leads has all that was written, and leases begin anew when another one leads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, cast

from elaunch.agent.watch.hosted import HostedEtcd, ServerPlace
from elaunch.errors import LaunchError, StoreUnavailable
from elaunch.rendezvous.cluster.servers import CATCH_UP_S as LATE_S
from elaunch.rendezvous.cluster.servers import EtcdMember, EtcdServers
from elaunch.rendezvous.codec import from_json
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.view import View

if TYPE_CHECKING:
    from elaunch.rendezvous.membership import NodeDoc
    from tests.simulation.control_founding import FoundingNode, FoundingWorld, HostedStore

PORT = 29400
START_S = 0.2
CATCH_UP_S = 1.0
LAG_S = 0.02
ELECTION_S = 0.3
NO_PID = 1 << 30  # greater than that of any process
LOST_ANSWERS = 0.02


@dataclass(eq=False)
class Member:
    """A server as the others of its cluster have agreed on it.

    Attributes:
        server: its process; None: it has not been started.
    """

    id: str
    peer: str
    votes: bool
    server: SimulatedEtcd | None = None


class SimulatedEtcd:
    """The process of a server and its data, in the place of `EmbeddedEtcd`.

    Attributes:
        held: how many of the entries of its cluster it has.
        has_caught_up: whether it has had all of them; only one that has counts.
    """

    folder = ""

    def __init__(self, node: FoundingNode, peer: str, port: int) -> None:
        self.node, self.peer = node, peer
        self.endpoint = f"{node.name}:{port}"
        self.cluster: Cluster | None = None
        self.member: Member | None = None
        self.runs = False
        self.exitcode: int | None = None
        self.held = 0
        self.has_caught_up = False
        self.serves_s = inf
        self._world = node.founding_world

    @property
    def pid(self) -> int | None:
        return NO_PID if self.runs else None

    def last_line(self) -> str:
        return ""

    def start(self, has_threads: bool = False) -> None:
        """Begins a store of its own."""
        if self._world.server_at(self.endpoint) is not None:
            raise LaunchError(f"{self.endpoint} is in use")
        self.has_caught_up = True
        self._run()

    def join(self, peers: Any) -> None:
        """Comes to a cluster that expects it, without data."""
        if self._world.server_at(self.endpoint) is not None:
            self.endpoint = f"{self.node.name}:{self._world.free_port()}"
        for store in self._world.stores:
            for member in store.cluster.members:
                if member.peer == self.peer and member.server is None:
                    self.cluster, self.member, member.server = store.cluster, member, self
        self._run()
        self._world.at(START_S + self._world.rng.random() * CATCH_UP_S * self.node.slowness, self._catch_up)
        if self.node.slowness > 1.0:
            self._world.disturbed_s = self._world.now_s + LATE_S
        self.node.slowness = 1.0

    def start_again(self) -> None:
        self._run()

    def stop(self, grace_s: float = 1.0) -> None:
        self.end(0)

    def end(self, code: int, silently: bool = False) -> None:
        """Ends the process; `silently`: with its machine."""
        if not self.runs:
            return
        self.runs, self.exitcode, self.serves_s = False, code, inf
        if self.cluster is not None:
            self.cluster.look()
        if not silently:
            self._world.at(0.01, self.node.tend)

    def _run(self) -> None:
        self.runs, self.exitcode, self.serves_s = True, None, self._world.now_s + START_S
        self._world.at(START_S, self._serve)

    def _serve(self) -> None:
        if self.runs and self.cluster is not None:
            if self.member in self.cluster.members:
                self.cluster.look()
            else:  # one that was removed does not come back
                self.end(1)
        elif self.runs:
            self.end(1)

    def _catch_up(self) -> None:
        cluster, member = self.cluster, self.member
        if not self.runs or cluster is None or member not in cluster.members or self.has_caught_up:
            return
        if cluster.leader is not None and cluster.hears(member, cluster.leader):
            self.has_caught_up, self.held = True, cluster.written
            cluster.look()
        else:
            self._world.at(0.2, self._catch_up)


class Cluster:
    """The servers of a store.

    Args:
        world: of the simulation.
        first: the server that it begins with.
        changed: called when other servers can be used than before.
        elected: called when another server leads.

    Attributes:
        members: as they have agreed, each change after the one before.
        changed_s: when that was last.
        leader: who leads; None: nobody can, or nobody has been elected yet.
        electing: whether somebody is about to be elected.
        term: how often somebody was.
        written: how many entries they have agreed on.
        led_s: when somebody led last.
    """

    def __init__(
        self,
        world: FoundingWorld,
        first: SimulatedEtcd,
        changed: Callable[[], None],
        elected: Callable[[], None],
    ) -> None:
        self.world = world
        self.members = [Member(world.new_id(), first.peer, True, first)]
        self.leader: Member | None = None
        self.electing = False
        self.term = 0
        self.written = 0
        self.led_s = world.now_s
        self.changed_s = world.now_s
        self._changed = changed
        self._elected = elected
        self._written_s = 0.0
        first.cluster, first.member = self, self.members[0]

    @property
    def voters(self) -> list[Member]:
        return [one for one in self.members if one.votes]

    def runs(self, member: Member) -> bool:
        return member.server is not None and member.server.runs and self.world.now_s >= member.server.serves_s

    def hears(self, one: Member, other: Member) -> bool:
        """Whether two servers run, and something passes between them."""
        if not (self.runs(one) and self.runs(other)):
            return False
        assert one.server is not None
        assert other.server is not None
        return self.world.passes(one.server.node.name, other.server.node.name)

    def counts(self, member: Member, leader: Member) -> bool:
        """Whether a server takes what another one writes."""
        return self.hears(member, leader) and cast(SimulatedEtcd, member.server).has_caught_up

    def has_quorum(self, leader: Member) -> bool:
        voters = self.voters
        return leader in voters and 2 * sum(self.counts(one, leader) for one in voters) > len(voters)

    def can_lead(self, member: Member) -> bool:
        """Whether a majority of those that vote would vote for a server: those do that have no more than it."""
        if member.server is None or not member.votes:
            return False
        for_it = [
            one
            for one in self.voters
            if self.counts(one, member) and cast(SimulatedEtcd, one.server).held <= member.server.held
        ]
        return 2 * len(for_it) > len(self.voters)

    def write(self) -> None:
        """All that is written goes to a majority at once, and to the others a moment later."""
        leader, world = self.leader, self.world
        assert leader is not None, "a store is written to while no server leads"
        assert self.has_quorum(leader), "a store without a quorum is written to"
        self.take_over()
        self.written += 1
        voters = [one for one in self.voters if one is not leader and self.counts(one, leader)]
        learners = [one for one in self.members if not one.votes and self.counts(one, leader)]
        n_needed = len(self.voters) // 2
        for index, member in enumerate([*world.rng.sample(voters, len(voters)), *learners]):
            if (index < n_needed and member.votes) or world.rng.random() < 0.7:
                cast(SimulatedEtcd, member.server).held = self.written
        cast(SimulatedEtcd, leader.server).held = self.written
        self._written_s = world.now_s

    def take_over(self) -> None:
        """What a server lacked of the last writes it has by now."""
        if self.leader is not None and self.world.now_s > self._written_s + LAG_S:
            for one in self.members:
                if self.counts(one, self.leader):
                    cast(SimulatedEtcd, one.server).held = self.written

    def look(self) -> None:
        """Sees who leads after something has changed."""
        if self.leader is not None:
            self.led_s = self.world.now_s
            if not (self.leader in self.members and self.has_quorum(self.leader)):
                self.leader = None
        if self.leader is None and not self.electing and any(map(self.can_lead, self.members)):
            self.electing = True
            if len(self.members) == 1:
                self._elect()
                return
            self.world.at(ELECTION_S * (1 + self.world.rng.random()), self._elect)
        self._changed()

    def _elect(self) -> None:
        self.electing = False
        able = [one for one in self.members if self.can_lead(one)]
        if self.leader is None and able:
            self.leader = able[0] if len(able) == 1 else self.world.rng.choice(able)
            held = cast(SimulatedEtcd, self.leader.server).held
            assert held == self.written, f"{self.leader.peer} leads with {held} of {self.written} entries"
            self.term += 1
            self._elected()
        self._changed()

    # -- members ------------------------------------------------------------------------------------------------------

    def add(self, peer: str) -> None:
        assert all(one.votes for one in self.members), "a learner is added, and there is one already"
        self.members.append(Member(self.world.new_id(), peer, False))
        self._change()

    def promote(self, member: Member) -> bool:
        server = member.server
        if member.votes:
            return True
        if server is None or not self.is_ready(server):
            return False
        assert server.has_caught_up, f"{member.peer} votes with {server.held} of {self.written} entries"
        member.votes = True
        self._change()
        return True

    def is_ready(self, server: SimulatedEtcd) -> bool:
        """Whether a learner has nine tenths of all, as etcd asks; it may have ended since."""
        return server.has_caught_up and 10 * server.held >= 9 * self.written

    def remove(self, member: Member) -> None:
        had_quorum = any(map(self.has_quorum, self.members))
        self.members.remove(member)
        if had_quorum and not self.world.parted:
            assert any(map(self.has_quorum, self.members)), f"without {member.peer} the others have no quorum"
        self.world.at(0.1, lambda: self._end_removed(member))
        self._change()

    def _end_removed(self, member: Member) -> None:
        """A server that was removed ends when it hears of that."""
        if member.server is not None and member.server.runs:
            if any(self.hears(one, member) for one in self.members):
                member.server.end(0)
            else:
                self.world.at(0.5, lambda: self._end_removed(member))

    def _change(self) -> None:
        self.changed_s = self.world.now_s
        self.write_if_possible()
        self.look()

    def write_if_possible(self) -> None:
        if self.leader is not None and self.leader in self.members and self.has_quorum(self.leader):
            self.write()


class SimulatedPlace(ServerPlace):
    """Where the server of a simulated node would be: each has another address for the others."""

    def __init__(self, node: FoundingNode, is_alone: bool) -> None:
        self._node = node
        self.servers: list[SimulatedEtcd] = []
        super().__init__(node.name, PORT, lambda folder: None, is_alone=is_alone)
        self._alone = is_alone

    def renew(self) -> str:
        if not self._is_alone:
            self.address = f"{self._node.name}:{self._node.founding_world.free_port()}"
        return self.address

    def make_server(self, at_any_port: bool = False) -> EmbeddedEtcd:
        port = self._node.founding_world.free_port() if at_any_port else self.port
        made = SimulatedEtcd(self._node, self.address, port)
        self.servers.append(made)
        return cast(EmbeddedEtcd, made)


class SimulatedHost(HostedEtcd):
    """Keeps the server of a simulated node; nobody looks for jobs on its machine."""

    def _list(self, folder: str, endpoint: str) -> None:
        pass


@dataclass(frozen=True)
class Written:
    """The document on the servers, as it stands."""

    servers: EtcdServers
    revision: int

    def as_event(self) -> Written:
        return self


class KeptStore:
    """What `ServerKeeper` sees of a node and its store: in the place of its session, replica, members and reporter."""

    def __init__(self, node: FoundingNode) -> None:
        self._node = node

    # -- the session ----------------------------------------------------------------------------------------------

    def get(self, name: str) -> Written | None:
        written = self._store().written
        return written if written.revision else None

    def replace(self, name: str, value: bytes, expected: int) -> bool:
        store = self._store()
        if store.written.revision != expected:
            return False
        store.cluster.write()
        store.revision += 1
        store.written = Written(from_json(EtcdServers, value), store.revision)
        for node in store.users():
            node.later(self._node.founding_world.seeing(node, store.written))
        return True

    # -- the replica ----------------------------------------------------------------------------------------------

    @property
    def nodes(self) -> dict[str, NodeDoc]:
        return self._node.docs

    @property
    def view(self) -> View:
        return self._node.view

    @property
    def servers(self) -> EtcdServers:
        return self._node.servers

    def take(self, written: Written) -> None:
        self._node.see_servers(written)

    # -- the members ----------------------------------------------------------------------------------------------

    def list(self) -> tuple[EtcdMember, ...]:
        cluster = self._store().cluster
        return tuple(
            EtcdMember(
                one.id,
                one.peer,
                one.server.endpoint if one.server is not None and one.server.has_caught_up else "",
                one.votes,
                one is cluster.leader,
            )
            for one in cluster.members
        )

    def add(self, peer: str) -> None:
        cluster = self._store().cluster
        if all(one.peer != peer for one in cluster.members):
            cluster.add(peer)
        self._lose_answer()

    def promote(self, member: str) -> bool:
        cluster = self._store().cluster
        found = [one for one in cluster.members if one.id == member]
        if not found:
            raise LaunchError("member not found")
        if not cluster.promote(found[0]):
            return False
        self._lose_answer()
        return True

    def remove(self, member: str) -> None:
        store = self._store()
        for one in list(store.cluster.members):
            if one.id == member:
                store.check_removal(one, self.nodes.values(), self._node.keeper._late)
                store.cluster.remove(one)
        self._lose_answer()

    def answers(self, client: str) -> bool:
        return self._node.founding_world.listens(self._node, client)

    # -- the reporter ---------------------------------------------------------------------------------------------

    def warn(self, text: str) -> None:
        self._node.world.note(self._node.name, f"says: {text}")

    def tell_setback(self, error: Exception, what: str) -> None:
        self.warn(f"{error}: {what}")

    def _store(self) -> HostedStore:
        store = self._node.hosted
        if not self._node.connected or store.cluster.leader is None:
            raise StoreUnavailable("no server leads")
        return store

    def _lose_answer(self) -> None:
        """Something was done, and whoever asked for it does not hear so."""
        if self._node.world.rng.random() < LOST_ANSWERS:
            raise StoreUnavailable("the answer was lost")
