"""A fit of Lightning's, in which the first process of a slot dies: `--die LOCAL_RANK:STEP`."""

from __future__ import annotations

import argparse
import os
import signal
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from elaunch.integrations.lightning import Trainer

parser = argparse.ArgumentParser()
parser.add_argument("--folder", required=True)
parser.add_argument("--die", default="")
parser.add_argument("--sleep", type=float, default=0.0, help="seconds in each step")
arguments = parser.parse_args()


class Net(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).double()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        is_first = os.environ.get("ELAUNCH_WORKER", "").endswith("#0")
        if is_first and f"{os.environ['LOCAL_RANK']}:{self.global_step}" == arguments.die:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(arguments.sleep)
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


lightning.seed_everything(1)
inputs = torch.randn(100, 8).double()
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
trainer = Trainer(
    accelerator="cpu",
    devices=3,
    strategy="ddp",
    max_epochs=4,
    log_every_n_steps=1,
    logger=CSVLogger(arguments.folder),
    callbacks=[ModelCheckpoint(monitor="val_loss", save_top_k=2)],
    enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(data, batch_size=3, shuffle=True), DataLoader(data, batch_size=5))
