"""Trains a small classifier with Lightning's Trainer. The import of Trainer is all that elaunch asks for.

    elaunch --standalone --nproc-per-node=3 --max-restarts=5 examples/train_lightning.py

Kill any worker with `kill -9`: the others go on at once, and a replacement joins them. It also runs under torchrun.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from elaunch.integrations.lightning import Trainer

CLASSES = 4


class Classifier(lightning.LightningModule):
    """Tells the quadrant in which the sum of points lies."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, CLASSES))
        self.accuracy = MulticlassAccuracy(CLASSES)
        self.val_accuracy = MulticlassAccuracy(CLASSES)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Returns the loss of a batch."""
        found = self.net(batch[0])
        loss = nn.functional.cross_entropy(found, batch[1])
        self.accuracy.update(found, batch[1])
        self.log("loss", loss, sync_dist=True, prog_bar=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        """Logs how good the model is."""
        found = self.net(batch[0])
        self.val_accuracy.update(found, batch[1])
        self.log("val_loss", nn.functional.cross_entropy(found, batch[1]), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Returns the optimizer and its schedule."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]


def points(count: int) -> TensorDataset:
    """Returns that many sets of eight points, and the quadrants of their sums."""
    inputs = torch.randn(count, 8, 2)
    right, above = (inputs.sum(1) > 0).long().unbind(1)
    return TensorDataset(inputs.flatten(1), right + 2 * above)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", default="train_lightning", help="for logs and checkpoints")
    options = parser.parse_args()
    lightning.seed_everything(0)
    train, val = points(4096), points(512)
    best = ModelCheckpoint(monitor="val_accuracy", mode="max", save_top_k=2)
    trainer = Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp" if "LOCAL_WORLD_SIZE" in os.environ else "auto",
        max_epochs=options.epochs,
        log_every_n_steps=10,
        logger=CSVLogger(options.folder),
        callbacks=[best],
    )
    trainer.fit(Classifier(), DataLoader(train, batch_size=32, shuffle=True), DataLoader(val, batch_size=64))
    if trainer.is_global_zero:
        print(f"best: {best.best_model_path}")


if __name__ == "__main__":
    main()
