"""Optimizer states and master weights, sharded per layer over the tuples that hold it (ZeRO-1)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elaunch.errors import StateError
from elaunch.workers.comm.group import memory
from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.engine.executor import LayerKey
from elaunch.workers.engine.layers import Layer
from elaunch.workers.engine.layout import ALIGN, Fragment, Owned, StateLayout
from elaunch.workers.engine.messages import Kind, tag
from elaunch.workers.engine.sums import Node, TreeSum

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]

NormTerm = tuple[int, int, int, int, float]
"""Layer, segment, level and place of a node of the tree over a segment's elements, sum of squares below it."""

_NOT_ELEMENTWISE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)


class ZeroOptimizer:
    """The part of the optimizer that this worker owns: master weights and states of its shards.

    Args:
        layout: of the shards.
        worker: this one.
        layers: this worker's, by layer and number of the tuple that it belongs to; their values are the first masters.
        make_optimizer: called with (name, flat part of a parameter) pairs, named `layers.INDEX.NAME[START:STOP]`.
        make_scheduler: of the learning rate, called with the optimizer.

    Raises:
        StateError: the optimizer needs more than one element at a time.
    """

    def __init__(
        self,
        layout: StateLayout,
        worker: str,
        layers: Mapping[LayerKey, Layer],
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
    ) -> None:
        self._layout, self._worker, self._layers = layout, worker, layers
        held = {layer for layer, _ in layers}
        self._numbered = [(number, shard) for number, shard in enumerate(layout.all_shards) if shard.layer in held]
        self.masters: dict[Owned, Tensor] = {}
        self._pieces: list[tuple[nn.Parameter, Owned, int, int]] = []
        named: list[tuple[str, nn.Parameter]] = []
        flats: dict[tuple[int, int, int], Tensor] = {}
        for _, shard in self._numbered:
            if layout.owner(shard) != worker:
                continue
            key = (shard.layer, shard.segment, shard.replica)
            if key not in flats:
                flats[key] = self._flat(shard.layer, shard.segment, shard.replica)
            master = self.masters[shard] = flats[key][shard.start : shard.stop].clone()
            for fragment, start, stop in _within(layout.segments[shard.layer][shard.segment].fragments, shard):
                piece = nn.Parameter(master[start - shard.start : stop - shard.start])
                self._pieces.append((piece, shard, start - shard.start, stop - shard.start))
                part = "" if fragment.dim is None else f" part {shard.segment}"
                label = f"layers.{shard.layer}.{fragment.name}{part}[{start - fragment.start}:{stop - fragment.start}]"
                named.append((label, piece))
        self._optimizer = make_optimizer(named) if named else None
        if isinstance(self._optimizer, _NOT_ELEMENTWISE):
            raise StateError(
                f"{type(self._optimizer).__name__} does not update each element by itself, so its states cannot be "
                "sharded; use an elementwise optimizer such as AdamW or SGD"
            )
        self._scheduler = make_scheduler(self._optimizer) if make_scheduler and self._optimizer else None

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

    def step(self, gradients: Mapping[Owned, Tensor], coefficient: float) -> None:
        """Update the masters, with the gradients multiplied by `coefficient`."""
        if self._optimizer is None:
            return
        if coefficient != 1.0:
            gradients = {shard: gradient * coefficient for shard, gradient in gradients.items()}
        for piece, shard, start, stop in self._pieces:
            piece.grad = gradients[shard][start:stop].to(piece.device)
        self._optimizer.step()
        for piece, *_ in self._pieces:
            piece.grad = None
        if self._scheduler is not None:
            self._scheduler.step()

    @torch.no_grad()
    def share(self, traffic: Traffic) -> None:
        """Give the new values to all who hold the parameters, and take those of the shards that others own."""
        layout, worker = self._layout, self._worker
        incoming: dict[tuple[str, int], list[Tensor]] = {}
        flats: dict[tuple[int, int, int], Tensor] = {}
        for number, shard in self._numbered:
            owner, part = layout.owner(shard), tag(Kind.PARAMETER, number)
            sent = self.masters[shard].to(self._dtype(shard)).cpu() if owner == worker else None
            told: set[str] = set()
            for replica in range(len(layout.holders[shard.layer])):
                receivers = layout.receivers(shard, replica)
                if sent is not None:
                    for peer in receivers:
                        if peer != worker and peer not in told:
                            told.add(peer)
                            traffic.send(peer, part, memory(sent), sent)
                if worker not in receivers:
                    continue
                key = (shard.layer, shard.segment, replica)
                if key not in flats:
                    flats[key] = torch.empty(
                        layout.segments[shard.layer][shard.segment].elements, dtype=self._dtype(shard)
                    )
                place = flats[key][shard.start : shard.stop]
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
        for (layer, segment, replica), flat in flats.items():
            workers = layout.holders[layer][replica]
            values = {name: value.data for name, value in self._layers[layer, replica].parameters.items()}
            for fragment in layout.segments[layer][segment].fragments:
                view = layout.view(values[fragment.name], fragment, layer, segment, workers)
                view.copy_(flat[fragment.start : fragment.stop].view(fragment.shape))

    def state_bytes(self) -> int:
        """Size of this worker's optimizer states, without the masters."""
        if self._optimizer is None:
            return 0
        states = self._optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    def master_bytes(self) -> int:
        """Size of this worker's master weights."""
        return sum(master.nbytes for master in self.masters.values())

    @property
    def learning_rates(self) -> list[float]:
        """Of each group of the optimizer; empty on a worker that owns nothing."""
        return [] if self._optimizer is None else [float(group["lr"]) for group in self._optimizer.param_groups]

    def _flat(self, layer: int, segment: int, replica: int) -> Tensor:
        values = {name: value.data for name, value in self._layers[layer, replica].parameters.items()}
        return self._layout.flatten(layer, segment, self._layout.holders[layer][replica], values)

    def _dtype(self, shard: Owned) -> torch.dtype:
        return self._layout.wire_dtype(shard.layer, shard.segment)


def _within(fragments: Sequence[Fragment], shard: Owned) -> Iterable[tuple[Fragment, int, int]]:
    for fragment in fragments:
        start, stop = max(fragment.start, shard.start), min(fragment.stop, shard.stop)
        if start < stop:
            yield fragment, start, stop


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
