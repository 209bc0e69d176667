"""The native groups of one generation, and their names."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch.distributed as dist

from elaunch.workers.comm.native.bulk import Bulk

EVERYONE = ""
"""The purpose of the group of all members."""

STATE = "state"
"""The purpose, with a number, of a group of all members that is opened for state to move in."""

STEP_STATE = "state-in-step"
"""The same of state that moves in the background of a step."""

Connect = Callable[[], dist.Store]


class GroupKey(NamedTuple):
    """A native group of a generation, known by its purpose and members; what is sent in it comes in one order."""

    purpose: str
    members: tuple[str, ...]

    @property
    def place(self) -> str:
        """Returns where its members meet, below the generation's place in the store."""
        return f"/{self.purpose}/{','.join(self.members)}" if self.purpose != EVERYONE else ""


class Begun(NamedTuple):
    """The opening of a group that goes on in the background.

    Attributes:
        generation: of its members.
        key: of the group.
        thread: opens it; None: it is over.
    """

    generation: int
    key: GroupKey
    thread: threading.Thread | None


Needs = Sequence[GroupKey]
"""All groups that the members need, in an order that is the same on all, in which they are opened."""


@dataclass(eq=False)
class Opening:
    """The native groups of one generation.

    Attributes:
        members: of the generation.
        rank: of this one among them.
        connect: returns a client of the job's store.
        needs: the groups of all members that must be open before any is used.
        bulks: those of this worker, whether they are open or not.
        more: groups that this worker has asked for besides; when one is used, its members agree among themselves.
        is_open: those that stand here; whether they do elsewhere, the commit barrier says.
        in_use: all members have all that they need, and use it.
        poisoned: the generation is over.
        for_state: how many groups were opened for state to move in, by purpose.
        refused: why a group of these does not stand here.
        seconds: that its openings took.
        last: the thread that opens what was asked for last.
    """

    generation: int
    members: tuple[str, ...]
    rank: int
    connect: Connect
    needs: tuple[GroupKey, ...] = ()
    bulks: dict[GroupKey, Bulk] = field(default_factory=dict)
    more: dict[GroupKey, Bulk] = field(default_factory=dict)
    is_open: set[GroupKey] = field(default_factory=set)
    in_use: bool = False
    poisoned: bool = False
    for_state: Counter[str] = field(default_factory=Counter)
    refused: dict[GroupKey, str] = field(default_factory=dict)
    seconds: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    last: threading.Thread | None = None

    @property
    def all(self) -> dict[GroupKey, Bulk]:
        """All groups of this worker."""
        return self.bulks | self.more

    @property
    def state_key(self) -> GroupKey:
        """The key of the group that was opened last for state."""
        return GroupKey(f"{STATE}{self.for_state[STATE]}", self.members)

    @property
    def in_step(self) -> GroupKey | None:
        """The key of the group in which state moves in the background of a step, until that commits."""
        key = GroupKey(f"{STEP_STATE}{self.for_state[STEP_STATE]}", self.members)
        return key if key in self.more else None

    def is_ready(self) -> bool:
        """Returns whether all that this worker needs is open."""
        return not self.poisoned and all(key in self.is_open for key in self.needs if key in self.bulks)
