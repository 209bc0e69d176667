"""Scripts that never import elaunch are run as torchrun runs them, and restarted as a whole."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.helpers import ROOT, Spawner
from tests.jobs.plain_etcd import serving
from tests.jobs.watch import Node, assert_gone, elaunch, wait_for

JOBS = ROOT / "tests" / "jobs"
PROBE, WORKER, DDP = (JOBS / f"plain_{name}.py" for name in ("probe", "worker", "ddp"))
ALONE = "--standalone"
TWO = (ALONE, "--nproc-per-node=2")
LIMIT_S = 40.0


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedEtcd]:
    with serving(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where `plain_worker.py` reports to."""
    path = tmp_path / "reports"
    path.mkdir()
    return path


def reports(folder: Path) -> list[dict[str, Any]]:
    """What workers have reported, in the order of attempts and ranks."""
    found = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return sorted(found, key=lambda report: (report["restart"], report["size"], report["rank"]))


def wait_for_reports(nodes: Node | list[Node], folder: Path, count: int) -> list[dict[str, Any]]:
    wait_for(nodes, lambda: len(reports(folder)) >= count, LIMIT_S, f"{count} workers")
    return reports(folder)


def run(spawn: Spawner, folder: Path, *command: str | Path, env: Mapping[str, str | None] | None = None) -> Node:
    """Run elaunch to a good end; `command` is flags, script and arguments."""
    agent = spawn.elaunch(*command, env=env, cwd=folder)
    node = Node(agent, folder / "none")
    assert agent.wait(LIMIT_S) == 0, agent.tail()
    return node


class TestWhatAWorkerIsGiven:
    def facts(self, folder: Path) -> list[dict[str, Any]]:
        paths = sorted(folder.glob("facts-*"), key=lambda path: int(path.name.removeprefix("facts-")))
        return [json.loads(path.read_text()) for path in paths]

    def test_torchruns_environment(self, spawn: Spawner, tmp_path: Path) -> None:
        unset = {"OMP_NUM_THREADS": None, "TORCH_NCCL_ASYNC_ERROR_HANDLING": None}
        flags = (ALONE, "--nproc-per-node=3", "--max-restarts=4")
        run(spawn, tmp_path, *flags, PROBE, tmp_path / "facts-${local_rank}", env=unset)
        environments = [facts["environment"] for facts in self.facts(tmp_path)]
        assert len(environments) == 3
        for rank, environment in enumerate(environments):
            expected = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "ROLE_RANK": rank,
                "GROUP_RANK": 0,
                "ROLE_NAME": "default",
                "WORLD_SIZE": 3,
                "LOCAL_WORLD_SIZE": 3,
                "ROLE_WORLD_SIZE": 3,
                "GROUP_WORLD_SIZE": 1,
                "MASTER_ADDR": "127.0.0.1",
                "TORCHELASTIC_RESTART_COUNT": 0,
                "TORCHELASTIC_MAX_RESTARTS": 4,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
                "OMP_NUM_THREADS": 1,
            }
            assert {name: environment.get(name) for name in expected} == {k: str(v) for k, v in expected.items()}
            assert environment["TORCHELASTIC_RUN_ID"]
        assert len({environment["MASTER_PORT"] for environment in environments}) == 1

    def test_one_worker_may_use_all_cores(self, spawn: Spawner, tmp_path: Path) -> None:
        run(spawn, tmp_path, ALONE, PROBE, "facts-0", env={"OMP_NUM_THREADS": None})
        assert "OMP_NUM_THREADS" not in self.facts(tmp_path)[0]["environment"]

    def test_what_the_user_has_set_stays(self, spawn: Spawner, tmp_path: Path) -> None:
        env = {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "OF_THE_USER": "a=b\nc"}
        run(spawn, tmp_path, *TWO, PROBE, "facts-${local_rank}", env=env)
        for facts in self.facts(tmp_path):
            assert {name: facts["environment"][name] for name in env} == env

    def test_arguments_as_they_are_but_for_the_local_rank(self, spawn: Spawner, tmp_path: Path) -> None:
        arguments = (
            "--nnodes=3:1",
            "-m",
            "--",
            "--standalone",
            "",
            "a b",
            "$LOCAL_RANK",
            "x${local_rank}${local_rank}",
        )
        run(spawn, tmp_path, *TWO, PROBE, *arguments, "facts-${local_rank}")
        for rank, facts in enumerate(self.facts(tmp_path)):
            expected = [*arguments[:-1], f"x{rank}{rank}", f"facts-{rank}"]
            assert facts["argv"] == [str(PROBE), *expected]

    def test_a_session_of_its_own_and_unbuffered_streams(self, spawn: Spawner, tmp_path: Path) -> None:
        run(spawn, tmp_path, ALONE, PROBE, "facts-0", env={"PYTHONUNBUFFERED": None})
        facts = self.facts(tmp_path)[0]
        assert facts["leads_session"]
        assert facts["leads_group"]
        assert [stream[5] for stream in facts["streams"]] == [True, True]
        assert facts["signals"]["SIGTERM"] == "0"
        assert facts["blocked"] == []
        assert facts["descriptors"] == [0, 1, 2]


class TestWhatIsRun:
    def test_a_module(self, spawn: Spawner, tmp_path: Path) -> None:
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "main.py").write_text(
            "import sys; print('module', __name__, __package__, sys.argv[1:])"
        )
        node = run(spawn, tmp_path, ALONE, "-m", "package.main", "--flag")
        assert "module __main__ package ['--flag']" in node.agent.text()

    def test_a_program(self, spawn: Spawner, tmp_path: Path) -> None:
        node = run(spawn, tmp_path, *TWO, "--no-python", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
        assert sorted(re.findall(r"rank \d of \d", node.agent.text())) == ["rank 0 of 2", "rank 1 of 2"]

    def test_another_interpreter(self, spawn: Spawner, tmp_path: Path) -> None:
        python = tmp_path / "python"
        python.write_text('#!/bin/sh\necho other "$@"\n')
        python.chmod(0o755)
        script = tmp_path / "script.py"
        script.touch()
        node = run(spawn, tmp_path, ALONE, script, "x", env={"PYTHON_EXEC": str(python)})
        assert f"other -u {script} x" in node.agent.text()

    @pytest.mark.parametrize(
        ("text", "code"),
        [("", 0), ("exit 1", 1), ("exit 3", 1), ("kill -9 $$", 1), ("test $RANK = 0", 1), ("test $RANK = 1", 1)],
    )
    def test_the_exit_code_is_one_for_any_failure(self, spawn: Spawner, tmp_path: Path, text: str, code: int) -> None:
        agent = spawn.elaunch(*TWO, "--no-python", "sh", "-c", text, cwd=tmp_path)
        assert agent.wait(LIMIT_S) == code, agent.tail()

    def test_the_early_success_of_one_is_not_the_end(self, spawn: Spawner, tmp_path: Path) -> None:
        script = "test $RANK = 1 || exit 0; until test -e go; do sleep 0.01; done; echo the last one"
        node = elaunch(spawn, tmp_path, *TWO, "--no-python", script=("sh", "-c", script))
        wait_for(node, lambda: node.events("worker_exited"), LIMIT_S, "the first to end")
        (tmp_path / "go").touch()
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        assert "the last one" in node.agent.text()


# meets.py FOLDER [once] [wait]: meets by the launcher's variables. In attempt 0, rank 0 leaves a value and dies, and
# rank 1 then reads it. `once`: both exit with 3 there; `wait`: they wait for a file `go` before that.
MEETS = """
import os, signal, sys, time
from torch.distributed import rendezvous
folder, *how = sys.argv[1:]
rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
place = os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
store, _, _ = next(rendezvous("env://"))
def told_to_end(*_):
    print("rank 1 found:", store.get("from 0").decode(), flush=True)
    os._exit(0)
if rank == 0:
    print(f"rank 0 in attempt {attempt} at {place} finds its key: {store.check(['from 0'])}", flush=True)
else:
    signal.signal(signal.SIGTERM, told_to_end)
store.set(f"from {rank}", f"of rank {rank}")
store.wait(["from 0", "from 1"])
open(os.path.join(folder, "met"), "w").close()
while "wait" in how and attempt == "0" and not os.path.exists(os.path.join(folder, "go")):
    time.sleep(0.02)
if attempt != "0":
    store.wait(["over"]) if rank == 0 else store.set("over", "")
    sys.exit(0)
if "once" in how:
    sys.exit(3)
if rank == 0:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(1)
"""


class TestRestart:
    def test_a_failure_restarts_all_workers(self, spawn: Spawner, tmp_path: Path, folder: Path) -> None:
        node = elaunch(spawn, tmp_path, *TWO, "--max-restarts=2", script=(WORKER, folder, "--fail=1:2"))
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        found = reports(folder)
        assert [(report["restart"], report["rank"]) for report in found] == [(n // 2, n % 2) for n in range(6)]
        assert len({report["pid"] for report in found}) == 6
        # What the dead had written under the old port must not be found by the new.
        assert len({report["port"] for report in found}) == 3
        assert "node0/1#0 exited with code 3: all workers are started again (attempt 1)" in node.agent.text()

    def test_it_gives_up_when_the_restarts_are_used_up(self, spawn: Spawner, tmp_path: Path, folder: Path) -> None:
        node = elaunch(spawn, tmp_path, *TWO, "--max-restarts=1", script=(WORKER, folder, "--fail=0:9"))
        assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
        assert [report["restart"] for report in reports(folder)] == [0, 0, 1, 1]
        assert re.search(r"worker node0/0#\d+ exited with code 3 \(after 1 of 1 restarts\)\n", node.agent.text())

    def test_there_is_no_restart_unless_asked_for(self, spawn: Spawner, tmp_path: Path, folder: Path) -> None:
        node = elaunch(spawn, tmp_path, *TWO, script=(WORKER, folder, "--fail=0:9"))
        assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
        assert len(reports(folder)) == 2
        assert "worker node0/0#0 exited with code 3 (after 0 of 0 restarts)" in node.agent.text()

    def test_the_first_failure_is_told_first_whichever_end_is_seen_first(self, spawn: Spawner, tmp_path: Path) -> None:
        # Rank 0 fails, and takes its time to end; rank 1 fails of that, and ends at once.
        script = tmp_path / "fails.py"
        script.write_text(
            "import json, os, sys, time\n"
            "rank, late = int(os.environ['RANK']), '1700000005'\n"
            "while rank == 1 and not os.path.exists('written'): time.sleep(0.01)\n"
            "extra = {'py_callstack': 'x', 'timestamp': late if rank else '1700000000'}\n"
            "told = {'message': {'message': f'ValueError: rank {rank}', 'extraInfo': extra}}\n"
            "open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write(json.dumps(told))\n"
            "open('written', 'w').close()\n"
            "if rank == 0: time.sleep(600)\n"
            "sys.exit(1)\n"
        )
        node = elaunch(spawn, tmp_path, *TWO, script=(script,))
        assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
        told = (
            "worker node0/0#0 failed: ValueError: rank 0, then worker node0/1#0 exited with code 1: ValueError: rank 1"
        )
        assert f"{told}\n" in node.agent.text()
        assert f"{told} (after 0 of 0 restarts)\n" in node.agent.text()
        root = node.agent.text()[node.agent.text().index("Root Cause") :]
        assert "rank      : 0 (local_rank: 0)" in root

    def test_nothing_of_the_failed_attempt_is_left(self, spawn: Spawner, tmp_path: Path, folder: Path) -> None:
        script = (WORKER, folder, "--fail=1:1", "--wait", "--child")
        node = elaunch(spawn, tmp_path, *TWO, "--max-restarts=1", script=script)
        found = wait_for_reports(node, folder, 4)
        assert_gone([report[key] for report in found[:2] for key in ("pid", "child")])
        assert all(psutil.pid_exists(report[key]) for report in found[2:] for key in ("pid", "child"))
        node.agent.signal(signal.SIGTERM)
        assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
        assert_gone([report[key] for report in found for key in ("pid", "child")])

    # In tests/conformance a script of this kind comes back in every run.
    @pytest.mark.soak
    @pytest.mark.timeout(150)
    def test_a_gloo_script_comes_back(self, spawn: Spawner, tmp_path: Path) -> None:
        node = elaunch(spawn, tmp_path, *TWO, "--max-restarts=1", script=(DDP, "--failures=1"))
        assert node.agent.wait(140) == 0, node.agent.tail()
        assert "the failure that was asked for" in node.agent.text()
        ends = re.findall(r"rank (\d) of 2 norm (\S+)", node.agent.text())
        assert sorted(rank for rank, _ in ends) == ["0", "1"]
        assert len({norm for _, norm in ends}) == 1
        assert [event["local_rank"] for event in node.events("worker_started")] == [0, 1, 0, 1]


class Cluster:
    """Agents of one job on this machine."""

    def __init__(self, spawn: Spawner, folder: Path, etcd: EmbeddedEtcd, nnodes: str, *flags: str) -> None:
        self.spawn, self.folder = spawn, folder
        # The folder is the test's own, so is the name of the job.
        self.flags = (f"--nnodes={nnodes}", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-id={folder.name}", *flags)
        self.nodes: list[Node] = []

    def add(self, name: str, *script: str | Path, workers: int = 1) -> Node:
        flags = (f"--nproc-per-node={workers}", f"--node-name={name}")
        self.nodes.append(elaunch(self.spawn, self.folder, *self.flags, *flags, script=script, name=name))
        return self.nodes[-1]


class TestNodes:
    def test_a_failure_on_one_restarts_all(
        self, spawn: Spawner, tmp_path: Path, folder: Path, etcd: EmbeddedEtcd
    ) -> None:
        cluster = Cluster(spawn, tmp_path, etcd, "2", "--max-restarts=1")
        for name, workers in (("a", 1), ("b", 2)):
            cluster.add(name, WORKER, folder, "--fail=2:1", workers=workers)
        for node in cluster.nodes:
            assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        found = reports(folder)
        assert [(report["restart"], report["rank"]) for report in found] == [(n // 3, n % 3) for n in range(6)]
        assert {(report["size"], report["nodes"]) for report in found} == {(3, 2)}
        for attempt in (found[:3], found[3:]):
            assert sorted(report["node"] for report in attempt) in ([0, 0, 1], [0, 1, 1])
            assert len({(report["address"], report["port"]) for report in attempt}) == 1
        assert found[0]["port"] != found[3]["port"]

    def test_all_give_up_together(self, spawn: Spawner, tmp_path: Path, folder: Path, etcd: EmbeddedEtcd) -> None:
        cluster = Cluster(spawn, tmp_path, etcd, "2")
        for name in "ab":
            cluster.add(name, WORKER, folder, "--fail=1:9")
        for node in cluster.nodes:
            assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
            assert re.search(r"worker [ab]/0#0 exited with code 3 \(after 0 of 0 restarts\)", node.agent.text())

    def test_a_node_that_comes_later_restarts_the_script_for_free(
        self, spawn: Spawner, tmp_path: Path, folder: Path, etcd: EmbeddedEtcd
    ) -> None:
        cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--rdzv-conf=attach_timeout=0,last_call_timeout=0")
        cluster.add("a", WORKER, folder, "--wait")
        wait_for_reports(cluster.nodes, folder, 1)
        cluster.add("b", WORKER, folder, "--wait")
        found = wait_for_reports(cluster.nodes, folder, 3)
        assert [(r["size"], r["rank"], r["restart"]) for r in found] == [(1, 0, 0), (2, 0, 0), (2, 1, 0)]
        assert_gone([found[0]["pid"]])
        (folder / "go").touch()
        for node in cluster.nodes:
            assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()

    def test_a_node_that_is_killed_restarts_the_others(
        self, spawn: Spawner, tmp_path: Path, folder: Path, etcd: EmbeddedEtcd
    ) -> None:
        conf = "--rdzv-conf=lease_ttl=1,attach_timeout=0"
        cluster = Cluster(spawn, tmp_path, etcd, "1:2", conf, "--max-restarts=1")
        a, b = (cluster.add(name, WORKER, folder, "--wait", "--child") for name in "ab")
        wait_for(cluster.nodes, lambda: sum(r["size"] == 2 for r in reports(folder)) == 2, LIMIT_S, "both")
        b.agent.signal(signal.SIGKILL)
        found = wait_for(a, lambda: [r for r in reports(folder) if r["restart"] == 1], LIMIT_S, "the restart")
        assert [(report["size"], report["rank"]) for report in found] == [(1, 0)]
        (folder / "go").touch()
        assert a.agent.wait(LIMIT_S) == 0, a.agent.tail()
        assert_gone([report["pid"] for report in reports(folder)])
        b.agent.wait(LIMIT_S)
        for report in reports(folder):
            # A child of a worker that ended well may go on, as under torchrun; one of any other may not.
            if report["restart"] == 1:
                os.kill(report["child"], signal.SIGKILL)
            else:
                assert_gone([report["child"]])


class TestTheStore:
    """The workers' store at MASTER_ADDR:MASTER_PORT, which the agent of the first node serves."""

    def test_it_outlives_rank_0(self, spawn: Spawner, tmp_path: Path) -> None:
        script = tmp_path / "meets.py"
        script.write_text(MEETS)
        node = elaunch(spawn, tmp_path, *TWO, "--shutdown-timeout=60", script=(script, tmp_path))
        assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
        assert "rank 1 found: of rank 0" in node.agent.text(), node.agent.tail()

    @pytest.mark.soak
    def test_nothing_of_the_former_attempt_is_in_it(self, spawn: Spawner, tmp_path: Path, free_port: int) -> None:
        script = tmp_path / "meets.py"
        script.write_text(MEETS)
        # Fixed by the user, the port is the same in both attempts.
        flags = ("--nproc-per-node=2", "--max-restarts=1", f"--master-port={free_port}")
        node = elaunch(spawn, tmp_path, *flags, script=(script, tmp_path, "once"))
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        assert f"rank 0 in attempt 0 at 127.0.0.1:{free_port} finds its key: False" in node.agent.text()
        assert f"rank 0 in attempt 1 at 127.0.0.1:{free_port} finds its key: False" in node.agent.text()

    @pytest.mark.soak
    def test_rank_0_makes_it_once_the_process_that_served_it_was_killed(self, spawn: Spawner, tmp_path: Path) -> None:
        script = tmp_path / "meets.py"
        script.write_text(MEETS)
        node = elaunch(spawn, tmp_path, *TWO, "--max-restarts=1", script=(script, tmp_path, "once", "wait"))
        wait_for(node, lambda: (tmp_path / "met").exists(), LIMIT_S, "the workers to meet")
        of_agent = [each for each in psutil.Process(node.agent.pid).children() if not each.name().startswith("etcd")]
        (server,) = [each for each in of_agent if not each.children()]
        server.kill()
        (tmp_path / "go").touch()
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        assert "rank 0 makes their store" in node.agent.text()
        assert re.search("rank 0 in attempt 1 at 127.0.0.1:[0-9]+ finds its key: False", node.agent.text())

    def test_a_port_that_somebody_else_has_is_named(self, spawn: Spawner, tmp_path: Path, free_port: int) -> None:
        with socket.create_server(("127.0.0.1", free_port)):
            agent = spawn.elaunch(f"--master-port={free_port}", PROBE, tmp_path / "facts")
            assert agent.wait(LIMIT_S) == 1, agent.tail()
        said = (
            f"elaunch: error: --master-port={free_port}: the store of the workers cannot listen there: Address already"
        )
        assert said in agent.text()
        assert "Traceback" not in agent.text()


class TestTheEndOfTheAgent:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
    def test_a_signal_ends_the_workers(
        self, spawn: Spawner, tmp_path: Path, folder: Path, number: signal.Signals
    ) -> None:
        node = elaunch(spawn, tmp_path, *TWO, script=(WORKER, folder, "--wait"))
        found = wait_for_reports(node, folder, 2)
        node.agent.signal(number)
        assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
        assert f"stopped by {number.name}" in node.agent.text()
        assert [event["signal"] for event in node.events("worker_exited")] == [number] * 2
        assert_gone([report["pid"] for report in found])

    def test_a_worker_that_ignores_it_is_killed_in_the_end(self, spawn: Spawner, tmp_path: Path, folder: Path) -> None:
        node = elaunch(spawn, tmp_path, ALONE, "--shutdown-timeout=0.5", script=(WORKER, folder, "--wait", "--deaf"))
        wait_for_reports(node, folder, 1)
        node.agent.signal(signal.SIGTERM)
        assert node.agent.wait(20) == 1, node.agent.tail()
        assert [event["signal"] for event in node.events("worker_exited")] == [signal.SIGKILL]

    def test_so_is_one_that_ignores_it_after_the_failure_of_a_peer(
        self, spawn: Spawner, tmp_path: Path, folder: Path
    ) -> None:
        node = elaunch(spawn, tmp_path, *TWO, "--shutdown-timeout=0.5", script=(WORKER, folder, "--fail=1:9", "--deaf"))
        assert node.agent.wait(20) == 1, node.agent.tail()
        ends = {
            event["local_rank"]: event.get("exitcode", event.get("signal")) for event in node.events("worker_exited")
        }
        assert ends == {1: 3, 0: signal.SIGKILL}

    def test_a_second_signal_kills_at_once(self, spawn: Spawner, tmp_path: Path, folder: Path) -> None:
        node = elaunch(spawn, tmp_path, ALONE, "--shutdown-timeout=600", script=(WORKER, folder, "--wait", "--deaf"))
        wait_for_reports(node, folder, 1)
        node.agent.signal(signal.SIGTERM)
        node.agent.signal(signal.SIGINT)
        assert node.agent.wait(20) == 1, node.agent.tail()
        assert [event["signal"] for event in node.events("worker_exited")] == [signal.SIGKILL]

    def test_a_signal_in_the_first_moment_leaves_nothing(self, spawn: Spawner, tmp_path: Path) -> None:
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        env = {"TMPDIR": str(temporary)}
        agent = spawn.elaunch(ALONE, "--no-python", "sleep", "600", env=env)
        node = Node(agent, tmp_path / "none")
        wait_for(node, lambda: list(temporary.glob("elaunch-etcd-*/etcd.log")), LIMIT_S, "the server to be started")
        agent.signal(signal.SIGTERM)
        assert agent.wait(LIMIT_S) == 1, agent.tail()
        assert "stopped by SIGTERM" in agent.text()
        assert "Traceback" not in agent.text()
        assert list(temporary.iterdir()) == []

    @pytest.mark.parametrize("who", ["agent", "fork server"])
    def test_a_kill_leaves_no_process(self, spawn: Spawner, tmp_path: Path, folder: Path, who: str) -> None:
        # By a cold start: the server of forks would end what a launcher that was killed leaves in its group.
        script = (WORKER, folder, "--wait", "--child", "--deaf")
        node = elaunch(spawn, tmp_path, *TWO, script=script, warm=False)
        found = wait_for_reports(node, folder, 2)
        descendants = [process.pid for process in psutil.Process(node.agent.pid).children(recursive=True)]
        pids = [report[key] for report in found for key in ("pid", "child")]
        assert set(pids) < set(descendants)
        if who == "agent":
            node.agent.signal(signal.SIGKILL)
            node.agent.wait(LIMIT_S)
        else:
            os.kill(psutil.Process(found[0]["pid"]).ppid(), signal.SIGKILL)
            assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
            message = "the process that holds this node's workers was killed, and the workers with it"
            assert node.agent.text().count(message) == 1
            assert "Traceback" not in node.agent.text()
        assert_gone(descendants)


def test_the_interpreter_is_that_of_elaunch(spawn: Spawner, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print('runs', sys.executable)")
    assert f"runs {sys.executable}" in run(spawn, tmp_path, ALONE, script).agent.text()
