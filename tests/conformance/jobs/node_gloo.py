"""Sums the ranks by an all-reduce over Gloo and writes `<rank> <sum>` to `FOLDER/<rank>.sum`."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    Path(sys.argv[1], f"{dist.get_rank()}.sum").write_text(f"{dist.get_rank()} {total.item():g}")
    dist.barrier()
    dist.destroy_process_group()
    # torch 2.13 at times aborts in the teardown after Gloo.
    os._exit(0)


if __name__ == "__main__":
    main()
