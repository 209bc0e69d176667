"""A fit of Lightning's, in which the first process of a slot dies: `--die LOCAL_RANK:STEP`, with `end` for its end.

With `--cut` the model is sharded by a ModelParallelStrategy: over all workers, over half of them in two replicas, or
over half of them in tensor-parallel pairs; the model may have no values before it is sharded (meta).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanSquaredError

from elaunch.integrations.lightning import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--die", action="append", default=[])
parser.add_argument("--accumulate", type=int, default=1, help="batches of a step; with several, an EarlyStopping")
parser.add_argument("--sleep", type=float, default=0.0, help="seconds in each step")
parser.add_argument("--cut", choices=["shards", "replicas", "pairs", "meta"])
arguments = parser.parse_args()
workers = int(os.environ["LOCAL_WORLD_SIZE"])


def die_at(place: int | str) -> None:
    is_first = os.environ.get("ELAUNCH_WORKER", "").endswith("#0")
    if is_first and f"{os.environ['LOCAL_RANK']}:{place}" in arguments.die:
        os.kill(os.getpid(), signal.SIGKILL)


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double()
        self.error, self.largest = MeanSquaredError(), MaxMetric()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        die_at(self.global_step)
        time.sleep(arguments.sleep)
        found = self.net(batch[0])
        loss = nn.functional.mse_loss(found, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.error.update(found.detach(), batch[1])
        self.largest.update(found.detach())
        self.log_dict({"error": self.error, "largest": self.largest}, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def on_fit_end(self) -> None:
        die_at("end")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Sharded(Net):
    """A module whose parameters are cut over the members, as Lightning's manual has it."""

    def configure_model(self) -> None:
        pairs, shards = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]  # type: ignore[index]
        if arguments.cut == "meta":
            with torch.device("meta"):
                self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double()
        if pairs.size() > 1:
            parallelize_module(self.net, pairs, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if arguments.cut == "replicas" and dist.get_world_size() % 2 == 0:
            shards = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("copies", "parts"))
        fully_shard(self.net[0], mesh=shards)
        fully_shard(self.net, mesh=shards)
        self.configure_model = lambda: None  # type: ignore[method-assign]  # once, as after the fit

    def on_fit_start(self) -> None:
        # In a module that had no values, Lightning leaves those of metrics to chance, and of what resets them.
        if arguments.cut == "meta":
            self.error, self.largest = MeanSquaredError(), MaxMetric()


class BestFiles(Callback):
    """Says at the end which files a ModelCheckpoint has kept, and what an EarlyStopping has seen."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            kept, stop = trainer.checkpoint_callback.best_k_models, trainer.early_stopping_callback
            files = sorted((os.path.basename(path), round(score.item(), 9)) for path, score in kept.items())
            there = sorted(os.listdir(trainer.checkpoint_callback.dirpath))
            sys.stdout.write(f"kept {files}\nthere {there}\n")
            if stop is not None:
                score = stop.best_score
                sys.stdout.write(f"stopped in {stop.stopped_epoch} after {trainer.global_step} at {score:.9f}\n")


lightning.seed_everything(1)
inputs = torch.randn(100, 8).double()
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
stops = [EarlyStopping(monitor="val_loss", patience=1, min_delta=0.2)] if arguments.accumulate > 1 else []
strategy: Any = "ddp"
if arguments.cut is not None:
    size = 2 if arguments.cut == "pairs" else 1
    strategy = ModelParallelStrategy(data_parallel_size=workers // size, tensor_parallel_size=size)
trainer = Trainer(
    accelerator="cpu",
    devices=workers,
    strategy=strategy,
    max_epochs=4 if arguments.accumulate == 1 else 30,
    accumulate_grad_batches=arguments.accumulate,
    log_every_n_steps=1,
    logger=CSVLogger(arguments.folder),
    callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k=2), *stops, BestFiles()],
    enable_model_summary=False,
)
module = Net() if arguments.cut is None else Sharded()
trainer.fit(module, DataLoader(data, batch_size=3, shuffle=True), DataLoader(data, batch_size=5))
if arguments.cut is not None:
    # What comes after a fit has the trained module, and reads what any number of members has written. Lightning deals
    # out as many samples as can be divided by the workers.
    path, some = f"{arguments.folder}/last", DataLoader(TensorDataset(*data[:96]), batch_size=5)
    trainer.save_checkpoint(path)
    found = [trainer.validate(module, some, ckpt_path=one, verbose=False)[0] for one in (None, "best", path)]
    if trainer.is_global_zero:
        sys.stdout.write("after: " + " ".join(f"{one['val_loss']:.9f}" for one in found) + "\n")
