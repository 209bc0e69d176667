"""Emulated compute until a file appears: `endless.py FILE SECONDS`, where a micro-batch takes so long."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch import nn

import elaunch
from tests.jobs import say
from tests.jobs.eager import compile_nothing
from tests.jobs.train import Samples


def main() -> None:
    compile_nothing()
    end, seconds = Path(sys.argv[1]), float(sys.argv[2])
    job = elaunch.init()
    torch.manual_seed(1)
    model = job.wrap(nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(Samples(torch.float64), global_batch_size=12, micro_batch_size=3, seed=7, steps=1_000_000):
        for points, values in step:
            time.sleep(seconds)
            loss = (model(points) - values).square().mean()
            loss.backward()
            job.report(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
        if end.exists():
            job.stop()
    say(f"ended {job.worker} after {job.step} steps")


if __name__ == "__main__":
    main()
