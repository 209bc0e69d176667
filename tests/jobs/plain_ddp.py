"""DistributedDataParallel over Gloo, as any script for torchrun; rank 1 fails in the first `--failures` attempts."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.jobs import say


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--failures", type=int, default=0)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())  # DistributedDataParallel is to make the weights the same
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        if step == 2 and dist.get_rank() == 1 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < args.failures:
            raise RuntimeError("the failure that was asked for")
        loss = model(torch.full((2, 4), float(dist.get_rank()))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    norm = sum(parameter.detach().double().square().sum().item() for parameter in model.parameters())
    say(f"rank {dist.get_rank()} of {dist.get_world_size()} norm {norm:.12e}")
    dist.destroy_process_group()
    # torch 2.13 at times aborts in the teardown after Gloo ("terminate called ..."), under torchrun too.
    os._exit(0)


if __name__ == "__main__":
    main()
