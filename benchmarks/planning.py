"""How long a decision takes, and how good it is against trying everything.

    python benchmarks/planning.py --quick
    python benchmarks/planning.py --json planning.json

Pure computation on one core: no worker is started. The model is the derived profile of Llama 2 34B
(benchmarks/profiles/README.md), a TP group of four or eight devices is a tensor-parallel group of the plan.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.report import Report, add_arguments, spread
from elaunch.plan import Pipeline, Plan, PlanError, Stage, pipelines, stages, symmetric
from elaunch.plan.schedule import schedule
from elaunch.policy.candidates.expand import expanded
from elaunch.policy.candidates.matching import prepare
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.policy.select import choose

PROFILE = Path(__file__).resolve().parent / "profiles" / "llama2-34b.json"
PER_NODE = 8


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A job that has lost nobody; `units`: micro-batches of each pipeline."""

    dp: int
    pp: int
    tp: int
    units: int
    losses: int
    limit_s: float

    @property
    def devices(self) -> int:
        return self.dp * self.pp * self.tp

    def plan(self, n_layers: int) -> Plan:
        workers = [f"n{number // PER_NODE}/{number % PER_NODE}#0" for number in range(self.devices)]
        batch = self.dp * self.units
        return symmetric(workers, n_layers, batch, 1, dp=self.dp, pp=self.pp, tp=self.tp)


CLUSTERS = [
    Cluster(2, 8, 4, 64, 20, 1.0),
    Cluster(8, 8, 4, 32, 20, 1.0),
    Cluster(32, 8, 4, 16, 10, 1.0),
    Cluster(125, 10, 8, 20, 5, 10.0),
]


def lost_worker(report: Report, profile: Profile, clusters: Sequence[Cluster]) -> None:
    """One worker is lost, with its TP group: the whole decision, from the plan to the choice."""
    for cluster in clusters:
        plan = cluster.plan(len(profile.layers))
        here = dataclasses.replace(profile, width=cluster.tp)
        # As a job has for the steps before: a plan keeps what was derived of it.
        schedule(plan)
        prepare(cluster.dp * cluster.pp)
        seconds, processor_s, chosen = [], [], set()
        for lost in random.Random(0).sample(plan.workers, cluster.losses):
            members = [worker for worker in plan.workers if worker != lost]
            gc.collect()
            start_s, start_processor_s = time.perf_counter(), time.process_time()
            choice = choose(plan, plan, members, here)
            seconds.append(time.perf_counter() - start_s)
            processor_s.append(time.process_time() - start_processor_s)
            chosen.add(choice.chosen.policy)
        found = spread(seconds)
        report.row(
            {
                "what": f"{cluster.devices} devices, one lost",
                "plan": f"DP {cluster.dp} PP {cluster.pp} TP {cluster.tp}",
                "decisions": found.count,
                "p50_s": found.median,
                "p99_s": found.worst,
                "processor_p50_s": spread(processor_s).median,
                "processor_p99_s": spread(processor_s).worst,
                "chosen": ", ".join(sorted(chosen)),
            }
        )
        report.target(f"decision with {cluster.devices} devices", found.worst, "s, p99", below=cluster.limit_s)


def expansion(report: Report, profile: Profile, runs: int) -> None:
    """Suika's 16 -> 64: the plan that uses 48 more devices."""
    workers = [f"n{number // PER_NODE}/{number % PER_NODE}#0" for number in range(16)]
    plan = symmetric(workers, len(profile.layers), 256, 1, dp=4, pp=4)
    members = [*workers, *(f"m{number // PER_NODE}/{number % PER_NODE}#0" for number in range(48))]
    seconds = []
    for _ in range(runs):
        gc.collect()
        start_s = time.perf_counter()
        larger = expanded(plan, members, profile)
        seconds.append(time.perf_counter() - start_s)
    found = spread(seconds)
    gain = estimate_step(plan, profile).step_s / estimate_step(larger, profile).step_s
    report.row(
        {
            "what": "16 -> 64 devices",
            "plan": "DP 4 PP 4",
            "decisions": found.count,
            "p50_s": found.median,
            "p99_s": found.worst,
            "chosen": f"{gain:.2f} x as fast",
        }
    )
    report.target("expansion from 16 to 64 devices", found.worst, "s, p99", below=1.0)


# -- quality ------------------------------------------------------------------------------------------------------


def cuts(n_layers: int, parts: int) -> Iterator[list[range]]:
    """Every way to cut layers into contiguous stages."""
    for inner in itertools.combinations(range(1, n_layers), parts - 1):
        yield [range(*ends) for ends in itertools.pairwise([0, *inner, n_layers])]


def shares(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a number as so many numbers of 1 or more."""
    for inner in itertools.combinations(range(1, total), parts - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise([0, *inner, total]))


def every_plan(n_layers: int, units: int, members: Sequence[str]) -> Iterator[Plan]:
    """All plans of stages with any numbers of replicas, and of pipelines with any depths, cuts and shares of the batch.

    The members are alike, so which of them has which place makes no difference to a step.
    """
    for used in range(1, len(members) + 1):
        here = members[:used]
        for parts in range(1, min(used, n_layers) + 1):
            for replicas in shares(used, parts):
                ends = list(itertools.accumulate(replicas, initial=0))
                groups = [tuple((one,) for one in here[start:stop]) for start, stop in itertools.pairwise(ends)]
                width = max(replicas)
                replicas_of: list[tuple[tuple[str, ...], ...]] = [
                    (*some, *[()] * (width - len(some))) for some in groups
                ]
                for layers in cuts(n_layers, parts):
                    try:
                        yield stages(n_layers, units, 1, [Stage(*one) for one in zip(layers, replicas_of, strict=True)])
                    except PlanError:
                        continue
            for depths in shares(used, parts):
                if parts > units or max(depths) > n_layers or list(depths) != sorted(depths):
                    continue
                ends = list(itertools.accumulate(depths, initial=0))
                names = [here[start:stop] for start, stop in itertools.pairwise(ends)]
                for cut in itertools.product(*(list(cuts(n_layers, depth)) for depth in depths)):
                    for counts in shares(units, parts):
                        runs = itertools.pairwise(itertools.accumulate(counts, initial=0))
                        made = [
                            Pipeline(range(*run), tuple(zip(layers, ((one,) for one in some), strict=True)))
                            for run, layers, some in zip(runs, cut, names, strict=True)
                        ]
                        yield pipelines(n_layers, units, 1, made)


def quality(report: Report, quick: bool) -> None:
    """The chosen plan against the best of all, where all can be tried."""
    cases = [(2, 2, 5, 6), (1, 4, 6, 4), (2, 2, 6, 8)] if quick else [
        (2, 2, 5, 6), (1, 4, 6, 4), (4, 1, 4, 8), (2, 2, 6, 8), (1, 5, 6, 6), (3, 2, 5, 6), (2, 3, 6, 6),
    ]  # fmt: skip
    ratios = []
    for dp, pp, n_layers, units in cases:
        workers = [f"n{number}/0#0" for number in range(dp * pp)]
        # The last layer is a head: half as much again as a block.
        block = LayerProfile(1.0, 2.0, 100, 1200, 10, 50)
        head = dataclasses.replace(block, forward_s_per_row=1.5, backward_s_per_row=3.0)
        profile = Profile("small", (*[block] * (n_layers - 1), head), 1, 1e9, 0.0)
        plan = symmetric(workers, n_layers, units, 1, dp=dp, pp=pp)
        # Who is lost makes no difference to the best of all.
        every = list(every_plan(n_layers, units, workers[1:]))
        best_s = min(estimate_step(one, profile).step_s for one in every)
        for lost in range(0, dp * pp, dp):
            members = [worker for worker in workers if worker != workers[lost]]
            took = choose(plan, plan, members, profile).chosen.step
            assert took is not None
            ratios.append(took.step_s / best_s)
        report.row(
            {
                "what": f"best of {len(every):,} plans",
                "plan": f"DP {dp} PP {pp}, {n_layers} layers",
                "decisions": pp,
                "worst_over_best": max(ratios[-pp:]),
            }
        )
    report.target("chosen plan against the best of all", max(ratios), "x its step", at_most=1.02)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    profile = Profile.load(PROFILE)
    report = Report(
        "planning",
        notes=["one core", "p99 of so few decisions is the slowest", "processor: where other programs use the machine"],
    )
    lost_worker(report, profile, CLUSTERS[:2] if args.quick else CLUSTERS)
    expansion(report, profile, 2 if args.quick else 5)
    try:
        quality(report, args.quick)
    except NotPossible as error:
        print(f"planning: {error}", file=sys.stderr)
        return 1
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
