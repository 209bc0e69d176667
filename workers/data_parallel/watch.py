"""Sees to it that all members of a data-parallel job hold the same state, and change it alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elaunch.errors import StateError
from elaunch.replica_check import NAME, ReplicaCheck
from elaunch.workers import replicas
from elaunch.workers.barrier import StepRecord
from elaunch.workers.comm.group import Group
from elaunch.workers.data_parallel import calls
from elaunch.workers.data_parallel.calls import StepCalls
from elaunch.workers.hooks import Verdict
from elaunch.workers.replicas import ReplicasDiffer

_CURE = (
    "Something changed them on some workers only, such as code that runs once for each micro-batch, or a count of "
    "steps that a new worker began at 0: keep what changes the model, the optimizer or the learning rate after the "
    "loop over the micro-batches of `for step in job.steps(...)`, and take the count from `step.number`. {name}=N,"
    "repair copies the state of most workers to the others instead of ending the job"
)


@dataclass(frozen=True, slots=True)
class _Doubt:
    """Calls of `step` were not the same on all members of a generation: who was there at the barrier knows it."""

    generation: int
    step: int
    counts: Mapping[str, int] | None


class ReplicaWatch:
    """Compares what members hold and what they have called. All members make the same calls of it.

    Attributes:
        check: when they compare; that of the first member.
        calls: of `step`, since the last commit.
    """

    def __init__(self, check: ReplicaCheck) -> None:
        self.check = check
        self.calls = StepCalls()
        self._doubt: _Doubt | None = None
        self._done = (0, 0)
        self._alike: int | None = None

    def committed(self, whole: StepRecord | None, generation: int) -> None:
        """Takes note of a commit.

        Args:
            whole: the record of all members; None: the step committed by a recovery.
            generation: number of their generation.
        """
        counts = self.calls.committed()
        if whole is not None and calls.differ(whole.effects):
            self._doubt = _Doubt(generation, whole.step[0] - 1, counts)

    def is_due(self, group: Group, step: int, saving: bool) -> bool:
        """Returns whether the members compare at this step boundary; each does so once in a generation.

        Args:
            group: the members.
            step: number of steps that have committed.
            saving: whether a checkpoint begins here, or the job ends.
        """
        return self.check.is_due(step, saving) and self._done != (group.generation, step)

    def at_boundary(self, group: Group, objects: Mapping[str, Any], step: int, saving: bool) -> Verdict | None:
        """Compares what is to be compared at a step boundary.

        Returns:
            Who must get whose state; None: nobody.

        Raises:
            StateError: calls of `step` differed.
            ReplicasDiffer: the state does.
            StepInterrupted: a peer was lost, or the generation changed.
        """
        doubt, self._doubt = self._doubt, None
        doubted = doubt is not None and doubt.generation == group.generation
        if doubted and not self.check.repair:
            assert doubt is not None
            told = group.all_gather_json(doubt.counts)
            raise StateError(calls.text(group.members, told, doubt.step))
        if doubted or self.is_due(group, step, saving):
            verdict = self.compare(group, objects, step)
            self._done = (group.generation, step)
            return verdict
        return None

    def compare(self, group: Group, objects: Mapping[str, Any] | None, step: int) -> Verdict | None:
        """Compares the state of the members.

        Args:
            group: the members.
            objects: of this one; None: it holds nothing yet.
            step: number of steps that have committed.

        Returns:
            Who must get whose state; None: nobody.

        Raises:
            ReplicasDiffer: it is not the same, and is not to be repaired.
            StepInterrupted: a peer was lost, or the generation changed.
        """
        if not self.check.every:
            return None
        digests = None if objects is None else replicas.digests_of_objects(objects)
        if replicas.agree(group, None if digests is None else replicas.whole(digests)):
            self._alike = step
            return None
        told = group.all_gather_json(digests)
        differ = replicas.text(group.members, told, step, self._alike)
        most, others, _ = replicas.odd_ones(told)
        if not self.check.repair:
            raise ReplicasDiffer(f"{differ}. {_CURE.format(name=NAME)}")
        return Verdict(step, (), most, others, facts=({"differ": differ},))
