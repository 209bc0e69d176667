"""Optimizer states and master weights, sharded per layer over the TP groups that hold it (ZeRO-1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from elaunch.workers.exact_sum import NOTHING, ExactSum
from elaunch.workers.layers.carry.carrier import Carrier
from elaunch.workers.layers.executor import LayerKey
from elaunch.workers.layers.messages import Kind, tag
from elaunch.workers.layers.model import Layer
from elaunch.workers.layers.shards import Shards
from elaunch.workers.state.layout import ALIGN, OptimizerShard, ParameterPiece, StateLayout

Lacking = Mapping[str, Collection[LayerKey]]


class ZeroOptimizer:
    """The part of the optimizer that this worker owns, and what the owners tell those who hold the parameters.

    Args:
        layout: of the shards.
        worker: this one.
        layers: this worker's, by layer and number of the TP group that it belongs to.
        shards: the masters and states of this worker's pieces.
    """

    def __init__(self, layout: StateLayout, worker: str, layers: Mapping[LayerKey, Layer], shards: Shards) -> None:
        self._layout, self._worker, self._layers, self.shards = layout, worker, layers, shards
        parameters = (one for layer in layers.values() for one in layer.module.parameters())
        self._device = next((one.device for one in parameters), torch.device("cpu"))
        held = {layer for layer, _ in layers} | {piece.shard.layer for piece in shards.pieces}
        self._numbered = [(number, shard) for number, shard in enumerate(layout.all_shards) if shard.layer in held]
        self._places: dict[OptimizerShard, list[int]] = defaultdict(list)
        for place, piece in enumerate(shards.pieces):
            self._places[piece.shard].append(place)

    @cached_property
    def travels(self) -> bool:
        """Returns whether new values go from any worker to another one, which is the same for all of them."""
        layout = self._layout
        return any(
            peer != layout.owner(shard)
            for shard in layout.all_shards
            for replica in range(len(layout.holders[shard.layer]))
            for peer in layout.receivers(shard, replica)
        )

    @torch.no_grad()
    def take_values(self) -> None:
        """Makes the parameters' present values those of the masters of this worker's pieces."""
        for place, master in first_masters(self._layout, self.shards.pieces, self._layers):
            self.shards.master(place).copy_(master)

    def squares(self, gradients: Mapping[OptimizerShard, Tensor]) -> ExactSum:
        """Returns the sum of the squares of this worker's part of the gradient.

        Elements are summed in aligned blocks of `ALIGN`, each in one fixed tree, and the blocks without rounding: the
        sum over all workers does not depend on who owns what.
        """
        return sum((_square_sum(gradient, shard.start) for shard, gradient in gradients.items()), NOTHING)

    @torch.no_grad()
    def share(self, carrier: Carrier | None, lacking: Lacking | None = None) -> int:
        """Gives the new values to those who hold the parameters, and takes those of the shards that others own.

        Args:
            carrier: of the tensors of this operation; None: none travels.
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
                            assert carrier is not None
                            carrier.send(peer, part, sent)
                if worker not in receivers:
                    continue
                segment = (*key, shard.segment)
                if segment not in flats:
                    flats[segment] = torch.empty(
                        layout.segments[shard.layer][shard.segment].elements,
                        dtype=self._dtype(shard),
                        device=self._device,
                    )
                place = flats[segment][shard.start : shard.stop]
                if sent is not None:
                    place.copy_(sent)
                else:
                    incoming.setdefault((owner, part), []).append(place)
        for (owner, part), places in incoming.items():
            assert carrier is not None
            carrier.post(owner, part, places[0])
        for (owner, part), places in incoming.items():
            assert carrier is not None
            carrier.wait(owner, part)
            for place in places[1:]:
                place.copy_(places[0])
        for (layer, replica, number), flat in flats.items():
            workers = layout.holders[layer][replica]
            values = {name: value.data for name, value in self._layers[layer, replica].parameters.items()}
            for fragment in layout.segments[layer][number].fragments:
                view = layout.view(values[fragment.name], fragment, layer, number, workers)
                view.copy_(flat[fragment.start : fragment.stop].view(fragment.shape))
        if carrier is not None:
            carrier.finish()
        return sum(places[0].nbytes for places in incoming.values())

    def _values(self, shard: OptimizerShard) -> Tensor:
        """The masters of a shard as they travel; between parameters there is nothing that counts."""
        flat = torch.zeros(shard.stop - shard.start, dtype=self._dtype(shard), device=self._device)
        for place in self._places[shard]:
            piece = self.shards.pieces[place]
            flat[piece.start - shard.start : piece.stop - shard.start].copy_(self.shards.master(place))
        return flat

    def _dtype(self, shard: OptimizerShard) -> torch.dtype:
        return self._layout.wire_dtype(shard.layer, shard.segment)


def first_masters(
    layout: StateLayout, pieces: Sequence[ParameterPiece], layers: Mapping[LayerKey, Layer]
) -> Iterator[tuple[int, Tensor]]:
    """Yields the masters of some pieces, with their places, of the values in the layers that their owner has."""
    flat, flat_of = torch.empty(0), (-1, -1, -1)
    for place, piece in enumerate(pieces):
        shard = piece.shard
        key = (shard.layer, shard.segment, shard.replica)
        if key != flat_of:
            layer = layers[shard.layer, shard.replica]
            values = {name: value.data for name, value in layer.parameters.items()}
            flat = layout.flatten(shard.layer, shard.segment, layout.holders[shard.layer][shard.replica], values)
            flat_of = key
        yield place, flat[piece.start : piece.stop].clone()


def _square_sum(gradient: Tensor, first: int) -> ExactSum:
    """Returns the sum of squares of the elements of a segment from `first`, the beginning of a block, on."""
    assert first % ALIGN == 0
    squares = gradient.double().square()
    blocks = torch.nn.functional.pad(squares, (0, -len(squares) % ALIGN)).view(-1, ALIGN)
    while blocks.shape[1] > 1:
        blocks = blocks[:, 0::2] + blocks[:, 1::2]
    return ExactSum.of_tensor(blocks)
