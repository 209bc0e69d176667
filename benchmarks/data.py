"""Steps whose samples take their time to load: elaunch beside torchrun + DDP + DataLoader with as many processes.

    python benchmarks/data.py --quick
    python benchmarks/data.py --json data.json           about 20 minutes

Two workers, micro-batches of 8 samples, 2 for each worker in a step, samples of 0, 4 and 16 ms. One half of it is
undisturbed steps, in neighbouring pairs of runs; in the other a worker is killed, and under torchrun the job restarts
from a checkpoint of the last step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.commits import KillFigures, kill_figures, median_steps
from benchmarks.jobs import ELAUNCH, HERE, TORCHRUN, Job, JobFailed, TimeLimit, Training, limit_time
from benchmarks.report import Report, add_arguments, median_interval, spread

WORKERS = 2
COMPUTE_S = 0.025  # emulated, of a micro-batch
WARM_UP_STEPS = 80  # meanwhile elaunch imports torch for replacements, on the same cores
NAMES = ("elaunch", "torchrun")


class LoadingJob(Job):
    """The job of `data_job.py` under one of the two launchers."""

    def __init__(self, name: str, folder: Path, steps: int, item_s: float, loaders: int, checkpoint: bool) -> None:
        super().__init__(name, Training(WORKERS, COMPUTE_S, steps), folder)
        flags = [f"--item-s={item_s}", f"--loaders={loaders}", *self.training.flags]
        place = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1000000"]
        script = str(HERE / "data_job.py")
        if name == "elaunch":
            self._command = [*ELAUNCH, *place, f"--events={self.log}", script, *flags]
        else:
            saves = [f"--checkpoint={folder / f'checkpoint-{uuid.uuid4().hex[:8]}'}"] if checkpoint else []
            self._command = [*TORCHRUN, *place, script, "--ddp", f"--commits={self.log}", *saves, *flags]

    def begin(self) -> None:
        self._agent = self.processes.start(self._command)

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._agent


def steps_of(job: LoadingJob) -> list[float]:
    """The seconds of the steps of an undisturbed run, after a warm-up."""
    with job:
        job.wait(lambda: len(job.commits()) >= job.training.steps, f"{job.training.steps} steps", 180.0)
    times = [commit.t for commit in job.commits()[WARM_UP_STEPS:]]
    return [after - before for before, after in itertools.pairwise(times)]


def kills_of(job: LoadingJob, count: int, chance: random.Random) -> tuple[list[KillFigures], float]:
    """What kills of a worker cost, each after its replacement has settled; and the median step of all workers."""
    moments = []
    with job:
        job.wait_complete(-1, 10, 60.0)
        for _ in range(count):
            time.sleep(chance.uniform(0.0, median_steps(job.commits())[WORKERS]))
            pid = chance.choice(sorted(job.workers().values()))
            job.read()
            generation = job.commits()[-1].generation
            moments.append(time.time())
            os.kill(pid, signal.SIGKILL)
            job.wait_complete(generation, 6, 90.0)
        commits = job.commits()
    return [kill_figures(commits, moment, WORKERS) for moment in moments], median_steps(commits)[WORKERS]


def undisturbed(report: Report, folder: Path, item_ms: int, loaders: int, pairs: int, steps: int) -> None:
    """Runs of both launchers in turn; every other pair in reverse order."""
    runs: dict[str, list[list[float]]] = {name: [] for name in NAMES}
    for pair in range(pairs):
        for name in NAMES[:: -1 if pair % 2 else 1]:
            say(f"{item_ms} ms a sample, {loaders} loaders: {name} {pair + 1}/{pairs}")
            runs[name].append(steps_of(LoadingJob(name, folder, steps, item_ms / 1e3, loaders, checkpoint=False)))
    ratios = [statistics.median(a) / statistics.median(b) for a, b in zip(*runs.values(), strict=True)]
    low, high = median_interval(ratios)
    for name, of_name in runs.items():
        seconds, medians = spread(itertools.chain(*of_name)), spread(map(statistics.median, of_name))
        report.row(
            {
                "undisturbed": name,
                "sample_ms": item_ms,
                "loaders": loaders,
                "steps": seconds.count,
                "median_ms": 1e3 * seconds.median,
                "p90_ms": 1e3 * seconds.p90,
                "least_run_median_ms": 1e3 * medians.least,
                "worst_run_median_ms": 1e3 * medians.worst,
            }
        )
    what = f"step, samples of {item_ms} ms, {loaders} loaders"
    report.target(what, statistics.median(ratios), "x torchrun + DataLoader", at_most=1.03)
    report.notes.append(
        f"{what}: ratio of {len(ratios)} neighbouring pairs {min(ratios):.3f} to {max(ratios):.3f}, median "
        f"{statistics.median(ratios):.3f}, 95 % interval of the median {low:.3f} to {high:.3f}"
    )


def killed(report: Report, folder: Path, item_ms: int, loaders: int, count: int, seed: int) -> None:
    """SIGKILL of a worker, to the next committed step."""
    for name in NAMES:
        say(f"{item_ms} ms a sample, {loaders} loaders: {name}, {count} kills")
        job = LoadingJob(name, folder, 10**9, item_ms / 1e3, loaders, checkpoint=True)
        figures, step_s = kills_of(job, count, random.Random(seed))
        next_ms = spread(1e3 * figure.next_commit_s for figure in figures)
        report.row(
            {
                "SIGKILL -> next commit": name,
                "sample_ms": item_ms,
                "loaders": loaders,
                "kills": next_ms.count,
                "step_ms": 1e3 * step_s,
                "least_ms": next_ms.least,
                "median_ms": next_ms.median,
                "worst_ms": next_ms.worst,
            }
        )


def say(text: str) -> None:
    """Progress goes to standard error, so that standard output is the report alone."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--loaders", type=int, default=4, help="processes that load, of each worker")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and victims of the kills")
    parser.add_argument("--limit-s", type=int, default=3600, help="the most that the whole benchmark may take")
    args = parser.parse_args()
    report = Report(
        f"data: {WORKERS} workers, samples that are loaded ahead",
        notes=["loading and computing are emulated by sleeping; processes, messages and batches are real"],
    )
    pairs, steps, kills = (1, 140, 1) if args.quick else (6, 240, 10)
    failed = False
    limit_time(args.limit_s)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            for item_ms, loaders in ((4, args.loaders),) if args.quick else _cases(args.loaders):
                undisturbed(report, folder, item_ms, loaders, pairs, steps)
            for item_ms in (4,) if args.quick else (0, 4, 16):
                killed(report, folder, item_ms, args.loaders, kills, args.seed)
        except (JobFailed, TimeLimit) as error:
            failed = True
            report.notes.append(f"FAILED: {error}")
    signal.alarm(0)
    report.print()
    report.write(args.json)
    return 1 if failed else 0


def _cases(loaders: int) -> list[tuple[int, int]]:
    """Milliseconds of a sample, and processes that load."""
    return [(0, 0), *((item_ms, loaders) for item_ms in (0, 4, 16))]


if __name__ == "__main__":
    sys.exit(main())
