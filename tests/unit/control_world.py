"""A toy store, toy agents around the real `Lifecycle` and `decide`, and simulated time, for test_control_simulation."""

from __future__ import annotations

import heapq
import itertools
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from elaunch.agent.actions import Exit, Say, Signal, Start, Tell
from elaunch.agent.lifecycle import Lifecycle
from elaunch.agent.node_state import NodeSettings
from elaunch.rendezvous.decide import Settings, View, decide
from elaunch.rendezvous.membership import (
    Generation,
    NodeDoc,
    PlanRequest,
    Result,
    Stage,
    WorkerState,
    from_json,
    slot_of,
    to_json,
    with_order,
)
from tests.unit.control_worker import Op, Worker, show


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
    faults: int
    elastic: bool = True


class World:
    """Simulated time, the store's documents, and everybody else."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = random.Random(case.seed)
        self.now_s = 100.0
        self.trace: list[str] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.settings = Settings(
            min_nodes=case.min_nodes,
            max_nodes=case.max_nodes,
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

    def fails(self, one: str, other: str) -> bool:
        """Whether a link between these live workers fails whenever it is made."""
        slots = frozenset((slot_of(one), slot_of(other)))
        return bool(self.sick & {one, other}) or slots in self.cursed

    def note(self, text: str) -> None:
        self.trace.append(f"{self.now_s - 100:9.4f}  {text}")

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._numbers), act))

    def delay_s(self) -> float:
        return self.rng.choice([0.0005, 0.002, 0.01, 0.01, 0.05]) * (0.5 + self.rng.random())

    def run(self, until_s: float) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, act = heapq.heappop(self._heap)
            act()
            if self.over():
                return
        self.now_s = until_s

    def over(self) -> bool:
        return bool(self.nodes) and all(node.ended for node in self.nodes.values())

    def add_node(self, name: str = "") -> None:
        """An agent comes; with the name of one that crashed, it is that machine started again."""
        name = name or f"n{len(self.nodes)}"
        self.note(f"{name}: an agent starts")
        node = self.nodes[name] = Node(self, name)
        self.all_nodes.append(node)
        self.at(self.delay_s(), node.connect)

    # -- collectives --------------------------------------------------------------------------------------------

    def arrive(self, worker: Worker, op: Op, payload: Any) -> None:
        """A member reaches a collective of its generation; each returns from it once all have come."""
        generation = worker.generation()
        there = self.arrivals.setdefault((generation.epoch, op), {})
        assert worker.id not in there, f"{worker.id} comes to {op} of epoch {generation.epoch} twice"
        there[worker.id] = payload
        worker.at_op = op
        if set(there) == set(generation.ids):
            ordered = [there[one] for one in generation.ids]
            for one in generation.ids:
                member = self.workers[one]
                self.at(self.delay_s(), member.returning(generation.epoch, op, ordered))
        else:
            self.look_around(worker)

    def look_around(self, worker: Worker) -> None:
        """What a member that waits in a collective notices of the others."""
        if worker.at_op is None or not worker.alive:
            return
        generation, op = worker.generation(), worker.at_op
        there = self.arrivals[generation.epoch, op]
        for one in generation.ids:
            peer = self.workers[one]
            if one in there:
                continue
            pair = frozenset((one, worker.id))
            refused = self.deaf & pair and pair not in self.linked
            if not peer.alive or pair in worker.broken_links or self.fails(one, worker.id) or refused:
                self.at(self.delay_s(), worker.losing(generation.epoch, op, one))
            elif peer.active is not None and peer.active.epoch > generation.epoch:
                # Its frames of the newer epoch tell that it will never come.
                self.at(self.delay_s(), worker.overtaken(generation.epoch, op, peer.active.epoch))

    def look_around_all(self) -> None:
        for worker in self.workers.values():
            self.look_around(worker)

    def committed(self, worker: str, step: int, generation: Generation) -> None:
        """Only a worker that the others go on without may have committed a step that they commit again."""
        before = self.commits.get((generation.attempt, step))
        if before is None or before[0] != generation.epoch:
            again = before[1] & set(generation.ids) if before else None
            assert not again, f"{again} committed step {step} in epoch {before and before[0]}, {show(generation)}"
            self.commits[generation.attempt, step] = before = (generation.epoch, set())
        before[1].add(worker)
        self.last_commit_s = self.now_s

    # -- faults -------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        alive = [worker for worker in self.workers.values() if worker.alive]
        agents = [node for node in self.nodes.values() if not node.ended]
        kind = self.rng.choice(["kill"] * 5 + ["exit1", "exit0", "crash", "drain", "join", "join", "outage", "away"])
        if alive:
            kind = self.rng.choice([kind] * 8 + ["cut"] * 4 + ["plan", "plan", "sick", "deaf", "curse"])
        if kind in ("kill", "exit1", "exit0") and alive:
            victim = self.rng.choice(alive)
            self.note(f"FAULT {kind} {victim.id}")
            victim.end({"exit1": 1, "exit0": 0}.get(kind), signal.SIGKILL if kind == "kill" else None)
            if kind == "kill" and self.rng.random() < 0.4 and len(alive) > 1:
                other = self.rng.choice([worker for worker in alive if worker is not victim])
                self.at(self.rng.random() * 0.1, lambda: other.end(None, signal.SIGKILL))
        elif kind == "cut" and len(alive) > 1:
            pair = frozenset(worker.id for worker in self.rng.sample(alive, 2))
            self.note(f"FAULT the link {' - '.join(sorted(pair))} breaks")
            self.linked.discard(pair)
            for worker in alive:
                if worker.id in pair and worker.active is not None:
                    worker.broken_links.add(pair)
            self.look_around_all()
        elif kind in ("sick", "deaf"):
            victim = self.rng.choice(alive)
            self.note(f"FAULT {victim.id} is {kind}")
            (self.sick if kind == "sick" else self.deaf).add(victim.id)
            self.look_around_all()
        elif kind == "curse" and len(alive) > 1:
            slots = frozenset(slot_of(worker.id) for worker in self.rng.sample(alive, 2))
            self.note(f"FAULT no link lasts between {' and '.join(sorted(slots))}")
            if len(slots) == 2:
                self.cursed.add(slots)
            self.look_around_all()
        elif kind == "plan":
            self.store.ask_for_plan()
            if self.rng.random() < 0.5:
                victim = self.rng.choice(alive)
                self.at(self.rng.random() * 0.5, lambda: victim.end(None, signal.SIGKILL))
        elif kind == "crash" and agents:
            node = self.rng.choice(agents)
            node.crash()
            if self.rng.random() < 0.5:
                self.at(self.rng.random() * 3, lambda: self.add_node(node.name))
        elif kind == "drain" and agents:
            node = self.rng.choice(agents)
            self.note(f"FAULT SIGTERM to the agent of {node.name}")
            node.step(lambda: node.life.on_signal(signal.SIGTERM, self.now_s))
        elif kind == "join":
            self.add_node()
        elif kind == "outage" and self.store.up:
            self.store.go_away(self.rng.choice([0.3, 2.0, 8.0]))
        elif kind == "away" and agents:
            self.rng.choice(agents).be_cut_off(self.rng.choice([0.3, 3.0, 12.0]))


class Store:
    """Documents with leases. A change is seen by each connected node after a delay, in order."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.revision = 0
        self.docs: dict[str, tuple[bytes, int]] = {}
        self.leader = ""
        self.generation = b""
        self.generation_revision = 0
        self.result: Result | None = None
        self.request: PlanRequest | None = None
        self.announced: list[Generation] = []
        self.epochs: list[int] = [0]
        self.expired_s: dict[str, float] = {}
        self.back_s = 0.0

    def go_away(self, duration_s: float) -> None:
        self.world.note(f"FAULT the store is away for {duration_s} s")
        self.up = False
        for node in self.world.nodes.values():
            node.disconnect()
        self.world.at(duration_s, self.come_back)

    def come_back(self) -> None:
        self.world.note("the store is back")
        self.up, self.back_s = True, self.world.now_s
        for node in self.world.all_nodes:
            if node.ended:
                self.watch_lease(node)
            else:
                self.world.at(self.world.rng.random() * 0.3, node.connect)

    def watch_lease(self, node: Node) -> None:
        """Let the lease of a node run out if it is still silent then."""
        silence = node.silence
        self.world.at(self.world.settings.lease_s, lambda: self.expire(node, silence))

    def expire(self, node: Node, silence: int) -> None:
        if self.up and not node.connected and node.silence == silence and node.present:
            self.world.note(f"the lease of {node.name} has run out")
            self.remove(node)

    def remove(self, node: Node) -> None:
        self.docs.pop(node.name)
        self.expired_s[node.name] = self.world.now_s
        node.present = False
        self._tell_leader(node.name, None)
        if self.leader == node.name:
            self.leader = ""
            for other in self.world.nodes.values():
                other.later(other.try_to_lead)

    def put(self, doc: NodeDoc) -> None:
        self.revision += 1
        created = self.docs[doc.node][1] if doc.node in self.docs else self.revision
        self.docs[doc.node] = (to_json(doc), created)
        self.expired_s.pop(doc.node, None)
        self._tell_leader(doc.node, self.read(doc.node))

    def read(self, node: str) -> NodeDoc:
        data, created = self.docs[node]
        return with_order(from_json(NodeDoc, data), created)

    def _tell_leader(self, name: str, doc: NodeDoc | None) -> None:
        leader = self.world.nodes.get(self.leader)
        if leader is not None:
            leader.later(lambda: leader.see_doc(name, doc))

    def announce(self, generation: Generation, expected: int, by: str) -> bool:
        if expected != self.generation_revision:
            return False
        world = self.world
        world.note(f"{by} announces {show(generation)}")
        assert generation.epoch > max(self.epochs), f"epoch {generation.epoch} follows {self.epochs[-1]}"
        assert len(set(generation.ids)) == len(generation.ids), "a worker stands in a generation twice"
        assert not set(generation.ids) & set(generation.leaving), "a worker leaves and stays"
        assert len(generation.nodes) <= world.case.max_nodes, "more nodes than the maximum"
        doubt_s = world.settings.lease_s if world.now_s < self.back_s + 2 * world.settings.lease_s else 0.0
        for name in generation.nodes:
            gone_s = world.now_s - self.expired_s.get(name, world.now_s)
            assert gone_s < doubt_s + 1.0, f"{name} has been gone for {gone_s:.3f} s"
        self.check_plan(generation)
        self.announced.append(generation)
        self.epochs.append(generation.epoch)
        if generation.stage is Stage.TRAIN:
            world.members.update(generation.ids)
        self.revision += 1
        self.generation, self.generation_revision = to_json(generation), self.revision
        for node in world.nodes.values():
            node.later(node.read_generation(self.generation, self.revision))
        return True

    def ask_for_plan(self) -> None:
        if self.up and self.announced:
            generation = self.announced[-1]
            self.world.note(f"a plan is asked for at epoch {generation.epoch}")
            self.request = PlanRequest(f"r{self.revision}", generation.epoch, f"plan {self.revision}", self.world.now_s)
            self.revision += 1
            leader = self.world.nodes.get(self.leader)
            if leader is not None:
                leader.later(leader.see_request(self.request))

    def check_plan(self, generation: Generation) -> None:
        """It is carried on through an attempt; a generation that brings a new one changes nothing else."""
        former = self.announced[-1] if self.announced else None
        plan = generation.plan, generation.plan_request
        if former is None or former.attempt != generation.attempt:
            assert plan == ("", ""), f"a new attempt has {plan}"
        elif generation.plan_request != former.plan_request:
            assert self.request is not None
            assert plan == (self.request.plan, self.request.id)
            assert former.epoch == self.request.epoch, "it was made for another generation"
            assert (generation.workers, generation.urgent, generation.stage) == (
                former.workers,
                former.urgent,
                former.stage,
            )
        else:
            assert plan == (former.plan, former.plan_request), f"{plan} is no more what was asked for"

    def end(self, result: Result) -> None:
        if self.result is None:
            self.world.note(f"RESULT {result}")
            self.result = result
            for node in self.world.nodes.values():
                node.later(lambda node=node: node.see_result(result))  # type: ignore[misc]


class Node:
    """An agent: a lifecycle, its workers, and the part in the rendezvous that `Participant` plays."""

    def __init__(self, world: World, name: str) -> None:
        case = world.case
        self.world, self.name = world, name
        self.life = Lifecycle(
            NodeSettings(name, name, case.slots, case.min_nodes, case.max_nodes, case.max_restarts, shutdown_s=5.0)
        )
        self.ended = False
        self.exit: Exit | None = None
        self.connected = False
        self.present = False
        self.joined = False
        self.cut_off = False
        self.silence = 0
        self.written: NodeDoc | None = None
        self.view = View()
        self.docs: dict[str, NodeDoc] = {}
        self.leading = False
        self.generation_revision = 0
        self.told_result = False
        self.wakes = 0
        self.ordered_s = 0.0

    # -- the rendezvous -----------------------------------------------------------------------------------------

    def later(self, act: Callable[[], None]) -> None:
        """Deliver something from the store, in order, unless the connection breaks first."""
        if not self.connected:
            return
        silence, world = self.silence, self.world
        self.ordered_s = max(self.ordered_s, world.now_s + world.delay_s())
        world.at(self.ordered_s - world.now_s, lambda: act() if self.connected and self.silence == silence else None)

    def disconnect(self) -> None:
        self.connected = self.leading = False
        self.silence += 1
        self.written = None

    def be_cut_off(self, duration_s: float) -> None:
        self.world.note(f"FAULT {self.name} cannot reach the store for {duration_s} s")
        self.disconnect()
        self.cut_off = True
        self.world.store.watch_lease(self)
        self.world.at(duration_s, self.come_back)

    def come_back(self) -> None:
        self.cut_off = False
        self.connect()

    def connect(self) -> None:
        store, world = self.world.store, self.world
        if self.ended or self.connected or self.cut_off or not store.up:
            return
        if not self.present and self.name in store.docs:
            world.at(0.2, self.connect)  # until the lease of its predecessor runs out
            return
        if self.joined:
            self.view = replace(self.view, outage_end_s=world.now_s)
        self.connected = self.present = self.joined = True
        self.docs.clear()
        self.publish()
        if store.generation:
            self.read_generation(store.generation, store.generation_revision)()
        if store.result is not None:
            self.see_result(store.result)
        if self.connected and store.leader in ("", self.name):
            store.leader = ""
            self.try_to_lead()

    def publish(self) -> None:
        doc = self.life.doc()
        if self.connected and doc != self.written:
            self.written = doc
            self.world.store.put(doc)

    def read_generation(self, data: bytes, revision: int) -> Callable[[], None]:
        def take() -> None:
            if revision <= self.generation_revision:
                return
            self.generation_revision = revision
            generation = from_json(Generation, data)
            former = self.view.generation
            begun = self.view.begun and former is not None and former.attempt == generation.attempt
            self.view = replace(
                self.view, generation=generation, generation_s=self.world.now_s, pending_s=None, begun=begun
            )
            self.step(lambda: self.life.on_generation(generation, self.world.now_s))
            if self.leading:
                self.lead()

        return take

    def see_result(self, result: Result) -> None:
        self.view = replace(self.view, result=result)
        if not self.told_result:
            self.told_result = True
            self.step(lambda: self.life.on_result(result, self.world.now_s))

    def see_request(self, request: PlanRequest) -> Callable[[], None]:
        def take() -> None:
            self.view = replace(self.view, request=request)
            self.lead()

        return take

    def see_doc(self, name: str, doc: NodeDoc | None) -> None:
        if not self.leading:
            return
        if doc is None:
            self.docs.pop(name, None)
        else:
            self.docs[name] = doc
            self.view = replace(self.view, begun=self.view.begun or self.holds_state(doc))
        self.view = replace(self.view, nodes=tuple(self.docs.values()), changed_s=self.world.now_s)
        self.lead()

    def holds_state(self, doc: NodeDoc) -> bool:
        generation = self.view.generation
        current = generation is None or doc.attempt == generation.attempt
        return current and any(worker.state is WorkerState.MEMBER for worker in doc.workers)

    def try_to_lead(self) -> None:
        store = self.world.store
        if store.leader or self.ended:
            return
        self.world.note(f"{self.name} leads")
        store.leader = self.name
        self.docs = {name: store.read(name) for name in store.docs}
        self.view = replace(
            self.view,
            nodes=tuple(self.docs.values()),
            led_s=self.world.now_s,
            changed_s=self.world.now_s,
            pending_s=None,
            request=store.request,
            begun=self.view.begun or any(self.holds_state(doc) for doc in self.docs.values()),
        )
        self.leading = True
        self.lead()

    def lead(self) -> None:
        world = self.world
        if not self.leading or self.ended:
            return
        decision = decide(self.view, world.now_s, world.settings)
        pending_s = (self.view.pending_s or world.now_s) if decision.pending else None
        self.view = replace(self.view, pending_s=pending_s)
        if decision.generation is not None and world.store.announce(
            decision.generation, self.generation_revision, self.name
        ):
            self.read_generation(world.store.generation, world.store.generation_revision)()
        if decision.result is not None:
            world.store.end(decision.result)
        self.wakes += 1
        wake, silence = self.wakes, self.silence
        delay_s = 1.0 if decision.wake_s is None else max(0.0, decision.wake_s - world.now_s) + 1e-4
        world.at(delay_s, lambda: self.lead() if (wake, silence) == (self.wakes, self.silence) else None)

    # -- the agent ----------------------------------------------------------------------------------------------

    def step(self, decide_what: Callable[[], list[Any] | None]) -> None:
        """Let the lifecycle react, carry out what it says, and publish what it has become."""
        if self.ended:
            return
        for action in [*(decide_what() or []), *self.life.on_time(self.world.now_s)]:
            if isinstance(action, Start):
                self.world.note(f"{self.name} starts {action.worker}")
                # A machine that was started again before the first step may begin with the names it had.
                former = self.world.workers.get(action.worker)
                assert former is None or former.on_a_lost_machine, f"{action.worker} is used twice"
                assert action.worker not in self.world.members, f"{action.worker} has been a member"
                worker = self.world.workers[action.worker] = Worker(self.world, self, action.worker)
                self.world.at(self.world.delay_s(), worker.boot)
            elif isinstance(action, Signal):
                target = self.world.workers[action.worker]
                self.world.note(f"{self.name} sends {signal.Signals(action.number).name} to {target.id}")
                self.world.at(0.001, lambda target=target, n=action.number: target.end(None, n))  # type: ignore[misc]
            elif isinstance(action, Tell):
                worker = self.world.workers[action.worker]
                worker.send_down(lambda worker=worker, g=action.generation: worker.hear(g))  # type: ignore[misc]
            elif isinstance(action, Say):
                self.world.note(f"{self.name} says: {action.text}")
            elif isinstance(action, Exit):
                self.leave(action)
                return
        self.publish()
        due_s = self.life.due_s()
        if due_s is not None:
            assert due_s > self.world.now_s - 1.0, f"{self.name} has been asked in vain since {due_s - 100:.3f}"
            delay_s = max(due_s - self.world.now_s, 0.05 if due_s <= self.world.now_s else 0.0)
            self.world.at(delay_s, lambda: self.step(lambda: self.life.on_time(self.world.now_s)))

    def leave(self, action: Exit) -> None:
        self.world.note(f"{self.name} exits with {action.code} {action.text}")
        self.exit = action
        self.ended = True
        connected = self.connected
        self.disconnect()
        for worker in self.mine():
            worker.end(None, signal.SIGKILL)
        if connected:
            self.world.store.remove(self)
        else:
            self.world.store.watch_lease(self)

    def crash(self) -> None:
        self.world.note(f"FAULT {self.name} crashes")
        self.ended = True
        self.disconnect()
        for worker in self.mine():
            worker.vanish()
        self.world.store.watch_lease(self)

    def mine(self) -> list[Worker]:
        return [worker for worker in self.world.workers.values() if worker.node is self and worker.alive]
