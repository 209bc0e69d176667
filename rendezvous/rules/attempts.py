"""When a job begins again, from the start or from a checkpoint, and when it fails instead. Pure."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from elaunch.rendezvous.membership import Generation, GenerationStage, NodeDoc, Restarts, Result
from elaunch.rendezvous.view import LeaderDecision, MembershipSettings, View, absence_in_doubt, next_generation

ALL_LEAVE = "every node left the job before it was done; start it again"
RESUMES = 3
"""How often a job goes back to the same checkpoint, where --max-restarts is not given."""


def too_few(present: int, since_s: float, now_s: float, settings: MembershipSettings) -> LeaderDecision:
    """Waits for more nodes, and fails when that has taken too long.

    Args:
        present: how many nodes there are.
        since_s: since when they have been too few.
        now_s: the leader's clock.
        settings: for the least number of nodes, and how long to wait for it.
    """
    end_s = since_s + settings.join_s
    text = f"{present} of at least {settings.min_nodes} nodes are here"
    if now_s < end_s:
        return LeaderDecision(text, wake_s=end_s)
    message = f"only {text} after {settings.join_s:g} s; start more nodes, or raise --rdzv-conf join_timeout"
    return LeaderDecision(message, result=Result(False, message))


def again(
    view: View, generation: Generation, cause: str, cause_t: float, failure: bool, leaving: tuple[str, ...] = ()
) -> Generation:
    """Returns the generation in which all workers stop and the nodes meet again for the next attempt.

    Args:
        view: for the newest generation.
        generation: the present one.
        cause: why, for people.
        cause_t: Unix time of that; 0: unknown.
        failure: whether it counts against --max-restarts.
        leaving: nodes that leave, and may end when they hear of this generation.
    """
    return Generation(
        number=next_generation(view),
        stage=GenerationStage.ASSEMBLE,
        attempt=generation.attempt + 1,
        restarts=replace(generation.restarts, count=generation.restarts.count + (1 if failure else 0)),
        cause=cause,
        cause_t=cause_t,
        leaving=leaving,
    )


def let_go(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: MembershipSettings
) -> LeaderDecision | None:
    """Lets nodes leave while the nodes meet again; fails where all of them do. None where no more nodes are to leave.

    A node waits for this: by itself it cannot tell whether it is the last one.
    """
    draining = tuple(doc.node for doc in nodes if doc.draining)
    if set(draining) <= set(generation.leaving):
        return None
    if len(draining) == len(nodes):
        if absence_in_doubt(view, now_s, settings):
            return LeaderDecision("others may come back")
        return LeaderDecision(ALL_LEAVE, result=Result(False, ALL_LEAVE))
    cause = f"node {', '.join(draining)} leaves"
    after = replace(generation, number=next_generation(view), cause=cause, cause_t=0.0, leaving=draining)
    return LeaderDecision(cause, generation=after)


def begin_again(
    view: View, generation: Generation, nodes: tuple[NodeDoc, ...], now_s: float, settings: MembershipSettings
) -> LeaderDecision:
    """Starts the script on the nodes that are here now: none is left of those that ran the job.

    They are of an earlier run, or were lost all at once. Those that only lost the store come back within the time of a
    lease, for which this waits.
    """
    sure_s = max(view.led_s, -inf if view.outage_end_s is None else view.outage_end_s) + settings.lease_s
    if now_s < sure_s:
        return LeaderDecision("no node of the present generation is here", wake_s=sure_s)
    here = ", ".join(doc.node for doc in nodes)
    cause = f"no node that ran the job is left, nor any state in memory; it begins again on {here}"
    after = again(view, generation, cause, 0.0, failure=False)
    return LeaderDecision(cause, generation=replace(after, restarts=replace(after.restarts, count=0)))


def takes_part(doc: NodeDoc, generation: Generation) -> bool:
    """Returns whether its agent is one of those that run this generation; a new one may bear the name of a lost one."""
    if doc.node not in generation.node_set:
        return False
    return (
        generation.stage is GenerationStage.START
        or doc.summary.took_part
        or any(each.id in generation.ranks for each in doc.workers)
    )


def go_back(view: View, generation: Generation, text: str, saved: int, settings: MembershipSettings) -> LeaderDecision:
    """Starts again from a checkpoint, as often as that is allowed: the state in memory is lost.

    Args:
        view: for the newest generation.
        generation: the present one.
        text: what was lost, for people.
        saved: number of steps in the checkpoint.
        settings: for the number of restarts.
    """
    resumes = 1 + (generation.restarts.resumes if saved == generation.restarts.saved else 0)
    limit = settings.max_restarts
    if resumes <= RESUMES if limit is None else generation.restarts.count < limit:
        cause = f"{text}; the job goes on from its checkpoint of {saved} steps"
        after = again(view, generation, cause, 0.0, failure=True)
        return LeaderDecision(cause, generation=replace(after, restarts=Restarts(after.restarts.count, saved, resumes)))
    used = f"it has gone back there {RESUMES} times" if limit is None else f"--max-restarts {limit} is used up"
    message = f"{text}; there is a checkpoint of {saved} steps, but {used}: start the job again to go on from it"
    return LeaderDecision(text, result=Result(False, message))
