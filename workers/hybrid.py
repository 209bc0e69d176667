"""What a script whose model is a list of layers talks to: `hybrid()` and its `HybridJob`.

    job = elaunch.hybrid()
    job.engine(layers, loss_fn, AdamW, plan, dataset=dataset)
    for report in job.steps(1000):
        ...

Like `Job`, it is written on the hook protocol.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NoReturn

import torch

from elaunch.detect.devices import Clocks
from elaunch.detect.heartbeat import Phase
from elaunch.detect.nvml import NvmlClocks, gpu_of
from elaunch.errors import StateError, StateLost, StepInterrupted
from elaunch.plan.tiling import Plan, PlanError
from elaunch.policy.selector import Decision, History, Selector, make_selector
from elaunch.policy.settings import from_environment
from elaunch.policy.structure import NotPossible
from elaunch.rendezvous.membership import Generation, names_text
from elaunch.wire import Finished, Leaving, Report
from elaunch.workers import agent_client, pulse
from elaunch.workers.checkpoints import Checkpoints
from elaunch.workers.clocks import Governor
from elaunch.workers.comm.fabric import Fabric
from elaunch.workers.comm.group import Group
from elaunch.workers.engine import data
from elaunch.workers.engine.engine import Engine, StepReport
from elaunch.workers.engine.executor import LossFunction
from elaunch.workers.engine.layers import Factory
from elaunch.workers.engine.shards import MakeOptimizer
from elaunch.workers.engine.standing import Commit
from elaunch.workers.engine.timing import Stopwatch
from elaunch.workers.hooks import CONNECT_TIMEOUT_S, Left, Membership, Verdict, Vote, tells_again
from elaunch.workers.session import NEVER, SPEEDS_CHANGED, choose_device, send_news

_REFUSED = b"refused "
"""Before the reasons why there is no plan."""


class HybridJob:
    """A job whose model is cut over its workers, seen from one of them.

    Attributes:
        device: where this worker computes.
        find_clocks: gives what sets the clock of the device, for `--allow-dvfs`; may be set before `engine` is called.
    """

    def __init__(self, client: agent_client.Client) -> None:
        self._client = client
        self._fabric = Fabric(client.worker, client.token, client.host)
        self._checkpoints = Checkpoints(client)
        self._governor: Governor | None = None
        self.find_clocks: Callable[[], Clocks] = partial(_own_clocks, client.slot)
        self._membership = Membership(client, self._fabric, self)
        self._group: Group | None = None
        self._engine: Engine | None = None
        self._given: Plan | None = None
        self._home: Plan | None = None
        self._next: Decision | None = None
        self._selector: Selector | None = None
        self._memory_bytes: int | None = None
        self._history: History | None = None
        self._reconsider = False
        self._request = ""
        self._holds = False
        self._changeover = False
        self._last_step: dict[str, Any] | None = None
        self._commit_s = time.monotonic()
        self._finished = self._closed = False
        self.device = choose_device(client.slot)
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        """Position of this worker among the members."""
        return self._group.rank if self._group is not None else int(os.environ.get("RANK", 0))

    @property
    def size(self) -> int:
        """Number of members of the present generation."""
        return self._group.size if self._group is not None else int(os.environ.get("WORLD_SIZE", 1))

    @property
    def epoch(self) -> int:
        """Number of the present generation."""
        return self._membership.generation.epoch if self._group is not None else 0

    @property
    def step(self) -> int:
        """Number of the step in flight, which is also the number of steps that have committed."""
        return self._engine.step if self._engine is not None else 0

    @property
    def worker(self) -> str:
        """Identity of this worker: node/slot#incarnation."""
        return self._client.worker

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
        if not self._client.elastic:
            settings = {"snapshots": 0, **settings}
        wishes = from_environment(os.environ)
        if wishes.consistency is not None:
            settings["consistency"] = wishes.consistency
        if wishes.allow_dvfs and self._client.elastic:
            self._governor = Governor(self.find_clocks)
        self._engine = Engine(layers, loss_fn, optimizer, plan, device=self.device, joining=True, **settings)
        if self._client.elastic:
            self._memory_bytes = _memory_bytes(self.device)
            self._engine.check_widths(wishes.tp)
            widths = {len(tile.workers) for tile in plan.tiles}.union(wishes.tp) if wishes.tp else ()
            described, least = self._engine.described(), self._client.min_nodes
            self._selector = make_selector(
                self.worker, *described, "this job", min_nodes=least, widths=tuple(sorted(widths))
            )
        self._client.ready(self._fabric.address, takes_plans=True)
        self._settle()
        self._commit_s = time.monotonic()
        return self._engine

    def steps(self, count: int) -> Iterator[StepReport]:
        """Train until `count` steps of the job have committed, then wait for the other members.

        Raises:
            StateError: workers were lost, and with them parts of the state that nobody else has.
        """
        while self._made.step < count:
            yield self.train_step()
        self.finish()

    def train_step(self) -> StepReport:
        """Do one step, for a loop of one's own that calls `finish` at its end; the step's loss goes to the event log.

        A step that is interrupted is done again, by the members that are left.

        Raises:
            StateError: workers were lost, and with them parts of the state that nobody else has.
        """
        engine = self._made
        while True:
            self._settle()
            step = engine.step
            if self._membership.interrupted:
                self._agree(None)
                continue
            try:
                self._save()
                pulse.enter(Phase.STEP, step)
                self._train(engine)
                self._tell()
            except StepInterrupted as error:
                if engine.step > step:
                    self._tell()
                self._agree(error)
            if engine.step > step:
                assert engine.report is not None
                return engine.report

    def finish(self) -> None:
        """All steps are done: wait for the other members, so that nobody takes the end of one for a failure."""
        count = self.step
        while self._group is not None and not self._finished:
            self._settle()
            if self.step < count:
                self.train_step()  # it went back to a checkpoint
                continue
            try:
                self._checkpoints.last(self._group, self.step, self._made.durable)
                self._made.arrive()
                self._group.barrier()
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
            self._checkpoints.close()
            if self._selector is not None:
                self._selector.close()
            if self._governor is not None:
                self._governor.close()
            if self._engine is not None:
                self._engine.close()
            self._fabric.close()
            self._client.close()

    # -- steps and membership -----------------------------------------------------------------------------------

    @property
    def _made(self) -> Engine:
        if self._engine is None:
            raise StateError("call engine() first: the job has no model yet")
        return self._engine

    def _train(self, engine: Engine) -> None:
        """Try a step; with its barrier each tells the others what it has measured, and of changes to come."""
        note: dict[str, Any] = {"epoch": self._membership.newest_epoch()}
        selector, watch = self._selector, None
        if selector is not None:
            clocks = self._governor.range() if self._governor is not None and selector.known else None
            note |= selector.note(self._fabric.rates, self._memory_bytes, clocks, self._fabric.carried)
            if selector.measures() and not engine.changing:
                watch = Stopwatch(self.device, selector.meters())
        engine.train_step(note, watch)
        if selector is not None and watch is not None:
            selector.add(watch.turns(), watch.kept_bytes, engine.update_s, engine.n_owned)

    def _tell(self) -> None:
        """Report the step that has just committed; its barrier also told who knows of a planned change."""
        pulse.committed(self._made.step)
        self._note_step()
        changed_s = self._membership.committed()
        if self._selector is not None and changed_s is not None:
            self._selector.measured.change_took(changed_s)
        assert self._last_step is not None
        if self.rank == 0:
            self._client.send(Report("step", self._last_step))
        notes = self._made.notes
        self._changeover = self._membership.all_know(note["epoch"] for note in notes)
        if self._selector is not None and self._group is not None:
            said = dict(zip(self._group.members, notes))
            profile = self._selector.heard(said, self._last_step["seconds"], self._last_step["step"])
            self._reconsider = self._selector.due
            send_news(self._client, self._selector, profile, self.epoch)

    def _note_step(self) -> None:
        report = self._made.report
        assert report is not None
        now_s = time.monotonic()
        seconds, self._commit_s = now_s - self._commit_s, now_s
        self._last_step = self._described(report, seconds)

    def _agree(self, error: StepInterrupted | None) -> None:
        """Settle the step in flight with the survivors; the state moves before the next one."""
        self._changeover = self._reconsider = False
        try:
            self._membership.agree(error)
        except Left as left:
            self._leave(left)

    def _settle(self) -> None:
        """Between two steps: change over to a planned generation, or finish a recovery."""
        try:
            if self._changeover:
                if not self._membership.part():
                    self._change_over()
            elif self._reconsider:
                self._membership.reconsider(SPEEDS_CHANGED)
            self._changeover = self._reconsider = False
            self._membership.settle()
        except Left as left:
            self._leave(left)

    def _change_over(self) -> None:
        """Enter a planned generation, once everybody has the new values of the step before."""
        assert self._group is not None
        error: StepInterrupted | None = None
        try:
            if self._membership.all_leave:
                self._checkpoints.leave(self._group, self.step, self._made.durable)
            self._group.barrier()
        except StepInterrupted as interruption:
            error = interruption
        self._membership.agree(error)

    def _described(self, report: StepReport, seconds: float) -> dict[str, Any]:
        assert self._engine is not None
        return {
            "epoch": self._membership.generation.epoch,
            "step": report.step,
            "loss": report.loss,
            "samples": self._engine.plan.global_batch_size,
            "digest": data.digest(self._engine.sample_ids(report.step)),
            "members": len(self._membership.generation.workers),
            "seconds": round(seconds, 6),
        }

    def _save(self) -> None:
        """Between two steps: begin a checkpoint, if one is due."""
        assert self._group is not None
        self._checkpoints.boundary(self._group, self.step, self._made.durable)

    def _go_back(self, group: Group, plan: Plan, step: int, had: int) -> int:
        """Prepare to go on from a checkpoint, that of `step` or an older one.

        As far as anybody knows, `had` steps had committed before.
        """
        found = self._made.restore(group, plan, lambda read: self._checkpoints.restore(group, step, read))
        self._last_step = None
        self._checkpoints.resumed(group, found, had)
        return 0

    def _leave(self, left: Left) -> NoReturn:
        self._client.send(Leaving(self._made.step))
        self.close()
        raise SystemExit(0 if self._client.worker in left.generation.leaving else str(left))

    # -- hooks (elaunch.workers.hooks.Hooks) --------------------------------------------------------------------

    def vote(self) -> Vote:
        engine = self._made
        commit = engine.last_commit
        facts = {
            "commit": asdict(commit) if commit is not None else None,
            "home": str(self._home) if self._home is not None else "",
            "request": self._request,
            "history": self._selector.told_history() if self._selector is not None else None,
        }
        saved = self._checkpoints
        return Vote(engine.step, engine.entered, self._holds and engine.holds, facts, saved.newest(), saved.every)

    def pause(self) -> None:
        """Nothing runs in the background between steps."""

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        engine = self._made
        if engine.entered and engine.step == verdict.step:
            engine.drop()
        elif engine.entered:
            engine.apply(Commit(**verdict.facts[verdict.passed]["commit"]))
            self._note_step()
        last = self._last_step
        again = tells_again(verdict, generation, self._group, self.worker)
        if again and last is not None and last["step"] == verdict.step - 1:
            self._client.send(Report("step", last))

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        self._next = self._chosen(generation, group, verdict)
        return dict(self._next.event)

    def transfer(self, group: Group, verdict: Verdict) -> int:
        assert self._next is not None
        plan = self._next.plan
        wanted = self._made.links(plan, self.worker) | {self.worker}
        generation = self._membership.generation
        addresses = {worker.id: worker.address for worker in generation.workers if worker.id in wanted}
        self._fabric.connect(addresses, epoch=generation.epoch, timeout_s=CONNECT_TIMEOUT_S)
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
        self._group, self._home, self._request = group, self._next.home, generation.plan_request
        self._holds, self._changeover = True, False
        self._checkpoints.entered(group.members)
        if self._governor is not None:
            self._governor.hold(self._next.clock_mhz(self.worker))
        if self._selector is not None:
            said = verdict.facts[verdict.passed if not verdict.fresh else 0]["history"]
            self._selector.entered(self._next.plan, self._next.home, group.members, History.from_json(said))
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(group.rank), str(group.size)

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
            saved = self._checkpoints.newest()
            where = f"from its checkpoint after {saved} steps" if saved is not None else "from the start"
            raise StateError(
                f"{found.removeprefix(_REFUSED).decode()}; start the job with more workers or memory, and it goes on "
                f"{where}"
            )
        return Decision.from_bytes(found)

    def _decided(self, now: Plan, home: Plan, members: Sequence[str], more: str, leaving: Sequence[str]) -> bytes:
        assert self._selector is not None, "a membership that changes without an agent"
        gone = [worker for worker in now.idle if worker not in members]
        if gone and set(members) == set(now.workers) - set(gone):
            plan = replace(now, idle=tuple(worker for worker in now.idle if worker in members))
            reason = f"{names_text(gone)} left, and had nothing any more{more}"
            return replace(Decision.given(plan, "stay", reason), home=home).to_bytes()
        try:
            choice = self._selector.decide(now, home, [worker for worker in members if worker not in leaving])
            chosen = Decision.of(choice, self._selector.clocking(choice.plan), more)
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
