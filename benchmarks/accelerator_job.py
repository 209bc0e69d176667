"""The job that `accelerator.py` runs: a GPT on random bytes, under elaunch, or with `--peer` under torchrun.

Several workers may share one GPU (`one_device.py`).
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import elaunch
from benchmarks.one_device import device_of
from benchmarks.small_model import CommitLog
from examples.train_gpt import DTYPES, GPT

OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Bytes(Dataset[tuple[Tensor, Tensor]]):
    """A million windows of random bytes, each with the byte that follows each of its bytes; no pass ends meanwhile."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.bytes = torch.randint(256, (1 << 16,), generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * 31 % (len(self.bytes) - self.context - 1)
        window = self.bytes[start : start + self.context + 1]
        return window[:-1], window[1:]


def build(args: argparse.Namespace, device: torch.device) -> GPT:
    """Returns the model, with the same parameters in every process; one thread each, since workers share the cores."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return GPT(args.layers, args.width, args.heads, args.context, dropout=0.0).to(device, DTYPES[args.dtype])


def loss_of(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Returns the mean cross-entropy of the bytes that follow."""
    tokens, following = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


def let_settle(args: argparse.Namespace, device: torch.device, step: int) -> None:
    """Waits for the device at the end of a window of steps, as a script does that prints its loss."""
    if device.type != "cpu" and (step + 1) % args.window == 0:
        torch.accelerator.synchronize(device)


def elastic(args: argparse.Namespace) -> None:
    """Trains under elaunch, which notes each commit by itself."""
    job = elaunch.init()
    model = job.wrap(build(args, job.device))
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=1e-3)
    job.register(model=model, optimizer=optimizer)
    for batch in job.batches(Bytes(args.context), global_batch_size=args.global_batch_size, steps=args.steps):
        step = job.step
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        let_settle(args, job.device, step)


def peer(args: argparse.Namespace) -> None:
    """Trains with DistributedDataParallel, or by torch alone."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = device_of(int(os.environ["LOCAL_RANK"]))
    commits = CommitLog(args.commits)
    commits.started(int(os.environ["LOCAL_RANK"]))
    model: torch.nn.Module = build(args, device)
    if args.peer == "ddp":
        dist.init_process_group(dist.get_default_backend_for_device(device))
        model = DistributedDataParallel(model, device_ids=None if device.type == "cpu" else [device.index])
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=1e-3)
    for step, batch in zip(range(args.steps), _batches(args, rank, size)):
        tokens, following = (part.to(device, non_blocking=True) for part in batch)
        torch.autograd.backward(loss_of(model, (tokens, following)))
        optimizer.step()
        optimizer.zero_grad()
        let_settle(args, device, step)
        if rank == 0:
            commits.commit(step, size, 0)
    if args.peer == "ddp":
        dist.destroy_process_group()


def _batches(args: argparse.Namespace, rank: int, size: int) -> Iterator[Any]:
    items = Bytes(args.context)
    sampler: DistributedSampler[Any] = DistributedSampler(items, size, rank)
    loader = DataLoader(items, args.global_batch_size // size, sampler=sampler)
    return itertools.chain.from_iterable(itertools.repeat(loader))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that jobs of `accelerator.py` have in common."""
    parser.add_argument("--commits", type=Path, help="where the peer appends a line for each step")
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--window", type=int, default=1, help="steps after which a device is waited for")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", choices=("ddp", "plain"), help="under torchrun instead of elaunch")
    add_arguments(parser)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    args = parser.parse_args()
    if args.peer:
        peer(args)
    else:
        elastic(args)


if __name__ == "__main__":
    main()
