"""The state of a model in layers as a part of a checkpoint, and back under any plan.

`model.layers.3.mlp.weight` is the master, `optimizer.layers.3.mlp.weight.exp_avg` what the optimizer keeps beside it.
The parameters follow from the masters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from elaunch.workers.layers.change.held_state import forms_from_json, forms_to_json
from elaunch.workers.layers.shards import Form, MakeOptimizer, MakeScheduler, Shards, chunks_of
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.checkpoint import CheckpointShard, ChunkedTensor, SavedCheckpoint
from elaunch.workers.state.layout import LayerSpec, ParameterPiece, StateLayout
from elaunch.workers.state.space import OPTIMIZER

KIND = "layers"

MODEL, STATES = "model.", "optimizer."


def part_of(specs: Sequence[LayerSpec], shards: Shards, settings: Mapping[str, Any]) -> CheckpointShard:
    """Returns what a worker adds to a checkpoint; the tensors are the live ones."""
    shapes = _shapes(specs)
    forms = shards.forms()
    tensors = {}
    for item, chunks in shards.chunks().items():
        path = item.removesuffix(OPTIMIZER)
        for place, name in enumerate(_names(path, forms[path])):
            tensors[name] = ChunkedTensor(shapes[path], [(chunk.box, chunk.tensors[place]) for chunk in chunks])
    facts = {"forms": forms_to_json(forms), "schedule": shards.schedule(), "optimizer": shards.optimizer_name}
    return CheckpointShard(KIND, settings, tensors, facts)


def shards_of(
    saved: SavedCheckpoint,
    specs: Sequence[LayerSpec],
    layout: StateLayout,
    pieces: Sequence[ParameterPiece],
    settings: Mapping[str, Any],
    device: torch.device,
    make_optimizer: MakeOptimizer,
    make_scheduler: MakeScheduler | None,
) -> tuple[Shards, int]:
    """Returns masters and states of some pieces from a checkpoint, and the bytes that were read.

    Raises:
        CheckpointDamaged: it is not what was written.
        StateError: it is of another job.
    """
    saved.check(KIND, settings)
    _check_shapes(saved, specs)
    forms: dict[str, Form] = {}
    for one in saved.facts:
        forms |= forms_from_json(one["forms"])
    schedule = next((one["schedule"] for one in saved.facts if one["schedule"] is not None), None)
    shapes = _shapes(specs)
    boxes: dict[str, list[tuple[Box, Tensor]]] = {}
    tensors: list[tuple[Tensor, ...]] = []
    for piece in pieces:
        form = forms[piece.parameter]
        dtypes = (layout.sum_dtype(piece.shard.layer), *form.dtypes)
        tensors.append(tuple(torch.empty(piece.elements, dtype=dtype, device=device) for dtype in dtypes))
        for chunk in chunks_of(piece, tensors[-1]):
            for name, part in zip(_names(piece.parameter, form), chunk.tensors, strict=True):
                boxes.setdefault(name, []).append((chunk.box, part))
    paths = {name: piece.parameter for piece in pieces for name in _names(piece.parameter, forms[piece.parameter])}
    read_bytes = saved.read({name: ChunkedTensor(shapes[paths[name]], parts) for name, parts in boxes.items()})
    shards = Shards(pieces, tensors, make_optimizer, make_scheduler, forms, schedule)
    kinds = {one["optimizer"] for one in saved.facts if one["optimizer"]}
    if shards.optimizer_name and kinds and shards.optimizer_name not in kinds:
        saved.refuse([f"the optimizer is {', '.join(sorted(kinds))} there and {shards.optimizer_name} here"])
    return shards, read_bytes


def _names(path: str, form: Form) -> list[str]:
    """Of the tensors of a parameter, the master first."""
    return [MODEL + path, *(f"{STATES}{path}.{key}" for key, _ in form.tensors)]


def _shapes(specs: Sequence[LayerSpec]) -> dict[str, tuple[int, ...]]:
    return {f"layers.{spec.index}.{name}": tuple(shape) for spec in specs for name, shape in spec.shapes.items()}


def _check_shapes(saved: SavedCheckpoint, specs: Sequence[LayerSpec]) -> None:
    there, here = saved.shapes(MODEL), _shapes(specs)
    saved.refuse(
        [
            f"{path} is {_shape_text(there.get(path))} there and {_shape_text(here.get(path))} here"
            for path in dict.fromkeys([*there, *here])
            if there.get(path) != here.get(path)
        ]
    )


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
