"""Hooks of training loops with FSDP2, pure or with replicas.

job = FullySharded(build, shard, optimizer, copies=1)
job.member.join()
while job.step < steps or not job.member.finish():
    with job.member.attempt():
        if job.trains:  # not where this worker leaves after the step: its shards are elsewhere by then
            loss = loss_fn(job.model(inputs), targets)
            loss.backward()
        job.commit()
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from elaunch.errors import StateError, UsageError
from elaunch.rendezvous.membership import Generation
from elaunch.workers.comm.group import Group
from elaunch.workers.frameworks.attach import attach
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.state.modules import load_model, load_optimizer, tensors_of
from elaunch.workers.state.placement.layouts import Layout
from elaunch.workers.state.tensors import TensorSpace

REPLICAS, SHARDS = "replicas", "shards"
"""The axes of the mesh; where there is one replica, only the second one."""

_NO_MODEL = (
    "this worker has no shards: call member.join() first; and where job.trains is false, since this worker is about to "
    "leave, call job.commit() alone"
)


class FullySharded:
    """The hooks of a job whose model `fully_shard` cuts over the members, in one replica or in several.

    Attributes:
        member: this worker in its job.
        mesh: on which the model is; made anew after each change.
        step: number of steps that have committed.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        shard: Callable[[nn.Module, DeviceMesh], object],
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
        *,
        replicas: int = 1,
        copies: int = 0,
    ) -> None:
        """Attaches this process to its job; nothing is built before `member.join()`.

        Args:
            build: makes the model. The first member's values are those that the job begins with; all others, and all of
                them after a change, build it on the meta device.
            shard: calls `fully_shard` on the modules of a model, with this mesh.
            optimizer: makes the optimizer of some parameters.
            replicas: of the model, each over as many members, while their number can be divided by it; else one.
            copies: as for `elaunch.attach`. Without, the job ends where all that had some part of the state die.

        Raises:
            UsageError: `replicas` is below 1.
        """
        if replicas < 1:
            raise UsageError(f"FullySharded(replicas={replicas}): expected 1 or more")
        self._build, self._shard, self._make_optimizer, self._replicas = build, shard, optimizer, replicas
        self.member = attach(self, copies=copies)
        self.step, self._holds = 0, False
        self.mesh: DeviceMesh | None = None
        self._model: nn.Module | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._bare: nn.Module | None = None
        self._space = TensorSpace(self.member.worker, self.member.device)

    @property
    def trains(self) -> bool:
        """Returns whether this member has shards. One that leaves has none in its last step, which it only commits."""
        return self.mesh is not None

    @property
    def size(self) -> int:
        """Returns how many members have shards, and so do the step; 0 on one that has none."""
        return int(self.mesh.size()) if self.mesh is not None else 0

    @property
    def rank(self) -> int:
        """Returns the place of this member among those that have shards.

        Raises:
            StateError: it has none (`trains`).
        """
        place = self.mesh.get_coordinate() if self.mesh is not None else None
        if self.mesh is None or place is None:
            raise StateError(_NO_MODEL)
        rank = 0
        for index, length in zip(place, self.mesh.shape, strict=True):
            rank = rank * length + index
        return rank

    @property
    def model(self) -> nn.Module:
        """Returns the model, over the members of the time: another one after each change."""
        if self._model is None:
            raise StateError(_NO_MODEL)
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Returns the optimizer of the model."""
        if self._optimizer is None:
            raise StateError(_NO_MODEL)
        return self._optimizer

    def commit(self, note: bytes = b"") -> list[bytes]:
        """Commits a step whose gradients are complete, and takes it; returns what each member noted.

        Raises:
            StepInterrupted: not all have come to the barrier.
        """
        notes = self.member.commit(note)
        self._update()
        return notes

    def _update(self) -> None:
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self.step += 1

    # -- hooks --------------------------------------------------------------------------------------------------

    def vote(self) -> Vote:
        """Says how far it is."""
        return Vote(self.step, self.member.entered, self._holds)

    def pause(self) -> None:
        """Takes the modules that an interrupted pass has left unsharded back to their shards."""
        if self._model is not None:
            take_shards_back(self._model)

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        """Takes the step in flight, if it has committed; else drops its gradients."""
        if self._holds and self.step < verdict.step:
            self._update()
        elif self._optimizer is not None:
            self._optimizer.zero_grad()

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        """Chooses nothing: the mesh follows from the number of members."""
        return {}

    def transfer(self, group: Group, verdict: Verdict) -> int:
        """Moves the state to the shards of a mesh of all members that stay."""
        self.hold()
        if verdict.fresh and group.rank == 0:
            self._space.hold(Layout((1,), group.members[:1]), *tensors_of(self._build()))
        self._model = self._optimizer = None  # the space has it all
        size = group.size - len(verdict.leaving)
        several = self._replicas > 1 and size % self._replicas == 0
        shape = (self._replicas, size // self._replicas) if several else (size,)
        self.mesh = self.member.mesh(shape, (REPLICAS, SHARDS) if several else (SHARDS,), verdict.leaving)
        if self.mesh is None:
            return self._space.move(group, None).received_bytes
        with torch.device("meta"):
            self._bare = self._build()
        self._shard(self._bare, self.mesh)
        layout = Layout.of(self.mesh, group.members, dict(self._bare.named_parameters()))
        return self._space.move(group, layout).received_bytes

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        """Goes on with the shards that have come."""
        self._space.install()
        self.step, self._holds = verdict.step, True
        if self.mesh is not None and self._bare is not None:
            self._model, self._bare = self._bare, None
            load_model(self._space, self._model)
            self._optimizer = self._make_optimizer(self._model.parameters())
            load_optimizer(self._space, self._model, self._optimizer)

    def hold(self) -> TensorSpace:
        """Returns the space, with the shards of this moment."""
        if self._model is not None and self._space.layout is not None:
            # What an interruption found later than `pause`, such as a pass in a hook of the user, leaves them too.
            take_shards_back(self._model)
            self._space.hold(self._space.layout, *tensors_of(self._model, self._optimizer))
        return self._space


def take_shards_back(model: nn.Module) -> None:
    """Has all modules of a model that `fully_shard` has cut use their shards, wherever a pass was interrupted.

    `reshard()` alone does nothing in the middle of a forward pass, for modules that stay whole until their backward.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                group._training_state = TrainingState.IDLE
                group._all_gather_result = None
            module.reshard()
