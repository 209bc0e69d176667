"""Whether all members of a job wait for each other, and whom to take out, so that the others do the step again. Pure.

A worker that waits for peers is never at fault as long as one member does anything else. Each node reports its members
in its document (`PeerFaults.stalled`) while all of them wait, and have for longer than they may. When every node of the
generation does so nobody is left who could end it: the leader asks the node of the victim to take it out, by a
`Deadlock` document. Workers of one node that are all members need no leader; their agent asks `victim` itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from elaunch.rendezvous.membership import Deadlock, GenerationStage, Stalled
from elaunch.rendezvous.rules.holders import holders_of, may_go
from elaunch.rendezvous.view import View

SHOWN = 32
"""Members that a document names; those of large jobs would not fit into one."""


def find(view: View) -> Deadlock | None:
    """Returns what the leader is to tell the victim's node; None: somebody goes on, or it is a matter of one node.

    Args:
        view: what the leader knows.
    """
    generation = view.generation
    if (
        view.result is not None
        or generation is None
        or generation.stage is not GenerationStage.TRAIN
        or generation.hold
    ):
        return None
    # A node that has not heard of this generation may tell of the one before.
    here = [doc for doc in view.nodes if doc.progress.generation == generation.number]
    stalled = {wait.worker: wait for doc in here for wait in doc.peers.stalled}
    if not stalled or not stalled.keys() >= generation.ranks.keys() or len(generation.nodes) < 2:
        return None
    members = [stalled[worker] for worker in generation.ids]
    chosen = victim(members, holders_of(generation, view.nodes))
    shown = members if len(members) <= SHOWN else [chosen, *members[: SHOWN - 1]]
    return Deadlock(chosen.worker, len(members), tuple(dict.fromkeys(map(describe, shown))))


def victim(stalled: Sequence[Stalled], holders: Collection[str] = ()) -> Stalled:
    """Returns whom to take out of members that wait for each other.

    It is not the last one that holds the state. Of the others it is who is in an earlier step; among equals, who is in
    an operation in which the fewest are; then one that nobody names; then the last one.

    Args:
        stalled: the members, in the order of their ranks.
        holders: those of them that hold the state.
    """
    left = [wait for wait in stalled if may_go(wait.worker, holders)] or list(stalled)
    first = min(wait.step for wait in left)
    left = [wait for wait in left if wait.step == first]
    operations = Counter((wait.generation, wait.operation) for wait in left)
    fewest = min(operations.values())
    left = [wait for wait in left if operations[wait.generation, wait.operation] == fewest]
    named = {peer for wait in stalled for peer in wait.peers}
    return ([wait for wait in left if wait.worker not in named] or left)[-1]


def describe(stalled: Stalled) -> str:
    """Returns who waits for whom, for the user."""
    more = f" and {stalled.others} more" if stalled.others else ""
    peers = (", ".join(stalled.peers) or "its peers") + more
    return f"{stalled.worker} for {peers}, {stalled.doing}, operation {stalled.operation}"
