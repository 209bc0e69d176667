"""A backward in two parts: the gradient of the input, for which others wait, and those of the parameters, later.

In the graph of a piece, the ways to its parameters leave the way to its input at some operations. The gradients of
their outputs are kept, and the rest is done from there. (So does torch.distributed.pipelining, whose import takes as
long as a recovery may.) Whether that gives the same as one backward cannot be told from the graph alone: a hook of the
script on a tensor may run twice, for one. So the first time both are done, and a piece of which the results differ is
not split. Nor is one in which a parameter does not meet the way to the input, or meets it in a function of the script
or the compiler, or whose layers share a parameter.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.graph import Node as GraphNode

from elaunch.workers.layers import tensor_parallel
from elaunch.workers.layers.model import Layer
from elaunch.workers.layers.timing import Span

ROUNDING = 0.01
"""So far may the results be apart, relative to their norm, where rounding may differ."""

_COLLECTIVES = ("_CopyToGroupBackward", "_ReduceBackward")

_Users = Mapping[GraphNode, Sequence[GraphNode]]
"""Of each node of a graph those that lead to it, so to say its consumers in the forward."""


@dataclass(eq=False)
class _Group:
    """Parameters of a layer that are reached from the same operations.

    Attributes:
        places: of the parameters in their layer.
        nodes: where gradients of parameters are summed up.
        meets: the operations on the way to the input.
        grads: of the outputs of each of `meets`, once they are known.
    """

    places: list[int]
    nodes: list[GraphNode]
    meets: list[GraphNode]
    grads: list[tuple[Tensor | None, ...] | None] = field(default_factory=list)


_Groups = list[_Group]

Ways = list[_Groups]
"""Those of each layer of a piece."""


@dataclass(eq=False)
class DeferredWeights:
    """The gradients of the parameters of a piece, of one micro-batch, which are still to be computed."""

    piece: Sequence[Layer]
    groups: Ways
    spans: Sequence[Span]

    def layers(self) -> Iterator[tuple[Layer, list[Tensor]]]:
        """Yields each layer with the gradients of its `parameters`, the last layer first. Callable once."""
        for place in reversed(range(len(self.piece))):
            layer, groups = self.piece[place], self.groups[place]
            if not self.spans:
                yield layer, weight_gradients(layer, groups)
                continue
            span = self.spans[place]
            span.kept_for_weights(_kept_bytes(groups))
            span.begin("W")
            grads = weight_gradients(layer, groups)
            span.end("W")
            yield layer, grads


class Splitter:
    """Splits the backward of layers that are differentiated at once.

    Args:
        piece: the layers.
        exact: see `Chain`.

    Attributes:
        splits: None: it has not been tried.
    """

    def __init__(self, piece: Sequence[Layer], exact: bool) -> None:
        self._piece, self._exact = piece, exact
        has_parameters = any(layer.parameters for layer in piece)
        self.splits: bool | None = None if has_parameters and not piece[0].recompute else False

    def ways(self, y: Tensor, leaf: Tensor) -> Ways | None:
        """Returns where the gradients of the parameters come from; None if they do not all come from the way from the
        output to the input, or those of several layers from one place, or some from a function of the script or of the
        compiler, which would compute all of its gradients twice.
        """
        if y.grad_fn is None or not leaf.requires_grad:
            return None
        users = _users(y.grad_fn)
        start = get_gradient_edge(leaf).node
        if start not in users:
            return None
        on_way = _closure([start], users)
        owner: dict[GraphNode, int] = {}
        found: list[_Groups] = [[] for _ in self._piece]
        for number, layer in enumerate(self._piece):
            for place, parameter in enumerate(layer.parameters.values()):
                node = get_gradient_edge(parameter).node
                if node not in users:
                    continue
                meets = [one for one in _closure([node], users, on_way) if one in on_way]
                if not meets or any(owner.setdefault(one, number) != number for one in meets):
                    return None
                if any(isinstance(one, BackwardCFunction) for one in meets):
                    return None
                same = [group for group in found[number] if not set(group.meets).isdisjoint(meets)]
                found[number] = [group for group in found[number] if group not in same]
                found[number].append(
                    _Group(
                        [*chain.from_iterable(group.places for group in same), place],
                        [*chain.from_iterable(group.nodes for group in same), node],
                        list(dict.fromkeys([*chain.from_iterable(group.meets for group in same), *meets])),
                    )
                )
        if self._piece[0].tp_rank.size > 1 and _meets_collective(found, users):
            return None
        return found

    def input_gradient(self, y: Tensor, leaf: Tensor, dy: Tensor, ways: Ways) -> Tensor:
        """Returns the gradient of the input, and keeps in `ways` what those of the parameters come from."""
        handles = []
        try:
            for group in chain.from_iterable(ways):
                group.grads = [None] * len(group.meets)
                for place, node in enumerate(group.meets):
                    handles.append(node.register_prehook(partial(group.grads.__setitem__, place)))
            with tensor_parallel.placed(self._piece[0].tp_rank):
                (dx,) = torch.autograd.grad(y, leaf, dy, retain_graph=True)
        finally:
            for handle in handles:
                handle.remove()
        return dx

    def try_out(
        self, y: Tensor, leaf: Tensor, dy: Tensor, dx: Tensor | None, grads: Sequence[Sequence[Tensor]]
    ) -> None:
        """Finds out whether the piece can be split, from what one backward has given, which left the graph as it was.

        All members of a TP group call it together.
        """
        self.splits = False
        ways = self.ways(y, leaf)
        if dx is None or ways is None:
            return
        other_dx = self.input_gradient(y, leaf, dy, ways)
        if any(grad is None for group in chain.from_iterable(ways) for grad in group.grads):
            return
        others = [weight_gradients(layer, groups) for layer, groups in zip(self._piece, ways, strict=True)]
        pairs = [(dx, other_dx)]
        for some, more in zip(grads, others, strict=True):
            pairs += zip(some, more, strict=True)
        self.splits = all(self._alike(*pair) for pair in pairs)

    def _alike(self, one: Tensor, other: Tensor) -> bool:
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if bool(((one == other) | (one.isnan() & other.isnan())).all()):
            return True
        apart, size = (torch.linalg.vector_norm(some.float()) for some in (one - other, one))
        return not self._exact and bool(apart <= ROUNDING * size)


def weight_gradients(layer: Layer, groups: _Groups) -> list[Tensor]:
    """Returns the gradients of a layer's parameters, in their order; zeros for what has none."""
    parameters = list(layer.parameters.values())
    found: dict[int, Tensor] = {}
    for group in groups:
        edges: list[GradientEdge] = []
        given: list[Tensor] = []
        handles = []
        for node, grads in zip(group.meets, group.grads, strict=True):
            assert grads is not None, "an operation on the way to the input that no gradient has reached"
            for place, grad in enumerate(grads):
                if grad is not None:
                    edges.append(GradientEdge(node, place))
                    given.append(grad)
            if len(group.meets) > 1:
                # What comes here from another of them is in it already.
                handles.append(node.register_prehook(partial(_instead, grads)))
        try:
            with tensor_parallel.placed(layer.tp_rank):
                got = torch.autograd.grad(edges, [parameters[place] for place in group.places], given)
        finally:
            for handle in handles:
                handle.remove()
        found |= zip(group.places, got, strict=True)
    groups.clear()
    return [found[place] if place in found else torch.zeros_like(one) for place, one in enumerate(parameters)]


def _instead(grads: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
    return grads


def _users(root: GraphNode) -> _Users:
    found: dict[GraphNode, list[GraphNode]] = {root: []}
    left = [root]
    while left:
        node = left.pop()
        for other, _ in node.next_functions:
            if other is not None:
                if other not in found:
                    found[other] = []
                    left.append(other)
                found[other].append(node)
    return found


def _closure(nodes: Sequence[GraphNode], users: _Users, border: Collection[GraphNode] = ()) -> dict[GraphNode, None]:
    """Returns the nodes that lead to these, and these; no further than to the first ones in `border`."""
    found = dict.fromkeys(nodes)
    left = [node for node in nodes if node not in border]
    while left:
        for user in users[left.pop()]:
            if user not in found:
                found[user] = None
                if user not in border:
                    left.append(user)
    return found


def _meets_collective(ways: Ways, users: _Users) -> bool:
    """Returns whether a parameter's gradient is summed over the TP group after it has left the way to the input: in a
    whole backward of one member that would be at another place than in a split one of another.
    """
    groups = chain.from_iterable(ways)
    return any(
        node.name() in _COLLECTIVES and node not in group.meets
        for group in groups
        for node in _closure(group.nodes, users, group.meets)
    )


def _kept_bytes(groups: _Groups) -> int:
    """Returns the bytes of the gradients from which those of the parameters come."""
    found = [grad for group in groups for some in group.grads for grad in some or () if grad is not None]
    storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in found}
    return sum(storages.values())
