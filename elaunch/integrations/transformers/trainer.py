"""Transformers' Trainer, whose `train()` is left and entered again when the members change."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import transformers
from accelerate.utils import extract_model_from_parallel
from transformers.trainer_callback import ExportableState, TrainerState

from elaunch.errors import UsageError
from elaunch.integrations.accelerate import (
    WORLD_AT_START,
    GlobalBatches,
    agreed,
    dealt_out,
    forget_group,
)
from elaunch.integrations.adapters import under_adapters
from elaunch.integrations.transformers.outside import Outside
from elaunch.integrations.transformers.sharded import UnshardedModel, fsdp_version, local_parts, take_local_parts
from elaunch.workers.agent_client import has_agent
from elaunch.workers.reentry.run import Reentry
from elaunch.workers.reentry.state import ElasticState

IN_MEMORY = "elaunch: the last commit, in memory"
"""Stands for a checkpoint where transformers would read one."""

SUMS = {
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
}
"""What a Trainer counts beside its state; older versions have not all of it."""

TRL_COUNTS = ("_metrics", "_total_train_tokens")
"""What a trainer of TRL counts for its next log."""

TRL_GENERATING = ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")
"""Trainers of TRL that make their own batches, from what the model generates."""

SHARDED_AT_LOAD = "is_distributed_loading_by_transformers"
"""What newer versions say of a model that `from_pretrained()` has sharded."""

UNKNOWN_ORDERS = ("group_by_length", "batch_rebalance")
"""Ways of sampling whose order depends on more than a seed and the pass."""

Kind = TypeVar("Kind", bound=type)

if has_agent():
    Outside.begin()


@dataclasses.dataclass
class _Training:
    """One entry of `train()`.

    Attributes:
        reentry: of the job.
        state: of this entry.
        values: of the last commit; before the first one `world`, `seed`, `began_t` (Unix time) and `accumulation`.
        epoch: the pass that is under way.
        position: updates of it that are over.
        step: of the last commit, as transformers counts.
        loss: over the batches since, on this member.
        batches: of this member.
        weights: of its batches in the update that is under way.
        ids: samples of all members since the last commit.
    """

    reentry: Reentry
    state: ElasticState
    values: dict[str, Any]
    epoch: int = 0
    position: int = 0
    step: int = 0
    loss: Any = None
    batches: GlobalBatches | None = None
    weights: list[float] = dataclasses.field(default_factory=list)
    ids: list[int] = dataclasses.field(default_factory=list)

    @property
    def kept(self) -> dict[str, Any] | None:
        """Returns what the Trainer kept in the last commit; None before the first."""
        return self.values.get("trainer")


class Trainer(transformers.Trainer):  # type: ignore[misc]
    """Transformers' Trainer. Under elaunch, its training survives changes of members.

    The batch of an update stays as large as at the start: fewer members have more batches each, none larger than
    `per_device_train_batch_size`.
    """

    model: Any
    optimizer: Any
    current_gradient_accumulation_steps: Any
    _training: _Training | None = None
    _began_as_first: bool | None = None
    _history: tuple[int, str] | None = None
    _unsharded: UnshardedModel | None = None
    _trained_parts: dict[str, torch.Tensor] | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Trains; see transformers.

        Raises:
            UsageError: the training cannot be dealt out anew, or this process has trained under elaunch before.
        """
        own = super().train
        if not has_agent():
            return own(resume_from_checkpoint, trial, ignore_keys_for_eval, **kwargs)
        if not Outside.alone:
            raise UsageError("under elaunch a process calls Trainer.train() once: this is the second call")
        self._check_elastic()
        self._unsharded = UnshardedModel(self.model) if fsdp_version(self.args) else None
        reentry = Reentry(1)
        self._given = self._snapshot()
        self._accumulation = self.args.gradient_accumulation_steps
        Outside.alone = False
        result = reentry.run(
            lambda state: self._enter(
                reentry,
                state,
                lambda kept: own(None if kept else resume_from_checkpoint, trial, ignore_keys_for_eval, **kwargs),
            )
        )
        self.args.gradient_accumulation_steps = self._accumulation
        self._form_group()  # as under torchrun, for what comes after the training
        if self._trained_parts is not None:
            self._shard_trained()
        return result

    def _check_elastic(self) -> None:
        for name, found in (
            ("FSDP 1 (FSDP 2: fsdp_config={'version': 2})", fsdp_version(self.args) == 1),
            ("fsdp_config={'xla': True}", self.is_fsdp_xla_enabled),
            ("a model that from_pretrained() has sharded", getattr(self, SHARDED_AT_LOAD, False)),
            ("parallelism_config", self.args.parallelism_config is not None),
            ("deepspeed", self.is_deepspeed_enabled),
            ("auto_find_batch_size", self.args.auto_find_batch_size),
            *(
                (f"train_sampling_strategy={name!r}", self.args.train_sampling_strategy == name)
                for name in UNKNOWN_ORDERS
            ),
            ("average_tokens_across_devices=False", not self.args.average_tokens_across_devices),
        ):
            if found:
                raise UsageError(f"elaunch.integrations.transformers.Trainer does not go with {name} yet: leave it out")

    def _enter(self, reentry: Reentry, state: ElasticState, train: Callable[[bool], Any]) -> Any:
        """Trains with the members of now, from the last commit."""
        own = {"world": WORLD_AT_START, "seed": self.args.data_seed or self.args.seed, "began_t": time.time()}
        values = agreed(reentry, own)
        values.setdefault("accumulation", self._accumulation)
        self._training = training = _Training(reentry, state, values)
        self.args.gradient_accumulation_steps = self._accumulation
        self._form_group()
        if training.kept is None:
            self._go_back_to(self._given)
        ended = False
        try:
            result = train(training.kept is not None)
            ended = True
            return result
        finally:
            self._training = None
            self._leave_group(ended)

    # -- the process group, and what hangs on it ----------------------------------------------------------------

    def _form_group(self) -> None:
        forget_group()
        self.args.__dict__.pop("_setup_devices", None)
        self.args._setup_devices  # noqa: B018 (forms the group)
        self.create_accelerator_and_postprocess()

    def _leave_group(self, ended: bool) -> None:
        """Lets go of everything that a group hangs on, and, unless training has ended, of the optimizer made for it."""
        self.model = extract_model_from_parallel(self.model, keep_fp32_wrapper=False)
        if self._unsharded is not None:
            self._trained_parts = local_parts(self.model) if ended else None
            self.model = self._unsharded.make()
        self.model_wrapped = self.callback_handler.model = self.model
        self.optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if self._given["optimizer"] is None and not (ended and self._unsharded is None):
            self.optimizer = None
        if self.neftune_noise_alpha is not None and hasattr(self, "neftune_hook_handle"):
            self.neftune_hook_handle.remove()
        self.callback_handler.train_dataloader = None
        self.accelerator.free_memory()
        for parameter in self.model.parameters():
            parameter.grad = None

    def _shard_trained(self) -> None:
        """Has the trained model be sharded over the group that was formed after the training."""
        assert self._trained_parts is not None
        self.create_optimizer()  # accelerate prepares both together
        self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.model_wrapped = self.callback_handler.model = self.model
        take_local_parts(self.model, self._trained_parts)
        self._trained_parts = None

    def _snapshot(self) -> dict[str, Any]:
        """Returns what the training begins with: an update that did not commit must leave nothing of it behind."""
        return {
            "model": {
                name: one.detach().to("cpu", copy=True)
                for name, one in self.model.state_dict().items()
                if isinstance(one, torch.Tensor)
            }
            if self.model is not None
            else {},
            "optimizer": copy.deepcopy(self.optimizer.state_dict()) if self.optimizer is not None else None,
            "lr_scheduler": copy.deepcopy(self.lr_scheduler.state_dict()) if self.lr_scheduler is not None else None,
            "counts": self._trl_counts(),
        }

    def _go_back_to(self, given: dict[str, Any]) -> None:
        if given["model"]:
            self.model.load_state_dict(given["model"], strict=False)
        for name in ("optimizer", "lr_scheduler"):
            if given[name] is not None:
                getattr(self, name).load_state_dict(copy.deepcopy(given[name]))
        self._take_trl_counts(given["counts"])

    def _trl_counts(self) -> dict[str, Any]:
        return {name: copy.deepcopy(getattr(self, name)) for name in TRL_COUNTS if hasattr(self, name)}

    def _take_trl_counts(self, counts: dict[str, Any]) -> None:
        for name, value in counts.items():
            found = getattr(self, name)
            if not isinstance(found, dict):
                setattr(self, name, value)
                continue
            for mode, lists in value.items():  # by metric, in training and in evaluation
                found[mode].clear()
                found[mode].update(copy.deepcopy(lists))

    # -- what transformers calls --------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """Returns the loader of this member's batches."""
        loader = super().get_train_dataloader()
        training = self._training
        if training is None:
            return loader
        world, accumulation = training.values["world"], training.values["accumulation"]
        made, batches = dealt_out(
            loader,
            lambda whole: GlobalBatches(
                whole,
                world,
                accumulation,
                self.args.process_index,
                self.args.world_size,
                even=self.accelerator.even_batches,
                cut=True,
            ),
            loader.device,
            training.values["seed"],
        )
        training.batches = batches
        self.args.gradient_accumulation_steps = batches.n_batches()
        return made

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the number of samples of an update over all members."""
        training = self._training
        if training is None:
            return int(super().get_total_train_batch_size(args))
        return int(self._train_batch_size * training.values["accumulation"] * training.values["world"])

    def _init_training_state(self, max_steps: int, num_update_steps_per_epoch: int, *args: Any) -> tuple[int, int]:
        found = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args)
        training = self._training
        if training is None:
            return tuple(found)
        if training.kept is not None:
            self._take_state(training.kept["state"])
            self._take_trl_counts(training.kept["counts"])
            self.state.init_training_references(self, max_steps, args[0], args[2] if len(args) > 2 else None)
            done = self.state.global_step
            n_updates = training.kept["update"]
            epoch = training.kept["epoch"]
            training.step, training.position = done, n_updates
            return epoch, n_updates * self.args.gradient_accumulation_steps
        training.step = self.state.global_step
        training.position = found[1] // self.args.gradient_accumulation_steps
        return tuple(found)

    def _prepare_for_training(self, *args: Any) -> Any:
        prepared = super()._prepare_for_training(*args)
        training = self._training
        if training is not None:
            objects = {
                "model": self.accelerator.unwrap_model(self.model),
                "optimizer": self.optimizer.optimizer,
                "scheduler": getattr(self.lr_scheduler, "scheduler", self.lr_scheduler),
            }
            if self.accelerator.scaler is not None:
                objects["scaler"] = self.accelerator.scaler
            training.state.bind(constant=under_adapters(objects), **objects)
            training.state.values = dict(training.values)
            self._begin()
        return prepared

    def _begin(self) -> None:
        """Has what transformers sets before the first update be as at the last commit.

        Callbacks that have seen the training begin do not see it again, unless this worker has become the first.
        """
        handler, training = self.callback_handler, self._training
        assert training is not None
        kept = training.kept
        first = bool(self.is_world_process_zero())
        begin = type(handler).on_train_begin
        again = self._began_as_first is not None and (self._began_as_first or not first)

        def on_train_begin(args: Any, state: Any, control: Any) -> Any:
            handler.__dict__.pop("on_train_begin", None)
            if kept is not None:
                self._tr_loss.fill_(kept["tr_loss"])
                for name in SUMS & kept.keys():
                    setattr(self, name, kept[name])
            if again:
                control.should_training_stop = False
                return control
            return begin(handler, args, state, control)

        self._began_as_first = first or bool(self._began_as_first)
        handler.on_train_begin = on_train_begin

    def _run_epoch(self, **kwargs: Any) -> None:
        training = self._training
        if training is None:
            super()._run_epoch(**kwargs)
            return
        kept = training.kept
        if kept is not None and kept["stopped"]:
            self.control.should_training_stop = True
            return
        if kept is not None and kwargs["epoch"] == kwargs["epochs_trained"]:
            kwargs["resume_from_checkpoint"] = IN_MEMORY
        training.epoch = kwargs["epoch"]
        super()._run_epoch(**kwargs)
        if self.state.global_step > training.step:
            self._commit(training.epoch + 1, 0)
        training.position = 0

    def _finalize_training(self, trial: Any, num_train_samples: int, start_time: float) -> Any:
        training = self._training
        if training is not None:
            start_time = training.values["began_t"]
            if "trainer" in training.state.values:
                # Its own part since the last log differs between members, and is lost with one.
                self._tr_loss.fill_(training.state.values["trainer"]["tr_loss"])
        return super()._finalize_training(trial, num_train_samples, start_time)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Logs; see transformers. What is counted per second is counted from the first entry on."""
        if start_time is not None and self._training is not None:
            start_time = self._training.values["began_t"]
        super().log(logs, start_time)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint != IN_MEMORY:
            super()._load_rng_state(checkpoint)
        elif self._training is not None:
            self._training.reentry.continue_random()

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Returns this member's batches of the next update; before that, the one before it commits."""
        training = self._training
        if training is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        if self.state.global_step > training.step:
            self._commit(training.epoch, training.position)
        training.reentry.check()
        found = super().get_batch_samples(epoch_iterator, num_batches, device)
        assert training.batches is not None
        training.weights = training.batches.weights(training.position)
        training.ids += training.batches.ids(training.position)
        training.position += 1
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Computes the gradients of a batch; a mean over more samples than in other batches counts as much more."""
        training = self._training
        if training is None:
            return super().training_step(*args, **kwargs)
        weight = training.weights.pop(0)
        pieces = self.current_gradient_accumulation_steps
        if weight != 1.0:
            self.current_gradient_accumulation_steps = pieces / weight
        try:
            loss = super().training_step(*args, **kwargs)
        finally:
            self.current_gradient_accumulation_steps = pieces
        training.loss = loss.double() if training.loss is None else training.loss + loss.double()
        return loss

    # -- commits ------------------------------------------------------------------------------------------------

    def _commit(self, epoch: int, update: int) -> None:
        training = self._training
        assert training is not None
        sums = torch.stack([training.loss.reshape(()), self._tr_loss.double().reshape(())])
        if self.args.world_size > 1:
            dist.all_reduce(sums)
        loss, tr_loss = (sums / self.args.world_size).tolist()
        training.state.values["trainer"] = {
            "epoch": epoch,
            "update": update,
            "tr_loss": tr_loss,
            "stopped": bool(self.control.should_training_stop),
            "state": self._state_as_json(),
            "counts": self._trl_counts(),
            **{name: getattr(self, name) for name in sorted(SUMS) if hasattr(self, name)},
        }
        ids, training.ids, training.loss = training.ids, [], None
        training.state.commit(loss=loss, sample_ids=ids)
        training.step = self.state.global_step
        self._given = {**self._given, "model": {}}

    def _state_as_json(self) -> dict[str, Any]:
        """Returns the state of the Trainer; what it has logged is one text, made anew only when there is more of it."""
        for one in [*self.callback_handler.callbacks, self.control]:
            if isinstance(one, ExportableState):
                self.state.stateful_callbacks[type(one).__name__] = one.state()
        history = self.state.log_history
        if self._history is None or self._history[0] != len(history):
            self._history = len(history), json.dumps(history)
        rest = dataclasses.replace(self.state, log_history=[])
        return {**dataclasses.asdict(rest), "log_history": self._history[1]}

    def _take_state(self, kept: dict[str, Any]) -> None:
        """Sets the state of the Trainer and of its callbacks to those of a commit."""
        self.state = TrainerState(**{**kept, "log_history": json.loads(kept["log_history"])})
        self._history = None
        for one in self.callback_handler.callbacks:
            found = self.state.stateful_callbacks.get(type(one).__name__)
            if isinstance(one, ExportableState) and isinstance(found, dict):
                for name, value in found["attributes"].items():
                    setattr(one, name, value)


def elastic(trainer: Kind) -> Kind:
    """Returns a trainer of another library, made from transformers' Trainer, whose training survives as `Trainer` does.

    Under torchrun and in a plain process it is the class itself.

    Args:
        trainer: its class, such as TRL's SFTTrainer.

    Raises:
        UsageError: it makes its batches from what the model generates.
    """
    if not has_agent():
        return trainer
    if any(one.__name__ in TRL_GENERATING for one in trainer.__mro__):
        raise UsageError(f"elastic({trainer.__name__}): it makes its own batches, which cannot be dealt out anew")
    names = {"__module__": trainer.__module__, "__qualname__": trainer.__qualname__, "__doc__": trainer.__doc__}
    return type(trainer)(trainer.__name__, (Trainer, trainer), names)
