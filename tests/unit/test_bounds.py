"""Waits that have an end, whatever is waited for: each says what for, and then does without it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from elaunch.agent import forkserver
from elaunch.agent.output import tee as tee_module
from elaunch.agent.output.logs import LogSettings, WorkerLogs
from elaunch.agent.output.tee import Tee
from elaunch.agent.supervisor import START_S, Supervisor
from elaunch.agent.watch.node_check import measure
from elaunch.errors import JobFailed, LaunchError
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.workers import checkpoints
from elaunch.workers.agent_client import AgentClient, StaticClient
from elaunch.workers.member.saving import SaveAttempt
from tests.helpers import Spawner, is_running, wait_until
from tests.unit.comm_crew import Task

LIMIT_S = 20.0


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits says so at once."""
    monkeypatch.setattr("elaunch.waits.WAITED_S", 0.01)
    monkeypatch.setattr("elaunch.waits.LOOK_S", 0.02)


def test_an_agent_that_ends_kills_a_fork_server_that_is_stopped_and_its_workers(spawn: Spawner, tmp_path: Path) -> None:
    agent = spawn.python(
        "-c",
        "import os, select, signal, sys\n"
        "from elaunch.agent.supervisor import Supervisor\n"
        "holder = Supervisor()\n"
        "holder.spawn('w', ['sleep', '1000'], dict(os.environ), None)\n"
        "(message,) = holder.receive()\n"
        "print('pids', holder.pid, message['pid'], 'end', flush=True)\n"
        "os.kill(holder.pid, signal.SIGSTOP)\n"
        "holder.close(0.2)\n",
    )
    pids = [int(pid) for pid in agent.wait_for_text("end\n", LIMIT_S).split()[1:3]]
    assert agent.wait(LIMIT_S) == 0, agent.tail()
    wait_until(lambda: not any(map(is_running, pids)), LIMIT_S, "the ends of the fork server and its worker")


def test_a_worker_that_is_never_started_is_told_of_and_ends_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(forkserver, "start", lambda: (ours, 0))
    holder = Supervisor()
    holder.spawn("a/0#0", ["true"], {}, None)
    holder._asked_s = dict.fromkeys(holder._asked_s, 100.0)
    told = [(second, holder.late(100.0 + second)) for second in range(int(START_S) + 1)]
    lines = [(second, line) for second, (line, _) in told if line]
    assert lines[0] == (3, "the process of worker a/0#0 has been starting for 3 s, of at most 300 s")
    assert told[-1][1] == ("the process that holds this node's workers has not started a/0#0 within 300 s", True)
    assert [over for _, (_, over) in told[:-1]] == [False] * int(START_S)
    theirs.sendall(b'{"started": "a/0#0", "pid": 7}\n')
    holder.receive()
    assert holder.late(1e6) == ("", False)
    holder.warm({}, ("torch",))
    holder.spawn("a/0#1", ["true"], {}, {})
    holder._asked_s = dict.fromkeys(holder._asked_s, 2e6)
    text, over = holder.late(2e6 + 2 * START_S)
    assert text == "the process of worker a/0#1 has been starting for 600 s, while modules are imported for it"
    assert not over
    theirs.sendall(b'{"warm": true, "error": ""}\n')
    holder.receive()
    now_s = time.monotonic()
    assert [holder.late(now_s + seconds)[1] for seconds in (START_S - 10, START_S + 10)] == [False, True]
    ours.close()
    theirs.close()


def test_a_worker_that_cannot_leave_says_so_and_ends(spawn: Spawner) -> None:
    worker = spawn.python(
        "-c",
        "import sys, time\n"
        "from elaunch import waits\n"
        "from elaunch.workers.fatal import within\n"
        "waits.WAITED_S = 0.01\n"
        "with within(60.0, 'thing'):\n"
        "    print('quick', flush=True)\n"
        "with within(1.5, 'leaving'):\n"
        "    time.sleep(1000)\n",
        env={"ELAUNCH_WORKER": "a/0#0"},
    )
    assert worker.wait(LIMIT_S) == 1
    assert "waiting for 1 s, 0 s left: the leaving of worker a/0#0" in worker.text()
    assert "worker a/0#0 ends: its leaving failed: TimeoutError: it was not over after 1.5 s" in worker.text()


def test_a_console_that_nobody_reads_does_not_keep_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tee_module, "CLOSE_S", 0.1)
    read_fd, write_fd = os.pipe()
    with os.fdopen(write_fd, "w") as console, (tmp_path / "errors").open("w") as errors:
        shown = Tee(LogSettings(), "n0", console, errors)
        log = tmp_path / "log"
        log.touch()
        shown.follow("a/0#0", 0, 0, WorkerLogs(str(log), None, None, tee_stdout=True))
        log.write_bytes(b"x" * 1023 + b"\n" * 1000)
        shown.close()
        os.close(read_fd)  # which ends the thread that writes
        for thread in threading.enumerate():
            if thread.name == "elaunch-tee":
                thread.join(LIMIT_S)


class AllAtBarrier:
    """Stands for a group whose members all come to its barriers."""

    def __init__(self) -> None:
        self.barriers = 0

    def barrier(self) -> None:
        self.barriers += 1


def test_a_disk_that_never_ends_a_write_costs_the_last_checkpoint_and_not_the_end_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoints, "WRITE_S", 0.05)
    monkeypatch.setattr(checkpoints, "COMPLETE_S", 0.05)
    member, group = checkpoints.Checkpoints(StaticClient()), AllAtBarrier()
    folder = tmp_path / "step-000000200.1-ab.part"
    folder.mkdir()
    member._attempt = SaveAttempt(200, 1, ("rank/0#0",), 0, folder, 0, time.monotonic())
    member._settle(group)  # type: ignore[arg-type]
    assert group.barriers == 1
    assert not folder.exists()
    text = "the checkpoint after 200 steps is left incomplete: rank/0#0 had not written its part within 0.05 s"
    assert text in capsys.readouterr().err


@pytest.mark.usefixtures("hasty")
def test_an_etcd_that_is_not_ready_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "etcd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\nexec sleep 1000\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    server, said = EmbeddedEtcd(str(tmp_path / "etcd")), list[str]()
    server.start()
    with pytest.raises(LaunchError, match="not ready within"):
        server.wait_ready(0.5, said.append)
    assert said[0] == f"waiting for 0 s, 0 s left: etcd (pid {server.pid}, {server.endpoint}) to answer"
    server.stop()


def test_a_stranger_at_the_port_of_an_etcd_that_talks_without_end_is_no_etcd(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def talk() -> None:
            with contextlib.suppress(OSError):
                link, _ = stranger.accept()
                with link:
                    while True:
                        link.sendall(b"x")
                        time.sleep(0.01)

        threading.Thread(target=talk, daemon=True).start()
        server = EmbeddedEtcd(str(tmp_path / "etcd"), port=stranger.getsockname()[1])
        answer = Task(lambda: server._is_healthy(time.monotonic() + LIMIT_S))
        assert answer.result(LIMIT_S) is False


@pytest.mark.usefixtures("hasty")
def test_a_worker_whose_agent_does_not_answer_says_so_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("elaunch.workers.agent_client.WELCOME_TIMEOUT_S", 0.3)
    path = str(tmp_path / "agent")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(path)
        agent.listen()
        with pytest.raises(JobFailed, match="does not answer: timed out"):
            AgentClient(path, "a/0#0")
    assert "waiting for 0 s, 0 s left: the agent of worker a/0#0 to answer\n" in capsys.readouterr().err


@pytest.mark.usefixtures("hasty")
def test_a_worker_under_torchrun_says_that_it_waits_for_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = []

    def until_told() -> None:
        text: list[str] = []

        def said() -> bool:
            text.append(capsys.readouterr().err)
            return "\n" in text[-1]  # which may come after the line itself

        wait_until(said, LIMIT_S, "a line")
        told.append("".join(text).partition("\n")[0])

    class Store:
        def __init__(self, host: str, port: int, size: int, is_master: bool) -> None:
            until_told()

        def set(self, key: str, value: str) -> None:
            pass

        def get(self, key: str) -> bytes:
            until_told()
            return b"127.0.0.1:1"

    with socket.create_server(("127.0.0.1", 0)) as master:
        port = master.getsockname()[1]
        for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr("torch.distributed.TCPStore", Store)
        monkeypatch.setattr("torch.distributed.PrefixStore", lambda prefix, store: store)
        client = StaticClient()
        assert told == [f"[elaunch] waiting for 0 s, 300 s left: the other workers, at 127.0.0.1:{port}"]
        client.ready("127.0.0.1:2")
    assert told == [told[0]] * 3


@pytest.mark.usefixtures("hasty")
def test_a_check_of_the_node_that_lasts_is_told_of(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    said: list[str] = []
    figures = measure(1, {"PYTHON_EXEC": str(program), "PATH": "/usr/bin:/bin"}, 1.3, said.append)
    assert "was not done after 1.3 s" in figures.problems[0]
    assert said[0] == "waiting for 1 s, 0 s left: the check of this node"
