"""Where torchrun 2.13 breaks: one or more tests for each numbered defect, asserting what is right."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.conftest import JOBS, Launcher
from tests.conformance.jobs.node_crew import HOST, Crew, assert_gone, is_listening, talks_to
from tests.helpers import ROOT, Spawner

# A lost node is to be seen after three seconds, and a store that says nothing is given up after ten. What torchrun does
# not know: these scripts never call elaunch.init(), and a node that joins need not wait for it.
QUICK = (
    "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,read_timeout=10,attach_timeout=1"
)
SOON_S = 30.0


@pytest.fixture
def crew(launch: Launcher, tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(launch, tmp_path / "crew")
    yield crew
    crew.release()


@pytest.fixture
def meet(free_port: int) -> list[str]:
    """The flags that lead all nodes to one place."""
    return ["--rdzv-backend=c10d", f"--rdzv-endpoint={HOST}:{free_port}", "--rdzv-id=job", QUICK]


def start_host(crew: Crew, port: int, *flags: object, script: list[str] | None = None) -> None:
    """Start node `a`, and wait until it hosts the rendezvous."""
    crew.start("a", *flags, script=script)
    crew.wait(lambda: is_listening(port), "the first node to host the rendezvous")


class TestDefect1:
    @pytest.mark.defect("1: new workers read addresses of dead ones from the store of the attempt before")
    def test_a_gloo_job_comes_back_from_a_worker_failure(self, crew: Crew) -> None:
        flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
        # elaunch has torch imported once for the four workers; torchrun knows nothing of this.
        env = {"ELAUNCH_WARM_START": "1"}
        crew.start("a", *flags, env=env, script=[JOBS / "node_ddp.py", crew.folder])
        assert crew.codes(limit_s=110) == [0]
        sums = [(crew.folder / f"{rank}.sum").read_text() for rank in (0, 1)]
        assert sums[0] == sums[1]


class TestDefect2:
    @pytest.mark.defect("2: rank 0 does not announce its address to a node that joins")
    def test_all_nodes_agree_on_the_master_when_a_node_joins(self, crew: Crew, meet: list[str], free_port: int) -> None:
        flags = [*meet, "--nnodes=1:2"]
        start_host(crew, free_port, *flags)
        self.join(crew, *flags)

    @pytest.mark.defect("2: when the node that joins becomes rank 0, nodes disagree on the master")
    def test_all_nodes_agree_on_the_master_when_the_joining_node_may_be_rank_0(
        self, crew: Crew, meet: list[str], free_port: int
    ) -> None:
        # torchrun ranks nodes by their addresses as text.
        flags = [*meet, "--nnodes=1:2"]
        start_host(crew, free_port, *flags, "--local-addr=127.0.0.9")
        self.join(crew, *flags, "--local-addr=127.0.0.1")

    def join(self, crew: Crew, *flags: object) -> None:
        first = crew.together(1)
        crew.start("b", *flags)
        second = crew.together(2, without=first)
        assert len({worker.master for worker in second}) == 1
        for worker in second:
            assert worker["TORCHELASTIC_USE_AGENT_STORE"] == "False" or worker.unreachable == ""
        crew.order(0)
        assert crew.codes() == [0, 0]

    @pytest.mark.defect("2: a replacement node is not told of the master")
    def test_a_node_that_is_lost_can_be_replaced(self, crew: Crew, meet: list[str], free_port: int) -> None:
        flags = [*meet, "--nnodes=2", "--max-restarts=3"]
        start_host(crew, free_port, *flags)
        crew.start("b", *flags)
        first = crew.together(2)
        crew.kill_node("b")
        crew.start("c", *flags)
        second = crew.together(2, without=first)
        assert {worker.node for worker in second} == {"a", "c"}
        assert len({worker.master for worker in second}) == 1
        crew.order(0)
        assert crew.codes("a", "c") == [0, 0]


class TestDefect3:
    @pytest.mark.defect("3: only the node whose worker failed counts the restart")
    def test_the_restart_count_is_the_same_on_all_nodes(self, crew: Crew, meet: list[str]) -> None:
        for node in ("a", "b"):
            crew.start(node, *meet, "--nnodes=2", "--max-restarts=2")
        first = crew.together(2)
        crew.order(3, first[1])
        second = crew.together(2, without=first)
        assert [worker["TORCHELASTIC_RESTART_COUNT"] for worker in second] == ["1", "1"]

    @pytest.mark.defect("3: each node has max-restarts of its own")
    def test_max_restarts_counts_for_the_job(self, crew: Crew, meet: list[str]) -> None:
        for node in ("a", "b"):
            crew.start(node, *meet, "--nnodes=2", "--max-restarts=1")
        first = crew.together(2)
        crew.order(3, first[0])
        second = crew.together(2, without=first)
        crew.order(3, next(worker for worker in second if worker.node != first[0].node))

        def over() -> bool:
            known = {worker.pid for worker in first + second}
            ended = all(node.process.poll() is not None for node in crew.nodes.values())
            return ended or any(worker.pid not in known for worker in crew.reports())

        crew.wait(over, "the end of the job, or a third attempt")
        assert len(crew.reports()) == 4, "a third attempt was made"
        assert crew.codes() == [1, 1]


class TestDefect4:
    @pytest.mark.defect("4: the folder of attempt 0 is deleted when attempt 0 starts again after a membership change")
    def test_logs_from_before_a_membership_change_are_still_there(
        self, crew: Crew, meet: list[str], tmp_path: Path
    ) -> None:
        # torchrun does not get as far with the store of the launcher: defect 2.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        flags = [*meet, "--nnodes=1:2", f"--log-dir={tmp_path / 'logs'}", "--redirects=3"]
        crew.start("a", *flags, env=env)
        first = crew.together(1)
        crew.start("b", *flags, env=env)
        second = crew.together(2, without=first)
        crew.order(0)
        assert crew.codes() == [0, 0]
        logs = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
        for worker in second + first:
            assert any(f"worker {worker.pid} of node {worker.node}\n" in log for log in logs)


class TestDefect5:
    @pytest.fixture
    def launch(self, spawn: Spawner, tmp_path: Path) -> Launcher:
        """The launcher as it starts for a user: the server of forks ends what one that fails leaves in its group."""
        return Launcher(spawn, tmp_path, warm=False)

    @pytest.mark.defect("5: SIGKILL of the launcher leaves the workers running")
    def test_no_worker_outlives_a_launcher_that_was_killed(self, crew: Crew) -> None:
        launcher = crew.start("a", "--standalone", "--nproc-per-node=2", script=["--child"])
        workers = crew.together(2)
        launcher.signal(signal.SIGKILL)
        assert_gone([worker.pid for worker in workers] + [worker.child for worker in workers])

    @pytest.mark.defect("5: grandchildren of a failed worker survive")
    def test_no_grandchild_of_a_failed_worker_survives(self, crew: Crew) -> None:
        crew.start("a", "--standalone", script=["--child"])
        (worker,) = crew.together(1)
        crew.order(3, worker)
        assert crew.codes() == [1]
        assert_gone([worker.child])

    @pytest.mark.defect("5: an expired timer kills the launcher, too, and orphans the peers")
    def test_an_expired_timer_ends_the_attempt_and_not_the_launcher(self, crew: Crew) -> None:
        flags = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
        env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
        crew.start("a", *flags, env=env, script=[JOBS / "node_timer.py", crew.folder])
        assert crew.codes(limit_s=100) == [0]
        assert {path.stem for path in crew.folder.glob("*.pid")} == {"0-0", "0-1", "1-0", "1-1"}
        assert_gone(int(path.read_text()) for path in crew.folder.glob("*.pid"))


class TestDefect6:
    @pytest.mark.defect("6: peers of a failed worker have 30 s whatever --shutdown-timeout says")
    def test_the_shutdown_timeout_holds_for_the_peers_of_a_failed_worker(self, crew: Crew) -> None:
        flags = ["--standalone", "--nproc-per-node=2", "--shutdown-timeout=2"]
        crew.start("a", *flags, script=["--deaf"])
        failing, deaf = crew.together(2)
        crew.order(3, failing)
        assert crew.codes(limit_s=80) == [1]
        _, terminated, after = crew.beats(deaf).partition("T")
        assert terminated
        # 15 s of the worker's own time, in which a busy machine only lets it do less.
        assert len(after) < 150


class TestDefect7:
    @pytest.mark.defect("7: loss of a node is not noticed until some worker fails")
    def test_loss_of_a_node_is_noticed(self, crew: Crew, meet: list[str]) -> None:
        # Started together, both are there before the last call ends, so that the job starts with them.
        conf = QUICK.replace("last_call_timeout=1", "last_call_timeout=10")
        for node, hosts in (("a", 1), ("b", 0)):
            crew.start(node, *meet, "--nnodes=1:2", "--max-restarts=3", f"{conf},is_host={hosts}")
        first = crew.together(2)
        crew.kill_node("b")
        (worker,) = crew.together(1, without=first, limit_s=SOON_S)
        assert worker.node == "a"
        crew.order(0)
        assert crew.codes("a") == [0]

    @pytest.mark.defect("7: a node that gives up but does not host the store leaves the others waiting")
    def test_a_node_that_gives_up_ends_the_others(self, crew: Crew, meet: list[str], free_port: int) -> None:
        start_host(crew, free_port, *meet, "--nnodes=2")
        crew.start("b", *meet, "--nnodes=2")
        workers = crew.together(2)
        crew.order(3, next(worker for worker in workers if worker.node == "b"))
        assert crew.codes("b") == [1]
        assert crew.codes("a", limit_s=SOON_S) == [1]
        assert_gone(worker.pid for worker in workers)


class TestDefect8:
    @pytest.mark.defect("8: a spare node dies with an AttributeError, or of the lost store, at the end of the job")
    def test_a_spare_node_ends_well_when_the_job_ends_well(self, crew: Crew, meet: list[str], free_port: int) -> None:
        start_host(crew, free_port, *meet, "--nnodes=2")
        crew.start("b", *meet, "--nnodes=2")
        workers = crew.together(2)
        spare = crew.start("spare", *meet, "--nnodes=2")
        crew.wait(lambda: talks_to(spare.pid, free_port), "the spare node to find the rendezvous")
        crew.wait_beats(workers[0], 20)
        assert spare.process.poll() is None
        crew.order(0)
        assert crew.codes("a", "b") == [0, 0]
        assert crew.codes("spare", limit_s=SOON_S) == [0]
        assert "Traceback" not in spare.text()
        assert len(crew.reports()) == 2

    @pytest.mark.defect("8: PET_STANDALONE with an empty value crashes")
    def test_an_empty_pet_standalone_is_as_none(self, crew: Crew) -> None:
        crew.order(0)
        crew.start("a", "--nproc-per-node=1", env={"PET_STANDALONE": ""})
        assert crew.codes() == [0]
        assert len(crew.reports()) == 1

    @pytest.mark.defect("8: a worker stuck in the kernel makes an unhealthy result, which exits with 0")
    def test_an_unhealthy_worker_is_a_failure(self, crew: Crew) -> None:
        env = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "2"}
        crew.start("a", "--standalone", env=env, script=[JOBS / "node_stuck.py", crew.folder])
        stuck = crew.folder / "stuck.pid"
        crew.wait(stuck.exists, "the worker")
        assert crew.codes() == [1]
        assert_gone([int(stuck.read_text())])


class TestDefect9:
    @pytest.fixture
    def nameless(self, tmp_path: Path) -> dict[str, str]:
        """An environment in which this machine's name for itself does not resolve."""
        folder = tmp_path / "nameless"
        folder.mkdir()
        name = "no-such-host.invalid"
        (folder / "sitecustomize.py").write_text(
            f"import socket\nsocket.gethostname = lambda: {name!r}\nsocket.getfqdn = lambda name='': name or {name!r}\n"
        )
        return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}

    @pytest.mark.defect("9: workers are given the name of the machine, whether or not it resolves")
    def test_a_machine_whose_name_does_not_resolve_takes_part(
        self, crew: Crew, meet: list[str], nameless: dict[str, str]
    ) -> None:
        crew.order(0)
        for node in ("a", "b"):
            crew.start(node, *meet, "--nnodes=2", env=nameless)
        assert crew.codes(limit_s=60) == [0, 0]
        assert [worker["MASTER_ADDR"] for worker in crew.reports()] == [HOST, HOST]

    def test_the_local_address_wins(self, crew: Crew, meet: list[str], nameless: dict[str, str]) -> None:
        crew.order(0)
        for node in ("a", "b"):
            crew.start(node, *meet, "--nnodes=2", "--local-addr=127.0.0.3", env=nameless)
        assert crew.codes() == [0, 0]
        assert [worker["MASTER_ADDR"] for worker in crew.reports()] == ["127.0.0.3"] * 2

    def test_a_failure_names_what_was_tried(self, launch: Launcher, free_port: int) -> None:
        endpoint = f"no-such-host.invalid:{free_port}"
        flags = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}"]
        ended = launch.run(*flags, "--rdzv-conf=join_timeout=5,read_timeout=5", JOBS / "node_worker.py")
        assert ended.code == 1
        assert "no-such-host.invalid" in ended.output
        assert str(free_port) in ended.output
