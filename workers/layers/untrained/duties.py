"""Who keeps copies of whose frozen parameters and buffers; a function of plan and layers alone, so everybody knows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from elaunch.plan.tiling import Plan
from elaunch.plan.views import holders
from elaunch.rendezvous.membership import node_of
from elaunch.workers.member.keepers import KeeperRing, Place
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.layout import LayerSpec
from elaunch.workers.state.space import untrained_boxes

CopiedBox = tuple[str, Box]
"""An item and a box of it."""

TPGroups = Sequence[Sequence[str]]


def duties(
    holders_by_layer: Sequence[TPGroups],
    specs: Sequence[LayerSpec],
    workers: Sequence[str],
    copies: int,
    place: Place = node_of,
) -> dict[tuple[str, str], list[CopiedBox]]:
    """Returns what each worker copies from which other: by (source, holder), the boxes.

    Each value is to be at `copies` workers beside the first, in as many other places and on as many other nodes as
    there are. Who has the layer counts, so what all replicas hold is seldom copied.

    Args:
        holders_by_layer: the tensor-parallel groups that have each layer.
        specs: of the layers.
        workers: of the plan.
        copies: beside the first.
        place: of each worker.
    """
    ring, wanted = KeeperRing(workers, place), [min(copies + 1, n) for n in _counts(workers, place)]

    @cache
    def more(having: tuple[str, ...]) -> tuple[str, ...]:
        return _more(having, ring.keepers(having[0], len(workers) - 1), wanted, place)

    found: dict[tuple[str, str], list[CopiedBox]] = {}
    for spec, tp_groups in zip(specs, holders_by_layer, strict=True):
        if not copies or not spec.untrained:
            continue
        having: dict[tuple[str, Box], list[str]] = {}
        for group in tp_groups:
            for worker in group:
                for name, box in untrained_boxes(spec, group, worker).items():
                    having.setdefault((name, box), []).append(worker)
        first = (untrained_boxes(spec, tp_groups[0], worker).items() for worker in tp_groups[0])
        for name, box in dict.fromkeys(one for boxes in first for one in boxes):
            there = tuple(dict.fromkeys(having[name, box]))
            for holder in more(there):
                found.setdefault((there[0], holder), []).append((f"layers.{spec.index}.{name}", box))
    return found


def copy_peers(
    plan: Plan, specs: Sequence[LayerSpec], worker: str, copies: int, place: Place = node_of
) -> frozenset[str]:
    """Returns the workers to which `worker` needs a link under a plan for these copies."""
    pairs = duties(holders(plan), specs, plan.workers, copies, place)
    return frozenset(end for pair in pairs if worker in pair for end in pair if end != worker)


def _counts(workers: Sequence[str], place: Place) -> list[int]:
    """Returns how many places, nodes and workers there are."""
    return [len(set(map(key, workers))) for key in _levels(place)]


def _levels(place: Place) -> tuple[Place, Place, Place]:
    """Returns what copies are to be apart in, the most important first."""
    return place, node_of, str


def _more(having: Sequence[str], order: Sequence[str], wanted: Sequence[int], place: Place) -> tuple[str, ...]:
    """Those that are to have it too, until it is in so many places, on so many nodes, and at so many workers; the first
    in `order` first.
    """
    there = list(having)
    for key, count in zip(_levels(place), wanted, strict=True):
        seen = set(map(key, there))
        for worker in order:
            if len(seen) < count and key(worker) not in seen:
                there.append(worker)
                seen.add(key(worker))
    return tuple(there[len(having) :])
