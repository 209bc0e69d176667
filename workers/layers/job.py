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
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from elaunch.detect.devices import Clocks
from elaunch.detect.heartbeat import Phase
from elaunch.detect.nvml import NvmlClocks, gpu_of
from elaunch.errors import StateError, StateLost, StepInterrupted
from elaunch.plan.tiling import Plan, PlanError
from elaunch.policy.dvfs import ClockRange
from elaunch.policy.selector import Decision, make_selector
from elaunch.policy.settings import from_environment
from elaunch.policy.structure import NotPossible
from elaunch.rendezvous.membership import Generation, names_text
from elaunch.workers import agent_client, heartbeat
from elaunch.workers.clocks import Governor
from elaunch.workers.comm.group import Group
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.layers.engine import Engine, StepReport
from elaunch.workers.layers.executor import LossFunction
from elaunch.workers.layers.held_state import Commit
from elaunch.workers.layers.model import Factory
from elaunch.workers.layers.shards import MakeOptimizer
from elaunch.workers.layers.timing import Stopwatch
from elaunch.workers.recovery import CONNECT_TIMEOUT_S
from elaunch.workers.runtime import Member, history_of

_REFUSED = b"refused "
"""Before the reasons why there is no plan."""


class HybridJob:
    """A job whose model is cut over its workers, seen from one of them.

    Attributes:
        find_clocks: gives what sets the clock of the device, for `--allow-dvfs`; may be set before `engine` is called.
    """

    def __init__(self, client: agent_client.Client) -> None:
        self._governor: Governor | None = None
        self.find_clocks: Callable[[], Clocks] = partial(_own_clocks, client.slot)
        self._engine: Engine | None = None
        self._given: Plan | None = None
        self._home: Plan | None = None
        self._next: Decision | None = None
        self._request = ""
        self._holds = False
        self._member = Member(
            client,
            self,
            durable=lambda: self._made.durable(),
            step=lambda: self.step,
            complete=lambda: self._made.arrive(),
            closers=[self._close],
        )

    @property
    def device(self) -> torch.device:
        """Where this worker computes."""
        return self._member.device

    @property
    def rank(self) -> int:
        """Position of this worker among the members."""
        return self._member.rank

    @property
    def size(self) -> int:
        """Number of members of the present generation."""
        return self._member.size

    @property
    def generation(self) -> int:
        """Number of the present generation."""
        return self._member.generation.number if self._member.joined else 0

    @property
    def step(self) -> int:
        """Number of the step in flight, which is also the number of steps that have committed."""
        return self._engine.step if self._engine is not None else 0

    @property
    def worker(self) -> str:
        """Identity of this worker: node/slot#incarnation."""
        return self._member.worker

    def engine(
        self,
        layers: Sequence[Factory],
        loss_fn: LossFunction,
        optimizer: MakeOptimizer,
        plan: Plan,
        **settings: Any,
    ) -> Engine:
        """Make the engine of this worker, and wait until it is a member.

        Who joins a running job gets its state here, or during its first step: until then its parameters mean nothing.

        Args:
            layers: functions that make the layers.
            loss_fn: mean loss over the rows, of (output of the last layer, target).
            optimizer: makes an elementwise optimizer for (name, part of a parameter) pairs.
            plan: for as many workers as the job begins with. Its workers, in the order in which it names them, become
                the members in the order of their ranks; so any names will do.
            settings: further arguments of `Engine`, `dataset` among them.

        Raises:
            PlanError: the plan does not tile layers and slots.
            StateError: it is for another number of workers, or the engine cannot be made so.
        """
        if self._engine is not None:
            raise StateError("engine() was called twice; a job trains one model")
        plan.validate()
        self._given = plan
        if not self._member.elastic:
            settings = {"snapshots": 0, **settings}
        policy_config = from_environment(os.environ)
        if policy_config.consistency is not None:
            settings["consistency"] = policy_config.consistency
        if policy_config.allow_dvfs and self._member.elastic:
            self._governor = Governor(self.find_clocks)
        self._engine = Engine(layers, loss_fn, optimizer, plan, device=self.device, joining=True, **settings)
        if self._member.elastic:
            self._member.memory_bytes = _memory_bytes(self.device)
            self._engine.check_widths(policy_config.tp)
            widths = {len(tile.workers) for tile in plan.tiles}.union(policy_config.tp) if policy_config.tp else ()
            described, least = self._engine.described(), self._member.min_nodes
            self._member.selector = make_selector(
                self.worker, *described, "this job", min_nodes=least, widths=tuple(sorted(widths))
            )
            self._member.clocks = self._clocks
        self._member.join(takes_plans=True)
        return self._engine

    def steps(self, count: int) -> Iterator[StepReport]:
        """Train until `count` steps of the job have committed, then wait for the other members.

        Raises:
            StateError: workers were lost, and with them parts of the state that nobody else has.
        """
        while self._made.step < count or not self._member.finish():
            yield self.train_step()

    def train_step(self) -> StepReport:
        """Do one step, for a loop of one's own that calls `finish` at its end; the step's loss goes to the event log.

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
            except StepInterrupted as error:
                if engine.step > step:
                    self._tell(engine)
                member.agree(error)
            if engine.step > step:
                assert engine.report is not None
                return engine.report

    def finish(self) -> None:
        """Waits for the other members when all steps are done, so that nobody takes an early end for a failure."""
        while not self._member.finish():
            self.train_step()

    def close(self) -> None:
        """Leave the job. Called by itself at the end of the process."""
        self._member.close()

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
        """Tries a step, measured if the selector wants it."""
        selector, watch = self._member.selector, None
        if selector is not None and selector.measures() and not engine.changing:
            watch = Stopwatch(self.device, selector.meters())
        engine.train_step(self._member.pass_barrier, watch)
        if selector is not None and watch is not None:
            selector.add(watch.turns(), watch.kept_bytes, engine.update_s, engine.n_owned)

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
        """Prepare to go on from a checkpoint, that of `step` or an older one.

        As far as anybody knows, `had` steps had committed before.
        """
        checkpoints = self._member.checkpoints
        found = self._made.restore(group, plan, lambda read: checkpoints.restore(group, step, read))
        self._member.forget_step()
        checkpoints.resumed(group, found, had)
        return 0

    # -- hooks (elaunch.workers.hooks.Hooks) --------------------------------------------------------------------

    def vote(self) -> Vote:
        engine = self._made
        commit = engine.last_commit
        facts = {
            "commit": asdict(commit) if commit is not None else None,
            "home": str(self._home) if self._home is not None else "",
            "request": self._request,
        }
        return Vote(engine.step, engine.entered, self._holds and engine.holds, facts)

    def pause(self) -> None:
        """Nothing runs in the background between steps."""

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        engine = self._made
        if engine.entered and engine.step == verdict.step:
            engine.drop()
        elif engine.entered:
            engine.apply(Commit(**verdict.facts[verdict.passed]["commit"]))

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        self._next = self._chosen(generation, group, verdict)
        return dict(self._next.event)

    def transfer(self, group: Group, verdict: Verdict) -> int:
        assert self._next is not None
        plan = self._next.plan
        self._member.connect(self._made.links(plan, self.worker) | {self.worker}, CONNECT_TIMEOUT_S)
        if verdict.fresh and verdict.saved is not None:
            return self._go_back(group, plan, verdict.saved, 0)
        try:
            return self._made.change(group, plan, verdict.step)
        except StateLost:
            # All members find the same.
            if verdict.saved is None:
                raise
            return self._go_back(group, plan, verdict.saved, verdict.step)

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        assert self._next is not None
        self._made.install()
        self._home, self._request, self._holds = self._next.home, generation.plan_request, True
        if self._governor is not None:
            self._governor.hold(self._next.clock_mhz(self.worker))
        if self._member.selector is not None:
            self._member.selector.entered(self._next.plan, self._next.home, group.members, history_of(verdict))

    def _chosen(self, generation: Generation, group: Group, verdict: Verdict) -> Decision:
        """The next plan; the same on all members."""
        assert self._given is not None
        members = generation.ids
        if verdict.fresh:
            if len(self._given.workers) == len(members):
                here = self._given.renamed(dict(zip(self._given.workers, members, strict=True)))
                return Decision.given(here, "given", "the script gave the plan")
            if verdict.saved is None:
                raise StateError(
                    f"the plan is for {len(self._given.workers)} workers and the job has {len(members)} "
                    f"({', '.join(members)}); start as many workers as the plan has, or give another plan"
                )
            return self._told(group, 0, self._given, self._given)
        said = verdict.facts[verdict.passed]
        refused = ""
        home = Plan.parse(said["home"])
        if generation.plan_request != said["request"] and generation.plan:
            asked = Plan.parse(generation.plan)
            refused = _unfit(asked, home, members)
            if not refused:
                return Decision.given(asked, "asked", "the plan was asked for")
            refused = f"; the plan asked for {refused}"
        now = self._made.plan if group.rank == verdict.passed else None
        return self._told(group, verdict.passed, now, home, refused, verdict.leaving)

    def _told(
        self,
        group: Group,
        who: int,
        now: Plan | None,
        home: Plan,
        more: str = "",
        leaving: Sequence[str] = (),
    ) -> Decision:
        """What one member chooses: what was measured and planned ahead differs between members.

        Args:
            group: of all members.
            who: chooses.
            now: the plan by which the state is distributed; there, it must be given.
            home: with all places filled.
            more: for the reason.
            leaving: members that are to have nothing.

        Raises:
            StateError: there is no plan for these members.
        """
        mine = b""
        if group.rank == who:
            assert now is not None
            mine = self._decided(now, home, group.members, more, leaving)
        found = group.all_gather_bytes(mine)[who]
        if found.startswith(_REFUSED):
            saved = self._member.checkpoints.newest()
            where = f"from its checkpoint after {saved} steps" if saved is not None else "from the start"
            raise StateError(
                f"{found.removeprefix(_REFUSED).decode()}; start the job with more workers or memory, and it goes on "
                f"{where}"
            )
        return Decision.from_bytes(found)

    def _decided(self, now: Plan, home: Plan, members: Sequence[str], more: str, leaving: Sequence[str]) -> bytes:
        selector = self._member.selector
        assert selector is not None, "a membership that changes without an agent"
        gone = [worker for worker in now.idle if worker not in members]
        if gone and set(members) == set(now.workers) - set(gone):
            plan = replace(now, idle=tuple(worker for worker in now.idle if worker in members))
            reason = f"{names_text(gone)} left, and had nothing any more{more}"
            return replace(Decision.given(plan, "stay", reason), home=home).to_bytes()
        try:
            choice = selector.decide(now, home, [worker for worker in members if worker not in leaving])
            chosen = Decision.of(choice, selector.clocking(choice.plan), more)
            return chosen.with_idle(leaving).to_bytes()
        except NotPossible as error:
            return _REFUSED + str(error).encode()


def _unfit(asked: Plan, home: Plan, members: Sequence[str]) -> str:
    """Why a plan that was asked for cannot be done; empty if it can."""
    sizes, ours = ((plan.n_layers, plan.global_batch_size, plan.micro_batch_size) for plan in (asked, home))
    if sizes != ours:
        return f"has (layers, batch, micro-batch) {sizes}, and the job has {ours}"
    if set(asked.workers) != set(members):
        return f"is for {', '.join(asked.workers)}, and the members are {', '.join(members)}"
    try:
        asked.validate(members)
    except PlanError as error:
        return str(error)
    return ""


def _own_clocks(slot: int) -> Clocks:
    """Of the GPU that this worker computes on; it may be the only one that it sees (--virtual-local-rank)."""
    return NvmlClocks(gpu_of(int(os.environ.get("LOCAL_RANK", slot)), os.environ))


def _memory_bytes(device: torch.device) -> int | None:
    """Of an accelerator; what a host has is shared with who knows whom."""
    if device.type == "cpu":
        return None
    return int(torch.get_device_module(device).mem_get_info(device)[1])


def hybrid() -> HybridJob:
    """Attach this process to its job; under torchrun or plain Python, a job whose membership never changes.

    Raises:
        JobFailed: the agent, or under torchrun the store, does not answer.
    """
    return HybridJob(agent_client.connect())
