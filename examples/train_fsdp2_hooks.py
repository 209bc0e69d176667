"""Train a small byte-level GPT with FSDP2 on the hooks: the process stays where it is, and its shards move.

    elaunch --standalone --nproc-per-node=4 examples/train_fsdp2_hooks.py                 # now kill a worker, any
    elaunch --standalone --nproc-per-node=4 examples/train_fsdp2_hooks.py --replicas 2

Each worker's shards have a copy on another one, so the others go on whoever dies. The samples of a step do not depend
on the members. It also runs under torchrun.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from train_gpt import GPT, Sources

from elaunch.hooks import FullySharded


class Trainer:
    """A training loop, and the job that it is a part of."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.dataset = Sources(args.corpus_bytes, 64)
        self.job = FullySharded(self.build, self.shard, self.optimizer, replicas=args.replicas, copies=args.copies)

    def build(self) -> nn.Module:
        """Make the model, wherever it is."""
        torch.manual_seed(0)
        model: nn.Module = GPT(self.args.layers, self.args.width, 4, 64, dropout=0.0)
        return model

    def shard(self, model: nn.Module, mesh: DeviceMesh) -> None:
        """Cut it over the members."""
        for block in model.get_submodule("blocks").children():
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Make its optimizer."""
        return torch.optim.AdamW(parameters, lr=2e-3)

    def samples(self, step: int) -> list[int]:
        """Choose the samples of a step, whoever uses them."""
        chosen = torch.Generator().manual_seed(step)
        ids: list[int] = torch.randint(len(self.dataset), (self.args.batch_size,), generator=chosen).tolist()
        return ids

    def train(self) -> None:
        """Do all steps."""
        job, member = self.job, self.job.member
        member.join()
        while job.step < self.args.steps or not member.finish():
            with member.attempt():
                loss = sum(map(json.loads, job.commit(json.dumps(self.gradients()).encode())))
                step = job.step - 1
                member.report(step, loss=loss, sample_ids=self.samples(step))
                if member.rank == 0 and step % self.args.log_every == 0:
                    print(f"step {step:5d}  loss {loss:.4f}  {member.size} members", flush=True)

    def gradients(self) -> float:
        """Compute the gradients of this step; return what this worker adds to the loss."""
        job = self.job
        if not job.trains:
            return 0.0  # it leaves after this step, and the others have its shards and samples
        mine = self.samples(job.step)[job.rank :: job.size]
        inputs, targets = (
            torch.stack(rows).to(job.member.device) for rows in zip(*map(self.dataset.__getitem__, mine))
        )
        # FSDP2 takes the mean over those with shards, who may have different numbers of samples.
        share = len(mine) / self.args.batch_size
        loss = F.cross_entropy(job.model(inputs).flatten(0, 1), targets.flatten()) * share
        (loss * job.size).backward()
        return float(loss.item())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all workers")
    parser.add_argument("--replicas", type=int, default=1, help="of the model, each cut over as many members")
    parser.add_argument("--copies", type=int, default=1, help="of each worker's shards on another one: 0 or 1")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--corpus-bytes", type=int, default=400_000)
    parser.add_argument("--log-every", type=int, default=10, help="steps from line to line")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    Trainer(parse()).train()
