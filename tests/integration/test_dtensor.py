"""examples/train_dtensor.py: a loop of plain torch, on the hook protocol, in layouts that change while it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elaunch.plan import symmetric
from tests.helpers import ROOT, Spawned, Spawner, scaled, soak
from tests.jobs.watch import START_S, Node, assert_same, digests, elaunch, losses, wait_for_step

EXAMPLE = ROOT / "examples" / "train_dtensor.py"
SLEEPY = ROOT / "tests" / "jobs" / "dtensor.py"
"""The same, and it can be told to sleep in each step."""
SMALL = ("--layers=2", "--width=16", "--context=8", "--batch-size=12", "--corpus-bytes=20000", "--dtype=float64")
FOUR = ("--standalone", "--nproc-per-node=4")
LIMIT_S = 150.0
ROUNDING = 1e-10

pytestmark = pytest.mark.timeout(300)


def run(spawn: Spawner, folder: Path, workers: int, *arguments: str, script: Path = EXAMPLE) -> Node:
    flags = ("--standalone", f"--nproc-per-node={workers}")
    return elaunch(spawn, folder, *flags, script=(script, *SMALL, *arguments), name=f"n{workers}")


def check(node: Node, alone: Node) -> None:
    """That both jobs ended well, with the same samples and losses, and without any new process."""
    for one in (node, alone):
        assert one.agent.wait(LIMIT_S) == 0, one.agent.tail()
    assert_same(losses(node), losses(alone), ROUNDING)
    assert digests(node) == digests(alone)
    assert len(node.events("worker_started")) == 4
    assert len(node.events("generation")) <= 3


@pytest.mark.parametrize("bound", [(), soak(("--max-extra-bytes=300000",))])
def test_the_layout_changes_while_it_runs(spawn: Spawner, tmp_path: Path, bound: tuple[str, ...]) -> None:
    steps = ("--steps=12",)
    changes = ("--switch=3:2x2", "--switch=5:4x1", "--switch=7:1x2", "--switch=9:2x2", "--switch=10:1x4")
    node = run(spawn, tmp_path, 4, *steps, *changes, *bound)
    check(node, run(spawn, tmp_path, 1, *steps))
    assert [event["plan"] for event in node.events("decision")] == ["1x4", "2x2", "4x1", "1x2", "2x2", "1x4"]
    assert {event["members"] for event in node.events("step")} == {4}


@pytest.mark.parametrize("die", ["", soak("1:5:resume"), soak("3:5:vote")])
def test_the_frameworks_own_code_asks_for_plans(spawn: Spawner, tmp_path: Path, die: str) -> None:
    """With a death, those who are left go by the nearest layout; whoever comes makes as many calls as the others."""
    steps = ("--steps=12",)
    asks = ("--ask=3:2x2", "--ask=5:4x1", "--ask=8:2x2")
    deaths = (f"--die={die}", "--crew=4") if die else ()
    node = run(spawn, tmp_path, 4, "--layout=4x1", *steps, *asks, *deaths, script=SLEEPY)
    alone = run(spawn, tmp_path, 1, *steps)
    if not die:
        check(node, alone)
        layouts = [event["plan"] for event in node.events("decision")]
        assert layouts == ["4x1", "2x2", "4x1", "2x2"]
        return
    for one in (node, alone):
        assert one.agent.wait(LIMIT_S) == 0, one.agent.tail()
    assert_same(losses(node), losses(alone), ROUNDING)
    assert digests(node) == digests(alone)
    assert "asked for (4, 1) and goes by" in node.agent.text()


@pytest.mark.soak
def test_a_layout_that_is_asked_for_is_changed_to_between_two_steps(
    spawn: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that `ctl` finds this job, and none of another test.
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    steps = (f"--steps={scaled(40, 300)}",)
    alone = run(spawn, tmp_path, 1, *steps)
    assert alone.agent.wait(LIMIT_S) == 0, alone.agent.tail()
    # So that it still runs when `ctl` has started.
    node = run(spawn, tmp_path, 4, *steps, f"--sleep={scaled(15, 5) / 100}", script=SLEEPY)
    wait_for_step(node, 3)
    file = tmp_path / "my.plan"
    file.write_text(str(symmetric(["a", "b", "c", "d"], 1, 12, 6, dp=2, tp=2)))
    asked = spawn.elaunch("ctl", "plan", "--set", str(file), name="ctl")
    assert asked.wait(LIMIT_S) == 0, asked.tail() + node.agent.tail()
    assert "all 4 members have changed over" in asked.text()
    check(node, alone)
    assert [event["plan"] for event in node.events("decision")] == ["1x4", "2x2"]


def lines(process: Spawned) -> list[str]:
    """What the first worker has said of its steps, without the layout, after a good end."""
    assert process.wait(START_S) == 0, process.tail()
    return re.findall(r"^(step .*)  layout", process.text(), re.MULTILINE)


@pytest.mark.soak
def test_it_runs_under_torchrun_and_alone(spawn: Spawner) -> None:
    steps = ("--steps=4", "--log-every=1")
    alone = lines(spawn.python(EXAMPLE, *SMALL, *steps, name="alone"))
    assert len(alone) == 4
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    assert lines(spawn.python(*torchrun, EXAMPLE, *SMALL, *steps, "--switch=2:2x1", name="torchrun")) == alone
