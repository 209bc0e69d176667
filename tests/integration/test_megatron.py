"""Megatron-core in an elastic function: replicas lost, and tensor- and pipeline-parallel sizes that follow the members.

All runs train alike whatever their layout: the losses are those of one worker that trains alone.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.helpers import ROOT, Spawner, once_a_session, soak
from tests.jobs.watch import Node, elaunch, kill_node, wait_for, wait_for_members

SCRIPT = ROOT / "tests" / "jobs" / "megatron_gpt.py"
STEPS = 12

Step = tuple[int, float, str]


def start(spawn: Spawner, folder: Path, *flags: str, workers: int, restarts: int = 3, name: str) -> Node:
    command = ("--standalone", f"--nproc-per-node={workers}", f"--max-restarts={restarts}")
    return elaunch(spawn, folder, *command, script=(SCRIPT, *flags), name=name, environment={"OMP_NUM_THREADS": "1"})


def steps(node: Node) -> list[Step]:
    """Number, loss and samples of each step, as logged."""
    return [(event["step"], event["loss"], event["digest"]) for event in node.events("step")]


def run(spawn: Spawner, folder: Path, *flags: str, workers: int, restarts: int = 3, name: str) -> Node:
    node = start(spawn, folder, "--steps", str(STEPS), *flags, workers=workers, restarts=restarts, name=name)
    assert node.agent.wait(100) == 0, node.agent.tail()
    return node


def assert_as_alone(
    spawn: Spawner, folder: Path, node: Node | list[Node], n_steps: int = STEPS, rel: float = 1e-6
) -> None:
    found = sorted(step for one in (node if isinstance(node, list) else [node]) for step in steps(one))

    def alone() -> list[Step]:
        calm = start(spawn, folder, "--steps", str(n_steps), workers=1, restarts=0, name=f"alone-{n_steps}")
        assert calm.agent.wait(100) == 0, calm.agent.tail()
        return steps(calm)

    expected = once_a_session(("megatron", n_steps), alone)
    assert [(step, digest) for step, _, digest in found] == [(step, digest) for step, _, digest in expected]
    assert len(expected) == n_steps
    for (step, loss, _), (_, wanted, _) in zip(found, expected, strict=True):
        assert loss == pytest.approx(wanted, rel=rel), f"step {step}"
    assert expected[-1][1] != pytest.approx(expected[0][1], rel=1e-3), "nothing was learned that could be lost"


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("layouts", "flags", "while_3"),
    [
        soak("2x1,1x1", (), "TP 1, PP 1, DP 3"),
        ("1x2,1x1", ("--sharded-optimizer",), "TP 1, PP 1, DP 3"),
        soak("1x2,1x1", (), "TP 1, PP 1, DP 3"),
        soak("2x2,1x1", (), "TP 1, PP 1, DP 3"),
        soak("1x1", ("--sharded-optimizer",), "TP 1, PP 1, DP 3"),
    ],
)
def test_a_replica_is_lost_and_the_others_go_on_in_the_layout_that_fits_them(
    spawn: Spawner, tmp_path: Path, layouts: str, flags: tuple[str, ...], while_3: str
) -> None:
    deaths = ("--die", "3:4", "--sleep", "0.02")
    # A replacement could be there before the others have entered again.
    node = run(spawn, tmp_path, "--layouts", layouts, *deaths, *flags, workers=4, restarts=0, name="deaths")
    assert f"{while_3}, step 4" in node.agent.text()
    assert {event["attempt"] for event in node.events("worker_started") if "attempt" in event} <= {0}
    assert_as_alone(spawn, tmp_path, node)


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_members_that_fit_no_layout_wait_for_others(spawn: Spawner, tmp_path: Path) -> None:
    flags = ("--layouts", "2x1", "--sharded-optimizer", "--die", "1:4", "--join-after", str(tmp_path / "entered-again"))
    node = run(spawn, tmp_path, *flags, workers=4, name="wait")
    assert (
        "3 members fit none of the (tensor, pipeline) sizes ((2, 1),): waiting for other members" in node.agent.text()
    )
    assert "entry 3: TP 2, PP 1, DP 2, step 4" in node.agent.text()
    assert_as_alone(spawn, tmp_path, node)


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("flags", [(), ("--sharded-optimizer",)])
def test_with_tensor_and_pipeline_parallelism_a_node_is_lost_and_the_other_goes_on(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """The node has the second stage of both replicas; the first worker that dies leaves too few for these sizes."""
    n_steps = 40
    conf = "--rdzv-conf=lease_ttl=2,last_call_timeout=0,attach_timeout=90"
    common = ("--nnodes=1:2", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", conf, "--nproc-per-node=4")
    script: tuple[Path | str, ...] = (SCRIPT, "--layouts", "2x2", "--steps", str(n_steps), "--sleep", "0.3", *flags)

    def add(name: str) -> Node:
        more = (f"--node-name={name}", "--max-restarts=2")
        return elaunch(spawn, tmp_path, *common, *more, script=script, name=name, environment={"OMP_NUM_THREADS": "1"})

    nodes = [add("a")]
    wait_for(nodes, lambda: nodes[0].pids(), 60, "the first node's workers")
    nodes.append(add("b"))
    wait_for_members(nodes, 8)
    os.kill(nodes[0].pids()["a/1#0"], signal.SIGKILL)
    wait_for(nodes, lambda: "a/1#1" in nodes[0].members(), 90, "another worker in its place")
    wait_for_members(nodes, 8)
    kill_node(nodes[1])
    wait_for(nodes, lambda: "TP 2, PP 2, DP 1, step" in nodes[0].agent.text().rpartition("DP 2")[2], 60, "one replica")
    assert nodes[0].agent.wait(150) == 0, nodes[0].agent.tail()
    assert "7 members fit none of the (tensor, pipeline) sizes ((2, 2),)" in nodes[0].agent.text()
    assert len(nodes[0].events("worker_started")) == 5, "four and one"
    assert_as_alone(spawn, tmp_path, nodes, n_steps)


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_the_distributed_optimizer_refuses_another_tensor_parallel_size(spawn: Spawner, tmp_path: Path) -> None:
    flags = ("--layouts", "2x1,1x1", "--sharded-optimizer", "--die", "1:4", "--steps", "8", "--sleep", "0.3")
    node = start(spawn, tmp_path, *flags, workers=4, restarts=1, name="refused")
    node.agent.wait(100)
    assert "with Megatron's distributed optimizer the tensor-parallel size cannot change" in node.agent.text()


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("layouts", "flags"), [("2x1,1x1", ()), ("1x2,1x1", ()), ("1x2,1x1", ("--sharded-optimizer",))]
)
def test_ten_random_kills_leave_the_losses_as_they_are(
    spawn: Spawner, tmp_path: Path, layouts: str, flags: tuple[str, ...]
) -> None:
    n_steps = 80
    node = start(
        spawn,
        tmp_path,
        *("--layouts", layouts, "--steps", str(n_steps), "--sleep", "0.1", *flags),
        workers=4,
        restarts=12,
        name="kills",
    )
    choose = random.Random(layouts)
    for number in range(10):
        wait_for(node, lambda: node.last_step() >= 2 + 7 * number and len(node.members()) == 4, 100, "more steps")  # noqa: B023
        os.kill(choose.choice(sorted(node.pids().values())), signal.SIGKILL)
        wait_for(node, lambda: len(node.events("worker_exited")) > number, 60, "the kill")  # noqa: B023
    assert node.agent.wait(150) == 0, node.agent.tail()
    assert_as_alone(spawn, tmp_path, node, n_steps, rel=1e-5)  # rounding of 80 steps in single precision
