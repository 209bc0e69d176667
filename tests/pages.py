"""Event logs for the page of a job."""

from __future__ import annotations

import json
from typing import Any

from elaunch.plan import symmetric


def lines(*events: dict[str, Any]) -> str:
    """Events as lines of a log."""
    return "".join(json.dumps({"v": 2, "node": "node0", **event}) + "\n" for event in events)


def large_job() -> str:
    """400 workers that have done 3,000 steps, one of them lost."""
    workers = [f"node{place // 8}/{place % 8}#0" for place in range(400)]
    found: list[dict[str, Any]] = []
    for generation, members in ((2, workers), (3, [*workers[:7], *workers[8:], "node0/7#1"])):
        t = 1000.0 * generation
        plan = str(symmetric(members, 48, 3200, 4, dp=50, pp=8))
        begun = {"t": t, "generation": generation}
        found.append({**begun, "kind": "generation", "workers": members, "cause": "start", "stage": "train"})
        found.append({**begun, "kind": "decision", "policy": "stay", "reason": "", "candidates": [], "plan": plan})
        for step in range(1500):
            commit = {"t": t + step * 0.3, "generation": generation, "kind": "step", "step": step + 1500 * generation}
            found.append({**commit, "seconds": 0.3, "loss": 5.0 / (step + 1), "samples": 3200, "members": 400})
    return lines(*found)
