"""What carries state from member to member: links, or something that is quicker where it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from elaunch.workers.comm.group import Group


class Parcel(NamedTuple):
    """A message of state.

    Attributes:
        name: what it has first, for people.
        views: what it consists of, at its sender, or where it goes.
    """

    name: str
    views: Sequence[Tensor]


Parcels = Mapping[int, Iterator[Parcel]]
"""By the rank of the other end, what goes there or comes from there, in order; the ends agree on all sizes."""


class StatePath(Protocol):
    """A way for the messages of one move.

    Attributes:
        name: for people.
        message_bytes: of a message, where memory is not bounded more tightly.
    """

    name: str
    message_bytes: int

    def move(self, outgoing: Parcels, incoming: Parcels, checksum: bool, hold: Callable[[int], None]) -> None:
        """Moves messages; every member calls it, also those that exchange nothing. What has come counts after `finish`.

        Args:
            outgoing: what leaves.
            incoming: what comes.
            checksum: whether each message is checked to have come as it was sent.
            hold: is told of bytes that are allocated; negative: that are let go.

        Raises:
            StateError: something arrived damaged.
            StepInterrupted: a peer was lost, the path has failed, or the generation changed.
        """

    def finish(self) -> None:
        """Returns when all that was to come is there, and right.

        Raises:
            StepInterrupted: it is not.
        """

    def close(self) -> None:
        """Gives back what the path holds, after `finish` or an error."""


class Paths(Protocol):
    """What a group may move state over besides its links.

    Attributes:
        last: the path of the last move; None: there was nothing to choose from.
    """

    last: str | None

    def choose(self, group: Group, most_bytes: int, device: torch.device | None, is_bounded: bool) -> StatePath | None:
        """Returns the path of a move; None: links. All members of the group call it alike.

        Args:
            group: of the members.
            most_bytes: that this member sends or receives, whichever is more.
            device: on which it has its part of the state, or is to have it; None: it has no part.
            is_bounded: whether memory is short.

        Raises:
            StepInterrupted: a link broke, or the membership changes.
        """

    def took(self, path: StatePath, n_bytes: int, seconds: float) -> None:
        """Takes note of what a path has moved."""
