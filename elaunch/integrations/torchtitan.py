"""torchtitan's training, which survives: `-m elaunch.integrations.torchtitan` in place of `-m torchtitan.train`.

A script with a Trainer of its own calls `main(ItsTrainer)` of this module in place of torchtitan's. Under torchrun both
do what torchtitan does.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed.checkpoint import FileSystemReader
from torchtitan import train as titan
from torchtitan.components.loss import IGNORE_INDEX

from elaunch.errors import UsageError
from elaunch.failures import ERROR_FILE
from elaunch.integrations.passes import FunctionEntry, entered_again
from elaunch.integrations.streams import SHARE_EVERY, Places, StreamLayout, Streams, degrees

VERSION = "0.2.2"

AnyTrainer = TypeVar("AnyTrainer", bound=type)


def main(trainer_class: type = titan.Trainer) -> None:
    """Trains as `torchtitan.train.main` does, with the arguments of the command line; the training survives.

    Args:
        trainer_class: torchtitan's Trainer, or one made from it.

    Raises:
        UsageError: it is not the torchtitan that this module is made for.
    """
    version = importlib.metadata.version("torchtitan")
    if not version.startswith(VERSION):
        raise UsageError(f"torchtitan {version}: elaunch.integrations.torchtitan is made for {VERSION}")
    survivor = elastic(trainer_class)
    # torchtitan takes the arguments when it is imported, which may have been in the process that preloads modules.
    titan.ConfigManager.parse_args.__defaults__ = (sys.argv[1:],)

    def train() -> None:
        # torchtitan would note changes of members in this file as errors; elaunch itself notes what ends a worker.
        path = os.environ.pop(ERROR_FILE, None)
        try:
            titan.main(survivor)
        finally:
            if path is not None:
                os.environ[ERROR_FILE] = path

    entered_again(train, 1, lambda: None)()


def elastic(trainer_class: AnyTrainer) -> AnyTrainer:
    """Returns a class whose trainers go on from the last update when the members change; `main` runs one.

    Args:
        trainer_class: torchtitan's Trainer, or one made from it.
    """
    return type(trainer_class.__name__, (_Elastic, trainer_class), {"__module__": trainer_class.__module__})  # type: ignore[return-value]


class _Elastic(titan.Trainer):  # type: ignore[misc]
    """What is put before a Trainer.

    A step counts when the next one is asked for, after its checkpoint and its validation.
    """

    dataloader: Any
    step: int

    def __init__(self, config: Any) -> None:
        self._entry = FunctionEntry.current
        if self._entry is None:
            super().__init__(config)
            return
        self._stepped, self._loss, self._tokens, self._batch_tokens = False, None, 0, 0
        self._places: Places = self._entry.kept.setdefault("places", Places())
        self._layout = _fit(self._entry, config)
        super().__init__(config)
        parallel = self.parallel_dims
        self._size = parallel.dp_replicate * parallel.dp_shard
        self._rank = parallel.get_mesh("batch").get_local_rank() if parallel.dp_enabled else 0
        own = self.dataloader

        def build(stream: int) -> Any:
            same = self._layout.streams == self._size and stream == self._rank
            return own if same else self._build_loader(stream)

        streams = Streams(self._layout, self._rank, self._size, build, IGNORE_INDEX)
        self.dataloader = self.checkpointer.states["dataloader"] = streams
        self.gradient_accumulation_steps = streams.rounds
        log = self.metrics_processor.log

        def note(step: int, global_avg_loss: float, *args: Any, **kwargs: Any) -> None:
            self._loss = global_avg_loss
            log(step, global_avg_loss, *args, **kwargs)

        self.metrics_processor.log = note

    def _build_loader(self, stream: int) -> Any:
        return self.train_spec.build_dataloader_fn(
            dp_world_size=self._layout.streams, dp_rank=stream, tokenizer=self.tokenizer, job_config=self.job_config
        )

    def train(self) -> None:
        """Trains from the last update on, or from torchtitan's checkpoint where no member has its state."""
        if self._entry is not None:
            load = self.checkpointer.load
            self.checkpointer.load = lambda step=-1: self._begin(lambda: load(step=step))
        super().train()

    def _begin(self, load: Any) -> None:
        entry = self._entry
        assert entry is not None
        state, streams = entry.state, self.dataloader

        def load_checkpoint() -> None:
            self._places.forget()
            load()
            if self.step:
                state.load_state_dict({"step": self.step, "position": 0, "values": self._values()})

        state.bind(
            load=load_checkpoint,
            **{f"model_{number}": part for number, part in enumerate(self.model_parts)},
            **{f"optimizer_{number}": one for number, one in enumerate(self.optimizers)},
            **{f"scheduler_{number}": one for number, one in enumerate(self.lr_schedulers)},
        )
        if state.values:
            self.step, self._tokens = state.values["step"], state.values["tokens"]
        found = self._places.find(self.step, streams.read, state.rank, state.all_gather)
        for stream, (at, snapshot) in found.items():
            streams.load_snapshot(stream, snapshot)
            streams.skip(stream, self.step - at)
        self._share()
        self.ntokens_seen = self._tokens // self._size + (self._rank < self._tokens % self._size)

    def _share(self) -> None:
        assert self._entry is not None
        self._places.share(self.step, self.dataloader.snapshots(), self._entry.state.all_gather)

    def batch_generator(self, data_iterable: Any) -> Iterator[Any]:
        """Yields this member's batches; those without labels, which fill up, do not count as tokens that were seen."""
        if self._entry is None:
            yield from super().batch_generator(data_iterable)
            return
        own, rounds = len(self.dataloader.own), self.dataloader.rounds
        for number, (inputs, labels) in enumerate(super().batch_generator(data_iterable)):
            self._entry.reentry.check()
            self._batch_tokens = labels.numel()
            if number % rounds >= own:
                self.ntokens_seen -= self._batch_tokens
                self.metrics_processor.ntokens_since_last_log -= self._batch_tokens
            yield inputs, labels

    def train_step(self, data_iterator: Any) -> None:
        """Does one update."""
        super().train_step(data_iterator)
        if self._entry is not None:
            self._stepped = True
            self._tokens += self._layout.n_batches * self._batch_tokens

    def should_continue_training(self) -> bool:
        """Says whether there are more steps; the one before counts from here on."""
        if self._entry is not None and self._stepped:
            self._commit(self._entry)
        return bool(super().should_continue_training())

    def _commit(self, entry: FunctionEntry) -> None:
        self._places.keep(self.step, self.dataloader.snapshots())
        if self.step % max(SHARE_EVERY, self._layout.streams) == 0:
            self._share()
        entry.state.values = self._values()
        loss, self._loss, self._stepped = self._loss, None, False
        entry.state.commit(loss=loss)

    def _values(self) -> dict[str, Any]:
        layout = self._layout
        of_layout = {"streams": layout.streams, "accumulation": layout.accumulation, "shards": layout.shards}
        return {**of_layout, "step": self.step, "tokens": self._tokens}

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint has of the trainer itself, as one of the ranks of the start would have it."""
        state: dict[str, Any] = super().state_dict()
        return state if self._entry is None else {**state, "ntokens_seen": self._tokens // self._layout.streams}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from a checkpoint."""
        super().load_state_dict(state_dict)
        if self._entry is not None:
            self._tokens = state_dict["ntokens_seen"] * self._layout.streams


def _fit(entry: FunctionEntry, config: Any) -> StreamLayout:
    """Makes a configuration fit the members of now; returns what the job keeps from its start.

    Raises:
        UsageError: torchtitan would do something that cannot be kept up with other members.
        StepInterrupted: no layout fits the members, and they have changed.
    """
    parallel, training, size = config.parallelism, config.training, entry.state.size
    if parallel.pipeline_parallel_degree > 1:
        raise UsageError("pipeline_parallel_degree: an elastic function cannot bind stages with different modules")
    together = parallel.context_parallel_degree * parallel.tensor_parallel_degree
    ranks, rest = divmod(size, together)
    if rest or not ranks:
        entry.state.wait_for_members(f"{size} members cannot be divided into groups of {together}")
    told: list[Mapping[str, int] | None] = entry.state.all_gather(entry.reentry.last_values() or None)
    known = next(filter(None, told), None)
    if known is not None:
        layout = StreamLayout(known["streams"], known["accumulation"], known["shards"])
    else:
        layout = _first(config, ranks)
    if known is not None or layout.streams != ranks:
        replicas, shards = degrees(parallel.data_parallel_replicate_degree, layout.shards, ranks)
        parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree = replicas, shards
    training.global_batch_size = -1  # torchtitan would divide it by the members of now
    return layout


def _first(config: Any, ranks: int) -> StreamLayout:
    """Returns the layout of a job that begins, or that begins again from a checkpoint."""
    parallel, training = config.parallelism, config.training
    streams = _count_streams(config) or ranks
    replicas, shards = parallel.data_parallel_replicate_degree, parallel.data_parallel_shard_degree
    if shards < 0:
        shards = streams // replicas
    if shards == 1 and replicas > 1:
        raise UsageError("data_parallel_shard_degree: 1 with replicas is DistributedDataParallel; expected 2 or more")
    whole, one = training.global_batch_size, training.local_batch_size * streams
    if whole > 0 and whole % one:
        raise UsageError(f"training.global_batch_size: {whole} is no multiple of {one}, a local batch for each rank")
    return StreamLayout(streams, whole // one if whole > 0 else 1, shards)


def _count_streams(config: Any) -> int:
    """Returns the data-parallel ranks of the newest checkpoint, if there is one; otherwise 0."""
    if not config.checkpoint.enable:
        return 0
    folder = Path(config.job.dump_folder, config.checkpoint.folder)
    steps = {int(path.parent.name.removeprefix("step-")): path.parent for path in folder.glob("step-*/.metadata")}
    wanted = config.checkpoint.load_step if config.checkpoint.load_step >= 0 else max(steps, default=-1)
    if wanted not in steps:
        return 0
    names = FileSystemReader(steps[wanted]).read_metadata().state_dict_metadata
    return sum(name.startswith("dataloader.dp_rank_") for name in names)


if __name__ == "__main__":
    main()
