"""Sums whose rounding does not depend on who adds what.

The terms of a sum are the leaves of one fixed binary tree over their numbers. Whoever holds some of the terms adds
those that are siblings, then the sums that are, and so on; what is left is at most about two partial sums per doubling
for each run of neighbouring leaves. Putting the partial sums of all together makes the same additions as a single
holder makes, whatever the division, so the total is bitwise the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """The sum of the leaves [place * 2**level, (place + 1) * 2**level)."""

    level: int
    place: int

    @property
    def parent(self) -> Node:
        """Returns the node that sums this one and its sibling."""
        return Node(self.level + 1, self.place >> 1)

    @property
    def sibling(self) -> Node:
        """Returns the node that has the same parent."""
        return Node(self.level, self.place ^ 1)


class TreeSum(Generic[T]):
    """Partial sums of some of the leaves 0..n_leaves-1.

    Args:
        n_leaves: of the whole tree, of which others may have a part.
        add: gives the sum of two values; it may change the first one and return it.
    """

    def __init__(self, n_leaves: int, add: Callable[[T, T], T]) -> None:
        self._n_leaves = n_leaves
        self._add = add
        self._values: dict[Node, T] = {}

    def put(self, node: Node, value: T) -> None:
        """Takes the sum of the leaves below `node`, none of which it has yet; `Node(0, i)` is leaf i itself."""
        while node != self._root:
            sibling = node.sibling
            if sibling.place << node.level < self._n_leaves:
                if sibling not in self._values:
                    break
                value = self._add(self._values.pop(sibling), value)
            node = node.parent
        self._values[node] = value

    def __len__(self) -> int:
        return len(self._values)

    def items(self) -> list[tuple[Node, T]]:
        """Returns the partial sums, in the order of their leaves."""
        return sorted(self._values.items(), key=lambda item: item[0].place << item[0].level)

    def clear(self) -> None:
        """Forgets all sums, for the next step."""
        self._values.clear()

    def total(self) -> T | None:
        """Returns the sum of all leaves that were put; None without any. Callable only once if `add` changes values."""
        return self._sum(self._root)

    @property
    def _root(self) -> Node:
        return Node(max(self._n_leaves - 1, 0).bit_length(), 0)

    def _sum(self, node: Node) -> T | None:
        if node in self._values:
            return self._values[node]
        if node.level == 0 or node.place << node.level >= self._n_leaves:
            return None
        left = self._sum(Node(node.level - 1, 2 * node.place))
        right = self._sum(Node(node.level - 1, 2 * node.place + 1))
        if left is None or right is None:
            return right if left is None else left
        return self._add(left, right)


def nodes(n_leaves: int, leaves: Iterable[int]) -> tuple[Node, ...]:
    """Returns what `TreeSum.items` has left of these leaves, without adding anything."""

    def nothing(one: None, other: None) -> None:
        return None

    tree = TreeSum[None](n_leaves, nothing)
    for leaf in leaves:
        tree.put(Node(0, leaf), None)
    return tuple(node for node, _ in tree.items())
