"""What a script sees of one step: its micro-batches, and once they are through, that it has committed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from elaunch.errors import StateError


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

    def check_is_over(self) -> None:
        """Sees to it that the script has left the step only when it had committed.

        Raises:
            StateError: it has not.
        """
        if not self.committed:
            raise StateError(
                f"step {self.number} was left before it had committed: the loop over its micro-batches must run "
                "to its end. To end the job before its last step, call job.stop()"
            )

    def check_call(self, name: str, thing: Any, in_micro_batch: bool) -> None:
        """Sees to it that what changes the model is called after the loop over the micro-batches.

        Args:
            name: under which the object is registered.
            thing: whose `step` or `update` the script calls.
            in_micro_batch: whether that is in the loop.

        Raises:
            StateError: it is in the loop, or before it and an optimizer.
        """
        if not self.committed and (in_micro_batch or isinstance(thing, torch.optim.Optimizer)):
            raise StateError(
                f"{name}.step() was called {'in' if in_micro_batch else 'before'} the loop over the micro-batches of "
                f"step {self.number}: call it once in a step, after that loop"
            )
