"""The device of a worker, and the memory of one that computes on the CPU."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F

KEPT_BLOCK_BYTES = 64 << 20
"""Freed blocks up to this size are used again; the kernel gives and takes larger ones, page by page."""

KEPT_BYTES = 256 << 20
"""The most freed memory that is kept at the end of the heap."""

LARGE_BYTES = 1 << 20
"""A tensor of so much or more may be on large pages: what it shares them with is little beside it."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_MADV_HUGEPAGE = 14  # bits/mman-linux.h
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


def load_kernels(device: torch.device) -> None:
    """Has an accelerator load what it loads when that is first used; returns when it has.

    That is the context of this process, the libraries of its vendor and the kernels of common layers and optimizers.
    No random numbers are drawn.
    """
    for dtype in (torch.float32, torch.bfloat16):
        rows = torch.ones(2, 4, 16, 64, dtype=dtype, device=device, requires_grad=True)  # attention's heads
        weight = torch.ones(64, 64, dtype=dtype, device=device, requires_grad=True)
        hidden = F.scaled_dot_product_attention(rows, rows, rows, is_causal=True)
        hidden = F.layer_norm(F.gelu(F.linear(hidden, weight)), (64,), weight[0], weight[1]) + rows
        classes = torch.zeros(2 * 4 * 16, dtype=torch.long, device=device)
        F.cross_entropy(F.embedding(classes, weight) + hidden.flatten(0, 2), classes).backward()
        torch.optim.AdamW([weight]).step()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


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


def use_large_pages(tensors: Iterable[torch.Tensor]) -> None:
    """Has the kernel back new tensors in host memory by large pages, where it does so on request.

    Memory that was never used is mapped and cleared when it is first written to. Page by page of 4 KiB that takes
    longer than what is then copied into it; with pages of 2 MiB, a fifth of the time. It is a hint: where the kernel
    has none to give, or the administrator has turned them off, nothing changes.
    """
    libc = ctypes.CDLL(None)
    page = mmap.PAGESIZE
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.nbytes < LARGE_BYTES or not tensor.is_contiguous():
            continue
        # Whole pages, those at the ends as well: so the ranges of neighbours on the heap meet, and the kernel makes one
        # of them.
        first = tensor.data_ptr() // page * page
        end = -(-(tensor.data_ptr() + tensor.nbytes) // page) * page
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_HUGEPAGE)
