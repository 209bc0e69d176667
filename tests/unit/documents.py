"""Reports of nodes whose fields a test names as it would say them, without the group in which each stands."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from elaunch.rendezvous.membership import Departure, NodeDoc, NodeProgress, PeerFaults, WorkerSummary

GROUPS: dict[str, type[Any]] = {
    "summary": WorkerSummary,
    "progress": NodeProgress,
    "peers": PeerFaults,
    "departure": Departure,
}
PLACES = {one.name: group for group, kind in GROUPS.items() for one in fields_of(kind)}


def changed_report(doc: NodeDoc, **fields: Any) -> NodeDoc:
    """Returns a report with other values of these fields: `changed_report(doc, draining=True, port=7)`."""
    parts = dict[str, dict[str, Any]]()
    for name, value in fields.items():
        parts.setdefault(PLACES.get(name, ""), {})[name] = value
    own = parts.pop("", {})
    return replace(doc, **own, **{group: replace(getattr(doc, group), **values) for group, values in parts.items()})
