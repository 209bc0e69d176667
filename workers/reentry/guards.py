"""Copies for others: what of the state is on one worker alone, another one keeps as well.

Each member has one guard, on another node where there are several, and is the guard of one. What it alone holds goes
there in each commit, before the barrier: whoever dies, no part of the last commit is lost with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from elaunch.rendezvous.membership import node_of
from elaunch.workers.comm.group import Group
from elaunch.workers.reentry.copies import Part, StateCopy
from elaunch.workers.state.boxes import Box, n_elements
from elaunch.workers.state.codec import dtype_of

Key = TypeVar("Key")


def guard_of(rank: int, members: Sequence[str], node: Callable[[str], str] = node_of) -> int:
    """Returns who keeps copies for a member: the one that is as many places behind it as a node has members."""
    counts = Counter(map(node, members))
    return (rank + (max(counts.values()) if len(counts) > 1 else 1)) % len(members)


def alone(
    rank: int, held: Sequence[Mapping[Key, Box]], members: Sequence[str], node: Callable[[str], str] = node_of
) -> list[Key]:
    """Returns the tensors of which a member has a part that nobody else has, or nobody on another node.

    Args:
        rank: of the member.
        held: by rank, the parts, by whatever stands for a tensor.
        members: by rank.
        node: gives the node of a member.
    """
    several = len(set(map(node, members))) > 1
    others = [
        boxes
        for other, boxes in enumerate(held)
        if other != rank and not (several and node(members[other]) == node(members[rank]))
    ]
    return [
        place
        for place, box in held[rank].items()
        if n_elements(box) and all(boxes.get(place) != box for boxes in others)
    ]


class Guards:
    """What one worker keeps for another, in one entry.

    Attributes:
        newest: the parts of the last commit that was begun.
        former: those of the one before.
    """

    def __init__(self) -> None:
        self.newest: list[Part] = []
        self.former: list[Part] = []

    def exchange(self, group: Group, copy: StateCopy) -> None:
        """Gives this worker's guard what it alone holds of a copy, and takes what it keeps itself. All members call it.

        Raises:
            StepInterrupted: a peer was lost, or the generation changed; what was taken is incomplete.
        """
        self.former, self.newest = self.newest, []
        if group.size == 1:
            return
        notes = group.all_gather_json([[place, box] for place, box in copy.boxes.items()])
        held = [{place: tuple((lo, hi) for lo, hi in box) for place, box in note} for note in notes]
        guards = [guard_of(rank, group.members) for rank in range(group.size)]
        ward = guards.index(group.rank)
        specs = copy.manifest["tensors"]
        taken: list[Part] = []
        for place in alone(ward, held, group.members):
            box = held[ward][place]
            shape = [stop - start for start, stop in box]
            taken.append((place, box, torch.empty(shape, dtype=dtype_of(specs[place]["dtype"]))))
        sent = [copy.tensors[place].contiguous() for place in alone(group.rank, held, group.members)]
        group.exchange([(guards[group.rank], tensor) for tensor in sent], [(ward, tensor) for _, _, tensor in taken])
        self.newest = taken

    def forget_newest(self) -> None:
        """Lets the parts of the last commit go: it does not count."""
        self.newest, self.former = self.former, []
