"""examples/train_fsdp2_hooks.py: FSDP2 on the hooks, with copies, so that the others go on whoever dies."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.helpers import ROOT, Spawner, soak
from tests.jobs.watch import Node, elaunch, wait_for_members, wait_for_step

SCRIPT = ROOT / "tests" / "jobs" / "fsdp_hooks.py"
STEPS = 14
SMALL = (f"--steps={STEPS}", "--layers=2", "--width=16", "--batch-size=12", "--corpus-bytes=20000", "--log-every=1")

pytestmark = pytest.mark.timeout(200)


def run(spawn: Spawner, folder: Path, workers: int, *flags: str, deaths: tuple[str, ...] = (), code: int = 0) -> Node:
    command = ("--standalone", f"--nproc-per-node={workers}", "--max-restarts=6")
    script: tuple[str | Path, ...] = (SCRIPT, *SMALL, *flags, *(f"--die={one}" for one in deaths))
    node = elaunch(spawn, folder, *command, script=script, name="deaths" if deaths else "calm")
    assert node.agent.wait(100) == code, node.agent.tail()
    return node


def weights(node: Node) -> float:
    """Of the models at the end; those of all workers are the same."""
    found = set(re.findall(r"weights (\S+)\.\n", node.agent.text()))
    assert len(found) == 1, node.agent.tail()
    return float(found.pop())


def assert_as_undisturbed(node: Node, calm: Node) -> None:
    """Steps may be told of twice where the job has gone back to a copy of the one before."""
    expected = {event["step"]: event for event in calm.events("step")}
    assert list(expected) == list(range(STEPS))
    seen = node.events("step")
    assert {event["step"] for event in seen} == set(expected)
    for event in seen:
        assert event["digest"] == expected[event["step"]]["digest"]
        assert event["loss"] == pytest.approx(expected[event["step"]]["loss"], rel=1e-9)
    assert weights(node) == pytest.approx(weights(calm), rel=1e-9)


@pytest.mark.parametrize(
    ("workers", "flags", "deaths"),
    [
        (3, (), ("1:3:forward", "0:8:backward")),
        soak(3, (), ("0:3:forward", "2:3:forward")),
        soak(3, (), ("0:1:barrier", "2:9:backward")),
        soak(4, ("--replicas=2",), ("3:3:forward", "0:8:backward")),
        soak(4, ("--replicas=2", "--copies=0"), ("3:3:forward",)),
        soak(4, (), ("0:2:forward", "1:5:backward", "2:8:barrier")),
        soak(2, (), ("1:0:forward", "0:7:barrier")),
    ],
)
def test_the_others_go_on_whoever_dies(
    spawn: Spawner, tmp_path: Path, workers: int, flags: tuple[str, ...], deaths: tuple[str, ...]
) -> None:
    calm = run(spawn, tmp_path, workers, *flags)
    node = run(spawn, tmp_path, workers, *flags, deaths=deaths)
    assert_as_undisturbed(node, calm)
    assert {event["attempt"] for event in node.events("worker_started") if "attempt" in event} <= {0}


def test_a_node_that_drains_gives_its_shards_away(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    flags = ("--nnodes=1:2", "--nproc-per-node=2", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job")
    script = (SCRIPT, *SMALL, "--sleep=0.2")
    nodes = [elaunch(spawn, tmp_path, *flags, f"--node-name={name}", script=script, name=name) for name in "ab"]
    wait_for_members(nodes, 4)
    wait_for_step(nodes, 3)
    nodes[1].agent.signal(signal.SIGTERM)
    for node in nodes:
        assert node.agent.wait(100) == 0, node.agent.tail()
    assert "node b leaves; 2 workers go on" in nodes[0].agent.text()
    assert [event.get("exitcode") for event in nodes[1].events("worker_exited")] == [0, 0], nodes[1].agent.tail()
    calm = run(spawn, tmp_path, 4)
    expected = {event["step"]: (event["digest"], event["loss"]) for event in calm.events("step")}
    found = {event["step"]: (event["digest"], event["loss"]) for node in nodes for event in node.events("step")}
    assert found.keys() == expected.keys()
    for step, (digest, loss) in expected.items():
        assert found[step] == (digest, pytest.approx(loss, rel=1e-9))
    assert weights(nodes[0]) == pytest.approx(weights(calm), rel=1e-9)


def test_where_a_copy_was_not_complete_one_step_more_is_done_again(spawn: Spawner, tmp_path: Path) -> None:
    node = run(spawn, tmp_path, 3, deaths=("0:6:copy",))
    assert "copies of step 6 were not complete when a worker was lost: going on from step 5" in node.agent.text()
    assert_as_undisturbed(node, run(spawn, tmp_path, 3))


@pytest.mark.soak
def test_without_copies_pure_shards_are_lost_with_a_worker(spawn: Spawner, tmp_path: Path) -> None:
    node = run(spawn, tmp_path, 3, "--copies=0", deaths=("1:3:forward",))
    assert "no surviving worker has all of " in node.agent.text()
    assert [event["step"] for event in node.events("step")] == [0, 1, 2, *range(STEPS)], "from the top, as restarts say"
