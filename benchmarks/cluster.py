"""A cluster on this machine: jobs with an agent for each node, whose nodes can be lost, and what their steps take.

The workloads are those of ElasWave's table 2. A worker stands for a TP group of four tensor-parallel devices, so a node
has two workers.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

from benchmarks.jobs import ELAUNCH, HERE, Job, Training, ask_job
from benchmarks.pipeline import cut
from elaunch.plan import Pipeline, Plan, Stage, pipelines, share, stages
from elaunch.policy.profile import Profile
from elaunch.rendezvous.embedded import EmbeddedEtcd

NODES = 12
PER_NODE = 2

SETTLE = 2
"""Steps after a change that do not count: in the first the state moves, in the next it is copied anew."""

STEP_LIMIT_S = 60.0
PACE_S = 0.4
"""From the start of an agent to that of the next, so that they are known in this order."""

Placement = Literal["pipelines", "ranks"]
"""Which workers a node has. pipelines: neighbouring stages of one pipeline. ranks: those of neighbouring ranks, as
Megatron numbers them: replicas of one stage, mostly."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A workload; `units`: micro-batches of each replica in a step."""

    name: str
    file: str
    pp: int
    dp: int
    micro_batch: int
    units: int

    def profile(self, time_scale: float) -> Profile:
        """What the emulation takes; messages and parameters are so small there that they count as nothing."""
        found = Profile.load(HERE / "profiles" / self.file).scaled(time_scale)
        layers = tuple(
            dataclasses.replace(
                layer, parameter_bytes=0, optimizer_bytes=0, activation_bytes_per_row=0, output_bytes_per_row=0
            )
            for layer in found.layers
        )
        return dataclasses.replace(found, layers=layers, latency_s=0.0)


MODELS = (
    Model("7B", "llama2-7b.json", 3, 8, 4, 12),
    Model("13B", "llama2-13b.json", 6, 4, 2, 24),
    Model("34B", "llama2-34b.json", 8, 3, 1, 24),
)
SMALL = Model("34B, PP 3 x DP 2", "llama2-34b.json", 3, 2, 1, 8)


@dataclasses.dataclass(frozen=True)
class Case:
    """A workload on a cluster, of which up to `lost` nodes are lost."""

    model: Model
    lost: int
    nodes: int = NODES
    placement: Placement = "pipelines"
    per_node: int = PER_NODE

    @property
    def name(self) -> str:
        return self.model.name + (", workers by rank" if self.placement == "ranks" else "")

    @property
    def workers(self) -> int:
        return self.nodes * self.per_node

    def lose(self) -> list[int]:
        """The nodes that are lost, in their order: the last ones."""
        return [self.nodes - 1 - number for number in range(self.lost)]

    def plan(self, profile: Profile) -> Plan:
        """Its workers by node."""
        model, n_layers = self.model, len(profile.layers)
        per_node = self.per_node
        workers = [f"n{number // per_node}/{number % per_node}#0" for number in range(self.workers)]
        batch = model.dp * model.units * model.micro_batch
        spans = cut(n_layers - 2, model.pp)
        if self.placement == "ranks":
            replicas = [workers[stage * model.dp : (stage + 1) * model.dp] for stage in range(model.pp)]
            given = [Stage(layers, tuple((one,) for one in some)) for layers, some in zip(spans, replicas, strict=True)]
            return stages(n_layers, batch, model.micro_batch, given)
        made = []
        for replica in range(model.dp):
            mine = workers[replica * model.pp : (replica + 1) * model.pp]
            units = share(model.dp * model.units, model.dp, replica)
            made.append(Pipeline(units, tuple((layers, (one,)) for layers, one in zip(spans, mine, strict=True))))
        return pipelines(n_layers, batch, model.micro_batch, made)


@dataclasses.dataclass(frozen=True)
class Window:
    """Steps under one plan.

    Attributes:
        steps_s: of each that counts.
        cores: that this job kept busy meanwhile.
        machine_cores: that everything on the machine kept busy.
        members: of the job.
        decision: the last event before, if the job had to decide.
    """

    steps_s: tuple[float, ...]
    cores: float
    machine_cores: float
    members: int
    decision: dict[str, Any] | None = None

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps_s)

    @property
    def policy(self) -> str:
        return str(self.decision["policy"]) if self.decision is not None else ""

    @property
    def estimate_s(self) -> float:
        """Of a step, as the decision had it; NaN if nothing was chosen."""
        candidates = self.decision["candidates"] if self.decision is not None else []
        found = [one["step_s"] for one in candidates if one["policy"] == self.policy and not one["rejected"]]
        return float(found[0]) if found else math.nan

    @property
    def error(self) -> float:
        """Of the estimate, as a part of what was measured."""
        return self.estimate_s / self.step_s - 1


class ClusterJob(Job):
    """An emulated job whose nodes are agents on this machine, with an etcd beside them."""

    def __init__(
        self, case: Case, policy: str, plan: Plan, args: argparse.Namespace, folder: Path, *flags: str
    ) -> None:
        super().__init__(f"{case.name}, --policy={policy}", Training(case.workers, 0.0), folder)
        self.case, self.plan = case, plan
        self._policy = policy
        self._plan = folder / f"{self.log.stem}.plan"
        self._plan.write_text(f"{plan}\n")
        self._etcd = EmbeddedEtcd(str(folder / f"{self.log.stem}.etcd"))
        self._flags = [
            *[f"--profile={HERE / 'profiles' / case.model.file}", f"--plan={self._plan}"],
            *[f"--time-scale={args.time_scale}", f"--row-bytes={args.row_bytes}", "--snapshots=1", *flags],
        ]
        self._agents: list[subprocess.Popen[bytes]] = []
        self._lost: set[int] = set()

    def begin(self) -> None:
        self._etcd.start()
        low = self.case.nodes - self.case.lost
        for node in range(self.case.nodes):
            self._agents.append(
                self.processes.start(
                    [
                        *[*ELAUNCH, f"--nnodes={low}:{self.case.nodes}", f"--nproc-per-node={self.case.per_node}"],
                        *[f"--rdzv-endpoint={self._etcd.endpoint}", "--rdzv-id=policies", f"--node-name=n{node}"],
                        *["--rdzv-conf=last_call_timeout=60,lease_ttl=2", "--max-restarts=0", "--warm-start"],
                        *["--preload=elaunch.workers.layers.job", f"--policy={self._policy}", "--consistency=fast"],
                        *["--events", str(self.log), str(HERE / "emulation.py"), *self._flags],
                    ]
                )
            )
            time.sleep(PACE_S)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._etcd.stop()

    def launcher(self) -> subprocess.Popen[bytes]:
        return self._agents[0]

    def members(self) -> list[str]:
        """Of the generation that trains, by rank."""
        return list(next(line for line in reversed(self.lines) if line["kind"] == "generation")["workers"])

    def lose(self, node: int) -> None:
        """End an agent and its workers as the loss of their machine would."""
        pids = [line["pid"] for line in self.lines if line["kind"] == "worker_started" and line["node"] == f"n{node}"]
        for pid in [*pids, self._agents[node].pid]:
            os.kill(pid, signal.SIGKILL)
        self._lost.add(node)

    def decided(self) -> bool:
        """Whether the job has chosen a plan."""
        return any(line["kind"] == "decision" and line["candidates"] for line in self.lines)

    def wait_members(self, after: int) -> None:
        """Wait until a step commits with those who are left, later than so many commits."""

        def there() -> bool:
            late = self.commits()[after:]
            return bool(late) and late[-1].members == len(self.members()) == self._left

        self.wait(there, f"a step of {self._left} workers", 2 * STEP_LIMIT_S)

    @property
    def _left(self) -> int:
        return (self.case.nodes - len(self._lost)) * self.case.per_node

    def profile(self) -> Profile:
        """What the job has measured."""
        told = f"{self.name}: no profile"
        words = "profile", "--json"
        return Profile.from_json(
            ask_job(*words, job="policies", endpoint=self._etcd.endpoint, limit_s=STEP_LIMIT_S, failed=told)
        )

    def ask(self, plan: Plan) -> None:
        """Have the job go on by another plan."""
        self._plan.write_text(f"{plan}\n")
        words = "plan", "--set", str(self._plan)
        told = f"{self.name}: the plan was not taken"
        ask_job(*words, job="policies", endpoint=self._etcd.endpoint, limit_s=STEP_LIMIT_S, failed=told)

    def window(self, after: int, steps: int, limit_s: float) -> Window:
        """Measure steps with as many members as are left.

        Args:
            after: that many commits, at least, are no part of it; nor are SETTLE steps after a decision.
            steps: to measure.
            limit_s: for all of it.
        """
        members = self._left
        deadline = time.monotonic() + limit_s

        def wait(count: int) -> None:
            self.wait(lambda: first() + count < len(self.commits()), f"{count} steps", deadline - time.monotonic())

        def first() -> int:
            """The commit at which the window begins."""
            decided_t = max((line["t"] for line in self.lines if line["kind"] in ("decision", "transition")), default=0)
            commits = self.commits()
            settled = next(
                (
                    place
                    for place, commit in enumerate(commits)
                    if commit.t > decided_t and commit.members == members and place >= after
                ),
                len(commits),
            )
            return settled + SETTLE

        while True:
            wait(0)
            place, cpu_s, machine_s, began_s = first(), self.processes.cpu_s(), machine_cpu_s(), time.monotonic()
            wait(steps)
            if first() == place:
                break
        took_s = time.monotonic() - began_s
        cpu_s, machine_s = self.processes.cpu_s() - cpu_s, machine_cpu_s() - machine_s
        times = [commit.t for commit in self.commits()[place : place + steps + 1]]
        decisions = [line for line in self.lines if line["kind"] == "decision"]
        return Window(
            tuple(later - earlier for earlier, later in itertools.pairwise(times)),
            cpu_s / took_s,
            machine_s / took_s,
            members,
            decisions[-1] if decisions else None,
        )


def machine_cpu_s() -> float:
    """Processor seconds of everything that has run on this machine."""
    user, nice, system, _, _, *interrupts = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
