"""The plan after a change of membership, by a simple rule: same-layer peers take over, returners take the lost places.

`home` is the plan with every place filled, by the names of those who had the places last. Who is new takes the place of
somebody lost. What is still lost goes, micro-batch by micro-batch, to the tuples that have the same layers and all
their members (ReCycle; Chameleon IV-A); where there is none, all who are left become one pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from elaunch.workers.plan.build import Pipeline, pipelines
from elaunch.workers.plan.shares import share
from elaunch.workers.plan.tiling import MicroBatch, Plan, Tile


class Takeover(NamedTuple):
    """What follows for the members.

    Attributes:
        plan: for exactly them.
        home: with the places that newcomers took.
        policy: "stay", "reroute" or "reparallelize".
        reason: for people.
    """

    plan: Plan
    home: Plan
    policy: str
    reason: str


def take_over(home: Plan, members: Sequence[str]) -> Takeover:
    """The plan for `members`.

    Raises:
        PlanError: there is none: nobody is left.
    """
    places = [worker for worker in home.workers if worker not in home.idle]
    lost = [worker for worker in places if worker not in members]
    free = [worker for worker in members if worker not in places]
    taken = dict(zip(lost, free))
    home = replace(home, idle=()).renamed({worker: taken.get(worker, worker) for worker in places})
    lost, spare = lost[len(taken) :], free[len(taken) :]
    new = f"; {', '.join(taken.values())} took the place of {', '.join(taken)}" if taken else ""
    if not lost:
        return Takeover(replace(home, idle=tuple(spare)), home, "stay", f"every place is filled{new}")
    rerouted = _rerouted(home, set(lost), spare)
    gone = ", ".join(lost)
    if rerouted is not None:
        return Takeover(rerouted, home, "reroute", f"same-layer peers do the micro-batches of {gone}{new}")
    plan = _one_pipeline(home, members)
    reason = f"nobody else has the layers of {gone}: one pipeline over {len(members) - len(plan.idle)} workers{new}"
    return Takeover(plan, home, "reparallelize", reason)


def _rerouted(home: Plan, lost: set[str], spare: Sequence[str]) -> Plan | None:
    whole = [tile for tile in home.tiles if lost.isdisjoint(tile.workers)]
    loads = {place: list(tile.micro_batches) for place, tile in enumerate(whole)}
    for tile in home.tiles:
        if lost.isdisjoint(tile.workers):
            continue
        peers = [place for place, other in enumerate(whole) if other.layers == tile.layers]
        if not peers:
            return None
        for micro_batch in tile.micro_batches:
            loads[min(peers, key=lambda place: len(loads[place]))].append(micro_batch)
    tiles = tuple(Tile(tile.layers, _ordered(loads[place]), tile.workers) for place, tile in enumerate(whole))
    busy = {worker for tile in tiles for worker in tile.workers}
    idle = [worker for worker in home.workers if worker not in busy and worker not in lost]
    return _valid(replace(home, tiles=tiles, idle=(*idle, *spare)))


def _one_pipeline(home: Plan, members: Sequence[str]) -> Plan:
    depth = min(len(members), home.n_layers)
    stages = tuple((share(home.n_layers, depth, stage), (members[stage],)) for stage in range(depth))
    units = range(home.global_batch_size // home.micro_batch_size)
    return pipelines(
        home.n_layers,
        home.global_batch_size,
        home.micro_batch_size,
        [Pipeline(units, stages)],
        zero=home.zero,
        idle=members[depth:],
    )


def _ordered(micro_batches: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
    return tuple(sorted(micro_batches, key=lambda runs: runs[0].start))


def _valid(plan: Plan) -> Plan:
    plan.validate()
    return plan
