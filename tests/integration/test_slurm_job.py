"""A job of several nodes in a real Slurm, by the batch script of `deploy/slurm`: a signal, a requeue, a lost node."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from elaunch.cli.rendezvous.slurm import read_hosts
from tests.helpers import ROOT, Spawner, wait_until
from tests.jobs.watch import Node, losses
from tests.slurm import slurm

SCRIPT = ROOT / "tests" / "jobs" / "endless.py"
LIMIT_S = 150.0


@pytest.mark.timeout(600)
def test_a_job_outlives_its_time_limit_and_a_node(spawn: Spawner, tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "slurm" / "train.sbatch").read_text()
    for word, ours in {
        "#SBATCH --nodes=4": "#SBATCH --nodes=3",
        "#SBATCH --gpus-per-node=8": "",
        "--nproc-per-node=gpu": "--nproc-per-node=1",
    }.items():
        assert word in text
        text = text.replace(word, ours)
    batch = tmp_path / "job.sbatch"
    batch.write_text(text)
    out = tmp_path / "out"
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),  # by which its agents are found below
        "ELAUNCH_PRELOAD": "",
        "ELAUNCH_EVENTS": str(tmp_path / "%n.jsonl"),
        "ELAUNCH_CHECKPOINT_DIR": str(tmp_path / "saved"),
    }
    logs = [Node(None, tmp_path / f"n{index}.jsonl") for index in (1, 2, 3)]  # type: ignore[arg-type]

    def members() -> int:
        steps = [event for log in logs for event in log.events("step")]
        return max(steps, key=lambda event: event["step"])["members"] if steps else 0

    with slurm(spawn, nodes=3, cpus=1) as commands:
        for hosts in ("n[1-3,07-10],gpu2", "rack[1-2]n[098-101]", "a,b1,c[3]"):
            assert list(read_hosts(hosts)) == commands("scontrol", "show", "hostnames", hosts).split()
        submitted = spawn(
            ["sbatch", "--parsable", f"--output={out}", batch, SCRIPT, tmp_path / "end", "0.05"],
            env=environment | {"SLURM_CONF": str(commands.configuration)},
        )
        assert submitted.wait(LIMIT_S) == 0, submitted.tail()
        job = submitted.text().split()[0]

        def state() -> str:
            return commands("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip()

        def waits_for(condition: Callable[[], bool], what: str) -> None:
            def asked() -> bool:
                time.sleep(0.2)
                return condition()

            wait_until(asked, LIMIT_S, lambda: f"{what}; {state()}, {members()} members\n{out.read_text()}")

        def last_step() -> int:
            return max((log.last_step() for log in logs), default=-1)

        waits_for(lambda: members() == 3, "three members")
        commands("scancel", "--batch", "--signal=USR1", job)  # as --signal=B:USR1@180 does
        waits_for(lambda: "PENDING" in state(), "the job queued again")
        reached = last_step()
        waits_for(lambda: last_step() > reached + 2 and members() == 3, "steps of the second run")

        (agent,) = agents_on("n3", str(tmp_path))
        commands.lose("n3", agent)
        waits_for(lambda: members() == 2, "two members")
        assert state() == "RUNNING"
        (tmp_path / "end").touch()
        waits_for(lambda: state() not in ("RUNNING", "COMPLETING"), "the end")
        assert state() == "COMPLETED", out.read_text()
    told = out.read_text()
    assert "from which the job goes on when it is started again" in told
    assert len(losses(logs)) > reached + 3, "each step once, over both runs"
    started = [event["worker"].split("/")[0] for log in logs for event in log.events("worker_started")]
    assert sorted(started) == ["n1", "n1", "n2", "n2", "n3", "n3"], "one in each run: nobody was started anew"


def agents_on(node: str, folder: str) -> list[int]:
    """The agent that Slurm has started on a node, for the job whose files are in `folder`."""
    found = []
    for process in psutil.process_iter():
        try:
            variables, above = process.environ(), process.parent()
        except psutil.Error:
            continue
        if above is not None and above.name() == "slurmstepd" and variables.get("TMPDIR") == folder:
            found += [process.pid] * (variables.get("SLURMD_NODENAME") == node and "SLURM_STEP_ID" in variables)
    return found
