"""A copy engine with a device's manners, on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor


class LateCopies:
    """Copies in the order in which copies were begun, but only when somebody waits for them.

    So whoever reads a buffer, or fills it anew, before its copies are done finds garbage.
    """

    def __init__(self, ahead: int = 1) -> None:
        self.ahead = ahead
        self.begun: deque[tuple[Tensor, Tensor]] = deque()
        self.n_begun = self.n_done = 0

    def new(self, n_bytes: int) -> Tensor:
        return torch.full((n_bytes,), 0xAB, dtype=torch.uint8)

    def copy(self, to: Tensor, from_: Tensor) -> None:
        self.begun.append((to, from_))
        self.n_begun += 1

    def mark(self) -> Callable[[], None]:
        upto = self.n_begun
        return lambda: self._do(upto)

    def _do(self, upto: int) -> None:
        while self.n_done < upto:
            to, from_ = self.begun.popleft()
            to.copy_(from_)
            self.n_done += 1
