"""Which native groups a plan needs, and in which order its messages come in them: pure functions of the plan.

    rows     from one worker to another: activations and their gradients, in the order in which the sender makes them
    holders  among all that hold a layer: terms of its gradient to the owners of its shards, new parameters back
    tp       among the members of a tensor-parallel group

A group of two for each direction, so that a message that nobody takes yet holds up no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from elaunch.plan.schedule import schedule
from elaunch.plan.tiling import Plan
from elaunch.workers.comm.native.opening import GroupKey
from elaunch.workers.layers.messages import Exchanges, GradientTerms, Kind, exchanges, tag
from elaunch.workers.state.layout import OptimizerShard, StateLayout

ROWS, HOLDERS, TP = "rows", "holders", "tp"

Message = tuple[str, str, int]
"""From, to, and its part."""


@dataclass(frozen=True)
class Bundle:
    """Messages that travel in one exchange of a group.

    Attributes:
        key: of the group.
        messages: all of them, also those between others; of several with the same ends, in their order.
    """

    key: GroupKey
    messages: tuple[Message, ...]


class NativeRoutes:
    """Where one worker's messages travel under a plan.

    Args:
        plan: valid.
        layout: of it.
        worker: this one.
        bitwise: as of the executor.
    """

    def __init__(self, plan: Plan, layout: StateLayout, worker: str, bitwise: bool) -> None:
        self._plan, self._layout, self.worker, self._bitwise = plan, layout, worker, bitwise
        self._exchanges: dict[str, dict[tuple[int, int], Exchanges]] = {}

    @cached_property
    def needs(self) -> tuple[GroupKey, ...]:
        """All groups that the workers of the plan need, in one order."""
        plan, found = self._plan, set[GroupKey]()
        for worker in plan.workers:
            for one in self._of(worker).values():
                found |= {rows_key(worker, rows.peer) for rows in (*one.y_to, *one.dx_to) if rows.peer != worker}
        found |= {tp_key(tile.workers) for tile in plan.tiles if len(tile.workers) > 1}
        found |= {key for layer in range(plan.n_layers) if (key := self.holders_key(layer)) is not None}
        return tuple(sorted(found))

    @cached_property
    def incoming(self) -> dict[str, tuple[int, ...]]:
        """By peer, the parts with rows that come from it to this worker, in their order."""
        found: dict[str, tuple[int, ...]] = {}
        order = schedule(self._plan).by_worker
        for peer in {rows.peer for one in self._of(self.worker).values() for rows in (*one.x_from, *one.dy_from)}:
            if peer == self.worker:
                continue
            parts = []
            for action in order[peer]:
                if action.passes is None:
                    continue
                one = self._of(peer)[action.tile, action.micro_batch]
                kind, told = (Kind.ACTIVATION, one.y_to) if action.kind == "F" else (Kind.INPUT_GRADIENT, one.dx_to)
                parts += [tag(kind, rows.number) for rows in told if rows.peer == self.worker]
            found[peer] = tuple(parts)
        return found

    @cached_property
    def gradients(self) -> tuple[Bundle, ...]:
        """This worker's bundles of a step, one for each layer, in the order in which backward comes to them."""
        layout, found = self._layout, list[Bundle]()
        terms = GradientTerms(self._plan, layout, self._bitwise)
        for layer in reversed(range(self._plan.n_layers)):
            messages = [
                (sender, layout.owner(shard), tag(Kind.GRADIENT, terms.number(shard, number)))
                for shard in layout.shards(layer)
                for number, term in enumerate(terms.terms[layer])
                if (sender := layout.holder(shard, term.replica)) != layout.owner(shard)
            ]
            found += self._bundles([layer], messages)
        return tuple(found)

    @cached_property
    def parameters(self) -> tuple[Bundle, ...]:
        """This worker's bundles of new parameters, one for each group of holders and dtype."""
        layers: dict[tuple[GroupKey, str], list[int]] = {}
        messages: dict[tuple[GroupKey, str], list[Message]] = {}
        for number, shard in enumerate(self._layout.all_shards):
            key = self.holders_key(shard.layer)
            if key is not None:
                where = key, str(self._layout.wire_dtype(shard.layer, shard.segment))
                layers.setdefault(where, []).append(shard.layer)
                messages.setdefault(where, []).extend(self._told(number, shard))
        return tuple(one for where in sorted(layers) for one in self._bundles(layers[where], messages[where]))

    def holders_key(self, layer: int) -> GroupKey | None:
        """Returns the group of all that hold a layer; None if that is one worker."""
        holders = {worker for workers in self._layout.holders[layer] for worker in workers}
        return GroupKey(HOLDERS, tuple(sorted(holders))) if len(holders) > 1 else None

    def _told(self, number: int, shard: OptimizerShard) -> Iterator[Message]:
        """The messages that bring a shard's parameters to all that hold them."""
        layout, owner = self._layout, self._layout.owner(shard)
        replicas = range(len(layout.holders[shard.layer]))
        peers = dict.fromkeys(peer for replica in replicas for peer in layout.receivers(shard, replica))
        return ((owner, peer, tag(Kind.PARAMETER, number)) for peer in peers if peer != owner)

    def _bundles(self, layers: Sequence[int], messages: Sequence[Message]) -> Iterator[Bundle]:
        """The bundle with these messages, if this worker has any of them."""
        key = self.holders_key(layers[0])
        if key is not None and any(self.worker in (sender, to) for sender, to, _ in messages):
            yield Bundle(key, tuple(messages))

    def _of(self, worker: str) -> dict[tuple[int, int], Exchanges]:
        if worker not in self._exchanges:
            self._exchanges[worker] = exchanges(self._plan, worker)
        return self._exchanges[worker]


def rows_key(sender: str, to: str) -> GroupKey:
    """Returns the group in which one worker sends rows to another."""
    return GroupKey(ROWS, (sender, to))


def tp_key(workers: Sequence[str]) -> GroupKey:
    """Returns the group of the members of a tensor-parallel group, in the order of their ranks."""
    return GroupKey(TP, tuple(workers))
