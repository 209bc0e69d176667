"""Cuts of layers into stages, and shares of equal items, against trying everything."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.policy.candidates.balance import shared_out
from elaunch.policy.candidates.partition import minimax
from tests.helpers import scaled

amounts = st.integers(0, 9)


def all_cuts(n_layers: int, n_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, n_layers), n_stages - 1):
        yield (0, *inner, n_layers)


@settings(max_examples=scaled(100, 300), deadline=None)
@given(
    layers=st.lists(st.tuples(amounts, amounts), min_size=1, max_size=8),
    stages=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 40)), min_size=1, max_size=5),
    wishes=st.lists(st.integers(0, 4), min_size=8, max_size=8),
    slack=st.sampled_from([0.0, 0.25]),
)
def test_the_best_of_all_cuts_is_found_and_of_those_the_one_that_moves_least(
    layers: list[tuple[int, int]], stages: list[tuple[int, int]], wishes: list[int], slack: float
) -> None:
    """Seconds and bytes by layer; factors and caps by stage; `wishes`: where each layer is now."""
    n_layers, n_stages = len(layers), len(stages)

    def cost(stage: int, start: int, stop: int) -> float:
        return stages[stage][0] * sum(seconds for seconds, _ in layers[start:stop])

    def fits(stage: int, start: int, stop: int) -> bool:
        return sum(size for _, size in layers[start:stop]) <= stages[stage][1]

    def moved(stage: int, start: int, stop: int) -> float:
        return sum(layers[layer][1] for layer in range(start, stop) if wishes[layer] != stage)

    def whole(bounds: tuple[int, ...], each: object) -> list[float]:
        assert callable(each)
        return [each(stage, bounds[stage], bounds[stage + 1]) for stage in range(n_stages)]

    able = [bounds for bounds in all_cuts(n_layers, n_stages) if all(whole(bounds, fits))]
    found = minimax(n_layers, n_stages, cost, fits, moved, slack)
    if not able:
        assert found is None
        assert minimax(n_layers, n_stages, cost, fits) is None
        return
    best = min(max(whole(bounds, cost)) for bounds in able)
    plain = minimax(n_layers, n_stages, cost, fits)
    assert plain is not None
    assert plain.slowest == best
    assert all(whole(plain.bounds, fits))
    near = [bounds for bounds in able if max(whole(bounds, cost)) <= best * (1 + slack)]
    assert found is not None
    assert found.bounds in near
    assert sum(whole(found.bounds, moved)) == min(sum(whole(bounds, moved)) for bounds in near)
    assert found.slowest == max(whole(found.bounds, cost))
    assert [layer for stage in found.stages for layer in stage] == list(range(n_layers))


def test_more_stages_than_layers_have_no_cut() -> None:
    assert minimax(2, 3, lambda *_: 0.0) is None
    assert minimax(2, 0, lambda *_: 0.0) is None


def all_shares(n_items: int, n_bins: int, least: int) -> Iterator[tuple[int, ...]]:
    if n_bins == 1:
        yield (n_items,)
        return
    for first in range(least, n_items - least * (n_bins - 1) + 1):
        for rest in all_shares(n_items - first, n_bins - 1, least):
            yield (first, *rest)


@settings(max_examples=scaled(70, 200), deadline=None)
@given(
    bins=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), min_size=1, max_size=4),
    more=st.integers(0, 9),
    least=st.integers(0, 2),
)
def test_items_are_shared_out_such_that_the_greatest_load_is_least(
    bins: list[tuple[int, int]], more: int, least: int
) -> None:
    n_items = least * len(bins) + more
    costs, first = [cost for cost, _ in bins], [begin for _, begin in bins]

    def load(shares: tuple[int, ...]) -> float:
        # A bin without items waits for nothing.
        return max((begin + n * cost for n, cost, begin in zip(shares, costs, first) if n), default=-math.inf)

    found = tuple(shared_out(n_items, costs, least, first))
    assert sum(found) == n_items
    assert min(found) >= least
    assert load(found) == min(map(load, all_shares(n_items, len(bins), least)))
