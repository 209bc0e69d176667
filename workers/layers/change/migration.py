"""A change of plan inside a step: nobody pauses while the state moves (ElasWave 6.2).

The step is done under a plan between the old and the new one (`elaunch.plan.transition`). In its background go
first the tensors of the layers that somebody gets, of which the first use waits, then what the optimizer keeps. All
of that is what the step before committed, and stays so until this one commits. The gradients go to the owners of the
new plan, so the commit is theirs. If the step is dropped, everybody still has what it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch

from elaunch.plan.tiling import Plan
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.layers.carry.links import LinkCarrier
from elaunch.workers.layers.carry.tp_sums import TPGroupSum
from elaunch.workers.layers.change.assembly import Assembly
from elaunch.workers.layers.executor import Executor, LayerKey, Outcome
from elaunch.workers.layers.messages import Kind, peers, tag
from elaunch.workers.layers.model import Layer
from elaunch.workers.layers.samples import Samples
from elaunch.workers.layers.shards import Shards
from elaunch.workers.layers.tensor_parallel import TPRank
from elaunch.workers.layers.untrained.places import boxes_of_layers, once, places_of_layers, shared
from elaunch.workers.state.background import BackgroundMove, BackgroundPathMove
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.chunks import Chunk, copy_box
from elaunch.workers.state.layout import LayerSpec, StateLayout
from elaunch.workers.state.routes import Router, n_bytes
from elaunch.workers.state.space import Item, optimizer_boxes, tensor_items

Keys = Mapping[str, Iterable[LayerKey]]
"""By worker: some of its layers."""

Layers = Mapping[LayerKey, Layer]


class Under(NamedTuple):
    """A plan, and where everything is under it."""

    plan: Plan
    layout: StateLayout


class Migration:
    """What a worker does in the step of the change.

    Args:
        between: the plan of the step.
        group: its workers.
        old, new: the two plans.
        layers: of this worker under each; those of the new one may have no values yet.
        lacking: by worker, the layers of the new plan that it has not.
        specs: of all layers.
        optimizer_items: of the space.
        local: what this worker owns under the old plan.
        sums: over the TP groups of the old plan.
        device: of the new tensors.
        make_executor: of a plan, its layout and this worker's layers.
    """

    def __init__(
        self,
        between: Plan,
        group: Group,
        old: Under,
        new: Under,
        layers: tuple[Layers, Layers],
        lacking: Keys,
        specs: tuple[LayerSpec, ...],
        optimizer_items: Mapping[str, Item],
        local: Shards | None,
        sums: Mapping[tuple[str, ...], TPGroupSum],
        device: torch.device,
        make_executor: Callable[[Plan, StateLayout, Mapping[LayerKey, Layer]], Executor],
    ) -> None:
        self.plan = between
        worker = group.members[group.rank]
        layout = StateLayout(between, specs, owners=new.plan)
        self._worker, self._staged = worker, device.type != "cpu"
        self._to_new = dict(zip(layout.all_shards, new.layout.all_shards, strict=True))
        self._sums = dict(sums)
        for (index, replica), layer in layers[1].items():
            workers = new.layout.holders[index][replica]
            if (index, replica) in lacking.get(worker, ()):
                add = self._sums.setdefault(workers, TPGroupSum(workers, worker)) if len(workers) > 1 else None
                layer.tp_rank = TPRank(workers.index(worker), len(workers), add)
        self._executor = make_executor(between, layout, _layers_of(layout, worker, old, new, layers))
        self.assembly = Assembly(new.layout.pieces(worker), local, optimizer_items, device)

        before, after = old.layout, new.layout
        moving = sorted({index for keys in lacking.values() for index, _ in keys})
        self._tensors = {index: tensor_items(specs[index]) for index in moving}
        items = {path: item for one in self._tensors.values() for path, item in one.items()} | {**optimizer_items}
        needed: dict[str, dict[str, tuple[Box, ...]]] = {
            who: boxes_of_layers(after, who, lacking.get(who, ()), specs, trained=True) for who in new.plan.workers
        }
        for who in new.plan.workers:
            stay = shapes_of(before, who)
            needed[who] |= optimizer_boxes([one for one in after.pieces(who) if one.shape not in stay])
        held = {}
        for who in old.plan.workers:
            keys = [key for key in keys_of(before, who) if key[0] in self._tensors]
            held[who] = boxes_of_layers(before, who, keys, specs, trained=True) | optimizer_boxes(before.pieces(who))
        # What is passed on would come later, and all has the time of a step.
        router = Router(items, held, needed, relays=False)
        routes = router.of(worker)
        state: dict[str, list[Chunk]] = {} if local is None else local.chunks()
        moved = {key: layer for key, layer in layers[0].items() if key[0] in self._tensors}
        state |= once(places_of_layers(before, worker, moved, trained=True))
        coming = {key: layers[1][key] for key in sorted(lacking.get(worker, ()))}
        wanted = places_of_layers(after, worker, coming, trained=True)
        filled = once(wanted)
        places = self.assembly.chunks() | filled
        # What a worker needs twice arrives once.
        self._shared = shared(wanted, filled)
        # The first number is that under which the members tell each other whether a path stands.
        over_links = BackgroundMove(items, routes, state, places, tag(Kind.MIGRATION, 1))
        self.coming_bytes = n_bytes(items, routes.receive)
        """That this worker will receive."""
        most_bytes = max(self.coming_bytes, n_bytes(items, routes.send))
        path = group.paths.in_step(group, most_bytes, device) if group.paths is not None else None
        self._move: BackgroundMove | BackgroundPathMove = over_links
        if path is not None:
            self._move = BackgroundPathMove(over_links, path, group, tag(Kind.MIGRATION, 0))
        ends = {end for piece in (*routes.send, *routes.receive) for end in (piece.source, piece.to)}
        group.link_up(peers(between, worker) | ends)

    def run(self, traffic: Traffic, step: int, samples: Samples) -> Outcome:
        """Does the step; when it returns, all that this worker will own is here, with the gradients for it."""
        self._move.begin(traffic)
        load = samples.begin(self.plan, step, self._executor.loaded)
        carrier = LinkCarrier(traffic, self._worker, self._staged)
        outcome = self._executor.run(carrier, step, load, self._sums, self._wait)
        self._move.wait()
        return Outcome(outcome.losses, {self._to_new[shard]: one for shard, one in outcome.gradients.items()})

    def move(self, traffic: Traffic) -> None:
        """Moves the state alone, without a step."""
        self._move.begin(traffic)
        self._move.wait()
        self._wait(range(self.plan.n_layers))

    def leave(self) -> None:
        """Leaves what is under way, which is over: nothing writes into what was to come any more."""
        self._move.leave()

    def _wait(self, layers: range) -> None:
        """Until all tensors of these layers are here; they stay, so it waits once."""
        wanted = [path for index in layers for path in self._tensors.pop(index, ())]
        if wanted:
            self._move.wait(wanted)
        for path in wanted:
            for source, to, box in self._shared.pop(path, ()):
                copy_box([source], [to], box)


def keys_of(layout: StateLayout, worker: str) -> list[LayerKey]:
    """Returns the layers of a worker."""
    return [
        (layer, replica)
        for layer, tp_groups in enumerate(layout.holders)
        for replica, workers in enumerate(tp_groups)
        if worker in workers
    ]


def shapes_of(layout: StateLayout, worker: str) -> set[tuple[object, ...]]:
    """Returns the shapes of all pieces of a worker."""
    return {piece.shape for piece in layout.pieces(worker)}


def _layers_of(
    layout: StateLayout, worker: str, old: Under, new: Under, layers: tuple[Layers, Layers]
) -> dict[LayerKey, Layer]:
    """This worker's layers under a plan of which each TP group is one of the two others'."""
    found = {
        (index, under.layout.holders[index][replica]): layer
        for under, its in ((new, layers[1]), (old, layers[0]))
        for (index, replica), layer in its.items()
    }
    return {key: found[key[0], layout.holders[key[0]][key[1]]] for key in keys_of(layout, worker)}
