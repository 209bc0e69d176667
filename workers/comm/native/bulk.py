"""What a native group can do, whatever its backend."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Bulk(Protocol):
    """A process group of one of torch's backends among the members of one generation.

    Attributes:
        backend: its name, such as "gloo".
    """

    backend: str

    def open(self, store: dist.Store, rank: int, size: int) -> None:
        """Connects to the other members, all of which call this with the same store.

        Raises:
            RuntimeError: it cannot be opened, or was poisoned meanwhile.
        """

    def all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Begins to sum a tensor over the members, in place and on the caller's stream; returns its work.

        What its `wait` means is the backend's: for host memory the sum is there; else the stream waits for it.

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
