"""A fit of Lightning's Trainer, when a worker dies: its table of metrics is that of an undisturbed run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers import ROOT, Spawner, soak
from tests.jobs.watch import elaunch

SCRIPT = ROOT / "tests" / "jobs" / "lightning_fit.py"

Table = list[dict[str, str]]


def table(spawn: Spawner, folder: Path, name: str, *flags: str, joins: bool = False) -> tuple[Table, list[str]]:
    target = folder / f"run-{name}"
    command = ("--standalone", "--nproc-per-node=3", "--max-restarts=2")
    node = elaunch(spawn, folder, *command, script=(SCRIPT, "--folder", str(target), *flags), name=name)
    assert node.agent.wait(90) == 0, node.agent.tail()
    assert [event["step"] for event in node.events("step")] == list(range(48))
    assert "all workers are started again" not in node.agent.text()
    assert ("joins; 3 workers go on" in node.agent.text()) == joins
    (path,) = target.glob("lightning_logs/version_*/metrics.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()))
    return rows, [event["digest"] for event in node.events("step")]


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("death", "sleep", "joins"), [("1:7", "0.25", True), soak("0:16", "0.25", True)])
def test_losses_and_validations_are_those_of_an_undisturbed_run(
    spawn: Spawner, tmp_path: Path, death: str, sleep: str, joins: bool
) -> None:
    calm, samples = table(spawn, tmp_path, "calm")
    disturbed, used = table(spawn, tmp_path, "death", "--die", death, "--sleep", sleep, joins=joins)
    assert used == samples
    assert len(disturbed) == len(calm)
    for found, expected in zip(disturbed, calm, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == value or float(found[name]) == pytest.approx(float(value), rel=1e-6), (name, expected)
