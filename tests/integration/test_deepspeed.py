"""DeepSpeed's ZeRO-1 and ZeRO-2 in an elastic function.

CI does not install DeepSpeed, which brings a compiler's tools along; by hand:

    .venv/bin/python -m pip install -c constraints.txt deepspeed==0.19.8
    DS_ACCELERATOR=cpu .venv/bin/python -m pytest --soak tests/integration/test_deepspeed.py
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
from pathlib import Path

import pytest

from tests.helpers import ROOT, Spawner
from tests.jobs.watch import Node, elaunch, wait_for

SCRIPT = ROOT / "tests" / "jobs" / "deepspeed_zero.py"

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(500),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs pip install deepspeed==0.19.8"),
]


def start(spawn: Spawner, folder: Path, *flags: str, restarts: int, name: str) -> Node:
    command = (
        "--standalone",
        "--nproc-per-node=3",
        f"--max-restarts={restarts}",
        "--warm-start",
        "--preload=deepspeed",
    )
    environment = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return elaunch(spawn, folder, *command, script=(SCRIPT, *flags), name=name, warm=False, environment=environment)


def steps(node: Node) -> list[tuple[int, str]]:
    return [(event["step"], event["digest"]) for event in node.events("step")]


def assert_as_undisturbed(node: Node, calm: Node, rel: float) -> None:
    assert steps(node) == steps(calm)
    for one, other in zip(node.events("step"), calm.events("step"), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=rel, abs=0.0), f"step {one['step']}"
    assert {event["attempt"] for event in node.events("worker_started") if "attempt" in event} <= {0}


@pytest.mark.parametrize(
    ("flags", "rel"),
    [
        (("--stage", "1"), 1e-5),
        (("--stage", "2"), 1e-5),
        # All steps have three members, so sums have one order: the state comes back bit for bit.
        (("--stage", "1", "--bf16", "--members", "3"), 0.0),
        (("--stage", "2", "--bf16", "--members", "3"), 0.0),
    ],
)
def test_ten_random_kills_leave_the_losses_as_they_are(
    spawn: Spawner, tmp_path: Path, flags: tuple[str, ...], rel: float
) -> None:
    n_steps = 80
    flags = (*flags, "--steps", str(n_steps))
    calm = start(spawn, tmp_path, *flags, restarts=0, name="calm")
    assert calm.agent.wait(150) == 0, calm.agent.tail()
    node = start(spawn, tmp_path, *flags, "--sleep", "0.1", restarts=12, name="kills")
    choose = random.Random(repr(flags))
    for number in range(10):
        wait_for(node, lambda: node.last_step() >= 2 + 7 * number and len(node.members()) == 3, 100, "more steps")  # noqa: B023
        os.kill(choose.choice(sorted(node.pids().values())), signal.SIGKILL)
        wait_for(node, lambda: len(node.events("worker_exited")) > number, 60, "the kill")  # noqa: B023
    assert node.agent.wait(150) == 0, node.agent.tail()
    assert_as_undisturbed(node, calm, rel)
