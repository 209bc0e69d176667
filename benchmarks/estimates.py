"""Estimates of plans that a job has not run yet, from the profile that it measured under another plan.

    python benchmarks/estimates.py                     # about 25 minutes
    python benchmarks/estimates.py --only slow,gpt     # some of its jobs

Each job begins under one plan. What it measured there, as `elaunch ctl profile --json` prints it, prices other plans;
then the job is asked to go over to each of them, and its steps are timed. Nothing is fitted to these.

Compute of the first four jobs is emulated (benchmarks/emulation.py): layers sleep, all else is real. In the last two
it is that of `examples/train_gpt_hybrid.py`, by two workers, since this machine has two cores. What others have
published is compared in benchmarks/published_times.py.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster import machine_cpu_s
from benchmarks.jobs import ELAUNCH, HERE, Job, JobFailed, TimeLimit, Training, ask_job, limit_time
from benchmarks.pipeline import cut, say
from benchmarks.report import Report, add_arguments
from elaunch.plan import Pipeline, Plan, pipelines, share, symmetric
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import Profile
from elaunch.rendezvous.embedded import EmbeddedEtcd

SETTLE = 3
"""Steps after a change that do not count."""

GROWING = (8, 15, 21, 26, 30, 33, 35, 36)
"""Where stages end, of 36 parts of the layers."""

START_LIMIT_S = 240.0
STEP_LIMIT_S = 60.0
MEASURED_STEPS = 24
MEASURED_S = 15.0
"""So much of the first plan is run before its profile is taken: figures are stable by then, and told again."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A job: its script with flags, the plan that it is measured under, and the plans that are estimated."""

    name: str
    script: Path
    flags: tuple[str, ...]
    first: str
    plans: dict[str, Plan]

    @property
    def workers(self) -> int:
        return len(self.plans[self.first].workers)


def names(n: int) -> list[str]:
    return [f"n0/{number}#0" for number in range(n)]


def of_depths(n_layers: int, batch: int, micro_batch: int, depths: Sequence[int], parts: Sequence[int]) -> Plan:
    """Pipelines of these depths, of which each does a part of the micro-batches in proportion to `parts`."""
    units = batch // micro_batch
    ends = [round(units * end / sum(parts)) for end in itertools.accumulate(parts, initial=0)]
    workers = iter(names(sum(depths)))
    made = [
        Pipeline(range(start, stop), tuple((layers, (next(workers),)) for layers in cut(n_layers - 2, depth)))
        for depth, (start, stop) in zip(depths, itertools.pairwise(ends), strict=True)
    ]
    return pipelines(n_layers, batch, micro_batch, made)


def unequal(n_layers: int, batch: int, micro_batch: int, bounds: Sequence[int]) -> Plan:
    """One pipeline whose stages end at these layers."""
    stages = tuple(
        (range(start, stop), (worker,))
        for (start, stop), worker in zip(itertools.pairwise([0, *bounds]), names(len(bounds)), strict=True)
    )
    return pipelines(n_layers, batch, micro_batch, [Pipeline(share(batch // micro_batch, 1, 0), stages)])


def emulated(name: str, file: str, time_scale: float, micro_batch: int, units: int, first: str) -> Case:
    """Eight workers, `units` micro-batches in all."""
    n_layers, batch = len(Profile.load(HERE / "profiles" / file).layers), micro_batch * units
    sizes = n_layers, batch, micro_batch

    def even(dp: int, pp: int) -> Plan:
        depth = [pp] * dp
        return of_depths(*sizes, depth, [1] * dp)

    plans = {
        "PP 8": even(1, 8),
        "PP 4 x DP 2": even(2, 4),
        "PP 2 x DP 4": even(4, 2),
        "DP 8": even(8, 1),
        "pipelines of 5 and 3 stages": of_depths(*sizes, [5, 3], [5, 3]),
        "PP 8, first stages longer": unequal(
            *sizes, [round(n_layers * part / 36) for part in (8, 15, 21, 26, 30, 33, 35, 36)]
        ),
    }
    flags = (f"--profile={HERE / 'profiles' / file}", f"--time-scale={time_scale}", "--row-bytes=4096", "--snapshots=0")
    return Case(name, HERE / "emulation.py", flags, first, plans)


def gpt(name: str, blocks: int, width: int, first: str) -> Case:
    """Two workers that compute, 16 micro-batches of 4 samples."""
    n_layers, batch, micro_batch = blocks + 2, 64, 4
    flags = (
        *[
            f"--layers={blocks}",
            f"--width={width}",
            f"--global-batch-size={batch}",
            f"--micro-batch-size={micro_batch}",
        ],
        *["--steps=1000000", "--snapshots=0", "--log-every=1000", "--corpus-bytes=200000"],
    )
    plans = {
        "PP 2": of_depths(n_layers, batch, micro_batch, [2], [1]),
        "DP 2": of_depths(n_layers, batch, micro_batch, [1, 1], [1, 1]),
        "PP 2, a quarter and three quarters": unequal(n_layers, batch, micro_batch, [1 + blocks // 4, n_layers]),
        "DP 2, micro-batches 5 to 3": of_depths(n_layers, batch, micro_batch, [1, 1], [5, 3]),
        "TP 2": symmetric(names(2), n_layers, batch, micro_batch, tp=2),
    }
    script = HERE.parent / "examples" / "train_gpt_hybrid.py"
    return Case(name, script, flags, first, plans)


def cases() -> dict[str, Case]:
    """By the word that --only takes."""
    return {
        "slow": emulated("34B, blocks of 10 and 15 ms", "llama2-34b.json", 1.0, 1, 24, "PP 8"),
        "long": emulated("34B, blocks of 2 and 3 ms", "llama2-34b.json", 0.2, 1, 24, "PP 8"),
        "short": emulated("34B, blocks of 0.5 and 0.9 ms", "llama2-34b.json", 0.05, 1, 24, "PP 8"),
        "replicas": emulated("7B, micro-batches of 4", "llama2-7b.json", 0.2, 4, 32, "PP 4 x DP 2"),
        "gpt": gpt("GPT of 8 blocks, width 256", 8, 256, "PP 2"),
        "wide": gpt("GPT of 4 blocks, width 512", 4, 512, "PP 2"),
    }


class PlannedJob(Job):
    """A job of one agent that is asked for one plan after the other."""

    def __init__(self, case: Case, folder: Path) -> None:
        super().__init__(case.name, Training(case.workers, 0.0), folder)
        self._case, self._plan = case, folder / f"{self.log.stem}.plan"
        self._plan.write_text(f"{case.plans[case.first]}\n")
        self._etcd = EmbeddedEtcd(str(folder / f"{self.log.stem}.etcd"))

    def begin(self) -> None:
        self._etcd.start()
        self._agent = self.processes.start(
            [
                *[*ELAUNCH, "--nnodes=1", f"--nproc-per-node={self._case.workers}", "--max-restarts=0"],
                *[f"--rdzv-endpoint={self._etcd.endpoint}", "--rdzv-id=estimates", "--node-name=n0"],
                # The job changes plans when it is asked to alone.
                *["--policy=reroute", "--slow-policy=report", "--events", str(self.log)],
                *[str(self._case.script), f"--plan={self._plan}", *self._case.flags],
            ]
        )

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[arg-type]
        self._etcd.stop()

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._agent

    def ctl(self, *words: str) -> str:
        """Runs `elaunch ctl` for this job and returns what it prints."""
        told = f"{self.name}: elaunch ctl {' '.join(words)}"
        return ask_job(*words, job="estimates", endpoint=self._etcd.endpoint, limit_s=STEP_LIMIT_S, failed=told)

    def profile(self) -> Profile:
        """Returns what the job has measured once it has run for some steps."""
        began = time.monotonic()
        first = len(self.commits())
        self.wait(lambda: len(self.commits()) >= first + MEASURED_STEPS, "measured steps", START_LIMIT_S)
        self.wait(lambda: time.monotonic() > began + MEASURED_S, "stable figures", START_LIMIT_S)
        return Profile.from_json(self.ctl("profile", "--json"))

    def ask(self, plan: Plan) -> None:
        """Has the job go over to a plan."""
        self._plan.write_text(f"{plan}\n")
        self.ctl("plan", "--set", str(self._plan))

    def steps_s(self, count: int) -> tuple[list[float], float]:
        """Returns seconds of `count` steps from now on, without SETTLE ones, and the cores that were busy."""
        self.read()
        first = len(self.commits()) + SETTLE
        limit_s = (count + SETTLE) * STEP_LIMIT_S
        self.wait(lambda: len(self.commits()) > first, "steps to settle", limit_s)
        busy_s, began_s = machine_cpu_s(), time.monotonic()
        self.wait(lambda: len(self.commits()) > first + count, f"{count} steps", limit_s)
        cores = (machine_cpu_s() - busy_s) / (time.monotonic() - began_s)
        times = [commit.t for commit in self.commits()[first : first + count + 1]]
        return [after - before for before, after in itertools.pairwise(times)], cores


class Bench:
    """Runs the jobs and fills the report."""

    def __init__(self, steps: int, folder: Path, report: Report) -> None:
        self.steps, self.folder, self.report = steps, folder, report
        self.errors: list[tuple[float, str, bool]] = []

    def run(self, case: Case, real: bool) -> None:
        """Measures a job under its first plan, then under the others."""
        with PlannedJob(case, self.folder) as job:
            job.wait(lambda: len(job.commits()) > 1, "the first steps", START_LIMIT_S)
            profile = job.profile()
            for text in profile.contradictions:
                say(f"  contradiction: {text}")
            say(
                f"  {case.name}: action {profile.action_s:.2g} s, send {profile.send_s:.2g}, hop {profile.hop_s:.2g}, "
                f"step {profile.step_s:.2g}, row {profile.load_s_per_row:.2g}"
            )
            self._row(case, case.first, profile, *job.steps_s(self.steps), real, seen=True)
            for name, plan in case.plans.items():
                if name != case.first:
                    job.ask(plan)
                    self._row(case, name, profile, *job.steps_s(self.steps), real, seen=False)

    def _row(
        self, case: Case, name: str, profile: Profile, steps_s: list[float], cores: float, real: bool, seen: bool
    ) -> None:
        median_s, plan = statistics.median(steps_s), case.plans[name]
        estimate_s = estimate_step(plan, profile).step_s
        bare = dataclasses.replace(profile, action_s=0.0, send_s=0.0, load_s_per_row=0.0, hop_s=0.0, step_s=0.0)
        error = estimate_s / median_s - 1
        if not seen:
            self.errors.append((error, f"{case.name}: {name}", real))
        say(f"  {name}: measured {median_s:.3f} s, estimated {estimate_s:.3f} s, {100 * error:+.1f} %")
        self.report.row(
            {
                "job": case.name,
                "plan": name,
                "seen": "measured here" if seen else "never",
                "step_s": median_s,
                "least_s": min(steps_s),
                "worst_s": max(steps_s),
                "estimate_s": estimate_s,
                "error_pct": 100 * error,
                "layers_alone_pct": 100 * (estimate_step(plan, bare).step_s / median_s - 1),
                "cores_busy": cores,
            }
        )

    def targets(self) -> None:
        """Adds the targets for plans that were never seen."""
        for what, some in (
            ("emulated", [one for one in self.errors if not one[2]]),
            ("computed", [one for one in self.errors if one[2]]),
        ):
            if some:
                mean = statistics.fmean(abs(error) for error, _, _ in some)
                worst, where, _ = max(some, key=lambda one: abs(one[0]))
                self.report.target(f"{what}: error of {len(some)} plans never seen, mean", 100 * mean, "%", at_most=3)
                self.report.target(f"{what}: worst", 100 * abs(worst), "%", at_most=8)
                self.report.notes.append(f"{what}: the worst, {100 * worst:+.1f} %, is {where}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    known = cases()
    parser.add_argument("--only", default="", metavar="JOB,…", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--steps", type=int, default=7, help="that count, under each plan")
    parser.add_argument("--limit-s", type=int, default=3600, help="the most that the whole benchmark may take")
    args = parser.parse_args()
    wanted = [name for name in args.only.split(",") if name] or (["short"] if args.quick else list(known))
    report = Report(
        "estimates of plans that were never run",
        notes=[
            "step_s: median from commit to commit; layers_alone: the estimate without what is measured beside layers",
            "cores_busy: of the whole machine, meanwhile; near its number of cores it held the job up",
        ],
    )
    limit_time(args.limit_s)
    failed = False
    with tempfile.TemporaryDirectory(prefix="estimates-") as folder:
        bench = Bench(args.steps, Path(folder), report)
        try:
            for name in wanted:
                bench.run(known[name], real=name in ("gpt", "wide"))
        except (JobFailed, TimeLimit) as error:
            failed = True
            report.notes.append(f"FAILED: {error}")
        signal.alarm(0)
        bench.targets()
    report.print()
    report.write(args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
