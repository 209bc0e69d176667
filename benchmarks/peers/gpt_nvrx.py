"""The GPT of `frameworks.py` under NVRx's in-process restart: the function is called again, and loads a checkpoint.

Needs nvidia-resiliency-ext 0.4.1, hence its own virtual environment.
"""

import argparse
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from nvidia_resiliency_ext import inprocess
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.gpt_frames import EPOCHS, Trace, arguments, build, data, loss_of

TUNED = {
    "monitor_thread_interval": timedelta(seconds=0.02),
    "monitor_process_interval": timedelta(seconds=0.02),
    "heartbeat_interval": timedelta(seconds=0.1),
    "progress_watchdog_interval": timedelta(seconds=0.1),
    "last_call_wait": timedelta(seconds=0.02),
}
SETTINGS: dict[str, Any] = TUNED if os.environ.get("NVRX_TUNED") else {}
PORT = int(os.environ["MASTER_PORT"])


@inprocess.Wrapper(store_kwargs={"port": PORT + 1}, **SETTINGS)  # type: ignore[untyped-decorator, unused-ignore]
def train(args: argparse.Namespace, job: dist.Store, wrapper: inprocess.CallWrapper = None) -> None:
    trace = Trace(args)
    trace.say("entered")
    prefix = dist.PrefixStore(str(wrapper.iteration), job)
    dist.init_process_group(
        args.backend, store=prefix, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace.say("built")
    step = 0
    newest = args.checkpoint / "newest"
    if newest.exists():
        step = int(newest.read_text())
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=args.checkpoint / str(step // args.checkpoint_every % 2))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    trace.say("restored")
    dataset = data(args)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, dist.get_world_size(), dist.get_rank(), drop_last=True
    )
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, drop_last=True)
    for epoch in range(step // len(loader), EPOCHS):
        sampler.set_epoch(epoch)
        for number, (inputs, targets) in enumerate(loader):
            if epoch * len(loader) + number < step:
                continue
            loss = loss_of(model, inputs, targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % args.checkpoint_every == 0:
                model_state, optimizer_state = get_state_dict(model, optimizer)
                state = {"model": model_state, "optimizer": optimizer_state}
                dcp.save(state, checkpoint_id=args.checkpoint / str(step // args.checkpoint_every % 2))
                if dist.get_rank() == 0:
                    unfinished = args.checkpoint / "unfinished"
                    unfinished.write_text(str(step))
                    unfinished.replace(newest)
                dist.barrier()
            trace.say("step", step=step, members=dist.get_world_size())
            if step >= args.steps:
                return


if __name__ == "__main__":
    args = arguments()
    master = int(os.environ["RANK"]) == 0
    train(args, dist.TCPStore(os.environ["MASTER_ADDR"], PORT, is_master=master, multi_tenant=True))
