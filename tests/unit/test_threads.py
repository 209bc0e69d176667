"""A thread of ours that dies says so, and whoever started it hears of it."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elaunch import threads
from elaunch.failures import ERROR_FILE, summary
from tests.helpers import ROOT, child_environment

LIMIT_S = 60


class Rude(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def test_a_thread_that_ends_by_itself_is_no_death(capfd: pytest.CaptureFixture[str]) -> None:
    died: list[BaseException] = []
    threads.start("worker", lambda: None, died.append).join(LIMIT_S)
    assert not died
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "error",
    [ValueError("two\nlines"), RecursionError("deep"), MemoryError(), SystemExit(3), KeyboardInterrupt(), Rude()],
)
def test_whatever_kills_a_thread_is_written_down_and_told(
    error: BaseException, capfd: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        raise error

    died: list[BaseException] = []
    thread = threads.start("elaunch-example", run, died.append)
    thread.join(LIMIT_S)
    assert died == [error]
    said = capfd.readouterr().err
    assert said.startswith(f"[elaunch] thread elaunch-example died: {threads.describe(error)}\nTraceback")
    assert "in run\n" in said
    assert thread.daemon


def test_a_listener_that_fails_is_written_down_too(capfd: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise ValueError("first")

    def died(error: BaseException) -> None:
        raise LookupError("second")

    threads.start("example", run, died).join(LIMIT_S)
    said = capfd.readouterr().err
    assert "\n[elaunch] thread example died: ValueError: first\n" in said
    assert "the death of thread example could not be handled: LookupError: second" in said


def test_an_error_is_described_on_one_line() -> None:
    assert threads.describe(ValueError("two\n  lines")) == "ValueError: two lines"
    assert threads.describe(MemoryError()) == "MemoryError"
    assert threads.describe(Rude()) == "Rude"


ENDS = """
import sys, time
from elaunch import threads
from elaunch.workers.fatal import end_process

def listen():
    sys.stdout.write("last words")
    raise RecursionError("nested too deeply")

threads.start("elaunch-example", listen, lambda error: end_process("example", error))
time.sleep(60)
"""


def run_and_end(error_file: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", ENDS],
        cwd=ROOT,
        env={**child_environment(), ERROR_FILE: error_file, **more},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_a_process_that_loses_what_it_needs_ends_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    done = run_and_end(str(path), ELAUNCH_WORKER="a/0#1")
    assert done.returncode == 1
    assert done.stdout == "last words"
    assert (
        "[elaunch] worker a/0#1 ends: its example failed: RecursionError: nested too deeply\nTraceback" in done.stderr
    )
    told = summary(str(path))
    assert told.startswith("PartFailed: the worker's example failed: RecursionError: nested too deeply (")
    assert told.endswith("in listen)")
    assert "RecursionError" in json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"]


def test_the_first_failure_stays_in_the_error_file(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    path.write_text("the first")
    assert run_and_end(str(path)).returncode == 1
    assert path.read_text() == "the first"


def test_a_process_ends_even_if_nobody_reads_its_last_words(tmp_path: Path) -> None:
    read, write = os.pipe()
    try:
        os.write(write, bytes(fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)))
        done = subprocess.run(
            [sys.executable, "-c", ENDS],
            cwd=ROOT,
            env={**child_environment(), ERROR_FILE: str(tmp_path / "error.json")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=write,
            timeout=LIMIT_S,
        )
    finally:
        os.close(read)
        os.close(write)
    assert done.returncode == 1
    assert (tmp_path / "error.json").exists()
