"""The GPT of `frameworks.py` under elaunch: the function is entered again, with the state of the last commit."""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import elaunch
from benchmarks.gpt_frames import EPOCHS, Trace, arguments, build, data, loss_of


@elaunch.elastic
def train(state: elaunch.ElasticState, args: argparse.Namespace) -> None:
    trace = Trace(args)
    trace.say("entered")
    dist.init_process_group(args.backend)
    model = build(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trace.say("built")
    state.bind(model=model, optimizer=optimizer)
    trace.say("restored")
    dataset = data(args)
    loader = DataLoader(dataset, args.batch_size, shuffle=True, drop_last=True)
    for inputs, targets in state.steps(loader, epochs=EPOCHS):
        loss = loss_of(model, inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trace.say("updated")
        state.commit()
        trace.say("step", step=state.step, members=state.size)
        if state.step >= args.steps:
            return


if __name__ == "__main__":
    train(arguments())
