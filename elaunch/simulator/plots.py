"""Plots of a simulation, with matplotlib, which `pip install elaunch[plots]` brings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from elaunch.errors import UsageError
from elaunch.simulator.cluster_model import ClusterRun
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


def plot_cluster(runs: Sequence[ClusterRun], path: Path) -> None:
    """Draws the devices that jobs hold, the jobs that wait and the distribution of completion times, by policy.

    Raises:
        UsageError: matplotlib is not there, or does not write such files.
        OSError: the file cannot be written.
    """
    figure, (above, middle, below) = _axes(3, share=False)
    for run in runs:
        hours = [at_s / 3600 for at_s, *_ in run.usage] + [run.end_s / 3600]
        for axes, place in ((above, 1), (middle, 4)):
            values = [line[place] for line in run.usage]
            axes.step(hours, [*values, *values[-1:]], where="post", label=run.policy)
        found = sorted(job.jct_s / 3600 for job in run.ended)
        below.step(found, [(number + 1) / len(found) for number in range(len(found))], where="post", label=run.policy)
    for axes, text in ((above, "devices used"), (middle, "jobs that wait"), (below, "part of the jobs")):
        axes.set_ylabel(text)
        axes.set_xlabel("hours to completion" if axes is below else "hours")
    below.legend(fontsize="small")
    _write(figure, path)


def _axes(count: int, share: bool = True) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("--plot needs matplotlib, which is not installed: pip install 'elaunch[plots]'") from None
    figure = Figure(figsize=(10, 3 * count), layout="constrained")
    return figure, figure.subplots(count, 1, sharex=share)


def _write(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except ValueError as error:  # the ending of its name is not known
        raise UsageError(f"--plot={path}: {error}") from None
