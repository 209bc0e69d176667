"""Plots of a simulation, with matplotlib, which `pip install elaunch[plots]` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elaunch.errors import UsageError
from elaunch.simulator.model import JobRun


def plot_jobs(runs: Sequence[JobRun], path: Path) -> None:
    """Draws a job's members and its throughput over time, by strategy, into a file of any kind that matplotlib writes.

    Raises:
        UsageError: matplotlib is not there, or does not write such files.
        OSError: the file cannot be written.
    """
    figure, (above, below) = _axes(2)
    for run in runs:
        times = [span.start_s / 3600 for span in run.spans] + [run.until_s / 3600]
        members = [span.members * run.per_worker for span in run.spans]
        above.step(times, [*members, *members[-1:]], where="post", label=run.strategy)
        rates = [rate for _, rate in run.rates()]
        below.step(times, [*rates, *rates[-1:]], where="post", label=f"{run.strategy}: {run.rate:.4g} samples/s")
    above.set_ylabel("devices")
    below.set_ylabel("samples/s")
    below.set_xlabel("hours")
    below.legend(fontsize="small")
    _write(figure, path)


def _axes(count: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'elaunch[plots]'") from None
    figure = Figure(figsize=(10, 3 * count), layout="constrained")
    return figure, figure.subplots(count, 1, sharex=True)


def _write(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except ValueError as error:  # the ending of its name is not known
        raise UsageError(f"--plot={path}: {error}") from None
