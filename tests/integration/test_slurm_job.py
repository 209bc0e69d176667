"""A job of several nodes in a real Slurm, by the batch script of `deploy/slurm`: a signal, a requeue, a lost node."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import pytest

from elaunch.cli.rendezvous.slurm import read_hosts
from tests.helpers import ROOT, Spawner, wait_until
from tests.jobs.watch import Node, losses
from tests.slurm import TestSlurm, slurm

SCRIPT = ROOT / "tests" / "jobs" / "endless.py"
LIMIT_S = 150.0
SAVED = "from which the job goes on when it is started again"


class BatchJob:
    """The batch script of `deploy/slurm` on all nodes of a Slurm, one worker each, as a user would change it.

    Args:
        spawn: starts what submits it.
        folder: of its files.
        commands: of the Slurm.
        nodes: how many.
        changed: more lines of the script, and what they become.
    """

    def __init__(
        self, spawn: Spawner, folder: Path, commands: TestSlurm, nodes: int, changed: Mapping[str, str] | None = None
    ) -> None:
        text = (ROOT / "deploy" / "slurm" / "train.sbatch").read_text()
        words = {
            "#SBATCH --nodes=4": f"#SBATCH --nodes={nodes}",
            "#SBATCH --gpus-per-node=8": "",
            "--nproc-per-node=gpu": "--nproc-per-node=1",
        }
        for word, ours in (words | dict(changed or {})).items():
            assert word in text
            text = text.replace(word, ours)
        batch = folder / "job.sbatch"
        batch.write_text(text)
        self._out, self._end, self._commands = folder / "out", folder / "end", commands
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TMPDIR": str(folder),  # by which its agents are found below
            "ELAUNCH_PRELOAD": "",
            "ELAUNCH_EVENTS": str(folder / "%n.jsonl"),
            "ELAUNCH_CHECKPOINT_DIR": str(folder / "saved"),
        }
        names = [folder / f"n{index + 1}.jsonl" for index in range(nodes)]
        self.logs = [Node(None, name) for name in names]  # type: ignore[arg-type]
        submitted = spawn(
            ["sbatch", "--parsable", f"--output={self._out}", batch, SCRIPT, self._end, "0.05"],
            env=environment | {"SLURM_CONF": str(commands.configuration)},
        )
        assert submitted.wait(LIMIT_S) == 0, submitted.tail()
        self.id = submitted.text().split()[0]

    def told(self) -> str:
        """What the script and its agents have written."""
        return self._out.read_text() if self._out.exists() else ""

    def state(self) -> str:
        return self._commands("squeue", "-h", "-t", "all", "-j", self.id, "-o", "%T").strip()

    def members(self) -> int:
        steps = [event for log in self.logs for event in log.events("step")]
        return max(steps, key=lambda event: event["step"])["members"] if steps else 0

    def last_step(self) -> int:
        return max((log.last_step() for log in self.logs), default=-1)

    def waits_for(self, condition: Callable[[], bool], what: str) -> None:
        def asked() -> bool:
            time.sleep(0.2)
            return condition()

        wait_until(asked, LIMIT_S, lambda: f"{what}; {self.state()}, {self.members()} members\n{self.told()}")

    def ends(self) -> None:
        """Lets the script come to its end, and waits for that of the job."""
        self._end.touch()
        self.waits_for(lambda: self.state() not in ("RUNNING", "COMPLETING"), "the end")
        assert self.state() == "COMPLETED", self.told()


@pytest.mark.timeout(600)
def test_a_job_outlives_its_time_limit_and_a_node(spawn: Spawner, tmp_path: Path) -> None:
    with slurm(spawn, nodes=3, cpus=1) as commands:
        for hosts in ("n[1-3,07-10],gpu2", "rack[1-2]n[098-101]", "a,b1,c[3]"):
            assert list(read_hosts(hosts)) == commands("scontrol", "show", "hostnames", hosts).split()
        job = BatchJob(spawn, tmp_path, commands, 3)
        job.waits_for(lambda: job.members() == 3, "three members")
        commands("scancel", "--batch", "--signal=USR1", job.id)  # as --signal=B:USR1@180 does
        job.waits_for(lambda: "PENDING" in job.state(), "the job queued again")
        reached = job.last_step()
        job.waits_for(lambda: job.last_step() > reached + 2 and job.members() == 3, "steps of the second run")

        (agent,) = agents_on("n3", str(tmp_path))
        commands.lose("n3", agent)
        job.waits_for(lambda: job.members() == 2, "two members")
        assert job.state() == "RUNNING"
        job.ends()
    assert SAVED in job.told()
    assert len(losses(job.logs)) > reached + 3, "each step once, over both runs"
    started = [event["worker"].split("/")[0] for log in job.logs for event in log.events("worker_started")]
    assert sorted(started) == ["n1", "n1", "n2", "n2", "n3", "n3"], "one in each run: nobody was started anew"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_slurm_itself_sends_the_signal_before_the_limit(spawn: Spawner, tmp_path: Path) -> None:
    """It looks twice a minute, and sends a signal that is due before it looks again: here after 30 to 60 s."""
    limits = {"#SBATCH --time=1-0": "#SBATCH --time=2", "--signal=B:USR1@180": "--signal=B:USR1@60"}
    with slurm(spawn, nodes=2, cpus=1) as commands:
        job = BatchJob(spawn, tmp_path, commands, 2, limits)
        job.waits_for(lambda: job.members() == 2, "two members")
        job.waits_for(lambda: "PENDING" in job.state(), "the job queued again")
        assert SAVED in job.told()
        assert "DUE TO TIME LIMIT" not in job.told(), "it had left when the limit came"
        assert len(losses(job.logs)) == job.last_step() + 1


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
