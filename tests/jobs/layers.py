"""A small model in layers under elaunch.hybrid(); a layer of it can raise, or wait for its test, in a step."""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import elaunch
from elaunch.workers.plan import symmetric
from tests.jobs import say
from tests.jobs.eager import compile_nothing
from tests.jobs.train import Samples

WIDTH = 12


class Layer(nn.Module):
    """One of several alike."""

    def __init__(self, number: int, raise_at: tuple[int, int] | None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.raise_at = raise_at
        self.number, self.step = number, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.raise_at == (self.number, self.step) and not x.is_meta:
            raise RuntimeError("the layer that breaks the script")
        return x + torch.dropout(torch.tanh(self.linear(x)), 0.1, True)


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y.mean(1, keepdim=True) - target).square().mean()


def main() -> None:
    compile_nothing()
    parser = argparse.ArgumentParser()
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--raise-at", default="", help="LAYER:STEP")
    parser.add_argument("--hold", default="", help="STEP:FILE: wait in this step for the file")
    args = parser.parse_args()
    layer, _, step = args.raise_at.partition(":")
    raise_at = (int(layer), int(step)) if args.raise_at else None
    hold, _, gate = args.hold.partition(":")

    job = elaunch.hybrid()
    workers = [f"w{rank}" for rank in range(args.dp * args.pp)]
    engine = job.engine(
        [partial(Layer, number, raise_at) for number in range(4)],
        loss_fn,
        partial(torch.optim.AdamW, lr=3e-3),
        symmetric(workers, 4, 24, 3, dp=args.dp, pp=args.pp),
        dataset=Samples(torch.float64),
        dtype=torch.float64,
        clip_norm=1.0,
    )
    say(f"trains {job.worker} pid {os.getpid()} layers {sorted(number for number, _ in engine.layers)}")
    while engine.step < args.steps:
        for layer_here in engine.layers.values():
            assert isinstance(layer_here.module, Layer)
            layer_here.module.step = engine.step
        while gate and engine.step == int(hold) and not Path(gate).exists():
            time.sleep(0.005)
        report = job.train_step()
        if job.rank == 0:
            say(f"step {report.step} loss {report.loss!r} norm {report.gradient_norm!r}")
    job.finish()


if __name__ == "__main__":
    main()
