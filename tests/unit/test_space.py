"""What a worker holds, against what torch itself gives it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from elaunch.errors import StateError
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.space import box_of_placements


@contextmanager
def rank_of(rank: int, size: int) -> Iterator[None]:
    """A process group in which this process is one of several that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(start, stop) for start, stop in box)]


PLACEMENTS: list[tuple[Any, ...]] = [
    (Replicate(), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(-1), Shard(0)),
]


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 9), (1, 2)])
@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_a_distributed_tensor_has_the_elements_of_its_box(placements: tuple[Any, ...], shape: tuple[int, int]) -> None:
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    for rank in range(8):
        with rank_of(rank, 8):
            mesh = init_device_mesh("cpu", (4, 2))
            local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        box = box_of_placements(shape, (4, 2), placements, divmod(rank, 2))
        assert torch.equal(at(whole, box), local) or (local.numel() == 0 and at(whole, box).numel() == 0)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)


def test_fsdp_over_tensor_parallelism_gives_boxes_that_tile_every_parameter() -> None:
    """FSDP2 cuts what tensor parallelism has cut already, along the same dimension: `_StridedShard`."""
    found: dict[str, list[Box]] = {}
    shapes = {}
    kinds = set()
    for rank in range(8):
        with rank_of(rank, 8):
            mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
            with torch.device("cpu"):
                model = Network()
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(model, mesh=mesh["dp"])
            for name, parameter in model.named_parameters():
                assert isinstance(parameter, DTensor)
                assert tuple(parameter.device_mesh.shape) == (4, 2)
                box = box_of_placements(parameter.shape, (4, 2), parameter.placements, divmod(rank, 2))
                assert tuple(stop - start for start, stop in box) == tuple(parameter.to_local().shape), name
                found.setdefault(name, []).append(box)
                shapes[name] = tuple(parameter.shape)
                kinds |= {type(placement).__name__ for placement in parameter.placements}
    assert "_StridedShard" in kinds
    for name, boxes in found.items():
        held = torch.zeros(shapes[name], dtype=torch.int)
        for box in boxes:
            at(held, box).add_(1)
        # A parameter that tensor parallelism does not cut is on both of its ranks.
        assert held.unique().numel() == 1, f"{name}: {boxes}"
        assert len(set(boxes)) == 8 // int(held.flatten()[0])


def test_strided_shards_come_after_the_parts_to_their_right() -> None:
    strided = pytest.importorskip("torch.distributed.tensor.placement_types")._StridedShard(0, split_factor=2)
    boxes = {
        (dp, tp): box_of_placements((16,), (4, 2), (strided, Shard(0)), (dp, tp))
        for dp, tp in product(range(4), range(2))
    }
    assert boxes[0, 0] == ((0, 2),)
    assert boxes[0, 1] == ((8, 10),)
    assert boxes[3, 0] == ((6, 8),)


def test_what_gives_no_box_is_refused() -> None:
    with pytest.raises(StateError, match=r"placed as P.* has no chunk; redistribute it"):
        box_of_placements((4,), (2,), (Partial(),), (0,))
