"""The GPT of `frameworks.py` as one replica group (of one worker) of torchft, written after its train_ddp.py.

Needs torchft 0.2.0, hence its own virtual environment. What is said in `torchft_train.py` holds here, too.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torch.utils.data import DataLoader
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport
from torchft.data import DistributedSampler

from benchmarks.gpt_frames import EPOCHS, Trace, arguments, data, loss_of, net
from benchmarks.peers.torchft_train import TolerantDataParallel


def train(args: argparse.Namespace) -> None:
    trace = Trace(args)
    trace.say("entered")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=timedelta(seconds=0.3))

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, dict[str, object]]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    replica, replicas = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    manager = Manager(
        pg=group,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=30),
        heartbeat_interval=timedelta(seconds=0.01),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device=torch.device("cpu")),
    )
    model = TolerantDataParallel(manager, net(args))
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
    trace.say("built")
    dataset = data(args)
    sampler = DistributedSampler(dataset, replica, replicas, 0, 1)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    for _epoch in range(EPOCHS):
        for inputs, targets in loader:
            step = manager.current_step()
            optimizer.zero_grad()
            loss = loss_of(model, inputs, targets)
            loss.backward()
            optimizer.step()
            if manager.current_step() > step:
                members = manager.num_participants()
                trace.say("step", step=manager.current_step(), members=members, quorum=manager._quorum_id)
            if manager.current_step() >= args.steps:
                os._exit(0)


if __name__ == "__main__":
    train(arguments())
