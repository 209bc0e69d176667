"""Simulated jobs whose store is on their nodes, and is founded anew where too many of those are lost or cut off.

The rules are the real ones: `rules.quorum`, by way of `decide`, `rules.founding`, and `cluster.servers` where several
nodes serve the store. It can be reached by those that reach a server of its quorum; who cannot keeps its membership
until its lease has run out by its own clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any, cast

from elaunch.agent.decisions.actions import Exit
from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.cluster.opener import StoreOpener
from elaunch.rendezvous.cluster.servers import CATCH_UP_S, EtcdServers
from elaunch.rendezvous.cluster.standings import LOST_S
from elaunch.rendezvous.membership import Generation, NodeDoc
from elaunch.rendezvous.node.servers import ServerKeeper, ServerSettings
from elaunch.rendezvous.rules.founding import (
    Founding,
    FoundStore,
    GoOver,
    Loss,
    Move,
    Standing,
    absent_agents,
    better_store,
    may_have_paused,
    next_move,
    seen_ended,
)
from elaunch.rendezvous.rules.quorum import NUMBERS, has_say
from tests.simulation.control_node import Node
from tests.simulation.control_servers import (
    PORT,
    Cluster,
    KeptStore,
    Member,
    SimulatedEtcd,
    SimulatedHost,
    SimulatedPlace,
    Written,
)
from tests.simulation.control_store import Document, Store
from tests.simulation.control_world import Case, World

ROUND_S = 0.2
ANSWER_S = 0.3
START_S = 0.2
LOST_ANSWERS = 0.05
SERVER_LOST_S = 2.0  # as in `agent.participation`
HAND_OVER_S = 5.0
SERVES_WITHIN_S = 10.0
EVEN_S = 15.0  # a lease, until the server of a lost node is removed, and until another one votes
SLOW = 2 * CATCH_UP_S  # at most as many seconds as are given twice


class HostedStore(Store):
    """A store on nodes of its job, whose servers end with the agents there.

    Attributes:
        name: which one it is, and where it began.
        cluster: its servers.
        founding: how it was founded; None: the job began with it.
        left: liveness addresses of agents that have left in good order.
        absent: those of agents that its leader misses.
        written: which servers there are, as the nodes are told.
    """

    def __init__(self, world: FoundingWorld, first: SimulatedEtcd, founding: Founding | None) -> None:
        super().__init__(world)
        self.up = False
        self.name = f"store{len(world.stores)}@{first.node.name}"
        self.cluster = Cluster(world, first, self._look, self._begin_leases)
        self.founding = founding
        self.written = Written(EtcdServers(), 0)
        self.left: set[str] = set()
        self.absent: frozenset[str] = frozenset()
        self.heard: dict[str, int] = {}  # how often each node has written
        # Revisions of different stores have nothing to do with each other; here they differ, to show mistakes.
        self.revision = 1000 * len(world.stores)

    @property
    def epoch(self) -> int:
        return self.founding.epoch if self.founding is not None else 0

    def reaches(self, node: Node) -> bool:
        return self.server_for(node) is not None

    def server_for(self, node: Node) -> SimulatedEtcd | None:
        """The first server that a node knows and reaches, and that has the others behind it."""
        assert isinstance(node, FoundingNode)
        addresses = node.opener.addresses
        for member in self.cluster.members:
            server = member.server
            if server is not None and server.endpoint in addresses and self._serves(server, node):
                return server
        return None

    def _serves(self, server: SimulatedEtcd, node: Node) -> bool:
        assert isinstance(self.world, FoundingWorld)
        member, leader = server.member, self.cluster.leader
        is_there = member is not None and leader is not None and self.cluster.counts(member, leader)
        return is_there and self.world.passes(node.name, server.node.name)

    def _look(self) -> None:
        """Other servers can be used than before: who was connected to one that cannot finds out."""
        self.up = self.cluster.leader is not None
        for node in self.users():
            assert isinstance(node, FoundingNode)
            server = node.server
            if not node.connected or server is None:
                continue
            if not server.runs and not server.node.machine_lost:
                node.hang_up()
            elif not self._serves(server, node) and not (self.cluster.electing and self._listens(server, node)):
                node.fall_silent()

    def _listens(self, server: SimulatedEtcd, node: Node) -> bool:
        assert isinstance(self.world, FoundingWorld)
        return server.runs and server.member in self.cluster.members and self.world.passes(node.name, server.node.name)

    def _begin_leases(self) -> None:
        """Leases begin anew with the server that leads now; those that are not renewed end later than they would."""
        assert isinstance(self.world, FoundingWorld)
        if self.cluster.term > 1:
            for node in self.world.agents():
                if self._has(node):
                    self.heard[node.name] += 1
                    if node.store is not self or not node.connected:
                        self.watch_lease(node)

    def check_removal(self, member: Member, known: Iterable[NodeDoc], late: Collection[str]) -> None:
        """A server that votes is removed only where it does not serve well, or there are too many.

        Of the nodes that its leader knows, those do not count that were `late` to catch up, and offer no other yet.
        """
        world, server = self.world, member.server
        assert isinstance(world, FoundingWorld)
        if not member.votes or server is None or not server.runs:
            return
        node = server.node
        is_well = node.connected and node.store is self and not node.life.ending.draining
        usable = [doc for doc in known if doc.store_address and not doc.draining and doc.store_address not in late]
        assert not is_well or len(self.cluster.voters) > world.most or len(usable) < world.most, (
            f"{member.peer} is removed, though it serves well"
        )

    def bring(self, generation: Generation) -> None:
        """A node that comes knows a newer generation than this store has."""
        if self.generation is None or self.generation.number < generation.number:
            self.announced.append(generation)
            self.generations.append(generation.number)
            self.revision += 1
            self.generation, self.generation_revision = generation, self.revision
            for node in self.users():
                node.later(node.read_generation(generation, self.revision))

    def announce(self, generation: Generation, expected: int, by: str) -> bool:
        former = self.generation
        self.cluster.write()
        if not super().announce(generation, expected, by):
            return False
        assert isinstance(self.world, FoundingWorld)
        self.world.decided(self, generation, former)
        # Now and then the answer is lost, and who asks again finds the document changed: it takes that for a refusal.
        return self.world.rng.random() > LOST_ANSWERS

    def remove(self, node: Node) -> None:
        if self._has(node):
            super().remove(node)

    def watch_lease(self, node: Node) -> None:
        heard = self.heard.get(node.name, 0)
        self.world.at(self.world.settings.lease_s, lambda: self._end_lease(node, heard))

    def _end_lease(self, node: Node, heard: int) -> None:
        uses = node.store is self
        if not self.up or not self._has(node) or (uses and node.connected) or heard != self.heard[node.name]:
            return
        self.world.note(node.name, f"has lost its lease in {self.name}: nothing was heard from it")
        if uses:
            self.remove(node)
        else:
            self.forget(node)

    def tell_absent(self, absent: frozenset[str], by: str) -> None:
        if absent != self.absent:
            self.world.note(by, f"tells all that {', '.join(sorted(absent)) or 'nobody'} is absent")
            self.cluster.write()
            self.absent = absent
            for node in self.users():
                assert isinstance(node, FoundingNode)
                node.later(partial(node.see_absent, absent))

    def settle(self, generation: Generation, expected: int) -> None:
        self.cluster.write()
        super().settle(generation, expected)

    def put(self, doc: NodeDoc) -> None:
        self.cluster.write()
        self.heard[doc.node] = self.heard.get(doc.node, 0) + 1
        super().put(doc)

    def _has(self, node: Node) -> bool:
        return node.name in self.docs and self.docs[node.name][0].liveness_address == node.life.liveness_address


class FoundingNode(Node):
    """An agent that does what `node.founder.Founder` does, and may serve the store.

    Attributes:
        host: its server of the store.
        opener: where it looks for the store.
        server: the one to which it is connected.
        servers: of its store, as it was told.
        absent: from its store, as it was told.
        slowness: how much longer than usual its next server takes to catch up.
    """

    def __init__(self, world: FoundingWorld, name: str) -> None:
        self.used: HostedStore | None = None
        super().__init__(world, name)
        self.founding_world = world
        self.slowness = 1.0
        self.place = SimulatedPlace(self, world.most == 1)
        self.host = SimulatedHost(None, cast(Any, None), partial(self.say, "says"), world.now_s, self.place)
        self.opener = StoreOpener("", cast(Any, None))
        self.server: SimulatedEtcd | None = None
        self.servers = EtcdServers()
        self.absent: frozenset[str] = frozenset()
        self.servers_revision = 0
        kept = KeptStore(self)
        settings = ServerSettings(world.most, SERVER_LOST_S, lambda: kept, self.opener.use)
        self.keeper = ServerKeeper(cast(Any, kept), cast(Any, kept), settings, cast(Any, kept), lambda: world.now_s)
        self.looks = 0
        self.leaves_s: float | None = None
        self.address = f"{name}:{len(world.all_nodes)}"
        self.life.liveness_address = self.address
        self.held_until_s = 0.0
        self.silent_since_s: dict[str, float] = {}
        self.saw_ended: set[str] = set()
        self.newest = 0
        self.told: NodeDoc | None = None
        self.seeks = False
        self.starting = False
        self.in_store = False
        self.machine_lost = False

    @property
    def store(self) -> Store:
        return self.used or self.world.store

    @property
    def hosted(self) -> HostedStore:
        assert isinstance(self.store, HostedStore)
        return self.store

    def say(self, verb: str, text: str) -> None:
        self.world.note(self.name, f"{verb}: {text}")

    def step(self, decide_what: Callable[[], list[Any] | None]) -> None:
        if self.leaves_s is not None:
            decide_what()
            return
        self.life.store_address, self.life.serves = self.host.address, self.host.serves
        super().step(decide_what)

    # -- its server of the store ----------------------------------------------------------------------------------

    def serve_first(self) -> HostedStore:
        """Begins the store of the job."""
        first = cast(SimulatedEtcd, self.place.make_server())
        first.start()
        first.serves_s = self.world.now_s
        self.host = SimulatedHost(
            cast(Any, first), cast(Any, None), partial(self.say, "says"), self.world.now_s, self.place
        )
        self.opener.move(first.endpoint)
        store = HostedStore(self.founding_world, first, None)
        store.cluster.look()
        return store

    def tend(self) -> None:
        """Looks after its server, as the loop of the agent does when that ends, and when it is time to."""
        if not self.ended:
            self.host.look(self.world.now_s)
            self.step(list)
            if (due_s := self.host.due_s()) < inf:
                self.world.at(max(0.05, due_s - self.world.now_s), self.tend)

    def see_servers(self, written: Written) -> None:
        if written.revision > self.servers_revision:
            self.servers_revision = written.revision
            if written.servers != self.servers and written.servers.clients:
                self.servers = written.servers
                self.keeper.follow()
                self.host.on_servers(written.servers, self.world.now_s)
                self.tend()

    def keep_servers(self) -> None:
        """The node that leads looks whether the right nodes serve."""
        if not self.leading or self.ended or not self.hosted.up or self.founding_world.most == 1:
            return
        try:
            self.keeper.turn()
        except StoreUnavailable:
            self.hang_up()
            return
        if self.keeper.due_s < inf:
            self.looks += 1
            looks, delay_s = self.looks, max(0.01, self.keeper.due_s - self.world.now_s)
            self.world.at(delay_s, lambda: self.keep_servers() if looks == self.looks else None)

    # -- the store ------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if self.ended or self.connected:
            return
        if self.used is None:
            self.used = self.founding_world.find_store(self)
            if self.used is None:
                self.world.at(0.5, self.connect)
                return
        self.find_other_at_its_addresses()
        store = self.hosted
        self.server = store.server_for(self)
        if self.server is None:
            if self.joined:
                self.start_seeking(0.0)
            else:
                self.used = None
                self.world.at(0.5, self.connect)
            return
        if not self.present and self.name in store.docs:
            self.world.at(0.2, self.connect)
            return
        self.take_founding(store)
        if self.view.generation is not None:
            number = self.view.generation.number
            assert store.epoch >= number // NUMBERS, f"{self.name} knows generation {number}, and acts on {store.name}"
            store.bring(self.view.generation)
        self.seeks, self.in_store = False, True
        super().connect()
        self.read_servers()
        self.see_absent(store.absent)

    def read_servers(self) -> None:
        if self.connected and self.hosted.written.revision:
            self.see_servers(self.hosted.written)

    def find_other_at_its_addresses(self) -> None:
        """Another store may be where this node's was: a machine offers a server the port that it had before."""
        assert self.used is not None
        found = [self.founding_world.server_at(address) for address in self.opener.addresses]
        stores = [self.founding_world.store_of(one) for one in found if one is not None]
        if stores and self.used not in stores and stores[0] is not None:
            self.world.note(self.name, f"finds {stores[0].name} where {self.used.name} was")
            self.used = stores[0]
            self.present = self.in_store = False
            self.generation_revision = self.servers_revision = 0

    def try_to_lead(self) -> None:
        if self.connected and not self.hosted.up:
            self.again(self.try_to_lead)
        else:
            super().try_to_lead()

    def _write(self, doc: NodeDoc) -> None:
        if self.hosted.up:
            super()._write(doc)
        else:
            self.again(self.publish)

    def again(self, act: Callable[[], None]) -> None:
        """What asks the store waits while its servers elect one."""
        silence = self.silence
        self.world.at(0.1, lambda: act() if silence == self.silence and not self.ended else None)

    def hang_up(self) -> None:
        """The connection ends, and this node looks at once whether there is another one."""
        if self.connected:
            self.disconnect()
            self.hosted.watch_lease(self)
            self.world.at(self.world.delay_s(self.name), self.seek)

    def take_founding(self, store: HostedStore) -> None:
        if (founding := store.founding) is not None:
            self.newest = max(self.newest, founding.epoch)
            self.view = replace(
                self.view,
                ended=self.view.ended | set(founding.ended),
                gone=frozenset(founding.gone),
                floor=founding.epoch * NUMBERS,
            )

    def publish(self) -> None:
        super().publish()
        if self.connected:
            self.told = self.written

    def disconnect(self) -> None:
        if self.connected:
            lease_s = self.world.settings.lease_s
            cluster = self.hosted.cluster
            last_s = self.world.now_s if cluster.leader is not None else cluster.led_s
            self.held_until_s = last_s + lease_s * (1 - self.world.rng.random() / 3)
        self.server = None
        self.silent_since_s = {}
        super().disconnect()

    def fall_silent(self) -> None:
        """Nothing comes from the store any more: this node finds out while its lease runs out."""
        if self.connected:
            self.disconnect()
            self.store.watch_lease(self)
            self.start_seeking((self.held_until_s - self.world.now_s) * (1 - self.world.rng.random() / 2))

    def lead(self) -> None:
        if not self.leading or self.ended:
            return
        if not self.hosted.up:
            self.again(self.lead)
            return
        self.view = replace(self.view, ended=self.view.ended | self.hosted.left)
        super().lead()
        self.keep_servers()

    def see_absent(self, absent: frozenset[str]) -> None:
        self.absent = absent

    def tell_absent(self, missing: Collection[str]) -> None:
        """As `Leader._put_absent`."""
        self.hosted.tell_absent(absent_agents(self.view, missing), self.name)

    def ask_missing(self, nodes: Collection[str]) -> None:
        """As `Founder.look_for_better`."""
        generation = self.view.generation
        assert generation is not None
        seats = dict((*generation.former_seats, *generation.seats))
        answers, ended = self.ask({node: seats[node] for node in nodes})
        for node, address in seats.items():
            doc = self.hosted.docs.get(node)
            if address in ended and doc is not None and doc[0].liveness_address == address:
                self.view = replace(self.view, ended=self.view.ended | {address})
        move = better_store(self.standing(away=False), generation, list(answers.values()))
        if move is not None:
            self.disconnect()
            self.hosted.watch_lease(self)
            self.act(move)

    # -- what others hear, and what this node asks ------------------------------------------------------------------

    def standing(self, away: bool) -> Standing:
        store, generation = self.hosted, self.view.generation
        founding = store.founding if self.in_store else None
        return Standing(
            self.name,
            founding.epoch if founding is not None else 0,
            self.newest,
            ",".join(self.opener.addresses),
            founding.node if founding is not None else "",
            generation.number if generation is not None else 0,
            away,
            self.host.will_serve,
            generation is not None and has_say(self.told or self.life.doc(), generation),
            True,
            tuple(sorted(self.saw_ended - self.absent)),
        )

    def ask(self, seats: dict[str, str]) -> tuple[dict[str, Standing], set[str]]:
        answers, ended = dict[str, Standing](), set[str]()
        for name, address in seats.items():
            if not self.founding_world.passes(self.name, name):
                continue
            found = [node for node in self.founding_world.agents() if node.address == address]
            if found and not found[0].ended and found[0].used is not None:
                answers[name] = found[0].standing(away=not found[0].connected)
            elif found and found[0].ended and found[0].machine_is_up():
                ended.add(address)
        return answers, ended

    def machine_is_up(self) -> bool:
        """Whether connections to its agent are refused at least: a lost machine may have been started again."""
        return not self.machine_lost or self.world.nodes[self.name] is not self

    # -- while it cannot reach the store --------------------------------------------------------------------------

    def start_seeking(self, delay_s: float) -> None:
        if not self.seeks:
            self.seeks = True
            self.world.at(delay_s, self.seek)

    def seek(self) -> None:
        self.seeks = True
        generation = self.view.generation
        if self.ended or self.connected:
            self.seeks = False
            return
        if self.starting:
            self.world.at(ROUND_S, self.seek)
            return
        if self.hosted.reaches(self) and self.world.now_s < self.held_until_s:
            self.connect()
        if self.connected or self.view.result is not None:
            self.seeks = False
            return
        if generation is None or not generation.seats:
            self.connect_if_possible()
            self.world.at(ROUND_S, self.seek)
            return
        seats = dict((*generation.former_seats, *generation.seats))
        seats.pop(self.name, None)
        answers, ended = self.ask(seats)
        servers = self.opener.addresses
        there = {one for one in servers if self.founding_world.listens(self, one)}
        delay_s = self.world.rng.random() * ANSWER_S
        asked_s = self.world.now_s
        self.world.at(delay_s, lambda: self.hear(generation, seats, answers, ended, servers, there, asked_s))

    def connect_if_possible(self) -> None:
        if self.hosted.reaches(self):
            self.connect()

    def hear(
        self,
        generation: Generation,
        seats: dict[str, str],
        answers: dict[str, Standing],
        ended: set[str],
        servers: tuple[str, ...],
        there: set[str],
        asked_s: float,
    ) -> None:
        if self.ended or self.connected:
            self.seeks = False
            return
        lapsed = self.world.now_s > self.held_until_s
        if not lapsed:
            self.saw_ended |= ended
        unheard = [one for one in servers if one not in there]
        dead = seen_ended(unheard, ended)
        loss = Loss(len(servers), len(there), dead, lapsed, self.servers.n_learners)
        others = {node: answers.get(node) for node in seats}
        silent = [node for node, address in seats.items() if node not in answers and address not in ended]
        self.silent_since_s = {node: self.silent_since_s.get(node, asked_s) for node in silent}
        paused = [
            node
            for node in silent
            if self.silent_since_s[node] > self.world.now_s - LOST_S and may_have_paused(seats[node], unheard, lapsed)
        ]
        self.act(next_move(self.standing(away=True), generation, others, loss, paused, self.in_store))
        if not self.connected:
            self.world.at(ROUND_S, self.seek)

    def act(self, move: Move) -> None:
        world = self.founding_world
        match move:
            case GoOver():
                world.note(self.name, f"goes over to {move.store}")
                self.host.leave(world.now_s)
                self.tend()
                self.move(world.store_at(move.store) or self.hosted, move.store)
                self.newest = max(self.newest, move.epoch)
                self.connect_if_possible()
                if not self.connected:
                    self.start_seeking(0.0)
            case FoundStore():
                address = self.host.found(world.now_s)
                store = HostedStore(world, self.place.servers[-1], move.founding)
                world.stores.append(store)
                world.note(self.name, f"founds {store.name}: {move.founding}")
                self.move(store, address)
                self.tend()
                self.newest = move.founding.epoch
                self.starting = True

                serves_by_s = world.now_s + SERVES_WITHIN_S

                def serve() -> None:
                    self.connect_if_possible()
                    self.starting = not self.connected and world.now_s < serves_by_s
                    if self.starting and not self.ended:
                        world.at(0.02, serve)

                world.at(START_S, serve)
            case _:
                self.connect_if_possible()

    def move(self, store: HostedStore, address: str) -> None:
        self.used = store
        self.opener.move(address)
        self.servers, self.absent = EtcdServers(), frozenset()
        self.present = self.in_store = False
        self.generation_revision = self.servers_revision = 0
        self.held_until_s = 0.0
        self.view = replace(self.view, ended=frozenset(), gone=frozenset(), floor=0)

    # -- faults -----------------------------------------------------------------------------------------------------

    def leave(self, action: Exit) -> None:
        """Before it leaves a job that goes on, it waits until another node serves the store in its stead."""
        if self.leaves_s is None:
            self.leaves_s = self.world.now_s + self.world.settings.lease_s + HAND_OVER_S
            self.publish()
        generation = self.view.generation
        is_alone = generation is None or not set(generation.nodes) - {self.name}
        has_to = self.life.ending.draining and self.view.result is None and not is_alone and bool(self.host.address)
        if has_to and (self.host.serves or self.host.is_ending) and self.world.now_s < self.leaves_s:
            self.world.at(0.05, lambda: self.leave(action) if not self.ended else None)
            self.host.look(self.world.now_s)
            return
        store, connected = self.hosted, self.connected and self.hosted.up
        if connected:
            store.cluster.write()
        super().leave(action)
        if connected:
            store.left.add(self.address)
        self.end_servers(silently=False)

    def kill_agent(self, outlived_s: float) -> None:
        super().kill_agent(outlived_s)
        self.end_servers(silently=False)

    def crash(self) -> None:
        self.machine_lost = True
        super().crash()
        self.end_servers(silently=True)

    def end_servers(self, silently: bool) -> None:
        for server in self.place.servers:
            server.end(-9, silently)


@dataclass
class Decided:
    """Where a generation comes from."""

    store: str
    generation: Generation
    former: int


class FoundingWorld(World):
    """A job that hosts its store.

    Attributes:
        stores: in the order in which they were founded.
        decided_by_number: all generations that any of them has decided on.
        tip: the newest generation in which a step committed.
        most: how many nodes serve a store at most.
        disturbed_s: when something happened last to nodes or servers, or stopped happening.
    """

    checks_kills = False

    def __init__(self, case: Case) -> None:
        self.stores: list[HostedStore] = []
        self.decided_by_number: dict[int, Decided] = {}
        self.tip = 0
        self.most = case.servers
        self.disturbed_s = 0.0
        self._ports = itertools.count(PORT + 1)
        super().__init__(case)
        self.settings = replace(self.settings, founds=True)

    def make_node(self, name: str) -> Node:
        node = FoundingNode(self, name)
        if not self.stores:
            node.used = node.serve_first()
            self.stores.append(node.used)
            self.store = node.used
        return node

    def agents(self) -> list[FoundingNode]:
        """All that there ever were."""
        return [node for node in self.all_nodes if isinstance(node, FoundingNode)]

    def through_json(self, document: Document) -> Document:
        """Documents are frozen: other simulations see to it that their text says the same."""
        return document

    def find_store(self, node: FoundingNode) -> HostedStore | None:
        """The newest store that a new node can find, at the servers that it has then."""
        for store in [*(one for one in reversed(self.stores) if one.generation), *self.stores[:1]]:
            clients = [one.server.endpoint for one in store.cluster.voters if one.server is not None]
            node.opener.move(",".join(clients))
            if store.reaches(node):
                return store
        return None

    def free_port(self) -> int:
        return next(self._ports)

    def new_id(self) -> str:
        return f"{next(self._ports):x}"

    def server_at(self, address: str) -> SimulatedEtcd | None:
        """The server that runs at an address for agents."""
        servers = (one for node in self.agents() for one in node.place.servers)
        return next((one for one in servers if one.runs and one.endpoint == address), None)

    def store_of(self, server: SimulatedEtcd) -> HostedStore | None:
        return next((one for one in self.stores if one.cluster is server.cluster), None)

    def store_at(self, addresses: str) -> HostedStore | None:
        """The store of which one of these addresses is a server, or was."""
        wanted = addresses.split(",")
        servers = [one for node in self.agents() for one in node.place.servers if one.endpoint in wanted]
        found = [store for one in servers if (store := self.store_of(one)) is not None]
        return max(found, key=lambda store: (store.up, store.epoch), default=None)

    def listens(self, node: FoundingNode, address: str) -> bool:
        """Whether somebody accepts a connection at an address for agents."""
        server = self.server_at(address)
        return server is not None and self.passes(node.name, server.node.name)

    def seeing(self, node: Node, written: Written) -> Callable[[], None]:
        assert isinstance(node, FoundingNode)
        return lambda: node.see_servers(written)

    def passes(self, one: str, other: str) -> bool:
        """Whether anything passes between two nodes."""
        return one == other or frozenset((one, other)) not in self.parted

    def host_of(self, store: HostedStore) -> FoundingNode:
        """The node whose server leads the others, or did."""
        first = store.cluster.leader or store.cluster.members[0]
        assert first.server is not None
        return first.server.node

    # -- what must never happen -----------------------------------------------------------------------------------

    def decided(self, store: HostedStore, generation: Generation, former: Generation | None) -> None:
        """Each number is given out once."""
        assert generation.number not in self.decided_by_number, (
            f"{store.name} and {self.decided_by_number[generation.number].store} both give out {generation.number}"
        )
        self.decided_by_number[generation.number] = Decided(store.name, generation, former.number if former else 0)
        self.store = store

    def committed(self, worker: str, step: int, generation: Generation) -> None:
        """Steps commit in one line of generations: no two parts of the job go on beside each other."""
        number = generation.number
        if number != self.tip and number not in self.line(self.tip):
            assert self.tip in self.line(number), (
                f"{worker} commits step {step} in generation {number}, which does not follow {self.tip}: "
                f"{self.decided_by_number[number]}, {self.decided_by_number[self.tip]}"
            )
            self.tip = number
        super().committed(worker, step, generation)

    def line(self, number: int) -> set[int]:
        """A generation and all that it follows."""
        line = {0}
        while number and number not in line:
            line.add(number)
            number = self.decided_by_number[number].former if number in self.decided_by_number else 0
        return line

    def watch_voters(self) -> None:
        """As long as a change may take after all else, and no longer, the number of those that vote is even."""
        for store in self.stores:
            leader = self.nodes.get(store.leader)
            began_s = max(self.disturbed_s, store.cluster.changed_s)
            if store.up and leader is not None and leader.store is store and leader.leading and began_s:
                is_even = len(store.cluster.voters) % 2 == 0
                assert not is_even or self.now_s < began_s + EVEN_S, (
                    f"{store.name} has {len(store.cluster.voters)} voters for {EVEN_S:g} s"
                )
        self.at(1.0, self.watch_voters)

    # -- faults -----------------------------------------------------------------------------------------------------

    def part(self, one: str, other: str) -> None:
        super().part(one, other)
        self.look_at_servers()

    def heal(self, one: str, other: str) -> None:
        super().heal(one, other)
        self.disturbed_s = max(self.disturbed_s, self.now_s)
        self.look_at_servers()

    def look_at_servers(self) -> None:
        for store in self.stores:
            store.cluster.look()

    def cut(self, group: Collection[str], others: Collection[str], duration_s: float) -> None:
        """Nothing passes between two groups of nodes for a while."""
        pairs = [(one, other) for one in group for other in others if one != other and self.passes(one, other)]
        for one, other in pairs:
            self.part(one, other)

        def mend() -> None:
            for one, other in pairs:
                if not self.passes(one, other):
                    self.heal(one, other)

        self.at(duration_s, mend)


def random_loss(world: World) -> None:
    """Something happens to the nodes of a job that hosts its store."""
    assert isinstance(world, FoundingWorld)
    rng = world.rng
    alive = [node for node in world.agents() if not node.ended]
    if not alive:
        return
    kind = rng.choice(
        ["agent", "agent", "machine", "cut", "cut", "cut", "cut_host", "worker", "worker", "drain", "join", "back"]
    )
    if kind == "agent":
        rng.choice(alive).kill_agent(rng.random() * 0.02)
    elif kind == "machine":
        rng.choice(alive).crash()
    elif kind == "cut_host":
        host = world.host_of(world.stores[-1]).name
        world.cut([host], [node.name for node in alive if node.name != host], rng.choice([1.0, 4.0, 8.0, 15.0]))
    elif kind == "cut" and len(alive) > 1:
        names = [node.name for node in alive]
        group = rng.sample(names, rng.randint(1, len(names) - 1))
        world.cut(group, [name for name in names if name not in group], rng.choice([1.0, 4.0, 8.0, 15.0]))
    elif kind == "worker":
        workers = [worker for worker in world.workers.values() if worker.alive]
        for worker in rng.sample(workers, min(len(workers), rng.randint(1, 2))):
            worker.end(None, 9)
    elif kind == "drain":
        world.terminate(rng.choice(alive).name)
    elif kind == "join":
        world.add_node()
    elif kind == "back":
        ended = [node for node in world.nodes.values() if node.ended]
        if ended:
            world.add_node(rng.choice(ended).name)


def random_loss_of_servers(world: FoundingWorld) -> None:
    """Something happens to the nodes of a job that several of them serve, or to the servers themselves."""
    rng = world.rng
    world.disturbed_s = max(world.disturbed_s, world.now_s)
    alive = [node for node in world.agents() if not node.ended]
    kind = rng.choice(["any", "any", "any", "etcd", "etcd", "two", "servers", "back", "slow"])
    if kind == "etcd":
        servers = [one for node in alive for one in node.place.servers if one.runs]
        if servers:
            server = rng.choice(servers)
            world.note("FAULT:", f"the etcd at {server.endpoint} is killed")
            server.end(-9)
    elif kind == "two" and len(alive) > 1:
        one, other = rng.sample(alive, 2)
        world.at(rng.random() * 0.3, partial(lose, one, rng.random() < 0.5))
        leave = partial(world.terminate, other.name)
        world.at(rng.random() * 0.3, leave if rng.random() < 0.3 else partial(lose, other, rng.random() < 0.5))
    elif kind == "servers":
        hosts = [node for node in alive if node.host.serves]
        others = [node.name for node in alive if not node.host.serves]
        some = rng.sample(hosts, rng.randint(1, len(hosts))) if hosts else []
        rest = [node.name for node in hosts if node not in some]
        group = [node.name for node in some] + rng.sample(others, rng.randint(0, len(others)))
        world.cut(group, [*rest, *(name for name in others if name not in group)], rng.choice([1.0, 4.0, 8.0, 15.0]))
    elif kind == "slow" and alive:
        rng.choice(alive).slowness = SLOW
    elif kind == "back":
        ended = [node for node in world.nodes.values() if node.ended]
        if ended:
            world.add_node(rng.choice(ended).name)
    else:
        random_loss(world)


def lose(node: FoundingNode, machine: bool) -> None:
    """A node is lost: its machine, or only its agent."""
    if not node.ended:
        if machine:
            node.crash()
        else:
            node.kill_agent(node.world.rng.random() * 0.02)
