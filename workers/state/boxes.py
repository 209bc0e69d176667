"""Boxes of a tensor: a half-open interval of indices along each dimension. All of this is arithmetic.

Whatever a worker holds of a tensor is a few boxes: a part cut along dimensions is one, and an interval of the flattened
tensor at most 2n-1 (n dimensions): the rest of a row, whole rows, and so on inwards and out again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from elaunch.plan.shares import share

Box = tuple[tuple[int, int], ...]
"""(start, stop) along each dimension; a scalar has the box ()."""


def whole(shape: Sequence[int]) -> Box:
    """Returns all of a tensor."""
    return tuple((0, size) for size in shape)


def n_elements(box: Box) -> int:
    """Returns how many elements a box has."""
    return math.prod(stop - start for start, stop in box)


def intersect(one: Box, other: Box) -> Box | None:
    """Returns what two boxes of a tensor have in common; None if that is nothing."""
    found = []
    for (a, b), (c, d) in zip(one, other, strict=True):
        start, stop = a if a > c else c, b if b < d else d
        if start >= stop:
            return None
        found.append((start, stop))
    return tuple(found)


def subtract(box: Box, other: Box) -> list[Box]:
    """Returns what is left of `box` without `other`: disjoint boxes, at most two for each dimension."""
    common = intersect(box, other)
    if common is None:
        return [box] if n_elements(box) else []
    rest = []
    for dim, ((start, stop), (first, end)) in enumerate(zip(box, common, strict=True)):
        before, after = common[:dim], box[dim + 1 :]
        if start < first:
            rest.append((*before, (start, first), *after))
        if end < stop:
            rest.append((*before, (end, stop), *after))
    return rest


def subtract_all(boxes: Iterable[Box], others: Iterable[Box]) -> list[Box]:
    """Returns what is left of disjoint boxes without some others."""
    rest = [box for box in boxes if n_elements(box)]
    for other in others:
        rest = [part for box in rest for part in subtract(box, other)]
    return rest


def slabs(box: Box, parts: int) -> list[Box]:
    """Cuts `box` into at most `parts` slabs of about the same thickness, along the outermost dimension that allows it.

    Slabs along an outer dimension are long runs of memory. Where no dimension has so many indices, the longest is cut.
    """
    sizes = [stop - start for start, stop in box]
    if parts < 2 or max(sizes, default=1) < 2:
        return [box]
    dim = next((dim for dim, size in enumerate(sizes) if size >= parts), sizes.index(max(sizes)))
    parts, start = min(parts, sizes[dim]), box[dim][0]
    runs = (share(sizes[dim], parts, part) for part in range(parts))
    return [(*box[:dim], (start + run.start, start + run.stop), *box[dim + 1 :]) for run in runs]


def of_interval(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Returns elements [start, stop) of the flattened tensor (row-major), as disjoint boxes in their order."""
    if start >= stop:
        return []
    if not shape:
        return [()]
    inner = math.prod(shape[1:])
    (row, offset), (end_row, end_offset) = divmod(start, inner), divmod(stop, inner)
    if row == end_row:
        return [((row, row + 1), *box) for box in of_interval(shape[1:], offset, end_offset)]
    found = []
    if offset:
        found += [((row, row + 1), *box) for box in of_interval(shape[1:], offset, inner)]
        row += 1
    if row < end_row:
        found.append(((row, end_row), *whole(shape[1:])))
    if end_offset:
        found += [((end_row, end_row + 1), *box) for box in of_interval(shape[1:], 0, end_offset)]
    return found


def shift(box: Box, offsets: Sequence[int]) -> Box:
    """Returns the box moved by `offsets`."""
    return tuple((start + by, stop + by) for (start, stop), by in zip(box, offsets, strict=True))
