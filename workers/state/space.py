"""The space of a job's state: all tensors unsharded, and which boxes of them a worker holds (DynaTran 4.1).

What a plan makes a worker hold follows from the plan and the shapes alone, so every worker knows it of every other.
Names: a parameter or a buffer is `layers.3.mlp.weight`; all that the optimizer keeps for the elements of a parameter,
masters included, is `layers.3.mlp.weight@optimizer`, one item, since its parts always move together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from elaunch.errors import StateError
from elaunch.plan.tiling import Plan
from elaunch.workers.state.boxes import Box, subtract_all, whole
from elaunch.workers.state.layout import LayerSpec, ParameterPiece, StateLayout

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement  # takes a second to import, and most jobs have none

Holdings = Mapping[str, Sequence[Box]]
"""By name of an item: the disjoint boxes of it that a worker holds."""

OPTIMIZER = "@optimizer"

MASTER_AND_MOMENTS = (torch.float32,) * 3
"""What AdamW keeps for an element."""


@dataclass(frozen=True)
class Item:
    """A tensor, or several of the same shape that move together.

    Attributes:
        name: in the whole job.
        shape: unsharded.
        dtypes: of its tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    @property
    def element_bytes(self) -> int:
        """Returns the bytes of one element, over all tensors."""
        return sum(dtype.itemsize for dtype in self.dtypes)


def items_of_layers(
    specs: Sequence[LayerSpec], optimizer: Callable[[str], tuple[torch.dtype, ...]] = lambda _: MASTER_AND_MOMENTS
) -> dict[str, Item]:
    """Returns all parameters and buffers of a model in layers, and what the optimizer keeps, by name.

    Args:
        specs: of the layers.
        optimizer: gives what it keeps for each element of a parameter, by the parameter's name in the job.
    """
    found = {}
    for spec in specs:
        trained = {f"layers.{spec.index}.{name}" for name in spec.shapes}
        for path, item in tensor_items(spec).items():
            found[path] = item
            if path in trained:
                found[path + OPTIMIZER] = Item(path + OPTIMIZER, item.shape, optimizer(path))
    return found


def tensor_items(spec: LayerSpec) -> dict[str, Item]:
    """Returns the parameters and the buffers of a layer, by name in the job."""
    trained = {name: (shape, spec.dtypes[name]) for name, shape in spec.shapes.items()}
    return _items(spec.index, {**trained, **spec.untrained})


def untrained_items(specs: Sequence[LayerSpec]) -> dict[str, Item]:
    """Returns the frozen parameters and the buffers of a model in layers, by name in the job."""
    return {path: item for spec in specs for path, item in _items(spec.index, spec.untrained).items()}


def _items(index: int, tensors: Mapping[str, tuple[torch.Size, torch.dtype]]) -> dict[str, Item]:
    paths = {f"layers.{index}.{name}": kind for name, kind in tensors.items()}
    return {path: Item(path, tuple(shape), (dtype,)) for path, (shape, dtype) in paths.items()}


def holdings_of_plan(plan: Plan, specs: Sequence[LayerSpec]) -> dict[str, dict[str, tuple[Box, ...]]]:
    """Returns what each worker holds under a plan: its parts of its layers' tensors, and its optimizer shards."""
    layout = StateLayout(plan, specs)
    found: dict[str, dict[str, list[Box]]] = {worker: {} for worker in plan.workers}
    for spec, tp_groups in zip(specs, layout.holders, strict=True):
        for workers in tp_groups:
            for worker in workers:
                for name, box in layer_boxes(spec, workers, worker).items():
                    # It may be in several TP groups that hold the layer: what counts is what there is of each tensor.
                    boxes = found[worker].setdefault(f"layers.{spec.index}.{name}", [])
                    boxes += subtract_all([box], boxes)
    return {
        worker: {name: tuple(boxes) for name, boxes in items.items()} | optimizer_boxes(layout.pieces(worker))
        for worker, items in found.items()
    }


def layer_boxes(spec: LayerSpec, workers: Sequence[str], worker: str) -> dict[str, Box]:
    """Returns what a member of a tensor-parallel group holds of a layer, trained or not, by name in the layer."""
    return _boxes(spec, spec.shapes, workers, worker) | untrained_boxes(spec, workers, worker)


def untrained_boxes(spec: LayerSpec, workers: Sequence[str], worker: str) -> dict[str, Box]:
    """Returns what such a member holds of the layer's frozen parameters and buffers."""
    return _boxes(spec, {name: shape for name, (shape, _) in spec.untrained.items()}, workers, worker)


def _boxes(spec: LayerSpec, shapes: Mapping[str, torch.Size], workers: Sequence[str], worker: str) -> dict[str, Box]:
    rank, size = workers.index(worker), len(workers)
    found: dict[str, Box] = {}
    for name, shape in shapes.items():
        box = list(whole(shape))
        dim = spec.cuts.get(name)
        if dim is not None:
            part = shape[dim] // size  # the layout, or the layer when it was cut, has seen that it divides
            box[dim] = (rank * part, (rank + 1) * part)
        found[name] = tuple(box)
    return found


def optimizer_boxes(pieces: Sequence[ParameterPiece]) -> dict[str, tuple[Box, ...]]:
    """Returns what the owner of some pieces holds of the optimizer's state."""
    found: dict[str, list[Box]] = {}
    for piece in pieces:
        found.setdefault(piece.parameter + OPTIMIZER, []).extend(piece.boxes)
    return {name: tuple(boxes) for name, boxes in found.items()}


def box_of_placements(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> Box:
    """Returns what one rank of a device mesh holds of a DTensor, by its placements; may be empty.

    Also of FSDP2 over tensor parallelism, whose `_StridedShard` stands for "after `split_factor` parts of the mesh
    dimensions to the right".

    Args:
        shape: of the whole tensor.
        mesh: number of ranks along each dimension of the mesh.
        placements: one for each of them.
        coordinate: of the rank in the mesh.

    Raises:
        StateError: a placement that gives no box: a partial sum, or one that is not known.
    """
    box = list(whole(shape))
    for mesh_dim in _order(mesh, placements):
        placement = placements[mesh_dim]
        dim = placement.dim % len(shape)  # type: ignore[attr-defined]
        start, stop = box[dim]
        # As torch.chunk does: all parts but the last ones have the same size.
        size = -(-(stop - start) // mesh[mesh_dim])
        first = min(start + coordinate[mesh_dim] * size, stop)
        box[dim] = (first, min(first + size, stop))
    return tuple(box)


def _order(mesh: Sequence[int], placements: Sequence[Placement]) -> list[int]:
    """The mesh dimensions that cut something, in the order in which they do."""
    order: list[int] = []
    for mesh_dim in reversed(range(len(mesh))):
        placement = placements[mesh_dim]
        if placement.is_replicate():
            continue
        if not hasattr(placement, "dim"):
            raise StateError(f"a tensor placed as {placement} has no chunk; redistribute it before it is registered")
        place, factor = 0, getattr(placement, "split_factor", 1)
        while factor > 1:
            if place == len(order):
                raise StateError(f"{placement}: no {placement.split_factor} parts to its right in {tuple(placements)}")  # type: ignore[attr-defined]
            right = placements[order[place]]
            if right.dim == placement.dim:  # type: ignore[attr-defined]
                factor //= mesh[order[place]]
            place += 1
        order.insert(place, mesh_dim)
    return order
