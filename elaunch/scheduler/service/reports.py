"""What running jobs say of themselves in etcd, and what the scheduler asks of them: to give nodes back."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from elaunch.rendezvous.membership import DrainRequest, GenerationStage, JobSize
from elaunch.rendezvous.observer import Documents, Observer
from elaunch.rendezvous.store import Store

REASON = "elaunch schedule"
SIZE_S = 30.0  # for which a request for another number of nodes stands


@dataclass(frozen=True, slots=True)
class JobReport:
    """What a job says of itself.

    Attributes:
        here: its nodes, by the names that they have in the job.
        working: those of the generation that trains.
        draining: those that leave.
        plain: its workers run, and none has called elaunch.
        step: the newest step that is known to have committed; -1: none.
        steps_per_s: 0: not known.
        devices: of the workers that train.
        nnodes: the least and the most nodes that it has; None: not known.
        profile: the text of what it has measured; empty: nothing yet.
        ended: it is over; `succeeded` and `message` say how.
    """

    here: frozenset[str] = frozenset()
    working: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    plain: bool = False
    step: int = -1
    steps_per_s: float = 0.0
    devices: int = 0
    nnodes: tuple[int, int] | None = None
    profile: str = ""
    ended: bool = False
    succeeded: bool = False
    message: str = ""


def report_of(documents: Documents) -> JobReport:
    """Returns the same of a job's documents."""
    generation, status, result = documents.generation, documents.status, documents.result
    trains = generation is not None and generation.stage is GenerationStage.TRAIN
    here = frozenset(doc.node for doc in documents.nodes)
    return JobReport(
        here=here,
        working=frozenset(generation.nodes) & here if generation is not None and trains else frozenset(),
        draining=frozenset(doc.node for doc in documents.nodes if doc.draining),
        plain=generation is not None
        and generation.stage not in (GenerationStage.TRAIN, GenerationStage.ASSEMBLE)
        and not any(doc.summary.elastic for doc in documents.nodes),
        step=-1 if status is None else status.step,
        steps_per_s=0.0 if status is None else status.steps_per_s,
        devices=len(generation.working) if generation is not None and trains else 0,
        nnodes=documents.nnodes,
        profile=documents.profile,
        ended=result is not None,
        succeeded=result is not None and result.succeeded,
        message="" if result is None else result.message,
    )


class JobReports(Protocol):
    """The jobs, as the scheduler needs them. Calls raise `StoreUnavailable`."""

    def look(self, jobs: Collection[str]) -> dict[str, JobReport]:
        """Returns what these jobs say of themselves now."""

    def ask_to_leave(self, job: str, nodes: Collection[str], timeout_s: float) -> None:
        """Asks nodes of a job to leave at a step boundary; the request stands for `timeout_s`."""

    def ask_size(self, job: str, least: int, most: int) -> None:
        """Asks a job to have another number of nodes."""


class StoredReports:
    """Jobs whose rendezvous is in the scheduler's own etcd.

    Args:
        store: that etcd.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._observers: dict[str, Observer] = {}

    def look(self, jobs: Collection[str]) -> dict[str, JobReport]:
        """Follows these jobs, and no others any more."""
        for job in set(self._observers).difference(jobs):
            self._observers.pop(job).close()
        found = {}
        for job in jobs:
            observer = self._observers.get(job)
            if observer is None:
                observer = self._observers[job] = Observer(self._store, job)
            now_s = time.monotonic()
            while observer.wait(now_s):
                pass
            found[job] = report_of(observer.documents)
        return found

    def ask_to_leave(self, job: str, nodes: Collection[str], timeout_s: float) -> None:
        """Puts a request for each node; those that have left or leave already are not asked."""
        documents = self._observers[job].documents
        lease = self._store.grant(timeout_s)
        for doc in documents.nodes:
            if doc.node in nodes and not doc.draining:
                self._observers[job].ask_to_drain(doc.node, DrainRequest(REASON, time.time()), lease)

    def ask_size(self, job: str, least: int, most: int) -> None:
        """Puts the request; the job's leader makes it count."""
        size = JobSize(secrets.token_hex(8), least, most, time.time())
        self._observers[job].ask_size(size, self._store.grant(SIZE_S))

    def close(self) -> None:
        """Ends all watches; the store stays open."""
        for observer in self._observers.values():
            with contextlib.suppress(Exception):
                observer.close()
        self._observers.clear()
