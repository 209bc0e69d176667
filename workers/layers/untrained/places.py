"""Which tensors of its layers a worker holds under a plan, and where they are in its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from elaunch.workers.layers.executor import LayerKey
from elaunch.workers.layers.model import Layer
from elaunch.workers.state.boxes import Box, subtract_all
from elaunch.workers.state.chunks import Chunk, covering
from elaunch.workers.state.layout import LayerSpec, StateLayout
from elaunch.workers.state.space import layer_boxes, untrained_boxes

BoxesOf = Callable[[LayerSpec, Sequence[str], str], dict[str, Box]]


def boxes_of_layers(
    layout: StateLayout, worker: str, keys: Iterable[LayerKey], specs: Sequence[LayerSpec], trained: bool
) -> dict[str, tuple[Box, ...]]:
    """Returns what a worker holds of some of its layers: frozen parameters, buffers and, if asked, what is trained."""
    boxes_of: BoxesOf = layer_boxes if trained else untrained_boxes
    found: dict[str, tuple[Box, ...]] = {}
    for index, replica in keys:
        for name, box in boxes_of(specs[index], layout.holders[index][replica], worker).items():
            path = f"layers.{index}.{name}"
            known = found.get(path, ())
            found[path] = (*known, *subtract_all([box], known))
    return found


def places_of_layers(
    layout: StateLayout, worker: str, layers: Mapping[LayerKey, Layer], trained: bool
) -> dict[str, list[Chunk]]:
    """Returns the same in memory. What a worker has twice, in two tensor-parallel groups, is there twice."""
    boxes_of: BoxesOf = layer_boxes if trained else untrained_boxes
    found: dict[str, list[Chunk]] = {}
    for (index, replica), layer in layers.items():
        boxes = boxes_of(layer.spec, layout.holders[index][replica], worker)
        tensors: dict[str, Tensor] = (layer.tensors() if trained else layer.untrained()) if boxes else {}
        for name, box in boxes.items():
            found.setdefault(f"layers.{index}.{name}", []).append(Chunk(box, (tensors[name],)))
    return found


def once(places: Mapping[str, Sequence[Chunk]]) -> dict[str, list[Chunk]]:
    """Returns places of which no two have an element in common; of what is there twice, the first."""
    found: dict[str, list[Chunk]] = {}
    for path, chunks in places.items():
        known = found.setdefault(path, [])
        for chunk in chunks:
            parts = subtract_all([chunk.box], [one.box for one in known])
            known += [Chunk(part, chunk.part(part)) for part in parts]
    return found


def shared(
    places: Mapping[str, Sequence[Chunk]], filled: Mapping[str, Sequence[Chunk]]
) -> dict[str, list[tuple[Chunk, Chunk, Box]]]:
    """Returns what is still to be copied once `filled` has its values: from there, to this place, this box."""
    found: dict[str, list[tuple[Chunk, Chunk, Box]]] = {}
    for path, chunks in places.items():
        for to in chunks:
            for source, common in covering(filled.get(path, ()), to.box):
                if source.part(common)[0].data_ptr() != to.part(common)[0].data_ptr():
                    found.setdefault(path, []).append((source, to, common))
    return found
