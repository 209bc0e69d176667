"""Parts of tensors of engines that cut their state otherwise than DTensors: pipeline stages, flat ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from elaunch.workers.state.boxes import Box, n_elements


class TensorShard:
    """A part of a tensor, which may be empty, and where it lies in the whole.

    It has the calls of a DTensor that copies of the state use.

    Args:
        local: this worker's part.
        box: of the whole, (start, stop) for each dim; its sizes are those of `local`.
        shape: of the whole.
    """

    def __init__(self, local: Tensor, box: Box, shape: tuple[int, ...]) -> None:
        if tuple(local.shape) != tuple(stop - start for start, stop in box):
            raise ValueError(f"a tensor of shape {tuple(local.shape)} is not the box {box}")
        self._local, self.box, self.shape = local, box, torch.Size(shape)

    @classmethod
    def from_local(cls, local: Tensor, device_mesh: None, placements: Box, *, shape: Any, **_: Any) -> TensorShard:
        """Returns the part at a box, which stands where a DTensor has placements."""
        return cls(local, placements, tuple(shape))

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the whole."""
        return self._local.dtype

    @property
    def device(self) -> torch.device:
        """Returns where the part lies."""
        return self._local.device

    @property
    def device_mesh(self) -> None:
        """Returns nothing: the box says all."""
        return None

    @property
    def placements(self) -> Box:
        """Returns the box."""
        return self.box

    @property
    def is_cut(self) -> bool:
        """Returns whether the part is not the whole."""
        return tuple(stop - start for start, stop in self.box) != tuple(self.shape)

    def to_local(self) -> Tensor:
        """Returns the part."""
        return self._local

    def detach(self) -> TensorShard:
        """Returns itself: it has no gradient."""
        return self

    def stride(self) -> tuple[int, ...]:
        """Returns the strides of the whole, were it in one piece of memory."""
        return tuple(torch.empty(self.shape, device="meta").stride())

    def to(self, device: Any) -> TensorShard:
        """Returns the part on another device."""
        return TensorShard(self._local.to(device), self.box, tuple(self.shape))


Form = tuple[str, tuple[int, ...]]
"""The dtype of a whole tensor, as text, and its shape."""


def form_of(shard: TensorShard) -> Form:
    """Returns the form of the tensor that a shard is a part of."""
    return str(shard.dtype), tuple(shard.shape)


def empty_shard(form: Form, device: torch.device) -> TensorShard:
    """Returns what a worker has of a tensor that lies on others alone."""
    name, shape = form
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    box = tuple((0, 0) for _ in shape)
    return TensorShard(torch.empty([0] * len(shape), dtype=dtype, device=device), box, shape)


def fill(shards: Mapping[str, TensorShard], found: Mapping[str, TensorShard]) -> None:
    """Copies parts that have come to where they belong, by name.

    Raises:
        KeyError: one has not come.
    """
    with torch.no_grad():
        for name, shard in shards.items():
            if n_elements(shard.box):
                shard.to_local().copy_(found[name].to_local())
