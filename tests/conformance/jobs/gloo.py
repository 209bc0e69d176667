"""gloo.py FOLDER: add up 1, 2, … over all workers, knowing of each other only by the launcher's variables."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
use_agent_store = os.environ["TORCHELASTIC_USE_AGENT_STORE"]
Path(sys.argv[1], f"sum-{dist.get_rank()}").write_text(f"{total.item()} {use_agent_store}\n")
dist.destroy_process_group()
