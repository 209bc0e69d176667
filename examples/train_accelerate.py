"""Trains a small classifier with accelerate. Three lines are for elaunch: the import, `elastic` and `epochs`.

    elaunch --standalone --nproc-per-node=3 --max-restarts=5 examples/train_accelerate.py

Kill any worker with `kill -9`: the others go on at once, and a replacement joins them. It also runs under torchrun.
"""

from __future__ import annotations

import argparse

import torch
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elaunch.integrations.accelerate import Accelerator, elastic


def spirals(count: int, seed: int) -> Dataset[tuple[torch.Tensor, ...]]:
    """Returns points of two spirals, and to which one each belongs."""
    generator = torch.Generator().manual_seed(seed)
    along = torch.rand(count, generator=generator) * 9 + 1
    kinds = torch.randint(0, 2, (count,), generator=generator)
    angle = along + kinds * torch.pi
    points = torch.stack([along * angle.cos(), along * angle.sin()], dim=1) / 10
    return TensorDataset(points, kinds)


@elastic
def train(args: argparse.Namespace) -> None:
    """Trains from the last update on, with the members that there are."""
    set_seed(0)
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs * 64)
    loader = DataLoader(spirals(2048, 0), batch_size=32, shuffle=True)
    held_out = DataLoader(spirals(512, 1), batch_size=128)
    model, optimizer, loader, held_out, scheduler = accelerator.prepare(model, optimizer, loader, held_out, scheduler)
    for epoch in accelerator.epochs(args.epochs):
        model.train()
        for points, kinds in loader:
            loss = nn.functional.cross_entropy(model(points), kinds)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            right = [accelerator.gather_for_metrics(model(points).argmax(1) == kinds) for points, kinds in held_out]
        share = torch.cat(right).float().mean().item()
        accelerator.print(f"epoch {epoch}: {share:.1%} of {sum(map(len, right))} points right", flush=True)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
