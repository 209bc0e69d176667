"""The states of a slot, and the table of its transitions.

A slot is the place of one local rank on this node; one worker process after the other runs in it. `TRANSITIONS` and
`IGNORED` together say what each event does in each state, and `tests/slot_diagram.py` draws docs/architecture.md from
them. `elaunch.agent.decisions.lifecycle` produces the events and carries out the effects.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product

from elaunch.rendezvous.membership import Generation, WorkerState

FRUITLESS_LIMIT = 3  # deaths in a row, none of which saw a step commit, after which a slot is given up


class SlotState(enum.Enum):
    """The states of a slot."""

    EMPTY = "no worker runs; one starts when the job has a place for it"
    STARTING = "the process starts, or its script does not use elaunch"
    ATTACHED = "the script has connected to the agent"
    READY = "its state is registered; it waits for a generation with it"
    JOINING = "a generation names it, and it enters"
    MEMBER = "it has entered a generation, and holds the state"
    EVICTED = "it is to leave at the next step boundary, and the slot is not used again"
    REPLACED = "it is to leave at the next step boundary, and another worker takes the slot"
    LEAVING = "it has left the job, and ends"
    LEAVING_EARLY = "it has left before it had entered, and ends"
    EVICTED_LEAVING = "evicted, and it has left the job"
    REPLACED_LEAVING = "to be replaced, and it has left the job"
    FINISHED = "all its steps are committed; the process ends"
    ENDED = "all its steps were committed, and the process has ended"
    BACKOFF = "a replacement starts when its time has come"
    LEFT = "its worker has left, and none follows in this attempt"
    GIVEN_UP = "no worker starts here in this attempt any more"

    @property
    def reported(self) -> WorkerState | None:
        """Returns what the node's report says of the worker; None without one."""
        return _REPORTED.get(self)

    @property
    def alive(self) -> bool:
        """Returns whether a process runs."""
        return self in ALIVE

    @property
    def evicted(self) -> bool:
        """Returns whether the worker is to leave although its node stays."""
        return self in _EVICTED

    @property
    def leaving(self) -> bool:
        """Returns whether the worker has left in order, so that its end is expected."""
        return self in _LEAVING

    @property
    def ends(self) -> bool:
        """Returns whether the worker has left, or committed all its steps, so that its process is about to end."""
        return self.leaving or self is SlotState.FINISHED


_REPORTED = {
    SlotState.STARTING: WorkerState.STARTING,
    SlotState.ATTACHED: WorkerState.STARTING,
    SlotState.READY: WorkerState.READY,
    SlotState.JOINING: WorkerState.READY,
    SlotState.LEAVING_EARLY: WorkerState.READY,
    SlotState.MEMBER: WorkerState.MEMBER,
    SlotState.EVICTED: WorkerState.MEMBER,
    SlotState.REPLACED: WorkerState.MEMBER,
    SlotState.LEAVING: WorkerState.MEMBER,
    SlotState.EVICTED_LEAVING: WorkerState.MEMBER,
    SlotState.REPLACED_LEAVING: WorkerState.MEMBER,
    SlotState.FINISHED: WorkerState.DONE,
    SlotState.ENDED: WorkerState.DONE,
}
_EVICTED = frozenset({SlotState.EVICTED, SlotState.REPLACED, SlotState.EVICTED_LEAVING, SlotState.REPLACED_LEAVING})
_LEAVING = frozenset(
    {SlotState.LEAVING, SlotState.LEAVING_EARLY, SlotState.EVICTED_LEAVING, SlotState.REPLACED_LEAVING}
)
ALIVE = frozenset(_REPORTED) - {SlotState.ENDED}
VACANT = frozenset({SlotState.EMPTY, SlotState.BACKOFF, SlotState.LEFT, SlotState.GIVEN_UP})
REACHABLE = frozenset({SlotState.READY, SlotState.JOINING, SlotState.MEMBER, SlotState.EVICTED, SlotState.REPLACED})
"""States in which peers must be able to connect to the worker."""


class SlotEvent(enum.Enum):
    """What can happen to a slot."""

    START = "a worker is started"
    ATTACH = "it connects to the agent"
    REGISTER = "it has registered its state"
    ADMIT = "a training generation names it"
    RELEASE = "a training generation lets it leave"
    OMIT = "a training generation does without it"
    JOIN = "it has entered a generation"
    COMMIT = "it saw a step commit"
    EVICT = "it is to leave for good"
    REPLACE = "it is to leave for another worker"
    LEAVE = "it has left the job"
    FINISH = "it has committed its last step"
    REFUSE = "a peer finds that it does not listen"
    EXIT = "it ends with code 0"
    DIE = "it ends otherwise"
    EXIT_DRAINING = "it ends while its node leaves"
    EXIT_UNJUDGED = "it ends when all workers are to end"
    RESET = "all workers start again, and none runs"


def place_in(generation: Generation, worker: str) -> SlotEvent:
    """Returns what a training generation means for a worker."""
    if worker in generation.ranks:
        return SlotEvent.ADMIT
    return SlotEvent.RELEASE if worker in generation.leaving else SlotEvent.OMIT


class Effect(enum.Enum):
    """What a transition does beside changing the state; `Lifecycle` has a method for each."""

    START_WORKER = "start it"
    TELL = "tell it the generation"
    KILL = "kill it"
    NOTE_ADDRESS = "note its address"
    NOTE_ADMISSION = "note the generation"
    NOTE_JOINED = "note what it entered"
    NOTE_COMMIT = "forget fruitless deaths"
    NOTE_REFUSED = "kill it if that lasts"
    SAY_EVICTED = "say that nobody follows"
    SAY_REPLACED = "say that another follows"
    REPORT_LOST = "report it as lost"
    BLAME_EARLY_EXIT = "report its early exit as the cause"
    BLAME = "report its death as the cause"
    FAIL = "report that the node has failed"
    NOTE_CAUSE = "report its departure as the cause"
    SAY_UNUSED = "say so if no slot is left"
    GIVE_UP_RESTARTS = "say that no restarts are left"
    GIVE_UP_FRUITLESS = "say that too many died"
    REPLACE_LATER = "start another after a pause"
    REPLACE_NOW = "start another"
    FORGET = "forget the worker"


@dataclass(slots=True)
class Slot:
    """A slot of this node: its state, and what is known of the worker in it, or of the last one.

    Attributes:
        local_rank: its number on this node.
        state: what it is in now; only `Lifecycle` changes it, by the table.
        worker: identity of the present worker or the last one; "" before the first.
        admitted_generation: of the newest training generation that named that worker; 0 without one.
        joined_generation: of the newest generation that it has entered; 0 without one.
        committed_generation: of the newest generation in which it saw a step commit.
        exitcode: of its process, once that has exited; None while it runs and where a signal ended it.
        told_to_end: whether a signal of its agent has asked it to end.
        is_given_up: whether it is being killed, since the others go on without it.
        fruitless: deaths in a row before this worker, none of which saw a step commit.
        retry_s: in BACKOFF, when a replacement may start.
        refused_s: when a peer first found that nobody listens at its address.
        error: what the last worker here raised, where none has seen a step commit since; "": nothing.
    """

    local_rank: int
    state: SlotState = SlotState.EMPTY
    worker: str = ""
    pid: int = 0
    address: str = ""
    admitted_generation: int = 0
    joined_generation: int = 0
    committed_generation: int | None = None
    exitcode: int | None = None
    told_to_end: bool = False
    is_given_up: bool = False
    fruitless: int = 0
    retry_s: float = 0.0
    refused_s: float | None = None
    error: str = ""

    @property
    def alive(self) -> bool:
        """Returns whether the worker's process runs, as far as the agent knows."""
        return self.state.alive

    @property
    def fruitless_deaths(self) -> int:
        """Returns how many workers in a row have seen no commit, if the present one has died."""
        return 0 if self.committed_generation is not None else self.fruitless + 1


@dataclass(frozen=True, slots=True)
class News:
    """What is known of an event; only the fields that the event has are set. Times in seconds, `t` is Unix time.

    Attributes:
        text: what has happened, for people; of an eviction, why.
        reason: what the worker has written down of why it failed.
        training: whether the job trains.
        restarts_left: whether --max-restarts allows another replacement.
        warm: of a start, whether a fork of the preloaded process will do.
        takes_plans: whether the worker carries out plans that users ask for.
    """

    now_s: float = 0.0
    generation: Generation | None = None
    number: int = 0
    address: str = ""
    text: str = ""
    reason: str = ""
    t: float = 0.0
    training: bool = False
    restarts_left: bool = True
    warm: bool = False
    takes_plans: bool = False


class Guard(enum.Enum):
    """Conditions of a row, which `holds` evaluates; the first row whose guard holds counts."""

    ALWAYS = ""
    ADMITTED = "a generation names it"
    REPLACED = "its links failed again and again, so that none takes it in"
    BEFORE_TRAINING = "the job does not train yet"
    RESTARTS_USED_UP = "no restarts are left"
    FRUITLESS = f"{FRUITLESS_LIMIT} in a row saw no commit"


def holds(guard: Guard, slot: Slot, news: News) -> bool:
    """Returns whether a guard holds for a slot in the light of an event."""
    match guard:
        case Guard.ALWAYS:
            return True
        case Guard.ADMITTED:
            return slot.admitted_generation > 0
        case Guard.REPLACED:
            return news.generation is not None and slot.worker in news.generation.streak.replaced
        case Guard.BEFORE_TRAINING:
            return not news.training
        case Guard.RESTARTS_USED_UP:
            return not news.restarts_left
        case Guard.FRUITLESS:
            return slot.fruitless_deaths >= FRUITLESS_LIMIT


@dataclass(frozen=True, slots=True)
class Transition:
    """A row of the table: the next state, the effects in their order, and the condition."""

    state: SlotState
    effects: tuple[Effect, ...] = ()
    guard: Guard = Guard.ALWAYS


Rows = Mapping[tuple[SlotState, SlotEvent], tuple[Transition, ...]]


def _rows() -> Rows:
    s, e, f, g, to = SlotState, SlotEvent, Effect, Guard, Transition
    rows: dict[tuple[SlotState, SlotEvent], tuple[Transition, ...]] = {}

    def row(states: SlotState | Iterable[SlotState], event: SlotEvent, *transitions: Transition) -> None:
        wanted = {states} if isinstance(states, SlotState) else set(states)
        for state in (state for state in SlotState if state in wanted):
            assert (state, event) not in rows, f"{state} and {event} have two rows"
            rows[state, event] = transitions

    def stay(states: SlotState | Iterable[SlotState], event: SlotEvent, *effects: Effect) -> None:
        for state in {states} if isinstance(states, SlotState) else states:
            row(state, event, Transition(state, effects))

    # A worker comes, and takes part.
    row(VACANT, e.START, to(s.STARTING, (f.START_WORKER,)))
    row(s.STARTING, e.ATTACH, to(s.ATTACHED, guard=g.BEFORE_TRAINING), to(s.ATTACHED, (f.TELL,)))
    row(s.ATTACHED, e.REGISTER, to(s.JOINING, (f.NOTE_ADDRESS,), g.ADMITTED), to(s.READY, (f.NOTE_ADDRESS,)))
    row(s.READY, e.ADMIT, to(s.JOINING, (f.NOTE_ADMISSION, f.TELL)))
    row(_UNJOINED, e.JOIN, to(s.MEMBER, (f.NOTE_JOINED,)))
    stay(_MEMBERS, e.JOIN, f.NOTE_JOINED)
    stay(REACHABLE, e.COMMIT, f.NOTE_COMMIT)

    # Training generations name it or do not. One that starts may bear the name of a worker that was lost.
    stay(s.STARTING, e.ADMIT, f.NOTE_ADMISSION)
    stay(ALIVE - {s.STARTING, s.READY}, e.ADMIT, f.NOTE_ADMISSION, f.TELL)
    stay(ALIVE - {s.STARTING}, e.RELEASE, f.TELL)
    for state in (s.ATTACHED, s.READY):
        row(state, e.OMIT, to(state, (f.KILL,), g.REPLACED), to(state, (f.TELL,)))
    stay(s.FINISHED, e.OMIT, f.TELL)
    stay(_MEMBERS | _LEAVING | {s.JOINING}, e.OMIT, f.KILL)
    stay(_NEW | REACHABLE, e.REFUSE, f.NOTE_REFUSED)

    # It leaves, or finishes.
    row(s.MEMBER, e.EVICT, to(s.EVICTED, (f.SAY_EVICTED,)))
    row(s.MEMBER, e.REPLACE, to(s.REPLACED, (f.SAY_REPLACED,)))
    row(s.JOINING, e.LEAVE, to(s.LEAVING_EARLY))
    row(s.MEMBER, e.LEAVE, to(s.LEAVING))
    row(s.EVICTED, e.LEAVE, to(s.EVICTED_LEAVING))
    row(s.REPLACED, e.LEAVE, to(s.REPLACED_LEAVING))
    row(_MEMBERS, e.FINISH, to(s.FINISHED))

    # Its process ends while the job goes on.
    left_early = to(s.LEFT, (f.BLAME_EARLY_EXIT,))
    died = (
        to(s.GIVEN_UP, (f.BLAME, f.GIVE_UP_RESTARTS), g.RESTARTS_USED_UP),
        to(s.GIVEN_UP, (f.BLAME, f.GIVE_UP_FRUITLESS), g.FRUITLESS),
        to(s.BACKOFF, (f.BLAME, f.REPLACE_LATER)),
    )
    judged = {s.ATTACHED, s.READY, s.JOINING, s.MEMBER, s.LEAVING, s.LEAVING_EARLY}
    row(s.STARTING, e.EXIT, to(s.EMPTY, guard=g.BEFORE_TRAINING), left_early)
    row(s.STARTING, e.DIE, to(s.EMPTY, (f.BLAME, f.FAIL), g.BEFORE_TRAINING), *died)
    row(judged, e.EXIT, left_early)
    row(judged, e.DIE, *died)
    for event in (e.EXIT, e.DIE):
        row((s.EVICTED, s.EVICTED_LEAVING), event, to(s.GIVEN_UP, (f.NOTE_CAUSE, f.SAY_UNUSED)))
        row((s.REPLACED, s.REPLACED_LEAVING), event, to(s.BACKOFF, (f.NOTE_CAUSE, f.REPLACE_NOW)))
    row(s.FINISHED, e.EXIT, to(s.ENDED))
    row(s.FINISHED, e.DIE, to(s.ENDED, (f.BLAME, f.FAIL)))

    # Its process ends while the node leaves, or all workers are to end.
    row(_NEW, e.EXIT_DRAINING, to(s.EMPTY, (f.REPORT_LOST,), g.ADMITTED), to(s.EMPTY))
    row(s.READY, e.EXIT_DRAINING, to(s.EMPTY))
    row(_MEMBERS | {s.JOINING}, e.EXIT_DRAINING, to(s.EMPTY, (f.REPORT_LOST,)))
    row(_LEAVING, e.EXIT_DRAINING, to(s.LEFT))
    row(_NEW | REACHABLE, e.EXIT_UNJUDGED, to(s.EMPTY))
    row(_LEAVING, e.EXIT_UNJUDGED, to(s.LEFT))
    row(s.FINISHED, e.EXIT_UNJUDGED, to(s.ENDED))
    row(VACANT | {s.ENDED}, e.RESET, to(s.EMPTY, (f.FORGET,)))
    return rows


@dataclass(frozen=True, slots=True)
class Ignored:
    """Events that change nothing in some states, and why."""

    states: frozenset[SlotState]
    events: frozenset[SlotEvent]
    reason: str


def _ignored(states: Iterable[SlotState], events: Iterable[SlotEvent], reason: str) -> Ignored:
    return Ignored(frozenset(states), frozenset(events), reason)


_NEW = frozenset({SlotState.STARTING, SlotState.ATTACHED})
_UNJOINED = frozenset({SlotState.READY, SlotState.JOINING})
_MEMBERS = frozenset({SlotState.MEMBER, SlotState.EVICTED, SlotState.REPLACED})
_GONE = VACANT | {SlotState.ENDED}
_OVER = _LEAVING | {SlotState.FINISHED}
_EVICTIONS = (SlotEvent.EVICT, SlotEvent.REPLACE)
_MESSAGES = (
    SlotEvent.ATTACH,
    SlotEvent.REGISTER,
    SlotEvent.JOIN,
    SlotEvent.COMMIT,
    *_EVICTIONS,
    SlotEvent.LEAVE,
    SlotEvent.FINISH,
)
_ENDS = (SlotEvent.EXIT, SlotEvent.DIE, SlotEvent.EXIT_DRAINING, SlotEvent.EXIT_UNJUDGED)

TRANSITIONS = _rows()
"""For each state and event what follows, in the first row whose guard holds."""

IGNORED = (
    _ignored(_GONE, _MESSAGES, "the process has ended"),
    _ignored(_GONE, (SlotEvent.ADMIT, SlotEvent.RELEASE, SlotEvent.OMIT), "there is no process to tell"),
    _ignored(
        {SlotState.STARTING}, (SlotEvent.RELEASE, SlotEvent.OMIT), "it hears of the newest generation when it attaches"
    ),
    _ignored(ALIVE - {SlotState.STARTING}, (SlotEvent.ATTACH,), "it is attached"),
    _ignored({SlotState.STARTING}, (SlotEvent.REGISTER,), "it has not attached"),
    _ignored(ALIVE - _NEW, (SlotEvent.REGISTER,), "its state is registered"),
    _ignored(_NEW, (SlotEvent.JOIN, SlotEvent.COMMIT), "it has registered no state"),
    _ignored(_NEW | _UNJOINED, (*_EVICTIONS, SlotEvent.FINISH), "it is no member"),
    _ignored(_NEW | {SlotState.READY}, (SlotEvent.LEAVE,), "no generation names it"),
    _ignored(_MEMBERS - {SlotState.MEMBER}, _EVICTIONS, "it is to leave already"),
    _ignored(_LEAVING, (SlotEvent.JOIN, SlotEvent.COMMIT, *_EVICTIONS, SlotEvent.LEAVE), "it has left, and ends"),
    _ignored(_LEAVING, (SlotEvent.FINISH, SlotEvent.REFUSE), "it has left, and ends"),
    _ignored({SlotState.FINISHED}, (SlotEvent.JOIN, SlotEvent.COMMIT, *_EVICTIONS), "its steps are all committed"),
    _ignored({SlotState.FINISHED}, (SlotEvent.LEAVE, SlotEvent.FINISH, SlotEvent.REFUSE), "it has finished, and ends"),
)
"""What a worker, or the job, may say in a state in which it changes nothing."""

IMPOSSIBLE = (
    _ignored(ALIVE | {SlotState.ENDED}, (SlotEvent.START,), "a worker is started only in a slot that is free"),
    _ignored(_GONE, (*_ENDS, SlotEvent.REFUSE), "a process ends once, and only a live one can refuse its peers"),
    _ignored({SlotState.FINISHED}, (SlotEvent.EXIT_DRAINING,), "who has finished ends as it would if the node stayed"),
    _ignored(ALIVE, (SlotEvent.RESET,), "workers start again when those of the former attempt have ended"),
)
"""Events that the agent itself makes, and not in these states: one would be a defect."""


def find_transition(slot: Slot, event: SlotEvent, news: News) -> Transition | None:
    """Returns what follows from an event in a slot; None where it is ignored.

    Raises:
        AssertionError: the agent does not make this event in the slot's state.
    """
    rows = TRANSITIONS.get((slot.state, event))
    if rows is not None:
        return next(row for row in rows if holds(row.guard, slot, news))
    assert (slot.state, event) in _QUIET, f"slot {slot.local_rank} is {slot.state.name}: {event.name} cannot happen"
    return None


def cells(groups: Iterable[Ignored]) -> list[tuple[SlotState, SlotEvent]]:
    """Returns the states and events of some groups, one by one."""
    return [cell for group in groups for cell in product(group.states, group.events)]


_QUIET = frozenset(cells(IGNORED))
