"""Training functions that are entered again, whose loops over epochs and loaders go on where the last commit was."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from elaunch.integrations.adapters import under_adapters
from elaunch.workers.agent_client import has_agent
from elaunch.workers.reentry.encoding import is_dtensor
from elaunch.workers.reentry.run import Reentry
from elaunch.workers.reentry.state import ElasticState

Dealt = Iterable[tuple[float, Sequence[int], Any]]
"""Of each batch of this member: its weight, the samples of all members, and its content."""


def whole_value(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the value of a tensor; of a DTensor, as a loss over tensor-parallel members, that of the whole one."""
    value = tensor.detach()
    if not is_dtensor(value):
        return value
    whole: torch.Tensor = value.full_tensor()  # type: ignore[attr-defined]
    return whole


class FunctionEntry:
    """An entry of a training function.

    Attributes:
        current: the one that is under way in this process.
        kept: what this process keeps from one entry to the next, by name.
    """

    current: FunctionEntry | None = None

    def __init__(self, reentry: Reentry, state: ElasticState, kept: dict[str, Any]) -> None:
        self.reentry, self.state, self.kept = reentry, state, kept


def entered_again(function: Callable[..., Any] | None, every: int, forget: Callable[[], object]) -> Any:
    """Has a training function entered by every worker, and entered again when the members of its job change.

    Under torchrun, or in a plain process, it is called.

    Args:
        function: the function; None: the decorator is returned.
        every: commits that count, as for `elaunch.elastic`.
        forget: called around each entry, for what a framework keeps for the whole process.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not has_agent():
                return function(*args, **kwargs)
            reentry = Reentry(every)
            kept: dict[str, Any] = {}

            def enter(state: ElasticState) -> Any:
                forget()
                FunctionEntry.current = FunctionEntry(reentry, state, kept)
                try:
                    return function(*args, **kwargs)
                finally:
                    FunctionEntry.current = None
                    forget()

            return reentry.run(enter)

        return call

    return decorate if function is None else decorate(function)


class FunctionLoop:
    """The loops of a training function: over epochs, and over loaders in them.

    An update counts when the next batch is asked for, or the next epoch.

    Args:
        entry: of the function.
        objects: returns what is bound, by name, and values to begin with where there was no commit.
        before_commit: called by all members before each commit.

    Attributes:
        weight: how much the mean over this member's present batch counts; 1.0 between batches.
        batch: number of the batch that was handed out last, in its pass for training; whoever counts resets it.
    """

    def __init__(
        self,
        entry: FunctionEntry,
        objects: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]],
        before_commit: Callable[[], object] = lambda: None,
    ) -> None:
        self.entry = entry
        self.weight = 1.0
        self.batch: int | None = None
        self._objects, self._before_commit = objects, before_commit
        self._n_loops = 0
        self._passed: list[int] = []  # passes that have begun and ended in this entry, or count as such
        self._under_way: dict[int, object] = {}
        self._loss: torch.Tensor | None = None
        self._stepped = False
        self._ids: list[int] = []

    @property
    def values(self) -> dict[str, Any]:
        """Returns the values of the job: its epoch, and by loader the passes that are over and the batches since."""
        return self.entry.state.values

    def add_loader(self) -> int:
        """Returns the place of one more loader."""
        self._passed.append(0)
        return len(self._passed) - 1

    def bind(self) -> None:
        """Brings the state of the last commit, unless that was done in this entry."""
        if self.entry.reentry.bound:
            return
        objects, values = self._objects()
        self.entry.state.bind(constant=under_adapters(objects), **objects)
        for one in objects.values():
            if isinstance(one, torch.optim.Optimizer):
                one.register_step_post_hook(self._note_step)
        nowhere: dict[str, Any] = {"loop": 0, "epoch": None, "over": False, "passes": [], "updates": [], "before": []}
        self.entry.state.values = {**nowhere, **values, **self.values}

    def epochs(self, numbers: range) -> Iterator[int]:
        """Yields the numbers of the epochs that are left, in this loop. A loader made in an epoch belongs to it."""
        self.bind()
        values, n_loaders = self.values, len(self._passed)
        loop, self._n_loops = self._n_loops, self._n_loops + 1
        if loop < values["loop"]:
            return
        if loop > values["loop"]:
            values["loop"], values["epoch"] = loop, None
        begun = values["epoch"]
        if begun is not None:
            numbers = range(begun + (numbers.step if values["over"] else 0), numbers.stop, numbers.step)
        for number in numbers:
            if number != begun:
                for counts in (values["passes"], values["updates"]):
                    del counts[n_loaders:]
                values |= {"epoch": number, "over": False, "before": list(values["passes"])}
            self._passed = [*values["before"], *[0] * n_loaders][:n_loaders]
            yield number
            self._end_passes()
            if self._stepped:
                values["over"] = True
                self._commit()

    def train(self, place: int, deal: Callable[[int, int], Dealt]) -> Iterator[Any]:
        """Yields what is left of a pass over a loader.

        Args:
            place: of the loader.
            deal: returns the batches of a pass, from one on.
        """
        self._end_passes(place)
        passes, updates = self.values["passes"], self.values["updates"]
        for counts in (passes, updates):
            counts += [0] * (place + 1 - len(counts))
        if self._passed[place] < passes[place]:
            self._passed[place] += 1  # a script that counts its passes itself comes to those again that are over
            return
        mark = self._under_way[place] = object()
        ids: Sequence[int] = ()
        try:
            for self.weight, ids, content in deal(passes[place], updates[place]):
                self._ids += ids
                self.entry.reentry.check()
                self.batch = updates[place]
                yield content
                ids, self.weight = (), 1.0
                updates[place] += 1
                if self._stepped:
                    self._commit()
        finally:
            self.weight = 1.0
            if ids and not self._stepped:  # a loop was left with a batch that it has not used
                del self._ids[-len(ids) :]
            if self._under_way.get(place) is mark:
                self._end_passes(place)

    def _end_passes(self, place: int | None = None) -> None:
        """Ends passes that are under way, such as those of loops that were left by a break; None: all."""
        for one in [one for one in self._under_way if place in (None, one)]:
            del self._under_way[one]
            self._passed[one] += 1
            self.values["passes"][one] += 1
            self.values["updates"][one] = 0

    def weigh(self, loss: torch.Tensor, divisor: int = 1) -> torch.Tensor:
        """Returns a loss, a mean over this member's samples, as it goes backward, and adds it to that of the update.

        Args:
            loss: of this member.
            divisor: batches of an update over which losses are averaged.
        """
        loss = loss if self.weight == 1.0 else loss * self.weight
        part = whole_value(loss).double() / divisor
        self._loss = part if self._loss is None else self._loss + part
        return loss

    def _note_step(self, *_: Any) -> None:
        self._stepped = True

    def _commit(self) -> None:
        loss, self._loss, self._stepped = self._loss, None, False
        ids, self._ids = self._ids, []
        self._before_commit()
        mean: float | None = None
        if loss is not None:
            total = loss.reshape(())
            if dist.is_initialized():
                dist.all_reduce(total)
            mean = total.item() / self.entry.state.size
        self.entry.state.commit(loss=mean, sample_ids=ids)
