"""Where each gradient and each optimizer state lives: parameters of a layer as flat segments, cut into shards.

A layer that somewhere is cut over up to G tensor-parallel members consists of G + 1 *segments*: what all members have
alike, and G parts of what is cut. A TP group of k members holds G / k parts each, so groups of different size share the
finest cut. Each segment is a flat vector in which every parameter starts at a multiple of `ALIGN` elements, and is cut
at such multiples into shards, one for each TP group that holds the layer (ElasWave 6.3). So an element lies at the same
place of a vector register whoever owns it, and elementwise updates round alike under every plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from elaunch.errors import StateError
from elaunch.plan.tiling import Plan
from elaunch.plan.views import holders, optimizer_shards
from elaunch.workers.random.trace import RandomTrace
from elaunch.workers.state.boxes import Box, of_interval, shift

ALIGN = 64
COMMON = -1
"""The segment of what all members of a TP group have alike."""


@dataclass(frozen=True)
class LayerSpec:
    """What every worker knows of every layer.

    Attributes:
        index: of the layer.
        name: for messages.
        shapes: of the parameters that are trained, whole, in registration order.
        dtypes: of them.
        cuts: the dimension along which tensor parallelism cuts a parameter, frozen or not; others stay whole.
        output: shape of a row of its output, and its dtype.
        trace: the random numbers it draws.
        untrained: frozen parameters and all buffers: shape, whole, and dtype of each.
    """

    index: int
    name: str
    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    cuts: Mapping[str, int]
    output: tuple[torch.Size, torch.dtype]
    trace: RandomTrace
    untrained: Mapping[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)


@dataclass(frozen=True)
class Fragment:
    """A parameter's place in a segment.

    Attributes:
        name: of the parameter, within its layer.
        dim: along which it is cut; None in the common segment.
        shape: of the fragment.
        start: in the segment, in elements.
    """

    name: str
    dim: int | None
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Returns where the fragment ends in the segment, in elements."""
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class FlatSegment:
    """A flat vector of `elements` that holds the fragments."""

    number: int
    fragments: tuple[Fragment, ...]
    elements: int


@dataclass(frozen=True)
class OptimizerShard:
    """A shard: elements [start, stop) of a segment of a layer, owned by TP group number `replica` of its holders."""

    layer: int
    segment: int
    replica: int
    start: int
    stop: int

    def __str__(self) -> str:
        part = "" if self.segment == COMMON else f" part {self.segment}"
        return f"layer {self.layer}{part} [{self.start}:{self.stop}]"


@dataclass(frozen=True)
class ParameterPiece:
    """What a shard has of a parameter: elements [start, stop) of its segment."""

    shard: OptimizerShard
    fragment: Fragment
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Returns how many elements the piece has."""
        return self.stop - self.start

    @property
    def parameter(self) -> str:
        """Returns the name of the parameter in the job."""
        return f"layers.{self.shard.layer}.{self.fragment.name}"

    @property
    def label(self) -> str:
        """Returns the name of the piece, for optimizers that sort their parameters by name."""
        part = "" if self.fragment.dim is None else f" part {self.shard.segment}"
        first = self.fragment.start
        return f"{self.parameter}{part}[{self.start - first}:{self.stop - first}]"

    @property
    def shape(self) -> tuple[object, ...]:
        """Returns its parameter and boxes; pieces of one shape hold the same elements in the same order."""
        return self.parameter, *self.boxes

    @property
    def boxes(self) -> list[Box]:
        """Returns its boxes in the whole parameter; the piece's elements are theirs, one box after the other."""
        first, shape, dim = self.fragment.start, self.fragment.shape, self.fragment.dim
        offsets = [self.shard.segment * size if axis == dim else 0 for axis, size in enumerate(shape)]
        return [shift(box, offsets) for box in of_interval(shape, self.start - first, self.stop - first)]


class StateLayout:
    """Segments of all layers, who holds them, and who owns which shard; the same on every worker.

    Args:
        plan: says who holds what.
        specs: of the layers.
        owners: the plan under which the shards are owned, by holders of this one and in the same cuts; default: `plan`.
    """

    def __init__(self, plan: Plan, specs: Sequence[LayerSpec], owners: Plan | None = None) -> None:
        self.holders = holders(plan)
        owners = owners or plan
        self.cuts = [math.lcm(*(len(workers) for workers in tp_groups)) for tp_groups in self.holders]
        self._specs = specs
        self._dtypes = [frozenset(spec.dtypes.values()) for spec in specs]
        self.segments: list[dict[int, FlatSegment]] = [
            _segments(spec, cut) for spec, cut in zip(specs, self.cuts, strict=True)
        ]
        common = optimizer_shards(owners, [segments[COMMON].elements for segments in self.segments], ALIGN)
        parts = optimizer_shards(
            owners, [segments[0].elements if 0 in segments else 0 for segments in self.segments], ALIGN
        )
        # The owners' numbers of the TP groups, as numbers of the holders.
        here = [[known.index(workers) for workers in theirs] for known, theirs in zip(self.holders, holders(owners))]
        self._shards = [
            tuple(
                OptimizerShard(layer, number, here[layer][shard.replica], shard.start, shard.stop)
                for number in segments
                for shard in (common if number == COMMON else parts)[layer]
            )
            for layer, segments in enumerate(self.segments)
        ]

    def shards(self, layer: int) -> tuple[OptimizerShard, ...]:
        """Returns all shards of a layer, in the order of its segments and elements."""
        return self._shards[layer]

    @cached_property
    def all_shards(self) -> tuple[OptimizerShard, ...]:
        """Returns the shards of all layers, layer by layer."""
        return tuple(shard for shards in self._shards for shard in shards)

    def pieces(self, worker: str) -> tuple[ParameterPiece, ...]:
        """Returns what a worker owns, in the order of its shards."""
        return self._pieces.get(worker, ())

    @cached_property
    def _pieces(self) -> dict[str, tuple[ParameterPiece, ...]]:
        found: dict[str, list[ParameterPiece]] = {}
        for shard in self.all_shards:
            pieces = found.setdefault(self.owner(shard), [])
            for fragment in self.segments[shard.layer][shard.segment].fragments:
                start, stop = max(fragment.start, shard.start), min(fragment.stop, shard.stop)
                if start < stop:
                    pieces.append(ParameterPiece(shard, fragment, start, stop))
        return {worker: tuple(pieces) for worker, pieces in found.items()}

    def owner(self, shard: OptimizerShard) -> str:
        """Returns the worker that owns a shard."""
        return self.holder(shard, shard.replica)

    def holder(self, shard: OptimizerShard, replica: int) -> str:
        """Returns the member of a TP group that holds a shard's elements; of several, the first."""
        workers = self.holders[shard.layer][replica]
        return workers[0] if shard.segment == COMMON else workers[shard.segment // self._span(shard.layer, workers)]

    def receivers(self, shard: OptimizerShard, replica: int) -> tuple[str, ...]:
        """Returns all members of a TP group that hold a shard's elements."""
        return self.holders[shard.layer][replica] if shard.segment == COMMON else (self.holder(shard, replica),)

    def sum_dtype(self, layer: int) -> torch.dtype:
        """Returns the dtype in which a layer's gradients are summed and its optimizer computes: float32 at least."""
        return torch.float64 if torch.float64 in self._dtypes[layer] else torch.float32

    def wire_dtype(self, layer: int, segment: int) -> torch.dtype:
        """Returns the dtype in which the values of a segment travel: that of its parameters, if they have one."""
        kinds = {self._specs[layer].dtypes[fragment.name] for fragment in self.segments[layer][segment].fragments}
        return kinds.pop() if len(kinds) == 1 else self.sum_dtype(layer)

    def flatten(self, layer: int, segment: int, workers: Sequence[str], parts: Mapping[str, Tensor]) -> Tensor:
        """Returns a segment as a flat vector, of what a member of `workers` has for each parameter of a layer."""
        dtype = self.sum_dtype(layer)
        found = self.segments[layer][segment]
        device = next(iter(parts.values())).device if parts else None
        flat = torch.zeros(found.elements, dtype=dtype, device=device)
        for fragment in found.fragments:
            part = self.view(parts[fragment.name], fragment, layer, segment, workers)
            flat[fragment.start : fragment.stop].view(fragment.shape).copy_(part)
        return flat

    def view(self, tensor: Tensor, fragment: Fragment, layer: int, segment: int, workers: Sequence[str]) -> Tensor:
        """Returns the fragment of a parameter, given the part of the parameter that a member of `workers` holds."""
        if fragment.dim is None:
            return tensor
        span = self._span(layer, workers)
        return tensor.chunk(span, fragment.dim)[segment % span]

    def _span(self, layer: int, workers: Sequence[str]) -> int:
        """How many segments each member of the TP group holds."""
        return self.cuts[layer] // len(workers)


def _segments(spec: LayerSpec, cut: int) -> dict[int, FlatSegment]:
    common, parts = [], []
    ends = [0, 0]
    for name, shape in spec.shapes.items():
        dim = spec.cuts.get(name)
        if cut > 1 and dim is not None:
            if shape[dim] % cut:
                raise StateError(
                    f"{spec.name}: {name} {tuple(shape)} is to be cut into {cut} along dimension {dim}; "
                    f"use tensor-parallel degrees whose least common multiple divides {shape[dim]}"
                )
            part = tuple(size // cut if place == dim else size for place, size in enumerate(shape))
            parts.append(Fragment(name, dim, part, ends[1]))
            ends[1] = _aligned(parts[-1].stop)
        else:
            common.append(Fragment(name, None, tuple(shape), ends[0]))
            ends[0] = _aligned(common[-1].stop)
    segments = {COMMON: FlatSegment(COMMON, tuple(common), ends[0])}
    if parts:
        segments |= {number: FlatSegment(number, tuple(parts), ends[1]) for number in range(cut)}
    return segments


def _aligned(elements: int) -> int:
    return -(-elements // ALIGN) * ALIGN
