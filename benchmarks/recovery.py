"""Failures, joins, start-up, overhead and memory of elaunch beside torchrun and torchft: one job, one machine, one run.

    python benchmarks/recovery.py --quick
    python benchmarks/recovery.py --torchft-python VENV/bin/python --json recovery.json

The job is `small_model.py` on 4 workers. Each kill is a SIGKILL of a random worker at a random moment of a step, timed
by this program; each commit is timed by the job. torchft is skipped where its interpreter cannot import it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.commits import Commit, KillFigures, kill_figures, median_steps
from benchmarks.jobs import (
    ELAUNCH,
    HERE,
    TORCHRUN,
    ElaunchJob,
    Job,
    JobFailed,
    Processes,
    TimeLimit,
    TorchftJob,
    TorchftSettings,
    TorchrunJob,
    Training,
    limit_time,
)
from benchmarks.report import Cell, Report, add_arguments, median_interval, spread
from benchmarks.small_model import MICRO_BATCHES

WORKERS = 4
STEP_S = 0.07  # emulated; the messages, the real compute and the optimizer bring it to about 0.1
WARM_UP_S = 15.0  # meanwhile elaunch imports torch for replacements, on the same cores
MEASUREMENTS = ("kill", "join", "launch", "steptime", "memory")

README = TorchftSettings(
    name="torchft (README)",
    why="README's lighthouse flags, train_ddp.py's timeouts: Gloo 5 s, transport 10 s, manager 30 s",
    quorum_tick_s=0.1,
    join_timeout_s=10.0,
    lighthouse_heartbeat_timeout_s=5.0,
    heartbeat_s=0.1,
    group_timeout_s=5.0,
    transport_timeout_s=10.0,
    manager_timeout_s=30.0,
)
TUNED = TorchftSettings(
    name="torchft (tuned)",
    why="short time-outs, about one step; false alarms were not counted: Gloo 150 ms, dead after 150 ms, heartbeat "
    "and quorum tick 10 ms, join timeout 500 ms",
    quorum_tick_s=0.01,
    join_timeout_s=0.5,
    lighthouse_heartbeat_timeout_s=0.15,
    heartbeat_s=0.01,
    group_timeout_s=0.15,
    transport_timeout_s=10.0,
    manager_timeout_s=30.0,
)


@dataclasses.dataclass(frozen=True)
class Kills:
    """The kills under one launcher; `step_s` is the median step of all workers, `own_s` the launcher's own figures."""

    name: str
    figures: list[KillFigures]
    step_s: float
    own_s: list[float]


@dataclasses.dataclass(frozen=True)
class StepRun:
    """The steps of one undisturbed run: seconds of each, and processor seconds per step of all its processes."""

    steps_s: list[float]
    cpu_s: float


class Bench:
    """One run of this program: its settings, its scratch folder and the report that it fills."""

    def __init__(self, args: argparse.Namespace, folder: Path, report: Report) -> None:
        self.launchers: list[str] = args.launchers
        self.runs: int = args.runs
        self.peer_runs = max(1 if args.quick else 10, args.runs // 5)
        self.pairs: int = args.pairs
        self.steps = 60 if args.quick else 119
        self.quick: bool = args.quick
        self.torchft_python: Path | None = args.torchft_python
        self.random = random.Random(args.seed)
        self.folder = folder
        self.report = report
        self.memory_bytes: dict[str, tuple[int, int]] = {}
        self.failed = False

    def emulated(self) -> Training:
        return Training(WORKERS, STEP_S * WORKERS / MICRO_BATCHES)

    # ---- 1 and 2: kills and joins

    def kills_and_joins(self, *, kill: bool, join: bool) -> None:
        """Kill workers under every launcher; the same kills give the recovery and the stall of the join."""
        jobs: list[tuple[Callable[[], Job], int]] = []
        if "elaunch" in self.launchers:
            jobs.append((lambda: ElaunchJob("elaunch", self.emulated(), self.folder), self.runs))
        if "torchrun" in self.launchers:
            jobs.append(
                (lambda: TorchrunJob("torchrun", self.emulated(), self.folder, checkpoint=True), self.peer_runs)
            )
        if self.torchft_python is not None:
            python = self.torchft_python
            jobs.append((lambda: self._torchft(python, TUNED), self.peer_runs))
            if not self.quick:
                jobs.append((lambda: self._torchft(python, README), self.peer_runs))
        rows: dict[str, list[dict[str, Cell]]] = {"kill": [], "join": []}
        try:
            for make, count in jobs:
                kills = self._kill(make(), count)
                rows["kill"].append(self._kill_row(kills, with_target=kill))
                rows["join"].append(self._join_row(kills, with_target=join))
        finally:
            for row in (rows["kill"] if kill else []) + (rows["join"] if join else []):
                self.report.row(row)

    def _kill_row(self, kills: Kills, *, with_target: bool) -> dict[str, Cell]:
        raw = spread(1e3 * figure.next_commit_s for figure in kills.figures)
        less = spread(1e3 * (figure.next_commit_s - kills.step_s) for figure in kills.figures)
        if kills.name == "elaunch" and with_target:
            self.report.target("SIGKILL -> next commit, median, less one step", less.median, "ms", below=100)
            self.report.target(f"the same, worst of {less.count}", less.worst, "ms", below=300)
        return {
            "SIGKILL -> next commit": kills.name,
            "kills": less.count,
            "step_ms": 1e3 * kills.step_s,
            "median_ms": raw.median,
            "median_less_step_ms": less.median,
            "p90_less_step_ms": less.p90,
            "worst_less_step_ms": less.worst,
            "own_log_median_ms": 1e3 * statistics.median(kills.own_s) if kills.own_s else None,
        }

    def _join_row(self, kills: Kills, *, with_target: bool) -> dict[str, Cell]:
        step_ms = 1e3 * kills.step_s
        stall = spread(1e3 * figure.join_stall_s for figure in kills.figures if not math.isnan(figure.join_stall_s))
        if kills.name == "elaunch" and with_target:
            self.report.target("stall at a join, median (asked: one step)", stall.median, "ms", below=step_ms)
            self.report.target(f"the same, worst of {stall.count}", stall.worst, "ms", below=step_ms)
        return {
            "stall when a worker joins": kills.name,
            "joins": stall.count,
            "step_ms": step_ms,
            "median_ms": stall.median,
            "p90_ms": stall.p90,
            "worst_ms": stall.worst,
        }

    def _torchft(self, python: Path, settings: TorchftSettings) -> Job:
        return TorchftJob(
            settings.name, self.emulated(), self.folder, python=python, settings=settings, port=_free_port()
        )

    def _kill(self, job: Job, count: int) -> Kills:
        """Kill `count` workers of `job`, one after the other, each after the replacement of the former has settled."""
        say(f"{job.name}: {count} kills")
        moments: list[float] = []
        commits: list[Commit] = []
        try:
            with job:
                job.wait_complete(-1, 10, 60.0)
                self.memory_bytes[job.name] = job.memory_bytes()
                for number in range(count):
                    step_s = median_steps(job.commits())[WORKERS]
                    time.sleep(self.random.uniform(0.0, step_s))
                    rank, pid = self.random.choice(sorted(job.workers().items()))
                    job.read()
                    generation = job.commits()[-1].generation
                    killed_t = time.time()
                    os.kill(pid, signal.SIGKILL)
                    moments.append(killed_t)
                    job.wait_complete(generation, 6, 90.0)
                    took_s = kill_figures(job.commits(), killed_t, WORKERS).next_commit_s
                    say(f"  {number + 1}/{count}: local rank {rank}, next commit after {took_s * 1e3:.0f} ms")
                commits = job.commits()
        except JobFailed as error:
            commits = job.commits()
            self.failed = True
            self.report.notes.append(f"{job.name} FAILED after {len(moments)} kills: {error}")
        if isinstance(job, TorchftJob) and job.starts > WORKERS + len(moments):
            extra = job.starts - WORKERS - len(moments)
            self.report.notes.append(f"{job.name}: {extra} replicas ended by themselves and were started again")
        transitions = [line for line in job.lines if line["kind"] == "transition"]
        after_kill = [next((line for line in transitions if line["t"] >= moment), None) for moment in moments]
        own_s = [line["total_s"] for line in after_kill if line is not None]
        figures = [kill_figures(commits, moment, WORKERS) for moment in moments]
        return Kills(job.name, figures, median_steps(commits).get(WORKERS, math.nan), own_s)

    # ---- 3: from the command to the first line of the script

    def launch(self) -> None:
        """One node, and two; see `_launch`."""
        self._launch(1)
        self._launch(2)

    def _launch(self, nodes: int) -> None:
        """Spawn both launchers in turn; the time till the script of the first and of the last worker runs.

        Two nodes are two launchers started at once on this machine, with the c10d rendezvous of each.
        """
        commands = {"elaunch": ELAUNCH, "torchrun": TORCHRUN}
        first: dict[str, list[float]] = {name: [] for name in commands if name in self.launchers}
        last: dict[str, list[float]] = {name: [] for name in first}
        for number in range(self.peer_runs if not self.quick else 2):
            for name in first:
                prefix = self.folder / f"first-line-{name}-{nodes}-{number}"
                times = self._launch_once(commands[name], prefix, nodes)
                first[name].append(min(times))
                last[name].append(max(times))
        say(f"launch, {nodes} nodes: {len(next(iter(first.values()), []))} of each")
        for name in first:
            early, late = spread(first[name]), spread(last[name])
            self.report.row(
                {
                    "launch -> first line": name,
                    "nodes": nodes,
                    "launches": late.count,
                    "first_worker_median_s": early.median,
                    "first_worker_worst_s": early.worst,
                    "last_worker_median_s": late.median,
                    "last_worker_worst_s": late.worst,
                }
            )
        if len(first) == 2:
            for which, values in (("first", first), ("last", last)):
                ratio = spread(values["elaunch"]).median / spread(values["torchrun"]).median
                where = f"{nodes} node{'s' if nodes > 1 else ''}"
                what = f"launch -> first line of the {which} worker, {where}"
                self.report.target(what, ratio, "x torchrun", below=0.3)

    def _launch_once(self, launcher: list[str], prefix: Path, nodes: int) -> list[float]:
        meet = ["--standalone"]
        if nodes > 1:
            meet = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{_free_port()}"]
        command: list[str | Path] = [
            *launcher,
            *meet,
            f"--nproc-per-node={WORKERS // nodes}",
            HERE / "first_line.py",
            prefix,
        ]
        with Processes(self.folder) as processes:
            began_t = time.time()
            started = [processes.start(command) for _ in range(nodes)]
            for process in started:
                try:
                    code = process.wait(60.0)
                except subprocess.TimeoutExpired:
                    raise JobFailed(f"{launcher} did not end within 60 s:\n{processes.tail()}") from None
                if code != 0:
                    raise JobFailed(f"{launcher} ended with exit code {code}:\n{processes.tail()}")
        return [float(Path(f"{prefix}.{rank}").read_text()) - began_t for rank in range(WORKERS)]

    # ---- 4: steps without failures

    def steptime(self) -> None:
        """Runs of elaunch and of torchrun with DDP in turn, with real and with emulated compute.

        Every other pair starts with the other launcher, so that a machine that becomes slower favours neither.
        """
        for compute, training in (
            ("real", Training(WORKERS, 0.0)),
            ("emulated", self.emulated()),
        ):
            if self.quick and compute == "emulated":
                continue
            runs: dict[str, list[StepRun]] = {name: [] for name in ("elaunch", "torchrun") if name in self.launchers}
            for pair in range(self.pairs):
                for name in list(runs)[:: -1 if pair % 2 else 1]:
                    say(f"step time, {compute} compute: {name} {pair + 1}/{self.pairs}")
                    runs[name].append(self._steps_of(self._undisturbed(name, training)))
            for name, of_name in runs.items():
                steps = spread(seconds for run in of_name for seconds in run.steps_s)
                medians = spread(statistics.median(run.steps_s) for run in of_name)
                self.report.row(
                    {
                        "failure-free step": name,
                        "compute": compute,
                        "runs": medians.count,
                        "steps": steps.count,
                        "median_ms": 1e3 * steps.median,
                        "p90_ms": 1e3 * steps.p90,
                        "least_run_median_ms": 1e3 * medians.least,
                        "worst_run_median_ms": 1e3 * medians.worst,
                        "cpu_ms_per_step": 1e3 * spread(run.cpu_s for run in of_name).median,
                    }
                )
            if len(runs) == 2:
                self._compare_steps(compute, runs["elaunch"], runs["torchrun"])

    def _undisturbed(self, name: str, training: Training) -> Job:
        if name == "elaunch":
            return ElaunchJob(name, training, self.folder)
        return TorchrunJob(name, training, self.folder, checkpoint=False)

    def _compare_steps(self, compute: str, elaunch: Sequence[StepRun], torchrun: Sequence[StepRun]) -> None:
        """The median over the pairs of neighbouring runs, with how sure it is."""
        pairs = list(zip(elaunch, torchrun, strict=True))
        wall = sorted(statistics.median(a.steps_s) / statistics.median(b.steps_s) for a, b in pairs)
        cpu = spread(a.cpu_s / b.cpu_s for a, b in pairs)
        low, high = median_interval(wall)
        middle = statistics.median(wall)
        self.report.target(f"step time, {compute} compute", middle, "x torchrun + DDP", at_most=1.02)
        self.report.notes.append(
            f"step time, {compute}: ratio of the {len(wall)} neighbouring pairs of runs: {wall[0]:.3f} to "
            f"{wall[-1]:.3f}, median {middle:.3f}, 95 % interval of the median {low:.3f} to {high:.3f}; "
            f"of their processor seconds: {cpu.least:.3f} to {cpu.worst:.3f}, median {cpu.median:.3f}"
        )

    def _steps_of(self, job: Job) -> StepRun:
        with job:
            job.wait(lambda: bool(job.commits()), "the first step", 180.0)
            warm_t = job.commits()[0].t + WARM_UP_S
            job.wait(lambda: job.commits()[-1].t > warm_t, "warm-up", 180.0)
            first, cpu_s = len(job.commits()), job.cpu_s()
            job.wait(lambda: len(job.commits()) >= first + self.steps, f"{self.steps} steps", 180.0)
            cpu_s = (job.cpu_s() - cpu_s) / (len(job.commits()) - first)
            times = [commit.t for commit in job.commits()[first - 1 : first + self.steps]]
        return StepRun([after - before for before, after in itertools.pairwise(times)], cpu_s)

    # ---- 5: memory

    def memory(self) -> None:
        """Resident memory of the launcher after ten steps, before any kill."""
        jobs: dict[str, Callable[[], Job]] = {
            "elaunch": lambda: ElaunchJob("elaunch", self.emulated(), self.folder),
            "torchrun": lambda: TorchrunJob("torchrun", self.emulated(), self.folder, checkpoint=False),
        }
        for name in jobs:
            if name not in self.launchers:
                continue
            if name not in self.memory_bytes:
                say(f"memory: {name}")
                with jobs[name]() as job:
                    job.wait_complete(-1, 10, 60.0)
                    self.memory_bytes[name] = job.memory_bytes()
            agent, helpers = (bytes_ / 1e6 for bytes_ in self.memory_bytes[name])
            self.report.row({"resident memory": name, "agent_mb": agent, "its_helpers_mb": helpers})
            if name == "elaunch":
                self.report.target("resident memory of the agent", agent, "MB", below=45)


def say(text: str) -> None:
    """Progress goes to standard error, so that standard output is the report alone."""
    print(text, file=sys.stderr, flush=True)


def _free_port() -> int:
    with socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::", 0))
        return int(probe.getsockname()[1])


def _can_import_torchft(python: Path) -> bool:
    try:
        return subprocess.run([python, "-c", "import torchft"], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--launchers", default="elaunch,torchrun,torchft", help="which of the three, with commas")
    parser.add_argument("--only", choices=MEASUREMENTS, help="one measurement instead of all")
    parser.add_argument(
        "--runs",
        type=int,
        help="kills under elaunch (default 50, quick 3); a fifth, at least 10, of them under each peer and as "
        "launches of each launcher",
    )
    parser.add_argument(
        "--pairs", type=int, help="runs of each launcher for the step time, in turn (default 8, quick 1)"
    )
    parser.add_argument(
        "--torchft-python", type=Path, default=Path(sys.executable), help="an interpreter that can import torchft"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims of the kills")
    parser.add_argument("--limit-s", type=int, default=3600, help="the most that the whole benchmark may take")
    args = parser.parse_args()
    args.launchers = args.launchers.split(",")
    unknown = set(args.launchers) - {"elaunch", "torchrun", "torchft"}
    if unknown:
        parser.error(f"unknown launchers {sorted(unknown)}: expected elaunch, torchrun or torchft")
    if args.runs is None:
        args.runs = 3 if args.quick else 50
    if args.pairs is None:
        args.pairs = 1 if args.quick else 8
    return args


def main() -> int:
    args = _parse()
    report = Report(
        f"recovery: {WORKERS} workers, a model of 1.0 M parameters with AdamW",
        notes=[
            f"compute is emulated in kills and joins: each worker's forwards sleep {STEP_S * 1e3:.0f} ms in a step of "
            f"{WORKERS} workers; parameters, gradients, optimizer, messages and processes are real",
            "the next commit is the first one by a membership without the dead worker; less_step: less the median step "
            "of the full membership",
            "torchrun: rank 0 writes a checkpoint in each step; the script gives each restart store keys of its own "
            "(PrefixStore named after TORCHELASTIC_RESTART_COUNT), since a restart with Gloo hangs otherwise (torch "
            "2.13); recovery and join are one restart",
            "torchft: 4 replica groups of one worker, started again by the benchmark as soon as they die; the batch of "
            "a step shrinks with the membership, so its step takes as long with 3 workers as with 4",
            f"{README.name}: {README.why}",
            f"{TUNED.name}: {TUNED.why}",
        ],
    )
    if "torchft" not in args.launchers:
        args.torchft_python = None
    elif args.only in (None, "kill", "join") and not _can_import_torchft(args.torchft_python):
        report.notes.append(f"torchft skipped: {args.torchft_python} cannot import it (see --torchft-python)")
        args.torchft_python = None

    limit_time(args.limit_s)
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        bench = Bench(args, Path(folder), report)
        wanted = MEASUREMENTS if args.only is None else (args.only,)
        measurements: list[Callable[[], None]] = []
        if {"kill", "join"} & set(wanted):
            measurements.append(lambda: bench.kills_and_joins(kill="kill" in wanted, join="join" in wanted))
        measurements += [getattr(bench, name) for name in ("launch", "steptime", "memory") if name in wanted]
        for measure in measurements:
            try:
                measure()
            except JobFailed as error:
                bench.failed = True
                report.notes.append(f"FAILED: {error}")
            except TimeLimit as error:
                bench.failed = True
                report.notes.append(str(error))
                break
        signal.alarm(0)
    report.print()
    report.write(args.json)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
