"""Mixed precision as scripts do it: a scaler, a norm that is clipped, two optimizers; it can hurt itself on request."""

from __future__ import annotations

import argparse
import os
import signal

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
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--infinite", type=int, default=-1, help="a step in which one sample has no finite gradient")
    parser.add_argument("--die", default="", help="SLOT:STEP in which its first worker dies, with its gradients summed")
    args = parser.parse_args()
    job = elaunch.init()
    torch.manual_seed(1)
    model = job.wrap(nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 1)).double())
    first, second = [list(model.parameters())[part] for part in (slice(2), slice(2, None))]
    one, other = torch.optim.AdamW(first, lr=3e-3), torch.optim.SGD(second, lr=1e-3, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    job.register(model=model, one=one, other=other, scaler=scaler)
    batches = job.batches(Samples(torch.float64), global_batch_size=24, micro_batch_size=3, seed=7, steps=args.steps)
    for points, values in batches:
        loss = (model(points) - values).square().mean()
        job.report(loss=loss)
        # The micro-batch with index 0 of a step is the first worker's.
        bad = job.step == args.infinite and job.rank == 0 and not job.last_micro_batch
        scaler.scale(loss * float("inf") if bad else loss).backward()
        for optimizer in (one, other):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 50.0)
        me = f"{os.environ.get('LOCAL_RANK', '0')}:{job.step}" if job.worker.endswith("#0") else ""
        if job.last_micro_batch and args.die == me:
            os.kill(os.getpid(), signal.SIGKILL)
        for optimizer in (one, other):
            scaler.step(optimizer)
        scaler.update()
        one.zero_grad()
        other.zero_grad()
    norm = sum(parameter.detach().square().sum().item() for parameter in model.parameters())
    say(f"ended {job.worker} norm {norm:.15e} scale {scaler.get_scale():g} grown {scaler._get_growth_tracker()}")


if __name__ == "__main__":
    main()
