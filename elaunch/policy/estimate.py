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
from functools import cached_property, partial
from itertools import accumulate, chain, pairwise, product
from typing import TypeVar

from elaunch.plan.components import Component, components
from elaunch.plan.schedule import sequence
from elaunch.plan.tiling import ORDERS, Order, Plan
from elaunch.plan.timeline import Action, Prices, crew_numbers, crews_of
from elaunch.plan.views import once_per_plan, rows_of
from elaunch.policy.memory import GradientSums, StateBytes, alignment, gradient_heads, sums_in_tree
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
        if not profile.workers and profile.memory_bytes is None:
            return {}
        caps = {worker: profile.cap_bytes(worker) for worker in self.peak_bytes}
        return {worker: (n, caps[worker]) for worker, n in self.peak_bytes.items() if n > caps[worker]}


def estimate_step(plan: Plan, profile: Profile) -> StepEstimate:
    """Plays a step of a valid plan through and returns its seconds and memory.

    Raises:
        PlanError: the profile is for another number of layers.
    """
    return _fastest(plan, profile, _Rest(plan, profile), [(plan.deferred, plan.costs, plan.order)])[1]


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
    """Returns the plan in the best of these ways, the first of equals, and the estimate of its step."""

    def play(component: Plan) -> list[_Played]:
        stage = _Stage(component, profile)
        known: dict[tuple[Action, ...], _Played] = {}
        found = [sequence(component, costs, order, most) for most, costs, order in ways]
        for actions in found:
            if actions not in known:
                known[actions] = stage.play(actions)
        return [known[actions] for actions in found]

    each = _each(plan, profile, play)
    outcomes: dict[tuple[int, ...], tuple[int, _StepOutcome]] = {}
    for number in range(len(ways)):
        parts = [(component, played[number]) for component, played in each]
        same = tuple(id(played) for _, played in parts)
        if same not in outcomes:
            outcomes[same] = number, _StepOutcome(parts, rest)
    number, outcome = min(outcomes.values(), key=lambda one: (one[1].is_over, round(one[1].step_s, 9)))
    most, costs, order = ways[number]
    if (costs, order, most) != (plan.costs, plan.order, plan.deferred):
        plan = replace(plan, costs=costs, order=order, deferred=most)
    return plan, outcome.estimate()


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
    """Figures by number of `crew_numbers`: end of the actions, length of the last, computing."""

    ends_s: Sequence[float]
    last_s: Sequence[float]
    busy_s: Sequence[float]
    keep: Callable[[], Sequence[int]]

    @cached_property
    def kept_bytes(self) -> Sequence[int]:
        """Returns what they keep at the worst moment; nobody asks for it of most orders where memory has no bound."""
        return self.keep()


T = TypeVar("T")


def _each(plan: Plan, profile: Profile, play: Callable[[Plan], T]) -> list[tuple[Component, T]]:
    """Returns the components of a plan with the result of playing each; components that are alike are played once."""
    known: dict[Hashable, T] = {}
    found = []
    in_tree = sums_in_tree(profile)
    for component in components(plan):
        key = _likeness(component, profile)
        if in_tree:
            # The shape says which tiles have the very same micro-batches.
            cuts = {id(tile.micro_batches): tile.micro_batches for tile in component.plan.tiles}
            key = key, tuple(alignment(plan, cut) for cut in cuts.values())
        if key not in known:
            known[key] = play(component.plan)
        found.append((component, known[key]))
    return found


def _likeness(component: Component, profile: Profile) -> Hashable:
    """Returns a key; components with equal keys take equally long."""
    if not profile.workers and not profile.links:
        return component.shape
    speeds = tuple(profile.slowest(tile.workers) for tile in component.plan.tiles)
    links: tuple[LinkProfile, ...] = ()
    if profile.links:
        heads = list(dict.fromkeys(tile.workers[0] for tile in component.plan.tiles))
        links = tuple(profile.link(one, other) for one in heads for other in heads if one != other)
    return component.shape, speeds, links


@once_per_plan
def _alike(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Returns, by number of `crew_numbers`, the workers for which it stands: those of a TP group, if each worker is in
    one only.
    """
    found: dict[int, tuple[str, ...]] = {}
    for tile, crew, numbers in zip(plan.tiles, crews_of(plan), crew_numbers(plan), strict=True):
        if len(crew) < len(tile.workers):
            found[numbers[0]] = tile.workers
        else:
            found |= {number: (worker,) for number, worker in zip(numbers, crew, strict=True)}
    return tuple(found[number] for number in range(len(found)))


class _StepOutcome:
    """What a step takes if the components are played like this, as far as orders are compared by it."""

    def __init__(self, parts: Sequence[tuple[Component, _Played]], rest: _Rest) -> None:
        self._parts, self._rest = parts, rest
        self.step_s = rest.common_s
        self.makespan_s = 0.0
        ends_s = 0.0
        for component, played in parts:
            for workers, end_s, last_s in zip(_alike(component.plan), played.ends_s, played.last_s, strict=True):
                ends_s = max(ends_s, end_s + rest.tail_s(workers[0], last_s))
            self.makespan_s = max(self.makespan_s, *played.ends_s)
        self.step_s = ends_s + rest.common_s

    @property
    def is_over(self) -> bool:
        """Returns whether some worker needs more memory than it may use."""
        rest = self._rest
        return rest.is_bounded and any(
            rest.bytes.peak_bytes(workers[0], kept) > rest.cap_bytes(workers)
            for component, played in self._parts
            for workers, kept in zip(_alike(component.plan), played.kept_bytes, strict=True)
        )

    def estimate(self) -> StepEstimate:
        """Returns all figures, by worker."""
        busy_s: dict[str, float] = {}
        peak_bytes: dict[str, int] = {}
        for component, played in self._parts:
            figures = zip(_alike(component.plan), played.busy_s, played.kept_bytes, strict=True)
            for workers, busy, kept in figures:
                busy_s |= dict.fromkeys(workers, busy)
                peak_bytes |= dict.fromkeys(workers, self._rest.bytes.peak_bytes(workers[0], kept))
        bubble = 1 - sum(busy_s.values()) / (len(busy_s) * self.makespan_s) if self.makespan_s else 0.0
        return StepEstimate(self.step_s, bubble, busy_s, peak_bytes)


class _Rest:
    """The costs of a step beside its actions, whatever their order; by one worker for all that are alike."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        profile.check(plan)
        self._profile = profile
        self._reduced_s, shared_s, self._updated_s = _synchronised(plan, profile)
        self._overlap = profile.overlap
        self.common_s = max(shared_s.values(), default=0.0) + profile.step_s
        self.bytes = StateBytes(plan, profile)
        self.is_bounded = profile.memory_bytes is not None or bool(profile.workers)

    def cap_bytes(self, workers: Sequence[str]) -> float:
        """Returns the memory that the worker may use that has the least of these."""
        return self._profile.least_cap_bytes(workers)

    def tail_s(self, worker: str, last_s: float) -> float:
        """Returns the seconds of a worker after its last action, which took `last_s`."""
        return _not_hidden(last_s, self._reduced_s[worker], self._overlap) + self._updated_s[worker]


class _Stage:
    """Plays orders of the actions of a component."""

    def __init__(self, component: Plan, profile: Profile) -> None:
        self._rows, self._crews = rows_of(component), crew_numbers(component)
        self._prices = Prices(component, action_s(profile, component), transfer_s(profile, component))
        self._activations = _bytes_per_row(component, [layer.activation_bytes_per_row for layer in profile.layers])
        self._gradients = _bytes_per_row(component, [layer.deferred_bytes_per_row for layer in profile.layers])
        self._sums = (
            [GradientSums(component, tile, profile) for tile in component.tiles] if profile.knows_gradients else []
        )

    def play(self, actions: Sequence[Action]) -> _Played:
        """Plays actions in this order."""
        played = self._prices.play(actions)
        n_workers = len(played.free_s)
        last_s: list[float] = [-1.0] * n_workers
        left = n_workers
        for kind, tile, micro_batch in reversed(actions):
            for worker in self._crews[tile]:
                if last_s[worker] < 0.0:
                    last_s[worker] = self._prices.seconds(kind)[tile][micro_batch]
                    left -= 1
            if not left:
                break
        return _Played(played.free_s, last_s, played.busy_s, partial(self._kept_bytes, actions, n_workers))

    def _kept_bytes(self, actions: Sequence[Action], n_workers: int) -> list[int]:
        """Returns what each worker keeps for backward, and of sums of gradients, when it keeps the most."""
        rows, crews, sums, activations, gradients = (
            self._rows,
            self._crews,
            self._sums,
            self._activations,
            self._gradients,
        )
        for one in sums:
            one.begin()
        kept, most = [0.0] * n_workers, [0.0] * n_workers
        for kind, tile, micro_batch in actions:
            if kind == "F":
                n_bytes = rows[tile][micro_batch] * activations[tile]
            elif kind == "I":
                n_bytes = rows[tile][micro_batch] * gradients[tile]
            else:
                per_row = -activations[tile] - (gradients[tile] if kind == "W" else 0.0)
                n_bytes = rows[tile][micro_batch] * per_row
                if sums:
                    worst, added = sums[tile].add(micro_batch, rows[tile][micro_batch], kind == "W")
                    for worker in crews[tile]:
                        most[worker] = max(most[worker], kept[worker] + worst)
                        kept[worker] += added
            for worker in crews[tile]:
                kept[worker] += n_bytes
                if kept[worker] > most[worker]:
                    most[worker] = kept[worker]
        return list(map(math.ceil, most))


def _bytes_per_row(component: Plan, by_layer: Sequence[int]) -> list[float]:
    """Returns what each tile's workers keep of a row, each of them, by what all keep of it in each layer."""
    before = list(accumulate(by_layer, initial=0))
    return [(before[tile.layers.stop] - before[tile.layers.start]) / len(tile.workers) for tile in component.tiles]


# -- after the last backward --------------------------------------------------------------------------------------


def _synchronised(plan: Plan, profile: Profile) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Returns the seconds of reducing gradients, of sharing new values and of the optimizer's step; by one worker for
    all that are alike, of the slowest of them.
    """
    reduced: dict[str, float] = defaultdict(float)
    shared: dict[str, float] = defaultdict(float)
    updated: dict[str, float] = defaultdict(float)
    members = {workers[0]: workers for workers in _alike(plan)}
    for group, heads in gradient_heads(plan):
        n = len(group.replicas)
        n_bytes = sum(profile.layers[layer].parameter_bytes for layer in group.layers)
        update_s = sum(profile.layers[layer].update_s for layer in group.layers) / n
        seconds = 0.0
        if n > 1:
            first = [workers[0] for workers in group.replicas]
            ring = pairwise([*first, first[0]]) if profile.links else [(first[0], first[1])]
            slowest = min((profile.link(*pair) for pair in ring), key=lambda link: link.bandwidth_bytes_per_s)
            seconds = slowest.seconds(n_bytes * (n - 1) / n)
        for worker, width in chain.from_iterable(heads):
            reduced[worker] += seconds / width
            shared[worker] += seconds / width
            speed = profile.slowest(members[worker])
            updated[worker] += update_s / width / speed
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
