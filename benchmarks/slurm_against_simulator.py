"""The same jobs and nodes in a real Slurm of four nodes of this host, under the real daemon, and in the simulator.

    python benchmarks/slurm_against_simulator.py                 # about eight minutes; needs root, slurm-wlm and munge

Compute is emulated (`cluster_job.py`); Slurm, etcd, daemon, agents, workers, messages and commits are real. First the
rates and what changes cost are measured, in runs of their own:

    rates       the job alone, by workers
    the rest    one job that starts, grows, gives devices back to another and gets them again, in the same Slurm

Then the trace is run, and `elaunch simulate cluster` is given the same trace and what was measured before. Jobs come
and nodes change so far apart that no decision depends on which of two things happens first; `least gap` says how far.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.cluster_job import BATCH
from benchmarks.cluster_trace import (
    CALIBRATION,
    DEVICES,
    NODES,
    SIZES,
    TABLES,
    TRACE,
    UNIT,
    ClusterTrace,
    Costs,
    TraceJob,
    TraceNode,
    jobs_csv,
    nodes_csv,
    overhead_rates,
)
from benchmarks.commits import Commit, commits_of
from benchmarks.jobs import ELAUNCH, HERE, limit_time, python_path
from benchmarks.report import Report, add_arguments
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.scheduler.service.documents import FINAL, AgentStage, by_name
from elaunch.scheduler.service.stored import Stored, read_all
from elaunch.scheduler.service.submit import job_spec, submit
from elaunch.scheduler.speeds import TableSpeed
from tests.helpers import Spawner
from tests.slurm import TestSlurm, slurm

POLL_S = 0.1
WARM = ("--warm-start", "--preload=torch,elaunch.workers.data_parallel.job")
"""The workers of an agent share its imports: all nodes share the cores of this host."""

ALONE_S = 8.0
WARM_STEPS = 3
"""Of a run alone; they do not count."""

Decision = tuple[str, tuple[tuple[str, int], ...]]
"""A job, and what it is to have from then on."""


@dataclasses.dataclass
class AgentSpan:
    """An agent of a job; seconds of the trace: when it was asked for, when to leave, when the daemon saw its end."""

    job: str
    number: int
    devices: int
    asked_s: float
    leaving_s: float | None = None
    ended_s: float | None = None


@dataclasses.dataclass
class RealRun:
    """What has become of a trace in Slurm, in seconds of the trace.

    Attributes:
        decided: what the daemon wrote: (seconds, job, what the job is to have).
        commits: of each job, with Unix times; `start_t` is that of the trace's beginning.
        agents: of all jobs.
        turn_s: from one turn of the daemon to the next, in the median.
        cpu: busy cores of the whole machine, in the mean.
    """

    start_t: float
    decided: list[tuple[float, str, Mapping[str, int]]]
    commits: dict[str, list[Commit]]
    agents: list[AgentSpan]
    turn_s: float
    cpu: float


def run_real(trace: ClusterTrace, rates: Mapping[str, Mapping[int, float]], folder: Path, interval_s: float) -> RealRun:
    """Runs a trace in a Slurm of its own."""
    folder.mkdir()
    spawn = Spawner(folder)
    server = EmbeddedEtcd(str(folder / "etcd"))
    server.start()
    try:
        server.wait_ready(20.0)
        store = EtcdStore(server.endpoint, timeout_s=5.0)
        with contextlib.closing(store), slurm(spawn, NODES, DEVICES) as commands:
            env = {
                "SLURM_CONF": str(commands.configuration),
                "PET_RDZV_ENDPOINT": server.endpoint,
                "OMP_NUM_THREADS": "1",
            }
            daemon = spawn(
                [
                    *[*ELAUNCH, "schedule", "run", f"--folder={folder / 'agents'}", "--devices=cpu"],
                    *[f"--interval={interval_s}", f"--metrics={folder / 'metrics'}"],
                ],
                env=env,
                name="daemon",
            )
            try:
                return _Watch(trace, rates, folder, store, commands).run()
            finally:
                daemon.end()
    finally:
        server.stop()


class _Watch:
    """Does what the trace says, and looks at what comes of it."""

    def __init__(
        self,
        trace: ClusterTrace,
        rates: Mapping[str, Mapping[int, float]],
        folder: Path,
        store: EtcdStore,
        commands: TestSlurm,
    ) -> None:
        self._trace, self._rates, self._folder = trace, rates, folder
        self._store, self._slurm = store, commands
        self._start_t = 0.0
        self._placed: dict[str, Mapping[str, int]] = {}
        self._decided: list[tuple[float, str, Mapping[str, int]]] = []
        self._agents: dict[tuple[str, int], AgentSpan] = {}
        self._turns: list[float] = []

    def run(self) -> RealRun:
        while not (self._folder / "metrics").exists():  # the daemon leads and looks
            time.sleep(POLL_S)
        self._start_t, busy_s = time.time(), _busy_s()
        coming = self._trace.events()
        while True:
            now_s = time.time() - self._start_t
            while coming and coming[0].at_s <= now_s:
                self._do(coming.pop(0))
            stored = read_all(self._store, "main")
            self._look(stored)
            stages = [stored.progress_of(spec).stage for spec in stored.jobs]
            if not coming and all(stage in FINAL for stage in stages) and not self._held(stored):
                break
            if now_s > self._trace.limit_s:
                raise SystemExit(f"after {now_s:.0f} s jobs are {stages}; logs are in {self._folder}")
            time.sleep(POLL_S)
        took_s = time.time() - self._start_t
        turns = [later - earlier for earlier, later in itertools.pairwise(self._turns)]
        commits = {job.name: self._commits(job.name) for job in self._trace.jobs}
        return RealRun(
            self._start_t,
            self._decided,
            commits,
            list(self._agents.values()),
            statistics.median(turns),
            (_busy_s() - busy_s) / took_s,
        )

    def _do(self, event: TraceJob | TraceNode) -> None:
        if isinstance(event, TraceJob):
            values = {
                "name": event.name,
                "basic": event.basic,
                "most": event.most,
                "unit": UNIT,
                "priority": event.priority,
                "rates": {str(n): rate for n, rate in self._rates[event.table].items()},
                "folder": str(self._folder),
                "command": [
                    *[*WARM, "--events", str(self._folder / f"{event.name}-%n.jsonl"), str(HERE / "cluster_job.py")],
                    *[f"--steps={event.steps}", "--rates"],
                    *[f"{n}={rate}" for n, rate in TABLES[event.table].items()],
                ],
            }
            submit(self._store, "main", job_spec(values, time.time()))
            return
        state = ["State=DRAIN", "Reason=trace"] if event.kind == "drain" else ["State=RESUME"]
        self._slurm("scontrol", "update", f"NodeName={event.node}", *state)

    def _look(self, stored: Stored) -> None:
        with contextlib.suppress(OSError):
            turn_t = (self._folder / "metrics").stat().st_mtime
            if not self._turns or turn_t > self._turns[-1]:
                self._turns.append(turn_t)
        decided_s = stored.schedule.changed_t - self._start_t
        for name, placement in sorted(by_name(stored.schedule.placements).items()):
            allocation = dict(placement.allocation)
            if allocation != self._placed.get(name, {}):
                self._decided.append((decided_s, name, allocation))
            self._placed[name] = allocation
        for spec in stored.jobs:
            agents = {agent.number: agent for agent in stored.progress_of(spec).agents}
            for agent in agents.values():
                key = spec.name, agent.number
                since_s = agent.since_t - self._start_t
                span = self._agents.setdefault(key, AgentSpan(*key, agent.devices, since_s))
                if agent.stage is AgentStage.LEAVING and span.leaving_s is None:
                    span.leaving_s = since_s
            for (name, number), span in self._agents.items():
                if name == spec.name and number not in agents and span.ended_s is None:
                    span.ended_s = time.time() - self._start_t

    def _held(self, stored: Stored) -> bool:
        return any(stored.progress_of(spec).agents for spec in stored.jobs)

    def _commits(self, job: str) -> list[Commit]:
        lines = [
            json.loads(line)
            for path in sorted(self._folder.glob(f"{job}-*.jsonl"))
            for line in path.read_text().splitlines()
        ]
        return commits_of(lines)


def _busy_s() -> float:
    """Processor seconds of everything that has run on this machine."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


# -- what is measured before ------------------------------------------------------------------------------------------


def measure_overheads(folder: Path) -> dict[int, float]:
    """Returns what a step takes beyond the table, in seconds by workers, of the job alone."""
    found = {}
    table = TABLES["good"]
    for workers in SIZES:
        log = folder / f"alone-{workers}.jsonl"
        steps = WARM_STEPS + max(4, int(ALONE_S * table[workers] / BATCH))
        command = [
            *[*ELAUNCH, "--standalone", f"--nproc-per-node={workers}", *WARM, "--events", str(log)],
            *[str(HERE / "cluster_job.py"), f"--steps={steps}", "--rates"],
            *[f"{n}={rate}" for n, rate in table.items()],
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
        subprocess.run(command, check=True, timeout=120, env=env, stdin=subprocess.DEVNULL, capture_output=True)
        times = [one.t for one in commits_of(json.loads(line) for line in log.read_text().splitlines())]
        steps_s = [later - earlier for earlier, later in itertools.pairwise(times[WARM_STEPS:])]
        found[workers] = statistics.mean(steps_s) - BATCH / table[workers]
    return found


def costs_of(run: RealRun, rates: Mapping[str, Mapping[int, float]], trace: ClusterTrace) -> Costs:
    """Returns what starting, joining, leaving and changing took in a run, in the mean."""
    half_s = run.turn_s / 2  # what is seen at a turn has happened since the last one
    starts, joins, leaves, changes = [], [], [], []

    def step_s(table: str, commit: Commit) -> float:
        return BATCH / TableSpeed(rates[table]).rate({"": max(commit.members, SIZES[0])})

    for job in trace.jobs:
        agents = [agent for agent in run.agents if agent.job == job.name]
        commits = run.commits[job.name]
        first_s = commits[0].t - run.start_t - step_s(job.table, commits[0])
        starts.append(first_s - agents[0].asked_s)
        for before, after in itertools.pairwise(commits):
            if after.members == before.members:
                continue
            stall_s = after.t - before.t - step_s(job.table, after)
            changes.append(max(0.0, stall_s))
            if after.members > before.members:
                asked_s = max(agent.asked_s for agent in agents if agent.asked_s < after.t - run.start_t)
                joins.append(before.t - run.start_t - asked_s)
        for agent in agents:
            assert agent.ended_s is not None
            from_s = commits[-1].t - run.start_t
            if agent.leaving_s is not None and agent.leaving_s < from_s:
                from_s = agent.leaving_s
            leaves.append(agent.ended_s - from_s - half_s)
    return Costs(
        interval_s=run.turn_s,
        start_s=statistics.mean(starts),
        join_s=statistics.mean(joins),
        leave_s=statistics.mean(leaves),
        change_s=statistics.mean(changes),
        overhead_s={},
    )


def calibrate(folder: Path, interval_s: float) -> Costs:
    """Measures rates and costs, in runs of their own."""
    overhead_s = measure_overheads(folder)
    rates = {name: overhead_rates(table, overhead_s) for name, table in TABLES.items()}
    run = run_real(CALIBRATION, rates, folder / "calibration", interval_s)
    return dataclasses.replace(costs_of(run, rates, CALIBRATION), overhead_s=overhead_s)


# -- the simulator ----------------------------------------------------------------------------------------------------


def run_simulated(
    trace: ClusterTrace, rates: Mapping[str, Mapping[int, float]], costs: Costs, folder: Path
) -> dict[str, Any]:
    """Runs the trace by `elaunch simulate cluster`; returns what it writes."""
    jobs, nodes, out = folder / "jobs.csv", folder / "nodes.csv", folder / "simulated.json"
    jobs.write_text(jobs_csv(trace, rates))
    nodes.write_text(nodes_csv(trace))
    command = [
        *[*ELAUNCH, "simulate", "cluster", f"--jobs={jobs}", f"--nodes={NODES}x{DEVICES}", "--policies=suika"],
        *([f"--trace={nodes}"] if trace.nodes else []),
        *["--state=0", f"--interval={costs.interval_s}", f"--start={costs.start_s}", f"--join={costs.join_s}"],
        *[f"--leave={costs.leave_s}", f"--change={costs.change_s}", "--changes", f"--json={out}"],
    ]
    print(" ".join(["elaunch", *command[len(ELAUNCH) :]]))
    env = os.environ | {"PYTHONPATH": python_path()}
    print(subprocess.run(command, check=True, timeout=60, env=env, capture_output=True, text=True).stdout)
    (run,) = json.loads(out.read_text())["runs"]
    found: dict[str, Any] = run
    return found


# -- both ------------------------------------------------------------------------------------------------------------


def compare(report: Report, trace: ClusterTrace, real: RealRun, simulated: Mapping[str, Any]) -> None:
    """Adds a row for each job and each decision, and the targets."""
    outcomes = {job["name"]: job for job in simulated["jobs"]}
    errors = []
    for job in trace.jobs:
        commits = real.commits[job.name]
        end_s, simulated_s = commits[-1].t - real.start_t, outcomes[job.name]["ended_s"]
        jct_s, simulated_jct_s = end_s - job.at_s, simulated_s - job.at_s
        errors.append(simulated_jct_s / jct_s - 1)
        begun = next(at_s for at_s, name, _ in real.decided if name == job.name)
        report.row(
            {
                "job": job.name,
                "came s": job.at_s,
                "steps": len(commits),
                "of": job.steps,
                "given devices s": begun,
                "simulated s": outcomes[job.name]["started_s"],
                "ended s": end_s,
                "simulated end s": simulated_s,
                "JCT s": jct_s,
                "simulated JCT s": simulated_jct_s,
                "off by": f"{errors[-1]:+.1%}",
            }
        )
    same = different = 0
    for one, other in aligned(real_decisions(real), simulated_decisions(simulated)):
        equal = one is not None and other is not None and one[1] == other[1]
        same, different = same + equal, different + (not equal)
        report.row(
            {
                "decided s": one[0] if one else None,
                "simulated s": other[0] if other else None,
                "job": (one or other or (0.0, ("", ())))[1][0],
                "is to have": _text(one),
                "simulated": "the same" if equal else _text(other),
            }
        )
    samples = sum(len(commits) for commits in real.commits.values()) * BATCH
    real_s = max(commits[-1].t for commits in real.commits.values()) - real.start_t
    ratio = (sum(job["samples"] for job in outcomes.values()) / simulated["end_s"]) / (samples / real_s)
    last_s = max(at_s for at_s, _ in simulated_decisions(simulated))
    times = [at_s for at_s in sorted(causes(trace, outcomes)) if at_s <= last_s]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    report.row(
        {
            "": "whole trace",
            "samples": samples,
            "took s": real_s,
            "simulated": simulated["end_s"],
            "samples/s": samples / real_s,
            "simulated/real": ratio,
            "busy cores": real.cpu,
            "least gap s": min(gaps),
        }
    )
    report.target("throughput, simulated against real", abs(ratio - 1), "", at_most=0.05)
    report.target("decisions that differ", different, f"of {same + different}", at_most=0)


def add_costs(report: Report, name: str, costs: Costs) -> None:
    """Adds a row of what changes took, and steps beyond their tables."""
    seconds = {what: value for what, value in dataclasses.asdict(costs).items() if what != "overhead_s"}
    more = {f"step of {n}, ms more": 1e3 * value for n, value in costs.overhead_s.items()}
    report.row({"what changes take": name, **seconds, **more})


def overheads(run: RealRun, trace: ClusterTrace) -> dict[int, float]:
    """Returns what steps took beyond their tables, in seconds by workers."""
    found: dict[int, list[float]] = {n: [] for n in SIZES}
    for job in trace.jobs:
        for before, after in itertools.pairwise(run.commits[job.name]):
            if before.members == after.members and after.members in found:
                found[after.members].append(after.t - before.t - BATCH / TABLES[job.table][after.members])
    return {n: statistics.mean(some) for n, some in found.items() if some}


def real_decisions(run: RealRun) -> list[tuple[float, Decision]]:
    return [(at_s, (job, tuple(sorted(allocation.items())))) for at_s, job, allocation in run.decided]


def simulated_decisions(run: Mapping[str, Any]) -> list[tuple[float, Decision]]:
    rows = sorted(run["decided"], key=lambda one: (one["at_s"], one["job"]))
    return [(one["at_s"], (one["job"], tuple(sorted(one["allocation"].items())))) for one in rows]


def aligned(
    some: Sequence[tuple[float, Decision]], others: Sequence[tuple[float, Decision]]
) -> Iterator[tuple[tuple[float, Decision] | None, tuple[float, Decision] | None]]:
    """Yields both sequences side by side, the same decisions in one row."""
    matcher = difflib.SequenceMatcher(None, [one[1] for one in some], [one[1] for one in others], autojunk=False)
    for _, low, high, other_low, other_high in matcher.get_opcodes():
        yield from itertools.zip_longest(some[low:high], others[other_low:other_high])


def causes(trace: ClusterTrace, outcomes: Mapping[str, Mapping[str, Any]]) -> list[float]:
    """Returns when something happens that has the scheduler decide anew."""
    return [*(one.at_s for one in trace.events()), *(job["ended_s"] for job in outcomes.values())]


def _text(one: tuple[float, Decision] | None) -> str:
    return "-" if one is None else ", ".join(f"{n} on {node}" for node, n in one[1][1]) or "nothing"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--interval", type=float, default=1.0, help="of the daemon, in seconds")
    parser.add_argument("--costs", type=Path, help="what was measured before; measured and written, if it is not there")
    parser.add_argument("--folder", type=Path, help="for logs, which are kept; it must not be there")
    parser.add_argument("--limit-s", type=int, default=1200)
    args = parser.parse_args()
    limit_time(args.limit_s)
    trace = TRACE.until(60.0) if args.quick else TRACE
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary) / "logs"
        folder.mkdir(parents=True)
        report = Report("a cluster in Slurm, and simulated", notes=["compute is emulated: workers sleep"])
        if args.costs and args.costs.exists():
            costs = Costs.load(args.costs)
        else:
            costs = calibrate(folder, args.interval)
            if args.costs:
                args.costs.write_text(costs.to_json())
        rates = {name: overhead_rates(table, costs.overhead_s) for name, table in TABLES.items()}
        simulated = run_simulated(trace, rates, costs, folder)
        real = run_real(trace, rates, folder / "real", args.interval)
        seen = dataclasses.replace(costs_of(real, rates, trace), overhead_s=overheads(real, trace))
        add_costs(report, "measured before, as simulated", costs)
        add_costs(report, "in the trace itself", seen)
        compare(report, trace, real, simulated)
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
