"""A fit of Lightning's Trainer, when a worker dies: its table of metrics is that of an undisturbed run."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.helpers import ROOT, Spawner
from tests.jobs.watch import elaunch

SCRIPT = ROOT / "tests" / "jobs" / "lightning_fit.py"


def table(spawn: Spawner, folder: Path, name: str, *flags: str) -> list[dict[str, str]]:
    target = folder / f"run-{name}"
    command = ("--standalone", "--nproc-per-node=3", "--max-restarts=2")
    node = elaunch(spawn, folder, *command, script=(SCRIPT, "--folder", str(target), *flags), name=name)
    assert node.agent.wait(90) == 0, node.agent.tail()
    assert [event["step"] for event in node.events("step")] == list(range(48))
    assert "all workers are started again" not in node.agent.text()
    (path,) = target.glob("lightning_logs/version_*/metrics.csv")
    return list(csv.DictReader(path.open()))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("death", ["0:16", "1:7"])
def test_losses_and_validations_are_those_of_an_undisturbed_run(spawn: Spawner, tmp_path: Path, death: str) -> None:
    calm = table(spawn, tmp_path, "calm")
    disturbed = table(spawn, tmp_path, "death", "--die", death)
    assert len(disturbed) == len(calm)
    for found, expected in zip(disturbed, calm, strict=True):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name] == value or float(found[name]) == pytest.approx(float(value), rel=1e-6), (name, expected)
