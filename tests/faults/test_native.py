"""Gradients over a native group: workers are killed and stopped in it, and the others go on with the same step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import Spawner, soak
from tests.jobs.watch import SCRIPT, Node, assert_same, digests, elaunch, losses

STEPS, WORKERS = 40, 4
JOB = ("--steps", str(STEPS), "--dropout", "0")
SLOW = ("--sleep", "0.005", "--crew", str(WORKERS))
NATIVE = ("--standalone", f"--nproc-per-node={WORKERS}", "--collectives=native")


def swaps(node: Node) -> dict[int, int]:
    """By generation, the step from which on its members used their native group."""
    return {event["generation"]: event["step"] for event in node.events("collectives")}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "deaths",
    [
        ("1:10:compute", "0:20:passed", "3:30:half"),
        soak(("2:10:enter", "0:18:compute", "1:26:half", "3:34:passed")),
    ],
    ids=["three", "four"],
)
def test_workers_are_killed_while_the_others_sum_natively(
    spawn: Spawner, tmp_path: Path, deaths: tuple[str, ...]
) -> None:
    flags = [flag for death in deaths for flag in ("--die", death)]
    node = elaunch(spawn, tmp_path, *NATIVE, script=(SCRIPT, *JOB, *SLOW, *flags), name="native")
    assert node.agent.wait(150) == 0, node.agent.tail()
    alone = elaunch(spawn, tmp_path, "--standalone", script=(SCRIPT, *JOB), name="alone")
    assert alone.agent.wait(60) == 0, alone.agent.tail()
    assert sorted(losses(node)) == list(range(STEPS))
    assert_same(losses(node), losses(alone), 1e-9)
    assert digests(node) == digests(alone)
    found = swaps(node)
    assert len(found) > len(deaths), f"each crew that lasts has a native group: {found}"
    assert min(found.values()) < 10


AGAIN = """
import os
import time
import torch
from torch import nn
import elaunch
from elaunch.workers.comm.native import groups

job, first = elaunch.init(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
meet = groups.meet
if not first and job.rank == 1:  # the other one meets what is left of the former attempt, if anything
    groups.meet = lambda *arguments: (time.sleep(1), meet(*arguments))
net = nn.Linear(4, 2)
model, optimizer = job.wrap(net), torch.optim.SGD(net.parameters(), lr=0.01)
job.register(model=net, optimizer=optimizer)
samples = [(torch.randn(4), torch.randn(2)) for _ in range(64)]
for step in job.steps(samples, global_batch_size=8, micro_batch_size=2, steps=2000):
    for inputs, targets in step:
        nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    if job._member.native.backend:
        if first and job.rank == 1:
            raise SystemExit(3)
        if not first:
            print(f"attempt 2, rank {job.rank}: {job._member.native.backend}.", flush=True)
            job.stop()
"""


@pytest.mark.timeout(150)
def test_the_next_attempt_of_torchrun_has_a_group_of_its_own(spawn: Spawner, tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    process = spawn.python(*run, script, env={"ELAUNCH_COLLECTIVES": "native"}, name="torchrun")
    assert process.wait(120) == 0, process.tail()
    for rank in range(2):
        assert f"attempt 2, rank {rank}: gloo." in process.text(), process.tail()
