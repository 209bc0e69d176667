from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.membership import NodeDoc, NodeProgress, NodeWorker, WorkerState
from elaunch.rendezvous.node.ends import PAUSES_S, WorkerEnds
from elaunch.rendezvous.store import Entry

LOST = "a/0#0"


class Job:
    """The store, as a session shows it, and who listens."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.docs: dict[str, bytes] = {}
        self.ended: list[tuple[str, int]] = []
        self.reads = 0
        self.ends = WorkerEnds(self, self, lambda: self.now_s)  # type: ignore[arg-type]

    def get(self, name: str) -> Entry | None:
        self.reads += 1
        return Entry(name, self.docs[name], 3, 2) if name in self.docs else None

    def worker_ended(self, worker: str, logged: int) -> None:
        self.ended.append((worker, logged))

    def says(
        self, logged: int, *workers: str, state: WorkerState = WorkerState.MEMBER, liveness_address: str = ""
    ) -> None:
        listed = tuple(NodeWorker(one, 0, state, f"{one}:1") for one in workers)
        doc = NodeDoc("a", "a", 1, listed, progress=NodeProgress(logged=logged))
        self.docs["nodes/a"] = to_json(replace(doc, liveness_address=liveness_address))

    def look(self) -> list[tuple[str, int]]:
        self.now_s = max(self.now_s, self.ends.due_s) if self.ends.due_s < 1e9 else self.now_s
        self.ends.turn()
        return self.ended


@pytest.fixture
def job() -> Job:
    return Job()


def test_nothing_is_read_while_nobody_is_awaited(job: Job) -> None:
    job.look()
    job.ends.await_end(LOST)
    job.ends.await_end("")
    job.look()
    assert job.reads == 0


def test_the_end_is_told_once_the_report_is_without_the_worker(job: Job) -> None:
    job.says(3, LOST)
    job.ends.await_end(LOST)
    for _ in range(20):
        assert job.look() == []
    assert job.ends.due_s - job.now_s == pytest.approx(PAUSES_S[1])
    job.says(6, "a/0#1")
    assert job.look() == [(LOST, 6)]
    job.look()
    assert job.ended == [(LOST, 6)]


def test_a_node_that_is_gone_tells_nothing_of_its_log(job: Job) -> None:
    job.ends.await_end(LOST)
    assert job.look() == [(LOST, 0)]


def test_a_damaged_report_is_read_until_the_node_has_written_it_again(job: Job) -> None:
    job.docs["nodes/a"] = b"{"
    job.ends.await_end(LOST)
    assert job.look() == []
    job.says(6)
    assert job.look() == [(LOST, 6)]


def test_an_agent_that_is_dead_is_not_waited_for_until_its_lease_ends(job: Job) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        job.says(3, LOST, liveness_address=address)
        job.ends.await_end(LOST)
        assert job.look() == []
    assert job.look() == [(LOST, 3)]


def test_one_that_has_finished_reports_nothing_more(job: Job) -> None:
    job.says(8, LOST, state=WorkerState.DONE)
    job.ends.await_end(LOST)
    assert job.look() == [(LOST, 8)]
