"""A plan as the page draws it: rectangles of layers and samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elaunch.plan.coverage import runs_of
from elaunch.plan.picture import has_many_runs, rectangles
from elaunch.plan.tiling import Plan, PlanError
from elaunch.telemetry.ui.texts import text as bounded


def plan_document(text: str) -> dict[str, Any]:
    """Returns a plan as JSON; of one that cannot be read, only why.

    A rectangle is [layers from, to, samples from, to, numbers of its workers, what is said of it]; one of a group of
    workers has several, what is done by nobody or more than once none. In a plan of very many micro-batches those of a
    tile are drawn as one, beyond that cells of a grid.
    """
    try:
        return _drawn(Plan.parse(text))
    except PlanError as error:
        return {"problem": bounded(str(error).partition("\n")[0])}
    except OverflowError:
        return {"problem": "its numbers are too large to be drawn"}


def _drawn(plan: Plan) -> dict[str, Any]:
    is_joined = has_many_runs(plan)
    if is_joined:
        batch = plan.global_batch_size
        joined = (tuple((range(*run),) for run in runs_of(tile, batch)) for tile in plan.tiles)
        plan = replace(plan, tiles=tuple(replace(tile, micro_batches=runs) for tile, runs in zip(plan.tiles, joined)))
    numbers = {worker: number for number, worker in enumerate(plan.workers)}
    return {
        "layers": plan.n_layers,
        "samples": plan.global_batch_size,
        "micro_batch": plan.micro_batch_size,
        "workers": plan.workers,
        "idle": plan.idle,
        "rectangles": [
            [
                one.layers.start,
                one.layers.stop,
                one.samples.start,
                one.samples.stop,
                [numbers[worker] for worker in one.workers],
                one.what.partition(": ")[2] if is_joined and one.what.startswith("tile ") else one.what,
            ]
            for one in rectangles(plan)
        ],
    }
