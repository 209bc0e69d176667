"""What a worker has and does under a plan, and how that is built from what the script gives."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elaunch.errors import StateError
from elaunch.plan.tiling import Plan
from elaunch.policy.profile import LayerProfile
from elaunch.workers.comm.group import Group
from elaunch.workers.layers.change.migration import keys_of
from elaunch.workers.layers.executor import Executor, LayerKey, LossFunction, TPGroupSum
from elaunch.workers.layers.model import Factory, Layer, build, check_cuts, describe
from elaunch.workers.layers.samples import Samples
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.layers.shards import Form, MakeOptimizer, MakeScheduler, Shards
from elaunch.workers.layers.snapshots import Snapshots
from elaunch.workers.layers.tensor_parallel import TPRank
from elaunch.workers.layers.zero import ZeroOptimizer, first_masters
from elaunch.workers.state.layout import ParameterPiece, StateLayout


@dataclass(eq=False)
class WorkerPart:
    """What a worker has and does under a plan."""

    plan: Plan
    group: Group
    worker: str
    layout: StateLayout
    layers: dict[LayerKey, Layer]
    zero: ZeroOptimizer
    executor: Executor
    snapshots: Snapshots
    sums: dict[tuple[str, ...], TPGroupSum] = field(default_factory=dict)

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
        layers, loss_fn, optimizer, plan, settings: see `elaunch.workers.layers.engine.Engine`.

    Attributes:
        specs: of the layers, in their order.
        samples: what the steps are made of.
        device: of the layers.
        fingerprint: a short text that differs where the layers or the settings of two workers do.

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
    ) -> None:
        if len(layers) != plan.n_layers:
            raise StateError(f"the plan is for {plan.n_layers} layers, and {len(layers)} are given")
        self._factories, self._loss_fn, self._make_optimizer = tuple(layers), loss_fn, optimizer
        self._settings = settings
        self._recompute = settings.recomputed(plan.n_layers)
        self.device = torch.device(settings.device)
        self.samples = Samples(settings.dataset, settings.seed, settings.shuffle, settings.collate_fn, self.device)
        self.specs = describe(layers, self.samples.example(), plan.micro_batch_size, settings.dtype)
        layer_texts = [[spec.name, str(dict(spec.shapes)), str(spec.cuts)] for spec in self.specs]
        chosen = str((settings.seed, settings.consistency, settings.clip_norm))
        self._described = {"layers": layer_texts, "settings": chosen}
        self.fingerprint = f"{zlib.crc32(repr(layer_texts).encode()):08x} {chosen}"

    @property
    def optimizers(self) -> tuple[MakeOptimizer, MakeScheduler | None]:
        """Returns what makes the optimizer and the scheduler of its learning rate."""
        return self._make_optimizer, self._settings.scheduler

    def begun(self, plan: Plan, group: Group) -> WorkerPart:
        """Returns this worker's part of the first state of a job."""
        layout, worker = StateLayout(plan, self.specs), group.members[group.rank]
        layers = {key: self.built(layout, key, worker=worker) for key in keys_of(layout, worker)}
        pieces = layout.pieces(worker)
        masters = [(master,) for master in first_masters(layout, pieces, layers)]
        shards = self.shards(pieces, masters)
        part = self.part_of(plan, group, layout, layers, shards)
        part.place_layers()
        return part

    def built(self, layout: StateLayout, key: LayerKey, worker: str, values: bool = True) -> Layer:
        """Builds a layer as a worker has it under a plan; without `values`, those of its parameters mean nothing."""
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
        copies = Snapshots(
            layout,
            plan.workers,
            worker,
            shards,
            self._settings.snapshots,
            self._make_optimizer,
            self._settings.scheduler,
        )
        return WorkerPart(plan, group, worker, layout, layers, zero, executor, copies)

    def executor(self, worker: str, plan: Plan, layout: StateLayout, layers: Mapping[LayerKey, Layer]) -> Executor:
        """Returns what runs a worker's actions under a plan."""
        settings = self._settings
        bitwise = settings.consistency == "bitwise"
        return Executor(plan, worker, self.specs, layers, layout, self._loss_fn, settings.seed, bitwise)

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
                    parameter_bytes=sum(size * spec.dtypes[name].itemsize for name, size in sizes.items()),
                    optimizer_bytes=3 * masters,
                    activation_bytes_per_row=output,
                    output_bytes_per_row=output,
                )
            )
            elements.append(sum(sizes.values()))
        return tuple(layers), tuple(elements)

    def check_widths(self, widths: Collection[int]) -> None:
        """Checks that the layers can be cut over tensor-parallel groups of so many workers.

        Raises:
            StateError: a layer cannot, or none says how.
        """
        for width in widths:
            try:
                check_cuts(self.specs, self._factories, self._settings.dtype, width)
            except StateError as error:
                raise StateError(f"--tp={width}: {error}") from error

    def shards(
        self,
        pieces: Sequence[ParameterPiece],
        tensors: Sequence[tuple[Tensor, ...]],
        forms: Mapping[str, Form] | None = None,
        schedule: Mapping[str, Any] | None = None,
    ) -> Shards:
        """Returns shards of the optimizer's state with these values and, where given, forms and schedule."""
        return Shards(pieces, tensors, self._make_optimizer, self._settings.scheduler, forms, schedule)

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
