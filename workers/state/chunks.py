"""Boxes of items in memory: what a worker really holds of the space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from elaunch.workers.state.boxes import Box, intersect
from elaunch.workers.state.space import Holdings


@dataclass(frozen=True, eq=False)
class Chunk:
    """A box of an item: one tensor of the box's shape for each tensor of the item; views of larger ones will do."""

    box: Box
    tensors: tuple[Tensor, ...]

    def part(self, box: Box) -> tuple[Tensor, ...]:
        """Returns views of a box inside this one."""
        return tuple(self.view(box, number) for number in range(len(self.tensors)))

    def view(self, box: Box, number: int) -> Tensor:
        """Returns the same of one tensor."""
        tensor = self.tensors[number]
        if box == self.box:
            return tensor
        return tensor[
            tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(box, self.box, strict=True))
        ]


ChunkedState = Mapping[str, Sequence[Chunk]]
"""By name of an item, the chunks of it that a worker holds; no two have an element in common."""


def holdings_of(state: ChunkedState) -> Holdings:
    """Returns the boxes of a state."""
    return {name: tuple(chunk.box for chunk in chunks) for name, chunks in state.items()}


def copy_box(source: Sequence[Chunk], to: Sequence[Chunk], box: Box) -> None:
    """Copies what of a box is in both; a chunk that is among both stays as it is."""
    for old, part in covering(source, box):
        for new, common in covering(to, part):
            if new is not old:
                for there, here in zip(new.part(common), old.part(common), strict=True):
                    there.copy_(here)


def covering(chunks: Sequence[Chunk], box: Box) -> Iterator[tuple[Chunk, Box]]:
    """Returns the chunks that have some of a box, each with what it has."""
    for chunk in chunks:
        common = intersect(chunk.box, box)
        if common is not None:
            yield chunk, common
