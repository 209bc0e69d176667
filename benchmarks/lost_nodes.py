"""Throughput after lost devices as the papers have it, computed: ElasWave's figure 11 and Chameleon's figure 8.

    python benchmarks/lost_nodes.py --only elaswave
    python benchmarks/lost_nodes.py --only chameleon --seeds 3
    python benchmarks/lost_nodes.py --json lost_nodes.json

Pure computation: the plans that the policies make, played through by the estimator, with the seconds of gradients and
of messages, and under a bound on memory. Models, parallelism, micro-batches, batches, devices and their memory are the
papers'. What a layer costs is derived (benchmarks/profiles/README.md). benchmarks/policies.py runs such jobs, smaller.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster import MODELS, Case, Model
from benchmarks.profiles.derive import MODELS as SIZES
from benchmarks.profiles.derive import derive, measured
from benchmarks.report import Report, add_arguments
from elaunch.plan import Plan, symmetric
from elaunch.policy.candidates.reparallelize import reparallelized
from elaunch.policy.candidates.reroute import rerouted
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.estimate import StepEstimate, estimate_step, ordered
from elaunch.policy.profile import Profile
from elaunch.policy.select import choose
from elaunch.simulator.baselines import decoupled, depths_of, drop_replica, template_switch

GLOBAL_BATCH = {"7B": 8192, "13B": 2048, "34B": 768}
"""ElasWave, table 2."""

HEALTHY = {"7B": 51.941, "13B": 32.805, "34B": 8.545}
"""Samples per second before any loss (ElasWave, table 3). Seconds of computing are scaled to give these."""

TOKENS = 2048
"""Of a sample; ElasWave does not say. With 4096 the activations of 1F1B do not fit into its devices before any loss."""

ELASWAVE_BYTES = 4 * 32_000_000_000
"""Of a TP group of four devices."""

ROCE_BYTES_PER_S = 200e9 / 8
"""Of a node."""

PAPER = {("34B", 1, "reroute"): 1.35, ("34B", 1, "drop-replica"): 1.60}
"""ElasWave 7.2: its throughput over the baseline's. The other bars of figure 11 have no figures in the text."""

HOURS = 9
HOURLY = 0.1
NPUS = 32
CHAMELEON_BYTES = 64_000_000_000
CHAMELEON = {"template switch": 1.229, "reroute": 1.355}
"""Chameleon, figure 8: its average throughput over the baseline's."""


def played(plan: Plan, profile: Profile) -> tuple[Plan, StepEstimate]:
    """The plan in its best order, every backward whole."""
    return ordered(plan, profile)


# -- ElasWave ---------------------------------------------------------------------------------------------------------


def elaswave_profile(model: Model) -> Profile:
    """Of a model of ElasWave, as fast as the paper's devices were before any loss."""
    sizes = next(one for one in SIZES if one.name.endswith(model.name.lower()))
    found = derive(sizes, measured(), TOKENS)
    found = dataclasses.replace(found, bandwidth_bytes_per_s=ROCE_BYTES_PER_S, memory_bytes=ELASWAVE_BYTES)
    wanted_s = GLOBAL_BATCH[model.name] / HEALTHY[model.name]
    plan = Case(model, 0).plan(found)
    low, high = 0.1, 100.0
    for _ in range(30):
        middle = math.sqrt(low * high)
        if estimate_step(plan, found.scaled(middle)).step_s < wanted_s:
            low = middle
        else:
            high = middle
    return found.scaled(high)


def figure_11(report: Report, names: Sequence[str]) -> None:
    """One, two and three nodes are lost, under each policy."""
    for model in MODELS:
        if model.name not in names:
            continue
        units = GLOBAL_BATCH[model.name] // (model.dp * model.micro_batch)
        case = Case(dataclasses.replace(model, units=units), 3)
        profile = elaswave_profile(case.model)
        plan = case.plan(profile)
        before = estimate_step(plan, profile)
        _row(report, profile, plan.global_batch_size, (model.name, 0, "before"), (plan, before))
        for number in range(1, 4):
            gone = {f"n{node}" for node in case.lose()[:number]}
            members = [worker for worker in plan.workers if worker.partition("/")[0] not in gone]
            found: dict[str, StepEstimate] = {}
            policies: dict[str, Callable[[], tuple[Plan, StepEstimate]]] = {
                "auto": lambda: _chosen(plan, members, profile),  # noqa: B023
                "reroute": lambda: decoupled(rerouted(plan, members, profile), profile),  # noqa: B023
                "reroute, all deferred": lambda: _unbounded(rerouted(plan, members, profile), profile),  # noqa: B023
                "reroute, whole backwards": lambda: played(rerouted(plan, members, profile), profile),  # noqa: B023
                "drop-replica": lambda: played(drop_replica(plan, members), profile),  # noqa: B023
            }
            for policy, make in policies.items():
                key = model.name, number, policy
                try:
                    made = make()
                except NotPossible as error:
                    report.notes.append(f"{model.name}, {number} lost, {policy}: {error}")
                    continue
                found[policy] = made[1]
                _row(report, profile, plan.global_batch_size, key, made)
            for policy, took in found.items():
                expected = PAPER.get((model.name, number, policy))
                paper = "" if expected is None else f" (paper: {expected})"
                if policy != "auto" and "auto" in found:
                    ratio = took.step_s / found["auto"].step_s
                    report.notes.append(f"{model.name}, {number} lost: auto is {ratio:.3f} x {policy}{paper}")


def _unbounded(plan: Plan, profile: Profile) -> tuple[Plan, StepEstimate]:
    """The plan that defers as many weight gradients as makes it fastest, whatever memory that takes."""
    stages = len({tile.layers.start for tile in plan.tiles})
    many = [0, *(stages << power for power in range(8))]
    return ordered(plan, dataclasses.replace(profile, memory_bytes=None), many)


def _chosen(plan: Plan, members: Sequence[str], profile: Profile) -> tuple[Plan, StepEstimate]:
    chosen = choose(plan, plan, members, profile).chosen
    assert chosen.plan is not None
    assert chosen.step is not None
    return chosen.plan, chosen.step


def _row(
    report: Report, profile: Profile, batch: int, key: tuple[str, int, str], made: tuple[Plan, StepEstimate]
) -> None:
    plan, step = made
    peak = max(step.peak_bytes.values())
    report.row(
        {
            "model": key[0],
            "lost": key[1],
            "policy": key[2],
            "step_s": step.step_s,
            "samples_per_s": batch / step.step_s,
            "bubble_pct": 100 * step.bubble,
            "deferred": plan.deferred,
            "peak_GB": peak / 1e9,
            "fits": "yes" if peak <= (profile.memory_bytes or math.inf) else "no",
        }
    )


# -- Chameleon --------------------------------------------------------------------------------------------------------


def figure_8(report: Report, seeds: int, units: int) -> None:
    """Nine hours in which each device fails with 10 % an hour: the throughput over time, on average."""
    sizes = next(one for one in SIZES if one.name.endswith("7b"))
    profile = dataclasses.replace(derive(sizes, measured(), TOKENS, 1), memory_bytes=CHAMELEON_BYTES)
    workers = [f"n{number // 8}/{number % 8}#0" for number in range(NPUS)]
    plan = symmetric(workers, len(profile.layers), units, 1, dp=NPUS // 4, pp=4)
    averages: dict[str, list[float]] = {}
    for seed in range(seeds):
        losses = _losses(workers, random.Random(seed))
        for policy, rates in _rates(plan, losses, profile, report, seed).items():
            hours = [later - here for (here, _), later in zip(rates, [*(t for t, _ in rates[1:]), HOURS], strict=True)]
            average = sum(rate * part for (_, rate), part in zip(rates, hours, strict=True)) / HOURS
            averages.setdefault(policy, []).append(average)
    for policy, found in averages.items():
        ratios = [one / other for one, other in zip(averages["auto"], found, strict=True)]
        report.row(
            {
                "model": "7B, 9 hours",
                "policy": policy,
                "samples_per_s": statistics.fmean(found),
                "auto_over_it": statistics.fmean(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "paper": CHAMELEON.get(policy, ""),
            }
        )


def _losses(workers: Sequence[str], chance: random.Random) -> list[tuple[float, str]]:
    """When who fails, in hours."""
    rate = -math.log(1 - HOURLY)
    found = sorted((chance.expovariate(rate), worker) for worker in workers)
    return [one for one in found if one[0] < HOURS]


def _rates(
    plan: Plan, losses: Sequence[tuple[float, str]], profile: Profile, report: Report, seed: int
) -> dict[str, list[tuple[float, float]]]:
    """From each moment on, the samples per second under each policy."""
    depths = depths_of(4)

    def reroute(now: Plan, members: Sequence[str], whole: bool) -> tuple[Plan, StepEstimate]:
        """As ReCycle: as long as each stage has somebody left; after that, new pipelines."""
        try:
            made = rerouted(now, members, profile)
        except NotPossible:
            made = reparallelized(now, members, profile)
        return played(made, profile) if whole else decoupled(made, profile)

    policies: dict[str, Callable[[Plan, Sequence[str]], tuple[Plan, StepEstimate]]] = {
        "auto": lambda now, members: _chosen(now, members, profile),
        "reroute": lambda now, members: reroute(now, members, False),
        "reroute, whole backwards": lambda now, members: reroute(now, members, True),
        "template switch": lambda now, members: played(template_switch(now, members, profile, depths), profile),
    }
    found = {}
    for policy, step in policies.items():
        now, took = played(plan, profile)
        members = list(plan.workers)
        rates = [(0.0, now.global_batch_size / took.step_s)]
        for hours, worker in losses:
            members.remove(worker)
            try:
                now, took = step(now, members)
            except NotPossible as error:
                report.notes.append(f"seed {seed}, {policy}, {len(members)} left: {error}")
                rates.append((hours, 0.0))
                break
            fits = not took.over(profile)
            rates.append((hours, now.global_batch_size / took.step_s if fits else 0.0))
        found[policy] = rates
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", choices=("elaswave", "chameleon"))
    parser.add_argument("--models", nargs="+", choices=list(HEALTHY), help="of ElasWave (default: all)")
    parser.add_argument("--seeds", type=int, default=5, help="sequences of failures (default 5, quick 1)")
    parser.add_argument("--batch", type=int, default=64, help="of Chameleon's job, with micro-batches of 1 (16 to 64)")
    args = parser.parse_args()
    report = Report(
        "lost nodes, as in ElasWave's figure 11 and Chameleon's figure 8, computed",
        notes=[
            f"a sample has {TOKENS} tokens; ElasWave: {ELASWAVE_BYTES / 1e9:g} GB for a TP group, 25 GB/s to another",
            "reroute: micro-batches of the lost to their peers, weight gradients deferred as far as memory permits "
            "(ReCycle); all deferred: whatever it needs",
        ],
    )
    if args.only != "chameleon":
        figure_11(report, ["34B"] if args.quick else args.models or list(HEALTHY))
    if args.only != "elaswave":
        figure_8(report, 1 if args.quick else args.seeds, args.batch)
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
