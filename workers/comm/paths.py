"""What carries state from member to member: links, or something that is quicker where it is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    import threading

    from elaunch.workers.comm.group import Group
    from elaunch.workers.comm.traffic import Traffic


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


class StepPath(Protocol):
    """A way for the messages of one move in the background of a step, of which it is not known yet whether it stands.

    Attributes:
        message_bytes: of a message.
    """

    message_bytes: int

    def start(self, run: Callable[[], None]) -> threading.Thread:
        """Starts the thread that moves the messages, after all that the caller has given the device."""

    def stands(self, traffic: Traffic, part: int) -> bool:
        """Returns whether it stands on all members, each of which calls this; in the thread that moves the messages.

        Args:
            traffic: of the step.
            part: under which the members tell each other.

        Raises:
            StepInterrupted: the traffic has ended.
        """

    def move(self, traffic: Traffic, outgoing: Parcels, incoming: Parcels, came: Callable[[int], None]) -> None:
        """Moves messages; returns when all have come, in the thread that moves them.

        Args:
            traffic: of the step; its end is the end of the move.
            outgoing: what leaves.
            incoming: what comes.
            came: called for each message that is where it belongs, with the rank of its sender.

        Raises:
            StepInterrupted: a peer was lost, the path has failed, or the generation changed.
        """

    def leave(self) -> None:
        """Has what the device is given next come after whatever was begun. The thread has ended."""


class Paths(Protocol):
    """What a group may move state over besides its links.

    Attributes:
        last: the path of the last move of anything; None: there was nothing to choose from.
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

    def in_step(self, group: Group, most_bytes: int, device: torch.device) -> StepPath | None:
        """Returns what may carry a move in the background of the step that comes; None: links.

        It is opened meanwhile; arguments and errors are those of `choose`.
        """

    def took(self, path: StatePath, n_bytes: int, seconds: float) -> None:
        """Takes note of what a path has moved."""
