"""A fit of Lightning's, in which the first process of a slot dies: `--die LOCAL_RANK:STEP`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanSquaredError

from elaunch.integrations.lightning import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--die", action="append", default=[])
parser.add_argument("--accumulate", type=int, default=1, help="batches of a step; with several, an EarlyStopping")
parser.add_argument("--sleep", type=float, default=0.0, help="seconds in each step")
arguments = parser.parse_args()


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double()
        self.error, self.largest = MeanSquaredError(), MaxMetric()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        is_first = os.environ.get("ELAUNCH_WORKER", "").endswith("#0")
        if is_first and f"{os.environ['LOCAL_RANK']}:{self.global_step}" in arguments.die:
            os.kill(os.getpid(), signal.SIGKILL)
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

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


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
trainer = Trainer(
    accelerator="cpu",
    devices=3,
    strategy="ddp",
    max_epochs=4 if arguments.accumulate == 1 else 30,
    accumulate_grad_batches=arguments.accumulate,
    log_every_n_steps=1,
    logger=CSVLogger(arguments.folder),
    callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k=2), *stops, BestFiles()],
    enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(data, batch_size=3, shuffle=True), DataLoader(data, batch_size=5))
