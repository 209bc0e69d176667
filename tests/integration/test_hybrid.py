"""A model in layers, cut over workers by a plan: whole jobs from the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elaunch.plan import Plan
from tests.helpers import ROOT, Spawned, Spawner
from tests.jobs.watch import START_S, assert_gone, elaunch

SCRIPT = ROOT / "tests" / "jobs" / "layers.py"
EXAMPLE = ROOT / "examples" / "train_gpt_hybrid.py"
SMALL = ("--layers=2", "--width=16", "--context=8", "--steps=3", "--log-every=1", "--corpus-bytes=20000")

pytestmark = pytest.mark.timeout(300)


def lines(process: Spawned) -> list[str]:
    """What the first worker has said of its steps, after a good end."""
    assert process.wait(START_S) == 0, process.tail()
    return re.findall(r"^step .*", process.text(), re.MULTILINE)


@pytest.mark.soak
def test_the_steps_are_bitwise_the_same_under_any_launcher_and_plan(spawn: Spawner, tmp_path: Path) -> None:
    alone = lines(spawn.python(SCRIPT, "--pp=1", name="alone"))
    assert len(alone) == 6
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert lines(spawn.python(*torchrun, SCRIPT, "--pp=2", name="torchrun")) == alone
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=4", script=(SCRIPT, "--dp=2", "--pp=2"))
    assert lines(node.agent) == alone
    assert "layers [0, 1]" in node.agent.text()
    steps = node.events("step")
    assert [event["step"] for event in steps] == list(range(6))
    assert {event["members"] for event in steps} == {4}
    assert [f"step {event['step']} loss {event['loss']!r}" for event in steps] == [
        line.partition(" norm")[0] for line in alone
    ]
    (decision,) = node.events("decision")
    assert decision["policy"] == "given"
    assert Plan.parse(decision["plan"]).workers == tuple(node.members())


@pytest.mark.soak
def test_the_example_trains_by_a_plan_from_a_file(spawn: Spawner, tmp_path: Path) -> None:
    shown = spawn.python(EXAMPLE, *SMALL, "--pp=2", "--dp=1", "--show-plan", name="plan")
    assert shown.wait(START_S) == 0, shown.tail()
    file = tmp_path / "my.plan"
    # The second stage has two replicas, with six of eight and two of eight rows.
    file.write_text(
        "plan layers 4 batch 64 micro-batch 8 zero interleaved\n"
        "layers 0:2 samples 0:64/8 workers w0\n"
        "layers 2:4 samples 0:6 8:14 16:22 24:30 32:38 40:46 48:54 56:62 workers w1\n"
        "layers 2:4 samples 6:8 14:16 22:24 30:32 38:40 46:48 54:56 62:64 workers w2\n"
    )
    cut = elaunch(
        spawn, tmp_path, "--standalone", "--nproc-per-node=3", script=(EXAMPLE, *SMALL, f"--plan={file}"), name="cut"
    )
    alone = spawn.python(EXAMPLE, *SMALL, name="alone")
    assert lines(cut.agent) == lines(alone)
    assert Plan.parse(shown.text()).workers == ("w0", "w1")


def test_a_plan_for_another_number_of_workers_is_refused(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=3", script=(SCRIPT, "--pp=2"))
    assert node.agent.wait(START_S) == 1, node.agent.tail()
    assert "the plan is for 2 workers and the job has 3 (node0/0#0, node0/1#0, node0/2#0); start as many" in (
        node.agent.text()
    )


@pytest.mark.parametrize("layer", [0, 3])
def test_a_layer_that_raises_brings_its_traceback_and_ends_the_job(spawn: Spawner, tmp_path: Path, layer: int) -> None:
    node = elaunch(
        spawn, tmp_path, "--standalone", "--nproc-per-node=4", script=(SCRIPT, "--dp=2", f"--raise-at={layer}:2")
    )
    assert node.agent.wait(START_S) == 1, node.agent.tail()
    text = node.agent.text()
    assert "RuntimeError: the layer that breaks the script" in text
    assert 'layers.py", line ' in text
    assert node.last_step() == 1
    assert_gone(node.all_pids())
