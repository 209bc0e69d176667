"""What training loops do besides a step: each thing in its place, so that it survives the loss of any worker.

    elaunch --standalone --nproc-per-node=4 examples/train_habits.py --steps 200

In the loop over the micro-batches: forward, backward, and what belongs to a sample. After it, once a step and alike on
all workers: clipping, the optimizers, an average of the weights, noise, evaluation, and the decision to stop early. The
samples come from a DataLoader, whose processes load ahead with `--loaders`, and the loss is scaled by a GradScaler.
"""

from __future__ import annotations

import argparse
import math
import os

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import elaunch


class Spirals(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Points of three spirals, and which one each is of."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        number = self.first + index
        arm, radius = number % 3, (number * 0.618034) % 1.0
        angle = 4.0 * radius + arm * 2.0 * math.pi / 3.0 + 0.1 * math.sin(number)
        point = torch.tensor([radius * math.cos(angle), radius * math.sin(angle)], dtype=torch.float64)
        return point, torch.tensor(arm)


def learning_rate(step: int, steps: int, most: float) -> float:
    """A linear warm-up, then half a cosine down to zero."""
    warm = max(1, steps // 10)
    return most * min((step + 1) / warm, 0.5 * (1 + math.cos(math.pi * step / steps)))


@torch.no_grad()
def accuracy(model: nn.Module, held_out: Spirals) -> float:
    """The part of the held-out points that the model gets right."""
    points, arms = zip(*(held_out[index] for index in range(len(held_out))), strict=True)
    model.eval()
    return float((model(torch.stack(points)).argmax(1) == torch.stack(arms)).double().mean())


def norm_of(model: nn.Module) -> float:
    """The norm of all weights, to compare runs by."""
    return math.sqrt(sum(weight.detach().double().square().sum().item() for weight in model.parameters()))


def main() -> None:
    """Trains a small classifier."""
    parser = argparse.ArgumentParser(description="Show where everything in a training loop goes.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--noise", type=float, default=1e-4, help="standard deviation of what is added to the weights")
    parser.add_argument("--loaders", type=int, default=0, help="processes of each worker that load samples ahead")
    parser.add_argument("--enough", type=float, default=2.0, help="stop at this accuracy; above 1: never")
    args = parser.parse_args()

    job = elaunch.init()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    model = job.wrap(net.to(job.device, torch.float64))
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.98))
    first, last = list(net[:-1].parameters()), list(net[-1].parameters())
    optimizers = {"adamw": torch.optim.AdamW(first, lr=args.lr), "sgd": torch.optim.SGD(last, lr=args.lr, momentum=0.9)}
    scaler = torch.amp.GradScaler(job.device.type, init_scale=1024.0, growth_interval=50)
    job.register(model=model, average=average, scaler=scaler, **optimizers)

    samples = DataLoader(Spirals(3000), batch_size=6, shuffle=True, num_workers=args.loaders)
    for step in job.steps(samples, global_batch_size=48, steps=args.steps):
        for optimizer in optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step.number, args.steps, args.lr)

        for points, arms in step:  # this worker's micro-batches; after an interruption, all of them again
            loss = nn.functional.cross_entropy(model(points), arms)
            scaler.scale(loss).backward()
            job.report(loss=loss)

        # The step has committed: from here on all workers do the same, once.
        for optimizer in optimizers.values():
            scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers.values():
            scaler.step(optimizer)  # not if there is an infinity; then on no worker
        scaler.update()
        with torch.no_grad():
            for weight in net.parameters():
                weight.add_(args.noise * torch.randn_like(weight))  # the same numbers on all workers
        average.update_parameters(net)
        if step.number % 50 == 49 and job.rank == 0:
            right = accuracy(average, Spirals(300, first=100_000))
            print(f"step {step.number}  loss {step.loss:.4f}  gradient {norm:.3f}  right {right:.3f}", flush=True)
            if right >= args.enough:
                job.stop()  # one worker's word is enough
    weights = f"weights {norm_of(net):.12e} average {norm_of(average):.12e}"
    print(f"ended {job.worker} pid {os.getpid()} after {job.step} steps: {weights}", flush=True)


if __name__ == "__main__":
    main()
