"""What happens to nodes and which jobs come, from files; what a file has wrong is said with its line and its value.

Nodes, in either of two forms:

    0,add,node1                                     milliseconds, add or remove, a node
    [60000, "remove", {"nodes": ["node-4"]}]        milliseconds; add, remove, no-op or DONE; nodes

Jobs, with a line of names: `submit_s`, `duration_s` and `num_gpus` must be there, `name`, `most_gpus`, `user` (or
`vc`), `model` and `priority` may be; other columns are passed over.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elaunch.errors import UsageError

KINDS = ("add", "remove", "no-op", "DONE")
_FORMS = "expected 'MILLISECONDS,add|remove,NODE' or '[MILLISECONDS, \"add|remove\", {\"nodes\": [NODE, ...]}]'"


@dataclass(frozen=True)
class NodeChange:
    """What happens to the nodes of a cluster at one time.

    Attributes:
        at_s: since the beginning.
        joined: nodes that are there from now on.
        left: nodes that are gone.
        speeds: of nodes that compute faster or slower from now on; 1 is as before.
    """

    at_s: float
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    speeds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Arrival:
    """A job as it is submitted.

    Attributes:
        name: unique.
        at_s: when.
        duration_s: that it takes on the devices that it asks for.
        devices: that it asks for.
        most: that it can use; None: nobody has said.
        user: whose it is.
        model: that it trains, if the trace says.
        priority: higher goes first.
    """

    name: str
    at_s: float
    duration_s: float
    devices: int
    most: int | None = None
    user: str = ""
    model: str = ""
    priority: int = 0


def read_nodes(path: Path) -> list[NodeChange]:
    """Reads a trace of nodes.

    Raises:
        UsageError: names the file, the line and the value that cannot be used.
        OSError: the file cannot be read.
    """
    here: set[str] = set()
    found: list[NodeChange] = []
    for where, at_s, kind, nodes in _node_lines(path):
        if found and at_s < found[-1].at_s:
            raise UsageError(
                f"{where}: {at_s * 1e3:g} ms comes after {found[-1].at_s * 1e3:g} ms; sort the lines by time"
            )
        for node in nodes:
            if (node in here) == (kind == "add"):
                what = "is there already" if kind == "add" else "is not there"
                raise UsageError(f"{where}: {kind} {node!r}, but that node {what}")
            here ^= {node}
        found.append(NodeChange(at_s, *((nodes, ()) if kind == "add" else ((), nodes))))
    if not found:
        raise UsageError(f"{path}: no changes of nodes; {_FORMS} in each line")
    return merged(found)


def merged(changes: Iterable[NodeChange]) -> list[NodeChange]:
    """Returns changes by time, those of one time as one; a node that comes and goes at once is not in it."""
    by_time: dict[float, list[NodeChange]] = {}
    for change in sorted(changes, key=lambda one: one.at_s):
        by_time.setdefault(change.at_s, []).append(change)
    found = []
    for at_s, some in by_time.items():
        state: dict[str, bool] = {}
        speeds: dict[str, float] = {}
        for one in some:
            for nodes, joins in ((one.joined, True), (one.left, False)):
                for node in nodes:
                    if state.pop(node, joins) == joins:
                        state[node] = joins
            speeds |= one.speeds
        joined = tuple(node for node, joins in state.items() if joins)
        left = tuple(node for node, joins in state.items() if not joins)
        found.append(NodeChange(at_s, joined, left, speeds))
    return found


def _node_lines(path: Path) -> Iterator[tuple[str, float, str, tuple[str, ...]]]:
    for number, text in enumerate(path.read_text().splitlines(), 1):
        where = f"{path}:{number}"
        if not (text := text.strip()) or text.startswith("#"):
            continue
        ms, kind, nodes = _json_line(where, text) if text.startswith("[") else _csv_line(where, text)
        if kind in ("no-op", "DONE"):
            nodes = ()
        yield where, ms / 1e3, "add" if kind in ("no-op", "DONE") else kind, nodes


def _csv_line(where: str, text: str) -> tuple[float, str, tuple[str, ...]]:
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != 3 or cells[1] not in KINDS[:2] or not cells[2]:
        raise UsageError(f"{where}: {_FORMS}, found {text[:80]!r}")
    return _number(where, "milliseconds", cells[0]), cells[1], (cells[2],)


def _json_line(where: str, text: str) -> tuple[float, str, tuple[str, ...]]:
    try:
        ms, kind, more = json.loads(text)
        nodes = more.get("nodes", [])
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{where}: {_FORMS}, found {text[:80]!r}") from None
    if kind not in KINDS:
        raise UsageError(f"{where}: expected one of {', '.join(KINDS)}, found {kind!r}")
    if not isinstance(nodes, list) or not all(isinstance(node, str) and node for node in nodes):
        raise UsageError(f"{where}: nodes must be a list of names, found {nodes!r}")
    return _number(where, "milliseconds", ms), kind, tuple(nodes)


def read_jobs(path: Path) -> list[Arrival]:
    """Reads a trace of jobs, sorted by the time of their submission.

    Raises:
        UsageError: names the file, the line and the value that cannot be used.
        OSError: the file cannot be read.
    """
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        needed = ("submit_s", "duration_s", "num_gpus")
        if missing := [name for name in needed if name not in (rows.fieldnames or ())]:
            raise UsageError(
                f"{path}:1: column {missing[0]} is missing; expected {','.join(needed)}, found "
                f"{','.join(rows.fieldnames or ())!r}"
            )
        found = [_arrival(f"{path}:{rows.line_num}", number, row) for number, row in enumerate(rows)]
    if not found:
        raise UsageError(f"{path}: no jobs")
    names: set[str] = set()
    for one in found:
        if one.name in names:
            raise UsageError(f"{path}: two jobs are named {one.name!r}; names must be unique")
        names.add(one.name)
    return sorted(found, key=lambda one: one.at_s)


def _arrival(where: str, number: int, row: Mapping[str, str | None]) -> Arrival:
    def cell(name: str) -> str:
        return (row.get(name) or "").strip()

    devices = _whole(where, "num_gpus", cell("num_gpus"), 1)
    most = _whole(where, "most_gpus", cell("most_gpus"), devices) if cell("most_gpus") else None
    return Arrival(
        name=cell("name") or f"job{number}",
        at_s=_number(where, "submit_s", cell("submit_s")),
        duration_s=_number(where, "duration_s", cell("duration_s"), above=0.0),
        devices=devices,
        most=most,
        user=cell("user") or cell("vc"),
        model=cell("model"),
        priority=_whole(where, "priority", cell("priority"), -(1 << 31)) if cell("priority") else 0,
    )


def read_sizes(path: Path) -> list[tuple[float, int]]:
    """Reads a schedule of sizes, a JSON list of `{"time": minutes, "size": devices}`: for how long, and how many.

    Raises:
        UsageError: names the file, the entry and the value that cannot be used.
        OSError: the file cannot be read.
    """
    try:
        entries: Any = json.loads(path.read_text())
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise UsageError(f'{path}: expected a list of {{"time": minutes, "size": devices}}, found {str(entries)[:80]}')
    found = []
    for number, entry in enumerate(entries):
        where = f"{path}: entry {number}"
        if not isinstance(entry, dict) or not {"time", "size"} <= set(entry):
            raise UsageError(f'{where}: expected {{"time": minutes, "size": devices}}, found {str(entry)[:80]}')
        minutes = _number(where, "time", entry["time"])
        found.append((60 * minutes, _whole(where, "size", str(entry["size"]), 0)))
    return found


def sized(sizes: Sequence[tuple[float, int]], per_node: int) -> list[NodeChange]:
    """Returns the changes of nodes by which a job gets those sizes in turn; the last node goes first."""
    at_s, here = 0.0, 0
    found = []
    for length_s, size in sizes:
        count = -(-size // per_node)
        names = [f"node{number}" for number in range(max(here, count))]
        if count != here:
            found.append(NodeChange(at_s, tuple(names[here:count]), tuple(names[count:here])))
        at_s, here = at_s + length_s, count
    return found


def _number(where: str, what: str, value: Any, above: float = -1.0) -> float:
    found = _parsed(float, value)
    if not (isinstance(found, float) and math.isfinite(found) and found >= 0 and found > above):
        raise UsageError(
            f"{where}: {what} must be a number {'above 0' if above >= 0 else 'of 0 or more'}, found {value!r}"
        )
    return found


def _whole(where: str, what: str, value: str, least: int) -> int:
    found = _parsed(int, value)
    if found is None or found < least:
        raise UsageError(f"{where}: {what} must be a whole number of {least} or more, found {value!r}")
    return int(found)


def _parsed(kind: Callable[[Any], float], value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        return kind(value)
    except (TypeError, ValueError):
        return None
