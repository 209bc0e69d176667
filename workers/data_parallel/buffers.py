"""A model's buffers (running statistics, counters) as part of the step transaction.

Like DistributedDataParallel, a step ends with the buffers of the first member on all members. A step that is dropped
leaves none of its traces in them.
"""

from __future__ import annotations

import torch
from torch import nn

from elaunch.workers.comm.group import Group


class ModelBuffers:
    """The buffers of one model, whichever tensors these are at the time; a model without buffers costs nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: list[torch.Tensor] = []
        self._first: torch.Tensor | None = None

    def begin(self) -> None:
        """A step starts: keep what a dropped step goes back to."""
        self._before = [buffer.detach().clone() for buffer in self._model.buffers()]
        self._first = None

    def exchange(self, group: Group) -> None:
        """Fetch the first member's buffers, for `commit`. All members call this, before the barrier."""
        if self._before and group.size > 1:
            self._first = torch.cat([_bytes(buffer) for buffer in self._model.buffers()]).cpu()
            group.broadcast(self._first, 0)

    def commit(self) -> None:
        """The step has committed."""
        if self._first is None:
            return
        offset = 0
        with torch.no_grad():
            for buffer in self._model.buffers():
                part = self._first[offset : offset + buffer.nbytes].clone()
                buffer.copy_(part.view(buffer.dtype).view(buffer.shape))
                offset += buffer.nbytes
        self._first = None

    def drop(self) -> None:
        """The step is dropped."""
        self._first = None
        with torch.no_grad():
            for buffer, before in zip(self._model.buffers(), self._before, strict=True):
                buffer.copy_(before)


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().contiguous().view(-1).view(torch.uint8)
