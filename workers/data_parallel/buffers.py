"""A model's buffers (running statistics, counters) as part of the step transaction.

Like DistributedDataParallel, a step ends with the buffers of the first member on all members. A step that is dropped
leaves none of its traces in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import nn

from elaunch.workers.comm.group import Group


class ModelBuffers:
    """The buffers of one model, whichever tensors these are at the time; a model without buffers costs nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = FoundBuffers(model)
        self._before: list[torch.Tensor] = []
        self._first: torch.Tensor | None = None

    def begin(self) -> None:
        """A step starts: keep what a dropped step goes back to."""
        self._before = [buffer.detach().clone() for buffer in self._buffers.now()]
        self._first = None

    def exchange(self, group: Group) -> None:
        """Fetch the first member's buffers, for `commit`. All members call this, before the barrier."""
        if self._before and group.size > 1:
            self._first = torch.cat([_bytes(buffer) for buffer in self._buffers.now()]).cpu()
            group.broadcast(self._first, 0)

    def commit(self) -> None:
        """The step has committed."""
        if self._first is None:
            return
        offset = 0
        with torch.no_grad():
            for buffer in self._buffers.now():
                part = self._first[offset : offset + buffer.nbytes].clone()
                buffer.copy_(part.view(buffer.dtype).view(buffer.shape))
                offset += buffer.nbytes
        self._first = None

    def drop(self) -> None:
        """The step is dropped."""
        self._first = None
        with torch.no_grad():
            for buffer, before in zip(self._buffers.now(), self._before, strict=True):
                buffer.copy_(before)


class FoundBuffers:
    """Finds the buffers of a model, without walking through it while its modules have what they had.

    Args:
        model: may get other modules and buffers at any time.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: list[torch.Tensor] = []
        self._modules: list[nn.Module] = []
        # Of all these modules, children first, then buffers: how many each has, and which.
        self._counts: list[int] | None = None
        self._held: list[Any] = []

    def now(self) -> Sequence[torch.Tensor]:
        """Returns the buffers as they are now, each once."""
        tables = self._tables()
        if list(map(len, tables)) != self._counts or not all(map(is_, _held_in(tables), self._held)):
            self._found, self._modules = list(self._model.buffers()), list(self._model.modules())
            tables = self._tables()
            # A module that finds them in a way of its own is asked each time.
            self._counts = list(map(len, tables)) if all(map(_finds_as_usual, self._modules)) else None
            self._held = list(_held_in(tables))
        return self._found

    def _tables(self) -> list[Mapping[str, Any]]:
        return [*map(_CHILDREN, self._modules), *map(_BUFFERS, self._modules)]


_CHILDREN, _BUFFERS = attrgetter("_modules"), attrgetter("_buffers")
_FINDS = ("buffers", "named_buffers", "modules", "named_modules", "_named_members")


def _held_in(tables: Sequence[Mapping[str, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(methodcaller("values"), tables))


def _finds_as_usual(module: nn.Module) -> bool:
    """Returns whether a module has its children and buffers where all modules have them."""
    kind = type(module)
    return not isinstance(module, torch.jit.ScriptModule) and all(
        getattr(kind, name) is getattr(nn.Module, name) for name in _FINDS
    )


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.detach().contiguous().view(-1).view(torch.uint8)
