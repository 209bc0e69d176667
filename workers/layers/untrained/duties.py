"""Who keeps copies of whose frozen parameters and buffers; a function of plan and layers alone, so everybody knows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from elaunch.plan.tiling import Plan
from elaunch.plan.views import holders
from elaunch.rendezvous.membership import node_of
from elaunch.workers.layers.snapshots import ring_order
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.layout import LayerSpec
from elaunch.workers.state.space import untrained_boxes

CopiedBox = tuple[str, Box]
"""An item and a box of it."""

TPGroups = Sequence[Sequence[str]]


def duties(
    holders_by_layer: Sequence[TPGroups], specs: Sequence[LayerSpec], workers: Sequence[str], copies: int
) -> dict[tuple[str, str], list[CopiedBox]]:
    """Returns what each worker copies from which other: by (source, holder), the boxes.

    Each value is to be at `copies` workers beside the first, and on as many other nodes as there are. Who has the layer
    counts, so what all replicas hold is seldom copied.

    Args:
        holders_by_layer: the tensor-parallel groups that have each layer.
        specs: of the layers.
        workers: of the plan.
        copies: beside the first.
    """
    n_nodes = len({node_of(worker) for worker in workers})

    @cache
    def more(having: tuple[str, ...]) -> tuple[str, ...]:
        return _more(having, ring_order(workers, having[0]), min(copies + 1, len(workers)), min(copies + 1, n_nodes))

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


def copy_peers(plan: Plan, specs: Sequence[LayerSpec], worker: str, copies: int) -> frozenset[str]:
    """Returns the workers to which `worker` needs a link under a plan for these copies."""
    pairs = duties(holders(plan), specs, plan.workers, copies)
    return frozenset(end for pair in pairs if worker in pair for end in pair if end != worker)


def _more(having: Sequence[str], order: Sequence[str], n_workers: int, n_nodes: int) -> tuple[str, ...]:
    """Those that are to have it too, until it is at so many workers and on so many nodes; nearest in `order` first."""
    there = list(having)
    nodes = {node_of(worker) for worker in there}
    for worker in order:
        if len(nodes) < n_nodes and node_of(worker) not in nodes:
            there.append(worker)
            nodes.add(node_of(worker))
    for worker in order:
        if len(there) < n_workers and worker not in there:
            there.append(worker)
    return tuple(there[len(having) :])
