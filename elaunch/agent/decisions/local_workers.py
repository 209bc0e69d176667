"""The workers of this node: their slots go through the table of `slots`, whose effects happen here."""

from __future__ import annotations

import signal
from collections.abc import Collection
from dataclasses import dataclass, field

from elaunch.agent.decisions.actions import Action, Ended, Say, Signal, Start, Tell
from elaunch.agent.decisions.node_state import Blame, PeerReports
from elaunch.agent.decisions.slots import REACHABLE, VACANT, Effect, News, Slot, SlotEvent, SlotState, find_transition
from elaunch.agent.decisions.state_holders import StateHolders
from elaunch.agent.decisions.step_lines import StepLines
from elaunch.rendezvous.membership import Generation, NodeWorker, WorkerState, WorkerSummary, incarnation, worker_id
from elaunch.rendezvous.rules.early import common_error
from elaunch.rendezvous.rules.holders import grace_s

REFUSED_S = 2.0  # so long a live worker may refuse its peers before it is replaced: one that ends takes less
LAST_REFUSED_S = 20.0  # and so much longer if nobody else holds the state, which it can give to nobody
LATE_S = 60.0  # after which the user is told that a worker of a training job has not registered
HINT = (
    "the script does not use elaunch, so a failure ends all its workers. With `job = elaunch.init()` and "
    "job.wrap(model) the others go on without the one that failed: docs/running.md, 'The script'"
)
BACKOFF_S = (0.0, 0.5, 2.0)  # before the next start, by the number of fruitless deaths in a row


@dataclass(slots=True)
class Unregistered:
    """Since when a worker has kept a training job waiting for its `register`, and whether the user was told."""

    since_s: float
    told: bool = False


@dataclass(slots=True)
class LocalWorkers:
    """The slots of a node, and what their workers have done.

    Attributes:
        node: name of the node.
        max_restarts: how many workers that die are replaced; None: all.
        slots: by local rank.
        blame: what failed.
        peers: where workers are reported that ended before they could leave.
        holders: the members, here and elsewhere, that hold the state.
        replaced: how many workers that died were replaced.
        took_part: whether one was a member in the present attempt.
        takes_plans: whether the newest that registered carries out plans that users ask for.
        early_death: how the first died that did so in this attempt before any had registered; "": none did.
        has_attached: whether a script here has ever called `elaunch.init()`, or the like.
        has_committed: whether a worker here has ever seen a step commit.
        unregistered: workers that have not registered although the job trains, by name.
        lines: on steps.
    """

    node: str
    max_restarts: int | None
    slots: list[Slot]
    blame: Blame = field(default_factory=Blame)
    peers: PeerReports = field(default_factory=PeerReports)
    holders: StateHolders = field(default_factory=StateHolders)
    replaced: int = 0
    took_part: bool = False
    takes_plans: bool = False
    early_death: str = ""
    has_attached: bool = False
    has_committed: bool = False
    unregistered: dict[str, Unregistered] = field(default_factory=dict)
    lines: StepLines = field(default_factory=StepLines)

    # -- views --------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Slot]:
        """Returns the slots in which a process runs."""
        return [slot for slot in self.slots if slot.state.alive]

    @property
    def occupied(self) -> list[Slot]:
        """Returns the slots whose worker the node reports."""
        return [slot for slot in self.slots if slot.state.reported is not None]

    @property
    def elastic(self) -> bool:
        """Returns whether a worker uses elaunch."""
        return any(slot.state is not SlotState.STARTING for slot in self.occupied) or self.admitted

    @property
    def finished(self) -> bool:
        """Returns whether each worker has ended well, and there was at least one."""
        over = [slot for slot in self.slots if slot.exitcode == 0]
        done = any(slot.state is SlotState.ENDED for slot in over)
        # Once members have finished, a worker that has not joined yet never will.
        counted = (WorkerState.MEMBER, WorkerState.DONE)
        left = [slot for slot in self.running if not done or slot.state.reported in counted]
        return bool(over) and not left and not self.blame.failed

    @property
    def admitted(self) -> bool:
        """Returns whether a training generation has named the present or the last worker of any slot."""
        return any(slot.admitted_generation for slot in self.slots)

    @property
    def restarts_left(self) -> bool:
        """Returns whether another worker may be replaced after its death."""
        return self.max_restarts is None or self.replaced < self.max_restarts

    @property
    def evicted(self) -> tuple[str, ...]:
        """Returns workers that are to leave although the node stays."""
        return tuple(slot.worker for slot in self.slots if slot.state.evicted)

    @property
    def refusing(self) -> list[Slot]:
        """Returns the slots whose worker a peer could not reach, though peers must be able to."""
        return [slot for slot in self.slots if slot.refused_s is not None and slot.state in REACHABLE]

    def joined_generation(self, ids: Collection[str]) -> int:
        """Returns the newest generation that all of these workers that are of this node have entered; 0 without any."""
        return min((slot.joined_generation for slot in self.occupied if slot.worker in ids), default=0)

    def report(self) -> tuple[NodeWorker, ...]:
        """Returns the workers as the node's report lists them."""
        return tuple(
            NodeWorker(slot.worker, slot.local_rank, reported, slot.address)
            for slot in self.slots
            if (reported := slot.state.reported) is not None
            # The leader takes in who is ready.
            and not (slot.is_given_up and reported is WorkerState.READY)
        )

    def summary(self) -> WorkerSummary:
        """Returns what the node's report says of all of them together."""
        return WorkerSummary(
            elastic=self.elastic,
            took_part=self.took_part,
            takes_plans=self.takes_plans,
            finished=self.finished,
            failed=self.blame.failed,
            abandoned=self.blame.abandoned,
            error=self.error,
            early_death=self.early_death,
        )

    @property
    def error(self) -> str:
        """Returns what the last worker of each slot raised, if that is the same and no step has committed; else ""."""
        return "" if self.has_committed else common_error([slot.error for slot in self.slots])

    @property
    def failures(self) -> list[Ended]:
        """Returns the workers to be blamed in the report of a failed job, each slot's last one."""
        replaced = self.blame.replaced if self.error else {}
        own = {rank: ended for rank, ended in self.blame.failures.items() if ended.own or rank not in replaced}
        return list({**replaced, **own}.values())

    def find(self, worker: str) -> Slot | None:
        """Returns the slot of a worker that the node reports."""
        return next((slot for slot in self.occupied if slot.worker == worker), None)

    # -- events -------------------------------------------------------------------------------------------------

    def happens(self, event: SlotEvent, worker: str, news: News) -> list[Action]:
        """Lets an event happen to a worker of this node; one of another node, or of a former agent, is ignored."""
        slot = next((slot for slot in self.slots if worker and slot.worker == worker), None)
        return [] if slot is None else self.apply(slot, event, news)

    def apply(self, slot: Slot, event: SlotEvent, news: News) -> list[Action]:
        """Takes a slot through the transition that the table has for an event, if it has one."""
        transition = find_transition(slot, event, news)
        if transition is None:
            return []
        if slot.alive and (not transition.state.alive or transition.state is SlotState.FINISHED):
            self.lines.note_end()
        if slot.alive and not transition.state.alive and event is SlotEvent.DIE:
            self._note_death(slot, news)
        self.has_attached = self.has_attached or event is SlotEvent.ATTACH
        slot.state = transition.state
        return [action for effect in transition.effects for action in self._carry_out(effect, slot, news)]

    def refused_until_s(self, slot: Slot) -> float:
        """Returns how long a worker that runs may refuse its peers; where only it holds the state, they wait for it."""
        assert slot.refused_s is not None
        sound = {other.worker for other in self.running if other.refused_s is None}
        return slot.refused_s + REFUSED_S + min(LAST_REFUSED_S, grace_s(slot.worker, self.holders.ids, sound))

    def _note_death(self, slot: Slot, news: News) -> None:
        """Notes what the job must know of a death before the first step has committed."""
        slot.error = "" if self.has_committed else news.reason
        unregistered = all(one.state in (*VACANT, SlotState.STARTING, SlotState.ATTACHED) for one in self.slots)
        if not news.training and self.has_attached and unregistered:
            self.early_death = self.early_death or news.text

    def abandon(self, worker: str, why: str) -> None:
        """Notes that the job cannot go on, as a worker of this node says: the leader ends it."""
        if self.find(worker) is not None:
            self.blame.abandoned = self.blame.abandoned or why

    def end_refusing(self, now_s: float) -> list[Action]:
        """Kills a worker that lives and trains, and at whose address nobody listens any more: no peer can reach it.

        One at a time: see `forget_refusals`.
        """
        due = [slot for slot in self.refusing if now_s >= self.refused_until_s(slot)]
        if not due:
            return []
        self.forget_refusals()
        worker = due[0].worker
        self.holders.note_end(worker)
        text = f"worker {worker} runs, but refuses the connections of its peers; it is ended"
        return [Say(text), Signal(worker, signal.SIGKILL)]

    def forget_refusals(self) -> None:
        """Forgets who is said to refuse its peers, since one of this node ends that may have said so.

        That one may have been at fault; who still cannot reach a worker in the next generation will say so again.
        """
        for slot in self.slots:
            slot.refused_s = None

    def end_unregistered(self, training: bool, now_s: float, register_s: float) -> list[Action]:
        """Says which workers have not registered although the job trains, and kills those that take too long."""
        slots = [slot for slot in self.slots if training and slot.state in (SlotState.STARTING, SlotState.ATTACHED)]
        self.unregistered = {
            slot.worker: self.unregistered.get(slot.worker, Unregistered(now_s)) for slot in slots if slot.worker
        }
        actions: list[Action] = []
        for slot in slots:
            wait = self.unregistered[slot.worker]
            what = "elaunch.init()" if slot.state is SlotState.STARTING else "register()"
            late_s = now_s - wait.since_s
            text = f"worker {slot.worker} has not called {what} for {late_s:.0f} s, and the others train without it"
            if late_s >= register_s:
                wait.since_s = now_s
                actions.append(Say(f"{text}; it is ended: --rdzv-conf register_timeout=SECONDS gives it more time"))
                actions.append(Signal(slot.worker, signal.SIGKILL))
            elif late_s >= LATE_S and not wait.told:
                wait.told = True
                peers = "a script that calls init_process_group() waits there for peers that never come"
                actions.append(Say(f"{text}; it is ended after {register_s:g} s ({peers})"))
        return actions

    def due_times(self, register_s: float) -> list[float]:
        """Returns when `end_refusing` and `end_unregistered` have something to do."""
        times = list(map(self.refused_until_s, self.refusing))
        waits = self.unregistered.values()
        return [*times, *(one.since_s + (register_s if one.told else min(LATE_S, register_s)) for one in waits)]

    def hint(self, cause: str, generation: Generation | None, restarts: int) -> list[Action]:
        """Says how workers can outlive each other, where a script does not use elaunch: once for a job.

        Args:
            cause: of its failure; the node whose failure that is says so.
            generation: the newest.
            restarts: how many it has, if this is the job's first failure.
        """
        is_first = generation is None or generation.restarts.count == restarts
        is_ours = bool(self.blame.failed) and cause.startswith(self.blame.failed)
        return [Say(HINT)] if is_first and is_ours and not self.has_attached else []

    def begin_attempt(self) -> None:
        """Forgets the workers of the former attempt, all of which have ended."""
        self.blame.failed, self.blame.abandoned, self.took_part = "", "", False
        self.early_death = ""
        self.lines.begin_attempt()
        self.blame.failures.clear()
        self.blame.replaced.clear()
        for slot in self.slots:
            self.apply(slot, SlotEvent.RESET, News())

    # -- effects ------------------------------------------------------------------------------------------------

    def _carry_out(self, effect: Effect, slot: Slot, news: News) -> list[Action]:
        match effect:
            case Effect.START_WORKER:
                return self._start(slot, news)
            case Effect.TELL:
                assert news.generation is not None
                return [Tell(slot.worker, news.generation)]
            case Effect.KILL:
                # The others went on without it: what it computes may no longer count.
                slot.is_given_up = True
                text = f"worker {slot.worker} was given up by its peers; it is ended"
                return [Say(text), Signal(slot.worker, signal.SIGKILL)]
            case Effect.NOTE_ADDRESS:
                slot.address, self.takes_plans = news.address, news.takes_plans
            case Effect.NOTE_ADMISSION:
                slot.admitted_generation, self.took_part = news.number, True
            case Effect.NOTE_JOINED:
                slot.joined_generation = news.number
                self.holders.note_joined(news.number)
            case Effect.NOTE_COMMIT:
                slot.committed_generation, slot.fruitless = news.number, 0
                self.has_committed, slot.error = True, ""
            case Effect.NOTE_REFUSED:
                if slot.refused_s is None:
                    slot.refused_s = news.now_s  # it is about to end, as a rule
            case Effect.SAY_EVICTED:
                return [Say(_leaves(slot, "its slot is not used again", news))]
            case Effect.SAY_REPLACED:
                return [Say(_leaves(slot, "another process takes its place", news))]
            case Effect.REPORT_LOST:
                self.peers.note_unreachable(slot.worker)
                self.blame.replace(f"{news.text} before the step boundary at which it was to leave", news.t)
                return [Say(self.blame.cause)]
            case Effect.BLAME_EARLY_EXIT:
                self.blame.note(f"{news.text} before the job's end", news.t)
                return [Say(self.blame.cause)]
            case Effect.BLAME:
                self.blame.note(news.text, news.t)
            case Effect.FAIL:
                self.blame.failed = self.blame.failed or news.text
                return [Say(news.text)]
            case Effect.NOTE_CAUSE:
                self.blame.replace(news.text, news.t)
            case Effect.SAY_UNUSED:
                if all(other.state is SlotState.GIVEN_UP for other in self.slots):
                    return [Say("no slot of this node is used any more; its agent stays until the job ends")]
            case Effect.GIVE_UP_RESTARTS:
                return self._give_up(slot, news, f"--max-restarts {self.max_restarts} is used up")
            case Effect.GIVE_UP_FRUITLESS:
                tries = f"{slot.fruitless_deaths} workers in a row died here before they saw a step commit"
                return self._give_up(slot, news, tries)
            case Effect.REPLACE_LATER:
                slot.fruitless = slot.fruitless_deaths
                self.replaced += 1
                slot.retry_s = news.now_s + BACKOFF_S[min(slot.fruitless, len(BACKOFF_S) - 1)]
                return [Say(f"{news.text}; a replacement starts")]
            case Effect.REPLACE_NOW:
                slot.retry_s = news.now_s
            case Effect.FORGET:
                slot.admitted_generation, slot.exitcode, slot.fruitless, slot.error = 0, None, 0, ""
        return []

    def _start(self, slot: Slot, news: News) -> list[Action]:
        generation = news.generation
        assert generation is not None
        number = incarnation(slot.worker) + 1 if slot.worker else self._first_incarnation(generation)
        slot.worker = worker_id(self.node, slot.local_rank, number)
        slot.address, slot.exitcode, slot.told_to_end, slot.is_given_up = "", None, False, False
        slot.admitted_generation, slot.joined_generation, slot.committed_generation, slot.refused_s = 0, 0, None, None
        self.blame.replace_worker(slot.local_rank)
        self.blame.failed = ""
        return [Start(slot.local_rank, slot.worker, generation, news.warm)]

    def _first_incarnation(self, generation: Generation) -> int:
        """Returns a number that no worker had: an agent that was killed may have run some under this node's name."""
        former = [
            incarnation(worker)
            for worker in (*generation.ids, *generation.leaving)
            if worker.startswith(f"{self.node}/")
        ]
        return max([generation.number - 1, *(number + 1 for number in former)])

    def _give_up(self, slot: Slot, news: News, why: str) -> list[Action]:
        slot.fruitless = slot.fruitless_deaths
        over = (SlotState.GIVEN_UP, SlotState.LEFT, SlotState.EMPTY)
        if all(other.state in over or other.state.leaving for other in self.slots):
            self.blame.failed = news.text
        return [Say(f"{news.text}; it is not replaced: {why}")]


def _leaves(slot: Slot, then: str, news: News) -> str:
    return f"worker {slot.worker} leaves at the next step boundary, {then}: {news.text}"
