"""Grouped operations of NCCL look for the loss of a peer before they are called.

What torch gives to a communicator that has lost a peer fails, which is an error like others. Where torch groups it, as
it does with functional collectives, and so with all that DTensor exchanges, and with batches of messages, its end fails
as well, and C++ ends the process for that. A traced graph calls these operations without torch's Python: it is not
held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed import distributed_c10d

COME_FIRST = ("_resolve_group", "_resolve_group_name")
"""What functional collectives of torch's versions call before the operation itself."""


@contextlib.contextmanager
def before_grouped(hold: Callable[[], None]) -> Iterator[None]:
    """Returns a context in which something is called before each grouped operation.

    Args:
        hold: what it raises comes out of the operation.
    """
    from torch.distributed import _functional_collectives as functional

    places: list[tuple[Any, str]] = [(functional, name) for name in COME_FIRST if hasattr(functional, name)]
    places.append((distributed_c10d, "_check_p2p_op_list"))
    own = [getattr(*place) for place in places]

    def held(first: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            if not torch.compiler.is_compiling():
                hold()
            return first(*args, **more)

        return call

    for place, first in zip(places, own, strict=True):
        setattr(*place, held(first))
    try:
        yield
    finally:
        for place, first in zip(places, own, strict=True):
            setattr(*place, first)
