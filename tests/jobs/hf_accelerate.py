"""A small regression with accelerate, from random data; workers die where they are told to."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elaunch.integrations.accelerate import Accelerator, elastic
from tests.jobs.cpus_for_devices import take_cpus_for_devices


@elastic
def train(options: Any) -> None:
    torch.manual_seed(0)
    sharding = FullyShardedDataParallelPlugin(fsdp_version=2) if options.fsdp else None
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulation, fsdp_plugin=sharding)
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(1)).double()
    targets = inputs.sum(1, keepdim=True) ** 2
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=70)
    loader: Any = DataLoader(TensorDataset(inputs, targets), batch_size=4, shuffle=True)
    held_out: Any = DataLoader(TensorDataset(inputs[:10], targets[:10]), batch_size=4)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    for epoch in accelerator.epochs(3):
        model.train()
        for number, (some, wanted) in enumerate(loader):
            if accelerator.num_processes < 3:
                time.sleep(0.15)  # others join meanwhile
            worker = os.environ.get("ELAUNCH_WORKER", "")
            if any(
                worker.endswith(f"/{death.split(':')[0]}#0") and death.endswith(f":{epoch}.{number}")
                for death in options.die
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(some), wanted))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            errors = [accelerator.gather_for_metrics((model(some) - wanted) ** 2) for some, wanted in held_out]
        if accelerator.is_main_process:
            rate = scheduler.get_last_lr()[0]
            total = torch.cat(errors).sum().item()
            sys.stdout.write(f"epoch {epoch}: {sum(map(len, errors))} {total:.9f} {rate:.9f}.\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--die", action="append", default=[], help="RANK:EPOCH.BATCH")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--fsdp", action="store_true")
    torch.set_num_threads(1)
    options = parser.parse_args()
    if options.fsdp:
        take_cpus_for_devices()
    train(options)
