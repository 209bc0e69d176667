"""The job that `data.py` runs: the small model, from samples that take their time to load.

Under elaunch, or with `--ddp` under torchrun: DistributedDataParallel, DistributedSampler and DataLoader, as scripts
have them. Loading and computing are emulated by sleeping, so that they do not compete for the cores of this machine.
"""

from __future__ import annotations

import contextlib
import os
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import elaunch
from benchmarks.peers.torchrun_train import join_group
from benchmarks.small_model import FEATURES, CommitLog, arguments, build, loss_of

GLOBAL_BATCH = 32
MICRO_BATCH = 8


class SlowItems(Dataset[Tensor]):
    """A million rows, each of which takes `item_s` seconds to load: no pass ends during the benchmark."""

    def __init__(self, item_s: float) -> None:
        self.item_s = item_s
        self.rows = torch.randn(512, FEATURES, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        if self.item_s:
            time.sleep(self.item_s)
        return self.rows[index % len(self.rows)]


def elastic(args: Namespace) -> None:
    job = elaunch.init()
    model = job.wrap(build(args.micro_batch_s))
    optimizer = torch.optim.AdamW(model.parameters())
    job.register(model=model, optimizer=optimizer)
    loader = DataLoader(SlowItems(args.item_s), MICRO_BATCH, shuffle=True, num_workers=args.loaders)
    for rows in job.batches(loader, global_batch_size=GLOBAL_BATCH, steps=args.steps):
        loss = loss_of(model(rows), rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def ddp(args: Namespace) -> None:
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    commits = CommitLog(args.commits)
    commits.started(int(os.environ["LOCAL_RANK"]))
    join_group(restart)
    world_size = dist.get_world_size()
    net = build(args.micro_batch_s)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if args.checkpoint is not None and args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    items = SlowItems(args.item_s)
    sampler: DistributedSampler[Tensor] = DistributedSampler(items, seed=restart)
    batches: Iterator[Tensor] = iter(DataLoader(items, MICRO_BATCH, sampler=sampler, num_workers=args.loaders))
    turns = GLOBAL_BATCH // MICRO_BATCH // world_size
    while step < args.steps:
        for turn in range(turns):
            rows = next(batches)
            with contextlib.nullcontext() if turn == turns - 1 else model.no_sync():
                torch.autograd.backward(loss_of(model(rows), rows) / turns)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if dist.get_rank() == 0:
            if args.checkpoint is not None:
                unfinished = args.checkpoint.with_suffix(".unfinished")
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
                unfinished.replace(args.checkpoint)
            commits.commit(step, world_size, restart)
    dist.destroy_process_group()


def main() -> None:
    parser = arguments()
    parser.add_argument("--item-s", type=float, default=0.0, help="emulated seconds to load a sample")
    parser.add_argument("--loaders", type=int, default=0, help="processes that load, of each worker")
    parser.add_argument("--ddp", action="store_true", help="the peer, under torchrun")
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    (ddp if args.ddp else elastic)(args)


if __name__ == "__main__":
    main()
