"""What an elastic function sees of its job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from elaunch.errors import UsageError
from elaunch.workers.reentry.data import Batches

if TYPE_CHECKING:
    from elaunch.workers.reentry.run import Reentry

POSITION = "elaunch.position"
"""Among the values of a copy: how many samples have been used."""


class ElasticState:
    """The state of a job, in one entry of its function.

    Args:
        reentry: the loop around the function.

    Attributes:
        values: what of the state is neither a module nor an optimizer nor has a `state_dict`, as JSON: numbers, texts,
            lists and dicts, the same on all members. It is part of each commit, and comes back after a change.
        weight: how much the mean loss over the last batch of `steps` counts: 1 unless `global_batch_size` gives members
            batches of different sizes. Multiply the loss by it, so that the mean over the members is that over all
            samples.
    """

    def __init__(self, reentry: Reentry, values: dict[str, Any]) -> None:
        self._reentry = reentry
        self.values: dict[str, Any] = values
        self.weight = 1.0
        self._position = 0
        self._start = 0
        self._batches: Batches | None = None

    @property
    def device(self) -> torch.device:
        """Returns where this worker computes."""
        return self._reentry.member.device

    @property
    def rank(self) -> int:
        """Returns the position of this worker among the members, as RANK says it."""
        return self._reentry.member.rank

    @property
    def size(self) -> int:
        """Returns the number of members, as WORLD_SIZE says it."""
        return self._reentry.member.size

    @property
    def step(self) -> int:
        """Returns how many commits there have been."""
        return self._reentry.step

    @property
    def entry(self) -> int:
        """Returns how often this process has entered the function, from 1."""
        return self._reentry.entry

    @property
    def epoch(self) -> int:
        """Returns the number of the pass over the data set of `steps` to which the next sample belongs, from 0."""
        return self._position // self._batches.n_samples if self._batches is not None else 0

    def bind(self, **objects: Any) -> None:
        """Names what makes up the state, and gives it the state of the last commit, if there is one. Once in an entry.

        All members call it with the same names, after the process groups and the objects are made: modules and
        optimizers, plain or of DTensors (FSDP2, tensor parallelism), schedulers, scalers, whatever has `state_dict` and
        `load_state_dict`.

        Raises:
            UsageError: it was called before in this entry, or an object has no `state_dict`.
            StateError: the objects do not fit the state.
            StepInterrupted: the members have changed; it leaves the function.
        """
        for name, thing in objects.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(thing, method, None)):
                    raise UsageError(
                        f"state.bind({name}=...): {type(thing).__name__} has no {method}(); numbers, texts, lists and "
                        "dicts go into state.values"
                    )
        values = self._reentry.bind(objects)
        if values is not None:
            self._position = values.pop(POSITION)
            self.values = values
        self._start = self._position

    def steps(self, loader: Any, *, epochs: int = 1, global_batch_size: int | None = None) -> Iterator[Any]:
        """Yields this member's batches, from where the last commit was.

        The order of the samples does not depend on the members: each is used once in an epoch, whatever happens.

        Args:
            loader: a DataLoader; a sampler that shares out samples among ranks is taken for the whole it shares out.
            epochs: passes over its data set.
            global_batch_size: samples of a step over all members, dealt out evenly (see `weight`); by default each
                member has as many as the loader has in a batch, so a step has fewer while there are fewer members.

        Raises:
            UsageError: the loader cannot be dealt out; says why.
            StepInterrupted: the members have changed; it leaves the function.
        """
        if not self._reentry.bound:
            raise UsageError("call state.bind() before state.steps(): it brings the position in the data back")
        self._batches = Batches(loader, global_batch_size, epochs)
        for batch, content in self._batches.load(self._position, self.rank, self.size):
            self._reentry.check()
            self.weight = batch.weight
            self._position = batch.stop
            yield content

    def commit(self, *, loss: float | None = None, sample_ids: Sequence[int] | None = None) -> None:
        """Makes the present state the one that counts: after it, this step is never lost or done again.

        All members call it alike, after the update; it is a barrier. Where a change of members is due, it leaves the
        function.

        Args:
            loss: of the step, for the event log and `elaunch ctl status`.
            sample_ids: of the samples of all members since the last commit, for the event log; by default those of
                `steps`.

        Raises:
            UsageError: nothing is bound.
            StateError: an object has a value that cannot be copied, or was changed while it was copied.
            StepInterrupted: the members have changed; it leaves the function.
        """
        if not self._reentry.bound:
            raise UsageError("call state.bind() before state.commit(): nothing is bound that could be kept")
        ids = sample_ids if sample_ids is not None else self._ids_since_commit()
        self._start = self._position
        self._reentry.commit({**self.values, POSITION: self._position}, loss, ids)

    def _ids_since_commit(self) -> Sequence[int]:
        return self._batches.ids(self._start, self._position) if self._batches is not None else []
