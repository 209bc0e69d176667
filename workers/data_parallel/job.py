"""What a training script talks to: `init()` and the `Job` that it returns.

A step is a transaction. The gradients of the last micro-batch are reduced while backward runs; the first call of a
registered optimizer's `step` after it passes the commit barrier, or recovers. Where the step commits, optimizers and
schedulers take effect; where it does not, they do nothing and `batches` yields the same step again. Under `steps` the
end of the loop over the micro-batches does that, and is reached when the step has committed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, Unpack

import torch
from torch import nn

from elaunch import replica_check
from elaunch.detect.heartbeat import Phase
from elaunch.errors import StateError, StepInterrupted
from elaunch.policy.collectives import in_order
from elaunch.rendezvous.membership import Generation
from elaunch.workers import agent_client, heartbeat
from elaunch.workers.barrier import DifferentSettings, StepRecord
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.data.batches import Collate, to_device
from elaunch.workers.data.loader import Loader
from elaunch.workers.data.source import DataSource, Loading
from elaunch.workers.data_parallel.buffers import ModelBuffers
from elaunch.workers.data_parallel.feed import AFTER, BEFORE, SampleFeed
from elaunch.workers.data_parallel.gradients import DataParallel, GradientBuckets
from elaunch.workers.data_parallel.in_flight import StepInFlight
from elaunch.workers.data_parallel.layout import SampleLayout, Share
from elaunch.workers.data_parallel.plans import Plans
from elaunch.workers.data_parallel.reducer import Reducer
from elaunch.workers.data_parallel.registered import RegisteredState
from elaunch.workers.data_parallel.step import Step
from elaunch.workers.data_parallel.takeover import take_over, trained_bytes
from elaunch.workers.data_parallel.watch import ReplicaWatch
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.job import BaseJob
from elaunch.workers.moments import OwnTime, timing_of
from elaunch.workers.refusals import refuse_own_group, refuse_sparse, refuse_wrappers, warn_of_own_group
from elaunch.workers.runtime import Member

STOPS = "elaunch.stops"
"""Among the facts of a vote: whether a script has asked to end the job."""


class Job(BaseJob):
    """A training job, seen from one of its workers."""

    def __init__(self, client: agent_client.Client) -> None:
        self._reducer = Reducer(lambda generation: self._member.native.failed(generation), in_order(os.environ))
        self._state = RegisteredState(ReplicaWatch(replica_check.from_environment(os.environ)))
        super().__init__(
            Member(
                client,
                self,
                lambda: self._state.durable(self._known_feed.layout, self._member.group),
                lambda: self.step,
                boundary=lambda group, saving: self._state.at_boundary(self._member, group, saving),
                state_is_whole=True,
                closers=[self._reducer.close, self._state.let_go],
                native=True,
            )
        )
        self._plans = Plans(self._member, lambda: trained_bytes(self._state.objects.values()))
        self._buckets: GradientBuckets | None = None
        self._model_buffers: ModelBuffers | None = None
        self._feed: SampleFeed | None = None
        self._in_flight = StepInFlight()
        self._timing = timing_of(self.device)
        self._measured: tuple[OwnTime, int, int] | None = None  # a step: micro-batches, and rows of each
        self._step: Step | None = None
        self._wants_stop = self._stops = False

    # -- what scripts use ---------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Returns the number of the step in flight, which is also the number of steps that have committed."""
        return self._state.step

    @step.setter
    def step(self, value: int) -> None:
        self._state.begin_at(value, self._member.joined)

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
        if not self._member.joined:
            raise StateError("call register() first: this worker is no member of its job yet")
        self._member.torch_groups.interrupted = self._reducer.interrupt
        return self._member.process_group

    def wrap(self, model: nn.Module, first_bucket_bytes: int = 1 << 20, bucket_bytes: int = 25 << 20) -> DataParallel:
        """Makes a model data-parallel over the members of the job, like DistributedDataParallel.

        Args:
            model: on its device, with all parameters that will ever be trained requiring gradients.
            first_bucket_bytes: gradients are reduced in buckets; the first is small so that reduction starts early.
            bucket_bytes: size of the others.

        Raises:
            StateError: a model was wrapped before, or this one is in DistributedDataParallel or FSDP, or has sparse
                gradients.
        """
        if self._buckets is not None:
            raise StateError("wrap was called twice; put several models into one nn.ModuleDict and wrap that")
        refuse_wrappers([model])
        refuse_sparse(model)
        self._model_buffers = ModelBuffers(model)
        named = list(model.named_parameters())
        self._buckets = GradientBuckets(
            [parameter for _, parameter in named],
            lambda _, flat: self._reducer.launch(flat),
            first_bucket_bytes,
            bucket_bytes,
            names=[name for name, _ in named],
            finished=self._wait_for_sums,
            computing=lambda is_under_way: self._in_flight.computes(is_under_way),
        )
        return DataParallel(model, self._buckets)

    def register(self, **objects: Any) -> None:
        """Names what makes up the state of the job: anything with `state_dict` and `load_state_dict`.

        Waits until this worker is a member. One that joins a running job receives the state here.

        Raises:
            StateError: called twice, or the peers registered something else, or it cannot survive a change of members:
                a model in DistributedDataParallel or FSDP, an optimizer with closures, the script's own process group.
        """
        refuse_wrappers(objects.values())
        if self._member.elastic:
            refuse_own_group()
        take_over(objects, self._takes_effect, lambda: self._buckets is not None, lambda: self._in_flight.has_sums)
        self._state.register(objects, self._buckets.parameters if self._buckets is not None else ())
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
            dataset: map-style: `len(dataset)` and `dataset[index]`; or an `IterableDataset` or `elaunch.Stream`; or a
                DataLoader of one. What is not given here is then as the DataLoader has it: its batch size is that of a
                micro-batch, its sampler's order is kept, or replaced by this job's if it is random.
            global_batch_size: samples of a step, over all workers, whatever their number.
            micro_batch_size: samples of a micro-batch; without it a worker gets its share of a step at once.
            seed: of the order of samples, and of the random numbers of each micro-batch; default: 0.
            steps: number of steps of the whole job, those done before this worker joined included; or a stream ends it.
            shuffle: whether each pass over the data has an order of its own; default: True.
            collate_fn: makes a batch of a list of samples; default: torch's.
            loading: `num_workers` and what else DataLoader takes for loading ahead, with the same meanings.

        Raises:
            ValueError: a size below 1, or a sampler whose samples cannot be dealt out.
            TypeError: the data set is neither map-style nor a stream.
            StateError: the members train with different settings.
        """
        source = DataSource.of(dataset, seed=seed, shuffle=shuffle, collate_fn=collate_fn, loading=loading)
        feed = SampleFeed.of(source, global_batch_size, micro_batch_size, steps, self._state.stream)
        with self._loader(feed, steps) as loader:
            while not self._ended(steps):
                if self._begins(loader):
                    yield from self._attempt(loader)

    def steps(
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
    ) -> Iterator[Step]:
        """Yields the steps of the job, whose loop yields this worker's micro-batches, until `steps` have committed.

            for step in job.steps(dataset, global_batch_size=64, micro_batch_size=8, steps=1000):
                for inputs, targets in step:
                    loss = loss_fn(model(inputs), targets)
                    loss.backward()
                    job.report(loss=loss)
                optimizer.step()

        The inner loop ends when the step has committed on all members. What stands after it runs once a step on each of
        them, whatever happens: optimizers, schedules made by hand, averages of weights, logging. An interrupted step
        begins again in the inner loop, so that one may run any number of times.

        Args:
            dataset, global_batch_size, micro_batch_size, seed, steps, shuffle, collate_fn, loading: as for `batches`.

        Raises:
            StateError: a step was left before its inner loop was through, or as for `batches`.
            ValueError, TypeError: as for `batches`.
        """
        source = DataSource.of(dataset, seed=seed, shuffle=shuffle, collate_fn=collate_fn, loading=loading)
        feed = SampleFeed.of(source, global_batch_size, micro_batch_size, steps, self._state.stream)
        with self._loader(feed, steps) as loader:
            while not self._ended(steps):
                if not self._begins(loader):
                    continue
                feed.seed_alike(self.step, BEFORE)
                step = self._step = Step(self.step, lambda step: self._micro_batches(step, loader))
                yield step
                step.check_is_over()
                self._step = None

    def stop(self) -> None:
        """Ends the job before its last step, on all workers: after the next step that commits.

        One worker's call is enough, so one of them may decide, such as by an evaluation that only rank 0 makes.
        """
        self._wants_stop = True

    def report(self, *, loss: torch.Tensor | float) -> None:
        """Gives the mean loss of the micro-batch at hand; its mean over the step's samples goes to the event log."""
        self._in_flight.add_loss(loss)

    # -- one step -----------------------------------------------------------------------------------------------

    @contextmanager
    def _loader(self, feed: SampleFeed, steps: int) -> Iterator[Loader]:
        """Becomes a member for a loop over the data, and loads for as long as that lasts."""
        self._feed = feed
        self._become_member()
        self._state.check_origin(self._member, feed.layout)
        loader = feed.loader(steps, self.device)
        try:
            yield loader
        finally:
            loader.close()

    def _ended(self, steps: int) -> bool:
        """Whether all steps are done, and all members have come to the end."""
        while True:
            self._member.settle()
            if not self._is_over(steps):
                return False
            if self._member.finish(lambda: self._is_over(steps)):
                return True

    def _is_over(self, steps: int) -> bool:
        return self.step >= steps or self._stops or self._state.stream.is_over

    def _begins(self, loader: Loader) -> bool:
        """Settles at the step boundary; returns whether there is another step: not where a stream has ended."""
        self._member.begin_step(partial(self._known_feed.draw, loader, self._plans, self._state))
        return not self._state.stream.is_over

    def _micro_batches(self, step: Step, loader: Loader) -> Iterator[Any]:
        """Yields the micro-batches of a step as often as it is begun, until it has committed."""
        yield from self._attempt(loader)
        while not self._in_flight.committed:
            if not self._begins(loader):
                raise StateError(f"the stream ended before step {step.number} when it was read again, and not before")
            if self._buckets is None:
                self._state.zero_gradients()  # those in buckets are zeroed when a step begins
            yield from self._attempt(loader)
        self._known_feed.seed_alike(step.number, AFTER)
        step.committed, step.loss = True, self._loss()

    def _attempt(self, loader: Loader) -> Iterator[Any]:
        """Yields the micro-batches of the step in flight; it ends committed, or dropped."""
        layout = self._known_feed.layout
        share = self._begin_step(layout)
        loader.begin(self.step, share.micro_batches)
        step = self._in_flight
        usual = layout.usual_samples(len(self._member.generation.working))
        self._reducer.begin(self._member.group, usual / layout.global_batch_size, self._member.native.current)
        self._read_own_time()  # of the step before, whose end the device may not have come to at its commit
        if self._member.selector is not None and self._member.selector.measures():
            n_turns, step.own = len(share.micro_batches), OwnTime(self._timing)
            self._measured = step.own, n_turns, len(share.units) // n_turns
        for place, samples in enumerate(share.micro_batches):
            if self._member.interrupted or self._reducer.error is not None:
                self._resolve()
                return
            heartbeat.enter(Phase.SCRIPT, self.step)
            step.works(True)
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
            step.works(False)
        self._read_own_time()
        if self._resolve():  # unless an optimizer did; there is none, or a GradScaler skipped it
            self._tell()

    def _begin_step(self, layout: SampleLayout) -> Share:
        share = self._plans.share(layout)
        self._in_flight = StepInFlight(share.coverage, share.whole_coverage)
        if self._buckets is not None:
            self._buckets.zero()
        if self._model_buffers is not None:
            self._model_buffers.begin()
        return share

    def _read_own_time(self) -> None:
        """Tells what this worker's own part of the last measured step took, once its device has come to its end."""
        if self._measured is not None:
            own, n_turns, rows = self._measured
            if (own_s := own.read_s()) is not None:
                self._member.policy.measured(own_s / n_turns, rows)
                self._measured = None

    def _wait_for_sums(self) -> None:
        """Has what follows come after the sums."""
        with self._in_flight.waiting():
            self._reducer.join()

    def _resolve(self) -> bool:
        """Commits the step, or recovers; returns whether it is committed. Once per attempt."""
        step = self._in_flight
        if step.committed is None:
            heartbeat.enter(Phase.STEP)
            if step.own is not None:
                step.own.end()  # the update follows, and what the script does between two steps
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
            if step.committed:
                self._state.watch.committed(step.whole, self._member.generation.number)
                self._stops = self._stops or (step.whole is not None and step.whole.stops > 0)
                self._state.commit()
        return step.committed

    def _recover(self, error: StepInterrupted | None) -> bool:
        """Agrees with the survivors on the step in flight; moving state waits for the step boundary."""
        return self._member.agree(error).step > self.step

    @property
    def _known_feed(self) -> SampleFeed:
        assert self._feed is not None, "no loop over the data has begun"
        return self._feed

    def _pass_barrier(self, step: StepInFlight) -> StepRecord:
        if self._buckets is not None:
            self._buckets.flush()
        self._reducer.wait()
        self._reducer.raise_error()
        if self._model_buffers is not None:
            self._model_buffers.exchange(self._member.group)
        code = self._known_feed.layout.code()
        try:
            whole = self._member.pass_barrier(
                StepRecord.at(
                    self.step,
                    settings=(code, code),
                    effects=self._state.watch.calls.span,
                    stops=int(self._wants_stop),
                    coverage=step.coverage,
                    samples=step.loss_samples,
                    loss=step.loss,
                )
            )
        except DifferentSettings:
            raise StateError(
                f"the members call batches() with different settings; here: {self._known_feed.layout}. All workers of "
                "a job must run the same script with the same arguments"
            ) from None
        assert whole.coverage == step.whole_coverage, f"the micro-batches of step {self.step} are not those of a batch"
        return whole

    def _tell(self) -> None:
        """Reports the step that has just committed."""
        step = self.step - 1
        if self._in_flight.whole is None:
            self._member.committed(self.step)
            return
        self._member.report(step, loss=self._loss(), sample_ids=self._known_feed.ids(step))

    def _loss(self) -> float | None:
        """The mean loss of the step that has just committed; where a recovery committed it, what the others know."""
        whole = self._in_flight.whole
        if whole is None:
            return self._member.last_loss
        return whole.loss.value / whole.samples if whole.samples else None

    @contextmanager
    def _takes_effect(self, name: str, thing: Any) -> Iterator[bool]:
        """Around a call of `step` by the script, whether it acts.

        It does not in a micro-batch before the last, nor in a dropped step. After it the script has its own time.

        Raises:
            StateError: it is in the loop over the micro-batches of a step, or before it.
        """
        in_flight, step = self._in_flight, self._step
        if step is not None:
            step.check_call(name, thing, in_flight.in_micro_batch)
        acts = not in_flight.in_micro_batch or (in_flight.last_micro_batch and self._resolve())
        if acts:
            self._state.watch.calls.add(name)
        yield acts
        in_flight.ends_update(self.step)

    # -- membership ---------------------------------------------------------------------------------------------

    def _become_member(self) -> None:
        if not self._member.joined:
            self._member.join()

    # -- hooks (elaunch.workers.hooks.Hooks) --------------------------------------------------------------------

    def vote(self) -> Vote:
        """Says how far this worker is: entered, from the barrier until the step is settled."""
        entered = self._member.entered and self._in_flight.committed is None
        return Vote(
            self.step,
            entered,
            self._state.holds,
            {replica_check.CHECK: str(self._state.watch.check), STOPS: self._stops},
        )

    def pause(self) -> None:
        """Ends the reductions of the step in flight; what was measured is of members that change."""
        self._reducer.cancel()
        self._measured = None
        if self._buckets is not None:
            self._buckets.disarm()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        """The step in flight is settled where the script calls its optimizer; here, what else the others know."""
        self._state.watch.check = replica_check.agreed(verdict.facts, self._state.watch.check)
        self._stops = self._stops or any(facts.get(STOPS) for facts in verdict.facts)
        self._state.stream.is_over = False  # the members find that out anew, all of them

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        """Chooses how the micro-batches are shared out, or leaves it to the first step."""
        return self._plans.decide(self._feed.layout if self._feed is not None else None, generation, group, verdict)

    def transfer(self, group: Group, verdict: Verdict) -> int:
        """Brings the state to those that lack it, from memory or from a checkpoint."""
        if verdict.fresh and verdict.saved is not None:
            self._state.go_back(self._member, group, verdict.saved)
            return 0
        if not verdict.receivers:
            return 0
        return self._state.move(self._member, group, verdict)

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        """This worker holds the state from now on."""
        self._state.holds = True


def init() -> Job:
    """Attaches this process to its job.

    Under elaunch the job is elastic. Under torchrun, or in a plain Python process, its membership never changes.

    Raises:
        JobFailed: the agent, or under torchrun the store, does not answer.
    """
    client = agent_client.connect()
    if client.elastic:
        warn_of_own_group()
    return Job(client)
