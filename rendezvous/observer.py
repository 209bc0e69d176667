"""A job seen from outside: its documents as they stand, and how they change. An observer takes no part in the job."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from elaunch.errors import ProtocolError, RequestRefused, StoreUnavailable
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.intake import is_ours, read_generation, read_node, read_size
from elaunch.rendezvous.membership import (
    JOBS_PREFIX,
    DrainRequest,
    Generation,
    JobConfig,
    JobSize,
    NodeDoc,
    PlanRequest,
    Result,
    job_of,
    job_prefix,
)
from elaunch.rendezvous.rules.spares import HeldSpares
from elaunch.rendezvous.status import TrainingStatus
from elaunch.rendezvous.store import Store, WatchEvent

BACK_S = 10.0
"""How long an observer that has lost its server tries to go on with it or another one: one may leave with its node."""

AGAIN_S = 0.2


@dataclass(frozen=True, slots=True)
class Documents:
    """What stands in the store of a job; `nodes` in the order in which ranks are given out.

    `profile` is what the job has measured of its layers, workers and links, in its JSON form; "": nothing yet.
    `status` is how far the training is; None: no step has committed yet.
    `spares` are the nodes that hold workers ready, or are about to.
    `unreadable` are the keys, without the job's prefix, that hold no document of the job, and why. Of those that could
    be read before, the last version is shown.
    """

    nodes: tuple[NodeDoc, ...] = ()
    generation: Generation | None = None
    result: Result | None = None
    profile: str = ""
    status: TrainingStatus | None = None
    config: JobConfig | None = None
    size: JobSize | None = None
    spares: tuple[str, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()

    @property
    def damaged(self) -> tuple[tuple[str, str], ...]:
        """Returns those of `unreadable` that are the job's own: it changes nothing until they are in order again."""
        nodes = {doc.node for doc in self.nodes}
        return tuple((name, why) for name, why in self.unreadable if is_ours(name, "", nodes, self.generation))

    @property
    def nnodes(self) -> tuple[int, int] | None:
        """Returns the least and the most nodes that the job has; None while that is not known."""
        limits = self.size or self.config
        return None if limits is None else (limits.min_nodes, limits.max_nodes)

    def node(self, name: str) -> NodeDoc | None:
        """Returns the report of a node; None: there is none."""
        return next((doc for doc in self.nodes if doc.node == name), None)


class Observer:
    """Reads the documents of a job and follows them by a watch.

    What cannot be read is passed over: `Documents.unreadable` tells of it.

    Raises:
        StoreUnavailable: the store does not answer.
    """

    def __init__(self, store: Store, job: str) -> None:
        self._store = store
        self._prefix = job_prefix(job)
        self._nodes: dict[str, NodeDoc] = {}
        self._documents = Documents()
        self._unreadable: dict[str, str] = {}
        self._begin()

    @property
    def documents(self) -> Documents:
        """Returns the documents as they were at the last `wait`."""
        return self._documents

    def wait(self, until_s: float, tell: Callable[[float], None] = lambda left_s: None) -> bool:
        """Waits for the next change, and takes it in; False when none came before `until_s` of the monotonic clock.

        Args:
            until_s: when the wait ends.
            tell: called about every second with the seconds left.

        Raises:
            StoreUnavailable: the connection was lost, and there is no other one before `until_s`, and within `BACK_S`.
        """
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            try:
                news = self._news.get(timeout=min(1.0, left_s))
                break
            except queue.Empty:
                if time.monotonic() >= until_s:
                    return False
                tell(left_s)
        if isinstance(news, StoreUnavailable):
            self._begin_again(news, min(until_s, time.monotonic() + BACK_S))
        else:
            self._take(news)
        return True

    def ask(self, request: PlanRequest, lease: int) -> None:
        """Puts a request, which stands as long as the lease does."""
        self._store.put(f"{self._prefix}requests/plan", to_json(request), lease)

    def ask_size(self, size: JobSize, lease: int) -> None:
        """Asks for another number of nodes; what counts by then stays when the lease has ended."""
        self._store.put(f"{self._prefix}requests/size", to_json(size), lease)

    def ask_to_drain(self, node: str, request: DrainRequest, lease: int) -> None:
        """Asks a node to leave, as long as the lease lasts."""
        self._store.put(f"{self._prefix}requests/drain/{node}", to_json(request), lease)

    def close(self) -> None:
        """Ends the watch; the store stays open."""
        self._watch.cancel()

    def _begin(self) -> None:
        """Reads all documents as they stand, and follows them from then on."""
        self._news: queue.SimpleQueue[list[WatchEvent] | StoreUnavailable] = queue.SimpleQueue()
        entries, revision = self._store.range(self._prefix)
        gone = {self._prefix + name for name in self._nodes} - {entry.key for entry in entries}
        self._take(
            [
                *(WatchEvent(key, None, revision, 0) for key in gone),
                *(WatchEvent(entry.key, entry.value, entry.revision, entry.created) for entry in entries),
            ]
        )
        self._watch = self._store.watch(self._prefix, revision + 1, self._news.put, self._news.put)

    def _begin_again(self, why: StoreUnavailable, until_s: float) -> None:
        self._watch.cancel()
        while True:
            try:
                return self._begin()
            except StoreUnavailable:
                if time.monotonic() + AGAIN_S >= until_s:
                    raise why from None
            time.sleep(AGAIN_S)

    def _take(self, events: list[WatchEvent]) -> None:
        for event in events:
            name = event.key.removeprefix(self._prefix)
            self._unreadable.pop(name, None)
            try:
                self._take_one(name, event)
            except ProtocolError as error:
                self._unreadable[name] = str(error)
        nodes = sorted(self._nodes.values(), key=lambda doc: (doc.rank, doc.order, doc.node))
        self._documents = replace(
            self._documents, nodes=tuple(nodes), unreadable=tuple(sorted(self._unreadable.items()))
        )

    def _take_one(self, name: str, event: WatchEvent) -> None:
        value = event.value
        if name.startswith("nodes/"):
            if value is None:
                self._nodes.pop(name, None)
            else:
                self._nodes[name] = read_node(name.removeprefix("nodes/"), value, event.created)
        elif name == "generation":
            self._documents = replace(self._documents, generation=None if value is None else read_generation(value))
        elif name == "result":
            result = None if value is None else from_json(Result, value)
            self._documents = replace(self._documents, result=result)
        elif name == "config":
            config = None if value is None else from_json(JobConfig, value)
            self._documents = replace(self._documents, config=config)
        elif name == "size":
            if value is not None:  # it counts on where its writer has gone
                self._documents = replace(self._documents, size=read_size(value))
        elif name == "spares":
            spares = () if value is None else from_json(HeldSpares, value).nodes
            self._documents = replace(self._documents, spares=spares)
        elif name == "status":
            status = None if value is None else from_json(TrainingStatus, value)
            self._documents = replace(self._documents, status=status)
        elif name == "profile":
            self._documents = replace(self._documents, profile=(value or b"").decode(errors="replace"))


def find_jobs(store: Store, most: int) -> list[str]:
    """Returns the names of jobs that have documents in the store, at most so many, by one short request for each."""
    jobs: list[str] = []
    former, key = None, store.next_key(JOBS_PREFIX, "")
    while key is not None and key != former and len(jobs) < most:
        folder, slash, _ = key.removeprefix(JOBS_PREFIX).partition("/")
        if slash:
            jobs.append(job_of(key))
        after = f"{JOBS_PREFIX}{folder}0" if slash else f"{key}\0"  # "0" comes after "/"
        former, key = key, store.next_key(JOBS_PREFIX, after)
    return jobs


@contextlib.contextmanager
def asking(store: Store, job: str, timeout_s: float) -> Iterator[tuple[Observer, int]]:
    """Makes an observer, and a lease for what is asked for: it is withdrawn at the end."""
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
    """Raises `RequestRefused` for a job of which nothing can be asked: it has ended, is damaged, or nobody is here."""
    if documents.result is not None:
        raise RequestRefused(f"job {job!r} has ended: {documents.result.message}")
    for name, why in documents.damaged:
        key = job_prefix(job) + name
        raise RequestRefused(
            f"{key} is damaged: {why}. Job {job!r} changes nothing until it is written anew or deleted, as by "
            f"`etcdctl del {key}`"
        )
    if not documents.nodes:
        raise RequestRefused(f"no node of job {job!r} is here: check --rdzv-endpoint and --rdzv-id")
