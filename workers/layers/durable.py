"""The state of a model in layers as a part of a checkpoint, and back under any plan.

`model.layers.3.mlp.weight` is the master, `optimizer.layers.3.mlp.weight.exp_avg` what the optimizer keeps beside it.
The trained parameters follow from the masters. A frozen parameter or a buffer is itself there, as `model.…`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elaunch.workers.layers.change.held_state import forms_from_json, forms_to_json
from elaunch.workers.layers.executor import LayerKey
from elaunch.workers.layers.model import Layer
from elaunch.workers.layers.shards import Form, MakeOptimizer, MakeScheduler, Shards, chunks_of
from elaunch.workers.layers.untrained.places import once, places_of_layers, shared
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.checkpoint import CheckpointShard, ChunkedTensor, SavedCheckpoint
from elaunch.workers.state.chunks import Chunk, ChunkedState, copy_box
from elaunch.workers.state.layout import LayerSpec, ParameterPiece, StateLayout
from elaunch.workers.state.space import OPTIMIZER, untrained_items

KIND = "layers"


class RestoredLayers(NamedTuple):
    """What a worker reads of a checkpoint; what is trained in the layers still follows from the masters."""

    shards: Shards
    layers: dict[LayerKey, Layer]


MODEL, STATES = "model.", "optimizer."


def part_of(
    specs: Sequence[LayerSpec], shards: Shards, untrained: ChunkedState, settings: Mapping[str, Any]
) -> CheckpointShard:
    """Returns what a worker adds to a checkpoint; the tensors are the live ones.

    Args:
        specs: of all layers.
        shards: of this worker.
        untrained: the frozen parameters and buffers that it writes.
        settings: what must be the same when the job goes on from there.
    """
    shapes = _shapes(specs)
    forms = shards.forms()
    tensors = {}
    for item, chunks in shards.chunks().items():
        path = item.removesuffix(OPTIMIZER)
        for place, name in enumerate(_names(path, forms[path])):
            tensors[name] = ChunkedTensor(shapes[path], [(chunk.box, chunk.tensors[place]) for chunk in chunks])
    items = untrained_items(specs)
    for path, places in untrained.items():
        tensors[MODEL + path] = ChunkedTensor(items[path].shape, [(one.box, one.tensors[0]) for one in places])
    facts = {"forms": forms_to_json(forms), "schedule": shards.schedule(), "optimizer": shards.optimizer_name}
    return CheckpointShard(KIND, settings, tensors, facts)


def written_places(layout: StateLayout, worker: str, layers: Mapping[LayerKey, Layer]) -> dict[str, list[Chunk]]:
    """Returns the frozen parameters and buffers that a worker writes: of those who hold the same, they take turns."""
    found: dict[str, list[Chunk]] = {}
    for key, layer in layers.items():
        tp_groups = layout.holders[key[0]]
        if key[1] != key[0] % len(tp_groups):
            continue
        workers = tp_groups[key[1]]
        for path, chunks in places_of_layers(layout, worker, {key: layer}, trained=False).items():
            cut = path.removeprefix(f"layers.{key[0]}.") in layer.spec.cuts
            if cut or workers[key[0] % len(workers)] == worker:
                found[path] = chunks
    return found


def has_untrained(saved: SavedCheckpoint, specs: Sequence[LayerSpec]) -> bool:
    """Returns whether frozen parameters and buffers are in a checkpoint; older versions wrote none."""
    return not saved.shapes(MODEL).keys().isdisjoint(untrained_items(specs))


def read_untrained(saved: SavedCheckpoint, layout: StateLayout, worker: str, layers: Mapping[LayerKey, Layer]) -> int:
    """Fills the frozen parameters and buffers of a worker's layers; returns the bytes that were read.

    Raises:
        CheckpointDamaged: it is not what was written.
    """
    places = places_of_layers(layout, worker, layers, trained=False)
    filled = once(places)
    items = untrained_items([layer.spec for layer in layers.values()])
    n_bytes = saved.read(
        {
            MODEL + path: ChunkedTensor(items[path].shape, [(one.box, one.tensors[0]) for one in chunks])
            for path, chunks in filled.items()
        }
    )
    for copied in shared(places, filled).values():
        for source, to, box in copied:
            copy_box([source], [to], box)
    return n_bytes


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
    forms: dict[str, Form] = {}
    for one in saved.facts:
        forms |= forms_from_json(one["forms"])
    _check_shapes(saved, specs, forms)
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


def _check_shapes(saved: SavedCheckpoint, specs: Sequence[LayerSpec], trained: Collection[str]) -> None:
    """Checks that the checkpoint, of whose parameters those in `trained` were trained, is of these layers."""
    there, here, untrained = saved.shapes(MODEL), _shapes(specs), untrained_items(specs)
    saved.refuse(
        [f"{path} is trained there and frozen here" for path in there if path in trained and path in untrained]
    )
    saved.refuse([f"{path} is frozen there and trained here" for path in there if path in here and path not in trained])
    if has_untrained(saved, specs):
        here |= {path: item.shape for path, item in untrained.items()}
    saved.refuse(
        [
            f"{path} is {_shape_text(there.get(path))} there and {_shape_text(here.get(path))} here"
            for path in dict.fromkeys([*there, *here])
            if there.get(path) != here.get(path)
        ]
    )


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(list(shape))
