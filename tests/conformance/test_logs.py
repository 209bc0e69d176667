"""Where the output of workers goes: the console, files, both, or a selection of lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conformance.conftest import WORKER, Launcher, read_records

SAY = "*=say:out+cry:err"


def logs_of(folder: Path, attempt: int = 0) -> dict[str, str]:
    """The log files of one attempt under a log folder with one run, by their path in the attempt's folder."""
    [run] = folder.iterdir()
    top = run / f"attempt_{attempt}"
    return {str(path.relative_to(top)): path.read_text(errors="replace") for path in top.rglob("*.log")}


def test_output_goes_straight_to_the_launchers_own_streams_if_nothing_else_is_asked(
    launch: Launcher, tmp_path: Path
) -> None:
    logs = tmp_path / "not" / "there"
    ended = launch.run("--nproc-per-node", 2, "--log-dir", logs, WORKER, tmp_path, SAY, env={"OMP_NUM_THREADS": "1"})
    assert ended.code == 0
    assert ended.stdout == "out\nout\n"
    assert ended.stderr.splitlines().count("err") == 2
    assert logs_of(logs) == {}
    [run] = logs.iterdir()
    run_id = read_records(tmp_path)[0].environment["TORCHELASTIC_RUN_ID"]
    assert run.name.startswith(f"{run_id}_")
    assert sorted(path.name for path in (run / "attempt_0").iterdir()) == ["0", "1"]


@pytest.mark.parametrize(
    "flags, stdout, stderr, files",
    [
        (["-r", "3"], [], [], ["0/stdout.log", "0/stderr.log", "1/stdout.log", "1/stderr.log"]),
        (["--redirects", "1"], [], ["err", "err"], ["0/stdout.log", "1/stdout.log"]),
        (["-r", "0:1,1:2"], ["out"], ["err"], ["0/stdout.log", "1/stderr.log"]),
        (["-t", "2"], ["out", "out"], ["[default0]:err", "[default1]:err"], ["0/stderr.log", "1/stderr.log"]),
        (["-r", "3", "--tee", "1:1"], ["[default1]:out"], [], None),
        (["-t", "0:3", "-r", "1:1"], ["[default0]:out"], ["[default0]:err", "err"], None),
        (["--local-ranks-filter", "1"], ["out"], ["err"], []),
        (["-t", "3", "--local-ranks-filter", "1"], ["[default1]:out"], ["[default1]:err"], None),
    ],
    ids=lambda value: " ".join(value) if value and value[0].startswith("-") else "",
)
def test_each_stream_of_each_worker_goes_where_it_is_told(
    launch: Launcher,
    tmp_path: Path,
    flags: list[str],
    stdout: list[str],
    stderr: list[str],
    files: list[str] | None,
) -> None:
    ended = launch.run("--nproc-per-node", 2, "--log-dir", tmp_path / "logs", *flags, WORKER, tmp_path, SAY)
    assert ended.code == 0
    assert sorted(ended.stdout.splitlines()) == stdout
    assert sorted(line for line in ended.stderr.splitlines() if line.endswith("err")) == stderr
    if files is None:  # whatever is redirected or tee'd, wherever it is shown
        redirected = {
            "-t 3": "0/out 0/err 1/out 1/err",
            "-r 3": "0/out 0/err 1/out 1/err",
            "-t 0:3": "0/out 0/err 1/out",
        }
        files = [part.replace("/", "/std") + ".log" for part in redirected[" ".join(flags[:2])].split()]
    assert logs_of(tmp_path / "logs") == {name: "out\n" if "out" in name else "err\n" for name in files}


def test_a_teed_line_is_whole_and_as_the_worker_wrote_it(launch: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "out = sys.stdout.buffer\n"
        "out.write('größe\\n'.encode()); out.flush()\n"
        "out.write(b'half '); out.flush()\n"
        "out.write(b'and half\\n\\n' + b'x' * 100_000 + b'\\nbroken \\xff byte\\nlast, unfinished'); out.flush()\n"
    )
    ended = launch.run("-t", 3, "--log-dir", tmp_path / "logs", script, env={"PYTHONUTF8": "1"})
    assert ended.code == 0
    lines = ["größe", "half and half", "", "x" * 100_000, "broken � byte", "last, unfinished"]
    assert ended.stdout.rstrip("\n").split("\n") == [f"[default0]:{line}" for line in lines]
    assert logs_of(tmp_path / "logs")["0/stdout.log"] == "\n".join(lines)


def test_a_teed_line_is_on_the_console_while_its_worker_still_runs(launch: Launcher, tmp_path: Path) -> None:
    launched = launch("-t", 1, WORKER, tmp_path, "0=say:early+until:heard-0")
    launched.wait_for_text("[default0]:early\n", launch.limit_s)
    (tmp_path / "heard-0").touch()
    assert launched.wait(launch.limit_s) == 0


def test_a_role_is_the_prefix_of_teed_lines(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run("--role", "trainer", "-t", 1, WORKER, tmp_path, SAY)
    assert ended.code == 0
    assert ended.stdout == "[trainer0]:out\n"


def test_the_prefix_of_teed_lines_follows_the_template(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run(
        *("--nproc-per-node", 2, "--role", "trainer", "-t", 1, WORKER, tmp_path, SAY),
        env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} $rank/${local_rank} ${other}> "},
    )
    assert ended.code == 0
    assert sorted(ended.stdout.splitlines()) == ["<trainer 0/0 ${other}> out", "<trainer 1/1 ${other}> out"]


def test_lines_that_match_a_filter_are_written_once_more_for_all_workers_together(
    launch: Launcher, tmp_path: Path
) -> None:
    ended = launch.run(
        *("--nproc-per-node", 2, "--log-dir", tmp_path / "logs", "-t", "0:3,1:1"),
        *("--duplicate-stdout-filters", "loss,a,,b", "--duplicate-stderr-filters=warn"),
        *(WORKER, tmp_path, "*=say:loss 1+say:lost+say:take a,b+say:a and b+cry:a warning+cry:loss"),
    )
    assert ended.code == 0
    assert ended.stdout.splitlines().count("[default0]:lost") == 1
    logs = logs_of(tmp_path / "logs")
    assert sorted(logs["filtered_stdout.log"].splitlines()) == [
        "[default0]:loss 1",
        "[default0]:take a,b",
        "[default1]:loss 1",
        "[default1]:take a,b",
    ]
    # Only what is tee'd is looked at.
    assert logs["filtered_stderr.log"] == "[default0]:a warning\n"
    assert logs["1/stdout.log"] == "loss 1\nlost\ntake a,b\na and b\n"


def test_each_attempt_has_logs_of_its_own(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run(
        *("-t", 1, "--max-restarts", 1, "--log-dir", tmp_path / "logs"),
        *(WORKER, tmp_path, "0@0=say:first+exit:1", "0@1=say:second"),
    )
    assert ended.code == 0
    assert ended.stdout == "[default0]:first\n[default0]:second\n"
    assert logs_of(tmp_path / "logs", attempt=0) == {"0/stdout.log": "first\n"}
    assert logs_of(tmp_path / "logs", attempt=1) == {"0/stdout.log": "second\n"}


def test_two_jobs_share_a_log_folder_and_a_name_without_sharing_files(
    launch: Launcher, tmp_path: Path, free_port: int
) -> None:
    logs = tmp_path / "logs"
    for text in ("first", "second"):
        ended = launch.run(
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port}", "--rdzv-id", "job"),
            *("-r", 1, "--log-dir", logs, WORKER, tmp_path, f"0=say:{text}"),
        )
        assert ended.code == 0
    assert sorted(path.read_text() for path in logs.glob("job_*/attempt_0/0/stdout.log")) == ["first\n", "second\n"]


def test_a_failing_worker_loses_no_line_on_its_way_out(launch: Launcher, tmp_path: Path) -> None:
    lines = [f"line {number}" for number in range(500)]
    ended = launch.run("-t", 1, WORKER, tmp_path, "0=" + "+".join(f"say:{line}" for line in lines) + "+die:SIGKILL")
    assert ended.code == 1
    assert ended.stdout.splitlines() == [f"[default0]:{line}" for line in lines]


def test_the_null_device_as_log_folder_makes_no_files(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run("--nproc-per-node", 2, "--log-dir", "/dev/null", WORKER, tmp_path, SAY)
    assert ended.code == 0
    assert sorted(read_records(tmp_path)) == [0, 1]
    assert {record.environment["TORCHELASTIC_ERROR_FILE"] for record in read_records(tmp_path).values()} == {""}
    assert not [path for path in launch.temporary.rglob("*") if path.name == "error.json" or path.suffix == ".log"]
