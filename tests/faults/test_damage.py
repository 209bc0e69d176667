"""A real job, and somebody who writes into its etcd: training goes on, and so does the job once the damage is mended.

`etcd` stands before `spawn` in the signatures, so that the agents end while the store still serves.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.membership import NodeDoc
from tests.faults.test_nodes import Cluster
from tests.helpers import Spawner, wait_until
from tests.jobs.plain_etcd import etcdctl
from tests.jobs.watch import kill_node, wait_for, wait_for_members, wait_for_step

AT = "/elaunch/job/"


@pytest.mark.soak
def test_garbage_in_the_store_neither_ends_a_job_nor_keeps_it_from_surviving_a_death(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--steps", "4000", "--sleep", "0.02")
    a, _b = cluster.add("a", 2), cluster.add("b")
    wait_for_members(cluster.nodes, 3)
    pids = [node.pids() for node in cluster.nodes]
    generations = len(a.events("generation"))

    def put(name: str, value: str) -> None:
        etcdctl(etcd.endpoint, "put", AT + name, value)

    def get(name: str) -> str:
        return etcdctl(etcd.endpoint, "get", "--print-value-only", AT + name)

    def steps_go_on() -> None:
        wait_for_step(cluster.nodes, max(node.last_step() for node in cluster.nodes) + 40)
        assert [node.pids() for node in cluster.nodes] == pids
        assert [node.agent.process.poll() for node in cluster.nodes] == [None, None]

    def any_says(text: str) -> None:
        wait_until(lambda: any(text in node.agent.text() for node in cluster.nodes), 30, text)

    # What is none of the job's stays there all the time.
    put("nodes/ghost", "\udcff\udcfe garbage")
    put("nodes/ghost2", "[" * 100_000)
    put("nodes/ghost3", to_json(NodeDoc("b", "h", 1)).decode())
    put("nodes/\udcff", to_json(NodeDoc("b", "h", 1)).decode())
    put("what", "garbage")
    for name in ("ghost", "ghost2", "ghost3", r"\xff"):
        any_says(f"{AT}nodes/{name} is ignored")
    steps_go_on()

    for name in "ab":
        put(f"nodes/{name}", "[" * 100_000)
    any_says("was overwritten by somebody else; this node writes it again")  # the leader's own is back at once
    wait_until(lambda: all('"member"' in get(f"nodes/{name}") for name in "ab"), 30, "the reports to be back")
    steps_go_on()

    generation = get("generation")
    put("generation", "\udcff")
    for node in cluster.nodes:
        node.agent.wait_for_text(f"{AT}generation is damaged", 30)
    steps_go_on()
    etcdctl(etcd.endpoint, "del", AT + "generation")
    wait_until(lambda: get("generation") == generation, 30, "the generation to be written again")
    for node in cluster.nodes:
        node.agent.wait_for_text(f"{AT}generation is in order again; changes of the job go on", 30)
    steps_go_on()
    assert len(a.events("generation")) == generations, "somebody was expelled"

    worker, pid = sorted(a.pids().items())[0]
    os.kill(pid, signal.SIGKILL)
    wait_for(cluster.nodes, lambda: worker not in a.members(), 30, "a generation without the dead worker")
    wait_for_members(cluster.nodes, 3)
    assert get("nodes/ghost2")
    for node in cluster.nodes:
        assert node.agent.text().count(f"{AT}nodes/ghost is ignored") <= 1
        kill_node(node)
