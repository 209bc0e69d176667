"""What the scripts share that `frameworks.py` runs under each launcher: a small GPT, its data, and a trace of events.

The scripts themselves are `peers/gpt_*.py`: one loop, written for each launcher as its documentation has it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from train_gpt import GPT, Sources

CONTEXT = 64
EPOCHS = 1_000_000  # a benchmark ends a job by its number of steps


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True, help="all workers append to it")
    parser.add_argument("--kind", choices=("ddp", "fsdp"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of each worker in a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--checkpoint", type=Path, default=Path("unused"))
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})  # alike under all launchers
    torch.set_num_threads(1)
    return args


def data() -> Sources:
    return Sources(400_000, CONTEXT)


def net(args: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    return GPT(args.layers, args.width, 4, CONTEXT, dropout=0.0)


def build(args: argparse.Namespace) -> nn.Module:
    if args.kind == "ddp":
        return DistributedDataParallel(net(args))
    model: Any = net(args)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks.children():
        fully_shard(block, mesh=mesh)
    whole: nn.Module = fully_shard(model, mesh=mesh)
    return whole


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Trace:
    """Lines with the time, and the processor time that the process has taken, for whoever measures."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._file = os.open(args.trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def say(self, kind: str, **fields: Any) -> None:
        who = {"pid": os.getpid(), "slot": int(os.environ["LOCAL_RANK"])}
        line = {"t": time.time(), "kind": kind, **who, "cpu_s": time.process_time(), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")
