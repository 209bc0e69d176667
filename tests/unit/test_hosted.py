"""The agent's own etcd: started again when it ends, at ever longer intervals if it fails, and not for ever."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.local_jobs import make_folder, running
from elaunch.agent.watch.hosted import LONGEST_PAUSE_S, MOST_QUICK_ENDS, HostedEtcd, QuickEnds, ServerPlace
from elaunch.rendezvous.cluster.servers import EtcdServer, EtcdServers
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from tests.helpers import wait_until

LIMIT_S = 20.0


class TestPacing:
    def test_a_server_that_was_killed_after_it_had_served_is_started_at_once_as_often_as_that_happens(self) -> None:
        ends = QuickEnds()
        assert [ends.pause_s(0.6, was_killed=True) for _ in range(3 * MOST_QUICK_ENDS)] == [0.0] * 3 * MOST_QUICK_ENDS

    def test_one_that_fails_soon_is_given_ever_longer_pauses_and_then_up(self) -> None:
        ends = QuickEnds()
        pauses = [ends.pause_s(5.0, was_killed=False) for _ in range(MOST_QUICK_ENDS)]
        assert pauses[:3] == [0.1, 0.2, 0.4]
        assert pauses[-2:] == [LONGEST_PAUSE_S, None]

    def test_failures_before_a_long_life_do_not_count(self) -> None:
        ends = QuickEnds()
        for _ in range(MOST_QUICK_ENDS - 1):
            assert ends.pause_s(0.1, was_killed=False) is not None
        assert ends.pause_s(3600.0, was_killed=False) == 0.0
        assert ends.pause_s(0.1, was_killed=False) == 0.1


class Keeper:
    """An etcd, and the loop that keeps it."""

    def __init__(self, folder: Path) -> None:
        self.etcd = EmbeddedEtcd(str(folder))
        self.etcd.start()
        self.said: list[str] = []
        self.now_s = 100.0
        self.selector = selectors.DefaultSelector()

    def keep(self) -> HostedEtcd:
        self.hosted = HostedEtcd(self.etcd, self.selector, self.said.append, self.now_s)
        return self.hosted

    def read(self, key: str) -> bytes | None:
        store = EtcdStore(self.etcd.endpoint, timeout_s=LIMIT_S)
        try:
            entry = store.get(key)
            return entry.value if entry else None
        finally:
            store.close()

    def close(self) -> None:
        self.hosted.close()
        self.etcd.stop()
        self.selector.close()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    made = Keeper(tmp_path / "etcd")
    yield made
    made.close()


def test_its_end_wakes_the_loop_and_it_comes_back_with_its_data_at_its_port(keeper: Keeper) -> None:
    keeper.etcd.wait_ready(LIMIT_S)
    hosted, endpoint, pid = keeper.keep(), keeper.etcd.endpoint, keeper.etcd.pid
    store = EtcdStore(endpoint, timeout_s=LIMIT_S)
    store.put("/a", b"1")
    store.put("/last", b"")  # what an old etcd may lose
    store.close()
    assert pid is not None
    hosted.look(keeper.now_s)
    assert keeper.selector.select(0) == []
    os.kill(pid, signal.SIGKILL)
    assert keeper.selector.select(LIMIT_S)
    keeper.now_s += 1.0
    wait_until(lambda: keeper.etcd.pid is None, LIMIT_S, "the end of etcd")
    hosted.look(keeper.now_s)
    assert keeper.etcd.pid not in (None, pid)
    assert keeper.read("/a") == b"1"
    assert keeper.etcd.endpoint == endpoint
    assert "was killed by SIGKILL; it is started again with its data" in keeper.said[0]
    assert len(keeper.said) == 1


def test_a_server_counts_for_the_quorum_once_it_votes(keeper: Keeper) -> None:
    place = ServerPlace("127.0.0.1", 0, lambda folder: None, address="127.0.0.1:1")
    keeper.hosted = hosted = HostedEtcd(keeper.etcd, keeper.selector, keeper.said.append, keeper.now_s, place)
    assert hosted.will_serve, "it is the only one"
    for votes in (False, True):
        server = EtcdServer("a", place.address, keeper.etcd.endpoint, votes)
        hosted.on_servers(EtcdServers((server,)), keeper.now_s)
        assert hosted.will_serve is votes


def test_one_that_fails_at_each_start_is_given_up_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "etcd"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\necho the disk is on fire >&2; exit 3\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("elaunch.agent.watch.hosted.MOST_QUICK_ENDS", 4)
    keeper = Keeper(tmp_path / "etcd")
    hosted = keeper.keep()
    for _ in range(4):
        wait_until(lambda: keeper.etcd.pid is None, LIMIT_S, "the end of etcd")
        hosted.look(keeper.now_s)
        assert hosted.due_s() >= keeper.now_s
        keeper.now_s += 0.5
        hosted.look(keeper.now_s)
    assert keeper.etcd.pid is None
    assert hosted.due_s() == float("inf")
    first, last = keeper.said
    assert "exited with code 3; it is started again" in first
    assert "exited with code 3, soon after its start, for the 4th time in a row: it is not started again" in last
    assert last.endswith("Its log ends: the disk is on fire")
    keeper.close()


def test_a_store_that_is_founded_takes_the_port_of_the_server_that_ran_here(keeper: Keeper) -> None:
    """Of a store that has lost its quorum: there other nodes look for the job."""
    keeper.etcd.wait_ready(LIMIT_S)
    former, (host, _, port) = keeper.etcd, keeper.etcd.endpoint.rpartition(":")
    place = ServerPlace(host, int(port), lambda folder: None)
    keeper.hosted = hosted = HostedEtcd(former, keeper.selector, keeper.said.append, keeper.now_s, place, "job")
    assert hosted.found(keeper.now_s) == former.endpoint
    assert former.pid is None
    store = EtcdStore(former.endpoint, timeout_s=LIMIT_S)
    assert store.get("/a") is None
    store.close()


def test_a_store_that_is_founded_is_empty_and_whoever_looks_for_the_job_here_finds_it(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    keeper.etcd.wait_ready(LIMIT_S)
    folder = make_folder()
    former = keeper.etcd
    keeper.etcd = EmbeddedEtcd(folder)
    keeper.etcd.start()
    keeper.etcd.wait_ready(LIMIT_S)
    former.stop()
    place = ServerPlace("127.0.0.1", 0, lambda folder: None, is_alone=True)
    hosted = HostedEtcd(keeper.etcd, keeper.selector, keeper.said.append, keeper.now_s, place, "job")
    keeper.hosted = hosted
    assert [one.endpoint for one in running()] == [keeper.etcd.endpoint]
    hosted.on_servers(EtcdServers((EtcdServer("b", "b:1", "b:2", votes=True),)), keeper.now_s)
    assert [one.endpoint for one in running()] == ["b:2"], "the server here may be removed now"
    former, address = keeper.etcd, hosted.found(keeper.now_s)
    assert [one.endpoint for one in running()] == [address]
    assert address != former.endpoint
    hosted.look(keeper.now_s)
    assert former.pid is None
    store = EtcdStore(address, timeout_s=LIMIT_S)
    assert store.get("/a") is None
    store.close()
    assert hosted.serves
    assert f"this node serves another one at {address}" in keeper.said[-1]
