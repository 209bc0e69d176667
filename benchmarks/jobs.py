"""Jobs that a benchmark starts under a launcher, watches through their event log, hurts, and ends.

Every process that a job starts carries a mark in its environment. Ending a job ends, by its id, each process with the
mark, so that neither a launcher that failed nor one that re-parented its children leaves anything behind.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, TypeVar

from benchmarks.commits import Commit, commits_of, live_workers

HERE = Path(__file__).resolve().parent
ELAUNCH = [sys.executable, "-m", "elaunch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
MARK = "ELAUNCH_BENCHMARK_JOB"
JobType = TypeVar("JobType", bound="Job")


class TimeLimit(Exception):
    """The whole benchmark took longer than --limit-s; what was measured till then is reported."""


def limit_time(limit_s: int) -> None:
    """Raise `TimeLimit` in the main thread after so long; a SIGTERM ends the program in order, with its jobs."""

    def time_is_up(number: int, frame: FrameType | None) -> None:
        raise TimeLimit(f"stopped after --limit-s {limit_s} seconds; the table is incomplete")

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGALRM, time_is_up)
    signal.signal(signal.SIGTERM, end)
    signal.alarm(limit_s)


class JobFailed(Exception):
    """A job ended by itself or did not do in time what was waited for; the message has the end of its output."""


def python_path() -> str:
    """Returns where children find this elaunch, and what this process finds by its own PYTHONPATH."""
    return os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device`, which `on_gpu` reads."""
    parser.add_argument(
        "--device", choices=("auto", "cpu", "gpu"), default="auto", help="default: a GPU if there is one"
    )


def on_gpu(args: argparse.Namespace) -> bool:
    """Returns whether a benchmark is to run on a GPU."""
    return args.device == "gpu" or (args.device == "auto" and has_gpu())


def ask_job(*words: str, job: str, endpoint: str, limit_s: float, failed: str) -> str:
    """Runs `elaunch ctl` for a job and returns what it prints; `failed` begins the message where it is refused.

    Raises:
        JobFailed: it is.
    """
    found = subprocess.run(
        [*ELAUNCH, "ctl", *words, f"--rdzv-id={job}", f"--rdzv-endpoint={endpoint}"],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=os.environ | {"PYTHONPATH": python_path()},
        check=False,
    )
    if found.returncode:
        raise JobFailed(f"{failed}: {found.stderr or found.stdout}")
    return found.stdout


class Processes:
    """Starts marked processes; leaving the context ends them and all their descendants."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / f"output-{uuid.uuid4().hex[:8]}"
        self._mark = uuid.uuid4().hex
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, command: Sequence[str | Path], **environment: str) -> subprocess.Popen[bytes]:
        """Start `command` with its output appended to `self.output`."""
        inherited = os.environ | {"PYTHONPATH": python_path()}
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                [str(word) for word in command],
                env=inherited | {"OMP_NUM_THREADS": "1", MARK: self._mark} | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def tail(self, lines: int = 15) -> str:
        """The end of what the processes wrote."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-lines:]) if self.output.exists() else ""

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._started:
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 10.0
        for process in self._started:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        deadline = time.monotonic() + 5.0
        while (left := self._marked()) and time.monotonic() < deadline:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.02)

    def cpu_s(self) -> float:
        """Processor seconds, of user and system, of the processes that run."""
        return sum(_cpu_s(pid) for pid in self._marked())

    def _marked(self) -> list[int]:
        wanted = f"{MARK}={self._mark}".encode()
        found = []
        for entry in os.scandir("/proc"):
            if entry.name.isdigit():
                try:
                    environment = Path(entry.path, "environ").read_bytes()
                except OSError:
                    continue
                if wanted in environment.split(b"\0"):
                    found.append(int(entry.name))
        return found


@dataclasses.dataclass(frozen=True)
class Training:
    """What to train: `workers` workers, `steps` steps, `micro_batch_s` emulated seconds per micro-batch."""

    workers: int
    micro_batch_s: float
    steps: int = 10**9

    @property
    def flags(self) -> list[str]:
        return [f"--steps={self.steps}", f"--micro-batch-s={self.micro_batch_s}"]


class Job:
    """A training job under one launcher, seen through its event log."""

    def __init__(self, name: str, training: Training, folder: Path) -> None:
        self.name = name
        self.training = training
        self.processes = Processes(folder)
        self.log = folder / f"events-{uuid.uuid4().hex[:8]}.jsonl"
        self.lines: list[dict[str, Any]] = []
        self._read_bytes = 0
        self._commits: list[Commit] = []
        self._first: dict[int, Commit] = {}
        self._n_counted = 0

    def begin(self) -> None:
        """Start the launcher."""
        raise NotImplementedError

    def tend(self) -> None:
        """Do what this launcher leaves to its user; called again and again while a job is waited for."""

    def launcher(self) -> subprocess.Popen[bytes]:
        """The process whose memory counts as the launcher's."""
        raise NotImplementedError

    def finished(self) -> bool:
        """Whether the launcher has ended."""
        return self.launcher().poll() is not None

    def __enter__(self: JobType) -> JobType:
        self.processes.__enter__()
        try:
            self.begin()
        except BaseException:
            self.processes.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.processes.__exit__(kind, error, trace)

    def read(self) -> None:
        """Take in the lines that were written since; an unfinished last line waits for the next call."""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read_bytes)
                fresh = file.read()
            whole = fresh[: fresh.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            self.lines += [json.loads(line) for line in whole.splitlines()]

    def commits(self) -> list[Commit]:
        """The committed steps so far, in order of time."""
        if self._n_counted < len(self.lines):  # polled while the job runs, on the same cores: count each line once
            self._commits = commits_of(self.lines[self._n_counted :], self._first)
            self._n_counted = len(self.lines)
        return self._commits

    def workers(self) -> dict[int, int]:
        """Local rank -> process id."""
        return live_workers(self.lines)

    def wait(self, done: Callable[[], bool], what: str, limit_s: float) -> None:
        """Return once `done()` holds; raises JobFailed after `limit_s` seconds or when the job ends before."""
        deadline = time.monotonic() + limit_s
        while True:
            ended = self.finished()
            self.read()
            if done():
                return
            if ended:
                raise JobFailed(f"{self.name} ended while waiting for {what}:\n{self.processes.tail()}")
            if time.monotonic() > deadline:
                raise JobFailed(f"{self.name}: no {what} within {limit_s:g} s:\n{self.processes.tail()}")
            self.tend()
            time.sleep(0.01)

    def wait_complete(self, after_generation: int, steps: int, limit_s: float) -> None:
        """Wait until all workers have committed `steps` steps together, in a generation above `after_generation`."""

        def complete() -> bool:
            last = self.commits()[-steps:]
            return len(last) == steps and all(
                commit.members == self.training.workers and commit.generation > after_generation for commit in last
            )

        self.wait(complete, f"{steps} steps of {self.training.workers} workers", limit_s)

    def cpu_s(self) -> float:
        """Processor seconds of all processes of the job so far, launcher included; not of those that have ended."""
        return self.processes.cpu_s()

    def memory_bytes(self) -> tuple[int, int]:
        """Resident bytes of the launcher, and of all its descendants that are neither workers nor below one."""
        workers = set(self.workers().values())
        children = _children()
        helpers, queue = 0, list(children.get(self.launcher().pid, []))
        while queue:
            pid = queue.pop()
            if pid not in workers:
                helpers += _resident_bytes(pid)
                queue += children.get(pid, [])
        return _resident_bytes(self.launcher().pid), helpers


class ElaunchJob(Job):
    """The job on one node under elaunch; a worker that dies is replaced while the others go on."""

    def begin(self) -> None:
        self._agent = self.processes.start(
            [
                *[*ELAUNCH, "--standalone", f"--nproc-per-node={self.training.workers}", "--max-restarts=1000000"],
                *["--events", str(self.log), str(HERE / "train_small.py"), *self.training.flags],
            ]
        )

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._agent


class TorchrunJob(Job):
    """The job under torchrun; with `checkpoint` it restarts from the last committed step."""

    def __init__(self, name: str, training: Training, folder: Path, *, checkpoint: bool) -> None:
        super().__init__(name, training, folder)
        self._checkpoint = [f"--checkpoint={folder / ('checkpoint-' + uuid.uuid4().hex[:8])}"] if checkpoint else []

    def begin(self) -> None:
        self._agent = self.processes.start(
            [
                *[*TORCHRUN, "--standalone", f"--nproc-per-node={self.training.workers}", "--max-restarts=1000000"],
                *[str(HERE / "peers/torchrun_train.py"), f"--commits={self.log}"],
                *[*self._checkpoint, *self.training.flags],
            ]
        )

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._agent


@dataclasses.dataclass(frozen=True)
class TorchftSettings:
    """How torchft is run; `why` says where the values come from."""

    name: str
    why: str
    quorum_tick_s: float
    join_timeout_s: float
    lighthouse_heartbeat_timeout_s: float
    heartbeat_s: float
    group_timeout_s: float
    transport_timeout_s: float
    manager_timeout_s: float


class TorchftJob(Job):
    """One lighthouse and one replica group per worker; a replica that ends is started again at once."""

    def __init__(
        self, name: str, training: Training, folder: Path, *, python: Path, settings: TorchftSettings, port: int
    ) -> None:
        super().__init__(name, training, folder)
        self._python, self._settings, self._port = python, settings, port
        self._replicas: list[subprocess.Popen[bytes]] = []
        self.starts = 0

    def begin(self) -> None:
        settings = self._settings
        self._lighthouse = self.processes.start(
            [
                self._python.parent / "torchft_lighthouse",
                *["--bind", f"[::]:{self._port}", "--min_replicas", "1"],
                *["--quorum_tick_ms", str(round(settings.quorum_tick_s * 1e3))],
                *["--join_timeout_ms", str(round(settings.join_timeout_s * 1e3))],
                *["--heartbeat_timeout_ms", str(round(settings.lighthouse_heartbeat_timeout_s * 1e3))],
            ]
        )
        self._replicas = [self._start_replica(number) for number in range(self.training.workers)]

    def tend(self) -> None:
        for number, replica in enumerate(self._replicas):
            if replica.poll() is not None and replica.returncode != 0:
                self._replicas[number] = self._start_replica(number)

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._lighthouse

    def finished(self) -> bool:
        return super().finished() or all(replica.poll() == 0 for replica in self._replicas)

    def _start_replica(self, number: int) -> subprocess.Popen[bytes]:
        self.starts += 1
        settings = self._settings
        return self.processes.start(
            [
                self._python,
                HERE / "peers/torchft_train.py",
                *[f"--commits={self.log}", *self.training.flags],
                *[f"--replica={number}", f"--replicas={self.training.workers}"],
                *[f"--group-timeout-s={settings.group_timeout_s}", f"--heartbeat-s={settings.heartbeat_s}"],
                *[f"--transport-timeout-s={settings.transport_timeout_s}"],
                *[f"--manager-timeout-s={settings.manager_timeout_s}"],
            ],
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{self._port}",
        )


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                stat = Path(entry.path, "stat").read_text()
            except OSError:
                continue
            # The name in parentheses may hold spaces; the parent is the second field after it.
            parent = int(stat[stat.rindex(")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    return children


def has_gpu() -> bool:
    """Returns whether this machine has an accelerator."""
    import torch  # late: --help and --device=cpu do without

    return torch.accelerator.is_available()


def _cpu_s(pid: int) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0.0
    user, system = stat[stat.rindex(")") + 2 :].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:")), 0)
