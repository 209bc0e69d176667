"""The state of a data-parallel job on one worker: what the script has registered, and how many steps are in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from elaunch.errors import StateError
from elaunch.workers.comm.group import Group
from elaunch.workers.data.streaming import STREAM, StreamState
from elaunch.workers.data_parallel.layout import SampleLayout
from elaunch.workers.data_parallel.watch import ReplicaWatch
from elaunch.workers.hooks import Verdict
from elaunch.workers.refusals import refuse_unregistered
from elaunch.workers.runtime import Member
from elaunch.workers.state.objects import fill, move_objects, part_of, read

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.state.checkpoint import CheckpointShard, Restored


class RegisteredState:
    """All members hold it whole, and the same.

    Attributes:
        objects: by the name under which they are registered.
        step: number of steps that have committed.
        stream: how far the stream has been used, where the data is one.
        holds: whether it is the state of the job, or not that yet.
        watch: compares it with that of the other members.
    """

    def __init__(self, watch: ReplicaWatch) -> None:
        self.objects: Mapping[str, Any] = {}
        self.step = 0
        self.stream = StreamState()
        self.holds = False
        self.watch = watch
        self._went_back: Restored[None] | None = None
        self._hook: Any = None  # keeps other optimizers away from the job's parameters

    def register(self, objects: Mapping[str, Any], trained: Sequence[torch.Tensor]) -> None:
        """Takes the objects of the script; `trained` are the parameters whose gradients the job sums.

        Raises:
            StateError: there are some already.
        """
        if self.objects:
            raise StateError("register was called twice; name all objects in one call")
        self.objects = objects
        if trained:
            known = frozenset(map(id, objects.values()))
            self._hook = refuse_unregistered(frozenset(map(id, trained)), lambda optimizer: id(optimizer) in known)

    def begin_at(self, step: int, joined: bool) -> None:
        """Begins the job at a step, which counts like the first values of the objects: where nobody has gone on yet.

        Args:
            step: so many have committed in the run that the script has loaded the state of.
            joined: whether this worker is a member already.

        Raises:
            StateError: it is.
            ValueError: the step is negative.
        """
        if joined:
            raise StateError(
                f"job.step = {step} comes too late: load a state of the script's own, and set job.step, before "
                "job.register(...)"
            )
        if step < 0:
            raise ValueError(f"job.step must be 0 or more, got {step}")
        self.step = step

    def commit(self) -> None:
        """Takes note that the step in flight has committed."""
        self.stream.commit()
        self.step += 1

    def let_go(self) -> None:
        """Lets any optimizer act again: this worker leaves the job."""
        if self._hook is not None:
            self._hook.remove()

    def zero_gradients(self) -> None:
        """Drops the gradients that an interrupted attempt has left."""
        for thing in self.objects.values():
            if isinstance(thing, torch.optim.Optimizer):
                thing.zero_grad()

    def durable(self, layout: SampleLayout, group: Group) -> CheckpointShard:
        """Returns this worker's part of a checkpoint."""
        objects = self._whole() if layout.n_shards else self.objects
        return part_of(objects, layout.cursor, group.rank, group.size)

    def _whole(self) -> dict[str, Any]:
        return {**self.objects, STREAM: self.stream}

    def go_back(self, member: Member, group: Group, step: int) -> None:
        """All members read a checkpoint, that of `step` or an older one.

        Whether its settings are those of this job is known when the loop over the data begins.
        """
        from elaunch.workers.state.checkpoint import Restored

        found = member.checkpoints.restore(group, step, read)
        fill(self._whole() if STREAM in found.state.manifest["objects"] else self.objects, found.saved, found.state)
        # The tensors are in the objects now.
        self.step = found.saved.step
        self._went_back = Restored(found.saved, None, found.read_bytes, found.seconds)

    def check_origin(self, member: Member, layout: SampleLayout) -> None:
        """Sees to it that the checkpoint from which this job goes on, if any, is of one with the same samples.

        Raises:
            StateError: it is of one with others.
        """
        if self._went_back is not None:
            self._went_back.saved.check("objects", layout.cursor)
            member.checkpoints.resumed(member.group, self._went_back, 0)
            self._went_back = None

    def move(self, member: Member, group: Group, verdict: Verdict) -> int:
        """Brings the state to those that lack it; returns the bytes that this worker received.

        Nobody receives a state that is not that of most members that hold one: where it is to be repaired, the others
        receive it, too.

        Raises:
            ReplicasDiffer: it is not the same, and is not to be repaired.
            StepInterrupted: a peer was lost, or the generation changed.
        """
        try:
            found = self.watch.compare(group, self.objects if self.holds else None, verdict.step)
        except StateError as error:
            member.abandon(str(error))
            raise
        if found is not None:
            others = tuple(sorted({*verdict.receivers, *found.receivers}))
            verdict = replace(verdict, sources=found.sources, receivers=others)
            self.holds = group.rank in found.sources
        received_bytes, self.step = move_objects(group, verdict, self._whole(), self.step)
        return received_bytes

    def at_boundary(self, member: Member, group: Group, saving: bool) -> None:
        """Sees to it that all members hold the same, where that is to be compared at this step boundary.

        Raises:
            StateError: they do not, or calls of `step` differed.
            StepInterrupted: a peer was lost, or the generation changed.
        """
        try:
            verdict = self.watch.at_boundary(group, self.objects, self.step, saving)
        except StateError as error:
            member.abandon(str(error))
            raise
        if verdict is None:
            return
        if group.rank == 0:
            member.send("replicas_repaired", {"step": self.step, **verdict.facts[0]})
        # Who is interrupted here has something of both states.
        self.holds = group.rank in verdict.sources
        move_objects(group, verdict, self._whole(), self.step)
        self.holds = True
