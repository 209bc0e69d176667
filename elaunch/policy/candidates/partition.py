"""Which layers each stage has: the contiguous partition whose slowest stage is fastest (ElasWave alg. 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

Cost = Callable[[int, int, int], float]
"""Of (stage, first layer, layer after the last): grows with the layers."""


class Partition(NamedTuple):
    """A cut of the layers into stages.

    Attributes:
        bounds: stage p has the layers bounds[p] to bounds[p + 1].
        slowest: the greatest cost of a stage.
    """

    bounds: tuple[int, ...]
    slowest: float

    @property
    def stages(self) -> tuple[range, ...]:
        """Returns the layers of each stage."""
        return tuple(map(range, self.bounds, self.bounds[1:]))


def minimax(
    n_layers: int,
    n_stages: int,
    cost: Cost,
    fits: Callable[[int, int, int], bool] = lambda stage, start, stop: True,
    moved: Cost | None = None,
    slack: float = 0.0,
) -> Partition | None:
    """Cuts layers into stages of one layer or more so that the greatest cost of a stage is least (ElasWave alg. 1).

    O(stages x layers^2) at worst. As layers are added at the front of a stage, it ends where the stage costs more than
    the best cut so far, or does not fit any more; so it is mostly near O(stages x layers).

    Args:
        n_layers: of the model.
        n_stages: at most as many.
        cost: of a stage; does not fall when it gets more layers.
        fits: whether a stage may have these layers; what does not fit does not with more layers either.
        moved: of all cuts that are not slower than the best by more than `slack`, the one with the least sum of this
            is taken; None: any of the best.
        slack: as a part of the cost.

    Returns:
        None if no cut fits.
    """
    if not 1 <= n_stages <= n_layers:
        return None
    best = _table(n_layers, n_stages, cost, fits, max, math.inf)
    slowest = best[n_stages][n_layers].value
    if math.isinf(slowest):
        return None
    if moved is not None:
        limit = slowest * (1 + slack)
        best = _table(
            n_layers,
            n_stages,
            moved,
            lambda stage, start, stop: cost(stage, start, stop) <= limit and fits(stage, start, stop),
            lambda before, here: before + here,
            None,
        )
    bounds = [n_layers]
    for stage in range(n_stages, 0, -1):
        bounds.append(best[stage][bounds[-1]].start)
    found = tuple(reversed(bounds))
    return Partition(found, max(cost(stage, found[stage], found[stage + 1]) for stage in range(n_stages)))


class _Best(NamedTuple):
    value: float
    start: int


_NONE = _Best(math.inf, 0)


def _table(
    n_layers: int,
    n_stages: int,
    cost: Cost,
    fits: Callable[[int, int, int], bool],
    joined: Callable[[float, float], float],
    prune: float | None,
) -> list[list[_Best]]:
    """Returns [stages][layers] -> the best value of giving the first layers to the first stages, and where the last
    begins.
    """
    table = [[_NONE] * (n_layers + 1) for _ in range(n_stages + 1)]
    table[0][0] = _Best(0.0, 0)
    for stage in range(1, n_stages + 1):
        before, here = table[stage - 1], table[stage]
        for stop in range(stage, n_layers - (n_stages - stage) + 1):
            best = _NONE
            for start in range(stop - 1, stage - 2, -1):
                if not fits(stage - 1, start, stop):
                    break
                value = cost(stage - 1, start, stop)
                if prune is not None and value >= best.value:
                    break
                if before[start].value < math.inf:
                    value = joined(before[start].value, value)
                    if value < best.value:
                        best = _Best(value, start)
            here[stop] = best
    return table
