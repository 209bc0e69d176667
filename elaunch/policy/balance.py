"""Sharing out equal items over bins that differ in what an item costs there (Suika appendix B)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from elaunch.plan.shares import even_shares
from elaunch.plan.tiling import Plan
from elaunch.plan.views import shares_of
from elaunch.policy.profile import Profile


def shared_out(n_items: int, costs: Sequence[float], least: int = 0, first: Sequence[float] | None = None) -> list[int]:
    """Returns how many items each bin gets so that the greatest load is least; a load is first + items x cost.

    Each item goes where the load is then smallest, which is exact: O(items x log bins).

    Args:
        n_items: at least `least` for each bin.
        costs: of an item, by bin; above 0.
        least: items that each bin gets at any rate.
        first: of a bin, before any item.
    """
    assert n_items >= least * len(costs), (n_items, least, costs)
    start = [0.0] * len(costs) if first is None else list(first)
    found = [least] * len(costs)
    queue = [(start[place] + (least + 1) * cost, place) for place, cost in enumerate(costs)]
    heapq.heapify(queue)
    for _ in range(n_items - least * len(costs)):
        _, place = queue[0]
        found[place] += 1
        heapq.heapreplace(queue, (start[place] + (found[place] + 1) * costs[place], place))
    return found


def shares_by_speed(plan: Plan, members: Sequence[str], profile: Profile) -> dict[str, int]:
    """Returns how many units each member does under a plan of one stage; as even shares as there are if all members
    are equally fast, so that they do not depend on how the plan came about.

    Args:
        plan: for exactly the members.
        members: in the order of ranks, which is that of the shares.
        profile: for their speeds.
    """
    if len({profile.speed(member) for member in members}) == 1:
        return even_shares(plan.n_units, members)
    shares = shares_of(plan)
    return {member: shares[member] for member in members}
