"""The state of bound objects as a manifest and this worker's tensors, with DTensors as parts of whole tensors."""

from __future__ import annotations

import itertools
import sys
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaunch.workers.reentry.tensor_shard import TensorShard
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.codec import VERSION, Encoder, Manifest, TensorPlaces, Where
from elaunch.workers.state.space import box_of_placements


@dataclass(frozen=True, eq=False)
class Description:
    """The state of some objects.

    Attributes:
        manifest: what is said of it, the same on all members.
        tensors: this worker's parts, the live ones, in the order of the manifest.
        boxes: by place in it, the parts that are not whole tensors.
        form: the same object for two descriptions in which the same tensors lie at the same places.
    """

    manifest: Manifest
    tensors: list[Tensor]
    boxes: dict[int, Box]
    form: object


@dataclass(frozen=True, eq=False)
class Stretch:
    """What an encoder found from one place of its list to another.

    Attributes:
        start: the place of the first tensor.
        tensors, specs, boxes: those of the encoder.
        places: where the tensors lie; None: the list has a copy of one.
        known: the tensors that it lists once, if they appear again.
    """

    start: int
    tensors: list[Tensor]
    specs: list[dict[str, Any]]
    boxes: dict[int, Box]
    places: list[Where | None]
    known: dict[Where, int]

    def is_like(self, other: Stretch) -> bool:
        """Returns whether both are of the same tensors at the same places."""
        return (self.start, self.places, self.known, self.boxes, self.specs) == (
            other.start,
            other.places,
            other.known,
            other.boxes,
            other.specs,
        ) and None not in self.places


class ShardEncoder(Encoder):
    """Describes values, and of a DTensor the whole tensor, while the list has this worker's part.

    Attributes:
        boxes: by place in the list, the parts that are not whole tensors.
    """

    def __init__(self, before: TensorPlaces | None = None) -> None:
        super().__init__(before)
        self.boxes: dict[int, Box] = {}
        self._cut: dict[tuple[Any, ...], Box] = {}
        self._adopted: list[Stretch] = []  # whose tensors are in the list, and not known yet

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Returns what stands for a value in a manifest."""
        if type(value) in _WITHOUT_PARTS or not is_dtensor(value):
            return super().encode(value, path, depth)
        # Of engines' shards, two may lie at the same place on one worker and not on another: these have names instead.
        place = self.add(value.to_local(), path, tied=not isinstance(value, TensorShard))
        self.boxes[place] = self._box(value)
        spec, shape = self.specs[place], list(value.shape)
        if spec["shape"] != shape or "strides" in spec:  # else it is from before, and shared
            self.specs[place] = {key: item for key, item in spec.items() if key != "strides"} | {"shape": shape}
        return {"k": "tensor", "i": place}

    def add(self, tensor: Tensor, path: str, *, tied: bool = True) -> int:
        """Takes a tensor into the list, as `Encoder.add` does."""
        while self._adopted:
            self._known.update(self._adopted.pop(0).known)
        return super().add(tensor, path, tied=tied)

    def since(self, start: int) -> Stretch:
        """Returns what has been found from a place in the list on."""
        newest = itertools.takewhile(lambda item: item[1] >= start, reversed(self._known.items()))
        boxes = {place: box for place, box in self.boxes.items() if place >= start}
        return Stretch(
            start, self.tensors[start:], self.specs[start:], boxes, self._places[start:], dict(reversed(list(newest)))
        )

    def adopt(self, stretch: Stretch) -> None:
        """Takes in what another encoder found after the same tensors, if that is as it was."""
        self.tensors += stretch.tensors
        self.specs += stretch.specs
        self.boxes |= stretch.boxes
        self._places += stretch.places
        self._adopted.append(stretch)

    def _box(self, value: Any) -> Box:
        if isinstance(value, TensorShard):
            return value.box
        # An optimizer keeps several tensors that are cut like their parameter; the mesh lives as long as they do.
        cut = tuple(value.shape), id(value.device_mesh), value.placements
        if cut not in self._cut:
            self._cut[cut] = box_of(value)
        return self._cut[cut]


_WITHOUT_PARTS = frozenset((Tensor, torch.nn.Parameter, dict, OrderedDict, list, int, float, bool, str, type(None)))


def is_dtensor(value: Any) -> bool:
    """Returns whether a value is a part of a tensor, as DTensors are, without importing what defines these."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, TensorShard) or (module is not None and isinstance(value, module.DTensor))


def is_sharded(thing: Any) -> bool:
    """Returns whether an object has tensors of which this worker has a part: parameters, or others of its state."""
    if isinstance(thing, torch.nn.Module):
        return any(_is_cut(one) for one in thing.parameters())
    if isinstance(thing, torch.optim.Optimizer):
        return any(_is_cut(one) for group in thing.param_groups for one in group["params"])
    return _has_cut(thing.state_dict())


def _has_cut(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_cut, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_cut, value))
    return _is_cut(value)


def _is_cut(value: Any) -> bool:
    if isinstance(value, TensorShard):
        return value.is_cut
    return is_dtensor(value) and not all(placement.is_replicate() for placement in value.placements)


def box_of(tensor: Any) -> Box:
    """Returns which part of a DTensor this worker has; it may be empty.

    Raises:
        StateError: it has a placement that gives no box, such as a partial sum.
    """
    if isinstance(tensor, TensorShard):
        return tensor.box
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tuple((0, 0) for _ in range(tensor.dim()))
    box: Box = box_of_placements(tuple(tensor.shape), tuple(mesh.shape), tensor.placements, coordinate)
    return box


@torch.no_grad()
def describe_shards(objects: Mapping[str, Any]) -> Description:
    """Returns the state of objects with `state_dict`, by name.

    Raises:
        StateError: an object has no state_dict, or one with a value that cannot be described; names the path.
    """
    encoder = ShardEncoder()
    described = {name: encoder.encode(state_of(thing), name) for name, thing in objects.items()}
    return Description(manifest_of(described, encoder), encoder.tensors, encoder.boxes, object())


def manifest_of(described: Mapping[str, Any], encoder: ShardEncoder) -> Manifest:
    """Returns the manifest of objects that an encoder has described, by name."""
    return {"version": VERSION, "objects": described, "tensors": encoder.specs}


def state_of(thing: Any) -> Any:
    """Returns the state of an object; parameters as they are, since to detach a DTensor takes long."""
    if isinstance(thing, torch.nn.Module) and type(thing).state_dict is torch.nn.Module.state_dict:
        return thing.state_dict(keep_vars=True)
    return thing.state_dict()


def local_part(tensor: Any) -> Tensor:
    """Returns what this worker has of a tensor; all of it, unless it is a part."""
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local
