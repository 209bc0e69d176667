"""Throughput after losing 1, 2 and 3 nodes under each policy; how exact estimates are; what a slow worker costs.

    python benchmarks/policies.py --quick
    python benchmarks/policies.py --json policies.json

The cluster of ElasWave's section 7: 12 nodes of 8 devices, a worker stands for four tensor-parallel devices, so a node
has 2 workers; Llama 2 7B, 13B and 34B in the configurations of its table 2 with a smaller global batch. Compute is
emulated (benchmarks/emulation.py) by derived profiles (benchmarks/profiles/README.md). A node is an agent; a node is
lost by SIGKILL to the agent and its workers. In one job nodes are lost one after the other, the same ones under each
policy.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster import MODELS, NODES, PER_NODE, SETTLE, SMALL, STEP_LIMIT_S, Case, ClusterJob, Window
from benchmarks.emulation import Slow
from benchmarks.jobs import JobFailed, TimeLimit, limit_time
from benchmarks.pipeline import say
from benchmarks.report import Report, add_arguments, spread
from elaunch.plan import Plan
from elaunch.policy.candidates.reparallelize import reparallelized
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import Profile, WorkerProfile
from elaunch.rendezvous.membership import slot_of
from elaunch.simulator.baselines import depths_of, drop_replica, template_switch

MOST_LOST = 3
POLICIES = ("auto", "reroute", "resize", "reparallelize")
BASELINES = ("drop-replica", "template switch")

NORMALISED = {"low": 0.931, "medium": 0.865, "high": 0.809}
"""Throughput with a slow worker and nothing done about it, of that without (ElasWave fig. 15a)."""

WARM_UP = 6
"""Steps before the first that counts: one warms up, the next ones measure the profile (see `selector`)."""

START_LIMIT_S = 300.0


@dataclasses.dataclass
class Losses:
    """What was measured of a case, by policy or baseline, and by the number of nodes lost."""

    before: dict[str, Window] = dataclasses.field(default_factory=dict)
    after: dict[tuple[str, int], Window] = dataclasses.field(default_factory=dict)

    def rate(self, name: str, number: int) -> float:
        """Steps per second after the loss, the same job before it in each case; NaN if it was not measured."""
        found = self.after.get((name, number))
        return math.nan if found is None else 1 / found.step_s


class Bench:
    """Runs the jobs and fills the report."""

    def __init__(self, args: argparse.Namespace, folder: Path, report: Report) -> None:
        self.args, self.folder, self.report = args, folder, report
        self.errors: list[tuple[float, str]] = []
        self.failed = False

    # -- lost nodes -------------------------------------------------------------------------------------------------

    def losses(self, case: Case) -> None:
        """Lose the nodes of a case under each policy and by each baseline; add rows and targets."""
        found = Losses()
        try:
            for policy in self._policies(case):
                say(f"{case.name}: --policy={policy}")
                self._try(lambda: self._under(case, policy, found))  # noqa: B023
            say(f"{case.name}: baselines")
            self._try(lambda: self._baselines(case, found))
        finally:
            self._table(case, found)
            self._targets(case, found)

    def _policies(self, case: Case) -> list[str]:
        """Those that are measured; of the other placement, the two that are compared there."""
        asked: list[str] = self.args.policies
        return asked if case.placement == "pipelines" else [name for name in asked if name in ("auto", "reroute")]

    def _try(self, job: Callable[[], None]) -> None:
        """A job that fails is no reason not to run the others."""
        try:
            job()
        except (JobFailed, subprocess.TimeoutExpired) as error:
            self.failed = True
            self.report.notes.append(f"FAILED: {error}")

    def _under(self, case: Case, policy: str, found: Losses) -> None:
        profile = case.model.profile(self.args.time_scale)
        with ClusterJob(case, policy, case.plan(profile), self.args, self.folder) as job:
            found.before[policy] = self._first(job)
            for number, node in enumerate(case.lose(), 1):
                after = len(job.commits())
                job.lose(node)
                found.after[policy, number] = self._window(job, after)
                self._check(f"{case.name}, --policy={policy}", found.after[policy, number])

    def _check(self, what: str, window: Window) -> None:
        """Note an estimate, if there is one."""
        what = f"{what}, {window.members} workers: {window.policy}"
        say(f"  {what}: measured {window.step_s:.3f} s, {window.cores:.2f} of {window.machine_cores:.2f} cores")
        if not math.isnan(window.error):
            self.errors.append((window.error, what))
            say(f"    estimated {window.estimate_s:.3f} s, {100 * window.error:+.1f} %")

    def _baselines(self, case: Case, found: Losses) -> None:
        """Their plans are asked for in one job."""
        profile = case.model.profile(self.args.time_scale)
        given = case.plan(profile)
        depths = depths_of(case.model.pp)
        with ClusterJob(case, "reroute", given, self.args, self.folder) as job:
            before = self._first(job)
            found.before |= dict.fromkeys(BASELINES, before)
            for number, node in enumerate(case.lose(), 1):
                after = len(job.commits())
                job.lose(node)
                job.wait_members(after)
                members = job.members()
                plans: dict[str, Callable[[], Plan]] = {
                    "drop-replica": partial(drop_replica, given, members),
                    "template switch": partial(template_switch, given, members, profile, depths),
                }
                for name, make in plans.items():
                    try:
                        plan = make()
                    except NotPossible as error:
                        self.report.notes.append(f"{case.name}, {number} lost, {name}: {error}")
                        continue
                    after = len(job.commits())
                    job.ask(plan)
                    found.after[name, number] = self._window(job, after)
                    say(f"  {name}, {number} lost: {found.after[name, number].step_s:.3f} s")

    def _first(self, job: ClusterJob) -> Window:
        """Before anything happens."""
        found = self._window(job, WARM_UP - SETTLE, START_LIMIT_S)
        if job.members() != list(job.plan.workers):
            raise JobFailed(f"{job.name}: the agents came in another order than they were started in")
        return found

    def _window(self, job: ClusterJob, after: int, start_s: float = 0.0) -> Window:
        steps = self.args.steps
        return job.window(after, steps, start_s + (steps + after + 2 * SETTLE) * STEP_LIMIT_S)

    def _table(self, case: Case, found: Losses) -> None:
        profile = case.model.profile(self.args.time_scale)
        batch = case.plan(profile).global_batch_size
        for number in range(1, case.lost + 1):
            for name in [*self.args.policies, *BASELINES]:
                if (name, number) not in found.after:
                    continue
                window, base = found.after[name, number], found.before[name]
                steps = spread(window.steps_s)
                assert window.decision is not None
                priced = estimate_step(Plan.parse(window.decision["plan"]), profile)
                self.report.row(
                    {
                        "model": case.name,
                        "lost": number,
                        "policy": name,
                        "chosen": "-" if name in BASELINES else window.policy,
                        "before_s": base.step_s,
                        "step_s": steps.median,
                        "least_s": steps.least,
                        "worst_s": steps.worst,
                        "samples_per_s": batch / steps.median,
                        "lse": efficiency(base, window),
                        "estimate_error_pct": 100 * window.error,
                        "of_critical_path": steps.median / priced.step_s,
                        "cores_busy": max(base.cores, window.cores),
                        "machine_busy": max(base.machine_cores, window.machine_cores),
                    }
                )

    def _targets(self, case: Case, found: Losses) -> None:
        for number in range(1, case.lost + 1):
            if ("auto", number) not in found.after:
                continue
            what = f"{case.name}, {number} lost"
            lse = efficiency(found.before["auto"], found.after["auto", number])
            self.report.target(f"{what}: auto", lse, "LSE", at_least=0.95)
            pinned = [found.rate(name, number) for name in self.args.policies if name != "auto"]
            if pinned and not any(map(math.isnan, pinned)):
                ratio = found.rate("auto", number) / max(pinned)
                self.report.target(f"{what}: auto", ratio, "x best pinned policy", at_least=0.98)
            if case.model.name == "34B" and number == 1:
                for name, at_least in (("drop-replica", 1.6), ("reroute", 1.35)):
                    ratio = found.rate("auto", number) / found.rate(name, number)
                    self.report.target(f"{what}: auto", ratio, f"x {name}", at_least=at_least)

    def estimates(self) -> None:
        """Add the targets for all estimates that were checked."""
        if not self.errors:
            return
        mean = statistics.fmean(abs(error) for error, _ in self.errors)
        worst, what = max(self.errors, key=lambda one: abs(one[0]))
        self.report.target(f"error of {len(self.errors)} estimates, mean", 100 * mean, "%", at_most=5)
        self.report.target("the same, worst", 100 * abs(worst), "%", at_most=10)
        bias = statistics.fmean(error for error, _ in self.errors)
        self.report.notes.append(
            f"estimates: on average {100 * bias:+.1f} % with its sign; the worst, {100 * worst:+.1f} %: {what}"
        )

    # -- a slow worker ----------------------------------------------------------------------------------------------

    def slow(self, case: Case) -> None:
        """Slow a worker down, by each level in a job of its own, under reroute and auto."""
        profile = case.model.profile(self.args.time_scale)
        plan = case.plan(profile)
        slow = plan.workers[case.model.pp // 2]  # a middle stage of the first pipeline
        best_s = estimate_step(reparallelized(plan, plan.workers, profile), profile).step_s
        best_s /= estimate_step(plan, profile).step_s
        for level in self.args.levels:
            factor = slow_factor(plan, slow, profile, NORMALISED[level])
            found: dict[str, list[Window]] = {}
            for policy in ("reroute", "auto"):
                say(f"{case.name}: slow worker, {level}, {factor:g} times as long, --policy={policy}")
                self._try(lambda: found.update({policy: self._slowed(case, policy, slow, factor)}))  # noqa: B023
            if len(found) < 2:
                continue
            (healthy, ill), (well, mended) = found["reroute"], found["auto"]
            slowed, back = healthy.step_s / ill.step_s, well.step_s / mended.step_s
            recovered = (back - slowed) / (1 - slowed)
            self.report.row(
                {
                    "model": case.name,
                    "slow worker": level,
                    "seconds_x": factor,
                    "healthy_s": healthy.step_s,
                    "slow_s": ill.step_s,
                    "slow_of_healthy": slowed,
                    "chosen": mended.policy,
                    "auto_s": mended.step_s,
                    "auto_of_healthy": back,
                    "recovered_pct": 100 * recovered,
                    "of_best_plan_pct": 100 * (back - slowed) / (max(1.0, 1 / best_s) - slowed),
                    "cores_busy": max(one.cores for one in (healthy, ill, well, mended)),
                    "machine_busy": max(one.machine_cores for one in (healthy, ill, well, mended)),
                }
            )
            name = f"{case.name}, slow worker, {level}: throughput recovered"
            self.report.target(name, 100 * recovered, "%", at_least=50)

    def _slowed(self, case: Case, policy: str, slow: str, factor: float) -> list[Window]:
        """Before the worker becomes slow, and after the job has had the time to notice."""
        at = WARM_UP + self.args.steps + 2
        one = Slow(slot_of(slow), at, factor)
        plan = case.plan(case.model.profile(self.args.time_scale))
        with ClusterJob(case, policy, plan, self.args, self.folder, f"--slow={one}") as job:
            found = [self._first(job)]
            if policy == "auto":
                limit_s = (at + self.args.notice) * STEP_LIMIT_S
                job.wait(lambda: job.decided() or len(job.commits()) > at + self.args.notice, "a decision", limit_s)
                at = len(job.commits())
            found.append(self._window(job, at))
            self._check(f"{case.name}, slow worker, --policy={policy}", found[-1])
            return found


def efficiency(before: Window, after: Window) -> float:
    """Linear-scaling efficiency: throughput, of what the workers left would do at the same rate (ElasWave 7.2)."""
    return before.step_s / after.step_s * before.members / after.members


def slow_factor(plan: Plan, slow: str, profile: Profile, normalised: float) -> float:
    """How much longer a worker must take that the throughput of the plan, as it is, falls to this part."""
    well_s = estimate_step(plan, profile).step_s

    def part(factor: float) -> float:
        ill = dataclasses.replace(profile, workers={slot_of(slow): WorkerProfile(1 / factor)})
        return well_s / estimate_step(plan, ill).step_s

    low, high = 1.0, 4.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if part(middle) < normalised else (middle, high)
    return round(low, 3)


def notes(args: argparse.Namespace) -> list[str]:
    """What belongs to the figures."""
    sizes = [
        f"{model.name}: PP {model.pp}, DP {model.dp}, micro-batches of {model.micro_batch}, {model.units} of them for "
        "each replica"
        for model in MODELS
    ]
    return [
        f"compute is emulated: layers sleep {args.time_scale:g} times their derived profile (benchmarks/profiles/"
        f"README.md); an activation row is {args.row_bytes} bytes, parameters are small as well, memory is no bound. "
        "Agents, etcd, processes, messages, gradients, the optimizer with a copy of its state, measuring, choosing and "
        "changing over are real; all on this machine: cores_busy are those that the job kept busy, machine_busy "
        "those that anybody did; near the number of cores the machine held the emulation up, and the row says little",
        "; ".join(sizes) + ". So the bubble is a larger part of a step than with the global batches of ElasWave, "
        "which favours plans with shallower pipelines: they may pass an LSE of 1",
        "policies are compared by their steps after the loss; before_s is the same plan in each job of a case, so its "
        "spread tells what a difference means",
        f"{NODES} agents of {PER_NODE} workers. A node has neighbouring stages of one pipeline (as ElasWave's remarks "
        "on whole replicas imply), in the cases by rank those of neighbouring ranks as Megatron numbers them. Lost are,"
        " one after the other in one job, the last nodes",
        "34B, 1 lost, workers in pipelines: 22 of 24 workers against two of three replicas; no plan with an LSE of 1 "
        "is more than 1.375 times as fast as drop-replica there, but for the bubble",
        f"a step lasts from commit to commit on the first worker; the {SETTLE} after a change do not count; median of "
        f"{args.steps}. LSE: throughput over that before in the same job, over the part of the workers that is left. "
        "of_critical_path: to the play-through of the plan with the emulation's own seconds, all else free",
        "drop-replica (torchft) and template switch (Oobleck) are plans (elaunch/simulator/baselines.py) which one job "
        "per model is asked to go over to by `elaunch ctl plan --set` after each loss; no micro-batch is dropped",
        "slow worker: a middle stage of the first pipeline takes seconds_x times as long, chosen such that the "
        "critical path has the throughput of ElasWave's figure 15a with nothing done; recovered: of what was lost "
        "against the plan at the start; of_best_plan: of what is lost against the best plan for healthy workers",
    ]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", choices=("losses", "slow"), help="lost nodes, or a slow worker (default: both)")
    parser.add_argument("--models", nargs="+", choices=[model.name for model in MODELS], help="default: all")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--levels", nargs="*", choices=list(NORMALISED), help="of the slow worker (default: all)")
    parser.add_argument("--steps", type=int, help="that count, under each plan (default 4, quick 3)")
    parser.add_argument("--notice", type=int, default=40, help="steps in which a slow worker must have been noticed")
    parser.add_argument("--time-scale", type=float, help="factor on the profile's seconds (default 0.5, quick 0.2)")
    parser.add_argument("--row-bytes", type=int, default=4 << 10, help="bytes of an activation row")
    parser.add_argument("--limit-s", type=int, default=5400, help="the most that the whole benchmark may take")
    args = parser.parse_args()
    for name, quick, full in (("steps", 3, 4), ("time_scale", 0.2, 0.5)):
        if getattr(args, name) is None:
            setattr(args, name, quick if args.quick else full)
    if args.levels is None:
        args.levels = [] if args.quick else list(NORMALISED)
    return args


def main() -> int:
    args = _parse()
    if args.quick:
        losses, slow = [Case(SMALL, 1, nodes=3)], []
        args.policies = ["auto"]
    else:
        wanted = [model for model in MODELS if model.name in (args.models or [one.name for one in MODELS])]
        losses = [Case(model, MOST_LOST) for model in wanted]
        losses += [Case(model, 1, placement="ranks") for model in wanted if model.name == "34B"]
        slow = [Case(model, 0) for model in wanted if model.name == "34B"]
        losses, slow = ([] if args.only == "slow" else losses), ([] if args.only == "losses" else slow)
    report = Report("policies: throughput after lost nodes, estimates, a slow worker", notes=notes(args))
    limit_time(args.limit_s)
    with tempfile.TemporaryDirectory(prefix="policies-") as folder:
        bench = Bench(args, Path(folder), report)
        jobs: list[tuple[Callable[[Case], None], Case]] = [(bench.losses, case) for case in losses]
        jobs += [(bench.slow, case) for case in slow if args.levels]
        try:
            for measure, case in jobs:
                measure(case)
        except TimeLimit as error:
            bench.failed = True
            report.notes.append(str(error))
        signal.alarm(0)
        bench.estimates()
    report.print()
    report.write(args.json)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
