"""What lets accelerate shard models where there are only CPUs."""

from __future__ import annotations

from typing import Any

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def take_cpus_for_devices() -> None:
    """Has accelerate, which shards on accelerators alone, take a group of CPUs for one of them."""
    form = PartialState.__init__

    def formed(state: Any, *args: Any, **kwargs: Any) -> None:
        form(state, *args, **kwargs)
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_XPU

    PartialState.__init__ = formed
