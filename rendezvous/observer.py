"""A job seen from outside: its documents as they stand, and how they change. An observer takes no part in the job."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from elaunch.errors import RequestRefused, StoreUnavailable
from elaunch.rendezvous.membership import (
    DrainRequest,
    Generation,
    JobConfig,
    JobSize,
    NodeDoc,
    PlanRequest,
    Result,
    from_json,
    job_prefix,
    to_json,
    with_order,
)
from elaunch.rendezvous.store import Event, Store

D = TypeVar("D")


@dataclass(frozen=True, slots=True)
class Documents:
    """What stands in the store of a job; `nodes` in the order in which ranks are given out.

    `profile` is what the job has measured of its layers, workers and links, in its JSON form; "": nothing yet.
    """

    nodes: tuple[NodeDoc, ...] = ()
    generation: Generation | None = None
    result: Result | None = None
    profile: str = ""
    config: JobConfig | None = None
    size: JobSize | None = None

    @property
    def nnodes(self) -> tuple[int, int] | None:
        """The least and the most nodes that the job has."""
        limits = self.size or self.config
        return None if limits is None else (limits.min_nodes, limits.max_nodes)

    def node(self, name: str) -> NodeDoc | None:
        return next((doc for doc in self.nodes if doc.node == name), None)


class Observer:
    """Reads the documents of a job and follows them by a watch.

    Raises:
        StoreUnavailable: the store does not answer.
        ProtocolError: the job is of another version of elaunch.
    """

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._prefix = job_prefix(job)
        self._nodes: dict[str, NodeDoc] = {}
        self._documents = Documents()
        self._news: queue.SimpleQueue[list[Event] | StoreUnavailable] = queue.SimpleQueue()
        entries, revision = store.range(self._prefix)
        self._take([Event(entry.key, entry.value, entry.revision, entry.created) for entry in entries])
        self._watch = store.watch(self._prefix, revision + 1, self._news.put, self._news.put)

    @property
    def documents(self) -> Documents:
        """As they were at the last `wait`."""
        return self._documents

    def wait(self, until_s: float) -> bool:
        """Wait for the next change, and take it in; False when none came before `until_s` of the monotonic clock.

        Raises:
            StoreUnavailable: the connection was lost.
            ProtocolError: a document of another version.
        """
        try:
            news = self._news.get(timeout=max(0.0, until_s - time.monotonic()))
        except queue.Empty:
            return False
        if isinstance(news, StoreUnavailable):
            raise news
        self._take(news)
        return True

    def ask(self, request: PlanRequest, lease: int) -> None:
        """Put a request, which stands as long as the lease does."""
        self._store.put(f"{self._prefix}requests/plan", to_json(request), lease)

    def ask_size(self, size: JobSize, lease: int) -> None:
        """Ask for another number of nodes; what counts by then stays when the lease has ended."""
        self._store.put(f"{self._prefix}requests/size", to_json(size), lease)

    def ask_to_drain(self, node: str, request: DrainRequest, lease: int) -> None:
        """Ask a node to leave, as long as the lease lasts."""
        self._store.put(f"{self._prefix}requests/drain/{node}", to_json(request), lease)

    def close(self) -> None:
        """End the watch; the store stays open."""
        self._watch.cancel()

    def _take(self, events: list[Event]) -> None:
        for event in events:
            name = event.key.removeprefix(self._prefix)
            if name.startswith("nodes/"):
                doc = _read(NodeDoc, event.value)
                if doc is None:
                    self._nodes.pop(name, None)
                else:
                    self._nodes[name] = with_order(doc, event.created)
            elif name == "generation":
                self._documents = replace(self._documents, generation=_read(Generation, event.value))
            elif name == "result":
                self._documents = replace(self._documents, result=_read(Result, event.value))
            elif name == "config":
                self._documents = replace(self._documents, config=_read(JobConfig, event.value))
            elif name == "size":
                # It counts on where its writer has gone.
                self._documents = replace(self._documents, size=_read(JobSize, event.value) or self._documents.size)
            elif name == "profile":
                self._documents = replace(self._documents, profile=(event.value or b"").decode())
        nodes = sorted(self._nodes.values(), key=lambda doc: (doc.rank, doc.order, doc.node))
        self._documents = replace(self._documents, nodes=tuple(nodes))


@contextlib.contextmanager
def asking(store: Store, job: str, timeout_s: float) -> Iterator[tuple[Observer, int]]:
    """An observer, and a lease for what is asked for: it is withdrawn at the end."""
    observer = Observer(store, job)
    lease: int | None = None
    try:
        lease = store.grant(timeout_s + 1.0)
        yield observer, lease
    finally:
        observer.close()
        if lease is not None:
            with contextlib.suppress(StoreUnavailable):  # it runs out by itself
                store.revoke(lease)


def check_runs(job: str, documents: Documents) -> None:
    """Raise `RequestRefused` for a job of which nothing can be asked: it has ended, or nobody is here."""
    if documents.result is not None:
        raise RequestRefused(f"job {job!r} has ended: {documents.result.message}")
    if not documents.nodes:
        raise RequestRefused(f"no node of job {job!r} is here: check --rdzv-endpoint and --rdzv-id")


def _read(kind: type[D], value: bytes | None) -> D | None:
    return None if value is None else from_json(kind, value)
