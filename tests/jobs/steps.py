"""A loop of `job.steps`, with something wrong in it on request; all of it on a worker's first process of a slot."""

from __future__ import annotations

import argparse
import os

import torch
from torch import nn

import elaunch
from tests.jobs import come_late, say
from tests.jobs.eager import compile_nothing
from tests.jobs.train import Samples


def main() -> None:
    come_late()
    compile_nothing()
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--noise-at", type=int, default=-1, help="step in which slot 1 changes its weights")
    parser.add_argument("--skip-at", type=int, default=-1, help="step in which slot 1 leaves out its optimizer's step")
    parser.add_argument("--stop-at", type=int, default=-1, help="step after which slot 1 asks for the end")
    parser.add_argument(
        "--old", action="store_true", help="a loop of `job.batches`, in which slot 1 accumulates by hand"
    )
    args = parser.parse_args()
    second = os.environ.get("LOCAL_RANK") == "1"
    job = elaunch.init()
    torch.manual_seed(1)
    model = job.wrap(nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 1)).double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    job.register(model=model, optimizer=optimizer)
    sizes = {"global_batch_size": 12, "micro_batch_size": 3, "seed": 7, "steps": args.steps}
    data = Samples(torch.float64)
    if args.old:
        for points, values in job.batches(data, **sizes):
            (model(points) - values).square().mean().backward()
            if not (second and job.step == 3):
                optimizer.step()
    else:
        for step in job.steps(data, **sizes):
            for points, values in step:
                loss = (model(points) - values).square().mean()
                loss.backward()
                job.report(loss=loss)
            if second and step.number == args.noise_at:
                next(model.parameters()).data.add_(1.0)
            if not (second and step.number == args.skip_at):
                optimizer.step()
            if second and step.number == args.stop_at:
                job.stop()
    norm = sum(parameter.detach().square().sum().item() for parameter in model.parameters())
    say(f"ended after {job.step} steps, norm {norm:.12e}")


if __name__ == "__main__":
    main()
