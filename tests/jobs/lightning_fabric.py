"""A regression with Lightning Fabric, from random data; workers die on request: `--die RANK:EPOCH.BATCH`.

With `--pairs 1` the model is sharded over all workers (FSDP2), with `--pairs 2` over pairs of tensor-parallel workers.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import torch
from lightning.fabric.loggers.csv_logs import CSVLogger
from lightning.fabric.strategies import ModelParallelStrategy  # type: ignore[attr-defined]
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

from elaunch.integrations.lightning import Fabric, elastic

WORKERS = int(os.environ["LOCAL_WORLD_SIZE"])
"""As many as the node has places; the variable follows the members."""


def dies(options: Any, epoch: int, number: int) -> None:
    worker = os.environ.get("ELAUNCH_WORKER", "")
    for death in options.die:
        slot, place = death.split(":")
        if worker.endswith(f"/{slot}#0") and place == f"{epoch}.{number}":
            os.kill(os.getpid(), signal.SIGKILL)


def cut(model: Any, mesh: Any) -> Any:
    pairs, shards = mesh["tensor_parallel"], mesh["data_parallel"]
    if pairs.size() > 1:
        parallelize_module(model, pairs, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model[0], mesh=shards)
    return fully_shard(model, mesh=shards)


@elastic
def train(options: Any) -> None:
    strategy: Any = "ddp"
    if options.pairs:
        strategy = ModelParallelStrategy(cut, "auto", options.pairs)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=WORKERS, loggers=CSVLogger(options.folder))
    fabric.launch()
    fabric.seed_everything(1, verbose=False)
    inputs = torch.randn(100, 4, generator=torch.Generator().manual_seed(1)).double()
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True) ** 2)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    if options.pairs:
        model = fabric.setup_module(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    if options.pairs:
        optimizer = fabric.setup_optimizers(optimizer)
    else:
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
            if fabric.world_size < WORKERS:
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
        saved = {"model": model, "optimizer": optimizer, "epoch": epoch, **counts}
        fabric.save(path, saved)
        fabric.load(path, saved)
        fabric.print(f"epoch {saved['epoch']}: {saved['batches']} batches, rate {scheduler.get_last_lr()[0]:.9f}.")
        fabric.barrier()
    fabric.logger.finalize("success")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument(
        "--pairs", type=int, default=0, help="size of tensor-parallel groups; 0: DistributedDataParallel"
    )
    torch.set_num_threads(1)
    train(parser.parse_args())
