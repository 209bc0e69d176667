"""The agent's decisions, pure: what happened in, what to do out. The agent's loop (`agent`) carries them out.

What happens to a worker becomes an event of its slot, and the table of `elaunch.agent.decisions.slots` says what
follows from it; docs/architecture.md draws it. What concerns the node as a whole is decided here.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, field, replace

from elaunch.agent.decisions.actions import NO_ACCOUNT, Account, Action, Ended, Say, Signal, Warm, signal_name
from elaunch.agent.decisions.local_workers import LocalWorkers
from elaunch.agent.decisions.node_state import Ending, NodeSettings, Standby, going_on
from elaunch.agent.decisions.slots import News, Slot, SlotEvent, SlotState, place_in
from elaunch.rendezvous.membership import (
    Cut,
    Departure,
    Generation,
    GenerationStage,
    NodeDoc,
    NodeProgress,
    Result,
    Stalled,
    WorkerState,
)


@dataclass(slots=True)
class Lifecycle:
    """The state of one agent, and its reactions.

    Attributes:
        port: offered to the workers for their own rendezvous.
        liveness_address: the address at which other nodes find out whether this one lives.
        store_address: where an etcd of this node would listen for other servers; empty: nowhere. `serves`: it runs.
        attempt: of which all former workers have ended here; `wanted_attempt` is the job's.
        warmed: whether a preloaded process was asked for.
        standby: what is known of places, for a node that has none in the job.
        plan_generation: of the first generation with the present request for a plan that was heard of here.
        saved: number of steps in the newest checkpoint.
    """

    settings: NodeSettings
    port: int = 0
    liveness_address: str = ""
    store_address: str = ""
    serves: bool = False
    generation: Generation | None = None
    attempt: int = 0
    wanted_attempt: int = 0
    result: Result | None = None
    ending: Ending = field(default_factory=Ending)
    warmed: bool = False
    standby: Standby = field(default_factory=Standby)
    plan_generation: int = 0
    saved: int | None = None
    workers: LocalWorkers = field(init=False)

    def __post_init__(self) -> None:
        slots = [Slot(local_rank) for local_rank in range(self.settings.slots)]
        self.workers = LocalWorkers(self.settings.node, self.settings.max_restarts, slots)

    @property
    def training(self) -> bool:
        """Returns whether the present generation trains; False before the first one and while workers are admitted."""
        return self.generation is not None and self.generation.stage is GenerationStage.TRAIN

    @property
    def _trains_here(self) -> bool:
        return self.training and self.workers.admitted

    @property
    def slots(self) -> list[Slot]:
        """Returns all slots of this node, in the order of their local ranks, including empty ones."""
        return self.workers.slots

    @property
    def running(self) -> list[Slot]:
        """Returns the slots whose worker's process has not ended."""
        return self.workers.running

    def doc(self) -> NodeDoc:
        """Returns the report of this node, as it is now."""
        draining, evicted, peers = self.ending.draining, self.workers.evicted, self.workers.peers
        number = self.generation.number if self.generation is not None else 0
        committed, logged = peers.committed, self.workers.lines.logged
        return NodeDoc(
            node=self.settings.node,
            host=self.settings.host,
            slots=self.settings.slots,
            workers=self.workers.report(),
            role=self.settings.role,
            rank=self.settings.rank,
            domain=self.settings.domain,
            port=self.port,
            liveness_address=self.liveness_address,
            cause=self.workers.blame.cause,
            cause_t=self.workers.blame.cause_t,
            summary=self.workers.summary(),
            store_address=self.store_address,
            serves=self.serves,
            progress=NodeProgress(self.attempt, number, self._plan_request(), committed, self.saved, logged),
            peers=peers.faults(),
            departure=Departure(draining, evicted, self._joined() if draining or evicted else 0, self.ending.sick),
        )

    def _plan_request(self) -> str:
        """Returns the request that the generation carries, once all members of this node have entered one with it."""
        generation = self.generation
        if generation is None or not generation.plan_request or self._joined() < self.plan_generation:
            return ""
        return generation.plan_request

    def _joined(self) -> int:
        """Returns the newest generation that all members of this node have entered; 0 without any."""
        return self.workers.joined_generation(self.generation.ranks if self.generation is not None else ())

    def find(self, worker: str) -> Slot | None:
        """Returns the slot of a worker that this node reports."""
        return self.workers.find(worker)

    # -- what the job says --------------------------------------------------------------------------------------

    def on_generation(self, generation: Generation, now_s: float) -> list[Action]:
        """Goes on in another generation of the job; an old one changes nothing."""
        if self.ending.alone or (self.generation is not None and generation.number <= self.generation.number):
            return []
        if self.generation is None or generation.plan_request != self.generation.plan_request:
            self.plan_generation = generation.number
        self.generation = generation
        self.ending.hear(generation, self.settings.node)
        self.workers.peers.enter(generation)
        self.workers.blame.enter(generation)
        self.workers.holders.enter(generation)
        if self.ending.stopping:
            return []
        actions: list[Action] = []
        if generation.attempt > self.wanted_attempt:
            # Also where this node was absent while the others met again.
            actions.extend(self._new_attempt(generation, now_s))
        if generation.stage is GenerationStage.TRAIN:
            actions.extend(self._training(generation, now_s))
        elif generation.stage is GenerationStage.START:
            actions.extend(self._starting(generation))
        elif not any(slot.worker for slot in self.slots):
            actions.append(Say(generation.cause))
        return [*actions, *self._tell_that_it_stays()]

    def _starting(self, generation: Generation) -> list[Action]:
        if self.settings.node in generation.node_set:
            news = News(generation=generation, warm=self.settings.warm_start)
            free = [slot for slot in self.slots if slot.state.reported is None and not self.ending.draining]
            starts = [action for slot in free for action in self.workers.apply(slot, SlotEvent.START, news)]
            return [*self._warm(news.warm), *starts]
        if len(generation.nodes) < self.settings.max_nodes:
            return [Say("this node waits: the job has just started without it")]
        return list(self.standby.wait(self.settings))

    def _training(self, generation: Generation, now_s: float) -> list[Action]:
        actions: list[Action] = []
        local = self.workers.occupied
        news = News(generation=generation, number=generation.number, training=True)
        for slot in self.slots:
            actions.extend(self.workers.apply(slot, place_in(generation, slot.worker), news))
        if generation.hold and generation.workers:
            nodes = len({worker.node for worker in generation.workers})
            actions.append(
                Say(
                    f"{nodes} of at least {self.settings.min_nodes} nodes are left: the workers keep their state in "
                    "memory and wait for more"
                )
            )
        elif generation.cause != "start" and generation.workers:
            actions.append(Say(f"{generation.cause}; {going_on(generation)}"))
        actions.extend(self._warm(self.workers.admitted))
        draining, here = self.ending.draining, self.settings.node in generation.node_set
        if draining and not generation.workers:
            self.ending.exit_code = 1  # all nodes leave at once: nobody goes on
        idle = not here and not any(slot.admitted_generation for slot in local)
        if draining and idle and not all(slot.told_to_end for slot in self.running):
            actions.extend(self._terminate(now_s))
        apart = not here and not local and not draining
        if apart and len(generation.nodes) >= self.settings.max_nodes:
            actions.extend(self.standby.wait(self.settings, once=True))
        actions.extend(self._fill(now_s))
        return actions

    def _fill(self, now_s: float) -> list[Action]:
        """Starts a worker in each free slot of a training job, as far as restarts allow.

        Before the first step only workers that called `elaunch.init()` are replaced: a plain script is restarted whole.
        """
        generation = self.generation
        if generation is None or not self._has_place(generation):
            return []
        actions: list[Action] = []
        for slot in self.slots:
            due = slot.state is SlotState.BACKOFF and now_s >= slot.retry_s
            if due or (slot.state is SlotState.EMPTY and self.training):
                actions.extend(self.workers.apply(slot, SlotEvent.START, News(generation=generation, warm=True)))
        return [*self._warm(self.settings.warm_start and bool(actions)), *actions]

    def _warm(self, wanted: bool) -> list[Action]:
        """Asks for the warm parent, once."""
        due, self.warmed = wanted and not self.warmed, self.warmed or wanted
        return [Warm()] if due else []

    def _has_place(self, generation: Generation) -> bool:
        """Whether workers that this node starts now could still become members."""
        if generation.stage is GenerationStage.ASSEMBLE or self.ending.under_way or self.attempt != self.wanted_attempt:
            return False
        if self.result is not None or any(slot.state.reported is WorkerState.DONE for slot in self.slots):
            return False
        return self.standby.has_place(self.settings, generation)

    def _new_attempt(self, generation: Generation, now_s: float) -> list[Action]:
        self.wanted_attempt = generation.attempt
        actions: list[Action] = []
        if any(slot.worker for slot in self.slots):
            actions.append(Say(f"{generation.cause}: all workers are started again (attempt {generation.attempt})"))
        actions.extend(self.workers.hint(generation.cause, generation, 1))
        actions.extend(self._terminate(now_s))
        self._begin_attempt()
        return actions

    def _begin_attempt(self) -> None:
        """Takes up the job's attempt, once all workers of the former one have ended."""
        if self.attempt < self.wanted_attempt and not self.running:
            self.attempt = self.wanted_attempt
            self.ending.kill_s = None
            self.workers.begin_attempt()

    def on_result(self, result: Result, now_s: float) -> list[Action]:
        """Ends this node's part of the job, which is over."""
        self.result = result
        if self.ending.stopping:
            return []
        if result.succeeded and self.running:
            # Members that are to leave may wait in vain for some that have ended; others have nothing to join any more.
            others = [slot for slot in self.running if not slot.state.ends]
            leaving = [slot for slot in others if self.ending.draining and slot.admitted_generation > 0]
            if leaving and self.ending.kill_s is None:
                self.ending.kill_s = now_s + self.settings.shutdown_s
            return [Signal(slot.worker, signal.SIGKILL) for slot in others if slot not in leaving]
        hint = [] if result.succeeded else self.workers.hint(result.message, self.generation, 0)
        return [*hint, *self._stop(result.message, 0 if result.succeeded else 1, now_s)]

    # -- what the workers do ------------------------------------------------------------------------------------

    def on_started(self, worker: str, pid: int) -> None:
        """Notes that the process of a worker runs."""
        slot = self.workers.find(worker)
        if slot is not None and slot.alive:
            slot.pid = pid

    def on_attach(self, worker: str) -> list[Action]:
        """Notes that a worker's script has called `elaunch.init()`, or the like."""
        return self.workers.happens(SlotEvent.ATTACH, worker, News(generation=self.generation, training=self.training))

    def on_ready(self, worker: str, address: str, takes_plans: bool = False) -> None:
        """Notes that a worker has registered its state, and listens at `address`."""
        self.workers.happens(SlotEvent.REGISTER, worker, News(address=address, takes_plans=takes_plans))

    def on_joined(self, worker: str, generation: int) -> None:
        """Notes that a worker has entered a generation: it holds the state of the job."""
        self.workers.happens(SlotEvent.JOIN, worker, News(number=generation))

    def on_progress(self, worker: str, number: int) -> None:
        """Notes that a worker has seen a step commit in this generation."""
        self.workers.happens(SlotEvent.COMMIT, worker, News(number=number))
        generation = self.generation
        if generation is not None and generation.streak.urgent and generation.ids[:1] == (worker,):
            # The leader wants to know, of one node.
            self.workers.peers.committed = max(self.workers.peers.committed, number)

    def on_saved(self, step: int) -> None:
        """Notes that there is a checkpoint of so many steps; 0: none can be read."""
        self.saved = step or None

    def on_finished(self, worker: str) -> None:
        """Notes that a worker has committed its last step."""
        self.workers.happens(SlotEvent.FINISH, worker, News())

    def on_leaving(self, worker: str) -> None:
        """Notes that a worker has left the job and is about to end."""
        self.workers.happens(SlotEvent.LEAVE, worker, News())

    def evict(self, worker: str, replace: bool, why: str) -> list[Action]:
        """Lets one worker leave at the next step boundary; the others go on without it.

        Args:
            worker: a member of this node.
            replace: whether another process takes its slot; else nobody does, until all workers are started again.
            why: for people.
        """
        if self.ending.under_way:
            return []
        return self.workers.happens(SlotEvent.REPLACE if replace else SlotEvent.EVICT, worker, News(text=why))

    def on_exit(
        self, worker: str, exitcode: int | None, number: int | None, t: float, now_s: float, why: Account = NO_ACCOUNT
    ) -> list[Action]:
        """Reacts to the end of a worker's process: with `exitcode`, or by signal `number`, at Unix time `t`.

        `why`: what is written down; with a reason it failed by itself, even if it was told to end meanwhile.
        """
        slot = self.workers.find(worker)
        if slot is None or not slot.alive:
            return []
        self.workers.holders.note_end(worker)
        self.workers.forget_refusals()
        if exitcode != 0:
            code = -number if number is not None else exitcode or 0
            own = bool(why.reason) or not slot.told_to_end
            self.workers.blame.failures[slot.local_rank] = Ended(worker, slot.local_rank, slot.pid, code, t, own)
        slot.pid, slot.address, slot.refused_s, slot.exitcode = 0, "", None, exitcode
        how = f"exited with code {exitcode}" if number is None else f"was killed by {signal_name(number)}"
        news = News(
            now_s=now_s,
            text=why.tell(f"worker {worker} {how}"),
            reason=why.reason,
            t=t,
            training=self.training,
            restarts_left=self.workers.restarts_left,
        )
        actions = self.workers.apply(slot, self._kind_of_end(slot), news)
        if slot.state is SlotState.BACKOFF:
            actions.extend(self._fill(now_s))
        self._begin_attempt()
        return [*actions, *self._end_if_over()]

    def _kind_of_end(self, slot: Slot) -> SlotEvent:
        """Returns the event that the end of a slot's process is, after its exit code has been noted."""
        if self.ending.draining and slot.state is not SlotState.FINISHED:
            return SlotEvent.EXIT_DRAINING
        if self.ending.stopping or self.result is not None or self.attempt != self.wanted_attempt:
            return SlotEvent.EXIT_UNJUDGED
        return SlotEvent.EXIT if slot.exitcode == 0 else SlotEvent.DIE

    # -- what is found out about peers --------------------------------------------------------------------------

    def on_broken(self, number: int, worker: str, peer: str) -> None:
        """Notes that a worker of this node, member of generation `number`, lost its link to a peer, for any reason."""
        generation = self.generation
        if (
            generation is not None
            and number >= generation.aborts_step_before
            and {worker, peer} <= generation.ranks.keys()
        ):
            self.workers.peers.note_broken(worker, peer)

    def on_unreachable(self, number: int, peer: str, refused: bool, now_s: float) -> None:
        """Notes that a worker, member of generation `number`, found a peer dead or its link to a live one broken."""
        if self.generation is None or number < self.generation.aborts_step_before:
            return
        if not refused or peer not in (*self.generation.ids, *self.generation.leaving):
            # The worker may be in a step of a former generation yet, which the peer was to leave behind it.
            self.workers.peers.reset_generation = self.generation.number
        else:
            slot = self.workers.find(peer)
            if slot is None or not slot.alive:
                self.workers.peers.note_unreachable(peer)
            else:
                self.workers.apply(slot, SlotEvent.REFUSE, News(now_s=now_s))

    def on_reach(self, cut: tuple[Cut, ...], well: frozenset[str]) -> list[Action]:
        """Notes the answers of other nodes that were asked whether they can be reached.

        Args:
            cut: those that cannot.
            well: those that can, although a worker of this node took them for silent.
        """
        peers = self.workers.peers
        if self.generation is not None and peers.needs_links(self.generation, cut, well):
            peers.reset_generation = self.generation.number
        return peers.note_cut(cut)

    def on_stalled(self, stalled: tuple[Stalled, ...]) -> None:
        """Notes which members of this node wait, once all of them have exceeded the wait limit; none: they have not."""
        self.workers.peers.stalled = stalled

    # -- the end ------------------------------------------------------------------------------------------------

    def on_signal(self, number: int, now_s: float) -> list[Action]:
        """Reacts to a signal: SIGTERM drains a training node, another stops its workers; a second one kills them."""
        name = signal_name(number)
        again, self.ending.signalled = self.ending.signalled, True
        if self.ending.stopping or (self.ending.draining and (again or number != signal.SIGTERM)):
            self.ending.kill_s = now_s
            self.ending.stopping = self.ending.stopping or f"stopped by {name}"
            return self.on_time(now_s)
        if self.ending.draining:
            end_s = now_s + self.settings.shutdown_s
            self.ending.kill_s = end_s if self.ending.kill_s is None else min(self.ending.kill_s, end_s)
            wait = f"they are killed after {self.settings.shutdown_s:g} s, and by a second signal at once"
            return [Say(f"{name}: the workers of this node leave already; {wait}")]
        if number == signal.SIGTERM and self._trains_here:
            return self.drain(name, now_s, self.settings.shutdown_s)
        return self._stop(f"stopped by {name}", 1, now_s, number)

    def drain(self, reason: str, now_s: float, within_s: float | None = None) -> list[Action]:
        """Lets this node leave the job as soon as the others can go on without it; a second time changes nothing.

        Args:
            reason: for people.
            now_s: the time.
            within_s: its workers are killed after so long; None: they have the time they need.
        """
        if self.ending.under_way or self.result is not None:
            return []
        generation, node = self.generation, self.settings.node
        meets = generation is not None and generation.stage is GenerationStage.ASSEMBLE
        if generation is None or not (meets or node in generation.node_set):
            text = f"{reason}: this node leaves; it had no part in the job yet"
            return [Say(text), *self._stop(reason, 0, now_s)]
        last = generation.nodes == (node,)
        if not self._trains_here and last:
            return self._stop(f"stopped by {reason}", 1, now_s)
        self.ending.drain(reason, 1 if last else 0, generation, node)
        self.workers.blame.replace(f"{reason}: node {node} drains", 0.0)
        fate = "no other node is left to go on" if last else "the others go on"
        self.ending.kill_s = None if within_s is None else now_s + within_s
        if not self._trains_here:
            # Its workers end when the others have heard of it; who ends before that was lost.
            return [Say(f"{reason}: this node leaves" + ("" if meets else f"; {fate}"))]
        unready = [Signal(slot.worker, signal.SIGTERM) for slot in self.running if not slot.admitted_generation]
        return [Say(f"{reason}: the workers of this node leave at the next step boundary; {fate}"), *unready]

    def on_resized(self, min_nodes: int, max_nodes: int, now_s: float) -> list[Action]:
        """Notes the job's new limits, in which this node may find a place."""
        self.settings = replace(self.settings, min_nodes=min_nodes, max_nodes=max_nodes)
        return self._fill(now_s)

    def on_spares(self, nodes: tuple[str, ...], now_s: float) -> list[Action]:
        """Notes which nodes hold workers ready; starts those of this one if it is among them."""
        return [*self.standby.hear(self.settings, nodes), *self._fill(now_s)]

    def on_sick(self, why: str) -> list[Action]:
        """Notes that something here is about to fail; the leader has this node leave once the job can do without it.

        A node without which the job would stop stays: what fails, then fails, and may yet be made good.
        """
        self.ending.sick = self.ending.sick or why
        return self._tell_that_it_stays()

    def _tell_that_it_stays(self) -> list[Action]:
        ending = self.ending
        if not ending.sick or ending.sick_told or not self._trains_here or ending.under_way or self.result is not None:
            return []
        others = len({*(self.generation.nodes if self.generation else ()), *self.standby.spares} - {self.settings.node})
        if others >= max(self.settings.min_nodes, 1):
            return []
        ending.sick_told = True
        left = "no other node" if not others else f"{others} of at least {self.settings.min_nodes} nodes"
        return [Say(f"this node stays in the job, which would have {left} without it; it leaves when others have come")]

    def on_time(self, now_s: float) -> list[Action]:
        """Does whatever is due by now."""
        actions: list[Action] = []
        if self.ending.kill_s is not None and now_s >= self.ending.kill_s and not self.ending.killed:
            self.ending.killed, self.ending.unheard = True, False
            actions.extend(Signal(slot.worker, signal.SIGKILL) for slot in self.running)
        actions.extend(self.workers.end_refusing(now_s))
        actions.extend(self.workers.end_unregistered(self.training, now_s, self.settings.register_s))
        actions.extend(self._fill(now_s))
        actions.extend(self._end_if_over())
        return actions

    def due_s(self) -> float | None:
        """Returns when `on_time` has something to do next."""
        times = self.workers.due_times(self.settings.register_s)
        if self.generation is not None and self._has_place(self.generation):
            times += [slot.retry_s for slot in self.slots if slot.state is SlotState.BACKOFF]
        if self.ending.kill_s is not None and not self.ending.killed and (self.running or self.ending.unheard):
            times.append(self.ending.kill_s)
        return min(times, default=None)

    def on_refused(self, text: str, now_s: float) -> list[Action]:
        """Stops this node: the job does not take it, or the store cannot be reached at the start."""
        return self._stop(text, 1, now_s)

    def _stop(self, text: str, code: int, now_s: float, number: int = signal.SIGTERM) -> list[Action]:
        self.ending.stopping, self.ending.exit_code = text or "stopped", code
        return [*self._terminate(now_s, number), *self._end_if_over()]

    def _terminate(self, now_s: float, number: int = signal.SIGTERM) -> list[Action]:
        self.ending.kill_s, self.ending.killed = now_s + self.settings.shutdown_s, False
        for slot in self.running:
            slot.told_to_end = True
        return [Signal(slot.worker, number) for slot in self.running]

    def _end_if_over(self) -> list[Action]:
        end = None if self.running else self.ending.exit(self.result, self.saved, self.settings.left_code)
        return [] if end is None else [end]
