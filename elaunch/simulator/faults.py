"""Failures that are made up: nodes that fail at a rate, and come back; nodes that are slow for a while. Seeded."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from elaunch.simulator.traces import NodeChange, merged


def present(nodes: Sequence[str], at_s: float = 0.0) -> list[NodeChange]:
    """Returns the change with which nodes are there."""
    return [NodeChange(at_s, tuple(nodes))]


def rate_of(part: float, within_s: float = 3600.0) -> float:
    """Returns failures per second of something that fails within some seconds with this probability, below 1."""
    return -math.log1p(-part) / within_s


def exponential(
    nodes: Sequence[str], mtbf_s: float, until_s: float, seed: int, repair_s: float | None = None
) -> list[NodeChange]:
    """Returns failures of nodes that have no memory.

    Args:
        nodes: that are there at the beginning.
        mtbf_s: mean seconds from a node's being there to its failure.
        until_s: nothing happens from then on.
        seed: the same gives the same failures; those of one node do not depend on what other nodes there are.
        repair_s: after which a node is back; None: it stays away.
    """
    found = []
    for node in nodes:
        chance = random.Random(f"{seed}:{node}")
        at_s = chance.expovariate(1 / mtbf_s)
        while at_s < until_s:
            found.append(NodeChange(at_s, left=(node,)))
            if repair_s is None or at_s + repair_s >= until_s:
                break
            found.append(NodeChange(at_s + repair_s, joined=(node,)))
            at_s += repair_s + chance.expovariate(1 / mtbf_s)
    return merged(found)


def stragglers(
    nodes: Sequence[str],
    per_hour: float,
    speed: tuple[float, float],
    lasting_s: float,
    until_s: float,
    seed: int,
) -> list[NodeChange]:
    """Returns spells in which nodes are slow.

    Args:
        nodes: that are there.
        per_hour: spells of each node in an hour, in the mean.
        speed: least and greatest of a slow node; 1 is as usual.
        lasting_s: a spell, in the mean.
        until_s: nothing happens from then on.
        seed: as of `exponential`.
    """
    found = []
    for node in nodes:
        chance = random.Random(f"{seed}:slow:{node}")
        at_s = chance.expovariate(per_hour / 3600) if per_hour > 0 else until_s
        while at_s < until_s:
            found.append(NodeChange(at_s, speeds={node: chance.uniform(*speed)}))
            at_s += chance.expovariate(1 / lasting_s)
            if at_s < until_s:
                found.append(NodeChange(at_s, speeds={node: 1.0}))
            at_s += chance.expovariate(per_hour / 3600)
    return merged(found)
