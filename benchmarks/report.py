"""What every benchmark prints and writes: the machine, a table, the targets and whether they were met.

    report = Report("recovery", notes=["compute is emulated: layers sleep"])
    report.row(launcher="elaunch", median_ms=42.0)
    report.target("recovery, median", 42.0, "ms", below=100.0)
    report.print()
    report.write(args.json)                 # nothing is written when it is None

The JSON form is `{"machine": ..., "rows": [...], "targets": [{"name", "value", "unit", "target", "met"}]}`.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import platform
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

Cell = str | int | float | bool | None


@dataclasses.dataclass(frozen=True)
class Spread:
    """Order statistics of one list of measurements, in the unit of the measurements."""

    count: int
    least: float
    median: float
    p90: float
    worst: float


@dataclasses.dataclass(frozen=True)
class Target:
    """One figure beside what was asked of it; `target` is text such as `< 100`."""

    name: str
    value: float
    unit: str
    target: str
    met: bool


def spread(values: Iterable[float]) -> Spread:
    """The order statistics of `values`; all NaN where there are none.

    The 90th percentile is the smallest value that at least nine tenths of the measurements do not exceed.
    """
    ordered = sorted(values)
    if not ordered:
        return Spread(0, math.nan, math.nan, math.nan, math.nan)
    return Spread(len(ordered), ordered[0], statistics.median(ordered), percentile(ordered, 0.9), ordered[-1])


def percentile(values: Sequence[float], part: float) -> float:
    """The least value that so great a part of all does not exceed; NaN where there are none."""
    return sorted(values)[math.ceil(part * len(values)) - 1] if values else math.nan


def median_interval(values: Iterable[float], confidence: float = 0.95) -> tuple[float, float]:
    """Two of the values between which the median of what they are drawn from lies with that confidence, at least.

    The values on either side of it are as many as heads in throws of a coin (the sign test). With too few values,
    the least and the greatest.
    """
    ordered = sorted(values)
    n, tail, rank = len(ordered), 0.0, 0
    for heads in range(n // 2):
        tail += math.comb(n, heads) / 2**n
        if 2 * tail > 1 - confidence:
            break
        rank = heads
    return ordered[rank], ordered[n - 1 - rank]


def machine() -> dict[str, Cell]:
    """The machine and the versions that the figures belong to; reads /proc, so Linux only in its details."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": _memory_gib(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "load_1m": round(os.getloadavg()[0], 2),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The two flags that every benchmark has."""
    parser.add_argument("--quick", action="store_true", help="a small version, of some minutes at most")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write machine, rows and targets to PATH")


class Report:
    """Rows and targets as they come in; printing and writing them is the last thing a benchmark does."""

    def __init__(self, title: str, notes: Sequence[str] = ()) -> None:
        self.title = title
        self.notes = list(notes)
        self.rows: list[dict[str, Cell]] = []
        self.targets: list[Target] = []
        # Taken now: afterwards the load average would be the benchmark's own.
        self.machine = machine()

    def row(self, cells: Mapping[str, Cell] | None = None, **more: Cell) -> None:
        """Add one row, columns in the order given; rows with the same columns in sequence print as one table."""
        self.rows.append({**(cells or {}), **more})

    def target(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        below: float | None = None,
        at_most: float | None = None,
        at_least: float | None = None,
    ) -> None:
        """Add one target: exactly one of the bounds says what was asked. NaN (not measured) never meets it."""
        assert [below, at_most, at_least].count(None) == 2, "a target has exactly one bound"
        if below is not None:
            self.targets.append(Target(name, value, unit, f"< {below:.4g}", value < below))
        if at_most is not None:
            self.targets.append(Target(name, value, unit, f"<= {at_most:.4g}", value <= at_most))
        if at_least is not None:
            self.targets.append(Target(name, value, unit, f">= {at_least:.4g}", value >= at_least))

    def print(self) -> None:
        print(f"\n{self.title}")
        print("machine: " + ", ".join(f"{name} {value}" for name, value in self.machine.items()))
        for group in _tables(self.rows):
            print()
            print(table(group))
        if self.targets:
            print()
            print(table([_target_row(target) for target in self.targets]))
        for note in self.notes:
            print(textwrap.fill(note, 120, initial_indent="- ", subsequent_indent="  ", replace_whitespace=False))

    def write(self, path: Path | None) -> None:
        """Write the JSON form to `path`, if there is one. NaN (nothing measured) becomes null."""
        if path is None:
            return
        document = {
            "machine": self.machine,
            "rows": [_finite(row) for row in self.rows],
            "targets": [_finite(dataclasses.asdict(target)) for target in self.targets],
            "notes": self.notes,
        }
        path.write_text(json.dumps(document, indent=1) + "\n")


def table(rows: Sequence[Mapping[str, Cell]]) -> str:
    """`rows` as aligned text; the columns are those of the first row."""
    columns = list(rows[0])
    cells = [columns] + [[_text(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [isinstance(rows[0][column], int | float) for column in columns]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, numeric)
        )
        for line in cells
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def _tables(rows: Sequence[dict[str, Cell]]) -> list[list[dict[str, Cell]]]:
    groups: list[list[dict[str, Cell]]] = []
    for row in rows:
        if groups and list(groups[-1][0]) == list(row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _target_row(target: Target) -> dict[str, Cell]:
    met = "yes" if target.met else "not measured" if math.isnan(target.value) else "NO"
    return {"target": target.name, "value": target.value, "unit": target.unit, "asked": target.target, "met": met}


def _text(value: Cell) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _finite(row: Mapping[str, Cell]) -> dict[str, Cell]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def _memory_gib() -> float | None:
    total = _field("/proc/meminfo", "MemTotal")
    return round(int(total.split()[0]) / 2**20, 1) if total else None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
