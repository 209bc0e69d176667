"""Sharing out equal items over bins that differ in what an item costs there (Suika appendix B)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


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
