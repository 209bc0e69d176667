"""Mixed precision with a GradScaler, through deaths and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers import Spawner
from tests.jobs.watch import assert_same, elaunch, losses

SCRIPT = Path(__file__).parent.parent / "jobs" / "amp.py"
ENDED = re.compile(r"norm (\S+) scale (\S+) grown (\S+)")


@pytest.mark.timeout(200)
def test_a_scaler_skips_the_same_step_everywhere_and_its_scale_survives_a_kill_and_a_checkpoint(
    spawn: Spawner, tmp_path: Path
) -> None:
    # Without a kill, by one worker; step 5 has an infinity.
    one = elaunch(spawn, tmp_path, "--standalone", script=(SCRIPT, "--infinite=5"), name="one")
    assert one.agent.wait(100) == 0, one.agent.tail()
    ((norm, *scale),) = ENDED.findall(one.agent.text())
    assert scale == ["8192", "1"]  # grown after steps 2, 8, 11, 14; halved after step 5

    # Three, of which the first dies right before the commit of step 9, after it has unscaled the gradients.
    die = ("--infinite=5", "--die=0:9")
    folder = tmp_path / "checkpoints"
    saves = (f"--checkpoint-dir={folder}", "--checkpoint-every=7")
    three = ("--standalone", "--nproc-per-node=3", *saves)
    node = elaunch(spawn, tmp_path, *three, script=(SCRIPT, "--steps=12", *die), name="three")
    assert node.agent.wait(100) == 0, node.agent.tail()
    found = ENDED.findall(node.agent.text())
    assert len(set(found)) == 1, found
    assert len(found) >= 2
    assert "was killed by SIGKILL" in node.agent.text()

    # And from its last checkpoint to the end.
    rest = elaunch(spawn, tmp_path, *three, script=(SCRIPT, "--infinite=5"), name="rest")
    assert rest.agent.wait(100) == 0, rest.agent.tail()
    found = ENDED.findall(rest.agent.text())
    assert len(found) == 3
    assert all([*state] == scale for _, *state in found), found
    assert all(float(each) == pytest.approx(float(norm), rel=1e-9) for each, *_ in found)
    expected = losses(one)
    for event in (*node.events("step"), *rest.events("step")):
        assert_same({0: event["loss"]}, {0: expected[event["step"]]}, 1e-9)
