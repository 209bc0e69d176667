"""The runtime of a worker: commit barrier, checkpoints, policy selector, reports, and leaving.

`elaunch.init()` and `elaunch.hybrid()` are two implementations of `Hooks` over it, as any framework's is that calls
`attach()`:

    member = elaunch.attach(hooks)
    member.join()
    while step < steps or not member.finish():
        with member.attempt():              # interrupted: the agreement is made, and the next attempt begins
            ...                             # forward, backward, gradients summed
            member.commit()
            ...                             # the update: nothing in it communicates
            step += 1
            member.report(step - 1)
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from elaunch.detect.heartbeat import Phase
from elaunch.errors import StateError, StepInterrupted
from elaunch.plan.tiling import Plan
from elaunch.policy.collectives import in_order, uses_native
from elaunch.rendezvous.membership import Generation
from elaunch.wire import Abandoned, Finished, Leaving, Report
from elaunch.workers import agent_client, barrier, heartbeat
from elaunch.workers.barrier import UNSAID, StepRecord
from elaunch.workers.checkpoints import Checkpoints
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.link import NEVER
from elaunch.workers.comm.native.choice import maker
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.comm.transport import Transport
from elaunch.workers.device import take_device
from elaunch.workers.fatal import within
from elaunch.workers.hooks import Hooks, Verdict
from elaunch.workers.member.notes import Notes, pack
from elaunch.workers.member.planned import Planned
from elaunch.workers.member.policy import Policy
from elaunch.workers.member.reports import StepReports
from elaunch.workers.member.runtime_hooks import RuntimeHooks
from elaunch.workers.member.torch_groups import TorchGroups
from elaunch.workers.recovery import Left, Recovery

# torch.distributed.checkpoint and meshes take a second to import, and most jobs have none.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elaunch.workers.state.checkpoint import CheckpointShard

CLOSE_S = 120.0  # so long a worker may take to leave, after its last step
SPEEDS_CHANGED = "the speed of workers has changed"


class Member(Planned):
    """This worker as a member of its job. All of it belongs to the training thread.

    Args:
        client: the channel to this worker's agent.
        hooks: the framework's.
        durable: returns this worker's part of a checkpoint; None if the framework cannot save its state.
        step: returns the number of steps that have committed here; by default, what the hooks vote.
        complete: does what would have been done during the next step; called at the end, when there is none.
        boundary: called at each step boundary before the next step, with the members and whether a checkpoint begins
            there or the job ends.
        state_is_whole: whether every member holds the whole state, so that one that leaves has nothing to hand over.
        closers: called when this worker leaves the job, after its communication has been interrupted.
        transport: its links to other members; None: it makes its own.
        native: whether tensors may go over native groups of the members.

    Attributes:
        device: where this worker computes.
        checkpoints: its part in them.
        policy: its policy selector, and the plans of the job.
        native: the native groups of the members, and `torch_groups` what `torch.distributed` sees.
    """

    def __init__(
        self,
        client: agent_client.Client,
        hooks: Hooks,
        durable: Callable[[], CheckpointShard] | None = None,
        step: Callable[[], int] | None = None,
        complete: Callable[[], None] | None = None,
        boundary: Callable[[Group, bool], None] | None = None,
        state_is_whole: bool = False,
        closers: Sequence[Callable[[], None]] = (),
        transport: Transport | None = None,
        native: bool = False,
    ) -> None:
        self._client = client
        self._transport = (
            Transport(client.worker, client.token, client.host, client.security) if transport is None else transport
        )
        self._durable, self._complete, self._boundary = durable, complete, boundary
        self._state_is_whole, self._closers = state_is_whole, closers
        self.checkpoints = Checkpoints(client)
        self.policy = Policy(client, self.checkpoints.newest)
        self._reports = StepReports(client)
        self.device = take_device(client.local_rank)
        native = native and uses_native(os.environ, self.device.type)
        ordered = in_order(os.environ)
        self.native = NativeGroups(maker(client.host, self.device) if native else None, messages=ordered)
        self.native.load(self.device)
        self._transport.watch(self.native.poison)
        here = lambda: self.group, self.device.type, self.native, lambda: self.generation
        self.torch_groups = TorchGroups(*here, sums=not ordered)
        parts = self.checkpoints, self.policy, self._reports, self.native, self.torch_groups.works
        self._hooks = RuntimeHooks(client, hooks, step, *parts)
        self._recovery = Recovery(client, self._transport, self._hooks)
        self._notes = Notes()
        self._change_due = self._replan_due = False
        self._finished = self._closed = False
        atexit.register(self.close)

    @property
    def worker(self) -> str:
        """Identity of this worker: node/local_rank#incarnation."""
        return self._client.worker

    @property
    def elastic(self) -> bool:
        """Whether the membership can change: not under torchrun, nor in a plain Python process."""
        return self._client.elastic

    @property
    def min_nodes(self) -> int:
        """The least number of nodes of the job."""
        return self._client.min_nodes

    @property
    def joined(self) -> bool:
        """Whether this worker is a member of its job yet."""
        return self._hooks.group is not None

    @property
    def entered(self) -> bool:
        """Whether this worker has complete gradients of a step that has not committed: what it votes."""
        return self._hooks.entered

    @property
    def generation(self) -> Generation:
        """The generation that this worker is a member of, or enters."""
        return self._recovery.generation

    @property
    def interrupted(self) -> bool:
        """Whether the step in flight cannot commit any more."""
        return self._recovery.interrupted

    @property
    def group(self) -> Group:
        """The members of the present generation, and their collectives; in `transfer`, already of the next one."""
        group = self._hooks.group
        if group is None:
            raise StateError("call join() first: this worker is no member of its job yet")
        return group

    @property
    def rank(self) -> int:
        """Position of this worker in the group; before it has joined, what its agent has set."""
        group = self._hooks.group
        return group.rank if group is not None else int(os.environ.get("RANK", 0))

    @property
    def size(self) -> int:
        """Number of members; before this worker has joined, what its agent has set."""
        group = self._hooks.group
        return group.size if group is not None else int(os.environ.get("WORLD_SIZE", 1))

    @property
    def process_group(self) -> ElasticProcessGroup:
        """The default group of `torch.distributed`, over the group of the time. What is interrupted raises."""
        return self.torch_groups.default

    def mesh(self, shape: Sequence[int], names: Sequence[str], without: Collection[str] = ()) -> DeviceMesh | None:
        """Returns a device mesh of the first members of the group, row by row; None if this worker has no place in it.

        All members make the same meshes in the same order. A mesh can be used until the next generation.

        Args:
            shape: sizes of the mesh's axes.
            names: names of the axes.
            without: members that get no place, such as those that leave.

        Raises:
            MeshError: the mesh has more places than there are members for it; it names sizes and members.
        """
        return self.torch_groups.mesh(shape, names, without)

    # -- the life of a member -----------------------------------------------------------------------------------

    def join(self, takes_plans: bool = False) -> None:
        """Becomes a member: all hooks are called once, and whoever joins a running job has its state after that.

        Args:
            takes_plans: whether `elaunch ctl plan` may ask for plans; then they come in `generation.plan`.

        Raises:
            StateError: the state of the job is lost.
        """
        self.native.await_load()
        self._client.ready(self._transport.address, takes_plans)
        self.settle()
        self._reports.begin()

    def settle(self) -> None:
        """Changes over to a planned generation, or finishes a recovery, between two steps; else does nothing.

        Every attempt begins with it. It stands alone before a decision that all members must make alike.
        """
        try:
            if self._change_due:
                if self._state_is_whole or not self._recovery.part():
                    self._recovery.agree(self._complete_step())
            elif self._replan_due:
                self._recovery.reconsider(SPEEDS_CHANGED)
            self._change_due = self._replan_due = False
            self._recovery.settle()
        except Left as left:
            self._leave(left)

    def begin_step(self, prepare: Callable[[Group], None] | None = None) -> None:
        """Settles at a step boundary until a step can begin, and begins a checkpoint if one is due.

        Args:
            prepare: called at last, with the members, for what they have to agree on before the step.
        """
        while True:
            self.settle()
            try:
                if self._recovery.interrupted:
                    self.agree(None)
                    continue
                saves = self._durable is not None and self.checkpoints.is_due(self.group, self._hooks.step)
                if self._boundary is not None:
                    self._boundary(self.group, saves)
                if self._durable is not None and self.checkpoints.every:
                    self.checkpoints.boundary(self.group, self._hooks.step, self._durable)
                if prepare is not None:
                    prepare(self.group)
                self._hooks.swaps.begin(self.group, lambda: self._hooks.step)
                return
            except StepInterrupted as error:
                self.agree(error)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Tries a step. Where it is interrupted, the members agree on it, and the next attempt follows.

        Between two attempts the hooks may be called: the state may have moved, and the step may have committed.
        Until its first collective the attempt is the framework's own time, in which it may sleep (`script_code`).
        """
        self.begin_step()
        heartbeat.enter(Phase.SCRIPT)
        try:
            yield
        except (StepInterrupted, RuntimeError) as error:
            self.agree(self.torch_groups.works.interruption(error))

    def commit(self, note: bytes = b"", copied: int | None = None) -> list[bytes]:
        """Passes the commit barrier of the step in flight; returns what each member noted, in their order.

        From its call on this worker has complete gradients. When it returns the step has committed on all members: the
        update must follow, whatever happens.

        Args:
            note: bytes for all members.
            copied: number of steps of which other workers have in memory all that this one alone has; None: of none.

        Raises:
            StepInterrupted: not all have come to the barrier.
        """
        step = self._hooks.step
        self.pass_barrier(StepRecord.at(step, copied=UNSAID if copied is None else (copied, copied)), note)
        heartbeat.committed(step + 1)
        return self._notes.of_frameworks(self.size)

    def script_code(self) -> AbstractContextManager[None]:
        """Returns a context for code of the user that an attempt runs after its first collective, such as a callback.

        Code in it may sleep for longer than a step takes: a worker that does so is given as long as between two steps
        before it counts as one that hangs.
        """
        return heartbeat.script_code()

    def pass_barrier(self, record: StepRecord, note: bytes = b"") -> StepRecord:
        """Passes the commit barrier as `commit` does; returns the record of all members together.

        Args:
            record: what this member brings.
            note: bytes for all members, beside it.

        Raises:
            StepInterrupted: not all have come to the barrier.
            DifferentSettings: the members run with different settings.
        """
        self.torch_groups.works.finish()
        newest = self._recovery.newest_generation()
        packed = pack(self.policy.note(self._transport), note)
        notes = {self.group.rank: packed} if packed else {}
        ready = self.native.ready()
        brought = replace(
            record, generation=(newest, newest), native=(ready, ready), logged=self._reports.heard(), notes=notes
        )
        self._hooks.entered = True
        whole = barrier.reduce(self.group, brought)
        self._hooks.entered = False
        self._reports.hear(whole.logged)
        self._reports.copied = whole.copied[0] if whole.copied != UNSAID else None
        self._hooks.swaps.committed(self.group, whole)
        self._notes = Notes(whole.notes)
        self._change_due = self._recovery.all_know(whole.generation)
        return whole

    def report(self, step: int, *, loss: float | None = None, sample_ids: Iterable[int] = ()) -> None:
        """Tells the event log that a step has committed. All members call it, alike, after the update.

        Args:
            step: its number, from 0.
            loss: the mean over its samples.
            sample_ids: the samples that went into it, over all members.
        """
        group, generation = self.group, self.generation.number
        seconds = self._reports.tell(group, generation, step, loss, sample_ids)
        self.committed(step + 1)
        news = self.policy.heard(self._notes, generation, group.members, step, seconds)
        self._replan_due = self.policy.due
        for message in news:
            self._client.send(message)

    def committed(self, steps: int) -> None:
        """Tells that so many steps have committed here, also where the agreement of a recovery committed the last."""
        heartbeat.committed(steps)
        changed_s = self._recovery.committed(self._hooks.swaps.first_step)
        if changed_s is not None:
            self.policy.change_took(changed_s)

    @property
    def boundary_is_due(self) -> bool:
        """Whether the members, or their plan, change at the next step boundary: all members know the same."""
        return self._change_due or self._replan_due

    @property
    def last_loss(self) -> float | None:
        """The loss of the last step that has committed, as far as a member reported it or told this one of it."""
        return self._reports.last["loss"] if self._reports.last is not None else None

    def abandon(self, why: str) -> None:
        """Tells the agent that the job cannot go on, whoever is left of it: it ends, and is not started again."""
        self._client.send(Abandoned(" ".join(why.split())))

    def forget_step(self) -> None:
        """Forgets the last report of a step: the job goes on from a checkpoint."""
        self._reports.forget()
        self._hooks.replans.went_back()

    def replan(
        self, plan: Plan | None = None, weights_only: bool = False, under_way: Callable[[], Plan | None] = lambda: None
    ) -> None:
        """Plans and moves the state with the same members, between two steps. All call it, alike.

        Without a plan, after `settle`; where it is interrupted, all settle in the next generation, whose plan the hooks
        make anew.

        Args:
            plan: to go by; its workers, in the order in which it names them, become the members by rank. Hooks that
                call `choose` get it from there, others in `generation.plan`.
            weights_only: for hooks that tell weights from the rest.
            under_way: returns the plan of a change that the next step would complete.

        Raises:
            PlanError: the plan does not tile layers and samples.
            StateError: it is for another job, or the members asked for different ones.
            WentBack: the job went back to a checkpoint meanwhile.
        """
        if plan is None:
            self._reconsider("another plan was asked for")
            self.settle()
            return
        self.policy.check(plan, self.group.members)
        call = self._hooks.replans.begin(self._hooks.step, plan, weights_only)
        self._hooks.replans.carry_out(call, self.settle, self._reconsider, under_way)
        self._recovery.changed()

    def finish(self, is_over: Callable[[], bool] = lambda: True) -> bool:
        """Waits for the other members when all steps are done, so that nobody takes the end of one for a failure.

        Args:
            is_over: returns whether the job still ends at this step, which a change of members may have left open.

        Returns:
            False where it does not, or went back to a checkpoint meanwhile, and has steps to do again.
        """
        steps, at_end = self._hooks.step, False
        while not (self._finished or (at_end and self.generation.finished)):
            self.settle()
            if self._hooks.step < steps or not is_over():
                return False
            try:
                if self._boundary is not None:
                    self._boundary(self.group, True)
                if self._durable is not None:
                    self.checkpoints.last(self.group, steps, self._durable)
                if self._complete is not None:
                    self._complete()
                self.native.give_up()
                at_end = True
                self._reports.end(self.group)
                break
            except StepInterrupted as error:
                self.agree(error)  # where another member has finished, nobody needs any state any more
        if not self._finished:
            self._finished = True
            self._client.send(Finished())
            heartbeat.close()
        return True

    def close(self) -> None:
        """Leaves the job. Called by itself at the end of the process."""
        if not self._closed:
            self._closed = True
            heartbeat.close()
            # A script that failed in its backward may have left a collective behind, whose peers wait for this worker.
            self._transport.interrupt(NEVER)
            with within(CLOSE_S, "leaving"):
                for close in self._closers:
                    close()
                self.native.close()
                self.checkpoints.close()
                self.policy.close()
                self._transport.close()
                self._client.close()

    def send(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Writes an event to the log; the number of the generation is added."""
        self._client.send(Report(kind, {"generation": self._recovery.generation.number, **fields}))

    def connect(self, workers: Collection[str], timeout_s: float) -> None:
        """Makes links to some members of the generation that is being entered.

        Raises:
            StepInterrupted: a member does not answer, or the membership changes.
        """
        generation = self._recovery.generation
        addresses = {worker.id: worker.address for worker in generation.workers if worker.id in workers}
        self._transport.connect(addresses, generation=generation.number, timeout_s=timeout_s)

    # -- membership ---------------------------------------------------------------------------------------------

    def agree(self, error: StepInterrupted | None) -> Verdict:
        """Settles the step in flight with the survivors; the state moves before the next one.

        Args:
            error: what interrupted the step; None: the news of a change.
        """
        self._change_due = self._replan_due = False
        try:
            return self._recovery.agree(error)
        except Left as left:
            self._leave(left)

    def _reconsider(self, cause: str) -> None:
        try:
            self._recovery.reconsider(cause)
        except Left as left:
            self._leave(left)

    def _complete_step(self) -> StepInterrupted | None:
        """Completes the last step on all members before a planned change; returns what interrupted that.

        Where all members leave, the state goes to disk.
        """
        try:
            if self._recovery.all_leave and self._durable is not None:
                self.checkpoints.leave(self.group, self._hooks.step, self._durable)
            if self._recovery.first_leaves:
                self._reports.settle(self.group)
            elif not self._state_is_whole:
                self.group.barrier()
        except StepInterrupted as error:
            if self._state_is_whole:
                self._recovery.leave_if_due()
            return error
        return None

    def _leave(self, left: Left) -> NoReturn:
        """Ends this process: the members go on without it."""
        self._client.send(Leaving(self._hooks.step))
        self.close()
        if self.worker in left.generation.leaving:
            raise SystemExit(0)
        raise SystemExit(f"elaunch: worker {self.worker} was given up by its peers: {left}")
