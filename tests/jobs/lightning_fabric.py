"""A regression with Lightning Fabric, from random data; workers die on request: `--die RANK:EPOCH.BATCH`."""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import torch
from lightning.fabric.loggers.csv_logs import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from elaunch.integrations.lightning import Fabric, elastic


def dies(options: Any, epoch: int, number: int) -> None:
    worker = os.environ.get("ELAUNCH_WORKER", "")
    for death in options.die:
        slot, place = death.split(":")
        if worker.endswith(f"/{slot}#0") and place == f"{epoch}.{number}":
            os.kill(os.getpid(), signal.SIGKILL)


@elastic
def train(options: Any) -> None:
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=3, loggers=CSVLogger(options.folder))
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(1)).double()
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    loader: Any = DataLoader(data, batch_size=4, shuffle=True)
    held_out: Any = DataLoader(TensorDataset(*data[:10]), batch_size=4)
    loader, held_out = fabric.setup_dataloaders(loader, held_out)
    error = MeanSquaredError()
    counts = {"batches": 0}
    path = f"{options.folder}/last.ckpt"
    for epoch in fabric.epochs(1, 4, scheduler=scheduler, error=error, counts=counts):
        model.train()
        for number, (some, wanted) in fabric.enumerate(loader):
            if fabric.world_size < 3:
                time.sleep(0.15)  # others join meanwhile
            dies(options, epoch, number)
            waits = (number + 1) % options.accumulation != 0
            with fabric.no_backward_sync(model, enabled=waits):
                found = model(some)
                loss = nn.functional.mse_loss(found, wanted)
                fabric.backward(loss / options.accumulation)
            error.update(found.detach().contiguous(), wanted.contiguous())
            counts["batches"] += 1
            mean = fabric.all_reduce(loss.detach().clone())
            fabric.log("loss", mean, step=counts["batches"])
            if not waits:
                fabric.clip_gradients(model, optimizer, max_norm=5.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            squares = sum(((model(some) - wanted) ** 2).sum() for some, wanted in held_out)
        dies(options, epoch, -1)
        gathered: Any = fabric.all_gather(squares)
        fabric.log("held_out", gathered.sum(), step=counts["batches"])
        fabric.log("train_error", error.compute(), step=counts["batches"])
        error.reset()
        fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": epoch, **counts})
        saved = fabric.load(path, {"model": model})
        fabric.print(f"epoch {saved['epoch']}: {saved['batches']} batches, rate {scheduler.get_last_lr()[0]:.9f}.")
        fabric.barrier()
    fabric.logger.finalize("success")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--accumulation", type=int, default=1)
    torch.set_num_threads(1)
    train(parser.parse_args())
