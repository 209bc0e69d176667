"""Sums along a tree: the same whoever adds what."""

from __future__ import annotations

import ast
import random

from hypothesis import given
from hypothesis import strategies as st

from elaunch.plan.sums import Node, TreeSum, nodes


def text(one: str, other: str) -> str:
    """An addition that shows the order of all additions."""
    return f"({one}+{other})"


def tree_of(n_leaves: int, members: list[int]) -> TreeSum[str]:
    tree = TreeSum(n_leaves, text)
    for leaf in members:
        tree.put(Node(0, leaf), str(leaf))
    return tree


def balanced(first: int, size: int, n_leaves: int) -> str:
    """The twin: halves, recursively, without what is beyond the end."""
    if size == 1:
        return str(first)
    half = size // 2
    left = balanced(first, half, n_leaves)
    return left if first + half >= n_leaves else f"({left}+{balanced(first + half, half, n_leaves)})"


def leaves(node: Node, n_leaves: int) -> range:
    """What is below a node."""
    return range(node.place << node.level, min((node.place + 1) << node.level, n_leaves))


def test_eight_terms_are_added_in_pairs() -> None:
    assert tree_of(8, list(range(8))).total() == "(((0+1)+(2+3))+((4+5)+(6+7)))"


def test_a_run_of_terms_leaves_two_sums_for_each_doubling_at_most() -> None:
    assert [node for node, _ in tree_of(16, list(range(1, 15))).items()] == [
        Node(0, 1),
        Node(1, 1),
        Node(2, 1),
        Node(2, 2),
        Node(1, 6),
        Node(0, 14),
    ]


def test_nothing_has_no_sum() -> None:
    assert TreeSum(4, text).total() is None


@given(st.integers(1, 40), st.integers(1, 6), st.randoms(use_true_random=False))
def test_the_additions_are_the_same_for_every_division(n_leaves: int, n_members: int, draw: random.Random) -> None:
    owner = [draw.randrange(n_members) for _ in range(n_leaves)]
    whole = TreeSum(n_leaves, text)
    order = list(range(n_members))
    draw.shuffle(order)
    for member in order:
        mine = [leaf for leaf in range(n_leaves) if owner[leaf] == member]
        draw.shuffle(mine)
        part = tree_of(n_leaves, mine)
        assert nodes(n_leaves, mine) == tuple(node for node, _ in part.items())
        assert sorted(leaf for node, _ in part.items() for leaf in leaves(node, n_leaves)) == sorted(mine)
        for node, value in part.items():
            whole.put(node, value)
    size = 1
    while size < n_leaves:
        size *= 2
    # Additions commute bit by bit, so the sides of a pair may change places.
    assert normal(whole.total()) == normal(balanced(0, size, n_leaves))


@given(st.integers(1, 30), st.sets(st.integers(0, 29)))
def test_terms_that_are_missing_are_left_out(n_leaves: int, members: set[int]) -> None:
    have = [leaf for leaf in members if leaf < n_leaves]
    total = tree_of(n_leaves, have).total()
    found = [] if total is None else [int(one) for one in total.replace("(", "").replace(")", "").split("+")]
    assert sorted(found) == sorted(have)


def normal(total: str | None) -> object:
    assert total is not None
    return _sorted(ast.literal_eval(total.replace("+", ",")))


def _sorted(pair: object) -> object:
    return tuple(sorted((_sorted(side) for side in pair), key=str)) if isinstance(pair, tuple) else pair
