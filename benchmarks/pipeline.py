"""Step time of the hybrid engine against the critical path of its schedule, and beside torch.distributed.pipelining.

    python benchmarks/pipeline.py --quick
    python benchmarks/pipeline.py --json pipeline.json

Compute is emulated (benchmarks/emulation.py) by the derived profile of Llama 2 34B (benchmarks/profiles/README.md), in
the configuration of ElasWave's table 2: 8 stages, micro-batches of 1 sample, up to 3 replicas; a worker stands for four
tensor-parallel devices. The global batch is smaller. The critical path is `timeline` of the schedule with the profile's
times for layers and none for messages.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.jobs import ELAUNCH, HERE, TORCHRUN, Job, JobFailed, TimeLimit, Training, limit_time
from benchmarks.report import Report, add_arguments, spread
from elaunch.plan import Pipeline, Plan, Stage, pipelines, share, stages
from elaunch.plan.schedule import schedule
from elaunch.plan.timeline import timeline
from elaunch.policy.profile import Profile, action_s

PROFILE = HERE / "profiles" / "llama2-34b.json"
MICRO_BATCH = 1
DEPTH = 8  # stages
REPLICAS = 3
NOISE = 0.01
"""Of a ratio between two systems: what is closer than this is not told apart."""

OF_CRITICAL_PATH = 1.05
"""What a step may take, beside a schedule in which only layers take time."""

START_LIMIT_S = 600.0
STEP_LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan to run; `with_torch`: under torch.distributed.pipelining, too."""

    name: str
    plan: Plan
    with_torch: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """Seconds of each measured step of one job, and how many processor cores it kept busy meanwhile."""

    steps_s: Sequence[float]
    cores: float


def cut(n_blocks: int, depth: int) -> list[range]:
    """The layers of each stage: blocks shared evenly; the embedding is in the first stage, the head in the last."""
    blocks = [share(n_blocks, depth, stage) for stage in range(depth)]
    bounds = [0, *(1 + one.stop for one in blocks)]
    bounds[-1] += 1
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def replicated(n_layers: int, depth: int, replicas: int, units: int, lost_in: int | None = None) -> Plan:
    """Stages with `replicas` replicas, each with `units` micro-batches; stage `lost_in` has lost its last one."""
    found = []
    for stage, layers in enumerate(cut(n_layers - 2, depth)):
        tp_groups = [(f"s{stage}r{replica}",) for replica in range(replicas)]
        found.append(Stage(layers, (*tp_groups[:-1], ()) if stage == lost_in else tuple(tp_groups)))
    return stages(n_layers, replicas * units * MICRO_BATCH, MICRO_BATCH, found)


def of_depths(n_layers: int, depths: Sequence[int], units: int) -> Plan:
    """Pipelines of different depth; each has a part of the micro-batches like its part of the workers."""
    ends = [round(units * len(depths) * some / sum(depths)) for some in accumulate(depths)]
    found = [
        Pipeline(
            range(start, stop),
            tuple((layers, (f"p{number}s{stage}",)) for stage, layers in enumerate(cut(n_layers - 2, depth))),
        )
        for number, (depth, (start, stop)) in enumerate(zip(depths, itertools.pairwise([0, *ends])))
    ]
    return pipelines(n_layers, units * len(depths) * MICRO_BATCH, MICRO_BATCH, found)


def cases(n_layers: int, units: int, quick: bool) -> list[Case]:
    """What is run, with `units` micro-batches in a step for each replica of the model."""
    found = [Case(f"PP {DEPTH}", replicated(n_layers, DEPTH, 1, units), with_torch=True)]
    if quick:
        lost = replicated(n_layers, 2, 2, max(2, units // 4), lost_in=1)
        return [*found, Case("PP 2 x DP 2, one worker lost", lost)]
    found += [
        Case(f"PP {DEPTH} x DP {replicas}", replicated(n_layers, DEPTH, replicas, units))
        for replicas in range(2, REPLICAS + 1)
    ]
    lost = replicated(n_layers, DEPTH, REPLICAS, units, lost_in=DEPTH // 2)
    found.append(Case(f"PP {DEPTH} x DP {REPLICAS}, one worker lost", lost))
    depths = [DEPTH, DEPTH - 1, DEPTH - 2]
    found.append(Case(f"pipelines of {', '.join(map(str, depths))} stages", of_depths(n_layers, depths, units)))
    return found


class EmulatedJob(Job):
    """A plan with emulated compute under `launcher`, elaunch or torchrun."""

    def __init__(self, launcher: str, case: Case, folder: Path, flags: Sequence[str], steps: int | None = None) -> None:
        super().__init__(f"{case.name} under {launcher}", Training(len(case.plan.workers), 0.0), folder)
        self._launcher = launcher
        plan = folder / "plan"
        plan.write_text(f"{case.plan}\n")
        limit = [] if steps is None else [f"--steps={steps}"]
        self._flags = [f"--profile={PROFILE}", f"--plan={plan}", *limit, *flags]

    def begin(self) -> None:
        workers = ["--standalone", f"--nproc-per-node={self.training.workers}", "--max-restarts=0"]
        if self._launcher == "elaunch":
            command = [*ELAUNCH, *workers, "--events", str(self.log), str(HERE / "emulation.py"), *self._flags]
        else:
            script = str(HERE / "peers/torch_pipelining.py")
            command = [*TORCHRUN, *workers, script, f"--commits={self.log}", *self._flags]
        self._agent = self.processes.start(command)

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._agent


class Bench:
    """Runs the cases and fills the report."""

    def __init__(self, args: argparse.Namespace, folder: Path, report: Report) -> None:
        self.args, self.folder, self.report = args, folder, report
        self.profile = Profile.load(PROFILE).scaled(args.time_scale)

    def run(self, case: Case) -> None:
        """Run a case, in turn with torch if it is compared, and add its rows and targets."""
        launchers = ["elaunch", "torchrun"] if case.with_torch else ["elaunch"]
        found: dict[str, list[Run]] = {launcher: [] for launcher in launchers}
        for number in range(self.args.pairs if case.with_torch else self.args.runs):
            for launcher in launchers:
                say(f"{case.name}: {launcher}, run {number + 1}")
                found[launcher].append(self._measure(launcher, case))
        priced = timeline(case.plan, schedule(case.plan), action_s(self.profile, case.plan))
        for launcher, runs in found.items():
            steps = spread(seconds for run in runs for seconds in run.steps_s)
            medians = spread(statistics.median(run.steps_s) for run in runs)
            self.report.row(
                {
                    "plan": case.name,
                    "engine": "elaunch" if launcher == "elaunch" else "torch Schedule1F1B",
                    "workers": len(case.plan.workers),
                    "runs": medians.count,
                    "steps": steps.count,
                    "critical_path_s": priced.step_s,
                    "bubble": priced.bubble,
                    "median_s": steps.median,
                    "least_s": steps.least,
                    "worst_s": steps.worst,
                    "of_critical_path": steps.median / priced.step_s,
                    "cores_busy": spread(run.cores for run in runs).median,
                }
            )
            if launcher == "elaunch":
                ratio = steps.median / priced.step_s
                self.report.target(f"step, {case.name}", ratio, "x critical path", at_most=OF_CRITICAL_PATH)
        if case.with_torch:
            self._compare(case, found["elaunch"], found["torchrun"])

    def _measure(self, launcher: str, case: Case) -> Run:
        warm_up, steps = self.args.warm_up, self.args.steps
        flags = [f"--time-scale={self.args.time_scale}", f"--row-bytes={self.args.row_bytes}"]
        with EmulatedJob(launcher, case, self.folder, flags) as job:
            job.wait(lambda: len(job.commits()) >= warm_up, f"{warm_up} steps", START_LIMIT_S)
            settled = time.monotonic() + (self.args.settle_s if launcher == "elaunch" else 0.0)
            job.wait(lambda: time.monotonic() >= settled, "imports for replacements", START_LIMIT_S)
            first, cpu_s = len(job.commits()), job.cpu_s()
            job.wait(lambda: len(job.commits()) >= first + steps, "the other steps", steps * STEP_LIMIT_S)
            cpu_s = job.cpu_s() - cpu_s
            times = [commit.t for commit in job.commits()[first - 1 : first + steps]]
        return Run([after - before for before, after in itertools.pairwise(times)], cpu_s / (times[-1] - times[0]))

    def _compare(self, case: Case, elaunch: Sequence[Run], torch: Sequence[Run]) -> None:
        """The median over the pairs of neighbouring runs, and their spread."""
        ratios = spread(statistics.median(a.steps_s) / statistics.median(b.steps_s) for a, b in zip(elaunch, torch))
        self.report.target(f"step, {case.name}", ratios.median, "x torch Schedule1F1B", at_most=1 + NOISE)
        self.report.notes.append(
            f"{case.name}: elaunch to torch in the {ratios.count} neighbouring pairs of runs: {ratios.least:.4f} to "
            f"{ratios.worst:.4f}, median {ratios.median:.4f}; asked is at most {1 + NOISE}"
        )


def say(text: str) -> None:
    """Progress goes to standard error, so that standard output is the report alone."""
    print(text, file=sys.stderr, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", type=int, metavar="N", help="the N-th case alone, from 1")
    parser.add_argument("--pairs", type=int, help="runs of elaunch and torch, in turn (default 3, quick 1)")
    parser.add_argument("--runs", type=int, default=1, help="runs of each other case")
    parser.add_argument("--warm-up", type=int, help="steps of a run that are not counted (default 2, quick 1)")
    parser.add_argument(
        "--settle-s",
        type=float,
        default=12.0,
        help="seconds after these in which elaunch imports torch for replacements, on the cores of the job, that are "
        "not counted either",
    )
    parser.add_argument("--steps", type=int, default=5, help="steps of a run that are")
    parser.add_argument("--micro-batches", type=int, help="per replica and step (default 32, quick 12)")
    parser.add_argument("--time-scale", type=float, help="factor on the profile's seconds (default 1, quick 0.2)")
    parser.add_argument("--row-bytes", type=int, default=64 << 10, help="bytes of an activation row")
    parser.add_argument("--limit-s", type=int, default=3600, help="the most that the whole benchmark may take")
    args = parser.parse_args()
    quick, full = (1, 1, 12, 0.2), (3, 2, 32, 1.0)
    for name, value in zip(("pairs", "warm_up", "micro_batches", "time_scale"), quick if args.quick else full):
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


def main() -> int:
    args = _parse()
    profile = Profile.load(PROFILE)
    block = profile.layers[1].scaled(args.time_scale)
    report = Report(
        f"pipeline: {profile.name} in {DEPTH} stages, {args.micro_batches} micro-batches for each replica",
        notes=[
            f"compute is emulated: a block sleeps {1e3 * block.forward_s(1):.2f} ms forward and "
            f"{1e3 * block.backward_s(1):.2f} ms backward, {args.time_scale:g} times its derived profile "
            "(benchmarks/profiles/README.md), less the small computation that it really does; an activation row is "
            f"{args.row_bytes} bytes instead of {profile.layers[1].output_bytes_per_row}, parameters are small as well",
            "processes, launchers, messages, schedules, gradients, their reduction and the optimizer are real; all on "
            "this one machine, so cores_busy near its number of cores says that the machine held the emulation up",
            "critical path: the schedule played through with the profile's times, messages and all else free; it has "
            "the bubble of 1F1B",
            "torch: Schedule1F1B of torch.distributed.pipelining over Gloo under torchrun, with the same modules, "
            "stages and micro-batches; AdamW on each stage. Runs in turn. elaunch sums gradients bitwise reproducibly "
            "and passes a commit barrier in each step, torch does neither",
            "after its first steps elaunch imports torch for replacements, at a quarter of a core: "
            f"{args.settle_s:g} s of its steps are left out for that",
            "a run is a new job; a step lasts from commit to commit on the worker of rank 0 (first stage)",
        ],
    )

    limit_time(args.limit_s)
    failed = False
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        bench = Bench(args, Path(folder), report)
        wanted = cases(len(profile.layers), args.micro_batches, args.quick)
        for case in wanted if args.only is None else wanted[args.only - 1 : args.only]:
            try:
                bench.run(case)
            except JobFailed as error:
                failed = True
                report.notes.append(f"FAILED: {error}")
            except TimeLimit as error:
                failed = True
                report.notes.append(str(error))
                break
        signal.alarm(0)
    report.print()
    report.write(args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
