"""What a simulation prints: tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
