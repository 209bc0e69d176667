"""The stacks of a worker that hangs: from py-spy where there is one, else from its own faulthandler."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from elaunch.detect import stacks
from elaunch.detect.stacks import Stacks, collect, frames_of, save
from tests.helpers import Spawned, Spawner, wait_until

HANGS = """
import sys, threading, time
from elaunch.workers import heartbeat
from tests.jobs import hangs

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
shown = heartbeat.open_heartbeat()
sys.stdout.write(f"heartbeat {shown.stacks_fd} {threading.get_native_id()} {threading.get_ident()}\\n")
sys.stdout.flush()
hangs.hang(sys.argv[1])
"""

FAULTHANDLER = """Thread 0x00007f8d8da396c0 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

Current thread 0x00007f8db19cfb80 (most recent call first):
  File "/home/me/my models/train.py", line 29 in attention
  File "/home/me/my models/train.py", line ??? in <lambda>
"""

PY_SPY = """Process 25448: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread 25450 (idle): "Thread-1 (<lambda>)"
    _bootstrap (threading.py:1002)
Thread 25448 (active+gil): "MainThread"
    attention (my models/train.py:29)
    <module> (train.py:8)
"""

SPY = """#!/bin/sh
{before}
cat <<END
Process $3: python train.py

Thread $3 (active): "MainThread"
    seen_by_the_spy (train.py:29)
END
exit {code}
"""


@pytest.fixture(autouse=True)
def no_py_spy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has; `spy` makes one."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(stacks, "py_spy", lambda: shutil.which("py-spy", path=str(tmp_path / "bin")))


def spy(folder: Path, before: str = "", code: int = 0) -> None:
    program = folder / "bin" / "py-spy"
    program.write_text(SPY.format(before=before, code=code))
    program.chmod(0o755)


def start(spawn: Spawner, kind: str) -> tuple[Spawned, int, int, int]:
    """A process that hangs; it, its file for dumps, and both numbers of its training thread."""
    worker = spawn.python("-c", HANGS, kind)
    wait_until(lambda: worker.text().endswith("\n") or worker.process.poll() is not None, 60, worker.tail)
    fd, tid, thread = map(int, worker.text().split("heartbeat ")[1].split()[:3])
    return worker, os.open(f"/proc/{worker.pid}/fd/{fd}", os.O_RDONLY), tid, thread


def take(spawn: Spawner, kind: str, stopped: bool = False) -> Stacks:
    worker, fd, tid, thread = start(spawn, kind)
    # It has said so before it hangs.
    wait_until(lambda: f"in {kind}" in _dump(worker, fd, tid, thread), 60, worker.tail)
    if stopped:
        worker.signal(signal.SIGSTOP)
    try:
        return collect(worker.pid, tid, thread, fd)
    finally:
        os.close(fd)


def _dump(worker: Spawned, fd: int, tid: int, thread: int) -> str:
    return stacks._by_faulthandler(worker.pid, fd)


def test_the_frames_of_the_training_thread_are_found_in_either_form() -> None:
    frames = frames_of(FAULTHANDLER, 25448, 0x7F8DB19CFB80)
    assert [str(frame) for frame in frames] == ["train.py:29 in attention", "train.py:??? in <lambda>"]
    frames = frames_of(PY_SPY, 25448, 0x7F8DB19CFB80)
    assert [str(frame) for frame in frames] == ["train.py:29 in attention", "train.py:8 in <module>"]
    assert frames_of(PY_SPY, 0x25448, 25448) == ()
    assert frames_of("", 1, 2) == ()


@pytest.mark.parametrize("kind", ["loop", "call", "sleep", "lock"])
def test_faulthandler_reaches_a_worker_in_whatever_it_hangs(spawn: Spawner, kind: str) -> None:
    found = take(spawn, kind)
    assert found.by == "faulthandler"
    assert f" in {kind} < " in found.place()
    assert "_bootstrap" in found.text, "the other threads are there as well"


def test_py_spy_is_asked_first(spawn: Spawner, tmp_path: Path) -> None:
    spy(tmp_path)
    found = take(spawn, "sleep")
    assert (found.by, found.place()) == ("py-spy", "train.py:29 in seen_by_the_spy")


@pytest.mark.parametrize("before_code", [("", 1), ("sleep 30", 0)], ids=["it may not", "it takes too long"])
def test_where_py_spy_cannot_faulthandler_does(
    spawn: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_code: tuple[str, int]
) -> None:
    monkeypatch.setattr(stacks, "PY_SPY_LIMIT_S", 0.3)
    before, code = before_code
    spy(tmp_path, f"exec {before}" if before else "", code)
    assert take(spawn, "sleep").by == "faulthandler"


def test_a_process_that_is_stopped_runs_no_handler(spawn: Spawner) -> None:
    found = take(spawn, "sleep", stopped=True)
    assert (found.text, found.place()) == ("", "")
    assert found.by == "no dump came within 1 s"


def test_the_dump_is_saved_under_a_heading(tmp_path: Path) -> None:
    path = tmp_path / "stacks.0.txt"
    assert save(Stacks(FAULTHANDLER, "faulthandler"), str(path), "a/1#0 hangs") == str(path)
    assert path.read_text() == f"a/1#0 hangs\n\n{FAULTHANDLER}"
    assert save(Stacks("", "no dump"), str(path), "") == ""
    assert save(Stacks("x", "py-spy"), str(tmp_path / "nowhere" / "x"), "") == ""
