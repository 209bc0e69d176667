"""Boxes of items in memory: what a worker really holds of the space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from elaunch.workers.state.boxes import Box, intersect
from elaunch.workers.state.space import Holdings


@dataclass(frozen=True, eq=False)
class Region:
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


State = Mapping[str, Sequence[Region]]
"""By name of an item, the regions of it that a worker holds; no two have an element in common."""


def holdings_of(state: State) -> Holdings:
    """Returns the boxes of a state."""
    return {name: tuple(region.box for region in regions) for name, regions in state.items()}


def copy_box(source: Sequence[Region], to: Sequence[Region], box: Box) -> None:
    """Copies what of a box is in both; a region that is among both stays as it is."""
    for old, part in covering(source, box):
        for new, common in covering(to, part):
            if new is not old:
                for there, here in zip(new.part(common), old.part(common), strict=True):
                    there.copy_(here)


def covering(regions: Sequence[Region], box: Box) -> Iterator[tuple[Region, Box]]:
    """Returns the regions that have some of a box, each with what it has."""
    for region in regions:
        common = intersect(region.box, box)
        if common is not None:
            yield region, common
