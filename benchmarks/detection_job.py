"""The job of detection.py: data-parallel, layers that sleep, and workers with whom something is wrong on order.

    elaunch --nproc-per-node=4 benchmarks/detection_job.py --orders FOLDER

The file FOLDER/SLOT, once it is there, says what becomes of the worker of that slot and in which step: `120 exit`. The
worker takes the file away, writes FOLDER/SLOT.began in the moment in which it begins (Unix seconds and the step), and

    exit          ends with exit code 3
    loop          goes round in a loop that calls nothing, so that no other thread of it runs
    cross         waits for a message of the next worker, which nobody sends
    slow F        takes F times as long for its micro-batches from now on
    throttle B    sends no more than B bytes a second over each of its links from now on; 0: as fast as it can
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from pathlib import Path

import torch
from torch import nn

import elaunch

SO_MAX_PACING_RATE = 47
UNLIMITED = 2**32 - 1
WIDTH = 600


class Orders:
    """What is to become of this worker."""

    def __init__(self, folder: Path, job: elaunch.Job) -> None:
        self._job = job
        self._file = folder / os.environ.get("LOCAL_RANK", "0")
        self._order: list[str] = []
        self.slow = 1.0

    def look(self) -> None:
        """Called at the beginning of each step."""
        if self._file.exists():
            self._order = self._file.read_text().split()
            self._file.unlink()
        if self._order and int(self._order[0]) <= self._job.step:
            kind, *values = self._order[1:]
            self._order = []
            began = self._file.with_suffix(".began")
            new = began.with_suffix(".new")
            new.write_text(json.dumps({"t": time.time(), "step": self._job.step}))
            new.rename(began)
            getattr(self, f"_{kind}")(*values)

    def _exit(self) -> None:
        os._exit(3)

    def _loop(self) -> None:
        while True:
            pass

    def _cross(self) -> None:
        torch.distributed.recv(torch.ones(1), (self._job.rank + 1) % self._job.size, group=self._job.process_group)

    def _slow(self, factor: str) -> None:
        self.slow = float(factor)

    def _throttle(self, rate: str) -> None:
        for link in self._job._member._transport._links.values():
            link.socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(rate) or UNLIMITED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--orders", type=Path, required=True)
    parser.add_argument("--micro-batches", type=int, default=16, help="of a step, over all workers")
    parser.add_argument("--micro-batch-s", type=float, default=0.01)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elaunch.init()
    orders = Orders(args.orders, job)
    torch.manual_seed(1)
    model = job.wrap(nn.Sequential(nn.Linear(12, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    job.register(model=model, optimizer=optimizer)
    points = torch.utils.data.TensorDataset(torch.randn(4096, 12), torch.randn(4096, 1))
    looked = -1
    for inputs, targets in job.batches(
        points, global_batch_size=args.micro_batches, micro_batch_size=1, seed=1, steps=10**9
    ):
        if looked != job.step:
            looked = job.step
            orders.look()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        time.sleep(args.micro_batch_s * orders.slow)
        if job.last_micro_batch:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
