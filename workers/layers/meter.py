"""How many bytes of activations are kept for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


class ActivationMeter:
    """Counts what autograd keeps between forward and backward, in the thread that enters it.

    A storage counts once however many operations keep it, from the first that does until the last lets go of it; so it
    is what the activations occupy. Parameters do not count. It slows the forward down, so it is for measuring only.

    Args:
        parameters: storages of these tensors are left out.

    Attributes:
        now_bytes: kept at the moment.
        peak_bytes: the most that was kept at any moment.
    """

    def __init__(self, parameters: Collection[Tensor] = ()) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        self._left_out = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._users: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)

    def __enter__(self) -> ActivationMeter:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _keep(self, tensor: Tensor) -> _Kept:
        return _Kept(self, tensor)

    def _taken(self, storage: Any) -> None:
        where = storage.data_ptr()
        self._users[where] += 1
        if self._users[where] == 1 and where not in self._left_out:
            self.now_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _let_go(self, storage: Any) -> None:
        where = storage.data_ptr()
        self._users[where] -= 1
        if not self._users[where]:
            del self._users[where]
            if where not in self._left_out:
                self.now_bytes -= storage.nbytes()


class _Kept:
    """A tensor that autograd keeps as long as it keeps this."""

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        self.tensor = tensor
        self._meter = meter
        meter._taken(tensor.untyped_storage())

    def __del__(self) -> None:
        self._meter._let_go(self.tensor.untyped_storage())
