"""What a native group can do, whatever its backend."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Bulk(Protocol):
    """A process group of one of torch's backends among the members of one generation.

    Attributes:
        backend: its name, such as "gloo".
    """

    backend: str

    def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
        """Connects to the other members, all of which call this with the same store.

        Args:
            store: where they meet.
            rank: of this member.
            size: number of members.
            messages: whether they will call `send`, `receive` or `exchange`, so that none of these waits for a
                connection later.

        Raises:
            RuntimeError: it cannot be opened, or was poisoned meanwhile.
        """

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to sum a tensor over the members, in place and on the caller's stream; returns its work.

        What its `wait` means is the backend's: for host memory the sum is there; else the stream waits for it.

        Raises:
            RuntimeError: the group is poisoned, or the backend refuses.
        """

    def backend_group(self) -> Any:
        """Returns the backend's own group, for all else that it does; each of its operations begins like a sum.

        None: operations that it does not know of could not be freed, and go over links.

        Raises:
            RuntimeError: the group is poisoned, or not open.
        """

    def wrap(self, work: dist.Work, is_message: bool) -> dist.Work:
        """Returns the work of an operation that was begun in the backend's own group, for whoever waits for it.

        Args:
            work: the backend's.
            is_message: whether it sends or receives one.
        """

    def start_batch(self) -> bool:
        """Has what this thread calls in `backend_group` from now on begin at `end_batch`, all of it together.

        Returns False, and does nothing, where an operation does not keep those after it waiting.

        Raises:
            RuntimeError: the group is poisoned, or not open.
        """

    def end_batch(self) -> dist.Work | None:
        """Begins what was called since `start_batch`, and returns its work, as `all_reduce` does.

        None: nothing was called, or what follows on the caller's stream comes after it anyway.

        Raises:
            RuntimeError: the group is poisoned, or the backend refuses.
        """

    def send(self, tensor: torch.Tensor, to: int) -> dist.Work:
        """Begins to send a contiguous tensor to a member, after what the caller's stream has to do; returns its work.

        What one member sends to another is matched with what that one receives in order. The tensor must stay as it is
        until the work is done, which is not before the other member receives.

        Raises:
            RuntimeError: the group is poisoned, or the backend refuses.
        """

    def receive(self, tensor: torch.Tensor, from_: int) -> dist.Work:
        """Begins to fill a contiguous tensor with what a member sends; returns its work, as `all_reduce` does.

        Raises:
            RuntimeError: the group is poisoned, or the backend refuses.
        """

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Sequence[dist.Work]:
        """Begins to send each member a flat tensor and to receive one from each; returns works, all to be waited for.

        All members call it in the same order. None waits in it for one that has nothing for it.

        Args:
            outgoing: by rank; empty for a member that gets nothing, and for this one.
            incoming: by rank; empty for a member that sends nothing, and for this one.

        Raises:
            RuntimeError: the group is poisoned, or the backend refuses.
        """

    def poison(self) -> None:
        """Frees whoever waits in the group, within milliseconds, with an error or with garbage. From any thread."""

    def leave(self) -> None:
        """Has nothing that was issued here keep the device from other work. By the training thread, once poisoned."""

    def errored(self) -> str | None:
        """Returns what has gone wrong in the group, as far as it is known once its work is done; None: nothing."""

    def close(self) -> None:
        """Gives back what the group holds. No member may be in it any more: all have poisoned it, or are gone."""


def keep(what: Any) -> None:
    """Keeps something for as long as this process lives, and has nothing destroy it at the end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def keep_until_over(what: Any, works: Sequence[_Work]) -> None:
    """Keeps something that threads of a backend use until they are done with these works.

    `end_kept` destroys it then; what they never come out of stays for as long as this process lives.
    """
    kept = _Unended(what, tuple(works))
    keep(kept)
    with _KEEPING:
        _KEPT.append(kept)


def end_kept() -> None:
    """Destroys what was kept for works that are over by now."""
    with _KEEPING:
        over = [one for one in _KEPT if all(work.is_completed() for work in one.works)]
        _KEPT[:] = [one for one in _KEPT if one not in over]
    for one in over:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(one))


class _Work(Protocol):
    def is_completed(self) -> bool: ...


@dataclass(frozen=True, eq=False)
class _Unended:
    what: Any
    works: tuple[_Work, ...]


_KEPT: list[_Unended] = []
_KEEPING = threading.Lock()
