"""Reroute: the micro-batches of lost workers go whole to their peers (ReCycle; Chameleon 4.A). No parameters move.

In a data-parallel job all members hold all layers. So each of them is a same-layer peer of the lost one, and the plan
depends on the list of members alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from elaunch.rendezvous.membership import Generation
from elaunch.workers.plan.shares import DataParallelPlan
from elaunch.workers.plan.tiling import MicroBatch, Plan, Tile, n_rows
from elaunch.workers.policy.profile import Profile
from elaunch.workers.policy.structure import NotPossible


def rerouted(plan: Plan, members: Sequence[str], profile: Profile | None = None) -> Plan:
    """The plan in which those who hold the layers of a lost tile do its micro-batches, each of them whole.

    Where pipelines cut the layers differently, the layers of a lost tile are cut as those of the peers are. Of several
    peers the one takes a micro-batch that has the least to do.

    Args:
        plan: valid.
        members: who is left, and who has come and stays idle.
        profile: of the model, for the speeds of workers; None: they are alike.

    Raises:
        NotPossible: nobody is lost, or nobody else has some of the layers.
    """
    here = set(members)
    whole = [tile for tile in plan.tiles if here.issuperset(tile.workers)]
    lost = [tile for tile in plan.tiles if not here.issuperset(tile.workers)]
    if not lost:
        raise NotPossible("all micro-batches have their workers")
    work: dict[tuple[str, ...], float] = {}
    given: dict[tuple[tuple[str, ...], range], list[MicroBatch]] = {}

    def give(workers: tuple[str, ...], layers: range, micro_batch: MicroBatch) -> None:
        speed = 1.0 if profile is None else min(map(profile.speed, workers))
        work[workers] = work.get(workers, 0.0) + n_rows(micro_batch) * len(layers) / speed
        given.setdefault((workers, layers), []).append(micro_batch)

    for tile in whole:
        for micro_batch in tile.micro_batches:
            give(tile.workers, tile.layers, micro_batch)
    cuts = sorted({end for tile in whole for end in (tile.layers.start, tile.layers.stop)})
    for tile in lost:
        ends = [tile.layers.start, *(cut for cut in cuts if tile.layers.start < cut < tile.layers.stop)]
        for band in [range(*pair) for pair in pairwise([*ends, tile.layers.stop])]:
            peers = list(
                dict.fromkeys(
                    other.workers
                    for other in whole
                    if other.layers.start <= band.start and band.stop <= other.layers.stop
                )
            )
            if not peers:
                gone = ", ".join(worker for worker in tile.workers if worker not in here)
                raise NotPossible(f"nobody else has the layers {band.start}:{band.stop} of {gone}")
            for micro_batch in tile.micro_batches:
                give(min(peers, key=lambda workers: (work[workers], workers)), band, micro_batch)
    tiles = tuple(Tile(layers, _ordered(some), workers) for (workers, layers), some in given.items())
    busy = {worker for tile in tiles for worker in tile.workers}
    found = replace(plan, tiles=tiles, idle=tuple(member for member in members if member not in busy))
    found.validate(members)
    return found


def _ordered(micro_batches: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
    return tuple(sorted(micro_batches, key=lambda runs: runs[0].start))


@dataclass(frozen=True, slots=True)
class Decision:
    """A plan and why it was chosen.

    Attributes:
        step_s: estimated seconds of a step under it; None before a step was measured.
    """

    policy: str
    reason: str
    plan: DataParallelPlan
    step_s: float | None

    def event(self) -> dict[str, Any]:
        """The fields of the `decision` event."""
        candidate = {
            "policy": self.policy,
            "step_s": self.step_s,
            "transition_s": None,
            "peak_bytes": None,
            "score": None,
            "rejected": None,
        }
        return {"policy": self.policy, "reason": self.reason, "candidates": [candidate], "plan": str(self.plan)}


def reroute(
    before: DataParallelPlan | None,
    global_batch_size: int,
    micro_batch_size: int,
    generation: Generation,
    step_s: float | None,
) -> Decision:
    """Share the micro-batches of a step evenly over the members.

    Args:
        before: the plan that was left; None at the start.
        global_batch_size: samples of a step.
        micro_batch_size: samples of a micro-batch, which is never cut.
        generation: the members.
        step_s: seconds of the last step under `before`.
    """
    plan = DataParallelPlan.even(global_batch_size, micro_batch_size, generation.ids)
    plan.validate()
    estimate = None
    if before is not None and step_s is not None:
        estimate = round(step_s * _most_units(plan) / _most_units(before), 6)
    lost = [] if before is None else [worker for worker in before.workers if worker not in plan.workers]
    new = [worker for worker in plan.workers if before is None or worker not in before.workers]
    changes = [f"{', '.join(lost)} left" if lost else "", f"{', '.join(new)} joined" if new and before else ""]
    what = "; ".join(filter(None, changes)) or "the same members go on" if before else "the first members"
    reason = (
        f"{what}: every member holds all layers, so the {plan.n_units} micro-batches are shared out over "
        f"{len(plan.workers)} members, at most {_most_units(plan)} each"
    )
    return Decision("reroute", reason, plan, estimate)


def _most_units(plan: DataParallelPlan) -> int:
    return max(1, max(len(units) for _, units in plan.units))
