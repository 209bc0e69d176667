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
import json
import os
import struct
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from elaunch.detect.heartbeat import Phase
from elaunch.errors import StateError, StepInterrupted
from elaunch.plan.tiling import Plan
from elaunch.policy.dvfs import ClockRange
from elaunch.policy.measure import Step
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.policy.selector import Decision, History, Selector, make_selector
from elaunch.rendezvous.membership import Generation
from elaunch.wire import Evict, Finished, Leaving, Profiled, Report
from elaunch.workers import agent_client, barrier, data, heartbeat
from elaunch.workers.barrier import StepRecord
from elaunch.workers.checkpoints import Checkpoints
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Hooks, Verdict, Vote
from elaunch.workers.planning import FACTS, Planner
from elaunch.workers.recovery import Left, Recovery, tells_again

# torch.distributed.checkpoint and meshes take a second to import, and most jobs have none.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elaunch.workers.comm.mesh import Meshes
    from elaunch.workers.state.checkpoint import Part

NEVER = 1 << 62  # above every generation's number
SPEEDS_CHANGED = "the speed of workers has changed"

_LAST_STEP, _HISTORY = "elaunch.last_step", "elaunch.history"
"""Among the facts of a vote: the report of the last step that the voter has committed, and what its selector knows."""

_LENGTH = struct.Struct("<I")


class Member:
    """This worker as a member of its job. All of it belongs to the training thread.

    Args:
        client: the channel to this worker's agent.
        hooks: the framework's.
        durable: returns this worker's part of a checkpoint; None if the framework cannot save its state.
        step: returns the number of steps that have committed here; by default, what the hooks vote.
        complete: does what would have been done during the next step; called at the end, when there is none.
        state_is_whole: whether every member holds the whole state, so that one that leaves has nothing to hand over.
        closers: called when this worker leaves the job, after its communication has been interrupted.

    Attributes:
        device: where this worker computes.
        entered: whether it has complete gradients of a step that has not committed: what it votes.
        selector: the policy selector, where the framework has one.
        memory_bytes, clocks: what the selector tells the other members of this worker's device, if it is known.
    """

    def __init__(
        self,
        client: agent_client.Client,
        hooks: Hooks,
        durable: Callable[[], Part] | None = None,
        step: Callable[[], int] | None = None,
        complete: Callable[[], None] | None = None,
        state_is_whole: bool = False,
        closers: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._client = client
        self._transport = Transport(client.worker, client.token, client.host)
        self._durable, self._complete = durable, complete
        self._state_is_whole, self._closers = state_is_whole, closers
        self._hooks = _RuntimeHooks(self, hooks, step)
        self._recovery = Recovery(client, self._transport, self._hooks)
        self._group: Group | None = None
        self._process_group: ElasticProcessGroup | None = None
        self._meshes: Meshes | None = None
        self._change_due = self._replan_due = False
        self._last_step: dict[str, Any] | None = None
        self._notes: Mapping[int, bytes] = {}
        self._commit_s = time.monotonic()
        self._finished = self._closed = False
        self.checkpoints = Checkpoints(client)
        self.selector: Selector | None = None
        self._planner: Planner | None = None
        self.memory_bytes: int | None = None
        self.clocks: Callable[[], ClockRange | None] = lambda: None
        self.entered = False
        self.device = choose_device(client.local_rank)
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
        return self._group is not None

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
        if self._group is None:
            raise StateError("call join() first: this worker is no member of its job yet")
        return self._group

    @property
    def rank(self) -> int:
        """Position of this worker in the group; before it has joined, what its agent has set."""
        return self._group.rank if self._group is not None else int(os.environ.get("RANK", 0))

    @property
    def size(self) -> int:
        """Number of members; before this worker has joined, what its agent has set."""
        return self._group.size if self._group is not None else int(os.environ.get("WORLD_SIZE", 1))

    @property
    def process_group(self) -> ElasticProcessGroup:
        """The default group of `torch.distributed`, over the group of the time. What is interrupted raises."""
        if self._process_group is None:
            self._process_group = ElasticProcessGroup(lambda: self.group)
            self._process_group.register()
        return self._process_group

    def mesh(self, shape: Sequence[int], names: Sequence[str], without: Collection[str] = ()) -> DeviceMesh | None:
        """Returns a device mesh of the first members of the group, row by row; None if this worker has no place in it.

        All members make the same meshes in the same order. A mesh can be used until the next generation.

        Args:
            shape: sizes of the mesh's axes.
            names: names of the axes.
            without: members that get no place, such as those that leave.

        Raises:
            ValueError: the mesh has more places than there are members for it.
        """
        from elaunch.workers.comm.mesh import Meshes

        if self._meshes is None:
            self._meshes = Meshes()
        assert self.process_group is not None  # a mesh asks the default group for this worker's rank
        return self._meshes.make(self.group, self.device.type, shape, names, without)

    # -- plans --------------------------------------------------------------------------------------------------

    def use_plans(self, plan: Plan, layers: Sequence[LayerProfile], elements: Sequence[int] | None = None) -> None:
        """Has the policy selector choose the plans of this job: call it before `join`, and `choose` in the hook `plan`.

        Args:
            plan: the one to begin with, for as many workers as there are then. Its workers, in the order in which it
                names them, become the members in the order of their ranks; so any names will do.
            layers: what is known of the layers beforehand; seconds may be 0, they are measured (`took`).
            elements: how many parameters each layer trains; for what the optimizer's step takes.

        Raises:
            PlanError: the plan does not tile layers and samples.
            StateError: it has another number of layers, or `--profile` is of another model.
        """
        plan.validate()
        if len(layers) != plan.n_layers:
            raise StateError(f"the plan has {plan.n_layers} layers, and {len(layers)} are described")
        if self.elastic:
            counts = [1] * len(layers) if elements is None else elements
            widths = {len(tile.workers) for tile in plan.tiles}
            self.selector = make_selector(
                self.worker, layers, counts, "this job", min_nodes=self.min_nodes, plan_widths=widths
            )
        self._planner = Planner(plan, self.selector, self.checkpoints.newest)

    def choose(self, generation: Generation, group: Group, verdict: Verdict) -> Decision:
        """Returns the plan by which the members go on, the same on all of them; for the hook `plan`, which gets these.

        One member asks its policy selector and tells the others. Where `elaunch ctl plan --set` has asked for a plan
        that these members can follow, it is that.

        Raises:
            StateError: there is no plan for these members.
        """
        if self._planner is None:
            raise StateError("call use_plans() before join(): this job has no plan to go on from")
        return self._planner.choose(generation, group, verdict)

    def took(self, seconds: float, rows: int) -> None:
        """Tells the selector what this worker's own part of the step under way took.

        For plans of a single layer; others measure by layer and call `selector.add`.

        Args:
            seconds: of computing, forward and backward, without waiting for other members.
            rows: of the plan's rows that were computed in them.
        """
        if self.selector is not None and rows and self.selector.measures():
            self.selector.add([Step.of(seconds, rows)], {}, 0.0, 0)

    # -- the life of a member -----------------------------------------------------------------------------------

    def join(self, takes_plans: bool = False) -> None:
        """Becomes a member: all hooks are called once, and whoever joins a running job has its state after that.

        Args:
            takes_plans: whether `elaunch ctl plan` may ask for plans; then they come in `generation.plan`.

        Raises:
            StateError: the state of the job is lost.
        """
        self._client.ready(self._transport.address, takes_plans)
        self.settle()
        self._commit_s = time.monotonic()

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

    def begin_step(self) -> None:
        """Settles at a step boundary until a step can begin, and begins a checkpoint if one is due."""
        while True:
            self.settle()
            try:
                if self._recovery.interrupted:
                    self.agree(None)
                    continue
                if self._durable is not None and self.checkpoints.every:
                    self.checkpoints.boundary(self.group, self._hooks.step, self._durable)
                return
            except StepInterrupted as error:
                self.agree(error)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Tries a step. Where it is interrupted, the members agree on it, and the next attempt follows.

        Between two attempts the hooks may be called: the state may have moved, and the step may have committed.
        """
        self.begin_step()
        heartbeat.enter(Phase.STEP)
        try:
            yield
        except StepInterrupted as error:
            self.agree(error)

    def commit(self, note: bytes = b"") -> list[bytes]:
        """Passes the commit barrier of the step in flight; returns what each member noted, in their order.

        From its call on this worker has complete gradients. When it returns the step has committed on all members: the
        update must follow, whatever happens.

        Raises:
            StepInterrupted: not all have come to the barrier.
        """
        self.pass_barrier(StepRecord.at(self._hooks.step), note)
        return [_unpacked(self._notes.get(rank, b""))[1] for rank in range(self.size)]

    def pass_barrier(self, record: StepRecord, note: bytes = b"") -> StepRecord:
        """Passes the commit barrier as `commit` does; returns the record of all members together.

        Args:
            record: what this member brings.
            note: bytes for all members, beside it.

        Raises:
            StepInterrupted: not all have come to the barrier.
            DifferentSettings: the members run with different settings.
        """
        newest = self._recovery.newest_generation()
        told = {}
        if self.selector is not None:
            told = self.selector.note(self._transport.rates, self.memory_bytes, self.clocks(), self._transport.carried)
        notes = {self.group.rank: _packed(told, note)} if told or note else {}
        self.entered = True
        whole = barrier.reduce(self.group, replace(record, generation=(newest, newest), notes=notes))
        self.entered = False
        self._notes = whole.notes
        self._change_due = self._recovery.all_know(whole.generation)
        return whole

    def report(self, step: int, *, loss: float | None = None, sample_ids: Iterable[int] = ()) -> None:
        """Tells the event log that a step has committed. All members call it, alike, after the update.

        Args:
            step: its number, from 0.
            loss: the mean over its samples.
            sample_ids: the samples that went into it, over all members.
        """
        now_s = time.monotonic()
        seconds, self._commit_s = now_s - self._commit_s, now_s
        ids = list(sample_ids)
        self._last_step = {
            "generation": self._recovery.generation.number,
            "step": step,
            "loss": loss,
            "samples": len(ids),
            "digest": data.digest(ids),
            "members": self.size,
            "seconds": round(seconds, 6),
        }
        if self.rank == 0:
            self._client.send(Report("step", self._last_step))
        self.committed(step + 1)
        if self.selector is not None:
            told = {
                member: json.loads(_unpacked(self._notes[rank])[0] or b"{}") if rank in self._notes else {}
                for rank, member in enumerate(self.group.members)
            }
            profile = self.selector.heard(told, seconds, step)
            self._replan_due = self.selector.due
            self._tell_news(self.selector, profile)

    def committed(self, steps: int) -> None:
        """Tells that so many steps have committed here, also where the agreement of a recovery committed the last."""
        heartbeat.committed(steps)
        changed_s = self._recovery.committed()
        if self.selector is not None and changed_s is not None:
            self.selector.measured.change_took(changed_s)

    def forget_step(self) -> None:
        """Forgets the last report of a step: the job goes on from a checkpoint."""
        self._last_step = None

    def replan(self) -> None:
        """Plans and moves the state with the same members, between two steps. All call it, alike, after `settle`.

        Where it is interrupted, all settle in the next generation, whose plan the hooks make anew.
        """
        try:
            self._recovery.reconsider("another plan was asked for")
        except Left as left:
            self._leave(left)
        self.settle()

    def finish(self) -> bool:
        """Waits for the other members when all steps are done, so that nobody takes the end of one for a failure.

        Returns:
            False where the job went back to a checkpoint meanwhile, and has steps to do again; call it again then.
        """
        steps = self._hooks.step
        while not self._finished:
            self.settle()
            if self._hooks.step < steps:
                return False
            try:
                if self._durable is not None:
                    self.checkpoints.last(self.group, steps, self._durable)
                if self._complete is not None:
                    self._complete()
                self.group.barrier()
                self._finished = True
                self._client.send(Finished())
                heartbeat.close()
            except StepInterrupted as error:
                self.agree(error)
        return True

    def close(self) -> None:
        """Leaves the job. Called by itself at the end of the process."""
        if not self._closed:
            self._closed = True
            heartbeat.close()
            # A script that failed in its backward may have left a collective behind, whose peers wait for this worker.
            self._transport.interrupt(NEVER)
            for close in self._closers:
                close()
            self.checkpoints.close()
            if self.selector is not None:
                self.selector.close()
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

    def _complete_step(self) -> StepInterrupted | None:
        """Completes the last step on all members before a planned change; returns what interrupted that.

        Where all members leave, the state goes to disk.
        """
        try:
            if self._recovery.all_leave and self._durable is not None:
                self.checkpoints.leave(self.group, self._hooks.step, self._durable)
            if not self._state_is_whole:
                self.group.barrier()
        except StepInterrupted as error:
            return error
        return None

    def _leave(self, left: Left) -> NoReturn:
        """Ends this process: the members go on without it."""
        self._client.send(Leaving(self._hooks.step))
        self.close()
        if self.worker in left.generation.leaving:
            raise SystemExit(0)
        raise SystemExit(f"elaunch: worker {self.worker} was given up by its peers: {left}")

    def _tell_news(self, selector: Selector, profile: Profile | None) -> None:
        """Tells the agent what the selector has found, and that this worker is to leave, if it is."""
        for event in selector.events():
            self.send("slow", event)
        if profile is not None:
            self._client.send(Profiled(profile.to_json()))
        excuse = selector.excused()
        if excuse is not None:
            self._client.send(Evict(excuse.replace, excuse.why))


class _RuntimeHooks:
    """The framework's hooks, and what the runtime does at the same moments."""

    def __init__(self, member: Member, hooks: Hooks, step: Callable[[], int] | None) -> None:
        self._member = member
        self._hooks = hooks
        self._step = step
        self._resumed: Group | None = None

    @property
    def step(self) -> int:
        """Number of steps that have committed here."""
        return self._step() if self._step is not None else self._hooks.vote().step

    def vote(self) -> Vote:
        member, vote = self._member, self._hooks.vote()
        facts = {**vote.facts, _LAST_STEP: member._last_step}
        if member.selector is not None:
            facts[_HISTORY] = member.selector.told_history()
        if member._planner is not None:
            facts[FACTS] = member._planner.facts()
        saved = member.checkpoints
        return replace(vote, facts=facts, saved=saved.newest(), every=saved.every)

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
        member = self._member
        if member._planner is not None:
            decision = member._planner.entered(generation)
            if member.selector is not None:
                member.selector.entered(decision.plan, decision.preferred_plan, group.members, history_of(verdict))
        member.entered = member._change_due = member._replan_due = False
        member.checkpoints.entered(group.members)
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(group.rank), str(group.size)


def history_of(verdict: Verdict) -> History | None:
    """Returns what a member that had committed all steps knew of the job's changes."""
    return History.from_json(verdict.facts[verdict.passed].get(_HISTORY))


def choose_device(local_rank: int) -> torch.device:
    """Returns the accelerator with this worker's local rank, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def _packed(told: Mapping[str, Any], note: bytes) -> bytes:
    """Returns a note of the barrier: what the selector tells, and what the framework notes."""
    text = json.dumps(told).encode() if told else b""
    return _LENGTH.pack(len(text)) + text + note


def _unpacked(note: bytes) -> tuple[bytes, bytes]:
    """Returns both parts of a note; they are empty where there is none."""
    if not note:
        return b"", b""
    end = _LENGTH.size + _LENGTH.unpack_from(note)[0]
    return note[_LENGTH.size : end], note[end:]
