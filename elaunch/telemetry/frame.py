"""One frame of `elaunch ctl top`: what a job is doing now, drawn for a terminal with rich."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import ConsoleOptions, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from elaunch.rendezvous.membership import node_of

PHASE_STYLES = {
    "detect": "red",
    "connect": "yellow",
    "agree": "magenta",
    "plan": "cyan",
    "transfer": "blue",
    "resume": "green",
}
STATE_STYLES = {"member": "green", "ready": "cyan", "starting": "yellow", "done": "dim", "not here": "red"}
HEADING_LINES = 14
"""So many lines of a frame are no workers."""


def frame(
    values: Mapping[str, Any], words: str, ages: Mapping[str, str], options: ConsoleOptions, height: int
) -> RenderableType:
    """Returns a frame.

    Args:
        values: of the job, as `elaunch ctl status --json` has them.
        words: what the job is doing.
        ages: how long ago the last `step` committed and the last `recovery` ended, in words; none that is not known.
        options: of the terminal.
        height: so many lines it may have.
    """
    head = Text.assemble(("job ", "dim"), (values["job"], "bold"), (f" at {values['endpoint']}", "dim"), f": {words}")
    if values["message"]:
        head.append(f": {values['message']}")
    if values["generation"] is not None:
        members = [worker["worker"] for worker in values["workers"] if worker["rank"] is not None]
        head.append(f"\n{_plural(len(members), 'member')} on {_plural(len(set(map(node_of, members))), 'node')}")
        if values["spares"]["wanted"]:
            ready = len(values["spares"]["ready"])
            head.append(f", {ready} of {_plural(values['spares']['wanted'], 'spare')} ready")
        head.append(f", generation {values['generation']}, attempt {values['attempt']}: {values['cause']}", "dim")
    parts: list[RenderableType] = [Panel(head, title="elaunch", title_align="left")]
    if (training := values["training"]) is not None:
        parts += _training(training, ages, options)
    if values["slow"]:
        slow = [f"{slot} takes {ratio:.2f} times as long as others" for slot, ratio in values["slow"].items()]
        parts.append(Text(f"slow: {', '.join(slow)}", "yellow"))
    if remarks := [f"{one['node']} {one['remark']}" for one in values["nodes"] if one["remark"]]:
        parts.append(Text(f"nodes: {', '.join(remarks)}", "yellow"))
    parts += [Text(f"{one['key']}: {one['why']}", "red") for one in values["unreadable"]]
    if values["workers"]:
        parts.append(_workers(values["workers"], max(3, height - HEADING_LINES)))
    return Group(*parts)


def _training(training: Mapping[str, Any], ages: Mapping[str, str], options: ConsoleOptions) -> list[RenderableType]:
    line = Text.assemble((f"step {training['step']:,}", "bold"), f" {ages['step']} ago")
    if training["steps_per_s"] > 0:
        line.append(f"   {training['steps_per_s']:.3g} steps/s", "green")
    if training["has_diverged"]:
        line.append("   the loss is not a finite number", "bold red")
    elif training["loss"] is not None:
        line.append(f"   loss {training['loss']:.6g}")
    if training["copy_lag"]:
        line.append(f"   copies of the state {_plural(training['copy_lag'], 'step')} behind", "yellow")
    recovery = training["recovery"]
    if recovery is None:
        return [line]
    told = Text.assemble(
        ("last recovery ", "bold"), f"{ages['recovery']} ago, in {_duration(recovery['seconds'])}: {recovery['cause']}"
    )
    return [line, told, *_phases(recovery["phases"], options)]


def _phases(phases: Mapping[str, float], options: ConsoleOptions) -> list[RenderableType]:
    """Draws phases as a bar, each as long as it took beside the others, and names them below."""
    taken = {phase: took_s for phase, took_s in phases.items() if took_s > 0}
    total_s = sum(taken.values())
    if not total_s:
        return []
    bar, names, width = Text(), Text(), options.max_width
    block, mark = ("#", "*") if options.ascii_only else ("█", "■")
    for phase, took_s in taken.items():
        style = PHASE_STYLES.get(phase, "white")
        bar.append(block * max(1, round((width - len(taken)) * took_s / total_s)), style)
        names.append(f"{mark} {phase} {_duration(took_s)}  ", style)
    bar.truncate(width)
    return [bar, names]


def _workers(workers: Sequence[Mapping[str, Any]], most: int) -> RenderableType:
    """Draws workers as a table; those in trouble come first where not all have room."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "worker", "state", "speed", "address"):
        table.add_column(name, justify="right" if name == "rank" else "left", no_wrap=True)
    shown = list(workers)
    if len(shown) > most:
        shown.sort(key=lambda one: one["state"] == "member" and one["times_as_long"] <= 1)
        shown = shown[: most - 1]
    for one in shown:
        ratio = one["times_as_long"]
        table.add_row(
            "" if one["rank"] is None else str(one["rank"]),
            one["worker"],
            Text(one["state"], STATE_STYLES.get(one["state"], "")),
            Text(f"{ratio:.2f} times as long", "yellow") if ratio > 1 else "",
            Text(one["address"], "dim"),
        )
    if len(shown) < len(workers):
        table.add_row("", f"and {len(workers) - len(shown)} more")
    return table


def _duration(took_s: float) -> str:
    return f"{took_s * 1e3:.3g} ms" if took_s < 0.9995 else f"{took_s:.3g} s"


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
