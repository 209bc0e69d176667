"""Static rendezvous: the nodes and their ranks stand on the command lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import JOBS, Launcher
from tests.conformance.jobs.node_crew import HOST, Crew, Report, assert_gone, is_listening
from tests.helpers import find_free_port

DEFAULT_PORT = 29500
TIMED_OUT = re.compile(r"(?i)tim(e|ed)[ -]?out|clients joined|failed to connect|only 1 of|missing|after \d")


@pytest.fixture
def crew(launch: Launcher, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(launch, tmp_path / "crew")
    yield crew
    crew.release()


def master(port: int) -> list[str]:
    return [f"--master-addr={HOST}", f"--master-port={port}"]


@pytest.fixture(scope="module")
def shared_port() -> int:
    return find_free_port()


@pytest.fixture(scope="module")
def workers(launch_once: Launcher, shared_port: int) -> list[Report]:
    """Of two nodes, by rank. Node 1 is started first, and has more workers, in a role of their own."""
    crew = Crew(launch_once, launch_once.folder / "two")
    crew.order(0)
    flags = ["--nnodes=2", *master(shared_port), "--max-restarts=2"]
    crew.start("one", *flags, "--node-rank=1", "--nproc-per-node=2", "--role=reader")
    crew.start("zero", *flags, "--node-rank=0", "--nproc-per-node=1", "--role=trainer")
    assert crew.codes() == [0, 0]
    return sorted(crew.reports(), key=lambda worker: worker.number("RANK"))


class TestTwoNodes:
    def test_ranks_follow_the_node_ranks_whatever_the_order_of_start(self, workers: list[Report]) -> None:
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
        found = [(worker.node, *map(worker.number, names)) for worker in workers]
        assert found == [("zero", 0, 0, 0), ("one", 1, 0, 1), ("one", 2, 1, 1)]

    def test_sizes_count_what_each_node_has(self, workers: list[Report]) -> None:
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
        assert [tuple(map(worker.number, names)) for worker in workers] == [(3, 1, 2), (3, 2, 2), (3, 2, 2)]

    def test_role_ranks_count_within_the_role(self, workers: list[Report]) -> None:
        found = [(w["ROLE_NAME"], w.number("ROLE_RANK"), w.number("ROLE_WORLD_SIZE")) for w in workers]
        assert found == [("trainer", 0, 1), ("reader", 0, 2), ("reader", 1, 2)]

    def test_workers_see_the_master_that_was_given(self, workers: list[Report], shared_port: int) -> None:
        assert {worker.master for worker in workers} == {(HOST, str(shared_port))}

    def test_the_launchers_store_is_there_if_they_say_so(self, workers: list[Report]) -> None:
        assert len({worker["TORCHELASTIC_USE_AGENT_STORE"] for worker in workers}) == 1
        for worker in workers:
            assert worker["TORCHELASTIC_USE_AGENT_STORE"] == "False" or worker.unreachable == ""

    def test_the_job_has_the_default_name_and_its_own_count_of_restarts(self, workers: list[Report]) -> None:
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
        assert {tuple(map(worker.__getitem__, names)) for worker in workers} == {("none", "0", "2")}


def test_an_endpoint_may_stand_for_the_master_flags(crew: Crew, free_port: int) -> None:
    flags = ["--nnodes=2", "--rdzv-backend=static", f"--rdzv-endpoint={HOST}:{free_port}", "--rdzv-conf=timeout=60"]
    crew.order(0)
    crew.start("one", *flags, "--node-rank=1")
    crew.start("zero", *flags, "--node-rank=0")
    assert crew.codes() == [0, 0]
    workers = sorted(crew.reports(), key=lambda worker: worker.number("RANK"))
    assert [(worker.node, worker.master) for worker in workers] == [
        ("zero", (HOST, str(free_port))),
        ("one", (HOST, str(free_port))),
    ]


def test_without_flags_the_master_is_the_loopback_interface_at_port_29500(crew: Crew) -> None:
    if is_listening(DEFAULT_PORT):
        pytest.skip(f"something else listens at port {DEFAULT_PORT}")
    crew.order(0)
    for rank in (0, 1):
        crew.start(f"node-{rank}", "--nnodes=2", f"--node-rank={rank}")
    assert crew.codes() == [0, 0]
    assert [worker.master for worker in crew.reports()] == [(HOST, str(DEFAULT_PORT))] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_too_few_nodes_end_it_after_the_timeout(crew: Crew, free_port: int, rank: int) -> None:
    crew.start("alone", "--nnodes=2", f"--node-rank={rank}", *master(free_port), "--rdzv-conf=timeout=3")
    assert crew.codes() == [1]
    assert TIMED_OUT.search(crew.nodes["alone"].text()), crew.tails()
    assert crew.reports() == []


def test_gloo_works_across_the_nodes(crew: Crew, free_port: int) -> None:
    for rank in (1, 0):
        flags = ["--nnodes=2", f"--node-rank={rank}", *master(free_port)]
        crew.start(f"node-{rank}", *flags, script=[JOBS / "node_gloo.py", crew.folder])
    assert crew.codes(limit_s=100) == [0, 0]
    assert sorted(path.read_text() for path in crew.folder.glob("*.sum")) == ["0 1", "1 1"]


@pytest.mark.defect("3: with static rendezvous only the node that failed starts its workers again")
def test_after_a_failure_all_nodes_start_again(crew: Crew, free_port: int) -> None:
    for rank in (0, 1):
        crew.start(f"node-{rank}", "--nnodes=2", f"--node-rank={rank}", *master(free_port), "--max-restarts=1")
    first = crew.together(2)
    crew.order(3, first[1])
    second = crew.together(2, without=first, limit_s=30)
    assert [worker.node for worker in second] == ["node-0", "node-1"]
    assert [worker["TORCHELASTIC_RESTART_COUNT"] for worker in second] == ["1", "1"]
    crew.order(0)
    assert crew.codes() == [0, 0]


@pytest.mark.defect("7: a node that gives up but does not host the store leaves the others waiting")
def test_a_node_that_gives_up_ends_the_others(crew: Crew, free_port: int) -> None:
    for rank in (0, 1):
        crew.start(f"node-{rank}", "--nnodes=2", f"--node-rank={rank}", *master(free_port))
    workers = crew.together(2)
    crew.order(3, workers[1])
    assert crew.codes("node-1") == [1]
    assert crew.codes("node-0", limit_s=20) == [1]
    assert_gone(worker.pid for worker in workers)
