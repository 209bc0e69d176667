"""Which backend a worker's native groups have."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

from elaunch.workers.comm.native.bulk import Bulk
from elaunch.workers.comm.native.gloo import GlooBulk
from elaunch.workers.comm.native.hccl import HcclBulk, Npu
from elaunch.workers.comm.native.nccl import NcclBulk, refuse_version
from elaunch.workers.comm.native.nccl2 import Nccl2Bulk, is_chosen
from elaunch.workers.comm.native.reconfigure import LeftGroups


def maker(host: str, device: torch.device) -> Callable[[], Bulk] | None:
    """Returns what makes native groups for this worker; None: it can have none, which is said.

    Args:
        host: address of this worker that the others can reach.
        device: where it computes.
    """
    try:
        return _maker(host, device)
    except RuntimeError as error:
        line = f"[elaunch] {error}; until then tensors on {device.type} go over links, through host memory"
        print(line, file=sys.stderr, flush=True)
        return None


def _maker(host: str, device: torch.device) -> Callable[[], Bulk]:
    if device.type == "cpu" and dist.is_gloo_available():
        # New each time. Torch 2.14 and later could connect the left group anew, which is no quicker: 9.4 ms against 9.1
        # among 4 members, 25 against 23 among 8 (benchmarks/regroup.py).
        return lambda: GlooBulk(host)
    if device.type == "cuda" and dist.is_nccl_available():
        refuse_version(torch.cuda.nccl.version())
        if not is_chosen(os.environ, dist):
            return lambda: NcclBulk(device)
        left = LeftGroups()
        return lambda: Nccl2Bulk(device, left)
    if device.type == "npu" and (npu := Npu.find(device)) is not None:
        return lambda: HcclBulk(npu)
    raise RuntimeError(f"this torch has no backend for native collectives on {device.type}: install one that does")
