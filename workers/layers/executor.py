"""Runs one worker's part of a step: its actions in the order of the schedule, activations and gradients as messages.

Nothing here waits for a send, and every receive is of a message whose sender does not wait for this worker (see
`elaunch.plan.schedule`), so a step ends or is interrupted.

The gradient of a layer goes to the owners of its shards as soon as the last backward of the layer is over. Where the
layers of a tile have different holders, so that their reductions would queue at some workers, they go out in the rounds
of a greedy colouring (Chameleon IV-B): of one round no worker has two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from elaunch.errors import StateError
from elaunch.plan.schedule import schedule
from elaunch.plan.sums import Node, TreeSum
from elaunch.plan.tiling import MicroBatch, Plan, Tile, n_rows
from elaunch.plan.timeline import Action
from elaunch.plan.views import gradient_groups, rounds, rows_by_unit, unit_of
from elaunch.workers.layers.carry.carrier import Carrier
from elaunch.workers.layers.carry.tp_sums import TPGroupSum, added
from elaunch.workers.layers.chain.chain import Chain, SavedActivations
from elaunch.workers.layers.chain.split import DeferredWeights
from elaunch.workers.layers.messages import GradientTerms, Kind, Rows, exchanges, tag
from elaunch.workers.layers.model import Draw, Layer
from elaunch.workers.layers.samples import Load
from elaunch.workers.layers.timing import ActionSpan, Span, Stopwatch
from elaunch.workers.state.layout import LayerSpec, OptimizerShard, StateLayout

LOOK_AHEAD = 2
"""Messages of so many actions to come are received in the background."""

LossFunction = Callable[[Tensor, Any], Tensor]
LayerKey = tuple[int, int]
"""A layer and the number of one of the TP groups that hold it."""


Summed = Callable[[OptimizerShard, Tensor], object]
"""Takes the gradient of a shard."""


@dataclass(frozen=True)
class Outcome:
    """What a worker has after its actions.

    Attributes:
        losses: (first sample, rows, mean loss over them) of each micro-batch that this worker reports.
        gradients: of the shards that this worker owns, of the mean loss over the global batch.
    """

    losses: tuple[tuple[int, int, float], ...]
    gradients: dict[OptimizerShard, Tensor]


@dataclass(eq=False)
class _Sum:
    """The gradients of one layer's parameters over this worker's micro-batches of the step."""

    tree: TreeSum[list[Tensor]]
    rest: list[Tensor] | None = None
    left: int = 0


class Executor:
    """Executes the tiles of `worker` under `plan`.

    Args:
        plan: valid.
        worker: whose part it is.
        specs: of all layers.
        layers: those of this worker, by layer and number of the TP group it belongs to.
        layout: of gradients and optimizer states.
        loss_fn: mean loss over the rows of (output, target).
        seed: of the random numbers.
        bitwise: whether gradients are summed in an order that does not depend on the plan.
    """

    def __init__(
        self,
        plan: Plan,
        worker: str,
        specs: Sequence[LayerSpec],
        layers: Mapping[LayerKey, Layer],
        layout: StateLayout,
        loss_fn: LossFunction,
        seed: int,
        bitwise: bool,
    ) -> None:
        self._plan, self._worker, self._specs, self._layers = plan, worker, specs, layers
        self._layout, self._loss_fn, self._seed, self._bitwise = layout, loss_fn, seed, bitwise
        self.order = schedule(plan).by_worker[worker]
        self._exchanges = exchanges(plan, worker)
        self._terms = GradientTerms(plan, layout, bitwise)
        self._owned = [shard for shard in layout.all_shards if layout.owner(shard) == worker]
        parameters = (one for layer in layers.values() for one in layer.module.parameters())
        self._device = next((one.device for one in parameters), torch.device("cpu"))
        self._replica = {tile: self._replicas_of(tile) for tile in plan.tiles_of(worker)}
        self._chains = {
            tile: Chain([layers[key] for key in replicas.items()], bitwise) for tile, replicas in self._replica.items()
        }
        groups = gradient_groups(plan)
        self._round = dict.fromkeys(range(plan.n_layers), 0)
        for number, members in enumerate(rounds(groups)):
            self._round |= {layer: number for group in members for layer in groups[group].layers}

    @property
    def loaded(self) -> list[MicroBatch]:
        """The micro-batches whose samples this worker loads in a step, in the order in which it does."""
        actions = [one for one in self.order if one.kind == "F" and self.loads(self._plan.tiles[one.tile])]
        return [self._plan.tiles[one.tile].micro_batches[one.micro_batch] for one in actions]

    def loads(self, tile: Tile) -> bool:
        """Whether a tile begins with the inputs, or ends with what is compared with the targets."""
        return tile.layers.start == 0 or tile.layers.stop == self._plan.n_layers

    def run(
        self,
        carrier: Carrier,
        step: int,
        load: Load,
        sums: Mapping[tuple[str, ...], TPGroupSum],
        ready: Callable[[range], object] = lambda _: None,
        watch: Stopwatch | None = None,
        summed: Summed = lambda _, __: None,
    ) -> Outcome:
        """Does all actions of step number `step`.

        Args:
            carrier: of the tensors of the step.
            step: its number.
            load: of the samples.
            sums: over tensor-parallel groups.
            ready: called before some layers are used, returns when they can be.
            watch: measures the layers, if there is one.
            summed: called with each of this worker's shards and its gradient as soon as that is complete, most of them
                while backward goes on.

        Raises:
            StepInterrupted: a link broke, or the membership changes.
            StateError: a layer or the loss does something that cannot be used.
        """
        return _Step(self, carrier, step, load, sums, ready, watch, summed).run()

    @cached_property
    def _taker(self) -> dict[int, Action]:
        """By part of rows that come from others, the action that needs it."""
        found: dict[int, Action] = {}
        for action in self.order:
            peers = self._exchanges[action.tile, action.micro_batch]
            if action.passes is None:
                continue
            kind, rows = (Kind.ACTIVATION, peers.x_from) if action.kind == "F" else (Kind.INPUT_GRADIENT, peers.dy_from)
            found |= {tag(kind, one.number): action for one in rows if one.peer != self._worker}
        return found

    def _replicas_of(self, tile: int) -> dict[int, int]:
        workers = self._plan.tiles[tile].workers
        return {layer: self._layout.holders[layer].index(workers) for layer in self._plan.tiles[tile].layers}


class _Step:
    def __init__(
        self,
        executor: Executor,
        carrier: Carrier,
        step: int,
        load: Load,
        sums: Mapping[tuple[str, ...], TPGroupSum],
        ready: Callable[[range], object],
        watch: Stopwatch | None,
        summed: Summed,
    ) -> None:
        self._of, self._plan = executor, executor._plan
        self._carrier, self._step, self._load, self._ready, self._watch = carrier, step, load, ready, watch
        self._summed = summed
        self._gradients: dict[OptimizerShard, Tensor] = {}
        # In the order in which backward comes to them.
        self._unsummed = deque(sorted(executor._owned, key=lambda shard: -shard.layer))
        self._saved: dict[tuple[int, int], list[SavedActivations]] = {}
        self._left: dict[tuple[int, int], list[DeferredWeights]] = {}
        self._dy: dict[tuple[int, int], Tensor] = {}
        self._local: dict[int, Tensor] = {}
        self._posted: dict[int, Tensor] = {}
        self._losses: list[tuple[int, int, Tensor]] = []
        self._sums: dict[LayerKey, _Sum] = {}
        self._arriving: dict[tuple[OptimizerShard, int], Tensor] = {}
        for tile, replicas in executor._replica.items():
            for key in replicas.items():
                entry = self._sums.setdefault(key, _Sum(TreeSum(self._plan.n_units, _add_all)))
                entry.left += len(self._plan.tiles[tile].micro_batches)
        for one in sums.values():
            one.begin(carrier, watch)

    def run(self) -> Outcome:
        self._post_gradients()
        order = self._of.order
        do = {"F": self._forward, "B": self._backward, "I": self._input_gradient, "W": self._weight_gradients}
        for place, action in enumerate(order):
            for coming in order[place : place + LOOK_AHEAD + 1]:
                self._post(coming)
            do[action.kind](action)
        with nullcontext() if self._watch is None else self._watch.phase("sums"):
            while self._unsummed:
                self._sum(self._unsummed.popleft())
            gradients = {shard: self._gradients[shard] for shard in self._of._owned}
            self._carrier.finish()
        return Outcome(tuple((sample, rows, float(loss)) for sample, rows, loss in self._losses), gradients)

    # -- actions ------------------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        key = (action.tile, action.micro_batch)
        tile, peers = self._plan.tiles[action.tile], self._of._exchanges[key]
        samples = tile.micro_batches[action.micro_batch]
        first, last = tile.layers.start == 0, tile.layers.stop == self._plan.n_layers
        data = self._loaded(samples) if self._of.loads(tile) else None
        x = data[0] if data is not None and first else self._collect(Kind.ACTIVATION, peers.x_from)
        self._ready(tile.layers)
        with self._timed(action) as timed:
            of_layers = None if self._watch is None else self._watch.of_layers
            x, self._saved[key] = self._of._chains[action.tile].forward(x, self._draw(samples), of_layers)
            if last:
                assert data is not None
                self._dy[key] = self._loss(x, data[1], samples, reports=tile.workers[0] == self._of._worker)
            if timed is not None:
                timed.layers = _spans(self._saved[key])
                if last and timed.layers:
                    timed.layers[-1].lasts("F")
            self._hand_over(Kind.ACTIVATION, x, peers.y_to, timed)

    def _loaded(self, samples: MicroBatch) -> tuple[Tensor, Any]:
        with nullcontext() if self._watch is None else self._watch.loading(n_rows(samples)):
            return self._load(samples)

    def _timed(self, action: Action) -> AbstractContextManager[ActionSpan | None]:
        return nullcontext() if self._watch is None else self._watch.action(action)

    def _loss(self, y: Tensor, target: Any, samples: MicroBatch, reports: bool) -> Tensor:
        """The gradient of the output, in units of a whole micro-batch's mean loss."""
        leaf = y.detach().requires_grad_()
        loss = self._of._loss_fn(leaf, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise StateError(f"loss_fn must return one number that depends on the output, got {loss!r}")
        rows = n_rows(samples)
        if reports:
            self._losses.append((samples[0].start, rows, loss.detach()))
        weight = rows / self._plan.micro_batch_size
        (grad,) = torch.autograd.grad(loss if weight == 1 else loss * weight, leaf)
        return grad

    def _backward(self, action: Action) -> None:
        key = (action.tile, action.micro_batch)
        tile, peers = self._plan.tiles[action.tile], self._of._exchanges[key]
        samples = tile.micro_batches[action.micro_batch]
        unit = unit_of(self._plan, samples) if self._of._bitwise else None
        dy: Tensor | None = self._dy.pop(key, None)
        if dy is None:
            dy = self._collect(Kind.INPUT_GRADIENT, peers.dy_from)
        later: list[LayerKey] = []
        held: list[list[Tensor]] = []

        def add(layer: int, grads: list[Tensor]) -> None:
            key = (layer, self._of._replica[action.tile][layer])
            if self._add(key, unit, grads):
                # The first round goes out while backward goes on.
                (later.append if self._of._round[layer] else self._send_gradient)(key)
                if not peers.dx_to:
                    self._sum_what_came()

        def done(layer: Layer, grads: list[Tensor]) -> None:
            if peers.dx_to and layer.spec.index == tile.layers.start:
                held.append(grads)
            else:
                add(layer.spec.index, grads)

        with self._timed(action) as timed:
            saved = self._saved.pop(key)
            if timed is not None:
                timed.layers = _spans(saved)
            dx = self._of._chains[action.tile].backward(saved, dy, self._draw(samples), done)
            if peers.dx_to:
                # Others wait for this, and for the gradients of the first layer, which come with it, nobody does yet.
                assert dx is not None, f"layer {tile.layers.start} gives no gradient to the one before it"
                self._hand_over(Kind.INPUT_GRADIENT, dx, peers.dx_to, timed)
                add(tile.layers.start, *held)
            self._send_later(later)

    def _input_gradient(self, action: Action) -> None:
        """Does the part of a backward for which others wait."""
        key = (action.tile, action.micro_batch)
        tile, peers = self._plan.tiles[action.tile], self._of._exchanges[key]
        dy: Tensor | None = self._dy.pop(key, None)
        if dy is None:
            dy = self._collect(Kind.INPUT_GRADIENT, peers.dy_from)
        whole: list[tuple[Layer, list[Tensor]]] = []

        def done(layer: Layer, grads: list[Tensor]) -> None:
            whole.append((layer, grads))

        draw = self._draw(tile.micro_batches[action.micro_batch])
        with self._timed(action) as timed:
            dx, left = self._of._chains[action.tile].input_gradient(self._saved.pop(key), dy, draw, done)
            assert dx is not None, f"layer {tile.layers.start} gives no gradient to the one before it"
            self._hand_over(Kind.INPUT_GRADIENT, dx, peers.dx_to, timed)
            self._left[key] = left
            self._add_all_of(action, whole)

    def _weight_gradients(self, action: Action) -> None:
        """Does the rest of a backward."""
        with self._timed(action):
            for one in self._left.pop((action.tile, action.micro_batch)):
                self._add_all_of(action, one.layers())

    def _add_all_of(self, action: Action, given: Iterable[tuple[Layer, list[Tensor]]]) -> None:
        """Adds gradients of layers, and sends those that are complete."""
        tile = self._plan.tiles[action.tile]
        unit = unit_of(self._plan, tile.micro_batches[action.micro_batch]) if self._of._bitwise else None
        later: list[LayerKey] = []
        for layer, grads in given:
            key = (layer.spec.index, self._of._replica[action.tile][layer.spec.index])
            if self._add(key, unit, grads):
                (later.append if self._of._round[layer.spec.index] else self._send_gradient)(key)
        self._send_later(later)

    def _send_later(self, later: Sequence[LayerKey]) -> None:
        """Sends the gradients of later rounds than the first, in the order of the rounds."""
        for key in sorted(later, key=lambda key: (self._of._round[key[0]], -key[0])):
            self._send_gradient(key)
        self._sum_what_came()

    def _draw(self, samples: MicroBatch) -> Draw:
        plan = self._plan
        return Draw(self._of._seed, self._step, rows_by_unit(plan, samples), plan.micro_batch_size)

    # -- activations and their gradients --------------------------------------------------------------------------

    def _post(self, action: Action) -> None:
        """Has what this action needs received in the background."""
        peers = self._of._exchanges[action.tile, action.micro_batch]
        if action.passes is None:
            return
        if action.kind == "F":
            kind, rows, layer = Kind.ACTIVATION, peers.x_from, self._plan.tiles[action.tile].layers.start - 1
        else:
            kind, rows, layer = Kind.INPUT_GRADIENT, peers.dy_from, self._plan.tiles[action.tile].layers.stop - 1
        away = [one for one in rows if one.peer != self._of._worker]
        if not away or tag(kind, away[0].number) in self._posted:
            return
        shape, dtype = self._of._specs[layer].output
        whole = torch.empty((sum(one.count for one in rows), *shape), dtype=dtype, device=self._of._device)
        for one in away:
            part = tag(kind, one.number)
            self._posted[part] = whole
            self._carrier.post(one.peer, part, whole[one.first : one.first + one.count])
        for one in away:
            for part in self._carrier.before(one.peer, tag(kind, one.number)):
                self._post(self._of._taker[part])

    def _collect(self, kind: Kind, rows: Sequence[Rows]) -> Tensor:
        """Waits for the rows and puts them together."""
        whole: Tensor | None = None
        away = [one for one in rows if one.peer != self._of._worker]
        with self._watch.receiving() if away and self._watch is not None else nullcontext():
            for one in away:
                self._carrier.wait(one.peer, tag(kind, one.number))
                whole = self._posted.pop(tag(kind, one.number))
        local = [(one.first, self._local.pop(tag(kind, one.number))) for one in rows if one.peer == self._of._worker]
        if whole is None:
            return (
                local[0][1]
                if len(local) == 1
                else torch.cat([rows_here for _, rows_here in sorted(local, key=itemgetter(0))])
            )
        for first, rows_here in local:
            whole[first : first + len(rows_here)] = rows_here
        return whole

    def _hand_over(self, kind: Kind, whole: Tensor, rows: Sequence[Rows], timed: ActionSpan | None = None) -> None:
        for one in rows:
            if one.peer == self._of._worker:
                self._local[tag(kind, one.number)] = whole[one.first : one.first + one.count]
        away = [one for one in rows if one.peer != self._of._worker]
        if away:
            with nullcontext() if timed is None else timed.sending():
                sent = whole.detach().contiguous()
                for one in away:
                    self._carrier.send(one.peer, tag(kind, one.number), sent[one.first : one.first + one.count])

    # -- gradients of parameters ----------------------------------------------------------------------------------

    def _add(self, key: LayerKey, unit: int | None, grads: list[Tensor]) -> bool:
        """Adds the gradients of a micro-batch; tells whether it was the last one here."""
        entry = self._sums[key]
        grads = [grad if grad.dtype == torch.float64 else grad.float() for grad in grads]
        if unit is not None:
            entry.tree.put(Node(0, unit), grads)
        else:
            entry.rest = grads if entry.rest is None else _add_all(entry.rest, grads)
        entry.left -= 1
        return not entry.left

    def _send_gradient(self, key: LayerKey) -> None:
        """All contributions of this worker to a layer's gradient are there: send them to those who own it."""
        layout, worker = self._of._layout, self._of._worker
        entry, (layer, replica) = self._sums[key], key
        workers = layout.holders[layer][replica]
        sums: list[tuple[Node | None, list[Tensor]]] = [*entry.tree.items()]
        if entry.rest is not None:
            sums.append((None, entry.rest))
        names = list(self._of._layers[layer, replica].parameters)
        numbers = [place for place, term in enumerate(self._of._terms.terms[layer]) if term.replica == replica]
        flats: dict[tuple[int, int], Tensor] = {}
        for shard in layout.shards(layer):
            if layout.holder(shard, replica) != worker:
                continue
            for number, (_, grads) in zip(numbers, sums, strict=True):
                flat = flats.get((shard.segment, number))
                if flat is None:
                    given = dict(zip(names, grads, strict=True))
                    flat = flats[shard.segment, number] = layout.flatten(layer, shard.segment, workers, given)
                part = flat[shard.start : shard.stop]
                owner = layout.owner(shard)
                if owner == worker:
                    self._arriving[shard, number] = part
                else:
                    message = tag(Kind.GRADIENT, self._of._terms.number(shard, number))
                    self._carrier.send(owner, message, part)
        entry.tree.clear()
        entry.rest = None

    def _post_gradients(self) -> None:
        layout, terms = self._of._layout, self._of._terms
        for shard in self._of._owned:
            for number, term in enumerate(terms.terms[shard.layer]):
                sender = layout.holder(shard, term.replica)
                if sender != self._of._worker:
                    part = torch.empty(
                        shard.stop - shard.start, dtype=layout.sum_dtype(shard.layer), device=self._of._device
                    )
                    self._arriving[shard, number] = part
                    self._carrier.post(sender, tag(Kind.GRADIENT, terms.number(shard, number)), part)

    def _sum_what_came(self) -> None:
        """Sums the gradients of the next shards, as long as all terms of one are here."""
        while self._unsummed and self._is_here(self._unsummed[0]):
            self._sum(self._unsummed.popleft())

    def _is_here(self, shard: OptimizerShard) -> bool:
        layout, terms, worker = self._of._layout, self._of._terms, self._of._worker
        for number, term in enumerate(terms.terms[shard.layer]):
            sender = layout.holder(shard, term.replica)
            if sender == worker:
                if (shard, number) not in self._arriving:
                    return False
            elif not self._carrier.arrived(sender, tag(Kind.GRADIENT, terms.number(shard, number))):
                return False
        return True

    def _sum(self, shard: OptimizerShard) -> None:
        total = self._gradients[shard] = self._total(shard)
        self._summed(shard, total)

    def _total(self, shard: OptimizerShard) -> Tensor:
        """The gradient of a shard: sums over whole units along the tree, then the rest by TP group, in order."""
        layout, terms = self._of._layout, self._of._terms
        tree = TreeSum[Tensor](self._plan.n_units, Tensor.add_)
        rest = []
        for number, term in enumerate(terms.terms[shard.layer]):
            sender = layout.holder(shard, term.replica)
            if sender != self._of._worker:
                self._carrier.wait(sender, tag(Kind.GRADIENT, terms.number(shard, number)))
            part = self._arriving.pop((shard, number))
            if term.node is None:
                rest.append(part)
            else:
                tree.put(term.node, part)
        whole = tree.total()
        total = added([*([] if whole is None else [whole]), *rest])
        return total.mul_(self._plan.micro_batch_size / self._plan.global_batch_size)


def _spans(saved: Iterable[SavedActivations]) -> list[Span]:
    return [span for piece in saved for span in piece.spans]


def _add_all(some: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    """Not in place: autograd may give one tensor as the gradient of several things, or one whose elements overlap."""
    return list(torch._foreach_add(some, more)) if some else []
