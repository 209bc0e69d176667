"""Several nodes that meet at an endpoint which the first of them hosts (c10d)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import JOBS, Launcher
from tests.conformance.jobs.node_crew import HOST, Crew, Report, assert_gone, is_listening, talks_to
from tests.helpers import find_free_port

KEYS = (
    "join_timeout=60,last_call_timeout=1,close_timeout=30,heartbeat_timeout=5,keep_alive_interval=5,"
    "keep_alive_max_attempt=3,read_timeout=60,store_type=tcp"
)
TIMED_OUT = re.compile(r"(?i)tim(e|ed)[ -]?out|only 1 of|missing")
CLOSED = re.compile(r"(?i)closed|has ended")

# torchrun 2.13 does not survive a change of membership with the store of the launcher: defect 2.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def crew(launch: Launcher, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(launch, tmp_path / "crew")
    yield crew
    crew.release()


@pytest.fixture
def meet(free_port: int) -> list[str]:
    """The flags that lead all nodes to one place."""
    return at(free_port)


def at(port: int) -> list[str]:
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}:{port}", "--rdzv-id=job"]


@pytest.fixture(scope="module")
def workers(launch_once: Launcher) -> list[Report]:
    """By rank. Each of two nodes has two workers, in a role of their own; every key of the configuration is given."""
    crew = Crew(launch_once, launch_once.folder / "two")
    crew.order(0)
    flags = [*at(find_free_port()), "--nnodes=2", "--nproc-per-node=2", "--max-restarts=3"]
    crew.start("a", *flags, "--role=trainer", f"--rdzv-conf={KEYS},is_host=1")
    crew.start("b", *flags, "--role=reader", f"--rdzv-conf={KEYS},is_host=0")
    assert crew.codes() == [0, 0]
    return sorted(crew.reports(), key=lambda worker: worker.number("RANK"))


class TestTwoNodesOfTwoWorkers:
    def test_each_worker_has_a_rank_and_those_of_a_node_stand_together(self, workers: list[Report]) -> None:
        names = ("RANK", "LOCAL_RANK", "GROUP_RANK")
        found = [tuple(map(worker.number, names)) for worker in workers]
        assert found == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
        nodes = [worker.node for worker in workers]
        assert nodes in (["a", "a", "b", "b"], ["b", "b", "a", "a"])

    def test_sizes(self, workers: list[Report]) -> None:
        names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE")
        assert [tuple(map(worker.number, names)) for worker in workers] == [(4, 2, 2, 2)] * 4

    def test_role_ranks_count_within_the_role(self, workers: list[Report]) -> None:
        found = {(w.node, w["ROLE_NAME"], w.number("LOCAL_RANK"), w.number("ROLE_RANK")) for w in workers}
        assert found == {("a", "trainer", 0, 0), ("a", "trainer", 1, 1), ("b", "reader", 0, 0), ("b", "reader", 1, 1)}

    def test_all_see_the_same_master(self, workers: list[Report]) -> None:
        assert len({worker.master for worker in workers}) == 1

    def test_the_launchers_store_is_there_if_they_say_so(self, workers: list[Report]) -> None:
        assert len({worker["TORCHELASTIC_USE_AGENT_STORE"] for worker in workers}) == 1
        for worker in workers:
            assert worker["TORCHELASTIC_USE_AGENT_STORE"] == "False" or worker.unreachable == ""

    def test_the_job_has_the_name_that_was_given(self, workers: list[Report]) -> None:
        names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
        assert {tuple(map(worker.__getitem__, names)) for worker in workers} == {("job", "0", "3")}


def test_gloo_works_across_nodes_of_different_size(crew: Crew, meet: list[str]) -> None:
    for node, workers in (("a", 1), ("b", 2)):
        flags = [*meet, "--nnodes=2", f"--nproc-per-node={workers}"]
        crew.start(node, *flags, script=[JOBS / "node_gloo.py", crew.folder])
    assert crew.codes(limit_s=100) == [0, 0]
    assert sorted(path.read_text() for path in crew.folder.glob("*.sum")) == ["0 3", "1 3", "2 3"]


def test_too_few_nodes_end_it_after_the_join_timeout(crew: Crew, meet: list[str]) -> None:
    crew.start("a", *meet, "--nnodes=2", "--rdzv-conf=join_timeout=3")
    assert crew.codes() == [1]
    assert TIMED_OUT.search(crew.nodes["a"].text()), crew.tails()
    assert crew.reports() == []


def test_the_last_call_lets_a_job_start_below_its_maximum(crew: Crew, meet: list[str]) -> None:
    crew.start("a", *meet, "--nnodes=1:3", "--rdzv-conf=last_call_timeout=1")
    (worker,) = crew.together(1)
    assert (worker.number("GROUP_WORLD_SIZE"), worker.number("WORLD_SIZE")) == (1, 1)
    crew.order(0)
    assert crew.codes() == [0]


def test_after_a_failure_on_one_node_all_workers_are_stopped_and_the_nodes_meet_again(
    crew: Crew, meet: list[str]
) -> None:
    for node in ("a", "b"):
        crew.start(node, *meet, "--nnodes=2", "--max-restarts=2")
    first = crew.together(2)
    failing = next(worker for worker in first if worker.node == "b")
    crew.order(3, failing)
    second = crew.together(2, without=first)
    assert {worker.node for worker in second} == {"a", "b"}
    restarts = {worker.node: worker["TORCHELASTIC_RESTART_COUNT"] for worker in second}
    assert restarts["b"] == "1"
    assert len({worker.master for worker in second}) == 1
    crew.order(0)
    assert crew.codes() == [0, 0]


def test_a_host_without_restarts_left_closes_the_job_and_the_others_end_with_1(
    crew: Crew, meet: list[str], free_port: int
) -> None:
    a = crew.start("a", *meet, "--nnodes=2")
    crew.wait(lambda: is_listening(free_port), "the first node to host the rendezvous")
    crew.start("b", *meet, "--nnodes=2")
    workers = crew.together(2)
    failing = next(worker for worker in workers if worker.node == "a")
    crew.order(3, failing)
    assert crew.codes() == [1, 1]
    assert str(failing.pid) in a.text(), "the table of failures names the worker"
    assert_gone(worker.pid for worker in workers)


def test_a_late_node_is_turned_away_with_a_line(crew: Crew, meet: list[str], free_port: int) -> None:
    flags = [*meet, "--nnodes=2:3", "--rdzv-conf=last_call_timeout=1"]
    # The host is still there when the late node comes, because its worker does not end on SIGTERM.
    crew.start("a", *flags, script=["--deaf"])
    crew.wait(lambda: is_listening(free_port), "the first node to host the rendezvous")
    crew.start("b", *flags)
    workers = {worker.node: worker for worker in crew.together(2)}
    crew.order(3, workers["b"])
    assert crew.codes("b") == [1]
    late = crew.start("late", *flags)
    assert crew.codes("late") == [1]
    assert CLOSED.search(late.text()), late.tail()
    assert [worker for worker in crew.reports() if worker.node == "late"] == []
    crew.order(3, workers["a"])
    assert crew.codes("a") == [1]


def test_a_new_node_makes_everyone_start_again_without_using_a_restart(
    crew: Crew, meet: list[str], free_port: int
) -> None:
    flags = [*meet, "--nnodes=1:2", "--rdzv-conf=last_call_timeout=1,attach_timeout=1"]
    crew.start("a", *flags, env=OWN_STORE)
    first = crew.together(1)
    crew.start("b", *flags, env=OWN_STORE)
    second = crew.together(2, without=first)
    assert {worker.node for worker in second} == {"a", "b"}
    assert [worker["TORCHELASTIC_RESTART_COUNT"] for worker in second] == ["0", "0"]
    assert [worker["TORCHELASTIC_USE_AGENT_STORE"] for worker in second] == ["False", "False"]
    assert len({worker.master for worker in second}) == 1
    crew.order(0)
    assert crew.codes() == [0, 0]


def test_a_node_beyond_the_maximum_waits_and_disturbs_nobody(crew: Crew, meet: list[str], free_port: int) -> None:
    crew.start("a", *meet, "--nnodes=1:1")
    (worker,) = crew.together(1)
    spare = crew.start("spare", *meet, "--nnodes=1:1")
    crew.wait(lambda: talks_to(spare.pid, free_port), "the spare node to find the rendezvous")
    crew.wait_beats(worker, 20)
    assert spare.process.poll() is None, spare.tail()
    assert crew.reports() == [worker]
    crew.order(0)
    assert crew.codes("a") == [0]
    spare.wait(30)


def test_nodes_wait_for_each_other_at_the_end(crew: Crew, meet: list[str]) -> None:
    for node in ("a", "b"):
        crew.start(node, *meet, "--nnodes=2")
    workers = {worker.node: worker for worker in crew.together(2)}
    crew.order(0, workers["a"])
    assert_gone([workers["a"].pid])
    crew.wait_beats(workers["b"], 20)
    assert crew.nodes["a"].process.poll() is None, crew.tails()
    crew.order(0, workers["b"])
    assert crew.codes() == [0, 0]
    assert len(crew.reports()) == 2


def test_a_node_that_is_stopped_by_a_signal_ends_its_workers_only(crew: Crew, meet: list[str], free_port: int) -> None:
    # Both are there before the last call ends, so that the job starts with them.
    flags = [*meet, "--nnodes=1:2", "--max-restarts=3"]
    crew.start("a", *flags)
    crew.wait(lambda: is_listening(free_port), "the first node to host the rendezvous")
    b = crew.start("b", *flags)
    workers = {worker.node: worker for worker in crew.together(2)}
    b.end()
    assert crew.codes("b") == [1]
    assert_gone([workers["b"].pid])
    crew.wait(lambda: [worker for worker in crew.alive() if worker.node == "a"] or None, "the other node to go on")
    assert crew.nodes["a"].process.poll() is None, crew.tails()


def test_the_given_local_address_is_the_one_that_workers_see(crew: Crew, meet: list[str]) -> None:
    crew.order(0)
    for node in ("a", "b"):
        crew.start(node, *meet, "--nnodes=2", "--local-addr=127.0.0.3")
    assert crew.codes() == [0, 0]
    assert [worker["MASTER_ADDR"] for worker in crew.reports()] == ["127.0.0.3"] * 2
