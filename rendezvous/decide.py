"""The leader's rule: documents and the clock in, at most one new document out. Pure.

The leader's shell calls `decide` after every change that it sees and at the times that `decide` asks to be woken.
Any node may lead at any time: all it needs is in the documents.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from elaunch.rendezvous import escalate
from elaunch.rendezvous.membership import (
    Generation,
    NodeDoc,
    PlanRequest,
    Result,
    Stage,
    Streak,
    Worker,
    WorkerState,
    names_text,
)

PLAN_ASKED = "a new plan was asked for"
ALL_LEAVE = "every node left the job before it was done; start it again"
RESUMES = 3
"""How often a job goes back to the same checkpoint, where --max-restarts is not given."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Numbers of nodes and time limits of a job.

    Attributes:
        max_restarts: whole restarts after a failure that memory cannot mend; None stands for none.
        last_call_s: how long a job with enough nodes, but not all, waits for more before it starts.
        join_s: how long it waits with fewer nodes than `min_nodes` before it fails.
        window_s: deaths that come within this time make one generation.
        attach_s: how long a script may take to import elaunch before it counts as one that never will.
        ready_s: how long workers that are ready wait for others that still start, before the first step.
        lease_s: the lease of a node; after an outage of the store, absence is believed only after this time.
        reach_s: how long the leader waits for what a node says that others cannot reach, before it leaves one out.
    """

    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int | None = None
    last_call_s: float = 2.0
    join_s: float = 600.0
    window_s: float = 0.005
    attach_s: float = 10.0
    ready_s: float = 30.0
    lease_s: float = 5.0
    reach_s: float = 3.0


@dataclass(frozen=True, slots=True)
class View:
    """What the leader knows. Times are readings of its own monotonic clock, in seconds.

    Attributes:
        nodes: reports of the nodes whose lease is valid.
        led_s: since when it leads.
        changed_s: when it last saw a node's report change, appear or go.
        generation_s: when it first saw the present generation.
        begun: whether it ever saw a worker that holds state.
        pending_s: since when the rule has waited for the window to close, if it does.
        outage_end_s: when the store last came back after an outage, or went on after it stood still, if it ever did.
        request: for another plan, as long as it stands in the store.
    """

    nodes: tuple[NodeDoc, ...] = ()
    generation: Generation | None = None
    result: Result | None = None
    led_s: float = 0.0
    changed_s: float = 0.0
    generation_s: float = 0.0
    begun: bool = False
    pending_s: float | None = None
    outage_end_s: float | None = None
    request: PlanRequest | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What to write, if anything; when to ask again, at the latest; whether a window is open; and why."""

    reason: str
    generation: Generation | None = None
    result: Result | None = None
    wake_s: float | None = None
    pending: bool = False


@dataclass(frozen=True, slots=True)
class _Change:
    """How the members of a training generation fare."""

    survivors: tuple[Worker, ...] = ()
    lost: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    joiners: tuple[Worker, ...] = ()
    done: tuple[str, ...] = ()
    reset: bool = False
    causes: tuple[tuple[float, str], ...] = field(default=())
    doubt: bool = False

    @property
    def urgent(self) -> bool:
        return bool(self.lost) or self.reset

    @property
    def nodes(self) -> frozenset[str]:
        """Those of the workers that go on."""
        return frozenset(worker.node for worker in (*self.survivors, *self.joiners))


def decide(view: View, now_s: float, settings: Settings) -> Decision:
    """Apply the rule once.

    Args:
        view: the documents and when they changed.
        now_s: the leader's monotonic clock.
        settings: numbers of nodes and time limits.
    """
    if view.result is not None:
        return Decision("the job is over")
    nodes = tuple(sorted(view.nodes, key=lambda doc: (doc.rank, doc.order, doc.node)))
    generation = view.generation
    if generation is None or generation.stage is Stage.ASSEMBLE:
        return _assemble(view, nodes, now_s, settings)
    if generation.nodes and all(_finished(nodes, name) for name in generation.nodes):
        return Decision("all nodes have finished", result=Result(True, "all workers have finished"))
    if nodes and generation.nodes and not any(_takes_part(doc, generation) for doc in nodes):
        return _begin_again(view, generation, nodes, now_s, settings)
    if generation.stage is Stage.TRAIN:
        return _train(view, generation, nodes, now_s, settings)
    if any(doc.elastic for doc in nodes):
        return _first_step(view, generation, nodes, now_s, settings)
    return _plain(view, generation, nodes, now_s, settings)


def surplus(view: View, max_nodes: int) -> tuple[str, ...]:
    """The nodes that are to leave a job which has more members' nodes than it may have: those that joined last."""
    if view.generation is None or view.result is not None:
        return ()
    docs = {doc.node: doc for doc in view.nodes}
    staying = [docs[name] for name in view.generation.nodes if name in docs and not docs[name].draining]
    staying.sort(key=lambda doc: (doc.rank, doc.order, doc.node))
    return tuple(doc.node for doc in staying[max_nodes:])


def next_epoch(view: View) -> int:
    """Epochs only grow, also when the store lost its data: the nodes remember the newest they saw."""
    known = [doc.epoch for doc in view.nodes]
    if view.generation is not None:
        known.append(view.generation.epoch)
    return max(known, default=0) + 1


def _begin_again(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: Settings
) -> Decision:
    """Nobody is left of the nodes that ran the job: an earlier run, or all at once. Those here now start the script.

    Nodes that only lost the store come back within the time of a lease; so long this waits for them.
    """
    sure_s = max(view.led_s, -inf if view.outage_end_s is None else view.outage_end_s) + settings.lease_s
    if now_s < sure_s:
        return Decision("no node of the present generation is here", wake_s=sure_s)
    here = ", ".join(doc.node for doc in nodes)
    cause = f"no node that ran the job is left, nor any state in memory; it begins again on {here}"
    again = _again(view, generation, cause, 0.0, failure=False)
    return Decision(cause, generation=replace(again, restarts=0))


def _takes_part(doc: NodeDoc, generation: Generation) -> bool:
    """Whether its agent is one of those that run this generation; a new one may bear the name of a lost one."""
    if doc.node not in generation.nodes:
        return False
    return generation.stage is Stage.START or doc.took_part or any(each.id in generation.ids for each in doc.workers)


def _finished(nodes: tuple[NodeDoc, ...], name: str) -> bool:
    return any(doc.node == name and doc.finished for doc in nodes)


def _assemble(view: View, nodes: tuple[NodeDoc, ...], now_s: float, settings: Settings) -> Decision:
    """Wait for the nodes, then let each start its workers."""
    former = view.generation
    attempt = former.attempt if former else 0
    present = [doc for doc in nodes if not doc.draining]
    clear = [doc for doc in present if former is None or doc.attempt >= attempt]
    opened_s = view.generation_s if former else view.led_s
    if len(present) < settings.min_nodes:
        return _too_few(len(present), opened_s, now_s, settings)
    if len(clear) < min(len(present), settings.max_nodes):
        return Decision(f"{len(present) - len(clear)} nodes still stop workers of the former attempt")
    if former is None and len(present) < settings.max_nodes:
        call_s = view.changed_s + settings.last_call_s
        if now_s < call_s:
            return Decision(f"last call: {len(present)} of {settings.max_nodes} nodes are here", wake_s=call_s)
    chosen = clear[: settings.max_nodes]
    workers = tuple(
        Worker(id=f"{doc.node}/{slot}", node=doc.node, slot=slot) for doc in chosen for slot in range(doc.slots)
    )
    start = Generation(
        epoch=next_epoch(view),
        stage=Stage.START,
        workers=workers,
        attempt=attempt,
        restarts=former.restarts if former else 0,
        saved=former.saved if former else None,
        resumes=former.resumes if former else 0,
        cause=former.cause if former else "start",
        cause_t=former.cause_t if former else 0.0,
        master_addr=chosen[0].host,
        master_port=chosen[0].port,
        roles=() if len({doc.role for doc in chosen}) == 1 else tuple((doc.node, doc.role) for doc in chosen),
    )
    return Decision(f"{len(chosen)} nodes are here", generation=start)


def _too_few(present: int, since_s: float, now_s: float, settings: Settings) -> Decision:
    end_s = since_s + settings.join_s
    text = f"{present} of at least {settings.min_nodes} nodes are here"
    if now_s < end_s:
        return Decision(text, wake_s=end_s)
    message = f"only {text} after {settings.join_s:g} s; start more nodes, or raise --rdzv-conf join_timeout"
    return Decision(message, result=Result(False, message))


def _plain(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: Settings
) -> Decision:
    """No worker has attached: the script is restarted as a whole, as torchrun would do it."""
    present = {doc.node: doc for doc in nodes}
    failed = [doc for doc in nodes if doc.failed and doc.attempt == generation.attempt and doc.node in generation.nodes]
    absent = () if _absence_in_doubt(view, now_s, settings) else tuple(set(generation.nodes) - set(present))
    if failed or absent:
        first = min(failed, key=lambda doc: doc.cause_t) if failed else None
        cause = first.failed if first else f"node {', '.join(sorted(absent))} was lost"
        if generation.restarts < (settings.max_restarts or 0):
            again = _again(view, generation, cause, first.cause_t if first else 0.0, failure=True)
            return Decision(cause, generation=again)
        used = f"after {generation.restarts} of {settings.max_restarts or 0} restarts"
        return Decision(cause, result=Result(False, f"{cause} ({used})"))
    draining = [doc.node for doc in nodes if doc.draining and doc.node in generation.nodes]
    if len(draining) == len(generation.nodes):
        return Decision(ALL_LEAVE, result=Result(False, ALL_LEAVE))
    if draining:
        cause = f"node {', '.join(draining)} leaves"
        return Decision(cause, generation=_again(view, generation, cause, 0.0, failure=False))
    waiting = [doc.node for doc in nodes if doc.node not in generation.nodes and not doc.draining]
    if waiting and len(generation.nodes) < settings.max_nodes and not any(doc.finished for doc in nodes):
        grace_s = view.generation_s + settings.attach_s
        if now_s < grace_s:
            return Decision(f"node {waiting[0]} waits; the script may still import elaunch", wake_s=grace_s)
        cause = f"node {', '.join(waiting)} joins"
        return Decision(cause, generation=_again(view, generation, cause, 0.0, failure=False))
    return Decision("the workers run")


def _first_failure(nodes: Iterable[NodeDoc]) -> str:
    """What failed first, of what made the others fail; clocks of machines may differ by more than that took."""
    return min(((doc.cause_t, doc.failed) for doc in nodes if doc.failed), default=(0.0, ""))[1]


def _again(view: View, generation: Generation, cause: str, cause_t: float, failure: bool) -> Generation:
    """All workers stop and the nodes meet again for the next attempt."""
    return Generation(
        epoch=next_epoch(view),
        stage=Stage.ASSEMBLE,
        attempt=generation.attempt + 1,
        restarts=generation.restarts + (1 if failure else 0),
        cause=cause,
        cause_t=cause_t,
        saved=generation.saved,
        resumes=generation.resumes,
    )


def _absence_in_doubt(view: View, now_s: float, settings: Settings) -> bool:
    """Right after an outage of the store, nodes that are alive may not have renewed their lease yet."""
    return view.outage_end_s is not None and now_s < view.outage_end_s + settings.lease_s


def _ready(doc: NodeDoc, attempt: int) -> tuple[Worker, ...]:
    if doc.attempt < attempt:
        return ()  # it has still to hear that all start again
    return tuple(
        Worker(worker.id, doc.node, worker.slot, worker.address)
        for worker in sorted(doc.workers, key=lambda worker: worker.slot)
        if worker.state is WorkerState.READY
    )


def _first_step(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: Settings
) -> Decision:
    """The script uses elaunch: wait until its workers have registered, then let them train."""
    present = [doc for doc in nodes if not doc.draining]
    if not present:
        return Decision(ALL_LEAVE, result=Result(False, ALL_LEAVE))
    able = [doc for doc in present if _ready(doc, generation.attempt)][: settings.max_nodes]
    if len(present) < settings.min_nodes:
        return _too_few(len(present), view.changed_s, now_s, settings)
    starting = [
        worker.id
        for doc in present
        for worker in doc.workers
        if worker.state is WorkerState.STARTING and doc.node in generation.nodes
    ]
    # Nodes that have not reacted to the start yet.
    starting += [doc.node for doc in present if doc.node in generation.nodes and doc.epoch < generation.epoch]
    if len(able) < settings.min_nodes and not starting:
        return _too_few_ready(view, generation, present, len(able), now_s, settings)
    if starting:
        end_s = view.changed_s + settings.ready_s
        if len(able) < settings.min_nodes or now_s < end_s:
            return Decision(f"still starting: {', '.join(starting)}", wake_s=end_s if now_s < end_s else None)
    workers = tuple(worker for doc in able for worker in _ready(doc, generation.attempt))
    epoch = next_epoch(view)
    first = replace(generation, epoch=epoch, stage=Stage.TRAIN, workers=workers, cause="start", urgent=epoch)
    return Decision("all workers are ready", generation=first)


def _too_few_ready(
    view: View, generation: Generation, present: list[NodeDoc], able: int, now_s: float, settings: Settings
) -> Decision:
    """Nothing has trained yet, so nothing is lost by starting again with a node that came later."""
    failed = _first_failure(present)
    if failed:
        count = sum(bool(doc.failed) for doc in present)
        which = "every worker" if not able else f"workers of {count} nodes"
        return Decision(failed, result=Result(False, f"{which} failed before the first step: {failed}"))
    late = [doc.node for doc in present if doc.node not in generation.nodes]
    if late and len(present) - len(late) < settings.max_nodes:
        cause = f"node {', '.join(late)} joins"
        return Decision(cause, generation=_again(view, generation, cause, 0.0, failure=False))
    return _too_few(able, view.changed_s, now_s, settings)


Missing = Mapping[str, Collection[str]]
"""By node, if there are any: the nodes between which and it nothing passes."""


def apart(nodes: Sequence[str], missing: Missing) -> set[str]:
    """The nodes to leave out so that all others reach each other: the smaller part, where the network is in two.

    Args:
        nodes: in the order of the job; of equals the last is left out.
        missing: for both of two; others than these nodes do not count.
    """
    others = {node: missed for node in nodes if (missed := set(missing.get(node, ())).intersection(nodes))}
    left = {node: set(missed) for node, missed in others.items()}
    order = [node for node in nodes if node in left]
    out = set[str]()
    while any(left.values()):
        worst = max(reversed(order), key=lambda node: len(left.get(node, ())))
        out.add(worst)
        for other in left.pop(worst):
            left[other].discard(worst)
    # What was left out early may do no harm without those that were left out later.
    for node in order:
        if node in out and others[node] <= out:
            out.discard(node)
    return out


def _missing(nodes: Sequence[NodeDoc]) -> dict[str, set[str]]:
    """What the nodes that are here say of each other; it is enough that one of two says so."""
    hosts = {doc.node: doc.host for doc in nodes}
    missing = defaultdict[str, set[str]](set)
    for doc in nodes:
        for one in doc.cut:
            if one.node != doc.node and hosts.get(one.node) == one.host:
                missing[doc.node].add(one.node)
                missing[one.node].add(doc.node)
    return missing


def _left_out(nodes: Sequence[str], holders: Collection[str], missing: Missing) -> set[str]:
    """As `apart`, but nobody who holds the state goes for one who does not."""
    if not missing:
        return set()
    first = [node for node in nodes if node in holders]
    out = apart(first, missing)
    kept = set(first) - out
    out |= {node for node in nodes if node not in holders and not kept.isdisjoint(missing.get(node, ()))}
    return out | apart([node for node in nodes if node not in holders and node not in out], missing)


def _members(nodes: Iterable[NodeDoc], ids: Collection[str], missing: Missing) -> tuple[Worker, ...]:
    """Those of `ids` that hold state, on nodes that all others reach."""
    return tuple(
        Worker(worker.id, doc.node, worker.slot, worker.address)
        for doc in nodes
        if not missing.get(doc.node)
        for worker in doc.workers
        if worker.id in ids and worker.state is WorkerState.MEMBER
    )


def _compare(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: Settings
) -> _Change:
    present = {doc.node: doc for doc in nodes}
    gone = {worker for doc in nodes for worker in doc.gone}
    listed = {worker.id for doc in nodes for worker in doc.workers}
    doubt = _absence_in_doubt(view, now_s, settings)
    missing, of_generation = _missing(nodes), set(generation.nodes)
    members = [doc.node for doc in nodes if doc.node in of_generation]
    holders = {doc.node for doc in nodes if any(worker.state is WorkerState.MEMBER for worker in doc.workers)}
    out = _left_out(members, holders, missing)
    survivors: list[Worker] = []
    draining: list[Worker] = []
    lost, leaving, causes = [], list[str](), []
    heirs = False
    missed = False  # somebody still needs a collective with a worker that has finished and ended
    entered = True
    for worker in generation.workers:
        doc = present.get(worker.node)
        state = next((w.state for w in doc.workers if w.id == worker.id), None) if doc else None
        entered = entered and state is not WorkerState.READY
        if state is WorkerState.DONE:
            missed = missed or worker.id in gone
        elif worker.id in gone:
            lost.append(worker.id)
            causes.append((0.0, f"worker {worker.id} cannot be reached"))
        elif doc is None:
            if doubt:
                survivors.append(worker)
            else:
                lost.append(worker.id)
                causes.append((0.0, f"node {worker.node} was lost"))
        elif state is None:
            lost.append(worker.id)
            causes.append((doc.cause_t, doc.cause or f"worker {worker.id} died"))
        elif worker.node in out:
            lost.append(worker.id)
            others = sorted(of_generation.intersection(missing[worker.node]))
            causes.append((0.0, f"node {worker.node} is left out: nothing passes between it and {names_text(others)}"))
        elif doc.draining or worker.id in doc.excused:
            draining.append(worker)
        else:
            survivors.append(worker)
            heirs = heirs or state is WorkerState.MEMBER
    # Those told to leave by an earlier generation may still be members of the step in flight.
    dead = [worker for worker in generation.leaving if worker in gone]
    told = [worker for worker in generation.leaving if worker in listed and worker not in gone]
    causes.extend((0.0, f"worker {worker} died before it could leave") for worker in dead)
    reset = bool(dead) or missed or any(doc.reset_epoch >= generation.epoch for doc in nodes)
    urgent = bool(lost) or reset
    back = _members(nodes, told, missing) if urgent else ()
    draining.extend(back)
    joiners: list[Worker] = []
    admitted = {worker.node for worker in survivors}
    here = admitted | {worker.node for worker in draining}
    known = {*generation.ids, *generation.leaving, *generation.streak.replaced, *gone}
    for doc in nodes:
        if doc.draining or (doc.node not in admitted and len(admitted) >= settings.max_nodes):
            continue
        if not here.isdisjoint(missing.get(doc.node, ())):
            continue
        fresh = [worker for worker in _ready(doc, generation.attempt) if worker.id not in known]
        if fresh:
            admitted.add(doc.node)
            here.add(doc.node)
            joiners.extend(fresh)
            causes.append((0.0, f"{', '.join(worker.id for worker in fresh)} joins"))
    settled = generation.hold or (entered and all(present[one.node].settled >= generation.urgent for one in draining))
    if not urgent and ((heirs and settled) or not (survivors or joiners)):
        leaving.extend(worker.id for worker in draining)
        for worker in draining:
            doc = present[worker.node]
            causes.append((doc.cause_t, f"node {doc.node} leaves") if doc.draining else (0.0, f"{worker.id} leaves"))
    else:
        # The state would leave with them: they stay until somebody else holds it.
        staying = {worker.id for worker in (*survivors, *draining)}
        survivors = [worker for worker in (*generation.workers, *back) if worker.id in staying]
        told = [worker for worker in told if worker not in staying]
    leaving.extend(told)
    return _Change(
        survivors=tuple(survivors),
        lost=tuple(lost),
        leaving=tuple(leaving),
        joiners=tuple(joiners),
        done=tuple(worker.id for doc in nodes for worker in doc.workers if worker.state is WorkerState.DONE),
        reset=reset,
        causes=tuple(dict.fromkeys(causes)),
        doubt=any(not present[node].cut and not of_generation.isdisjoint(missing.get(node, ())) for node in members),
    )


def _train(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: Settings
) -> Decision:
    """Keep the list of members true: drop the lost, let the draining leave, take in those that are ready."""
    change = _compare(view, generation, nodes, now_s, settings)
    if change.done:
        change = replace(change, joiners=())
        if not change.urgent or not change.survivors:
            return _closing(generation, change, nodes)
    elif not change.survivors and not change.leaving:
        return _all_lost(view, generation, change, settings)
    hold = _too_small(change, settings)
    news = change.lost or change.joiners or change.reset or set(change.leaving) - set(generation.leaving)
    if not news and hold == generation.hold:
        if generation.hold:
            return _too_few(len(change.nodes), view.generation_s, now_s, settings)
        if view.request is not None and _counts(view.request, generation):
            return _replan(view, replace(generation, leaving=change.leaving), view.request)
        wake_s = None
        if view.outage_end_s is not None and _absence_in_doubt(view, now_s, settings):
            wake_s = view.outage_end_s + settings.lease_s
        return Decision("nothing has changed", wake_s=wake_s)
    window_s = settings.reach_s if change.doubt else settings.window_s
    close_s = (now_s if view.pending_s is None else view.pending_s) + window_s
    if now_s < close_s:
        return Decision("more changes may come", wake_s=close_s, pending=True)
    change, streak = _escalate(generation, change, nodes)
    if given_up := escalate.why_given_up(streak, _saved(nodes)):
        return Decision(given_up, result=Result(False, given_up))
    dated = [t for t, _ in change.causes if t > 0]
    by_time = sorted(change.causes, key=lambda cause: cause[0] or inf)  # the first, and then what has no time
    cause = "; ".join(dict.fromkeys(text for _, text in by_time)) or (
        "a link was made anew" if change.reset else "the number of nodes changed"
    )
    epoch = next_epoch(view)
    after = replace(
        generation,
        epoch=epoch,
        workers=(*change.survivors, *change.joiners),
        cause=cause,
        cause_t=min(dated, default=0.0),
        urgent=epoch if change.urgent else generation.urgent,
        begun=generation.begun or view.begun,
        hold=_too_small(change, settings),
        leaving=change.leaving,
        streak=streak,
    )
    return Decision(cause, generation=after)


def _too_small(change: _Change, settings: Settings) -> bool:
    """Whether the workers that go on have to wait for more nodes."""
    return len(change.nodes) < settings.min_nodes and not change.done


def _escalate(generation: Generation, change: _Change, nodes: tuple[NodeDoc, ...]) -> tuple[_Change, Streak]:
    """Where links are made anew again and again, let the others go on without the worker to which they fail."""
    if not change.urgent:
        return change, generation.streak
    streak = escalate.follow(generation, nodes, reset=not change.lost)
    if change.lost:
        return change, streak
    members = [worker.id for worker in change.survivors]
    hold_state = {worker.id for doc in nodes for worker in doc.workers if worker.state is WorkerState.MEMBER}
    worker = escalate.suspect(streak, members, hold_state.intersection(members))
    if not worker:
        return change, streak
    text = f"links to worker {worker} failed {streak.resets} times in a row, and no step has committed: it is replaced"
    left = tuple(one for one in change.survivors if one.id != worker)
    causes = ((0.0, text), *change.causes)
    return replace(change, survivors=left, lost=(worker,), causes=causes), replace(
        streak, replaced=(*streak.replaced, worker)
    )


def _saved(nodes: Iterable[NodeDoc]) -> int | None:
    """The number of steps in the newest checkpoint that any node knows of."""
    return max((doc.saved for doc in nodes if doc.saved is not None), default=None)


def _counts(request: PlanRequest, generation: Generation) -> bool:
    """Whether it was made for these members, and not yet carried. Its author makes it anew where they have changed."""
    return request.epoch == generation.epoch and request.id != generation.plan_request


def _replan(view: View, generation: Generation, request: PlanRequest) -> Decision:
    """The same workers, another plan: a planned change, like that of a joiner."""
    after = replace(
        generation,
        epoch=next_epoch(view),
        cause=PLAN_ASKED,
        cause_t=request.t,
        begun=generation.begun or view.begun,
        plan=request.plan,
        plan_request=request.id,
    )
    return Decision(PLAN_ASKED, generation=after)


def _closing(generation: Generation, change: _Change, nodes: tuple[NodeDoc, ...]) -> Decision:
    """A member has finished, so all have committed the last step: the job ends when each has ended."""
    failed = _first_failure(doc for doc in nodes if doc.node in generation.nodes)
    if failed:
        return Decision(failed, result=Result(False, failed))
    busy = {worker.id for doc in nodes for worker in doc.workers if worker.state is WorkerState.MEMBER}
    ending = [doc for doc in nodes if any(worker.id in change.done for worker in doc.workers)]
    if busy.isdisjoint(generation.ids) and all(doc.finished for doc in ending):
        note = f"; lost after the last step: {', '.join(change.lost)}" if change.lost else ""
        return Decision("all members have finished", result=Result(True, f"all workers have finished{note}"))
    return Decision(f"{len(change.done)} workers have finished, {len(busy)} are about to")


def _all_lost(view: View, generation: Generation, change: _Change, settings: Settings) -> Decision:
    if not change.lost:
        if any(doc.draining for doc in view.nodes):
            return Decision("the last members leave")
        message = "every node left the job, and the state in memory with them; start it again from your last checkpoint"
        return Decision(message, result=Result(False, message))
    cause = "; ".join(dict.fromkeys(text for _, text in change.causes))
    failed = _first_failure(view.nodes)
    count = len(change.lost)
    who = "the last worker of the job" if count == 1 else f"all {count} workers of the job"
    text = f"{who} failed, and the state in memory with {'it' if count == 1 else 'them'}: {failed or cause}"
    saved = _saved(view.nodes)
    if saved is not None:
        return _go_back(view, generation, text, saved, settings)
    if generation.restarts < (settings.max_restarts or 0):
        return Decision(text, generation=_again(view, generation, text, 0.0, failure=True))
    advice = "start the job again from your last checkpoint, or give --max-restarts to let elaunch start it again"
    return Decision(text, result=Result(False, f"{text}; {advice}"))


def _go_back(view: View, generation: Generation, text: str, saved: int, settings: Settings) -> Decision:
    """The state is lost, and there is a checkpoint of `saved` steps."""
    resumes = 1 + (generation.resumes if saved == generation.saved else 0)
    limit = settings.max_restarts
    if resumes <= RESUMES if limit is None else generation.restarts < limit:
        cause = f"{text}; the job goes on from its checkpoint of {saved} steps"
        again = _again(view, generation, cause, 0.0, failure=True)
        return Decision(cause, generation=replace(again, saved=saved, resumes=resumes))
    used = f"it has gone back there {RESUMES} times" if limit is None else f"--max-restarts {limit} is used up"
    message = f"{text}; there is a checkpoint of {saved} steps, but {used}: start the job again to go on from it"
    return Decision(text, result=Result(False, message))
