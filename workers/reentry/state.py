"""What an elastic function sees of its job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

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
        self._ids: list[int] = []  # of the samples of all members since the last commit
        self._batches: Batches | None = None
        self._loads = False
        self._entry: AbstractContextManager[ElasticState] = reentry.entered(self)

    def __enter__(self) -> ElasticState:
        """Enters the body of a loop over `elaunch.Elastic`, once."""
        return self._entry.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        """Ends it; what a change of members has raised goes no further."""
        return self._entry.__exit__(kind, error, trace)

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
        return self._reentry.done

    @property
    def entry(self) -> int:
        """Returns how often this process has entered the function, from 1."""
        return self._reentry.entry

    @property
    def epoch(self) -> int:
        """Returns the number of the pass over the data set of `steps` to which the next sample belongs, from 0."""
        return self._position // self._batches.n_samples if self._batches is not None else 0

    def on_reset(self, function: Callable[[], object]) -> None:
        """Has a function called once, before the function is entered again (see `reset` of `elastic`)."""
        self._reentry.resets.append(function)

    def bind(self, *, load: Callable[[], object] | None = None, constant: Collection[str] = (), **objects: Any) -> None:
        """Names what makes up the state, and gives it the state of the last commit, if there is one. Once in an entry.

        All members call it with the same names, after the process groups and the objects are made: modules and
        optimizers, plain or of DTensors (FSDP2, tensor parallelism), schedulers, scalers, whatever has `state_dict` and
        `load_state_dict`.

        Args:
            load: loads the script's newest checkpoint, if there is one, into the objects, and with `load_state_dict`
                into this state. All members call it, where no member has the state: when the job begins, and when all
                copies of a part have been lost.
            constant: paths of tensors that training does not change, such as the frozen weights under an adapter:
                `"model.layer.weight"` for that of an object `model`, or `"model.layer"` for all in it. They are copied
                once in an entry, and not in each commit.
            objects: by name.

        Raises:
            UsageError: it was called before in this entry, an object has no `state_dict`, or the members have loaded
                different checkpoints.
            StateError: the objects do not fit the state.
            StateLost: all copies of a part are lost, and there is no `load`.
            StepInterrupted: the members have changed; it leaves the function.
        """
        for name, thing in objects.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(thing, method, None)):
                    raise UsageError(
                        f"state.bind({name}=...): {type(thing).__name__} has no {method}(); numbers, texts, lists and "
                        "dicts go into state.values"
                    )
        values = self._reentry.bind(objects, None if load is None else lambda: self._load(load), constant)
        if values is not None:
            self._position = values.pop(POSITION)
            self.values = values
        self._start = self._position

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint of the script's own has to hold besides its objects, as JSON: the last commit's.

        It is the same on all members.
        """
        return {"step": self.step, "position": self._start, "values": dict(self.values)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a checkpoint of the script's own; in the function that is the `load` of `bind`.

        Args:
            state: what `state_dict` returned.

        Raises:
            UsageError: it is called elsewhere.
        """
        if not self._loads:
            raise UsageError("call state.load_state_dict() in the function that state.bind(load=...) gets")
        self._position, self.values = state["position"], dict(state["values"])
        self._reentry.step = state["step"]

    def _load(self, load: Callable[[], object]) -> None:
        self._loads = True
        try:
            load()
        finally:
            self._loads = False

    def wait_for_members(self, why: str) -> NoReturn:
        """Waits until the members change, and leaves the function then. All members call it, if they are too few.

        Args:
            why: what a line of the first member says.

        Raises:
            StepInterrupted: the members have changed.
        """
        if self.rank == 0:
            print(f"[elaunch] {why}: waiting for other members", file=sys.stderr, flush=True)
        self._reentry.wait_for_change()

    def all_gather(self, value: Any) -> list[Any]:
        """Returns what each member gives, as JSON, by rank. All members call it; it needs no process group.

        Raises:
            StepInterrupted: the members have changed; it leaves the function.
        """
        return self._reentry.all_gather(value)

    def steps(
        self,
        loader: Any,
        *,
        epochs: int = 1,
        global_batch_size: int | None = None,
        replica: tuple[int, int] | None = None,
    ) -> Iterator[Any]:
        """Yields this member's batches, from where the last commit was.

        The order of the samples does not depend on the members: each is used once in an epoch, whatever happens.

        Args:
            loader: a DataLoader; a sampler that shares out samples among ranks is taken for the whole it shares out.
            epochs: passes over its data set.
            global_batch_size: samples of a step over all members, dealt out evenly (see `weight`); by default each
                member has as many as the loader has in a batch, so a step has fewer while there are fewer members.
            replica: which of how many replicas of the model this member belongs to. The members of one, as with tensor
                or pipeline parallelism, get the same samples; by default each member is a replica.

        Raises:
            UsageError: the loader cannot be dealt out; says why.
            StepInterrupted: the members have changed; it leaves the function.
        """
        if not self._reentry.bound:
            raise UsageError("call state.bind() before state.steps(): it brings the position in the data back")
        self._batches = Batches(loader, global_batch_size, epochs)
        for stop, batch, content in self._batches.load(self._position, *(replica or (self.rank, self.size))):
            self._reentry.check()
            self.weight = batch.weight
            self._position = stop
            self._ids += batch.step_ids
            yield content

    def commit(self, *, loss: float | None = None, sample_ids: Sequence[int] | None = None) -> None:
        """Makes the present state the one that counts: after it, this step is never lost or done again.

        All members call it alike, after the update; it is a barrier. Where a change of members is due, it leaves the
        function. What members have parts of, they give their guards while the next step computes: a member that dies
        before they have arrived takes that step with it, too.

        Args:
            loss: of the step, for the event log and `elaunch ctl status`.
            sample_ids: of the samples of all members since the last commit, for the event log; by default those of
                `steps`.

        Raises:
            UsageError: nothing is bound.
            StateError: an object has a value that cannot be copied, or was changed while it was copied.
            StepInterrupted: the members have changed; it leaves the function.
        """
        ids, self._ids = sample_ids if sample_ids is not None else self._ids, []
        self._start = self._position
        self._reentry.commit({**self.values, POSITION: self._position}, loss, ids)
