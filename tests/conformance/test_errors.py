"""How a failure is told: the exit code, the launcher's own error file, and the table on standard error."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import JOBS, WORKER, Launcher, read_records
from tests.helpers import find_free_port

EARLY_S = 1_700_000_000
LATE_S = EARLY_S + 5


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.parametrize("how", ["exit:1", "exit:3", "exit:255", "die:SIGKILL", "die:SIGTERM"])
def test_however_a_worker_fails_the_exit_code_is_1(launch: Launcher, tmp_path: Path, how: str) -> None:
    ended = launch.run("--nproc-per-node", 2, WORKER, tmp_path, f"0=meet+{how}", "1=meet+wait")
    assert ended.code == 1
    assert "FAILED" in ended.stderr


@pytest.mark.parametrize("how", ["script", "--no-python", "PYTHON_EXEC"])
def test_a_program_that_is_not_there_ends_with_1_and_is_named(launch: Launcher, tmp_path: Path, how: str) -> None:
    missing = str(tmp_path / "missing-program")
    if how == "PYTHON_EXEC":
        ended = launch.run(WORKER, tmp_path, env={"PYTHON_EXEC": missing})
    elif how == "script":
        ended = launch.run(missing)
    else:
        ended = launch.run(how, missing)
    assert ended.code == 1
    assert missing in ended.stderr


def test_the_table_shows_the_root_cause_and_then_the_others(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run(
        *("--nproc-per-node", 4, "--log-dir", tmp_path / "logs", WORKER, tmp_path),
        *(
            "0=meet+wait",
            f"1=meet+outlive:2+nested:{LATE_S}+exit:3",
            f"2=meet+flat:{EARLY_S}+die:SIGKILL",
            "3=meet+wait",
        ),
    )
    assert ended.code == 1
    records = read_records(tmp_path)
    lines = ended.stderr.splitlines()
    title = lines.index(f"{WORKER} FAILED")
    # What logs are searched for.
    assert lines[title - 2].rstrip() == "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
    failures = lines.index("Failures:", title)
    root = lines.index("Root Cause (first observed failure):", failures)
    assert set(lines[title - 1]) == {"="}
    assert set(lines[root - 1]) == {"-"}
    end = next(number for number, line in enumerate(lines) if number > root and set(line) == {"="})
    [cause] = read_table(lines[root + 1 : end])
    others = read_table(lines[failures + 1 : root - 1])
    assert cause["rank"] == "2 (local_rank: 2)"
    assert cause["exitcode"].split() == ["-9", "(pid:", f"{records[2].pid})", "(SIGKILL)"]
    assert cause["error_file"] == records[2].environment["TORCHELASTIC_ERROR_FILE"]
    assert cause["traceback"] == "Told: rank 2"
    assert re.fullmatch(r"2023-11-1[45]_\d\d:\d\d:20", cause["time"])
    assert cause["host"]
    by_rank = {other["rank"]: other for other in others}
    assert sorted(by_rank) == ["0 (local_rank: 0)", "1 (local_rank: 1)", "3 (local_rank: 3)"]
    # Those that waited were ended by the launcher, which is part of the account.
    assert by_rank["0 (local_rank: 0)"]["exitcode"].split()[0] == "-15"
    assert by_rank["0 (local_rank: 0)"]["error_file"] == "<N/A>"
    assert by_rank["0 (local_rank: 0)"]["traceback"] == f"Signal 15 (SIGTERM) received by PID {records[0].pid}"


def read_table(lines: list[str]) -> list[dict[str, str]]:
    """The failures of a report: what stands behind each name. Further lines of a traceback are left out."""
    found: list[dict[str, str]] = []
    for line in lines:
        if re.fullmatch(r"\[\d+\]:", line):
            found.append({})
        elif match := re.match(r"  (\w+) *: (.*)", line):
            found[-1][match[1]] = match[2].rstrip()
    return found


def test_a_failure_without_others_and_without_an_error_file_says_so(launch: Launcher, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    ended = launch.run(WORKER, tmp_path, "0=exit:7", env={"TORCHELASTIC_ERROR_FILE": str(own)})
    assert ended.code == 1
    assert "<NO_OTHER_FAILURES>" in ended.stderr
    [cause] = read_table(ended.stderr[ended.stderr.index("Root Cause") :].splitlines())
    assert cause["exitcode"].split() == ["7", "(pid:", f"{read_records(tmp_path)[0].pid})"]
    assert cause["error_file"] == "<N/A>"
    assert "https://pytorch.org/docs/stable/elastic/errors.html" in cause["traceback"]
    # The worker wrote none, so there is nothing to hand on.
    assert not own.exists()


def test_the_earliest_error_file_becomes_the_launchers_own_with_the_exit_code(launch: Launcher, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text("of a job before")
    ended = launch.run(
        *("--nproc-per-node", 2, WORKER, tmp_path),
        *(f"0=nested:{LATE_S}+mark:written+outlive:1+exit:3", f"1=until:written-0+nested:{EARLY_S}+die:SIGKILL"),
        env={"TORCHELASTIC_ERROR_FILE": str(own)},
    )
    assert ended.code == 1
    assert read_json(own) == {
        "message": {
            "message": "Told: rank 1",
            "extraInfo": {"py_callstack": "Traceback of rank 1\n  second line", "timestamp": str(EARLY_S)},
            "errorCode": -9,
        }
    }


def test_of_several_failures_the_one_with_the_earliest_time_is_the_cause(launch: Launcher, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    ended = launch.run(
        *("--nproc-per-node", 2, WORKER, tmp_path),
        # The worker that fails first blames a later time than the one that the launcher then stops.
        *(f"0=until:written-1+nested:{LATE_S}+exit:3", f"1=nested:{EARLY_S}+mark:written+wait"),
        env={"TORCHELASTIC_ERROR_FILE": str(own)},
    )
    assert ended.code == 1
    document = read_json(own)
    assert document["message"]["message"] == "Told: rank 1"
    assert document["message"]["errorCode"] == -15


def test_a_flat_error_file_is_copied_as_it_is(launch: Launcher, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    ended = launch.run(WORKER, tmp_path, f"0=flat:{EARLY_S}+exit:3", env={"TORCHELASTIC_ERROR_FILE": str(own)})
    assert ended.code == 1
    assert read_json(own) == {"message": "Told: rank 0", "timestamp": EARLY_S}


def test_an_error_file_of_an_attempt_that_was_repeated_is_not_handed_on(launch: Launcher, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    ended = launch.run(
        *("--max-restarts", 1, WORKER, tmp_path, f"0@0=nested:{EARLY_S}+exit:3"),
        env={"TORCHELASTIC_ERROR_FILE": str(own)},
    )
    assert ended.code == 0
    assert not own.exists()


def test_an_exception_recorded_by_torch_reaches_the_launchers_own_file(launch: Launcher, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    ended = launch.run(JOBS / "recorded.py", env={"TORCHELASTIC_ERROR_FILE": str(own)})
    assert ended.code == 1
    message = read_json(own)["message"]
    assert message["message"] == "ValueError: the loss is not a number"
    assert "recorded.py" in message["extraInfo"]["py_callstack"]
    assert int(message["extraInfo"]["timestamp"]) > EARLY_S
    assert message["errorCode"] == 1
    assert "ValueError: the loss is not a number" in ended.stderr[ended.stderr.index("Root Cause") :]


def test_the_launchers_own_failure_is_recorded_too(launch: Launcher, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    ended = launch.run("--no-python", "/no/such/program", env={"TORCHELASTIC_ERROR_FILE": str(own)})
    assert ended.code == 1
    message = read_json(own)["message"]
    assert "/no/such/program" in message["message"]
    assert int(message["extraInfo"]["timestamp"]) > EARLY_S
    assert message["extraInfo"]["py_callstack"]


def test_a_job_that_goes_well_writes_no_error_file(launch: Launcher, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    ended = launch.run(
        *("--rdzv-endpoint", f"localhost:{find_free_port()}", "--rdzv-backend", "c10d", WORKER, tmp_path),
        env={"TORCHELASTIC_ERROR_FILE": str(own)},
    )
    assert ended.code == 0
    assert not own.exists()
    assert "FAILED" not in ended.output
    assert read_records(tmp_path)[0].environment["TORCHELASTIC_ERROR_FILE"] != str(own)
