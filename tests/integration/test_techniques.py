"""What scripts do with gradients, where a framework attaches by its hooks: the column of docs/running.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import ROOT, Spawner
from tests.jobs.techniques import TECHNIQUES
from tests.jobs.watch import elaunch

SCRIPT = ROOT / "tests" / "jobs" / "techniques.py"


@pytest.mark.timeout(120)
def test_each_technique_trains_two_members_as_one_process_of_plain_torch(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=0", script=(SCRIPT,))
    assert node.agent.wait(100) == 0, node.agent.tail()
    lines = node.agent.text().splitlines()
    for technique in TECHNIQUES:
        assert lines.count(f"as in plain torch: {technique.name}") == 2, node.agent.tail()
    assert lines.count("sparse: a torch.sparse_coo tensor cannot be sent: hand over tensor.to_dense()") == 2
