"""What follows for a change of plan from what the members say they have; the same on all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elaunch.errors import StateError
from elaunch.plan.tiling import Plan
from elaunch.plan.transition import transitional
from elaunch.workers.layers.change.held_state import HeldState
from elaunch.workers.layers.change.migration import Under, keys_of, shapes_of
from elaunch.workers.layers.executor import LayerKey
from elaunch.workers.layers.shards import Form
from elaunch.workers.layers.untrained.places import boxes_of_layers
from elaunch.workers.state.boxes import n_elements
from elaunch.workers.state.layout import LayerSpec, StateLayout
from elaunch.workers.state.routes import Router
from elaunch.workers.state.space import (
    OPTIMIZER,
    Holdings,
    Item,
    layer_boxes,
    optimizer_boxes,
    tensor_items,
    untrained_items,
)


class MigrationPlan:
    """Who has what, and who needs what under the next plan.

    Args:
        plan: the next one.
        held_states: of all members.
        specs: of all layers.

    Attributes:
        new: the next plan.
        forms: what the optimizer keeps, by name of a parameter.
        schedule: state of the learning-rate scheduler.
        items: the space of the optimizer's state.
        kept: by worker, the layers of its next part that it has already, cut in the same way, and which these are.
        lacking: by worker, those that it has not.
        stale: whether some parameters may be those of the step before.

    Raises:
        StateError: a worker was given other layers or settings.
    """

    def __init__(self, plan: Plan, held_states: Mapping[str, HeldState], specs: Sequence[LayerSpec]) -> None:
        _check_alike(held_states)
        self._held_states, self._specs = held_states, specs
        self._holding = {who: one for who, one in held_states.items() if one.plan}
        plans = {text: Plan.parse(text) for text in {one.plan for one in self._holding.values()}}
        self._old = {text: Under(old, StateLayout(old, specs)) for text, old in plans.items()}
        self.new = Under(plan, StateLayout(plan, specs))
        self.forms: dict[str, Form] = {}
        for one in self._holding.values():
            self.forms |= one.forms
        schedules = (one.schedule for one in self._holding.values() if one.schedule is not None)
        self.schedule: dict[str, Any] | None = next(schedules, None)
        self.items: dict[str, Item] = {}
        for spec in specs:
            for name, shape in spec.shapes.items():
                path = f"layers.{spec.index}.{name}"
                dtypes = (self.new.layout.sum_dtype(spec.index), *self.forms.get(path, Form()).dtypes)
                self.items[path + OPTIMIZER] = Item(path + OPTIMIZER, tuple(shape), dtypes)
        self.kept = {who: self._kept(who) for who in plan.workers}
        self.lacking = {who: set(keys_of(self.new.layout, who)) - self.kept[who].keys() for who in plan.workers}
        self.stale = any(one.stale for one in self._holding.values())

    @property
    def old(self) -> Under | None:
        """Returns the plan whose parts all have, as of the last commit; None if they have not."""
        whole = len(self._old) == 1 and not self.stale and all(one.boxes is None for one in self._holding.values())
        return next(iter(self._old.values())) if whole else None

    def router(self) -> Router:
        """Returns the routes of masters and optimizer states."""
        old = {who: self._old[one.plan].layout for who, one in self._holding.items()}
        return Router(
            self.items,
            {who: _held(who, one, old[who]) for who, one in self._holding.items()},
            {who: optimizer_boxes(self.new.layout.pieces(who)) for who in self.new.plan.workers},
            {who: _hosted(one, old[who]) for who, one in self._holding.items()},
        )

    def tensor_router(self, trained: bool) -> Router:
        """Returns the routes of frozen parameters and buffers, or of all tensors, to the layers that lack them."""
        old = {who: self._old[one.plan].layout for who, one in self._holding.items()}
        specs = [spec for spec in self._specs if trained or spec.untrained]
        moving = {index for keys in self.lacking.values() for index, _ in keys} & {spec.index for spec in specs}
        items = untrained_items([spec for spec in specs if spec.index in moving])
        if trained:
            items = {path: item for spec in specs if spec.index in moving for path, item in tensor_items(spec).items()}
        keys = {who: [key for key in keys_of(layout, who) if key[0] in moving] for who, layout in old.items()}
        copied = {
            who: {path: boxes for path, boxes in one.copied.items() if path in items}
            for who, one in self._held_states.items()
        }
        return Router(
            items,
            {who: boxes_of_layers(layout, who, keys[who], self._specs, trained) for who, layout in old.items()},
            {
                who: boxes_of_layers(self.new.layout, who, sorted(lacking), self._specs, trained)
                for who, lacking in self.lacking.items()
            },
            copied,
        )

    def between(self, members: tuple[str, ...], max_extra_bytes: int | None) -> Plan | None:
        """Returns the plan of a step in which the members go over; None if nothing moves, or only while all pause.

        Args:
            members: of the generation.
            max_extra_bytes: what a worker may hold beside its old state.
        """
        old, new = self.old, self.new
        if old is None or any(worker not in members for tile in old.plan.tiles for worker in tile.workers):
            return None
        extra = [self._extra_bytes(old, who) for who in new.plan.workers]
        if not any(extra) or (max_extra_bytes is not None and max(extra) > max_extra_bytes):
            return None
        # Shards of layers that are cut otherwise have no place in the sums of the other plan.
        return transitional(old.plan, new.plan, members) if old.layout.cuts == new.layout.cuts else None

    def _extra_bytes(self, old: Under, who: str) -> int:
        """Of what a worker gets, or gets in another place."""
        stay = shapes_of(old.layout, who)
        come = (piece for piece in self.new.layout.pieces(who) if piece.shape not in stay)
        size = sum(piece.elements * self.items[piece.parameter + OPTIMIZER].element_bytes for piece in come)
        for key in self.lacking[who]:
            spec = self._specs[key[0]]
            boxes = layer_boxes(spec, self.new.layout.holders[key[0]][key[1]], who)
            items = tensor_items(spec)
            size += sum(n_elements(box) * items[f"layers.{key[0]}.{name}"].element_bytes for name, box in boxes.items())
        return size

    def _kept(self, who: str) -> dict[LayerKey, LayerKey]:
        held_state = self._held_states.get(who)
        if held_state is None or not held_state.plan:
            return {}
        before = self._old[held_state.plan].layout
        there: dict[tuple[int, int, int], list[LayerKey]] = {}
        for key in keys_of(before, who):
            there.setdefault(_cut(before, key, who), []).append(key)
        found = {}
        for key in keys_of(self.new.layout, who):
            alike = there.get(_cut(self.new.layout, key, who))
            if alike:
                found[key] = alike.pop(0)
        return found


def _check_alike(held_states: Mapping[str, HeldState]) -> None:
    (first, settings), *others = ((worker, one.settings) for worker, one in held_states.items())
    for worker, theirs in others:
        if theirs != settings:
            raise StateError(
                f"{first} and {worker} were given different layers, samples or settings (digest of layers and samples, "
                f"seed, consistency, clip_norm): {settings} and {theirs}; all workers must run the same script with "
                "the same arguments"
            )


def _held(worker: str, held_state: HeldState, layout: StateLayout) -> Holdings:
    """What a worker has of its own optimizer state."""
    return optimizer_boxes(layout.pieces(worker)) if held_state.boxes is None else held_state.boxes


def _hosted(held_state: HeldState, layout: StateLayout) -> Holdings:
    """What a worker has in host memory of others' states, under its plan."""
    if held_state.hosted is not None:
        return held_state.hosted
    return optimizer_boxes(
        [piece for owner, count in held_state.snapshots.items() for piece in layout.pieces(owner)[:count]]
    )


def _cut(layout: StateLayout, key: LayerKey, worker: str) -> tuple[int, int, int]:
    """Layer, size of the TP group and rank in it."""
    workers = layout.holders[key[0]][key[1]]
    return key[0], len(workers), workers.index(worker)
