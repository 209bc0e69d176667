"""Lightning Fabric whose training function goes on with whoever is there, in the same processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import lightning.fabric
import torch
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy, Strategy  # type: ignore[attr-defined]
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.fabric.wrappers import _FabricDataLoader, _unwrap_compiled
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from elaunch.errors import UsageError
from elaunch.integrations.lightning import loggers
from elaunch.integrations.lightning.data import DealtLoader, dealt
from elaunch.integrations.lightning.metrics import EpochMetrics, metrics_of
from elaunch.integrations.lightning.parts import (
    DataRank,
    FitStart,
    agree_on_start,
    fit_mesh,
    make_elastic,
    sharded_rank,
    weighted,
    why_not_elastic,
)
from elaunch.integrations.passes import Dealt, FunctionEntry, FunctionLoop, entered_again

START = "lightning.fabric"
"""Among what a process keeps from one entry to the next: what the first members have begun with."""


def elastic(function: Callable[..., Any] | None = None, *, every: int = 1) -> Any:
    """Has a training function entered by every worker, and entered again when the members of its job change.

    The function makes its `Fabric` (of this module) itself. Under torchrun, or in a plain process, it is called.

    Args:
        function: the function.
        every: commits that count, as for `elaunch.elastic`.
    """
    return entered_again(function, every, lambda: None)


class ElasticFabricStrategy(Strategy):
    """What is put before a strategy of Fabric's: the members that there are have the global batches of the first ones.

    Attributes:
        fabric: to which it belongs; None: it is Lightning's.
    """

    fabric: LiveFabric | None = None

    @property
    def data_rank(self) -> DataRank:
        """Returns which part of a batch is this member's."""
        strategy: Any = self
        return DataRank(strategy.global_rank, strategy.world_size)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Returns what Fabric makes samplers with; what they give is dealt out anew."""
        if self.fabric is None:
            rank, size = self.data_rank
            return {"num_replicas": size, "rank": rank}
        return {"num_replicas": self.fabric.start.replicas, "rank": 0}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Returns a loader that deals out global batches, where that can be."""
        return dataloader if self.fabric is None else self.fabric.dealt(dataloader, False)

    @property
    def weight(self) -> float:
        """Returns how much the mean over this member's present batch counts."""
        return self.fabric.loop.weight if self.fabric is not None else 1.0

    def setup_environment(self) -> None:
        """Makes the process group of the members, who hear from the first one where the job is."""
        super().setup_environment()
        if self.fabric is not None:
            self.fabric.meet()

    def backward(self, tensor: torch.Tensor, module: Any, *args: Any, **kwargs: Any) -> None:
        """Runs backward from a loss, weighted."""
        super().backward(self.fabric.loop.weigh(tensor) if self.fabric is not None else tensor, module, *args, **kwargs)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces a tensor over the members; within a batch, a mean is one over the samples of all members."""
        return super().all_reduce(weighted(self, tensor, reduce_op), group, reduce_op)  # type: ignore[safe-super]


class ElasticFabricDDP(ElasticFabricStrategy, DDPStrategy):
    """DistributedDataParallel."""


class ElasticFabricModelParallel(ElasticFabricStrategy, ModelParallelStrategy):
    """FSDP2 and tensor parallelism; the tensor-parallel size stays, the data-parallel one follows the members."""

    @property
    def data_rank(self) -> DataRank:
        """Returns which part of a batch is this member's: the members of a tensor-parallel group share one."""
        return sharded_rank(self)

    def setup_environment(self) -> None:
        """Makes the process group and the mesh of the members."""
        if self.fabric is not None:
            fit_mesh(self, self.fabric.loop.entry.state)
        super().setup_environment()


ELASTIC: dict[type, type] = {DDPStrategy: ElasticFabricDDP, ModelParallelStrategy: ElasticFabricModelParallel}
"""By strategy of Fabric's, the one that it becomes."""


class LiveFabric(lightning.fabric.Fabric):
    """Lightning's Fabric. In an `elastic` function its training survives changes of members.

    A loader that is iterated over while a model is in training mode, and gradients are computed, is one of training
    data. The batches of all members together are those of the first members, and each counts as committed
    when the next one is asked for after an update.

    Args:
        kwargs: as for Lightning's.
    """

    def __init__(self, **kwargs: Any) -> None:
        entry = FunctionEntry.current
        self._loop = FunctionLoop(entry, self._objects, self._before_commit) if entry is not None else None
        self._others: dict[str, Any] = {}
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[Any] = []
        self._wrappers: list[Any] = []
        self._metrics: dict[str, EpochMetrics] = {}
        self._logs_steps = False
        self._last_row: int | None = None  # in the tables, when this entry began to log
        super().__init__(**kwargs)

    def _prepare_run_method(self) -> None:
        # Lightning calls this when the strategy is there, and before anything is launched.
        super()._prepare_run_method()
        if self._loop is None:
            return
        if not make_elastic(self._strategy, ELASTIC):
            name, instead = why_not_elastic(self._strategy)
            raise UsageError(f"in an elastic function Fabric does not take {name}; {instead}")
        strategy: Any = self._strategy
        strategy.fabric = self

    @property
    def loop(self) -> FunctionLoop:
        """Returns the loops of the function."""
        assert self._loop is not None
        return self._loop

    @property
    def start(self) -> FitStart:
        """Returns what the first members have begun with."""
        start: FitStart = self.loop.entry.kept[START]
        return start

    def meet(self) -> None:
        """Has all members know what the first ones have begun with. All members call it."""
        entry = self.loop.entry
        known = entry.kept.get(START)
        replicas = self._elastic_strategy.data_rank.size
        start, is_first = agree_on_start(entry.state, known, replicas, loggers.versions(self.loggers))
        entry.kept[START] = start
        if not is_first:
            loggers.take_over(self.loggers, start.logger_versions, self.is_global_zero)

    # -- what the function calls ----------------------------------------------------------------------------------

    def epochs(self, *numbers: int, **objects: Any) -> Iterator[int]:
        """Yields the numbers of the epochs that are left; call it after everything is set up.

        Args:
            numbers: as for `range`.
            objects: what else makes up the state of training, by name: schedulers, whatever has `state_dict` and
                `load_state_dict`, and dicts of numbers and texts, which are changed in place.
        """
        if self._loop is None:
            yield from range(*numbers)
            return
        if objects and self._loop.entry.reentry.bound:
            raise UsageError("give what makes up the state to the first fabric.epochs(), before any training")
        for name, one in objects.items():
            if isinstance(one, Metric | MetricCollection):
                self._metrics[name] = EpochMetrics(metrics_of(one), self.is_global_zero)
            self._others[name] = self._metrics.get(name, _KeptDict(one) if type(one) is dict else one)
        yield from self._loop.epochs(range(*numbers))

    def enumerate(self, batches: Iterable[Any], start: int = 0) -> Iterator[tuple[int, Any]]:
        """Yields what is iterated over, with its number, which for training data is that in the whole pass."""
        if self._loop is not None:
            self._loop.batch = None
        for count, batch in enumerate(batches):
            number = self._loop.batch if self._loop is not None else None
            yield start + (count if number is None else number), batch
            if self._loop is not None:
                self._loop.batch = None

    def setup(self, module: torch.nn.Module, *optimizers: Optimizer, scheduler: Any = None, **kwargs: Any) -> Any:
        """Sets up a model and its optimizers, as Fabric does."""
        self._note(module, *optimizers)
        if self._loop is not None and scheduler is not None:
            self._others[f"scheduler{len(self._models)}"] = scheduler
        found = super().setup(module, *optimizers, scheduler=scheduler, **kwargs)
        self._take_sharded(found[0] if optimizers else found)
        self._wrappers += found[1 : 1 + len(optimizers)] if optimizers else ()
        return found

    def setup_module(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Sets up a model, as Fabric does."""
        self._note(module)
        found = super().setup_module(module, *args, **kwargs)
        self._take_sharded(found)
        return found

    def setup_optimizers(self, *optimizers: Optimizer) -> Any:
        """Sets up optimizers, as Fabric does."""
        self._note(None, *optimizers)
        found = super().setup_optimizers(*optimizers)
        self._wrappers += found if isinstance(found, tuple) else [found]
        return found

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on one worker: in an elastic function that is the first one, for those of a node change."""
        if self._loop is None:
            super().print(*args, **kwargs)
        elif self.is_global_zero:
            print(*args, **kwargs)

    def log_dict(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Logs metrics, as Fabric does."""
        if self._loop is not None and step is not None and self.is_global_zero:
            self._logs_steps = True
            if self._last_row is None:
                self._last_row = loggers.last_step(self.loggers)
            if step <= self._last_row:  # it may have been logged in an update that was lost
                loggers.forget_row(self.loggers, step, metrics)
        super().log_dict(metrics, step)

    # -- its parts ------------------------------------------------------------------------------------------------

    @property
    def trains(self) -> bool:
        """Returns whether a loader that is iterated over now has training data."""
        return any(one.training for one in self._models) and torch.is_grad_enabled()

    def dealt(self, loader: Any, trains: bool) -> Any:
        """Returns a loader that deals out global batches; for other than training the same one if it cannot."""
        rank, size = self._elastic_strategy.data_rank
        return dealt(loader, self.start.replicas, rank, size, trains)

    @property
    def _elastic_strategy(self) -> Any:
        return self._strategy

    def _setup_dataloader(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        found: Any = super()._setup_dataloader(dataloader, *args, **kwargs)
        if self._loop is not None:
            found.__class__ = LiveFabricLoader
            found.fabric, found.place = self, self._loop.add_loader()
        return found

    def _note(self, module: torch.nn.Module | None, *optimizers: Any) -> None:
        if self._loop is None:
            return
        if self._loop.entry.reentry.bound:
            raise UsageError("set up all models and optimizers before the first epoch: they make up the state")
        self._models += [module] if module is not None else []
        self._optimizers += optimizers

    def _take_sharded(self, wrapper: Any) -> None:
        """Has the state be that of the model as it was sharded, which need not be the object that was set up."""
        if isinstance(self._strategy, ModelParallelStrategy) and self._loop is not None:
            self._models[-1], _ = _unwrap_compiled(wrapper._forward_module)

    def _objects(self) -> tuple[dict[str, Any], dict[str, Any]]:
        objects: dict[str, Any] = {f"model{place}": one for place, one in enumerate(self._models)}
        objects |= {f"optimizer{place}": one for place, one in enumerate(self._optimizers)}
        if self._precision.state_dict():
            objects["precision"] = self._precision
        known = [getattr(one, "optimizer", None) for one in self._others.values()]
        for one in (*self._optimizers, *self._wrappers):
            if hasattr(one.step, "_wrapped_by_lr_sched") and not any(one is other for other in known):
                raise UsageError(
                    "an optimizer has a scheduler that is not part of the state: give it to "
                    "fabric.epochs(..., scheduler=scheduler), or to fabric.setup"
                )
        return objects | self._others, {}

    def _before_commit(self) -> None:
        for metrics in self._metrics.values():
            metrics.add_up(self.device)
        if self._logs_steps:
            loggers.save(self.loggers)


class LiveFabricLoader(_FabricDataLoader):
    """A loader that Fabric has set up, with global batches that are dealt out among the members.

    Attributes:
        fabric: which has set it up.
        place: among the loaders of the function.
    """

    fabric: LiveFabric
    place: int

    def __iter__(self) -> Any:
        """Returns what is left of this pass, for training, else a pass."""
        if not self.fabric.trains:
            return super().__iter__()
        self.fabric.loop.bind()
        return self.fabric.loop.train(self.place, self._deal)

    def _deal(self, passed: int, start: int) -> Dealt:
        loader: DealtLoader = self.fabric.dealt(self._dataloader, True)
        self._num_iter_calls = passed + 1
        _set_sampler_epoch(loader, passed)
        loader.dealer.start, loader.dealer.epoch = start, self.fabric.loop.values["epoch"] or 0
        for content in loader:
            assert loader.share is not None
            on_device = content if self._device is None else move_data_to_device(content, self._device)
            yield loader.share.weight, loader.share.step_ids, on_device


class _KeptDict:
    """A dict of a script, as an object with a state."""

    def __init__(self, content: dict[str, Any]) -> None:
        self._content = content

    def state_dict(self) -> dict[str, Any]:
        """Returns what is in it."""
        return dict(self._content)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Has the dict hold what it held."""
        self._content.clear()
        self._content.update(state)
