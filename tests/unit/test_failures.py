from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from datetime import datetime
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from elaunch.failures import (
    ERROR_FILE,
    EXCEPTION,
    HINT,
    Failure,
    copy_to_launcher,
    read_failure,
    record_own_error,
    report,
    root_cause,
    summary,
)
from tests.helpers import Spawner

T = 1_700_000_000.75

# A worker as users write them, and torch's own reading of what it left: the table that torchrun would print.
RECORDED_WORKER = """
import json, os, sys, traceback
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure, record

@record
def main():
    raise RuntimeError("no more\\npatience")

if "--read" in sys.argv:
    failures = {}
    for rank, (pid, exitcode, path) in enumerate(json.loads(sys.argv[2])):
        failures[rank] = ProcessFailure(local_rank=rank, pid=pid, exitcode=exitcode, error_file=path)
        if not os.path.isfile(path):
            failures[rank].timestamp = 1_700_000_000
    error = ChildFailedError("train.py", failures)
    sys.stdout.write("".join(traceback.format_exception_only(error)).removesuffix("\\n"))
else:
    try:
        main()
    finally:
        os.environ.pop("TORCHELASTIC_ERROR_FILE")
"""


def failure(
    *, rank: int = 0, exitcode: int = 1, content: object = None, folder: Path | None = None, t: float = T
) -> Failure:
    """A failure of rank `rank`, with `content` in its error file: as it is if bytes, else as JSON; None for no file."""
    path = None
    if content is not None:
        assert folder is not None
        path = folder / f"error-{rank}.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return read_failure(
        rank=rank,
        local_rank=rank,
        pid=100 + rank,
        exitcode=exitcode,
        error_file=str(path) if path else str(Path("/nonexistent/error.json")),
        t=t,
        host="node0",
    )


def nested(timestamp: object, callstack: str = "Traceback\n  line 1") -> dict[str, Any]:
    return {
        "message": {"message": "RuntimeError: no", "extraInfo": {"py_callstack": callstack, "timestamp": timestamp}}
    }


def local_second(time: str) -> int:
    return int(datetime.fromisoformat(time.replace("_", "T")).timestamp())


def test_a_nested_error_file_gives_traceback_and_time(tmp_path: Path) -> None:
    read = failure(content=nested("1600000000"), folder=tmp_path)
    assert read.message == "Traceback\n  line 1"
    assert read.timestamp == 1_600_000_000
    assert read.t == T


def test_a_flat_error_file_gives_message_and_time(tmp_path: Path) -> None:
    read = failure(content={"message": "out of luck", "timestamp": 1_600_000_000}, folder=tmp_path)
    assert (read.message, read.timestamp) == ("out of luck", 1_600_000_000)


def test_without_error_file_the_signal_is_named_and_the_time_is_that_of_the_end() -> None:
    read = failure(exitcode=-signal.SIGSEGV)
    assert read.message == "Signal 11 (SIGSEGV) received by PID 100"
    assert (read.timestamp, read.error_file) == (int(T), None)


def test_without_error_file_and_signal_the_message_tells_how_to_get_a_traceback() -> None:
    assert failure(exitcode=3).message == HINT


def test_a_signal_without_a_name_is_no_obstacle() -> None:
    read = failure(exitcode=-250)
    assert read.message == "Signal 250 (<N/A>) received by PID 100"
    assert "exitcode  : -250 (pid: 100) \n" in report("train.py", [read])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b'{"message": {"mess',
        b"\xff\xfe\x00",
        b"[" * 200_000,
        b"[1, 2]",
        b"{}",
        b'{"message": 5}',
        b'{"message": null, "timestamp": 3}',
    ],
    ids=["empty", "cut off", "no text", "too deep", "a list", "no message", "a number", "null"],
)
def test_a_damaged_error_file_is_said_in_the_message(tmp_path: Path, content: bytes) -> None:
    read = failure(content=content, folder=tmp_path, exitcode=-signal.SIGKILL)
    assert read.message.startswith("Signal 9 (SIGKILL) received by PID 100; the error file cannot be read: ")
    assert read.error_file == str(tmp_path / "error-0.json")
    assert read.message in report("train.py", [read])


@pytest.mark.parametrize(
    "content",
    [
        {"message": "flat"},
        {"message": "flat", "timestamp": "soon"},
        {"message": "flat", "timestamp": None},
        {"message": {"message": "flat"}},
        {"message": {"message": "flat", "extraInfo": None}},
        nested(float("inf"), "flat"),
        nested("1e30", "flat"),
        nested("", "flat"),
    ],
)
def test_a_file_without_a_usable_time_counts_from_when_it_was_written(tmp_path: Path, content: object) -> None:
    read = failure(content=content, folder=tmp_path)
    assert read.message == "flat"
    assert read.timestamp == int(os.stat(tmp_path / "error-0.json").st_mtime)


def test_a_message_that_is_empty_is_replaced_by_what_is_known_of_the_end(tmp_path: Path) -> None:
    assert failure(content={"message": "", "timestamp": 5}, folder=tmp_path).message == HINT
    assert failure(content={"message": {}}, folder=tmp_path, exitcode=-6).message.startswith("Signal 6 (SIGABRT)")


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"message": "gave\n  up", "timestamp": 1}, "gave up"),
        (
            {
                "message": {
                    "message": "ValueError: no",
                    "extraInfo": {
                        "py_callstack": 'Traceback:\n  File "/a/train.py", line 3, in main\n    f()\n'
                        '  File "/a/b/layers.py", line 17, in forward\n    raise ValueError("no")\nValueError: no\n'
                    },
                }
            },
            "ValueError: no (layers.py:17 in forward)",
        ),
        ({"message": "x" * 1000}, f"{'x' * 300}..."),
        (b"{", "the error file cannot be read: Expecting property name enclosed in double quotes"),
    ],
)
def test_what_a_worker_has_written_down_in_a_line(tmp_path: Path, content: object, line: str) -> None:
    path = tmp_path / "error.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert summary(str(path)).startswith(line)


def test_the_root_cause_is_the_earliest_timestamp_whoever_was_heard_of_first(tmp_path: Path) -> None:
    late = failure(rank=0, content=nested("1600000009"), folder=tmp_path, t=T)
    early = failure(rank=1, content=nested("1600000001"), folder=tmp_path, t=T + 5)
    assert root_cause([late, early]) is early


def test_within_one_second_the_root_cause_is_what_was_written_down_first(tmp_path: Path) -> None:
    killed = failure(rank=0, exitcode=-9, t=T)
    raised = replace(failure(rank=1, content=nested(str(int(T))), folder=tmp_path, t=T + 0.2), written_t=T - 0.5)
    assert root_cause([killed, raised]) is raised
    assert root_cause([killed, replace(raised, written_t=T + 0.1)]) is killed


def test_the_report_of_one_failure_names_every_field() -> None:
    time = "2023-11-14_22:13:20"
    text = report("train.py", [replace(failure(rank=3, exitcode=-9), timestamp=local_second(time))])
    assert text.split("\n") == [
        f"{EXCEPTION}: ",
        "=" * 52,
        "train.py FAILED",
        "-" * 52,
        "Failures:",
        "  <NO_OTHER_FAILURES>",
        "-" * 52,
        "Root Cause (first observed failure):",
        "[0]:",
        f"  time      : {time}",
        "  host      : node0",
        "  rank      : 3 (local_rank: 3)",
        "  exitcode  : -9 (pid: 103)  (SIGKILL)",
        "  error_file: <N/A>",
        "  traceback : Signal 9 (SIGKILL) received by PID 103",
        "=" * 52,
    ]


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_the_root_cause_is_the_earliest_in_whatever_order_the_ends_were_seen(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    seconds = ["1600000002", "1600000001", "1600000002"]
    failures = [failure(rank=rank, content=nested(seconds[rank]), folder=tmp_path) for rank in range(3)]
    assert root_cause([failures[number] for number in order]).rank == 1
    same = [replace(each, timestamp=5, written_t=5.5) for each in failures]
    assert root_cause([same[number] for number in order]).rank == 0


def test_the_other_failures_stand_above_the_root_cause_under_their_own_numbers(tmp_path: Path) -> None:
    failures = [failure(rank=rank, t=T + abs(rank - 1)) for rank in range(3)]
    lines = report("train.py", failures).split("\n")
    assert [line for line in lines if line.startswith(("[", "Failures", "Root"))] == [
        "Failures:",
        "[0]:",
        "[2]:",
        "Root Cause (first observed failure):",
        "[1]:",
    ]


def test_a_recorded_worker_is_read_and_reported_as_torchrun_does(tmp_path: Path, spawn: Spawner) -> None:
    script = tmp_path / "worker.py"
    script.write_text(RECORDED_WORKER)
    path = tmp_path / "error.json"
    worker = spawn.python(script, env={ERROR_FILE: str(path)}, name="worker")
    code = worker.wait(60)

    raised = read_failure(rank=0, local_rank=0, pid=worker.pid, exitcode=code, error_file=str(path), t=T)
    assert raised.message.startswith("Traceback (most recent call last):\n")
    assert raised.message.endswith("RuntimeError: no more\npatience\n")
    flat = tmp_path / "flat.json"
    flat.write_text('{"message": "first line\\nsecond line", "timestamp": 1700000000}')
    others = [(7, -11, "/nonexistent"), (8, 3, "/nonexistent"), (9, -200, str(flat))]
    ours = [raised]
    for rank, (pid, exitcode, file) in enumerate(others, 1):
        ours.append(read_failure(rank=rank, local_rank=rank, pid=pid, exitcode=exitcode, error_file=file, t=T + rank))
    # torch takes the first of those with the same second.
    ours = [replace(item, timestamp=int(T)) if item.error_file is None else item for item in ours]

    reader = spawn.python(
        script, "--read", json.dumps([(worker.pid, code, str(path)), *others]), env={ERROR_FILE: None}, name="reader"
    )
    assert reader.wait(60) == 0
    assert report("train.py", ours) == reader.text()


def test_a_nested_root_cause_reaches_the_launchers_error_file_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "launcher.json"
    target.write_text("what stood here before, longer than what will" * 50)
    monkeypatch.setenv(ERROR_FILE, str(target))
    content = nested("1600000000")
    assert copy_to_launcher(failure(content=content, folder=tmp_path, exitcode=-11)) == str(target)
    content["message"]["errorCode"] = -11
    assert json.loads(target.read_text()) == content


def test_a_flat_root_cause_is_copied_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "launcher.json"
    monkeypatch.setenv(ERROR_FILE, str(target))
    content = {"message": "flat", "timestamp": 7, "more": [1]}
    copy_to_launcher(failure(content=content, folder=tmp_path))
    assert json.loads(target.read_text()) == content


def test_a_damaged_root_cause_is_described_in_the_launchers_error_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "launcher.json"
    monkeypatch.setenv(ERROR_FILE, str(target))
    damaged = failure(content=b"{", folder=tmp_path, exitcode=2)
    copy_to_launcher(damaged)
    message = json.loads(target.read_text())["message"]
    assert message["message"] == damaged.message
    assert message["errorCode"] == 2
    assert message["extraInfo"]["timestamp"] == str(damaged.timestamp)


def test_nothing_is_written_without_a_workers_file_or_a_launchers_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "launcher.json"
    monkeypatch.setenv(ERROR_FILE, str(target))
    assert copy_to_launcher(failure(exitcode=-9)) is None
    assert not target.exists()
    monkeypatch.delenv(ERROR_FILE)
    assert copy_to_launcher(failure(content=nested("1"), folder=tmp_path)) is None
    assert record_own_error(ValueError("x")) is None


def test_the_launchers_own_error_is_recorded_in_the_nested_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "launcher.json"
    monkeypatch.setenv(ERROR_FILE, str(target))
    with pytest.raises(LookupError) as caught:
        raise LookupError("nobody there")
    assert record_own_error(caught.value) == str(target)
    message = json.loads(target.read_text())["message"]
    assert message["message"] == "LookupError: nobody there"
    assert message["extraInfo"]["py_callstack"].startswith("Traceback (most recent call last):")
    assert int(message["extraInfo"]["timestamp"]) > T


def test_an_error_file_that_cannot_be_written_is_said_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "missing" / "error.json"))
    assert record_own_error(Rude()) is None
    assert copy_to_launcher(failure(content=nested("1"), folder=tmp_path)) is None
    written = capsys.readouterr().err.splitlines()
    assert len(written) == 2
    assert all("No such file or directory" in line for line in written)
