"""Ways to go on after a loss that others have, as plans of this runtime: pure functions, to compare policies with.

drop_replica       torchft: a pipeline that has lost somebody is dropped as a whole
template_switch    Oobleck: pipelines of depths that were planned before, such that every worker has a place
decoupled          ReCycle: a plan whose weight gradients fill its bubbles
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from elaunch.plan import Pipeline, Plan, Stage, pipelines, stages
from elaunch.policy.candidates.balance import shared_out
from elaunch.policy.candidates.partition import minimax
from elaunch.policy.candidates.reroute import deferrals
from elaunch.policy.candidates.structure import NotPossible, stages_of, tp_groups_of
from elaunch.policy.estimate import StepEstimate, ordered
from elaunch.policy.profile import Profile


def drop_replica(plan: Plan, members: Sequence[str]) -> Plan:
    """The plan in which pipelines that are whole do all micro-batches, in even parts; who else is left is idle.

    Args:
        plan: valid; its pipelines cut the layers alike.
        members: who is left of its workers.

    Raises:
        NotPossible: no pipeline is whole.
    """
    here = set(members)
    found = stages_of(plan, [worker for worker in plan.workers if worker not in here])
    dp_ranks = range(len(found[0].replicas))
    whole = [dp_rank for dp_rank in dp_ranks if all(stage.replicas[dp_rank] for stage in found)]
    if not whole:
        raise NotPossible("every pipeline has lost somebody")
    kept = [Stage(stage.layers, tuple(stage.replicas[dp_rank] for dp_rank in whole)) for stage in found]
    busy = {worker for stage in kept for workers in stage.replicas for worker in workers}
    idle = [member for member in members if member not in busy]
    sizes = plan.n_layers, plan.global_batch_size, plan.micro_batch_size
    return stages(*sizes, kept, zero=plan.zero, idle=idle)


def decoupled(plan: Plan, profile: Profile) -> tuple[Plan, StepEstimate]:
    """The plan with as many weight gradients deferred as is fastest and fits in memory, and the estimate of its step.

    As `reroute` does of its own accord; here for plans that are compared without a decision.
    """
    return ordered(plan, profile, deferrals(plan, profile))


@dataclass(frozen=True)
class Template:
    """A pipeline of a certain depth.

    Attributes:
        stages: the layers of each, such that the slowest stage is as fast as can be.
        first_s: what the first micro-batch takes more than each further one.
        each_s: a micro-batch in the slowest stage.
    """

    stages: tuple[range, ...]
    first_s: float
    each_s: float


def depths_of(depth: int) -> range:
    """The depths for which there are templates in a job whose pipelines have `depth` stages.

    From the least that is more than half of it; as many as it takes that any larger number of workers is a sum of them
    (after Oobleck: n0 consecutive sizes from n0).
    """
    least = depth // 2 + 1
    return range(least, 2 * least)


def template(plan: Plan, depth: int, profile: Profile) -> Template:
    """The pipeline of so many stages, for the micro-batches of a plan."""

    def turn_s(_: int, start: int, stop: int) -> float:
        return profile.turn_s(range(start, stop), plan.micro_batch_size)

    found = minimax(plan.n_layers, depth, turn_s)
    assert found is not None, f"{plan.n_layers} layers in {depth} stages"
    return Template(found.stages, turn_s(0, 0, plan.n_layers) - found.slowest, found.slowest)


def template_switch(plan: Plan, members: Sequence[str], profile: Profile, depths: Sequence[int]) -> Plan:
    """The fastest pipelines from templates of these depths in which every tensor-parallel group is a stage.

    Micro-batches stay whole and are distributed by the speed of the templates.

    Args:
        plan: valid.
        members: who is left of its workers.
        profile: of the model.
        depths: of the templates.

    Raises:
        NotPossible: templates of these depths do not cover so many workers.
    """
    tp_groups, idle = tp_groups_of(plan, members)
    known = {depth: template(plan, depth, profile) for depth in depths if depth <= min(plan.n_layers, len(tp_groups))}
    best: tuple[float, list[Template], list[int]] | None = None
    for some in sums(len(tp_groups), sorted(known)):
        if not 1 <= len(some) <= plan.n_units:
            continue
        chosen = [known[depth] for depth in some]
        units = shared_out(plan.n_units, [one.each_s for one in chosen], 1, [one.first_s for one in chosen])
        step_s = max(one.first_s + n * one.each_s for one, n in zip(chosen, units, strict=True))
        if best is None or step_s < best[0]:
            best = step_s, chosen, units
    if best is None:
        raise NotPossible(f"templates of {', '.join(map(str, known))} stages do not cover {len(tp_groups)} workers")
    _, chosen, units = best
    free = iter(tp_groups)
    made = [
        Pipeline(range(*ends), tuple((layers, next(free)) for layers in one.stages))
        for one, ends in zip(chosen, pairwise(accumulate(units, initial=0)), strict=True)
    ]
    sizes = plan.n_layers, plan.global_batch_size, plan.micro_batch_size
    return pipelines(*sizes, made, zero=plan.zero, idle=idle)


def sums(total: int, numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to write `total` as a sum of `numbers`, each as often as one likes, in ascending order."""
    if total == 0:
        yield ()
    for place, number in enumerate(numbers):
        if number <= total:
            for rest in sums(total - number, numbers[place:]):
                yield (number, *rest)
