"""The GPT of `frameworks.py` in a plain script, which survives nothing: the others are compared with it."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.gpt_frames import EPOCHS, Trace, arguments, build, data, loss_of


def train(args: argparse.Namespace) -> None:
    trace = Trace(args)
    trace.say("entered")
    dist.init_process_group(args.backend)
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace.say("built")
    dataset = data(args)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, dist.get_world_size(), dist.get_rank(), drop_last=True
    )
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = loss_of(model, inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            trace.say("step", step=step, members=dist.get_world_size())
            if step >= args.steps:
                return


if __name__ == "__main__":
    train(arguments())
    dist.destroy_process_group()
