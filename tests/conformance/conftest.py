"""The launcher under test, what its workers wrote down, and the markers for where torchrun is not the measure."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import LOG_TAIL_LINES, TEST_ID, Spawned, Spawner, wait_until

LAUNCHER = os.environ.get("LAUNCHER", "elaunch")
MODULES = {"elaunch": "elaunch", "torchrun": "torch.distributed.run"}
LIMIT_S = {"elaunch": 30.0, "torchrun": 90.0}.get(LAUNCHER, 30.0)
"""How long a launch may take. torchrun imports torch first, which takes seconds on a busy machine."""

JOBS = Path(__file__).parent / "jobs"
"""Scripts for workers."""

WORKER = JOBS / "worker.py"
"""Writes down how it was started and does what it is told; it says itself how it is told."""

# What a launcher reads; a test sets what it wants of it.
_READ = (
    "CUDA_VISIBLE_DEVICES",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "LOGLEVEL",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "PYTHON_EXEC",
    "RANK",
    "WORLD_SIZE",
)
_READ_PREFIXES = ("ELAUNCH_", "PET_", "ROLE_", "TORCH_", "TORCHELASTIC_")


def pytest_configure(config: pytest.Config) -> None:
    if LAUNCHER not in MODULES:
        raise pytest.UsageError(f"LAUNCHER={LAUNCHER}: expected one of {', '.join(MODULES)}")
    config.addinivalue_line("markers", "defect(reason): torchrun 2.13 is broken here, and is expected to fail the test")
    config.addinivalue_line("markers", "beyond(reason): torchrun has no such thing, so the test is left out for it")


def pytest_itemcollected(item: pytest.Item) -> None:
    if LAUNCHER != "torchrun":
        return
    for mark in item.iter_markers("defect"):
        # Covers the teardown too, where the guard of tests/conftest.py speaks up about the orphans that torchrun left.
        item.add_marker(pytest.mark.xfail(reason=mark.args[0], strict=True))
    for mark in item.iter_markers("beyond"):
        item.add_marker(pytest.mark.skip(reason=mark.args[0]))


@dataclass(frozen=True, slots=True)
class Record:
    """What jobs/worker.py wrote down: one worker of one attempt."""

    argv: list[str]
    command: list[str]
    cwd: str
    environment: dict[str, str]
    executable: str
    name: str
    path: list[str]
    pgid: int
    pid: int
    ppid: int
    sid: int


def read_records(folder: Path, restart: int = 0) -> dict[int, Record]:
    """The workers of an attempt that have started, by rank."""
    return {
        int(path.stem.partition("-")[2]): Record(**json.loads(path.read_text()))
        for path in sorted(folder.glob(f"{restart}-*.json"))
    }


def wait_for_workers(folder: Path, count: int, timeout_s: float, restart: int = 0) -> dict[int, Record]:
    """The workers of an attempt, as soon as there are `count`."""

    def found() -> dict[int, Record] | None:
        records = read_records(folder, restart)
        return records if len(records) == count else None

    return wait_until(found, timeout_s, lambda: f"{count} workers in {[path.name for path in folder.iterdir()]}")


def read_lines(path: Path) -> list[str]:
    """The lines of a file; none if it is not there."""
    return path.read_text().splitlines() if path.exists() else []


@dataclass(frozen=True, slots=True)
class Ended:
    """A launch that is over: the launcher's exit code, and what it and its workers wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


class Launcher:
    """Starts the launcher under test: `launch("--nproc-per-node", "2", script)`.

    Variables that a launcher reads are taken out of its environment unless `env` sets them. Its temporary directory, so
    also the log folder that it makes for itself, is `temporary`. `warm`: elaunch is a fork that has its imports.
    """

    def __init__(self, spawner: Spawner, folder: Path, warm: bool = True) -> None:
        self.name = LAUNCHER
        self.warm = warm and LAUNCHER == "elaunch"
        self.limit_s = LIMIT_S
        self.folder = folder
        self.temporary = folder / "t"
        self.temporary.mkdir()
        self._spawner = spawner
        self._runs = 0

    def environment(self, changes: Mapping[str, str | None] | None = None) -> dict[str, str | None]:
        """`changes` on top of what every launch gets; None removes a variable."""
        cleared = {name for name in os.environ if name in _READ or name.startswith(_READ_PREFIXES)} - {TEST_ID}
        return {**dict.fromkeys(cleared), "TMPDIR": str(self.temporary), **(changes or {})}

    def __call__(
        self,
        *arguments: object,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        name: str | None = None,
    ) -> Spawned:
        """Start it; standard output and error go to one log."""
        env, name = self.environment(env), name or LAUNCHER
        if self.warm:
            return self._spawner.elaunch(*arguments, env=env, cwd=cwd, name=name)
        return self._spawner.python("-m", MODULES[LAUNCHER], *map(str, arguments), env=env, cwd=cwd, name=name)

    def run(
        self,
        *arguments: object,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        name: str | None = None,
        limit_s: float = LIMIT_S,
    ) -> Ended:
        """Start it and wait for its end; fails the test if that takes more than `limit_s`."""
        name = name or LAUNCHER
        self._runs += 1
        stderr = self.folder / f"{self._runs}-{name}.stderr"
        env = self.environment(env)
        if self.warm:
            spawned = self._spawner.elaunch(*arguments, env=env, cwd=cwd, name=name, errors=stderr)
        else:
            # `exec`, so that the process is the launcher itself.
            redirected = ("sh", "-c", 'log=$1; shift; exec "$@" 2>"$log"', "sh", str(stderr))
            command = [*redirected, sys.executable, "-m", MODULES[LAUNCHER], *map(str, arguments)]
            spawned = self._spawner(command, env=env, cwd=cwd, name=name)
        try:
            code = spawned.wait(limit_s)
        finally:
            print(f"--- {stderr.name}", *stderr.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:], sep="\n")
        return Ended(code, spawned.text(), stderr.read_text(errors="replace"))


@pytest.fixture
def launch(spawn: Spawner, tmp_path: Path) -> Launcher:
    """The launcher under test: `launch(...)` starts it, `launch.run(...)` also waits for its end."""
    return Launcher(spawn, tmp_path)


@pytest.fixture(scope="module")
def launch_once(tmp_path_factory: pytest.TempPathFactory, session_id: str) -> Iterator[Launcher]:
    """The same for fixtures of a module, which several tests look at."""
    folder = tmp_path_factory.mktemp("once")
    spawner = Spawner(folder)
    yield Launcher(spawner, folder)
    spawner.end_all()


@pytest.fixture
def run(launch: Launcher) -> Callable[..., Ended]:
    """`launch.run`."""
    return launch.run
