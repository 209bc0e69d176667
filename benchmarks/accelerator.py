"""Steps and recoveries beside DistributedDataParallel, on one GPU or on the CPU: whatever is there.

    python benchmarks/accelerator.py --quick
    python benchmarks/accelerator.py --json accelerator.json      # at most 8 minutes, on the CPU 10
    python benchmarks/accelerator.py --device cpu

On a GPU: a GPT of 85.6 M parameters in bfloat16, by one worker and by four that share the device, over NCCL. On the
CPU: GPTs of 1, 25 and 101 M parameters on few tokens, by four workers, over elaunch's links and over Gloo. Step times
come from neighbouring runs in turn; kills are SIGKILLs of a random worker at a random moment of a step. The last step
times are of two pipelines of two stages, beside torch.distributed.pipelining with DistributedDataParallel. `pack.py`
packs what a machine without internet lacks.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.commits import Commit, KillFigures, kill_figures, median_steps
from benchmarks.jobs import (
    ELAUNCH,
    HERE,
    TORCHRUN,
    Job,
    JobFailed,
    TimeLimit,
    Training,
    add_device,
    limit_time,
    on_gpu,
)
from benchmarks.report import Report, add_arguments, median_interval, spread

LEAST_WINDOWS = 6
IMPORT_S = 10.0  # torch, for replacements, at the quarter of a core that it takes from workers on all cores
END_S = 5.0  # for a job to end, and for the report
NATIVE_LIMIT_S = 30.0  # for a native group to be in use; without one, what is measured goes over links, and says so
BOUNDS = {
    "gpu 1": ("GPU, step, 1 worker", "x DDP", "at_most", 1.01),
    "gpu 4": ("GPU, step, 4 workers on one device", "x DDP", "at_most", 1.02),
    "gpu hybrid": ("GPU, step, hybrid DP 2 x PP 2", "x pipelining + DDP", "at_most", 1.1),
    "gpu next": ("GPU, SIGKILL -> next commit, median, less one step", "s", "below", 0.3),
    "gpu next, worst": ("the same, worst", "s", "below", 0.6),
    "gpu join": ("GPU, SIGKILL -> the replacement is a member, worst", "s", "below", 3.0),
    "cpu 1M links": ("CPU, step, 1 M parameters, links", "x DDP", "at_most", 1.01),
    "cpu 1M native": ("CPU, step, 1 M parameters, native", "x DDP", "at_most", 1.01),
    "cpu 25M links": ("CPU, step, 25 M parameters, links", "x DDP", "at_most", 1.01),
    "cpu 25M native": ("CPU, step, 25 M parameters, native", "x DDP", "at_most", 1.01),
    "cpu 100M links": ("CPU, step, 101 M parameters, links", "x DDP", "at_most", 1.01),
    "cpu 100M native": ("CPU, step, 101 M parameters, native", "x DDP", "at_most", 1.01),
    "cpu hybrid native": ("CPU, step, hybrid DP 2 x PP 2, native", "x pipelining + DDP", "at_most", 1.1),
    "cpu hybrid links": ("CPU, step, hybrid DP 2 x PP 2, links", "x pipelining + DDP", "at_most", 1.1),
    "cpu links next": (
        *("CPU, links, SIGKILL -> next commit, median, less one step and the report of the death", "s"),
        *("below", 0.05),
    ),
    "cpu links next, worst": ("the same, worst, less one step alone", "s", "below", 0.15),
    "cpu native next": (
        *("CPU, native, SIGKILL -> next commit, median, less one step and the report of the death", "s"),
        *("below", 0.05),
    ),
    "cpu native next, worst": ("the same, worst, less one step alone", "s", "below", 0.15),
}
"""What was asked, by name of the figure: how it is called in the report, its unit and its bound."""


@dataclasses.dataclass(frozen=True)
class GptCase:
    """One job that is measured.

    Attributes:
        key: of its figures in `BOUNDS`.
        parameters: of its model, as text.
        launchers: the first is measured against all others; elaunch's are named by what sums the gradients.
        warm_s, measured_s: seconds of a run before what counts, and of what counts.
        window: steps that are timed together: a device is waited for at their end only.
        micro_batch_size: rows of a pipeline's micro-batch; 0: there are no pipelines.
    """

    key: str
    parameters: str
    workers: int
    on_cpu: bool
    launchers: tuple[str, ...]
    model: tuple[int, int, int, int]
    global_batch_size: int
    optimizer: str
    pairs: int
    warm_s: float
    measured_s: float
    window: int = 1
    micro_batch_size: int = 0

    @property
    def is_hybrid(self) -> bool:
        """Whether it is the job of `accelerator_hybrid_job.py`, in micro-batches of so many rows."""
        return self.micro_batch_size > 0

    @property
    def flags(self) -> list[str]:
        """The flags of its script."""
        names = ("layers", "width", "heads", "context")
        rest = [f"--micro-batch-size={self.micro_batch_size}"] if self.is_hybrid else [f"--optimizer={self.optimizer}"]
        return [
            *(f"--{name}={value}" for name, value in zip(names, self.model, strict=True)),
            f"--dtype={'float32' if self.on_cpu else 'bfloat16'}",
            f"--global-batch-size={self.global_batch_size}",
            f"--window={self.window}",
            *rest,
        ]


PEERS = ("ddp", "pipelining", "plain")
"""Launchers that are torchrun."""

ON_CPU, ON_GPU = ("links", "native", "ddp"), ("native", "ddp")
GPT_1M, GPT_25M, GPT_101M = (5, 128, 4, 16), (8, 512, 8, 16), (8, 1024, 16, 16)
GPT_86M = (12, 768, 12, 512)
CPU_STEPS = (
    GptCase("cpu 1M", "1.0 M", 4, True, ON_CPU, GPT_1M, 4, "sgd", 3, 2.0, 4.0),
    GptCase("cpu 25M", "25.4 M", 4, True, ON_CPU, GPT_25M, 4, "sgd", 2, 2.0, 6.0),
    GptCase("cpu 100M", "101 M", 4, True, ON_CPU, GPT_101M, 4, "sgd", 2, 4.0, 8.0),
    GptCase(
        *("cpu hybrid", "25.4 M", 4, True, ("links", "native", "pipelining"), GPT_25M, 32, "adamw"),
        *(2, 2.0, 10.0),
        micro_batch_size=4,
    ),
)
GPU_STEPS = (
    GptCase("gpu 1", "85.6 M", 1, False, ("elaunch", "ddp", "plain"), GPT_86M, 32, "adamw", 4, 2.0, 5.0, 10),
    GptCase("gpu 4", "85.6 M", 4, False, ON_GPU, GPT_86M, 32, "adamw", 4, 2.0, 6.0, 4),
    GptCase(
        *("gpu hybrid", "85.6 M", 4, False, ("native", "pipelining"), GPT_86M, 32, "adamw"),
        *(4, 2.0, 6.0, 4),
        micro_batch_size=4,
    ),
)
CPU_KILLS = GptCase("cpu", "1.0 M", 4, True, ("links", "native"), GPT_1M, 12, "adamw", 50, 3.0, 0.0)
GPU_KILLS = GptCase("gpu", "85.6 M", 4, False, ("native",), GPT_86M, 32, "adamw", 20, 3.0, 0.0)


class GptJob(Job):
    """The job of `accelerator_job.py`, or of `accelerator_hybrid_job.py`, under one launcher."""

    def __init__(self, name: str, case: GptCase, folder: Path) -> None:
        super().__init__(name, Training(case.workers, 0.0), folder)
        self.case = case
        place = ["--standalone", f"--nproc-per-node={case.workers}", "--max-restarts=1000000"]
        script = str(HERE / ("accelerator_hybrid_job.py" if case.is_hybrid else "accelerator_job.py"))
        if name in PEERS:
            self._command = [*TORCHRUN, *place, script, f"--peer={name}", f"--commits={self.log}", *case.flags]
        else:
            collectives = f"--collectives={'auto' if name == 'elaunch' else name}"
            self._command = [*ELAUNCH, *place, collectives, f"--events={self.log}", script, *case.flags]

    def begin(self) -> None:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self.case.on_cpu else {}
        self._agent = self.processes.start(self._command, **hidden)

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._agent

    def sums_over(self) -> str:
        """Returns what sums gradients in the present generation, as the event log says."""
        if self.name in PEERS:
            return self.name
        return native_backend(self.lines) or ("links" if self.case.workers > 1 else "nothing to sum")

    def wait_for_native(self) -> None:
        """Returns when a native group is in use, where there is to be one, or after `NATIVE_LIMIT_S` without it."""
        deadline = time.monotonic() + NATIVE_LIMIT_S
        if self.name == "native":
            self.wait(
                lambda: native_backend(self.lines) is not None or time.monotonic() > deadline,
                "native group",
                2 * NATIVE_LIMIT_S,
            )

    def warm_up(self) -> None:
        """Returns after the warm-up. Steps on the CPU are measured when elaunch has torch imported for replacements."""
        imports = self.case.on_cpu and self.case.measured_s > 0 and self.name not in PEERS
        settled = time.monotonic() + self.case.warm_s + imports * IMPORT_S
        self.wait(lambda: time.monotonic() >= settled, "warm-up", 60.0)


@dataclasses.dataclass(frozen=True)
class QuietRun:
    """One undisturbed run: seconds of a step in each window, processor seconds of a step, and what summed."""

    steps_s: list[float]
    cpu_s: float
    sums_over: str

    @property
    def median_s(self) -> float:
        """Returns the median step."""
        return statistics.median(self.steps_s)


def native_backend(lines: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns the backend of the native group that the newest committed generation uses; None: it has none."""
    generation = next((line["generation"] for line in reversed(lines) if line["kind"] == "step"), None)
    found = (line for line in reversed(lines) if line["kind"] == "collectives" and line["generation"] == generation)
    return next((str(line["backend"]) for line in found), None)


def key_of(case: GptCase, launcher: str) -> str:
    """Returns the name of a case's figures; on the CPU elaunch has several launchers."""
    return f"{case.key} {launcher}" if case.on_cpu else case.key


def windows(commits: Iterable[Commit], steps: int) -> list[float]:
    """Returns the mean seconds of a step in each window: between two commits after which the device was waited for.

    Args:
        commits: in order of time, without gaps.
        steps: of a window; the last of each is one below a multiple of it.
    """
    times = [commit.t for commit in commits if (commit.step + 1) % steps == 0]
    return [(after - before) / steps for before, after in itertools.pairwise(times)]


def joined_s(commits: Sequence[Commit], killed_t: float, members: int) -> float:
    """Returns the seconds from a kill at `killed_t` until `members` workers commit together again; infinite: never."""
    before = max((commit.generation for commit in commits if commit.t <= killed_t), default=-1)
    later = (commit.t for commit in commits if commit.generation > before and commit.members == members)
    return next(later, math.inf) - killed_t


def reported_s(lines: Iterable[Mapping[str, Any]], killed_t: float, pid: int) -> float:
    """Returns the seconds from the SIGKILL of process `pid` at `killed_t` until its parent had it from the kernel.

    The kernel tells of the death once it has torn the process down; NaN where the log has no such line, as a peer's.
    """
    exits = (one["t"] for one in lines if one["kind"] == "worker_exited" and one["pid"] == pid and one["t"] >= killed_t)
    return next(exits, math.nan) - killed_t


def measure_steps(job: GptJob) -> QuietRun:
    """Runs a job undisturbed, and returns the steps after its warm-up."""
    case = job.case
    with job:
        job.wait(lambda: len(job.commits()) >= 3, "first steps", 120.0)
        job.wait_for_native()
        job.warm_up()
        first, cpu_s = len(job.commits()), job.cpu_s()
        end = time.monotonic() + case.measured_s
        enough = first + case.window * (LEAST_WINDOWS + 1)
        job.wait(lambda: time.monotonic() >= end and len(job.commits()) >= enough, f"{enough} steps", 120.0)
        commits = job.commits()
        cpu_s = (job.cpu_s() - cpu_s) / (len(commits) - first)
        return QuietRun(windows(commits[first:], case.window), cpu_s, job.sums_over())


def compare_steps(report: Report, figures: dict[str, float], case: GptCase, folder: Path) -> None:
    """Runs all launchers in turn, every other time in reverse order, and reports what there is when time is up."""
    runs: dict[str, list[QuietRun]] = {name: [] for name in case.launchers}
    try:
        for turn in range(case.pairs):
            for name in case.launchers[:: -1 if turn % 2 else 1]:
                say(f"{case.key}, {name}: run {turn + 1} of {case.pairs}")
                runs[name].append(measure_steps(GptJob(name, case, folder)))
    finally:
        _report_steps(report, figures, case, {name: of_name for name, of_name in runs.items() if of_name})


def _report_steps(report: Report, figures: dict[str, float], case: GptCase, runs: Mapping[str, list[QuietRun]]) -> None:
    for name, of_name in runs.items():
        steps = spread(itertools.chain.from_iterable(run.steps_s for run in of_name))
        medians = spread(run.median_s for run in of_name)
        report.row(
            {
                "undisturbed step": name,
                "parameters": case.parameters,
                "workers": case.workers,
                "device": "cpu" if case.on_cpu else "gpu",
                "sums over": ", ".join(sorted({run.sums_over for run in of_name})),
                "steps": steps.count * case.window,
                "median_ms": 1e3 * steps.median,
                "least_run_ms": 1e3 * medians.least,
                "worst_run_ms": 1e3 * medians.worst,
                "cpu_ms_per_step": 1e3 * spread(run.cpu_s for run in of_name).median,
            }
        )
    for name in runs:
        for other in PEERS:
            pairs = list(zip(runs[name], runs.get(other, [])))
            if name in PEERS or not pairs:
                continue
            ratios = sorted(a.median_s / b.median_s for a, b in pairs)
            cpu = spread(a.cpu_s / b.cpu_s for a, b in pairs)
            low, high = median_interval(ratios)
            if other != "plain":
                figures[key_of(case, name)] = statistics.median(ratios)
            report.notes.append(
                f"{case.key}, {name} / {other}: {len(ratios)} neighbouring pairs {ratios[0]:.3f} to {ratios[-1]:.3f}, "
                f"median {statistics.median(ratios):.3f}, 95 % interval of the median {low:.3f} to {high:.3f}; of "
                f"their processor seconds: {cpu.least:.3f} to {cpu.worst:.3f}, median {cpu.median:.3f}"
            )


def kill_workers(report: Report, figures: dict[str, float], case: GptCase, folder: Path, chance: random.Random) -> None:
    """Kills workers of a job under each launcher; each job has an equal part of the time that is left."""
    for number, name in enumerate(case.launchers):
        left_s = signal.getitimer(signal.ITIMER_REAL)[0] - END_S
        end_s = time.monotonic() + left_s / (len(case.launchers) - number)
        kill_in_turn(report, figures, GptJob(name, case, folder), chance, end_s)


def kill_in_turn(
    report: Report, figures: dict[str, float], job: GptJob, chance: random.Random, end_s: float = math.inf
) -> None:
    """Kills workers, each after the former's replacement has settled, and reports what there is when time is up.

    Args:
        report, figures: get what was found.
        job: that is to be started.
        chance: of the moments and the victims.
        end_s: no kill comes later, by `time.monotonic`.
    """
    case, kills, sums = job.case, list[tuple[float, int]](), set[str]()
    try:
        with job:
            try:
                job.wait_complete(-1, 10, 120.0)
                job.warm_up()
                while len(kills) < case.pairs and time.monotonic() < end_s:
                    job.wait_for_native()
                    time.sleep(chance.uniform(0.0, median_steps(job.commits())[case.workers]))
                    pid = chance.choice(sorted(job.workers().values()))
                    job.read()
                    generation = job.commits()[-1].generation
                    sums.add(job.sums_over())
                    say(f"{case.key}: kill {len(kills) + 1} of {case.pairs}, sums over {job.sums_over()}")
                    killed_t = time.time()
                    os.kill(pid, signal.SIGKILL)
                    job.wait_complete(generation, 6, 90.0)
                    kills.append((killed_t, pid))
            finally:
                job.read()
    finally:
        if kills:
            _report_kills(report, figures, job, kills, sums)


def _report_kills(
    report: Report,
    figures: dict[str, float],
    job: GptJob,
    killed: Sequence[tuple[float, int]],
    sums: Iterable[str],
) -> None:
    case, commits = job.case, job.commits()
    step_s = median_steps(commits)[case.workers]
    kills: list[KillFigures] = [kill_figures(commits, moment, case.workers) for moment, _ in killed]
    deaths = [reported_s(job.lines, moment, pid) for moment, pid in killed]
    less = spread(kill.next_commit_s - step_s for kill in kills)
    beyond = spread(kill.next_commit_s - step_s - death_s for kill, death_s in zip(kills, deaths, strict=True))
    joins = spread(joined_s(commits, moment, case.workers) for moment, _ in killed)
    key = key_of(case, job.name)
    figures |= {
        f"{key} next": beyond.median if case.on_cpu else less.median,
        f"{key} next, worst": less.worst,
        f"{key} join": joins.worst,
    }
    report.row(
        {
            "SIGKILL of one of 4 workers": "cpu" if case.on_cpu else "gpu",
            "launcher": job.name,
            "sums over": ", ".join(sorted(sums)),
            "kills": less.count,
            "step_ms": 1e3 * step_s,
            "next_commit_ms": 1e3 * spread(kill.next_commit_s for kill in kills).median,
            "less_step_ms": 1e3 * less.median,
            "death_reported_ms": 1e3 * spread(deaths).median,
            "less_report_ms": 1e3 * beyond.median,
            "worst_less_report_ms": 1e3 * beyond.worst,
            "p90_less_step_ms": 1e3 * less.p90,
            "worst_less_step_ms": 1e3 * less.worst,
            "member_again_ms": 1e3 * joins.median,
            "worst_member_again_ms": 1e3 * joins.worst,
        }
    )


def add_targets(report: Report, figures: Mapping[str, float]) -> None:
    """Sets the figures beside what was asked; one that is absent was not measured."""
    for key, (name, unit, bound, value) in BOUNDS.items():
        report.target(name, figures.get(key, math.nan), unit, **{bound: value})


def say(text: str) -> None:
    """Progress goes to standard error, so that standard output is the report alone."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_device(parser)
    parser.add_argument("--only", choices=("step", "kill"), help="one measurement instead of both")
    parser.add_argument("--case", help="step times of one case alone, such as 'cpu 25M'")
    parser.add_argument("--pairs", type=int, help="runs of each launcher for each step time (default 2 to 4, quick 1)")
    parser.add_argument("--kills", type=int, help="default 50 on the CPU, 20 on a GPU, quick 3")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims of the kills")
    parser.add_argument("--limit-s", type=int, help="the most that all of it may take (default 480, on the CPU 600)")
    args = parser.parse_args()
    args.device = "gpu" if on_gpu(args) else "cpu"
    steps, kills = (GPU_STEPS, GPU_KILLS) if args.device == "gpu" else (CPU_STEPS, CPU_KILLS)
    known = [case.key for case in steps]
    if args.case is not None and args.case not in known:
        parser.error(f"--case={args.case}: expected one of {', '.join(known)}")
    n_pairs, n_kills = args.pairs or (1 if args.quick else None), args.kills or (3 if args.quick else kills.pairs)
    report = Report(
        f"accelerator: GPTs on {args.device}, beside torchrun + DistributedDataParallel",
        notes=[
            "nothing is emulated, but on a GPU: the workers of one device say that they are machines of their own "
            "(NCCL_HOSTID) and talk over loopback sockets (NCCL_SOCKET_IFNAME=lo), under both launchers alike",
            "on the CPU a worker has one row of 16 tokens and updates by SGD, so that the sums are most of a step; in "
            "kills, in pipelines and on a GPU the optimizer is AdamW",
            "hybrid: 2 pipelines of 2 stages, micro-batches of 4 rows; beside Schedule1F1B of "
            "torch.distributed.pipelining with DistributedDataParallel of each stage",
            "death_reported: from the SIGKILL until the kernel has torn the process down and its parent has the news; "
            "less_report: less that, too",
            "less_step: less the median step of 4 workers; the next commit is the first one without the dead worker; "
            "member_again: until the replacement commits with all others",
        ],
    )
    figures: dict[str, float] = {}
    failed = False
    limit_time(args.limit_s or (480 if args.device == "gpu" else 600))
    with tempfile.TemporaryDirectory(prefix="accelerator-") as name:
        try:
            if args.only != "kill":
                for case in steps[:2] if args.quick else steps:
                    if args.case in (None, case.key):
                        compare_steps(
                            report, figures, dataclasses.replace(case, pairs=n_pairs or case.pairs), Path(name)
                        )
            if args.only != "step" and args.case is None:
                chosen = dataclasses.replace(kills, pairs=n_kills)
                kill_workers(report, figures, chosen, Path(name), random.Random(args.seed))
        except (JobFailed, TimeLimit) as error:
            failed = True
            report.notes.append(f"FAILED: {error}")
    signal.alarm(0)
    add_targets(report, figures)
    report.print()
    report.write(args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
