"""Frameworks stand on the default group of a job: each call they make, over links and natively, and after a death."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.devices import BACKENDS, on_gpu
from tests.helpers import Spawner
from tests.jobs.watch import elaunch

SCRIPT = Path(__file__).parent.parent / "jobs" / "c10d_calls.py"
CALLS = {
    *("all_reduce", "rooted", "gathers", "scatters", "coalesced", "objects", "messages", "barriers"),
    *("ranks_and_names", "store", "init_process_group_again", "new_groups", "groups_by_enumeration", "split_group"),
    *("device_meshes", "ddp", "fsdp2", "functional", "compiled"),
}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(("carrier", "device"), [("links", "cpu"), ("native", "cpu"), on_gpu("native", "cuda")])
def test_the_calls_of_frameworks_give_what_they_should_before_and_after_a_death(
    spawn: Spawner, tmp_path: Path, carrier: str, device: str
) -> None:
    flags = ("--standalone", "--nproc-per-node=4", "--max-restarts=0", f"--collectives={carrier}")
    node = elaunch(spawn, tmp_path, *flags, script=(SCRIPT, carrier), device=device)
    assert node.agent.wait(150) == 0, node.agent.tail()
    told = re.findall(r"calls (\d) (\w+) (.*)", node.agent.text())
    backend = BACKENDS[device] if carrier == "native" else "links"
    assert sorted((size, by) for size, by, _ in told) == [*[("3", backend)] * 3, *[("4", backend)] * 4]
    assert all(set(names.split()) == CALLS for _, _, names in told)
    # The step in which the worker died did not commit with it.
    assert len(re.findall(r"ended node0/\d#0 \[3\]", node.agent.text())) == 3
