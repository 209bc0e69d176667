"""The agent's decisions, pure: what happened in, what to do out. The agent's loop (`agent`) carries them out.

A slot of the node goes through these states; `None` is the empty slot.

    from      on                                to
    None      told to start                     STARTING
    STARTING  the script calls elaunch.init()   ATTACHED
    ATTACHED  its state is registered           READY
    READY     it holds the state of the job     MEMBER
    MEMBER    all steps are committed           DONE
    any       the process ends                  None (DONE stays, where it ended with 0)
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field, replace

from elaunch.rendezvous.membership import (
    BrokenLink,
    Cut,
    Generation,
    NodeDoc,
    NodeWorker,
    Result,
    Stage,
    Stalled,
    WorkerState,
    incarnation,
    names_text,
    worker_id,
)

FRUITLESS_LIMIT = 3  # deaths in a row, none of which saw a step commit, after which a slot is given up
TOGETHER_S = 1.0  # deaths on a node that come within this time have one cause
REFUSED_S = 2.0  # so long a live worker may refuse its peers before it is replaced: one that ends takes less
BACKOFF_S = (0.0, 0.5, 2.0)  # before the next start, by the number of fruitless deaths in a row


class Phase(enum.Enum):
    """How far the worker of a slot has come."""

    STARTING = "starting"
    ATTACHED = "attached"
    READY = "ready"
    MEMBER = "member"
    DONE = "done"


@dataclass(slots=True)
class Slot:
    """A place for a worker on this node, and the worker in it."""

    index: int
    worker: str = ""
    phase: Phase | None = None
    pid: int = 0
    address: str = ""
    incarnation: int = 0
    fruitless: int = 0
    progressed: bool = False
    joined: bool = False
    alive: bool = False
    ended_ok: bool = False
    given_up: bool = False
    left: bool = False
    excused: bool = False
    again: bool = False  # of one that is excused: another worker takes the slot
    signalled: bool = False
    settled: int = 0
    retry_s: float | None = None
    refused_s: float | None = None  # when a peer first found that nobody listens at its address


@dataclass(frozen=True, slots=True)
class Start:
    """Start a worker. `warm`: a fork of the warm parent will do."""

    slot: int
    worker: str
    generation: Generation
    warm: bool


@dataclass(frozen=True, slots=True)
class Signal:
    """Send a signal to a worker's process group."""

    worker: str
    number: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a generation to an attached worker."""

    worker: str
    generation: Generation


@dataclass(frozen=True, slots=True)
class Say:
    """A line for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Warm:
    """Keep a warm parent: the script uses elaunch, so a replacement is to be quick, or workers start by it anyway."""


@dataclass(frozen=True, slots=True)
class Exit:
    """The agent's work is over."""

    code: int
    text: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker that failed, `own`: by itself, not because it was told to end.

    `exitcode` is negative for a signal, `t` is Unix time in seconds.
    """

    worker: str
    slot: int
    pid: int
    exitcode: int
    t: float
    own: bool


Action = Start | Signal | Tell | Say | Warm | Exit


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What the lifecycle needs to know of the command line. Times in seconds."""

    node: str
    host: str
    slots: int
    min_nodes: int
    max_nodes: int
    max_restarts: int | None
    shutdown_s: float = 30.0
    role: str = "default"
    rank: int = 0
    warm_start: bool = False


@dataclass(slots=True)
class Lifecycle:
    """The state of one agent, and its reactions."""

    settings: NodeSettings
    port: int = 0
    door: str = ""
    slots: list[Slot] = field(default_factory=list)
    generation: Generation | None = None
    attempt: int = 0
    wanted_attempt: int = 0
    draining: bool = False
    drain_reason: str = ""
    signalled: bool = False  # this agent, not a worker
    sick: str = ""  # why this node is to leave as soon as the others can do without it
    sick_told: bool = False
    spare: bool = False  # whether the user was told that this node has no place
    stopping: str = ""
    exit_code: int = 1
    kill_s: float | None = None
    killed: bool = False
    replaced: int = 0
    failed: str = ""
    cause: str = ""
    cause_t: float = 0.0
    gone: tuple[str, ...] = ()
    reset_epoch: int = 0
    broken: tuple[BrokenLink, ...] = ()
    committed: int = 0
    cut: tuple[Cut, ...] = ()
    stalled: tuple[Stalled, ...] = ()  # members, while all of this node wait for longer than they may
    result: Result | None = None
    warmed: bool = False
    took_part: bool = False
    plan_epoch: int = 0  # of the first generation with the present request for a plan that was heard of here
    failures: dict[int, Ended] = field(default_factory=dict)  # by slot, of workers that were not replaced
    takes_plans: bool = False
    saved: int | None = None  # number of steps in the newest checkpoint

    def __post_init__(self) -> None:
        self.slots = [Slot(index) for index in range(self.settings.slots)]

    # -- views --------------------------------------------------------------------------------------------------

    @property
    def elastic(self) -> bool:
        """Whether a worker of this node uses elaunch."""
        return any(slot.phase not in (None, Phase.STARTING) or slot.joined for slot in self.slots)

    @property
    def training(self) -> bool:
        return self.generation is not None and self.generation.stage is Stage.TRAIN

    @property
    def running(self) -> list[Slot]:
        return [slot for slot in self.slots if slot.alive]

    @property
    def finished(self) -> bool:
        """Whether each worker of this node has ended well, and there was at least one."""
        over = [slot for slot in self.slots if slot.ended_ok]
        done = any(slot.phase is Phase.DONE for slot in over)
        # Once members have finished, a worker that has not joined yet never will.
        left = [
            slot for slot in self.slots if slot.alive and not (done and slot.phase not in (Phase.MEMBER, Phase.DONE))
        ]
        return bool(over) and not left and not self.failed

    def doc(self) -> NodeDoc:
        """The report of this node, as it is now."""
        states = {
            Phase.STARTING: WorkerState.STARTING,
            Phase.ATTACHED: WorkerState.STARTING,
            Phase.READY: WorkerState.READY,
            Phase.MEMBER: WorkerState.MEMBER,
            Phase.DONE: WorkerState.DONE,
        }
        return NodeDoc(
            node=self.settings.node,
            host=self.settings.host,
            slots=self.settings.slots,
            workers=tuple(
                NodeWorker(slot.worker, slot.index, states[slot.phase], slot.address)
                for slot in self.slots
                if slot.phase is not None
            ),
            attempt=self.attempt,
            elastic=self.elastic,
            draining=self.draining,
            finished=self.finished,
            failed=self.failed,
            cause=self.cause,
            cause_t=self.cause_t,
            gone=self.gone,
            reset_epoch=self.reset_epoch,
            port=self.port,
            door=self.door,
            epoch=self.generation.epoch if self.generation else 0,
            took_part=self.took_part,
            takes_plans=self.takes_plans,
            plan_request=self._plan_request(),
            saved=self.saved,
            settled=self._settled() if self.draining or any(slot.excused for slot in self.slots) else 0,
            excused=tuple(slot.worker for slot in self.slots if slot.excused and slot.phase is not None),
            cut=self.cut,
            stalled=self.stalled,
            broken=self.broken,
            committed=self.committed,
            role=self.settings.role,
            rank=self.settings.rank,
        )

    def _plan_request(self) -> str:
        """The request that the generation carries, once every member of this node has settled a generation with it."""
        generation = self.generation
        if generation is None or not generation.plan_request or self._settled() < self.plan_epoch:
            return ""
        return generation.plan_request

    def _settled(self) -> int:
        """The newest epoch that all members of this node have entered; 0 without any."""
        ids = self.generation.ids if self.generation is not None else ()
        return min((slot.settled for slot in self.slots if slot.phase is not None and slot.worker in ids), default=0)

    def find(self, worker: str) -> Slot | None:
        return next((slot for slot in self.slots if slot.worker == worker and slot.phase is not None), None)

    def _runs(self, worker: str) -> bool:
        return any(slot.alive for slot in self.slots if slot.worker == worker)

    # -- what the job says --------------------------------------------------------------------------------------

    def on_generation(self, generation: Generation, now_s: float) -> list[Action]:
        if self.generation is not None and generation.epoch <= self.generation.epoch:
            return []
        if self.generation is None or generation.plan_request != self.generation.plan_request:
            self.plan_epoch = generation.epoch
        self.generation = generation
        self.stalled, self.broken = (), ()
        known = {*generation.ids, *generation.leaving}
        self.gone = tuple(worker for worker in self.gone if worker in known)
        if self.stopping:
            return []
        actions: list[Action] = []
        if generation.attempt > self.wanted_attempt:
            # Also where this node was absent while the others met again.
            actions.extend(self._new_attempt(generation, now_s))
        if generation.stage is Stage.TRAIN:
            actions.extend(self._training(generation, now_s))
        elif generation.stage is Stage.START:
            actions.extend(self._starting(generation))
        elif not any(slot.worker for slot in self.slots):
            actions.append(Say(generation.cause))
        return [*actions, *self._leave_if_sick(now_s)]

    def _starting(self, generation: Generation) -> list[Action]:
        if self.settings.node in generation.nodes:
            warm = self.settings.warm_start
            starts = [self._start(slot, generation, warm=warm) for slot in self.slots if slot.phase is None]
            if warm and not self.warmed:
                self.warmed = True
                return [Warm(), *starts]
            return [*starts]
        if len(generation.nodes) < self.settings.max_nodes:
            return [Say("this node waits: the job has just started without it")]
        return [self._waits_as_spare()]

    def _training(self, generation: Generation, now_s: float) -> list[Action]:
        actions: list[Action] = []
        mine = [slot for slot in self.slots if slot.phase is not None]
        for slot in mine:
            if slot.worker in generation.ids:
                slot.joined = self.took_part = True
            elif self._given_up(slot) and slot.worker not in generation.leaving:
                # The others went on without it: what it computes may no longer count.
                actions.append(Say(f"worker {slot.worker} was given up by its peers; it is ended"))
                actions.append(Signal(slot.worker, signal.SIGKILL))
                continue
            if slot.phase is not Phase.STARTING:
                actions.append(Tell(slot.worker, generation))
        if generation.hold and generation.workers:
            nodes = len({worker.node for worker in generation.workers})
            actions.append(
                Say(
                    f"{nodes} of at least {self.settings.min_nodes} nodes are left: the workers keep their state in "
                    "memory and wait for more"
                )
            )
        elif generation.cause != "start" and generation.workers:
            actions.append(Say(f"{generation.cause}; {_go_on(len(generation.workers))}"))
        if not self.warmed and any(slot.joined for slot in self.slots):
            self.warmed = True
            actions.append(Warm())
        if self.draining and not generation.workers:
            self.exit_code = 1  # all nodes leave at once: nobody goes on
        idle = self.settings.node not in generation.nodes and not any(slot.joined for slot in mine)
        if self.draining and idle and not all(slot.signalled for slot in self.running):
            actions.extend(self._terminate(now_s))
        apart = self.settings.node not in generation.nodes and not mine and not self.draining
        if apart and not self.spare and len(generation.nodes) >= self.settings.max_nodes:
            actions.append(self._waits_as_spare())
        actions.extend(self._fill(now_s))
        return actions

    @staticmethod
    def _given_up(slot: Slot) -> bool:
        """Of one that is not in the newest generation: whether it was in one, or thinks so."""
        return slot.phase is Phase.MEMBER or (slot.phase is Phase.READY and slot.joined)

    def _waits_as_spare(self) -> Say:
        self.spare, most = True, self.settings.max_nodes
        return Say(f"this node waits as a spare: the job has its {most} node{'' if most == 1 else 's'}")

    def _fill(self, now_s: float) -> list[Action]:
        """Start a worker in each empty slot of a training job, as far as restarts allow.

        Before the first step only workers that called `elaunch.init()` are replaced: a plain script is restarted whole.
        """
        generation = self.generation
        if generation is None or not self._has_place(generation):
            return []
        actions: list[Action] = []
        for slot in self.slots:
            if slot.phase is not None or slot.given_up or slot.left or not (self.training or slot.retry_s is not None):
                continue
            if slot.worker and slot.retry_s is None:
                slot.retry_s = now_s  # it died before the job was known to use elaunch
            if slot.retry_s is not None and now_s < slot.retry_s:
                continue
            actions.append(self._start(slot, generation, warm=True))
        return actions

    def _has_place(self, generation: Generation) -> bool:
        """Whether workers that this node starts now could still become members."""
        if generation.stage is Stage.ASSEMBLE or self.draining or self.stopping or self.attempt != self.wanted_attempt:
            return False
        if self.result is not None or any(slot.phase is Phase.DONE for slot in self.slots):
            return False
        return self.settings.node in generation.nodes or len(generation.nodes) < self.settings.max_nodes

    def _start(self, slot: Slot, generation: Generation, warm: bool) -> Start:
        first = slot.worker == ""
        slot.incarnation = self._first_incarnation(generation) if first else slot.incarnation + 1
        slot.worker = worker_id(self.settings.node, slot.index, slot.incarnation)
        slot.phase = Phase.STARTING
        slot.alive = True
        slot.address = ""
        slot.progressed = slot.joined = slot.ended_ok = slot.left = slot.signalled = slot.excused = False
        slot.settled = 0
        slot.retry_s = slot.refused_s = None
        self.failures.pop(slot.index, None)
        self.failed = ""
        return Start(slot.index, slot.worker, generation, warm)

    def _first_incarnation(self, generation: Generation) -> int:
        """A number that no worker had: an agent that was killed may have run some under this node's name."""
        former = [
            incarnation(worker)
            for worker in (*generation.ids, *generation.leaving)
            if worker.startswith(f"{self.settings.node}/")
        ]
        return max([generation.epoch - 1, *(number + 1 for number in former)])

    def _new_attempt(self, generation: Generation, now_s: float) -> list[Action]:
        self.wanted_attempt = generation.attempt
        for slot in self.slots:
            slot.given_up = slot.left = False
            slot.fruitless = 0
        actions: list[Action] = []
        if any(slot.worker for slot in self.slots):
            actions.append(Say(f"{generation.cause}: all workers are started again (attempt {generation.attempt})"))
        actions.extend(self._terminate(now_s))
        self._settle_attempt()
        return actions

    def _settle_attempt(self) -> None:
        if self.attempt < self.wanted_attempt and not self.running:
            self.attempt = self.wanted_attempt
            self.failed, self.kill_s, self.took_part = "", None, False
            self.failures.clear()
            for slot in self.slots:
                slot.phase = slot.retry_s = None
                slot.ended_ok = slot.joined = False

    def on_result(self, result: Result, now_s: float) -> list[Action]:
        self.result = result
        if self.stopping:
            return []
        if result.succeeded and self.running:
            # Members, and those that left, are about to end by themselves; others have nothing to join any more.
            return [Signal(slot.worker, signal.SIGKILL) for slot in self.running if not self._ends_by_itself(slot)]
        return self._stop(result.message, 0 if result.succeeded else 1, now_s)

    def _ends_by_itself(self, slot: Slot) -> bool:
        return slot.phase is Phase.DONE or slot.left or (self.draining and slot.joined)

    # -- what the workers do ------------------------------------------------------------------------------------

    def on_started(self, worker: str, pid: int) -> None:
        slot = self.find(worker)
        if slot is not None:
            slot.pid = pid

    def on_attach(self, worker: str) -> list[Action]:
        slot = self.find(worker)
        if slot is None or slot.phase is not Phase.STARTING:
            return []
        slot.phase = Phase.ATTACHED
        if self.generation is not None and self.training:
            return [Tell(worker, self.generation)]
        return []

    def on_ready(self, worker: str, address: str, takes_plans: bool = False) -> None:
        slot = self.find(worker)
        if slot is not None and slot.phase is Phase.ATTACHED:
            slot.phase, slot.address = Phase.READY, address
            self.takes_plans = takes_plans

    def on_settled(self, worker: str, epoch: int) -> None:
        slot = self.find(worker)
        if slot is not None and slot.phase in (Phase.READY, Phase.MEMBER):
            slot.phase, slot.settled = Phase.MEMBER, epoch

    def on_progress(self, worker: str, epoch: int) -> None:
        """A worker has seen a step commit in this generation."""
        slot = self.find(worker)
        if slot is not None:
            slot.progressed, slot.fruitless = True, 0
        generation = self.generation
        if generation is not None and generation.streak.urgent and generation.ids[:1] == (worker,):
            self.committed = max(self.committed, epoch)  # the leader wants to know, of one node

    def on_saved(self, step: int) -> None:
        self.saved = step or None

    def on_finished(self, worker: str) -> None:
        slot = self.find(worker)
        if slot is not None:
            slot.phase = Phase.DONE

    def on_leaving(self, worker: str) -> None:
        slot = self.find(worker)
        if slot is not None:
            slot.left = True

    def excuse(self, worker: str, again: bool, why: str) -> list[Action]:
        """Let one worker leave at the next step boundary; the others go on without it.

        Args:
            worker: a member of this node.
            again: whether another process takes its slot; else nobody does, until all workers are started again.
            why: for people.
        """
        slot = self.find(worker)
        if slot is None or slot.phase is not Phase.MEMBER or slot.excused or self.draining or self.stopping:
            return []
        slot.excused, slot.again = True, again
        then = "another process takes its place" if again else "its slot is not used again"
        return [Say(f"worker {worker} leaves at the next step boundary, {then}: {why}")]

    def _excused_ended(self, slot: Slot, text: str, t: float, now_s: float) -> list[Action]:
        """The process of a worker that was to leave has ended, in order or not."""
        self.cause, self.cause_t = text, t
        slot.excused = slot.left = False
        if not slot.again:
            slot.given_up = True
            if all(other.given_up for other in self.slots):
                return [Say("no slot of this node is used any more; its agent stays until the job ends")]
            return []
        slot.retry_s = now_s
        return self._fill(now_s)

    def on_broken(self, epoch: int, worker: str, peer: str) -> None:
        """A worker of this node, member of generation `epoch`, lost its link to a peer, whatever the reason."""
        generation = self.generation
        if generation is not None and epoch >= generation.urgent and {worker, peer}.issubset(generation.ids):
            self.broken = tuple(dict.fromkeys((*self.broken, BrokenLink(worker, peer))))

    def on_unreachable(self, epoch: int, peer: str, gone: bool, now_s: float) -> None:
        """A worker of this node, member of generation `epoch`, found a peer dead or its link to a live one broken."""
        if self.generation is None or epoch < self.generation.urgent:
            return
        if not gone:
            self.reset_epoch = self.generation.epoch
        elif peer in (*self.generation.ids, *self.generation.leaving):
            if not self._runs(peer):
                self.gone = tuple(dict.fromkeys((*self.gone, peer)))
            elif (slot := self.find(peer)) is not None and slot.refused_s is None:
                slot.refused_s = now_s  # it is about to end, as a rule

    def on_reach(self, cut: tuple[Cut, ...], well: frozenset[str]) -> list[Action]:
        """Other nodes were asked whether they can be reached.

        Args:
            cut: those that cannot.
            well: those that can, although a worker of this node took them for silent.
        """
        if well and self.generation is not None:
            self.reset_epoch = self.generation.epoch
        now, before = {one.node: one.host for one in cut}, {one.node: one.host for one in self.cut}
        self.cut = cut
        new = [f"{node} ({host})" for node, host in now.items() if node not in before]
        back = [f"{node} ({host})" for node, host in before.items() if node not in now]
        actions: list[Action] = []
        if new:
            actions.append(Say(f"nothing comes from {names_text(new)} any more: the network from here to there is cut"))
        if back:
            actions.append(Say(f"{names_text(back)} can be reached again from here"))
        return actions

    def on_exit(
        self,
        worker: str,
        exitcode: int | None,
        number: int | None,
        t: float,
        now_s: float,
        reason: str = "",
    ) -> list[Action]:
        """A worker's process ended: with `exitcode`, or by signal `number`, at Unix time `t`.

        `reason`: what it has written down of why; then it failed by itself, even if it was told to end meanwhile.
        """
        slot = self.find(worker)
        if slot is None:
            return []
        if exitcode != 0:
            code = -number if number is not None else exitcode or 0
            own = bool(reason) or not slot.signalled
            self.failures[slot.index] = Ended(worker, slot.index, slot.pid, code, t, own)
        phase, slot.pid, slot.address, slot.alive = slot.phase, 0, "", False
        slot.refused_s = None
        slot.phase = Phase.DONE if phase is Phase.DONE else None
        slot.ended_ok = exitcode == 0
        how = f"exited with code {exitcode}" if number is None else f"was killed by {signal_name(number)}"
        text = f"worker {worker} {how}{f': {reason}' if reason else ''}"
        actions: list[Action] = []
        if self.draining and phase is not Phase.DONE:
            if slot.joined and not slot.left:
                self.gone = (*self.gone, worker)
                self.cause, self.cause_t = f"{text} before the step boundary at which it was to leave", t
                actions.append(Say(self.cause))
        elif not self.stopping and self.result is None and self.attempt == self.wanted_attempt:
            actions.extend(self._judge(slot, phase, exitcode, text, t, now_s))
        self._settle_attempt()
        actions.extend(self._end_if_over())
        return actions

    def _judge(
        self, slot: Slot, phase: Phase | None, exitcode: int | None, text: str, t: float, now_s: float
    ) -> list[Action]:
        elastic = phase is not Phase.STARTING or self.training
        if slot.excused:
            return self._excused_ended(slot, text, t, now_s)
        if exitcode == 0:
            if elastic and phase is not Phase.DONE:
                slot.left = True
                self._blame(f"{text} before the job's end", t)
                return [Say(self.cause)]
            return []
        self._blame(text, t)
        if phase is Phase.DONE or not elastic:
            self.failed = self.failed or text
            return [Say(text)]
        slot.fruitless = 0 if slot.progressed else slot.fruitless + 1
        limit = self.settings.max_restarts
        if limit is not None and self.replaced >= limit:
            return [Say(f"{text}; it is not replaced: --max-restarts {limit} is used up"), *self._give_up(slot, text)]
        if slot.fruitless >= FRUITLESS_LIMIT:
            tries = f"{slot.fruitless} workers in a row died here before they saw a step commit"
            return [Say(f"{text}; it is not replaced: {tries}"), *self._give_up(slot, text)]
        self.replaced += 1
        slot.retry_s = now_s + BACKOFF_S[min(slot.fruitless, len(BACKOFF_S) - 1)]
        return [Say(f"{text}; a replacement starts"), *self._fill(now_s)]

    def _blame(self, text: str, t: float) -> None:
        """The first of deaths that come together is the cause of all: what follows from it is not to hide it."""
        if not 0 <= t - self.cause_t < TOGETHER_S:
            self.cause, self.cause_t = text, t

    def _give_up(self, slot: Slot, text: str) -> list[Action]:
        slot.given_up = True
        if all(other.given_up or other.left or not (other.phase or other.retry_s) for other in self.slots):
            self.failed = text
        return []

    # -- the end ------------------------------------------------------------------------------------------------

    def on_signal(self, number: int, now_s: float) -> list[Action]:
        """A signal for the agent: SIGTERM drains a training node, another stops its workers; a second one kills."""
        name = signal_name(number)
        again, self.signalled = self.signalled, True
        if self.stopping or (self.draining and (again or number != signal.SIGTERM)):
            self.kill_s = now_s
            self.stopping = self.stopping or f"stopped by {name}"
            return self.on_time(now_s)
        if self.draining:
            end_s = now_s + self.settings.shutdown_s
            self.kill_s = end_s if self.kill_s is None else min(self.kill_s, end_s)
            wait = f"they are killed after {self.settings.shutdown_s:g} s, and by a second signal at once"
            return [Say(f"{name}: the workers of this node leave already; {wait}")]
        if number == signal.SIGTERM and self._trains_here:
            return self.drain(name, now_s, self.settings.shutdown_s)
        return self._stop(f"stopped by {name}", 1, now_s, number)

    @property
    def _trains_here(self) -> bool:
        return self.training and any(slot.joined for slot in self.slots)

    def drain(self, reason: str, now_s: float, within_s: float | None = None) -> list[Action]:
        """This node is to leave the job, as soon as the others can go on without it; a second time changes nothing.

        Args:
            reason: for people.
            now_s: the time.
            within_s: its workers are killed after so long; None: they have the time they need.
        """
        if self.stopping or self.draining or self.result is not None:
            return []
        generation, node = self.generation, self.settings.node
        if generation is None or node not in generation.nodes:
            text = f"{reason}: this node leaves; it had no part in the job yet"
            return [Say(text), *self._stop(reason, 0, now_s)]
        last = set(generation.nodes) <= {node}
        if not self._trains_here and last:
            return self._stop(f"stopped by {reason}", 1, now_s)
        self.draining, self.drain_reason, self.exit_code = True, reason, 1 if last else 0
        self.cause, self.cause_t = f"{reason}: node {node} drains", 0.0
        fate = "no other node is left to go on" if last else "the others go on"
        self.kill_s = None if within_s is None else now_s + within_s
        if not self._trains_here:
            # Its workers end when the others have heard of it; who ends before that was lost.
            return [Say(f"{reason}: this node leaves; {fate}")]
        unready = [Signal(slot.worker, signal.SIGTERM) for slot in self.slots if slot.phase and not slot.joined]
        return [Say(f"{reason}: the workers of this node leave at the next step boundary; {fate}"), *unready]

    def on_resized(self, min_nodes: int, max_nodes: int, now_s: float) -> list[Action]:
        """The job has other limits from now on; this node may find a place in it."""
        self.settings = replace(self.settings, min_nodes=min_nodes, max_nodes=max_nodes)
        return self._fill(now_s)

    def on_sick(self, why: str, now_s: float) -> list[Action]:
        """Something of this node is about to fail: its workers leave as soon as the others can do without them.

        A node without which the job would stop stays: what fails, then fails, and may yet be made good.
        """
        self.sick = self.sick or why
        return self._leave_if_sick(now_s)

    def _leave_if_sick(self, now_s: float) -> list[Action]:
        if not self.sick or not self._trains_here or self.draining or self.stopping or self.result is not None:
            return []
        assert self.generation is not None
        others = len(set(self.generation.nodes) - {self.settings.node})
        if others >= self.settings.min_nodes:
            return self.drain(self.sick, now_s)
        if self.sick_told:
            return []
        self.sick_told = True
        left = "no other node" if not others else f"{others} of at least {self.settings.min_nodes} nodes"
        return [Say(f"this node stays in the job, which would have {left} without it; it leaves when others have come")]

    def on_time(self, now_s: float) -> list[Action]:
        """Whatever is due by now."""
        actions: list[Action] = []
        if self.kill_s is not None and now_s >= self.kill_s and self.running and not self.killed:
            self.killed = True
            actions.extend(Signal(slot.worker, signal.SIGKILL) for slot in self.running)
        actions.extend(self._end_refusing(now_s))
        actions.extend(self._fill(now_s))
        actions.extend(self._end_if_over())
        return actions

    def _end_refusing(self, now_s: float) -> list[Action]:
        """End workers that live and train, and at whose address nobody listens any more: no peer can reach them."""
        actions: list[Action] = []
        for slot in self._refusing():
            if slot.refused_s is not None and now_s >= slot.refused_s + REFUSED_S:
                slot.refused_s = None
                actions.append(Say(f"worker {slot.worker} runs, but refuses the connections of its peers; it is ended"))
                actions.append(Signal(slot.worker, signal.SIGKILL))
        return actions

    def _refusing(self) -> list[Slot]:
        """The workers that a peer could not reach, less those that are through or leave in order."""
        return [
            slot
            for slot in self.running
            if slot.refused_s is not None and slot.phase in (Phase.READY, Phase.MEMBER) and not slot.left
        ]

    def due_s(self) -> float | None:
        """When `on_time` has something to do next."""
        times = [slot.refused_s + REFUSED_S for slot in self._refusing() if slot.refused_s is not None]
        if self.generation is not None and self._has_place(self.generation):
            times += [slot.retry_s for slot in self.slots if slot.retry_s is not None and slot.phase is None]
        if self.kill_s is not None and not self.killed and self.running:
            times.append(self.kill_s)
        return min(times, default=None)

    def on_refused(self, text: str, now_s: float) -> list[Action]:
        """The job does not take this node, or the store cannot be reached at the start."""
        return self._stop(text, 1, now_s)

    def _stop(self, text: str, code: int, now_s: float, number: int = signal.SIGTERM) -> list[Action]:
        self.stopping, self.exit_code = text or "stopped", code
        return [*self._terminate(now_s, number), *self._end_if_over()]

    def _terminate(self, now_s: float, number: int = signal.SIGTERM) -> list[Action]:
        self.kill_s, self.killed = now_s + self.settings.shutdown_s, False
        for slot in self.running:
            slot.signalled = True
        return [Signal(slot.worker, number) for slot in self.running]

    def _kept(self) -> str:
        if self.saved is None:
            return "the state in memory is gone"
        return f"there is a checkpoint of {self.saved} steps, from which the job goes on when it is started again"

    def _end_if_over(self) -> list[Action]:
        if self.running:
            return []
        if self.stopping:
            return [Exit(self.exit_code, "" if self.exit_code == 0 else self.stopping)]
        if self.draining:
            return [Exit(self.exit_code, f"stopped by {self.drain_reason}; {self._kept()}" if self.exit_code else "")]
        if self.result is not None:
            return [Exit(0 if self.result.succeeded else 1, "" if self.result.succeeded else self.result.message)]
        return []


def _go_on(workers: int) -> str:
    return "1 worker goes on" if workers == 1 else f"{workers} workers go on"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
