"""How a DataLoader loads, apart from what."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

LOADING = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def loading_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns the arguments with which another DataLoader loads other batches as one does."""
    return {name: getattr(loader, name) for name in LOADING if hasattr(loader, name)}
