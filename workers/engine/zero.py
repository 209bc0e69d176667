"""Optimizer states and master weights, sharded per layer over the tuples that hold it (ZeRO-1)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from elaunch.workers.comm.group import memory
from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.engine.executor import LayerKey
from elaunch.workers.engine.layers import Layer
from elaunch.workers.engine.layout import ALIGN, Owned, Piece, StateLayout
from elaunch.workers.engine.messages import Kind, tag
from elaunch.workers.engine.shards import Shards
from elaunch.workers.engine.sums import Node, TreeSum

Lacking = Mapping[str, Collection[LayerKey]]

NormTerm = tuple[int, int, int, int, float]
"""Layer, segment, level and place of a node of the tree over a segment's elements, sum of squares below it."""


class ZeroOptimizer:
    """The part of the optimizer that this worker owns, and what the owners tell those who hold the parameters.

    Args:
        layout: of the shards.
        worker: this one.
        layers: this worker's, by layer and number of the tuple that it belongs to.
        shards: the masters and states of this worker's pieces.
    """

    def __init__(self, layout: StateLayout, worker: str, layers: Mapping[LayerKey, Layer], shards: Shards) -> None:
        self._layout, self._worker, self._layers, self.shards = layout, worker, layers, shards
        held = {layer for layer, _ in layers} | {piece.shard.layer for piece in shards.pieces}
        self._numbered = [(number, shard) for number, shard in enumerate(layout.all_shards) if shard.layer in held]
        self._places: dict[Owned, list[int]] = defaultdict(list)
        for place, piece in enumerate(shards.pieces):
            self._places[piece.shard].append(place)

    def norm_terms(self, gradients: Mapping[Owned, Tensor]) -> list[NormTerm]:
        """This worker's part of the squared norm of the whole gradient, for `total_norm`."""
        found = []
        for shard, gradient in gradients.items():
            for node, value in _square_sums(gradient, shard.start):
                found.append((shard.layer, shard.segment, node.level, node.place, value))
        return found

    def total_norm(self, terms: Iterable[NormTerm]) -> float:
        """The norm of the whole gradient, of the terms of all workers; it does not depend on who owned what."""
        trees: dict[tuple[int, int], TreeSum[float]] = {}
        for layer, segment, level, place, value in sorted(terms):
            tree = trees.get((layer, segment))
            if tree is None:
                elements = self._layout.segments[layer][segment].elements
                tree = trees[layer, segment] = TreeSum(elements, float.__add__)
            tree.put(Node(level, place), value)
        return math.sqrt(math.fsum(total for tree in trees.values() if (total := tree.total()) is not None))

    @torch.no_grad()
    def share(self, traffic: Traffic, lacking: Lacking | None = None) -> int:
        """Give the new values to those who hold the parameters, and take those of the shards that others own.

        Args:
            traffic: of this operation.
            lacking: by worker, which of its layers need values; None: all of all.

        Returns:
            The bytes that this worker received.
        """
        layout, worker = self._layout, self._worker
        incoming: dict[tuple[str, int], list[Tensor]] = {}
        flats: dict[tuple[int, int, int], Tensor] = {}
        for number, shard in self._numbered:
            owner, part = layout.owner(shard), tag(Kind.PARAMETER, number)
            sent: Tensor | None = None
            told: set[str] = set()
            for replica in range(len(layout.holders[shard.layer])):
                key = (shard.layer, replica)
                receivers = [
                    peer for peer in layout.receivers(shard, replica) if lacking is None or key in lacking.get(peer, ())
                ]
                if owner == worker and receivers:
                    sent = self._values(shard) if sent is None else sent
                    for peer in receivers:
                        if peer != worker and peer not in told:
                            told.add(peer)
                            traffic.send(peer, part, memory(sent), sent)
                if worker not in receivers:
                    continue
                segment = (*key, shard.segment)
                if segment not in flats:
                    flats[segment] = torch.empty(
                        layout.segments[shard.layer][shard.segment].elements, dtype=self._dtype(shard)
                    )
                place = flats[segment][shard.start : shard.stop]
                if sent is not None:
                    place.copy_(sent)
                else:
                    incoming.setdefault((owner, part), []).append(place)
        for (owner, part), places in incoming.items():
            traffic.post(owner, part, memory(places[0]))
        for (owner, part), places in incoming.items():
            traffic.wait(owner, part)
            for place in places[1:]:
                place.copy_(places[0])
        for (layer, replica, number), flat in flats.items():
            workers = layout.holders[layer][replica]
            values = {name: value.data for name, value in self._layers[layer, replica].parameters.items()}
            for fragment in layout.segments[layer][number].fragments:
                view = layout.view(values[fragment.name], fragment, layer, number, workers)
                view.copy_(flat[fragment.start : fragment.stop].view(fragment.shape))
        return sum(places[0].nbytes for places in incoming.values())

    def _values(self, shard: Owned) -> Tensor:
        """The masters of a shard as they travel; between parameters there is nothing that counts."""
        flat = torch.zeros(shard.stop - shard.start, dtype=self._dtype(shard))
        for place in self._places[shard]:
            piece = self.shards.pieces[place]
            flat[piece.start - shard.start : piece.stop - shard.start].copy_(self.shards.master(place))
        return flat

    def _dtype(self, shard: Owned) -> torch.dtype:
        return self._layout.wire_dtype(shard.layer, shard.segment)


def first_masters(layout: StateLayout, pieces: Sequence[Piece], layers: Mapping[LayerKey, Layer]) -> list[Tensor]:
    """Masters of some pieces, of the initial values of the layers that their owner has."""
    found: list[Tensor] = []
    flats: dict[tuple[int, int, int], Tensor] = {}
    for piece in pieces:
        shard = piece.shard
        key = (shard.layer, shard.segment, shard.replica)
        if key not in flats:
            layer = layers[shard.layer, shard.replica]
            values = {name: value.data for name, value in layer.parameters.items()}
            flats[key] = layout.flatten(shard.layer, shard.segment, layout.holders[shard.layer][shard.replica], values)
        found.append(flats[key][piece.start : piece.stop].clone())
    return found


def _square_sums(gradient: Tensor, first: int) -> list[tuple[Node, float]]:
    """The sums of squares of elements first, first + 1, … of a segment, as nodes of the tree over its elements.

    Level by level for all elements at once; what has no sibling here is left over as a node.
    """
    sums, level, found = gradient.double().square(), 0, []
    ranges: dict[int, list[tuple[Node, float]]] = defaultdict(list)
    assert first % ALIGN == 0
    while len(sums):
        if first % 2:
            ranges[level].append((Node(level, first), float(sums[0])))
            first, sums = first + 1, sums[1:]
        if len(sums) % 2:
            ranges[level].append((Node(level, first + len(sums) - 1), float(sums[-1])))
            sums = sums[:-1]
        sums, first, level = sums[0::2] + sums[1::2], first // 2, level + 1
    for nodes in ranges.values():
        found += nodes
    return found
