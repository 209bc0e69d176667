"""A training loop that is not elaunch's, on its hook protocol: plain torch, tensor parallelism with DTensor.

    elaunch --standalone --nproc-per-node=4 examples/train_dtensor.py --layout 2x2
    elaunch --standalone --nproc-per-node=4 examples/train_dtensor.py --layout 1x4 --switch 100:2x2

A layout AxB is A replicas, each cut over B workers. Where workers are lost, those who are left go on with fewer
replicas, or fewer parts, in the same processes; a replacement makes the layout grow again. `elaunch ctl plan --set`
asks for another one: a plan whose tiles are the replicas. With `--checkpoint-dir` the state is saved, and read again in
whatever layout the job starts with. It also runs as `python examples/train_dtensor.py`.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_gpt import DTYPES, Sources
from train_gpt_hybrid import adamw, gpt, loss_fn

import elaunch
from elaunch.hooks import (
    Generation,
    Group,
    Layout,
    TensorSpace,
    Verdict,
    Vote,
    load_model,
    load_optimizer,
    tensors_of,
)
from elaunch.plan import Plan

Shape = tuple[int, int]
"""Replicas, and workers over which each is cut."""


def shape_of(text: str) -> Shape:
    """2x4 as (2, 4)."""
    replicas, parts = map(int, text.split("x"))
    return replicas, parts


def fitted(wanted: Shape, members: int) -> Shape:
    """The layout nearest to the one that is wanted which so many members can do."""
    replicas, parts = wanted
    while parts > members:
        parts //= 2
    return min(replicas, members // parts), parts


class Trainer:
    """The model of this worker, and the steps; and the hooks (elaunch.hooks.Hooks) by which it is moved."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.member = elaunch.attach(self)
        self.space = TensorSpace(self.member.worker, self.member.device, max_extra_bytes=args.max_extra_bytes)
        self.dataset = Sources(args.corpus_bytes, args.context)
        self.step = 0
        self.holds = False
        self.wanted: Shape = args.layout or (1, int(os.environ.get("WORLD_SIZE", "1")))
        self.shape = self.wanted
        self.acted_on = ""  # the last request for a plan
        # None on a worker that is idle:
        self.mesh: DeviceMesh | None = None
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None

    # -- the training loop: plain torch -------------------------------------------------------------------------

    def train(self) -> None:
        """Do all steps."""
        member, args = self.member, self.args
        member.join(takes_plans=True)
        while self.step < args.steps or not member.finish():
            member.settle()
            wanted = args.switch.get(self.step, self.wanted)
            if wanted != self.wanted:
                self.wanted = wanted
                member.replan()
                continue
            with member.attempt():
                loss = self.gradients()
                loss = sum(map(json.loads, member.commit(json.dumps(loss).encode())))
                self.update()
                step = self.step - 1
                member.report(step, loss=loss, sample_ids=self.samples(step))
                if member.rank == 0 and step % args.log_every == 0:
                    print(f"step {step:5d}  loss {loss:.4f}  layout {self.shape[0]}x{self.shape[1]}", flush=True)

    def samples(self, step: int) -> list[int]:
        """The samples of a step, whoever does them."""
        chosen = torch.Generator().manual_seed(self.args.seed * 1_000_003 + step)
        ids: list[int] = torch.randint(len(self.dataset), (self.args.batch_size,), generator=chosen).tolist()
        return ids

    def gradients(self) -> float:
        """The gradients of this step, summed over the replicas; returns what this worker adds to the loss."""
        if self.model is None or self.optimizer is None or self.mesh is None:
            return 0.0
        self.optimizer.zero_grad()
        replicas = self.mesh["dp"]
        mine = self.samples(self.step)[replicas.get_local_rank() :: replicas.size()]
        context, following = (torch.stack(rows) for rows in zip(*(self.dataset[index] for index in mine), strict=True))
        device = self.member.device
        loss = loss_fn(self.model(context.to(device)), following.to(device)) * len(mine) / self.args.batch_size
        loss.backward()
        for parameter in self.model.parameters():
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            dist.all_reduce(gradient, group=replicas.get_group())
        return loss.item() if self.mesh["tp"].get_local_rank() == 0 else 0.0

    def update(self) -> None:
        """Take the step. Nothing in it communicates."""
        if self.optimizer is not None:
            self.optimizer.step()
        self.step += 1

    def whole(self) -> nn.Module:
        """The model with its first values."""
        torch.manual_seed(self.args.seed)
        return nn.Sequential(*(make() for make in gpt(self.args))).to(DTYPES[self.args.dtype])

    def cut(self, mesh: DeviceMesh) -> nn.Module:
        """The model over the axis "tp" of a mesh, without values."""
        with torch.device("meta"):
            model = self.whole()
        styles = {
            "qkv": ColwiseParallel(),
            "out": RowwiseParallel(),
            "up": ColwiseParallel(),
            "down": RowwiseParallel(),
        }
        for block in list(model.children())[1:-1]:
            parallelize_module(block, mesh["tp"], styles, src_data_rank=None)
        return model

    # -- the hooks ----------------------------------------------------------------------------------------------

    def vote(self) -> Vote:
        facts = {"wanted": self.wanted, "acted_on": self.acted_on}
        return Vote(self.step, self.member.entered, self.holds, facts)

    def pause(self) -> None:
        """Nothing runs in the background."""

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        if self.holds and self.step < verdict.step:
            self.update()  # others have passed the barrier at which this worker was interrupted

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        if not verdict.fresh:
            said = verdict.facts[verdict.passed]
            self.wanted, self.acted_on = tuple(said["wanted"]), said["acted_on"]
        if generation.plan_request not in ("", self.acted_on):
            tiles = Plan.parse(generation.plan).tiles
            self.wanted, self.acted_on = (len(tiles), len(tiles[0].workers)), generation.plan_request
        members = len(generation.ids) - len(verdict.leaving)
        self.shape = fitted(self.wanted, members)
        reason = f"{members} members, and {self.wanted[0]}x{self.wanted[1]} is wanted"
        return {"policy": "layout", "reason": reason, "candidates": [], "plan": f"{self.shape[0]}x{self.shape[1]}"}

    def transfer(self, group: Group, verdict: Verdict) -> int:
        self.hold()
        if verdict.fresh and group.rank == 0:
            self.space.hold(Layout((1,), group.members[:1]), *tensors_of(self.whole()))
        self.model = self.optimizer = None  # the space has it all, until a new model is made of it
        self.mesh = self.member.mesh(self.shape, ("dp", "tp"), without=verdict.leaving)
        if self.mesh is None:
            return self.space.move(group, None).received_bytes
        self.bare = self.cut(self.mesh)
        layout = Layout.of(self.mesh, group.members, dict(self.bare.named_parameters()))
        return self.space.move(group, layout).received_bytes

    def hold(self) -> TensorSpace:
        """The space, with the tensors as they are now: before they move, and for a checkpoint."""
        if self.model is not None and self.space.layout is not None:
            self.space.hold(self.space.layout, *tensors_of(self.model, self.optimizer))
        return self.space

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        self.space.install()
        self.step, self.holds = verdict.step, True
        if self.mesh is not None:
            self.model = self.bare
            load_model(self.space, self.model)
            self.optimizer = adamw(self.model.named_parameters(), self.args.lr)
            load_optimizer(self.space, self.model, self.optimizer)


def switch_of(text: str) -> tuple[int, Shape]:
    """100:2x2 as (100, (2, 2))."""
    step, _, shape = text.partition(":")
    return int(step), shape_of(shape)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The settings from the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with DTensor, in layouts that change.")
    parser.add_argument("--layout", type=shape_of, help="replicas x workers of each; default: all workers, 1xN")
    parser.add_argument("--switch", type=switch_of, action="append", default=[], help="STEP:AxB, another layout")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all workers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes in a sample")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--max-extra-bytes", type=int, help="bound of the memory that a move takes beside the state")
    parser.add_argument("--corpus-bytes", type=int, default=8_000_000)
    parser.add_argument("--log-every", type=int, default=10, help="steps from line to line")
    args = parser.parse_args(arguments)
    args.switch, args.dropout = dict(args.switch), 0.0
    return args


if __name__ == "__main__":
    Trainer(parse()).train()
