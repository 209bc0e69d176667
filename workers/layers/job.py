"""What a script whose model is a list of layers talks to: `hybrid()` and its `HybridJob`.

    job = elaunch.hybrid()
    job.engine(layers, loss_fn, AdamW, plan, dataset=dataset)
    for report in job.steps(1000):
        ...

Like `Job`, it is written on the hook protocol.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from elaunch import replica_check
from elaunch.detect.devices import Clocks
from elaunch.detect.heartbeat import Phase
from elaunch.detect.nvml import NvmlClocks, gpu_of
from elaunch.errors import StateError, StateLost, StepInterrupted
from elaunch.plan.executed import ExecutedStep, digest_of_plan
from elaunch.plan.tiling import Plan
from elaunch.policy.decision import Decision
from elaunch.policy.dvfs import ClockRange
from elaunch.policy.settings import from_environment
from elaunch.rendezvous.membership import Generation
from elaunch.replica_check import CHECK
from elaunch.workers import agent_client, heartbeat
from elaunch.workers.barrier import StepRecord
from elaunch.workers.clocks import Governor
from elaunch.workers.comm.group import Group
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.job import BaseJob
from elaunch.workers.layers.change.held_state import Commit, StepReport
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.executor import LossFunction
from elaunch.workers.layers.model import Factory
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.layers.shards import MakeOptimizer
from elaunch.workers.layers.timing import Stopwatch
from elaunch.workers.member.replans import ReplanCall, asked
from elaunch.workers.moments import host_clock_t
from elaunch.workers.recovery import CONNECT_TIMEOUT_S
from elaunch.workers.refusals import refuse_spare_state
from elaunch.workers.replicas import ReplicasDiffer
from elaunch.workers.runtime import Member


class _MeasuredStep(NamedTuple):
    """A step that was measured, and what held in it.

    Attributes:
        updated: elements that this worker updates.
        selects: the policy selector has asked for its figures.
        tells: the event log gets what was done in it.
    """

    watch: Stopwatch
    step: int
    generation: int
    plan: Plan
    updated: int
    selects: bool
    tells: bool


class HybridJob(BaseJob):
    """A job whose model is cut over its workers, seen from one of them.

    Attributes:
        find_clocks: gives what sets the clock of the device, for `--allow-dvfs`; may be set before `engine` is called.
    """

    def __init__(self, client: agent_client.Client) -> None:
        # Before the device is used: with the usual 8 queues, a receive that waits could hold up another group's send.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        self._governor: Governor | None = None
        self.find_clocks: Callable[[], Clocks] = partial(_own_clocks, client.local_rank)
        self._engine: Engine | None = None
        self._measured: _MeasuredStep | None = None
        self._told: tuple[int, Plan] | None = None  # a generation and its plan: the log has a step of this worker
        self._next: Decision | None = None
        self._call: ReplanCall | None = None  # by which the members go over to it
        self._holds = False
        self._replica_check = replica_check.from_environment(os.environ)
        self._compared = (0, 0)
        self._alike: int | None = None
        super().__init__(
            Member(
                client,
                self,
                durable=lambda: self._made.durable(),
                step=lambda: self.step,
                complete=lambda: self._made.arrive(),
                boundary=self._compare,
                closers=[self._close],
                native=True,
            )
        )
        self._member.native.needs = lambda members: self._made.needs

    @property
    def step(self) -> int:
        """Returns the number of the step in flight, which is also the number of steps that have committed."""
        return self._engine.step if self._engine is not None else 0

    def engine(
        self,
        layers: Sequence[Factory],
        loss_fn: LossFunction,
        optimizer: MakeOptimizer,
        plan: Plan,
        **settings: Any,
    ) -> Engine:
        """Makes the engine of this worker, and waits until it is a member.

        Who joins a running job gets its state here, or during its first step: until then its parameters mean nothing.
        Values that the script puts into the layers after this call count if no step has committed; in a job that goes
        on, its own values are put back before the next step.

        Args:
            layers: functions that make the layers.
            loss_fn: mean loss over the rows, of (output of the last layer, target).
            optimizer: makes an elementwise optimizer for (name, part of a parameter) pairs.
            plan: for as many workers as the job begins with. Its workers, in the order in which it names them, become
                the members in the order of their ranks; so any names will do.
            settings: the fields of `EngineSettings`, `dataset` among them; and, for loading ahead, `num_workers` and
                what else DataLoader takes for that.

        Raises:
            PlanError: the plan does not tile layers and samples.
            StateError: it is for another number of workers, or the engine cannot be made so.
        """
        if self._engine is not None:
            raise StateError("engine() was called twice; a job trains one model")
        plan.validate()
        if not self._member.elastic:
            settings = {"snapshots": 0, **settings}
        policy_config = from_environment(os.environ)
        if policy_config.consistency is not None:
            settings["consistency"] = policy_config.consistency
        if policy_config.allow_dvfs and self._member.elastic:
            self._governor = Governor(self.find_clocks)
        chosen = EngineSettings.of(device=self.device, **settings)
        self._engine = Engine(layers, loss_fn, optimizer, plan, chosen, joining=True, native=self._member.native)
        if self._member.elastic:
            self._member.policy.memory_bytes = _memory_bytes(self.device)
            self._engine.builder.check_widths(policy_config.tp)
            self._member.policy.clocks = self._clocks
        self._member.use_plans(plan, *self._engine.builder.described())
        self._member.join(takes_plans=True)
        self._engine.guard()
        return self._engine

    def steps(self, count: int) -> Iterator[StepReport]:
        """Trains until `count` steps of the job have committed, then waits for the other members.

        Raises:
            StateError: workers were lost, and with them parts of the state that nobody else has.
        """
        with self._made.builder.samples.until(count):
            while self._made.step < count or not self._member.finish():
                yield self.train_step()

    def train_step(self) -> StepReport:
        """Does one step, for a loop of one's own that calls `finish` at its end; the step's loss goes to the event log.

        A step that is interrupted is done again, by the members that are left.

        Raises:
            StateError: workers were lost, and with them parts of the state that nobody else has.
        """
        engine, member = self._made, self._member
        while True:
            member.begin_step()
            step = engine.step
            heartbeat.enter(Phase.STEP, step)
            try:
                self._train(engine)
                self._tell(engine)
                self._read_measured()
            except StepInterrupted as error:
                if engine.step > step:
                    self._tell(engine)
                member.agree(error)
            if engine.step > step:
                assert engine.report is not None
                return engine.report

    def replan(self, plan: Plan, weights_only: bool = False) -> Plan:
        """Goes over to another plan, before the step that comes; returns when it holds.

        All members call it alike, at the same step: whether and with which plan may depend on the job's step, and on
        nothing that differs between members. A worker that joins in between finds that the calls of this step which are
        over return at once.

        With `weights_only`, parameters and buffers alone follow the plan, until the next call without it: the
        optimizer's state stays where it is, in host memory, and no step can be done. A recovery ends that as well, with
        the plan that trains.

        Args:
            plan: for the same layers, batch and micro-batch. Its workers, in the order in which it names them, become
                the members in the order of their ranks; so any names will do. Members beyond them are idle. Where
                workers of the job are lost, the members go on as after any loss under this plan, and take it when
                everybody is back.
            weights_only: whether only parameters and buffers move.

        Returns:
            The plan that holds, with the names of the members; that is another one where members are lost, and where
            the others are further than this worker.

        Raises:
            PlanError: the plan does not tile layers and samples.
            StateError: it is for other layers, batch or micro-batch, or for too many workers; layers cannot be cut so;
                or the members asked for different plans.
            WentBack: the job went back to its checkpoint meanwhile; go on from its step.
        """
        engine = self._made
        plan.validate()
        widths = {len(tile.workers) for tile in plan.tiles}
        engine.builder.check_widths(widths, "replan(): a plan with tensor-parallel groups of ")
        self._member.replan(plan, weights_only, lambda: engine.under_way)
        return engine.plan

    def finish(self) -> None:
        """Waits for the other members when all steps are done, so that nobody takes an early end for a failure."""
        while not self._member.finish():
            self.train_step()
        self._made.builder.samples.close()

    def _close(self) -> None:
        if self._governor is not None:
            self._governor.close()
        if self._engine is not None:
            self._engine.close()

    # -- steps and membership -----------------------------------------------------------------------------------

    @property
    def _made(self) -> Engine:
        if self._engine is None:
            raise StateError("call engine() first: the job has no model yet")
        return self._engine

    def _train(self, engine: Engine) -> None:
        """Tries a step, measured if the selector wants it, or if it is the first whole one of a plan."""
        selector, watch, step, generation = self._member.selector, None, engine.step, self._member.generation.number
        selects = selector is not None and selector.measures()
        tells = self._member.elastic and not self._has_told(generation, engine.plan)
        if (selects or tells) and not engine.changing:
            watch = Stopwatch(self.device, selects and selector is not None and selector.meters(), layers=selects)
        barrier = self._pass_barrier if watch is None else watch.at_end(self._pass_barrier)
        engine.train_step(barrier, watch)
        if watch is not None:
            watch.ended(engine.update)
            self._measured = _MeasuredStep(watch, step, generation, engine.plan, engine.n_owned, selects, tells)
            if selects:  # what the log alone gets can wait until the step is reported
                self._read_measured()

    def _has_told(self, generation: int, plan: Plan) -> bool:
        """Whether the event log has got what this worker did in a step of this generation and plan."""
        return self._told is not None and self._told[0] == generation and self._told[1] is plan

    def _pass_barrier(self, record: StepRecord) -> StepRecord:
        """Passes the commit barrier; what was measured until the step before is told in it."""
        self._read_measured()
        return self._member.pass_barrier(record)

    def _read_measured(self) -> None:
        """Has the selector and the log take in what the last measured step has shown, once the device is at its end."""
        selector, measured = self._member.selector, self._measured
        if measured is None or not measured.watch.is_over:
            return
        self._measured, watch = None, measured.watch
        if measured.tells and not self._has_told(measured.generation, measured.plan):
            self._tell_actions(measured)
        is_present = measured.plan is self._made.plan  # else others have its layers now
        if selector is not None and measured.selects and is_present:
            figures = watch.kept_bytes, watch.update_s, measured.updated, watch.weights(), watch.overheads()
            selector.add(watch.turns(), *figures)

    def _tell_actions(self, measured: _MeasuredStep) -> None:
        """Tells the log when this worker did what it did in a step."""
        self._told = measured.generation, measured.plan
        plan, executed = digest_of_plan(measured.plan), measured.watch.executed()
        told = ExecutedStep.of(self.worker, measured.step, plan, *executed, host_clock_t())
        self._member.send("actions", {"generation": measured.generation, **told.fields()})

    def _compare(self, group: Group, saving: bool) -> None:
        """Compares the replicas of layers where that is due; never while layers move."""
        engine, at = self._made, (group.generation, self.step)
        if not self._replica_check.is_due(self.step, saving) or self._compared == at or engine.changing:
            return
        try:
            differ = engine.check_replicas(self._alike, self._replica_check.repair)
        except ReplicasDiffer as error:
            self._member.abandon(str(error))
            raise
        if differ is not None and group.rank == 0:
            self._member.send("replicas_repaired", {"step": self.step, "differ": differ})
        self._compared, self._alike = at, self.step

    def _clocks(self) -> ClockRange | None:
        selector = self._member.selector
        known = self._governor is not None and selector is not None and selector.known
        return self._governor.range() if known and self._governor is not None else None

    def _tell(self, engine: Engine) -> None:
        """Reports the step that has just committed."""
        report = engine.report
        assert report is not None
        self._member.report(report.step, loss=report.loss, sample_ids=engine.sample_ids(report.step))

    def _go_back(self, group: Group, plan: Plan, step: int, had: int) -> int:
        """Prepares to go on from a checkpoint, that of `step` or an older one.

        As far as anybody knows, `had` steps had committed before.
        """
        checkpoints = self._member.checkpoints
        found = self._made.restore(group, plan, lambda read: checkpoints.restore(group, step, read))
        self._member.forget_step()
        checkpoints.resumed(group, found, had)
        return 0

    # -- hooks (elaunch.workers.hooks.Hooks) --------------------------------------------------------------------

    def vote(self) -> Vote:
        """Returns how far it is and, as a fact, its last commit, which members one step behind may have to apply."""
        engine = self._made
        commit = engine.last_commit
        facts = {"commit": asdict(commit) if commit is not None else None, CHECK: str(self._replica_check)}
        return Vote(engine.step, engine.entered, self._holds and engine.holds, facts)

    def pause(self) -> None:
        """Leaves what was under way in native groups; nothing else runs in the background."""
        if self._engine is not None:
            self._engine.pause()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        """Applies the step that it entered, with the commit of a member that has it, or drops the step."""
        engine = self._made
        self._replica_check = replica_check.agreed(verdict.facts, self._replica_check)
        if engine.entered and engine.step == verdict.step:
            engine.drop()
        elif engine.entered:
            engine.apply(Commit(**verdict.facts[verdict.passed]["commit"]))

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        """Chooses the next plan with all other members; returns the fields of the `decision` event."""
        self._next, self._call = self._member.choose(generation, group, verdict), asked(verdict, generation)
        return dict(self._next.event)

    def transfer(self, group: Group, verdict: Verdict) -> int:
        """Moves the state to where the next plan wants it, or restores the checkpoint; returns the bytes received.

        Raises:
            StateLost: a part of the state is on no member, and there is no checkpoint.
        """
        assert self._next is not None
        plan = self._next.plan
        self._member.connect(self._made.links(plan, self.worker, group.domains) | {self.worker}, CONNECT_TIMEOUT_S)
        if verdict.fresh and verdict.saved is not None:
            return self._go_back(group, plan, verdict.saved, 0)
        if self._call is not None and self._call.weights_only:
            return self._made.lend(group, plan)
        try:
            return self._made.change(group, plan, verdict.step, pausing=self._call is not None)
        except StateLost:
            # All members find the same.
            if verdict.saved is None:
                raise
            return self._go_back(group, plan, verdict.saved, verdict.step)

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        """Installs the new plan and state, and sets the clock of this worker's device that the plan was priced with."""
        assert self._next is not None
        self._made.install()
        self._holds = True
        if self._governor is not None:
            self._governor.hold(self._next.clock_mhz(self.worker))


def _own_clocks(local_rank: int) -> Clocks:
    """Of the GPU that this worker computes on; it may be the only one that it sees (--virtual-local-rank)."""
    return NvmlClocks(gpu_of(int(os.environ.get("LOCAL_RANK", local_rank)), os.environ))


def _memory_bytes(device: torch.device) -> int | None:
    """Of an accelerator; what a host has is shared with who knows whom."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def hybrid() -> HybridJob:
    """Attaches this process to its job; under torchrun or plain Python, a job whose membership never changes.

    Raises:
        JobFailed: the agent, or under torchrun the store, does not answer.
        StateError: the job was started with --spare-state.
    """
    refuse_spare_state("elaunch.hybrid()")
    return HybridJob(agent_client.connect())
