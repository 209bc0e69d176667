"""A cluster of three real etcd servers that grows out of one: who uses it loses nothing when a server is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.cluster.members import ClusterMembers
from elaunch.rendezvous.embedded import EmbeddedEtcd, free_address
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.store import WatchEvent
from tests.helpers import wait_until

LIMIT_S = 20.0


class Cluster:
    """Servers that end with the test, and a client of all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.servers: dict[str, EmbeddedEtcd] = {}
        peer, first = self._make()
        first.start()
        first.wait_ready(LIMIT_S)
        self.servers[peer] = first
        self.store = EtcdStore(first.endpoint, timeout_s=LIMIT_S)
        self.members = ClusterMembers(self.store)

    def _make(self) -> tuple[str, EmbeddedEtcd]:
        peer = free_address("127.0.0.1")
        return peer, EmbeddedEtcd(str(self._folder / f"etcd{len(self.servers)}"), peer=peer)

    def grow(self) -> None:
        """Adds a server, which takes part once it has caught up."""
        peer, server = self._make()
        self.members.add(peer)
        self.servers[peer] = server
        server.join(one.peer for one in self.members.list())
        (learner,) = [one for one in self.members.list() if one.peer == peer]
        wait_until(lambda: self.members.promote(learner.id), LIMIT_S, f"the server to catch up; {server.last_line()}")
        wait_until(lambda: all(one.client for one in self.members.list()), LIMIT_S, "it to say where clients reach it")
        self.follow()

    def follow(self) -> None:
        self.store.use(",".join(one.client for one in self.members.list()))

    def used(self) -> str:
        """The peer address of the server that the client uses."""
        return next(peer for peer, one in self.servers.items() if one.endpoint == self.store.server.address)

    def signal(self, peer: str, number: int) -> None:
        pid = self.servers[peer].pid
        if pid is not None:
            os.kill(pid, number)

    def close(self) -> None:
        self.store.close()
        for server in self.servers.values():
            if server.pid is not None:
                server.stop(0.0)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        made.grow()
        made.grow()
        yield made
    finally:
        made.close()


class Writer:
    """Writes numbers under one key by compare-and-swap, each once, and keeps a lease, from a thread of its own."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store
        self.written = 0
        self.problem: BaseException | None = None
        self.lease = store.grant(LIMIT_S)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                entry = self._store.get("/count")
                value = b"%d" % (self.written + 1)
                if entry is None:
                    assert self._store.create("/count", value, self.lease)
                else:
                    assert entry.value == b"%d" % self.written
                    assert self._store.replace("/count", value, entry.revision)
                self.written += 1
                self._store.put("/last", value)
                assert self._store.keep_alive(self.lease)
        except BaseException as error:
            self.problem = error

    def goes_on(self) -> None:
        before = self.written
        wait_until(lambda: self.problem or self.written > before + 20, LIMIT_S, "writes to go on")
        assert self.problem is None

    def end(self) -> int:
        self._is_over.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()
        assert self.problem is None
        return self.written


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_writes_and_watches_go_on_when_a_server_is_lost_and_another_takes_its_place(
    cluster: Cluster, number: int
) -> None:
    seen: list[WatchEvent] = []
    errors: list[Exception] = []
    cluster.store.watch("/count", 1, seen.extend, errors.append)
    writer = Writer(cluster.store)
    writer.goes_on()
    for _ in range(2):
        lost = cluster.used()
        cluster.signal(lost, number)
        try:
            writer.goes_on()
            (member,) = [one for one in cluster.members.list() if one.peer == lost]
            cluster.members.remove(member.id)
            cluster.members.remove(member.id)
        finally:
            cluster.signal(lost, signal.SIGCONT)
        cluster.follow()
        cluster.grow()
        assert len(cluster.members.list()) == 3
        writer.goes_on()
    written = writer.end()
    wait_until(lambda: len(seen) >= written or errors, LIMIT_S, "all events")
    assert errors == []
    assert [event.value for event in seen] == [b"%d" % number for number in range(1, written + 1)]


def test_a_server_that_is_removed_ends_and_the_last_one_goes_on_alone(cluster: Cluster) -> None:
    cluster.store.put("/a", b"1")
    first, *others = cluster.members.list()
    for member in others:
        cluster.members.remove(member.id)
        server = cluster.servers[member.peer]
        wait_until(lambda server=server: server.pid is None, LIMIT_S, "its end")  # type: ignore[misc]
        assert server.exitcode == 0
        cluster.follow()
    assert [one.peer for one in cluster.members.list()] == [first.peer]
    entry = cluster.store.get("/a")
    assert entry is not None
    assert entry.value == b"1"


def test_without_a_quorum_nothing_is_written(cluster: Cluster) -> None:
    """And a client says so in its time."""
    cluster.store.put("/a", b"1")
    cluster.store.timeout_s = 2.0
    for peer in list(cluster.servers)[1:]:
        cluster.signal(peer, signal.SIGKILL)
    begin_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="was not answered"):
        cluster.store.put("/a", b"2")
    assert time.monotonic() - begin_s < LIMIT_S
