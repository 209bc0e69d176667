"""Weights under another plan for a while, as in the phases of a job that trains on what its model generates.

Only parameters and buffers are laid out anew, beside what the worker has under the plan that trains. Masters, optimizer
states and their copies stay at their owners; on an accelerator they wait in host memory, and so do the layers that the
other plan does not use. No step commits meanwhile, so the way back moves nothing over links, and all is as it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from elaunch.errors import StateError
from elaunch.plan.tiling import Plan
from elaunch.workers.comm.group import Group
from elaunch.workers.layers.change.held_state import HeldState
from elaunch.workers.layers.change.migration import keys_of
from elaunch.workers.layers.change.migration_plan import MigrationPlan
from elaunch.workers.layers.executor import LayerKey
from elaunch.workers.layers.model import Layer
from elaunch.workers.layers.parts import Builder, WorkerPart
from elaunch.workers.layers.untrained.moving import move


@dataclass(eq=False)
class LentWeights:
    """This worker's layers under another plan than that by which it trains.

    Attributes:
        plan: the other one.
        layers: by it; some of them are those of the plan that trains.
        received_bytes: that came for it.
        part: what this worker has under the plan that trains.
    """

    plan: Plan
    layers: dict[LayerKey, Layer]
    received_bytes: int
    part: WorkerPart

    @cached_property
    def _modes(self) -> list[tuple[nn.Module, bool]]:
        modules = (module for layer in self._shared for module in layer.module.modules())
        return [(module, module.training) for module in modules]

    @property
    def _shared(self) -> list[Layer]:
        used = set(map(id, self.layers.values()))
        return [layer for layer in self.part.layers.values() if id(layer) in used]

    def begin(self) -> None:
        """Puts what is not used into host memory, and notes what the script may change in what is."""
        assert self._modes is not None
        shared = set(map(id, self._shared))
        for layer in self.part.layers.values():
            if id(layer) not in shared:
                layer.place(torch.device("cpu"))

    def end(self) -> None:
        """Puts all back where the plan that trains has it, on this worker; it may be called again."""
        for module, training in self._modes:
            module.training = training
        bring_back(self.part)


def bring_back(part: WorkerPart) -> None:
    """Has all of a part on its device."""
    part.zero.shards.place(part.device)
    for layer in part.layers.values():
        layer.place(part.device)


def lend(group: Group, plan: Plan, part: WorkerPart | None, builder: Builder) -> LentWeights:
    """Lays the weights out under another plan. All members of the group call it, when all have their parts.

    An interruption leaves what this worker had.

    Args:
        group: of the workers of `plan`.
        plan: for them.
        part: what this worker has.
        builder: of its layers.

    Raises:
        StateError: some member has no part of the same plan.
        StepInterrupted: a link broke, or the membership changes.
    """
    plan.validate(group.members)
    worker, theirs = group.members[group.rank], "" if part is None else str(part.plan)
    told = group.all_gather_json(HeldState(plan=theirs, settings=builder.fingerprint).to_json())
    held = {who: HeldState.from_json(one) for who, one in zip(group.members, told, strict=True)}
    if part is None or len({one.plan for one in held.values()}) > 1:
        raise StateError("the weights cannot follow another plan alone while a change of plan is under way")
    migration_plan = MigrationPlan(plan, held, builder.specs)
    layout = migration_plan.new.layout
    layers = {key: part.layers[was] for key, was in migration_plan.kept[worker].items()}
    for key in keys_of(layout, worker):
        if key not in layers:
            layers[key] = builder.built(layout, key, worker, values=False)
    part.zero.shards.place(torch.device("cpu"))
    received_bytes = move(group, migration_plan, part, layers, {}, trained=True)
    return LentWeights(plan, layers, received_bytes, part)
