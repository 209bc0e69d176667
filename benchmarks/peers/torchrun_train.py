"""The small job under torchrun: DistributedDataParallel over Gloo, and a checkpoint of every step to restart from.

With `--checkpoint` rank 0 writes the state after each step (to a temporary name, then renamed) and a restarted job
goes on from it. Without, it is the plain DDP loop whose step time elaunch is compared with.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

from benchmarks.small_model import MICRO_BATCHES, CommitLog, Samples, arguments, build, loss_of


def join_group(restart: int) -> None:
    """Join the process group of this restart.

    Torch 2.13 hands the restarted workers the agent's store as the previous ones left it. Gloo then reads the dead
    workers' addresses from it and waits for them, so each restart gets keys of its own.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world_size, is_master=False)
    dist.init_process_group("gloo", store=PrefixStore(f"restart-{restart}", store), rank=rank, world_size=world_size)


def main() -> None:
    parser = arguments()
    parser.add_argument("--checkpoint", type=Path)
    args = parser.parse_args()
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    commits = CommitLog(args.commits)
    commits.started(int(os.environ["LOCAL_RANK"]))
    join_group(restart)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    share = range(rank * MICRO_BATCHES // world_size, (rank + 1) * MICRO_BATCHES // world_size)

    net = build(args.micro_batch_s)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    samples, step = Samples(), 0
    if args.checkpoint is not None and args.checkpoint.exists():
        state = torch.load(args.checkpoint)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    while step < args.steps:
        for sample in share:
            rows = samples.micro_batch(step, sample)
            # Only the last micro-batch of the share synchronises, as in any script that accumulates gradients.
            with contextlib.nullcontext() if sample == share[-1] else model.no_sync():
                torch.autograd.backward(loss_of(model(rows), rows) / len(share))
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            if args.checkpoint is not None:
                unfinished = args.checkpoint.with_suffix(".unfinished")
                torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
                unfinished.replace(args.checkpoint)
            commits.commit(step, world_size, restart)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
