"""Jobs whose members hold the whole model: a tiling of one layer, whose rows are the micro-batches of a step.

Who has come and who is left is planned by the same policies as everything; then each member gets a run of as many
micro-batches as it was given. Which ones they are makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from elaunch.plan.shares import DataParallelPlan
from elaunch.plan.tiling import Plan, Tile, n_rows
from elaunch.policy.profile import Profile


def tiling(plan: DataParallelPlan) -> Plan:
    """Returns the same as an execution plan: one layer, with a slot for each micro-batch."""
    tiles = tuple(
        Tile(range(1), tuple((range(unit, unit + 1),) for unit in units), (worker,))
        for worker, units in plan.units
        if units
    )
    return Plan(1, plan.n_units, 1, tiles, idle=tuple(worker for worker, units in plan.units if not units))


def shares(plan: Plan, sizes: DataParallelPlan, members: Sequence[str], profile: Profile) -> DataParallelPlan:
    """Reverses `tiling`: returns the data-parallel plan, with the sizes of `sizes`.

    Members that are alike get as even shares as there are, so that a plan does not depend on how it came about.

    Args:
        plan: for exactly the members.
        sizes: another plan of the same batch.
        members: in order of ranks.
        profile: for their speeds.
    """
    if len({profile.speed(member) for member in members}) == 1:
        return DataParallelPlan.even(sizes.global_batch_size, sizes.micro_batch_size, members)
    counts = {
        member: sum(n_rows(runs) for tile in plan.tiles_of(member) for runs in plan.tiles[tile].micro_batches)
        for member in members
    }
    edges = accumulate((counts[member] for member in members), initial=0)
    units = tuple((member, range(*ends)) for member, ends in zip(members, pairwise(edges), strict=True))
    return DataParallelPlan(sizes.global_batch_size, sizes.micro_batch_size, units)
