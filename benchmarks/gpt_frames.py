"""What the scripts share that `frameworks.py` runs under each launcher: a GPT, its data, and a trace of events.

The scripts themselves are `peers/gpt_*.py`: one loop, written for each launcher as its documentation has it.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
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

from train_gpt import DTYPES, GPT, Sources

from benchmarks.one_device import await_device, device_of

SLOTS = 4
"""Workers of this machine, which share its cores."""

EPOCHS = 1_000_000  # a benchmark ends a job by its number of steps


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trace", type=Path, required=True, help="all workers append to it")
    parser.add_argument("--kind", choices=("ddp", "fsdp"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of each worker in a step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--window", type=int, default=1, help="steps after which a device is waited for")
    parser.add_argument("--checkpoint", type=Path, default=Path("unused"))
    parser.add_argument("--checkpoint-every", type=int, default=1, help="steps")
    args = parser.parse_args()
    slot, cores = int(os.environ["LOCAL_RANK"]), sorted(os.sched_getaffinity(0))
    args.device = device_of(slot)
    args.backend = torch.distributed.get_default_backend_for_device(args.device)
    # Alike under all launchers. On a device, backward and NCCL have threads of their own.
    wide = args.device.type != "cpu" and len(cores) >= SLOTS
    os.sched_setaffinity(0, set(cores[slot % SLOTS :: SLOTS]) if wide else {cores[slot % len(cores)]})
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)  # where it is, for whoever waits in vain
    return args


def data(args: argparse.Namespace) -> Sources:
    return Sources(400_000, args.context)


def net(args: argparse.Namespace) -> GPT:
    torch.manual_seed(0)
    model = GPT(args.layers, args.width, args.heads, args.context, dropout=0.0)
    return model.to(args.device, DTYPES[args.dtype])


def build(args: argparse.Namespace) -> nn.Module:
    if args.kind == "ddp":
        return DistributedDataParallel(net(args))
    model: Any = net(args)
    mesh = init_device_mesh(args.device.type, (torch.distributed.get_world_size(),))
    for block in model.blocks.children():
        fully_shard(block, mesh=mesh)
    whole: nn.Module = fully_shard(model, mesh=mesh)
    return whole


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    device = next(model.parameters()).device
    inputs, targets = (part.to(device, non_blocking=True) for part in (inputs, targets))
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Trace:
    """Lines with the time, and the processor time that the process has taken, for whoever measures.

    The line of a step that ends a window comes when the device has done the step.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._device, self._window = args.device, args.window
        self._file = os.open(args.trace, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def say(self, kind: str, **fields: Any) -> None:
        if kind == "step" and fields["step"] % self._window == 0:
            await_device(self._device)
        who = {"pid": os.getpid(), "slot": int(os.environ["LOCAL_RANK"])}
        line = {"t": time.time(), "kind": kind, **who, "cpu_s": time.process_time(), **fields}
        os.write(self._file, json.dumps(line).encode() + b"\n")
