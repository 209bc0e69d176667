"""A Trainer whose fit goes on with whoever is there, in the same processes."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.call import _call_configure_model
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden

from elaunch.integrations.adapters import under_adapters
from elaunch.integrations.lightning import loggers, loops
from elaunch.integrations.lightning.configured import GivenModule, copied, put_back_values
from elaunch.integrations.lightning.data import DealtLoader
from elaunch.integrations.lightning.metrics import EpochMetrics, metrics_of
from elaunch.integrations.lightning.parts import agree_on_configs, agree_on_start, make_elastic, say_not_elastic
from elaunch.integrations.lightning.progress import FitProgress, add_up, past_metrics, put_back, put_back_metrics
from elaunch.integrations.lightning.strategies import ElasticDDP, ElasticModelParallel
from elaunch.workers.agent_client import has_agent
from elaunch.workers.random.rng import Generators, read_generators, set_generators
from elaunch.workers.reentry.encoding import describe_shards, local_part
from elaunch.workers.reentry.forms import elastic
from elaunch.workers.reentry.shares import load_shares, shares
from elaunch.workers.reentry.state import ElasticState
from elaunch.workers.state.codec import restore

ELASTIC: dict[type, type] = {DDPStrategy: ElasticDDP, ModelParallelStrategy: ElasticModelParallel}
"""By strategy of Lightning's, the one that it becomes."""

METRICS = "lightning.metrics"
"""Among the values of a commit: what was logged by past epochs and validations."""


class ElasticFit:
    """A Trainer's fit, from one entry to the next.

    Args:
        trainer: whose strategy is an `ElasticStrategy`.

    Attributes:
        trainer: the same.
        strategy: of the Trainer.
        restored: whether this entry has begun with the state of a commit.
        goes_on: whether the loops are to go on within an epoch, which they do as soon as it begins.
        positions: the steps that the loaders of the training data begin with.
        committed_steps: steps of optimizers at the last commit.
    """

    def __init__(self, trainer: LiveTrainer) -> None:
        self.trainer = trainer
        self.strategy: Any = trainer.strategy
        self.strategy.elastic = self  # type: ignore[attr-defined]
        self.restored = self.goes_on = False
        self.positions: list[int] = []
        self.committed_steps = 0
        self._state: ElasticState | None = None
        self._progress = FitProgress(self)
        self._metrics = EpochMetrics({}, False)
        self._sample_ids: list[int] = []
        self._saved: dict[str, int] = {}
        self._again: set[str] = set()
        self._is_set_up = False
        self._given: GivenModule | None = None
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generators: Generators | None = None
        self._modes: dict[str, bool] = {}
        self._forward: Any = None
        bar = trainer.progress_bar_callback
        self._shows_bar = bar is not None and getattr(bar, "is_enabled", False)
        loops.take_place(trainer, self)

    # -- an entry -----------------------------------------------------------------------------------------------

    def run(self, state: ElasticState, fit: Callable[..., None], model: pl.LightningModule, path: Any) -> None:
        """Runs a fit in one entry.

        Args:
            state: of the job.
            fit: Lightning's, which takes the path of the checkpoint to begin with.
            model: the module.
            path: that path; it is of no use once there was a commit.
        """
        trainer = self.trainer
        if self._is_set_up:  # a fit that had ended when somebody died, so that not all have
            self._leave(model)
        self._state, self._is_set_up = state, True
        self.restored = self.goes_on = False
        if state.entry == 1:
            self._forward, self._generators = vars(model).get("forward"), read_generators()
            changing = [*(one for one in model.parameters() if one.requires_grad), *model.buffers()]
            self._values = copied(changing) if not self._is_sharded else []
        elif state.step == 0:  # what was done before the first commit is done again, from the same beginning
            put_back_values(self._values)
            if self._generators is not None:
                set_generators(self._generators)
        self._modes = self._modes or {name: one.training for name, one in model.named_modules()}
        bar = trainer.progress_bar_callback
        if bar is not None and self._shows_bar:
            bar.enable()
        try:
            fit(path if state.step == 0 else None)
        except BaseException:
            self._leave(model)
            raise

    def _leave(self, model: pl.LightningModule) -> None:
        """Puts away what belongs to members who are gone: the fit was interrupted anywhere."""
        trainer = self.trainer
        self._is_set_up = False
        trainer.training = True
        epochs: Any = trainer.fit_loop
        for loop in (epochs, epochs.epoch_loop.val_loop):
            if loop._data_fetcher is not None:
                loop._data_fetcher.teardown()
                loop._data_fetcher = None
            loop._combined_loader = None
        for name, module in model.named_modules():
            module.training = self._modes.get(name, module.training)
        vars(model).pop("forward", None)  # Lightning puts another there for the time of a step
        if self._forward is not None:
            vars(model)["forward"] = self._forward
        for metric in metrics_of(model).values():
            metric.reset()
        model._current_fx_name = None
        model._metric_attributes = None  # metrics may be made anew, in `setup` or `configure_model`
        trainer._signal_connector.teardown()
        self._unconfigure()
        self.strategy.model = None
        self.strategy.loss = None
        self.strategy.weight = 1.0
        self._sample_ids = []
        _close_bar(trainer.progress_bar_callback)

    def end(self) -> None:
        """Leaves the Trainer as Lightning's: what comes after the fit is not elastic."""
        self.strategy.elastic = None
        loops.give_back(self.trainer)
        if self._is_sharded:
            self._shard_trained()
        self._given, self._values = None, []

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.strategy, ElasticModelParallel)

    @contextmanager
    def configuring(self) -> Iterator[None]:
        """Returns a context in which `configure_model` runs; what it does is undone when the fit is left."""
        self._given = GivenModule(self.trainer.lightning_module, self.state.step == 0)
        with self._given.configuring():
            yield

    def _unconfigure(self) -> None:
        """Has the module be whole again, and lets the optimizers of its shards go."""
        given, self._given = self._given, None
        if given is not None:
            given.put_back()
            self.strategy._reset_optimizers_and_schedulers()

    def _shard_trained(self) -> None:
        """Has the trained module and its optimizers be sharded over a group for what comes after the fit."""
        trainer, strategy = self.trainer, self.strategy
        trained = describe_shards(self._stateful())
        self._unconfigure()
        strategy.setup_environment()
        _call_configure_model(trainer)
        strategy.setup(trainer)
        objects = self._stateful()
        needed = shares(objects, trained.manifest)  # the members and their parts are those of the fit
        tensors = [share.wrap(tensor) for share, tensor in zip(needed, trained.tensors, strict=True)]
        restore(objects, trained.manifest, tensors, load=load_shares)
        strategy.teardown()

    def meet(self) -> None:
        """Has all members know what the first ones have begun with. All members call it."""
        strategy, used = self.strategy, self.trainer.loggers
        replicas = strategy.data_rank.size
        start, is_first = agree_on_start(self.state, strategy.start, replicas, loggers.versions(used))
        strategy.start = start
        if not is_first:
            loggers.take_over(used, start.logger_versions, strategy.is_global_zero)
            agree_on_configs(self.state, self.trainer.callbacks)  # type: ignore[attr-defined]

    def bind(self) -> None:
        """Brings the state of the last commit, now that there is a model with optimizers. All members call it."""
        trainer, strategy = self.trainer, self.strategy
        module = trainer.lightning_module
        self._metrics = EpochMetrics(metrics_of(module), strategy.is_global_zero)
        objects = {**self._stateful(), "trainer": self._progress, "metrics": self._metrics}
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ModelCheckpoint) and "file_exists" not in vars(callback):
                self._write_again(callback)
        state = self.state
        state.bind(constant=under_adapters(objects), **objects)
        self._again = {path for path, step in self._saved.items() if step >= state.step}
        if not self.restored:
            return
        put_back_metrics(trainer, state.values.get(METRICS, {}))
        epochs: Any = trainer.fit_loop
        if self.goes_on:
            trainer._logger_connector._first_loop_iter = True  # so that the next batch is not the first one
            trainer._logger_connector._current_fx = "training_step"
            if state.rank == 0:
                put_back(epochs.epoch_loop._results, self._progress.sums)
        if strategy.is_global_zero:
            loggers.forget_from(trainer.loggers, epochs.epoch_loop._batches_that_stepped)

    @contextmanager
    def keeping_state(self) -> Iterator[None]:
        """Returns a context in which hooks may make weights: those of the last commit are put back after it."""
        module = self.trainer.lightning_module
        keeps = self.restored and is_overridden("on_train_start", module)
        state = module.state_dict(keep_vars=True).values() if keeps else ()
        values = copied(local_part(one) for one in state if isinstance(one, torch.Tensor))
        yield
        put_back_values(values)

    def _stateful(self) -> dict[str, Any]:
        """Returns what is trained, by name."""
        trainer = self.trainer
        objects: dict[str, Any] = {"model": trainer.lightning_module}
        objects |= {f"optimizer{place}": one for place, one in enumerate(trainer.optimizers)}
        objects |= {f"scheduler{place}": one.scheduler for place, one in enumerate(trainer.lr_scheduler_configs)}
        return objects

    @property
    def state(self) -> ElasticState:
        """Returns the state of the job."""
        assert self._state is not None
        return self._state

    # -- a step -------------------------------------------------------------------------------------------------

    def weight(self) -> float:
        """Returns how much the mean over this member's batch counts."""
        epochs: Any = self.trainer.fit_loop
        loader: DealtLoader = epochs.loaders[0]
        return loader.share.weight if loader.share is not None else 1.0

    def note_batch(self) -> None:
        """Takes down the samples of a batch."""
        epochs: Any = self.trainer.fit_loop
        share = epochs.loaders[0].share
        self._sample_ids += share.step_ids if share is not None else ()

    def commit(self) -> None:
        """Makes the present state the one that counts. All members call it."""
        trainer, strategy, state = self.trainer, self.strategy, self.state
        results = trainer.fit_loop.epoch_loop._results
        told = trainer._logger_connector.should_update_logs or not trainer.loggers
        loss, strategy.loss = strategy.loss, None
        sums, total = add_up(results, loss if told else None, strategy.root_device, state.size)
        self._progress.sums = sums
        self._metrics.add_up(strategy.root_device)
        self.committed_steps = trainer.global_step
        state.values[METRICS] = past_metrics(trainer)
        ids, self._sample_ids = self._sample_ids, []
        state.commit(loss=total.item() / state.size if total is not None else None, sample_ids=ids)
        self._values = []
        if self._given is not None:
            self._given.forget_values()

    # -- checkpoints --------------------------------------------------------------------------------------------

    def saves(self, path: str) -> None:
        """Takes down that a checkpoint is written, in a step that may have to be done again."""
        if path in self._again and self.strategy.is_global_zero and os.path.isdir(path):
            shutil.rmtree(path)  # more members may have left parts in it than there are now
        self._saved[path] = self.state.step
        self._again.discard(path)

    def _write_again(self, callback: ModelCheckpoint) -> None:
        """Has a file of a step that is done again written over: it does not count as one of another run."""

        def file_exists(filepath: Any, trainer: pl.Trainer) -> bool:
            is_there = trainer.is_global_zero and str(filepath) not in self._again and callback._fs.exists(filepath)
            return bool(trainer.strategy.reduce_boolean_decision(is_there, all=False))

        callback.file_exists = file_exists  # type: ignore[method-assign]


class LiveTrainer(pl.Trainer):
    """Lightning's Trainer. Under elaunch, its `fit` goes on in the same processes when members die or join.

    `fit` enters again what it does before training: `setup`, `configure_model`, `configure_optimizers`, `on_fit_start`
    and `on_train_start`, as when Lightning resumes from a checkpoint; the state is that of the last commit, which is
    the last step of the optimizers. The batches of all members together are those of the first members.
    """

    _elastic: ElasticFit | None = None

    def fit(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Trains, as Lightning does. Once in a process it does so with members that may change."""
        if has_agent() and self._elastic is None:
            if not make_elastic(self.strategy, ELASTIC):
                say_not_elastic(self.strategy)
            elif _Fits.begun:
                print(
                    f"[elaunch] worker {os.environ['ELAUNCH_WORKER']}: only the first fit of a process is elastic; in "
                    "this one, all workers are started again when one dies",
                    file=sys.stderr,
                    flush=True,
                )
            else:
                _Fits.begun = True
                self._elastic = ElasticFit(self)
        super().fit(model, *args, **kwargs)

    def _fit_impl(
        self,
        model: pl.LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: Any = None,
        weights_only: bool | None = None,
    ) -> None:
        def fit(path: Any) -> None:
            super(LiveTrainer, self)._fit_impl(
                model, train_dataloaders, val_dataloaders, datamodule, path, weights_only
            )

        fits = self._elastic
        if fits is None:
            fit(ckpt_path)
            return
        elastic(lambda state: fits.run(state, fit, model, ckpt_path))()
        self._elastic = None
        fits.end()

    def _run_stage(self) -> Any:
        if self._elastic is not None and self.state.fn == TrainerFn.FITTING:
            self._elastic.bind()
        return super()._run_stage()

    def _run_sanity_check(self) -> None:
        if self._elastic is None or not self._elastic.restored:
            super()._run_sanity_check()

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        """Writes a checkpoint, as Lightning does."""
        if self._elastic is not None:
            self._elastic.saves(str(filepath))
        super().save_checkpoint(filepath, weights_only, storage_options)


class _Fits:
    """Whether a fit of this process has been elastic."""

    begun = False


def _close_bar(bar: Any) -> None:
    """Ends the lines of a progress bar, which begins new ones."""
    for name in ("_train_progress_bar", "_val_progress_bar"):
        if getattr(bar, name, None) is not None:
            getattr(bar, name).close()
            setattr(bar, name, None)
    if hasattr(bar, "_stop_progress"):
        bar._stop_progress()
