"""The agent's watch over workers that hang: one whose stacks cannot be taken is found all the same."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from elaunch import threads
from elaunch.agent.watch import hang_watch
from elaunch.agent.watch.hang_watch import Found, HangWatch, describe
from elaunch.detect.hang import Hang, HangTimeout
from tests.helpers import wait_until

LIMIT_S = 20.0
WORKER = "a/0#0"
HANG = Hang(WORKER, 3, "in step 3, asleep", 9.0, 5.0, 0.1, 1.0)


class Watched:
    """A watch, what it has found, and one worker in it, for which this process stands."""

    def __init__(self) -> None:
        self.found: Queue[Found] = Queue()
        self.watch = HangWatch(HangTimeout(), {}, self.found.put)
        fds = [os.memfd_create("elaunch-test") for _ in range(2)]
        assert self.watch.attached(WORKER, os.getpid(), fds) == ""

    def is_busy(self) -> bool:
        return self.watch._watched[WORKER].busy


@pytest.fixture
def watched() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.watch.close()


def check(watched: Watched, why: str) -> None:
    found = watched.found.get(timeout=LIMIT_S)
    assert found.hang == HANG
    assert not found.moved
    assert why in describe(found)
    assert describe(found).endswith("it is killed")
    watched.watch.done(WORKER)
    assert not watched.is_busy()


def test_one_whose_stacks_cannot_be_taken_is_found(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(hang_watch, "collect", broken)
    shown = SimpleNamespace(training_tid=1, thread=1, since_s=HANG.moment_s)
    monkeypatch.setattr(watched.watch._watched[WORKER].reader, "read", lambda: shown)
    watched.watch._blame(HANG, "")
    check(watched, "OSError: too many open files")
    said = ""

    def is_said() -> bool:
        nonlocal said
        said += capfd.readouterr().err
        return "thread elaunch-stacks died" in said

    wait_until(is_said, LIMIT_S, "the line")


def test_one_that_shows_nothing_any_more_is_found(watched: Watched) -> None:
    watched.watch._blame(HANG, "")
    check(watched, "was judged without a heartbeat")


def test_without_threads_one_is_found_too(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threads, "start", none)
    watched.watch._blame(HANG, "")
    check(watched, "can't start new thread")


def test_what_is_no_file_in_memory_is_refused(watched: Watched) -> None:
    read, write = os.pipe()
    assert "expected two of files in memory" in watched.watch.attached("a/1#0", 1, [read, write])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)
    assert watched.watch.attached("a/1#0", 1, []) == ""


def test_a_process_that_cannot_be_looked_at_passes_for_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: Any) -> None:
        raise OSError(24, "too many open files")

    monkeypatch.setattr("os.open", short)
    assert hang_watch.thread_state(os.getpid()) == ""


def test_workers_of_which_only_the_state_is_seen_are_looked_at_more_rarely_unless_one_is_stopped() -> None:
    def pause_s(state: str) -> float:
        with patch.object(hang_watch, "thread_state", return_value=state):
            watch.look([(WORKER, os.getpid())], 1, [WORKER], [], lambda _: "")
        return watch.due_s - time.monotonic()

    watch = HangWatch(HangTimeout(), {"T": 60.0}, lambda _: None)
    assert hang_watch.LOOK_S < pause_s("S") <= hang_watch.PLAIN_LOOK_S
    assert pause_s("T") <= hang_watch.LOOK_S
    assert pause_s("S") > hang_watch.LOOK_S
    assert watch.attached(WORKER, os.getpid(), [os.memfd_create("elaunch-test") for _ in range(2)]) == ""
    assert watch.due_s - time.monotonic() <= hang_watch.LOOK_S
    assert pause_s("S") <= hang_watch.LOOK_S
    watch.close()
