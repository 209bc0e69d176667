"""The smallest runtime of docs/hooks.md is a program that works, and what the page names is there."""

from __future__ import annotations

import math
import operator
import os
import re
import signal
from pathlib import Path

import pytest

from elaunch import attach, hooks
from elaunch.errors import UsageError
from tests.helpers import ROOT, Spawner, scaled
from tests.jobs.watch import START_S, assert_same, elaunch, losses, wait_for_step

PAGE = (ROOT / "docs" / "hooks.md").read_text()
STEPS = scaled(300, 1500)

pytestmark = pytest.mark.timeout(300)


def undisturbed() -> dict[int, float]:
    """The losses of the same training, in plain Python."""
    weight = [0.0] * 8
    found = {}
    for step in range(STEPS):
        inputs = [[math.cos(row * k + step) for k in range(8)] for row in range(64)]
        errors = [sum(map(operator.mul, inputs[row], weight)) - row / 64 for row in range(64)]
        found[step] = sum(error * error for error in errors) / 64
        for k in range(8):
            weight[k] -= 0.1 * sum(inputs[row][k] * errors[row] for row in range(64)) / 64
    return found


def test_the_smallest_runtime_survives_a_death(spawn: Spawner, tmp_path: Path) -> None:
    script = tmp_path / "smallest_runtime.py"
    (code,) = re.findall(r"```python\n(import sys\n.*?)```", PAGE, re.DOTALL)
    script.write_text(f"from tests.jobs import come_late\n\ncome_late()\n{code}")
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=3", script=(script, str(STEPS)))
    wait_for_step(node, 5)
    os.kill(node.pids()["node0/0#0"], signal.SIGKILL)
    assert node.agent.wait(START_S) == 0, node.agent.tail()
    assert [len(event["workers"]) for event in node.events("generation") if event["stage"] == "train"][:2] == [3, 2]
    assert not any(event.get("exitcode") for event in node.events("worker_exited"))
    assert_same(losses(node), undisturbed(), 1e-10)


def test_a_folder_for_checkpoints_that_nobody_would_write_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELAUNCH_CHECKPOINT_DIR", "/shared/run-17")
    with pytest.raises(UsageError, match=r"--checkpoint-dir=/shared/run-17 .* have no method hold"):
        attach(None)  # type: ignore[arg-type]


def test_every_public_name_has_a_home_and_is_told_of() -> None:
    for name in hooks.__all__:
        assert getattr(hooks, name).__name__ == name
        assert name in PAGE or name == "Moved"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hooks.nothing  # noqa: B018
