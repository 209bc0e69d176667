"""Replacements of workers in a running job: forks of the warm parent, and by exec where there is none."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from tests.helpers import Spawner, is_running
from tests.jobs.watch import SCRIPT, Node, assert_gone, elaunch, wait_for, wait_for_members, wait_for_step

LIMIT_S = 60.0
TWO = ("--standalone", "--nproc-per-node=2")
ENDLESS = (SCRIPT, "--steps", "100000", "--sleep", "0.01")
GATE = "tests.jobs.plain_gate"


def forkserver(node: Node) -> psutil.Process:
    """The parent of the workers."""
    parent = psutil.Process(next(iter(node.pids().values()))).parent()
    assert parent is not None
    return parent


def warm_parents(node: Node) -> list[psutil.Process]:
    """Children of the fork server that are no workers."""
    return [
        child for child in forkserver(node).children() if child.pid not in node.all_pids() and is_running(child.pid)
    ]


def test_with_a_warm_start_the_first_workers_are_forks_too(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(spawn, tmp_path, *TWO, "--warm-start", script=ENDLESS, warm=False)
    wait_for_step(node, 2)
    assert all(is_fork(node, pid) for pid in node.pids().values())
    assert len(warm_parents(node)) == 1
    assert is_fork(node, replace_one(node))


def replace_one(node: Node) -> int:
    """Kill a worker, and wait until its replacement is a member; the pid of that."""
    before = node.pids()
    victim = sorted(before)[1]
    os.kill(before[victim], signal.SIGKILL)
    wait_for(node, lambda: victim not in node.members(), LIMIT_S, f"a generation without {victim}")
    wait_for_members(node, 2)
    (pid,) = set(node.pids().values()) - set(before.values())
    return pid


def is_fork(node: Node, pid: int) -> bool:
    """A fork shows the command line of the agent, an exec'd worker that of its script."""
    return psutil.Process(pid).cmdline() == psutil.Process(node.agent.pid).cmdline()


def descendants(node: Node) -> list[int]:
    return [process.pid for process in psutil.Process(node.agent.pid).children(recursive=True)]


@pytest.mark.timeout(200)
def test_a_replacement_is_a_fork_of_the_warm_parent_and_ends_with_the_agent(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(spawn, tmp_path, *TWO, script=ENDLESS, warm=False)
    wait_for_step(node, 2)
    wait_for(node, lambda: warm_parents(node), LIMIT_S, "the warm parent")
    first = node.pids()
    assert not any(is_fork(node, pid) for pid in first.values())
    assert is_fork(node, replace_one(node))
    assert len(set(first.values()) & set(node.pids().values())) == 1
    left = descendants(node)
    assert {*node.pids().values(), *(parent.pid for parent in warm_parents(node))} < set(left)
    node.agent.signal(signal.SIGKILL)
    node.agent.wait(LIMIT_S)
    assert_gone(left)


@pytest.mark.timeout(200)
@pytest.mark.soak
def test_a_replacement_that_waits_for_a_preload_that_fails_is_started(
    spawn: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("PLAIN_GATE", str(gate))
    node = elaunch(spawn, tmp_path, *TWO, f"--preload={GATE}", script=ENDLESS, warm=False)
    wait_for_step(node, 2)
    (parent,) = wait_for(node, lambda: warm_parents(node), LIMIT_S, "the warm parent")
    before = node.pids()
    victim = sorted(before)[0]
    os.kill(before[victim], signal.SIGKILL)
    wait_for(node, lambda: victim not in node.members(), LIMIT_S, f"a generation without {victim}")
    (tmp_path / "part").write_text("fail")
    (tmp_path / "part").rename(gate)
    wait_for_members(node, 2)
    text = node.agent.text()
    assert text.count("workers start from nothing") == 1
    assert f"workers start from nothing: cannot import {GATE}: this module cannot be imported today\n" in text
    assert_gone([parent.pid])

    left = descendants(node)
    forkserver(node).kill()
    assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
    reason = "the process that holds this node's workers was killed, and the workers with it"
    assert node.agent.text().count(reason) == 1
    assert "Traceback" not in node.agent.text()
    assert_gone(left)
