"""A job that a Python program starts, by elaunch.LaunchConfig and elastic_launch."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from elaunch.api import LaunchConfig
from tests.helpers import Spawner, is_running, wait_until

LIMIT_S = 40.0

PROGRAM = """
import os, sys, threading, time
from elaunch import LaunchConfig, elastic_launch
from elaunch.errors import JobFailed

def work(what, slot):
    if what == "fail" and os.environ["RANK"] == "1":
        raise ValueError("the value that was asked for")
    if what == "wait":
        open(f"pid-{slot}", "w").write(str(os.getpid()))
        time.sleep(600)
    assert not [name for name in os.environ if name in ("ELAUNCH_PARENT", "ELAUNCH_RESULT")]
    return what, int(os.environ["RANK"]), int(slot), os.environ["ROLE_NAME"]

if __name__ == "__main__":
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()  # programs have threads
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, role="trainer")
    try:
        if sys.argv[1] == "program":
            found = elastic_launch(config, sys.executable)("-c", "import os; print('rank', os.environ['RANK'])")
        else:
            found = elastic_launch(config, work)(sys.argv[1], "${local_rank}")
        print("returned", sorted(found.items()))
    except JobFailed as error:
        own = error.failures[1]
        print("failed", own["exitcode"], own["local_rank"], own["message"].splitlines()[-1])
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_a_function_returns_its_values_by_rank(spawn: Spawner, tmp_path: Path, program: Path) -> None:
    run = spawn.python(program, "add", cwd=tmp_path)
    assert run.wait(LIMIT_S) == 0, run.tail()
    assert "returned [(0, ('add', 0, 0, 'trainer')), (1, ('add', 1, 1, 'trainer'))]" in run.text()


def test_a_program_may_be_launched_too(spawn: Spawner, tmp_path: Path, program: Path) -> None:
    run = spawn.python(program, "program", cwd=tmp_path)
    assert run.wait(LIMIT_S) == 0, run.tail()
    assert {"rank 0", "rank 1"} <= set(run.text().replace("rank", "\nrank").split("\n"))
    assert "returned [(0, None), (1, None)]" in run.text()


def test_a_failure_is_raised_with_what_the_worker_wrote_down(spawn: Spawner, tmp_path: Path, program: Path) -> None:
    run = spawn.python(program, "fail", cwd=tmp_path)
    assert run.wait(LIMIT_S) == 0, run.tail()
    assert "failed 1 1 ValueError: the value that was asked for" in run.text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_the_program_is_the_end_of_its_job(
    spawn: Spawner, tmp_path: Path, program: Path, number: signal.Signals
) -> None:
    run = spawn.python(program, "wait", cwd=tmp_path)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), LIMIT_S, "the workers")
    run.signal(number)
    run.wait(LIMIT_S)
    wait_until(lambda: not any(is_running(int(file.read_text())) for file in files), LIMIT_S, "the workers to end")


def test_the_settings_become_a_command_line() -> None:
    config = LaunchConfig(
        1, 4, 8, run_id="job", rdzv_backend="static", rdzv_endpoint="h:29500", rdzv_configs={"rank": 2, "timeout": 60}
    )
    flags = config.flags()
    assert {"--nnodes=1:4", "--nproc-per-node=8", "--rdzv-id=job", "--node-rank=2", "--rdzv-conf=timeout=60"} <= set(
        flags
    )
    assert not [flag for flag in flags if flag.endswith(("=None", "="))]


def test_torchs_log_settings_are_understood() -> None:
    # The attributes of torch's DefaultLogsSpecs.
    specs = SimpleNamespace(root_log_dir="/logs", _redirects=3, _tee={0: 1}, _local_ranks_filter={1, 0})
    flags = LaunchConfig(1, 1, 1, logs_specs=specs).flags()
    assert {"--log-dir=/logs", "--redirects=3", "--tee=0:1", "--local-ranks-filter=0,1"} <= set(flags)


def test_what_cannot_be_pickled_is_said(tmp_path: Path, spawn: Spawner) -> None:
    text = "import elaunch; elaunch.elastic_launch(elaunch.LaunchConfig(1, 1, 1), lambda: 1)()"
    run = spawn([sys.executable, "-c", text], cwd=tmp_path)
    assert run.wait(LIMIT_S) == 1
    assert "launch_agent: the function or an argument cannot be pickled" in run.text()
