"""Toy workers for test_control_simulation, which follow the rules of `elaunch.workers.recovery.Recovery`.

An urgent generation interrupts a step, a planned one is entered at the first step boundary at which all members know of
it, and a step commits on all members or on none.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elaunch.rendezvous.membership import Generation, GenerationStage, node_of
from tests.simulation.transcript import generation_text

if TYPE_CHECKING:
    from tests.simulation.control_node import Node
    from tests.simulation.control_world import World

STEP_S = 0.4
Op = tuple[str, int]


@dataclass
class Worker:
    """A training process, as `recovery.Recovery` and a data-parallel session make it behave."""

    world: World
    node: Node
    id: str
    alive: bool = True
    on_a_lost_machine: bool = False
    registered: bool = False
    newest: Generation | None = None
    active: Generation | None = None
    entering: bool = True
    past: int = 0
    waiting: bool = False
    broke: bool = False
    holds: bool = False
    step: int = 0
    entered: bool = False
    at_op: Op | None = None
    broken_links: set[frozenset[str]] = field(default_factory=set)
    up_s: float = 0.0
    down_s: float = 0.0

    def generation(self) -> Generation:
        assert self.active is not None
        return self.active

    def send_up(self, act: Callable[[], Any]) -> None:
        """A message to the agent; they arrive in order."""
        self.up_s = max(self.up_s, self.world.now_s + self.world.delay_s(self.id))
        self.world.at(self.up_s - self.world.now_s, lambda: self.node.step(act))

    def send_down(self, act: Callable[[], None]) -> None:
        self.down_s = max(self.down_s, self.world.now_s + self.world.delay_s(self.id))
        self.world.at(self.down_s - self.world.now_s, lambda: act() if self.alive else None)

    def boot(self) -> None:
        if not self.alive:
            return
        life = self.node.life
        self.send_up(lambda: life.on_started(self.id, 1))
        if not self.world.case.elastic:
            self.world.at(self.world.case.steps * STEP_S, lambda: self.end(0, None))
            return
        attach_s = self.world.import_s(self.id)
        self.world.at(attach_s, lambda: self.send_up(lambda: life.on_attach(self.id) if self.alive else None))
        self.world.at(attach_s + self.world.import_s(self.id), self.register)

    def register(self) -> None:
        if self.alive:
            self.send_up(lambda: self.node.life.on_ready(self.id, f"{self.id}:1"))
            self.registered = self.waiting = True
            self.look_for_a_generation()

    def hear(self, generation: Generation) -> None:
        if generation.stage is not GenerationStage.TRAIN or (self.newest and generation.number <= self.newest.number):
            return
        self.newest = generation
        if self.waiting:
            self.look_for_a_generation()
        elif self.active is not None and (self.entering or generation.aborts_step_before > self.active.number):
            self.tell_of_end(
                f"generation {generation.number} is urgent" if not self.entering else "there is a newer one"
            )
            self.interrupt(generation.number - 1)

    def note(self, text: str) -> None:
        self.world.note(self.id, text, of_worker=True)

    def tell_of_end(self, why: str) -> None:
        """Note what it does not go on with."""
        if not self.registered:
            return
        if self.entering:
            self.note(f"gives up entering generation {self.generation().number}: {why}")
        elif self.step < self.world.case.steps:
            self.note(f"aborts step {self.step}: {why}")
        else:
            self.note(f"leaves the last barrier: {why}")

    def interrupt(self, past: int) -> None:
        self.at_op = None
        self.waiting, self.broke, self.past = True, False, max(past, self.generation().number)
        self.look_for_a_generation()

    def look_for_a_generation(self) -> None:
        newest = self.newest
        if newest is None or newest.number <= self.past or not self.registered:
            return
        if self.id not in newest.ids:
            if self.active is not None:
                self.leave(newest)
                return
        elif not newest.hold and (
            self.active is None or self.entering or not self.broke or newest.aborts_step_before > self.active.number
        ):
            self.enter(newest)
            return
        self.past = newest.number

    def enter(self, generation: Generation) -> None:
        self.active, self.entering, self.waiting, self.broke = generation, True, False, False
        self.broken_links = set()
        self.note(f"enters generation {generation.number}")
        self.world.look_around_all()
        self.world.arrive(self, ("votes", 0), (self.step, self.entered, self.holds))

    def leave(self, generation: Generation) -> None:
        planned = self.id in generation.leaving
        self.note(f"leaves after {self.step} steps")
        self.waiting = False
        self.send_up(lambda: self.node.life.on_leaving(self.id))
        self.at_op, self.registered = None, False
        self.world.at(self.world.delay_s(self.id), lambda: self.end(0 if planned else 1, None))

    def returning(self, generation: int, op: Op, said: list[Any]) -> Callable[[], None]:
        def go_on() -> None:
            if self.alive and self.active is not None and self.active.number == generation and self.at_op == op:
                self.at_op = None
                after: dict[str, Callable[[list[Any]], None]] = {
                    "votes": self.voted,
                    "seal": self.sealed,
                    "commit": self.commit,
                    "finish": self.finished,
                }
                after[op[0]](said)

        return go_on

    def losing(self, generation: int, op: Op, peer: str) -> Callable[[], None]:
        def lose() -> None:
            if self.alive and self.active is not None and self.active.number == generation and self.at_op == op:
                self.tell_of_end(f"the link to {peer} is lost")
                self.at_op = None
                self.waiting, self.broke, self.past = True, not self.entering, generation
                self.world.at(0.03, lambda: self.probe(generation, peer))
                self.look_for_a_generation()

        return lose

    def overtaken(self, generation: int, op: Op, newer: int) -> Callable[[], None]:
        def leave_step() -> None:
            if self.alive and self.active is not None and self.active.number == generation and self.at_op == op:
                self.tell_of_end(f"a peer has entered generation {newer}")
                self.interrupt(newer - 1)

        return leave_step

    def probe(self, generation: int, peer: str) -> None:
        """Tell the agent whether a lost peer is dead; a machine that is gone gives no answer."""
        if not self.alive or not self.waiting or self.active is None or self.active.number != generation:
            return
        lost = self.world.workers[peer]
        if lost.on_a_lost_machine:
            self.world.at(0.5, lambda: self.probe(generation, peer))
        elif self.world.apart(self.id, peer):
            self.note(f"finds that the machine of {peer} does not answer")
            self.send_up(lambda: self.node.life.on_broken(generation, self.id, peer))
            self.send_up(lambda: self.node.ask_others(generation, node_of(peer)))
        else:
            dead = not lost.alive or peer in self.world.deaf
            self.note(f"finds {peer} {'dead' if dead else 'alive'}")
            self.send_up(lambda: self.node.life.on_broken(generation, self.id, peer) if not dead else None)
            self.send_up(lambda: self.node.life.on_unreachable(generation, peer, dead, self.world.now_s))

    def voted(self, said: list[tuple[int, bool, bool]]) -> None:
        generation = self.generation()
        holders = [vote for vote in said if vote[2]]
        if not holders and generation.begun:
            self.note(f"finds that no member of generation {generation.number} holds the state")
            self.end(1, None)
            return
        step = max((vote[0] for vote in holders), default=0)
        for their_step, entered, _ in holders:
            assert their_step == step or (their_step == step - 1 and entered), (
                f"votes {said} of {generation_text(None, generation)}"
            )
        receives = bool(holders) and not self.holds
        if receives:
            self.note(f"receives the state after {step} steps")
        elif holders and self.step < step:
            self.note(f"applies step {self.step} after all: others have committed it")
        self.step, self.entered = step, False
        self.world.at(self.world.transfer_s(self.id, receives), lambda: self.seal(generation.number))

    def seal(self, generation: int) -> None:
        if self.alive and not self.waiting and self.active is not None and self.active.number == generation:
            self.world.arrive(self, ("seal", 0), None)

    def sealed(self, said: list[None]) -> None:
        self.entering, self.holds = False, True
        generation = self.generation().number
        self.world.linked.update(frozenset((self.id, one)) for one in self.generation().ids)
        self.send_up(lambda: self.node.life.on_joined(self.id, generation))
        newest = self.newest
        if newest is not None and newest.aborts_step_before > self.generation().number:
            self.tell_of_end(f"generation {newest.number} is urgent")
            self.interrupt(newest.number - 1)
        else:
            if self.step < self.world.case.steps:
                self.note(f"begins step {self.step}")
            self.next_step()

    def next_step(self) -> None:
        generation, step = self.generation().number, self.step
        done = step >= self.world.case.steps
        self.world.at(0.0 if done else STEP_S, lambda: self.barrier(generation, step))

    def barrier(self, generation: int, step: int) -> None:
        in_it = self.alive and self.active is not None and self.active.number == generation
        if in_it and self.step == step and not self.entering and not self.waiting and self.at_op is None:
            assert self.newest is not None
            self.entered = step < self.world.case.steps
            self.world.arrive(self, ("commit" if self.entered else "finish", step), self.newest.number)

    def commit(self, said: list[int]) -> None:
        generation = self.generation().number
        self.world.committed(self.id, self.step, self.generation())
        self.step, self.entered = self.step + 1, False
        self.send_up(lambda: self.node.life.on_progress(self.id, generation))
        if len(set(said)) == 1 and said[0] > generation:
            self.interrupt(generation)  # not an interruption: all change over at this boundary
        else:
            self.next_step()

    def finished(self, said: list[int]) -> None:
        self.note("has finished")
        self.send_up(lambda: self.node.life.on_finished(self.id))
        self.registered = False
        self.world.at(0.1, lambda: self.end(0, None))

    def end(self, exitcode: int | None, number: int | None) -> None:
        if not self.alive:
            return
        self.note(f"exits with {exitcode}" if number is None else f"is ended by {signal.Signals(number).name}")
        self.alive, self.at_op = False, None
        now_s = self.world.now_s
        # Whatever it said before is read before its end is reported.
        self.send_up(lambda: self.node.life.on_exit(self.id, exitcode, number, now_s, self.world.now_s))
        self.world.look_around_all()

    def outlive(self, seconds: float) -> None:
        """Its agent is killed: it goes on until it ends by itself, a while later."""
        self.world.at(seconds, lambda: self.end(None, signal.SIGKILL))

    def vanish(self) -> None:
        self.alive, self.on_a_lost_machine, self.at_op = False, True, None
        self.world.look_around_all()
