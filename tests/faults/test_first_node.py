"""The first node of a job is lost, and the etcd that it hosts with it: with three nodes or more the others go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.cluster.members import ClusterMembers
from elaunch.rendezvous.etcd import EtcdStore
from tests.helpers import Spawner, find_free_port, soak
from tests.jobs.watch import SCRIPT, Node, elaunch, kill_node, losses, wait_for, wait_for_members

STEPS = 60


class Job:
    """Nodes of one job, each with an address of its own, whose store is on three of them."""

    def __init__(self, spawn: Spawner, folder: Path, names: str) -> None:
        self._port = find_free_port()
        self.gate = folder / "gate"
        self.nodes: dict[str, Node] = {}
        self._hosts = {name: f"127.0.0.{number}" for number, name in enumerate(names, 1)}
        script = ("--steps", str(STEPS), "--sleep", "0.01", "--gather", str(len(names)))
        for name, host in self._hosts.items():
            self.nodes[name] = elaunch(
                spawn,
                folder,
                f"--nnodes=1:{len(names)}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{self._port}",
                "--rdzv-id=job",
                "--rdzv-conf=lease_ttl=2,last_call_timeout=60,store_timeout=20,store_nodes=3",
                f"--node-name={name}",
                f"--local-addr={host}",
                script=(SCRIPT, *script, "--hold", f"{STEPS - 10}:{self.gate}"),
                name=name,
            )
        self.all = list(self.nodes.values())

    def servers(self, names: str, count: int) -> None:
        """Waits until the store is on so many of these nodes, all of which have a vote."""
        endpoints = {f"{self._hosts[name]}:{self._port}" for name in names}

        def there() -> bool:
            store = EtcdStore(",".join(sorted(endpoints)), timeout_s=2.0)
            try:
                found = ClusterMembers(store).list()
            except StoreUnavailable:
                return False
            finally:
                store.close()
            return (
                len(found) == count and {one.client for one in found} <= endpoints and all(one.votes for one in found)
            )

        wait_for(list(self.nodes.values()), there, 60, f"the store to be on {count} of {', '.join(names)}")

    def lose(self, name: str) -> None:
        kill_node(self.nodes.pop(name))

    def end(self) -> None:
        self.gate.touch()
        for name, node in self.nodes.items():
            assert node.agent.wait(60) == 0, node.agent.tail()
            assert "the rendezvous store is away" not in node.agent.text(), f"{name}: {node.agent.tail()}"
        assert sorted(losses(self.all)) == list(range(STEPS))


@pytest.mark.parametrize("names", ["abcd", soak("abc")])
def test_the_nodes_that_host_the_store_may_be_lost_one_after_the_other(
    spawn: Spawner, tmp_path: Path, names: str
) -> None:
    job = Job(spawn, tmp_path, names)
    wait_for_members(job.all, len(names))
    job.servers("abc", 3)
    for count in range(len(names) - 2):
        job.lose(names[count])
        wait_for_members(list(job.nodes.values()), len(names) - count - 1)
        left = names[count + 1 :]
        job.servers(left, 3 if len(left) >= 3 else 1)
    job.end()
