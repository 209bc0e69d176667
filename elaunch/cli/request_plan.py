"""Asking a job that runs to go on by another execution plan.

    able, fitted -> PlanRequest, leased -> the leader's generation that carries it -> each node says that it has settled

All but `change_plan` is pure. The request is made for the members of one generation. Where they change before the
leader has taken it up, it is made anew for those that are there then, or refused if it does not fit them.
"""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from elaunch.cli.resize import say
from elaunch.errors import RequestRefused
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.membership import (
    Generation,
    GenerationStage,
    PlanRequest,
    RequestedPlan,
    WorkerState,
    names_text,
)
from elaunch.rendezvous.observer import Documents, asking, check_runs
from elaunch.rendezvous.store import Store
from elaunch.waits import Watched

if TYPE_CHECKING:
    from elaunch.plan import Plan

MOST_BYTES = 1_000_000  # of a generation; etcd by default takes 1.5 MiB


def fitted(plan: Plan, members: Sequence[str]) -> Plan:
    """Returns the same plan for these members: names that are none of them stand, in order, for the members without a
    name.

    So a plan may name its workers in any way: these are then the members in the order of their ranks.

    Raises:
        RequestRefused: it is for another number of workers.
    """
    if len(plan.workers) != len(members):
        raise RequestRefused(
            f"the plan is for {len(plan.workers)} workers ({names_text(plan.workers)}) and the job has {len(members)} "
            f"({names_text(members)}); give one for {len(members)}; its line 'idle ...' names those without a tile"
        )
    here, named = set(members), set(plan.workers)
    strange = [worker for worker in plan.workers if worker not in here]
    free = [member for member in members if member not in named]
    return plan.renamed(dict(zip(strange, free, strict=True)))


class RequestState(enum.Enum):
    """How far a request for a plan has come."""

    OPEN = "the leader has not taken it up yet"
    VOID = "it was made for another generation, or not yet"
    CARRIED = "the members change over"
    SETTLED = "all members have changed over"


def standing(documents: Documents, request: PlanRequest) -> RequestState:
    """Returns how far it has come in a job that has not ended."""
    generation = documents.generation
    if generation is None or generation.plan_request != request.id:
        return (
            RequestState.OPEN
            if generation is not None and generation.number == request.generation
            else RequestState.VOID
        )
    return RequestState.SETTLED if generation.workers and not still_changing(documents) else RequestState.CARRIED


def still_changing(documents: Documents) -> list[str]:
    """Returns the nodes whose members have not settled what the generation carries."""
    generation = documents.generation
    if generation is None:
        return []
    settled = {doc.node for doc in documents.nodes if doc.progress.plan_request == generation.plan_request}
    return [node for node in generation.nodes if node not in settled]


def able(job: str, documents: Documents) -> Generation:
    """Returns the generation of a job whose members can go over to another plan.

    Raises:
        RequestRefused: it does not train, or no more.
    """
    check_runs(job, documents)
    generation = documents.generation
    states = {worker.id: worker.state for doc in documents.nodes for worker in doc.workers}
    if generation is None or generation.stage is not GenerationStage.TRAIN:
        elastic = any(doc.summary.elastic for doc in documents.nodes)
        if generation is not None and generation.stage is GenerationStage.START and not elastic:
            raise RequestRefused(
                f"no worker of job {job!r} has called elaunch.hybrid(): a plain script takes no plan, and one that "
                "still starts takes it when it trains"
            )
        raise RequestRefused(
            f"job {job!r} has not begun to train; ask again when `elaunch ctl status` says that it does"
        )
    if not any(doc.summary.takes_plans for doc in documents.nodes):
        raise RequestRefused(f"job {job!r} takes no plan: its workers call elaunch.init(), not elaunch.hybrid()")
    if generation.hold:
        raise RequestRefused(f"job {job!r} waits for nodes; ask again when it trains")
    if WorkerState.DONE in states.values():
        raise RequestRefused(f"job {job!r} has done its last step")
    new = [worker for worker in generation.ids if states.get(worker) is not WorkerState.MEMBER]
    if new:
        raise RequestRefused(f"{names_text(new)} of job {job!r} do not hold the state yet; ask again in a moment")
    return generation


def change_plan(store: Store, job: str, plan: Plan, timeout_s: float) -> str:
    """Asks the members to go on by this plan, and waits until they do.

    The request is leased: what was not taken up in time, or by a job whose members have become too few, is withdrawn.

    Returns:
        A line for the user.

    Raises:
        RequestRefused: the plan does not fit the job, the job cannot take one, or the time is up.
        StoreUnavailable: the store does not answer.
    """
    begin_s = time.monotonic()
    request = PlanRequest(secrets.token_hex(8), 0, "", time.time())
    carried, watched = False, Watched(say)
    with asking(store, job, timeout_s) as (observer, lease):
        while True:
            documents = observer.documents
            if carried and documents.result is not None:
                raise RequestRefused(f"job {job!r} ended while its members changed over: {documents.result.message}")
            stands = standing(documents, request)
            if stands is RequestState.SETTLED:
                break
            if carried and stands is not RequestState.CARRIED:
                raise RequestRefused(_dropped(job, documents))
            carried = stands is RequestState.CARRIED
            if stands is RequestState.VOID:
                asked = able(job, documents)
                request = replace(request, generation=asked.number, plan=str(fitted(plan, asked.ids)))
                _check_size(request, asked)
                observer.ask(request, lease)
            if not observer.wait(
                begin_s + timeout_s, lambda left_s: watched.tell("the members to change over", left_s)
            ):
                raise RequestRefused(_late(job, documents, carried, timeout_s))
    generation = documents.generation
    assert generation is not None
    took_s = time.monotonic() - begin_s
    who = "the only member has" if len(generation.ids) == 1 else f"all {len(generation.ids)} members have"
    return f"generation {generation.number}: {who} changed over, {took_s:.2f} s after the plan was asked for"


def _check_size(request: PlanRequest, generation: Generation) -> None:
    """A generation that etcd refuses would end the leader, and the job with it."""
    size_bytes = len(to_json(replace(generation, requested_plan=RequestedPlan(request.plan, request.id))))
    if size_bytes > MOST_BYTES:
        raise RequestRefused(
            f"with this plan a generation has {size_bytes} bytes, and etcd takes {MOST_BYTES}; "
            "give one with fewer tiles, or longer runs of slots"
        )


def _dropped(job: str, documents: Documents) -> str:
    generation = documents.generation
    if generation is not None and generation.plan_request:
        return f"another plan was asked for before the members of job {job!r} had gone over to this one"
    return f"job {job!r} was started again from the top, which drops the plan; ask again when it trains"


def _late(job: str, documents: Documents, carried: bool, timeout_s: float) -> str:
    if not carried:
        return f"no agent of job {job!r} has taken up the request within {timeout_s:g} s; it is withdrawn"
    assert documents.generation is not None
    return (
        f"generation {documents.generation.number} of job {job!r} carries the plan, but the members on "
        f"{names_text(still_changing(documents))} have not changed over within {timeout_s:g} s; they may yet, "
        "see `elaunch ctl status`"
    )
