"""The Trainer's strategies over the members that there are, who have the global batches of the first ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy

from elaunch.integrations.lightning.data import dealt
from elaunch.integrations.lightning.parts import DataRank, FitStart, fit_mesh, is_mean, sharded_rank, weigh, weighted

if TYPE_CHECKING:
    from elaunch.integrations.lightning.trainer import ElasticFit


class ElasticStrategy(Strategy):
    """What is put before a strategy of Lightning's.

    Attributes:
        elastic: the fit that it belongs to; None: it is Lightning's.
        start: what the first members have begun with, once that is known.
        weight: how much the mean over this member's present batch counts; 1.0 outside of steps.
        loss: the sum of the losses that went backward since the last commit, weighted.
    """

    elastic: ElasticFit | None = None
    start: FitStart | None = None
    weight: float = 1.0
    loss: torch.Tensor | None = None

    @property
    def data_rank(self) -> DataRank:
        """Returns which part of a batch is this member's."""
        strategy: Any = self
        return DataRank(strategy.global_rank, strategy.world_size)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Returns what Lightning makes samplers with; what they give is dealt out anew."""
        if self.elastic is None or self.start is None:
            rank, size = self.data_rank
            return {"num_replicas": size, "rank": rank}
        return {"num_replicas": self.start.replicas, "rank": 0}

    def setup_environment(self) -> None:
        """Makes the process group of the members, who hear from the first one where the job is."""
        super().setup_environment()
        if self.elastic is not None:
            self.elastic.meet()

    def process_dataloader(self, dataloader: object) -> object:
        """Returns a loader that deals out global batches."""
        if self.elastic is None or self.start is None:
            return dataloader
        rank, size = self.data_rank
        return dealt(dataloader, self.start.replicas, rank, size, bool(self.elastic.trainer.training))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Weighs what follows by the size of the batch."""
        super().on_train_batch_start(batch, batch_idx)
        if self.elastic is not None:
            self.weight = self.elastic.weight()

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Runs backward from a loss, weighted."""
        loss = weigh(self, closure_loss) if self.elastic is not None else closure_loss
        return super().backward(loss, optimizer, *args, **kwargs)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the members; in a step, a mean is one over its samples.

        Numbers of samples are averaged as well, for a mean over them, and need not be divisible by that of the members.
        """
        if self.elastic is not None and is_mean(reduce_op) and isinstance(tensor, torch.Tensor):
            tensor = tensor if tensor.is_floating_point() else tensor.double()
        return super().reduce(weighted(self, tensor, reduce_op), group, reduce_op)  # type: ignore[safe-super]


class ElasticDDP(ElasticStrategy, DDPStrategy):
    """DistributedDataParallel."""


class ElasticModelParallel(ElasticStrategy, ModelParallelStrategy):
    """FSDP2 and tensor parallelism, as `configure_model` applies them: it is called in each entry, for a whole model.

    The tensor-parallel size stays, the data-parallel one follows the members.
    """

    @property
    def data_rank(self) -> DataRank:
        """Returns which part of a batch is this member's: the members of a tensor-parallel group share one."""
        return sharded_rank(self)

    def setup_environment(self) -> None:
        """Makes the process group and the mesh of the members."""
        if self.elastic is not None:
            fit_mesh(self, self.elastic.state)
        super().setup_environment()

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Returns the context in which `configure_model` is called."""
        with super().tensor_init_context(empty_init):
            if self.elastic is None:
                yield
            else:
                with self.elastic.configuring():
                    yield
