"""What a launcher runs and how it is told to: the command of a worker, the spellings of a flag, restarts."""

from __future__ import annotations

import json
import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from tests.conformance.conftest import WORKER, Launcher, read_lines, read_records


def test_a_worker_runs_its_script_unbuffered_in_the_launchers_python_and_folder(
    launch: Launcher, tmp_path: Path
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    assert launch.run(WORKER, tmp_path, "--epochs", "3", cwd=folder).code == 0
    record = read_records(tmp_path)[0]
    assert record.command[1:] == ["-u", str(WORKER), str(tmp_path), "--epochs", "3"]
    assert record.executable == sys.executable
    assert record.argv == [str(WORKER), str(tmp_path), "--epochs", "3"]
    assert record.path[0] == str(WORKER.parent)
    assert record.name == "__main__"
    assert record.cwd == str(folder)


def test_everything_after_the_script_is_the_scripts(launch: Launcher, tmp_path: Path) -> None:
    arguments = ["--nproc-per-node", "7", "-m", "-r", "3", "--", "--no-python", "--help", "${rank} $$", ""]
    assert launch.run("--nproc-per-node", 2, "--", WORKER, tmp_path, *arguments).code == 0
    records = read_records(tmp_path)
    assert sorted(records) == [0, 1]
    assert records[0].argv[2:-2] == arguments[:-2]
    assert records[0].argv[-1] == ""


def test_local_rank_is_filled_in_wherever_an_argument_names_it(launch: Launcher, tmp_path: Path) -> None:
    launched = launch.run(
        "--nproc-per-node", 2, WORKER, tmp_path, "--local-rank=${local_rank}", "$local_rank/$other", "${role_name}"
    )
    assert launched.code == 0
    assert [record.argv[2:] for _, record in sorted(read_records(tmp_path).items())] == [
        ["--local-rank=0", "0/$other", "${role_name}"],
        ["--local-rank=1", "1/$other", "${role_name}"],
    ]


@pytest.mark.parametrize("flag", ["-m", "--module"])
def test_a_module_runs_as_python_m_runs_it(launch: Launcher, tmp_path: Path, flag: str) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    shutil.copy(WORKER, package / "trainer.py")
    # The flag belongs to the launcher once: after the module's name it is an argument.
    assert launch.run(flag, "mine.trainer", tmp_path, flag, cwd=tmp_path).code == 0
    record = read_records(tmp_path)[0]
    assert record.command[1:] == ["-u", "-m", "mine.trainer", str(tmp_path), flag]
    assert record.argv == [str(package / "trainer.py"), str(tmp_path), flag]
    assert record.path[0] == str(tmp_path)


def test_without_python_any_program_is_a_worker(launch: Launcher, tmp_path: Path) -> None:
    program = tmp_path / "program.sh"
    program.write_text('#!/bin/sh\necho "$1 $RANK of $WORLD_SIZE" >"$(dirname "$0")/rank-$2"\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    launched = launch.run("--no-python", "--nproc-per-node", 2, program, "--label=this is", "${local_rank}")
    assert launched.code == 0
    assert read_lines(tmp_path / "rank-0") == ["--label=this is 0 of 2"]
    assert read_lines(tmp_path / "rank-1") == ["--label=this is 1 of 2"]


def test_without_python_a_program_is_looked_for_in_the_path(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run("--no-python", "sh", "-c", 'echo "rank $RANK"')
    assert ended.code == 0
    assert ended.stdout == "rank 0\n"


def test_run_path_runs_the_script_as_main_even_where_no_python_is_given(launch: Launcher, tmp_path: Path) -> None:
    launched = launch.run("--run-path", "--no-python", "--nproc-per-node", 2, WORKER, tmp_path, "-m", "${local_rank}")
    assert launched.code == 0
    records = read_records(tmp_path)
    assert sorted(records) == [0, 1]
    assert [record.name for record in records.values()] == ["__main__"] * 2
    assert [record.argv for record in records.values()] == [
        [str(WORKER), str(tmp_path), "-m", "0"],
        [str(WORKER), str(tmp_path), "-m", "1"],
    ]
    # As runpy.run_path has it for a file: the folder of the script is not on the path.
    assert str(WORKER.parent) not in records[0].path


def test_run_path_reports_a_script_that_fails(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run("--run-path", WORKER, tmp_path, "0=nested:100+exit:3")
    assert ended.code == 1
    assert "FAILED" in ended.stderr


def test_run_path_writes_down_the_exception_that_ends_the_script(launch: Launcher, tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text("def main():\n    raise ValueError('no such data set')\n\nmain()\n")
    own = tmp_path / "own.json"
    ended = launch.run("--run-path", script, env={"TORCHELASTIC_ERROR_FILE": str(own)})
    assert ended.code == 1
    message = json.loads(own.read_text())["message"]
    assert message["message"] == "ValueError: no such data set"
    assert f'{script}", line 2, in main' in message["extraInfo"]["py_callstack"]
    assert "ValueError: no such data set" in ended.stderr[ended.stderr.index("Root Cause") :]


def test_python_exec_names_the_python_of_the_workers(launch: Launcher, tmp_path: Path) -> None:
    python = tmp_path / "other-python"
    python.write_text(f'#!/bin/sh\nOTHER=yes exec {sys.executable} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    assert launch.run(WORKER, tmp_path, env={"PYTHON_EXEC": str(python)}).code == 0
    record = read_records(tmp_path)[0]
    assert record.environment["OTHER"] == "yes"
    assert record.command[1:] == ["-u", str(WORKER), str(tmp_path)]


def test_with_virtual_local_ranks_each_worker_sees_its_own_device_as_the_first(
    launch: Launcher, tmp_path: Path
) -> None:
    launched = launch.run(
        *("--virtual-local-rank", "--nproc-per-node", 2, WORKER, tmp_path, "${local_rank}"),
        env={"CUDA_VISIBLE_DEVICES": "5, GPU-8932f937,6"},
    )
    assert launched.code == 0
    seen = {
        rank: (record.environment["LOCAL_RANK"], record.environment["CUDA_VISIBLE_DEVICES"], record.argv[-1])
        for rank, record in read_records(tmp_path).items()
    }
    assert seen == {0: ("0", "5", "0"), 1: ("0", "GPU-8932f937", "1")}


def test_with_virtual_local_ranks_devices_are_numbered_where_none_are_named(launch: Launcher, tmp_path: Path) -> None:
    assert launch.run("--virtual-local-rank", "--nproc-per-node", 2, WORKER, tmp_path).code == 0
    seen = {
        rank: (record.environment["LOCAL_RANK"], record.environment["CUDA_VISIBLE_DEVICES"])
        for rank, record in read_records(tmp_path).items()
    }
    assert seen == {0: ("0", "0"), 1: ("0", "1")}


def test_more_virtual_local_ranks_than_devices_end_with_1(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run(
        "--virtual-local-rank", "--nproc-per-node", 2, WORKER, tmp_path, env={"CUDA_VISIBLE_DEVICES": "4"}
    )
    assert ended.code == 1
    assert "CUDA_VISIBLE_DEVICES=4" in ended.stderr
    assert not read_records(tmp_path)


def test_a_flag_may_be_spelt_with_underscores_cut_short_or_joined_to_its_value(
    launch: Launcher, tmp_path: Path
) -> None:
    launched = launch.run(
        *("--nproc_per_n=2", "--nnod", "1:1", "--max_restarts", "4", "--monitor_interval", ".02", "--rol", "trainer"),
        *("--start_method=forkserver", "-r1", "-t=2", "--log_dir", tmp_path / "logs", "--stand"),
        *("--local_ranks_filter=0", "--signals_to_handle=SIGTERM,SIGUSR1", WORKER, tmp_path),
    )
    assert launched.code == 0
    records = read_records(tmp_path)
    assert sorted(records) == [0, 1]
    environment = records[0].environment
    assert environment["TORCHELASTIC_MAX_RESTARTS"] == "4"
    assert environment["ROLE_NAME"] == "trainer"
    assert environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGUSR1"
    assert environment["TORCHELASTIC_ERROR_FILE"].startswith(str(tmp_path / "logs"))
    assert {path.name for path in Path(environment["TORCHELASTIC_ERROR_FILE"]).parent.iterdir()} == {
        "stdout.log",
        "stderr.log",
    }


def test_a_flag_given_twice_counts_as_given_last(launch: Launcher, tmp_path: Path) -> None:
    assert launch.run("--nproc-per-node", 3, "--nproc_per_node=1", WORKER, tmp_path).code == 0
    assert sorted(read_records(tmp_path)) == [0]


def test_variables_stand_for_flags_and_the_command_line_wins(launch: Launcher, tmp_path: Path, free_port: int) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    shutil.copy(WORKER, package / "trainer.py")
    launched = launch.run(
        *("--role", "from-flag", "mine.trainer", tmp_path, "*=say:out+cry:err"),
        cwd=tmp_path,
        env={
            "PET_NNODES": "1",
            "PET_NPROC_PER_NODE": "2",
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"localhost:{free_port}",
            "PET_RDZV_ID": "my-job",
            "PET_RDZV_CONF": "join_timeout=30,last_call_timeout=1",
            "PET_MAX_RESTARTS": "5",
            "PET_MONITOR_INTERVAL": "0.05",
            "PET_START_METHOD": "spawn",
            "PET_ROLE": "from-variable",
            "PET_MODULE": "1",
            "PET_NO_PYTHON": "0",
            "PET_RUN_PATH": "0",
            "PET_STANDALONE": "0",
            "PET_VIRTUAL_LOCAL_RANK": "1",
            "PET_LOG_DIR": str(tmp_path / "logs"),
            "PET_REDIRECTS": "1",
            "PET_TEE": "0:2,1:0",
            "PET_SIGNALS_TO_HANDLE": "SIGTERM",
            "PET_SHUTDOWN_TIMEOUT": "7",
            "PET_DUPLICATE_STDERR_FILTERS": "err",
            "PET_EVENT_LOG_HANDLER": "null",
        },
    )
    assert launched.code == 0
    assert "out" not in launched.stdout
    assert "[from-flag0]:err\n" in launched.stderr
    records = read_records(tmp_path)
    assert sorted(records) == [0, 1]
    environment = records[1].environment
    expected = {
        "LOCAL_RANK": "0",
        "ROLE_NAME": "from-flag",
        "TORCHELASTIC_MAX_RESTARTS": "5",
        "TORCHELASTIC_RUN_ID": "my-job",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM",
    }
    assert {name: environment.get(name) for name in expected} == expected
    [attempt] = (tmp_path / "logs").glob("my-job_*/attempt_0")
    written = {str(path.relative_to(attempt)): path.read_text() for path in attempt.rglob("*.log")}
    assert written == {
        "0/stdout.log": "out\n",
        "0/stderr.log": "err\n",
        "1/stdout.log": "out\n",
        "filtered_stderr.log": "[from-flag0]:err\n",
    }


def test_standalone_overrides_the_rendezvous_flags(launch: Launcher, tmp_path: Path) -> None:
    launched = launch.run(
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "no.such.host.invalid:1", "--rdzv-id", "given"),
        *("--nproc-per-node", 2, WORKER, tmp_path),
        env={"PET_STANDALONE": "1"},
    )
    assert launched.code == 0
    run_ids = {record.environment["TORCHELASTIC_RUN_ID"] for record in read_records(tmp_path).values()}
    assert len(run_ids) == 1


@pytest.mark.parametrize(
    "flags",
    [
        ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
        pytest.param(("--standalone",), marks=pytest.mark.beyond("torchrun --standalone gives every job another id")),
        pytest.param((), marks=pytest.mark.beyond("so does one node without an endpoint")),
    ],
    ids=["c10d", "standalone", "nothing"],
)
def test_a_job_of_one_node_has_the_id_that_it_is_given(
    launch: Launcher, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    logs = tmp_path / "logs"
    launched = launch.run(*flags, "--log-dir", logs, WORKER, tmp_path, env={"PET_RDZV_ID": "given"})
    assert launched.code == 0
    assert read_records(tmp_path)[0].environment["TORCHELASTIC_RUN_ID"] == "given"
    assert [path.name.startswith("given_") for path in logs.iterdir()] == [True]


def test_a_switch_that_is_neither_on_nor_off_is_refused(launch: Launcher, tmp_path: Path) -> None:
    launched = launch.run(WORKER, tmp_path, env={"PET_STANDALONE": "abc"})
    assert launched.code == 1
    assert "abc" in launched.stderr
    assert not read_records(tmp_path)


def test_a_failed_worker_has_all_started_anew_until_the_attempt_that_succeeds(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run(
        *("--nproc-per-node", 2, "--max-restarts", 3, "--monitor-interval", 0.05, "--log-dir", tmp_path / "logs"),
        *(WORKER, tmp_path, "0@0=meet+wait", "1@0=meet+exit:3", "0@1=meet+die:SIGKILL", "1@1=meet+wait"),
    )
    assert ended.code == 0
    attempts = [read_records(tmp_path, restart) for restart in range(4)]
    assert [sorted(attempt) for attempt in attempts] == [[0, 1], [0, 1], [0, 1], []]
    pids = [record.pid for attempt in attempts for record in attempt.values()]
    assert len(set(pids)) == 6
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    for restart, attempt in enumerate(attempts[:3]):
        assert {record.environment["TORCHELASTIC_RESTART_COUNT"] for record in attempt.values()} == {str(restart)}
        assert {record.environment["TORCHELASTIC_MAX_RESTARTS"] for record in attempt.values()} == {"3"}
        assert len({record.environment["MASTER_PORT"] for record in attempt.values()}) == 1
    [run] = (tmp_path / "logs").iterdir()
    assert sorted(path.name for path in run.iterdir()) == ["attempt_0", "attempt_1", "attempt_2"]


def test_a_worker_that_keeps_failing_is_started_max_restarts_times_more(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run("--nproc-per-node", 2, "--max-restarts", 1, WORKER, tmp_path, "0=meet+exit:3", "1=meet+wait")
    assert ended.code == 1
    assert [sorted(read_records(tmp_path, restart)) for restart in range(3)] == [[0, 1], [0, 1], []]


def test_a_worker_that_ends_well_before_its_peer_does_not_end_the_job(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run("--nproc-per-node", 2, WORKER, tmp_path, "1=outlive:0+say:last+mark:done")
    assert ended.code == 0
    assert ended.stdout == "last\n"
    assert (tmp_path / "done-1").exists()


def test_a_failure_after_a_peer_has_ended_well_starts_both_anew(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run("--nproc-per-node", 2, "--max-restarts", 1, WORKER, tmp_path, "1@0=outlive:0+exit:3")
    assert ended.code == 0
    assert sorted(read_records(tmp_path, restart=1)) == [0, 1]
