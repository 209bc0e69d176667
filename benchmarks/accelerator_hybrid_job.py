"""The hybrid job that `accelerator.py` runs: two pipelines of two stages of one GPT.

    under elaunch               elaunch.hybrid, the plan `symmetric(dp=2, pp=2)`
    under torchrun, `--peer`    Schedule1F1B of torch.distributed.pipelining; each stage in a DistributedDataParallel

Both have the same layers, cut at the same place, the same micro-batches and the same ranks, by the same backend.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import elaunch
from benchmarks import accelerator_job
from benchmarks.accelerator_job import Bytes, let_settle
from benchmarks.one_device import device_of
from benchmarks.small_model import CommitLog
from elaunch.plan import Plan, symmetric

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from examples.train_gpt import DTYPES
from examples.train_gpt_hybrid import adamw, gpt, loss_fn

DP, PP = 2, 2


def plan_of(args: argparse.Namespace) -> Plan:
    """Returns the plan of both; worker (stage * DP + replica)."""
    workers = [f"w{rank}" for rank in range(DP * PP)]
    return symmetric(workers, args.layers + 2, args.global_batch_size, args.micro_batch_size, dp=DP, pp=PP)


def elastic(args: argparse.Namespace) -> None:
    """Trains under elaunch, which notes each commit by itself."""
    job = elaunch.hybrid()
    job.engine(
        gpt(args),
        loss_fn,
        partial(adamw, lr=1e-3),
        plan_of(args),
        dataset=Bytes(args.context),
        dtype=DTYPES[args.dtype],
        consistency="fast",
        snapshots=0,
    )
    for report in job.steps(args.steps):
        let_settle(args, job.device, report.step)


def peer(args: argparse.Namespace) -> None:
    """Trains with what torch has for this layout."""
    rank = int(os.environ["RANK"])
    device = device_of(int(os.environ["LOCAL_RANK"]))
    commits = CommitLog(args.commits)
    commits.started(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(dist.get_default_backend_for_device(device))
    mesh = dist.init_device_mesh(device.type, (PP, DP), mesh_dim_names=("pp", "dp"))
    stage_index, replica = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")

    torch.manual_seed(stage_index)
    factories, layers = gpt(args), plan_of(args).tiles[rank].layers
    module = nn.Sequential(*(factories[layer]() for layer in layers)).to(device, DTYPES[args.dtype])
    replicated = DistributedDataParallel(
        module, device_ids=None if device.type == "cpu" else [device.index], process_group=mesh.get_group("dp")
    )
    optimizer = adamw(module.named_parameters(), lr=1e-3)
    stage = PipelineStage(replicated, stage_index, PP, device, group=mesh.get_group("pp"))
    rows = args.global_batch_size // DP
    schedule = Schedule1F1B(stage, rows // args.micro_batch_size, loss_fn=loss_fn)
    items = Bytes(args.context)
    loader = DataLoader(items, rows, sampler=DistributedSampler(items, DP, replica))
    for step, batch in zip(range(args.steps), loader):
        tokens, following = (part.to(device, non_blocking=True) for part in batch)
        if stage_index == 0:
            schedule.step(tokens, return_outputs=False)
        else:
            schedule.step(target=following, losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        let_settle(args, device, step)
        if rank == 0:
            commits.commit(step, DP * PP, 0)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peer", choices=("pipelining",), help="under torchrun instead of elaunch")
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--dropout", type=float, default=0.0)
    accelerator_job.add_arguments(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peer:
        peer(args)
    else:
        elastic(args)


if __name__ == "__main__":
    main()
