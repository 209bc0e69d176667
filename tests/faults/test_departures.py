"""Workers whose departure is announced: what only they have moves to the others first, and no step is interrupted."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from elaunch import checkpoints
from elaunch.plan import Plan
from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.faults import test_dtensor as dtensor
from tests.faults.test_hybrid import SCRIPT, reference, weights
from tests.faults.test_nodes import Cluster
from tests.helpers import Spawner, wait_until
from tests.jobs import watch as train
from tests.jobs.watch import (
    Node,
    assert_same,
    digests,
    elaunch,
    kill_node,
    losses,
    wait_for_members,
    wait_for_step,
)

LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)


DP_PP, PP = ("--dp=2", "--pp=2"), ("--dp=1", "--pp=4")
BOUND = ("--max-extra-bytes", "262144")


def start(
    etcd: EmbeddedEtcd, spawn: Spawner, folder: Path, script: Path, *arguments: str, nodes: str = "ab", workers: int = 2
) -> list[Node]:
    """Nodes with so many workers each."""
    flags = (
        f"--nnodes=1:{len(nodes)}",
        f"--nproc-per-node={workers}",
        f"--rdzv-endpoint={etcd.endpoint}",
        "--rdzv-id=job",
        "--rdzv-conf=lease_ttl=2,attach_timeout=90,last_call_timeout=60",
        "--consistency=bitwise",
    )
    return [
        elaunch(spawn, folder, *flags, f"--node-name={name}", script=(script, *arguments), name=name) for name in nodes
    ]


@pytest.mark.parametrize(
    ("shape", "bound"),
    [
        pytest.param(DP_PP, (), id="DP x PP in a step"),
        pytest.param(DP_PP, BOUND, id="DP x PP pausing", marks=pytest.mark.soak),
        pytest.param(PP, (), id="PP in a step", marks=pytest.mark.soak),
        pytest.param(PP, BOUND, id="PP pausing", marks=pytest.mark.soak),
    ],
)
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


STEPS = ("--steps", "60")


def three(etcd: EmbeddedEtcd, spawn: Spawner, folder: Path, last_step: int, *arguments: str) -> list[Node]:
    """Nodes of one worker each, whose layers nobody else has; that step has committed."""
    shape = (*STEPS, "--dp=1", "--pp=3", *arguments)
    nodes = start(etcd, spawn, folder, SCRIPT, *shape, nodes="abc", workers=1)
    wait_for_members(nodes, 3)
    wait_for_step(nodes, last_step)
    return nodes


@pytest.mark.soak
def test_nodes_that_drain_one_after_the_other_give_away_what_only_they_have(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    """The second is to leave while the state of the first one moves. There are no copies."""
    found, samples, ended = reference(spawn, tmp_path, *STEPS)
    gate = tmp_path / "gate"
    nodes = three(etcd, spawn, tmp_path, 10, "--snapshots=0", "--hold-change", f"10:{gate}")
    first, second, staying = nodes
    first.agent.signal(signal.SIGTERM)
    for node in nodes:
        node.agent.wait_for_text("a change is held", 30)
    second.agent.signal(signal.SIGTERM)
    wait_until(lambda: len(staying.members()) == 1, 30, "a generation without the two")
    gate.touch()
    assert [node.agent.wait(LIMIT_S) for node in nodes] == [0, 0, 0], "".join(node.agent.tail() for node in nodes)
    check_undisturbed(*nodes)
    assert losses(nodes) == found
    assert digests(nodes) == samples
    assert weights(staying) == ended


@pytest.mark.soak
def test_a_node_that_is_to_leave_stays_when_another_one_dies_first(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    """It has the only copy of what the other one had, and its own layers are still to move."""
    found, samples, ended = reference(spawn, tmp_path, *STEPS)
    gate = tmp_path / "gate"
    nodes = three(etcd, spawn, tmp_path, 19, "--snapshots=1", "--hold", f"20:{gate}")
    names = [worker.partition("/")[0] for worker in nodes[0].members()]
    staying, dying, leaving = (nodes["abc".index(name)] for name in names)
    leaving.agent.signal(signal.SIGTERM)
    wait_until(lambda: len(staying.members()) == 2, 30, "a generation without who leaves")
    kill_node(dying)
    wait_until(lambda: f"{names[1]}/0#0" not in staying.members(), 30, "a generation without who died")
    assert f"{names[2]}/0#0" in staying.members()
    gate.touch()
    assert leaving.agent.wait(60) == 0, leaving.agent.tail()
    assert [event.get("exitcode") for event in leaving.events("worker_exited")] == [0]
    assert staying.agent.wait(LIMIT_S) == 0, staying.agent.tail()
    assert losses(nodes) == found
    assert digests(nodes) == samples
    assert weights(staying) == ended


@pytest.mark.soak
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


def two(cluster: Cluster, *flags: str) -> tuple[Node, Node]:
    """Two nodes of one worker each, of a data-parallel job that trains."""
    a = cluster.add("a", 1, *flags)
    wait_for_members([a], 1)
    b = cluster.add("b", 1, *flags)
    wait_for_members(cluster.nodes, 2)
    return a, b


def ctl(spawn: Spawner, etcd: EmbeddedEtcd, *words: str, code: int = 0) -> str:
    """What the command says; it must exit with `code`."""
    ended = spawn.elaunch("ctl", *words, f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", name="ctl")
    assert ended.wait(60) == code, ended.tail()
    return ended.text().strip()


def check_undisturbed(*nodes: Node) -> None:
    """No step was begun twice: nobody was lost."""
    for node in nodes:
        for event in node.events("generation"):
            assert not re.search("died|lost|killed|reached", event["cause"]), event


LONG = ("--steps", "100000", "--sleep", "0.03")


def test_a_node_leaves_when_somebody_asks_for_it(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", *LONG)
    a, b = two(cluster)
    assert "has no node z; here are a, b" in ctl(spawn, etcd, "drain", "z", code=1)
    assert "a, b would leave nobody to go on" in ctl(spawn, etcd, "drain", "a", "b", code=1)
    said = ctl(spawn, etcd, "drain", "b")
    assert re.fullmatch(r"b has left, [\d.]+ s after it was asked for; a goes on", said), said
    assert b.agent.wait(20) == 0, b.agent.tail()
    assert "elaunch ctl drain: the workers of this node leave at the next step boundary" in b.agent.text()
    assert [event.get("exitcode") for event in b.events("worker_exited")] == [0]
    wait_for_members([a], 1)
    check_undisturbed(a)
    assert "a has left" in ctl(spawn, etcd, "drain", "--all")
    assert a.agent.wait(20) == 1, a.agent.tail()
    assert "stopped by elaunch ctl drain; the state in memory is gone" in a.agent.text()


def test_a_job_gets_fewer_nodes_and_then_more(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", *LONG)
    a, b = two(cluster)
    said = ctl(spawn, etcd, "resize", "1")
    assert said == "job job has 1 node from now on; b has left; a goes on"
    assert b.agent.wait(20) == 0, b.agent.tail()
    assert "the job is to have 1 node from now on: the workers of this node leave" in b.agent.text()
    wait_for_members([a], 1)
    c = cluster.add("c")
    c.agent.wait_for_text("this node waits as a spare: the job has its 1 node", 60)
    assert "job job has 1 to 3 nodes from now on" in ctl(spawn, etcd, "resize", "1:3")
    wait_for_members([a, c], 2)
    check_undisturbed(a, c)
    assert "a, c have left" in ctl(spawn, etcd, "drain", "--all")


def test_signals_announce_the_end_of_a_node_and_of_the_job(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    """With a folder for checkpoints, the job goes on later from the very step at which it was ended."""
    saved = tmp_path / "saved"
    flags = ("--checkpoint-dir", str(saved), "--checkpoint-every", "100000")
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", *LONG)
    a, b = two(cluster, *flags)
    b.agent.signal(signal.SIGUSR1)
    assert b.agent.wait(30) == 0, b.agent.tail()
    assert "SIGUSR1: the workers of this node leave at the next step boundary; the others go on" in b.agent.text()
    assert not list(saved.glob("step-*"))
    c = cluster.add("c", 1, *flags)
    wait_for_members([a, c], 2)
    c.agent.signal(signal.SIGUSR2)
    codes = [node.agent.wait(60) for node in (a, c)]
    assert codes == [1, 1], a.agent.tail() + c.agent.tail()
    check_undisturbed(a, c)
    done = max(a.last_step(), c.last_step()) + 1
    assert "SIGUSR2 to node c: the workers of this node leave" in a.agent.text()
    rest = f"there is a checkpoint of {done} steps, from which the job goes on when it is started again"
    assert rest in a.agent.text() + c.agent.text()
    script = (train.SCRIPT, "--steps", str(done + 5))
    again = elaunch(spawn, tmp_path, "--standalone", *flags, script=script, name="again")
    assert again.agent.wait(LIMIT_S) == 0, again.agent.tail()
    assert f"/step-{done:09d}, at step {done}" in again.agent.text()
    assert [event["step"] for event in again.events("step")] == list(range(done, done + 5))


def test_a_job_that_waits_for_nodes_in_vain_saves_its_state_and_ends(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    flags = ("--checkpoint-dir", str(saved), "--checkpoint-every", "100000")
    cluster = Cluster(spawn, tmp_path, etcd, "2:2", *LONG, conf="join_timeout=10")
    a, b = cluster.add("a", 1, *flags), cluster.add("b", 1, *flags)
    wait_for_members(cluster.nodes, 2)
    kill_node(b)
    assert a.agent.wait(90) == 1, a.agent.tail()
    text = a.agent.text()
    assert "the workers keep their state in memory and wait for more" in text
    assert "stopped by only 1 of at least 2 nodes are here after 10 s; start more nodes, or raise" in text
    done = max(a.last_step(), b.last_step()) + 1
    assert checkpoints.complete(saved) == [done]
    assert f"there is a checkpoint of {done} steps, from which the job goes on when it is started again" in text
    script = (train.SCRIPT, "--steps", str(done + 5))
    again = elaunch(spawn, tmp_path, "--standalone", *flags, script=script, name="again")
    assert again.agent.wait(LIMIT_S) == 0, again.agent.tail()
    assert [event["step"] for event in again.events("step")] == list(range(done, done + 5))


@pytest.mark.soak
def test_a_hybrid_job_that_is_ended_so_goes_on_bit_by_bit(spawn: Spawner, tmp_path: Path) -> None:
    steps = ("--steps", "60")
    found, samples, ended = reference(spawn, tmp_path, *steps)
    gate, saved = tmp_path / "gate", tmp_path / "saved"
    keep = ("--checkpoint-dir", str(saved), "--checkpoint-every", "1000")
    flags = ("--standalone", "--nproc-per-node=4", "--consistency=bitwise", *keep)
    shape = ("--dp=2", "--pp=2", "--snapshots=0")
    first = elaunch(spawn, tmp_path, *flags, script=(SCRIPT, *steps, *shape, "--hold", f"20:{gate}"), name="first")
    wait_for_step(first, 19)
    first.agent.signal(signal.SIGUSR1)
    first.agent.wait_for_text("no other node is left to go on", 30)
    gate.touch()
    assert first.agent.wait(60) == 1, first.agent.tail()
    again = elaunch(spawn, tmp_path, *flags, script=(SCRIPT, *steps, *shape), name="again")
    assert again.agent.wait(LIMIT_S) == 0, again.agent.tail()
    assert losses([first, again]) == found
    assert digests([first, again]) == samples
    assert weights(again) == ended


def test_a_notice_announces_the_end_of_a_node(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    file = tmp_path / "taken"
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", *LONG)
    a, b = cluster.add("a"), cluster.add("b", 1, f"--notice=file:{file}")
    wait_for_members(cluster.nodes, 2)
    file.write_text("rack 7 is switched off\n")
    assert b.agent.wait(30) == 0, b.agent.tail()
    assert f"{file}: rack 7 is switched off: the workers of this node leave at the next" in b.agent.text()
    wait_for_members([a], 1)
    check_undisturbed(a)
    assert "a has left" in ctl(spawn, etcd, "drain", "--all")


def test_a_plain_script_starts_again_without_a_node_that_drains(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    """What torchrun does when a node leaves; that it was asked to is no failure that counts."""
    script = ("--no-python", "sh", "-c", "echo begins with $WORLD_SIZE; sleep 600")
    conf = "--rdzv-conf=lease_ttl=2,last_call_timeout=60,attach_timeout=5"
    flags = ("--nnodes=1:2", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", conf, "--max-restarts=0")
    nodes = [elaunch(spawn, tmp_path, *flags, f"--node-name={name}", script=script, name=name) for name in "ab"]
    for node in nodes:
        node.agent.wait_for_text("begins with 2", 60)
    assert "b has left" in ctl(spawn, etcd, "drain", "b")
    assert nodes[1].agent.wait(20) == 0, nodes[1].agent.tail()
    nodes[0].agent.wait_for_text("begins with 1", 60)
    assert "a has left" in ctl(spawn, etcd, "drain", "--all")
    assert nodes[0].agent.wait(20) == 1, nodes[0].agent.tail()
    assert "stopped by elaunch ctl drain" in nodes[0].agent.text()


def test_a_plain_script_ends_when_all_nodes_are_to_leave(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    conf = "--rdzv-conf=lease_ttl=2,last_call_timeout=60"
    flags = ("--nnodes=2", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", conf)
    script = ("--no-python", "sh", "-c", "echo begins; sleep 600")
    nodes = [elaunch(spawn, tmp_path, *flags, f"--node-name={name}", script=script, name=name) for name in "ab"]
    for node in nodes:
        node.agent.wait_for_text("begins", 60)
    # One after the other, or both at once: the job has failed, and who leaves last says so.
    said = ctl(spawn, etcd, "drain", "--all")
    assert "nobody is left of job job" in said or "every node left the job before it was done" in said
    assert 1 in [node.agent.wait(20) for node in nodes]
    assert any("every node left the job before it was done" in node.agent.text() for node in nodes)


def test_of_plain_nodes_that_leave_one_after_the_other_the_last_fails(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    """Also where it waits for others by then, so that nothing runs on it."""
    conf = "--rdzv-conf=lease_ttl=2,last_call_timeout=60"
    flags = ("--nnodes=3", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", conf)
    script = ("--no-python", "sh", "-c", "echo begins; sleep 600")
    nodes = [elaunch(spawn, tmp_path, *flags, f"--node-name={name}", script=script, name=name) for name in "abc"]
    for node in nodes:
        node.agent.wait_for_text("begins", 60)
    for name, node in zip("ab", nodes, strict=False):
        assert f"{name} has left" in ctl(spawn, etcd, "drain", name)
        assert node.agent.wait(20) == 0, node.agent.tail()
    ctl(spawn, etcd, "drain", "--all")
    assert nodes[2].agent.wait(20) == 1, nodes[2].agent.tail()
    assert "every node left the job before it was done; start it again" in nodes[2].agent.text()
