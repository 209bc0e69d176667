"""What a script sees of one step: its micro-batches, and once they are through, that it has committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Step:
    """One step of a job, on this worker; `Job.steps` yields it.

    Its loop yields the micro-batches of this worker. An interrupted step begins again within that loop, so it may
    yield them anew. The loop ends when the step has committed: what stands after it runs once a step, on all members.

    Attributes:
        number: of the step, from 0; the same on all members.
        loss: mean loss over all samples of the step, of what members gave to `Job.report`; the same on all members.
            None before the step has committed, and if nothing was given.
        committed: whether it has. The gradients are then those of the whole step.
    """

    def __init__(self, number: int, micro_batches: Callable[[Step], Iterator[Any]]) -> None:
        self.number = number
        self.loss: float | None = None
        self.committed = False
        self._micro_batches = micro_batches

    def __iter__(self) -> Iterator[Any]:
        """Yields the micro-batches, until the step has committed; a second loop yields nothing."""
        return iter(()) if self.committed else self._micro_batches(self)
