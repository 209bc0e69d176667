"""Expand: workers that join become replicas, stages or tensor-parallel partners in the present plan (Suika alg. 1).

The skeleton of the plan stays: its stages, their replicas, who does what. Newcomers are added along one dimension, in
several portions if that is better, and then layers and rows are balanced anew. Plans of each size are made from several
smaller ones, since the best plan of a size does not always grow out of the best of the size before (Suika fig. 9).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

from elaunch.plan.build import Stage
from elaunch.plan.tiling import Plan
from elaunch.policy.candidates.balance import shared_out
from elaunch.policy.candidates.resize import MOST_PLAYED, balanced, pace, with_rows
from elaunch.policy.candidates.structure import NotPossible, stages_of, tp_groups_of, width_of
from elaunch.policy.estimate import estimate_step
from elaunch.policy.memory import stage_bytes
from elaunch.policy.profile import Profile
from elaunch.rendezvous.membership import node_of

WINDOW = 8
"""W: of how many smaller plans a plan is made."""

GROUPS = 16
"""The newcomers are added in so many groups of a node, or more (w = N / 16 and at most 8: Suika 3.2)."""

MOST_GROUP = 8

FEW_ACTIONS = 2000
"""Of a pipeline in a step, up to which one skeleton more is played through."""

WEIGHTS = ((0.0, 0.0), (3.0, 1.0))
"""Of sending on the rows of a turn and of reducing gradients, in a step's seconds by closed form, which knows neither
what pipelines wait for nor what is hidden. Skeletons are looked for with each, and the best are played through.
"""

Skeleton = tuple[Stage, ...]


@dataclass(frozen=True)
class _Grown:
    """A skeleton with the seconds of a step by closed form."""

    stages: Skeleton
    step_s: float


def expanded(
    plan: Plan, members: Sequence[str], profile: Profile, *, window: int = WINDOW, widths: Sequence[int] = ()
) -> Plan:
    """Returns the fastest plan that uses the members that `plan` leaves idle, or some of them.

    Args:
        plan: valid; its workers, as far as they are members, are the base.
        members: who there is.
        profile: of the model.
        window: of how many smaller plans a plan is made.
        widths: of tensor-parallel groups, beside those of the plan, that the layers can be cut for.

    Raises:
        NotPossible: says why.
    """
    here = set(members)
    base = stages_of(plan, [worker for worker in plan.workers if worker not in here])
    if not all(any(stage.replicas) for stage in base):
        raise NotPossible("a stage has lost all its replicas")
    busy = {worker for stage in base for workers in stage.replicas for worker in workers}
    new, _ = tp_groups_of(plan, [worker for worker in members if worker not in busy])
    if not new:
        raise NotPossible(
            f"no {width_of(plan)} members are free on a node for another TP group"
            if len(here) > len(busy)
            else "nobody is free"
        )
    groups = _grouped(_by_affinity(new, sorted(busy), profile), len(busy))
    first = [_whole(stage) for stage in base]
    found: dict[Skeleton, Plan] = {}
    reason = "there are no more micro-batches or layers for newcomers"

    def cut(skeleton: Skeleton, most_played: int) -> Plan:
        dp_size = max(len(stage.replicas) for stage in skeleton)
        given = [with_rows(_padded(stage, dp_size), profile) for stage in skeleton]
        return balanced(plan, given, members, profile, most_played)

    ways = [_skeletons(plan, first, groups, profile, window, widths, weights) for weights in WEIGHTS]
    # The fastest one, and that of the most workers: by closed form, stages more than are needed are of no use.
    largest = sorted(ways[-1], key=_n_workers, reverse=True)[:1]
    for skeletons in [*ways, [some for some in largest if 2 * plan.n_units * len(some) <= FEW_ACTIONS]]:
        for skeleton in skeletons:
            if skeleton in found:
                break
            try:
                found[skeleton] = cut(skeleton, 1)
                break
            except NotPossible as error:
                reason = str(error)
    if not found:
        raise NotPossible(reason)
    if len(found) == 1:
        return cut(next(iter(found)), MOST_PLAYED)
    return min(found.values(), key=lambda made: estimate_step(made, profile).step_s)


def _skeletons(
    plan: Plan,
    first: Sequence[Stage],
    groups: Sequence[Sequence[tuple[str, ...]]],
    profile: Profile,
    window: int,
    widths: Sequence[int],
    weights: tuple[float, float],
) -> list[Skeleton]:
    """Returns the best skeleton with each number of groups of newcomers, the fastest first."""
    best = [_grown(plan, first, profile, weights)]
    for size in range(1, len(groups) + 1):
        found: list[_Grown] = []
        for start in range(max(0, size - window), size):
            before = best[start]
            if before is not None:
                joining = [workers for group in groups[start:size] for workers in group]
                found += _ways(plan, before.stages, joining, profile, widths, weights)
        best.append(min(found, key=lambda one: one.step_s, default=None))
    ranked = sorted((one for one in best[1:] if one is not None), key=lambda one: one.step_s)
    return [one.stages for one in ranked]


def _n_workers(skeleton: Skeleton) -> int:
    return sum(len(workers) for stage in skeleton for workers in stage.replicas)


def _whole(stage: Stage) -> Stage:
    """Returns the stage without empty DP ranks and without weights."""
    return Stage(stage.layers, tuple(filter(None, stage.replicas)))


def _padded(stage: Stage, dp_size: int) -> Stage:
    return replace(stage, replicas=(*stage.replicas, *[()] * (dp_size - len(stage.replicas))))


def _by_affinity(new: Sequence[tuple[str, ...]], busy: Sequence[str], profile: Profile) -> list[tuple[str, ...]]:
    """Sorts TP groups: the best link to a worker of the job first; among equal ones, those of a node together."""
    nodes = {node_of(worker) for worker in busy}
    nearest = {node: next(worker for worker in busy if node_of(worker) == node) for node in nodes}

    def affinity(workers: tuple[str, ...]) -> float:
        heads = nearest.values() if not profile.links else busy
        return max(profile.link(head, workers[0]).bandwidth_bytes_per_s for head in heads)

    return sorted(new, key=lambda workers: (-affinity(workers), node_of(workers[0]) not in nodes, workers))


def _grouped(new: Sequence[tuple[str, ...]], n_busy: int) -> list[list[tuple[str, ...]]]:
    """Groups neighbours of one node, as many together as the size of the job suggests."""
    size = max(1, min(math.ceil(n_busy / len(new[0]) / GROUPS), MOST_GROUP))
    found: list[list[tuple[str, ...]]] = []
    for workers in new:
        last = found[-1] if found else []
        if last and len(last) < size and node_of(last[-1][0]) == node_of(workers[0]):
            last.append(workers)
        else:
            found.append([workers])
    return found


def _ways(
    plan: Plan,
    before: Skeleton,
    joining: Sequence[tuple[str, ...]],
    profile: Profile,
    widths: Sequence[int],
    weights: tuple[float, float],
) -> Iterator[_Grown]:
    """Yields the base with newcomers as a stage, as replicas of a stage, or as partners of a stage's TP groups."""
    skeletons: list[Skeleton] = []
    if len(before) < plan.n_layers:
        # Where the stage comes makes no difference here: layers are cut anew in any case.
        end = before[-1].layers.stop
        skeletons.append((*before, Stage(range(end, end), tuple(joining))))
    for place, stage in enumerate(before):
        more = _as_wide(plan, joining, len(stage.replicas[0]))
        if more is not None:
            wider = Stage(stage.layers, (*stage.replicas, *more))
            skeletons.append((*before[:place], wider, *before[place + 1 :]))
        partners = _partners(stage, joining, widths) if widths else None
        if partners is not None:
            skeletons.append((*before[:place], partners, *before[place + 1 :]))
    for skeleton in skeletons:
        grown = _grown(plan, skeleton, profile, weights)
        if grown is not None:
            yield grown


def _as_wide(plan: Plan, joining: Sequence[tuple[str, ...]], width: int) -> Sequence[tuple[str, ...]] | None:
    """Returns the newcomers in TP groups of this width, each on one node; None if some are left over."""
    if len(joining[0]) == width:
        return joining
    found, rest = tp_groups_of(plan, [worker for workers in joining for worker in workers], width)
    return None if rest else found


def _partners(stage: Stage, joining: Sequence[tuple[str, ...]], widths: Sequence[int]) -> Stage | None:
    """Returns the stage with wider TP groups, in which newcomers join TP groups on their node; None if they cannot."""
    left = [worker for workers in joining for worker in workers]
    width = len(stage.replicas[0]) + len(left) / len(stage.replicas)
    if width not in widths:
        return None
    more = int(width) - len(stage.replicas[0])
    replicas = []
    for workers in stage.replicas:
        near = [worker for worker in left if node_of(worker) == node_of(workers[0])][:more]
        if len(near) < more:
            return None
        left = [worker for worker in left if worker not in near]
        replicas.append((*workers, *near))
    return replace(stage, replicas=tuple(replicas))


def _grown(plan: Plan, skeleton: Sequence[Stage], profile: Profile, weights: tuple[float, float]) -> _Grown | None:
    """Returns a skeleton with its step's seconds by Suika's closed form (A.2), for equal layers; None if not possible.

    `balanced` looks at the layers as they are, for the few skeletons that are best.
    """
    dp_size = max(len(stage.replicas) for stage in skeleton)
    if dp_size > plan.n_units:
        return None
    rows, turns = plan.micro_batch_size * dp_size, math.ceil(plan.n_units / dp_size)
    costs = [_layer_s(stage, profile, rows) for stage in skeleton]
    layers = shared_out(plan.n_layers, costs, 1)
    whole = [n * cost for n, cost in zip(layers, costs)]
    if profile.memory_bytes is not None and not _fits(skeleton, layers, profile, rows, turns):
        return None
    sending, reducing = weights
    if sending and len(skeleton) > 1:
        row_s = profile.output_bytes_per_row / profile.bandwidth_bytes_per_s
        whole = [one + sending * rows / len(stage.replicas) * row_s for one, stage in zip(whole, skeleton)]
    after_s = reducing * max(map(partial(_reduction_s, profile), skeleton, layers)) if reducing else 0.0
    return _Grown(tuple(skeleton), sum(whole) + (turns - 1) * max(whole) + after_s)


def _reduction_s(profile: Profile, stage: Stage, n_layers: int) -> float:
    """Returns the seconds in which the replicas of a stage of average layers add up gradients and share new values,
    none of which is hidden.
    """
    n = len(stage.replicas)
    if n == 1:
        return 0.0
    slowest = profile.link("", "")
    if profile.links:
        heads = list({node_of(workers[0]): workers[0] for workers in stage.replicas}.values())
        ring = pairwise([*heads, heads[0]]) if len(heads) > 1 else [(stage.replicas[0][0], stage.replicas[1][0])]
        slowest = min((profile.link(*ends) for ends in ring), key=lambda link: link.bandwidth_bytes_per_s)
    n_bytes = n_layers * profile.parameter_bytes / len(profile.layers)
    return 2 * slowest.seconds(n_bytes * (n - 1) / n) / len(stage.replicas[0])


def _layer_s(stage: Stage, profile: Profile, rows: int) -> float:
    """Returns the seconds of an average layer for the rows of a turn."""
    width, n = len(stage.replicas[0]), len(profile.layers)
    factor = pace(with_rows(stage, profile), profile, rows) if profile.workers else rows / len(stage.replicas)
    fixed, whole = profile.whole_turn_s(width)
    return max((fixed + factor * (whole - fixed)) / n, 1e-12)


def _fits(skeleton: Sequence[Stage], layers: Sequence[int], profile: Profile, rows: int, turns: int) -> bool:
    """Returns whether average layers fit in memory."""
    every = range(len(profile.layers))
    for place, (stage, n) in enumerate(zip(skeleton, layers, strict=True)):
        replicas = len(stage.replicas)
        kept_rows = min(len(skeleton) - place, turns) * math.ceil(rows / replicas)
        needed = stage_bytes(profile, every, replicas, kept_rows) * n / len(every) / len(stage.replicas[0])
        if needed > min(profile.cap_bytes(worker) for workers in stage.replicas for worker in workers):
            return False
    return True
