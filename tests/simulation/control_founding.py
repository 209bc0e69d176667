"""Simulated jobs whose store is on one of their nodes, and is founded anew where that node is lost or cut off.

The rules are the real ones: `rules.quorum`, by way of `decide`, and `rules.founding`. The store of a node can be
reached by those that reach the node; who cannot keeps its membership until its lease has run out by its own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elaunch.agent.decisions.actions import Exit
from elaunch.rendezvous.membership import Generation, NodeDoc
from elaunch.rendezvous.rules.founding import (
    Founding,
    FoundStore,
    GoOver,
    Loss,
    Move,
    Standing,
    better_store,
    next_move,
)
from elaunch.rendezvous.rules.quorum import NUMBERS, has_say
from tests.simulation.control_node import Node
from tests.simulation.control_store import Document, Store
from tests.simulation.control_world import Case, World

ROUND_S = 0.2
ANSWER_S = 0.3
START_S = 0.2
LOST_ANSWERS = 0.05


class HostedStore(Store):
    """A store on a node, which ends with that node's agent.

    Attributes:
        name: where it is.
        host: the node.
        founding: how it was founded; None: the job began with it.
        left: liveness addresses of agents that have left in good order.
    """

    def __init__(self, world: FoundingWorld, host: FoundingNode, founding: Founding | None) -> None:
        super().__init__(world)
        self.name = f"store{len(world.stores)}@{host.name}"
        self.host = host
        self.founding = founding
        self.left: set[str] = set()
        self.heard: dict[str, int] = {}  # how often each node has written
        # Revisions of different stores have nothing to do with each other; here they differ, to show mistakes.
        self.revision = 1000 * len(world.stores)

    @property
    def epoch(self) -> int:
        return self.founding.epoch if self.founding is not None else 0

    def reaches(self, node: Node) -> bool:
        assert isinstance(self.world, FoundingWorld)
        return self.up and not self.host.ended and self.world.passes(node.name, self.host.name)

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

    def put(self, doc: NodeDoc) -> None:
        self.heard[doc.node] = self.heard.get(doc.node, 0) + 1
        super().put(doc)

    def _has(self, node: Node) -> bool:
        return node.name in self.docs and self.docs[node.name][0].liveness_address == node.life.liveness_address

    def give_up(self) -> None:
        """The etcd ends: its clients see their connections end."""
        self.up = False
        for node in self.users():
            if node.connected:
                node.disconnect()
                self.world.at(self.world.delay_s(node.name), partial(seek, node))


def seek(node: Node) -> None:
    assert isinstance(node, FoundingNode)
    node.seek()


class FoundingNode(Node):
    """An agent that does what `node.founder.Founder` does."""

    def __init__(self, world: FoundingWorld, name: str) -> None:
        self.used: HostedStore | None = None
        super().__init__(world, name)
        self.founding_world = world
        self.address = f"{name}:{len(world.all_nodes)}"
        self.life.liveness_address = self.address
        self.held_until_s = 0.0
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

    def step(self, decide_what: Callable[[], list[Any] | None]) -> None:
        self.life.serves = self.used is not None and self.used.host is self and self.used.up
        super().step(decide_what)

    # -- the store ------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        if self.ended or self.connected:
            return
        if self.used is None:
            self.used = self.founding_world.find_store(self)
            if self.used is None:
                self.world.at(0.5, self.connect)
                return
        store = self.hosted
        if not store.reaches(self):
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
            store.bring(self.view.generation)
        self.seeks, self.in_store = False, True
        super().connect()

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
            self.held_until_s = self.world.now_s + lease_s * (1 - self.world.rng.random() / 3)
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
        self.view = replace(self.view, ended=self.view.ended | self.hosted.left)
        super().lead()

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
        move = better_store(self.standing(away=False), generation, answers.values())
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
            store.name,
            founding.node if founding is not None else "",
            generation.number if generation is not None else 0,
            away,
            store.host is self and store.up,
            generation is not None and has_say(self.told or self.life.doc(), generation),
            True,
            tuple(sorted(self.saw_ended)),
        )

    def ask(self, seats: dict[str, str]) -> tuple[dict[str, Standing], set[str]]:
        answers, ended = dict[str, Standing](), set[str]()
        for name, address in seats.items():
            if not self.founding_world.passes(self.name, name):
                continue
            found = [node for node in self.founding_world.agents() if node.address == address]
            if found and not found[0].ended and found[0].used is not None:
                answers[name] = found[0].standing(away=not found[0].connected)
            elif found and found[0].ended and not found[0].machine_lost:
                ended.add(address)
        return answers, ended

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
        there = self.hosted.reaches(self)
        self.world.at(self.world.rng.random() * ANSWER_S, lambda: self.hear(generation, seats, answers, ended, there))

    def connect_if_possible(self) -> None:
        if self.hosted.reaches(self):
            self.connect()

    def hear(
        self,
        generation: Generation,
        seats: dict[str, str],
        answers: dict[str, Standing],
        ended: set[str],
        there: bool,
    ) -> None:
        if self.ended or self.connected:
            self.seeks = False
            return
        lapsed = self.world.now_s > self.held_until_s
        if not lapsed:
            self.saw_ended |= ended
        host = self.hosted.host
        loss = Loss(1, int(there), int(not there and host.address in ended), lapsed)
        others = {node: answers.get(node) for node in seats}
        self.act(next_move(self.standing(away=True), generation, others, loss))
        if not self.connected:
            self.world.at(ROUND_S, self.seek)

    def act(self, move: Move) -> None:
        world = self.founding_world
        match move:
            case GoOver():
                store = next(one for one in world.stores if one.name == move.store)
                world.note(self.name, f"goes over to {store.name}")
                self.move(store)
                self.newest = max(self.newest, move.epoch)
                self.connect_if_possible()
                if not self.connected:
                    self.start_seeking(0.0)
            case FoundStore():
                store = HostedStore(world, self, move.founding)
                store.up = False
                world.stores.append(store)
                world.note(self.name, f"founds {store.name}: {move.founding}")
                self.move(store)
                self.newest = move.founding.epoch
                self.starting = True

                def serve() -> None:
                    self.starting, store.up = False, True
                    self.connect_if_possible()

                world.at(START_S, serve)
            case _:
                self.connect_if_possible()

    def move(self, store: HostedStore) -> None:
        former = self.used
        self.used = store
        self.present = self.in_store = False
        self.generation_revision = 0
        self.held_until_s = 0.0
        self.view = replace(self.view, ended=frozenset(), gone=frozenset(), floor=0)
        if former is not None and former.host is self and former.up:
            former.give_up()

    # -- faults -----------------------------------------------------------------------------------------------------

    def leave(self, action: Exit) -> None:
        store, connected = self.hosted, self.connected
        super().leave(action)
        if connected:
            store.left.add(self.address)
        if store.host is self:
            store.give_up()

    def kill_agent(self, outlived_s: float) -> None:
        store = self.used
        super().kill_agent(outlived_s)
        if store is not None and store.host is self:
            store.give_up()

    def crash(self) -> None:
        self.machine_lost = True
        store = self.used
        super().crash()
        if store is not None and store.host is self:
            store.up = False
            for node in list(store.users()):
                if isinstance(node, FoundingNode):
                    node.fall_silent()


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
    """

    checks_kills = False

    def __init__(self, case: Case) -> None:
        self.stores: list[HostedStore] = []
        self.decided_by_number: dict[int, Decided] = {}
        self.tip = 0
        super().__init__(case)
        self.settings = replace(self.settings, founds=True)

    def make_node(self, name: str) -> Node:
        node = FoundingNode(self, name)
        if not self.stores:
            node.used = HostedStore(self, node, None)
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
        """The newest store that a new node can find."""
        return next((one for one in reversed(self.stores) if one.reaches(node) and one.generation), None) or next(
            (one for one in self.stores[:1] if one.reaches(node)), None
        )

    def passes(self, one: str, other: str) -> bool:
        """Whether anything passes between two nodes."""
        return one == other or frozenset((one, other)) not in self.parted

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

    # -- faults -----------------------------------------------------------------------------------------------------

    def part(self, one: str, other: str) -> None:
        super().part(one, other)
        for node in list(self.nodes.values()):
            if isinstance(node, FoundingNode) and node.connected and not node.hosted.reaches(node):
                node.fall_silent()

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
        host = world.stores[-1].host.name
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
