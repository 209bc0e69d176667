"""Who may be killed or left out, so that the state of the job is not lost with it. Pure.

A member holds the state from when it has entered a generation until it ends. A replacement that is still being filled
does not, so a member may be the last holder although others are there: those are waited for. An agent that wants to
kill a worker of its node gives it more time than others:

    it holds nothing, or another holder on the node goes on         none
    it is the last holder                                           LAST_S
    all other holders are on other nodes, or do not go on either    none, but the first member has KEEPER_S

Each agent decides for its own workers. Where several nodes would each kill one at the same moment, because all sleep
for the same reason, the first member's comes last: by then its agent has heard that the others are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from elaunch.rendezvous.membership import Generation, NodeDoc, WorkerState

LAST_S = 600.0
"""Who has not gone on for so long is lost in any case: the job can go on from a checkpoint only."""

KEEPER_S = 1.0
"""A death becomes a generation that all nodes have heard of in less."""


def may_go(worker: str, holders: Collection[str]) -> bool:
    """Returns whether the state survives the loss of a worker: it holds none, or somebody else does."""
    return worker not in holders or len(set(holders)) > 1


def grace_s(worker: str, holders: Sequence[str], sound: Collection[str]) -> float:
    """Returns how much longer than others a worker is waited for before its agent may kill it, in seconds.

    Args:
        worker: of this node.
        holders: the members that hold the state, by rank.
        sound: workers of this node that go on.
    """
    others = set(holders) - {worker}
    if worker not in holders or not others.isdisjoint(sound):
        return 0.0
    if not others:
        return LAST_S
    return KEEPER_S if holders[0] == worker else 0.0


def holders_of(generation: Generation, nodes: Iterable[NodeDoc]) -> tuple[str, ...]:
    """Returns the members of a generation that hold the state, by rank, as their nodes report them."""
    holding = {worker.id for doc in nodes for worker in doc.workers if worker.state is WorkerState.MEMBER}
    return tuple(worker for worker in generation.ids if worker in holding)
