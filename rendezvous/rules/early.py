"""What a job does about failures before its first step has committed, where nothing is lost by ending it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from elaunch.rendezvous.membership import Generation, NodeDoc, Result, WorkerState
from elaunch.rendezvous.rules.attempts import again
from elaunch.rendezvous.view import LeaderDecision, MembershipSettings, View

TOGETHER_S = 1.0  # so long an exception in one worker waits for the same one in the others
RESTARTS = 2
"""How often all workers start again after a death before any has registered, where --max-restarts is not given."""

_RAISED = re.compile(r"(?:^|: )([A-Za-z_][\w.]*)(?::.*)? \((\S+:\d+) in \S+\)$", re.DOTALL)
_REGISTERED = (WorkerState.READY, WorkerState.MEMBER, WorkerState.DONE)


def origin(reason: str) -> str:
    """Returns the exception and the line of a failure, `ValueError at train.py:31`; "" if it was no exception."""
    found = _RAISED.search(reason)
    return f"{found[1]} at {found[2]}" if found else ""


def common_error(reasons: Sequence[str]) -> str:
    """Returns the first of these failures if all are the same exception at the same line; "" otherwise."""
    origins = {origin(reason) for reason in reasons}
    return reasons[0] if len(origins) == 1 and "" not in origins else ""


def same_everywhere(generation: Generation, nodes: Sequence[NodeDoc]) -> LeaderDecision | None:
    """Ends the job if all workers of all nodes have raised the same exception, and no step has committed yet.

    Starting them again would end the same way.
    """
    concerned = [doc for doc in nodes if doc.workers or doc.summary.error or doc.node in generation.node_set]
    missing = generation.node_set - {doc.node for doc in concerned}
    if missing or not concerned or generation.restarts.saved is not None:
        return None
    if any(doc.progress.attempt != generation.attempt for doc in concerned):
        return None
    error = common_error([doc.summary.error for doc in concerned])
    if not error:
        return None
    text = f"every worker raised the same exception before the first step committed: {error}"
    return LeaderDecision(text, result=Result(False, text))


def restart_whole(
    view: View, generation: Generation, nodes: Sequence[NodeDoc], now_s: float, settings: MembershipSettings
) -> LeaderDecision | None:
    """Starts all workers again where one died before any had registered, as torchrun does.

    The others may wait for it in a process group of the script, which a single new worker could not enter.
    """
    deaths = [
        (doc.cause_t, doc.summary.early_death)
        for doc in nodes
        if doc.summary.early_death and doc.progress.attempt == generation.attempt
    ]
    if not deaths or any(worker.state in _REGISTERED for doc in nodes for worker in doc.workers):
        return None
    cause = min(deaths)[1]
    end_s = view.changed_s + TOGETHER_S
    if origin(cause) and now_s < end_s:
        return LeaderDecision("others may raise the same exception", wake_s=end_s)
    count, limit = generation.restarts.count, settings.max_restarts
    if count < (RESTARTS if limit is None else limit):
        return LeaderDecision(cause, generation=again(view, generation, cause, min(deaths)[0], failure=True))
    if limit is None:
        return None  # only its slot starts another worker, until that has died too often
    used = f"no worker had called register() yet; after {count} of {limit} restarts"
    return LeaderDecision(cause, result=Result(False, f"{cause} ({used})"))
