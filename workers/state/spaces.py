"""The tensors of a `TensorSpace` as parts of a checkpoint, and back, in any layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaunch.errors import StateError
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.checkpoint import CheckpointShard, ChunkedTensor, Read, Restored, SavedCheckpoint
from elaunch.workers.state.codec import dtype_of
from elaunch.workers.state.placement.layouts import AnyLayout
from elaunch.workers.state.space import Item
from elaunch.workers.state.tensors import TensorSpace

KIND = "tensors"


def part_of(space: TensorSpace, worker: str) -> CheckpointShard:
    """Returns what a worker adds to a checkpoint of a space; the tensors are the live ones.

    Of the members that hold the same part of a tensor, one writes it; they take turns.

    Raises:
        StateError: the space holds parts of several layouts, or nothing.
    """
    layout, items = space.layout, space.items
    if layout is None:
        if items:
            raise StateError("a move was interrupted and not done again; the state cannot be saved")
        return CheckpointShard(KIND, {}, {}, {})  # an idle member that has had no place yet
    parts = layout.parts(items)
    written: dict[str, ChunkedTensor] = {}
    described: list[Any] = []
    turns: Counter[tuple[str, ...]] = Counter()
    # Members of different pipeline stages know different tensors: those who hold the same part find the same turn.
    for name in sorted(items):
        holders: dict[tuple[Box, ...], list[str]] = {}
        for member in layout.members:
            if name in parts[member]:
                holders.setdefault(parts[member][name].boxes, []).append(member)
        for boxes, members in holders.items():
            if boxes:
                turns[tuple(members)] += 1
                if members[turns[tuple(members)] % len(members)] == worker:
                    written[name] = ChunkedTensor(items[name].shape, list(space.chunks(name)))
        if next(member for member in layout.members if name in parts[member]) == worker:
            described.append([name, items[name].shape, str(items[name].dtypes[0])])
    facts: dict[str, Any] = {"items": described} if described else {}
    if worker == layout.members[0]:
        facts["values"] = space.values
    return CheckpointShard(KIND, {}, written, facts)


@dataclass(frozen=True)
class SpaceState:
    """What one worker reads of a checkpoint of a space.

    Attributes:
        items: all tensors of the job, by name.
        values: what is no tensor.
        tensors: this worker's parts, in boxes of the whole; those without elements are left out.
    """

    items: Mapping[str, Item]
    values: Mapping[str, Any]
    tensors: Mapping[str, Sequence[tuple[Box, Tensor]]]


class SpaceSource:
    """A checkpoint from which a space reads instead of from its peers.

    Args:
        restore: finds a checkpoint that all members can read, with the function that reads this worker's part.

    Attributes:
        found: what was read.
    """

    def __init__(self, restore: Callable[[Read[SpaceState]], Restored[SpaceState]]) -> None:
        self._restore = restore
        self.found: Restored[SpaceState] | None = None

    def read(self, layout: AnyLayout, worker: str, device: torch.device, known: Sequence[Item]) -> Restored[SpaceState]:
        """Reads this worker's parts of all tensors. All members of the job call it.

        Args:
            layout: by which they are wanted.
            worker: this one; it reads nothing if it has no place in the layout.
            device: of the tensors.
            known: tensors that the job has begun with; the checkpoint must have them.

        Raises:
            StateError: the checkpoint is of another job, or none is whole.
            StepInterrupted: a link broke, or the membership changes.
        """
        self.found = self._restore(lambda saved: _read(saved, layout, worker, device, known))
        return self.found


def _read(
    saved: SavedCheckpoint, layout: AnyLayout, worker: str, device: torch.device, known: Sequence[Item]
) -> tuple[SpaceState, int]:
    saved.check(KIND, {})
    items = {
        name: Item(name, tuple(shape), (dtype_of(dtype),))
        for facts in saved.facts
        for name, shape, dtype in facts.get("items", ())
    }
    values = next(facts["values"] for facts in saved.facts if "values" in facts)
    saved.refuse([text for item in known if (text := _difference(items.get(item.name), item))])
    chunks = {
        name: [
            (box, torch.empty([stop - start for start, stop in box], dtype=items[name].dtypes[0])) for box in part.boxes
        ]
        for name, part in layout.parts(items).get(worker, {}).items()
        if part.boxes
    }
    read_bytes = saved.read({name: ChunkedTensor(items[name].shape, of_item) for name, of_item in chunks.items()})
    tensors = {name: [(box, tensor.to(device)) for box, tensor in of_item] for name, of_item in chunks.items()}
    return SpaceState(items, values, tensors), read_bytes


def _difference(there: Item | None, here: Item) -> str:
    """Returns how a tensor of the checkpoint differs from one of the job; empty if it does not."""
    if there is None:
        return f"{here.name} is missing there"
    if (there.shape, there.dtypes) != (here.shape, here.dtypes):
        return (
            f"{here.name} is {there.dtypes[0]} {list(there.shape)} there and {here.dtypes[0]} {list(here.shape)} here"
        )
    return ""
