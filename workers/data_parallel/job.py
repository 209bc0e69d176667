"""What a training script talks to: `init()` and the `Job` that it returns.

A step is a transaction. The gradients of the last micro-batch are reduced while backward runs; the first call of a
registered optimizer's `step` after it passes the commit barrier, or recovers. Where the step commits, optimizers and
schedulers take effect; where it does not, they do nothing and `batches` yields the same step again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import nn

from elaunch.detect.heartbeat import Phase
from elaunch.errors import StateError, StepInterrupted
from elaunch.plan.tiling import size_findings
from elaunch.rendezvous.membership import Generation
from elaunch.workers import agent_client, heartbeat
from elaunch.workers.barrier import DifferentSettings, StepRecord
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.data.batches import Collate, to_device
from elaunch.workers.data.loader import Loader, MicroBatches, loader_of
from elaunch.workers.data.order import SampleOrder
from elaunch.workers.data.source import DataSource, Loading
from elaunch.workers.data_parallel.buffers import ModelBuffers
from elaunch.workers.data_parallel.gradients import DataParallel, GradientBuckets
from elaunch.workers.data_parallel.in_flight import StepInFlight
from elaunch.workers.data_parallel.layout import SampleLayout, Share
from elaunch.workers.data_parallel.plans import Plans
from elaunch.workers.data_parallel.reducer import Reducer
from elaunch.workers.data_parallel.takeover import take_over, trained_bytes
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.job import BaseJob
from elaunch.workers.runtime import Member
from elaunch.workers.state.objects import fill, move_objects, part_of, read

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.state.checkpoint import CheckpointShard, Restored


class Job(BaseJob):
    """A training job, seen from one of its workers.

    Attributes:
        step: number of the step in flight, which is also the number of steps that have committed.
    """

    def __init__(self, client: agent_client.Client) -> None:
        self._reducer = Reducer()
        closers = [self._reducer.close]
        super().__init__(Member(client, self, self._durable, lambda: self.step, state_is_whole=True, closers=closers))
        self._plans = Plans(self._member, lambda: trained_bytes(self._objects.values()))
        self._buckets: GradientBuckets | None = None
        self._model_buffers: ModelBuffers | None = None
        self._objects: dict[str, Any] = {}
        self._layout: SampleLayout | None = None
        self._order: SampleOrder | None = None
        self._in_flight = StepInFlight()
        self._went_back: Restored[None] | None = None
        self._holds = False
        self.step = 0

    # -- what scripts use ---------------------------------------------------------------------------------------

    @property
    def last_micro_batch(self) -> bool:
        """Whether the micro-batch at hand is this worker's last one of the step: gradients are complete after it."""
        return self._in_flight.last_micro_batch

    @cached_property
    def process_group(self) -> ElasticProcessGroup:
        """A process group for collectives of the script's own, such as `torch.distributed.all_reduce`.

        Its members are those of the present generation. Use it in the last micro-batch of a step, before the
        optimizer's step, alike on all members: what a change interrupts there has unspecified results, and the step is
        done again.
        """
        group = ElasticProcessGroup(self._current_group, self._reducer.interrupt)
        group.register()
        return group

    def wrap(self, model: nn.Module, first_bucket_bytes: int = 1 << 20, bucket_bytes: int = 25 << 20) -> DataParallel:
        """Makes a model data-parallel over the members of the job, like DistributedDataParallel.

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
            lambda _, flat: self._reducer.launch(flat),
            first_bucket_bytes,
            bucket_bytes,
            names=[name for name, _ in named],
            finished=self._wait_for_sums,
        )
        return DataParallel(model, self._buckets)

    def register(self, **objects: Any) -> None:
        """Names what makes up the state of the job: anything with `state_dict` and `load_state_dict`.

        Waits until this worker is a member. One that joins a running job receives the state here.

        Raises:
            StateError: called twice, or the peers registered something else.
        """
        if self._objects:
            raise StateError("register was called twice; name all objects in one call")
        self._objects = objects
        take_over(objects.values(), self._takes_effect, lambda: self._buckets is not None)
        self._become_member()

    def batches(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        micro_batch_size: int | None = None,
        seed: int | None = None,
        steps: int,
        shuffle: bool | None = None,
        collate_fn: Collate | None = None,
        **loading: Unpack[Loading],
    ) -> Iterator[Any]:
        """Yields this worker's micro-batches, step after step, until `steps` steps have committed.

        Args:
            dataset: map-style: `len(dataset)` and `dataset[index]`; or a DataLoader of one. What is not given here is
                then as the DataLoader has it: its batch size is that of a micro-batch, its sampler's order is kept, or
                replaced by this job's if it is random.
            global_batch_size: samples of a step, over all workers, whatever their number.
            micro_batch_size: samples of a micro-batch; without it a worker gets its share of a step at once.
            seed: of the order of samples, and of the random numbers of each micro-batch; default: 0.
            steps: number of steps of the whole job, those done before this worker joined included.
            shuffle: whether each pass over the data has an order of its own; default: True.
            collate_fn: makes a batch of a list of samples; default: torch's.
            loading: `num_workers` and what else DataLoader takes for loading ahead, with the same meanings.

        Raises:
            ValueError: a size below 1, or a sampler whose samples cannot be dealt out.
            TypeError: the data set is not map-style.
            StateError: the members train with different settings.
        """
        source = DataSource.of(dataset, seed=seed, shuffle=shuffle, collate_fn=collate_fn, loading=loading)
        micro_batch_size = micro_batch_size or source.batch_size
        unit = micro_batch_size or 1
        if wrong := size_findings(1, global_batch_size, unit):
            raise ValueError(wrong[0])
        if steps < 0:
            raise ValueError(f"steps must be 0 or more, got {steps}")
        self._layout = SampleLayout(
            global_batch_size,
            unit,
            micro_batch_size is None,
            source.n_samples,
            source.seed,
            source.shuffle,
            source.order,
        )
        self._order = order = SampleOrder(source.n_samples, source.seed, source.shuffle)
        self._become_member()
        self._check_origin(self._layout)
        loader = loader_of(MicroBatches(source, order, global_batch_size, unit, steps, self.device))
        try:
            while True:
                self._member.settle()
                if self.step < steps:
                    self._member.begin_step()
                    yield from self._attempt(loader)
                elif self._member.finish():
                    break
        finally:
            loader.close()

    def report(self, *, loss: torch.Tensor | float) -> None:
        """Gives the mean loss of the micro-batch at hand; its mean over the step's samples goes to the event log."""
        self._in_flight.add_loss(loss)

    # -- one step -----------------------------------------------------------------------------------------------

    def _attempt(self, loader: Loader) -> Iterator[Any]:
        """Yields the micro-batches of the step in flight; it ends committed, or dropped."""
        layout = self._layout
        assert layout is not None
        share = self._begin_step(layout)
        loader.begin(self.step, share.micro_batches)
        step = self._in_flight
        usual = layout.usual_samples(self._member.size)
        self._reducer.begin(self._member.group, usual / layout.global_batch_size)
        selector = self._member.selector
        measured = selector is not None and selector.measures()
        own_s = 0.0
        for place, samples in enumerate(share.micro_batches):
            if self._member.interrupted or self._reducer.error is not None:
                self._resolve()
                return
            heartbeat.enter(Phase.STEP, self.step)
            begin_s = self._now_s(measured) - step.waited_s
            batch = loader.take(self.step, samples)
            step.n_samples = len(samples) if share.counts else 0
            step.last_micro_batch = place == len(share.micro_batches) - 1
            if self._buckets is not None:
                self._buckets.weight = step.n_samples / usual
                if step.last_micro_batch:
                    self._buckets.arm()
            step.in_micro_batch = True
            yield to_device(batch, self.device)
            step.in_micro_batch = False
            # What it waited for others is in both.
            own_s += self._now_s(measured) - step.waited_s - begin_s
        if measured:
            n_turns = len(share.micro_batches)
            self._member.took(own_s / n_turns, len(share.units) // n_turns)
        if self._resolve():  # unless an optimizer did; there is none, or GradScaler skipped it
            self._tell()

    def _begin_step(self, layout: SampleLayout) -> Share:
        share = self._plans.share(layout)
        self._in_flight = StepInFlight(share.coverage, share.whole_coverage)
        if self._buckets is not None:
            self._buckets.zero()
        if self._model_buffers is not None:
            self._model_buffers.begin()
        return share

    def _now_s(self, measured: bool) -> float:
        """Returns the time; in a step that is measured, when the device has done all that it was told."""
        if measured and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        return time.monotonic()

    def _wait_for_sums(self) -> None:
        begin_s = time.monotonic()
        self._reducer.wait()
        self._in_flight.waited_s += time.monotonic() - begin_s

    def _resolve(self) -> bool:
        """Commits the step, or recovers; returns whether it is committed. Once per attempt."""
        step = self._in_flight
        if step.committed is None:
            begin_s = time.monotonic()
            try:
                if self._member.interrupted:
                    self._reducer.raise_error()
                    step.committed = self._recover(None)
                else:
                    step.whole = self._pass_barrier(step)
                    step.committed = True
            except StepInterrupted as error:
                step.committed = self._recover(error)
            if self._model_buffers is not None:
                (self._model_buffers.commit if step.committed else self._model_buffers.drop)()
            step.waited_s += time.monotonic() - begin_s
            if step.committed:
                self.step += 1
        return step.committed

    def _recover(self, error: StepInterrupted | None) -> bool:
        """Agrees with the survivors on the step in flight; moving state waits for the step boundary."""
        return self._member.agree(error).step > self.step

    def _pass_barrier(self, step: StepInFlight) -> StepRecord:
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
                    coverage=step.coverage,
                    samples=step.loss_samples,
                    loss=step.loss,
                )
            )
        except DifferentSettings:
            raise StateError(
                f"the members call batches() with different settings; here: {self._layout}. All workers of a job "
                "must run the same script with the same arguments"
            ) from None
        assert whole.coverage == step.whole_coverage, f"the micro-batches of step {self.step} are not those of a batch"
        return whole

    def _tell(self) -> None:
        """Reports the step that has just committed."""
        whole, step = self._in_flight.whole, self.step - 1
        if whole is None:
            self._member.committed(self.step)
            return
        assert self._layout is not None
        assert self._order is not None
        batch = self._layout.global_batch_size
        loss = whole.loss.value / whole.samples if whole.samples else None
        self._member.report(step, loss=loss, sample_ids=self._order.ids(step * batch, batch))

    def _takes_effect(self) -> bool:
        """Whether a call of `step` by the script acts: not in a micro-batch before the last, nor in a dropped step."""
        if not self._in_flight.in_micro_batch:
            return True
        return self._in_flight.last_micro_batch and self._resolve()

    # -- membership ---------------------------------------------------------------------------------------------

    def _become_member(self) -> None:
        if not self._member.joined:
            self._member.join()

    def _current_group(self) -> Group:
        if not self._member.joined:
            raise StateError("call register() first: this worker is no member of its job yet")
        return self._member.group

    def _durable(self) -> CheckpointShard:
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

    def _check_origin(self, layout: SampleLayout) -> None:
        """That the checkpoint from which this job goes on, if any, is of one with the same samples."""
        if self._went_back is not None:
            self._went_back.saved.check("objects", layout.cursor)
            self._member.checkpoints.resumed(self._member.group, self._went_back, 0)
            self._went_back = None

    # -- hooks (elaunch.workers.hooks.Hooks) --------------------------------------------------------------------

    def vote(self) -> Vote:
        """Says how far this worker is: entered, from the barrier until the step is settled."""
        return Vote(self.step, self._member.entered and self._in_flight.committed is None, self._holds)

    def pause(self) -> None:
        """Ends the reductions of the step in flight."""
        self._reducer.cancel()
        if self._buckets is not None:
            self._buckets.disarm()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        """The step in flight is settled where the script calls its optimizer."""

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        """Chooses how the micro-batches are shared out, or leaves it to the first step."""
        return self._plans.decide(self._layout, group, verdict)

    def transfer(self, group: Group, verdict: Verdict) -> int:
        """Brings the state to those that lack it, from memory or from a checkpoint."""
        if verdict.fresh and verdict.saved is not None:
            self._go_back(group, verdict.saved)
            return 0
        if not verdict.receivers:
            return 0
        received_bytes, self.step = move_objects(group, verdict, self._objects, self.step)
        return received_bytes

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        """This worker holds the state from now on."""
        self._holds = True


def init() -> Job:
    """Attaches this process to its job.

    Under elaunch the job is elastic. Under torchrun, or in a plain Python process, its membership never changes.

    Raises:
        JobFailed: the agent, or under torchrun the store, does not answer.
    """
    return Job(agent_client.connect())
