"""What happens to nodes and which jobs come, from files; what a file has wrong is said with its line and its value.

Nodes, in either of two forms:

    0,add,node1                                     milliseconds, add or remove, a node
    [60000, "remove", {"nodes": ["node-4"]}]        milliseconds; add, remove, no-op or DONE; nodes

Those of a cluster may be drained, too: `60000,drain,n4`.

Jobs, with a line of names: `submit_s`, `duration_s` and `num_gpus` must be there, `name`, `most_gpus`, `unit`, `user`
(or `vc`), `model`, `priority` and `rates` (`1=10 2=19.5`) may be; other columns are passed over.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elaunch.errors import UsageError
from elaunch.rendezvous.membership import names_text

KINDS = ("add", "remove", "no-op", "DONE")
DRAIN = "drain"


@dataclass(frozen=True)
class NodeChange:
    """What happens to the nodes of a cluster at one time.

    Attributes:
        at_s: since the beginning.
        joined: nodes that are there from now on.
        left: nodes that are gone.
        speeds: of nodes that compute faster or slower from now on; 1 is as before.
        drained: nodes that nobody is to use any more; who is there leaves between two steps.
    """

    at_s: float
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    speeds: Mapping[str, float] = field(default_factory=dict)
    drained: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arrival:
    """A job as it is submitted.

    Attributes:
        name: unique.
        at_s: when.
        duration_s: that it takes on the devices that it asks for.
        devices: that it asks for.
        most: that it can use; None: nobody has said.
        unit: it grows by so many; None: nobody has said.
        rates: samples per second by devices; empty: nobody has said.
        user: whose it is.
        model: that it trains, if the trace says.
        priority: higher goes first.
    """

    name: str
    at_s: float
    duration_s: float
    devices: int
    most: int | None = None
    unit: int | None = None
    rates: Mapping[int, float] = field(default_factory=dict)
    user: str = ""
    model: str = ""
    priority: int = 0


def read_nodes(path: Path, there: Collection[str] | None = None) -> list[NodeChange]:
    """Reads a trace of nodes.

    Args:
        path: of the file.
        there: nodes that are there from the beginning, those of a cluster, which may be drained; None: none are.

    Raises:
        UsageError: names the file, the line and the value that cannot be used.
        OSError: the file cannot be read.
    """
    kinds = KINDS if there is None else (*KINDS[:2], DRAIN, *KINDS[2:])
    here = set(there or ())
    found: list[NodeChange] = []
    for where, at_s, kind, nodes in _node_lines(path, kinds):
        if found and at_s < found[-1].at_s:
            raise UsageError(
                f"{where}: {at_s * 1e3:g} ms comes after {found[-1].at_s * 1e3:g} ms; sort the lines by time"
            )
        for node in nodes:
            if (node in here) == (kind == "add"):
                what = "is there already" if kind == "add" else "is not there"
                raise UsageError(f"{where}: {kind} {node!r}, but that node {what}")
            if there is not None and node not in there:
                raise UsageError(
                    f"{where}: there is no node {node!r} in this cluster; it has {names_text(sorted(there))}"
                )
            here ^= {node}
        of = {kind: nodes}
        found.append(NodeChange(at_s, of.get("add", ()), of.get("remove", ()), drained=of.get(DRAIN, ())))
    if not found:
        raise UsageError(f"{path}: no changes of nodes; {_forms(kinds)} in each line")
    return merged(found)


def merged(changes: Iterable[NodeChange]) -> list[NodeChange]:
    """Returns changes by time, those of one time as one; a node that comes and goes at once is not in it."""
    by_time: dict[float, list[NodeChange]] = {}
    for change in sorted(changes, key=lambda one: one.at_s):
        by_time.setdefault(change.at_s, []).append(change)
    found = []
    for at_s, some in by_time.items():
        state: dict[str, str] = {}
        speeds: dict[str, float] = {}
        for one in some:
            for nodes, kind in ((one.joined, "joined"), (one.left, "left"), (one.drained, "drained")):
                for node in nodes:
                    if (state.pop(node, kind) == "joined") == (kind == "joined"):
                        state[node] = kind
            speeds |= one.speeds
        joined, left, drained = (
            tuple(node for node, kind in state.items() if kind == wanted) for wanted in ("joined", "left", "drained")
        )
        found.append(NodeChange(at_s, joined, left, speeds, drained))
    return found


def _node_lines(path: Path, kinds: Sequence[str]) -> Iterator[tuple[str, float, str, tuple[str, ...]]]:
    for number, text in enumerate(path.read_text().splitlines(), 1):
        where = f"{path}:{number}"
        if not (text := text.strip()) or text.startswith("#"):
            continue
        ms, kind, nodes = _json_line(where, text, kinds) if text.startswith("[") else _csv_line(where, text, kinds)
        if kind in ("no-op", "DONE"):
            nodes = ()
        yield where, ms / 1e3, "add" if kind in ("no-op", "DONE") else kind, nodes


def _forms(kinds: Sequence[str]) -> str:
    plain = "|".join(kinds[:-2])
    return f"expected 'MILLISECONDS,{plain},NODE' or '[MILLISECONDS, \"{plain}\", {{\"nodes\": [NODE, ...]}}]'"


def _csv_line(where: str, text: str, kinds: Sequence[str]) -> tuple[float, str, tuple[str, ...]]:
    cells = [cell.strip() for cell in text.split(",")]
    if len(cells) != 3 or cells[1] not in kinds[:-2] or not cells[2]:
        raise UsageError(f"{where}: {_forms(kinds)}, found {text[:80]!r}")
    return _number(where, "milliseconds", cells[0]), cells[1], (cells[2],)


def _json_line(where: str, text: str, kinds: Sequence[str]) -> tuple[float, str, tuple[str, ...]]:
    try:
        ms, kind, more = json.loads(text)
        nodes = more.get("nodes", [])
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise UsageError(f"{where}: {_forms(kinds)}, found {text[:80]!r}") from None
    if kind not in kinds:
        raise UsageError(f"{where}: expected one of {', '.join(kinds)}, found {kind!r}")
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
        unit=_whole(where, "unit", cell("unit"), 1) if cell("unit") else None,
        rates=_rates(where, cell("rates"), devices),
    )


def _rates(where: str, text: str, devices: int) -> dict[int, float]:
    """Reads samples per second by devices, such as `1=10 2=19.5`; a job can run on what it asks for."""
    found: dict[int, float] = {}
    for word in text.split():
        size, sign, rate = word.partition("=")
        if not sign:
            raise UsageError(f"{where}: rates must be DEVICES=SAMPLES_PER_S, with blanks between, found {word!r}")
        found[_whole(where, "devices of rates", size, 1)] = _number(where, "samples per second", rate, above=0.0)
    if found and devices < min(found):
        raise UsageError(f"{where}: rates say nothing of {devices} devices, which num_gpus asks for")
    return found


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
