"""Whoever waits in a Gloo group is freed when it is poisoned, also where Gloo loses the end of an operation."""

from __future__ import annotations

import itertools
import os
import random
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from elaunch.errors import CollectiveFailed
from elaunch.workers.comm.native import ended, sockets
from elaunch.workers.comm.native.gloo import MESSAGE, GlooBulk
from elaunch.workers.comm.native.gloo_work import Collective, Freed, GroupEnd, Messages, threads_asleep
from elaunch.workers.layers.carry.native import NativeCarrier
from elaunch.workers.layers.carry.routes import tp_key
from tests.helpers import Spawner, wait_until
from tests.jobs.gloo_peer import ELEMENTS
from tests.jobs.watch import WARM
from tests.unit.comm_crew import Task
from tests.unit.test_native import HOST, gloo

SHORT = timedelta(seconds=0.01)


class Endless(dist.Work):
    """An operation of whose end Gloo tells nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.never = threading.Event()

    def wait(self, timeout: timedelta = timedelta(days=1)) -> bool:
        if not self.never.wait(timeout.total_seconds()):
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()


@pytest.mark.parametrize("how", ["send", "receive", "exchange"])
def test_a_message_that_a_connection_was_in_the_middle_of_ends_with_its_group(
    spawn: Spawner, tmp_path: Path, how: str
) -> None:
    """Gloo tells nobody of its end: the peer is stopped, and the connection shut down as when members change."""
    place, does = tmp_path / "store", "gives" if how == "receive" else "takes"
    peer = psutil.Process(spawn.fork(WARM, "tests.jobs.gloo_peer", place, does, name="peer").process.pid)
    bulk, tensor = GlooBulk(HOST), torch.zeros(ELEMENTS)
    bulk.open(dist.FileStore(str(place), 2), 0, 2, messages=True)
    routes: Any = SimpleNamespace(worker="a")
    carrier = NativeCarrier(routes, [], {tp_key(("a", "b")): bulk}, torch.device("cpu"), 7, True, lambda number: None)
    if how == "receive":
        work = bulk.receive(tensor, 1)
        waiting = Task(work.wait)
        wait_until(lambda: bool(tensor[0]), 20, "the message to begin")
        peer.send_signal(signal.SIGSTOP)
    else:
        wait_until(lambda: peer.status() == psutil.STATUS_STOPPED, 20, "the peer to stop")
        if how == "send":
            work = bulk.exchange([tensor[:0], tensor], [tensor[:0]] * 2)[0]
            waiting = Task(work.wait)
        else:  # nor does a tensor-parallel sum with a fixed order outlast its generation
            waiting = Task(lambda: carrier.exchange(("a", "b"), 0, [tensor] * 2, [tensor.clone(), tensor.clone()]))
    time.sleep(0.1)
    assert waiting.running
    if how == "receive":
        assert not tensor[-1], "all of it came before the peer was stopped"
    bulk.poison()
    with pytest.raises((Freed, CollectiveFailed), match="the group is closed"):
        waiting.result(5)
    assert all(one.is_closed() for one in bulk._connections), "nothing is written any more"
    if how != "exchange":
        ended.drop([work], on_host=True)
    bulk.close()


def test_a_message_may_take_longer_than_whoever_waits_for_it_looks_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "LINKS_S", 0.01)
    looks, tensor = list[None](), torch.zeros(3)
    with gloo(2) as bulks:
        coming = bulks[0].receive(tensor, 1)
        with pytest.raises(RuntimeError, match="not over within"):
            coming.wait(SHORT)
        waiting = Task(lambda: ended.wait(coming, lambda: looks.append(None)))
        wait_until(lambda: len(looks) > 2, 20, "it to look")
        assert waiting.running
        bulks[1].send(torch.ones(3), 0).wait()
        waiting.result(10)
        assert tensor.tolist() == [1.0] * 3
        assert coming.is_completed()


def test_messages_without_an_end_hold_up_nobody_once_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "DROP_S", 60.0)
    closed = threading.Event()
    end = GroupEnd(closed.is_set, closed.is_set)
    lost = Messages([Endless()], end)
    waiting = Task(lost.wait)
    assert waiting.running
    end.come()
    time.sleep(0.05)
    assert waiting.running, "they may still write"
    closed.set()
    with pytest.raises(Freed):
        waiting.result(10)
    begin_s = time.monotonic()
    ended.drop([lost, Messages([Endless()], end)], on_host=True)
    with pytest.raises(Freed):
        Messages([Endless()], end).wait()
    assert time.monotonic() - begin_s < ended.DROP_S / 2


@pytest.mark.parametrize("kind", ["messages", "collective"])
def test_whoever_waits_in_a_group_that_lives_is_freed_when_a_connection_breaks(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All members may have lost the same end; then nobody tells of it."""
    monkeypatch.setattr("elaunch.workers.comm.native.gloo_work.LOOK_AT_CONNECTIONS_S", 0.01)
    broken = threading.Event()
    end = GroupEnd(bool, broken.is_set)
    lost = Messages([Endless()], end) if kind == "messages" else Collective(Endless(), end)
    waiting = Task(lambda: ended.wait(lost, lambda: None))
    time.sleep(0.05)
    assert waiting.running
    broken.set()
    with pytest.raises(Freed, match="has broken"):
        waiting.result(5)


def test_a_connection_that_gloo_keeps_though_it_has_ended_holds_up_nobody_and_takes_no_processor(
    spawn: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gloo reads no further where what it was reading into is gone, as after a sum that failed for a third member."""
    monkeypatch.setattr(ended, "DROP_S", 60.0)
    place = tmp_path / "store"
    peer = psutil.Process(spawn.fork(WARM, "tests.jobs.gloo_peer", place, "gives", name="peer").process.pid)
    bulk, tensor = GlooBulk(HOST), torch.zeros(ELEMENTS)
    bulk.open(dist.FileStore(str(place), 2), 0, 2, messages=True)
    coming = bulk.backend_group().recv([tensor], 1, MESSAGE)
    wait_until(lambda: bool(tensor[0]), 20, "the message to begin")
    peer.send_signal(signal.SIGSTOP)
    assert not tensor[-1], "all of it came before the peer was stopped"
    waiting = bulk.all_reduce(torch.zeros(1 << 20))
    del coming
    peer.send_signal(signal.SIGCONT)
    (connection,) = bulk._connections
    time.sleep(0.1)
    begin_s = time.monotonic()
    bulk.poison()
    with pytest.raises(Freed):
        Task(waiting.wait).result(20)
    ended.drop([waiting], on_host=True)
    assert not waiting.is_completed(), "it has come to its end"
    assert not connection.is_closed(), "Gloo has closed it"
    bulk.close()  # its group is kept for as long as this process lives
    process = psutil.Process()

    def busy_s() -> float:
        return process.cpu_times().user + process.cpu_times().system

    def is_quiet() -> bool:
        before_s = busy_s()
        time.sleep(0.2)
        return busy_s() - before_s < 0.1

    wait_until(is_quiet, 20, "Gloo's thread to sleep")
    assert time.monotonic() - begin_s < ended.DROP_S


def test_what_a_connection_still_holds_is_dropped_once_it_was_shut_down() -> None:
    with socket.create_server((HOST, 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    with near, far:
        near.setblocking(False)
        connection = sockets.Socket(near.fileno(), os.fstat(near.fileno()).st_ino, near.dup())
        far.sendall(b"x" * 100_000)
        wait_until(lambda: near.recv(1, socket.MSG_PEEK), 20, "it to come")
        assert not connection.is_used_up()
        assert len(near.recv(10, socket.MSG_PEEK)) == 10, "of a connection that lives, nothing is dropped"
        connection.shut_down()
        assert connection.is_used_up()
        assert near.recv(10) == b""
        connection.close()
        assert connection.is_used_up()


def test_threads_sleep_only_if_all_of_gloos_do(tmp_path: Path) -> None:
    def thread(number: int, name: str, state: str) -> None:
        (tmp_path / str(number)).mkdir(exist_ok=True)
        text = f"Name:\t{name}\nState:\t{state}\nPid:\t{number}\nvoluntary_ctxt_switches:\t{10 * number}\n"
        (tmp_path / str(number) / "status").write_text(text)

    thread(1, "python", "R (running)")
    (tmp_path / "2").mkdir()  # it has ended
    assert threads_asleep(str(tmp_path)) is None, "without names, nothing is known"
    thread(3, "pt_gloo_runloop", "S (sleeping)")
    thread(4, "pt_gloo_runloop", "S (sleeping)")
    assert threads_asleep(str(tmp_path)) == frozenset({("3", "30"), ("4", "40")})
    thread(4, "pt_gloo_runloop", "D (disk sleep)")
    assert threads_asleep(str(tmp_path)) is None


@pytest.mark.parametrize("way", ["awake", "connected"])
def test_a_collective_whose_thread_may_go_on_is_waited_for(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(ended, "DROP_S", 60.0)
    module = "elaunch.workers.comm.native.gloo_work"
    monkeypatch.setattr(f"{module}.ASLEEP_LOOK_S", 0.0)
    closed, looks = threading.Event(), itertools.count()
    asleep = frozenset({("1", "0")})
    sleepy = threading.Event()

    def threads(tasks: str = "") -> frozenset[tuple[str, str]] | None:
        # It is woken now and then, or computes.
        return asleep if sleepy.is_set() else random.choice([None, frozenset({("1", str(next(looks)))})])

    monkeypatch.setattr(f"{module}.threads_asleep", threads)
    end = GroupEnd(closed.is_set, bool)
    (sleepy if way == "connected" else closed).set()
    dropping = Task(lambda: ended.drop([Collective(Endless(), end)], on_host=True))
    time.sleep(0.1)
    assert dropping.running, "it may still write"
    sleepy.set()
    closed.set()
    dropping.result(20)


class Broken(Endless):
    """An operation whose connection is gone."""

    def wait(self, timeout: timedelta = timedelta(days=1)) -> bool:
        raise RuntimeError("Connection closed by peer")

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        lost: torch.futures.Future[Any] = torch.futures.Future()
        lost.set_exception(RuntimeError("Connection closed by peer"))
        return lost


@pytest.mark.parametrize("kind", ["messages", "collective", "future"])
def test_what_fails_because_its_group_is_over_says_so(kind: str) -> None:
    end = GroupEnd(bool, bool)
    lost = Messages([Broken(), Endless()], end) if kind == "messages" else Collective(Broken(), end)

    def wait() -> None:
        Task(lost.get_future().wait if kind == "future" else lost.wait).result(10)

    with pytest.raises(RuntimeError, match="closed by peer"):
        wait()
    end.come()
    with pytest.raises(Freed, match="the group is closed") as found:
        wait()
    assert "closed by peer" in str(found.value.__cause__)


def test_an_error_of_one_message_is_told_though_another_never_ends() -> None:
    both = Messages([Broken(), Endless()], GroupEnd(bool, bool))
    with pytest.raises(RuntimeError, match="closed by peer"):
        Task(lambda: ended.wait(both, lambda: pytest.fail("its links are looked at"))).result(10)
    assert both.is_completed()
    assert not both.is_success()


def test_a_collective_without_an_end_holds_up_nobody_once_its_group_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended, "DROP_S", 0.01)
    end = GroupEnd(lambda: True, bool)
    lost = Collective(Endless(), end)
    with pytest.raises(RuntimeError, match="timed out"):
        lost.wait(SHORT)
    waiting, future = Task(lambda: ended.wait(lost, lambda: None)), lost.get_future()
    time.sleep(0.05)
    assert waiting.running
    assert not future.done()
    end.come()
    with pytest.raises(Freed):
        waiting.result(10)
    with pytest.raises(Freed):
        Task(future.wait).result(10)
    assert not lost.is_completed(), "it may still write"
    ended.drop([lost], on_host=True)


def test_a_group_with_a_thread_that_never_ends_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr("elaunch.workers.comm.native.gloo.keep_until_over", lambda what, works: kept.append(what))
    with gloo(2) as bulks:
        group = bulks[0].backend_group()
        bulks[0].wrap(Endless(), is_message=False)
        for bulk in bulks:
            bulk.poison()
        Task(bulks[0].close).result(5)
        Task(bulks[1].close).result(5)
    assert [one for one, _ in kept] == [group]
