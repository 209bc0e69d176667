"""What a script whose model is a list of layers talks to: `hybrid()` and its `HybridJob` (DESIGN section 11, level 2).

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
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from elaunch.errors import LinkLost, StateError, StepInterrupted
from elaunch.rendezvous.membership import Generation
from elaunch.wire import Finished, Leaving, Progress, Report
from elaunch.workers import agent_client
from elaunch.workers.comm.fabric import Fabric
from elaunch.workers.comm.group import Group
from elaunch.workers.engine import data
from elaunch.workers.engine.engine import Engine, StepReport
from elaunch.workers.engine.executor import LossFunction
from elaunch.workers.engine.layers import Factory
from elaunch.workers.engine.messages import peers
from elaunch.workers.engine.shards import MakeOptimizer
from elaunch.workers.hooks import CONNECT_TIMEOUT_S, Left, Membership, Verdict, Vote
from elaunch.workers.plan.tiling import Plan
from elaunch.workers.session import NEVER, choose_device


class HybridJob:
    """A job whose model is cut over its workers, seen from one of them.

    Attributes:
        device: where this worker computes.
    """

    def __init__(self, client: agent_client.Client) -> None:
        self._client = client
        self._fabric = Fabric(client.worker, client.token, client.host)
        self._membership = Membership(client, self._fabric, self)
        self._group: Group | None = None
        self._engine: Engine | None = None
        self._commit_s = time.monotonic()
        self._finished = self._closed = False
        self.device = choose_device(client.slot)
        atexit.register(self.close)

    @property
    def rank(self) -> int:
        """Position of this worker among the members."""
        return self._group.rank if self._group is not None else int(os.environ.get("RANK", 0))

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
        """Wait until the workers are there, and make the engine of this one.

        Args:
            layers: functions that make the layers.
            loss_fn: mean loss over the rows, of (output of the last layer, target).
            optimizer: makes an elementwise optimizer for (name, part of a parameter) pairs.
            plan: for as many workers as the job has. Its workers, in the order in which it names them, become the
                members in the order of their ranks; so any names will do.
            settings: further arguments of `Engine`, `dataset` among them.

        Raises:
            PlanError: the plan does not tile layers and slots.
            StateError: it is for another number of workers, or the engine cannot be made so.
        """
        if self._engine is not None:
            raise StateError("engine() was called twice; a job trains one model")
        plan.validate()
        self._client.ready(self._fabric.address)
        try:
            self._membership.settle()
        except Left as left:
            self._leave(left)
        assert self._group is not None
        members = self._group.members
        if len(plan.workers) != len(members):
            raise StateError(
                f"the plan is for {len(plan.workers)} workers and the job has {len(members)} ({', '.join(members)}); "
                "start as many workers as the plan has, or give another plan"
            )
        here = plan.renamed(dict(zip(plan.workers, members, strict=True)))
        self._connect(here)
        self._engine = Engine(layers, loss_fn, optimizer, here, group=self._group, device=self.device, **settings)
        if self.rank == 0:
            self._client.send(
                Report(
                    "decision",
                    {
                        "epoch": self._membership.generation.epoch,
                        "policy": "given",
                        "reason": "the script gave the plan",
                        "candidates": [],
                        "plan": str(here),
                    },
                )
            )
        self._commit_s = time.monotonic()
        return self._engine

    def steps(self, count: int) -> Iterator[StepReport]:
        """Train until `count` steps of the job have committed, then wait for the other members.

        Raises:
            StateError: a worker was lost, and with it the part of the state that only it had.
        """
        while self._engine is None or self._engine.step < count:
            yield self.train_step()
        self.finish()

    def train_step(self) -> StepReport:
        """Do one step, for a loop of one's own that calls `finish` at its end; the step's loss goes to the event log.

        Raises:
            StateError: a worker was lost, and with it the part of the state that only it had.
        """
        if self._engine is None:
            raise StateError("call engine() first: the job has no model yet")
        step = self._engine.step
        try:
            self._engine.train_step()
        except StepInterrupted as error:
            if self._engine.step > step:
                self._tell()
            self._give_up(error)
        return self._tell()

    def _tell(self) -> StepReport:
        """Report the step that has just committed."""
        assert self._engine is not None
        report = self._engine.report
        assert report is not None
        self._membership.committed()
        now_s = time.monotonic()
        seconds, self._commit_s = now_s - self._commit_s, now_s
        if not report.step:
            self._client.send(Progress(1))
        if self.rank == 0:
            self._client.send(Report("step", self._described(report, seconds)))
        return report

    def finish(self) -> None:
        """All steps are done: wait for the other members, so that nobody takes the end of one for a failure."""
        if self._group is not None and not self._finished:
            try:
                self._group.barrier()
            except StepInterrupted as error:
                self._give_up(error)
            self._finished = True
            self._client.send(Finished())

    def close(self) -> None:
        """Leave the job. Called by itself at the end of the process."""
        if not self._closed:
            self._closed = True
            self._fabric.interrupt(NEVER)
            self._fabric.close()
            self._client.close()

    def _connect(self, plan: Plan) -> None:
        """Beside the links of the collectives, which in large groups are those to a few members only."""
        generation = self._membership.generation
        wanted = peers(plan, self.worker) | {self.worker}
        addresses = {worker.id: worker.address for worker in generation.workers if worker.id in wanted}
        try:
            self._fabric.connect(addresses, epoch=generation.epoch, timeout_s=CONNECT_TIMEOUT_S)
        except StepInterrupted as error:
            raise StateError(f"a worker was lost before the first step: {error}") from error

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

    def _give_up(self, error: StepInterrupted) -> NoReturn:
        assert self._engine is not None
        who = f"worker {error.peer} was lost" if isinstance(error, LinkLost) else "the membership changed"
        raise StateError(
            f"{who} in step {self._engine.step}: {error}. Each worker of this plan has a part of the state that no "
            "other has, so the job cannot go on; start it again"
        ) from error

    def _leave(self, left: Left) -> NoReturn:
        self._client.send(Leaving(0))
        self.close()
        raise SystemExit(0 if self._client.worker in left.generation.leaving else str(left))

    # -- hooks (elaunch.workers.hooks.Hooks) --------------------------------------------------------------------

    def vote(self) -> Vote:
        return Vote(step=self._engine.step if self._engine is not None else 0, holds=self._engine is not None)

    def pause(self) -> None:
        """Nothing runs in the background between steps."""

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        """The reports of steps are sent by the first member as they commit."""

    def plan(self, generation: Generation, verdict: Verdict) -> dict[str, Any]:
        return {}

    def transfer(self, group: Group, verdict: Verdict) -> int:
        """Every worker makes its own initial values."""
        return 0

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        self._group = group
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(group.rank), str(group.size)


def hybrid() -> HybridJob:
    """Attach this process to its job; under torchrun or plain Python, a job whose membership never changes.

    Raises:
        JobFailed: the agent, or under torchrun the store, does not answer.
    """
    return HybridJob(agent_client.connect())
