"""The first node of a job is lost, and the etcd that it hosts with it: with three nodes or more the others go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.cluster.members import ClusterMembers
from elaunch.rendezvous.etcd import EtcdStore
from tests.faults.test_store import etcd_of, kill_etcd
from tests.helpers import ROOT, Spawner, find_free_port
from tests.jobs.plain_etcd import find_server
from tests.jobs.watch import SCRIPT, Node, elaunch, kill_node, losses, wait_for, wait_for_members, wait_for_step
from tests.netns import Network, network

ELASTIC = ROOT / "tests" / "jobs" / "elastic.py"


class Job:
    """Nodes of one job, each with an address of its own, whose store is on three of them."""

    def __init__(self, spawn: Spawner, folder: Path, names: str, script: tuple[Path | str, ...] = ()) -> None:
        self._spawn, self._folder, self._script = spawn, folder, script
        self._port = find_free_port()
        self.nodes: dict[str, Node] = {}
        self.all: list[Node] = []
        self._hosts = {name: f"127.0.0.{number}" for number, name in enumerate(names, 1)}
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        """Starts the agent of a node, or once more after its loss."""
        size = len(self._hosts)
        endpoint = ",".join(f"{host}:{self._port}" for host in self._hosts.values())
        # All addresses are this machine's: any of the agents could begin.
        begins = "" if len(self.all) >= size else f",is_host={'false' if self.all else 'true'}"
        self.nodes[name] = elaunch(
            self._spawn,
            self._folder,
            f"--nnodes=1:{size}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
            "--rdzv-id=job",
            f"--rdzv-conf=lease_ttl=2,last_call_timeout=60,store_timeout=8{begins}",
            f"--node-name={name}",
            f"--local-addr={self._hosts[name]}",
            script=self._script or (SCRIPT, "--steps", "100000", "--sleep", "0.05", "--gather", str(size)),
            name=f"{name}{len(self.all)}",
        )
        self.all.append(self.nodes[name])

    def servers(self, count: int) -> list[str]:
        """Waits until the store is on so many of the nodes that are left, all of which have a vote; returns those."""
        names = {f"{self._hosts[name]}:{self._port}": name for name in self.nodes}

        def there() -> list[str]:
            store = EtcdStore(",".join(names), timeout_s=2.0)
            try:
                found = ClusterMembers(store).list()
            except StoreUnavailable:
                return []
            finally:
                store.close()
            serving = sorted(names.get(one.client, "") for one in found if one.votes)
            return serving if len(serving) == len(found) == count and "" not in serving else []

        found: list[str] = wait_for(list(self.nodes.values()), there, 60, f"the store to be on {count} nodes")
        return found

    def lose(self, name: str) -> None:
        kill_node(self.nodes.pop(name))

    def end(self) -> None:
        """Sees that each step was done once, by agents that never missed the store."""
        for name, node in self.nodes.items():
            assert node.agent.process.poll() is None
            assert "the rendezvous store is away" not in node.agent.text(), f"{name}: {node.agent.tail()}"
        for node in self.nodes.values():
            kill_node(node)
        losses(self.all)


def test_the_nodes_that_host_the_store_may_be_lost_one_after_the_other_and_come_back(
    spawn: Spawner, tmp_path: Path
) -> None:
    job = Job(spawn, tmp_path, "abcd")
    wait_for_members(job.all, 4)
    assert "a" in job.servers(3)
    job.lose("a")
    wait_for_members(list(job.nodes.values()), 3)
    assert job.servers(3) == ["b", "c", "d"]
    job.lose("b")
    wait_for_members(list(job.nodes.values()), 2)
    job.servers(1)
    job.start("a")
    wait_for_members(list(job.nodes.values()), 3)
    assert job.servers(3) == ["a", "c", "d"]
    job.end()


@pytest.mark.soak
def test_process_groups_of_a_script_meet_in_the_store_of_another_node(spawn: Spawner, tmp_path: Path) -> None:
    job = Job(spawn, tmp_path, "abc", (ELASTIC, "--sleep", "0.1", "--epochs", "1"))
    wait_for_step(job.all, 4)
    job.servers(3)
    first = job.all[0].members()[0].partition("/")[0]  # MASTER_ADDR and MASTER_PORT are that of its agent
    job.lose(first)
    for node in job.nodes.values():
        assert node.agent.wait(60) == 0, node.agent.tail()
    assert sorted(losses(job.all)) == list(range(25))


@pytest.mark.soak
def test_a_server_that_is_killed_is_replaced_by_its_agent(spawn: Spawner, tmp_path: Path) -> None:
    """By one without data: what an old etcd has after a kill may differ from what the others have."""
    job = Job(spawn, tmp_path, "abc")
    wait_for_members(job.all, 3)
    job.servers(3)
    for name in "ab":
        node = job.nodes[name]
        before = etcd_of(node)
        kill_etcd(node)
        wait_for(job.all, lambda: "another one is started in its stead" in node.agent.text(), 20, "the loss to be told")  # noqa: B023
        assert etcd_of(node) != before
        job.servers(3)
    job.end()


@pytest.mark.soak
def test_a_node_that_is_drained_hands_the_store_over(spawn: Spawner, tmp_path: Path) -> None:
    """Also where one node is left, which serves it alone then."""
    job = Job(spawn, tmp_path, "abc")
    wait_for_members(job.all, 3)
    job.servers(3)
    for left in ("bc", "c"):
        node = job.nodes.pop("a" if left == "bc" else "b")
        node.agent.signal(signal.SIGUSR1)
        assert node.agent.wait(60) == 0, node.agent.tail()
        wait_for_members(list(job.nodes.values()), len(left))
        job.servers(1)
    job.end()


def test_all_may_leave_right_after_a_loss(spawn: Spawner, tmp_path: Path) -> None:
    """While the lost node's lease lasts, none of the other two servers is taken out."""
    job = Job(spawn, tmp_path, "abc")
    wait_for_members(job.all, 3)
    job.servers(3)
    job.lose("a")
    job.nodes["b"].agent.signal(signal.SIGUSR2)
    for name, node in job.nodes.items():
        assert node.agent.wait(60) is not None
        assert "the rendezvous store is away" not in node.agent.text(), f"{name}: {node.agent.tail()}"
    losses(job.all)


@pytest.mark.soak
def test_without_two_of_the_three_that_host_the_store_the_others_found_another_one(
    spawn: Spawner, tmp_path: Path
) -> None:
    """It is on one node, since two are left."""
    job = Job(spawn, tmp_path, "abcd")
    wait_for_members(job.all, 4)
    lost = job.servers(3)[:2]
    for name in lost:
        job.nodes[name].agent.signal(signal.SIGKILL)
    for name in lost:
        job.lose(name)
    wait_for_members(list(job.nodes.values()), 2)
    assert sum("this node serves another one at" in node.agent.text() for node in job.nodes.values()) == 1
    for node in job.nodes.values():
        assert node.agent.process.poll() is None
        kill_node(node)
    losses(job.all)


class Machines:
    """Nodes of one job, each on a machine of its own in a network, whose store is on three of them."""

    def __init__(self, spawn: Spawner, folder: Path, made: Network, names: str) -> None:
        self._spawn, self._folder, self.made = spawn, folder, made
        self._spaces = {name: made.add(name) for name in names}
        self.nodes: dict[str, Node] = {}
        self.all: list[Node] = []
        for name in names:
            self.start(name)
        wait_for_members(self.all, len(names))
        wait_for(self.all, lambda: all(map(serves, self.all)), 30, "three that serve the store")

    def start(self, name: str) -> Node:
        """Starts the agent of a node, or once more after its loss."""
        endpoint = ",".join(f"{self.made.address(each)}:29400" for each in self._spaces)
        self.nodes[name] = elaunch(
            self._spawn,
            self._folder,
            f"--nnodes=1:{len(self._spaces)}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
            "--rdzv-id=job",
            "--rdzv-conf=lease_ttl=2,link_timeout=2,last_call_timeout=60,store_timeout=8",
            f"--node-name={name}",
            script=(SCRIPT, "--steps", "100000", "--sleep", "0.05", "--gather", str(len(self._spaces))),
            name=f"{name}{len(self.all)}",
            host=self._spaces[name],
        )
        self.all.append(self.nodes[name])
        return self.nodes[name]

    def others(self) -> list[Node]:
        """Returns all nodes but the first."""
        return [node for name, node in self.nodes.items() if name != "a"]

    def lose_first(self) -> None:
        """Its machine is lost; the others go on at the same store, which two of them serve."""
        self.made.plug("a", into=False)
        kill_node(self.nodes["a"])
        wait_for_members(self.others(), 2)

    def end(self) -> None:
        """Sees that each step was done once, and that no node's workers but those of the lost ones were replaced."""
        for node in self.nodes.values():
            assert node.agent.process.poll() is None, node.agent.tail()
            assert len(node.all_pids()) == 1, node.agent.tail()
            kill_node(node)
        losses(self.all)


def serves(node: Node) -> bool:
    """Returns whether an etcd runs beside this agent."""
    return find_server(node.agent.pid) is not None


@contextmanager
def machines(spawn: Spawner, folder: Path, names: str) -> Iterator[Machines]:
    with network() as made:
        try:
            yield Machines(spawn, folder, made, names)
        finally:
            spawn.end_all()  # before their network goes


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_the_first_node_that_is_cut_off_decides_nothing_and_the_others_go_on(spawn: Spawner, tmp_path: Path) -> None:
    """Not even the end of a connection tells the others: nothing comes from that host any more."""
    with machines(spawn, tmp_path, "abc") as job:
        others, first = job.others(), job.nodes.pop("a")
        wait_for_step(others, max(node.last_step() for node in job.all) + 20)
        job.made.part("a", "bc")
        wait_for_members(others, 2)
        assert first.agent.wait(60) == 1, first.agent.tail()
        assert "was of no use for 8 s while this node waited" in first.agent.text()
        assert all(len(event["workers"]) == 3 for event in first.events("generation") if event["stage"] == "train")
        job.end()


def test_a_first_node_that_begins_another_job_is_told_where_the_one_it_had_begun_goes_on(
    spawn: Spawner, tmp_path: Path
) -> None:
    """Its machine is started again, and reaches nobody for longer than it asks; nobody has had to found a store."""
    with machines(spawn, tmp_path, "abc") as job:
        job.lose_first()
        back = job.start("a")
        wait_for(back, lambda: serves(back), 30, "it to serve a store of its own")
        job.made.plug("a", into=True)
        wait_for_members(job.all[1:], 3)
        assert "this node goes over to the rendezvous store at" in back.agent.text(), back.agent.tail()
        assert not any("this node serves another one at" in node.agent.text() for node in job.all)
        wait_for_step(job.others(), max(node.last_step() for node in job.all) + 20)
        job.end()


def test_a_first_node_that_comes_back_before_its_network_does_begins_no_other_job(
    spawn: Spawner, tmp_path: Path
) -> None:
    with machines(spawn, tmp_path, "abc") as job:
        job.lose_first()
        back = job.start("a")
        time.sleep(1.0)  # it asks for 3.5 s
        assert not serves(back), "it asks before it serves"
        job.made.plug("a", into=True)
        wait_for_members(job.all[1:], 3)
        assert "this node goes over to the rendezvous store at" not in back.agent.text(), back.agent.tail()
        job.end()
