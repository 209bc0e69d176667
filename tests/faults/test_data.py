"""Workers die whose samples are loaded ahead by processes: no sample is lost or used twice, and no process stays."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.faults.test_workers import ending, reference
from tests.helpers import Spawner, is_running, soak, wait_until
from tests.jobs.watch import SCRIPT, Node, assert_same, digests, elaunch, losses, wait_for_members, wait_for_step

THREE = ("--standalone", "--nproc-per-node=3")
STEPS = ("--steps", "60")


def loading(node: Node, worker: str) -> list[psutil.Process]:
    """The processes that load for a worker, when it has both of them."""
    found: list[psutil.Process] = []

    def all_there() -> bool:
        pid = node.pids().get(worker)
        children = psutil.Process(pid).children() if pid else []
        # multiprocessing has one more to clean up after those that it spawns.
        found[:] = [one for one in children if "resource_tracker" not in " ".join(one.cmdline())]
        return len(found) == 2

    wait_until(all_there, 60, f"two processes that load for {worker}")
    return found


@pytest.mark.parametrize(
    ("arguments", "launched"),
    [
        (("--data-loader",), ()),
        soak(("--start-method", "spawn"), ()),
        soak((), ("--warm-start",)),
    ],
    ids=["handed over", "spawned", "all forked from the warm parent"],
)
@pytest.mark.timeout(240)
def test_a_kill_loses_no_sample_and_leaves_no_loader_and_the_replacement_has_its_own(
    spawn: Spawner, tmp_path: Path, arguments: tuple[str, ...], launched: tuple[str, ...]
) -> None:
    expected, samples, norm = reference(spawn, tmp_path, *STEPS)
    script: tuple[str | Path, ...] = (SCRIPT, *STEPS, "--loaders", "2", "--load", "0.002", "--crew", "3", *arguments)
    node = elaunch(spawn, tmp_path, *THREE, *launched, script=script)
    wait_for_step(node, 5)
    before, victim = node.pids(), "node0/1#0"
    orphans = loading(node, victim)
    os.kill(before[victim], signal.SIGKILL)
    wait_until(lambda: not any(is_running(one.pid) for one in orphans), 30, "the loaders of the killed worker to end")
    wait_for_members(node, 3)
    assert len(loading(node, "node0/1#1")) == 2
    assert node.agent.wait(100) == 0, node.agent.tail()
    survivors = [event for event in node.events("worker_exited") if event["worker"] in ("node0/0#0", "node0/2#0")]
    assert [event.get("exitcode") for event in survivors] == [0, 0]
    assert_same(losses(node), expected, 1e-9)
    assert digests(node) == samples
    assert all(float(each) == pytest.approx(float(norm), rel=1e-9) for each in ending(node.agent.text()))
