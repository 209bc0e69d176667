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
    table = _Table(n_layers, n_stages)
    table.fill(cost, fits, summed=False)
    slowest = table.values[n_stages][n_layers]
    if math.isinf(slowest):
        return None
    if moved is not None:
        limit = slowest * (1 + slack)
        table = _Table(n_layers, n_stages)
        table.fill(
            moved,
            lambda stage, start, stop: cost(stage, start, stop) <= limit and fits(stage, start, stop),
            summed=True,
        )
    bounds = [n_layers]
    for stage in range(n_stages, 0, -1):
        bounds.append(table.starts[stage][bounds[-1]])
    found = tuple(reversed(bounds))
    return Partition(found, max(cost(stage, found[stage], found[stage + 1]) for stage in range(n_stages)))


class _Table:
    """For [stages][layers], the best value of giving the first layers to the first stages, and where the last of these
    begins.
    """

    def __init__(self, n_layers: int, n_stages: int) -> None:
        self.values = [[math.inf] * (n_layers + 1) for _ in range(n_stages + 1)]
        self.starts = [[0] * (n_layers + 1) for _ in range(n_stages + 1)]
        self.values[0][0] = 0.0

    def fill(self, cost: Cost, fits: Callable[[int, int, int], bool], *, summed: bool) -> None:
        """Finds the least of the greatest cost of a stage, or of the sum of all."""
        n_stages, n_layers = len(self.values) - 1, len(self.values[0]) - 1
        for stage in range(n_stages):
            before = self.values[stage]
            for stop in range(stage + 1, n_layers - (n_stages - stage) + 2):
                best, first = math.inf, 0
                for start in range(stop - 1, stage - 1, -1):
                    if not fits(stage, start, stop):
                        break
                    value = cost(stage, start, stop)
                    if not summed and value >= best:
                        break
                    earlier = before[start]
                    if summed:
                        value += earlier
                    elif earlier > value:
                        value = earlier
                    if value < best:
                        best, first = value, start
                self.values[stage + 1][stop], self.starts[stage + 1][stop] = best, first
