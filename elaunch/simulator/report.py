"""What a simulation prints: tables for people."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from elaunch.rendezvous.membership import names_text
from elaunch.simulator.cluster_model import ClusterRun, JobOutcome
from elaunch.simulator.model import JobRun

Cell = str | int | float


def job_table(runs: Sequence[JobRun]) -> str:
    """Returns a line for each strategy: what the job did in its time, and what for."""
    rows: list[Mapping[str, Cell]] = []
    best = max((run.rate for run in runs), default=0.0)
    for run in runs:
        stopped = sum(run.seconds(kind) for kind in ("detect", "decide", "change", "restart"))
        rows.append(
            {
                "strategy": run.strategy,
                "samples/s": run.rate,
                "of the best": run.rate / best if best else 0.0,
                "steps": run.steps,
                "steps lost": run.undone,
                "trained": run.trained,
                "stopped s": stopped,
                "again s": run.seconds("redo"),
                "waited s": run.seconds("wait"),
                "changes": len(run.changes),
                "chosen": ", ".join(f"{n} {name}" for name, n in Counter(c.policy for c in run.changes).most_common()),
            }
        )
    notes = [f"{run.strategy} waits at the end: {run.note}" for run in runs if run.note]
    return "\n".join([table(rows), *notes])


def change_lines(run: JobRun) -> str:
    """Returns a line for each change of a job's plan."""
    rows: list[Mapping[str, Cell]] = [
        {
            "at s": change.at_s,
            "chosen": change.policy,
            "members": change.members,
            "lost": change.lost,
            "new": change.joined,
            "stopped s": change.stopped_s,
            "moved GB": change.moved_bytes / 1e9,
            "step s": change.step_s,
            "steps lost": change.undone,
            "": change.reason,
        }
        for change in run.changes
    ]
    return f"{run.strategy}\n{table(rows)}" if rows else f"{run.strategy}: no changes"


def cluster_table(runs: Sequence[ClusterRun]) -> str:
    """Returns a line for each policy: how long jobs took, and what the devices did."""
    rows: list[Mapping[str, Cell]] = []
    for run in runs:
        rows.append(
            {
                "policy": run.policy,
                "ended": len(run.ended),
                "JCT s": run.jct_s,
                "weighted": run.wjct_s,
                "waited s": run.waited_s,
                "JCT of the first": run.jct_s / runs[0].jct_s if runs[0].jct_s else 0.0,
                "devices used": run.utilisation,
                "makespan s": run.end_s,
                "changes": run.changes,
                "of a change s": run.change_s,
                "decisions": len(run.decision_s),
                "p50 ms": 1e3 * percentile(run.decision_s, 0.5),
                "p99 ms": 1e3 * percentile(run.decision_s, 0.99),
            }
        )
    lines = [table(rows)]
    for run in runs:
        if run.unplaced:
            lines.append(
                f"{run.policy}: {len(run.unplaced)} jobs found no place to the end: {names_text(run.unplaced)}"
            )
    return "\n".join(lines)


def job_lines(run: ClusterRun) -> str:
    """Returns a line for each job of a cluster."""
    rows: list[Mapping[str, Cell]] = [
        {
            "job": job.name,
            "asked for": job.basic,
            "came s": job.submitted_s,
            "waited s": "-" if job.started_s is None else cell_text(job.started_s - job.submitted_s),
            "JCT s": "-" if job.ended_s is None else cell_text(job.jct_s),
            "devices": job.device_s / held_s if (held_s := _held_s(job, run.end_s)) else 0.0,
            "changes": job.changes,
            "stopped s": job.stopped_s,
        }
        for job in run.jobs.values()
    ]
    return f"{run.policy}\n{table(rows)}"


def decided_lines(run: ClusterRun) -> str:
    """Returns a line for each change of what a job is to have."""
    rows: list[Mapping[str, Cell]] = [
        {
            "at s": one.at_s,
            "job": one.job,
            "is to have": ", ".join(f"{n} on {node}" for node, n in sorted(one.allocation.items())) or "nothing",
            "": one.text,
        }
        for one in run.decided
    ]
    return f"{run.policy}\n{table(rows)}" if rows else f"{run.policy}: no changes"


def _held_s(job: JobOutcome, end_s: float) -> float:
    return 0.0 if job.started_s is None else (end_s if job.ended_s is None else job.ended_s) - job.started_s


def percentile(values: Sequence[float], part: float) -> float:
    """Returns the least value that so great a part of all does not exceed; 0 where there are none."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)] if values else 0.0


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """Returns rows as aligned text; the columns are those of the first row, numbers to the right."""
    names = list(rows[0])
    cells = [names, *([cell_text(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(names))]
    right = [not isinstance(rows[0][name], str) for name in names]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if is_right else cell.ljust(width) for cell, width, is_right in zip(line, widths, right)
        ).rstrip()
        for line in cells
    )


def cell_text(value: Cell) -> str:
    """Returns a value for people: four digits of a number."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return str(value)
