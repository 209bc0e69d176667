"""The end of a connection is noticed at once, and what it means is asked of NCCL."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaunch.workers.comm.native import sockets
from elaunch.workers.comm.native.hangups import ERROR_S, IN_PROGRESS, SUCCESS, Hangups, await_failure, communicator_of
from elaunch.workers.comm.native.nccl import NcclBulk, await_aborts
from elaunch.workers.reentry.groups import FunctionGroups

REMOTE = 6  # ncclRemoteError


def connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    return ours, theirs


@pytest.fixture
def told() -> Iterator[tuple[Hangups, threading.Semaphore]]:
    heard = threading.Semaphore(0)
    hangups = Hangups(heard.release)
    yield hangups, heard
    hangups.close()


def test_whoever_watches_hears_at_once_that_a_peer_has_closed_its_end(told: Any) -> None:
    hangups, heard = told
    older = sockets.inodes()
    with_old, (ours, theirs) = connection(), connection()
    hangups.watch(older)
    hangups.watch(older)  # once more, as more connections are made
    theirs.sendall(b"what comes is not the end")
    assert not heard.acquire(timeout=0.05)
    theirs.close()
    assert heard.acquire(timeout=10)
    assert not heard.acquire(timeout=0.05), "one end is told of once"
    for one in (ours, *with_old):
        one.close()


def test_older_connections_and_those_that_end_here_are_nobodys_loss(told: Any) -> None:
    hangups, heard = told
    ours, theirs = connection()
    hangups.watch(sockets.inodes())
    theirs.close()
    mine, peer = connection()
    hangups.watch(sockets.inodes() - {inode for fd, inode in sockets.numbers() if fd == mine.fileno()})
    mine.close()
    assert not heard.acquire(timeout=0.05)
    for one in (ours, peer):
        one.close()


def test_nothing_is_told_after_the_end() -> None:
    heard = threading.Semaphore(0)
    hangups = Hangups(heard.release)
    older = sockets.inodes()
    ours, theirs = connection()
    hangups.watch(older)
    hangups.close()
    theirs.close()
    assert not heard.acquire(timeout=0.05)
    ours.close()


class TestHold:
    """What is about to be called waits for what the end of a connection means."""

    @pytest.fixture(autouse=True)
    def lost(self) -> Iterator[None]:
        self.over, self.asked, self.answer = threading.Event(), threading.Event(), threading.Event()
        self.is_loss = True

        def ended() -> None:
            self.asked.set()
            assert self.answer.wait(10)
            if self.is_loss:
                self.over.set()

        self.hangups = Hangups(ended)
        older = sockets.inodes()
        self.ours, self.theirs = connection()
        self.hangups.watch(older)
        yield
        self.answer.set()
        self.hangups.close()
        for one in (self.ours, self.theirs):
            one.close()

    def test_it_goes_on_at_once_while_all_are_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(self.over, "wait", lambda _: pytest.fail("it waits"))
        self.hangups.hold(self.over)

    @pytest.mark.parametrize("is_asked", [False, True])
    def test_it_ends_with_the_group(self, is_asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("elaunch.workers.comm.native.hangups.HOLD_S", 20.0)
        self.theirs.close()
        if is_asked:
            assert self.asked.wait(10)
        threading.Timer(0.05, self.answer.set).start()
        with pytest.raises(RuntimeError, match="a peer of a process group is lost"):
            self.hangups.hold(self.over)

    def test_it_goes_on_where_nothing_comes_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_loss = False
        self.theirs.close()
        assert self.asked.wait(10)
        self.hangups.hold(self.over)
        waits: list[float] = []
        monkeypatch.setattr(self.over, "wait", waits.append)
        self.hangups.hold(self.over)
        assert waits == [pytest.approx(0, abs=0.01)], "no longer than once for one end"

    def test_nothing_is_waited_for_after_the_end(self) -> None:
        self.hangups.close()
        self.theirs.close()
        self.hangups.hold(self.over)


def test_a_communicator_fails_when_nccl_says_so_and_not_before() -> None:
    answers = iter([SUCCESS, IN_PROGRESS, SUCCESS, REMOTE])
    assert await_failure(lambda: [1], threading.Event(), lambda _: next(answers))
    assert next(answers, None) is None


def test_an_end_that_nccl_does_not_mind_is_forgotten() -> None:
    ticks = itertools.count(0.0, ERROR_S / 4)
    assert not await_failure(lambda: [1], threading.Event(), lambda _: SUCCESS, lambda: next(ticks))
    over = threading.Event()
    over.set()
    assert not await_failure(lambda: [1], over, lambda _: REMOTE), "its memory may be gone"


def test_a_group_without_a_communicator_has_no_address() -> None:
    assert communicator_of(SimpleNamespace()) == 0
    assert communicator_of(SimpleNamespace(_comm_ptr=lambda: 17)) == 17


def test_the_process_ends_after_the_abort_of_its_groups() -> None:
    bulk, ending, ended = NcclBulk(torch.device("cpu")), threading.Event(), list[str]()

    def abort() -> None:
        assert ending.wait(10)
        ended.append("abort")

    bulk._group = SimpleNamespace(abort=abort)
    bulk.poison()
    threading.Timer(0.05, ending.set).start()
    await_aborts()
    assert ended == ["abort"]


def test_torch_does_not_end_a_group_of_devices_that_the_entry_frees() -> None:
    groups, ended = FunctionGroups(), list[object]()
    device, host = object(), object()
    groups._device_groups = [device]
    for backends in ({"cuda": device, "cpu": host}, {"cpu": host}):
        group = SimpleNamespace(_device_types=list(backends), _get_backend=backends.__getitem__)
        groups._shut_down(group, ended.append)
    assert ended == [group]
