"""Several nodes and one etcd: nodes die, leave and come; the store goes away and comes back.

`etcd` stands before `spawn` in the signatures, so that the agents end while the store still serves.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil
import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.faults.test_workers import reference
from tests.helpers import Spawner, soak, wait_until
from tests.jobs.watch import (
    SCRIPT,
    Node,
    assert_gone,
    assert_same,
    digests,
    elaunch,
    kill_node,
    losses,
    wait_for,
    wait_for_members,
    wait_for_step,
)

LATE = "the job is over; this node hosts the rendezvous, and tells late nodes so for 3 s"


class Cluster:
    """Agents of one job on this machine."""

    def __init__(
        self, spawn: Spawner, folder: Path, etcd: EmbeddedEtcd, nnodes: str, *script: str, conf: str = ""
    ) -> None:
        self.spawn, self.folder = spawn, folder
        self.script: list[str | Path] = [SCRIPT, *script]
        # On a busy machine a script takes longer than usual to import torch; it must not be taken for a plain one.
        conf = ",".join(filter(None, ["lease_ttl=2", "last_call_timeout=0", "attach_timeout=90", conf]))
        self.flags = (f"--nnodes={nnodes}", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", f"--rdzv-conf={conf}")
        self.nodes: list[Node] = []

    def add(self, name: str, workers: int = 1, *flags: str, environment: Mapping[str, str] | None = None) -> Node:
        node = elaunch(
            self.spawn,
            self.folder,
            *self.flags,
            f"--nproc-per-node={workers}",
            f"--node-name={name}",
            *flags,
            script=self.script,
            name=name,
            environment=environment,
        )
        self.nodes.append(node)
        return node


@pytest.mark.parametrize("victim", [0, soak(1)])
def test_the_others_go_on_when_a_node_is_killed(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path, victim: int
) -> None:
    expected, samples, _ = reference(spawn, tmp_path, "--steps", "40")
    # With such a lease the run only ends in time if the broken links, and not the lease, show that the node is gone.
    gate = tmp_path / "gate"
    script = ("--steps", "40", "--gather", "3", "--hold", f"20:{gate}")
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", *script, conf="lease_ttl=300")
    first = cluster.add("a", 1)
    wait_until(lambda: first.pids() or first.agent.process.poll() is not None, 30, "the first node's worker")
    second = cluster.add("b", 2)
    nodes = [first, second]
    wait_for_members(nodes, 3)
    killed, survivor = nodes[victim], nodes[1 - victim]
    before = survivor.pids()
    kill_node(killed)
    gate.touch()
    assert survivor.agent.wait(100) == 0, survivor.agent.tail()
    assert set(before.values()) == set(survivor.all_pids())
    assert_same(losses(nodes), expected, 1e-9)
    assert digests(nodes) == samples


def _is_without(node: Node, worker: str) -> bool:
    return worker not in node.members()


def test_each_step_has_one_line_in_the_logs_of_all_nodes_whoever_dies_or_leaves(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    # The first member dies three times, each time on another node than its heir; then its node leaves.
    gate = tmp_path / "gate"
    script = ("--steps", "160", "--sleep", "0.02", "--gather", "3", "--hold", f"150:{gate}")
    cluster = Cluster(spawn, tmp_path, etcd, "1:3", *script)
    for name in ("a", "b", "c"):
        cluster.add(name)
    nodes = cluster.nodes
    wait_for_members(nodes, 3)
    for _ in range(3):
        wait_for_step(nodes, max(node.last_step() for node in nodes) + 2)
        first = nodes[0].members()[0]
        node = next(each for each in nodes if first in each.pids())
        os.kill(node.pids()[first], signal.SIGKILL)
        wait_for(nodes, partial(_is_without, nodes[0], first), 30, f"a generation without {first}")
        wait_for_members(nodes, 3)
    leaving = next(each for each in nodes if nodes[0].members()[0] in each.pids())
    leaving.agent.signal(signal.SIGTERM)
    gate.touch()
    for node in nodes:
        assert node.agent.wait(100) == 0, node.agent.tail()
    lines = [(event["step"], event["node"]) for node in nodes for event in node.events("step")]
    digests = {(event["step"], event["digest"]) for node in nodes for event in node.events("step")}
    assert sorted(step for step, _ in digests) == list(range(160)), sorted(lines)
    assert len(lines) == 160, sorted(lines)
    assert {node for _, node in lines} >= {"a", "b", "c"}


def test_a_step_has_one_line_although_the_first_members_agent_hears_of_its_end_last(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    # What would tell the agent is stopped meanwhile: the process that its workers are children of.
    gate = tmp_path / "gate"
    script = ("--steps", "80", "--sleep", "0.02", "--gather", "3", "--hold", f"70:{gate}")
    cluster = Cluster(spawn, tmp_path, etcd, "1:3", *script)
    for name in ("a", "b", "c"):
        cluster.add(name)
    nodes = cluster.nodes
    wait_for_members(nodes, 3)
    for _ in range(2):
        wait_for_step(nodes, max(node.last_step() for node in nodes) + 2)
        first = nodes[0].members()[0]
        node = next(each for each in nodes if first in each.pids())
        others = [each for each in nodes if each is not node]
        parent = psutil.Process(node.pids()[first]).ppid()
        os.kill(parent, signal.SIGSTOP)
        try:
            os.kill(node.pids()[first], signal.SIGKILL)
            wait_for(others, partial(_is_without, others[0], first), 30, f"a generation without {first}")
        finally:
            os.kill(parent, signal.SIGCONT)
        wait_for_members(nodes, 3)
    gate.touch()
    for node in nodes:
        assert node.agent.wait(60) == 0, node.agent.tail()
    lines = [(event["step"], event["node"]) for node in nodes for event in node.events("step")]
    assert sorted(step for step, _ in lines) == list(range(80)), sorted(lines)


def test_a_node_that_comes_later_joins_the_running_job(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    expected, samples, _ = reference(spawn, tmp_path, "--steps", "40")
    gate = tmp_path / "gate"
    cluster = Cluster(spawn, tmp_path, etcd, "1:3", "--steps", "40", "--gather", "4", "--hold", f"20:{gate}")
    for name in ("a", "b"):
        cluster.add(name)
    wait_for_members(cluster.nodes, 2)
    pids = [node.pids() for node in cluster.nodes]
    cluster.add("c", 2)
    wait_for_members(cluster.nodes, 4)
    for node, before in zip(cluster.nodes, pids, strict=False):
        assert node.pids() == before
    gate.touch()
    for node in cluster.nodes:
        assert node.agent.wait(100) == 0, node.agent.tail()
    assert_same(losses(cluster.nodes), expected, 1e-9)
    assert digests(cluster.nodes) == samples


def test_sigterm_lets_a_node_leave_at_a_step_boundary(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    expected, samples, _ = reference(spawn, tmp_path, "--steps", "40")
    gate = tmp_path / "gate"
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--steps", "40", "--gather", "3", "--hold", f"20:{gate}")
    leaving, staying = cluster.add("a", 2), cluster.add("b")
    wait_for_members(cluster.nodes, 3)
    leaving.agent.signal(signal.SIGTERM)
    gate.touch()
    assert leaving.agent.wait(30) == 0, leaving.agent.tail()
    assert [event.get("exitcode") for event in leaving.events("worker_exited")] == [0, 0]
    assert staying.agent.wait(100) == 0, staying.agent.tail()
    assert_same(losses(cluster.nodes), expected, 1e-9)
    assert digests(cluster.nodes) == samples
    # No step was interrupted: none was begun twice, so no generation was urgent.
    assert all("died" not in event["cause"] and "lost" not in event["cause"] for event in staying.events("generation"))


def test_training_goes_on_while_the_store_is_away(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--steps", "4000", "--sleep", "0.02")
    a, b = cluster.add("a", 2), cluster.add("b")
    wait_for_members(cluster.nodes, 3)
    generations = len(a.events("generation"))
    pids = [node.pids() for node in cluster.nodes]
    etcd.stop()
    a.agent.wait_for_text("the rendezvous store is away", 30)
    b.agent.wait_for_text("the rendezvous store is away", 30)
    step = max(node.last_step() for node in cluster.nodes)
    # Longer than the lease of two seconds.
    wait_for_step(cluster.nodes, step + 60)
    etcd.start()
    etcd.wait_ready(20)
    a.agent.wait_for_text("the rendezvous store is back", 30)
    b.agent.wait_for_text("the rendezvous store is back", 30)
    wait_for_step(cluster.nodes, max(node.last_step() for node in cluster.nodes) + 60)
    assert len(a.events("generation")) == generations, "somebody was expelled"
    assert [node.pids() for node in cluster.nodes] == pids
    for node in cluster.nodes:
        node.agent.signal(signal.SIGINT)
    for node in cluster.nodes:
        assert node.agent.wait(40) == 1


@pytest.mark.soak
def test_training_goes_on_while_the_store_stands_still(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "1:3", "--steps", "4000", "--sleep", "0.02")
    for name in "abc":
        cluster.add(name)
    wait_for_members(cluster.nodes, 3)
    generations = len(cluster.nodes[0].events("generation"))
    pids = [node.pids() for node in cluster.nodes]
    assert etcd.pid is not None
    os.kill(etcd.pid, signal.SIGSTOP)
    # Longer than the lease of two seconds, shorter than what breaks a connection.
    time.sleep(2.5)
    os.kill(etcd.pid, signal.SIGCONT)
    for node in cluster.nodes:
        node.agent.wait_for_text("its lease of 2 s had ended", 30)
    wait_for_step(cluster.nodes, max(node.last_step() for node in cluster.nodes) + 120)
    assert len(cluster.nodes[0].events("generation")) == generations, "somebody was expelled"
    assert [node.pids() for node in cluster.nodes] == pids
    for node in cluster.nodes:
        node.agent.signal(signal.SIGINT)
    for node in cluster.nodes:
        assert node.agent.wait(40) == 1


def test_a_death_while_the_store_is_away_is_handled_when_it_is_back(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--steps", "4000", "--sleep", "0.004", "--crew", "3")
    a, _b = cluster.add("a", 2), cluster.add("b")
    wait_for_members(cluster.nodes, 3)
    etcd.stop()
    a.agent.wait_for_text("the rendezvous store is away", 30)
    worker, pid = sorted(a.pids().items())[0]
    os.kill(pid, signal.SIGKILL)
    wait_for(cluster.nodes, lambda: worker not in a.pids(), 30, "the death to be seen")
    etcd.start()
    etcd.wait_ready(20)
    wait_for(cluster.nodes, lambda: worker not in a.members(), 30, "a generation without the dead worker")
    wait_for_members(cluster.nodes, 3)
    for node in cluster.nodes:
        kill_node(node)


def test_below_the_minimum_the_survivors_wait_with_their_state(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    expected, samples, _ = reference(spawn, tmp_path, "--steps", "40")
    gate = tmp_path / "gate"
    cluster = Cluster(spawn, tmp_path, etcd, "2:3", "--steps", "40", "--hold", f"20:{gate}")
    a, b = cluster.add("a"), cluster.add("b")
    wait_for_members(cluster.nodes, 2)
    survivor = a.pids()
    kill_node(b)
    gate.touch()
    a.agent.wait_for_text("1 of at least 2 nodes are left", 30)
    cluster.add("c")
    assert a.agent.wait(100) == 0, a.agent.tail()
    assert set(survivor.values()) == set(a.all_pids())
    assert_same(losses(cluster.nodes), expected, 1e-9)
    assert digests(cluster.nodes) == samples


def test_below_the_minimum_for_too_long_the_job_fails_with_a_reason(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "2:2", "--steps", "4000", conf="join_timeout=3")
    a, b = cluster.add("a"), cluster.add("b")
    wait_for_members(cluster.nodes, 2)
    kill_node(b)
    assert a.agent.wait(60) == 1, a.agent.tail()
    assert "only 1 of at least 2 nodes are here after 3 s" in a.agent.text()
    assert_gone(a.all_pids())
    late = cluster.add("c")
    assert late.agent.wait(30) == 1
    assert "job 'job' has ended with a failure (only 1 of" in late.agent.text()
    assert late.all_pids() == []


def test_the_first_node_may_host_the_rendezvous(spawn: Spawner, tmp_path: Path, free_port: int) -> None:
    script = (SCRIPT, "--steps", "40", "--sleep", "0.004")
    flags = c10d(free_port, "2")
    nodes = [elaunch(spawn, tmp_path, *flags, f"--node-name={name}", script=script, name=name) for name in "ab"]
    for node in nodes:
        assert node.agent.wait(100) == 0, node.agent.tail()
        assert LATE not in node.agent.text(), "there was no room for another node"
    assert len(losses(nodes)) == 40


def test_who_comes_when_such_a_job_has_ended_is_told(spawn: Spawner, tmp_path: Path, free_port: int) -> None:
    """The store has ended with the node that hosted it; another node may wait for that one to begin."""
    script, flags = (SCRIPT, "--steps", "2"), c10d(free_port, "1:2")
    host = elaunch(spawn, tmp_path, *flags, "--rdzv-conf=last_call_timeout=0", script=script, name="a")
    assert host.agent.wait(60) == 0, host.agent.tail()
    assert LATE in host.agent.text()
    flags = (*flags, "--rdzv-conf=is_host=false,connect_timeout=4")
    late = elaunch(spawn, tmp_path, *flags, script=script, name="b")
    assert late.agent.wait(60) == 1
    told = "has not started it yet or cannot be reached from here, or the job has ended, and its rendezvous with it"
    assert re.search(rf"waiting for the rendezvous, [01] s left: .*{told}\n", late.agent.text()), late.agent.tail()
    assert "gave up after 4 s" in late.agent.text()


STAYS = """
import sys
from elaunch.agent import participation
from elaunch.cli.run import main
participation.LATE_S = 600.0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, soak(signal.SIGTERM)])
def test_a_signal_ends_the_stay_of_the_host_of_a_job_that_is_over(
    spawn: Spawner, tmp_path: Path, free_port: int, number: signal.Signals
) -> None:
    flags = (*c10d(free_port, "1:2"), "--rdzv-conf=last_call_timeout=0")
    host = spawn.python("-c", STAYS, *flags, SCRIPT, "--steps", "2", name="host")
    host.wait_for_text("and tells late nodes so for 600 s", 60)
    host.signal(number)
    assert host.wait(60) == 0, "the job has ended well"


@pytest.mark.soak
def test_who_hosts_a_rendezvous_where_one_has_ended_says_so(spawn: Spawner, tmp_path: Path, free_port: int) -> None:
    flags = (*c10d(free_port, "2"), "--rdzv-conf=join_timeout=4", "--node-name=c")
    anew = elaunch(spawn, tmp_path, *flags, script=(SCRIPT, "--steps", "2"), name="c")
    assert anew.agent.wait(60) == 1
    told = f"this node hosts the rendezvous at 127.0.0.1:{free_port}; if a job has met there before, it has ended"
    assert re.search(rf"\(here: c, at least 1 missing, [01] s left\); {told}\n", anew.agent.text()), anew.agent.tail()


def c10d(port: int, nnodes: str) -> tuple[str, ...]:
    """Returns the flags of a job whose first node hosts the rendezvous."""
    return (
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=job",
        f"--nnodes={nnodes}",
    )


@pytest.mark.parametrize("name", ["a", soak("c")])
def test_a_job_whose_every_node_was_lost_at_once_can_be_run_again(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path, name: str
) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--steps", "4000", "--sleep", "0.02")
    a, b = cluster.add("a"), cluster.add("b")
    wait_for_members(cluster.nodes, 2)
    for node in (a, b):
        kill_node(node)
    # Started at once, so that the leases of the dead still run; once under a dead one's name.
    after = Cluster(spawn, tmp_path / "again", etcd, "1:2", "--steps", "20")
    after.folder.mkdir()
    again = after.add(name)
    assert again.agent.wait(60) == 0, again.agent.tail()
    assert len(losses(again)) == 20
