"""The plan with which a simulated job begins: the fastest that fits into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from elaunch.plan import Pipeline, Plan, pipelines, share
from elaunch.policy.candidates.partition import minimax
from elaunch.policy.candidates.reparallelize import Degrees, reparallelized
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.estimate import estimate_step, ordered
from elaunch.policy.memory import stage_bytes
from elaunch.rendezvous.membership import by_node
from elaunch.simulator.model import JobModel

MOST_PLAYED = 3
"""The symmetric plans that are best by closed form are played through."""


def first_plan(job: JobModel, members: Sequence[str]) -> Plan:
    """Returns the fastest plan for the members, symmetric or not.

    Raises:
        NotPossible: no plan fits.
    """
    plan = fastest_symmetric(job, members)
    if job.dp is not None or job.pp is not None or not plan.idle:
        return plan
    try:
        other, step = ordered(reparallelized(plan, members, job.profile, Degrees()), job.profile)
    except NotPossible:
        return plan
    return other if step.step_s < estimate_step(plan, job.profile).step_s else plan


def fastest_symmetric(job: JobModel, members: Sequence[str]) -> Plan:
    """Returns the fastest plan of equal pipelines; members that do not fit into it are idle.

    Stages have layers such that the slowest is as fast as can be. Neighbouring stages are on one node.

    Raises:
        NotPossible: no plan fits into memory, or into the members.
    """
    groups, rest = _tp_groups(job, members)
    units = -(-job.batch // job.micro_batch)
    profile, n_layers = job.profile, len(job.profile.layers)
    if not groups:
        raise NotPossible(f"{len(members)} members make no tensor-parallel group of {profile.width}")

    def turn_s(_: int, start: int, stop: int) -> float:
        return profile.turn_s(range(start, stop), job.micro_batch)

    found: list[tuple[float, int, int, tuple[range, ...]]] = []
    for pp in [job.pp] if job.pp is not None else range(1, min(n_layers, len(groups)) + 1):
        dp = min(len(groups) // pp, units) if job.dp is None else job.dp
        if dp < 1 or dp * pp > len(groups) or pp > n_layers or dp > units:
            continue
        turns = -(-units // dp)

        def fits(stage: int, start: int, stop: int, pp: int = pp, dp: int = dp, turns: int = turns) -> bool:
            if profile.memory_bytes is None:
                return True
            kept = min(pp - stage, turns) * job.micro_batch
            return stage_bytes(profile, range(start, stop), dp, kept) <= profile.memory_bytes * profile.width

        cut = minimax(n_layers, pp, turn_s, fits)
        if cut is not None:
            found.append((turn_s(0, 0, n_layers) + (turns - 1) * cut.slowest, pp, dp, cut.stages))
    best: tuple[float, Plan] | None = None
    for _, _, dp, spans in sorted(found, key=lambda one: one[:3])[:MOST_PLAYED]:
        plan = _plan(job, groups, rest, dp, spans)
        step = estimate_step(plan, profile)
        if not step.over(profile) and (best is None or step.step_s < best[0]):
            best = step.step_s, plan
    if best is None:
        raise NotPossible(f"no pipelines of {len(groups)} tensor-parallel groups fit")
    return ordered(best[1], profile)[0]


def _plan(
    job: JobModel, groups: Sequence[tuple[str, ...]], rest: Sequence[str], dp: int, spans: Sequence[range]
) -> Plan:
    units, pp = -(-job.batch // job.micro_batch), len(spans)
    made = [
        Pipeline(share(units, dp, replica), tuple(zip(spans, groups[replica * pp : (replica + 1) * pp], strict=True)))
        for replica in range(dp)
    ]
    idle = [*(worker for group in groups[dp * pp :] for worker in group), *rest]
    plan = pipelines(len(job.profile.layers), job.batch, job.micro_batch, made, idle=idle)
    return replace(plan, costs=job.profile.costs)


def _tp_groups(job: JobModel, members: Sequence[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Returns the members in tensor-parallel groups, each on one node, and those that are left over."""
    width, groups, rest = job.profile.width, [], []
    for workers in by_node(members).values():
        end = len(workers) - len(workers) % width
        groups += [tuple(workers[start:stop]) for start, stop in pairwise(range(0, end + 1, width))]
        rest += workers[end:]
    return groups, rest
