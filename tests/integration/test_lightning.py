"""Lightning's Trainer and Fabric, when workers die: what they log, keep and print is that of an undisturbed run."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path

import pytest

from tests.helpers import ROOT, Spawner, soak
from tests.jobs.watch import Node, digests, elaunch, losses, wait_for_step

FIT = ROOT / "tests" / "jobs" / "lightning_fit.py"
FABRIC = ROOT / "tests" / "jobs" / "lightning_fabric.py"
EXAMPLE = ROOT / "examples" / "train_lightning.py"

Table = list[dict[str, str]]


def run(spawn: Spawner, folder: Path, script: Path, name: str, *flags: str, workers: int = 3) -> tuple[Table, Node]:
    """Returns what a job has logged, and its node."""
    target = folder / f"run-{name}"
    command = ("--standalone", f"--nproc-per-node={workers}", "--max-restarts=4")
    node = elaunch(spawn, folder, *command, script=(script, "--folder", str(target), *flags), name=name)
    assert node.agent.wait(120) == 0, node.agent.tail()
    assert "all workers are started again" not in node.agent.text()
    (path,) = target.glob("lightning_logs/version_*/metrics.csv")
    return list(csv.DictReader(path.read_text().splitlines())), node


def said(node: Node) -> list[str]:
    """Returns what the script has printed at the end of epochs and of the fit."""
    lines = [line.partition("] ")[2] or line for line in node.agent.text().splitlines()]
    return [line for line in lines if line.startswith(("kept", "there", "stopped", "epoch ", "after: "))]


def assert_as_undisturbed(found: tuple[Table, Node], calm: tuple[Table, Node], rel: float) -> None:
    steps = [[(event["step"], event["digest"]) for event in node.events("step")] for _, node in (found, calm)]
    assert steps[0] == steps[1]
    assert [step for step, _ in steps[0]] == list(range(len(steps[0])))
    assert len(found[0]) == len(calm[0])
    for row, expected in zip(found[0], calm[0], strict=True):
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            assert row[name] == value or float(row[name]) == pytest.approx(float(value), rel=rel), (name, expected)


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("flags", "deaths", "sleep", "joins"),
    [
        ((), ["1:7"], "0.25", True),
        soak((), ["0:16"], "0.25", True),
        # Gradients of three batches, and training that stops early. Those who die first would have saved and logged.
        soak(("--accumulate", "3"), ["0:5", "2:10"], "0.05", False),
        soak(("--accumulate", "2"), ["1:2", "0:13"], "0.1", False),
    ],
    ids=["any", "first", "accumulating", "both"],
)
def test_a_fit_goes_on_as_if_nobody_had_died(
    spawn: Spawner, tmp_path: Path, flags: tuple[str, ...], deaths: list[str], sleep: str, joins: bool
) -> None:
    calm = run(spawn, tmp_path, FIT, "calm", *flags)
    dying = [flag for death in deaths for flag in ("--die", death)]
    found = run(spawn, tmp_path, FIT, "death", *flags, *dying, "--sleep", sleep)
    assert_as_undisturbed(found, calm, 1e-6)
    assert said(found[1]) == said(calm[1]) != []
    assert any(line.startswith("stopped in ") for line in said(calm[1])) == bool(flags)
    assert "joins; 3 workers go on" in found[1].agent.text() or not joins


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("flags", "deaths", "sleep"),
    [
        (("--cut", "shards"), ["1:7"], "0.1"),
        # Before the first commit, and the one who has written checkpoints.
        soak(("--cut", "shards"), ["2:0", "0:21", "3:end"], "0.1"),
        soak(("--cut", "meta", "--accumulate", "2"), ["3:3", "1:8"], "0.1"),
        soak(("--cut", "replicas"), ["1:7", "0:16"], "0.25"),
        soak(("--cut", "pairs"), ["1:7", "0:16"], "0.1"),
    ],
    ids=["any", "first", "meta", "replicas", "pairs"],
)
def test_a_fit_of_a_sharded_model_goes_on_as_if_nobody_had_died(
    spawn: Spawner, tmp_path: Path, flags: tuple[str, ...], deaths: list[str], sleep: str
) -> None:
    calm = run(spawn, tmp_path, FIT, "calm", *flags, workers=4)
    dying = [flag for death in deaths for flag in ("--die", death)]
    found = run(spawn, tmp_path, FIT, "death", *flags, *dying, "--sleep", sleep, workers=4)
    assert_as_undisturbed(found, calm, 1e-6)
    assert list(dict.fromkeys(said(found[1]))) == said(calm[1])
    # What comes after the fit has the trained module, and reads what another number of members may have written.
    (after,) = (line.split()[1:] for line in said(calm[1]) if line.startswith("after: "))
    assert float(after[0]) == float(after[2])
    text = found[1].agent.text()
    assert text.count("3 workers go on") >= 1
    waits = "3 members cannot be divided into groups of tensor_parallel_size=2: waiting for other members"
    assert (waits in text) == ("pairs" in flags)


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("flags", "deaths"),
    [
        (("--accumulation", "3"), ["0:1.7", "2:3.4"]),
        soak((), ["1:1.0", "0:2.4"]),
        soak((), ["2:1.5", "0:2.-1"]),
        (("--pairs", "1"), ["1:1.3"]),
        soak(("--pairs", "1", "--accumulation", "2"), ["2:1.0", "0:2.4"]),
        soak(("--pairs", "2"), ["2:1.5", "0:2.-1"]),
    ],
    ids=["accumulating", "first-batch", "end-of-epoch", "shards", "shards-first", "pairs"],
)
def test_a_script_of_fabric_goes_on_as_if_nobody_had_died(
    spawn: Spawner, tmp_path: Path, flags: tuple[str, ...], deaths: list[str]
) -> None:
    workers = 4 if "--pairs" in flags else 3
    calm = run(spawn, tmp_path, FABRIC, "calm", *flags, workers=workers)
    dying = [flag for death in deaths for flag in ("--die", death)]
    found = run(spawn, tmp_path, FABRIC, "death", *flags, *dying, workers=workers)
    assert_as_undisturbed(found, calm, 1e-6)
    assert len(said(calm[1])) == 3
    # Who dies after an epoch, and before the first update of the next, has its end done again.
    assert list(dict.fromkeys(said(found[1]))) == said(calm[1])


@pytest.mark.timeout(200)
def test_the_example_outlives_its_first_worker(spawn: Spawner, tmp_path: Path) -> None:
    command = ("--standalone", "--nproc-per-node=2", "--max-restarts=2")
    script = (EXAMPLE, "--epochs", "3", "--folder", str(tmp_path / "out"))
    node = elaunch(spawn, tmp_path, *command, script=script, name="example")
    wait_for_step(node, 20)
    os.kill(node.pids()["node0/0#0"], signal.SIGKILL)
    assert node.agent.wait(120) == 0, node.agent.tail()
    assert "all workers are started again" not in node.agent.text()
    assert len(losses(node)) == len(digests(node)) == 3 * 64
    (path,) = (tmp_path / "out").glob("lightning_logs/version_*/metrics.csv")
    rows = [row for row in csv.DictReader(path.read_text().splitlines()) if row["val_accuracy"]]
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert float(rows[-1]["val_accuracy"]) > 0.8
    assert "best: " in node.agent.text()
