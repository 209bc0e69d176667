"""What a node waits for that only the rendezvous store can bring, and how long it waits while that is away. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elaunch.agent.decisions.actions import Action, Say
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.agent.decisions.local_workers import LocalWorkers
from elaunch.agent.decisions.slots import SlotState
from elaunch.rendezvous.membership import Generation, GenerationStage, Worker, names_text
from elaunch.waits import Pace

QUIET_S = 10.0  # so long a node waits without a line while the store can be used
RARELY_S = 600.0  # a spare may wait for as long as the job lasts
START, MEETING, MORE_NODES = "the start of the job", "the nodes to meet again", "more nodes"
TOLD_BY_LEADER = (START, MEETING, MORE_NODES)


def awaited(node: str, generation: Generation | None, workers: LocalWorkers, draining: bool) -> str:
    """Returns what this node needs from the job before it can go on; empty while its workers need nobody.

    Args:
        node: name of this node.
        generation: the newest.
        workers: of this node.
        draining: whether the node is to leave.
    """
    if generation is None:
        return START
    if generation.stage is GenerationStage.ASSEMBLE:
        return MEETING
    if generation.hold:
        return MORE_NODES
    if node not in generation.node_set:
        return "a place in the job"
    if draining:
        return "the others to go on without it"
    if not workers.running and any(slot.state is SlotState.ENDED or slot.exitcode == 0 for slot in workers.slots):
        return "the end of the job"
    if generation.stage is GenerationStage.START:
        return _before_training(workers)
    gone = [worker for worker in generation.of_nodes[node] if _has_died(worker, workers)]
    if gone:
        return f"the job to go on without {names_text(gone)}"
    return _faults(generation, workers)


def survivors(node: str, generation: Generation, workers: LocalWorkers) -> tuple[Worker, ...]:
    """Returns the members of a training generation that this node does not know to be lost, in their order."""
    lost = {*workers.peers.unreachable}
    cut = {one.node for one in workers.peers.cut}
    return tuple(
        worker
        for worker in generation.workers
        if worker.id not in lost
        and worker.node not in cut
        and not (worker.node == node and _has_died(worker.id, workers))
    )


def save_and_leave(generation: Generation, members: tuple[Worker, ...], cause: str) -> tuple[Generation, Generation]:
    """Returns two generations for the workers of a node that ends because nobody can agree on any.

    In the first, these members settle the step in flight. In the second all leave, so at the next step boundary they
    save the state.
    """
    number = generation.number + 1
    first = replace(
        generation,
        number=number,
        workers=members,
        cause=cause,
        cause_t=0.0,
        aborts_step_before=number,
        begun=True,
        hold=False,
        leaving=(),
    )
    return first, replace(first, number=number + 1, workers=(), leaving=first.ids)


def _before_training(workers: LocalWorkers) -> str:
    ended = [slot.worker for slot in workers.slots if slot.worker and not slot.alive]
    if ended:
        return f"what becomes of the job after the end of {names_text(ended)}"
    ready = any(slot.state in (SlotState.READY, SlotState.JOINING) for slot in workers.slots)
    return "the first step: workers here are ready" if ready else ""


def _to_end(life: Lifecycle, now_s: float) -> str:
    """Returns which workers that were told to end still run, and when they are killed."""
    told = [slot.worker for slot in life.running if slot.told_to_end]
    if not told:
        return ""
    kill_s, names = life.ending.kill_s, names_text(told)
    if life.ending.killed or kill_s is None:
        return f"{names} to end; SIGKILL was sent"
    return f"{names} to end; SIGKILL is sent in {max(0.0, kill_s - now_s):.0f} s"


def _has_died(worker: str, workers: LocalWorkers) -> bool:
    """Whether a member of this node is there no more, and has not finished."""
    slot = next((slot for slot in workers.slots if slot.worker == worker), None)
    return slot is None or not (slot.alive or slot.state is SlotState.ENDED)


def _faults(generation: Generation, workers: LocalWorkers) -> str:
    """Returns what the generation does not know yet of peers: until it does, a step waits for them."""
    peers = workers.peers
    unreachable = _among(peers.unreachable, generation.ids)
    if unreachable:
        return f"the job to go on without {names_text(unreachable)}"
    cut = _among([one.node for one in peers.cut], generation.nodes)
    if cut:
        return f"a decision on {names_text(cut)}, which cannot be reached"
    if peers.broken or peers.reset_generation >= max(1, generation.aborts_step_before):
        peers_text = names_text(sorted({link.peer for link in peers.broken}))
        return f"new links to {peers_text}" if peers_text else "new links"
    if peers.stalled:
        return "an end to a deadlock: all its workers wait for others"
    return ""


def _among(names: Collection[str], known: Collection[str]) -> list[str]:
    return [name for name in names if name in known]


class Patience:
    """Says what this node waits for, and ends it if it has waited for too long for a store that is away, or of no use.

    A node whose workers train, and need nobody, is not touched. While the store can be used, the job's leader sees to
    it that waits end; then there is a line now and then.

    Args:
        life: of the node.
        limit_s: how long it waits, in seconds.
        saves: whether its workers can save their state.
    """

    def __init__(self, life: Lifecycle, limit_s: float, saves: bool) -> None:
        self._life = life
        self._limit_s = limit_s
        self._saves = saves
        self._why = ""
        self._away_since_s: float | None = None
        self._waits_since_s: float | None = None
        self._pace = Pace.begin(0.0)
        self._slow_pace = Pace.begin(0.0, QUIET_S, RARELY_S)
        self._slow_since_s: float | None = None

    def begin(self, why: str, now_s: float) -> list[Action]:
        """Notes that the store is of no use, and why; a second time, only why."""
        self._why = why
        if self._away_since_s is None:
            self._away_since_s = now_s
        return self.on_time(now_s)

    def end(self) -> list[Action]:
        """Notes that the store can be used."""
        self._away_since_s, self._waits_since_s, self._why = None, None, ""
        return []

    def due_s(self) -> float | None:
        """Returns when `on_time` has something to do next; None while this node does not wait."""
        if self._waits_since_s is None:
            return None if self._slow_since_s is None else self._slow_pace.due_s
        return min(self._pace.due_s, self._waits_since_s + self._limit_s)

    def on_time(self, now_s: float) -> list[Action]:
        """Says what this node waits for, or ends it, where that is due."""
        life = self._life
        ends = bool(life.ending.stopping) or life.ending.alone or life.result is not None
        what = "" if ends else awaited(life.settings.node, life.generation, life.workers, life.ending.draining)
        to_end = _to_end(life, now_s)
        if self._away_since_s is None or to_end or not what:
            self._waits_since_s = None
            return self._tell(to_end or what, now_s)
        self._slow_since_s = None
        if self._waits_since_s is None:
            self._waits_since_s = now_s
            self._pace.reset(now_s)
        waited_s = now_s - self._waits_since_s
        if waited_s >= self._limit_s:
            return self._give_up(what, now_s)
        if not self._pace.is_due(now_s):
            return []
        text = (
            f"this node has waited {waited_s:.0f} s for {what}; the rendezvous store has been of no use for "
            f"{now_s - self._away_since_s:.0f} s. If that lasts, this node ends in {self._limit_s - waited_s:.0f} s"
        )
        return [Say(text)]

    def _tell(self, what: str, now_s: float) -> list[Action]:
        """Says what this node waits for while the store can be used; of the start of a job the leader tells."""
        if not what or what in TOLD_BY_LEADER:
            self._slow_since_s = None
            return []
        if self._slow_since_s is None:
            self._slow_since_s = now_s
            self._slow_pace.reset(now_s)
        if not self._slow_pace.is_due(now_s):
            return []
        return [Say(f"this node has waited {now_s - self._slow_since_s:.0f} s for {what}")]

    def _give_up(self, what: str, now_s: float) -> list[Action]:
        life, generation = self._life, self._life.generation
        text = (
            f"the rendezvous store was of no use for {self._limit_s:g} s while this node waited for {what}: "
            f"{self._why} (--rdzv-conf store_timeout=SECONDS gives it more time)"
        )
        members = survivors(life.settings.node, generation, life.workers) if generation is not None else ()
        holders = [slot for slot in life.slots if slot.worker in {worker.id for worker in members} and slot.address]
        if generation is None or not (self._saves and life.training and holders):
            return life.on_refused(text, now_s)
        first, last = save_and_leave(generation, members, "the state is saved without the rendezvous store")
        within_s = max(self._limit_s, life.settings.shutdown_s)
        drained = life.drain(f"a wait without end: {text}", now_s, within_s)
        life.ending.kill_s = now_s + within_s if life.ending.kill_s is None else life.ending.kill_s
        actions: list[Action] = [one for one in drained if not isinstance(one, Say)]
        actions += [Say(f"{text}; the workers of this node save the state and leave, within {within_s:g} s")]
        actions += [*life.on_generation(first, now_s), *life.on_generation(last, now_s)]
        life.ending.alone = True
        return actions
