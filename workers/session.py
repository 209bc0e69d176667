"""What a training script talks to: `init()` and the `Job` that it returns.

A step is a transaction. The gradients of the last micro-batch are reduced while backward runs; the first call of a
registered optimizer's `step` after it passes the commit barrier, or recovers. Where the step commits, optimizers and
schedulers take effect; where it does not, they do nothing and `batches` yields the same step again.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import struct
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from elaunch.detect.heartbeat import Phase
from elaunch.errors import StateError, StepInterrupted
from elaunch.plan.shares import DataParallelPlan, micro_batches
from elaunch.policy.data_parallel import shares as as_shares
from elaunch.policy.data_parallel import tiling
from elaunch.policy.measure import Step
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.policy.selector import History, Selector, make_selector
from elaunch.rendezvous.membership import Generation
from elaunch.wire import Excused, Finished, Leaving, Profiled, Report
from elaunch.workers import agent_client, pulse
from elaunch.workers.checkpoints import Checkpoints
from elaunch.workers.comm.fabric import Fabric
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.comm.reducer import Reducer
from elaunch.workers.engine import data
from elaunch.workers.engine.buffers import ModelBuffers
from elaunch.workers.engine.gradients import DataParallel, GradientBuckets
from elaunch.workers.engine.rng import seed_micro_batch
from elaunch.workers.hooks import Left, Membership, Verdict, Vote, tells_again
from elaunch.workers.state.move import move_state

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.state.checkpoint import Part, Restored

NEVER = 1 << 62  # above every epoch
SPEEDS_CHANGED = "the speed of workers has changed"


@dataclass(frozen=True, slots=True)
class _Barrier:
    """What each member says at the commit barrier of a step."""

    epoch: int
    step: int
    layout: int
    first_unit: int
    end_unit: int
    loss: float
    samples: int
    more: dict[str, Any] = field(default_factory=dict)
    """Of the policy selector."""

    FORMAT = struct.Struct("<QQQIIdQ")

    def pack(self) -> bytes:
        fixed = self.FORMAT.pack(
            self.epoch, self.step, self.layout, self.first_unit, self.end_unit, self.loss, self.samples
        )
        return fixed + json.dumps(self.more).encode() if self.more else fixed

    @classmethod
    def unpack(cls, payload: bytes) -> _Barrier:
        more = payload[cls.FORMAT.size :]
        epoch, step, layout, first_unit, end_unit, loss, samples = cls.FORMAT.unpack_from(payload)
        return cls(epoch, step, layout, first_unit, end_unit, loss, samples, json.loads(more) if more else {})


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


class Job:
    """A training job, seen from one of its workers.

    Attributes:
        device: where this worker computes.
        step: number of the step in flight, which is also the number of steps that have committed.
    """

    def __init__(self, client: agent_client.Client) -> None:
        self._client = client
        self._fabric = Fabric(client.worker, client.token, client.host)
        self._reducer = Reducer()
        self._checkpoints = Checkpoints(client)
        self._went_back: Restored[None] | None = None
        self._membership = Membership(client, self._fabric, self)
        self._group: Group | None = None
        self._process_group: ElasticProcessGroup | None = None
        self._buckets: GradientBuckets | None = None
        self._model_buffers: ModelBuffers | None = None
        self._objects: dict[str, Any] = {}
        self._holds = False
        self._layout: _Layout | None = None
        self._plan: DataParallelPlan | None = None
        self._order: data.SampleOrder | None = None
        self._in_micro_batch = False
        self._last_micro_batch = False
        self._outcome: bool | None = None
        self._entered = False
        self._changeover = self._reconsider = False
        self._selector: Selector | None = None
        self._selected_for: DataParallelPlan | None = None
        self._history: History | None = None
        self._waited_s = 0.0
        self._loss = 0.0
        self._loss_samples = 0
        self._micro_samples = 0
        self._share_samples = 0
        self._units = range(0)
        self._commit_s = time.monotonic()
        self._step_seconds = 0.0
        self._last_step: dict[str, Any] | None = None
        self._closed = False
        self.step = 0
        self.device = choose_device(client.slot)
        atexit.register(self.close)

    # -- what scripts use ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Position of this worker in the present generation; it changes with the membership."""
        return self._membership.generation.rank(self._client.worker) if self._group else int(os.environ.get("RANK", 0))

    @property
    def size(self) -> int:
        """Number of members of the present generation."""
        return len(self._membership.generation.workers) if self._group else int(os.environ.get("WORLD_SIZE", 1))

    @property
    def epoch(self) -> int:
        """Number of the present generation."""
        return self._membership.generation.epoch if self._group else 0

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

    @property
    def worker(self) -> str:
        """Identity of this worker: node/slot#incarnation."""
        return self._client.worker

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
        ranges = micro_batches(global_batch_size, unit)
        if steps < 0:
            raise ValueError(f"steps must be 0 or more, got {steps}")
        self._layout = _Layout(global_batch_size, unit, micro_batch_size is None, n_samples, seed, shuffle)
        self._order = data.SampleOrder(n_samples, seed, shuffle)
        self._become_member()
        self._check_origin(self._layout)
        while True:
            self._settle()
            if self.step >= steps:
                break
            if not self._save():
                continue
            yield from self._attempt(dataset, ranges, collate_fn)
        self._finish()

    def report(self, *, loss: torch.Tensor | float) -> None:
        """Give the mean loss of the micro-batch at hand; its mean over the step's samples goes to the event log."""
        value = loss.item() if isinstance(loss, torch.Tensor) else float(loss)
        if self._micro_samples:
            self._loss += value * self._micro_samples
        self._loss_samples += self._micro_samples

    def close(self) -> None:
        """Leave the job. Called by itself at the end of the process."""
        if not self._closed:
            self._closed = True
            pulse.close()
            # A script that failed in its backward may have left an all-reduce behind, whose peers wait for this worker.
            self._fabric.interrupt(NEVER)
            self._reducer.close()
            self._checkpoints.close()
            if self._selector is not None:
                self._selector.close()
            self._fabric.close()
            self._client.close()

    # -- one step -----------------------------------------------------------------------------------------------

    def _attempt(self, dataset: Any, ranges: tuple[range, ...], collate_fn: data.Collate | None) -> Iterator[Any]:
        """Yield the micro-batches of the step in flight; it ends committed, or dropped."""
        layout, order = self._layout, self._order
        assert layout is not None
        assert order is not None
        assert self._group is not None
        self._begin_step(layout)
        start = self.step * layout.global_batch_size
        # A worker without a share computes a micro-batch that does not count, so that the script's own code between
        # backward and step (clipping, logging) runs alike on all members.
        counts = bool(self._units)
        shares = [ranges[index] for index in self._units] or [ranges[0]]
        if layout.whole_shares:
            shares = [range(shares[0].start, shares[-1].stop)]
        # Gradients are weighted relative to the usual micro-batch, so that most of them need no multiplication.
        usual = -(-layout.global_batch_size // self._group.size) if layout.whole_shares else layout.micro_batch_size
        self._reducer.begin(self._group, usual / layout.global_batch_size)
        measured = self._selector is not None and self._selector.measures()
        own_s = 0.0
        for place, slots in enumerate(shares):
            if self._membership.interrupted or self._reducer.error is not None:
                self._resolve()
                return
            pulse.enter(Phase.STEP, self.step)
            seed_micro_batch(layout.seed, self.step, slots.start // layout.micro_batch_size)
            begin_s = self._now_s(measured) - self._waited_s
            batch = data.load(dataset, order.ids(start + slots.start, len(slots)), collate_fn)
            self._micro_samples = len(slots) if counts else 0
            self._last_micro_batch = place == len(shares) - 1
            if self._buckets is not None:
                self._buckets.weight = self._micro_samples / usual
                if self._last_micro_batch:
                    self._buckets.arm()
            self._in_micro_batch = True
            yield data.to_device(batch, self.device)
            self._in_micro_batch = False
            # What it waited for others is in both.
            own_s += self._now_s(measured) - self._waited_s - begin_s
        if measured and counts and self._selector is not None:
            step = Step.of(own_s, len(self._units)) if layout.whole_shares else Step.of(own_s / len(shares), 1)
            self._selector.add([step], {}, 0.0, 0)
        if self._resolve():  # unless an optimizer did; there is none, or GradScaler skipped it
            self._after_commit()

    def _begin_step(self, layout: _Layout) -> None:
        generation = self._membership.generation
        sizes = layout.global_batch_size, layout.micro_batch_size
        plan = self._plan
        if plan is None or plan.workers != generation.ids or (plan.global_batch_size, plan.micro_batch_size) != sizes:
            plan = self._plan = DataParallelPlan.even(*sizes, generation.ids)
            if self._group is not None and self._group.rank == 0:
                reason = f"the {plan.n_units} micro-batches are shared out evenly over {len(plan.workers)} members"
                event = {"policy": "given", "reason": reason, "candidates": [], "plan": str(plan)}
                self._client.send(Report("decision", {"epoch": generation.epoch, **event}))
        if self._client.elastic and self._selector is None:
            samples = layout.global_batch_size / plan.n_units
            whole, least = [self._whole_model()], self._client.min_nodes
            self._selector = make_selector(self.worker, whole, [1], "this job", samples, least)
        if self._selector is not None and self._selected_for != plan:
            self._selected_for, now = plan, tiling(plan)
            self._selector.entered(now, now, generation.ids, self._history)
        self._units = plan.units_of(self._client.worker)
        self._outcome = None
        self._entered = False
        self._loss, self._loss_samples = 0.0, 0
        if self._buckets is not None:
            self._buckets.zero()
        if self._model_buffers is not None:
            self._model_buffers.begin()

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
        """Commit the step, or recover; tell whether it is committed. Once per attempt."""
        if self._outcome is None:
            begin_s = time.monotonic()
            try:
                if self._membership.interrupted:
                    self._reducer.raise_error()
                    self._outcome = self._recover(None)
                else:
                    self._outcome = self._pass_barrier()
            except StepInterrupted as error:
                self._outcome = self._recover(error)
            if self._model_buffers is not None:
                (self._model_buffers.commit if self._outcome else self._model_buffers.drop)()
            self._waited_s += time.monotonic() - begin_s
            if self._outcome:
                self.step += 1
        return self._outcome

    def _pass_barrier(self) -> bool:
        assert self._group is not None
        assert self._layout is not None
        if self._buckets is not None:
            self._buckets.flush()
        self._reducer.wait()
        self._reducer.raise_error()
        if self._model_buffers is not None:
            self._model_buffers.exchange(self._group)
        self._entered = True
        mine = _Barrier(
            epoch=self._membership.newest_epoch(),
            step=self.step,
            layout=self._layout.code(),
            first_unit=self._units.start,
            end_unit=self._units.stop,
            loss=self._loss,
            samples=self._loss_samples,
            more={}
            if self._selector is None
            else self._selector.note(self._fabric.rates, carried=self._fabric.carried),
        )
        said = [_Barrier.unpack(payload) for payload in self._group.all_gather_bytes(mine.pack())]
        self._check_same(said)
        self._changeover = self._membership.all_know(one.epoch for one in said)
        now_s = time.monotonic()
        self._step_seconds, self._commit_s = now_s - self._commit_s, now_s
        self._last_step = self._describe_step(said)
        if self._group.rank == 0:
            self._client.send(Report("step", self._last_step))
        if self._selector is not None:
            notes = dict(zip(self._group.members, (one.more for one in said), strict=True))
            profile = self._selector.heard(notes, self._step_seconds, self.step)
            self._reconsider = self._selector.due
            send_news(self._client, self._selector, profile, self.epoch)
        return True

    def _check_same(self, said: list[_Barrier]) -> None:
        assert self._layout is not None
        layouts = {one.layout for one in said}
        if len(layouts) > 1:
            raise StateError(
                f"the members call batches() with different settings; here: {self._layout}. All workers of a job "
                "must run the same script with the same arguments"
            )
        edge = 0
        for one in sorted(said, key=lambda one: (one.first_unit, one.end_unit)):
            assert one.step == self.step, f"at the barrier of step {self.step} a member is at step {one.step}"
            assert one.first_unit == edge or one.first_unit == one.end_unit, f"micro-batches are not tiled: {said}"
            edge = max(edge, one.end_unit)
        assert edge == len(micro_batches(self._layout.global_batch_size, self._layout.micro_batch_size))

    def _describe_step(self, said: list[_Barrier]) -> dict[str, Any]:
        """The `step` event. Every member can write it; the first does."""
        assert self._layout is not None
        assert self._order is not None
        samples = sum(one.samples for one in said)
        batch = self._layout.global_batch_size
        return {
            "epoch": self._membership.generation.epoch,
            "step": self.step,
            "loss": sum(one.loss for one in said) / samples if samples else None,
            "samples": batch,
            "digest": data.digest(self._order.ids(self.step * batch, batch)),
            "members": len(said),
            "seconds": round(self._step_seconds, 6),
        }

    def _after_commit(self) -> None:
        pulse.committed(self.step)
        changed_s = self._membership.committed()
        if self._selector is not None and changed_s is not None:
            self._selector.measured.change_took(changed_s)

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
        if self._group is None:
            self._client.ready(self._fabric.address)
            try:
                self._membership.settle()
            except Left as left:
                self._leave(left)

    def _recover(self, error: StepInterrupted | None) -> bool:
        """Agree with the survivors on the step in flight; moving state waits for the step boundary."""
        before = self.step
        try:
            verdict = self._membership.agree(error)
        except Left as left:
            self._leave(left)
        return verdict.step > before

    def _current_group(self) -> Group:
        if self._group is None:
            raise StateError("call register() first: this worker is no member of its job yet")
        return self._group

    def _settle(self) -> None:
        """At a step boundary: change over to a planned generation, or finish a recovery."""
        try:
            if self._changeover:
                self._membership.agree(self._part())
            elif self._reconsider:
                self._membership.reconsider(SPEEDS_CHANGED)
            self._changeover = self._reconsider = False
            self._membership.settle()
        except Left as left:
            self._leave(left)

    def _part(self) -> StepInterrupted | None:
        """Before a planned change: where all leave, the state goes to disk. Tells what came between."""
        assert self._group is not None
        if self._membership.all_leave:
            try:
                self._checkpoints.leave(self._group, self.step, self._durable)
            except StepInterrupted as error:
                return error
        return None

    def _save(self) -> bool:
        """At a step boundary: begin a checkpoint, if one is due. False: a change came between, and is to be settled."""
        assert self._group is not None
        try:
            self._checkpoints.boundary(self._group, self.step, self._durable)
        except StepInterrupted as error:
            self._recover(error)
            return False
        return True

    def _durable(self) -> Part:
        from elaunch.workers.state.objects import part_of

        assert self._layout is not None
        assert self._group is not None
        return part_of(self._objects, self._layout.cursor, self._group.rank, self._group.size)

    def _go_back(self, group: Group, step: int) -> None:
        """All members read a checkpoint, that of `step` or an older one.

        Whether its settings are those of this job is known when `batches` is called.
        """
        from elaunch.workers.state.checkpoint import Restored
        from elaunch.workers.state.objects import fill, read

        found = self._checkpoints.restore(group, step, read)
        fill(self._objects, found.saved, found.state)
        # The tensors are in the objects now.
        self.step = found.saved.step
        self._went_back = Restored(found.saved, None, found.read_bytes, found.seconds)

    def _check_origin(self, layout: _Layout) -> None:
        """That the checkpoint from which this job goes on, if any, is of one with the same samples."""
        if self._went_back is not None:
            self._went_back.saved.check("objects", layout.cursor)
            assert self._group is not None
            self._checkpoints.resumed(self._group, self._went_back, 0)
            self._went_back = None

    def _leave(self, left: Left) -> None:
        """End this process: the members go on without it."""
        self._client.send(Leaving(self.step))
        self.close()
        if self._client.worker in left.generation.leaving:
            raise SystemExit(0)
        raise SystemExit(f"elaunch: worker {self._client.worker} was given up by its peers: {left}")

    def _finish(self) -> None:
        """All steps are committed: wait until all members know it, so that nobody takes an early end for a failure."""
        while True:
            assert self._group is not None
            try:
                self._checkpoints.last(self._group, self.step, self._durable)
                self._group.barrier()
                break
            except StepInterrupted as error:
                self._recover(error)
                self._settle()
        self._client.send(Finished())
        pulse.close()

    # -- hooks (elaunch.workers.hooks.Hooks) --------------------------------------------------------------------

    def vote(self) -> Vote:
        entered, saved = self._entered and self._outcome is None, self._checkpoints
        facts = {"history": None if self._selector is None else self._selector.told_history()}
        return Vote(self.step, entered, self._holds, facts, saved=saved.newest(), every=saved.every)

    def pause(self) -> None:
        self._reducer.cancel()
        if self._buckets is not None:
            self._buckets.disarm()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        last = self._last_step
        again = tells_again(verdict, generation, self._group, self._client.worker)
        if again and last is not None and last["step"] == verdict.step - 1:
            self._client.send(Report("step", last))

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        self._history = History.from_json(verdict.facts[verdict.passed]["history"])
        if verdict.fresh:
            return {}  # the settings are not known before `batches` is called; the first attempt makes the plan
        mine, before, selector = b"", self._plan, self._selector
        if group.rank == verdict.passed and before is not None and selector is not None:
            now = tiling(before)
            choice = selector.decide(now, now, group.members)
            plan = as_shares(choice.plan, before, group.members, selector.profile())
            mine = json.dumps({**choice.event(), "plan": str(plan)}).encode()
        said = group.all_gather_bytes(mine)[verdict.passed]
        event: dict[str, Any] = json.loads(said) if said else {}
        self._plan = DataParallelPlan.parse(event["plan"]) if event else None
        return event

    def transfer(self, group: Group, verdict: Verdict) -> int:
        if verdict.fresh and verdict.saved is not None:
            self._go_back(group, verdict.saved)
            return 0
        if not verdict.receivers:
            return 0
        received_bytes, self.step = move_state(group, verdict, self._objects, self.step)
        return received_bytes

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        self._group = group
        self._checkpoints.entered(group.members)
        self._holds = True
        self._entered = False
        self._changeover = self._reconsider = False
        os.environ["RANK"], os.environ["WORLD_SIZE"] = str(group.rank), str(group.size)


def init() -> Job:
    """Attach this process to its job.

    Under elaunch the job is elastic. Under torchrun, or in a plain Python process, its membership never changes.

    Raises:
        JobFailed: the agent, or under torchrun the store, does not answer.
    """
    return Job(agent_client.connect())


def send_news(client: agent_client.Client, selector: Selector, profile: Profile | None, epoch: int) -> None:
    """After a commit, tell the agent what the selector has found, and that this worker is to leave, if it is."""
    for event in selector.events():
        client.send(Report("slow", {"epoch": epoch, **event}))
    if profile is not None:
        client.send(Profiled(profile.to_json()))
    excuse = selector.excused()
    if excuse is not None:
        client.send(Excused(excuse.again, excuse.why))


def choose_device(slot: int) -> torch.device:
    """The accelerator with this worker's local rank, else the CPU."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    device = torch.device(accelerator.type, slot % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device
