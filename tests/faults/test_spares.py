"""Spares take the places of nodes that are lost or leave: no step is done by fewer workers.

`etcd` stands before `spawn` in the signatures, so that the agents end while the store still serves.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.membership import WorkerState, slot_of
from elaunch.rendezvous.observer import Documents, Observer
from tests.faults import test_hybrid as hybrid
from tests.faults.test_departures import ctl
from tests.faults.test_nodes import Cluster
from tests.faults.test_workers import reference
from tests.helpers import Spawner, soak, wait_until
from tests.integration import test_reentry as reentry
from tests.jobs.watch import (
    SCRIPT,
    Node,
    assert_same,
    digests,
    elaunch,
    kill_node,
    losses,
    wait_for,
    wait_for_members,
    wait_for_step,
)

SPARE = "--spares=1"
LIMIT_S = 150.0


def documents(etcd: EmbeddedEtcd) -> Documents:
    """What stands in the store of the job now."""
    with closing(EtcdStore(etcd.endpoint, timeout_s=5.0)) as store, closing(Observer(store, "job")) as observer:
        return observer.documents


def wait_for_spare(etcd: EmbeddedEtcd, nodes: Sequence[Node], name: str, workers: int = 1) -> None:
    """Wait until the workers of a spare are ready, and the documents of the job name it."""

    def ready() -> bool:
        found = documents(etcd)
        doc = found.node(name)
        states = [] if doc is None else [worker.state for worker in doc.workers]
        return found.spares == (name,) and states == [WorkerState.READY] * workers

    wait_for(nodes, ready, 90, f"{name} to be a spare whose workers are ready")


def members_by_step(nodes: Sequence[Node]) -> dict[int, int]:
    return {event["step"]: event["members"] for node in nodes for event in node.events("step")}


@pytest.mark.timeout(300)
def test_a_spare_takes_the_rank_of_a_node_that_is_killed_in_the_step_that_is_interrupted(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    expected, samples, _ = reference(spawn, tmp_path, "--steps", "60")
    gate = tmp_path / "gate"
    script = ("--steps", "60", "--gather", "3", "--hold", f"20:{gate}")
    # With such a lease the run only ends in time if the broken links, and not the lease, show that the node is gone.
    cluster = Cluster(spawn, tmp_path, etcd, "3", *script, conf="lease_ttl=300")
    for name in "abc":
        cluster.add(name, 1, SPARE)
    wait_for_members(cluster.nodes, 3)
    members = cluster.nodes[0].members()
    first, lost, last = sorted(cluster.nodes, key=lambda node: members.index(next(iter(node.pids()))))
    before = [node.pids() for node in (first, last)]
    spare = cluster.add("d", 1, SPARE)
    wait_for_spare(etcd, cluster.nodes, "d")
    (waiting,) = spare.pids()
    assert "this node is a spare: its workers start, register, and wait" in spare.agent.text()
    assert waiting not in first.members(), "it is no member"
    said = ctl(spawn, etcd, "status")
    assert "spares: 1 of 1 ready\n" in said
    assert "d (spare, ready)" in said
    values = json.loads(ctl(spawn, etcd, "status", "--json"))
    assert values["spares"] == {"wanted": 1, "nodes": ["d"], "ready": ["d"]}
    kill_node(lost)
    gate.touch()
    wait_for(cluster.nodes, lambda: waiting in first.members(), 60, "the spare to be a member")
    assert first.members() == [members[0], waiting, members[2]], "it has the rank of the lost one"
    assert [node.agent.wait(LIMIT_S) for node in cluster.nodes if node is not lost] == [0, 0, 0]
    assert_same(losses(cluster.nodes), expected, 1e-9)
    assert digests(cluster.nodes) == samples
    counts = members_by_step(cluster.nodes)
    gathered = min(step for step, count in counts.items() if count == 3)
    assert {count for step, count in counts.items() if step >= gathered} == {3}, counts
    assert [node.all_pids() for node in (first, last)] == [list(pids.values()) for pids in before]
    (change,) = [
        event for event in first.events("generation") if "lost" in event["cause"] or "reached" in event["cause"]
    ]
    assert waiting in change["workers"], "it comes with the generation that leaves the lost one out"


@pytest.mark.timeout(300)
def test_a_node_that_leaves_is_replaced_by_a_spare_in_one_planned_change(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "2", "--steps", "100000", "--sleep", "0.02")
    for name in "ab":
        cluster.add(name, 2, SPARE)
    wait_for_members(cluster.nodes, 4)
    cluster.add("c", 2, SPARE)
    wait_for_spare(etcd, cluster.nodes, "c", 2)
    a, b, c = cluster.nodes
    begun = max(node.last_step() for node in cluster.nodes)
    b.agent.signal(signal.SIGTERM)
    assert b.agent.wait(60) == 0, b.agent.tail()
    wait_for(cluster.nodes, lambda: {slot_of(one) for one in a.members()} == {"a/0", "a/1", "c/0", "c/1"}, 60, "c")
    wait_for_step([a, c], max(a.last_step(), c.last_step()) + 5)
    counts = members_by_step(cluster.nodes)
    assert {count for step, count in counts.items() if step >= begun} == {4}, counts
    # A node that comes now is the next spare.
    cluster.add("d", 2, SPARE)
    wait_for_spare(etcd, [a, c], "d", 2)
    assert "a, c, d have left" in ctl(spawn, etcd, "drain", "--all")


@pytest.mark.timeout(300)
def test_the_plan_of_a_job_in_layers_stays_when_a_spare_takes_a_place(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    steps = ("--steps", "14")
    expected = hybrid.reference(spawn, tmp_path, *steps)
    gate = tmp_path / "gate"
    conf = "--rdzv-conf=lease_ttl=300,last_call_timeout=0,attach_timeout=90"
    flags = ("--nnodes=2", SPARE, f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", conf, "--nproc-per-node=2")
    script = (hybrid.SCRIPT, "--dp=2", "--pp=2", *steps, "--hold", f"7:{gate}")
    start = [*flags, "--consistency=bitwise"]
    nodes = [elaunch(spawn, tmp_path, *start, f"--node-name={name}", script=script, name=name) for name in "ab"]
    wait_for_step(nodes, 3)
    nodes.append(elaunch(spawn, tmp_path, *start, "--node-name=c", script=script, name="c"))
    wait_for_spare(etcd, nodes, "c", 2)
    first = nodes[0].members()[0].partition("/")[0]
    survivor, lost = nodes[:2] if first == "a" else nodes[1::-1]
    kill_node(lost)
    gate.touch()
    for node in (survivor, nodes[2]):
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    found, samples, ended = expected
    assert losses(nodes) == found, "bit by bit"
    assert digests(nodes) == samples
    assert {name: value for node in (survivor, nodes[2]) for name, value in hybrid.weights(node).items()} == ended
    plans = [event for node in nodes for event in node.events("decision")]
    given, kept = plans[0]["plan"], plans[-1]["plan"]
    assert "every place of the plan has its worker" in plans[-1]["reason"]
    names = dict(zip(nodes[0].events("generation")[1]["workers"], survivor.members(), strict=True))
    for before, after in names.items():
        given = given.replace(before, after)
    assert kept == given, "worker for worker"
    assert set(members_by_step(nodes).values()) == {4}


@pytest.mark.timeout(300)
def test_an_elastic_function_is_entered_again_with_the_spare(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    """FSDP, each worker of which has a part that nobody else has but its copy on another node."""
    calm = reentry.undisturbed(spawn, tmp_path)
    conf = "--rdzv-conf=lease_ttl=300,last_call_timeout=0,attach_timeout=90"
    flags = ("--nnodes=2", SPARE, f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", conf, "--max-restarts=2")
    script = (reentry.SCRIPT, "--shards", "2", "--sleep", "0.1")
    nodes = [elaunch(spawn, tmp_path, *flags, f"--node-name={name}", script=script, name=name) for name in "ab"]
    wait_for_step(nodes, 2)
    nodes.append(elaunch(spawn, tmp_path, *flags, "--node-name=c", script=script, name="c"))
    wait_for_spare(etcd, nodes, "c")
    kill_node(nodes[1])
    for node in (nodes[0], nodes[2]):
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    steps = {event["step"]: event for node in nodes for event in node.events("step")}
    assert [steps[step]["digest"] for step in sorted(steps)] == [digest for _, _, digest in calm.steps]
    for step, loss, _ in calm.steps:
        assert steps[step]["loss"] == pytest.approx(loss, rel=1e-8), f"step {step}"
    assert {event["members"] for event in steps.values()} == {2}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("elastic", [False, soak(True)])
def test_a_spare_of_a_script_that_starts_again_as_a_whole_starts_with_the_others(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path, elastic: bool
) -> None:
    """Plain scripts, and those all of whose members are lost: the restart has as many nodes as before."""
    conf = "--rdzv-conf=lease_ttl=2,last_call_timeout=0,attach_timeout=90"
    flags = ("--nnodes=2", SPARE, f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", conf, "--max-restarts=1")
    plain = ("--no-python", "sh", "-c", "echo begins with $WORLD_SIZE; sleep 600")
    script = (SCRIPT, "--steps", "100000", "--sleep", "0.05") if elastic else plain
    nodes = [elaunch(spawn, tmp_path, *flags, f"--node-name={name}", script=script, name=name) for name in "ab"]
    if elastic:
        wait_for_members(nodes, 2)
    else:
        wait_until(lambda: all("begins with 2" in node.agent.text() for node in nodes), 60, "both to begin")
    nodes.append(elaunch(spawn, tmp_path, *flags, "--node-name=c", script=script, name="c"))
    if elastic:
        wait_for_spare(etcd, nodes, "c")
    else:
        nodes[2].agent.wait_for_text("this node waits", 60)
        assert nodes[2].all_pids() == [], "a script that may need its peers is not started without them"
    kill_node(nodes[1])
    if elastic:
        wait_for_members([nodes[0], nodes[2]], 2)
    else:
        nodes[2].agent.wait_for_text("begins with 2", 60)
    assert " c have left" in ctl(spawn, etcd, "drain", "--all")  # the lost node may still count as one
