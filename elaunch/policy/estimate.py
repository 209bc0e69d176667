"""What a plan costs: seconds of a step and memory of each worker.

The step is played through in the very order that the executor follows (Chameleon eq. 11). Parts of the plan that have
nothing to do with each other, such as whole pipelines, are played once for all that are alike; so it takes
O(tiles x micro-batches) of those that differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from typing import TypeVar

from elaunch.plan.components import Component, components
from elaunch.plan.schedule import schedule, sequence
from elaunch.plan.tiling import ORDERS, Order, Plan, Tile
from elaunch.plan.timeline import Action, Schedule, by_workers, timeline
from elaunch.plan.views import gradient_groups, holders, rows_of
from elaunch.policy.profile import LinkProfile, Profile, action_s, transfer_s

LARGE, LARGEST = 2_000, 10_000
"""Micro-batches of a plan, all tiles' together, beyond which few orders that defer are tried, and none: each takes up
to a second, and what is deferred gains least where there are many micro-batches.
"""


@dataclass(frozen=True)
class StepEstimate:
    """One step under a plan.

    Attributes:
        step_s: from commit to commit.
        bubble: the part of their time in which the workers with tiles wait for each other, 0..1.
        busy_s: of computing, by worker with a tile.
        peak_bytes: by worker with a tile, at the worst moment of the step.
    """

    step_s: float
    bubble: float
    busy_s: Mapping[str, float]
    peak_bytes: Mapping[str, int]

    def over(self, profile: Profile) -> dict[str, tuple[int, float]]:
        """Returns, for each worker that needs more memory than it may use, the bytes needed and allowed."""
        caps = {worker: profile.cap_bytes(worker) for worker in self.peak_bytes}
        return {worker: (n, caps[worker]) for worker, n in self.peak_bytes.items() if n > caps[worker]}


def estimate_step(plan: Plan, profile: Profile) -> StepEstimate:
    """Plays a step of a valid plan through and returns its seconds and memory.

    Raises:
        PlanError: the profile is for another number of layers.
    """
    profile.check(plan)

    def play(component: Plan) -> _Played:
        return _play(component, schedule(component), profile)

    return _joined(_each(plan, profile, play), _Rest(plan, profile))


def ordered(plan: Plan, profile: Profile, deferred: Sequence[int] = ()) -> tuple[Plan, StepEstimate]:
    """Returns the plan with the order and the costs under which its step is fastest, and the estimate of that step.

    Costs are those of the profile, or none: clocks make an order by a rule, and the simpler ones are sometimes lucky.
    What does not fit in memory comes after what does; of equal ones that with the shorter text is taken.

    Args:
        plan: valid.
        profile: of the model.
        deferred: how many weight gradients may be deferred, beside none. A plan of more than LARGE micro-batches is
            tried with the clocks that are best without, backwards first; one of more than LARGEST with none.

    Raises:
        PlanError: the profile is for another number of layers.
    """
    profile.check(plan)
    clocks = list(dict.fromkeys([(), profile.costs]))
    rest = _Rest(plan, profile)
    found, step = _fastest(plan, profile, rest, list(product((0,), clocks, ORDERS)))
    orders: tuple[Order, ...] = ("backward", "forward")
    n_micro_batches = sum(len(tile.micro_batches) for tile in plan.tiles)
    if n_micro_batches > LARGE:
        clocks, orders = [found.costs], ("backward",)
    ways = list(product([most for most in deferred if most and n_micro_batches <= LARGEST], clocks, orders))
    if ways:
        other, took = _fastest(plan, profile, rest, ways)
        if _rank(took, profile) < _rank(step, profile):
            return other, took
    return found, step


_Way = tuple[int, tuple[int, ...], Order]
"""Deferred weight gradients, costs and order of a plan."""


def _rank(step: StepEstimate, profile: Profile) -> tuple[bool, float]:
    return bool(step.over(profile)), round(step.step_s, 9)


def _fastest(plan: Plan, profile: Profile, rest: _Rest, ways: Sequence[_Way]) -> tuple[Plan, StepEstimate]:
    """Returns the plan in the best of these ways, the first of equals."""

    def play(component: Plan) -> list[_Played]:
        known: dict[tuple[Action, ...], _Played] = {}
        found = [sequence(component, costs, order, most) for most, costs, order in ways]
        for actions in found:
            if actions not in known:
                known[actions] = _play(component, by_workers(component, actions), profile)
        return [known[actions] for actions in found]

    each = _each(plan, profile, play)
    estimates: dict[tuple[int, ...], tuple[int, StepEstimate]] = {}
    for number in range(len(ways)):
        parts = [(component, played[number]) for component, played in each]
        same = tuple(id(played) for _, played in parts)
        if same not in estimates:
            estimates[same] = number, _joined(parts, rest)
    number, step = min(estimates.values(), key=lambda one: _rank(one[1], profile))
    most, costs, order = ways[number]
    if (costs, order, most) != (plan.costs, plan.order, plan.deferred):
        plan = replace(plan, costs=costs, order=order, deferred=most)
    return plan, step


def static_bytes(plan: Plan, profile: Profile) -> dict[str, int]:
    """Returns, by worker with a tile, the bytes of parameters, and its part of masters and optimizer states; and of
    gradients, where nothing is known of their sums.
    """
    found: dict[str, float] = defaultdict(float)
    for layer, tp_groups in zip(profile.layers, holders(plan), strict=True):
        n_bytes: float = (2 if layer.gradient_bytes is None else 1) * layer.parameter_bytes
        n_bytes += layer.optimizer_bytes / len(tp_groups)
        for workers in tp_groups:
            for worker in workers:
                found[worker] += n_bytes / len(workers)
    return {worker: math.ceil(n) for worker, n in found.items()}


class EngineBytes:
    """What workers hold in a step of the engine beside what they keep from step to step and for backward.

    Attributes:
        known: whether the profile tells of sums of gradients; else the other figures are 0.
        arriving: by worker, from the beginning of a step: room for the gradients that replicas send to the owner.
        sharing: by worker, at the end of a step: the gradient of what it owns, its new values, and those of its layers.
    """

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.known = profile.knows_gradients
        self.arriving: dict[str, int] = defaultdict(int)
        self.sharing: dict[str, int] = defaultdict(int)
        if not self.known:
            return
        alone: dict[str, int] = defaultdict(int)
        for layer, tp_groups in zip(profile.layers, holders(plan), strict=True):
            n, gradient_bytes = len(tp_groups), layer.gradient_bytes or 0
            for workers in tp_groups:
                new_bytes = math.ceil(layer.parameter_bytes / len(workers))
                for worker in workers:
                    self.arriving[worker] += math.ceil(gradient_bytes * (n - 1) / n / len(workers))
                    self.sharing[worker] += math.ceil(gradient_bytes / len(workers)) + new_bytes
                    # Values that go to nobody else are made for one layer after the other.
                    self.sharing[worker] += math.ceil(new_bytes / n) if n > 1 else 0
                    alone[worker] = max(alone[worker], new_bytes if n == 1 else 0)
        for worker, n_bytes in alone.items():
            self.sharing[worker] += n_bytes


def stage_bytes(profile: Profile, layers: range, replicas: int, kept_rows: float) -> float:
    """Returns the bytes that a TP group needs for a stage: parameters, gradients, optimizer, activations (Suika A.3).

    Args:
        profile: of the model.
        layers: of the stage.
        replicas: among which the optimizer's state is shared out.
        kept_rows: whose activations are there at the worst moment.
    """
    own = profile.layers[layers.start : layers.stop]
    needed = 0.0
    for layer in own:
        gradient_bytes = layer.parameter_bytes if layer.gradient_bytes is None else layer.gradient_bytes
        needed += gradient_bytes + layer.parameter_bytes + layer.optimizer_bytes / replicas
    return needed + kept_rows * sum(layer.activation_bytes_per_row for layer in own)


def pipeline_s(forward_s: Sequence[float], backward_s: Sequence[float], n: int) -> float:
    """Returns the seconds of `n` micro-batches through one 1F1B pipeline, whose stages may differ (Chameleon eq. 11).

    Args:
        forward_s: of each stage, for a micro-batch.
        backward_s: likewise.
        n: micro-batches.
    """
    depth = len(forward_s)
    ahead = [min(depth - stage, n) for stage in range(depth)]
    free = [0.0] * depth
    forwards = [[0.0] * n for _ in range(depth)]
    # In turn t a stage does its forward number t + ahead - 1 after its backward number t - 1.
    for stage in range(depth):
        for number in range(ahead[stage]):
            ready = forwards[stage - 1][number] if stage else 0.0
            # Of the stages before, later ones are not known yet: they come with the turns.
            free[stage] = forwards[stage][number] = max(free[stage], ready) + forward_s[stage]
    for turn in range(n):
        arrived = 0.0
        for stage in range(depth - 1, -1, -1):
            free[stage] = arrived = max(free[stage], arrived) + backward_s[stage]
        for stage in range(depth):
            number = turn + ahead[stage]
            if number < n:
                ready = forwards[stage - 1][number] if stage else 0.0
                free[stage] = forwards[stage][number] = max(free[stage], ready) + forward_s[stage]
    return max(free)


def long_pipeline_s(forward_s: Sequence[float], backward_s: Sequence[float], n: int) -> float:
    """Approximates `pipeline_s`: once the pipeline has filled, each further micro-batch takes as long as the one
    before.
    """
    short = 3 * len(forward_s)
    if n <= short + 2:
        return pipeline_s(forward_s, backward_s, n)
    begin_s, end_s = (pipeline_s(forward_s, backward_s, some) for some in (short, short + 2))
    return begin_s + (n - short) * (end_s - begin_s) / 2


# -- the components of a plan ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Played:
    """Figures of the workers of a component, in their order: end of their actions, length of the last, computing,
    activations.
    """

    ends_s: tuple[float, ...]
    last_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    kept_bytes: tuple[int, ...]


T = TypeVar("T")


def _each(plan: Plan, profile: Profile, play: Callable[[Plan], T]) -> list[tuple[Component, T]]:
    """Returns the components of a plan with the result of playing each; components that are alike are played once."""
    known: dict[Hashable, T] = {}
    found = []
    for component in components(plan):
        key = _likeness(component, profile)
        if key not in known:
            known[key] = play(component.plan)
        found.append((component, known[key]))
    return found


def _joined(each: Sequence[tuple[Component, _Played]], rest: _Rest) -> StepEstimate:
    ends_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    busy_s: dict[str, float] = {}
    kept: dict[str, int] = {}
    for component, played in each:
        workers = component.plan.workers
        ends_s |= zip(workers, played.ends_s)
        last_s |= zip(workers, played.last_s)
        busy_s |= zip(workers, played.busy_s)
        kept |= zip(workers, played.kept_bytes)
    makespan_s = max(ends_s.values(), default=0.0)
    bubble = 1 - sum(busy_s.values()) / (len(busy_s) * makespan_s) if makespan_s else 0.0
    step_s = max((end_s + rest.tail_s(worker, last_s[worker]) for worker, end_s in ends_s.items()), default=0.0)
    peak_bytes = {worker: rest.peak_bytes(worker, n) for worker, n in kept.items()}
    return StepEstimate(step_s + rest.common_s, bubble, busy_s, peak_bytes)


class _Rest:
    """The costs of a step beside its actions, whatever their order."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self._reduced_s, shared_s, self._updated_s = _synchronised(plan, profile)
        self._overlap = profile.overlap
        self.common_s = max(shared_s.values(), default=0.0) + profile.step_s
        self._fixed = static_bytes(plan, profile)
        self._engine = EngineBytes(plan, profile)

    def peak_bytes(self, worker: str, kept_bytes: int) -> int:
        """Returns the bytes of a worker at the worst moment, if its actions keep so many at theirs."""
        engine = self._engine
        if not engine.known:
            return self._fixed[worker] + kept_bytes
        return self._fixed[worker] + max(kept_bytes + engine.arriving[worker], engine.sharing[worker])

    def tail_s(self, worker: str, last_s: float) -> float:
        """Returns the seconds of a worker after its last action, which took `last_s`."""
        return _not_hidden(last_s, self._reduced_s[worker], self._overlap) + self._updated_s[worker]


def _likeness(component: Component, profile: Profile) -> Hashable:
    """Returns a key; components with equal keys take equally long."""
    if not profile.workers and not profile.links:
        return component.shape
    speeds = tuple(profile.tile_speed(tile) for tile in component.plan.tiles)
    links: tuple[LinkProfile, ...] = ()
    if profile.links:
        heads = list(dict.fromkeys(tile.workers[0] for tile in component.plan.tiles))
        links = tuple(profile.link(one, other) for one in heads for other in heads if one != other)
    return component.shape, speeds, links


def _play(component: Plan, order: Schedule, profile: Profile) -> _Played:
    workers, rows = component.workers, rows_of(component)
    price = action_s(profile, component)
    played = timeline(component, order, price, transfer_s(profile, component))
    activations = _bytes_per_row(component, [layer.activation_bytes_per_row for layer in profile.layers])
    gradients = _bytes_per_row(component, [layer.deferred_bytes_per_row for layer in profile.layers])
    sums = [_Sums(profile, tile) for tile in component.tiles] if profile.knows_gradients else []
    known: dict[int, tuple[float, float, int]] = {}
    for worker in workers:
        # The members of a TP group have one order.
        actions = order.by_worker[worker]
        if id(actions) not in known:
            kept = most = 0.0
            for one in sums:
                one.begin()
            for kind, tile, micro_batch in actions:
                if kind == "F":
                    per_row = activations[tile]
                elif kind == "I":
                    per_row = gradients[tile]
                else:
                    per_row = -activations[tile] - (gradients[tile] if kind == "W" else 0.0)
                    if sums:
                        most = max(most, kept + sums[tile].fresh_bytes)
                        kept += sums[tile].add()
                kept += rows[tile][micro_batch] * per_row
                most = max(most, kept)
            last = actions[-1]
            last_s = price(last.kind, last.tile, rows[last.tile][last.micro_batch])
            known[id(actions)] = played.ends_s[last], last_s, math.ceil(most)
    found = [known[id(order.by_worker[worker])] for worker in workers]
    return _Played(
        tuple(end_s for end_s, _, _ in found),
        tuple(last_s for _, last_s, _ in found),
        tuple(played.busy_s[worker] for worker in workers),
        tuple(most for _, _, most in found),
    )


class _Sums:
    """The sums of gradients that each worker of a tile keeps, one micro-batch after the other."""

    def __init__(self, profile: Profile, tile: Tile) -> None:
        own = profile.layers[tile.layers.start : tile.layers.stop]
        of_layers = [layer.gradient_bytes or 0 for layer in own]
        self._in_tree = any(layer.summed_in_tree for layer in own)
        self._n_bytes = sum(of_layers) / len(tile.workers)
        # Of one layer at a time: the gradients that come, and their sum with those before.
        self.fresh_bytes = 2 * max(of_layers, default=0) / len(tile.workers)
        self._added = 0

    def begin(self) -> None:
        """Begins with no sum."""
        self._added = 0

    def add(self) -> float:
        """Takes another micro-batch; returns the bytes that sums need more than before. Of leaves in a row, as many
        partial sums are left as their number has ones in binary.
        """
        before, self._added = self._added, self._added + 1
        if self._in_tree:
            return (self._added.bit_count() - before.bit_count()) * self._n_bytes
        return 0.0 if before else self._n_bytes


def _bytes_per_row(component: Plan, by_layer: Sequence[int]) -> list[float]:
    """Returns what each tile's workers keep of a row, each of them, by what all keep of it in each layer."""
    before = list(accumulate(by_layer, initial=0))
    return [(before[tile.layers.stop] - before[tile.layers.start]) / len(tile.workers) for tile in component.tiles]


# -- after the last backward --------------------------------------------------------------------------------------


def _synchronised(plan: Plan, profile: Profile) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Returns, by worker, the seconds of reducing gradients, of sharing new values and of the optimizer's step."""
    reduced: dict[str, float] = defaultdict(float)
    shared: dict[str, float] = defaultdict(float)
    updated: dict[str, float] = defaultdict(float)
    for group in gradient_groups(plan):
        n = len(group.replicas)
        n_bytes = sum(profile.layers[layer].parameter_bytes for layer in group.layers)
        update_s = sum(profile.layers[layer].update_s for layer in group.layers) / n
        seconds = 0.0
        if n > 1:
            heads = [workers[0] for workers in group.replicas]
            ring = pairwise([*heads, heads[0]]) if profile.links else [(heads[0], heads[1])]
            slowest = min((profile.link(*pair) for pair in ring), key=lambda link: link.bandwidth_bytes_per_s)
            seconds = slowest.seconds(n_bytes * (n - 1) / n)
        for workers in group.replicas:
            for worker in workers:
                reduced[worker] += seconds / len(workers)
                shared[worker] += seconds / len(workers)
                updated[worker] += update_s / len(workers) / profile.speed(worker)
    return reduced, shared, updated


def shared_s(plan: Plan, profile: Profile) -> float:
    """Returns the seconds in which new values of parameters are shared, on the worker that it takes longest."""
    return max(_synchronised(plan, profile)[1].values(), default=0.0)


def _not_hidden(computing_s: float, telling_s: float, overlap: float) -> float:
    """Returns what remains of `telling_s` beside `computing_s` (Suika A.2, with the exponent 1/k)."""
    longer, shorter = max(computing_s, telling_s), min(computing_s, telling_s)
    if not longer or math.isinf(overlap):
        return longer - computing_s
    return float(longer * (1 + (shorter / longer) ** overlap) ** (1 / overlap) - computing_s)
