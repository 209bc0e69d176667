"""The bytes that each worker needs under a plan: its state, and the sums of gradients (Suika A.3).

With `consistency="bitwise"` gradients are summed along one tree over all units of the batch (`elaunch.plan.sums`), so a
worker keeps several partial sums, and sends several; how many depends on which units it does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from elaunch.plan.sums import Node, TreeSum
from elaunch.plan.tiling import MicroBatch, Plan, Tile
from elaunch.plan.timeline import crews_of
from elaunch.plan.views import (
    GradientGroup,
    gradient_groups,
    once_per_plan,
    partial_sums,
    tiles_by_group,
    unit_of,
)
from elaunch.policy.profile import Profile


class StateBytes:
    """What workers hold beside what they keep for backward, by a worker of each TP group of its own.

    Attributes:
        fixed: of parameters, and its part of masters and optimizer states; and of gradients, where nothing is known of
            their sums.
        known: whether the profile tells of sums of gradients; else the figures below are 0.
        arriving: from the beginning of a step: room for the gradients that replicas send to the owner.
        sharing: at the end of a step: the gradient of what it owns, its new values, and those of its layers.
    """

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.known = profile.knows_gradients
        fixed: dict[str, float] = defaultdict(float)
        self.arriving: dict[str, int] = defaultdict(int)
        self.sharing: dict[str, int] = defaultdict(int)
        alone: dict[str, int] = defaultdict(int)
        for group, heads in gradient_heads(plan):
            n = len(group.replicas)
            terms = _terms(plan, profile, group) if self.known else [0] * n
            # Of its part of the gradient, a worker gets all sums of the other replicas.
            come = [
                (worker, width, sum(terms) - own)
                for replica, own in zip(heads, terms, strict=True)
                for worker, width in replica
            ]
            for layer in (profile.layers[number] for number in group.layers):
                n_bytes: float = (2 if layer.gradient_bytes is None else 1) * layer.parameter_bytes
                n_bytes += layer.optimizer_bytes / n
                gradient_bytes = layer.gradient_bytes or 0
                for worker, width, sums in come:
                    fixed[worker] += n_bytes / width
                    if not self.known:
                        continue
                    new_bytes = math.ceil(layer.parameter_bytes / width)
                    self.arriving[worker] += math.ceil(gradient_bytes * sums / n / width)
                    self.sharing[worker] += math.ceil(gradient_bytes / width) + new_bytes
                    # Values that go to nobody else are made for one layer after the other.
                    self.sharing[worker] += math.ceil(new_bytes / n) if n > 1 else 0
                    alone[worker] = max(alone[worker], new_bytes if n == 1 else 0)
        for worker, n_alone in alone.items():
            self.sharing[worker] += n_alone
        self.fixed = {worker: math.ceil(n) for worker, n in fixed.items()}

    def peak_bytes(self, worker: str, kept_bytes: int) -> int:
        """Returns the bytes of a worker at the worst moment, if its actions keep so many at theirs."""
        if not self.known:
            return self.fixed[worker] + kept_bytes
        return self.fixed[worker] + max(kept_bytes + self.arriving[worker], self.sharing[worker])


def stage_bytes(profile: Profile, layers: range, replicas: int, kept_rows: float) -> float:
    """Returns the bytes that a TP group needs for a stage: parameters, gradients, optimizer, activations (Suika A.3).

    Args:
        profile: of the model.
        layers: of the stage.
        replicas: among which the optimizer's state is shared out.
        kept_rows: whose activations are there at the worst moment.
    """
    start, stop = layers.start, layers.stop
    held, optimizer, activations = profile.bytes_before
    n_bytes = held[stop] - held[start] + (optimizer[stop] - optimizer[start]) / replicas
    return n_bytes + kept_rows * (activations[stop] - activations[start])


class GradientSums:
    """The sums of gradients that each worker of a tile keeps, one micro-batch after the other.

    Args:
        plan: of which the tile is one; it need not cover all samples.
        tile: the tile.
        profile: of the model.
    """

    def __init__(self, plan: Plan, tile: Tile, profile: Profile) -> None:
        own, n = profile.layers[tile.layers.start : tile.layers.stop], len(tile.workers)
        # In the order of backward: of gradients, and of what a row keeps, without and with what deferring keeps.
        self._layers = [
            (
                (layer.gradient_bytes or 0) / n,
                layer.activation_bytes_per_row / n,
                (layer.activation_bytes_per_row + layer.deferred_bytes_per_row) / n,
            )
            for layer in reversed(own)
        ]
        self._units: list[int | None] = [None] * len(tile.micro_batches)
        if any(layer.summed_in_tree for layer in own):
            self._units = [unit_of(plan, micro_batch) for micro_batch in tile.micro_batches]
        self._n_units = plan.n_units
        self._known: dict[tuple[int, bool, int], tuple[float, float]] = {}
        self.begin()

    def begin(self) -> None:
        """Begins with no sum."""
        self._tree = TreeSum[None](self._n_units, _nothing)
        self._has_rest = False

    def add(self, micro_batch: int, rows: int, deferred: bool) -> tuple[float, float]:
        """Takes another micro-batch, which gives back what it kept while its gradients come, layer by layer.

        Returns the bytes that are there beside those of before at the worst moment, and those that sums need more from
        then on.
        """
        unit = self._units[micro_batch]
        if unit is None:
            more, self._has_rest = int(not self._has_rest), True
        else:
            before = len(self._tree)
            self._tree.put(Node(0, unit), None)
            more = len(self._tree) - before
        key = rows, deferred, more
        if key not in self._known:
            now = worst = added = 0.0
            for gradient, kept, kept_deferred in self._layers:
                # What comes, and its sum with what there is; of what the layer kept, all may still be there.
                worst = max(worst, now + (gradient if more == 1 else 2 * gradient))
                now += more * gradient - rows * (kept_deferred if deferred else kept)
                added += more * gradient
            self._known[key] = worst, added
        return self._known[key]


def sums_in_tree(profile: Profile) -> bool:
    """Returns whether partial sums follow a tree, so that they depend on which units a worker does."""
    return profile.knows_gradients and any(layer.summed_in_tree for layer in profile.layers)


def alignment(plan: Plan, micro_batches: Sequence[MicroBatch]) -> tuple[int, ...]:
    """Returns a key; micro-batches that are alike and have equal keys leave as many partial sums at each moment."""
    size = plan.micro_batch_size
    units = sorted({run.start // size for micro_batch in micro_batches for run in micro_batch})
    if not units:
        return ()
    level = (units[-1] - units[0]).bit_length()
    # No sum of theirs has a sibling beyond the subtrees of this level that they are in.
    base = units[0] >> level << level
    room = min(plan.n_units, (units[-1] >> level << level) + (1 << level)) - base
    if units[-1] - units[0] == len(units) - 1:
        return units[0] - base, len(units), room
    return (*[unit - base for unit in units], room)


def _nothing(one: None, other: None) -> None:
    return None


def _terms(plan: Plan, profile: Profile, group: GradientGroup) -> list[int]:
    """Returns how many sums each replica of a gradient group sends of each of its layers."""
    if not any(profile.layers[layer].summed_in_tree for layer in group.layers):
        return [1] * len(group.replicas)
    tiles = tiles_by_group(plan)
    counts: dict[tuple[tuple[int, ...], ...], int] = {}
    found = []
    for workers in group.replicas:
        here = [tile for tile in tiles[workers] if group.layers[0] in tile.layers]
        key = tuple(alignment(plan, tile.micro_batches) for tile in here)
        if key not in counts:
            counts[key] = len(partial_sums(plan, group.layers[0], here, in_tree=True))
        found.append(counts[key])
    return found


@once_per_plan
def gradient_heads(plan: Plan) -> list[tuple[GradientGroup, list[list[tuple[str, int]]]]]:
    """Returns the gradient groups, each with, for each replica, one worker for all that are alike, and the width of its
    TP group.
    """
    heads = {tile.workers: crew for tile, crew in zip(plan.tiles, crews_of(plan), strict=True)}
    return [
        (group, [[(worker, len(workers)) for worker in heads[workers]] for workers in group.replicas])
        for group in gradient_groups(plan)
    ]
