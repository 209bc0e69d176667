"""What a worker finds when it starts: its variables, its session, and the store that it meets its peers at."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.conformance.conftest import JOBS, WORKER, Launcher, Record, read_records

KNOWN = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "2",
    "OMP_NUM_THREADS": "1",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "2",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "WORLD_SIZE": "2",
}
RANKS = ("LOCAL_RANK", "RANK", "ROLE_RANK")


@pytest.fixture(scope="module")
def records(launch_once: Launcher) -> dict[int, Record]:
    """Two workers of a job that was told nothing but their number."""
    ended = launch_once.run(
        "--nproc-per-node", 2, WORKER, launch_once.folder, "*=meet", env={"USERS_OWN": "kept", "RANK": "17"}
    )
    assert ended.code == 0, ended.output
    return read_records(launch_once.folder)


@pytest.mark.parametrize("name", KNOWN)
def test_both_workers_are_told(records: dict[int, Record], name: str) -> None:
    assert [record.environment.get(name) for record in records.values()] == [KNOWN[name]] * 2


@pytest.mark.parametrize("name", RANKS)
def test_each_worker_is_told_its_own(records: dict[int, Record], name: str) -> None:
    assert [record.environment.get(name) for record in records.values()] == ["0", "1"]


def test_the_address_of_the_master_resolves_and_is_the_same_for_all(records: dict[int, Record]) -> None:
    masters = {(record.environment["MASTER_ADDR"], record.environment["MASTER_PORT"]) for record in records.values()}
    assert len(masters) == 1
    address, port = masters.pop()
    assert socket.getaddrinfo(address, int(port))
    assert int(port) > 0


def test_each_job_without_a_name_is_given_another(records: dict[int, Record], launch: Launcher, tmp_path: Path) -> None:
    assert launch.run(WORKER, tmp_path).code == 0
    [other] = read_records(tmp_path).values()
    run_ids = {record.environment["TORCHELASTIC_RUN_ID"] for record in records.values()}
    assert len(run_ids) == 1
    assert not run_ids & {"", "none", other.environment["TORCHELASTIC_RUN_ID"]}


def test_workers_are_told_that_the_launcher_hosts_their_store(records: dict[int, Record]) -> None:
    assert {record.environment["TORCHELASTIC_USE_AGENT_STORE"] for record in records.values()} == {"True"}


def test_error_files_are_in_a_fresh_folder_under_the_temporary_directory(
    records: dict[int, Record], launch_once: Launcher
) -> None:
    for rank, record in records.items():
        run_id = record.environment["TORCHELASTIC_RUN_ID"]
        path = Path(record.environment["TORCHELASTIC_ERROR_FILE"])
        assert path.is_relative_to(launch_once.temporary)
        _, run, *rest = path.relative_to(launch_once.temporary).parts
        assert run.startswith(f"{run_id}_")
        assert len(run) > len(f"{run_id}_")
        assert rest == ["attempt_0", str(rank), "error.json"]
    assert len({Path(record.environment["TORCHELASTIC_ERROR_FILE"]).parents[1] for record in records.values()}) == 1


def test_each_worker_leads_a_session_of_its_own(records: dict[int, Record]) -> None:
    assert [record.sid for record in records.values()] == [record.pid for record in records.values()]
    assert [record.pgid for record in records.values()] == [record.pid for record in records.values()]


def test_the_launchers_own_environment_is_handed_on(records: dict[int, Record]) -> None:
    for record in records.values():
        assert record.environment["USERS_OWN"] == "kept"
        assert record.environment["PATH"] == os.environ["PATH"]


def test_what_the_user_has_set_is_left_alone(launch: Launcher, tmp_path: Path) -> None:
    theirs = {"OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "CUDA_VISIBLE_DEVICES": "2,7"}
    assert launch.run("--nproc-per-node", 2, WORKER, tmp_path, env=theirs).code == 0
    for record in read_records(tmp_path).values():
        assert {name: record.environment.get(name) for name in theirs} == theirs


@pytest.mark.parametrize("shared", [None, "1"], ids=["shared", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"])
def test_workers_meet_by_what_their_variables_say(launch: Launcher, tmp_path: Path, shared: str | None) -> None:
    # elaunch has torch imported once for both workers; torchrun knows nothing of this.
    once = {"ELAUNCH_WARM_START": "1", "ELAUNCH_PRELOAD": "torch.distributed"}
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": shared, **once}
    ended = launch.run("--nproc-per-node", 2, JOBS / "gloo.py", tmp_path, env=env)
    assert ended.code == 0
    expected = "3.0 False" if shared else "3.0"
    assert [(tmp_path / f"sum-{rank}").read_text().startswith(expected) for rank in range(2)] == [True, True]
