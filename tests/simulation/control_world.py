"""Simulated time, the members of a job and what passes between them, for test_control_simulation and transcripts."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elaunch.agent.decisions.actions import Record
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.decide import MembershipSettings
from elaunch.rendezvous.membership import Generation, node_of, slot_of
from elaunch.rendezvous.rules.escalate import REPLACE_AFTER
from tests.simulation.control_node import Node
from tests.simulation.control_store import Document, Store
from tests.simulation.control_worker import Op, Worker
from tests.simulation.transcript import Committed, Event, Said, generation_text

START_S = 100.0
SILENT_S = 5.0  # so long nothing comes from a machine before a worker that waits for it asks whether it is there
WELL_S = 5.0  # so long a machine must answer again before it counts as one that can be reached


@dataclass(frozen=True)
class Case:
    """One job and what happens to it."""

    seed: int
    nodes: int
    slots: int
    min_nodes: int
    max_nodes: int
    max_restarts: int | None
    steps: int
    faults: int = 0
    elastic: bool = True
    spares: int = 0
    spare_state: bool = False
    servers: int = 1


class World:
    """Simulated time, the store, the agents and the workers.

    Attributes:
        checks_kills: whether no agent may kill the last worker that holds the state.
    """

    checks_kills = True

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = random.Random(case.seed)
        self.now_s = START_S
        self.ended = False  # whether an agent has
        self.events: list[Event] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.settings = MembershipSettings(
            min_nodes=case.min_nodes,
            max_nodes=case.max_nodes,
            spares=case.spares,
            spare_state=case.spare_state,
            max_restarts=case.max_restarts,
            last_call_s=1.0,
            join_s=20.0,
            attach_s=3.0,
            ready_s=5.0,
        )
        self.store = Store(self)
        self.nodes: dict[str, Node] = {}
        self.all_nodes: list[Node] = []
        self.workers: dict[str, Worker] = {}
        self.members: set[str] = set()
        self.arrivals: dict[tuple[int, Op], dict[str, Any]] = {}
        self.commits: dict[tuple[int, int], tuple[int, set[str]]] = {}
        self.last_commit_s = 0.0
        self.sick: set[str] = set()  # workers all of whose links fail, in each generation anew
        self.deaf: set[str] = set()  # live workers that refuse each connection; the links that they have stay
        self.linked: set[frozenset[str]] = set()
        self.cursed: set[frozenset[str]] = set()  # pairs of slots between whose workers no link lasts
        self.parted: dict[frozenset[str], float] = {}  # since when nothing passes between two nodes
        self.n_broken = 0  # links, and native groups, that broke once
        self.were_parted = False

    # -- time and delays ----------------------------------------------------------------------------------------

    @property
    def t_s(self) -> float:
        """The time since the beginning, in seconds."""
        return self.now_s - START_S

    def note(self, who: str, text: str, of_worker: bool = False) -> None:
        """Keep what somebody does for the transcript; `text` begins with a verb in the third person."""
        self.keep(Said(self.t_s, who, text, of_worker))

    def keep(self, event: Event) -> None:
        self.events.append(event)

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._numbers), act))

    def delay_s(self, way: str) -> float:
        """How long a message takes; `way` names the connection or the process."""
        return self.rng.choice([0.0005, 0.002, 0.01, 0.01, 0.05]) * (0.5 + self.rng.random())

    def import_s(self, worker: str) -> float:
        """How long a script takes to call `elaunch.init()`, and how long from there until its state is registered."""
        return 0.2 + self.rng.random()

    def transfer_s(self, worker: str, receives: bool) -> float:
        """How long a member takes from the agreement until it has the state that it lacks."""
        return self.delay_s(worker)

    def loss_s(self, worker: str, peer: Worker) -> float:
        """How long a member that waits for a peer takes to find their link lost."""
        return self.delay_s(worker)

    def run(self, until_s: float) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._heap)
            act()
            if self.ended and self.over():
                return
        self.now_s = until_s

    def over(self) -> bool:
        return bool(self.nodes) and all(node.ended for node in self.nodes.values())

    def through_json(self, document: Document) -> Document:
        """Returns a document as the store gives it back."""
        return from_json(type(document), to_json(document))

    def record(self, line: Record) -> None:
        """An agent writes a worker's line on a step; toy workers report none."""

    def make_worker(self, node: Node, id: str) -> Worker:
        """A process that an agent starts."""
        return Worker(self, node, id)

    def make_node(self, name: str) -> Node:
        """An agent."""
        return Node(self, name)

    def add_node(self, name: str = "") -> None:
        """An agent comes; with the name of one that crashed, it is that machine started again."""
        name = name or f"n{len(self.nodes)}"
        self.note(name, "starts: an agent")
        node = self.nodes[name] = self.make_node(name)
        self.all_nodes.append(node)
        self.at(self.delay_s(name), node.connect)

    # -- collectives --------------------------------------------------------------------------------------------

    def fails(self, one: str, other: str) -> bool:
        """Whether a link between these live workers fails whenever it is made."""
        slots = frozenset((slot_of(one), slot_of(other)))
        return bool(self.sick & {one, other}) or slots in self.cursed

    def may_replace(self) -> bool:
        """Whether links may have failed so often that a live worker is replaced."""
        return bool(self.sick or self.deaf or self.cursed) or self.were_parted or self.n_broken >= REPLACE_AFTER

    def apart(self, one: str, other: str) -> bool:
        """Whether nothing passes between the nodes of two workers."""
        return bool(self.parted) and frozenset((node_of(one), node_of(other))) in self.parted

    def arrive(self, worker: Worker, op: Op, payload: Any) -> None:
        """A member reaches a collective of its generation; it returns from it when it has heard from all others."""
        generation = worker.generation()
        there = self.arrivals.setdefault((generation.number, op), {})
        assert worker.id not in there, f"{worker.id} comes to {op} of generation {generation.number} twice"
        there[worker.id] = payload
        worker.at_op = op
        if set(there) == set(generation.ids):
            ordered = [there[one] for one in generation.ids]
            for one in generation.ids:
                if not any(self.apart(one, other) for other in generation.ids):
                    self.at(self.delay_s(one), self.workers[one].returning(generation.number, op, ordered))
            if self.parted:
                self.look_around_all()
        else:
            self.look_around(worker)

    def look_around(self, worker: Worker) -> None:
        """What a member that waits in a collective notices of the others."""
        if worker.at_op is None or not worker.alive:
            return
        generation, op = worker.generation(), worker.at_op
        there = self.arrivals[generation.number, op]
        for one in generation.ids:
            peer = self.workers[one]
            if self.apart(one, worker.id):
                self.at(SILENT_S, worker.losing(generation.number, op, one))
                continue
            if one in there:
                continue
            pair = frozenset((one, worker.id))
            refused = self.deaf & pair and pair not in self.linked
            if not peer.alive or pair in worker.broken_links or self.fails(one, worker.id) or refused:
                self.at(self.loss_s(worker.id, peer), worker.losing(generation.number, op, one))
            elif peer.active is not None and peer.active.number > generation.number:
                # Its frames of the newer generation tell that it will never come.
                self.at(self.delay_s(worker.id), worker.overtaken(generation.number, op, peer.active.number))

    def look_around_all(self) -> None:
        for worker in self.workers.values():
            self.look_around(worker)

    def committed(self, worker: str, step: int, generation: Generation) -> None:
        """Only a worker that the others go on without may have committed a step that they commit again."""
        before = self.commits.get((generation.attempt, step))
        if before is None or before[0] != generation.number:
            again = before[1] & set(generation.ids) if before else None
            assert not again, (
                f"{again} committed step {step} in generation {before and before[0]}, "
                f"{generation_text(None, generation)}"
            )
            self.commits[generation.attempt, step] = before = (generation.number, set())
        before[1].add(worker)
        self.last_commit_s = self.now_s
        self.keep(Committed(self.t_s, worker, step, generation))

    # -- faults -------------------------------------------------------------------------------------------------

    def break_link(self, one: str, other: str) -> None:
        """The link between two live workers breaks, once."""
        pair = frozenset((one, other))
        self.note("FAULT:", f"the link {' - '.join(sorted(pair))} breaks")
        self.n_broken += 1
        self.linked.discard(pair)
        for name in sorted(pair):
            worker = self.workers[name]
            if worker.alive and worker.active is not None:
                worker.broken_links.add(pair)
        self.look_around_all()

    def fall_sick(self, worker: str) -> None:
        """All links of a worker fail from now on, in each generation anew."""
        self.note("FAULT:", f"all links of {worker} fail from now on")
        self.sick.add(worker)
        self.look_around_all()

    def fall_deaf(self, worker: str) -> None:
        """A live worker refuses each new connection from now on."""
        self.note("FAULT:", f"{worker} refuses all new connections from now on")
        self.deaf.add(worker)
        self.look_around_all()

    def curse(self, one: str, other: str) -> None:
        """No link lasts between the workers of two slots from now on."""
        self.note("FAULT:", f"no link lasts between {one} and {other} from now on")
        if one != other:
            self.cursed.add(frozenset((one, other)))
        self.look_around_all()

    def part(self, one: str, other: str) -> None:
        """Nothing passes between two nodes from now on; each of them reaches the store and all other nodes."""
        self.note("FAULT:", f"nothing passes between {one} and {other} any more")
        self.parted[frozenset((one, other))], self.were_parted = self.now_s, True
        self.look_around_all()

    def heal(self, one: str, other: str) -> None:
        """Two nodes between which nothing passed reach each other again."""
        self.note("FAULT ENDS:", f"{one} and {other} reach each other again")
        self.parted.pop(frozenset((one, other)), None)
        for name in (one, other):
            self.at(WELL_S, self.nodes[name].ask_again)

    def terminate(self, node: str) -> None:
        """Somebody sends SIGTERM to the agent of a node."""
        self.note("FAULT:", f"SIGTERM is sent to the agent of {node}")
        life = self.nodes[node].life
        self.nodes[node].step(lambda: life.on_signal(signal.SIGTERM, self.now_s))

    def resize(self, min_nodes: int, max_nodes: int) -> None:
        """Somebody asks for another number of nodes, and the leader accepts it."""
        self.note("REQUEST:", f"the job is to have {min_nodes} to {max_nodes} nodes")
        self.settings = replace(self.settings, min_nodes=min_nodes, max_nodes=max_nodes)
        self.store.tell_of_size(min_nodes, max_nodes)
