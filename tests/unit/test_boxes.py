"""Box arithmetic against sets of elements."""

from __future__ import annotations

import math
from itertools import combinations, product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, DrawFn

from elaunch.workers.state.boxes import (
    Box,
    intersect,
    n_elements,
    of_interval,
    shift,
    slabs,
    subtract,
    subtract_all,
    whole,
)

Elements = set[tuple[int, ...]]


def elements(box: Box) -> Elements:
    return set(product(*(range(start, stop) for start, stop in box)))


def disjoint(boxes: list[Box]) -> bool:
    return all(elements(one).isdisjoint(elements(other)) for one, other in combinations(boxes, 2))


def together(boxes: list[Box]) -> Elements:
    return set().union(*map(elements, boxes))


shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw: DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in shape]
    return tuple((start, stop) for start, stop in ends)


@given(st.data())
def test_intersection_and_difference_are_those_of_the_elements(data: DataObject) -> None:
    shape = data.draw(shapes)
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    common, rest = intersect(one, other), subtract(one, other)
    assert elements(one) & elements(other) == (set() if common is None else elements(common))
    assert common is None or n_elements(common)
    assert together(rest) == elements(one) - elements(other)
    assert disjoint(rest)
    assert all(map(n_elements, rest))
    assert len(rest) <= max(1, 2 * len(shape))


@given(st.data())
def test_what_is_left_of_several_boxes(data: DataObject) -> None:
    shape = data.draw(shapes)
    others = data.draw(st.lists(boxes(shape), max_size=4))
    rest = subtract_all([whole(shape)], others)
    assert together(rest) == elements(whole(shape)) - together(others)
    assert disjoint(rest)


@given(st.data())
def test_an_interval_of_the_flat_tensor_is_a_few_boxes_in_order(data: DataObject) -> None:
    shape = data.draw(shapes)
    start, stop = sorted(data.draw(st.integers(0, math.prod(shape))) for _ in range(2))
    found = of_interval(shape, start, stop)
    numbers = np.arange(math.prod(shape)).reshape(shape)
    parts = [numbers[tuple(slice(*edge) for edge in box)].reshape(-1) for box in found]
    assert [int(number) for part in parts for number in part] == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)
    assert all(map(n_elements, found))


@given(st.data(), st.integers(1, 7))
def test_slabs_are_about_even_and_make_up_the_box(data: DataObject, parts: int) -> None:
    shape = data.draw(shapes)
    box = data.draw(boxes(shape))
    found = slabs(box, parts)
    assert together(found) == elements(box)
    assert disjoint(found)
    assert 1 <= len(found) <= parts
    assert all(map(n_elements, found)) == bool(n_elements(box))
    thickness = [{stop - start for start, stop in edges} for edges in zip(*found, strict=True)]
    assert all(max(several) - min(several) <= 1 for several in thickness)
    assert len(found) == min(parts, max((stop - start for start, stop in box), default=1)) or not n_elements(box)


def test_a_box_is_moved() -> None:
    assert shift(((0, 2), (1, 3)), (0, 4)) == ((0, 2), (5, 7))
    assert shift((), ()) == ()
    assert n_elements(()) == 1
