"""What workers tell each other in a step: who sends which rows to whom, and under which number.

All of it follows from the plan, so both ends of a message know its number, size and place without asking.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate

from elaunch.plan.sums import Node
from elaunch.plan.tiling import Plan
from elaunch.plan.views import Feed, holders, inputs, outputs, partial_sums, tiles_by_group
from elaunch.workers.state.layout import OptimizerShard, StateLayout

_NUMBERS = 1 << 28


class Kind(IntEnum):
    """Of message; each has numbers of its own."""

    ACTIVATION = 0
    INPUT_GRADIENT = 1
    GRADIENT = 2
    PARAMETER = 3
    TENSOR = 4
    SNAPSHOT_STATE = 5
    SNAPSHOT_GRADIENT = 6
    MIGRATION = 7
    UNTRAINED = 8


def tag(kind: Kind, number: int) -> int:
    """Returns the part under which a message travels (see `elaunch.workers.comm.traffic`)."""
    assert number < _NUMBERS
    return kind * _NUMBERS + number


@dataclass(frozen=True)
class Rows:
    """Rows [first, first + count) of this worker's micro-batch that go to or come from `peer` under `number`."""

    peer: str
    number: int
    first: int
    count: int


@dataclass(frozen=True)
class Exchanges:
    """What one micro-batch of one tile exchanges with the tiles before and after it."""

    x_from: tuple[Rows, ...]
    y_to: tuple[Rows, ...]
    dy_from: tuple[Rows, ...]
    dx_to: tuple[Rows, ...]


def exchanges(plan: Plan, worker: str) -> dict[tuple[int, int], Exchanges]:
    """Returns what `worker` receives and sends, for each of its (tile, micro-batch).

    Every member of a tensor-parallel group has the whole activation, so each member of the next one gets it from one
    of them: from itself, if it belongs to both, else from the one of its own rank, modulo their number.
    """
    feeds, consumers = inputs(plan), outputs(plan)
    first_number: dict[tuple[int, int, int, int], int] = {}
    number = 0
    for tile, of_tile in enumerate(feeds):
        for micro_batch, of_micro_batch in enumerate(of_tile):
            for feed in of_micro_batch:
                first_number[tile, micro_batch, feed.tile, feed.micro_batch] = number
                number += len(feed.runs)
    found = {}
    for tile in plan.tiles_of(worker):
        ours = plan.tiles[tile].workers
        for micro_batch in range(len(plan.tiles[tile].micro_batches)):
            x_from: list[Rows] = []
            y_to: list[Rows] = []
            dy_from: list[Rows] = []
            dx_to: list[Rows] = []
            for feed in feeds[tile][micro_batch]:
                theirs = plan.tiles[feed.tile].workers
                start = first_number[tile, micro_batch, feed.tile, feed.micro_batch]
                x_from += _rows(feed, start, (_source(theirs, worker, ours),))
                dx_to += _rows(feed, start, [peer for peer in theirs if _source(ours, peer, theirs) == worker])
            for feed in consumers[tile][micro_batch]:
                theirs = plan.tiles[feed.tile].workers
                start = first_number[feed.tile, feed.micro_batch, tile, micro_batch]
                turned = Feed(
                    feed.tile, feed.micro_batch, tuple((there, here, count) for here, there, count in feed.runs)
                )
                dy_from += _rows(turned, start, (_source(theirs, worker, ours),))
                y_to += _rows(turned, start, [peer for peer in theirs if _source(ours, peer, theirs) == worker])
            found[tile, micro_batch] = Exchanges(tuple(x_from), tuple(y_to), tuple(dy_from), tuple(dx_to))
    return found


def peers(plan: Plan, worker: str) -> frozenset[str]:
    """Returns the workers to which `worker` needs a link: those before and after it, and those sharing its layers."""
    found = {
        rows.peer
        for one in exchanges(plan, worker).values()
        for rows in (*one.x_from, *one.y_to, *one.dy_from, *one.dx_to)
    }
    for tp_groups in holders(plan):
        shares_it = any(worker in workers for workers in tp_groups)
        found |= {other for workers in tp_groups for other in workers if shares_it}
    return frozenset(found - {worker})


def _rows(feed: Feed, start: int, peers: Sequence[str]) -> Iterator[Rows]:
    for peer in peers:
        for place, (_, here, count) in enumerate(feed.runs):
            yield Rows(peer, start + place, here, count)


def _source(sources: tuple[str, ...], receiver: str, receivers: tuple[str, ...]) -> str:
    return receiver if receiver in sources else sources[receivers.index(receiver) % len(sources)]


@dataclass(frozen=True)
class Term:
    """What one holder of a layer contributes to its gradient: the sum below a node of the tree over the units.

    `node` is None for the sum of all its micro-batches that are no whole unit.
    """

    replica: int
    node: Node | None


class GradientTerms:
    """The terms of each layer's gradient, and the numbers under which they travel to the owners of its shards."""

    def __init__(self, plan: Plan, layout: StateLayout, bitwise: bool) -> None:
        tiles = tiles_by_group(plan)
        self.terms = [
            tuple(
                Term(replica, node)
                for replica, workers in enumerate(tp_groups)
                for node in partial_sums(plan, layer, tiles[workers], bitwise)
            )
            for layer, tp_groups in enumerate(layout.holders)
        ]
        counts = [len(self.terms[shard.layer]) for shard in layout.all_shards]
        self._first = dict(zip(layout.all_shards, [0, *accumulate(counts)], strict=False))

    def number(self, shard: OptimizerShard, term: int) -> int:
        """Returns the number of the message that brings term `term` of a layer's gradient to the owner of a shard."""
        return self._first[shard] + term
