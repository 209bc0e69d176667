"""A simulated worker: a process with the real runtime, its channel to the agent, and what the world sees of it."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from elaunch.agent.decisions.actions import Action
from elaunch.agent.messages import note_lost_link, react, step_of
from elaunch.errors import ElaunchError
from elaunch.rendezvous.membership import Generation, GenerationStage, node_of
from elaunch.wire import Finished, Leaving, Logged, Message, Ready, Report, Unreachable
from elaunch.workers.comm.secure.security import LinkSecurity
from elaunch.workers.runtime import Member
from tests.simulation.native import SimulatedBulk, groups_of
from tests.simulation.network import SimulatedTransport
from tests.simulation.processes import Process
from tests.simulation.script import Framework, train

if TYPE_CHECKING:
    from tests.simulation.control_node import Node
    from tests.simulation.world import JobWorld


class Channel:
    """What a worker has of its agent (`elaunch.workers.agent_client.Client`)."""

    elastic = True
    token, host, local_rank = "", "", 0
    security: LinkSecurity | None = None

    def __init__(self, of: Worker) -> None:
        self.worker, self.min_nodes = of.id, of.world.case.min_nodes
        self._of = of
        self._newest: Generation | None = None
        self.logged: Logged | None = None
        self._on_generation: Callable[[Generation], None] = lambda generation: None

    def listen(self, on_generation: Callable[[Generation], None]) -> None:
        self._on_generation = on_generation

    def newest(self) -> Generation | None:
        return self._newest

    def wait_beyond(self, generation: int, timeout_s: float | None) -> Generation | None:
        process, world = self._of.process, self._of.world
        end_s = None if timeout_s is None else world.now_s + timeout_s
        while self._newest is None or self._newest.number <= generation:
            left_s = None if end_s is None else end_s - world.now_s
            if left_s is not None and left_s <= 1e-9:
                return None
            process.wait(self, left_s)
        return self._newest

    def wait_logged(self, generation: int, step: int, timeout_s: float) -> None:
        process, world = self._of.process, self._of.world
        end_s = world.now_s + timeout_s
        while self.logged != Logged(generation, step) and end_s - world.now_s > 1e-9:
            process.wait(self, end_s - world.now_s)

    def note_logged(self, said: Logged | None) -> None:
        self.logged = said
        self._of.process.wake(self)

    def ready(self, address: str, takes_plans: bool = False) -> None:
        self.send(Ready(address, takes_plans))

    def send(self, message: Message) -> None:
        self._of.tell_agent(message)

    def close(self) -> None:
        pass

    def hear(self, generation: Generation) -> None:
        """The agent tells of a generation, in the thread of the channel."""
        if generation.stage is GenerationStage.TRAIN and (
            self._newest is None or generation.number > self._newest.number
        ):
            self._newest = generation
            self._of.process.wake(self)
            self._on_generation(generation)


class Worker:
    """A training process of a simulated job, with what `control_node.Node` uses of one."""

    def __init__(self, world: JobWorld, node: Node, id: str) -> None:
        self.world, self.node, self.id = world, node, id
        self.alive = True
        self.process = Process(world, self._main, lambda code: self.end(code, None))
        self.channel = Channel(self)
        self.member: Member | None = None
        self.hooks: Framework | None = None
        self.transport: SimulatedTransport | None = None
        self.bulks: list[SimulatedBulk] = []
        self.waits_since_s = inf  # in a native group
        self.finished = False
        self.activations: set[tuple[int, int]] = set()
        self.up_s = self.down_s = 0.0

    # -- what the world asks ------------------------------------------------------------------------------------

    @property
    def active(self) -> Generation | None:
        """The generation that it is a member of, or enters."""
        return self.member._recovery._active if self.member is not None else None

    @property
    def entering(self) -> bool:
        """Whether it has not resumed in it yet."""
        return self.member is None or self.member._recovery._entering

    @property
    def knows(self) -> bool:
        """Whether it still can, or could until the job ended, tell an agent what has committed."""
        return self.finished or (self.alive and not self.node.ended)

    @property
    def holds(self) -> bool:
        """Whether it holds the whole state of the job."""
        return self.hooks is not None and self.hooks.whole and self.hooks.holds

    def note(self, text: str) -> None:
        self.world.note(self.id, text, of_worker=True)

    # -- its agent ----------------------------------------------------------------------------------------------

    def send_up(self, act: Callable[[], Any]) -> None:
        """A message to the agent; they arrive in order."""
        self.up_s = max(self.up_s, self.world.now_s + self.world.delay_s(self.id))
        self.world.at(self.up_s - self.world.now_s, lambda: self.node.step(act))

    def send_down(self, act: Callable[[], None]) -> None:
        self.down_s = max(self.down_s, self.world.now_s + self.world.delay_s(self.id))
        self.world.at(self.down_s - self.world.now_s, lambda: self.process.when_running(act))

    def hear(self, generation: Generation) -> None:
        self.channel.hear(generation)

    def tell_agent(self, message: Message) -> None:
        """Sends a message, of which the agent makes what `WorkerMessages` does."""
        match message:
            case Unreachable():
                what = "dead" if message.refused else "on a silent machine" if message.silent else "alive"
                self.note(f"finds {message.peer} {what}")
                self.send_up(lambda: self._lost_peer(message))
            case Report():
                if message.kind == "collectives":
                    self.note(f"says that all sum natively from step {message.fields['step']} on")
                if message.kind == "step":
                    self.send_up(lambda: self._log(message))
            case _:
                if isinstance(message, Finished):
                    self.finished = True
                    self.note("has finished")
                elif isinstance(message, Leaving):
                    self.note(f"leaves after {message.step} steps")
                self.send_up(lambda: react(self.node.life, self.id, message))

    def _log(self, message: Report) -> list[Action]:
        return self.node.life.workers.lines.take(self.id, message, self.world.now_s)

    def note_logged(self, report: Report) -> None:
        """A log has the line on a step that it has reported."""
        self.send_down(partial(self.channel.note_logged, step_of(report)))

    def _lost_peer(self, message: Unreachable) -> None:
        if note_lost_link(self.node.life, self.id, message, self.world.now_s):
            self.node.ask_others(message.generation, node_of(message.peer))

    # -- its life -----------------------------------------------------------------------------------------------

    def boot(self) -> None:
        if self.alive:
            self.send_up(lambda: self.node.life.on_started(self.id, 1))
            self.process.start()

    def end(self, exitcode: int | None, number: int | None) -> None:
        """It exits, or is killed by a signal."""
        if not self.alive:
            return
        self.note(f"exits with {exitcode}" if number is None else f"is ended by {signal.Signals(number).name}")
        self.alive = False
        if self.transport is not None:
            self.transport.break_down()
        for bulk in self.bulks:
            if bulk.room is not None and not bulk.poisoned:
                bulk.room.left_by(bulk)
        self.process.kill()
        now_s = self.world.now_s
        # Whatever it said before is read before its end is reported.
        self.send_up(lambda: self.node.end_lines(self.id))
        self.send_up(lambda: self.node.life.on_exit(self.id, exitcode, number, now_s, self.world.now_s))

    def outlive(self, seconds: float) -> None:
        """Its agent is killed: the worker goes on until the kernel, and its peers, see it end a while later."""
        self.world.at(seconds, lambda: self.end(None, signal.SIGKILL))

    def vanish(self) -> None:
        """Its machine is lost: nobody is told."""
        self.alive = False
        self.world.lost_s[self.id] = self.world.now_s
        self.process.kill()
        self.world.network.look()

    def _main(self) -> None:
        world, case = self.world, self.world.case
        try:
            if not case.elastic:
                self.process.sleep(case.steps * world.step_s)
                return
            self.process.sleep(world.import_s(self.id))
            train(self, case.steps, case.seed % 2 == 0)
        except ElaunchError as error:
            self.note(f"fails: {error}")
            raise SystemExit(1) from error

    # -- what the script does -----------------------------------------------------------------------------------

    def attach(self, hooks: Framework) -> Member:
        """Makes the runtime, as `elaunch.attach` does."""
        life = self.node.life
        self.send_up(lambda: life.on_attach(self.id) if self.alive else None)
        self.hooks = hooks
        self.transport = SimulatedTransport(self.world, self.world.network, self.process, self.id)
        with groups_of(self) if self.world.native else nullcontext():
            member = Member(
                self.channel,
                hooks,
                step=lambda: hooks.step,
                boundary=hooks.boundary,
                state_is_whole=hooks.whole,
                transport=self.transport,
            )
        atexit.unregister(member.close)
        self.member = member
        return member

    def wake_threads(self, what: object) -> None:
        """Ends what threads beside the training thread wait for."""
        for thread in self.process.threads:
            thread.wake(what)

    def pass_import(self) -> None:
        self.process.sleep(self.world.import_s(self.id))

    def pass_step(self) -> None:
        self.process.sleep(self.world.step_s)

    def pass_time(self, moves: bool = False) -> None:
        """Lets a moment pass in which other news may come."""
        if moves or self.world.rng.random() < 0.5:
            self.process.sleep(self.world.transfer_s(self.id, moves))

    def committed(self, step: int, generation: Generation) -> None:
        self.world.committed(self.id, step, generation)

    def applies(self, step: int, generation: Generation) -> None:
        """It applies a step in which it was interrupted, since another member has passed the barrier."""
        self.note(f"applies step {step} after all: others have committed it")
        self.world.applied(self.id, step, generation)

    def resumed(self, generation: Generation) -> None:
        self.note(f"goes on in generation {generation.number}")
        assert self.hooks is not None
        self.activations.add(self.hooks.staged_for)
