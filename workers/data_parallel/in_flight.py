"""What a job knows of the step in flight, and forgets when the next attempt begins."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from elaunch.detect.heartbeat import Phase
from elaunch.workers import heartbeat
from elaunch.workers.barrier import StepRecord
from elaunch.workers.exact_sum import NOTHING, ExactSum
from elaunch.workers.moments import OwnTime


@dataclass(slots=True)
class StepInFlight:
    """One attempt of a step, on one worker.

    Attributes:
        coverage: digest of what this worker computes, and `whole_coverage` that of the whole step.
        in_micro_batch: the script has a micro-batch at hand.
        last_micro_batch: it is, or was, this worker's last one of the step.
        n_samples: samples of the micro-batch at hand that count.
        loss: sum of the losses of the samples, and `loss_samples` is their number.
        own: how long this worker's own part takes, if that is measured.
        committed: whether it has committed; None: that is not settled.
        whole: the record of all members; None unless they passed the barrier here: a recovery may commit a step, too.
    """

    coverage: int = 0
    whole_coverage: int = 0
    in_micro_batch: bool = False
    last_micro_batch: bool = False
    n_samples: int = 0
    loss: ExactSum = NOTHING
    loss_samples: int = 0
    own: OwnTime | None = None
    committed: bool | None = None
    whole: StepRecord | None = None

    def add_loss(self, loss: torch.Tensor | float) -> None:
        """Takes in the mean loss of the micro-batch at hand."""
        value = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
        if self.n_samples:
            self.loss += ExactSum.of([value * self.n_samples])
        self.loss_samples += self.n_samples

    def works(self, does: bool) -> None:
        """Takes note that this worker begins to work on the step, or leaves off."""
        if self.own is not None:
            (self.own.start if does else self.own.stop)()

    def waiting(self) -> AbstractContextManager[None]:
        """Returns a context in which this worker waits for others."""
        return nullcontext() if self.own is None else self.own.waiting()

    @property
    def has_sums(self) -> bool:
        """Whether the gradients at hand are those of a whole step, not of some of its micro-batches."""
        return not self.in_micro_batch or self.last_micro_batch

    def computes(self, is_under_way: bool) -> None:
        """Takes note that a forward or a backward begins, or that a backward has ended and the script has its own time.

        What the script computes after the step has committed is no part of a step: an evaluation.
        """
        if self.in_micro_batch and self.committed is None:
            heartbeat.enter(Phase.STEP if is_under_way else Phase.SCRIPT)

    def ends_update(self, step: int) -> None:
        """Takes note that a call of the script's optimizer is over, in `step` if that has committed."""
        if self.in_micro_batch and self.committed:
            heartbeat.committed(step)
        elif self.in_micro_batch and self.committed is not None:
            heartbeat.enter(Phase.SCRIPT)
