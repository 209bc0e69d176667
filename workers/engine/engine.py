"""The hybrid-parallel engine: a model given as a list of layers, trained under any execution plan."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from elaunch.errors import StateError
from elaunch.workers.comm.fabric import Fabric
from elaunch.workers.comm.group import Group
from elaunch.workers.engine import data
from elaunch.workers.engine.executor import Executor, LayerKey, LossFunction, TupleSum
from elaunch.workers.engine.layers import Factory, Layer, build, describe
from elaunch.workers.engine.layout import StateLayout
from elaunch.workers.engine.samples import Samples
from elaunch.workers.engine.tensor_parallel import Membership
from elaunch.workers.engine.zero import MakeOptimizer, MakeScheduler, ZeroOptimizer
from elaunch.workers.plan.tiling import Plan

Consistency = Literal["bitwise", "fast"]


@dataclass(frozen=True)
class StepReport:
    """What a step that has committed came to; the same on all workers.

    Attributes:
        step: its number.
        loss: mean over the global batch.
        gradient_norm: of the mean loss over the global batch, before clipping; None without clipping.
    """

    step: int
    loss: float
    gradient_norm: float | None


class Engine:
    """Trains `layers` under `plan`; this worker builds and runs its own part of them.

    All workers make it with the same arguments and call `train_step` as often.

    Args:
        layers: functions that make the layers, in their order. A layer maps one tensor (rows, …) to one tensor (rows,
            …); its attribute `placements` says how tensor parallelism cuts it
            (`elaunch.workers.engine.tensor_parallel`).
        loss_fn: mean loss over the rows, of (output of the last layer, target).
        optimizer: called with (name, flat part of a parameter) pairs for the parts that this worker owns; returns an
            elementwise torch optimizer: `AdamW` itself, or a function that sorts them into groups by name.
        plan: who does what.
        dataset: map-style; items are pairs (input, target).
        seed: of initial values, order of samples and all random numbers.
        scheduler: of the learning rate, called with the optimizer; steps once a step.
        clip_norm: the gradient's greatest norm.
        dtype: of the parameters; with bfloat16, master weights and optimizer states are float32.
        recompute: layers whose activations are computed again in backward instead of being kept; True: all.
        consistency: "bitwise": gradients are summed along a tree over the logical micro-batches, so that a result does
            not depend on who computed them; it takes a few more gradients' memory. "fast": each worker keeps one sum.
        shuffle: whether each pass over the data has an order of its own.
        collate_fn: makes a batch of a list of items; default: torch's.
        group: the workers of the plan; default: this process alone.
        device: of this worker's layers.

    Raises:
        PlanError: the plan does not tile layers and slots, or its workers are not those of the group.
        StateError: the layers, data set or optimizer cannot be used so.
    """

    def __init__(
        self,
        layers: Sequence[Factory],
        loss_fn: LossFunction,
        optimizer: MakeOptimizer,
        plan: Plan,
        *,
        dataset: Any,
        seed: int = 0,
        scheduler: MakeScheduler | None = None,
        clip_norm: float | None = None,
        dtype: torch.dtype | None = None,
        recompute: Collection[int] | bool = (),
        consistency: Consistency = "bitwise",
        shuffle: bool = True,
        collate_fn: data.Collate | None = None,
        group: Group | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if len(layers) != plan.n_layers:
            raise StateError(f"the plan is for {plan.n_layers} layers, and {len(layers)} are given")
        if consistency not in ("bitwise", "fast"):
            raise StateError(f"consistency must be 'bitwise' or 'fast', got {consistency!r}")
        self._own_fabric = None if group is not None else Fabric(plan.workers[0], "")
        self._group = group or Group(self._own_fabric, 1, plan.workers[:1])  # type: ignore[arg-type]
        plan.validate(self._group.members)
        self.plan, self.step, self.worker = plan, 0, self._group.fabric.worker
        self._clip_norm = clip_norm
        device = torch.device(device)
        self._samples = Samples(dataset, seed, shuffle, collate_fn, device)
        self.specs = describe(layers, self._samples.example(), plan.micro_batch_size, dtype)
        layout = StateLayout(plan, self.specs)
        self._sums: dict[tuple[str, ...], TupleSum] = {}
        self.layers: dict[LayerKey, Layer] = {}
        again = range(plan.n_layers) if recompute is True else recompute or ()
        for layer, tuples in enumerate(layout.holders):
            for replica, workers in enumerate(tuples):
                if self.worker in workers:
                    place = self._place(workers)
                    spec = self.specs[layer]
                    self.layers[layer, replica] = build(spec, layers[layer], seed, device, dtype, place, layer in again)
        self._zero = ZeroOptimizer(layout, self.worker, self.layers, optimizer, scheduler)
        self._executor = Executor(
            plan, self.worker, self.specs, self.layers, layout, loss_fn, seed, consistency == "bitwise"
        )
        self.report: StepReport | None = None
        """Of the last step that committed here."""
        self._check_same(seed, consistency, clip_norm)

    def train_step(self) -> StepReport:
        """Do one step of the global batch and update the parameters.

        Raises:
            StepInterrupted: a link broke, or the membership changes. If `step` has grown, the step had committed, and
                what is lacking is new values of parameters that others own.
        """
        step = self.step
        with self._group.open() as traffic:
            outcome = self._executor.run(
                traffic, step, lambda slots: self._samples.load(self.plan, step, slots), self._sums
            )
        norm_terms = [] if self._clip_norm is None else self._zero.norm_terms(outcome.gradients)
        mine = json.dumps({"step": step, "losses": outcome.losses, "norm": norm_terms}).encode()
        said = [json.loads(payload) for payload in self._group.all_gather_bytes(mine)]
        assert {one["step"] for one in said} == {step}, (
            f"at the barrier of step {step}: {[one['step'] for one in said]}"
        )
        norm, coefficient = None, 1.0
        if self._clip_norm is not None:
            norm = self._zero.total_norm(tuple(term) for one in said for term in one["norm"])
            coefficient = min(1.0, self._clip_norm / (norm + 1e-6))
        self._zero.step(outcome.gradients, coefficient)
        losses = sorted(tuple(loss) for one in said for loss in one["losses"])
        mean = math.fsum(rows * loss for _, rows, loss in losses) / self.plan.global_batch_size
        self.step, self.report = step + 1, StepReport(step, mean, norm)
        with self._group.open() as traffic:
            self._zero.share(traffic)
        return self.report

    def sample_ids(self, step: int) -> list[int]:
        """The samples of a step, by slot."""
        return self._samples.order.ids(step * self.plan.global_batch_size, self.plan.global_batch_size)

    @property
    def learning_rates(self) -> list[float]:
        """Of each group of the optimizer; empty on a worker that owns no part of it."""
        return self._zero.learning_rates

    def memory_bytes(self) -> dict[str, int]:
        """What this worker keeps from step to step: parameters, master weights and optimizer states."""
        parameters = sum(p.nbytes for layer in self.layers.values() for p in layer.module.parameters())
        return {
            "parameters": parameters,
            "masters": self._zero.master_bytes(),
            "optimizer": self._zero.state_bytes(),
        }

    def close(self) -> None:
        """Let go of what the engine made itself."""
        if self._own_fabric is not None:
            self._own_fabric.close()

    def _check_same(self, *settings: object) -> None:
        """That all workers were given the same; also, nobody begins before all have got this far."""
        mine = {
            "plan": str(self.plan),
            "layers": [[spec.name, str(dict(spec.shapes)), str(spec.placements)] for spec in self.specs],
            "settings": str(settings),
        }
        said = [json.loads(payload) for payload in self._group.all_gather_bytes(json.dumps(mine).encode())]
        for what in mine:
            for member, theirs in zip(self._group.members, said, strict=True):
                if theirs[what] != said[0][what]:
                    raise StateError(
                        f"{self._group.members[0]} and {member} were given different {what}: {said[0][what]} and "
                        f"{theirs[what]}; all workers must run the same script with the same arguments"
                    )

    def _place(self, workers: tuple[str, ...]) -> Membership:
        if len(workers) == 1:
            return Membership()
        sums = self._sums.setdefault(workers, TupleSum(workers, self.worker))
        return Membership(workers.index(self.worker), len(workers), sums)
