"""The etcd that an agent has started dies, with or without that agent: it comes back, or the job ends with a reason."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elaunch import checkpoints
from tests.faults import test_hybrid
from tests.faults.test_checkpoints import LAYERS, PATIENT, STEPS, check, run_layers
from tests.faults.test_workers import reference
from tests.helpers import Spawner, find_free_port, scaled, soak, wait_until
from tests.jobs.plain_etcd import find_server
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

AWAY = "the rendezvous store is away"


def etcd_of(node: Node) -> int:
    """Pid of the etcd that this agent has started, as soon as it runs its program."""
    return wait_until(lambda: find_server(node.agent.pid), 20, f"an etcd of this agent; {node.agent.tail()}")


def kill_etcd(node: Node) -> None:
    os.kill(etcd_of(node), signal.SIGKILL)


def test_an_etcd_of_the_job_that_is_killed_is_started_again(spawn: Spawner, tmp_path: Path) -> None:
    """Each time also a worker dies, whose loss nobody can agree on before etcd is back."""
    steps = scaled(200, 1600)
    expected, samples, _ = reference(spawn, tmp_path, "--steps", str(steps))
    gate = tmp_path / "gate"
    script = ("--steps", str(steps), "--sleep", "0.01", "--gather", "2", "--hold", f"{steps - 20}:{gate}")
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=2", script=(SCRIPT, *script))
    wait_for_members(node, 2)
    for count in range(scaled(2, 20)):
        worker, pid = sorted(node.pids().items())[count % 2]
        kill_etcd(node)
        os.kill(pid, signal.SIGKILL)
        wait_for(node, lambda gone=worker: gone not in node.members(), 60, "a generation without it")  # type: ignore[misc]
        wait_for_members(node, 2)
    gate.touch()
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert "was killed by SIGKILL; it is started again with its data" in node.agent.text()
    assert_same(losses(node), expected, 1e-9)
    assert digests(node) == samples


def some_nodes(
    spawn: Spawner, folder: Path, names: str, *flags: str, script: tuple[str, ...], program: Path = SCRIPT
) -> list[Node]:
    """The agent of the first hosts the rendezvous."""
    many = (
        f"--nnodes=1:{len(names)}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{find_free_port()}",
        "--rdzv-id=job",
    )
    conf = "--rdzv-conf=lease_ttl=2,last_call_timeout=60,store_timeout=5,on_store_loss=wait"
    nodes = []
    for name in names:
        own = (f"--node-name={name}", "--local-addr=127.0.0.1")
        nodes.append(elaunch(spawn, folder, *many, conf, *own, *flags, script=(program, *script), name=name))
        etcd_of(nodes[0])
    return nodes


@pytest.mark.soak
def test_so_is_one_that_other_nodes_use(spawn: Spawner, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = ("--steps", "300", "--sleep", "0.01", "--gather", "2", "--hold", f"280:{gate}")
    nodes = host, other = some_nodes(spawn, tmp_path, "ab", script=script)
    wait_for_members(nodes, 2)
    ((worker, pid),) = other.pids().items()
    kill_etcd(host)
    os.kill(pid, signal.SIGKILL)
    wait_for(nodes, lambda: worker not in host.members(), 60, "a generation without it")
    wait_for_members(nodes, 2)
    gate.touch()
    assert [node.agent.wait(100) for node in nodes] == [0, 0], other.agent.tail()


def test_whoever_waits_for_a_store_that_is_gone_for_good_ends(spawn: Spawner, tmp_path: Path) -> None:
    host, other = some_nodes(spawn, tmp_path, "ab", script=("--steps", "4000", "--sleep", "0.02"))
    wait_for_members([host, other], 2)
    kill_node(host)
    assert other.agent.wait(60) == 1, other.agent.tail()
    text = other.agent.text()
    assert AWAY in text
    assert "this node has waited 3 s for the job to go on without a/0#0; the rendezvous store has been" in text
    assert "was of no use for 5 s while this node waited for the job to go on without a/0#0" in text
    assert "--rdzv-conf store_timeout=SECONDS gives it more time" in text


@pytest.mark.parametrize("names", ["ab", soak("abc")])
def test_its_state_is_saved_where_there_is_a_folder_for_checkpoints(spawn: Spawner, tmp_path: Path, names: str) -> None:
    """By all members that are left: each node makes the same two generations for them."""
    saved = tmp_path / "saved"
    flags = (f"--checkpoint-dir={saved}", "--checkpoint-every=1000")
    nodes = host, *others = some_nodes(spawn, tmp_path, names, *flags, script=("--steps", "4000", "--sleep", "0.02"))
    wait_for_members(nodes, len(names))
    wait_for_step(nodes, 10)
    kill_node(host)
    for other in others:
        assert other.agent.wait(60) == 1, other.agent.tail()
    step = checkpoints.newest(saved)
    assert step is not None, others[0].agent.tail()
    assert step > 10
    for other in others:
        assert [event["exitcode"] for event in other.events("worker_exited")] == [0], other.agent.tail()
        assert f"there is a checkpoint of {step} steps, from which the job goes on" in other.agent.text()


def lose_store_at_step_6(spawn: Spawner, folder: Path, names: str, workers: int, *script: str) -> list[Node]:
    """A job in layers whose first node is lost, and the store with it; returns its nodes, all of which have ended."""
    gate = folder / "gate"
    flags = (
        f"--nproc-per-node={workers}",
        "--consistency=bitwise",
        f"--checkpoint-dir={folder / 'saved'}",
        "--checkpoint-every=4",
    )
    script = (*STEPS, *PATIENT, "--hold", f"6:{gate}", *script)
    nodes = host, *others = some_nodes(spawn, folder, names, *flags, script=script, program=LAYERS)
    wait_for_step(nodes, 5)
    assert {len(node.members()) for node in nodes} == {workers * len(names)}
    wait_for(nodes, lambda: checkpoints.newest(folder / "saved") == 4, 60, "a checkpoint after 4 steps")
    kill_node(host)
    gate.touch()
    for other in others:
        assert other.agent.wait(100) == 1, other.agent.tail()
    return nodes


@pytest.mark.soak
@pytest.mark.parametrize(
    ("names", "workers", "plan"),
    [("ab", 2, "--dp=2 --pp=2"), ("ab", 1, "--dp=1 --pp=2"), ("abc", 1, "--dp=1 --pp=3")],
)
def test_so_is_that_of_a_model_in_layers_of_which_the_others_have_copies(
    spawn: Spawner, tmp_path: Path, names: str, workers: int, plan: str
) -> None:
    """Each node holds one part of the model, and copies of another's."""
    expected = test_hybrid.reference(spawn, tmp_path, *STEPS)
    nodes = lose_store_at_step_6(spawn, tmp_path, names, workers, *plan.split())
    step = checkpoints.newest(tmp_path / "saved")
    for other in nodes[1:]:
        assert {event["exitcode"] for event in other.events("worker_exited")} == {0}, other.agent.tail()
        assert f"there is a checkpoint of {step} steps, from which the job goes on" in other.agent.text()
    assert step == 7, "the members that are left do the step that was interrupted, and save it"
    check(run_layers(spawn, tmp_path, "--pp=2", name="second"), expected, *nodes)


@pytest.mark.soak
def test_what_nobody_has_a_copy_of_comes_from_the_newest_checkpoint(spawn: Spawner, tmp_path: Path) -> None:
    expected = test_hybrid.reference(spawn, tmp_path, *STEPS)
    nodes = _, other = lose_store_at_step_6(spawn, tmp_path, "ab", 1, "--dp=2", "--pp=1", "--snapshots=0")
    assert "at step 4; parts of the state were lost, 2 steps are done again" in other.agent.text()
    assert checkpoints.newest(tmp_path / "saved") == 5, other.agent.tail()
    assert "there is a checkpoint of 5 steps, from which the job goes on" in other.agent.text()
    check(run_layers(spawn, tmp_path, "--pp=2", name="second"), expected, *nodes)


def test_training_that_needs_nobody_goes_on_without_the_store(spawn: Spawner, tmp_path: Path) -> None:
    """It goes on for longer than a node would wait."""
    gate = tmp_path / "gate"
    node = elaunch(
        spawn,
        tmp_path,
        "--standalone",
        "--rdzv-conf=store_timeout=1",
        "--nproc-per-node=2",
        script=(SCRIPT, "--steps", "40", "--sleep", "0.01", "--gather", "2", "--hold", f"30:{gate}"),
    )
    wait_for_members(node, 2)
    etcd = etcd_of(node)
    os.kill(etcd, signal.SIGSTOP)
    try:
        wait_for(node, lambda: AWAY in node.agent.text(), 40, "the outage to be noticed")
        step = node.last_step()
        gate.touch()
        wait_for_step(node, max(step, 35))
    finally:
        os.kill(etcd, signal.SIGCONT)
    assert node.agent.wait(60) == 0, node.agent.tail()
    assert "this node has waited" not in node.agent.text()
