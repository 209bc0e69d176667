"""The hybrid-parallel engine: a model given as a list of layers, trained under any execution plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from elaunch.errors import StateError, StateLost
from elaunch.plan.tiling import Plan
from elaunch.workers.barrier import StepRecord, reduce
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.native.opening import Needs
from elaunch.workers.comm.transport import Transport
from elaunch.workers.exact_sum import NOTHING, ExactSum
from elaunch.workers.layers.change.begin import migration_to, moved_shards
from elaunch.workers.layers.change.compare import check_replicas
from elaunch.workers.layers.change.held_state import Commit, HeldState, Hosted, StepReport
from elaunch.workers.layers.change.lending import LentWeights, bring_back, lend
from elaunch.workers.layers.change.migration import Migration, keys_of
from elaunch.workers.layers.change.migration_plan import MigrationPlan
from elaunch.workers.layers.executor import LayerKey, LossFunction, Outcome
from elaunch.workers.layers.model import Factory, Layer
from elaunch.workers.layers.parts import Builder, WorkerPart
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.layers.shards import MakeOptimizer, Shards
from elaunch.workers.layers.snapshots import links
from elaunch.workers.layers.timing import Stopwatch
from elaunch.workers.layers.untrained.duties import copy_peers
from elaunch.workers.layers.untrained.moving import move
from elaunch.workers.member.keepers import place_in
from elaunch.workers.moments import TimedWork, timing_of
from elaunch.workers.state.chunks import Chunk
from elaunch.workers.state.layout import LayerSpec, ParameterPiece, StateLayout

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.layers.durable import RestoredLayers
    from elaunch.workers.state.checkpoint import CheckpointShard, Read, Restored

Barrier = Callable[[StepRecord], StepRecord]


class Engine:
    """Trains `layers` under `plan`; this worker builds and runs its own part of them.

    All workers make it with the same arguments and call `train_step` as often.

    Args:
        layers: functions that make the layers, in their order. A layer maps one tensor (rows, …) to one tensor (rows,
            …); its attribute `placements` says how tensor parallelism cuts it
            (`elaunch.workers.layers.tensor_parallel`).
        loss_fn: mean loss over the rows, of (output of the last layer, target).
        optimizer: called with (name, flat part of a parameter) pairs for the parts that this worker owns; returns an
            elementwise torch optimizer: `AdamW` itself, or a function that sorts them into groups by name.
        plan: who does what.
        settings: how it is trained.
        group: the workers of the plan; default: this process alone.
        joining: `change` will say what this worker does; it holds nothing before.
        native: the native groups of the members; None: all goes over links.

    Raises:
        PlanError: the plan does not tile layers and samples, or its workers are not those of the group.
        StateError: the layers, data set or optimizer cannot be used so.
    """

    def __init__(
        self,
        layers: Sequence[Factory],
        loss_fn: LossFunction,
        optimizer: MakeOptimizer,
        plan: Plan,
        settings: EngineSettings,
        *,
        group: Group | None = None,
        joining: bool = False,
        native: NativeGroups | None = None,
    ) -> None:
        self._settings = settings
        self.builder = Builder(layers, loss_fn, optimizer, plan, settings, native)
        """It builds this worker's parts, and knows the layers without running them."""
        self.step = 0
        self.report: StepReport | None = None
        """Of the last step that committed here."""
        self._part: WorkerPart | None = None
        self._next: WorkerPart | None = None
        # A change that happens in the next step, and what follows when that commits.
        self._migration: Migration | None = None
        self._next_migration: Migration | None = None
        # Of the weights alone, for a while.
        self._lent: LentWeights | None = None
        self._next_lent: LentWeights | None = None
        self._outcome: Outcome | None = None
        self.update = TimedWork(timing_of(self.builder.device))
        """The optimizer's last step on what this worker owns."""
        self.last_commit: Commit | None = None
        """What the last step that committed here came to; for who was at its barrier and did not pass."""
        self._stale = False
        # While a change under a bound is under way, or was interrupted: what is here.
        self._mixed: dict[str, list[Chunk]] | None = None
        # The copies that were there before the last change, of use until the first commit after it makes them old.
        self._hosted: Hosted | None = None
        self._next_hosted: Hosted | None = None
        self._own_transport = None if group is not None or joining else Transport(plan.workers[0], "")
        if not joining:
            group = group or Group(self._own_transport, 1, plan.workers[:1])  # type: ignore[arg-type]
            plan.validate(group.members)
            self._part = self.builder.begun(plan, group)
            self.builder.check_same(plan, group)

    @property
    def specs(self) -> tuple[LayerSpec, ...]:
        """Returns what is known of each layer, in their order."""
        return self.builder.specs

    @property
    def plan(self) -> Plan:
        """Returns the plan in force; while the weights alone follow another one, that."""
        return self._here.plan if self._lent is None else self._lent.plan

    @property
    def layers(self) -> dict[LayerKey, Layer]:
        """Returns this worker's layers, by layer and number of the TP group that it belongs to."""
        return self._here.layers if self._lent is None else self._lent.layers

    @property
    def holds(self) -> bool:
        """Returns whether this worker has its part of the state: one that joins has it once its first step commits."""
        return self._part is not None

    @property
    def entered(self) -> bool:
        """Returns whether complete gradients of a step are here that has neither committed nor been dropped."""
        return self._outcome is not None

    def train_step(self, barrier: Barrier | None = None, watch: Stopwatch | None = None) -> StepReport:
        """Does one step of the global batch and updates the parameters.

        Args:
            barrier: passes the commit barrier with this worker's record, and returns that of all members; by default,
                over the group of the plan.
            watch: measures the layers; not in a step in which the plan changes.

        Raises:
            StepInterrupted: a link broke, or the membership changes. If `step` has grown, the step had committed, and
                what is lacking is new values of parameters that others own.
            StateError: the weights alone follow another plan.
        """
        step = self.step
        if self._lent is not None:
            why = "the weights alone follow another plan (weights_only=True); go back to the one before by replan()"
            raise StateError(f"step {step} cannot begin: {why}")
        self._settle()
        if not step and self._migration is None:
            self.builder.check_values(self._here)
        part, outcome = self._migrated(step) if self._migration is not None else self._trained(step, watch)
        clips = self._settings.clip_norm is not None
        record = StepRecord.at(
            step,
            samples=sum(rows for _, rows, _ in outcome.losses),
            loss=ExactSum.of(rows * loss for _, rows, loss in outcome.losses),
            squares=part.zero.squares(outcome.gradients) if clips else NOTHING,
            copied=part.copied(step),
        )
        self._outcome = outcome
        whole = reduce(part.group, record) if barrier is None else barrier(record)
        batch = part.plan.global_batch_size
        assert whole.samples == batch, f"step {step}: the losses are of {whole.samples} samples, the batch has {batch}"
        norm, coefficient = None, 1.0
        if self._settings.clip_norm is not None:
            norm = math.sqrt(whole.squares.value)
            coefficient = min(1.0, self._settings.clip_norm / (norm + 1e-6))
        self.apply(Commit(step, coefficient, whole.loss.value / batch, norm))
        self._here.share()
        self._stale = False
        assert self.report is not None
        return self.report

    def _trained(self, step: int, watch: Stopwatch | None) -> tuple[WorkerPart, Outcome]:
        part = self._here
        with part.group.open() as traffic:
            part.begin_copies(traffic)
            load = self.builder.samples.begin(part.plan, step, part.executor.loaded)
            keep = partial(part.snapshots.keep, traffic)
            outcome = part.executor.run(part.for_step(traffic), step, load, part.sums, watch=watch, summed=keep)
            part.keep_copies(traffic, outcome.gradients)
        return part, outcome

    def _migrated(self, step: int) -> tuple[WorkerPart, Outcome]:
        """Does the step in which the plan changes."""
        assert self._migration is not None
        assert self._next is not None
        part = self._next
        with part.group.open() as traffic:
            outcome = self._migration.run(traffic, step, self.builder.samples)
            # The old copies end with the commit, so the first new ones are made before it.
            part.begin_copies(traffic)
            part.keep_copies(traffic, outcome.gradients)
        return part, outcome

    def apply(self, commit: Commit) -> None:
        """Commits the step whose gradients are here. Parameters that others own have their old values after it."""
        assert self._outcome is not None
        assert commit.step == self.step, f"step {self.step} is here, {commit.step} has committed"
        outcome, self._outcome = self._outcome, None
        if self._migration is not None:
            self._take_over()
        self._stale = True
        with self.update:
            self._here.zero.shards.step(outcome.gradients, commit.coefficient)
        self._here.snapshots.commit(commit.coefficient)
        self._here.copies.commit()
        self.last_commit = commit
        self._hosted = None
        self.step += 1
        self.report = StepReport(commit.step, commit.loss, commit.gradient_norm)

    def drop(self) -> None:
        """Drops the step in flight, which is to be done again."""
        self._outcome = self._migration = None
        if self._part is not None:
            self._part.snapshots.drop()
            self._part.copies.drop()

    def pause(self) -> None:
        """Leaves what is under way in native groups, which are over."""
        for one in (self._part, self._next, self._migration):
            if one is not None:
                one.leave()

    @property
    def needs(self) -> Needs:
        """Returns the native groups that the members need after what they do now."""
        coming = self._next if self._migration is not None else self._part
        return coming.routes.needs if coming is not None else ()

    # -- changes of plan ------------------------------------------------------------------------------------------

    def held_state(self) -> HeldState:
        """Returns what the others must know of this worker's state for a change."""
        settings = self.builder.fingerprint
        if self._part is None:
            return HeldState(settings=settings)
        return self._part.held_state(self._stale, self._mixed, self._hosted, self.builder.copied.holdings(), settings)

    @property
    def under_way(self) -> Plan | None:
        """Returns the plan to which the next step goes over; None: to none."""
        return self._next.plan if self._migration is not None and self._next is not None else None

    def lend(self, group: Group, plan: Plan) -> int:
        """Has the weights follow another plan for a while; see `elaunch.workers.layers.change.lending`.

        All members of the group call it; it takes effect with `install`, and ends with the next `change`.

        Returns:
            The bytes that this worker received.

        Raises:
            StateError: a change of plan is under way.
            StepInterrupted: a link broke, or the membership changes.
        """
        self._take_back()
        self._settle()
        self._next_lent = lend(group, plan, self._part, self.builder)
        return self._next_lent.received_bytes

    def _take_back(self) -> None:
        """Ends that weights follow another plan, or its beginning."""
        for lent in (self._lent, self._next_lent):
            if lent is not None:
                lent.end()
        self._lent = self._next_lent = None
        if self._part is not None:
            bring_back(self._part)

    def change(self, group: Group, plan: Plan, step: int, pausing: bool = False) -> int:
        """Moves to another plan, or into the job; it takes effect with `install`.

        All members of the group call it with the same arguments; among those that `plan` uses or leaves idle, each. An
        interruption leaves this worker with what it has: it may be called again, for another plan and other members.

        Where everything that is needed is current at workers that are there, nothing moves yet: it does so during the
        next step, under the plan between the two (`elaunch.workers.layers.change.migration`). If that step
        does not commit, this worker has what it had before.

        Args:
            group: of the workers of `plan`, with links between those that exchange anything under it.
            plan: for them.
            step: the number of steps that have committed.
            pausing: whether it takes effect at once in any case. Where it is the plan in force, nothing is done.

        Returns:
            The bytes that this worker received, or will in the next step.

        Raises:
            StateError: no survivor has some part of the state, or a worker was given other settings.
            StepInterrupted: a link broke, or the membership changes.
        """
        worker = group.members[group.rank]
        plan.validate(group.members)
        self._take_back()
        self._settle()
        notes = group.all_gather_json(self.held_state().to_json())
        held = {who: HeldState.from_json(one) for who, one in zip(group.members, notes, strict=True)}
        self._next_migration, self._next_step = None, step
        if not any(one.plan for one in held.values()):
            if step:
                raise StateLost(f"no member has any of the state of step {step}; go on from the last checkpoint")
            self._next = self.builder.begun(plan, group)
            self.builder.check_same(plan, group)
            return 0
        part, text = self._part, str(plan)
        if pausing and part is not None and part.group is group and all(one.is_of(text) for one in held.values()):
            self._next = None
            return 0
        migration_plan = MigrationPlan(plan, held, self.specs)
        layout, pieces = migration_plan.new.layout, migration_plan.new.layout.pieces(worker)
        layers = {key: self._here.layers[was] for key, was in migration_plan.kept[worker].items()}
        for key in keys_of(layout, worker):
            if key not in layers:
                layers[key] = self.builder.built(layout, key, worker, values=False)
        between = None
        if not self._settings.blocking and not pausing:
            between = migration_plan.between(group.members, self._settings.max_extra_bytes)
        if between is not None:
            migration = self._next_migration = migration_to(between, migration_plan, layers, group, part, self.builder)
            shards = self.builder.shards(
                pieces, migration.assembly.tensors(), migration_plan.forms, migration_plan.schedule
            )
            self._next = self.builder.part_of(plan, group, layout, layers, shards)
            return migration.coming_bytes
        came_bytes = move(group, migration_plan, self._part, layers, self.builder.copied.chunks())
        shards, received_bytes = self._moved(group, migration_plan, pieces, pausing)
        received_bytes += came_bytes
        part = self.builder.part_of(plan, group, layout, layers, shards)
        # Where this is interrupted, some of the parameters that stay may have new values and others not yet.
        self._stale = self._stale or migration_plan.stale
        with group.open() as traffic:
            received_bytes += part.zero.share(
                part.over_links(traffic), None if migration_plan.stale else migration_plan.lacking
            )
        self._next = part
        return received_bytes

    def links(self, plan: Plan, worker: str, domains: Mapping[str, str]) -> frozenset[str]:
        """Returns the workers to which `worker` needs links under a plan; `domains` are failure domains."""
        copies, place = self._settings.snapshots, place_in(plan.workers, domains)
        return links(plan, worker, copies, place) | copy_peers(plan, self.specs, worker, copies, place)

    def install(self) -> None:
        """Goes on under the plan that the last `change` has prepared."""
        if self._next_lent is not None:
            self._lent, self._next_lent = self._next_lent, None
            self._lent.begin()
            return
        self.step, self._outcome = self._next_step, None
        self._migration, self._next_migration = self._next_migration, None
        if self._migration is None and self._next is not None:
            self._take_over()

    def arrive(self) -> None:
        """Gives those who join their state now, since no next step will. All members of the group call it.

        The others keep their parts under the old plan, so an interruption loses nothing.
        """
        self._settle()
        if self._migration is None:
            return
        assert self._next is not None
        with self._next.group.open() as traffic:
            self._migration.move(traffic)
        if self._part is None:
            self._take_over()
        self._migration = None

    def _take_over(self) -> None:
        """From now on this worker's part is the one that was prepared."""
        assert self._next is not None
        if self._part is not None:
            self._part.snapshots.close()
        self._part, self._next, self._migration = self._next, None, None
        self._part.place_layers()
        self._mixed, self._stale = None, False
        self._hosted, self._next_hosted = self._next_hosted, None

    def _moved(
        self, group: Group, migration_plan: MigrationPlan, pieces: Sequence[ParameterPiece], keeping: bool
    ) -> tuple[Shards, int]:
        """The optimizer's state of the new pieces, and the bytes that came."""
        local = self._part.zero.shards if self._part is not None and self._mixed is None else None
        state = self._mixed if self._mixed is not None else local.chunks() if local is not None else {}
        hosted = self._hosted
        if hosted is None:
            copies = {} if self._part is None else self._part.snapshots.chunks()
            hosted = Hosted(copies, migration_plan.forms, migration_plan.schedule)
        bound = self._settings.max_extra_bytes
        if bound is not None:
            self._mixed, self._hosted = state, hosted
        shards, received_bytes, self._next_hosted = moved_shards(
            group, migration_plan, pieces, local, state, hosted, self.builder, bound, keeping
        )
        return shards, received_bytes

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def durable(self) -> CheckpointShard:
        """Returns what this worker adds to a checkpoint between two steps; the tensors are the live ones."""
        self._settle()
        from elaunch.workers.layers.durable import part_of, written_places

        # Who joins during the next step has nothing yet.
        shards = self._here.zero.shards if self.holds else self.builder.shards((), ())
        places = written_places(self._here.layout, self._here.worker, self._here.layers) if self.holds else {}
        return part_of(self.specs, shards, places, self.builder.cursor(self.plan))

    def restore(
        self, group: Group, plan: Plan, go_back: Callable[[Read[RestoredLayers]], Restored[RestoredLayers]]
    ) -> Restored[RestoredLayers]:
        """Goes back to a checkpoint, under any plan; it takes effect with `install`.

        All members of the group call it with the same arguments, as `change`.

        Args:
            group: of the members.
            plan: by which they go on.
            go_back: finds a checkpoint that all members can read, with the function that reads this worker's part.

        Raises:
            StateError: the checkpoint is of another job, none is whole, or a worker was given other settings.
            StepInterrupted: a link broke, or the membership changes.
        """
        plan.validate(group.members)
        self._take_back()
        self.builder.check_same(plan, group)
        layout, worker = StateLayout(plan, self.specs), group.members[group.rank]
        found = go_back(lambda saved: self.builder.read(saved, plan, layout, worker))
        part = self.builder.part_of(plan, group, layout, found.state.layers, found.state.shards)
        with group.open() as traffic:
            part.zero.share(part.over_links(traffic))
        self._next, self._next_step, self._next_hosted, self._next_migration = part, found.saved.step, None, None
        return found

    # -- parts of an engine ---------------------------------------------------------------------------------------

    def guard(self) -> None:
        """Notes the values of a job that goes on, since the script may now load its first ones, which do not count."""
        if self.step and self._part is not None:
            self._part.guard()

    def _settle(self) -> None:
        """Takes in what the script has done to the layers since the engine had control."""
        if self._part is not None:
            self._part.settle(first=not self.step)

    @property
    def _here(self) -> WorkerPart:
        part = self._part
        if part is None and self._migration is not None:
            part = self._next
        if part is None:
            raise StateError("this worker has joined no job yet")
        return part

    def sample_ids(self, step: int) -> list[int]:
        """Returns the ids of the samples of a step, in their order."""
        return self.builder.samples.order.ids(step * self.plan.global_batch_size, self.plan.global_batch_size)

    @property
    def learning_rates(self) -> list[float]:
        """Returns the learning rate of each group of the optimizer; empty on a worker that owns no part of it."""
        return self._here.zero.shards.learning_rates

    @property
    def changing(self) -> bool:
        """Returns whether the plan changes in the step in flight."""
        return self._migration is not None

    def check_replicas(self, alike: int | None, repair: bool) -> str | None:
        """Compares the replicas of all layers; see `elaunch.workers.layers.change.compare`."""
        return check_replicas(self._here, self.step, alike, repair)

    @property
    def n_owned(self) -> int:
        """Returns how many elements of parameters this worker updates."""
        return sum(piece.elements for piece in self._here.zero.shards.pieces)

    def memory_bytes(self) -> dict[str, int]:
        """Returns what this worker keeps from step to step: parameters, master weights and optimizer states."""
        return self._here.memory_bytes()

    def close(self) -> None:
        """Lets go of what the engine made itself."""
        self.builder.samples.close()
        if self._part is not None:
            self._part.snapshots.close()
        if self._own_transport is not None:
            self._own_transport.close()
