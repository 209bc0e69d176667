"""What a training script talks to: `init()` and the `Job` that it returns.

A step is a transaction. The gradients of the last micro-batch are reduced while backward runs; the first call of a
registered optimizer's `step` after it passes the commit barrier, or recovers. Where the step commits, optimizers and
schedulers take effect; where it does not, they do nothing and `batches` yields the same step again.
"""

from __future__ import annotations

import functools
import json
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elaunch.detect.heartbeat import Phase
from elaunch.errors import StateError, StepInterrupted
from elaunch.plan.build import data_parallel
from elaunch.plan.shares import even_shares
from elaunch.plan.tiling import Plan, count_units, n_rows, size_findings
from elaunch.plan.views import shares_of, units_of
from elaunch.policy.candidates.balance import shares_by_speed
from elaunch.policy.decision import History
from elaunch.policy.profile import LayerProfile
from elaunch.policy.selector import make_selector
from elaunch.rendezvous.membership import Generation
from elaunch.workers import agent_client, data, heartbeat
from elaunch.workers.barrier import DifferentSettings, StepRecord, coverage_of
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.data_parallel.buffers import ModelBuffers
from elaunch.workers.data_parallel.gradients import DataParallel, GradientBuckets
from elaunch.workers.data_parallel.reducer import Reducer
from elaunch.workers.exact_sum import NOTHING, ExactSum
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.job import BaseJob
from elaunch.workers.random.rng import seed_micro_batch
from elaunch.workers.runtime import Member, history_of
from elaunch.workers.state.objects import fill, move_objects, part_of, read

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.state.checkpoint import Part, Restored


@dataclass(frozen=True, slots=True)
class _Layout:
    """What the samples of a step depend on; the same on all members."""

    global_batch_size: int
    micro_batch_size: int
    whole_shares: bool
    n_samples: int
    seed: int
    shuffle: bool

    @property
    def cursor(self) -> dict[str, Any]:
        """What a number of steps means."""
        return {
            "global_batch_size": self.global_batch_size,
            "samples in the data set": self.n_samples,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def code(self) -> int:
        return zlib.crc32(repr(self).encode())

    def plan(self, shares: Mapping[str, int]) -> Plan:
        """Returns the plan of a step by which each member does so many units."""
        return data_parallel(self.global_batch_size, self.micro_batch_size, shares, whole_shares=self.whole_shares)

    def fits(self, plan: Plan) -> bool:
        """Returns whether a plan is of such steps."""
        sizes = plan.global_batch_size, plan.micro_batch_size
        if self.whole_shares:
            cut_so = all(len(tile.micro_batches) == 1 for tile in plan.tiles)
        else:
            cut_so = all(n_rows(tile.micro_batches[0]) <= self.micro_batch_size for tile in plan.tiles)
        return cut_so and sizes == (self.global_batch_size, self.micro_batch_size)


class Job(BaseJob):
    """A training job, seen from one of its workers.

    Attributes:
        step: number of the step in flight, which is also the number of steps that have committed.
    """

    def __init__(self, client: agent_client.Client) -> None:
        self._reducer = Reducer()
        closers = [self._reducer.close]
        super().__init__(Member(client, self, self._durable, lambda: self.step, state_is_whole=True, closers=closers))
        self._went_back: Restored[None] | None = None
        self._process_group: ElasticProcessGroup | None = None
        self._buckets: GradientBuckets | None = None
        self._model_buffers: ModelBuffers | None = None
        self._objects: dict[str, Any] = {}
        self._holds = False
        self._layout: _Layout | None = None
        self._plan: Plan | None = None
        self._order: data.SampleOrder | None = None
        self._in_micro_batch = False
        self._last_micro_batch = False
        self._outcome: bool | None = None
        self._committed: StepRecord | None = None  # of all members; None where a recovery has committed the step
        self._selected_for: Plan | None = None
        self._history: History | None = None
        self._waited_s = 0.0
        self._loss = NOTHING
        self._loss_samples = 0
        self._micro_samples = 0
        self._units = range(0)
        self._coverage = self._whole_coverage = 0
        self.step = 0

    # -- what scripts use ---------------------------------------------------------------------------------------

    @property
    def last_micro_batch(self) -> bool:
        """Whether the micro-batch at hand is this worker's last one of the step: gradients are complete after it."""
        return self._last_micro_batch

    @property
    def process_group(self) -> ElasticProcessGroup:
        """A process group for collectives of the script's own, such as `torch.distributed.all_reduce`.

        Its members are those of the present generation. Use it in the last micro-batch of a step, before the
        optimizer's step, alike on all members: what a change interrupts there has unspecified results, and the step is
        done again.
        """
        if self._process_group is None:
            self._process_group = ElasticProcessGroup(self._current_group, self._reducer.interrupt)
            self._process_group.register()
        return self._process_group

    def wrap(self, model: nn.Module, first_bucket_bytes: int = 1 << 20, bucket_bytes: int = 25 << 20) -> DataParallel:
        """Make a model data-parallel over the members of the job, like DistributedDataParallel.

        Args:
            model: on its device, with all parameters that will ever be trained requiring gradients.
            first_bucket_bytes: gradients are reduced in buckets; the first is small so that reduction starts early.
            bucket_bytes: size of the others.

        Raises:
            StateError: a model was wrapped before.
        """
        if self._buckets is not None:
            raise StateError("wrap was called twice; put several models into one nn.ModuleDict and wrap that")
        self._model_buffers = ModelBuffers(model)
        named = list(model.named_parameters())
        self._buckets = GradientBuckets(
            [parameter for _, parameter in named],
            self._launch,
            first_bucket_bytes,
            bucket_bytes,
            names=[name for name, _ in named],
            finished=self._wait_for_sums,
        )
        return DataParallel(model, self._buckets)

    def register(self, **objects: Any) -> None:
        """Name what makes up the state of the job: anything with `state_dict` and `load_state_dict`.

        Waits until this worker is a member. One that joins a running job receives the state here.

        Raises:
            StateError: called twice, or the peers registered something else.
        """
        if self._objects:
            raise StateError("register was called twice; name all objects in one call")
        self._objects = objects
        for thing in objects.values():
            if isinstance(thing, torch.optim.Optimizer):
                self._take_over_optimizer(thing)
            elif isinstance(thing, (torch.optim.lr_scheduler.LRScheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)):
                self._take_over_scheduler(thing)
        self._become_member()

    def batches(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        seed: int = 0,
        steps: int,
        shuffle: bool = True,
        collate_fn: data.Collate | None = None,
    ) -> Iterator[Any]:
        """Yield this worker's micro-batches, step after step, until `steps` steps have committed.

        Args:
            dataset: map-style: `len(dataset)` and `dataset[index]`.
            global_batch_size: samples of a step, over all workers, whatever their number.
            micro_batch_size: samples of a micro-batch; without it a worker gets its share of a step at once.
            seed: of the order of samples, and of the random numbers of each micro-batch.
            steps: number of steps of the whole job, those done before this worker joined included.
            shuffle: whether each pass over the data has an order of its own.
            collate_fn: makes a batch of a list of samples; default: torch's.

        Raises:
            ValueError: a size below 1.
            TypeError: the data set is not map-style.
            StateError: the members train with different settings.
        """
        n_samples = data.count_samples(dataset)
        unit = micro_batch_size or 1
        if wrong := size_findings(1, global_batch_size, unit):
            raise ValueError(wrong[0])
        if steps < 0:
            raise ValueError(f"steps must be 0 or more, got {steps}")
        self._layout = _Layout(global_batch_size, unit, micro_batch_size is None, n_samples, seed, shuffle)
        self._order = data.SampleOrder(n_samples, seed, shuffle)
        self._become_member()
        self._check_origin(self._layout)
        while True:
            self._member.settle()
            if self.step < steps:
                self._member.begin_step()
                yield from self._attempt(dataset, collate_fn)
            elif self._member.finish():
                break

    def report(self, *, loss: torch.Tensor | float) -> None:
        """Give the mean loss of the micro-batch at hand; its mean over the step's samples goes to the event log."""
        value = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
        if self._micro_samples:
            self._loss += ExactSum.of([value * self._micro_samples])
        self._loss_samples += self._micro_samples

    # -- one step -----------------------------------------------------------------------------------------------

    def _attempt(self, dataset: Any, collate_fn: data.Collate | None) -> Iterator[Any]:
        """Yield the micro-batches of the step in flight; it ends committed, or dropped."""
        layout, order = self._layout, self._order
        assert layout is not None
        assert order is not None
        plan = self._begin_step(layout)
        start = self.step * layout.global_batch_size
        # A worker without a share computes a micro-batch that does not count, so that the script's own code between
        # backward and step (clipping, logging) runs alike on all members.
        counts = bool(self._units)
        own = [run for tile in plan.tiles_of(self.worker) for (run,) in plan.tiles[tile].micro_batches]
        micro_batches = own or [plan.unit(0)]
        # Gradients are weighted relative to the usual micro-batch, so that most of them need no multiplication.
        usual = -(-layout.global_batch_size // self._member.size) if layout.whole_shares else layout.micro_batch_size
        self._reducer.begin(self._member.group, usual / layout.global_batch_size)
        selector = self._member.selector
        measured = selector is not None and selector.measures()
        own_s = 0.0
        for place, samples in enumerate(micro_batches):
            if self._member.interrupted or self._reducer.error is not None:
                self._resolve()
                return
            heartbeat.enter(Phase.STEP, self.step)
            seed_micro_batch(layout.seed, self.step, samples.start // layout.micro_batch_size)
            begin_s = self._now_s(measured) - self._waited_s
            batch = data.load(dataset, order.ids(start + samples.start, len(samples)), collate_fn)
            self._micro_samples = len(samples) if counts else 0
            self._last_micro_batch = place == len(micro_batches) - 1
            if self._buckets is not None:
                self._buckets.weight = self._micro_samples / usual
                if self._last_micro_batch:
                    self._buckets.arm()
            self._in_micro_batch = True
            yield data.to_device(batch, self.device)
            self._in_micro_batch = False
            # What it waited for others is in both.
            own_s += self._now_s(measured) - self._waited_s - begin_s
        if measured:
            n_turns = len(micro_batches)
            self._member.took(own_s / n_turns, len(self._units) // n_turns)
        if self._resolve():  # unless an optimizer did; there is none, or GradScaler skipped it
            self._tell()

    def _begin_step(self, layout: _Layout) -> Plan:
        member = self._member
        plan, members = self._plan, member.generation.ids
        if plan is None or set(plan.workers) != set(members) or not layout.fits(plan):
            n_units = count_units(layout.global_batch_size, layout.micro_batch_size)
            plan = self._plan = layout.plan(even_shares(n_units, members))
            if member.rank == 0:
                reason = f"the {plan.n_units} micro-batches are shared out evenly over {len(plan.workers)} members"
                member.send("decision", {"policy": "given", "reason": reason, "candidates": [], "plan": str(plan)})
        if member.elastic and member.selector is None:
            samples = layout.global_batch_size / plan.n_units
            member.selector = make_selector(
                self.worker, [self._whole_model()], [1], "this job", samples, member.min_nodes
            )
        if self._selected_for != plan:
            self._selected_for = plan
            self._units = units_of(plan, self.worker)
            self._coverage, self._whole_coverage = coverage_of(self._units), coverage_of(range(plan.n_units))
            if member.selector is not None:
                now = _by_unit(plan)
                member.selector.entered(now, now, members, self._history)
        self._outcome = self._committed = None
        self._loss, self._loss_samples = NOTHING, 0
        if self._buckets is not None:
            self._buckets.zero()
        if self._model_buffers is not None:
            self._model_buffers.begin()
        return plan

    def _whole_model(self) -> LayerProfile:
        """As one layer, whose rows are micro-batches; of the optimizer, two states as large as the parameters."""
        optimizers = [one for one in self._objects.values() if isinstance(one, torch.optim.Optimizer)]
        groups = (group for one in optimizers for group in one.param_groups)
        n_bytes = sum(parameter.nbytes for group in groups for parameter in group["params"])
        return LayerProfile(0.0, 0.0, n_bytes, 2 * n_bytes, 0, 0)

    def _now_s(self, measured: bool) -> float:
        """In a step that is measured, when the device has done all that it was told."""
        if measured and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.monotonic()

    def _wait_for_sums(self) -> None:
        begin_s = time.monotonic()
        self._reducer.wait()
        self._waited_s += time.monotonic() - begin_s

    def _launch(self, index: int, flat: torch.Tensor) -> None:
        self._reducer.launch(flat)

    def _resolve(self) -> bool:
        """Commits the step, or recovers; returns whether it is committed. Once per attempt."""
        if self._outcome is None:
            begin_s = time.monotonic()
            try:
                if self._member.interrupted:
                    self._reducer.raise_error()
                    self._outcome = self._recover(None)
                else:
                    self._committed = self._pass_barrier()
                    self._outcome = True
            except StepInterrupted as error:
                self._outcome = self._recover(error)
            if self._model_buffers is not None:
                (self._model_buffers.commit if self._outcome else self._model_buffers.drop)()
            self._waited_s += time.monotonic() - begin_s
            if self._outcome:
                self.step += 1
        return self._outcome

    def _recover(self, error: StepInterrupted | None) -> bool:
        """Agrees with the survivors on the step in flight; moving state waits for the step boundary."""
        return self._member.agree(error).step > self.step

    def _pass_barrier(self) -> StepRecord:
        assert self._layout is not None
        if self._buckets is not None:
            self._buckets.flush()
        self._reducer.wait()
        self._reducer.raise_error()
        if self._model_buffers is not None:
            self._model_buffers.exchange(self._member.group)
        code = self._layout.code()
        try:
            whole = self._member.pass_barrier(
                StepRecord.at(
                    self.step,
                    settings=(code, code),
                    coverage=self._coverage,
                    samples=self._loss_samples,
                    loss=self._loss,
                )
            )
        except DifferentSettings:
            raise StateError(
                f"the members call batches() with different settings; here: {self._layout}. All workers of a job "
                "must run the same script with the same arguments"
            ) from None
        assert whole.coverage == self._whole_coverage, f"the micro-batches of step {self.step} are not those of a batch"
        return whole

    def _tell(self) -> None:
        """Reports the step that has just committed."""
        whole, step = self._committed, self.step - 1
        if whole is None:
            self._member.committed(self.step)
            return
        assert self._layout is not None
        assert self._order is not None
        batch = self._layout.global_batch_size
        loss = whole.loss.value / whole.samples if whole.samples else None
        self._member.report(step, loss=loss, sample_ids=self._order.ids(step * batch, batch))

    def _take_over_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Make `step` act once a step, when it commits, and leave the gradients to the job."""
        original = optimizer.step

        @functools.wraps(original)
        def step(closure: Any = None) -> Any:
            if closure is not None:
                raise StateError(
                    "optimizer.step(closure) would run the step again; optimizers with closures cannot be used"
                )
            return original() if self._takes_effect() else None

        zero_grad = optimizer.zero_grad

        @functools.wraps(zero_grad)
        def zero(set_to_none: bool = True) -> None:
            if self._buckets is None:
                zero_grad(set_to_none)

        optimizer.step = step  # type: ignore[method-assign]
        optimizer.zero_grad = zero  # type: ignore[method-assign]

    def _take_over_scheduler(self, scheduler: Any) -> None:
        """Like an optimizer's; through a subclass, because a scheduler's state_dict is all of its attributes."""
        kind = type(scheduler)

        def step(this: Any, *args: Any, **kwargs: Any) -> Any:
            return kind.step(this, *args, **kwargs) if this is not scheduler or self._takes_effect() else None

        scheduler.__class__ = type(kind.__name__, (kind,), {"step": functools.wraps(kind.step)(step)})

    def _takes_effect(self) -> bool:
        """Whether a call of `step` by the script acts: not in a micro-batch before the last, nor in a dropped step."""
        if not self._in_micro_batch:
            return True
        return self._last_micro_batch and self._resolve()

    # -- membership ---------------------------------------------------------------------------------------------

    def _become_member(self) -> None:
        if not self._member.joined:
            self._member.join()

    def _current_group(self) -> Group:
        if not self._member.joined:
            raise StateError("call register() first: this worker is no member of its job yet")
        return self._member.group

    def _durable(self) -> Part:
        assert self._layout is not None
        return part_of(self._objects, self._layout.cursor, self._member.rank, self._member.size)

    def _go_back(self, group: Group, step: int) -> None:
        """All members read a checkpoint, that of `step` or an older one.

        Whether its settings are those of this job is known when `batches` is called.
        """
        from elaunch.workers.state.checkpoint import Restored

        found = self._member.checkpoints.restore(group, step, read)
        fill(self._objects, found.saved, found.state)
        # The tensors are in the objects now.
        self.step = found.saved.step
        self._went_back = Restored(found.saved, None, found.read_bytes, found.seconds)

    def _check_origin(self, layout: _Layout) -> None:
        """That the checkpoint from which this job goes on, if any, is of one with the same samples."""
        if self._went_back is not None:
            self._went_back.saved.check("objects", layout.cursor)
            self._member.checkpoints.resumed(self._member.group, self._went_back, 0)
            self._went_back = None

    # -- hooks (elaunch.workers.hooks.Hooks) --------------------------------------------------------------------

    def vote(self) -> Vote:
        return Vote(self.step, self._member.entered and self._outcome is None, self._holds)

    def pause(self) -> None:
        self._reducer.cancel()
        if self._buckets is not None:
            self._buckets.disarm()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        """The step in flight is settled where the script calls its optimizer."""

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        self._history = history_of(verdict)
        if verdict.fresh:
            return {}  # the settings are not known before `batches` is called; the first attempt makes the plan
        choice_text, before, layout, selector = b"", self._plan, self._layout, self._member.selector
        decides = group.rank == verdict.passed
        # A script may call `batches` again with other sizes; then the plan before is of no use.
        if decides and selector is not None and layout is not None and before is not None and layout.fits(before):
            now = _by_unit(before)
            choice = selector.decide(now, now, group.members)
            plan = layout.plan(shares_by_speed(choice.plan, group.members, selector.profile()))
            choice_text = json.dumps({**choice.event(), "plan": str(plan)}).encode()
        choice_text = group.all_gather_bytes(choice_text)[verdict.passed]
        event: dict[str, Any] = json.loads(choice_text) if choice_text else {}
        self._plan = Plan.parse(event["plan"]) if event else None
        return event

    def transfer(self, group: Group, verdict: Verdict) -> int:
        if verdict.fresh and verdict.saved is not None:
            self._go_back(group, verdict.saved)
            return 0
        if not verdict.receivers:
            return 0
        received_bytes, self.step = move_objects(group, verdict, self._objects, self.step)
        return received_bytes

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        self._holds = True


def _by_unit(plan: Plan) -> Plan:
    """Returns a plan with a sample for each unit: policies are not to cut units, and a unit is what is measured."""
    return data_parallel(plan.n_units, 1, shares_of(plan))


def init() -> Job:
    """Attach this process to its job.

    Under elaunch the job is elastic. Under torchrun, or in a plain Python process, its membership never changes.

    Raises:
        JobFailed: the agent, or under torchrun the store, does not answer.
    """
    return Job(agent_client.connect())
