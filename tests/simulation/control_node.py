"""A toy agent for simulated jobs around the real `Lifecycle` and `decide`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elaunch.agent.decisions.actions import Action, AskEnd, Exit, Record, Say, Signal, Start, Tell
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.agent.decisions.node_state import NodeSettings
from elaunch.agent.decisions.step_lines import HOLD_S
from elaunch.rendezvous.decide import LeaderDecision, View, decide, to_leave
from elaunch.rendezvous.membership import Cut, Generation, NodeDoc, PlanRequest, Result, WorkerState, node_of
from elaunch.rendezvous.node.mailbox import is_news
from elaunch.rendezvous.rules import quorum
from elaunch.rendezvous.rules.spares import all_spares
from tests.simulation.control_worker import Worker

if TYPE_CHECKING:
    from tests.simulation.control_store import Store
    from tests.simulation.control_world import World

ANSWER_S = 1.0  # a machine that does not answer within this time cannot be reached


class Node:
    """An agent: a lifecycle, its workers, and the part in the rendezvous that `Participant` plays."""

    def __init__(self, world: World, name: str) -> None:
        case, size = world.case, world.settings
        self.world, self.name = world, name
        self.life = Lifecycle(
            NodeSettings(
                name,
                name,
                case.slots,
                size.min_nodes,
                size.max_nodes,
                case.max_restarts,
                shutdown_s=5.0,
                spare_state=size.spare_state,
            )
        )
        self.ended = False
        self.exit: Exit | None = None
        self.connected = False
        self.present = self.was_absent = False
        self.joined = False
        self.cut_off = False
        self.silence = 0
        self.written: NodeDoc | None = None
        self.view = View()
        self.docs: dict[str, NodeDoc] = {}
        self.leading = False
        self.generation_revision = 0
        self.told_result = False
        self.told_to_drain: set[str] = set()
        self.asked = ""
        self.hurried: list[Action] = []
        self.wakes = 0
        self.ordered_s = 0.0

    @property
    def store(self) -> Store:
        """The store that this node uses."""
        return self.world.store

    # -- the rendezvous -----------------------------------------------------------------------------------------

    def later(self, act: Callable[[], None]) -> None:
        """Deliver something from the store, in order, unless the connection breaks first."""
        if not self.connected:
            return
        silence, world = self.silence, self.world
        self.ordered_s = max(self.ordered_s, world.now_s + world.delay_s(self.name))
        world.at(self.ordered_s - world.now_s, lambda: act() if self.connected and self.silence == silence else None)

    def disconnect(self) -> None:
        self.connected = self.leading = False
        self.silence += 1
        self.written = None

    def be_cut_off(self, duration_s: float) -> None:
        self.world.note("FAULT:", f"{self.name} cannot reach the store for {duration_s:g} s")
        self.disconnect()
        self.cut_off = True
        self.store.watch_lease(self)
        self.world.at(duration_s, self.come_back)

    def come_back(self) -> None:
        self.cut_off = False
        self.connect()

    def connect(self) -> None:
        store, world = self.store, self.world
        if self.ended or self.connected or self.cut_off or not store.reaches(self):
            return
        if not self.present and self.name in store.docs:
            world.at(0.2, self.connect)  # until the lease of its predecessor runs out
            return
        if self.joined:
            self.view = replace(self.view, outage_end_s=world.now_s)
        self.connected = self.present = self.joined = True
        self.docs.clear()
        self.publish()
        if store.size is not None:
            self.see_size(*store.size)()
        self.see_spares(store.spares)()
        if store.generation is not None:
            self.read_generation(store.generation, store.generation_revision)()
        if store.result is not None:
            self.see_result(store.result)
        if self.connected and store.leader in ("", self.name):
            store.leader = ""
            self.try_to_lead()

    def publish(self) -> None:
        doc = self.life.doc()
        if not self.connected or doc == self.written:
            return
        if is_news(doc, self.written):
            self._write(doc)
        else:
            self.world.at(self.world.settings.lease_s / 3, self._write_late)

    def _write_late(self) -> None:
        if self.connected and (doc := self.life.doc()) != self.written:
            self._write(doc)

    def _write(self, doc: NodeDoc) -> None:
        self.written = doc
        self.store.put(doc)

    def read_generation(self, generation: Generation, revision: int) -> Callable[[], None]:
        def take() -> None:
            if revision <= self.generation_revision:
                return
            self.generation_revision = revision
            former = self.view.generation
            if former is not None and former.number == generation.number:
                self.view = replace(self.view, generation=generation)
                return
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

    def see_size(self, min_nodes: int, max_nodes: int) -> Callable[[], None]:
        def take() -> None:
            self.step(lambda: self.life.on_resized(min_nodes, max_nodes, self.world.now_s))
            self.lead()

        return take

    def see_spares(self, nodes: tuple[str, ...]) -> Callable[[], None]:
        return lambda: self.step(lambda: self.life.on_spares(nodes, self.world.now_s))

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
        current = generation is None or doc.progress.attempt == generation.attempt
        return current and any(worker.state is WorkerState.MEMBER for worker in doc.workers)

    def try_to_lead(self) -> None:
        store = self.store
        if store.leader or self.ended:
            return
        self.world.note(self.name, "leads")
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
        self.ask_to_leave(decision)
        if decision.generation is not None and self.store.announce(
            decision.generation, self.generation_revision, self.name
        ):
            assert self.store.generation is not None
            self.read_generation(self.store.generation, self.store.generation_revision)()
        elif (settled := quorum.settle(self.view)) is not None:
            self.store.settle(settled, self.generation_revision)
        self.store.hold_spares(all_spares(self.view, world.settings), self.name)
        if decision.result is not None:
            self.store.end(decision.result)
        self.tell_absent(decision.asks)
        if decision.asks:
            self.ask_missing(decision.asks)
        self.wakes += 1
        wake, silence = self.wakes, self.silence
        delay_s = 1.0 if decision.wake_s is None else max(0.0, decision.wake_s - world.now_s) + 1e-4
        world.at(delay_s, lambda: self.lead() if (wake, silence) == (self.wakes, self.silence) else None)

    def tell_absent(self, missing: Collection[str]) -> None:
        """Tells all nodes which of the missing ones are absent; only where the job hosts its store."""

    def ask_missing(self, nodes: Collection[str]) -> None:
        """Asks nodes without which the job may not go on here; only where it hosts its store."""

    def ask_to_leave(self, decision: LeaderDecision) -> None:
        """As `Requests` does it: each node that is sick or too many is asked once."""
        leaving = to_leave(self.view, self.world.settings, self.told_to_drain, decision)
        for name, why in leaving.items():
            if name not in self.told_to_drain:
                node = self.world.nodes[name]
                node.later(node.be_drained(why))
        self.told_to_drain = set(leaving)

    def be_drained(self, reason: str) -> Callable[[], None]:
        return lambda: self.step(lambda: self.life.drain(reason, self.world.now_s))

    # -- the agent ----------------------------------------------------------------------------------------------

    def step(self, decide_what: Callable[[], list[Any] | None]) -> None:
        """Let the lifecycle react, carry out what it says, and publish what it has become."""
        if self.ended:
            return
        lines = self.life.workers.lines
        decided = decide_what() or []
        for action in [*decided, *self.life.on_time(self.world.now_s), *lines.on_time(self.world.now_s)]:
            if isinstance(action, Start):
                self.world.note(self.name, f"starts {action.worker}")
                # A machine that was started again before the first step may begin with the names it had.
                former = self.world.workers.get(action.worker)
                assert former is None or (former.node is not self and not former.alive), (
                    f"{action.worker} is used twice"
                )
                assert action.worker not in self.world.members, f"{action.worker} has been a member"
                worker = self.world.workers[action.worker] = self.world.make_worker(self, action.worker)
                self.world.at(self.world.delay_s(worker.id), worker.boot)
            elif isinstance(action, Signal):
                target = self.world.workers[action.worker]
                if action.number == signal.SIGKILL:
                    self.check_kill(target)
                self.world.note(self.name, f"sends {signal.Signals(action.number).name} to {target.id}")
                self.world.at(0.001, lambda target=target, n=action.number: target.end(None, n))  # type: ignore[misc]
            elif isinstance(action, Tell):
                worker = self.world.workers[action.worker]
                self.world.note(worker.id, f"is told of generation {action.generation.number}", of_worker=True)
                worker.send_down(lambda worker=worker, g=action.generation: worker.hear(g))  # type: ignore[misc]
            elif isinstance(action, Record):
                self.world.record(action)
            elif isinstance(action, AskEnd):
                self.asked = action.worker
                if action.worker:
                    self.world.at(HOLD_S, lambda: self.step(list))
                    self.look_for_end(action.worker)
            elif isinstance(action, Say):
                self.world.note(self.name, f"says: {action.text}")
            elif isinstance(action, Exit):
                self.leave(action)
                return
        self.publish()
        due_s = self.life.due_s()
        if due_s is not None:
            assert due_s > self.world.now_s - 1.0, f"{self.name} has been asked in vain since {due_s - 100:.3f}"
            delay_s = max(due_s - self.world.now_s, 0.05 if due_s <= self.world.now_s else 0.0)
            self.world.at(delay_s, lambda: self.step(lambda: self.life.on_time(self.world.now_s)))

    def end_lines(self, worker: str) -> list[Action]:
        """Lines of a worker that ends do not wait any longer."""
        asked = self.life.workers.lines.asked
        actions = self.life.workers.lines.end_of(worker, self.world.now_s)
        if worker != asked:  # else they have waited for this end, and it is known what the log has
            self.hurried += actions
        return actions

    def look_for_end(self, worker: str) -> None:
        """As `WorkerEnds` does it."""
        if self.asked != worker or self.ended:
            return
        node = node_of(worker)
        if self.connected:
            doc = self.store.read(node) if node in self.store.docs else None
            listens = node in self.world.nodes and not self.world.nodes[node].ended
            counted = [listed.id for listed in doc.workers if listed.state is not WorkerState.DONE] if doc else []
            if not listens or worker not in counted:
                self.asked, logged = "", doc.progress.logged if doc is not None else 0
                lines = self.life.workers.lines
                self.world.at(0.001, lambda: self.step(lambda: lines.heard_of_end(worker, logged, self.world.now_s)))
                return
        self.world.at(0.02, lambda: self.look_for_end(worker))

    def check_kill(self, target: Worker) -> None:
        """While the job goes on, no agent kills the last worker that holds its state.

        A node that the store has not heard of for a lease counts as lost: the others have gone on without it. So they
        have without one that was replaced when another one held the state, whatever became of that one since.
        """
        life, world = self.life, self.world
        if not world.checks_kills or self.was_absent:
            return
        attempts = {node.life.wanted_attempt for node in world.nodes.values() if not node.ended}
        if self.store.result is not None or life.ending.under_way or attempts != {life.attempt} or not target.holds:
            return
        if self.store.holders_besides.get(target.id):
            return
        if not target.alive or target.id in world.deaf:  # who is deaf can give the state to nobody
            return
        others = [one for one in world.workers.values() if one.alive and one.holds and one is not target]
        waiting = [one for one in world.workers.values() if one.alive and one is not target]
        assert others or not waiting, f"{self.name} kills {target.id}, the last that holds the state"

    def leave(self, action: Exit) -> None:
        self.world.note(self.name, f"exits with {action.code}{action.text and f': {action.text}'}")
        self.exit = action
        self.ended = self.world.ended = True
        connected = self.connected
        self.disconnect()
        for worker in self.mine():
            worker.end(None, signal.SIGKILL)
        if connected:
            self.store.remove(self)
        else:
            self.store.watch_lease(self)

    def crash(self) -> None:
        self.world.note("FAULT:", f"the machine of {self.name} is lost")
        self.ended = self.world.ended = True
        self.disconnect()
        for worker in self.mine():
            worker.vanish()
        self.store.watch_lease(self)

    def kill_agent(self, outlived_s: float) -> None:
        """The agent is killed, and its workers go on for a while; what they tell it is lost."""
        self.world.note("FAULT:", f"the agent of {self.name} is killed, {outlived_s:g} s before its workers")
        self.ended = self.world.ended = True
        self.disconnect()
        for worker in self.mine():
            worker.outlive(outlived_s)
        self.store.watch_lease(self)

    def mine(self) -> list[Worker]:
        return [worker for worker in self.world.workers.values() if worker.node is self and worker.alive]

    # -- whom this node reaches ---------------------------------------------------------------------------------

    def ask_others(self, number: int, suspect: str) -> None:
        """A worker hears nothing from a peer, nor from its machine: whom does this node reach?"""
        generation = self.life.generation
        if generation is not None and number >= generation.aborts_step_before:
            asked = sorted({self.name, *generation.nodes})
            self.world.at(ANSWER_S, lambda: self.hear_answers(asked, suspect))

    def ask_again(self) -> None:
        """Nodes that did not answer are asked until they do."""
        if self.life.doc().peers.cut:
            self.hear_answers([one.node for one in self.life.doc().peers.cut], "")

    def hear_answers(self, asked: list[str], suspect: str) -> None:
        silent = [name for name in asked if frozenset((name, self.name)) in self.world.parted]
        well = frozenset({suspect} & set(asked) - set(silent))
        self.step(lambda: self.life.on_reach(tuple(Cut(name, name) for name in silent), well))
