"""A job that runs, from what `elaunch ctl status --json` has of it: as events, for what lasts, and as it is now."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

Values = Mapping[str, Any]


def events_of(values: Values, before: Values, now_t: float) -> Iterator[dict[str, Any]]:
    """Yields what has happened between two looks at a job, as far as its documents tell.

    Args:
        values: as they are now.
        before: as they were at the last look; empty at the first.
        now_t: the Unix time.
    """
    training, former = values["training"], before.get("training")
    recovery = None if training is None else training["recovery"]
    if recovery is not None and (former is None or recovery != former["recovery"]):
        phases = {f"{phase}_s": took_s for phase, took_s in recovery["phases"].items()}
        told = {"cause": recovery["cause"], "interrupted": True, "phases": phases, "total_s": recovery["seconds"]}
        yield _event("transition", training["generation"], recovery["t"], **told)
    generation = values["generation"]
    if generation is not None and generation != before.get("generation"):
        workers = [one["worker"] for one in values["workers"] if one["rank"] is not None]
        stage = "train" if values["state"] in ("training", "waiting") else "start"
        yield _event("generation", generation, now_t, workers=workers, cause=values["cause"], stage=stage)
    if training is not None and (former is None or training["step"] != former["step"]):
        rate = training["steps_per_s"]
        took_s = 1 / rate if rate > 0 else 0.0
        yield _event(
            "step",
            training["generation"],
            training["t"],
            step=training["step"],
            seconds=took_s,
            loss=training["loss"],
            members=training["members"],
            copy_lag=training["copy_lag"],
        )


def _event(kind: str, generation: int, t: float, **fields: Any) -> dict[str, Any]:
    return {"t": t, "kind": kind, "node": "", "generation": generation, **fields}


def beside_events(values: Values, words: str) -> dict[str, Any]:
    """Returns what the documents tell of now: in the page's document it takes the place of what events would tell."""
    training = values["training"]
    return {
        "state": words if not values["message"] else f"{words}: {values['message']}",
        "endpoint": values["endpoint"],
        "generation": values["generation"] or 0,
        "members": sum(one["rank"] is not None for one in values["workers"]),
        "nodes": [{"node": one["node"], "remark": one["remark"]} for one in values["nodes"]],
        "slots": [_slot(one, values["spares"]["nodes"]) for one in values["workers"]],
        "steps_per_s": None if training is None else training["steps_per_s"] or None,
        "samples_per_s": None,
        "unreadable": len(values["unreadable"]),
    }


def _slot(worker: Values, spares: Collection[str]) -> dict[str, Any]:
    name, ratio = worker["worker"], worker["times_as_long"]
    state = {"ready": "starting", "not here": "left"}.get(worker["state"], worker["state"])
    return {
        "slot": name.partition("#")[0],
        "worker": name,
        "node": name.partition("/")[0],
        "rank": worker["rank"],
        "state": "spare" if state in ("starting", "member") and name.partition("/")[0] in spares else state,
        "pid": None,
        "since_t": None,
        "ended_t": None,
        "end": "",
        "restarts": 0,
        "remarks": [f"takes {ratio:.2f} times as long as others"] if ratio > 1 else [],
    }
