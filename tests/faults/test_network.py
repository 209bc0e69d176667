"""Hosts that lose each other while all of them live: partitions, cuts of one direction, links that come and go.

The hosts are network namespaces, so what the kernel does with a silent connection is what it does between machines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.faults.test_workers import reference
from tests.helpers import Spawner, soak
from tests.jobs.plain_etcd import serving
from tests.jobs.watch import (
    SCRIPT,
    Node,
    assert_same,
    digests,
    elaunch,
    losses,
    wait_for,
    wait_for_members,
    wait_for_step,
)
from tests.netns import Network, network

STEPS = 150
LIMIT_S = 60.0  # for what takes some ten seconds when nothing else runs


@dataclass
class Hosts:
    """A job with one node on each host."""

    network: Network
    etcd: EmbeddedEtcd
    spawn: Spawner
    folder: Path
    nodes: dict[str, Node] = field(default_factory=dict)

    def start(self, names: str, nnodes: str, collectives: str = "auto") -> None:
        """Nodes of these names, which join in this order; the job's last steps wait for all of them to be back."""
        script: list[str | Path] = [SCRIPT, "--steps", str(STEPS), "--sleep", "0.03", "--crew", str(len(names))]
        conf = "lease_ttl=2,link_timeout=2,last_call_timeout=0,attach_timeout=90"
        for count, name in enumerate(names, start=1):
            self.nodes[name] = elaunch(
                self.spawn,
                self.folder,
                f"--nnodes={nnodes}",
                f"--rdzv-endpoint={self.etcd.endpoint}",
                f"--rdzv-conf={conf}",
                f"--collectives={collectives}",
                f"--node-name={name}",
                script=script,
                name=name,
                host=self.network.add(name),
            )
            if count >= int(nnodes.partition(":")[0]):
                wait_for_members(self.all, count)

    @property
    def all(self) -> list[Node]:
        return list(self.nodes.values())

    def of(self, names: str) -> list[Node]:
        return [self.nodes[name] for name in names]

    def wait_for_nodes(self, names: str, seen_by: str) -> None:
        """Until these nodes are the members, as others see it."""

        def there() -> bool:
            found = [sorted({worker.partition("/")[0] for worker in node.members()}) for node in self.of(seen_by)]
            return all(one == sorted(names) for one in found)

        wait_for(self.of(seen_by), there, LIMIT_S, f"a generation of {names}")

    def end(self, expected: dict[int, float], samples: list[str]) -> None:
        """All come to the end of the job, which has done what an undisturbed one does."""
        for node in self.all:
            assert node.agent.wait(100) == 0, node.agent.tail()
        assert_same(losses(self.all), expected, 1e-9)
        assert digests(self.all) == samples


def sums_natively(first: Node) -> bool:
    """Whether the members of the newest generation use a native group, as the first member's agent logs it."""
    return first.events("collectives")[-1:] != [] and (
        first.events("collectives")[-1]["generation"] == first.events("generation")[-1]["generation"]
    )


@pytest.fixture
def hosts(spawn: Spawner, tmp_path: Path) -> Iterator[Hosts]:
    with network() as made, serving(tmp_path / "etcd", made.gateway) as etcd:
        yield Hosts(made, etcd, spawn, tmp_path)
        spawn.end_all()  # before their network goes


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("both_ways", "collectives"),
    [(False, "links"), *(soak(*values) for values in ((True, "native"), (True, "links"), (False, "native")))],
)
def test_of_two_hosts_that_lose_each_other_the_later_is_left_out_until_they_are_joined_again(
    hosts: Hosts, both_ways: bool, collectives: str
) -> None:
    expected, samples, _ = reference(hosts.spawn, hosts.folder, "--steps", str(STEPS))
    hosts.start("abc", "1:3", collectives)
    if collectives == "native":
        wait_for(hosts.all, lambda: sums_natively(hosts.nodes["a"]), LIMIT_S, "steps over a native group")
    before = {name: node.pids() for name, node in hosts.nodes.items()}
    hosts.network.cut("a", "c", both_ways)
    hosts.wait_for_nodes("ab", seen_by="abc")
    (generation,) = [event for event in hosts.nodes["a"].events("generation") if "left out" in event["cause"]]
    assert generation["cause"] == "node c is left out: nothing passes between it and a"
    assert hosts.nodes["c"].agent.wait_for_text("nothing comes from a (10.", LIMIT_S)
    # It waits for the way to be mended, however ready its new worker is.
    wait_for_step(hosts.all, hosts.nodes["a"].last_step() + 3)
    hosts.network.mend("a", "c", both_ways)
    hosts.wait_for_nodes("abc", seen_by="abc")
    hosts.end(expected, samples)
    assert [hosts.nodes[name].all_pids() for name in "ab"] == [list(before[name].values()) for name in "ab"]
    assert len(hosts.nodes["c"].all_pids()) == 2


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_host_that_reaches_none_of_the_others_is_left_out_though_it_came_first(hosts: Hosts) -> None:
    expected, samples, _ = reference(hosts.spawn, hosts.folder, "--steps", str(STEPS))
    hosts.start("abc", "1:3")
    hosts.network.part("a", "bc")
    hosts.wait_for_nodes("bc", seen_by="abc")
    hosts.network.part("a", "bc", cut=False)
    hosts.wait_for_nodes("abc", seen_by="abc")
    hosts.end(expected, samples)


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_where_the_network_is_in_two_halves_one_goes_on_and_the_other_waits(hosts: Hosts) -> None:
    expected, samples, _ = reference(hosts.spawn, hosts.folder, "--steps", str(STEPS))
    hosts.start("abcd", "1:4")
    hosts.network.part("ab", "cd")
    hosts.wait_for_nodes("ab", seen_by="abcd")
    generation = hosts.nodes["a"].events("generation")[-1]["generation"]
    wait_for_step(hosts.all, hosts.nodes["a"].last_step() + 3)
    assert all(event["generation"] < generation for node in hosts.of("cd") for event in node.events("step"))
    hosts.network.part("ab", "cd", cut=False)
    hosts.wait_for_nodes("abcd", seen_by="abcd")
    hosts.end(expected, samples)


@pytest.mark.timeout(240)
@pytest.mark.soak
def test_with_fewer_nodes_than_the_job_must_have_all_wait_until_the_link_is_back(hosts: Hosts) -> None:
    expected, samples, _ = reference(hosts.spawn, hosts.folder, "--steps", str(STEPS))
    hosts.start("ab", "2:2")
    hosts.network.cut("a", "b")
    hosts.nodes["a"].agent.wait_for_text("1 of at least 2 nodes are left", LIMIT_S)
    step = max(node.last_step() for node in hosts.all)
    # Whichever came last, by a moment.
    (staying,) = {worker.partition("/")[0] for worker in hosts.nodes["a"].members()}
    other = hosts.nodes["b" if staying == "a" else "a"]
    other.agent.wait_for_text("was given up by its peers", LIMIT_S)
    assert max(node.last_step() for node in hosts.all) == step
    hosts.network.mend("a", "b")
    hosts.wait_for_nodes("ab", seen_by="ab")
    hosts.end(expected, samples)


@pytest.mark.timeout(240)
def test_a_host_whose_cable_is_pulled_comes_back(hosts: Hosts) -> None:
    expected, samples, _ = reference(hosts.spawn, hosts.folder, "--steps", str(STEPS))
    hosts.start("abc", "1:3")
    hosts.network.plug("b", into=False)
    hosts.wait_for_nodes("ac", seen_by="ac")
    # It does not know yet, and does nothing for the job that counts.
    generation = hosts.nodes["a"].events("generation")[-1]["generation"]
    wait_for_step(hosts.of("ac"), hosts.nodes["a"].last_step() + 3)
    assert max(event["generation"] for event in hosts.nodes["b"].events("generation")) < generation
    hosts.network.plug("b", into=True)
    hosts.wait_for_nodes("abc", seen_by="abc")
    hosts.end(expected, samples)


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_link_that_comes_and_goes_for_moments_costs_nobody_a_place(hosts: Hosts) -> None:
    expected, samples, _ = reference(hosts.spawn, hosts.folder, "--steps", str(STEPS))
    hosts.start("abc", "1:3")
    workers = hosts.nodes["a"].members()
    for _ in range(4):
        hosts.network.cut("a", "c")
        time.sleep(0.5)  # much less than what makes a link a silent one
        hosts.network.mend("a", "c")
        wait_for_step(hosts.all, max(node.last_step() for node in hosts.all) + 2)
    assert hosts.nodes["a"].members() == workers
    hosts.end(expected, samples)
    assert [len(node.all_pids()) for node in hosts.all] == [1, 1, 1]
