"""The jobs and node changes of `slurm_against_simulator.py`, and what is measured before they are run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from benchmarks.cluster_job import BATCH

NODES, DEVICES = 4, 2
UNIT = DEVICES
"""Jobs grow by whole nodes: an agent that is to have fewer devices is replaced by another one."""

SIZES = (2, 4)
"""Workers that jobs have, but for moments."""

TABLES: Mapping[str, Mapping[int, float]] = {
    "good": {n: round(24 * n**0.95, 2) for n in range(1, 7)},
    "poor": {n: round(24 * n**0.75, 2) for n in range(1, 7)},
}
"""Samples per second by workers, which the compute of a job emulates; a step of two takes a second or more."""


@dataclasses.dataclass(frozen=True)
class TraceJob:
    """A job: when it comes, its steps, the devices that it needs and can use, and its table."""

    at_s: float
    name: str
    steps: int
    basic: int
    most: int
    table: str
    priority: int = 0


@dataclasses.dataclass(frozen=True)
class TraceNode:
    """A node that is drained, or is back (`add`)."""

    at_s: float
    kind: str
    node: str


@dataclasses.dataclass(frozen=True)
class ClusterTrace:
    """Jobs that come and nodes that change; in Slurm all of it has to end within `limit_s`."""

    jobs: tuple[TraceJob, ...]
    nodes: tuple[TraceNode, ...]
    limit_s: float

    def events(self) -> list[TraceJob | TraceNode]:
        """Returns all that happens, by time."""
        events: list[TraceJob | TraceNode] = [*self.jobs, *self.nodes]
        return sorted(events, key=lambda one: one.at_s)

    def until(self, end_s: float) -> ClusterTrace:
        """Returns what happens before a time."""
        return dataclasses.replace(
            self,
            jobs=tuple(job for job in self.jobs if job.at_s < end_s),
            nodes=tuple(node for node in self.nodes if node.at_s < end_s),
        )


TRACE = ClusterTrace(
    jobs=(
        TraceJob(0.0, "a", 470, 2, 4, "good"),
        TraceJob(40.0, "b", 290, 2, 4, "poor"),
        TraceJob(85.0, "c", 115, 2, 2, "good", priority=5),
        TraceJob(255.0, "d", 105, 2, 4, "good"),
    ),
    nodes=(TraceNode(130.0, "drain", "n3"), TraceNode(180.0, "add", "n3")),
    limit_s=600.0,
)

CALIBRATION = ClusterTrace(
    jobs=(TraceJob(3.0, "x", 95, 2, 4, "good"), TraceJob(30.0, "z", 14, 2, 2, "good", priority=5)),
    nodes=(TraceNode(0.0, "drain", "n3"), TraceNode(0.0, "drain", "n4")),
    limit_s=240.0,
)
"""x starts on two nodes, gives one of them to z, and gets it again."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """What changes of an allocation take here, in seconds: flags of `elaunch simulate cluster`.

    Attributes:
        interval_s: from one turn of the daemon to the next.
        start_s, join_s, leave_s, change_s: as the flags say.
        overhead_s: of a step beyond its table, by workers.
    """

    interval_s: float
    start_s: float
    join_s: float
    leave_s: float
    change_s: float
    overhead_s: Mapping[int, float]

    def to_json(self) -> str:
        """Returns the text from which `load` makes it again."""
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def load(cls, path: Path) -> Costs:
        """Reads what was measured before."""
        values = json.loads(path.read_text())
        return cls(**values | {"overhead_s": {int(n): seconds for n, seconds in values["overhead_s"].items()}})


def overhead_rates(table: Mapping[int, float], overhead_s: Mapping[int, float]) -> dict[int, float]:
    """Returns the rates that jobs reach: those of a table, less what a step takes beyond it."""
    return {
        workers: round(BATCH / (BATCH / rate + overhead_s[workers]), 3)
        for workers, rate in table.items()
        if workers in overhead_s
    }


def jobs_csv(trace: ClusterTrace, rates: Mapping[str, Mapping[int, float]]) -> str:
    """Returns the jobs as `elaunch simulate cluster` reads them."""
    lines = ["name,submit_s,duration_s,num_gpus,most_gpus,unit,priority,rates"]
    for job in trace.jobs:
        known = rates[job.table]
        text = " ".join(f"{n}={rate}" for n, rate in known.items())
        duration_s = job.steps * BATCH / known[job.basic]
        lines.append(f"{job.name},{job.at_s},{duration_s:.6f},{job.basic},{job.most},{UNIT},{job.priority},{text}")
    return "\n".join(lines) + "\n"


def nodes_csv(trace: ClusterTrace) -> str:
    """Returns the node changes in the same way."""
    return "".join(f"{1000 * one.at_s:.0f},{one.kind},{one.node}\n" for one in trace.nodes)
