"""The Trainer's loops: they commit after each step and each epoch, and go on where the last commit was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loops.fit_loop import RestartStage, _FitLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop

from elaunch.integrations.lightning.data import DealtLoader

if TYPE_CHECKING:
    from elaunch.integrations.lightning.trainer import ElasticFit


class EpochLoop(_TrainingEpochLoop):
    """Lightning's loop over the batches of an epoch."""

    elastic: ElasticFit

    def reset(self) -> None:
        """Begins an epoch, or goes on within one."""
        if self.elastic.goes_on:
            self.elastic.goes_on = False
            return
        super().reset()

    def advance(self, data_fetcher: Any) -> None:
        """Does a batch."""
        try:
            super().advance(data_fetcher)
        finally:
            self.elastic.strategy.weight = 1.0

    def on_advance_end(self, data_fetcher: Any) -> None:
        """Validates, if that is due, and commits."""
        super().on_advance_end(data_fetcher)
        self.elastic.note_batch()
        # The last step of an epoch commits with the end of the epoch, which is one with it for whoever begins there.
        if self._has_stepped() and not self.done:
            self.elastic.commit()

    def _has_stepped(self) -> bool:
        if self.trainer.lightning_module.automatic_optimization:
            return not self._should_accumulate()
        return self.global_step != self.elastic.committed_steps


class FitLoop(_FitLoop):
    """Lightning's loop over the epochs."""

    elastic: ElasticFit

    @property
    def loaders(self) -> list[DealtLoader]:
        """Returns the loaders of the training data."""
        return list(self._combined_loader.flattened) if self._combined_loader is not None else []

    def setup_data(self) -> None:
        """Makes the loaders, from the position of the last commit on."""
        super().setup_data()
        positions, self.elastic.positions = self.elastic.positions, []
        for loader, position in zip(self.loaders, positions, strict=bool(positions)):
            loader.dealer.start = position

    def reset(self) -> None:
        """Begins a run, or goes on with one."""
        if self.elastic.restored:
            torch.set_grad_enabled(True)
        else:
            super().reset()

    def on_run_start(self) -> None:
        """Begins a run; what it goes on from stays, as Lightning's own examples make weights in `on_train_start`."""
        with self.elastic.keeping_state():
            super().on_run_start()

    def on_advance_start(self) -> None:
        """Begins an epoch, or goes on within one."""
        if not self.elastic.goes_on:
            super().on_advance_start()
            return
        self._restart_stage = RestartStage.RESTARTED_MID_EPOCH
        super().on_advance_start()
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, ProgressBar):
                callback.on_train_epoch_start(self.trainer, self.trainer.lightning_module)

    def on_advance_end(self) -> None:
        """Ends an epoch, and commits."""
        super().on_advance_end()
        self.elastic.commit()


def take_place(trainer: Any, elastic: ElasticFit) -> None:
    """Has a Trainer run these loops in place of Lightning's, which they only add methods to."""
    fit_loop: Any = trainer.fit_loop
    fit_loop.__class__ = FitLoop
    fit_loop.epoch_loop.__class__ = EpochLoop
    fit_loop.elastic = fit_loop.epoch_loop.elastic = elastic


def give_back(trainer: Any) -> None:
    """Has a Trainer run Lightning's loops again."""
    trainer.fit_loop.__class__ = _FitLoop
    trainer.fit_loop.epoch_loop.__class__ = _TrainingEpochLoop
