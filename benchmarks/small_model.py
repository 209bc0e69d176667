"""The job that `recovery.py` runs under every launcher: one model, one data set, one emulated compute time.

A step is 12 micro-batches of 8 samples, so 4 workers do 3 each and 3 workers do 4 each. With `micro_batch_s` above zero
the forward also sleeps that long: the parameters, gradients, optimizer and messages are real, the compute is not.
Imported by the peers' scripts too, hence it needs nothing but torch and the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

GLOBAL_BATCH = 96
MICRO_BATCH = 8
MICRO_BATCHES = GLOBAL_BATCH // MICRO_BATCH
FEATURES, CLASSES = 256, 128


class SmallNet(nn.Module):
    """A perceptron of 1.0 M parameters; `micro_batch_s` seconds of emulated compute are added to each forward."""

    def __init__(self, micro_batch_s: float) -> None:
        super().__init__()
        self.micro_batch_s = micro_batch_s
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 1024), nn.GELU(), nn.Linear(1024, 640), nn.GELU(), nn.Linear(640, CLASSES)
        )

    def forward(self, samples: Tensor) -> Tensor:
        if self.micro_batch_s > 0:
            time.sleep(self.micro_batch_s)
        logits: Tensor = self.layers(samples)
        return logits


class Samples(torch.utils.data.Dataset[Tensor]):
    """4,096 fixed random rows of shape (FEATURES,)."""

    def __init__(self) -> None:
        self.rows = torch.randn(4096, FEATURES, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def micro_batch(self, step: int, sample: int) -> Tensor:
        """The rows of one micro-batch (0..MICRO_BATCHES-1) of one step, shape (MICRO_BATCH, FEATURES)."""
        first = (step * GLOBAL_BATCH + sample * MICRO_BATCH) % len(self.rows)
        return self.rows[first : first + MICRO_BATCH]


def loss_of(logits: Tensor, samples: Tensor) -> Tensor:
    """A loss that needs no labels: reconstruct the first CLASSES features."""
    return nn.functional.mse_loss(logits, samples[:, :CLASSES])


def build(micro_batch_s: float) -> SmallNet:
    """The model with the same initial parameters in every process; one thread each, since workers share the cores."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return SmallNet(micro_batch_s)


class CommitLog:
    """Appends JSON lines to a file that several processes share; without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        # One write to an O_APPEND descriptor per line: lines of different processes do not mix.
        self._descriptor = None if path is None else os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def commit(self, step: int, members: int, generation: int) -> None:
        """Note that `step` is committed now by `members` workers; `generation` numbers the membership that did it."""
        self._write({"t": time.time(), "kind": "step", "step": step, "members": members, "generation": generation})

    def started(self, local_rank: int) -> None:
        """Note that this process works at place `local_rank`."""
        self._write({"t": time.time(), "kind": "worker_started", "local_rank": local_rank})

    def _write(self, line: dict[str, object]) -> None:
        if self._descriptor is not None:
            os.write(self._descriptor, (json.dumps(line | {"pid": os.getpid()}) + "\n").encode())


def arguments() -> argparse.ArgumentParser:
    """The flags that the training script of every launcher has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--micro-batch-s", type=float, default=0.0, help="emulated seconds per micro-batch")
    parser.add_argument("--commits", type=Path, help="where to append a JSON line per committed step")
    return parser
