"""The dashboard for Grafana asks for metrics and labels that agents export, and lays its panels side by side."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from elaunch.telemetry.metrics import metrics_of
from elaunch.telemetry.node_view import NodeView
from elaunch.telemetry.timed_store import StoreTimes
from tests.helpers import ROOT
from tests.unit.test_metrics import SLOW, step, tallied

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "elaunch.json").read_text())
PAGE = (ROOT / "docs" / "observing.md").read_text()

PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def exported() -> dict[str, set[str]]:
    """The labels of each sample's name, from an agent that has something to tell of everything."""
    times = StoreTimes()
    times.call("get", lambda: None)
    times.failures["get"] = 1
    tally = tallied()
    for event in ({"kind": "health", "verdict": "drain"}, {"kind": "checkpoint", "seconds": 1.0}, step(9, 0.5)):
        tally.take(event)
    tally.steps.loss, tally.steps.copy_lag = 0.5, 1
    found: dict[str, set[str]] = {}
    for family in metrics_of("run-17", "node0", tally, NodeView(saved=1, profile=SLOW), times):
        for one in family.samples:
            found.setdefault(one.name, set()).update(one.labels)
    return found


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\belaunch_\w+", query))


def test_every_metric_that_a_panel_asks_for_is_exported() -> None:
    asked = set().union(*map(names_in, QUERIES))
    assert len(asked) > 15
    assert asked <= exported().keys()
    variables = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    assert all(names_in(one["query"]["query"]) <= exported().keys() for one in variables)


@pytest.mark.parametrize("query", QUERIES)
def test_every_label_that_a_panel_asks_for_is_exported(query: str) -> None:
    labels = exported()
    there = set().union({"instance"}, *(labels[name] for name in names_in(query)))
    chosen = re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", query)
    grouped = [
        name for group in re.findall(r"(?:by|on|group_left)\s*\(([\w, ]*)\)", query) for name in group.split(", ")
    ]
    assert {*chosen, *filter(None, grouped)} <= there
    # What is chosen within braces belongs to the metric before them.
    for name, inside in re.findall(r"\b(elaunch_\w+)\{([^}]*)\}", query):
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)\s*\"", inside)) <= labels[name]


def test_every_legend_shows_labels_that_its_query_keeps() -> None:
    for panel in PANELS:
        for target in panel["targets"]:
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"(?:by|group_left) \(([\w, ]*)\)", target["expr"]))))
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            is_bare = " by (" not in target["expr"] and "group_left (" not in target["expr"]
            assert shown <= (kept or {"rdzv_id", "node"}) | ({"rdzv_id", "node"} if is_bare else set()), target


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in DASHBOARD["panels"])
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert all(x < 24 for x, _ in cells)


def test_the_page_explains_every_metric_and_names_no_other() -> None:
    named = {name for name in re.findall(r"`?\b(elaunch_\w+)", PAGE) if name not in ("elaunch_",)}
    bases = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported()}
    assert {re.sub(r"_(bucket|sum|count)$", "", name) for name in named} == bases
