"""Suika's figures 11 and 13 to 16, by the simulator; see benchmarks/cluster_tables.py.

What the paper leaves open, and what was taken: a step has 64 samples of 4096 tokens, micro-batches of one; seconds of a
layer by Galvatron's measured one (benchmarks/profiles/README.md), not those of an H100; 159 GB/s within a node
(measured there), 50 GB/s for a device between nodes (the paper's 400 Gbit/s), half of that between racks; a job can use
eight times what it asks for, 64 devices at most. Jobs are made up: in 8 hours on 64 devices 18 (fig. 2:
70 % of intervals of 1,024 GPUs are shorter than 60 s, which is 50 s in the mean if they have no memory; a job has two
events), of log-normal durations, scaled to 60 % of the devices' time. A restart takes 38 s and the state's way to the
storage and back at 4.4 GB/s (1.38 and 2.02 minutes for 7 and 13 billion parameters: Suika 2.2).
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from benchmarks.profiles.derive import Model, derive, measured
from benchmarks.report import Report, percentile
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import LinkProfile, Profile
from elaunch.scheduler.model import ClusterNode, JobState
from elaunch.scheduler.plan_speed import DefaultPlan, Distances, PlanSpeed
from elaunch.scheduler.settings import SuikaSettings
from elaunch.scheduler.speeds import ChangeCost, MoveCost, RestartCost, TableSpeed
from elaunch.simulator.arrivals import philly_like, scaled_to
from elaunch.simulator.cluster import simulate_cluster
from elaunch.simulator.cluster_model import ClusterJob, ClusterRun, ClusterSettings
from elaunch.simulator.first import fastest_symmetric
from elaunch.simulator.jobs import cluster_nodes
from elaunch.simulator.model import JobModel, Timings
from elaunch.simulator.policies import POLICIES, PolicyRun
from elaunch.simulator.traces import Arrival, read_jobs

BATCH = 64
PER_NODE = 8
DEVICE_BYTES = 80 * 10**9
HOUR_S = 3600.0
HERE = Path(__file__).resolve().parent
TIMINGS = Timings()
JOBS_PER_DEVICE_HOUR = 18 / 8 / 64
LOAD = 0.6
SEEDS = 3


def gpt(name: str, n_layers: int, hidden: int) -> Model:
    """A GPT: its perceptron has two matrices of 4 x hidden, which is as much as three of 8/3 x hidden."""
    return Model(name, n_layers, hidden, hidden * 8 // 3, hidden // 128)


@dataclass(frozen=True)
class Kind:
    """A model of the paper's table 1 and its default plan."""

    model: Model
    size: str
    pp: int
    dp: int
    tp: int

    @property
    def basic(self) -> int:
        return self.pp * self.dp * self.tp


KINDS = (
    Kind(gpt("GPT2-350M", 24, 1024), "S", 1, 1, 1),
    Kind(gpt("GPT2-1.3B", 24, 2048), "S", 1, 4, 1),
    Kind(gpt("GPT2-2.6B", 32, 2560), "S", 1, 4, 1),
    Kind(Model("Qwen2-0.5B", 24, 896, 4864, 1), "S", 1, 1, 1),
    Kind(Model("Qwen2-1.5B", 28, 1536, 8960, 2), "S", 1, 4, 1),
    Kind(gpt("GPT2-6.7B", 32, 4096), "M", 1, 4, 2),
    Kind(Model("LLaMA2-7B", 32, 4096, 11008, 32), "M", 1, 4, 2),
    Kind(Model("Qwen2-7B", 28, 3584, 18944, 4), "M", 1, 4, 2),
    Kind(gpt("GPT2-15B", 48, 5120), "L", 1, 4, 4),
    Kind(Model("LLaMA2-13B", 40, 5120, 13824, 40), "L", 1, 4, 4),
    Kind(gpt("GPT2-39B", 48, 8192), "XL", 2, 4, 4),
    Kind(Model("LLaMA-30B", 60, 6656, 17920, 52), "XL", 2, 4, 4),
    Kind(gpt("GPT2-76B", 60, 10240), "XL", 2, 4, 8),
    Kind(Model("LLaMA-65B", 80, 8192, 22016, 64), "XL", 2, 4, 8),
    Kind(Model("Qwen2-72B", 80, 8192, 29568, 8), "XL", 2, 4, 8),
    Kind(Model("LLaMA2-70B", 80, 8192, 28672, 8), "XL", 3, 8, 8),
    Kind(gpt("GPT2-175B", 96, 12288), "XL", 4, 8, 8),
)
TOO_LARGE = "GPT2-175B"
"""Its default plan does not fit into 80 GB with samples of 4096 tokens: no job of it could ever start."""

BY_NAME = {kind.model.name: kind for kind in KINDS}


@dataclass(frozen=True)
class Network:
    """GB/s of a device to one of its node, of its rack, and of another rack."""

    node: float = 159.119
    rack: float = 50.0
    cluster: float = 25.0

    def distances(self, tp: int) -> Distances:
        """Of TP groups, whose devices have a link each."""
        return Distances(*(LinkProfile(1e9 * one * tp, 20e-6) for one in (self.node, self.rack, self.cluster)))


FULL = Network()


@cache
def profile_of(name: str, tp: int) -> Profile:
    """A worker stands for a TP group."""
    found = derive(BY_NAME[name].model, measured(), devices=tp)
    return replace(found, memory_bytes=DEVICE_BYTES * tp, bandwidth_bytes_per_s=1e9 * FULL.node * tp)


@cache
def rates_of(name: str, family: str, most: int, network: Network) -> dict[int, float]:
    """Samples per second by number of devices that lie together; more devices are never slower."""
    kind = BY_NAME[name]
    found: dict[int, float] = {}
    best = 0.0
    for devices in _sizes(kind, most):
        best = max(best, _rate(kind, family, devices, network))
        found[devices] = best
    return found


def _sizes(kind: Kind, most: int) -> list[int]:
    """Those of its default plan and more by a TP group, first one by one, later in steps of a quarter."""
    sizes, size = [], kind.basic
    while size <= most:
        sizes.append(size)
        size += max(1, size // (4 * kind.tp)) * kind.tp
    return sizes if sizes[-1] == most else [*sizes, most]


def _rate(kind: Kind, family: str, devices: int, network: Network) -> float:
    if family == "symmetric":
        return max(_symmetric(kind, tp, devices, network) for tp in (1, 2, 4, 8))
    return _speed(kind, family, network).rate(_allocation(devices // kind.tp, PER_NODE // kind.tp))


@cache
def _speed(kind: Kind, family: str, network: Network) -> PlanSpeed:
    default = DefaultPlan(kind.pp, kind.dp, 1, BATCH, 1)
    nodes = cluster_nodes(128, PER_NODE // kind.tp, 16)
    profile = profile_of(kind.model.name, kind.tp)
    if family == "data-parallel":
        return PlanSpeed(profile, default, nodes, family="data-parallel", distances=network.distances(kind.tp))
    return PlanSpeed(profile, default, nodes, family="asymmetric", distances=network.distances(kind.tp))


def _symmetric(kind: Kind, tp: int, devices: int, network: Network) -> float:
    """The best of equal pipelines with TP groups of one size; the link is that of the farthest devices."""
    per_node = PER_NODE // tp
    workers = [f"n{number // per_node}/{number % per_node}#0" for number in range(devices // tp)]
    profile = profile_of(kind.model.name, tp)
    far = network.node if devices <= PER_NODE else network.rack if devices <= 16 * PER_NODE else network.cluster
    profile = replace(profile, bandwidth_bytes_per_s=1e9 * far * tp)
    try:
        plan = fastest_symmetric(JobModel(profile, BATCH, 1), workers)
    except NotPossible:
        return 0.0
    return BATCH / estimate_step(plan, profile).step_s


def _allocation(workers: int, per_node: int) -> dict[str, int]:
    return {f"n{first // per_node}": min(per_node, workers - first) for first in range(0, workers, per_node)}


@dataclass(frozen=True)
class Scheduler:
    """What is compared: the plans that a job may have, and how it changes to another."""

    name: str
    paper: str
    family: str
    moves: bool = True
    policy: str = "suika"

    @property
    def run(self) -> PolicyRun:
        return POLICIES[self.policy]

    def cost(self, kind: Kind) -> ChangeCost:
        state_bytes = float(JobModel(profile_of(kind.model.name, kind.tp), BATCH, 1).state_bytes)
        if self.moves:
            return MoveCost(TIMINGS.change_s, state_bytes, 1e9 * FULL.rack)
        return RestartCost(TIMINGS.restart_s, state_bytes, TIMINGS.storage_bytes_per_s)


NON_ELASTIC = Scheduler("first come, first served", "Non-elastic", "data-parallel", policy="none")
SIA = Scheduler("after Sia, more replicas", "Sia", "data-parallel", moves=False, policy="sia")
RUBICK = Scheduler("after Rubick, symmetric plans", "Rubick", "symmetric", moves=False, policy="rubick")
SUIKA_DP = Scheduler("Suika, more replicas", "Suika-DP", "data-parallel")
SUIKA = Scheduler("Suika", "Suika", "asymmetric")
SCHEDULERS = (NON_ELASTIC, SIA, RUBICK, SUIKA_DP, SUIKA)


@dataclass(frozen=True)
class Workload:
    """Jobs for a cluster: those of a trace, whose device-seconds they take, or made up."""

    nodes: int = 8
    hours: float = 8.0
    load: float = LOAD
    mix: Mapping[str, float] = field(default_factory=lambda: {"S": 3.0, "M": 1.0, "L": 1.0})
    intensity: float = 1.0
    most: int = 64
    seed: int = 0
    trace: str = ""

    def jobs(self) -> list[tuple[Kind, float, float]]:
        """Returns the model, the submission and the seconds on its default plan of each."""
        devices = self.nodes * PER_NODE
        chance = random.Random(f"{self.seed}:models")
        arrivals, device_s = self._arrivals(devices)
        kinds = []
        for _ in arrivals:
            size = chance.choices(list(self.mix), list(self.mix.values()))[0]
            kinds.append(chance.choice([kind for kind in KINDS if kind.size == size and kind.model.name != TOO_LARGE]))
        sized = [replace(one, devices=kind.basic) for one, kind in zip(arrivals, kinds, strict=True)]
        sized = scaled_to(sized, device_s)
        found = [(kind, one.at_s / self.intensity, one.duration_s) for kind, one in zip(kinds, sized, strict=True)]
        return [one for one in found if one[0].basic <= devices]

    def _arrivals(self, devices: int) -> tuple[list[Arrival], float]:
        """Returns jobs whose models are open, and the device-seconds that they take."""
        if self.trace:
            arrivals = read_jobs(HERE / "traces" / self.trace)
            return arrivals, sum(one.devices * one.duration_s for one in arrivals)
        count = round(JOBS_PER_DEVICE_HOUR * devices * self.hours)
        made = philly_like(count, HOUR_S * self.hours, self.seed, sizes={1: 1.0}, longest_s=24 * HOUR_S)
        return made, self.load * devices * HOUR_S * self.hours


_KNOWN: dict[str, ClusterRun] = {}


def simulated(
    scheduler: Scheduler,
    workload: Workload,
    network: Network = FULL,
    settings: SuikaSettings | None = None,
    error: float = 0.0,
) -> ClusterRun:
    """One cluster under one scheduler, once; `error`: the deviation of the speeds that the scheduler is told."""
    settings = settings if settings is not None and scheduler.policy in ("none", "suika") else SuikaSettings()
    key = repr((scheduler, workload, network, settings, error))
    if key not in _KNOWN:
        _KNOWN[key] = _simulated(scheduler, workload, network, settings, error)
    return _KNOWN[key]


def _simulated(
    scheduler: Scheduler, workload: Workload, network: Network, settings: SuikaSettings, error: float
) -> ClusterRun:
    jobs = []
    chance = random.Random(f"{workload.seed}:error")
    for number, (kind, at_s, duration_s) in enumerate(workload.jobs()):
        most = min(workload.most, max(8 * kind.basic, kind.basic))
        rates = rates_of(kind.model.name, scheduler.family, most, network)
        basic_rate = rates_of(kind.model.name, "data-parallel", kind.basic, network)[kind.basic]
        rates = {**rates, kind.basic: max(basic_rate, rates[kind.basic] if scheduler.run.elastic else 0.0)}
        cost = scheduler.cost(kind)
        told = None
        if error:
            told = TableSpeed({size: rate * max(0.1, chance.gauss(1, error)) for size, rate in rates.items()}, cost)
        state = JobState(f"job{number}", at_s, kind.basic, most, unit=kind.tp)
        jobs.append(scheduler.run.job(ClusterJob(state, duration_s * basic_rate, TableSpeed(rates, cost), told)))
    nodes: Sequence[ClusterNode] = cluster_nodes(workload.nodes, PER_NODE, 16)
    run_settings = ClusterSettings(interval_s=scheduler.run.interval_s)
    policy = scheduler.run.make(settings)
    return simulate_cluster(jobs, nodes, policy, scheduler.name, settings=run_settings)


def mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


def figure_11(report: Report, seeds: int, trace: str = "") -> dict[str, list[ClusterRun]]:
    """JCT, weighted JCT and utilisation on 64 devices."""
    paper = {  # non-elastic / x of JCT, WJCT
        "Non-elastic": (1.0, 1.0),
        "Sia": (1.67 / 1.29, 1.47 / 1.37),
        "Rubick": (1.67 / 1.31, 1.47 / 1.34),
        "Suika-DP": (1.67 / 1.18, 1.47 / 1.19),
        "Suika": (1.67, 1.47),
    }
    runs = {
        one.paper: [simulated(one, Workload(seed=seed, trace=trace)) for seed in range(seeds)] for one in SCHEDULERS
    }
    base = runs["Non-elastic"]
    for one in SCHEDULERS:
        here = runs[one.paper]
        ratios = [first.jct_s / run.jct_s for first, run in zip(base, here, strict=True)]
        report.row(
            {
                "figure": "11",
                "jobs": trace or "made up",
                "scheduler": f"{one.paper}: {one.name}",
                "JCT min": mean(run.jct_s for run in here) / 60,
                "JCT, x better: paper": paper[one.paper][0],
                "ours": mean(ratios),
                "least": min(ratios),
                "greatest": max(ratios),
                "WJCT: paper": paper[one.paper][1],
                "ours ": mean(first.wjct_s / run.wjct_s for first, run in zip(base, here, strict=True)),
                "used": mean(run.utilisation for run in here),
                "used, x: paper": 1.595 if one is SUIKA else None,
                " ours": mean(run.utilisation / first.utilisation for first, run in zip(base, here, strict=True)),
            }
        )
    return runs


def figure_13(report: Report, runs: Mapping[str, Sequence[ClusterRun]]) -> None:
    """13a: throughput of LLaMA2-13B by devices and plans. 13b: what a job loses by others' growth."""
    for devices in (16, 24, 32, 40, 48, 56, 64):
        row: dict[str, str | float | int | None] = {"figure": "13a", "devices": devices}
        for family in ("data-parallel", "symmetric", "asymmetric"):
            rates = rates_of("LLaMA2-13B", family, 64, FULL)
            row[family] = TableSpeed(rates).rate({"n": devices})
        report.row(row)
    paper = {"Suika": 60.0}
    for name, here in runs.items():
        if name == "Non-elastic":
            continue
        later = [
            job.jct_s - first.jobs[job.name].jct_s
            for first, run in zip(runs["Non-elastic"], here, strict=True)
            for job in run.ended
        ]
        report.row(
            {
                "figure": "13b",
                "scheduler": name,
                "jobs": len(later),
                "later by more than 60 s": sum(one > 60 for one in later),
                "the most s": max(later),
                "paper: the most s": paper.get(name),
            }
        )


def figure_14(report: Report, runs: Mapping[str, Sequence[ClusterRun]]) -> None:
    """14a: what a change costs in figure 11's runs. 14b: LLaMA2-13B from 16 to 24 devices, technique by technique."""
    suika_s = mean(run.change_s for run in runs["Suika"] if run.change_s)
    for name, ratio in (("Sia", 4.89), ("Rubick", 4.44), ("Suika", 1.0)):
        here = [run.change_s for run in runs[name] if run.change_s]
        report.row(
            {
                "figure": "14a",
                "scheduler": name,
                "a change s": mean(here) if here else 0.0,
                "of Suika's: paper": ratio,
                "ours": mean(here) / suika_s if here else 0.0,
                "changes": sum(run.changes for run in runs[name]),
            }
        )
    kind = BY_NAME["LLaMA2-13B"]
    state = float(JobModel(profile_of(kind.model.name, kind.tp), BATCH, 1).state_bytes)
    storage_s = 2 * state / TIMINGS.storage_bytes_per_s
    speed = _speed(kind, "asymmetric", FULL)
    routes_s = speed.change_s(_allocation(4, 2), _allocation(6, 2))
    all_moved_s = TIMINGS.change_s + state / 24 / (1e9 * FULL.rack)
    for what, seconds in (
        ("checkpoint and restart", TIMINGS.restart_s + storage_s),
        ("start beside training", storage_s),
        ("from device to device, all of it", all_moved_s),
        ("only what is missing, beside a step", routes_s),
    ):
        report.row({"figure": "14b", "technique": what, "seconds": seconds})


def figure_15(report: Report, seeds: int) -> None:
    """Sensitivity: JCT of the non-elastic scheduler, of Sia's and Rubick's plans, over Suika's."""

    def row(what: str, case: str, run: Callable[[Scheduler, int], ClusterRun]) -> None:
        found = {one.paper: [run(one, seed) for seed in range(seeds)] for one in (NON_ELASTIC, SIA, RUBICK, SUIKA)}
        cells: dict[str, str | float | None] = {"figure": what, "case": case}
        cells["Suika's JCT min"] = mean(one.jct_s for one in found["Suika"]) / 60
        for name in ("Non-elastic", "Sia", "Rubick"):
            pairs = zip(found[name], found["Suika"], strict=True)
            cells[f"{name} / Suika"] = mean(one.jct_s / suika.jct_s for one, suika in pairs)
        report.row(cells)

    networks = {"8 x 400 Gbit/s": FULL, "4 x 400 Gbit/s": Network(rack=25.0), "10 Gbit/s": Network(rack=1.25 / 8)}
    for case, network in networks.items():
        row("15a", case, lambda one, seed, network=network: simulated(one, Workload(seed=seed), network))  # type: ignore[misc]
    for intensity in (0.75, 1.0, 1.25, 1.5, 2.0):
        row(
            "15b",
            f"intervals / {intensity:g}",
            lambda one, seed, intensity=intensity: simulated(one, Workload(seed=seed, intensity=intensity)),  # type: ignore[misc]
        )
    for case, small in (("S 3 : 2", 3.0), ("S 4 : 1", 4.0), ("S 2 : 3", 2.0)):
        mix = {"S": small, "M": (5 - small) / 2, "L": (5 - small) / 2}
        row("15c", case, lambda one, seed, mix=mix: simulated(one, Workload(seed=seed, mix=mix)))  # type: ignore[misc]
    for knob in (0.25, 0.5, 0.75, 1.0, 1.5, 2.0):
        settings = SuikaSettings(aggressiveness=knob)
        row(
            "15d",
            f"lambda {knob:g}",
            lambda one, seed, settings=settings: simulated(one, Workload(seed=seed), settings=settings),  # type: ignore[misc]
        )
    shortest = SuikaSettings(queue="sjf")
    row("15e", "shortest job first", lambda one, seed: simulated(one, Workload(seed=seed), settings=shortest))
    row("15f", "philly_8h.csv", lambda one, seed: simulated(one, Workload(seed=seed, trace="philly_8h.csv")))
    for case, load in (("load 0.4", 0.4), ("load 0.8", 0.8), ("load 1", 1.0)):
        row("15f", case, lambda one, seed, load=load: simulated(one, Workload(seed=seed, load=load)))  # type: ignore[misc]


def wrong_estimates(report: Report, seeds: int) -> None:
    """Section 5.3: JCT if the scheduler is told speeds with errors."""
    base = [simulated(SUIKA, Workload(seed=seed)).jct_s for seed in range(seeds)]
    for error, paper in ((0.1, 1.02), (0.2, 1.06)):
        here = [simulated(SUIKA, Workload(seed=seed), error=error).jct_s for seed in range(seeds)]
        ratio = mean(one / other for one, other in zip(here, base, strict=True))
        report.row({"section": "5.3", "error": error, "JCT: paper": paper, "ours": ratio})


def figure_16(report: Report, seeds: int, hours: float, nodes: int, sizes: Workload | None = None) -> None:
    """1,024 devices, 24 hours; JCT and what a decision takes. `sizes`: for the mix of models, and how many devices."""
    sizes = sizes or Workload()
    paper = {"Non-elastic": 1.63, "Sia": 1.32, "Rubick": 1.32, "Suika": 1.0}
    found = {}
    for one in (NON_ELASTIC, SIA, RUBICK, SUIKA):
        workloads = [replace(sizes, nodes=nodes, hours=hours, seed=seed) for seed in range(seeds)]
        found[one.paper] = [simulated(one, workload) for workload in workloads]
    for name, runs in found.items():
        ratios = [run.jct_s / suika.jct_s for run, suika in zip(runs, found["Suika"], strict=True)]
        decisions = [1e3 * seconds for run in runs for seconds in run.decision_s]
        report.row(
            {
                "figure": "16",
                "models": ", ".join(sizes.mix),
                "scheduler": name,
                "devices": nodes * PER_NODE,
                "jobs": sum(len(run.ended) for run in runs),
                "JCT min": mean(run.jct_s for run in runs) / 60,
                "of Suika's: paper": paper[name],
                "ours": mean(ratios),
                "least": min(ratios),
                "greatest": max(ratios),
                "decisions": len(decisions),
                "p50 ms": percentile(decisions, 0.5),
                "p90 ms": percentile(decisions, 0.9),
                "p99 ms": percentile(decisions, 0.99),
            }
        )


def suika(report: Report, quick: bool) -> None:
    """Adds all tables."""
    seeds = 2 if quick else SEEDS
    figure_11(report, seeds, "philly_8h.csv")
    runs = figure_11(report, seeds)
    figure_13(report, runs)
    figure_14(report, runs)
    wrong_estimates(report, seeds)
    figure_15(report, 1 if quick else 2)
    figure_16(report, 1, 4.0 if quick else 24.0, 32 if quick else 128)


def figure_16_xl(report: Report, quick: bool) -> None:
    """Figure 16 with the models of size XL; of their share of the jobs the paper says nothing."""
    largest = Workload(mix={"S": 3.0, "M": 1.0, "L": 1.0, "XL": 1.0}, most=256)
    figure_16(report, 1, 4.0 if quick else 24.0, 32 if quick else 128, largest)
