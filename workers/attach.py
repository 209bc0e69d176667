"""`attach()`: this process as a worker whose framework implements the hooks itself."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from elaunch.checkpoints import FOLDER
from elaunch.errors import StateError, StateLost, UsageError
from elaunch.rendezvous.membership import Generation
from elaunch.workers import agent_client
from elaunch.workers.comm.group import Group
from elaunch.workers.hooks import Hooks, Verdict, Vote
from elaunch.workers.runtime import Member

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.state.checkpoint import CheckpointShard
    from elaunch.workers.state.tensors import TensorSpace


class Savable(Hooks, Protocol):
    """Hooks of a framework whose state can be saved by `--checkpoint-dir`."""

    def hold(self) -> TensorSpace:
        """Returns the framework's space, after it was made to hold the tensors of this moment.

        It is called between two steps, by the training thread, and before `transfer`.
        """


class _SavableHooks:
    """The hooks of a framework, and what a checkpoint takes: the state of its space, to the disk and back."""

    def __init__(self, hooks: Savable) -> None:
        self._hooks = hooks
        self._went_back_to: int | None = None
        self.member: Member  # set as soon as there is one, which needs these hooks

    def durable(self) -> CheckpointShard:
        """Returns what this worker adds to a checkpoint; the tensors are the live ones."""
        from elaunch.workers.state.spaces import part_of

        return part_of(self._hooks.hold(), self.member.worker)

    def vote(self) -> Vote:
        return self._hooks.vote()

    def pause(self) -> None:
        self._hooks.pause()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        self._hooks.agreed(generation, verdict)

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        return self._hooks.plan(generation, group, verdict)

    def transfer(self, group: Group, verdict: Verdict) -> int:
        self._went_back_to = None
        if verdict.fresh and verdict.saved is not None:
            return self._go_back(group, verdict, verdict.saved, 0)
        try:
            return self._hooks.transfer(group, verdict)
        except StateLost:
            # All members find the same.
            if verdict.saved is None:
                raise
            return self._go_back(group, verdict, verdict.saved, verdict.step)

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        if self._went_back_to is not None:
            verdict = replace(verdict, step=self._went_back_to)
        self._hooks.resume(generation, group, verdict)

    def _go_back(self, group: Group, verdict: Verdict, step: int, had: int) -> int:
        """Has the framework's own transfer read the checkpoint of `step`, or an older one, instead of peers' memory.

        As far as anybody knows, `had` steps had committed before.
        """
        from elaunch.workers.state.spaces import SpaceSource

        member = self.member
        source = SpaceSource(lambda read: member.checkpoints.restore(group, step, read))
        space = self._hooks.hold()
        with space.reading_from(source):
            received_bytes = self._hooks.transfer(group, verdict)
        if source.found is None:
            raise StateError(
                "the job goes on from a checkpoint, and transfer() did not call move() of the space that hold() returns"
            )
        self._went_back_to = source.found.saved.step
        member.forget_step()
        member.checkpoints.resumed(group, source.found, had)
        return received_bytes


def attach(hooks: Hooks) -> Member:
    """Attaches this process to its job, as a framework that implements the hooks.

    Under elaunch the job is elastic. Under torchrun, or in a plain Python process, its membership never changes. With
    `--checkpoint-dir` the hooks need one more, `hold` (see `Savable`).

    Raises:
        JobFailed: the agent, or under torchrun the store, does not answer.
        UsageError: the job was started with --checkpoint-dir, and the hooks have no `hold`.
    """
    folder = os.environ.get(FOLDER)
    if not folder:
        return Member(agent_client.connect(), hooks, native=True)
    if not callable(getattr(hooks, "hold", None)):
        raise UsageError(
            f"--checkpoint-dir={folder} ({FOLDER}) was given, and the hooks that the script passes to elaunch.attach() "
            "have no method hold(), which returns the TensorSpace to save (docs/hooks.md). Add it, or leave the option "
            "out and save the state in the script"
        )
    savable = _SavableHooks(hooks)  # type: ignore[arg-type]
    member = Member(agent_client.connect(), savable, savable.durable, native=True)
    savable.member = member
    return member
