"""`attach()`: this process as a worker whose framework implements the hooks itself."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from elaunch.checkpoints import FOLDER
from elaunch.errors import StateError, StateLost, UsageError
from elaunch.rendezvous.membership import Generation
from elaunch.workers import agent_client
from elaunch.workers.comm.group import Group
from elaunch.workers.hooks import Hooks, Verdict, Vote
from elaunch.workers.refusals import refuse_spare_state
from elaunch.workers.runtime import Member

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.frameworks.copies import CopyKey, SpaceCopies
    from elaunch.workers.state.checkpoint import CheckpointShard
    from elaunch.workers.state.tensors import TensorSpace


class Savable(Hooks, Protocol):
    """Hooks of a framework whose state can be saved by `--checkpoint-dir`."""

    def hold(self) -> TensorSpace:
        """Returns the framework's space, after it was made to hold the tensors of this moment.

        It is called between two steps, by the training thread, and before `transfer`.
        """


class _SavableHooks:
    """The hooks of a framework, and what copies and a checkpoint take: the state of its space, out of it and back."""

    def __init__(self, hooks: Savable, copies: SpaceCopies | None) -> None:
        self._hooks, self._copies = hooks, copies
        self._went_back_to: int | None = None
        self.member: Member  # set as soon as there is one, which needs these hooks

    def durable(self) -> CheckpointShard:
        """Returns what this worker adds to a checkpoint; the tensors are the live ones."""
        from elaunch.workers.state.spaces import part_of

        return part_of(self._hooks.hold(), self.member.worker)

    def boundary(self, group: Group, _: bool) -> None:
        """Begins the copy of the state at a step boundary."""
        if self._copies is not None and self.member.elastic:
            self._copies.begin(group, self._hooks.hold(), self._hooks.vote().step)

    def finish_copy(self) -> int | None:
        """Returns when the copy of the last step is complete, and of how many steps it is: the next one may commit."""
        if self._copies is None:
            return None
        self._copies.finish()
        return self._copies.newest

    def vote(self) -> Vote:
        return self._hooks.vote()

    def pause(self) -> None:
        self._hooks.pause()
        if self._copies is not None:
            self._copies.pause()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        self._hooks.agreed(generation, verdict)

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        return self._hooks.plan(generation, group, verdict)

    def transfer(self, group: Group, verdict: Verdict) -> int:
        self._went_back_to = None
        if verdict.fresh and verdict.saved is not None:
            return self._go_back(group, verdict, verdict.saved, 0)
        copied = None
        if self._copies is not None and not verdict.fresh:
            space = self._hooks.hold()
            space.stay()
            copied = self._copies.offer(group, space, verdict.step)
        # All members find the same.
        try:
            return self._hooks.transfer(group, verdict)
        except StateLost:
            if verdict.saved is None and copied is None:
                raise
        try:
            if copied is not None:
                return self._repeat(group, verdict, copied)
        except StateLost:
            self._went_back_to = None
            self._hooks.hold().stay()
            if verdict.saved is None:
                raise
        assert verdict.saved is not None
        return self._go_back(group, verdict, verdict.saved, verdict.step)

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        if self._went_back_to is not None:
            verdict = replace(verdict, step=self._went_back_to)
        if self._copies is not None:
            self._copies.resumed(verdict.step)
        self._hooks.resume(generation, group, verdict)

    def _repeat(self, group: Group, verdict: Verdict, key: CopyKey) -> int:
        """Has the framework's own transfer move copies of an older step, which was the last that all had copied."""
        assert self._copies is not None
        self._copies.go_back(self._hooks.hold(), key)
        received_bytes = self._hooks.transfer(group, verdict)
        self._went_back_to = key.step
        self.member.forget_step()
        if group.rank == 0:
            print(
                f"[elaunch] copies of step {verdict.step} were not complete when a worker was lost: going on from "
                f"step {key.step}",
                file=sys.stderr,
                flush=True,
            )
        return received_bytes

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


class _CopyingMember(Member):
    """A member that lets a step commit when the state before it has been copied."""

    def __init__(self, client: agent_client.Client, hooks: _SavableHooks, saves: bool) -> None:
        self._savable = hooks
        super().__init__(client, hooks, hooks.durable if saves else None, boundary=hooks.boundary, native=True)

    def commit(self, note: bytes = b"", copied: int | None = None) -> list[bytes]:
        """Passes the commit barrier, after the copy that was begun with the step is complete."""
        return super().commit(note, self._savable.finish_copy() if copied is None else copied)


def attach(hooks: Hooks, *, copies: int = 0) -> Member:
    """Attaches this process to its job, as a framework that implements the hooks.

    Under elaunch the job is elastic. Under torchrun, or in a plain Python process, its membership never changes. With
    `--checkpoint-dir` or copies the hooks need one more, `hold` (see `Savable`).

    Args:
        hooks: of the framework.
        copies: of what one worker alone holds, on others, on another node where there are several: 0 or 1. With one,
            the job survives the death of any worker in any layout. A copy is made and sent during the next step; it
            takes two copies of a worker's state in host memory, and two of what it keeps for another one.

    Raises:
        JobFailed: the agent, or under torchrun the store, does not answer.
        StateError: the job was started with --spare-state.
        UsageError: there are other copies than 0 or 1; or the job was started with --checkpoint-dir, or has copies, and
            the hooks have no `hold`.
    """
    refuse_spare_state("elaunch.attach()")
    folder = os.environ.get(FOLDER)
    if copies not in (0, 1):
        raise UsageError(f"elaunch.attach(copies={copies}): expected 0 or 1")
    if not folder and not copies:
        return Member(agent_client.connect(), hooks, native=True)
    if not callable(getattr(hooks, "hold", None)):
        given, what = (
            (f"--checkpoint-dir={folder} ({FOLDER}) was given", "save")
            if folder
            else (f"elaunch.attach(copies={copies}) was called", "copy")
        )
        raise UsageError(
            f"{given}, and the hooks that the script passes to elaunch.attach() "
            f"have no method hold(), which returns the TensorSpace to {what} (docs/hooks.md). Add it, or leave the "
            "option out and save the state in the script"
        )
    made = None
    if copies:
        from elaunch.workers.frameworks.copies import SpaceCopies

        made = SpaceCopies()
    savable = _SavableHooks(hooks, made)  # type: ignore[arg-type]
    member = _CopyingMember(agent_client.connect(), savable, saves=bool(folder))
    savable.member = member
    return member
