"""Workers whose departure is announced: what only they have moves to the others first, and no step is interrupted."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.workers.plan import Plan
from tests.faults import test_dtensor as dtensor
from tests.faults.test_hybrid import SCRIPT, reference, weights
from tests.helpers import Spawner
from tests.jobs.watch import Node, assert_same, digests, elaunch, losses, wait_for_members, wait_for_step

LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)


def start(etcd: EmbeddedEtcd, spawn: Spawner, folder: Path, script: Path, *arguments: str) -> list[Node]:
    """Two nodes of two workers each."""
    flags = (
        "--nnodes=1:2",
        "--nproc-per-node=2",
        f"--rdzv-endpoint={etcd.endpoint}",
        "--rdzv-id=job",
        "--rdzv-conf=lease_ttl=2,attach_timeout=90,last_call_timeout=60",
        "--consistency=bitwise",
    )
    return [
        elaunch(spawn, folder, *flags, f"--node-name={name}", script=(script, *arguments), name=name)
        for name in ("a", "b")
    ]


@pytest.mark.parametrize("shape", [("--dp=2", "--pp=2"), ("--dp=1", "--pp=4")], ids=["DP x PP", "PP"])
@pytest.mark.parametrize("bound", [(), ("--max-extra-bytes", "262144")], ids=["in a step", "pausing"])
def test_a_node_that_drains_gives_away_what_only_it_has(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path, shape: tuple[str, ...], bound: tuple[str, ...]
) -> None:
    """There are no copies of any state."""
    steps = ("--steps", "60")
    expected = reference(spawn, tmp_path, *steps)
    gate = tmp_path / "gate"
    both = start(etcd, spawn, tmp_path, SCRIPT, *steps, "--snapshots=0", *shape, *bound, "--hold", f"20:{gate}")
    wait_for_members(both, 4)
    wait_for_step(both, 10)
    staying = next(node for node in both if node.events("step"))
    leaving = next(node for node in both if node is not staying)
    leaving.agent.signal(signal.SIGTERM)
    leaving.agent.wait_for_text("leave at the next step boundary", 30)
    gate.touch()
    assert leaving.agent.wait(60) == 0, leaving.agent.tail()
    assert [event.get("exitcode") for event in leaving.events("worker_exited")] == [0, 0]
    assert staying.agent.wait(LIMIT_S) == 0, staying.agent.tail()
    found, samples, ended = expected
    assert losses(both) == found
    assert digests(both) == samples
    assert weights(staying) == ended
    # All of it moved while those who leave were still members; then they had nothing, and nothing moved.
    name = leaving.events("worker_started")[0]["worker"].partition("/")[0]
    decisions = staying.events("decision")
    plans = [Plan.parse(event["plan"]) for event in decisions]
    parted = next(at for at, plan in enumerate(plans) if set(plan.idle) == {f"{name}/0#0", f"{name}/1#0"})
    assert plans[parted + 1].tiles == plans[parted].tiles
    assert not plans[parted + 1].idle
    assert decisions[parted + 1]["policy"] == "stay"
    moved = {event["cause"]: event["bytes_moved"] for event in staying.events("transition")}
    assert moved[f"node {name} leaves"] == 0
    assert all("died" not in event["cause"] and "lost" not in event["cause"] for event in staying.events("generation"))


def test_a_runtime_of_ones_own_is_told_who_leaves(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    """Plain tensor parallelism: each worker has a quarter of the model that nobody else has."""
    steps = ("--steps=60",)
    found, samples = dtensor.reference(spawn, tmp_path, *steps)
    slowly = "--sleep=0.05"
    both = start(etcd, spawn, tmp_path, dtensor.SCRIPT, *dtensor.SMALL, *steps, "--layout=1x4", slowly)
    wait_for_members(both, 4)
    wait_for_step(both, 5)
    first = next(node for node in both if node.events("step"))
    other = next(node for node in both if node is not first)
    first.agent.signal(signal.SIGTERM)  # the first members: the mesh is made of the others
    assert first.agent.wait(60) == 0, first.agent.tail()
    assert other.agent.wait(LIMIT_S) == 0, other.agent.tail()
    assert [event.get("exitcode") for event in first.events("worker_exited")] == [0, 0]
    assert_same(losses(both), found, dtensor.ROUNDING)
    assert digests(both) == samples
    assert [event["plan"] for node in (first, other) for event in node.events("decision")] == ["1x4", "1x2", "1x2"]
