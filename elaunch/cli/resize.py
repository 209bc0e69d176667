"""Asking nodes to leave a job that runs, and asking a job to have another number of nodes.

    DrainRequest, leased -> the node drains -> it is gone
    JobSize, leased -> the leader makes it count -> nodes too many are asked to drain, those that wait find a place

All but `drain` and `resize` is pure.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Sequence

from elaunch.errors import RequestRefused
from elaunch.ranges import parse_range
from elaunch.rendezvous.membership import DrainRequest, JobSize, names_text
from elaunch.rendezvous.observer import Documents, Observer, asking, check_runs
from elaunch.rendezvous.rules.spares import standby_nodes
from elaunch.rendezvous.store import Store
from elaunch.waits import Watched


def leavers(job: str, documents: Documents, nodes: Sequence[str], all_of_it: bool) -> tuple[str, ...]:
    """Returns the nodes that are to leave, of those that are here.

    Args:
        job: its name, for messages.
        documents: of the job.
        nodes: their names.
        all_of_it: every node, so the job ends.

    Raises:
        RequestRefused: the job has ended, a node is not here, or nobody would be left and not all are meant.
    """
    check_runs(job, documents)
    here = [doc.node for doc in documents.nodes]
    if all_of_it:
        return tuple(here)
    strange = [node for node in nodes if node not in here]
    if strange:
        raise RequestRefused(f"job {job!r} has no node {names_text(strange)}; here are {names_text(here)}")
    generation = documents.generation
    # While the nodes meet again, each that waits may go on.
    working = generation.nodes if generation is not None and generation.nodes else here
    if set(working) <= set(nodes):
        raise RequestRefused(
            f"{names_text(list(nodes))} would leave nobody to go on with job {job!r}: name fewer nodes, or end the job "
            "at a step boundary with --all"
        )
    return tuple(dict.fromkeys(nodes))


def limits_of(job: str, documents: Documents, text: str) -> tuple[int, int]:
    """Returns the least and the most nodes that N or MIN:MAX asks for; with N alone, the least stays as far as it can.

    Raises:
        RequestRefused: the job has ended.
        UsageError: it is neither.
    """
    check_runs(job, documents)
    least, most = parse_range(text, "elaunch ctl resize")
    now = documents.nnodes
    if ":" not in text and now is not None:
        least = min(now[0], most)
    return least, most


def drain(store: Store, job: str, nodes: Sequence[str], all_of_it: bool, reason: str, timeout_s: float) -> str:
    """Asks nodes to leave at a step boundary, and waits until they are gone.

    Returns:
        A line for the user.

    Raises:
        RequestRefused: a node is not here, nobody would be left, or the time is up.
        StoreUnavailable: the store does not answer.
    """
    begin_s = time.monotonic()
    with asking(store, job, timeout_s) as (observer, lease):
        asked = leavers(job, observer.documents, nodes, all_of_it)
        for node in asked:
            observer.ask_to_drain(node, DrainRequest(reason, time.time()), lease)
        joined = {doc.node: doc.order for doc in observer.documents.nodes}

        def staying() -> list[str]:
            # One of the same name that came later is another one.
            now = {doc.node: doc.order for doc in observer.documents.nodes}
            return [node for node in asked if now.get(node) == joined[node]]

        if not _waited(observer, lambda: not staying(), begin_s + timeout_s, "the nodes to leave"):
            raise RequestRefused(
                f"{names_text(staying())} of job {job!r} has not left within {timeout_s:g} s; what was asked to leave "
                "still does, see `elaunch ctl status`"
            )
        documents = observer.documents
    return f"{_have_left(asked)}, {time.monotonic() - begin_s:.2f} s after it was asked for; {_rest(job, documents)}"


def resize(store: Store, job: str, text: str, timeout_s: float) -> str:
    """Asks a job to have another number of nodes, and waits until those too many are gone.

    Returns:
        A line for the user.

    Raises:
        RequestRefused: the job has ended, or the time is up.
        UsageError: the number is none.
        StoreUnavailable: the store does not answer.
    """
    begin_s = time.monotonic()
    with asking(store, job, timeout_s) as (observer, lease):
        before = [doc.node for doc in observer.documents.nodes]
        least, most = limits_of(job, observer.documents, text)
        size = JobSize(secrets.token_hex(8), least, most, time.time())
        observer.ask_size(size, lease)

        def done() -> bool:
            documents = observer.documents
            counts = documents.size is not None and documents.size.id == size.id
            working, standby = _working(documents)
            is_so = len(working) == most if standby else len(working) <= most
            return counts and is_so and not any(doc.draining for doc in documents.nodes)

        if not _waited(observer, done, begin_s + timeout_s, "the job to have that many nodes"):
            counts = observer.documents.size is not None and observer.documents.size.id == size.id
            n_nodes = len(_working(observer.documents)[0])
            what = f"has {n_nodes} nodes still" if counts else "has not taken up the request"
            raise RequestRefused(f"job {job!r} {what}, after {timeout_s:g} s; see `elaunch ctl status`")
        documents = observer.documents
    gone = [node for node in before if documents.node(node) is None]
    nodes = f"{least} to {most} nodes" if least < most else f"{most} node{'' if most == 1 else 's'}"
    left = f"; {_have_left(gone)}" if gone else ""
    return f"job {job} has {nodes} from now on{left}; {_rest(job, documents)}"


def _waited(observer: Observer, done: Callable[[], bool], until_s: float, what: str) -> bool:
    """Waits until something is so, or the job has ended; False when the time is up before."""
    watched = Watched(say)
    while not done() and observer.documents.result is None:
        if not observer.wait(until_s, lambda left_s: watched.tell(what, left_s)):
            return False
    return True


def say(line: str) -> None:
    """Tells the user what is waited for; what a command answers is on standard output."""
    print(f"elaunch ctl: {line}", file=sys.stderr, flush=True)


def _have_left(nodes: Sequence[str]) -> str:
    return f"{names_text(list(nodes))} {'has' if len(nodes) == 1 else 'have'} left"


def _rest(job: str, documents: Documents) -> str:
    """Who goes on."""
    if documents.result is not None:
        return f"job {job} has ended: {documents.result.message}"
    (working, standby), limits = _working(documents), documents.nnodes
    waiting = [doc.node for doc in documents.nodes if doc.node not in (*working, *standby)]
    if not documents.nodes:
        return f"nobody is left of job {job}"
    text = f"{names_text(working) or 'nobody'} {'goes' if len(working) < 2 else 'go'} on"
    if standby:
        text += f", {names_text(standby)} {'is' if len(standby) == 1 else 'are'} on standby"
    if waiting:
        text += f", {names_text(waiting)} {'waits' if len(waiting) == 1 else 'wait'}"
    if limits is not None and len(documents.nodes) < limits[0]:
        text += f"; with fewer than {limits[0]} nodes the job keeps its state and waits for more"
    return text


def _working(documents: Documents) -> tuple[list[str], list[str]]:
    """Returns the nodes of the newest generation that are here: those that work, and those on standby."""
    generation = documents.generation
    here = [doc.node for doc in documents.nodes if generation is not None and doc.node in generation.node_set]
    idle = standby_nodes(generation) if generation is not None else ()
    return [node for node in here if node not in idle], [node for node in here if node in idle]
