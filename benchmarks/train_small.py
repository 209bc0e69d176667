"""The small job under elaunch; every committed step is in the event log, so it writes nothing itself."""

from __future__ import annotations

import torch

import elaunch
from benchmarks.small_model import GLOBAL_BATCH, MICRO_BATCH, Samples, arguments, build, loss_of


def main() -> None:
    args = arguments().parse_args()
    job = elaunch.init()
    model = job.wrap(build(args.micro_batch_s).to(job.device))
    optimizer = torch.optim.AdamW(model.parameters())
    job.register(model=model, optimizer=optimizer)
    for rows in job.batches(
        Samples(), global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, seed=0, steps=args.steps
    ):
        loss = loss_of(model(rows), rows)
        loss.backward()
        job.report(loss=loss)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
