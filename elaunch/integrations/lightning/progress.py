"""What of a Trainer's state is neither a module nor an optimizer nor a scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

if TYPE_CHECKING:
    from elaunch.integrations.lightning.trainer import ElasticFit

# What a ModelCheckpoint goes by; its own state_dict lacks some of it.
OF_CHECKPOINTS = (
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
    "current_score",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "best_model_score",
    "best_model_path",
    "last_model_path",
)

Metrics = dict[str, list[Any]]
"""By name, values and their types, of metrics of past steps."""


class FitProgress:
    """Where the loops are, what callbacks keep, and sums that a logger will get at the end of the epoch.

    Args:
        elastic: the Trainer's fit.

    Attributes:
        sums: over all members, by place, of `accumulators`, as of the last commit.
    """

    def __init__(self, elastic: ElasticFit) -> None:
        self._elastic = elastic
        self._trainer: Any = elastic.trainer
        self.sums: dict[str, Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state; no member waits for another in it."""
        trainer = self._trainer
        loop = trainer.fit_loop
        return {
            "loops": _without_loaders(loop.state_dict()),
            "positions": [loader.position for loader in loop.loaders],
            "committed_steps": self._elastic.committed_steps,
            "callbacks": {one.state_key: one.state_dict() for one in trainer.callbacks if one.state_dict()},
            "checkpoints": [{name: getattr(one, name, None) for name in OF_CHECKPOINTS} for one in self._checkpoints()],
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "precision": trainer.precision_plugin.state_dict(),
            "should_stop": bool(trainer.should_stop),
            "sums": dict(self.sums),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes the state of the last commit; the loops go on from there."""
        trainer, elastic = self._trainer, self._elastic
        loop = trainer.fit_loop
        loop.load_state_dict(state["loops"])
        for one in (loop, loop.epoch_loop, loop.epoch_loop.val_loop):
            one._restarting = False  # theirs is the way back from a file, which repeats what belongs to a batch's end
        progress = loop.epoch_progress.current
        elastic.restored = True
        elastic.goes_on = progress.started > progress.processed
        elastic.positions = state["positions"] if elastic.goes_on else []
        elastic.committed_steps = state["committed_steps"]
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
        for checkpoint, values in zip(self._checkpoints(), state["checkpoints"], strict=True):
            for name, value in values.items():
                if hasattr(checkpoint, name):
                    setattr(checkpoint, name, value)
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        trainer.should_stop = state["should_stop"]
        self.sums = state["sums"]

    def _checkpoints(self) -> list[ModelCheckpoint]:
        return [one for one in self._trainer.callbacks if isinstance(one, ModelCheckpoint)]


def _without_loaders(loops: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of loops without that of loaders of the script's own, which are not iterated by us."""
    return {
        name: {key: value for key, value in state.items() if key != "combined_loader"} if type(state) is dict else state
        for name, state in loops.items()
    }


def accumulators(results: Any) -> dict[str, Any]:
    """Returns what logs of this epoch add up, by name: those that are synchronized over the members at its end."""
    return {
        key: metric
        for key, metric in sorted(results.items())
        if metric.is_tensor
        and metric.meta.on_epoch
        and metric.meta.sync.should
        and not metric.meta.sync.rank_zero_only
        and (metric.meta.is_mean_reduction or metric.meta.is_sum_reduction)
    }


def add_up(results: Any, loss: Tensor | None, device: torch.device, size: int) -> tuple[dict[str, Tensor], Any]:
    """Returns the accumulators' sums over all members, and that of a loss. All members call it.

    Args:
        results: of the training epoch.
        loss: of this member, in float64, or None where nobody asks for it.
        device: where members compute.
        size: their number.
    """
    found = accumulators(results)
    values = [loss] if loss is not None else []
    for metric in found.values():
        values.append(metric.value)
        values.append(metric.cumulated_batch_size if metric.meta.is_mean_reduction else torch.zeros(()))
    if not values:
        return {}, None
    total = torch.stack([value.detach().to(device, torch.float64).reshape(()) for value in values])
    if size > 1:
        dist.all_reduce(total)
    sums = total[1:] if loss is not None else total
    return {key: sums[2 * place : 2 * place + 2].clone() for place, key in enumerate(found)}, (
        total[0] if loss is not None else None
    )


def put_back(results: Any, sums: dict[str, Tensor]) -> None:
    """Gives one member what all have added up in this epoch."""
    for key, metric in accumulators(results).items():
        if key in sums:
            value, count = sums[key]
            metric.value = metric.value + value.to(metric.value)
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = metric.cumulated_batch_size + count.to(metric.cumulated_batch_size)
            metric._update_count = max(1, metric._update_count)


def past_metrics(trainer: Any) -> dict[str, Metrics]:
    """Returns what was logged by past epochs and validations, for callbacks, loggers and the progress bar, as JSON."""
    connector = trainer._logger_connector
    of_steps = set()
    for metric in trainer.fit_loop.epoch_loop._results.values():
        if metric.meta.on_step:
            of_steps.add(metric.meta.forked_name(True))
    found: dict[str, Metrics] = {}
    for kind in ("callback", "logged", "progress_bar"):
        known = getattr(connector, f"_{kind}_metrics")
        found[kind] = {
            name: [float(value), str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else ""]
            for name, value in known.items()
            if name not in of_steps
        }
    return found


def put_back_metrics(trainer: Any, found: dict[str, Metrics]) -> None:
    """Has callbacks and the progress bar know again what was logged by past epochs and validations."""
    connector = trainer._logger_connector
    for kind, metrics in found.items():
        getattr(connector, f"_{kind}_metrics").update(
            {
                name: torch.tensor(value, dtype=getattr(torch, of)) if of else value
                for name, (value, of) in metrics.items()
            }
        )
