"""What a fit needs of Lightning's strategies, and of the first members."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins.environments import TorchElasticEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.cli import SaveConfigCallback

from elaunch.errors import UsageError
from elaunch.integrations.passes import whole_value
from elaunch.workers.reentry.state import ElasticState

INSTEAD = {
    "FSDPStrategy": (
        "FSDP 1, whose flat parameters are cut otherwise for other members",
        "use ModelParallelStrategy (FSDP2), whose training goes on",
    ),
    "DeepSpeedStrategy": (
        "DeepSpeed's engine",
        "use ModelParallelStrategy, or DeepSpeed in a loop of your own with elaunch.integrations.deepspeed",
    ),
}
"""By name of a strategy that is not elastic: what it is, and what to use."""


class DataRank(NamedTuple):
    """A member's place among those who share a batch.

    Attributes:
        rank: the place.
        size: how many share the batch.
    """

    rank: int
    size: int


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
        replicas: their data-parallel size. Lightning's batch size, times this, is the global one.
        logger_versions: of the loggers, in their order, as the first of them has chosen them.
    """

    replicas: int
    logger_versions: tuple[int | str | None, ...] = ()


def agree_on_start(
    state: ElasticState, known: FitStart | None, replicas: int, logger_versions: Sequence[int | str | None] = ()
) -> tuple[FitStart, bool]:
    """Returns what the first members have begun with, and whether these are the first ones. All members call it.

    Args:
        state: of the job.
        known: what this member knows of it.
        replicas: data-parallel size of the members of now.
        logger_versions: that this member would choose.
    """
    own = [known.replicas, list(known.logger_versions)] if known is not None else [0, list(logger_versions)]
    notes = state.all_gather(own)
    count, versions = next((note for note in notes if note[0]), [replicas, notes[0][1]])
    return FitStart(count, tuple(versions)), not any(note[0] for note in notes)


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


def fit_mesh(strategy: Any, state: ElasticState) -> None:
    """Has a ModelParallelStrategy make a mesh of the members of now; its tensor-parallel size stays.

    Raises:
        UsageError: this worker has no device; of Lightning's launchers, which look, this strategy has none.
        StepInterrupted: they cannot be divided by it, and have changed.
    """
    strategy.cluster_environment.validate_settings(strategy.num_processes, strategy.num_nodes)
    if strategy._tensor_parallel_size == "auto":
        strategy._tensor_parallel_size = strategy.num_processes
    together = strategy._tensor_parallel_size
    if state.size % together:
        state.wait_for_members(f"{state.size} members cannot be divided into groups of tensor_parallel_size={together}")
    strategy._data_parallel_size = state.size // together


def sharded_rank(strategy: Any) -> DataRank:
    """Returns which part of a batch is this member's with a ModelParallelStrategy: a tensor-parallel group has one."""
    shards = strategy.device_mesh["data_parallel"]
    return DataRank(shards.get_local_rank(), shards.size())


def weigh(strategy: Any, loss: torch.Tensor) -> torch.Tensor:
    """Returns a loss as it goes backward, and adds it up: the mean over the members is that over the step's samples."""
    if strategy.weight != 1.0:
        loss = loss * strategy.weight
    seen = whole_value(loss).double()
    strategy.loss = seen if strategy.loss is None else strategy.loss + seen
    return loss


def is_mean(reduce_op: Any) -> bool:
    """Returns whether a reduction of Lightning's is a mean."""
    return isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")


def weighted(strategy: Any, tensor: Any, reduce_op: Any) -> Any:
    """Returns what goes into a reduction: a mean over the members is one over the samples of the step."""
    if (
        strategy.weight != 1.0
        and is_mean(reduce_op)
        and isinstance(tensor, torch.Tensor)
        and tensor.is_floating_point()
    ):
        return tensor * strategy.weight
    return tensor


def make_elastic(strategy: Any, kinds: Mapping[type, type]) -> bool:
    """Turns a strategy of Lightning's into the elastic one of its kind, if there is one.

    Args:
        strategy: of a Trainer, or of Fabric.
        kinds: by class that a strategy may have, the one that it gets, which adds methods only.
    """
    if type(strategy) in kinds.values():
        return True
    if type(strategy) not in kinds:
        return False
    strategy.__class__ = kinds[type(strategy)]
    if type(strategy.cluster_environment) is TorchElasticEnvironment:
        strategy.cluster_environment.__class__ = ElasticEnvironment
    return True


def why_not_elastic(strategy: Any) -> tuple[str, str]:
    """Returns the name of a strategy that is not elastic, with what it is, and what to use in its place."""
    name = type(strategy).__name__
    what, instead = INSTEAD.get(
        name,
        ("", 'give Lightning strategy="ddp" or a ModelParallelStrategy, and devices= as many as --nproc-per-node has'),
    )
    return f"{name} ({what})" if what else name, instead


def say_not_elastic(strategy: Any) -> None:
    """Says on the first worker that a Trainer's fit is not elastic."""
    if os.environ.get("RANK", "0") == "0":
        name, instead = why_not_elastic(strategy)
        line = f"{name} is not elastic: when a worker dies, all are started again; {instead}"
        print(f"[elaunch] {line}", file=sys.stderr, flush=True)
