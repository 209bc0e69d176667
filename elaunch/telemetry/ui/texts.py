"""What events say, as texts and names of bounded length."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from elaunch.telemetry.events import Event, count, number, seconds

MOST_CANDIDATES = 32
MOST_TEXT = 2000
"""Characters of a text, names apart."""

MOST_NAME = 200


def text(value: object) -> str:
    """Returns a text of bounded length; empty for None."""
    found = "" if value is None else value if isinstance(value, str) else repr(value)
    return found if len(found) <= MOST_TEXT else f"{found[:MOST_TEXT]}…"


def name(value: object) -> str:
    """Returns a name of bounded length."""
    return str(value)[:MOST_NAME]


def listed(value: object) -> list[Any]:
    """Returns a list; an empty one for anything else."""
    return value if isinstance(value, list) else []


def incarnation(worker: str) -> int:
    """Returns which of the workers of its slot a worker is, from 0."""
    digits = worker.rpartition("#")[2]
    return int(digits) if re.fullmatch(r"[0-9]{1,9}", digits) else 0


def by_name(name: str) -> list[tuple[int, int, str]]:
    """Returns a key that sorts node10 behind node2."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def candidate(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a candidate of a decision as JSON."""
    figures = ("score", "step_s", "transition_s", "bubble", "moved_bytes", "peak_bytes")
    found: dict[str, Any] = {figure: number(given.get(figure)) for figure in figures}
    return {"policy": name(given.get("policy")), "rejected": text(given.get("rejected")), **found}


def told(kind: str, event: Event) -> tuple[str, bool]:
    """Returns what a note says, and whether it tells of trouble that lasts."""
    step = f"step {count(event.get('step')):,}"
    match kind:
        case "checkpoint":
            return f"{step}, {count(event.get('bytes')):,} bytes in {seconds(event.get('seconds')):.3g} s", False
        case "resume":
            return f"from {step}, {count(event.get('again')):,} steps are repeated", False
        case "restored":
            return f"state of {step} in {seconds(event.get('seconds')):.3g} s", False
        case "checkpoint_damaged":
            return f"{step} was passed over: {text(event.get('problem'))}", True
        case "health":
            healthy = str(event.get("verdict")).lower() == "healthy"
            return (
                f"{text(event.get('subject'))}: {text(event.get('text'))} ({text(event.get('verdict'))})",
                not healthy,
            )
        case "cut":
            nodes = [name(one) for one in listed(event.get("nodes"))]
            return f"cannot reach {', '.join(nodes)}" if nodes else "reaches all nodes again", bool(nodes)
        case "spares":
            nodes = [name(one) for one in listed(event.get("nodes"))]
            return f"held ready: {', '.join(nodes) or 'none'}", False
        case "slow":
            what = text(event.get("worker") or event.get("slow_node") or event.get("link"))
            factor, slow = number(event.get("factor")), event.get("state") == "slow"
            if not slow:
                return f"{what} has recovered", False
            times = "" if factor is None else f" {factor:.2f} times as long as usual"
            return f"{what} is slow:{times}; {text(event.get('action'))}", True
        case "profile_doubtful":
            found = [text(one) for one in listed(event.get("contradictions"))]
            return text("; ".join(found)) or "contradicts itself no longer", bool(found)
        case "collectives":
            backend = text(event.get("backend") or "none here")
            return f"{step}: {backend}, opened in {seconds(event.get('opened_s')):.3g} s", False
        case _:
            common = ("v", "t", "kind", "node", "generation", "worker")
            return text(", ".join(f"{key}: {text(value)}" for key, value in event.items() if key not in common)), False
