"""What a script does in its own time, outside its model and the collectives, is no hang; what hangs in a step is."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.detect.hang import CHANGE_S
from tests.helpers import Spawner, soak
from tests.jobs.watch import SCRIPT, elaunch, losses

TWO = ("--standalone", "--nproc-per-node=2")
UPLOADS = ("--sleep", "0.01", "--upload", "0:15:4")
LIMIT_S = 120.0

pytestmark = pytest.mark.timeout(300)


def test_one_that_uploads_for_all_is_waited_for(spawn: Spawner, tmp_path: Path) -> None:
    """It waits for a server far longer than a step takes, after the optimizer's step and between two micro-batches."""
    script = (SCRIPT, "--steps=32", *UPLOADS, "--chat", "0:22:4")
    node = elaunch(spawn, tmp_path, *TWO, script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    assert node.events("hang") == []
    assert [event.get("exitcode") for event in node.events("worker_exited")] == [0, 0]
    assert len(losses(node)) == 32
    assert len([event for event in node.events("step") if event["seconds"] > 3]) == 3, "two uploads and a line of a log"


@pytest.mark.parametrize("kind", ["stop", soak("lock"), soak("call")])
def test_a_hang_in_a_step_is_found_at_once_although_scripts_pause(spawn: Spawner, tmp_path: Path, kind: str) -> None:
    node = elaunch(spawn, tmp_path, *TWO, script=(SCRIPT, "--steps=32", *UPLOADS, "--hang", f"1:22:{kind}"))
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    (event,) = node.events("hang")
    assert event["worker"] == "node0/1#0"
    limit_s = event["stopped_s"] if kind == "stop" else event["limit_s"]
    assert limit_s < 3, "uploads of 4 s are no reason to wait longer in a step"
    assert len(losses(node)) == 32


@pytest.mark.soak
def test_a_script_that_does_not_come_back_from_its_own_code_is_replaced(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--steps=32", "--sleep=0.01", "--between", "--hang", "1:22:sleep")
    node = elaunch(spawn, tmp_path, *TWO, script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    (event,) = node.events("hang")
    assert (event["worker"], event["doing"]) == ("node0/1#0", "before step 22, asleep")
    assert CHANGE_S < event["limit_s"] < CHANGE_S + 3
    assert len(losses(node)) == 32
