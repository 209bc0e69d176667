"""All nodes of a failure domain are lost at once: copies of their state are in another one.

`etcd` stands before `spawn` in the signatures, so that the agents end while the store still serves.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.faults import test_hybrid as hybrid
from tests.faults.test_spares import documents
from tests.helpers import Spawner, soak
from tests.integration import test_reentry as reentry
from tests.jobs.watch import Node, assert_gone, digests, elaunch, losses, wait_for, wait_for_members, wait_for_step

LIMIT_S = 150.0
DOMAINS = {"a": "left", "b": "left", "c": "right", "d": "right"}

pytestmark = pytest.mark.timeout(400)


def start(etcd: EmbeddedEtcd, spawn: Spawner, folder: Path, script: tuple[str | Path, ...], *flags: str) -> list[Node]:
    """Four nodes of one worker each, which have come in this order, the first two in one domain."""
    conf = "--rdzv-conf=lease_ttl=300,last_call_timeout=60,attach_timeout=90"
    nodes: list[Node] = []
    for name, domain in DOMAINS.items():
        own = (f"--node-name={name}", f"--failure-domain={domain}")
        job = ("--nnodes=1:4", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", conf)
        nodes.append(elaunch(spawn, folder, *job, *own, *flags, script=script, name=name))
        # The order in which nodes join is that of their ranks.
        wait_for(nodes, lambda name=name: documents(etcd).node(name) is not None, 60, f"{name} to join")  # type: ignore[misc]
    return nodes


def lose(nodes: list[Node]) -> None:
    """All of them at once."""
    for node in nodes:
        node.agent.signal(signal.SIGKILL)
    for node in nodes:
        node.agent.wait(10)
        assert_gone(node.all_pids())


def test_a_model_in_layers_survives_the_loss_of_a_domain(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    steps = ("--steps", "14")
    expected = hybrid.reference(spawn, tmp_path, *steps)
    gate = tmp_path / "gate"
    script = (hybrid.SCRIPT, "--dp=1", "--pp=4", *steps, "--hold", f"8:{gate}")
    nodes = start(etcd, spawn, tmp_path, script, "--consistency=bitwise")
    wait_for_members(nodes, 4)
    wait_for_step(nodes, 7)
    assert [worker.partition("/")[0] for worker in nodes[0].members()] == list(DOMAINS), "neighbours share a domain"
    left = [node for node in nodes if nodes.index(node) < 2]
    lose(left)
    gate.touch()
    right = nodes[2:]
    for node in right:
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    found, samples, ended = expected
    assert losses(nodes) == found, "bit by bit"
    assert digests(nodes) == samples
    lags = {event["step"]: event["copy_lag"] for node in nodes for event in node.events("step")}
    assert lags[13] == 0, "the two that are left keep copies of each other's state again"
    assert {name: value for node in right for name, value in hybrid.weights(node).items()} == ended


@pytest.mark.parametrize("script", [soak(reentry.SCRIPT)])
def test_shards_of_an_elastic_function_survive_the_loss_of_a_domain(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path, script: Path
) -> None:
    calm = reentry.undisturbed(spawn, tmp_path)
    nodes = start(etcd, spawn, tmp_path, (script, "--shards", "4", "--sleep", "0.1"))
    wait_for_step(nodes, 4)
    lose(nodes[:2])
    for node in nodes[2:]:
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    steps = {event["step"]: event for node in nodes for event in node.events("step")}
    assert [steps[step]["digest"] for step in sorted(steps)] == [digest for _, _, digest in calm.steps]
    for step, loss, _ in calm.steps:
        assert steps[step]["loss"] == pytest.approx(loss, rel=1e-8), f"step {step}"
    assert not any(event["stage"] == "assemble" for node in nodes for event in node.events("generation"))
