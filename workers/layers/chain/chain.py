"""Consecutive layers of one tile, run forward and backward, as few differentiations as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from elaunch.workers.layers import tensor_parallel
from elaunch.workers.layers.chain.split import DeferredWeights, Splitter
from elaunch.workers.layers.model import Draw, Layer
from elaunch.workers.layers.timing import Span, Stopwatch

Done = Callable[[Layer, list[Tensor]], None]
"""Takes a layer and the gradients of its `parameters`, in their order."""


@dataclass(eq=False)
class SavedActivations:
    """What the backward of one piece of a chain on one micro-batch needs."""

    x: Tensor
    y: Tensor | None
    spans: Sequence[Span] = ()


class Chain:
    """Consecutive layers of one tile. Those that keep their activations are differentiated at once, piece by piece.

    A single backward for several layers costs less than one for each, and still each layer's gradients are handed on as
    soon as they are complete.

    Args:
        layers: of the tile.
        exact: whether a backward is split only if that changes no bit of its results; else rounding may differ.
    """

    def __init__(self, layers: Sequence[Layer], exact: bool = True) -> None:
        self._pieces: list[list[Layer]] = []
        for layer in layers:
            if layer.recompute or not self._pieces or self._pieces[-1][0].recompute:
                self._pieces.append([])
            self._pieces[-1].append(layer)
        self._splitters = [Splitter(piece, exact) for piece in self._pieces]

    def forward(self, x: Tensor, draw: Draw, watch: Stopwatch | None = None) -> tuple[Tensor, list[SavedActivations]]:
        """Returns the output for `x` (rows, …), detached, and what `backward` needs.

        Args:
            x: the input.
            draw: of the step.
            watch: measures each layer, and its backward to come.
        """
        kept = []
        for piece in self._pieces:
            spans = []
            if watch is not None:
                spans = [watch.span(layer.spec.index, x.shape[0], layer.tp_rank.size) for layer in piece]
            if piece[0].recompute:
                with torch.no_grad():
                    y = _run(piece, x, draw, spans)
                kept.append(SavedActivations(x, None, spans))
            else:
                leaf = _leaf(x)
                y = _run(piece, leaf, draw, spans)
                kept.append(SavedActivations(leaf, y, spans))
            x = y.detach()
        return x, kept

    def backward(self, saved: list[SavedActivations], dy: Tensor, draw: Draw, done: Done) -> Tensor | None:
        """Returns the gradient of the input; None for one that has none. `saved` is used up.

        Args:
            saved: from `forward`.
            dy: gradient of the output.
            draw: that of `forward`.
            done: gets each layer with its gradients, last layer first as a rule.
        """
        dx: Tensor | None = dy
        for piece in reversed(self._pieces):
            dx = self._piece_backward(piece, saved.pop(), _given(dx, piece), draw, done)
        return dx

    def input_gradient(
        self, saved: list[SavedActivations], dy: Tensor, draw: Draw, done: Done
    ) -> tuple[Tensor | None, list[DeferredWeights]]:
        """Does as `backward`, but leaves the gradients of the parameters for later where that can be.

        Returns:
            The gradient of the input, and what is left: each is called with `done`, in this order.
        """
        dx: Tensor | None = dy
        left: list[DeferredWeights] = []
        for piece, splitter in zip(reversed(self._pieces), reversed(self._splitters), strict=True):
            here, dx = saved.pop(), _given(dx, piece)
            assert dx is not None
            ways = splitter.ways(here.y, here.x) if here.y is not None and splitter.splits else None
            if splitter.splits is not None and ways is None:
                dx = self._piece_backward(piece, here, dx, draw, done)
                _has_no_rest(here.spans)
            elif splitter.splits is None:
                # The first time both are done, and what comes of them is compared.
                given: dict[int, list[Tensor]] = {}

                def keep(layer: Layer, grads: list[Tensor], given: dict[int, list[Tensor]] = given) -> None:
                    given[layer.spec.index] = grads
                    done(layer, grads)

                y, leaf, dy = here.y, here.x, dx
                assert y is not None, "layers that are computed again are not split"
                dx = self._piece_backward(piece, here, dy, draw, keep, retain=True)
                splitter.try_out(y, leaf, dy, dx, [given[layer.spec.index] for layer in piece])
            else:
                assert here.y is not None
                assert ways is not None
                if here.spans:
                    here.spans[-1].begin("B")
                dx = splitter.input_gradient(here.y, here.x, dx, ways)
                if here.spans:
                    here.spans[0].end("B")
                left.append(DeferredWeights(piece, ways, here.spans))
        return dx, left

    def _piece_backward(
        self, piece: Sequence[Layer], here: SavedActivations, dy: Tensor, draw: Draw, done: Done, retain: bool = False
    ) -> Tensor | None:
        leaf, y = here.x, here.y
        if here.spans:
            here.spans[-1].begin("B")
        if y is None:
            leaf = _leaf(leaf)
            y = _run(piece, leaf, draw)
        for layer in piece:
            layer.expect(partial(done, layer))
        if y.requires_grad:
            with tensor_parallel.placed(piece[0].tp_rank):
                torch.autograd.backward(y, dy, retain_graph=retain)
        if here.spans:
            here.spans[0].end("B")
        dx = leaf.grad
        if dx is None and leaf.requires_grad:
            dx = torch.zeros_like(leaf)
        for layer in reversed(piece):
            layer.settle()
        return dx


def _given(dx: Tensor | None, piece: Sequence[Layer]) -> Tensor:
    assert dx is not None, f"{piece[-1].spec.name}: the layer after it gives no gradient"
    return dx


def _has_no_rest(spans: Sequence[Span]) -> None:
    """Notes that nothing of a backward was left for later."""
    for span in spans:
        span.begin("W")
        span.end("W")


def _run(piece: Sequence[Layer], x: Tensor, draw: Draw, spans: Sequence[Span] = ()) -> Tensor:
    if not spans:
        for layer in piece:
            x = layer.run(x, draw)
        return x
    for place, (layer, span) in enumerate(zip(piece, spans, strict=True)):
        x = span.forward(partial(layer.run, x, draw), layer.parameters.values())
        if x.requires_grad and place < len(piece) - 1:
            x.register_hook(partial(_backward_passes, spans[place + 1], span))
    return x


def _backward_passes(later: Span, earlier: Span, grad: Tensor) -> None:
    """The gradient between two layers is there."""
    later.end("B")
    earlier.begin("B")


def _leaf(x: Tensor) -> Tensor:
    x = x.detach()
    return x.requires_grad_() if x.is_floating_point() or x.is_complex() else x
