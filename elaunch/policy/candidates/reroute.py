"""Reroute: the micro-batches of lost workers go whole to their peers (ReCycle; Chameleon 4.A). No parameters move.

Of the orders that are tried for it, some defer weight gradients, so that the micro-batches that have come go into the
bubbles (ReCycle's decoupled backward).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

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
    own: dict[tuple[tuple[str, ...], range], list[Tile]] = {}
    given: dict[tuple[tuple[str, ...], range], list[tuple[int, MicroBatch]]] = {}

    def speed(workers: tuple[str, ...]) -> float:
        return 1.0 if profile is None else profile.slowest(workers)

    n_rows_of = {id(tile.micro_batches): sum(map(n_rows, tile.micro_batches)) for tile in whole}
    for tile in whole:
        rows = n_rows_of[id(tile.micro_batches)]
        work[tile.workers] = work.get(tile.workers, 0.0) + rows * len(tile.layers) / speed(tile.workers)
        own.setdefault((tile.workers, tile.layers), []).append(tile)
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
                taker = min(peers, key=lambda workers: (work[workers], workers))
                work[taker] += n_rows(micro_batch) * len(band) / speed(taker)
                given.setdefault((taker, band), []).append((place, micro_batch))
    tiles = tuple(_merged(own.get(key, []), given.get(key, []), *key) for key in dict.fromkeys([*own, *given]))
    busy = {worker for tile in tiles for worker in tile.workers}
    found = replace(plan, tiles=tiles, idle=tuple(member for member in members if member not in busy))
    found.validate(members)
    return found


def _merged(
    own: Sequence[Tile], given: Sequence[tuple[int, MicroBatch]], workers: tuple[str, ...], layers: range
) -> Tile:
    """Returns one tile for those of some workers and layers, with what they are given, each at its place."""
    if len(own) == 1 and not given:
        return own[0]
    found = [*(one for tile in own for one in enumerate(tile.micro_batches)), *given]
    found.sort(key=lambda one: (one[0], one[1][0].start))
    return Tile(layers, tuple(micro_batch for _, micro_batch in found), workers)


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
