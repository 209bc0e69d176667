"""A script that uses elaunch needs no elaunch to run: alone and under torchrun its membership never changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers import Spawned, Spawner
from tests.jobs.watch import SCRIPT, START_S, WARM, assert_gone, elaunch

STEPS = ("--steps", "20")
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")


def finish(process: Spawned, workers: int) -> list[float]:
    """The norms of the final weights, one for each worker, after a good end."""
    assert process.wait(START_S) == 0, process.tail()
    found = [float(norm) for norm in re.findall(r"norm (\S+) rate", process.text())]
    assert len(found) == workers, process.tail()
    return found


def assert_all_near(norms: Sequence[float], expected: float) -> None:
    assert list(norms) == pytest.approx([expected] * len(norms), rel=1e-9)


@pytest.mark.timeout(300)
def test_the_result_is_the_same_under_any_launcher(spawn: Spawner, tmp_path: Path) -> None:
    # The script asks which slot it has; elaunch needs none of torchrun's variables.
    env = {"LOCAL_RANK": "0", "OMP_NUM_THREADS": "1"}
    (alone,) = finish(spawn.fork(WARM, "tests.jobs.train", *STEPS, env=env, name="alone"), 1)
    assert_all_near(finish(spawn.fork(WARM, *TORCHRUN, SCRIPT, *STEPS, name="torchrun"), 2), alone)
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=2", script=(SCRIPT, *STEPS))
    assert_all_near(finish(node.agent, 2), alone)


@pytest.mark.timeout(200)
@pytest.mark.soak
def test_under_torchrun_a_failure_ends_the_job(spawn: Spawner) -> None:
    process = spawn.fork(WARM, *TORCHRUN, SCRIPT, *STEPS, "--fail-at", "1:3", name="torchrun")
    assert process.wait(START_S) == 1, process.tail()
    text = process.text()
    assert "the sample that breaks the script" in text
    assert "norm" not in re.sub("normal", "", text)
    pids = [int(pid) for pid in re.findall(r"pid\s*:\s*(\d+)", text)]
    assert pids, process.tail()
    assert_gone(pids)
