"""Workers that wait for one that does nothing for a while: the user hears of it, and nobody is harmed."""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers import Spawner
from tests.jobs.watch import SCRIPT, elaunch


def test_a_wait_for_a_peer_that_is_not_judged_yet_is_told_of(spawn: Spawner, tmp_path: Path) -> None:
    """It pauses in the third step, and nothing is judged before ten."""
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=2", script=(SCRIPT, "--pause", "0:3:14"))
    assert node.agent.wait(100) == 0, node.agent.tail()
    # Its training thread waits for the other worker, or for the thread that reduces gradients, which does.
    told = r"worker node0/1#0 has waited 10 s for (node0/0#0, in step 3, operation|other members, in step 3)"
    assert re.search(told, node.agent.text()), node.agent.tail()
    assert len(node.all_pids()) == 2


def test_a_peer_that_hangs_in_its_first_steps_is_replaced_after_their_limit(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--steps", "20", "--pause", "0:3:1000")
    flags = ("--standalone", "--nproc-per-node=2", "--rdzv-conf=first_steps_timeout=4")
    node = elaunch(spawn, tmp_path, *flags, script=script)
    assert node.agent.wait(100) == 0, node.agent.tail()
    told = (
        r"worker node0/0#0 hangs: in step 3, asleep for 4\.\d s, the limit is 4\.0 s until 10 steps have been seen "
        r"\(--rdzv-conf first_steps_timeout=SECONDS gives it more\); .*; it is killed\n"
    )
    assert re.search(told, node.agent.text()), node.agent.tail()
    assert [event["worker"] for event in node.events("hang")] == ["node0/0#0"]
    assert node.last_step() == 19
