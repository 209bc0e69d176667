"""Chameleon's figures 6 to 11 and section V-F, by the simulator and the planner; see benchmarks/cluster_tables.py.

What the paper leaves open, and what was taken: samples of 4096 tokens; seconds of a layer and links as derived for
Llama 2 (benchmarks/profiles/README.md), not those of an Ascend 910B; in figure 8 PP 4, DP 8, TP 1, 64 micro-batches of
one sample, a failed NPU alone is lost and stays away; in V-F PP 8, TP 1, four micro-batches for each pipeline.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.profiles.derive import MODELS, derive, measured
from benchmarks.report import Report
from elaunch.plan import GradientGroup, Pipeline, Plan, gradient_groups, pipelines, rounds, share, symmetric
from elaunch.policy.candidates.matching import matched
from elaunch.policy.estimate import estimate_step, ordered
from elaunch.policy.profile import Profile
from elaunch.policy.select import choose
from elaunch.policy.transition import estimate_transition
from elaunch.simulator.faults import exponential, present, rate_of
from elaunch.simulator.job import simulate_job
from elaunch.simulator.model import JobModel, JobRun, RunSpan, Timings
from elaunch.simulator.strategies import make_strategy

NPU_BYTES = 64 * 10**9
LLAMA = MODELS[0]
HOURS = 9
SEEDS = 5


def profile_of(tensor_parallel: int) -> Profile:
    """Llama 2 7B on TP groups of so many devices, of which a worker stands for one group."""
    found = derive(LLAMA, measured(), devices=tensor_parallel)
    return replace(found, memory_bytes=NPU_BYTES * tensor_parallel)


def workers_of(count: int, per_node: int = 1) -> list[str]:
    return [f"n{number // per_node}/{number % per_node}#0" for number in range(count)]


def figure_6(report: Report) -> None:
    """Throughput after a failure, of that before."""
    paper = {(4, 2, 1): 0.9622, (4, 4, 1): 0.89, (2, 2, 8): 0.7438}
    for (pp, dp, tp), ratio in paper.items():
        profile = profile_of(tp)
        workers = workers_of(pp * dp)
        for batch in (16, 64):
            plan, before = ordered(symmetric(workers, len(profile.layers), batch, 1, dp=dp, pp=pp), profile)
            choice = choose(plan, plan, workers[:-1], profile)
            assert choice.chosen.step is not None
            ours = before.step_s / choice.chosen.step.step_s
            report.row(
                {
                    "figure": "6",
                    "PP DP TP": f"{pp} {dp} {tp}",
                    "batch": batch,
                    "NPUs": f"{pp * dp * tp} -> {(pp * dp - 1) * tp}",
                    "chosen": choice.chosen.policy,
                    "paper": ratio,
                    "ours": ours,
                    "of what is left": ours / ((pp * dp - 1) / (pp * dp)),
                }
            )


def figure_8(report: Report, seeds: int) -> dict[str, list[JobRun]]:
    """32 NPUs of which 10 % fail in an hour, for 9 hours."""
    profile = profile_of(1)
    job = JobModel(profile, 64, 1, pp=4, dp=8)
    names = [f"npu{number}" for number in range(32)]
    strategies = {"auto": "Chameleon", "templates": "Oobleck", "reroute": "ReCycle"}
    found: dict[str, list[JobRun]] = {name: [] for name in strategies}
    timings = Timings()
    until_s = 3600.0 * HOURS
    for seed in range(seeds):
        changes = present(names) + exponential(names, 1 / rate_of(0.1), until_s, seed)
        for name in strategies:
            found[name].append(simulate_job(job, make_strategy(name, timings), changes, until_s, timings))
    paper = {"auto": 1.0, "templates": 1 / 1.229, "reroute": 1 / 1.355}
    for name, what in strategies.items():
        runs = found[name]
        ratios = [run.rate / best.rate for run, best in zip(runs, found["auto"], strict=True)]
        stopped = [sum(run.seconds(kind) for kind in ("detect", "decide", "change", "restart")) for run in runs]
        report.row(
            {
                "figure": "8",
                "policy": f"{what} ({name})",
                "samples/s": statistics.mean(run.rate for run in runs),
                "stopped s": statistics.mean(stopped),
                "steps lost": statistics.mean(run.undone for run in runs),
                "left at the end": statistics.mean(run.spans[-1].members for run in runs),
                "paper": paper[name],
                "ours": statistics.mean(ratios),
                "least": min(ratios),
                "greatest": max(ratios),
            }
        )
    return found


def figure_7(report: Report, runs: Mapping[str, Sequence[JobRun]]) -> None:
    """NPUs that are left over the hours of figure 8, and those with something to do under each policy."""
    for hour in range(HOURS + 1):
        spans = {name: [_span_at(run, 3600.0 * hour) for run in some] for name, some in runs.items()}
        left = [span.members for span in spans["auto"]]
        report.row(
            {
                "figure": "7",
                "hour": hour,
                "expected of 10 % in an hour": 32 * 0.9**hour,
                "left, mean": statistics.mean(left),
                "least": min(left),
                "greatest": max(left),
                **{f"busy, {name}": statistics.mean(span.busy for span in some) for name, some in spans.items()},
            }
        )


def _span_at(run: JobRun, at_s: float) -> RunSpan:
    """What a job does then, or next that is training."""
    late = [span for span in run.spans if span.end_s > at_s or span is run.spans[-1]]
    return next((span for span in late if span.kind == "train"), late[0])


def figure_10(report: Report) -> None:
    """DP 4, PP 2, an NPU lost, pipelines of 2, 2 and 3 stages: the transfer with and without matching."""
    full = profile_of(1)
    block = full.layers[1]
    paper = {4: None, 8: None, 16: 0.3235}
    for n_layers, ratio in paper.items():
        profile = replace(full, layers=(block,) * n_layers)
        workers = workers_of(8)
        before = symmetric(workers, n_layers, 16, 1, dp=4, pp=2)
        least, most, mean = 1.0, 0.0, []
        for lost in workers:
            members = [worker for worker in workers if worker != lost]
            roles = [spans for depth in (2, 2, 3) for spans in _even(n_layers, depth)]
            groups = [(member,) for member in members]
            seconds = []
            for order in (matched(groups, roles, before, profile), list(range(len(groups)))):
                after = _pipelines(n_layers, 16, (2, 2, 3), [members[place] for place in order])
                seconds.append(estimate_transition(before, after, profile, [lost]).transfer_s)
            saved = 1 - seconds[0] / seconds[1]
            least, most = min(least, saved), max(most, saved)
            mean.append(saved)
        report.row(
            {
                "figure": "10",
                "layers": n_layers,
                "paper: transfer saved": ratio,
                "ours, mean": statistics.mean(mean),
                "least": least,
                "greatest": most,
                "s by rank": seconds[1],
                "s matched": seconds[0],
            }
        )


def figure_11(report: Report) -> None:
    """Pipelines of 2, 2 and 3 stages: reductions of gradients in the order of layers, or by colour."""
    profile = profile_of(1)
    n_layers = len(profile.layers)
    paper = {16: 0.1144, 32: 0.1544, 64: 0.0552}
    for batch, ratio in paper.items():
        plan = _pipelines(n_layers, batch, (2, 2, 3), workers_of(7))
        groups = [group for group in gradient_groups(plan) if len(group.replicas) > 1]
        price = [_reduce_s(group, profile) for group in groups]
        coloured = [place for some in rounds(groups) for place in some]
        in_order_s, coloured_s = (_played(groups, price, order) for order in (range(len(groups)), coloured))
        quiet = replace(profile, bandwidth_bytes_per_s=1e18, latency_s=0.0)
        compute_s = estimate_step(plan, quiet).step_s
        report.row(
            {
                "figure": "11",
                "batch": batch,
                "reductions": len(groups),
                "rounds": len(rounds(groups)),
                "in order s": in_order_s,
                "by colour s": coloured_s,
                "computing s": compute_s,
                "paper: reductions": 0.3535,
                "ours": 1 - coloured_s / in_order_s,
                "paper: step": ratio,
                "our step": 1 - (compute_s + coloured_s) / (compute_s + in_order_s),
            }
        )


def section_5f(report: Report, decisions: int) -> None:
    """How long a decision takes."""
    profile = profile_of(1)
    for cards, limit in ((256, "<= 1.152"), (1024, "19.25"), (2048, "40.48")):
        dp = cards // 8
        workers = workers_of(cards, 8)
        plan = symmetric(workers, len(profile.layers), 4 * dp, 1, dp=dp, pp=8)
        seconds = []
        for number in range(decisions):
            lost = workers[number * cards // decisions]
            members = [worker for worker in workers if worker != lost]
            began_s = time.perf_counter()
            choose(plan, plan, members, profile)
            seconds.append(time.perf_counter() - began_s)
        report.row(
            {
                "section": "V-F",
                "NPUs": cards,
                "paper s": limit,
                "ours, median s": statistics.median(seconds),
                "worst s": max(seconds),
                "decisions": len(seconds),
            }
        )


def figure_12(report: Report) -> None:
    """The most that an NPU needs before and after DP 4, PP 2 lose one and become pipelines of 2, 2 and 3 stages."""
    profile = profile_of(1)
    n_layers = len(profile.layers)
    for batch in (16, 64):
        before = symmetric(workers_of(8), n_layers, batch, 1, dp=4, pp=2)
        after = _pipelines(n_layers, batch, (2, 2, 3), workers_of(7))
        peaks = [sorted(estimate_step(plan, profile).peak_bytes.values()) for plan in (before, after)]
        report.row(
            {
                "figure": "12",
                "batch": batch,
                "before GB, least": peaks[0][0] / 1e9,
                "before GB, most": peaks[0][-1] / 1e9,
                "after GB, least": peaks[1][0] / 1e9,
                "after GB, most": peaks[1][-1] / 1e9,
                "NPU GB": NPU_BYTES / 1e9,
                "paper": "does not increase, well below the limit",
            }
        )


def _even(n_layers: int, depth: int) -> list[range]:
    return [share(n_layers, depth, stage) for stage in range(depth)]


def _pipelines(n_layers: int, batch: int, depths: Sequence[int], workers: Sequence[str]) -> Plan:
    """Pipelines of these depths with layers shared evenly and micro-batches by their number of workers."""
    names = iter(workers)
    first, made = 0, []
    for number, depth in enumerate(depths):
        rest = batch - first
        units = rest if number == len(depths) - 1 else round(batch * depth / sum(depths))
        stages = tuple((layers, (next(names),)) for layers in _even(n_layers, depth))
        made.append(Pipeline(range(first, first + units), stages))
        first += units
    return pipelines(n_layers, batch, 1, made)


def _reduce_s(group: GradientGroup, profile: Profile) -> float:
    """Of an all-reduce in a ring."""
    n = len(group.replicas)
    n_bytes = sum(profile.layers[layer].parameter_bytes for layer in group.layers)
    return profile.link("", "").seconds(2 * n_bytes * (n - 1) / n)


def _played(groups: Sequence[GradientGroup], price: Sequence[float], order: Sequence[int]) -> float:
    """Seconds of all reductions, if each worker does its own in this order and a reduction needs all its workers."""
    free: dict[str, float] = {}
    for place in order:
        workers = [worker for replica in groups[place].replicas for worker in replica]
        end_s = max(free.get(worker, 0.0) for worker in workers) + price[place]
        free |= dict.fromkeys(workers, end_s)
    return max(free.values(), default=0.0)


def chameleon(report: Report, quick: bool) -> None:
    """Adds all tables."""
    figure_6(report)
    figure_7(report, figure_8(report, 2 if quick else SEEDS))
    figure_10(report)
    figure_11(report)
    figure_12(report)
    section_5f(report, 2 if quick else 5)
