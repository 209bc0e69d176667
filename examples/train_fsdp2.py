"""Train a small byte-level GPT with FSDP2, in a function that is entered again when the members change.

    elaunch --standalone --nproc-per-node=4 examples/train_fsdp2.py --epochs 1       # now kill a worker

What is elastic about it: the decorator, `bind`, `steps`, the weight of the loss and `commit`. It also runs under
torchrun.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from train_gpt import GPT, Sources

import elaunch


def shard(model: GPT, device: str, size: int, replicas: int) -> None:
    """Cuts the model over the members; into several replicas, where that many members can be divided by them."""
    n_replicas = replicas if size % replicas == 0 else 1
    shape, names = (
        ((n_replicas, size // n_replicas), ("replicas", "shards")) if n_replicas > 1 else ((size,), ("shards",))
    )
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@elaunch.elastic
def train(state: elaunch.ElasticState, args: argparse.Namespace) -> None:
    """Trains from the last commit on, with the members that there are."""
    dist.init_process_group("gloo" if state.device.type == "cpu" else "nccl")
    torch.manual_seed(0)
    model = GPT(args.layers, args.width, 4, 64, dropout=0.0).to(state.device)
    shard(model, state.device.type, state.size, args.replicas)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    state.bind(model=model, optimizer=optimizer)
    if state.rank == 0:
        print(f"{state.size} members, from step {state.step} on", flush=True)
    loader = DataLoader(Sources(args.corpus_bytes, 64), args.batch_size, shuffle=True)
    for inputs, targets in state.steps(loader, epochs=args.epochs, global_batch_size=args.batch_size):
        logits = model(inputs.to(state.device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(state.device).flatten()) * state.weight
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach_(), op=dist.ReduceOp.SUM)
        state.commit(loss=loss.item() / state.size)
        if state.rank == 0 and state.step % 10 == 0:
            print(f"step {state.step}: loss {loss.item() / state.size:.4f}, {state.size} members", flush=True)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all workers")
    parser.add_argument("--replicas", type=int, default=1, help="of the model, each cut over as many members")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--corpus-bytes", type=int, default=400_000)
    return parser.parse_args()


if __name__ == "__main__":
    train(parse())
