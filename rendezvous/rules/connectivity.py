"""Whom to leave out where nodes cannot reach each other. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from elaunch.rendezvous.membership import NodeDoc

Missing = Mapping[str, Collection[str]]
"""For each node that has any: the nodes between which and it nothing passes."""


def apart(nodes: Sequence[str], missing: Missing) -> set[str]:
    """Returns the nodes to leave out so that all others reach each other: the smaller part of a network that is in two.

    Args:
        nodes: in the order of the job; of equals the last is left out.
        missing: names both nodes of each pair; nodes that are not among these do not count.
    """
    others = {node: missed for node in nodes if (missed := set(missing.get(node, ())).intersection(nodes))}
    left = {node: set(missed) for node, missed in others.items()}
    order = [node for node in nodes if node in left]
    out = set[str]()
    while any(left.values()):
        worst = max(reversed(order), key=lambda node: len(left.get(node, ())))
        out.add(worst)
        for other in left.pop(worst):
            left[other].discard(worst)
    # What was left out early may do no harm without those that were left out later.
    for node in order:
        if node in out and others[node] <= out:
            out.discard(node)
    return out


def cut_off(nodes: Sequence[NodeDoc]) -> dict[str, set[str]]:
    """Returns who cannot reach whom among the nodes that are here; it is enough that one of two says so."""
    hosts = {doc.node: doc.host for doc in nodes}
    missing = defaultdict[str, set[str]](set)
    for doc in nodes:
        for cut in doc.peers.cut:
            if cut.node != doc.node and hosts.get(cut.node) == cut.host:
                missing[doc.node].add(cut.node)
                missing[cut.node].add(doc.node)
    return missing


def left_out(nodes: Sequence[str], holders: Collection[str], missing: Missing) -> set[str]:
    """Returns the nodes to leave out as `apart` does, but none that holds state for the sake of one that does not.

    Args:
        nodes: in the order of the job.
        holders: those whose workers hold the job's state.
        missing: who cannot reach whom.
    """
    if not missing:
        return set()
    first = [node for node in nodes if node in holders]
    out = apart(first, missing)
    kept = set(first) - out
    out |= {node for node in nodes if node not in holders and not kept.isdisjoint(missing.get(node, ()))}
    return out | apart([node for node in nodes if node not in holders and node not in out], missing)
