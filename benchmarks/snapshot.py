"""What copies of the optimizer's state in another worker's memory cost a step: with and without, in turn.

    python benchmarks/snapshot.py --quick
    python benchmarks/snapshot.py --json snapshot.json

*emulated*: the stages of benchmarks/pipeline.py, 4 of them with 2 replicas, each of which sends the gradient of its
shard (float32) to the one that copies it. How much of a step that takes is a ratio of bytes to compute. On the machines
of ElasWave's section 7 (Llama 2 34B, 8 stages of 4 devices, 3 replicas) a worker's shard of the gradient is 34e9 / 24 *
4 = 5.7 GB; at 100 GB/s between four devices and those of another node that is 57 ms of a step of 45 s, 0.13 %. Here 8
workers share the loopback interface and two cores, about 0.2 GB/s for each; so their layers have as many parameters as
make the same part of the emulated step (`--width`).

*real*: examples/train_gpt_hybrid.py, 2 stages with 2 replicas, where the copies' updates take the same cores as the
training.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.jobs import ELAUNCH, HERE, Job, JobFailed, TimeLimit, Training, limit_time
from benchmarks.pipeline import PROFILE, Case, EmulatedJob, replicated, say
from benchmarks.report import Report, add_arguments, spread
from elaunch.policy.profile import Profile

START_LIMIT_S = 300.0
MOST_LOSS = 0.005


class RealJob(Job):
    """The example, two stages with two replicas."""

    def __init__(self, snapshots: int, steps: int, folder: Path) -> None:
        super().__init__(f"real, {snapshots} copies", Training(4, 0.0, steps), folder)
        flags = ["--dp=2", "--pp=2", f"--steps={steps}", f"--snapshots={snapshots}", "--log-every=1000"]
        self._flags = [str(HERE.parent / "examples/train_gpt_hybrid.py"), *flags]

    def begin(self) -> None:
        workers = ["--standalone", "--nproc-per-node=4", "--max-restarts=0", "--events", str(self.log)]
        self._agent = self.processes.start([*ELAUNCH, *workers, *self._flags])

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._agent


def measure(make: Callable[[int], Job], warm_up: int, steps: int) -> tuple[list[float], float]:
    """Seconds of the steps after `warm_up` ones, and how many cores were busy meanwhile."""
    with make(warm_up + steps + 1) as job:
        job.wait(lambda: len(job.commits()) >= warm_up, f"{warm_up} steps", START_LIMIT_S)
        cpu_s = job.cpu_s()
        job.wait(lambda: len(job.commits()) >= warm_up + steps, "the other steps", START_LIMIT_S)
        cpu_s = job.cpu_s() - cpu_s
        times = [commit.t for commit in job.commits()[warm_up - 1 : warm_up + steps]]
    return [after - before for before, after in itertools.pairwise(times)], cpu_s / (times[-1] - times[0])


def compare(report: Report, name: str, make: Callable[[int, int], Job], pairs: int, warm_up: int, steps: int) -> float:
    """Run with and without, in turn and every other pair the other way round; the share of throughput that is lost."""
    medians: dict[int, list[float]] = {0: [], 1: []}
    for pair in range(pairs):
        for snapshots in (0, 1) if pair % 2 == 0 else (1, 0):
            say(f"{name}: {snapshots} copies, run {pair + 1}")
            seconds, cores = measure(lambda total, s=snapshots: make(s, total), warm_up, steps)  # type: ignore[misc]
            medians[snapshots].append(statistics.median(seconds))
            found = spread(seconds)
            report.row(
                {
                    "compute": name,
                    "copies": snapshots,
                    "run": pair + 1,
                    "steps": found.count,
                    "median_s": found.median,
                    "least_s": found.least,
                    "worst_s": found.worst,
                    "cores_busy": cores,
                }
            )
    losses = [1 - without / with_ for without, with_ in zip(medians[0], medians[1], strict=True)]
    lost = spread(losses)
    report.notes.append(
        f"{name}: throughput lost in the {lost.count} pairs of runs: {100 * lost.least:.2f} % to "
        f"{100 * lost.worst:.2f} %, median {100 * lost.median:.2f} %"
    )
    return lost.median


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", choices=("emulated", "real"), help="one kind of compute instead of both")
    parser.add_argument("--pairs", type=int, help="runs with and without copies (default 4, quick 1)")
    parser.add_argument("--steps", type=int, help="steps of a run that count (default 12, quick 3)")
    parser.add_argument("--width", type=int, default=128, help="features of the emulated layers")
    parser.add_argument("--time-scale", type=float, help="factor on the profile's seconds (default 0.2, quick 0.1)")
    parser.add_argument("--limit-s", type=int, default=1800, help="the most that the whole benchmark may take")
    args = parser.parse_args()
    for name, quick, full in (("pairs", 1, 4), ("steps", 3, 12), ("time_scale", 0.1, 0.2)):
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    profile = Profile.load(PROFILE)
    case = Case("PP 4 x DP 2", replicated(len(profile.layers), 4, 2, 12))
    shard_kb = len(profile.layers) / 4 * args.width**2 / 2 * 4 / 1e3
    report = Report(
        "snapshots: steps with and without copies of the optimizer's state",
        notes=[
            f"emulated: {case.name}, 8 workers, {args.time_scale:g} times the derived profile of {profile.name}; each "
            f"sends {shard_kb:.0f} kB of gradient in a step to the one that copies its state",
            "real: examples/train_gpt_hybrid.py, DP 2 x PP 2; all workers share this machine's cores",
        ],
    )
    limit_time(args.limit_s)
    failed = False
    with tempfile.TemporaryDirectory(prefix="snapshot-") as name:
        folder = Path(name)

        def emulated(snapshots: int, total: int) -> Job:
            flags = [f"--time-scale={args.time_scale}", f"--width={args.width}", f"--snapshots={snapshots}"]
            return EmulatedJob("elaunch", case, folder, flags, total)

        try:
            if args.only != "real":
                lost = compare(report, "emulated", emulated, args.pairs, 3, args.steps)
                report.target("throughput lost, emulated compute", 100 * lost, "%", below=100 * MOST_LOSS)
            if args.only != "emulated":
                compare(report, "real", lambda s, total: RealJob(s, total, folder), args.pairs, 20, 10 * args.steps)
        except (JobFailed, TimeLimit) as error:
            failed = True
            report.notes.append(f"FAILED: {error}")
        signal.alarm(0)
    report.print()
    report.write(args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
