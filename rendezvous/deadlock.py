"""Whether all members of a job wait for each other, and whom to take out, so that the others do the step again. Pure.

A worker that waits for peers is never at fault as long as one member does anything else. Each node reports its members
in its document (`NodeDoc.stalled`) while all of them wait, and have for longer than they may. When every node of the
generation does so nobody is left who could end it: the leader asks the node of the victim to take it out, by a
`Deadlock` document. Workers of one node that are all members need no leader; their agent asks `victim` itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from elaunch.rendezvous.decide import View
from elaunch.rendezvous.membership import Deadlock, Stage, Stalled

SHOWN = 32
"""Members that a document names; those of large jobs would not fit into one."""


def find(view: View) -> Deadlock | None:
    """What the leader is to tell the victim's node; None: somebody goes on, or it is a matter of one node.

    Args:
        view: what the leader knows.
    """
    generation = view.generation
    if view.result is not None or generation is None or generation.stage is not Stage.TRAIN or generation.hold:
        return None
    # A node that has not heard of this generation may tell of the one before.
    stalled = {one.worker: one for doc in view.nodes if doc.epoch == generation.epoch for one in doc.stalled}
    if not stalled or not stalled.keys() >= set(generation.ids) or len(generation.nodes) < 2:
        return None
    members = [stalled[worker] for worker in generation.ids]
    one = victim(members)
    shown = members if len(members) <= SHOWN else [one, *members[: SHOWN - 1]]
    return Deadlock(one.worker, len(members), tuple(dict.fromkeys(map(describe, shown))))


def victim(stalled: Sequence[Stalled]) -> Stalled:
    """Whom to take out of members that wait for each other, given in the order of their ranks.

    Who is in an earlier step; among equals, who is in an operation in which the fewest are; then one that nobody names;
    then the last one.
    """
    first = min(one.step for one in stalled)
    left = [one for one in stalled if one.step == first]
    operations = Counter((one.epoch, one.operation) for one in left)
    fewest = min(operations.values())
    left = [one for one in left if operations[one.epoch, one.operation] == fewest]
    named = {peer for one in stalled for peer in one.peers}
    return ([one for one in left if one.worker not in named] or left)[-1]


def describe(stalled: Stalled) -> str:
    """For the user: who waits for whom."""
    more = f" and {stalled.others} more" if stalled.others else ""
    peers = (", ".join(stalled.peers) or "its peers") + more
    return f"{stalled.worker} for {peers}, {stalled.doing}, operation {stalled.operation}"
