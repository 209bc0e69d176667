"""Simulated jobs that follow a script: fixed sizes, fixed delays, and faults at given times or events.

Scenario(
    name="one_worker_dies",
    about="...",
    faults=(at(4.0, kill("n1/0")), after("n1 starts n1/0#1", drain("n0"))),
    check=...,
)
"""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from elaunch.rendezvous.membership import Generation, GenerationStage, Result, slot_of
from tests.simulation.control_worker import STEP_S, Worker
from tests.simulation.control_world import SILENT_S, START_S, Case, World
from tests.simulation.transcript import Announced, Committed, Event, Reported, Said, render

END_S = 120.0
TRANSFER_S = 0.3
Fault = Callable[["Script"], None]


@dataclass(frozen=True)
class Timed:
    """A fault, and when it comes: at a time, or so long after the first event that has a text in it."""

    fault: Fault
    delay_s: float
    event: str = ""


def at(t_s: float, fault: Fault) -> Timed:
    """Let a fault come at a time, in seconds since the job began."""
    return Timed(fault, t_s)


def after(event: str, fault: Fault, delay_s: float = 0.0) -> Timed:
    """Let a fault come once an event with this text in it was seen, and `delay_s` seconds have passed."""
    return Timed(fault, delay_s, event)


def kill(*slots: str) -> Fault:
    """Kill the live workers of these slots, all at the same moment."""

    def act(world: Script) -> None:
        victims = [world.worker(slot) for slot in slots]
        world.note("FAULT:", f"{', '.join(one.id for one in victims)} killed")
        for one in victims:
            one.end(None, signal.SIGKILL)

    return act


def lose(node: str) -> Fault:
    """Lose a whole machine: its agent and its workers say nothing any more, and nothing at its address answers."""
    return lambda world: world.nodes[node].crash()


def start(*nodes: str) -> Fault:
    """Start agents that want to join the job."""

    def act(world: Script) -> None:
        for node in nodes:
            world.add_node(node)

    return act


def lose_at_once(*nodes: str) -> Fault:
    """Lose several whole machines at the same moment."""

    def act(world: Script) -> None:
        for node in nodes:
            world.nodes[node].crash()

    return act


def drain(node: str) -> Fault:
    """Send SIGTERM to the agent of a node."""
    return lambda world: world.terminate(node)


def fail_soon(*nodes: str) -> Fault:
    """Let the agents of some nodes find, at the same moment, that a device of theirs is about to fail."""

    def act(world: Script) -> None:
        for name in nodes:
            world.note("FAULT:", f"a device of {name} is about to fail")
            node = world.nodes[name]
            node.step(lambda node=node: node.life.on_sick("GPU 3: XID 95"))  # type: ignore[misc]

    return act


def store_away(duration_s: float) -> Fault:
    """Let nobody reach the store for a time."""
    return lambda world: world.store.go_away(duration_s)


def cut_off(node: str, duration_s: float) -> Fault:
    """Let one node not reach the store for a time."""
    return lambda world: world.nodes[node].be_cut_off(duration_s)


def part(one: str, other: str) -> Fault:
    """Let nothing pass between two nodes."""
    return lambda world: world.part(one, other)


def heal(one: str, other: str) -> Fault:
    """Let everything pass between two nodes again."""
    return lambda world: world.heal(one, other)


def sick(slot: str) -> Fault:
    """Let all links of the live worker of a slot fail, in each generation anew."""
    return lambda world: world.fall_sick(world.worker(slot).id)


def deaf(slot: str) -> Fault:
    """Let the live worker of a slot refuse new connections, and break the links that it has."""

    def act(world: Script) -> None:
        one = world.worker(slot)
        world.fall_deaf(one.id)
        for other in one.generation().ids:
            if other != one.id:
                world.break_link(one.id, other)

    return act


def break_link(one: str, other: str) -> Fault:
    """Break the link between the live workers of two slots, once."""
    return lambda world: world.break_link(world.worker(one).id, world.worker(other).id)


def resize(min_nodes: int, max_nodes: int) -> Fault:
    """Ask for another number of nodes, as `elaunch ctl resize` does."""
    return lambda world: world.resize(min_nodes, max_nodes)


def replace_worker(slot: str, why: str) -> Fault:
    """Let a worker ask to be replaced at the next step boundary, as one that is too slow does."""

    def act(world: Script) -> None:
        one = world.worker(slot)
        world.note("REQUEST:", f"{one.id} is to be replaced: {why}")
        one.node.step(lambda: one.node.life.evict(one.id, True, why))

    return act


def ask_for_plan() -> Fault:
    """Ask for another plan for the members of the present generation, as `elaunch ctl plan --set` does."""
    return lambda world: world.store.ask_for_plan()


class Script(World):
    """A world in which nothing is random.

    Each connection has a delay of its own, which follows from the seed and its name alone: one message more shifts no
    others.
    """

    def __init__(self, case: Case, faults: tuple[Timed, ...]) -> None:
        super().__init__(case)
        self._delays_s: dict[str, float] = {}
        self._waiting = [fault for fault in faults if fault.event]
        for index in range(case.nodes):
            self.at(0.05 * index, self.add_node)
        for fault in faults:
            if not fault.event:
                self.at(fault.delay_s, partial(fault.fault, self))

    def _fixed(self, name: str) -> float:
        if name not in self._delays_s:
            self._delays_s[name] = random.Random(f"{self.case.seed} {name}").random()
        return self._delays_s[name]

    def delay_s(self, way: str) -> float:
        return 0.001 + 0.002 * self._fixed(way)

    def import_s(self, worker: str) -> float:
        return 0.3 + 0.1 * self._fixed(worker)

    def transfer_s(self, worker: str, receives: bool) -> float:
        return TRANSFER_S if receives else self.delay_s(worker)

    def loss_s(self, worker: str, peer: Worker) -> float:
        return SILENT_S if peer.on_a_lost_machine else self.delay_s(worker)

    def keep(self, event: Event) -> None:
        super().keep(event)
        for fault in [fault for fault in self._waiting if fault.event in str(event)]:
            self._waiting.remove(fault)
            self.at(fault.delay_s, partial(fault.fault, self))

    def worker(self, slot: str) -> Worker:
        """Returns the live worker of a slot."""
        return next(one for one in self.workers.values() if one.alive and slot_of(one.id) == slot)


@dataclass(frozen=True)
class Played:
    """A scenario that was played to its end, and what a check may ask of it."""

    world: Script

    @property
    def generations(self) -> list[Generation]:
        return self.world.store.announced

    @property
    def training(self) -> list[Generation]:
        """Those in which workers train, in order."""
        return [one for one in self.generations if one.stage is GenerationStage.TRAIN]

    @property
    def result(self) -> Result:
        result = self.world.store.result
        assert result is not None, "the job has no result"
        return result

    @property
    def ended_by_agents(self) -> list[str]:
        """The workers to which an agent sent a signal while the job had no result."""
        end_s = self.t_s("RESULT")
        words = [event.text.split() for event in self.world.events if isinstance(event, Said) and event.t_s < end_s]
        return [text[3] for text in words if text[:1] == ["sends"]]

    @property
    def announced(self) -> list[Announced]:
        """The generations, with their time and their author."""
        return [event for event in self.world.events if isinstance(event, Announced)]

    @property
    def started(self) -> list[str]:
        """All workers, in the order in which they were started."""
        return list(self.world.workers)

    def index(self, text: str) -> int:
        """Returns the position of the first event that has this text in it."""
        found = next((index for index, event in enumerate(self.world.events) if text in str(event)), None)
        assert found is not None, f"nothing like this has happened: {text}"
        return found

    def t_s(self, text: str) -> float:
        """Returns the time of the first event that has this text in it."""
        return self.world.events[self.index(text)].t_s

    def happens(self, text: str) -> bool:
        return any(text in str(event) for event in self.world.events)

    def in_order(self, *texts: str) -> None:
        """Check that the first events with these texts in them came in this order."""
        found = [self.index(text) for text in texts]
        assert found == sorted(found), f"these came in another order: {list(zip(found, texts))}"

    def committed_in(self, step: int, attempt: int = 0) -> dict[int, list[str]]:
        """Returns who has committed a step by a barrier, by the number of the generation."""
        who = dict[int, list[str]]()
        for event in self.world.events:
            if isinstance(event, Committed) and (event.step, event.generation.attempt) == (step, attempt):
                who.setdefault(event.generation.number, []).append(event.worker)
        return who

    def pause_s(self) -> float:
        """Returns the longest time between two steps of the job that commit in succession, in seconds."""
        first = dict[tuple[int, int], float]()
        for event in self.world.events:
            if isinstance(event, Committed):
                first.setdefault((event.generation.attempt, event.step), event.t_s)
        times = list(first.values())
        return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


@dataclass(frozen=True)
class Scenario:
    """A job, what happens to it, and what must hold of how it goes on.

    Attributes:
        name: of the file of its transcript.
        about: two to four lines for the reader of the transcript: what happens, and what to look for.
        faults: what happens, and when.
        check: raises `AssertionError` where the job does not do what the scenario is there to show.
        steps: how many steps the job has, of `control_worker.STEP_S` seconds each.
        shows_all: whether the transcript has all of the start and of the end, which are the same in all jobs.
    """

    name: str
    about: str
    check: Callable[[Played], None]
    faults: tuple[Timed, ...] = ()
    nodes: int = 2
    slots: int = 2
    min_nodes: int = 1
    max_nodes: int = 0
    max_restarts: int | None = None
    steps: int = 20
    elastic: bool = True
    spares: int = 0
    spare_state: bool = False
    shows_all: bool = False

    def play(self) -> Played:
        """Plays the scenario until every agent has ended, and checks what holds of every job."""
        case = Case(
            seed=1,
            nodes=self.nodes,
            slots=self.slots,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes or self.nodes - self.spares,
            max_restarts=self.max_restarts,
            steps=self.steps,
            elastic=self.elastic,
            spares=self.spares,
            spare_state=self.spare_state,
        )
        world = Script(case, self.faults)
        world.run(START_S + END_S)
        assert world.over(), (
            f"these agents are still there: {[node.name for node in world.all_nodes if not node.ended]}"
        )
        assert not world._waiting, f"never seen: {[fault.event for fault in world._waiting]}"
        return Played(world)

    def transcript(self, played: Played) -> str:
        """Returns the text of the transcript, with its header."""
        case = played.world.case
        size = f"{case.nodes} nodes of {case.slots} workers, {case.min_nodes} to {case.max_nodes} nodes"
        size += f", --spares {case.spares}" if case.spares else ""
        size += ", --spare-state" if case.spare_state else ""
        restarts = "" if case.max_restarts is None else f", --max-restarts {case.max_restarts}"
        events: list[Event] = played.world.events
        start = ""
        if not self.shows_all:
            events = _without_start_and_end(played)
            start = "\n# How it starts and ends is in undisturbed.txt; n0 leads."
        header = [*(f"# {line.strip()}" for line in self.about.strip().splitlines()), "#"]
        header.append(f"# The job: {size}, {case.steps} steps of {STEP_S} s{restarts}.{start}")
        return "\n".join([*header, "", *render(events), ""])


def _without_start_and_end(played: Played) -> list[Event]:
    """Leave out what comes before the first step commits, but the first members, and the last reports of the nodes."""
    events = played.world.events
    members = next(event for event in played.announced if event.after.stage is GenerationStage.TRAIN)
    first = next(index for index, event in enumerate(events) if isinstance(event, Committed))
    last = played.index("has finished")
    return [members, *events[first:last], *(event for event in events[last:] if not isinstance(event, Reported))]
