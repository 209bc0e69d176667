"""A message as one run of memory on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from elaunch.workers.state.staging import aligned


def flat_of(views: Sequence[Tensor], device: torch.device) -> Tensor | None:
    """Returns the bytes of a message where it lies; None: it is no run of memory on the device and must be packed."""
    (view, *more) = views
    if more or view.device.type != device.type or not view.is_contiguous():
        return None
    return view.detach().view(-1).view(torch.uint8)


def packed_bytes(views: Sequence[Tensor]) -> int:
    """Returns the bytes of a packed message: each part begins at a multiple of 16, so all but the last are padded."""
    *first, last = views
    return sum(aligned(view.nbytes) for view in first) + last.nbytes


def room_for(views: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns memory for a packed message."""
    return torch.empty(packed_bytes(views), dtype=torch.uint8, device=device)


def pack(flat: Tensor, views: Sequence[Tensor]) -> None:
    """Puts a message into its memory."""
    for part, view in zip(parts_of(flat, views), views, strict=True):
        part.copy_(view)


def unpack(flat: Tensor, views: Sequence[Tensor]) -> None:
    """Puts a message that has come where it belongs."""
    for part, view in zip(parts_of(flat, views), views, strict=True):
        view.copy_(part)


def parts_of(flat: Tensor, views: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yields the parts of a packed message where they lie in its memory.

    Args:
        flat: from `room_for`.
        views: of the parts' types and shapes, in their order; they may be on the meta device.
    """
    start = 0
    for view in views:
        yield flat[start : start + view.nbytes].view(view.dtype).view(view.shape)
        start += aligned(view.nbytes)
