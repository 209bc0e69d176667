"""Reroute: the micro-batches of lost workers go whole to their peers (ReCycle; Chameleon 4.A). No parameters move.

Of the orders that are tried for it, some defer weight gradients, so that the micro-batches that have come go into the
bubbles (ReCycle's decoupled backward).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter

from elaunch.plan.tiling import MicroBatch, Plan, Tile, n_rows
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.profile import Profile


def rerouted(plan: Plan, members: Sequence[str], profile: Profile | None = None) -> Plan:
    """Returns the plan in which holders of a lost tile's layers do its micro-batches, each of them whole.

    Where pipelines cut the layers differently, the layers of a lost tile are cut as those of the peers are. Of several
    peers the one takes a micro-batch that has the least to do. It does it when its pipeline would have come to it: at
    the end, those stages of the pipeline that are left could not feed several peers at once.

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
    given: dict[tuple[tuple[str, ...], range], list[tuple[int, int, MicroBatch]]] = {}

    def give(workers: tuple[str, ...], layers: range, place: int, micro_batch: MicroBatch) -> None:
        speed = 1.0 if profile is None else min(map(profile.speed, workers))
        work[workers] = work.get(workers, 0.0) + n_rows(micro_batch) * len(layers) / speed
        given.setdefault((workers, layers), []).append((place, micro_batch[0].start, micro_batch))

    for tile in whole:
        for place, micro_batch in enumerate(tile.micro_batches):
            give(tile.workers, tile.layers, place, micro_batch)
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
            for place, micro_batch in enumerate(tile.micro_batches):
                give(min(peers, key=lambda workers: (work[workers], workers)), band, place, micro_batch)
    tiles = tuple(
        Tile(layers, tuple(micro_batch for *_, micro_batch in sorted(some, key=itemgetter(0, 1))), workers)
        for (workers, layers), some in given.items()
    )
    busy = {worker for tile in tiles for worker in tile.workers}
    found = replace(plan, tiles=tiles, idle=tuple(member for member in members if member not in busy))
    found.validate(members)
    return found


def deferrals(plan: Plan, profile: Profile) -> tuple[int, ...]:
    """Returns how many weight gradients a rerouted plan may defer, for `elaunch.policy.estimate.ordered`.

    As many as there are stages, which fill the bubble of 1F1B and at most double the activations of the first stage;
    where it is known how much memory there is, also one, and four times as many.
    """
    stages = len({tile.layers.start for tile in plan.tiles})
    if stages == 1:
        return ()
    bounded = all(math.isfinite(profile.cap_bytes(worker)) for tile in plan.tiles for worker in tile.workers)
    return (1, stages, 4 * stages) if bounded else (stages,)
