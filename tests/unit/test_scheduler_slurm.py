"""What is said to Slurm's commands, and what is made of their answers; texts as Slurm 22.05 writes them."""

from __future__ import annotations

import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.scheduler.clusters.cluster import AgentReport, AgentRequest, ClusterStage, ClusterUnavailable
from elaunch.scheduler.clusters.slurm import (
    SlurmCluster,
    SlurmSettings,
    batch_script,
    parse_jobs,
    parse_nodes,
    run,
    submission,
    without_doubles,
)
from elaunch.scheduler.model import ClusterNode
from tests.helpers import wait_until

JOBS = """\
12|RUNNING|elaunch:main:gpt.0.1|n1|2|None
13|PENDING|elaunch:main:gpt.0.2||4|ReqNodeNotAvail, UnavailableNodes:n2
14|COMPLETED|elaunch:main:gpt.0.0|n3|2|None
15|NODE_FAIL|elaunch:main:bert.1.0|n4|1|None
16|RUNNING|elaunch:other:gpt.0.1|n1|2|None
17|RUNNING|a|b|n1|(null)|None
18|COMPLETING|elaunch:main:bert.1.1|n4|(null)|None
nonsense
"""
NODES = """\
n1|mix|mixed|
n1|mixed|3/5/0/8|gpu:a100:4(S:0-1)|gpu:a100:3(IDX:0-2)|rack1,fast|
n2|draining|0/0/8/8|gpu:a100:4|gpu:a100:0(IDX:N/A)|rack2|
n2|draining|0/0/8/8|gpu:a100:4|gpu:a100:0(IDX:N/A)|rack2|
n3|idle*|0/8/0/8|gpu:v100:2,gpu:a100:2|gpu:0|(null)|
n4|idle~|0/8/0/8|(null)|gpu:0|(null)|
n5|down|0/0/8/8|gpu:2|gpu:0|(null)|
"""
REQUEST = AgentRequest("gpt.0.3", "n1", 2, ("--rdzv-id=gpt.0", "train.py", "it's"), "/home/ann", ("--time=60",))


def settings(folder: Path, gpus: bool = True) -> SlurmSettings:
    return SlurmSettings("main", folder, ("python", "-m", "elaunch"), ("--partition=train",), gpus)


def test_jobs_of_this_scheduler_are_read_and_others_left_out() -> None:
    rows = parse_jobs(JOBS, "main")
    assert [(row.id, row.node, row.devices) for row in rows] == [
        (12, "n1", 2),
        (13, "", 4),
        (14, "n3", 2),
        (15, "n4", 1),
        (18, "n4", 0),
    ]
    assert [row.report for row in rows] == [
        AgentReport("gpt.0.1", ClusterStage.RUNNING, "RUNNING"),
        AgentReport("gpt.0.2", ClusterStage.QUEUED, "PENDING (ReqNodeNotAvail, UnavailableNodes:n2)"),
        AgentReport("gpt.0.0", ClusterStage.ENDED, "COMPLETED"),
        AgentReport("bert.1.0", ClusterStage.ENDED, "NODE_FAIL"),
        AgentReport("bert.1.1", ClusterStage.RUNNING, "COMPLETING"),
    ]


def test_of_two_jobs_with_one_name_the_first_that_lives_stays() -> None:
    rows = parse_jobs(
        "9|COMPLETED|elaunch:main:a.0.0|n1|1|None\n"
        "5|RUNNING|elaunch:main:a.0.1|n1|1|None\n"
        "7|PENDING|elaunch:main:a.0.1||1|Dependency\n"
        "3|FAILED|elaunch:main:a.0.2|n1|1|None\n"
        "4|RUNNING|elaunch:main:a.0.2|n1|1|None\n",
        "main",
    )
    kept, doubles = without_doubles(rows)
    assert sorted(row.id for row in kept) == [4, 5, 9]
    assert [row.id for row in doubles] == [7]


def test_nodes_have_the_devices_that_others_do_not_use() -> None:
    rows = parse_jobs(JOBS + "19|RUNNING|elaunch:main:c.1.1|n3|1|None\n", "main")
    assert parse_nodes(NODES, rows, gpus=True) == [
        ClusterNode("n1", 3, "a100", "rack1"),  # one of the four is a stranger's
        ClusterNode("n2", 4, "a100", "rack2", usable=False),
        ClusterNode("n3", 1, "v100"),  # it does not respond: what is there stays
        ClusterNode("n5", 2, usable=False),
    ]
    begun = parse_jobs("20|PENDING|elaunch:main:d.0.0|n1|3|None\n", "main")
    assert parse_nodes(NODES, begun, gpus=True)[0].devices == 4, "what has begun meanwhile is no stranger's"
    assert parse_nodes(NODES, [], gpus=False)[0] == ClusterNode("n1", 5, "", "rack1")
    assert parse_nodes(NODES, [], gpus=False)[3] == ClusterNode("n4", 8)
    assert parse_nodes("", [], gpus=True) == []


def test_a_submission_names_node_devices_and_agent(tmp_path: Path) -> None:
    command = submission(REQUEST, settings(tmp_path))
    assert command[0] == "sbatch"
    wanted = {"--job-name=elaunch:main:gpt.0.3", "--nodelist=n1", "--gres=gpu:2", "--dependency=singleton"}
    assert wanted <= set(command)
    assert command[-2:] == ["--partition=train", "--time=60"], "the job's own options count last"
    assert "--cpus-per-task=2" in submission(REQUEST, settings(tmp_path, gpus=False))


@pytest.mark.parametrize("code", [0, 3])
def test_the_batch_script_passes_signals_to_the_agent_and_leaves_its_exit_code(tmp_path: Path, code: int) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(
        f'#!/bin/sh\ntrap "echo usr1 >>seen; exit {code}" USR1\ntrap "echo term >>seen" TERM\n'
        'printf "%s\\n" "$@" >seen\ntouch ready\nwhile :; do sleep 0.05; done\n'
    )
    launcher.chmod(0o755)
    script = batch_script(REQUEST, replace(settings(tmp_path), elaunch=(str(launcher),)))
    process = subprocess.Popen(["sh", "-c", script], cwd=tmp_path)
    seen = tmp_path / "seen"
    wait_until((tmp_path / "ready").exists, 20.0, "the launcher")
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: "term" in seen.read_text(), 20.0, "SIGTERM")
    process.send_signal(signal.SIGUSR1)
    assert process.wait(20) == code
    assert seen.read_text().splitlines() == ["--rdzv-id=gpt.0", "train.py", "it's", "term", "usr1"]
    assert (tmp_path / "gpt.0.3.exit").read_text().strip() == str(code)


def test_exit_codes_tell_of_agents_that_slurm_has_forgotten(tmp_path: Path) -> None:
    (tmp_path / "a.0.0.exit").write_text("0\n")
    (tmp_path / "a.0.1.exit").write_text("7\n")
    (tmp_path / "a.0.2.exit").write_text("")
    (tmp_path / "a.0.3.exit").write_text("0\n")
    cluster = SlurmCluster(settings(tmp_path))
    rows = parse_jobs("5|RUNNING|elaunch:main:a.0.3|n1|1|None\n", "main")
    assert cluster._agents(rows) == [
        AgentReport("a.0.3", ClusterStage.RUNNING, "RUNNING"),
        AgentReport("a.0.0", ClusterStage.ENDED, "exit code 0", True),
        AgentReport("a.0.1", ClusterStage.ENDED, "exit code 7"),
    ]
    cluster.forget("a.0.0")
    cluster.forget("a.0.0")
    assert not (tmp_path / "a.0.0.exit").exists()


def test_a_command_that_fails_or_is_not_there_is_told_in_one_line() -> None:
    with pytest.raises(ClusterUnavailable, match=r"^sh ended with 3: no$"):
        run(["sh", "-c", "echo no >&2; echo more >&2; exit 3"])
    with pytest.raises(ClusterUnavailable, match="Slurm's commands must be in PATH"):
        run(["no-such-command"])
    assert run(["cat"], "text") == "text"
