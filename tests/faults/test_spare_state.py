"""Spares that hold the state (--spare-state): no state is moved when one takes a place, and no step is lost.

`etcd` stands before `spawn` in the signatures, so that the agents end while the store still serves.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.membership import WorkerState, slot_of
from tests.faults import test_hybrid as hybrid
from tests.faults import test_streams as streams
from tests.faults.test_departures import ctl
from tests.faults.test_nodes import Cluster
from tests.faults.test_spares import documents, members_by_step
from tests.faults.test_workers import reference
from tests.helpers import Spawner
from tests.integration import test_reentry as reentry
from tests.jobs.watch import (
    Node,
    assert_same,
    digests,
    kill_node,
    losses,
    wait_for,
    wait_for_members,
    wait_for_step,
)

SPARE = ("--spares=1", "--spare-state")
LIMIT_S = 150.0
TRAIN_HYBRID, ELASTIC = hybrid.SCRIPT, reentry.SCRIPT


def wait_for_standby(
    etcd: EmbeddedEtcd, nodes: Sequence[Node], name: str, workers: int = 1, without: str = ""
) -> list[str]:
    """Wait until the workers of a spare, `without` not among them, are members with the state; returns their names.

    A step has committed with them then: their change is over, and what they received counts to no later one.
    """

    def there() -> list[str]:
        found = documents(etcd)
        doc, generation = found.node(name), found.generation
        here = [one.id for one in doc.workers if one.state is WorkerState.MEMBER] if doc is not None else []
        is_there = generation is not None and set(here) == set(generation.standby) and without not in here
        return here if is_there and len(here) == workers else []

    idle = list(wait_for(nodes, there, 90, f"{name} to be a spare that holds the state"))
    wait_for_step(nodes, max(node.last_step() for node in nodes) + 2)
    return idle


def last_generation(node: Node) -> dict[str, Any]:
    return [event for event in node.events("generation") if event["stage"] == "train"][-1]


def working(node: Node) -> list[str]:
    last = last_generation(node)
    return [worker for worker in last["workers"] if worker not in last.get("standby", [])]


def heirs(worker: str) -> str:
    """Who has the rank of a worker once c stands in for b."""
    return worker.replace("b/", "c/")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("collectives", ["links", "native"])
def test_a_spare_with_the_state_takes_the_rank_of_a_killed_node_and_no_state_is_moved(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path, collectives: str
) -> None:
    expected, samples, _ = reference(spawn, tmp_path, "--steps", "150")
    # With such a lease the run only ends in time if the broken links, and not the lease, show that the node is gone.
    script = ("--steps", "150", "--gather", "4", "--sleep", "0.03")
    cluster = Cluster(spawn, tmp_path, etcd, "3", *script, conf="lease_ttl=300")
    for name in "abc":
        cluster.add(name, 1, *SPARE, f"--collectives={collectives}")
    wait_for_members(cluster.nodes, 3)
    members = cluster.nodes[0].members()
    first, lost, last = sorted(cluster.nodes, key=lambda node: members.index(next(iter(node.pids()))))
    before = [node.pids() for node in (first, last)]
    spare = cluster.add("d", 1, *SPARE, f"--collectives={collectives}")
    (standby,) = wait_for_standby(etcd, cluster.nodes, "d")
    assert "this node is a spare: its workers start, register, and follow each step" in spare.agent.text()
    assert first.members() == [*members, standby], "it is the last member"
    assert "d (spare, holds the state)" in ctl(spawn, etcd, "status")
    values = json.loads(ctl(spawn, etcd, "status", "--json"))
    assert values["spares"] == {"wanted": 1, "nodes": ["d"], "ready": ["d"]}
    kill_node(lost)
    wait_for(cluster.nodes, lambda: len(first.members()) == 3, 60, "the others to go on")
    assert first.members() == [members[0], standby, members[2]], "it has the rank of the lost one"
    change = last_generation(first)
    assert f"{standby} takes over" in str(change["cause"])
    assert "standby" not in change
    assert [node.agent.wait(LIMIT_S) for node in cluster.nodes if node is not lost] == [0, 0, 0]
    assert_same(losses(cluster.nodes), expected, 1e-9)
    assert digests(cluster.nodes) == samples
    assert [node.all_pids() for node in (first, last)] == [list(pids.values()) for pids in before]
    (entered,) = [event for event in first.events("transition") if event["generation"] == change["generation"]]
    assert (entered["interrupted"], entered["bytes_moved"]) == (True, 0)
    (decided,) = [event for event in first.events("decision") if event["generation"] == change["generation"]]
    assert decided["policy"] == "stay"
    assert {one["moved_bytes"] for one in decided["candidates"] if one["policy"] == "stay"} == {0}
    assert bool(first.events("collectives")) is (collectives == "native")
    plan = next(event["plan"] for event in first.events("decision"))
    assert decided["plan"] == plan.replace(members[1], standby), "its share of each step is that of the lost one"


@pytest.mark.timeout(300)
def test_a_node_that_leaves_and_a_spare_that_dies_cost_no_state_either(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "2", "--steps", "100000", "--gather", "3", "--sleep", "0.01")
    for name in "ab":
        cluster.add(name, 2, *SPARE)
    wait_for_members(cluster.nodes, 4)
    cluster.add("c", 2, *SPARE)
    idle = wait_for_standby(etcd, cluster.nodes, "c", 2)
    a, b, c = cluster.nodes
    begun = max(node.last_step() for node in cluster.nodes)
    os.kill(c.pids()[idle[0]], signal.SIGKILL)
    again = wait_for_standby(etcd, cluster.nodes, "c", 2, without=idle[0])
    assert [slot_of(one) for one in again] == [slot_of(one) for one in idle], "it is replaced there, and a spare again"
    before = wait_for(a, lambda: members if len(members := working(a)) == 4 else None, 60, "the others to work on")
    assert {slot_of(one) for one in before} == {"a/0", "a/1", "b/0", "b/1"}
    b.agent.signal(signal.SIGTERM)
    assert b.agent.wait(60) == 0, b.agent.tail()
    wait_for(cluster.nodes, lambda: {slot_of(one) for one in a.members()} == {"a/0", "a/1", "c/0", "c/1"}, 60, "c")
    wait_for_step([a, c], max(a.last_step(), c.last_step()) + 5)
    assert [slot_of(one) for one in a.members()] == [slot_of(heirs(one)) for one in before], "rank for rank"
    number = next(event["generation"] for event in a.events("generation") if "take over" in event["cause"])
    (entered,) = [event for node in (a, c) for event in node.events("transition") if event["generation"] == number]
    assert (entered["interrupted"], entered["bytes_moved"]) == (False, 0)
    steps = [event["step"] for node in cluster.nodes for event in node.events("step")]
    assert sorted(steps) == list(range(max(steps) + 1)), "each step once"
    counts = members_by_step(cluster.nodes)
    assert min(count for step, count in counts.items() if step >= begun) >= 4, "no step is done by fewer"
    # A node that comes now is the next spare.
    cluster.add("d", 2, *SPARE)
    wait_for_standby(etcd, [a, c], "d", 2)
    assert "a, c, d have left" in ctl(spawn, etcd, "drain", "--all")


@pytest.mark.timeout(300)
def test_another_number_of_nodes_puts_a_spare_to_work_and_back_and_no_state_is_moved(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    expected, samples, _ = reference(spawn, tmp_path, "--steps", "200")
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--steps", "200", "--gather", "3", "--sleep", "0.02")
    cluster.add("a", 1, *SPARE)
    wait_for_step(cluster.nodes, 0)  # it is the first member, which tells of transitions
    cluster.add("b", 1, *SPARE)
    wait_for_members(cluster.nodes, 2)
    cluster.add("c", 1, *SPARE)
    (standby,) = wait_for_standby(etcd, cluster.nodes, "c")
    a = cluster.nodes[0]
    before = [node.pids() for node in cluster.nodes]
    numbers = [last_generation(a)["generation"]]
    for nodes, n_working, told in (("1:3", 3, "a, b, c go on"), ("1:2", 2, "a, b go on, c is on standby")):
        assert told in ctl(spawn, etcd, "resize", nodes)
        wait_for(cluster.nodes, lambda many=n_working: len(working(a)) == many, 60, f"{n_working} to work")  # type: ignore[misc]
        numbers.append(last_generation(a)["generation"])
        wait_for_step(cluster.nodes, max(node.last_step() for node in cluster.nodes) + 5)
        assert len(a.members()) == 3
    assert last_generation(a)["standby"] == [standby]
    assert [node.agent.wait(LIMIT_S) for node in cluster.nodes] == [0, 0, 0]
    assert_same(losses(cluster.nodes), expected, 1e-9)
    assert digests(cluster.nodes) == samples
    assert [node.all_pids() for node in cluster.nodes] == [list(pids.values()) for pids in before]
    entered = [event for event in a.events("transition") if event["generation"] in numbers[1:]]
    assert [(event["interrupted"], event["bytes_moved"]) for event in entered] == [(False, 0), (False, 0)]


@pytest.mark.timeout(300)
def test_a_spare_with_the_state_goes_on_with_a_stream_where_the_lost_node_was(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    undisturbed = streams.run(spawn, whole, "reference", ("--standalone",))
    (hurt / "used").mkdir(parents=True)
    cluster = Cluster(spawn, hurt, etcd, "2", conf="lease_ttl=300")
    cluster.script = [streams.SCRIPT, "--used", str(hurt / "used"), "--gather-at=6", "--sleep=0.1"]
    for name in "ab":
        cluster.add(name, 1, *SPARE)
    wait_for_step(cluster.nodes, 5)
    cluster.add("c", 1, *SPARE)
    (standby,) = wait_for_standby(etcd, cluster.nodes, "c")
    a, b, c = cluster.nodes
    kill_node(b)
    assert [node.agent.wait(LIMIT_S) for node in (a, c)] == [0, 0]
    change = last_generation(a)
    assert f"{standby} takes over" in str(change["cause"])
    found, expected = streams.used(hurt), streams.used(whole)
    # The lost worker may have died before it wrote down what it had used of the last step that it committed.
    steps = [event for node in cluster.nodes for event in node.events("step")]
    last = max(event["step"] for event in steps if event["t"] < change["t"])
    assert found.pop(last) <= expected.pop(last)
    assert found == expected
    assert_same(losses(cluster.nodes), losses(undisturbed), 1e-9)
    assert digests(cluster.nodes) == digests(undisturbed)


@pytest.mark.parametrize("script", [TRAIN_HYBRID, ELASTIC])
def test_jobs_of_other_kinds_say_at_the_start_what_to_leave_out(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path, script: Path
) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "1")
    cluster.script = [script]
    node = cluster.add("a", 1, *SPARE)
    assert node.agent.wait(LIMIT_S) == 1
    assert "--spare-state works with elaunch.init() only" in node.agent.text()
    assert "start the job with --spares alone" in node.agent.text()
