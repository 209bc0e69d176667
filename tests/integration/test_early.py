"""Scripts that fail before their first step, or never become what elaunch can keep alive."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.helpers import Spawner
from tests.jobs.watch import elaunch, wait_for

TWO = ("--standalone", "--nproc-per-node=2")

RAISES = """
import elaunch
job = elaunch.init()
def load(split):
    raise ValueError(f"no such split: {split}")
load("trian")
"""

OWN_GROUP = """
import sys, time, torch.distributed as dist, elaunch
job = elaunch.init()
dist.init_process_group("gloo")
dist.barrier()
print("met", flush=True)
time.sleep(0 if {attempt} else 600)
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "early.py"
    path.write_text(text)
    return path


def test_the_same_exception_in_all_workers_ends_the_job_at_once_with_its_traceback(
    spawn: Spawner, tmp_path: Path
) -> None:
    node = elaunch(spawn, tmp_path, *TWO, script=(script(tmp_path, RAISES),))
    assert node.agent.wait(60) == 1
    text = node.agent.text()
    said = "every worker raised the same exception before the first step committed: ValueError: no such split: trian ("
    assert said in text
    assert text.count("early.py:5 in load)") >= 1
    assert 'raise ValueError(f"no such split: {split}")' in text.partition("Root Cause")[2]
    assert "all workers are started again" not in text
    assert not any(event["worker"].endswith("#2") for event in node.events("worker_started"))


@pytest.mark.timeout(120)
def test_a_job_in_which_nobody_has_registered_is_restarted_as_a_whole(spawn: Spawner, tmp_path: Path) -> None:
    text = OWN_GROUP.replace("{attempt}", "int(__import__('os').environ['TORCHELASTIC_RESTART_COUNT'])")
    node = elaunch(spawn, tmp_path, *TWO, "--max-restarts=1", script=(script(tmp_path, text),))
    wait_for(node, lambda: node.agent.text().count("met") == 2, 60, "both workers to meet")
    os.kill(node.pids()["node0/1#0"], signal.SIGKILL)
    assert node.agent.wait(60) == 0, node.agent.tail()
    assert "was killed by SIGKILL: all workers are started again (attempt 1)" in node.agent.text()
    assert node.agent.text().count("met") == 4


def test_a_script_without_elaunch_that_dies_is_told_once_how_its_workers_outlive_each_other(
    spawn: Spawner, tmp_path: Path
) -> None:
    node = elaunch(spawn, tmp_path, *TWO, "--max-restarts=1", script=(script(tmp_path, "raise SystemExit(3)"),))
    assert node.agent.wait(60) == 1
    assert node.agent.text().count("the script does not use elaunch, so a failure ends all its workers") == 1
    assert "FAILED" in node.agent.text()
