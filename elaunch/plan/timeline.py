"""What the actions of a step are, who does them in which order, and when each begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from elaunch.plan.tiling import Plan
from elaunch.plan.views import Ends, once_per_plan, rows_of, sources, takers

Kind = Literal["F", "B", "I", "W"]
"""Forward, whole backward, and the parts of one that is split: input gradient and weight gradients. As in
torch.distributed.pipelining."""


class Action(NamedTuple):
    """One micro-batch of one tile; prints as F3.0: the forward of tile 3, micro-batch 0."""

    kind: Kind
    tile: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.tile}.{self.micro_batch}"

    @property
    def passes(self) -> Literal["activation", "input gradient"] | None:
        """Returns what it needs from other tiles, and gives to others; None for weight gradients."""
        return _PASSES[self.kind]


_PASSES: dict[Kind, Literal["activation", "input gradient"] | None] = {
    "F": "activation",
    "B": "input gradient",
    "I": "input gradient",
    "W": None,
}


@dataclass(frozen=True)
class Schedule:
    """The actions of each worker, in order, and the global sequence of which each of these orders is a part."""

    sequence: tuple[Action, ...]
    by_worker: Mapping[str, tuple[Action, ...]]

    def __str__(self) -> str:
        return "\n".join(f"{worker} {' '.join(map(str, actions))}" for worker, actions in self.by_worker.items())


def by_workers(plan: Plan, sequence: Sequence[Action]) -> Schedule:
    """Returns the schedule that follows from a sequence of all actions of a step."""
    crews = crews_of(plan)
    found: dict[str, list[Action]] = {}
    for action in sequence:
        for worker in crews[action.tile]:
            found.setdefault(worker, []).append(action)
    orders = {worker: tuple(actions) for worker, actions in found.items()}
    by_worker = dict.fromkeys(plan.workers, tuple[Action, ...]())
    for tile, crew in zip(plan.tiles, crews, strict=True):
        by_worker |= {worker: orders[worker if worker in crew else crew[0]] for worker in tile.workers}
    return Schedule(tuple(sequence), by_worker)


ActionPrice = Callable[[Kind, int, int], float]
"""Seconds of an action on its workers, by kind, tile and rows."""

TransferPrice = Callable[[int, int, int], float]
"""Seconds from the end of an action to the moment at which one that needs it may start: from this tile to that one, for
so many rows."""


@dataclass(frozen=True)
class Timeline:
    """When the actions of a schedule's sequence start and end, in seconds from the start of the step."""

    sequence: Sequence[Action]
    starts: Sequence[float]
    ends: Sequence[float]
    step_s: float
    busy_s: Mapping[str, float]

    @cached_property
    def starts_s(self) -> Mapping[Action, float]:
        """Returns the start of each action, in seconds."""
        return dict(zip(self.sequence, self.starts, strict=True))

    @cached_property
    def ends_s(self) -> Mapping[Action, float]:
        """Returns the end of each action, in seconds."""
        return dict(zip(self.sequence, self.ends, strict=True))

    @property
    def bubble(self) -> float:
        """Returns the part of all workers' time in which they wait, 0..1."""
        if not self.busy_s or not self.step_s:
            return 0.0
        return 1 - sum(self.busy_s.values()) / (len(self.busy_s) * self.step_s)


def timeline(
    plan: Plan,
    order: Schedule,
    action_s: ActionPrice,
    transfer_s: TransferPrice = lambda source, target, rows: 0.0,
) -> Timeline:
    """Prices a schedule: plays its critical path through computation and transfers (Chameleon eq. 11).

    Args:
        plan: whose tiles the actions name.
        order: of the actions.
        action_s: asked once for each kind, tile and number of rows.
        transfer_s: asked once for each pair of tiles and number of rows.
    """
    nothing = tuple(((),) * len(tile.micro_batches) for tile in plan.tiles)
    needs_of: dict[Kind, Ends] = {"F": sources(plan), "B": takers(plan), "I": takers(plan), "W": nothing}
    forward, backward, weights = ([[0.0] * len(tile.micro_batches) for tile in plan.tiles] for _ in range(3))
    done_of = {"F": forward, "B": backward, "I": backward, "W": weights}
    rows, crews = rows_of(plan), crews_of(plan)
    taken_s: dict[tuple[Kind, int, int], float] = {}
    told_s: dict[tuple[int, int, int], float] = {}
    free_s = dict.fromkeys(order.by_worker, 0.0)
    busy_s = dict.fromkeys(order.by_worker, 0.0)
    starts: list[float] = []
    ends: list[float] = []
    for kind, tile, micro_batch in order.sequence:
        done, start_s = done_of[kind], 0.0
        for source, number, n in needs_of[kind][tile][micro_batch]:
            way = source, tile, n
            if way not in told_s:
                told_s[way] = transfer_s(*way)
            start_s = max(start_s, done[source][number] + told_s[way])
        what = kind, tile, rows[tile][micro_batch]
        if what not in taken_s:
            taken_s[what] = action_s(*what)
        seconds = taken_s[what]
        for worker in crews[tile]:
            start_s = max(start_s, free_s[worker])
        end_s = start_s + seconds
        for worker in crews[tile]:
            free_s[worker] = end_s
            busy_s[worker] += seconds
        done[tile][micro_batch] = end_s
        starts.append(start_s)
        ends.append(end_s)
    for here, crew in zip(plan.tiles, crews, strict=True):
        busy_s |= {worker: busy_s[crew[0]] for worker in here.workers if worker not in crew}
    return Timeline(order.sequence, starts, ends, max(ends, default=0.0), busy_s)


@once_per_plan
def crews_of(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Returns, for each tile, the workers whose clocks matter: one per TP group, if every worker is in one only."""
    tp_groups: dict[str, set[tuple[str, ...]]] = {}
    for tile in plan.tiles:
        for worker in tile.workers:
            tp_groups.setdefault(worker, set()).add(tile.workers)
    apart = any(len(some) > 1 for some in tp_groups.values())
    return tuple(tile.workers if apart else tile.workers[:1] for tile in plan.tiles)
