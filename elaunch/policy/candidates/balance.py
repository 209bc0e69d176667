"""Sharing out equal items over bins that differ in what an item costs there (Suika appendix B)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from elaunch.plan.shares import even_shares
from elaunch.plan.tiling import Plan
from elaunch.plan.views import shares_of
from elaunch.policy.profile import Profile


def shared_out(n_items: int, costs: Sequence[float], least: int = 0, first: Sequence[float] | None = None) -> list[int]:
    """Returns how many items each bin gets so that the greatest load is least; a load is first + items x cost.

    Each item goes where the load is then smallest, which is exact. All loads come near the level to which they would
    rise if items could be cut; only the rest goes one by one: O(bins x log bins), however many items.

    Args:
        n_items: at least `least` for each bin.
        costs: of an item, by bin; above 0.
        least: items that each bin gets at any rate.
        first: of a bin, before any item.
    """
    assert n_items >= least * len(costs), (n_items, least, costs)
    start = [0.0] * len(costs) if first is None else list(first)
    found = _up_to_level(n_items, costs, least, start)
    queue = [(start[place] + (found[place] + 1) * cost, place) for place, cost in enumerate(costs)]
    heapq.heapify(queue)
    for _ in range(n_items - sum(found)):
        _, place = queue[0]
        found[place] += 1
        heapq.heapreplace(queue, (start[place] + (found[place] + 1) * costs[place], place))
    return found


def _up_to_level(n_items: int, costs: Sequence[float], least: int, start: Sequence[float]) -> list[int]:
    """Returns how many items bins get at any rate: as many as fit below the level that all items together reach."""
    found = [least] * len(costs)
    bins, left = list(range(len(costs))), n_items
    while bins:
        each = [1 / costs[place] for place in bins]
        level = (left + sum(start[place] * n for place, n in zip(bins, each, strict=True))) / sum(each)
        high = [place for place in bins if level - start[place] >= least * costs[place]]
        if len(high) == len(bins):
            level -= 1e-9 * abs(level)
            for place in bins:
                found[place] = max(least, int((level - start[place]) / costs[place]))
            break
        # Those above it get no more than they must, and the others have what they leave.
        bins, left = high, left - least * (len(bins) - len(high))
    last = max((start[place] + n * costs[place] for place, n in enumerate(found) if n > least), default=-math.inf)
    following = min(start[place] + (n + 1) * costs[place] for place, n in enumerate(found))
    # Costs that differ by more than numbers are exact: one by one.
    return found if sum(found) <= n_items and last < following else [least] * len(costs)


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
