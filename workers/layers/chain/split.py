"""A backward in two parts: the gradient of the input, for which others wait, and those of the parameters, later.

`torch.distributed.pipelining` finds in a graph where the ways to the parameters leave the way to the input; the
gradients there are kept, and it goes on from them when it is asked to. It does not say whether that gives the same as
one backward: a hook of the script on a tensor may run twice, for one. So the first time both are done, and a piece of
which the results differ is not split. Nor is one in which a parameter does not meet the way to the input, or whose
layers share a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node as GraphNode
from torch.distributed.pipelining._backward import (
    _get_grad_fn_or_grad_acc,
    construct_reverse_graph,
    get_param_groups,
    stage_backward_weight,
)

from elaunch.workers.layers import tensor_parallel
from elaunch.workers.layers.model import Layer
from elaunch.workers.layers.timing import Span

ROUNDING = 0.01
"""So far may the results be apart, relative to their norm, where rounding may differ."""

_Groups = list[dict[str, Any]]
"""Of torch: parameters that are reached from the same places of the graph, and the gradients there."""

Ways = list[_Groups]
"""Those of each layer of a piece."""

_COLLECTIVES = ("_CopyToGroupBackward", "_ReduceBackward")


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
        output to the input, or those of several layers from one place.
        """
        if y.grad_fn is None or not leaf.requires_grad:
            return None
        users = construct_reverse_graph([y.grad_fn])
        owners = {
            _get_grad_fn_or_grad_acc(parameter): place
            for place, layer in enumerate(self._piece)
            for parameter in layer.parameters.values()
        }
        start = _get_grad_fn_or_grad_acc(leaf)
        if start not in users:
            return None
        used = [node for node in owners if node in users]
        found: list[_Groups] = [[] for _ in self._piece]
        grouped: set[GraphNode] = set()
        for group in get_param_groups([start], used, users):
            places = {owners[node] for node in group["params"]}
            if len(places) > 1 or not group["intermediates"]:
                return None
            grouped |= group["params"]
            found[places.pop()].append(group | {"intermediates": list(group["intermediates"])})
        if len(grouped) < len(used):
            return None
        if self._piece[0].tp_rank.size > 1 and _meets_collective(found, users):
            return None
        return found

    def input_gradient(self, y: Tensor, leaf: Tensor, dy: Tensor, ways: Ways) -> Tensor:
        """Returns the gradient of the input, and keeps in `ways` what those of the parameters come from."""
        handles = []
        try:
            for group in chain.from_iterable(ways):
                group["grads"] = [None] * len(group["intermediates"])
                for place, node in enumerate(group["intermediates"]):
                    handles.append(node.register_prehook(partial(group["grads"].__setitem__, place)))
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
        if any(grad is None for group in chain.from_iterable(ways) for grad in group["grads"]):
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


def _meets_collective(ways: Ways, users: Mapping[GraphNode, Sequence[GraphNode]]) -> bool:
    """Returns whether a parameter's gradient is summed over the TP group after it has left the way to the input: in a
    whole backward of one member that would be at another place than in a split one of another.
    """
    for group in chain.from_iterable(ways):
        left, seen = list(group["params"]), set(group["intermediates"])
        while left:
            node = left.pop()
            if node.name() in _COLLECTIVES:
                return True
            seen.add(node)
            left += [user for user in users[node] if user not in seen]
    return False


def _kept_bytes(groups: _Groups) -> int:
    """Returns the bytes of the gradients from which those of the parameters come."""
    found = [grad for group in groups for some in group["grads"] for grad in some if grad is not None]
    storages = {grad.untyped_storage().data_ptr(): grad.untyped_storage().nbytes() for grad in found}
    return sum(storages.values())


def weight_gradients(layer: Layer, groups: _Groups) -> list[Tensor]:
    """Returns the gradients of a layer's parameters, in their order; zeros for what has none."""
    parameters = list(layer.parameters.values())
    with tensor_parallel.placed(layer.tp_rank):
        stage_backward_weight(iter(parameters), groups)
    grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
    for one in parameters:
        one.grad = None
    return grads
