"""How many workers a node starts, and what is turned down before any of them is started."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conformance.conftest import WORKER, Launcher, read_records


def test_a_node_starts_as_many_workers_as_it_is_told(launch: Launcher, tmp_path: Path) -> None:
    assert launch.run("--nproc-per-node", 3, WORKER, tmp_path).code == 0
    records = read_records(tmp_path)
    assert sorted(records) == [0, 1, 2]
    assert {record.environment["WORLD_SIZE"] for record in records.values()} == {"3"}


def test_a_node_starts_one_worker_if_not_told(launch: Launcher, tmp_path: Path) -> None:
    assert launch.run(WORKER, tmp_path).code == 0
    records = read_records(tmp_path)
    assert sorted(records) == [0]
    assert records[0].environment["WORLD_SIZE"] == "1"
    assert "OMP_NUM_THREADS" not in records[0].environment  # one worker may have all the processors


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_cpu_and_auto_count_the_processors_that_the_launcher_may_use(
    launch: Launcher, tmp_path: Path, name: str
) -> None:
    if name == "auto" and any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("auto counts the devices of this machine")
    launch.warm = False  # a fork may use what its server may
    allowed = os.sched_getaffinity(0)
    count = 1 if name == "cpu" else len(allowed)
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        launched = launch("--nproc-per-node", name, WORKER, tmp_path)
    finally:
        os.sched_setaffinity(0, allowed)
    assert launched.wait(launch.limit_s) == 0
    assert sorted(read_records(tmp_path)) == list(range(count))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-flag", "1"],
        ["--max-restarts", "many"],
        ["--monitor-interval", "often"],
        ["--start-method", "thread"],
        ["--numa-binding", "moon"],
        ["--standalone=1"],
        ["--rdzv", "x"],
    ],
    ids=" ".join,
)
def test_a_command_line_that_cannot_be_read_shows_the_usage_and_ends_with_2(
    launch: Launcher, tmp_path: Path, arguments: list[str]
) -> None:
    ended = launch.run(*arguments, WORKER, tmp_path)
    assert ended.code == 2
    assert "usage: " in ended.stderr
    assert "error: " in ended.stderr
    assert not ended.stdout
    assert not read_records(tmp_path)


@pytest.mark.parametrize("arguments", [["--nproc-per-node", "2"], ["--nnodes"]], ids=" ".join)
def test_a_command_line_that_ends_too_early_shows_the_usage_and_ends_with_2(
    launch: Launcher, arguments: list[str]
) -> None:
    ended = launch.run(*arguments)
    assert ended.code == 2
    assert "usage: " in ended.stderr


def test_a_variable_that_cannot_be_read_shows_the_usage_and_ends_with_2(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run(WORKER, tmp_path, env={"PET_MAX_RESTARTS": "many"})
    assert ended.code == 2
    assert "usage: " in ended.stderr
    assert not read_records(tmp_path)


def test_help_names_every_flag_and_ends_with_0(launch: Launcher) -> None:
    ended = launch.run("--help")
    assert ended.code == 0
    flags = """
        --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint --rdzv-id --rdzv-conf --standalone --max-restarts
        --monitor-interval --start-method --event-log-handler --role --module --no-python --run-path --log-dir
        --redirects --tee --local-ranks-filter --duplicate-stdout-filters --duplicate-stderr-filters --node-rank
        --master-addr --master-port --local-addr --logs-specs --numa-binding --signals-to-handle --shutdown-timeout
        --virtual-local-rank
    """
    assert [flag for flag in flags.split() if flag not in ended.stdout] == []


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["--nproc-per-node", "many"], "many"),
        (["--nnodes", "two"], "two"),
        (["--nnodes", "2:1"], "2"),
        (["--nnodes", "0"], "0"),
        (["--nnodes", "1:2:3"], "1:2:3"),
        (["--max-restarts", "-1"], "max"),
        (["--redirects", "5"], "5"),
        (["--tee", "0:1,1:4"], "0:1,1:4"),
        (["--local-ranks-filter", "first"], "filter"),
        (["--rdzv-backend", "no-such-backend", "--rdzv-endpoint", "localhost:1"], "no-such-backend"),
        (["--rdzv-conf", "novalue"], "novalue"),
        (["--logs-specs", "no-such-specs"], "no-such-specs"),
        (["--log-dir", __file__], os.path.basename(__file__)),
        (["--no-python", "--module"], "module"),
    ],
    ids=lambda value: " ".join(map(os.path.basename, value)) if isinstance(value, list) else "",
)
def test_a_value_that_makes_no_sense_is_named_and_ends_with_1(
    launch: Launcher, tmp_path: Path, arguments: list[str], named: str
) -> None:
    ended = launch.run(*arguments, WORKER, tmp_path)
    assert ended.code == 1
    assert named in ended.stderr
    assert not ended.stdout
    assert not read_records(tmp_path)


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="there is a GPU here")
def test_workers_per_gpu_need_a_gpu(launch: Launcher, tmp_path: Path) -> None:
    assert launch.run("--nproc-per-node", "gpu", WORKER, tmp_path).code == 1
    assert not read_records(tmp_path)
