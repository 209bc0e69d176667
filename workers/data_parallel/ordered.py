"""Sums in a native group whose bits are those of sums over links: the summands travel, and members add them themselves.

NCCL and Gloo add in an order of their own, which depends on their version, on the sizes and on the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from elaunch.workers.comm.group import ScratchRows, even_counts, fold, is_summed_whole, order_of_sum
from elaunch.workers.comm.native import ended
from elaunch.workers.comm.native.bulk import Bulk

Wait = Callable[[Sequence[dist.Work]], None]
Rows = Callable[[int, Tensor], list[Tensor]]


def sum_in_order(bulk: Bulk, rank: int, size: int, tensor: Tensor, scale: float, wait: Wait, rows: Rows) -> None:
    """Sums a 1-D contiguous tensor over the members of a native group, in place, as `Group.all_reduce` does over links.

    Args:
        bulk: the native group.
        rank: of this member.
        size: number of members, two or more.
        tensor: with as many elements on all.
        scale: what the sum is multiplied by, once.
        wait: has what follows come after some works.
        rows: returns a number of scratch tensors of the size and type of another one.

    Raises:
        RuntimeError: the group is poisoned, or has failed.
    """
    whole = is_summed_whole(tensor, size)
    chunks = [tensor] * size if whole else list(tensor.split(even_counts(tensor.numel(), size)))
    own = chunks[rank]
    nothing = _bytes(own)[:0]
    others = [member for member in range(size) if member != rank]
    parts = dict(zip(others, rows(size - 1, own), strict=True)) | {rank: own}
    wait(
        bulk.exchange(
            [nothing if member == rank else _bytes(chunks[member]) for member in range(size)],
            [nothing if member == rank else _bytes(parts[member]) for member in range(size)],
        )
    )
    fold([parts[member] for member in order_of_sum(rank, size)], own)
    own.mul_(scale)
    if not whole:
        wait(
            bulk.exchange(
                [nothing if member == rank else _bytes(own) for member in range(size)],
                [nothing if member == rank else _bytes(chunks[member]) for member in range(size)],
            )
        )


class OrderedSums:
    """The sums of one worker in a native group, step after step, in the order in which links add.

    On a device they are put on a stream of their own; in host memory whoever calls for one waits for it.
    """

    def __init__(self) -> None:
        self._rows = ScratchRows()
        self._stream: torch.Stream | None = None
        self._works: list[dist.Work] = []

    def sum_on_host(
        self, bulk: Bulk, rank: int, size: int, tensor: Tensor, scale: float, look: Callable[[], object]
    ) -> None:
        """Returns when a tensor in host memory has been summed.

        Args:
            bulk, rank, size, tensor, scale: as for `sum_in_order`.
            look: called now and then while this thread waits; what it raises ends the wait.

        Raises:
            RuntimeError: the group is poisoned, or has failed.
        """

        def wait(works: Sequence[dist.Work]) -> None:
            self._works.extend(works)
            for work in works:
                ended.wait(work, look)

        sum_in_order(bulk, rank, size, tensor, scale, wait, self._rows)
        self._works.clear()

    def begin_on_device(self, bulk: Bulk, rank: int, size: int, tensor: Tensor, scale: float) -> None:
        """Begins a sum on a device, after what the caller's stream has to do; `join` has a stream come after it.

        Args:
            bulk, rank, size, tensor, scale: as for `sum_in_order`.

        Raises:
            RuntimeError: the group is poisoned, or has failed.
        """
        if self._stream is None:
            self._stream = torch.Stream(tensor.device)
        self._stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        with self._stream:
            sum_in_order(bulk, rank, size, tensor, scale, _wait_by_stream, _new_rows)

    def join(self, device: torch.device) -> None:
        """Has what the present stream of a device is given from now on come after all sums there."""
        if self._stream is not None:
            with ended.shown(device):
                torch.accelerator.current_stream(device).wait_stream(self._stream)

    def drop(self, device: torch.device) -> None:
        """Returns when nothing writes into the tensors any more. The group has been poisoned before."""
        if device.type != "cpu":
            self.join(device)
        ended.drop(self._works, on_host=True)
        self._works.clear()


def _new_rows(number: int, like: Tensor) -> list[Tensor]:
    return list(like.new_empty((number, like.numel())).unbind(0))


def _wait_by_stream(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)
