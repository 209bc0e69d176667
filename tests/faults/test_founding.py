"""The node that hosts the store of a job is lost for good: the others found another store and go on with it."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.cluster.inquiry import HEAD
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.membership import NodeDoc, WorkerState, job_prefix, node_of
from elaunch.rendezvous.rules.founding import Standing
from elaunch.rendezvous.security.identity import guest
from elaunch.rendezvous.security.secret import SecuritySettings
from tests.faults.test_secured import Listening
from tests.faults.test_store import etcd_of
from tests.helpers import Spawner, soak, wait_until
from tests.jobs.watch import SCRIPT, Node, elaunch, kill_node, losses, wait_for, wait_for_members, wait_for_step
from tests.netns import Network, network

LEASE_S = 2.0
NUMBERS = 1_000_000
FOUNDED = "this node serves another one at"


class Job:
    """A job of nodes that have a machine each; the first one hosts the store, and only its address is known."""

    def __init__(
        self, spawn: Spawner, folder: Path, made: Network, names: str, *flags: str, begin_when: dict[str, Path] | None
    ) -> None:
        self._spawn, self._folder, self._flags, self._made = spawn, folder, flags, made
        self.nodes: dict[str, Node] = {}
        self.all: list[Node] = []
        self._begin_when = begin_when or {}
        self.spaces = {name: made.add(name) for name in names}
        for name in names:
            self.start(name, f"--nnodes=1:{len(names)}", ",last_call_timeout=60", len(names))
        if not self._begin_when:
            wait_for_members(self.all, len(names))

    def start(self, name: str, nnodes: str, conf: str = "", gather: int = 1, endpoint: str = "") -> Node:
        endpoint = endpoint or f"{self._made.address('a')}:29400"
        later = ("--begin-when", str(self._begin_when[name])) if name in self._begin_when else ()
        join_s = 20 if len(self.spaces) == 2 else 60  # of more, one that was cut off has to be there for longer
        node = elaunch(
            self._spawn,
            self._folder,
            nnodes,
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
            "--rdzv-id=job",
            f"--rdzv-conf=lease_ttl={LEASE_S:g},link_timeout=2,store_timeout=8,join_timeout={join_s}{conf}",
            f"--node-name={name}",
            *self._flags,
            script=(SCRIPT, "--steps", "100000", "--sleep", "0.02", "--gather", str(gather), *later),
            name=f"{name}{len(self.all)}",
            host=self.spaces[name],
        )
        if not self.all:
            etcd_of(node)
        self.nodes[name] = node
        self.all.append(node)
        return node

    def others(self, lost: str) -> list[Node]:
        return [node for name, node in self.nodes.items() if name not in lost]

    def go_on(self, lost: str) -> None:
        """Sees the others commit steps without those that are lost, in generations of another store."""
        others = self.others(lost)
        wait_for_members(others, len(others), 40)
        wait_for_step(others, max(node.last_step() for node in others) + 20)
        assert max(event["generation"] for node in others for event in node.events("generation")) >= NUMBERS
        for node in others:
            assert node.agent.process.poll() is None, node.agent.tail()

    def end(self, *left_behind: str) -> None:
        """Ends all, and sees that each step was done once and no survivor's worker was started again."""
        for name, node in self.nodes.items():
            if name not in left_behind:
                assert len(node.all_pids()) == 1, node.agent.tail()
        for node in self.nodes.values():
            if node.agent.process.poll() is None:
                kill_node(node)
        losses(self.all)


@contextmanager
def job(
    spawn: Spawner, folder: Path, names: str, *flags: str, begin_when: dict[str, Path] | None = None
) -> Iterator[tuple[Job, Network]]:
    with network() as made:
        try:
            yield Job(spawn, folder, made, names, *flags, begin_when=begin_when), made
        finally:
            spawn.end_all()  # before their network goes


def lose(running: Job, made: Network, name: str, how: str) -> None:
    """The agent of a node is killed on a machine that lives, or the machine is silent from now on."""
    if how == "killed":
        kill_node(running.nodes[name])
    else:
        made.plug(name, into=False)


@pytest.mark.parametrize(
    ("names", "how"), [("abc", "silent"), ("ab", "killed"), soak("abc", "killed"), soak("abcd", "silent")]
)
def test_the_others_go_on_without_the_node_that_hosts_the_store(
    spawn: Spawner, tmp_path: Path, names: str, how: str
) -> None:
    with job(spawn, tmp_path, names) as (running, made):
        joined = [node_of(worker) for worker in running.nodes["a"].members()]
        lose(running, made, "a", how)
        running.go_on("a")
        (founder,) = [name for name, node in running.nodes.items() if FOUNDED in node.agent.text()]
        assert founder == next(name for name in joined if name != "a"), "it is the first that came and is left"
        address = f"{made.address(founder)}:29400"
        assert f"{FOUNDED} {address}" in running.nodes[founder].agent.text()
        assert "job" in ctl(running.spaces[founder], address)
        if how == "silent":
            made.plug("a", into=True)
            goes_over = f"this node goes over to the rendezvous store at {address}"
            wait_for(running.nodes["a"], lambda: goes_over in running.nodes["a"].agent.text(), 40, "a to go over")
            wait_for_members(running.all, len(names))
            running.end("a")
        else:
            # Started again as it was, it takes itself for the first node of a job, until it hears of the one that runs.
            back = running.start("a", f"--nnodes=1:{len(names)}", ",last_call_timeout=60")
            wait_for_members(list(running.nodes.values()), len(names))
            assert f"this node goes over to the rendezvous store at {address}" in back.agent.text()
            running.end("a")


# Answers whoever connects to an address with the bytes that the third argument names in hex, until it is ended.
STRANGER = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=1024) as listener:
    print("listens", flush=True)
    while True:
        with listener.accept()[0] as link:
            link.sendall(bytes.fromhex(sys.argv[3]))
"""


@pytest.mark.parametrize("forged", ["it can reach its store", "it has founded another one"])
def test_a_stranger_who_answers_in_the_place_of_a_lost_agent_is_not_believed(
    spawn: Spawner, tmp_path: Path, forged: str
) -> None:
    """It has taken the address: it says that nobody has to found a store, or has them go over to its own."""
    with job(spawn, tmp_path, "abc") as (running, made):
        address, lost = made.address("a"), running.nodes["a"]
        store = EtcdStore(f"{address}:29400", timeout_s=10.0, pem=guest(SecuritySettings(), "job", time.time()))
        try:
            entry = store.get(f"{job_prefix('job')}nodes/a")
            assert entry is not None
            seat = from_json(NodeDoc, entry.value).liveness_address
        finally:
            store.close()
        standing = Standing("a", store=f"{address}:29400", generation=1)
        if forged == "it has founded another one":
            standing = replace(standing, epoch=7, newest=7, store=f"{address}:29666", founder="a", generation=7_000_000)
        made.plug("a", into=False)
        kill_node(lost)
        command = ["ip", "netns", "exec", running.spaces["a"], sys.executable, "-c", STRANGER]
        command += [*seat.rsplit(":", 1), to_json(standing).hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as stranger:
            try:
                assert stranger.stdout is not None
                assert stranger.stdout.readline() == "listens\n"
                made.plug("a", into=True)
                running.go_on("a")
            finally:
                stranger.kill()
        for node in running.others("a"):
            assert "29666" not in node.agent.text()
        told = f"what answers at {seat}, the address of node a's agent, does not prove that it is of this job"
        assert any(told in node.agent.text() for node in running.others("a"))
        running.end("a")


@pytest.mark.parametrize("encryption", ["auto", soak("off")])
def test_what_agents_ask_each_other_is_encrypted_as_links_are(spawn: Spawner, tmp_path: Path, encryption: str) -> None:
    with job(spawn, tmp_path, "abc", f"--link-encryption={encryption}") as (running, made):
        listening = Listening(made, "b")
        try:
            kill_node(running.nodes["a"])
            running.go_on("a")
            heard = listening.take()
        finally:
            listening.close()
        running.end("a")
    assert len(heard) > 10_000
    for word in (HEAD, b'"Standing"'):
        assert (word in heard) == (encryption == "off")


@pytest.mark.parametrize("lost", ["a", "c"])
def test_a_node_that_is_lost_while_workers_start_does_not_end_the_job(
    spawn: Spawner, tmp_path: Path, lost: str
) -> None:
    """Its workers are ready, and its report says so until its lease has run out."""
    begin = tmp_path / "begin"
    with job(spawn, tmp_path, "abc", begin_when={"b": begin}) as (running, made):
        address, pem = f"{made.address('a')}:29400", guest(SecuritySettings(), "job", time.time())
        store = EtcdStore(address, timeout_s=2.0, pem=pem)
        try:
            wait_until(lambda: ready(store) == {"a", "c"}, 60, "the workers of a and c to be ready")
        finally:
            store.close()
        kill_node(running.nodes[lost])
        begin.touch()
        others = running.others(lost)
        wait_for_members(others, 2, 40)
        wait_for_step(others, 20)
        trained = [event for event in others[0].events("generation") if event["stage"] == "train"]
        assert len(trained) <= 4, "it was taken in again and again"
        for node in others:
            assert len(node.all_pids()) == 1, node.agent.tail()


def ready(store: EtcdStore) -> set[str]:
    """The nodes whose workers wait for the first step."""
    try:
        entries, _ = store.range(f"{job_prefix('job')}nodes/")
    except StoreUnavailable:
        return set()
    docs = [from_json(NodeDoc, entry.value) for entry in entries]
    return {doc.node for doc in docs if any(worker.state is WorkerState.READY for worker in doc.workers)}


def ctl(space: str, endpoint: str) -> str:
    """What `elaunch ctl status` says on a machine."""
    command = [sys.executable, "-m", "elaunch", "ctl", "status", f"--rdzv-endpoint={endpoint}", "--rdzv-id=job"]
    done = subprocess.run(
        ["ip", "netns", "exec", space, *command], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_of_two_nodes_that_are_cut_off_only_the_first_goes_on(spawn: Spawner, tmp_path: Path) -> None:
    with job(spawn, tmp_path, "ab") as (running, made):
        made.part("a", "b")
        wait_for_members(running.nodes["a"], 1, 40)
        second = running.nodes["b"]
        assert second.agent.wait(60) == 1, second.agent.tail()
        assert "without a the nodes that are left are no majority, and those may have gone on" in second.agent.text()
        assert FOUNDED not in second.agent.text()
        assert all(len(event["workers"]) == 2 for event in second.events("generation") if event["stage"] == "train")
        running.end("b")


@pytest.mark.soak
def test_the_part_with_most_nodes_goes_on_and_the_rest_comes_back_to_it(spawn: Spawner, tmp_path: Path) -> None:
    """The node that hosts the store is in the smaller part: it decides nothing more."""
    with job(spawn, tmp_path, "abcd") as (running, made):
        made.part("a", "bcd")
        running.go_on("a")
        assert {event["members"] for event in running.nodes["a"].events("step")} <= {4}, "it commits nothing alone"
        made.part("a", "bcd", cut=False)
        wait_for_members(running.all, 4)
        running.end("a")
