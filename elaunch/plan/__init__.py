"""Who does which part of a step: pure values and functions, free of torch.

A plan tiles the rectangle layers × samples. `tiling` holds the value with its invariants and its text form (by
way of `coverage`, a sweep over the rectangle, and `picture`, drawings of it). `build` makes plans of the usual kinds.
`views` derives what others need to know from a plan: who feeds whom, who reduces gradients with whom, who owns which
part of the optimizer state. A new kind of plan needs a constructor only; nothing else asks of what kind a plan is.
"""

from __future__ import annotations

from elaunch.plan.build import Pipeline, Stage, data_parallel, pipelines, stages, symmetric
from elaunch.plan.picture import draw, to_svg
from elaunch.plan.shares import even_shares, share
from elaunch.plan.tiling import MicroBatch, OptimizerLayout, Plan, PlanError, Tile, n_rows
from elaunch.plan.views import (
    Feed,
    Feeds,
    GradientGroup,
    ShardRange,
    gradient_groups,
    holders,
    inputs,
    optimizer_shards,
    outputs,
    rounds,
    rows_by_unit,
    shares_of,
    unit_of,
    units_of,
)

__all__ = [
    "Feed",
    "Feeds",
    "GradientGroup",
    "MicroBatch",
    "OptimizerLayout",
    "Pipeline",
    "Plan",
    "PlanError",
    "ShardRange",
    "Stage",
    "Tile",
    "data_parallel",
    "draw",
    "even_shares",
    "gradient_groups",
    "holders",
    "inputs",
    "n_rows",
    "optimizer_shards",
    "outputs",
    "pipelines",
    "rounds",
    "rows_by_unit",
    "share",
    "shares_of",
    "stages",
    "symmetric",
    "to_svg",
    "unit_of",
    "units_of",
]
