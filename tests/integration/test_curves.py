"""The lines by which docs/observing.md has a script write to TensorBoard and W&B do so, also after rank 0 is lost."""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import ROOT, Spawner
from tests.jobs import loggers
from tests.jobs.watch import START_S, elaunch, losses

PAGE = (ROOT / "docs" / "observing.md").read_text().partition("## TensorBoard and W&B")[2]
STEPS, DEATH = 12, 5
SCRIPT = """
import os, signal
import torch
from torch import nn
from tests.jobs import come_late, loggers
from tests.jobs.eager import compile_nothing
from tests.jobs.train import Samples
loggers.install()
from torch.utils.tensorboard import SummaryWriter
import wandb
import elaunch

come_late()
compile_nothing()
job = elaunch.init()
torch.manual_seed(1)
model = job.wrap(nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)).double())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
job.register(model=model, optimizer=optimizer)
{writer}
begun = False
data = Samples(torch.float64)
for step in job.steps(data, global_batch_size=12, micro_batch_size=3, seed=7, steps={steps}):
    for points, values in step:
        loss = (model(points) - values).square().mean()
        loss.backward()
        job.report(loss=loss)
    optimizer.step()
    if job.rank == 0 and not begun:
        {run}
        begun = True
{lines}
    if job.rank == 0 and step.number == {death} and os.environ["ELAUNCH_WORKER"].endswith("/0#0"):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def the_script() -> str:
    (writer,) = re.findall(r"`(writer = SummaryWriter\(.*?\))`", PAGE)
    (run,) = re.findall(r"`(wandb\.init\(.*?\))`", PAGE)
    lines = re.findall(r"^    (if job\.rank == 0: .*?)$", PAGE, re.MULTILINE)
    assert [line.rpartition("# ")[2] for line in lines] == ["TensorBoard", "W&B"]
    inner = "\n".join(f"    {line}" for line in lines)
    return SCRIPT.format(writer=writer, run=run, lines=inner, steps=STEPS, death=DEATH)


@pytest.mark.timeout(180)
def test_each_committed_step_is_logged_by_whoever_has_rank_0(spawn: Spawner, tmp_path: Path) -> None:
    script, curves = tmp_path / "curves.py", tmp_path / "curves.jsonl"
    script.write_text(the_script())
    flags = ("--standalone", "--nproc-per-node=2", "--node-name=a")
    node = elaunch(spawn, tmp_path, *flags, script=(script,), environment={"CURVES": str(curves)})
    assert node.agent.wait(START_S) == 0, node.agent.tail()
    rows: list[dict[str, Any]] = list(map(json.loads, curves.read_text().splitlines()))
    for tool in ("tensorboard", "wandb"):
        of_tool = [row for row in rows if row["tool"] == tool]
        assert [row["step"] for row in of_tool] == list(range(STEPS)), tool
        assert all(row["loss"] > 0 for row in of_tool)
        assert {row["to"] for row in of_tool} == {"runs/run-17" if tool == "tensorboard" else "run-17"}
        assert {row["worker"] for row in of_tool[: DEATH + 1]} == {"a/0#0"}
        assert "a/0#0" not in {row["worker"] for row in of_tool[DEATH + 1 :]}
    assert {row["members"] for row in rows if row["tool"] == "wandb" and row["step"] <= DEATH} == {2}
    assert set(losses(node)) == set(range(STEPS))


def test_the_writer_of_these_tests_takes_what_torchs_takes() -> None:
    """Torch's own cannot be imported without the package tensorboard."""
    tree = ast.parse((Path(torch.__file__).parent / "utils" / "tensorboard" / "writer.py").read_text())
    (real,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == "SummaryWriter")
    methods = {
        one.name: [given.arg for given in one.args.args] for one in real.body if isinstance(one, ast.FunctionDef)
    }
    for name in ("__init__", "add_scalar", "flush"):
        assert list(inspect.signature(getattr(loggers.SummaryWriter, name)).parameters) == methods[name]
