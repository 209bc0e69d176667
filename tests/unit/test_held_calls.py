"""Something is called before each grouped operation of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d

from elaunch.workers.comm.native.held_calls import before_grouped


class PeerLost(Exception):
    pass


def lost() -> None:
    raise PeerLost


GATHER = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # the name changes in 2.13
SCATTER = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: functional.all_reduce(torch.ones(2), "sum", [0]),
    "all_gather": lambda: GATHER(torch.ones(2), 0, [0]),
    "reduce_scatter": lambda: SCATTER(torch.ones(2), "sum", 0, [0]),
    "all_to_all_single": lambda: functional.all_to_all_single(torch.ones(2), None, None, [0]),
    "broadcast": lambda: functional.broadcast(torch.ones(2), 0, [0]),
    "batch_isend_irecv": lambda: dist.batch_isend_irecv([]),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operation_is_held_before_it_reaches_its_group(name: str) -> None:
    with before_grouped(lost), pytest.raises(PeerLost):
        CALLS[name]()


def test_what_was_there_is_there_again() -> None:
    own = functional._resolve_group_name, distributed_c10d._check_p2p_op_list
    held: list[bool] = []
    with before_grouped(lambda: held.append(True)):
        assert functional._resolve_group_name is not own[0]
        with pytest.raises(ValueError, match="p2p_op_list"):
            dist.batch_isend_irecv(["no operation"])  # type: ignore[list-item]
    assert held == [True]
    assert (functional._resolve_group_name, distributed_c10d._check_p2p_op_list) == own
