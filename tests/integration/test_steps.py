"""`job.steps`: what stands after the loop over the micro-batches runs once a step; what runs otherwise is found."""

from __future__ import annotations

import os
import random
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.helpers import Spawner
from tests.jobs.watch import START_S, Node, elaunch, wait_for

SCRIPT = Path(__file__).parents[1] / "jobs" / "steps.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_habits.py"


def run(spawn: Spawner, folder: Path, *arguments: str, flags: tuple[str, ...] = (), code: int = 0) -> Node:
    node = elaunch(spawn, folder, "--standalone", "--nproc-per-node=3", *flags, script=(SCRIPT, *arguments))
    assert node.agent.wait(START_S) == code, node.agent.tail()
    return node


def ends(node: Node) -> set[tuple[int, str]]:
    found = re.findall(r"ended after (\d+) steps, norm (\S+)", node.agent.text())
    assert len(found) == 3, node.agent.tail()
    return {(int(steps), norm) for steps, norm in found}


@pytest.mark.timeout(200)
def test_one_workers_word_ends_the_job_on_all_of_them(spawn: Spawner, tmp_path: Path) -> None:
    ((steps, _),) = ends(run(spawn, tmp_path, "--stop-at=4"))
    assert steps == 6  # the step after the call is the last


@pytest.mark.timeout(200)
def test_a_worker_that_changes_its_weights_alone_ends_the_job(spawn: Spawner, tmp_path: Path) -> None:
    saved = ("--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every=4")
    node = run(spawn, tmp_path, "--noise-at=6", flags=("--check-replicas=100", *saved), code=1)
    # It is found before the next checkpoint, and the job does not begin again from the one before.
    assert "the workers' replicas differ after 8 steps (after 4 they were the same)" in node.agent.text()
    assert "`model.module.0.weight` is not the same on node0/1#0 as on node0/0#0, node0/2#0" in node.agent.text()
    assert node.last_step() == 7
    assert [event["stage"] for event in node.events("generation")] == ["start", "train"]


@pytest.mark.timeout(200)
def test_or_gets_the_state_of_the_others(spawn: Spawner, tmp_path: Path) -> None:
    (tmp_path / "undisturbed").mkdir()
    whole = ends(run(spawn, tmp_path / "undisturbed"))
    node = run(spawn, tmp_path, "--noise-at=11", "--steps=12", flags=("--check-replicas=4,repair",))
    assert ends(node) == whole
    (event,) = node.events("replicas_repaired")
    assert event["step"] == 12
    assert "is not the same on node0/1#0" in event["differ"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("arguments", [("--skip-at=3",), ("--old",)])
def test_an_optimizer_that_steps_on_some_workers_only_ends_the_job(
    spawn: Spawner, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    node = run(spawn, tmp_path, *arguments, code=1)
    assert (
        "in step 3, `optimizer.step()` took effect once on node0/0#0, node0/2#0; never on node0/1#0"
        in node.agent.text()
    )
    assert node.last_step() <= 4


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("kills", "steps"), [(2, 120), pytest.param(20, 5000, marks=pytest.mark.soak)])
def test_the_example_has_the_same_end_whoever_dies(spawn: Spawner, tmp_path: Path, kills: int, steps: int) -> None:
    chance = random.Random(5)

    def norms(name: str, kills: int) -> list[list[float]]:
        (tmp_path / name).mkdir()
        arguments = (EXAMPLE, "--steps", str(steps), "--loaders", "1")
        node = elaunch(spawn, tmp_path / name, "--standalone", "--nproc-per-node=3", script=arguments)
        for kill in range(kills):
            due = partial(may_lose_one, node, (kill + chance.random()) * 0.8 * steps / kills)
            wait_for(node, due, START_S, "workers that may be killed")
            os.kill(node.pids()[chance.choice(node.members())], signal.SIGKILL)
        assert node.agent.wait(START_S) == 0, node.agent.tail()
        number = r"([\d.]+e[+-]\d\d)"  # behind it another worker's line may begin: `print` writes the newline by itself
        found = re.findall(rf"after {steps} steps: weights {number} average {number}", node.agent.text())
        assert len(found) == 3, node.agent.tail()
        return [[float(norm) for norm in pair] for pair in found]

    undisturbed = norms("undisturbed", 0)
    for pair in norms("disturbed", kills):
        assert pair == pytest.approx(undisturbed[0], rel=1e-9)


def may_lose_one(node: Node, step: float) -> bool:
    """Whether the job has come so far, and more than one of its members lives."""
    members = node.members()
    return node.last_step() >= step and len(members) > 1 and set(members) <= set(node.pids())
