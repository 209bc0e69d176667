"""An elastic function that trains a small model with DeepSpeed's ZeRO-1 or ZeRO-2 over Gloo.

    elaunch --standalone --nproc-per-node=3 tests/jobs/deepspeed_zero.py --stage 2 --die 1:7

`--die LOCAL_RANK:STEP` kills the first process of a slot in that step, before its optimizer steps.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import elaunch
from elaunch.integrations import deepspeed as adapter

SAMPLES, BATCH = 480, 24

parser = argparse.ArgumentParser()
parser.add_argument("--stage", type=int, default=1)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--die", action="append", default=[])
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--members", type=int, default=0, help="with fewer than these, it waits for others")
parser.add_argument("--sleep", type=float, default=0.0)
arguments = parser.parse_args()


def die(step: int) -> None:
    if os.environ["ELAUNCH_WORKER"].endswith("#0") and f"{os.environ['LOCAL_RANK']}:{step}" in arguments.die:
        os.kill(os.getpid(), signal.SIGKILL)


def settings(size: int) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // size,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}},
        "zero_optimization": {"stage": arguments.stage},
        "bf16": {"enabled": arguments.bf16},
        "gradient_clipping": 1.0,
    }


@elaunch.elastic
def train(state: elaunch.ElasticState) -> None:
    adapter.reset()
    dist.init_process_group("gloo")
    if state.size < arguments.members:
        state.wait_for_members(f"{state.size} of {arguments.members} members are there")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 17), nn.ReLU(), nn.Linear(17, 1))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings(state.size), dist_init_required=False
    )
    state.bind(training=adapter.ZeroState(engine))
    sys.stdout.write(f"entry {state.entry}: {state.size} members, step {state.step}\n")
    inputs = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=BATCH, shuffle=True)
    for x, y in state.steps(loader, epochs=10, global_batch_size=BATCH):
        if state.step == arguments.steps:
            break
        dtype = next(engine.module.parameters()).dtype
        loss = nn.functional.mse_loss(engine(x.to(dtype)).float(), y) * state.weight
        engine.backward(loss)
        die(state.step)
        engine.step()
        assert engine.global_steps == state.step + 1
        total = loss.detach().double()
        dist.all_reduce(total)
        time.sleep(arguments.sleep)
        state.commit(loss=total.item() / state.size)
    sys.stdout.write(f"rank {state.rank} of {state.size}: {state.step} steps.\n")


train()
sys.exit(0)
