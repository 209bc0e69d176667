"""What a fit needs of Lightning's strategies, and of the first members."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.cli import SaveConfigCallback

from elaunch.errors import UsageError
from elaunch.workers.reentry.state import ElasticState


class ElasticEnvironment(TorchElasticEnvironment):
    """Lightning's environment of torchrun, where the number of workers is not that of devices and nodes."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Sees to it that each worker of this node has a device.

        Raises:
            UsageError: there are fewer devices than workers.
        """
        if self.local_rank() >= num_devices:
            raise UsageError(
                f"worker {self.local_rank()} of this node has no device: Lightning was given devices={num_devices}; "
                "give it as many as --nproc-per-node has"
            )


@dataclass(frozen=True)
class FitStart:
    """What the first members have begun with; whoever joins hears it from them.

    Attributes:
        replicas: their number. Lightning's batch size, times this, is the global one.
        logger_versions: of the loggers, in their order, as the first of them has chosen them.
    """

    replicas: int
    logger_versions: tuple[int | str | None, ...] = ()


def agree_on_start(
    state: ElasticState, known: FitStart | None, logger_versions: Sequence[int | str | None] = ()
) -> tuple[FitStart, bool]:
    """Returns what the first members have begun with, and whether these are the first ones. All members call it.

    Args:
        state: of the job.
        known: what this member knows of it.
        logger_versions: that this member would choose.
    """
    own = [known.replicas, list(known.logger_versions)] if known is not None else [0, list(logger_versions)]
    notes = state.all_gather(own)
    replicas, versions = next((note for note in notes if note[0]), [state.size, notes[0][1]])
    return FitStart(replicas, tuple(versions)), not any(note[0] for note in notes)


def agree_on_configs(state: ElasticState, callbacks: Sequence[Any]) -> None:
    """Has all members know whether LightningCLI's configuration is saved: its callback waits for all until it is.

    Args:
        state: of the job, whose first members were there before.
        callbacks: of the Trainer.
    """
    for callback in callbacks:
        if isinstance(callback, SaveConfigCallback):
            callback.already_saved = any(state.all_gather(bool(callback.already_saved)))
            callback.overwrite = True  # a file that is there is that of the first members


def weigh(strategy: Any, loss: torch.Tensor) -> torch.Tensor:
    """Returns a loss as it goes backward, and adds it up: the mean over the members is that over the step's samples."""
    if strategy.weight != 1.0:
        loss = loss * strategy.weight
    seen = loss.detach().double()
    strategy.loss = seen if strategy.loss is None else strategy.loss + seen
    return loss


def weighted(strategy: Any, tensor: Any, reduce_op: Any) -> Any:
    """Returns what goes into a reduction: a mean over the members is one over the samples of the step."""
    is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
    if strategy.weight != 1.0 and is_mean and isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
        return tensor * strategy.weight
    return tensor


def make_elastic(strategy: Any, plain: type, elastic: type) -> bool:
    """Turns a strategy of Lightning's into the elastic one of its kind, if there is one, else says so.

    Args:
        strategy: of a Trainer.
        plain: the class that it must have.
        elastic: the class that it gets, which adds methods only.
    """
    if type(strategy) is elastic:
        return True
    if type(strategy) is not plain:
        print(
            f"[elaunch] {type(strategy).__name__} is not elastic: when a worker dies, all are started again. Give "
            'Lightning strategy="ddp" and devices= as many as --nproc-per-node has',
            file=sys.stderr,
            flush=True,
        )
        return False
    strategy.__class__ = elastic
    if type(strategy.cluster_environment) is TorchElasticEnvironment:  # type: ignore[attr-defined]
        strategy.cluster_environment.__class__ = ElasticEnvironment  # type: ignore[attr-defined]
    return True
