"""What a signal to the launcher does: the workers' process groups get it, and nothing of the job is left."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conformance.conftest import WORKER, Launcher, read_lines, wait_for_workers
from tests.helpers import Spawned, Spawner, is_running, wait_until

SOON_S = 20.0
"""Less than the 30 s that a launcher gives its workers if it is not told otherwise."""


@pytest.fixture
def launch(spawn: Spawner, tmp_path: Path) -> Launcher:
    """The launcher as it starts for a user: the server of forks ends what one that fails leaves in its group."""
    return Launcher(spawn, tmp_path, warm=False)


def wait_for_marks(folder: Path, limit_s: float, *names: str) -> None:
    wait_until(lambda: all((folder / name).exists() for name in names), limit_s, f"{names} in {folder}")


def wait_for_signals(folder: Path, who: str, names: list[str]) -> None:
    path = folder / f"signals-0-{who}"
    wait_until(lambda: read_lines(path) == names, SOON_S, lambda: f"{names} for {who}, who got {read_lines(path)}")


def pids_of(folder: Path) -> list[int]:
    """Of the two workers and the child of the first."""
    workers = wait_for_workers(folder, 2, SOON_S)
    return [*(record.pid for record in workers.values()), int((folder / "child-0-0").read_text())]


def start(launch: Launcher, folder: Path, *flags: object, how: str, env: dict[str, str] | None = None) -> Spawned:
    """Two workers, the first with a child in its process group, that are ready to catch signals."""
    launched = launch(
        *("--nproc-per-node", 2, *flags, WORKER, folder),
        *(f"0={how}+child+mark:ready+wait", f"1={how}+mark:ready+wait"),
        env=env,
    )
    wait_for_marks(folder, launch.limit_s, "ready-0", "ready-1")
    return launched


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"])
def test_a_signal_is_passed_on_to_each_workers_process_group(launch: Launcher, tmp_path: Path, name: str) -> None:
    launched = start(launch, tmp_path, how="note:SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    pids = pids_of(tmp_path)
    launched.signal(signal.Signals[name])
    assert launched.wait(SOON_S) == 1
    for who in ("0", "0c", "1"):
        wait_for_signals(tmp_path, who, [name])
    wait_until(lambda: not any(map(is_running, pids)), SOON_S, "the end of workers and their child")


def test_ctrl_c_at_the_terminal_reaches_each_worker_once(launch: Launcher, tmp_path: Path) -> None:
    launched = start(launch, tmp_path, how="note:SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    # A terminal sends it to the whole group that has the foreground, which the workers are not in.
    os.killpg(launched.pid, signal.SIGINT)
    assert launched.wait(SOON_S) == 1
    for who in ("0", "0c", "1"):
        wait_for_signals(tmp_path, who, ["SIGINT"])


@pytest.mark.parametrize("how", ["--shutdown-timeout", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
def test_a_worker_that_defies_a_signal_is_killed_after_the_shutdown_timeout(
    launch: Launcher, tmp_path: Path, how: str
) -> None:
    flags = ["--shutdown-timeout", "1"] if how.startswith("-") else []
    env = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "100000" if flags else "1"}
    launched = start(launch, tmp_path, *flags, how="defy:SIGTERM,SIGINT", env=env)
    pids = pids_of(tmp_path)
    launched.signal(signal.SIGTERM)
    assert launched.wait(SOON_S) == 1
    for who in ("0", "0c", "1"):
        assert read_lines(tmp_path / f"signals-0-{who}")[0] == "SIGTERM"
    wait_until(lambda: not any(map(is_running, pids)), SOON_S, "the end of workers and their child")


def test_a_second_signal_leaves_no_orphans(launch: Launcher, tmp_path: Path) -> None:
    launched = start(launch, tmp_path, "--shutdown-timeout", 3, how="defy:SIGTERM,SIGINT")
    pids = pids_of(tmp_path)
    launched.signal(signal.SIGTERM)
    for who in ("0", "1"):
        wait_for_signals(tmp_path, who, ["SIGTERM"])
    launched.signal(signal.SIGINT)
    assert launched.wait(SOON_S) == 1
    wait_until(lambda: not any(map(is_running, pids)), SOON_S, "the end of workers and their child")


def test_only_the_signals_to_handle_are_passed_on(launch: Launcher, tmp_path: Path) -> None:
    launched = start(launch, tmp_path, "--signals-to-handle", "SIGUSR1,SIGTERM", how="note:SIGUSR1,SIGTERM")
    told = {
        record.environment["TORCHELASTIC_SIGNALS_TO_HANDLE"] for record in wait_for_workers(tmp_path, 2, 1).values()
    }
    assert told == {"SIGUSR1,SIGTERM"}
    launched.signal(signal.SIGUSR1)
    assert launched.wait(SOON_S) == 1
    for who in ("0", "0c", "1"):
        wait_for_signals(tmp_path, who, ["SIGUSR1"])


def test_workers_that_end_well_on_a_signal_do_not_make_the_launcher_end_well(launch: Launcher, tmp_path: Path) -> None:
    launched = start(launch, tmp_path, "--max-restarts", 3, how="note:SIGTERM")
    launched.signal(signal.SIGTERM)
    assert launched.wait(SOON_S) == 1
    assert not list(tmp_path.glob("1-*.json"))
    assert "SIGTERM" in launched.text()


def test_a_signal_is_recorded_in_the_launchers_own_error_file(launch: Launcher, tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    launched = start(launch, tmp_path, how="note:SIGHUP", env={"TORCHELASTIC_ERROR_FILE": str(own)})
    launched.signal(signal.SIGHUP)
    assert launched.wait(SOON_S) == 1
    assert "message" in own.read_text()
