"""The device of a worker, and the memory of one that computes on the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

import torch

KEPT_BLOCK_BYTES = 64 << 20
"""Freed blocks up to this size are used again; the kernel gives and takes larger ones, page by page."""

KEPT_BYTES = 256 << 20
"""The most freed memory that is kept at the end of the heap."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_USERS_OWN = "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"


def take_device(local_rank: int) -> torch.device:
    """Makes the accelerator with this worker's local rank the current one; returns it, or the CPU if there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        keep_freed_memory(os.environ)
        return torch.device("cpu")
    device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Has malloc keep what is freed instead of giving it back to the kernel; returns whether it does so.

    The gradients of a job stay where they are from step to step, so the largest blocks that a step frees are the
    temporary ones of backward and of the optimizer. glibc returns such blocks at once, and each of their pages is
    cleared and mapped anew a moment later.

    Args:
        environ: malloc is left alone where its user has tuned it, or has preloaded another allocator.
    """
    if any(environ.get(name) for name in _USERS_OWN):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl and macOS have none
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES))
