"""Which worker takes which role, such that the least has to move (Chameleon IV-B: Kuhn-Munkres)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from elaunch.workers.plan.tiling import Plan
from elaunch.workers.policy.profile import Profile

if TYPE_CHECKING:
    import numpy as np

    Matrix = np.ndarray[Any, Any]

MOST_SINGLY = 1500
"""Tuples up to which each is matched singly; beyond, tuples that hold the same are alike, and so are equal roles."""


def matched(tuples: Sequence[tuple[str, ...]], roles: Sequence[range], before: Plan, profile: Profile) -> list[int]:
    """For each role the index of its tuple; the sum of the bytes to be received is least.

    Without scipy, each role in turn takes the tuple that lacks least.

    Args:
        tuples: at least as many as roles.
        roles: the layers of each.
        before: the plan under which the tuples hold their layers.
        profile: of the model.
    """
    places = {workers: place for place, workers in enumerate(tuples)}
    held: list[set[int]] = [set() for _ in tuples]
    for tile in before.tiles:
        if tile.workers in places:
            held[places[tile.workers]].update(tile.layers)
    sizes = [layer.parameter_bytes + layer.optimizer_bytes for layer in profile.layers]
    kinds = {frozenset(some): None for some in held}
    spans = dict.fromkeys(roles)
    # Bytes that a kind of role wants and a kind of tuple has not.
    lacking = [[sum(sizes[layer] for layer in span if layer not in kind) for kind in kinds] for span in spans]
    rows = {span: number for number, span in enumerate(spans)}
    columns = {kind: number for number, kind in enumerate(kinds)}
    role_kinds = [rows[role] for role in roles]
    tuple_kinds = [columns[frozenset(some)] for some in held]
    try:
        if len(tuples) <= MOST_SINGLY:
            return _singly(lacking, role_kinds, tuple_kinds)
        return _by_kind(lacking, role_kinds, tuple_kinds)
    except ImportError:
        return nearest(lacking, role_kinds, tuple_kinds)


def nearest(lacking: Sequence[Sequence[float]], role_kinds: Sequence[int], tuple_kinds: Sequence[int]) -> list[int]:
    """Each role in turn takes the free tuple that lacks least."""
    free: list[list[int]] = [[] for _ in lacking[0]]
    for place, kind in reversed(list(enumerate(tuple_kinds))):
        free[kind].append(place)
    found = []
    for role in role_kinds:
        kind = min((kind for kind, some in enumerate(free) if some), key=lambda kind: lacking[role][kind])
        found.append(free[kind].pop())
    return found


def _singly(lacking: Sequence[Sequence[float]], role_kinds: Sequence[int], tuple_kinds: Sequence[int]) -> list[int]:
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    _, found = linear_sum_assignment(np.array(lacking, dtype=float)[np.ix_(role_kinds, tuple_kinds)])
    return [int(place) for place in found]


def _by_kind(lacking: Sequence[Sequence[float]], role_kinds: Sequence[int], tuple_kinds: Sequence[int]) -> list[int]:
    """As a transport of tuples of a kind to roles of a kind: a linear programme whose vertices are whole."""
    import numpy as np
    from scipy.optimize import linprog

    n_roles, n_tuples = len(lacking), len(lacking[0])
    found = linprog(
        np.array(lacking, dtype=float).reshape(-1),
        A_ub=np.kron(np.ones(n_roles), np.eye(n_tuples)),
        b_ub=np.bincount(tuple_kinds, minlength=n_tuples),
        A_eq=np.kron(np.eye(n_roles), np.ones(n_tuples)),
        b_eq=np.bincount(role_kinds, minlength=n_roles),
        method="highs-ds",
    )
    assert found.status == 0, found.message
    amounts = np.rint(found.x).astype(int).reshape(n_roles, n_tuples)
    free = [iter([place for place, kind in enumerate(tuple_kinds) if kind == here]) for here in range(n_tuples)]
    given = [
        iter(list(chain.from_iterable([kind] * int(n) for kind, n in enumerate(amounts[role]))))
        for role in range(n_roles)
    ]
    return [next(free[next(given[role])]) for role in role_kinds]
