"""Which worker takes which role, such that the least has to move (Chameleon IV-B: Kuhn-Munkres)."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Sequence
from itertools import chain

from elaunch.plan.tiling import Plan
from elaunch.policy.profile import Profile

FEW = 64
"""TP groups up to which it is quicker to match them here than to import scipy, while a job waits."""

MOST_SINGLY = 1500
"""TP groups up to which each is matched singly; beyond, those that hold the same are alike, and so are equal roles."""


def prepare(n_groups: int) -> None:
    """Imports what matching so many TP groups needs, before a job waits for it."""
    if n_groups > FEW:
        importlib.import_module("scipy.optimize")


def matched(tp_groups: Sequence[tuple[str, ...]], roles: Sequence[range], before: Plan, profile: Profile) -> list[int]:
    """Returns, for each role, the index of its TP group, such that the fewest bytes have to be received in all.

    Args:
        tp_groups: at least as many as roles.
        roles: the layers of each.
        before: the plan under which the TP groups hold their layers.
        profile: of the model.
    """
    places = {workers: place for place, workers in enumerate(tp_groups)}
    held: list[set[int]] = [set() for _ in tp_groups]
    for tile in before.tiles:
        if tile.workers in places:
            held[places[tile.workers]].update(tile.layers)
    sizes = [layer.parameter_bytes + layer.optimizer_bytes for layer in profile.layers]
    columns = {kind: number for number, kind in enumerate(dict.fromkeys(map(frozenset, held)))}
    rows = {span: number for number, span in enumerate(dict.fromkeys(roles))}
    # Bytes that a kind of role wants and a kind of TP group has not.
    lacking = [[sum(sizes[layer] for layer in span if layer not in kind) for kind in columns] for span in rows]
    role_kinds = [rows[role] for role in roles]
    group_kinds = [columns[frozenset(some)] for some in held]
    if len(tp_groups) <= FEW and "scipy.optimize" not in sys.modules:
        return assigned([[lacking[role][kind] for kind in group_kinds] for role in role_kinds])
    if len(tp_groups) <= MOST_SINGLY:
        return _singly(lacking, role_kinds, group_kinds)
    return _by_kind(lacking, role_kinds, group_kinds)


def assigned(costs: Sequence[Sequence[float]]) -> list[int]:
    """Returns a different column for each row, such that the sum of the costs is least; needs as many columns as rows.

    Rows are taken on one by one, each along a shortest augmenting path: O(rows^2 x columns).
    """
    n_columns = len(costs[0])
    row_price, column_price = [0.0] * len(costs), [0.0] * n_columns
    taker: list[int | None] = [None] * n_columns
    for new in range(len(costs)):
        # How much more than the prices it costs to come to a column, and from which one.
        slack, before, seen = [math.inf] * n_columns, [-1] * n_columns, [False] * n_columns
        at, row = -1, new
        while True:
            for column in range(n_columns):
                over = costs[row][column] - row_price[row] - column_price[column]
                if not seen[column] and over < slack[column]:
                    slack[column], before[column] = over, at
            at = min((column for column in range(n_columns) if not seen[column]), key=slack.__getitem__)
            least = slack[at]
            row_price[new] += least
            for column in range(n_columns):
                if seen[column]:
                    holder = taker[column]
                    assert holder is not None
                    row_price[holder] += least
                    column_price[column] -= least
                else:
                    slack[column] -= least
            seen[at] = True
            holder = taker[at]
            if holder is None:
                break
            row = holder
        while before[at] >= 0:
            taker[at] = taker[before[at]]
            at = before[at]
        taker[at] = new
    found = {row: column for column, row in enumerate(taker) if row is not None}
    return [found[row] for row in range(len(costs))]


def _singly(lacking: Sequence[Sequence[float]], role_kinds: Sequence[int], group_kinds: Sequence[int]) -> list[int]:
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    _, found = linear_sum_assignment(np.array(lacking, dtype=float)[np.ix_(role_kinds, group_kinds)])
    return [int(place) for place in found]


def _by_kind(lacking: Sequence[Sequence[float]], role_kinds: Sequence[int], group_kinds: Sequence[int]) -> list[int]:
    """Solves the matching as a transport of kinds of TP groups to kinds of roles: a linear programme, whole at its
    vertices.
    """
    import numpy as np
    from scipy.optimize import linprog

    n_roles, n_groups = len(lacking), len(lacking[0])
    found = linprog(
        np.array(lacking, dtype=float).reshape(-1),
        A_ub=np.kron(np.ones(n_roles), np.eye(n_groups)),
        b_ub=np.bincount(group_kinds, minlength=n_groups),
        A_eq=np.kron(np.eye(n_roles), np.ones(n_groups)),
        b_eq=np.bincount(role_kinds, minlength=n_roles),
        method="highs-ds",
    )
    assert found.status == 0, found.message
    amounts = np.rint(found.x).astype(int).reshape(n_roles, n_groups)
    free = [iter([place for place, kind in enumerate(group_kinds) if kind == here]) for here in range(n_groups)]
    given = [
        iter(list(chain.from_iterable([kind] * int(n) for kind, n in enumerate(amounts[role]))))
        for role in range(n_roles)
    ]
    return [next(free[next(given[role])]) for role in role_kinds]
