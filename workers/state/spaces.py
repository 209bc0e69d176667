"""The tensors of a `TensorSpace` as parts of a checkpoint, and back, in any layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elaunch.errors import StateError
from elaunch.workers.state.boxes import Box, n_elements
from elaunch.workers.state.checkpoint import CheckpointShard, ChunkedTensor, Read, Restored, SavedCheckpoint
from elaunch.workers.state.codec import dtype_of
from elaunch.workers.state.space import Item
from elaunch.workers.state.tensors import Layout, TensorSpace

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
    holdings = layout.holdings(items)
    written, turn = {}, 0
    for name, item in items.items():
        holders: dict[Box, list[str]] = {}
        for member in layout.members:
            holders.setdefault(holdings[member][name], []).append(member)
        for box, members in holders.items():
            if n_elements(box):
                turn += 1
                if members[turn % len(members)] == worker:
                    written[name] = ChunkedTensor(item.shape, [(box, space.local(name))])
    facts = {}
    if worker == layout.members[0]:
        facts = {"items": [[one.name, one.shape, str(one.dtypes[0])] for one in items.values()], "values": space.values}
    return CheckpointShard(KIND, {}, written, facts)


@dataclass(frozen=True)
class SpaceState:
    """What one worker reads of a checkpoint of a space.

    Attributes:
        items: all tensors of the job, by name.
        values: what is no tensor.
        tensors: this worker's parts, with their boxes; those without elements are left out.
    """

    items: Mapping[str, Item]
    values: Mapping[str, Any]
    tensors: Mapping[str, tuple[Box, Tensor]]


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

    def read(self, layout: Layout, worker: str, device: torch.device, known: Sequence[Item]) -> Restored[SpaceState]:
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
    saved: SavedCheckpoint, layout: Layout, worker: str, device: torch.device, known: Sequence[Item]
) -> tuple[SpaceState, int]:
    saved.check(KIND, {})
    told = next(facts for facts in saved.facts if facts)
    items = {name: Item(name, tuple(shape), (dtype_of(dtype),)) for name, shape, dtype in told["items"]}
    saved.refuse([text for item in known if (text := _difference(items.get(item.name), item))])
    boxes = layout.holdings(items).get(worker, {})
    parts = {
        name: (box, torch.empty([stop - start for start, stop in box], dtype=items[name].dtypes[0]))
        for name, box in boxes.items()
        if n_elements(box)
    }
    read_bytes = saved.read({name: ChunkedTensor(items[name].shape, [part]) for name, part in parts.items()})
    tensors = {name: (box, tensor.to(device)) for name, (box, tensor) in parts.items()}
    return SpaceState(items, told["values"], tensors), read_bytes


def _difference(there: Item | None, here: Item) -> str:
    """Returns how a tensor of the checkpoint differs from one of the job; empty if it does not."""
    if there is None:
        return f"{here.name} is missing there"
    if (there.shape, there.dtypes) != (here.shape, here.dtypes):
        return (
            f"{here.name} is {there.dtypes[0]} {list(there.shape)} there and {here.dtypes[0]} {list(here.shape)} here"
        )
    return ""
