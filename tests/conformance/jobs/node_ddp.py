"""DistributedDataParallel over Gloo. Rank 1 fails in attempt 0; in later ones it comes late to every set-up of a group.

While rank 0 sets up group N it appends to `FOLDER/<attempt>-<N>.beats`, and rank 1 waits for that: what rank 0 reads in
the store by then was not written by rank 1 of this attempt. Gloo lets the ports decide which of two connects to the
other, hence several groups. At the end each rank writes the sum of its weights to `FOLDER/<rank>.sum`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GROUPS = 8
BEATS, BEAT_S = 5, 0.1
TIMEOUT = timedelta(seconds=30)
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


@contextmanager
def setting_up(beats: Path) -> Iterator[None]:
    """Rank 0 beats during the block; rank 1 enters it late."""
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            with beats.open("a") as file:
                file.write(".")

    if RANK == 0:
        threading.Thread(target=beat, daemon=True).start()
    while RANK == 1 and ATTEMPT and not (beats.exists() and beats.stat().st_size >= BEATS):
        time.sleep(0.02)
    try:
        yield
    finally:
        over.set()


def main() -> None:
    folder = Path(sys.argv[1])
    with setting_up(folder / f"{ATTEMPT}-0.beats"):
        dist.init_process_group("gloo", timeout=TIMEOUT)
    for number in range(1, GROUPS):
        with setting_up(folder / f"{ATTEMPT}-{number}.beats"):
            group = dist.new_group(timeout=TIMEOUT)
    torch.manual_seed(RANK)  # DistributedDataParallel is to make the weights the same.
    model = DistributedDataParallel(nn.Linear(4, 1), process_group=group)
    if RANK == 1 and ATTEMPT == 0:
        sys.exit(3)
    model(torch.full((2, 4), float(RANK))).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    total = sum(parameter.detach().double().sum().item() for parameter in model.parameters())
    (folder / f"{RANK}.sum").write_text(f"{total:.9e}")
    dist.barrier()
    # torch 2.13 at times aborts in the teardown after Gloo.
    os._exit(0)


if __name__ == "__main__":
    main()
