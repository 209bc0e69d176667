"""The leader's rule for workers that train together: the list of members is kept true. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

from elaunch.rendezvous.membership import (
    BrokenLink,
    Generation,
    Master,
    NodeDoc,
    PlanRequest,
    RequestedPlan,
    Result,
    Streak,
    Worker,
    WorkerState,
    names_text,
    node_of,
)
from elaunch.rendezvous.rules import escalate
from elaunch.rendezvous.rules.attempts import again, go_back, too_few
from elaunch.rendezvous.rules.connectivity import Missing, cut_off, left_out
from elaunch.rendezvous.rules.holders import holders_of
from elaunch.rendezvous.rules.spares import in_order, placed, taken_over
from elaunch.rendezvous.view import (
    LeaderDecision,
    MembershipSettings,
    View,
    absence_in_doubt,
    first_failure,
    newest_checkpoint,
    next_generation,
    ready_workers,
)

PLAN_ASKED = "a new plan was asked for"


@dataclass(frozen=True, slots=True)
class _Change:
    """What is to change about the members of a training generation.

    Attributes:
        survivors: members that stay, in their order.
        lost: members that are gone, or that the others cannot reach.
        leaving: workers that were told to leave, now or before, and are still there.
        joiners: workers that become members.
        done: workers that have finished.
        reset: whether links between those that stay have to be made anew.
        doubted: such links, between workers each of which says that it cannot reach the other, and both live.
        causes: for people, each with its Unix time; 0: unknown.
        doubt: whether a member has yet to say whom it cannot reach.
        is_empty: whether all that stay are newcomers, which hold no state yet.
        has_death: whether one of those that were told to leave has died before.
    """

    survivors: tuple[Worker, ...] = ()
    lost: tuple[str, ...] = ()
    leaving: tuple[str, ...] = ()
    joiners: tuple[Worker, ...] = ()
    done: tuple[str, ...] = ()
    reset: bool = False
    doubted: tuple[BrokenLink, ...] = ()
    causes: tuple[tuple[float, str], ...] = ()
    doubt: bool = False
    is_empty: bool = False
    has_death: bool = False

    @property
    def aborts_step(self) -> bool:
        """Returns whether the step under way cannot commit any more."""
        return bool(self.lost) or self.reset

    @property
    def nodes(self) -> frozenset[str]:
        """Returns the nodes of the workers that go on."""
        return frozenset(worker.node for worker in (*self.survivors, *self.joiners))


@dataclass(slots=True)
class _Fates:
    """What the reports say of the members of a generation, one by one.

    Attributes:
        survivors: those that stay.
        draining: those that are to leave.
        lost: those that are gone, or that the others cannot reach.
        causes: why they are lost, each with its Unix time; 0: unknown.
        has_heir: whether one that stays holds the state.
        is_missed: whether somebody still needs a collective with one that has finished and ended.
        have_entered: whether all of them have entered the generation.
    """

    survivors: list[Worker] = field(default_factory=list)
    draining: list[Worker] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    causes: list[tuple[float, str]] = field(default_factory=list)
    has_heir: bool = False
    is_missed: bool = False
    have_entered: bool = True

    def lose(self, worker: Worker, cause: str, cause_t: float = 0.0) -> None:
        """Counts a member as lost."""
        self.lost.append(worker.id)
        self.causes.append((cause_t, cause))


def _fates(
    generation: Generation,
    nodes: tuple[NodeDoc, ...],
    gone: Mapping[str, str],
    missing: Missing,
    in_doubt: Callable[[str], bool],
) -> _Fates:
    """Goes through the members.

    Args:
        generation: the present one.
        nodes: reports of the nodes that are here.
        gone: workers that some peer found dead, and what to say of it.
        missing: who cannot reach whom.
        in_doubt: says of a node that is not here whether it may be alive.
    """
    present = {doc.node: doc for doc in nodes}
    of_generation = generation.node_set
    holders = {doc.node for doc in nodes if any(worker.state is WorkerState.MEMBER for worker in doc.workers)}
    out = left_out([doc.node for doc in nodes if doc.node in of_generation], holders, missing)
    fates = _Fates()
    for worker in generation.workers:
        doc = present.get(worker.node)
        state = next((listed.state for listed in doc.workers if listed.id == worker.id), None) if doc else None
        fates.have_entered = fates.have_entered and state is not WorkerState.READY
        if state is WorkerState.DONE:
            fates.is_missed = fates.is_missed or worker.id in gone
        elif worker.id in gone:
            fates.lose(worker, gone[worker.id])
        elif doc is None:
            if in_doubt(worker.node):
                fates.survivors.append(worker)
            else:
                fates.lose(worker, f"node {worker.node} was lost")
        elif state is None:
            fates.lose(worker, doc.cause or f"worker {worker.id} died", doc.cause_t)
        elif worker.node in out:
            others = names_text(sorted(of_generation.intersection(missing[worker.node])))
            fates.lose(worker, f"node {worker.node} is left out: nothing passes between it and {others}")
        elif doc.draining or worker.id in doc.departure.evicted:
            fates.draining.append(worker)
        else:
            fates.survivors.append(worker)
            fates.has_heir = fates.has_heir or state is WorkerState.MEMBER
    return fates


def _gone(generation: Generation, nodes: tuple[NodeDoc, ...]) -> tuple[dict[str, str], tuple[BrokenLink, ...]]:
    """Finds the workers that are lost by what peers found.

    Who holds the state is not lost by the word of nodes that hold nothing: where one that is to be filled cannot reach
    it, that one goes itself. Nor are all who hold it lost by the word of each other: those that say so live, and new
    links will show which of them others cannot reach either.

    Returns:
        These workers, with what to say of each; and links between holders that have to be made anew.
    """
    gone = {worker: f"worker {worker} cannot be reached" for doc in nodes for worker in doc.peers.unreachable}
    finders = {worker: {doc.node for doc in nodes if worker in doc.peers.unreachable} for worker in gone}
    holders = holders_of(generation, nodes)
    # Those that are to leave hold it, too.
    known = generation.ranks.keys() | set(generation.leaving)
    holding = {doc.node for doc in nodes for one in doc.workers if one.state is WorkerState.MEMBER and one.id in known}
    for worker in holders:
        if worker in finders and finders[worker].isdisjoint(holding):
            del gone[worker]
            what = f"{worker}, which {'alone ' if len(holders) == 1 else ''}holds the state"
            others = [other.id for other in generation.workers if other.node in finders[worker]]
            gone |= {other: f"worker {other} cannot reach {what}" for other in others}
    if not gone.keys() >= set(holders):
        return gone, ()
    # What a node found before it heard of this generation is of former links.
    heard = {doc.node for doc in nodes if doc.progress.generation >= generation.aborts_step_before}
    found = {worker: finders[worker] & heard for worker in holders if node_of(worker) not in finders[worker]}
    says = set[str]().union(*found.values())
    doubts = {worker: (bool(by) and node_of(worker) not in says, len(by)) for worker, by in found.items()}
    kept = [worker for worker in doubts if doubts[worker] == min(doubts.values())]
    links = [BrokenLink(one, worker) for worker in kept for one in holders if node_of(one) in found[worker]]
    return {worker: text for worker, text in gone.items() if worker not in kept}, tuple(links)


def _joiners(
    generation: Generation,
    nodes: tuple[NodeDoc, ...],
    survivors: Iterable[Worker],
    draining: Iterable[Worker],
    gone: Collection[str],
    missing: Missing,
    most_nodes: int,
) -> tuple[tuple[Worker, ...], ...]:
    """Returns the workers that can become members, of each node that has any, as far as the job has room for nodes."""
    admitted = {worker.node for worker in survivors}
    here = admitted | {worker.node for worker in draining}
    known = {*generation.ids, *generation.leaving, *generation.streak.replaced, *gone}
    joiners = []
    for doc in nodes:
        if doc.draining or (doc.node not in admitted and len(admitted) >= most_nodes):
            continue
        if not here.isdisjoint(missing.get(doc.node, ())):
            continue
        barred = generation.refused if doc.progress.generation < generation.aborts_step_before else ()
        ready = ready_workers(doc, generation.attempt)
        fresh = tuple(worker for worker in ready if worker.id not in known and worker.id not in barred)
        if fresh:
            admitted.add(doc.node)
            here.add(doc.node)
            joiners.append(fresh)
    return tuple(joiners)


def _members(nodes: Iterable[NodeDoc], ids: Collection[str], missing: Missing) -> tuple[Worker, ...]:
    """Returns those of `ids` that hold state, on nodes that all others reach."""
    return tuple(
        Worker(worker.id, doc.node, worker.local_rank, worker.address, doc.domain)
        for doc in nodes
        if not missing.get(doc.node)
        for worker in doc.workers
        if worker.id in ids and worker.state is WorkerState.MEMBER
    )


def _compare(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: MembershipSettings
) -> _Change:
    """Finds what is to change about the members."""
    present = {doc.node: doc for doc in nodes}
    gone, doubted = _gone(generation, nodes)
    missing = cut_off(nodes)
    fates = _fates(generation, nodes, gone, missing, partial(absence_in_doubt, view, now_s, settings))
    causes = list(fates.causes)
    # Those told to leave by an earlier generation may still be members of the step in flight.
    listed = {worker.id for doc in nodes for worker in doc.workers}
    dead = [worker for worker in generation.leaving if worker in gone]
    told = [worker for worker in generation.leaving if worker in listed and worker not in gone]
    causes += [(0.0, f"worker {worker} died before it could leave") for worker in dead]
    # A planned generation is no way out of a step that broke, so links that failed before it have to be made anew too.
    failed = any(doc.peers.reset_generation >= max(1, generation.aborts_step_before) for doc in nodes)
    # A store that was lost may have had a newer one, of which only some have heard.
    failed = failed or any(doc.progress.generation > generation.number for doc in nodes)
    reset = bool(dead) or fates.is_missed or failed or bool(doubted)
    is_urgent = bool(fates.lost) or reset
    done = tuple(worker.id for doc in nodes for worker in doc.workers if worker.state is WorkerState.DONE)
    # Once one has finished, all its steps are committed without those that leave, which would do the last ones again.
    back = _members(nodes, told, missing) if is_urgent and not done else ()
    draining = [*fates.draining, *back]
    by_node = _joiners(generation, nodes, fates.survivors, draining, gone, missing, settings.most_nodes)
    causes += [(0.0, f"{', '.join(worker.id for worker in fresh)} joins") for fresh in by_node]
    joiners = tuple(worker for fresh in by_node for worker in fresh)
    have_joined = generation.hold or (
        fates.have_entered
        and all(present[worker.node].departure.joined >= generation.aborts_step_before for worker in draining)
    )
    survivors, leaving = fates.survivors, list[str]()
    # Where all leave, nobody has to hold the state; but a member would wait for ever for one that was let go before it
    # came to the present generation.
    may_all_leave = not (survivors or joiners) and (generation.hold or fates.have_entered)
    if not is_urgent and ((fates.has_heir and have_joined) or may_all_leave):
        for worker in draining:
            leaving.append(worker.id)
            doc = present[worker.node]
            causes.append((doc.cause_t, f"node {doc.node} leaves") if doc.draining else (0.0, f"{worker.id} leaves"))
    else:
        # The state would leave with them: they stay until somebody else holds it.
        staying = {worker.id for worker in (*survivors, *draining)}
        survivors = [worker for worker in (*generation.workers, *back) if worker.id in staying]
        told = [worker for worker in told if worker not in staying]
    of_generation = generation.node_set
    newcomers = {worker.id for doc in nodes for worker in doc.workers if worker.state is WorkerState.READY}
    return _Change(
        survivors=tuple(survivors),
        lost=tuple(fates.lost),
        leaving=(*leaving, *told),
        joiners=joiners,
        done=done,
        reset=reset,
        doubted=doubted,
        causes=tuple(dict.fromkeys(causes)),
        doubt=any(
            doc.node in of_generation and not doc.peers.cut and not of_generation.isdisjoint(missing.get(doc.node, ()))
            for doc in nodes
        ),
        is_empty=newcomers.issuperset(worker.id for worker in survivors),
        has_death=bool(dead),
    )


def train(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: MembershipSettings
) -> LeaderDecision:
    """Keeps the list of members true: drops the lost, lets the draining leave, takes in those that are ready."""
    change = _compare(view, generation, nodes, now_s, settings)
    if change.done:
        change = replace(change, joiners=())
        repeats = change.aborts_step and not change.is_empty  # there is a step to repeat, and somebody who can
        waits = generation.hold and (not change.is_empty or bool(change.leaving))
        if not repeats and not waits:
            return _closing(generation, change, nodes)
    elif not change.survivors and not change.leaving:
        return _all_lost(view, generation, change, settings)
    hold = _too_small(change, settings)
    news = change.lost or change.joiners or change.reset or set(change.leaving) - set(generation.leaving)
    # After a change of the number of nodes others work.
    resized = False
    if settings.spare_state and not change.done:
        resized = set(_by_rank(generation, change, settings)[1]) != set(generation.standby)
    if not (news or resized) and hold == generation.hold:
        if generation.hold:
            return _held(change, view, now_s, settings)
        if view.request is not None and _counts(view.request, generation):
            return _replan(view, replace(generation, leaving=change.leaving), view.request)
        wake_s = None
        if view.outage_end_s is not None and absence_in_doubt(view, now_s, settings):
            wake_s = view.outage_end_s + settings.lease_s
        return LeaderDecision("nothing has changed", wake_s=wake_s)
    window_s = settings.reach_s if change.doubt else settings.window_s
    close_s = (now_s if view.pending_s is None else view.pending_s) + window_s
    if now_s < close_s:
        return LeaderDecision("more changes may come", wake_s=close_s, pending=True)
    change, streak = _escalate(generation, change, nodes)
    if given_up := escalate.why_given_up(streak, newest_checkpoint(nodes)):
        return LeaderDecision(given_up, result=Result(False, given_up))
    dated = [t for t, _ in change.causes if t > 0]
    workers, standby = _by_rank(generation, change, settings)
    by_time = sorted(change.causes, key=lambda cause: cause[0] or inf)  # the first, and then what has no time
    if over := taken_over(generation, standby, workers):
        by_time.append((0.0, over))
    cause = "; ".join(dict.fromkeys(text for _, text in by_time)) or (
        "a link was made anew" if change.reset else "the number of nodes changed"
    )
    number = next_generation(view)
    after = replace(
        generation,
        number=number,
        workers=workers,
        master=_master(generation, workers, nodes),
        cause=cause,
        cause_t=min(dated, default=0.0),
        aborts_step_before=number if change.aborts_step else generation.aborts_step_before,
        begun=generation.begun or view.begun,
        hold=_too_small(change, settings),
        leaving=change.leaving,
        streak=replace(streak, logged=_logged(generation, nodes)),
        refused=_refused(generation, change.lost, nodes),
        standby=standby,
        finished=generation.finished or bool(change.done),
    )
    return LeaderDecision(cause, generation=after)


def _by_rank(
    generation: Generation, change: _Change, settings: MembershipSettings
) -> tuple[tuple[Worker, ...], tuple[str, ...]]:
    """Returns the members after a change by rank, and those of them that are on standby."""
    workers = placed(generation.workers, change.survivors, change.joiners, generation.standby)
    return in_order(workers, settings)


def _refused(generation: Generation, lost: Sequence[str], nodes: Iterable[NodeDoc]) -> tuple[str, ...]:
    """Returns those that are still reported as ready, though they are lost, by nodes that may not have heard of it.

    The report of an agent that was killed stands until its lease has run out.
    """
    ready = {worker.id: doc.progress.generation for doc in nodes for worker in ready_workers(doc, generation.attempt)}
    kept = [worker for worker in generation.refused if ready.get(worker, inf) < generation.aborts_step_before]
    return tuple(dict.fromkeys((*kept, *(worker for worker in lost if worker in ready))))


def _held(change: _Change, view: View, now_s: float, settings: MembershipSettings) -> LeaderDecision:
    """Waits for more nodes; when that has taken too long, the members save the state and leave, or the job fails."""
    decision = too_few(len(change.nodes), view.generation_s, now_s, settings)
    if decision.result is None or not settings.saves or not change.survivors:
        return decision
    return LeaderDecision(decision.reason, all_leave=decision.reason)


def _master(generation: Generation, workers: Sequence[Worker], nodes: tuple[NodeDoc, ...]) -> Master:
    """Returns where process groups meet: the store of a node that goes on, the same one as long as that does."""
    stores = {doc.node: Master(doc.host, doc.port) for doc in nodes}
    offered = [stores[worker.node] for worker in workers if worker.node in stores]
    return generation.master if generation.master in offered or not offered else offered[0]


def _logged(generation: Generation, nodes: tuple[NodeDoc, ...]) -> int:
    """Returns how many steps stand in logs, as the nodes of this attempt knew when their workers ended."""
    of_attempt = [doc.progress.logged for doc in nodes if doc.progress.attempt == generation.attempt]
    return max([generation.streak.logged, *of_attempt])


def _too_small(change: _Change, settings: MembershipSettings) -> bool:
    """Returns whether the workers that go on have to wait for more nodes."""
    return len(change.nodes) < settings.min_nodes and not change.done


def _escalate(generation: Generation, change: _Change, nodes: tuple[NodeDoc, ...]) -> tuple[_Change, Streak]:
    """Counts the urgent generations in a row, and lets the others go on without a worker to which links always fail."""
    if not change.aborts_step:
        return change, generation.streak
    loses = bool(change.lost) or change.has_death
    streak = escalate.follow(generation, nodes, reset=not loses, doubted=change.doubted)
    if loses or change.done:  # where some have finished no step is left to commit, and their links end with them
        return change, streak
    members = [worker.id for worker in change.survivors]
    heard = [doc for doc in nodes if doc.progress.generation >= generation.aborts_step_before]
    holders, live = (set(holders_of(generation, docs)).intersection(members) for docs in (nodes, heard))
    worker = escalate.suspect(streak, members, holders, live)
    if not worker:
        return change, streak
    text = f"links to worker {worker} failed {streak.resets} times in a row, and no step has committed: it is replaced"
    others = tuple(member for member in change.survivors if member.id != worker)
    causes = ((0.0, text), *change.causes)
    return replace(change, survivors=others, lost=(worker,), causes=causes), replace(
        streak, replaced=(*streak.replaced, worker)
    )


def _counts(request: PlanRequest, generation: Generation) -> bool:
    """Returns whether it was made for these members and is not carried yet; its author renews it when they change."""
    return request.generation == generation.number and request.id != generation.plan_request


def _replan(view: View, generation: Generation, request: PlanRequest) -> LeaderDecision:
    """Has the same workers go on by another plan: a planned change, like that of a joiner."""
    after = replace(
        generation,
        number=next_generation(view),
        cause=PLAN_ASKED,
        cause_t=request.t,
        begun=generation.begun or view.begun,
        requested_plan=RequestedPlan(request.plan, request.id),
    )
    return LeaderDecision(PLAN_ASKED, generation=after)


def _closing(generation: Generation, change: _Change, nodes: tuple[NodeDoc, ...]) -> LeaderDecision:
    """Ends the job when each member has ended: one has finished, so all have committed the last step."""
    failed = first_failure(doc for doc in nodes if doc.node in generation.node_set)
    if failed:
        return LeaderDecision(failed, result=Result(False, failed))
    busy = {worker.id for doc in nodes for worker in doc.workers if worker.state is WorkerState.MEMBER}
    ending = [doc for doc in nodes if any(worker.id in change.done for worker in doc.workers)]
    if busy.isdisjoint(generation.ids) and all(doc.summary.finished for doc in ending):
        note = f"; lost after the last step: {', '.join(change.lost)}" if change.lost else ""
        return LeaderDecision("all members have finished", result=Result(True, f"all workers have finished{note}"))
    return LeaderDecision(f"{len(change.done)} workers have finished, {len(busy)} are about to")


def _all_lost(view: View, generation: Generation, change: _Change, settings: MembershipSettings) -> LeaderDecision:
    """Goes back to a checkpoint, starts again or fails: nobody who holds the state is left."""
    if not change.lost:
        if any(doc.draining for doc in view.nodes):
            return LeaderDecision("the last members leave")
        message = "every node left the job, and the state in memory with them; start it again from your last checkpoint"
        return LeaderDecision(message, result=Result(False, message))
    cause = "; ".join(dict.fromkeys(text for _, text in change.causes))
    failed = first_failure(view.nodes)
    count = len(change.lost)
    who = "the last worker of the job" if count == 1 else f"all {count} workers of the job"
    text = f"{who} failed, and the state in memory with {'it' if count == 1 else 'them'}: {failed or cause}"
    saved = newest_checkpoint(view.nodes)
    if saved is not None:
        return go_back(view, generation, text, saved, settings)
    if generation.restarts.count < (settings.max_restarts or 0):
        return LeaderDecision(text, generation=again(view, generation, text, 0.0, failure=True))
    advice = "start the job again from your last checkpoint, or give --max-restarts to let elaunch start it again"
    return LeaderDecision(text, result=Result(False, f"{text}; {advice}"))
