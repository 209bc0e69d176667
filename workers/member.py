"""What a training runtime needs beside its hooks: `attach()` and its `Member`.

member = elaunch.attach(hooks)
member.join()
while step < steps:
    with member.attempt():              # interrupted: the agreement is made, and the next attempt begins
        ...                             # forward, backward, gradients summed
        member.commit()
        ...                             # the update: nothing in it communicates
        step += 1
        member.report(step - 1)
member.finish()
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from torch.distributed.device_mesh import DeviceMesh

from elaunch.checkpoints import FOLDER
from elaunch.detect.heartbeat import Phase
from elaunch.errors import StateError, StepInterrupted, UsageError
from elaunch.rendezvous.membership import Generation
from elaunch.wire import Finished, Leaving, Report
from elaunch.workers import agent_client, pulse
from elaunch.workers.comm.fabric import Fabric
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.mesh import Meshes
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.engine import data
from elaunch.workers.hooks import Hooks, Left, Membership, Verdict, Vote, tells_again
from elaunch.workers.session import NEVER, choose_device

_LAST_STEP = "elaunch.last_step"
"""Among the facts of a vote: the report of the last step that the voter has committed."""


class Member:
    """This worker as a member of its job. All of it belongs to the training thread.

    Attributes:
        device: where this worker computes.
        entered: whether it has complete gradients of a step that has not committed: what it votes.
    """

    def __init__(self, client: agent_client.Client, hooks: Hooks) -> None:
        self._client = client
        self._fabric = Fabric(client.worker, client.token, client.host)
        self._around = _Around(self, hooks)
        self._membership = Membership(client, self._fabric, self._around)
        self._group: Group | None = None
        self._process_group: ElasticProcessGroup | None = None
        self._meshes = Meshes()
        self._changeover = False
        self._last_step: dict[str, Any] | None = None
        self._commit_s = time.monotonic()
        self._finished = self._closed = False
        self.entered = False
        self.device = choose_device(client.slot)
        atexit.register(self.close)

    @property
    def worker(self) -> str:
        """Identity of this worker: node/slot#incarnation."""
        return self._client.worker

    @property
    def elastic(self) -> bool:
        """Whether the membership can change: not under torchrun, nor in a plain Python process."""
        return self._client.elastic

    @property
    def generation(self) -> Generation:
        """The generation that this worker is a member of, or enters."""
        return self._membership.generation

    @property
    def interrupted(self) -> bool:
        """Whether the step in flight cannot commit any more."""
        return self._membership.interrupted

    @property
    def group(self) -> Group:
        """The members of the present generation, and their collectives; in `transfer`, already of the next one."""
        if self._group is None:
            raise StateError("call join() first: this worker is no member of its job yet")
        return self._group

    @property
    def rank(self) -> int:
        """Position of this worker in the group."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self.group.size

    @property
    def process_group(self) -> ElasticProcessGroup:
        """The default group of `torch.distributed`, over the group of the time. What is interrupted raises."""
        if self._process_group is None:
            self._process_group = ElasticProcessGroup(lambda: self.group)
            self._process_group.register()
        return self._process_group

    def mesh(self, shape: Sequence[int], names: Sequence[str], without: Collection[str] = ()) -> DeviceMesh | None:
        """A device mesh of the first members of the group, row by row; None if this worker has no place in it.

        All members make the same meshes in the same order. A mesh can be used until the next generation.

        Args:
            shape: of the mesh.
            names: of its axes.
            without: members that get no place, such as those that leave.

        Raises:
            ValueError: it has more places than there are members for it.
        """
        assert self.process_group is not None  # a mesh asks the default group for this worker's rank
        return self._meshes.make(self.group, self.device.type, shape, names, without)

    # -- the life of a member -----------------------------------------------------------------------------------

    def join(self, takes_plans: bool = False) -> None:
        """Become a member: all hooks are called once, and whoever joins a running job has its state after that.

        Args:
            takes_plans: whether `elaunch ctl plan` may ask for plans; then they come in `generation.plan`.

        Raises:
            StateError: the state of the job is lost.
        """
        self._client.ready(self._fabric.address, takes_plans)
        self.settle()
        self._commit_s = time.monotonic()

    def settle(self) -> None:
        """Between two steps: change over to a planned generation, or finish a recovery; else, nothing happens.

        Every attempt begins with it. It stands alone before a decision that all members must make alike.
        """
        try:
            if self._changeover:
                self._changeover = False
                if not self._membership.part():
                    self._membership.agree()
            self._membership.settle()
        except Left as left:
            self._leave(left)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Try a step. Where it is interrupted, the members agree on it, and the next attempt follows.

        Between two attempts the hooks may be called: the state may have moved, and the step may have committed.
        """
        self.settle()
        while self._membership.interrupted:
            self._agree(None)
            self.settle()
        pulse.enter(Phase.STEP)
        try:
            yield
        except StepInterrupted as error:
            self._agree(error)

    def commit(self, note: bytes = b"") -> list[bytes]:
        """Pass the commit barrier of the step in flight; returns what each member noted, in their order.

        From its call on this worker has complete gradients. When it returns the step has committed on all members: the
        update must follow, whatever happens.

        Raises:
            StepInterrupted: not all have come to the barrier.
        """
        self.entered = True
        said = self.group.all_gather_bytes(self._membership.newest_epoch().to_bytes(8, "little") + note)
        self.entered = False
        self._changeover = self._membership.all_know(int.from_bytes(one[:8], "little") for one in said)
        return [one[8:] for one in said]

    def report(self, step: int, *, loss: float | None = None, sample_ids: Iterable[int] = ()) -> None:
        """Tell the event log that a step has committed. All members call it, alike, after the update.

        Args:
            step: its number, from 0.
            loss: the mean over its samples.
            sample_ids: the samples that went into it, over all members.
        """
        pulse.committed(step + 1)
        now_s = time.monotonic()
        seconds, self._commit_s = now_s - self._commit_s, now_s
        ids = list(sample_ids)
        self._last_step = {
            "epoch": self._membership.generation.epoch,
            "step": step,
            "loss": loss,
            "samples": len(ids),
            "digest": data.digest(ids),
            "members": self.size,
            "seconds": round(seconds, 6),
        }
        self._membership.committed()
        if self.rank == 0:
            self._client.send(Report("step", self._last_step))

    def replan(self) -> None:
        """Between two steps, plan and move the state with the same members. All call it, alike, after `settle`.

        Where it is interrupted, all settle in the next generation, whose plan the hooks make anew.
        """
        try:
            self._membership.reconsider("another plan was asked for")
        except Left as left:
            self._leave(left)
        self.settle()

    def finish(self) -> None:
        """All steps are done: wait for the other members, so that nobody takes the end of one for a failure."""
        while not self._finished:
            self.settle()
            try:
                self.group.barrier()
                self._finished = True
                self._client.send(Finished())
                pulse.close()
            except StepInterrupted as error:
                self._agree(error)

    def close(self) -> None:
        """Leave the job. Called by itself at the end of the process."""
        if not self._closed:
            self._closed = True
            pulse.close()
            self._fabric.interrupt(NEVER)
            self._fabric.close()
            self._client.close()

    # -- membership ---------------------------------------------------------------------------------------------

    def _agree(self, error: StepInterrupted | None) -> None:
        """Settle the step in flight with the survivors; the state moves before the next one."""
        self._changeover = False
        try:
            self._membership.agree(error)
        except Left as left:
            self._leave(left)

    def _leave(self, left: Left) -> NoReturn:
        self._client.send(Leaving(self._around.vote().step))
        self.close()
        raise SystemExit(0 if self.worker in left.generation.leaving else str(left))


class _Around:
    """The hooks of the runtime, and what a member does at the same moments."""

    def __init__(self, member: Member, hooks: Hooks) -> None:
        self._member = member
        self._hooks = hooks
        self._resumed: Group | None = None

    def vote(self) -> Vote:
        vote = self._hooks.vote()
        return replace(vote, facts={**vote.facts, _LAST_STEP: self._member._last_step})

    def pause(self) -> None:
        self._hooks.pause()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        member = self._member
        self._hooks.agreed(generation, verdict)
        member.entered = False
        if generation.rank(member.worker) in verdict.committing:
            member._last_step = verdict.facts[verdict.passed][_LAST_STEP]
        last = member._last_step
        again = tells_again(verdict, generation, self._resumed, member.worker)
        if again and last is not None and last["step"] == verdict.step - 1:
            member._client.send(Report("step", last))

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        return self._hooks.plan(generation, group, verdict)

    def transfer(self, group: Group, verdict: Verdict) -> int:
        self._member._group = group
        return self._hooks.transfer(group, verdict)

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        self._resumed = group
        self._hooks.resume(generation, group, verdict)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(group.rank), str(group.size)


def attach(hooks: Hooks) -> Member:
    """Attach this process to its job, as a runtime that brings its own hooks.

    Under elaunch the job is elastic. Under torchrun, or in a plain Python process, its membership never changes.

    Raises:
        JobFailed: the agent, or under torchrun the store, does not answer.
        UsageError: the job was started with --checkpoint-dir, and a runtime of its own saves its state by itself.
    """
    if folder := os.environ.get(FOLDER):
        raise UsageError(
            f"--checkpoint-dir={folder} ({FOLDER}) is for elaunch.init() and elaunch.hybrid(); for a script that calls "
            "elaunch.attach() nothing would be saved. Leave it out, and save the state in the script"
        )
    return Member(agent_client.connect(), hooks)
