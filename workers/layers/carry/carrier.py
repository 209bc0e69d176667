"""What carries the tensors of one operation: a step, or the sharing of new parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor


class Carrier(Protocol):
    """Tensors to and from other workers, each named by its part (`elaunch.workers.layers.messages.tag`).

    Nothing but `finish`, and on the host `wait` and what it is made of, waits for a peer. All raise `StepInterrupted`
    when one is lost.
    """

    def post(self, peer: str, part: int, tensor: Tensor) -> None:
        """Says where a part from `peer` goes: a contiguous tensor, of its very shape and dtype."""

    def before(self, peer: str, part: int) -> Sequence[int]:
        """Returns the parts from `peer` that come before this one and have not been posted, which they must be."""

    def send(self, peer: str, part: int, tensor: Tensor) -> None:
        """Sends a contiguous tensor to `peer`; it must not change until this operation is over."""

    def wait(self, peer: str, part: int) -> None:
        """Has what follows, on a device on its present stream, come after the arrival of a part that was posted."""

    def arrived(self, peer: str, part: int) -> bool:
        """Returns whether a part that was posted is here; never raises. It is still to be waited for."""

    def exchange(
        self, workers: Sequence[str], part: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> None:
        """Sends each of these workers a flat tensor, and takes one from each, as `wait` does; what is this worker's own
        place in the two is left out. All of them call it.
        """

    def all_reduce(self, workers: Sequence[str], tensor: Tensor) -> Tensor | None:
        """Returns the sum of a tensor over workers, in any order, as `wait` does; None: it takes an `exchange`."""

    def finish(self) -> None:
        """Returns when all that was sent and posted is there, and right. Nothing is sent after it."""

    def drop(self) -> None:
        """Returns when nothing writes into the tensors any more: the generation is over."""
