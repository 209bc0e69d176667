"""Trains by the hooks in each of the ways in which scripts treat gradients, and beside it in plain torch.

A framework of the simplest kind: members hold the whole model, and sum its gradients by themselves before they commit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import elaunch
from elaunch.errors import StepInterrupted
from elaunch.hooks import Generation, Group, Verdict, Vote
from tests.jobs import say

STEPS, ROWS = 3, 8
POINTS = torch.linspace(-1, 1, 4 * ROWS * STEPS, dtype=torch.float64).view(STEPS, ROWS, 4)


class Runtime:
    """The hooks: all members begin alike, and none joins later."""

    def __init__(self) -> None:
        self.step, self.holds = 0, False
        self.member = elaunch.attach(self)

    def vote(self) -> Vote:
        return Vote(self.step, self.member.entered, self.holds)

    def pause(self) -> None: ...

    def agreed(self, generation: Generation, verdict: Verdict) -> None: ...

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        return {}

    def transfer(self, group: Group, verdict: Verdict) -> int:
        return 0

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        self.holds = True


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def compiled() -> nn.Module:
    model: Any = torch.compile(net(), backend="aot_eager")
    assert isinstance(model, nn.Module)
    return model


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, points: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layers, points, use_reentrant=False)
        return out


class Words(nn.Module):
    """A model with an embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(16, 1, sparse=True).double()

    def forward(self, points: Tensor) -> Tensor:
        out: Tensor = self.table((points[:, 0] * 8 + 8).long().clamp(0, 15))
        return out


def loss_of(model: nn.Module, points: Tensor) -> Tensor:
    loss: Tensor = (model(points) - points.sin().sum(1, keepdim=True)).square().mean()
    return loss


def with_penalty(model: nn.Module, points: Tensor) -> Tensor:
    loss = loss_of(model, points)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    inputs = points.clone().requires_grad_()
    (of_inputs,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    return loss + of_inputs.square().sum(1).mean() + 0.1 * sum(one.square().sum() for one in gradients)


Optimizers = Callable[[nn.Module], Sequence[torch.optim.Optimizer]]


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = model.parameters()
    return [torch.optim.AdamW([first], lr=0.01), torch.optim.SGD(others, lr=0.1)]


def lbfgs(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.LBFGS(model.parameters(), max_iter=3)]


@dataclass(frozen=True)
class Technique:
    """What a script does, and how."""

    name: str
    make: Callable[[], nn.Module] = net
    optimizers: Optimizers = adam
    loss: Callable[[nn.Module, Tensor], Tensor] = loss_of
    clip: float | None = None
    scales: bool = False
    no_sync: bool = False
    closures: bool = False
    wrapped: bool = False
    sharded: bool = False
    rtol: float = 1e-12


TECHNIQUES = (
    Technique("clip_grad_norm_", clip=0.1),
    Technique("several optimizers", optimizers=two),
    Technique("GradScaler", scales=True),
    Technique("no_sync", no_sync=True),
    Technique("create_graph", loss=with_penalty),
    Technique("torch.compile", make=compiled),
    Technique("activation checkpointing", make=Checkpointed),
    Technique("LBFGS", optimizers=lbfgs, closures=True, rtol=1e-9),
    Technique("sparse embeddings", make=Words, optimizers=lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)]),
    Technique("DistributedDataParallel", wrapped=True),
    Technique("fully_shard", sharded=True),
)


class Trainer:
    """Trains a model by a technique: as a member or, without a runtime, alone, in `parts` as if by so many members."""

    def __init__(self, technique: Technique, runtime: Runtime | None, parts: int = 1) -> None:
        self.technique, self.runtime = technique, runtime
        self.parts = 2 * parts if technique.no_sync else parts
        self.model = technique.make()
        if runtime is not None and technique.sharded:
            fully_shard(self.model, mesh=runtime.member.mesh((runtime.member.size,), ("dp",)))
        self.optimizers = technique.optimizers(self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=technique.scales)
        self.callee = self.model
        if runtime is not None and technique.wrapped:
            group = runtime.member.process_group
            self.callee = DistributedDataParallel(self.model, process_group=group, init_sync=False)

    def rows(self, step: int) -> Tensor:
        if self.runtime is None:
            return POINTS[step]
        member = self.runtime.member
        return POINTS[step].tensor_split(member.size)[member.rank]

    def backward(self, points: Tensor) -> Tensor:
        """Computes the gradients of the whole batch, and returns the loss of these rows."""
        technique = self.technique
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        parts = points.tensor_split(self.parts)
        losses = [technique.loss(self.callee, part) / len(parts) for part in parts]
        for loss in losses:
            self.scaler.scale(loss).backward()
        if self.runtime is not None and not technique.wrapped and not technique.sharded:
            for parameter in self.model.parameters():
                assert parameter.grad is not None
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
                dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=self.runtime.member.process_group)
        return sum(losses, torch.zeros((), dtype=torch.float64))

    def step(self, step: int) -> None:
        points = self.rows(step)
        if self.technique.closures:
            # It updates before the commit: what it began from comes back if that fails.
            before = copy.deepcopy((self.model.state_dict(), self.optimizers[0].state_dict()))
            try:
                self.optimizers[0].step(lambda: self.mean(self.backward(points)))
                self.commit()
            except StepInterrupted:
                self.model.load_state_dict(before[0])
                self.optimizers[0].load_state_dict(before[1])
                raise
            return
        self.backward(points)
        self.commit()
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer) if self.technique.scales else None
        if self.technique.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.technique.clip)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def mean(self, loss: Tensor) -> float:
        """All members must see the same loss, by which LBFGS decides how to go on."""
        if self.runtime is not None:
            dist.all_reduce(loss := loss.detach().clone(), dist.ReduceOp.AVG, group=self.runtime.member.process_group)
        return loss.item()

    def commit(self) -> None:
        if self.runtime is not None:
            self.runtime.member.commit()


def main() -> None:
    runtime = Runtime()
    member = runtime.member
    member.join()
    for technique in TECHNIQUES:
        ours, twin = Trainer(technique, runtime), Trainer(technique, None, parts=member.size)
        begin, done = runtime.step, 0
        while done < STEPS:
            with member.attempt():
                ours.step(done)
                runtime.step += 1
                member.report(runtime.step - 1)
            done = runtime.step - begin
        for step in range(STEPS):
            twin.step(step)
        for own, expected in zip(ours.model.parameters(), twin.model.parameters(), strict=True):
            whole = own.full_tensor() if isinstance(own, DTensor) else own
            torch.testing.assert_close(whole, expected, rtol=technique.rtol, atol=1e-12)
        assert ours.scaler.get_scale() == twin.scaler.get_scale()
        say(f"as in plain torch: {technique.name}")
    try:
        dist.all_reduce(torch.eye(2).to_sparse(), group=member.process_group)
    except ValueError as error:
        say(f"sparse: {error}")
    assert member.finish()


if __name__ == "__main__":
    main()
