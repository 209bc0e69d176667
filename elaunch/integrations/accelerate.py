"""Accelerate scripts that survive: `elastic` for the training function, `Accelerator` in place of accelerate's.

Under torchrun and in a plain process both do what accelerate does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import accelerate
import torch
from accelerate.data_loader import SeedableRandomSampler, prepare_data_loader
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.utils.data import DataLoader, IterableDataset

from elaunch.errors import UsageError
from elaunch.integrations.loaders import loading_of
from elaunch.integrations.passes import FunctionEntry, FunctionLoop, entered_again
from elaunch.workers.reentry.run import Reentry
from elaunch.workers.reentry.sampler import StepSampler

WORLD_AT_START = int(os.environ.get("WORLD_SIZE", "1"))
"""Members that the job had when this process was started."""


def forget_group() -> None:
    """Resets what accelerate keeps for the whole process: the next `Accelerator` looks at the environment again."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class GlobalBatches(StepSampler):
    """The batches of one member, cut from updates that are the same whatever the members are.

    An update uses as many samples as all members had at the start of the job, in the order and with the repetitions at
    the end of a pass that accelerate has with so many.

    Args:
        batches: the batch sampler of the whole data set.
        world: members at the start.
        accumulation: batches of each of them for an update.
        rank, size: this member among those of now.
        even: whether the last update is filled up with the first samples.
        cut: whether no batch may have more samples than one of `batches`; else a member has one batch in an update.

    Attributes:
        num_processes: members at the start: accelerate counts with them how many samples of the last update of a pass
            are there for the first time, for `gather_for_metrics`.

    Raises:
        UsageError: the batches have no fixed size.
    """

    def __init__(
        self, batches: Any, world: int, accumulation: int, rank: int, size: int, *, even: bool = True, cut: bool = False
    ) -> None:
        super().__init__(rank, size)
        self.batch_size: int = getattr(batches, "batch_size", None) or 0
        if self.batch_size < 1:
            raise UsageError(f"{type(batches).__name__} has no batch_size: batches of one size can be dealt out alone")
        self.batch_sampler, self.drop_last = batches, bool(getattr(batches, "drop_last", False))
        self._cut = cut
        self.num_processes = world
        whole = world * self.batch_size
        rounds = len(batches) // world if self.drop_last else -(-len(batches) // world)
        self._n_samples = rounds * whole
        if not even and not self.drop_last:
            self._n_samples = len(batches.sampler)
        self._per_update = accumulation * whole

    @property
    def sampler(self) -> Any:
        """Returns the sampler of the whole data set, which is told the epoch."""
        return self.batch_sampler.sampler

    @property
    def n_updates(self) -> int:
        """Returns the number of updates of a pass."""
        return -(-self._n_samples // self._per_update)

    def n_batches(self, update: int | None = None) -> int:
        """Returns how many batches every member has in an update of a pass; None: in a full one."""
        return self.count_batches(self._per_update if update is None else self._count(update))

    def count_batches(self, n_samples: int) -> int:
        """Returns how many batches every member has in an update of so many samples."""
        if not self._cut:
            return 1
        largest, least = -(-n_samples // self.size), n_samples // self.size
        return max(1, min(-(-largest // self.batch_size), least))

    def weights(self, update: int) -> list[float]:
        """Returns the weights of this member's batches in an update that has been drawn."""
        return [batch.weight for batch in self.drawn(update)]

    def ids(self, update: int) -> Sequence[int]:
        """Returns the samples of all members in an update that has been drawn."""
        batches = self.drawn(update)
        return batches[0].step_ids if batches else ()

    def __len__(self) -> int:
        last = self.n_updates - 1
        return last * self.n_batches() + self.n_batches(last) if last >= 0 else 0

    def steps(self) -> Iterator[tuple[int, Sequence[int]]]:
        """Yields the number and the samples of each update of a pass."""
        first: list[int] = []
        drawn: list[int] = []
        source = iter(self.batch_sampler)
        for update in range(self.n_updates):
            count = self._count(update)
            while len(drawn) < count and (batch := next(source, None)) is not None:
                drawn += batch
                if len(first) < self._per_update:
                    first += batch
            if not drawn:
                return
            place = 0
            while len(drawn) < count:
                drawn.append(first[place % len(first)])
                place += 1
            ids, drawn = drawn[:count], drawn[count:]
            yield update, ids
        for _ in source:  # a sampler counts its passes when it is used up
            pass

    def _count(self, update: int) -> int:
        return min(self._per_update, self._n_samples - update * self._per_update)


def dealt_out(
    loader: Any, batches: Callable[[Any], GlobalBatches], device: Any, seed: int
) -> tuple[Any, GlobalBatches]:
    """Returns a loader of this member's part of what an accelerate loader loads, and its batches.

    Args:
        loader: as accelerate has prepared it.
        batches: makes them of the batch sampler of the whole data set.
        device: where batches go; None: nowhere.
        seed: of the order of samples.

    Raises:
        UsageError: the data set is a stream.
    """
    if isinstance(loader.dataset, IterableDataset):
        raise UsageError(
            "a stream (IterableDataset) has no place to go back to when members change: use a data set with a length"
        )
    whole = loader.batch_sampler
    whole = getattr(whole, "batch_sampler", whole)
    if isinstance(whole.sampler, SeedableRandomSampler):
        whole.sampler.initial_seed = seed
    mine = batches(whole)
    generator = torch.Generator()  # or it draws from the script's own
    # GlobalBatches is all that a DataLoader needs of a batch sampler.
    plain: Any = DataLoader(loader.dataset, batch_sampler=mine, generator=generator, **loading_of(loader))
    made = prepare_data_loader(
        plain,
        device,
        num_processes=1,
        process_index=0,
        put_on_device=device is not None,
        dispatch_batches=False,
        non_blocking=loader._non_blocking,
    )
    return made, mine


def agreed(reentry: Reentry, own: dict[str, Any]) -> dict[str, Any]:
    """Returns what all members know of their job, before anything is bound; all call it.

    Args:
        reentry: of the job.
        own: counts before the first commit: the largest `world` (members at the start, as far as each knows), and
            the rest from the first member.

    Returns:
        The values of the last commit, or `own` as agreed.
    """
    notes = reentry.all_gather({"own": own, "last": reentry.last_values()})
    for note in notes:
        if note["last"] is not None:
            last: dict[str, Any] = note["last"]
            return last
    return {**notes[0]["own"], "world": max(note["own"]["world"] for note in notes)}


def elastic(function: Callable[..., Any] | None = None, *, every: int = 1) -> Any:
    """Has a training function entered by every worker, and entered again when the members of its job change.

    The function makes its `Accelerator` (of this module) itself. Under torchrun, or in a plain process, it is called.

    Args:
        function: the function.
        every: commits that count, as for `elaunch.elastic`.
    """
    return entered_again(function, every, forget_group)


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """Accelerate's Accelerator. In an `elastic` function its training survives changes of members.

    A loader that is iterated over while the first prepared model is in training mode is dealt out in updates that do
    not depend on the members; others, as for evaluation, are sharded among the members of now. The state counts as
    committed when the next batch is asked for after an update.

    Args:
        args, kwargs: as for accelerate's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        entry = FunctionEntry.current
        self._loop = FunctionLoop(entry, self._objects) if entry is not None else None
        self._start = agreed(entry.reentry, {"world": WORLD_AT_START}) if entry is not None else {}
        super().__init__(*args, **kwargs)
        if entry is not None:
            self.dataloader_config.use_seedable_sampler = True
            if self.split_batches or self.dispatch_batches:
                raise UsageError("split_batches and dispatch_batches do not go with an elastic function")

    def epochs(self, n_epochs: int) -> Iterator[int]:
        """Yields the numbers of the passes that are left, of `n_epochs`; call it after everything is prepared."""
        yield from range(n_epochs) if self._loop is None else self._loop.epochs(range(n_epochs))

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Computes gradients; a mean over more or fewer samples than others have counts as much more or less."""
        if self._loop is not None:
            loss = self._loop.weigh(loss, self.gradient_accumulation_steps)
        super().backward(loss, **kwargs)

    def prepare_data_loader(self, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepares a loader."""
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        if self._loop is None or isinstance(prepared, _Loader):
            return prepared
        return _Loader(self, prepared, self._loop.add_loader())

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepares a scheduler, which moves on by as many steps as there were members at the start."""
        prepared = super().prepare_scheduler(scheduler)
        if self._loop is not None and type(prepared) is AcceleratedScheduler:
            prepared.__class__ = _Scheduler
            prepared.world = self._start["world"]
        return prepared

    def _objects(self) -> tuple[dict[str, Any], dict[str, Any]]:
        objects: dict[str, Any] = {}
        for kind, found in (
            ("model", [self.unwrap_model(one) for one in self._models]),
            ("optimizer", [one.optimizer for one in self._optimizers]),
            ("scheduler", [one.scheduler for one in self._schedulers]),
            ("object", self._custom_objects),
            ("scaler", [self.scaler] if self.scaler is not None else []),
        ):
            objects |= {f"{kind}{place}": one for place, one in enumerate(found)}
        assert self._loop is not None
        # The script has seeded its generators by now.
        seeds = self._loop.entry.state.all_gather(torch.initial_seed() % 2**63)
        return objects, {"world": self._start["world"], "seed": seeds[0]}


class _Scheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A prepared scheduler, to which the members of now do not matter."""

    world = 1

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Moves on, if the optimizer did."""
        shared = PartialState._shared_state  # each AcceleratorState() takes its own from there
        size, shared["num_processes"] = shared["num_processes"], self.world
        try:
            super().step(*args, **kwargs)
        finally:
            shared["num_processes"] = size
            AcceleratorState()


class _Loader:
    """A prepared loader, which yields parts of updates while a model trains, and else what accelerate shares out.

    Args:
        accelerator: which prepared it.
        prepared: by accelerate.
        place: among the loaders of the function.
    """

    def __init__(self, accelerator: Accelerator, prepared: Any, place: int) -> None:
        self._accelerator, self._prepared, self._place = accelerator, prepared, place

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_prepared":
            raise AttributeError(name)
        return getattr(self._prepared, name)

    def __len__(self) -> int:
        if isinstance(self._prepared.dataset, IterableDataset):
            return len(self._prepared)
        whole = getattr(self._prepared.batch_sampler, "batch_sampler", self._prepared.batch_sampler)
        return len(self._batches(whole, 0, 1))

    def __iter__(self) -> Iterator[Any]:
        accelerator, loop = self._accelerator, self._accelerator._loop
        assert loop is not None
        loop.bind()
        if accelerator._models and accelerator._models[0].training:
            return loop.train(self._place, self._deal)
        return iter(self._prepared)

    def _batches(self, whole: Any, rank: int, size: int) -> GlobalBatches:
        accelerator = self._accelerator
        return GlobalBatches(whole, accelerator._start["world"], 1, rank, size, even=accelerator.even_batches)

    def _deal(self, passed: int, start: int) -> Iterator[tuple[float, Sequence[int], Any]]:
        accelerator = self._accelerator
        assert accelerator._loop is not None
        rank, size = accelerator.process_index, accelerator.num_processes
        loader, batches = dealt_out(
            self._prepared,
            lambda whole: self._batches(whole, rank, size),
            self._prepared.device,
            accelerator._loop.values["seed"],
        )
        loader.set_epoch(passed)
        if start:
            loader = accelerate.skip_first_batches(loader, start)
        if start < batches.n_updates:
            for update, batch in enumerate(loader, start):
                (weight,) = batches.weights(update)
                yield weight, batches.ids(update), batch
