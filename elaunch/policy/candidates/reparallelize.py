"""Reparallelize: new degrees of data and pipeline parallelism for those who are left (Chameleon alg. 1).

Pipelines may differ in depth, so that no worker need be idle. For each number of pipelines and each way to cut the
workers into them, units are shared out and layers are cut by what a pipeline can do. Or all pipelines have the same
stages, of which some have a replica more than others and more layers (Suika A.1). Workers take the roles that need the
fewest bytes to be moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise

from elaunch.plan.build import Pipeline, Stage, pipelines
from elaunch.plan.tiling import Plan, PlanError
from elaunch.policy.candidates.balance import shared_out
from elaunch.policy.candidates.matching import matched
from elaunch.policy.candidates.partition import minimax
from elaunch.policy.candidates.resize import balanced, with_rows
from elaunch.policy.candidates.structure import NotPossible, tp_groups_of, width_of
from elaunch.policy.estimate import StepEstimate, estimate_step
from elaunch.policy.memory import stage_bytes
from elaunch.policy.profile import Profile

NEAR = 2
"""The number of pipelines changes by at most so many (Chameleon IV-A)."""

SPREAD = 2
"""Pipelines differ in depth by at most so many stages."""

MOST_SHAPES = 64
"""Ways to cut the workers into pipelines that are looked at, for each number of pipelines."""

MOST_PLAYED = 4
"""The shapes of pipelines that are best by closed form are matched with workers and played through."""

MOST_STAGED = 2
"""Likewise, of those with uneven numbers of replicas."""


@dataclass(frozen=True)
class Degrees:
    """The degrees of parallelism to try; both ends belong to the range.

    Attributes:
        dp: number of pipelines; None: near what it is.
        pp: depth of a pipeline.
    """

    dp: tuple[int, int] | None = None
    pp: tuple[int, int] = (1, 1 << 30)


@dataclass(frozen=True)
class _Shape:
    """For each pipeline its stages' layers and its number of units; `step_s` by closed form."""

    stages: tuple[tuple[range, ...], ...]
    units: tuple[int, ...]
    step_s: float


def reparallelized(
    plan: Plan, members: Sequence[str], profile: Profile, degrees: Degrees = Degrees(), widths: Sequence[int] = ()
) -> Plan:
    """Returns the fastest plan for the members, of pipelines or of stages.

    Args:
        plan: valid; for these members or others, under which the state is distributed.
        members: who there is.
        profile: of the model.
        degrees: what is looked at.
        widths: of tensor-parallel groups, beside that of the plan, that the layers can be cut for.

    Raises:
        NotPossible: says why.
    """
    profile.check(plan)
    found: list[tuple[StepEstimate, Plan]] = []
    reasons: list[str] = []
    for width in dict.fromkeys((width_of(plan), *widths)):
        try:
            found.append(_of_width(width, plan, members, profile, degrees))
        except NotPossible as error:
            reasons.append(str(error))
    if not found:
        raise NotPossible(", ".join(reasons))
    return min(found, key=lambda one: one[0].step_s)[1]


def _of_width(
    width: int, plan: Plan, members: Sequence[str], profile: Profile, degrees: Degrees
) -> tuple[StepEstimate, Plan]:
    """Returns the fastest plan whose tensor-parallel groups have so many workers, with its estimate."""
    tp_groups, rest = tp_groups_of(plan, members, width)
    if not tp_groups:
        raise NotPossible(f"{len(members)} members make no tensor-parallel group of {width} on a node")
    # The slow ones last: they are in the deeper pipelines then, with fewer layers.
    tp_groups.sort(key=lambda workers: -profile.slowest(workers))
    shapes = sorted(_shapes(plan, tp_groups, profile, degrees), key=lambda shape: shape.step_s)
    made = [_with_workers(plan, shape, tp_groups, rest, profile) for shape in shapes[:MOST_PLAYED]]
    made += _staged(plan, tp_groups, members, profile, degrees)
    if not any(made):
        raise NotPossible(f"no pipelines of {degrees.pp[0]} to {min(degrees.pp[1], plan.n_layers)} stages fit")
    best: tuple[StepEstimate, Plan] | None = None
    for found in filter(None, made):
        here = estimate_step(found, profile)
        if not here.over(profile) and (best is None or here.step_s < best[0].step_s):
            best = here, found
    if best is None:
        caps = [profile.cap_bytes(worker) for worker in members]
        raise NotPossible(f"no pipelines of {len(tp_groups)} TP groups fit into {min(caps):,.0f} bytes of each worker")
    return best


def partitions(total: int, parts: int, low: int, high: int, spread: int) -> Iterator[tuple[int, ...]]:
    """Yields the ways to write `total` as `parts` numbers of low to high, descending, the greatest at most `spread`
    more than the least; the most even ones come first.
    """
    for wide in range(spread + 1):
        for least in range(max(low, -(-(total - wide * (parts - 1)) // parts)), min(high - wide, total // parts) + 1):
            yield from _with_ends(total, parts, least, least + wide)


def _with_ends(total: int, parts: int, least: int, greatest: int) -> Iterator[tuple[int, ...]]:
    """Yields those of which some numbers are as great as `greatest`, and some as small as `least`."""
    if least == greatest:
        if least * parts == total:
            yield (least,) * parts
        return
    rest = total - least - greatest - (parts - 2) * least
    if parts >= 2 and 0 <= rest <= (parts - 2) * (greatest - least):
        for more in _bounded(rest, parts - 2, greatest - least):
            yield (greatest, *(least + one for one in more), least)


def _bounded(total: int, parts: int, high: int) -> Iterator[tuple[int, ...]]:
    """Yields descending numbers of 0 to high with this sum."""
    if not parts:
        if not total:
            yield ()
        return
    for first in range(min(high, total), -1, -1):
        if first * parts < total:
            return
        for rest in _bounded(total - first, parts - 1, first):
            yield (first, *rest)


def _staged(
    plan: Plan, tp_groups: Sequence[tuple[str, ...]], members: Sequence[str], profile: Profile, degrees: Degrees
) -> Iterator[Plan]:
    """Returns plans whose stages have different numbers of replicas, the fastest by closed form."""
    low, high = _near(plan, degrees)
    width = len(tp_groups[0])
    size = plan.micro_batch_size
    found: list[tuple[float, tuple[int, ...], tuple[range, ...]]] = []

    @cache
    def turn_s(rows: float, start: int, stop: int) -> float:
        return profile.turn_s(range(start, stop), rows, width)

    for depth in range(max(2, degrees.pp[0]), min(degrees.pp[1], plan.n_layers, len(tp_groups)) + 1):
        dp_size, uneven = -(-len(tp_groups) // depth), len(tp_groups) % depth
        if not uneven or not low <= dp_size <= min(high, plan.n_units):
            continue
        for more in (range(uneven), range(depth - uneven, depth)):
            replicas = tuple(dp_size if stage in more else dp_size - 1 for stage in range(depth))

            def cost(
                stage: int, start: int, stop: int, replicas: Sequence[int] = replicas, dp_size: int = dp_size
            ) -> float:
                return turn_s(size * dp_size / replicas[stage], start, stop)

            cut = minimax(plan.n_layers, depth, cost)
            assert cut is not None
            first_s = sum(cost(stage, layers.start, layers.stop) for stage, layers in enumerate(cut.stages))
            turns = math.ceil(plan.n_units / dp_size)
            found.append((first_s + (turns - 1) * cut.slowest, replicas, cut.stages))
    for _, replicas, layers in sorted(found)[:MOST_STAGED]:
        roles = [span for span, n in zip(layers, replicas, strict=True) for _ in range(n)]
        names = iter(tp_groups[place] for place in matched(tp_groups, roles, plan, profile))
        placed = [tuple(next(names) for _ in range(n)) for n in replicas]
        padded = [(*some, *[()] * (max(replicas) - len(some))) for some in placed]
        given = [with_rows(Stage(*one), profile) for one in zip(layers, padded, strict=True)]
        try:
            yield balanced(plan, given, members, profile, most_played=1)
        except NotPossible:
            continue


def _near(plan: Plan, degrees: Degrees) -> tuple[int, int]:
    """Returns the least and the greatest number of pipelines to try."""
    now = sum(tile.layers.start == 0 for tile in plan.tiles)
    return degrees.dp or (max(1, now - NEAR), now + NEAR)


def _shapes(plan: Plan, tp_groups: Sequence[tuple[str, ...]], profile: Profile, degrees: Degrees) -> Iterator[_Shape]:
    n_groups, width = len(tp_groups), len(tp_groups[0])
    low, high = _near(plan, degrees)
    deepest = min(degrees.pp[1], plan.n_layers)
    cuts: dict[int, tuple[tuple[range, ...], float, float] | None] = {}
    for dp in range(low, min(high, plan.n_units, n_groups) + 1):
        seen = 0
        # Somebody is idle only where all cannot be used.
        for used in range(min(n_groups, dp * deepest), max(0, n_groups - dp), -1):
            for depths in partitions(used, dp, degrees.pp[0], deepest, SPREAD):
                seen += 1
                if seen > MOST_SHAPES:
                    break
                for depth in depths:
                    if depth not in cuts:
                        cuts[depth] = _cut(plan, depth, dp, width, profile)
                found = [cuts[depth] for depth in depths]
                if all(one is not None for one in found):
                    yield _shape(plan, [one for one in found if one is not None], profile)
            if seen:
                break


def _cut(
    plan: Plan, depth: int, dp: int, width: int, profile: Profile
) -> tuple[tuple[range, ...], float, float] | None:
    """Returns each stage's layers, the seconds of a unit through all and through the slowest; None if none fits."""
    size = plan.micro_batch_size
    turns = math.ceil(plan.n_units / dp)
    caps = profile.memory_bytes

    def cost(_: int, start: int, stop: int) -> float:
        return profile.turn_s(range(start, stop), size, width)

    def fits(stage: int, start: int, stop: int) -> bool:
        if caps is None:
            return True
        kept_rows = min(depth - stage, turns) * size
        return stage_bytes(profile, range(start, stop), dp, kept_rows) <= caps * width

    found = minimax(plan.n_layers, depth, cost, fits)
    if found is None:
        return None
    return found.stages, cost(0, 0, plan.n_layers), found.slowest


def _shape(plan: Plan, cuts: Sequence[tuple[tuple[range, ...], float, float]], profile: Profile) -> _Shape:
    """Shares out units by each pipeline's seconds per further unit, after the first has passed (Chameleon eq. 9 and
    10).
    """
    slowest = [one[2] for one in cuts]
    first = [one[1] - one[2] for one in cuts]
    units = shared_out(plan.n_units, slowest, 1, first)
    step_s = max(begin + n * each for begin, n, each in zip(first, units, slowest))
    return _Shape(tuple(one[0] for one in cuts), tuple(units), step_s)


def _with_workers(
    plan: Plan, shape: _Shape, tp_groups: Sequence[tuple[str, ...]], rest: Sequence[str], profile: Profile
) -> Plan | None:
    """Returns the plan of a shape, with fewer layers and units for slow workers; None if it is no valid plan."""
    roles = [layers for stages in shape.stages for layers in stages]
    taken = matched(tp_groups, roles, plan, profile)
    names = iter(tp_groups[place] for place in taken)
    workers = [[next(names) for _ in stages] for stages in shape.stages]
    cut, units = list(shape.stages), list(shape.units)
    if profile.workers:
        size = plan.micro_batch_size
        each, first = [], []
        for number, pipeline in enumerate(workers):
            speeds = [profile.slowest(some) for some in pipeline]

            def cost(stage: int, start: int, stop: int, speeds: Sequence[float] = speeds) -> float:
                return profile.turn_s(range(start, stop), size, len(tp_groups[0])) / speeds[stage]

            if len(set(speeds)) > 1:
                found = minimax(plan.n_layers, len(pipeline), cost)
                assert found is not None
                cut[number] = found.stages
            costs = [cost(stage, layers.start, layers.stop) for stage, layers in enumerate(cut[number])]
            each.append(max(costs))
            first.append(sum(costs) - max(costs))
        units = shared_out(plan.n_units, each, 1, first)
    used = set(taken)
    spare = [workers for place, workers in enumerate(tp_groups) if place not in used]
    ends = pairwise(accumulate(units, initial=0))
    made = [
        Pipeline(range(*end), tuple(zip(stages, pipeline, strict=True)))
        for end, stages, pipeline in zip(ends, cut, workers)
    ]
    idle = [*(worker for some in spare for worker in some), *rest]
    try:
        sizes = plan.n_layers, plan.global_batch_size, plan.micro_batch_size
        return replace(pipelines(*sizes, made, zero=plan.zero, idle=idle), costs=profile.costs)
    except PlanError:
        return None
