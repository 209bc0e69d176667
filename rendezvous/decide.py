"""The leader's rule: documents and the clock in, at most one new document out. Pure.

The leader's shell calls `decide` after every change that it sees and at the times that `decide` asks to be woken.
Any node may lead at any time: all it needs is in the documents.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from elaunch.rendezvous.membership import (
    Generation,
    GenerationStage,
    Master,
    NodeDoc,
    Restarts,
    Result,
    Worker,
    WorkerState,
)
from elaunch.rendezvous.rules import quorum
from elaunch.rendezvous.rules.attempts import ALL_LEAVE, again, begin_again, let_go, takes_part, too_few
from elaunch.rendezvous.rules.early import restart_whole, same_everywhere
from elaunch.rendezvous.rules.sick import sick_to_leave
from elaunch.rendezvous.rules.spares import held, n_ready, standby_nodes
from elaunch.rendezvous.rules.training import train
from elaunch.rendezvous.view import (
    LeaderDecision,
    MembershipSettings,
    View,
    absence_in_doubt,
    first_failure,
    next_generation,
    ready_workers,
)

__all__ = ["LeaderDecision", "MembershipSettings", "View", "decide", "to_leave"]


def decide(view: View, now_s: float, settings: MembershipSettings) -> LeaderDecision:
    """Applies the rule once.

    Args:
        view: the documents and when they changed.
        now_s: the leader's monotonic clock.
        settings: numbers of nodes and time limits.
    """
    if view.result is not None:
        return LeaderDecision("the job is over")
    decision = _decide(view, now_s, settings)
    return quorum.bind(decision, view, now_s, settings) if settings.founds else decision


def _decide(view: View, now_s: float, settings: MembershipSettings) -> LeaderDecision:
    nodes = tuple(sorted(view.nodes, key=lambda doc: (doc.rank, doc.order, doc.node)))
    generation = view.generation
    if generation is None or generation.stage is GenerationStage.ASSEMBLE:
        return _assemble(view, nodes, now_s, settings)
    if generation.nodes and generation.node_set <= {doc.node for doc in nodes if doc.summary.finished}:
        return LeaderDecision("all nodes have finished", result=Result(True, "all workers have finished"))
    for doc in nodes:
        if doc.summary.abandoned and doc.node in generation.node_set and doc.progress.attempt == generation.attempt:
            return LeaderDecision("the job is abandoned", result=Result(False, doc.summary.abandoned))
    spares = held(view, settings)
    concerned = [doc for doc in nodes if doc.node not in spares]
    if (hopeless := same_everywhere(generation, concerned)) is not None:
        return hopeless
    if nodes and generation.nodes and not any(takes_part(doc, generation) for doc in nodes):
        return begin_again(view, generation, nodes, now_s, settings)
    if generation.stage is GenerationStage.TRAIN:
        return train(view, generation, nodes, now_s, settings)
    if any(doc.summary.elastic for doc in nodes):
        return _first_step(view, generation, nodes, now_s, settings)
    return _plain(view, generation, nodes, now_s, settings)


def surplus(view: View, max_nodes: int, leaving: Collection[str] = ()) -> tuple[str, ...]:
    """Returns the nodes that are to leave a job whose members are on more nodes than it may have: the last to join.

    Spares that hold the state go first.

    Args:
        view: the documents.
        max_nodes: how many it may have.
        leaving: nodes that leave for another reason.
    """
    if view.generation is None or view.result is not None:
        return ()
    docs = {doc.node: doc for doc in view.nodes}
    here = [docs[name] for name in view.generation.nodes if name in docs and name not in leaving]
    staying = [doc for doc in here if not doc.draining]
    spares = standby_nodes(view.generation)
    staying.sort(key=lambda doc: (doc.node in spares, doc.rank, doc.order, doc.node))
    return tuple(doc.node for doc in staying[max_nodes:])


def to_leave(
    view: View, settings: MembershipSettings, asked: Collection[str], decision: LeaderDecision
) -> dict[str, str]:
    """Returns the nodes that are to be asked to leave, and why: sick ones, those that the job has too many, or all.

    Args:
        view: the documents.
        settings: for the numbers of nodes.
        asked: nodes that were asked before.
        decision: of the leader's rule.
    """
    if decision.all_leave:
        return {doc.node: decision.all_leave for doc in view.nodes if not doc.draining}
    sick, most = sick_to_leave(view, settings.min_nodes, asked, n_ready(view, settings)), settings.max_nodes
    text = f"the job is to have {most} node{'' if most == 1 else 's'} from now on"
    return sick | dict.fromkeys(surplus(view, settings.most_nodes, sick), text)


def _assemble(view: View, nodes: tuple[NodeDoc, ...], now_s: float, settings: MembershipSettings) -> LeaderDecision:
    """Waits for the nodes, then lets each start its workers."""
    former = view.generation
    if former is not None and (decision := let_go(view, former, nodes, now_s, settings)) is not None:
        return decision
    attempt = former.attempt if former else 0
    present = [doc for doc in nodes if not doc.draining]
    clear = [doc for doc in present if former is None or doc.progress.attempt >= attempt]
    opened_s = view.generation_s if former else view.led_s
    if len(present) < settings.min_nodes:
        return too_few(len(present), opened_s, now_s, settings)
    if len(clear) < min(len(present), settings.max_nodes):
        return LeaderDecision(f"{len(present) - len(clear)} nodes still stop workers of the former attempt")
    if former is None and len(present) < settings.max_nodes:
        call_s = view.changed_s + settings.last_call_s
        if now_s < call_s:
            return LeaderDecision(f"last call: {len(present)} of {settings.max_nodes} nodes are here", wake_s=call_s)
    chosen = clear[: settings.max_nodes]
    workers = tuple(
        Worker(id=f"{doc.node}/{local_rank}", node=doc.node, local_rank=local_rank)
        for doc in chosen
        for local_rank in range(doc.slots)
    )
    start = Generation(
        number=next_generation(view),
        stage=GenerationStage.START,
        workers=workers,
        attempt=attempt,
        restarts=former.restarts if former else Restarts(),
        cause=former.cause if former else "start",
        cause_t=former.cause_t if former else 0.0,
        master=Master(chosen[0].host, chosen[0].port),
        roles=() if len({doc.role for doc in chosen}) == 1 else tuple((doc.node, doc.role) for doc in chosen),
    )
    return LeaderDecision(f"{len(chosen)} nodes are here", generation=start)


def _plain(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: MembershipSettings
) -> LeaderDecision:
    """Restarts the script as a whole, as torchrun would do it: no worker has attached."""
    present = {doc.node: doc for doc in nodes}
    failed = [
        doc
        for doc in nodes
        if doc.summary.failed and doc.progress.attempt == generation.attempt and doc.node in generation.node_set
    ]
    missing = generation.node_set - present.keys()
    absent = tuple(node for node in missing if not absence_in_doubt(view, now_s, settings, node))
    if failed or absent:
        first = min(failed, key=lambda doc: doc.cause_t) if failed else None
        cause = first.summary.failed if first else f"node {', '.join(sorted(absent))} was lost"
        if generation.restarts.count < (settings.max_restarts or 0):
            cause_t = first.cause_t if first else 0.0
            return LeaderDecision(cause, generation=again(view, generation, cause, cause_t, failure=True))
        used = f"after {generation.restarts.count} of {settings.max_restarts or 0} restarts"
        return LeaderDecision(cause, result=Result(False, f"{cause} ({used})"))
    draining = [doc.node for doc in nodes if doc.draining and doc.node in generation.node_set]
    if len(draining) == len(generation.nodes):
        return LeaderDecision(ALL_LEAVE, result=Result(False, ALL_LEAVE))
    if draining:
        cause, leaving = f"node {', '.join(draining)} leaves", tuple(draining)
        return LeaderDecision(cause, generation=again(view, generation, cause, 0.0, failure=False, leaving=leaving))
    waiting = [doc.node for doc in nodes if doc.node not in generation.node_set and not doc.draining]
    if waiting and len(generation.nodes) < settings.max_nodes and not any(doc.summary.finished for doc in nodes):
        grace_s = view.generation_s + settings.attach_s
        if now_s < grace_s:
            return LeaderDecision(f"node {waiting[0]} waits; the script may still import elaunch", wake_s=grace_s)
        cause = f"node {', '.join(waiting)} joins"
        return LeaderDecision(cause, generation=again(view, generation, cause, 0.0, failure=False))
    return LeaderDecision("the workers run")


def _first_step(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: MembershipSettings
) -> LeaderDecision:
    """Waits until the workers of a script that uses elaunch have registered, then lets them train."""
    present = [doc for doc in nodes if not doc.draining]
    if not present:
        return LeaderDecision(ALL_LEAVE, result=Result(False, ALL_LEAVE))
    if (restart := restart_whole(view, generation, present, now_s, settings)) is not None:
        return restart
    able = [doc for doc in present if ready_workers(doc, generation.attempt)][: settings.max_nodes]
    if len(present) < settings.min_nodes:
        return too_few(len(present), view.changed_s, now_s, settings)
    starting = [
        worker.id
        for doc in present
        for worker in doc.workers
        if worker.state is WorkerState.STARTING and doc.node in generation.node_set
    ]
    # Nodes that have not reacted to the start yet.
    starting += [
        doc.node for doc in present if doc.node in generation.node_set and doc.progress.generation < generation.number
    ]
    if len(able) < settings.min_nodes and not starting:
        return _too_few_ready(view, generation, present, len(able), now_s, settings)
    if starting:
        end_s = view.changed_s + settings.ready_s
        if len(able) < settings.min_nodes or now_s < end_s:
            return LeaderDecision(f"still starting: {', '.join(starting)}", wake_s=end_s if now_s < end_s else None)
    workers = tuple(worker for doc in able for worker in ready_workers(doc, generation.attempt))
    number = next_generation(view)
    first = replace(
        generation,
        number=number,
        stage=GenerationStage.TRAIN,
        workers=workers,
        cause="start",
        aborts_step_before=number,
    )
    return LeaderDecision("all workers are ready", generation=first)


def _too_few_ready(
    view: View, generation: Generation, present: list[NodeDoc], able: int, now_s: float, settings: MembershipSettings
) -> LeaderDecision:
    """Starts again with a node that came later, if there is one: nothing has trained yet, so nothing is lost."""
    failed = first_failure(present)
    if failed:
        count = sum(bool(doc.summary.failed) for doc in present)
        which = "every worker" if not able else f"workers of {count} nodes"
        return LeaderDecision(failed, result=Result(False, f"{which} failed before the first step: {failed}"))
    late = [doc.node for doc in present if doc.node not in generation.node_set]
    if late and len(present) - len(late) < settings.max_nodes:
        cause = f"node {', '.join(late)} joins"
        return LeaderDecision(cause, generation=again(view, generation, cause, 0.0, failure=False))
    return too_few(able, view.changed_s, now_s, settings)
