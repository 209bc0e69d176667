"""An emulated job under torchrun: torch.distributed.pipelining's Schedule1F1B over Gloo, a stage in each process.

The modules, the loss, the optimizer and the division into stages and micro-batches are those of the job under elaunch
(benchmarks/emulation.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.emulation import Words, arguments, emulated_layers, loss_fn
from benchmarks.small_model import CommitLog
from elaunch.plan import Plan
from elaunch.policy.profile import Profile


def main() -> None:
    parser = arguments()
    parser.add_argument("--commits", type=Path, required=True, help="where to append a JSON line per step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    commits = CommitLog(args.commits)
    commits.started(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plan = Plan.parse(args.plan.read_text())
    assert len(plan.tiles) == world_size, "one stage for each process"
    tile = plan.tiles[rank]
    first, last = rank == 0, rank == world_size - 1

    torch.manual_seed(rank)
    factories = emulated_layers(Profile.load(args.profile).scaled(args.time_scale))
    module = nn.Sequential(*(factories[layer]() for layer in tile.layers))
    optimizer = torch.optim.AdamW(module.parameters())

    words = Words(args.row_bytes)
    # Shapes are inferred in the first step, which is not counted.
    stage = PipelineStage(module, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, plan.n_units, loss_fn=loss_fn)

    for step in range(args.steps):
        start = step * plan.global_batch_size
        batch = (
            [words[(start + sample) % len(words)] for sample in range(plan.global_batch_size)] if first or last else []
        )
        given = (torch.stack([x for x, _ in batch]),) if first else ()
        target = torch.stack([y for _, y in batch]) if last else None
        schedule.step(*given, target=target, losses=[] if last else None, return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        if first:
            commits.commit(step, world_size, 0)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
