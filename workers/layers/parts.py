"""What a worker has and does under a plan, and how that is built from what the script gives."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from elaunch.errors import StateError
from elaunch.plan.tiling import Plan
from elaunch.policy.profile import LayerProfile
from elaunch.workers.barrier import UNSAID, Span
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.layers.carry.carrier import Carrier
from elaunch.workers.layers.carry.links import LinkCarrier
from elaunch.workers.layers.carry.native import NativeCarrier
from elaunch.workers.layers.carry.routes import Bundle, NativeRoutes
from elaunch.workers.layers.carry.tp_sums import TPGroupSum
from elaunch.workers.layers.change.held_state import HeldState, Hosted
from elaunch.workers.layers.change.migration import keys_of
from elaunch.workers.layers.executor import Executor, LayerKey, LossFunction
from elaunch.workers.layers.model import Factory, Layer, build, check_cuts, describe, digest_of
from elaunch.workers.layers.samples import Samples
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.layers.shards import Form, MakeOptimizer, MakeScheduler, Shards
from elaunch.workers.layers.snapshots import Snapshots
from elaunch.workers.layers.tensor_parallel import TPRank
from elaunch.workers.layers.untrained.copies import HostCopies, UntrainedCopies
from elaunch.workers.layers.zero import ZeroOptimizer, first_masters
from elaunch.workers.member.keepers import place_in
from elaunch.workers.state.chunks import ChunkedState, holdings_of
from elaunch.workers.state.layout import OptimizerShard, ParameterPiece, StateLayout
from elaunch.workers.state.space import Holdings, tensor_items

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.layers.durable import RestoredLayers
    from elaunch.workers.state.checkpoint import SavedCheckpoint


Place = str
"""`3 0/2`: layer 3, the first of two workers of a tensor-parallel group."""


@dataclass(eq=False)
class WorkerPart:
    """What a worker has and does under a plan.

    Attributes:
        native: the native groups of the members, for those tensors that they carry once they are in use.
        exact: whether sums have a fixed order.
    """

    plan: Plan
    group: Group
    worker: str
    layout: StateLayout
    layers: dict[LayerKey, Layer]
    zero: ZeroOptimizer
    executor: Executor
    snapshots: Snapshots
    copies: UntrainedCopies
    device: torch.device
    native: NativeGroups | None
    exact: bool
    sums: dict[tuple[str, ...], TPGroupSum] = field(default_factory=dict)
    guarded: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """While the script may put its first values into the layers: where the job's values belong, and these."""
    _carrier: Carrier | None = None

    @cached_property
    def routes(self) -> NativeRoutes:
        """Returns where messages travel in native groups."""
        return NativeRoutes(self.plan, self.layout, self.worker, self.exact)

    def over_links(self, traffic: Traffic) -> Carrier:
        """Returns what carries tensors over the links of an operation."""
        return LinkCarrier(traffic, self.worker, self.device.type != "cpu")

    def for_step(self, traffic: Traffic) -> Carrier:
        """Returns what carries the tensors of the step that begins."""
        return self._natively(lambda: self.routes.gradients) or self.over_links(traffic)

    def share(self) -> None:
        """Gives the new values of parameters to those who hold them. All members of the group call it."""
        if not self.zero.travels:
            self.zero.share(None)
            return
        carrier = self._natively(lambda: self.routes.parameters)
        if carrier is not None:
            self.zero.share(carrier)
            return
        with self.group.open() as traffic:
            self.zero.share(self.over_links(traffic))

    def leave(self) -> None:
        """Leaves what was under way in native groups that are over."""
        if self._carrier is not None:
            self._carrier.drop()
            self._carrier = None

    def _natively(self, bundles: Callable[[], Sequence[Bundle]]) -> Carrier | None:
        """Returns what carries tensors in native groups, where all members use those of this plan."""
        native = self.native
        if native is None or not native.serves(self.routes.needs):
            return None
        self._carrier = NativeCarrier(
            self.routes, bundles(), native.in_use, self.device, self.group.generation, self.exact, native.failed
        )
        return self._carrier

    def copied(self, step: int) -> Span:
        """Returns what to tell at the barrier of a step about the copies of this worker's state."""
        behind = self.snapshots.behind
        return UNSAID if behind is None else (step + 1 - behind, step + 1 - behind)

    def begin_copies(self, traffic: Traffic) -> None:
        """Has what comes of others' states in a step received."""
        self.snapshots.begin(traffic)
        self.copies.begin(traffic)

    def keep_copies(self, traffic: Traffic, gradients: Mapping[OptimizerShard, Tensor]) -> None:
        """Sends, at the end of a step, what others' copies of this worker's state need, and waits for the same."""
        self.snapshots.ship(traffic, gradients)  # those that have not left yet
        self.copies.ship(traffic)
        self.snapshots.arrive(traffic)
        self.copies.arrive(traffic)

    def guard(self) -> None:
        """Notes what the job has given this worker, for `settle`."""
        found = (tensor for layer in self.layers.values() for tensor in layer.tensors().values())
        self.guarded = [(tensor, tensor.to("cpu", copy=True)) for tensor in found]

    def settle(self, first: bool) -> None:
        """Takes from the layers what the script has put there.

        Args:
            first: no step has committed. Then values count; later those of the job do, which are put back where the
                script of a worker that has just come has overwritten them.

        Raises:
            StateError: the layers are not what they were.
        """
        for layer in self.layers.values():
            layer.check()
        if first:
            self.zero.take_values()
        for tensor, value in self.guarded:
            tensor.copy_(value)
        self.guarded = []

    def held_state(
        self,
        stale: bool,
        mixed: ChunkedState | None,
        hosted: Hosted | None,
        copied: Holdings,
        settings: str,
    ) -> HeldState:
        """Returns what the others must know of this worker's state for a change.

        Args:
            stale: new values of parameters are still under way.
            mixed: what is here while a change under a bound is under way.
            hosted: the copies from before the last change, as long as they are of use.
            copied: what is here of others' frozen parameters and buffers.
            settings: fingerprint of this worker's settings.
        """
        shards, copies = self.zero.shards, self.snapshots
        schedule = shards.schedule()
        if schedule is None:
            schedule = copies.schedule() if hosted is None else hosted.schedule
        return HeldState(
            plan=str(self.plan),
            stale=stale,
            boxes=None if mixed is None else holdings_of(mixed),
            hosted=None if hosted is None else holdings_of(hosted.chunks),
            snapshots=copies.pieces(),
            copied=copied,
            forms={**(copies.forms() if hosted is None else hosted.forms), **shards.forms()},
            schedule=schedule,
            settings=settings,
        )

    def memory_bytes(self) -> dict[str, int]:
        """Returns what this worker keeps from step to step: parameters, master weights and optimizer states."""
        return {
            "parameters": sum(p.nbytes for layer in self.layers.values() for p in layer.module.parameters()),
            "masters": self.zero.shards.master_bytes(),
            "optimizer": self.zero.shards.state_bytes(),
        }

    @property
    def places(self) -> dict[Place, Layer]:
        """Returns this worker's layers, by the place that its replicas have too."""
        return {f"{key[0]} {one.tp_rank.rank}/{one.tp_rank.size}": one for key, one in self.layers.items()}

    def place_layers(self) -> None:
        """Tells the layers of their tensor-parallel groups in this plan."""
        for (index, replica), layer in self.layers.items():
            workers = self.layout.holders[index][replica]
            add = None
            if len(workers) > 1:
                add = self.sums.setdefault(workers, TPGroupSum(workers, self.worker))
            layer.tp_rank = TPRank(workers.index(self.worker), len(workers), add)


class Builder:
    """Builds the parts of this worker: layers, shards of the optimizer's state, executor and copies.

    Args:
        layers, loss_fn, optimizer, plan, settings, native: see `elaunch.workers.layers.engine.Engine`.

    Attributes:
        specs: of the layers, in their order.
        samples: what the steps are made of.
        device: of the layers.
        copied: what this worker has of others' frozen parameters and buffers, whatever the plan.
        fingerprint: a short text that differs where the layers, samples or settings of two workers do.

    Raises:
        StateError: the layers or the data set cannot be used so.
    """

    def __init__(
        self,
        layers: Sequence[Factory],
        loss_fn: LossFunction,
        optimizer: MakeOptimizer,
        plan: Plan,
        settings: EngineSettings,
        native: NativeGroups | None = None,
    ) -> None:
        if len(layers) != plan.n_layers:
            raise StateError(f"the plan is for {plan.n_layers} layers, and {len(layers)} are given")
        self._factories, self._loss_fn, self._make_optimizer = tuple(layers), loss_fn, optimizer
        self._settings, self._native = settings, native
        self._bitwise = settings.consistency == "bitwise"
        self._recompute = settings.recomputed(plan.n_layers)
        self.device = torch.device(settings.device)
        self.copied = HostCopies()
        self._widths = {1}  # of tensor-parallel groups, that all layers can have
        self.samples = Samples(settings.source(), self.device)
        self.specs = describe(layers, self.samples.example(), plan.micro_batch_size, settings.dtype)
        layer_texts = [
            [
                spec.name,
                str(dict(spec.shapes)),
                str(spec.cuts),
                *([str(dict(spec.untrained))] if spec.untrained else []),
            ]
            for spec in self.specs
        ]
        chosen = str((settings.seed, settings.consistency, settings.clip_norm))
        samples = self.samples.described()
        self._described = {"layers": layer_texts, "settings": chosen, "samples": samples}
        self.fingerprint = f"{zlib.crc32(repr((layer_texts, samples)).encode()):08x} {chosen}"

    @property
    def optimizers(self) -> tuple[MakeOptimizer, MakeScheduler | None]:
        """Returns what makes the optimizer and the scheduler of its learning rate."""
        return self._make_optimizer, self._settings.scheduler

    def begun(self, plan: Plan, group: Group) -> WorkerPart:
        """Returns this worker's part of the first state of a job."""
        layout, worker = StateLayout(plan, self.specs), group.members[group.rank]
        layers = {key: self.built(layout, key, worker=worker) for key in keys_of(layout, worker)}
        pieces = layout.pieces(worker)
        masters = [(master,) for _, master in first_masters(layout, pieces, layers)]
        shards = self.shards(pieces, masters)
        part = self.part_of(plan, group, layout, layers, shards)
        part.place_layers()
        return part

    def built(self, layout: StateLayout, key: LayerKey, worker: str, values: bool = True) -> Layer:
        """Builds a layer as a worker has it under a plan; without `values`, those of its tensors mean nothing."""
        layer, replica = key
        workers = layout.holders[layer][replica]
        place = TPRank(workers.index(worker), len(workers))
        return build(
            self.specs[layer],
            self._factories[layer],
            self._settings.seed,
            self.device,
            self._settings.dtype,
            place,
            layer in self._recompute,
            values,
        )

    def part_of(
        self,
        plan: Plan,
        group: Group,
        layout: StateLayout,
        layers: dict[LayerKey, Layer],
        shards: Shards,
    ) -> WorkerPart:
        """Puts a worker's part together from its layers and its shards of the optimizer's state."""
        worker = group.members[group.rank]
        zero = ZeroOptimizer(layout, worker, layers, shards)
        executor = self.executor(worker, plan, layout, layers)
        place = place_in(plan.workers, group.domains)
        copies = Snapshots(
            layout,
            plan.workers,
            worker,
            shards,
            self._settings.snapshots,
            self._make_optimizer,
            self._settings.scheduler,
            place,
        )
        of_untrained = UntrainedCopies(
            layout, self.specs, plan.workers, worker, layers, self._settings.snapshots, self.copied, place
        )
        return WorkerPart(
            plan,
            group,
            worker,
            layout,
            layers,
            zero,
            executor,
            copies,
            of_untrained,
            self.device,
            self._native,
            self._bitwise,
        )

    def read(self, saved: SavedCheckpoint, plan: Plan, layout: StateLayout, worker: str) -> tuple[RestoredLayers, int]:
        """Returns a worker's part of a checkpoint, and the bytes that were read.

        Raises:
            CheckpointDamaged: it is not what was written.
            StateError: it is of another job.
        """
        from elaunch.workers.layers.durable import RestoredLayers, has_untrained, read_untrained, shards_of

        pieces, cursor = layout.pieces(worker), self.cursor(plan)
        shards, n_bytes = shards_of(saved, self.specs, layout, pieces, cursor, self.device, *self.optimizers)
        # One of an older version has no frozen parameters and buffers: those of the factories are used then.
        there = has_untrained(saved, self.specs)
        layers = {key: self.built(layout, key, worker, values=not there) for key in keys_of(layout, worker)}
        if there:
            n_bytes += read_untrained(saved, layout, worker, layers)
        return RestoredLayers(shards, layers), n_bytes

    def cursor(self, plan: Plan) -> dict[str, Any]:
        """Returns what a number of steps means."""
        return {"global_batch_size": plan.global_batch_size, **self.samples.described()}

    def executor(self, worker: str, plan: Plan, layout: StateLayout, layers: Mapping[LayerKey, Layer]) -> Executor:
        """Returns what runs a worker's actions under a plan."""
        return Executor(plan, worker, self.specs, layers, layout, self._loss_fn, self._settings.seed, self._bitwise)

    def described(self) -> tuple[tuple[LayerProfile, ...], tuple[int, ...]]:
        """Returns all layers, as far as they are known without being run, and the elements of their parameters.

        Of the optimizer, a master and two states as large are assumed.
        """
        layers, elements = [], []
        for spec in self.specs:
            sizes = {name: math.prod(shape) for name, shape in spec.shapes.items()}
            shape, dtype = spec.output
            output = math.prod(shape) * dtype.itemsize
            masters = sum(size * (8 if spec.dtypes[name] == torch.float64 else 4) for name, size in sizes.items())
            layers.append(
                LayerProfile(
                    forward_s_per_row=0.0,
                    backward_s_per_row=0.0,
                    parameter_bytes=sum(
                        math.prod(item.shape) * item.element_bytes for item in tensor_items(spec).values()
                    ),
                    optimizer_bytes=3 * masters,
                    activation_bytes_per_row=output,
                    output_bytes_per_row=output,
                    gradient_bytes=masters,
                    summed_in_tree=self._bitwise,
                )
            )
            elements.append(sum(sizes.values()))
        return tuple(layers), tuple(elements)

    def check_widths(self, widths: Collection[int], asker: str = "--tp=") -> None:
        """Checks that the layers can be cut over tensor-parallel groups of so many workers.

        Args:
            widths: numbers of workers.
            asker: who wants them, for messages.

        Raises:
            StateError: a layer cannot, or none says how.
        """
        for width in set(widths) - self._widths:
            try:
                check_cuts(self.specs, self._factories, self._settings.dtype, width)
            except StateError as error:
                raise StateError(f"{asker}{width}: {error}") from error
            self._widths.add(width)

    def shards(
        self,
        pieces: Sequence[ParameterPiece],
        tensors: Sequence[tuple[Tensor, ...]],
        forms: Mapping[str, Form] | None = None,
        schedule: Mapping[str, Any] | None = None,
    ) -> Shards:
        """Returns shards of the optimizer's state with these values and, where given, forms and schedule."""
        return Shards(pieces, tensors, self._make_optimizer, self._settings.scheduler, forms, schedule)

    def check_values(self, part: WorkerPart) -> None:
        """Checks that all who hold a layer begin with the same values. All members of the group call it.

        Raises:
            StateError: names the layer and two workers.
        """
        if all(len(tp_groups) == 1 for tp_groups in part.layout.holders):
            return
        local = {place: digest_of(layer) for place, layer in part.places.items()}
        known: dict[str, tuple[str, str]] = {}
        for member, told in zip(part.group.members, part.group.all_gather_json(local), strict=True):
            for place, digest in told.items():
                first, expected = known.setdefault(place, (member, digest))
                if digest != expected:
                    name = self.specs[int(place.split()[0])].name
                    raise StateError(
                        f"{first} and {member} begin with different values of {name}; all workers that have a layer "
                        "must load the same values into it before the first step"
                    )

    def check_same(self, plan: Plan, group: Group) -> None:
        """Checks that all workers were given the same; also, nobody begins before all have got this far.

        Raises:
            StateError: names two workers and what differs.
        """
        local = {"plan": str(plan), **self._described}
        told = group.all_gather_json(local)
        for what in local:
            for member, theirs in zip(group.members, told, strict=True):
                if theirs[what] != told[0][what]:
                    raise StateError(
                        f"{group.members[0]} and {member} were given different {what}: {told[0][what]} and "
                        f"{theirs[what]}; all workers must run the same script with the same arguments"
                    )
