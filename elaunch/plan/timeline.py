"""What the actions of a step are, who does them in which order, and when each begins and ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
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


_Needs = Sequence[Sequence[Sequence[tuple[int, int, float]]]]
"""For [tile][micro-batch] what it needs: tile, micro-batch, and the seconds of the transfer."""


@dataclass(frozen=True)
class Played:
    """When actions start and end, in seconds from the start of the step; `free_s` and `busy_s` by `crew_numbers`."""

    starts: Sequence[float]
    ends: Sequence[float]
    free_s: Sequence[float]
    busy_s: Sequence[float]


class Prices:
    """What actions and transfers of a plan take, asked for once, however many orders of the actions are played."""

    def __init__(
        self, plan: Plan, action_s: ActionPrice, transfer_s: TransferPrice = lambda source, target, rows: 0.0
    ) -> None:
        """Takes the prices.

        Args:
            plan: whose tiles the actions name.
            action_s: asked once for each kind, tile and number of rows.
            transfer_s: asked once for each pair of tiles and number of rows.
        """
        self._plan, self._action_s, self._transfer_s = plan, action_s, transfer_s
        self._crews = crew_numbers(plan)
        self._n_workers = max(map(max, self._crews), default=-1) + 1
        self._seconds: dict[Kind, Sequence[Sequence[float]]] = {}

    def seconds(self, kind: Kind) -> Sequence[Sequence[float]]:
        """Returns, for [tile][micro-batch], what an action of a kind takes."""
        if kind not in self._seconds:
            found: list[Sequence[float]] = []
            for tile, rows in enumerate(rows_of(self._plan)):
                known = {n: self._action_s(kind, tile, n) for n in dict.fromkeys(rows)}
                found.append([known[n] for n in rows])
            self._seconds[kind] = found
        return self._seconds[kind]

    @cached_property
    def _activations(self) -> _Needs:
        return self._needs(sources(self._plan))

    @cached_property
    def _gradients(self) -> _Needs:
        return self._needs(takers(self._plan))

    @cached_property
    def _told_s(self) -> dict[tuple[int, int, int], float]:
        return {}

    def _needs(self, ends: Ends) -> _Needs:
        told_s, found = self._told_s, []
        for tile, some in enumerate(ends):
            of_tile = []
            for needed in some:
                of_micro_batch = []
                for source, number, n in needed:
                    way = source, tile, n
                    if way not in told_s:
                        told_s[way] = self._transfer_s(*way)
                    of_micro_batch.append((source, number, told_s[way]))
                of_tile.append(of_micro_batch)
            found.append(of_tile)
        return found

    def play(self, sequence: Sequence[Action]) -> Played:
        """Plays the critical path of a sequence through computation and transfers (Chameleon eq. 11)."""
        forward, backward, weights = ([[0.0] * len(some) for some in rows_of(self._plan)] for _ in range(3))
        nothing: _Needs = [[()] * len(some) for some in forward]
        done_of = {"F": forward, "B": backward, "I": backward, "W": weights}
        kinds = dict.fromkeys(action.kind for action in sequence)
        needs_of = {"F": self._activations, "B": self._gradients, "I": self._gradients, "W": nothing}
        of_kind = {kind: (needs_of[kind], self.seconds(kind), done_of[kind]) for kind in kinds}
        crews = self._crews
        free_s, busy_s = [0.0] * self._n_workers, [0.0] * self._n_workers
        starts: list[float] = []
        ends: list[float] = []
        for kind, tile, micro_batch in sequence:
            needs, seconds, done = of_kind[kind]
            start_s = 0.0
            for source, number, told_s in needs[tile][micro_batch]:
                ready_s = done[source][number] + told_s
                if ready_s > start_s:
                    start_s = ready_s
            takes_s = seconds[tile][micro_batch]
            for worker in crews[tile]:
                if free_s[worker] > start_s:
                    start_s = free_s[worker]
            end_s = start_s + takes_s
            for worker in crews[tile]:
                free_s[worker] = end_s
                busy_s[worker] += takes_s
            done[tile][micro_batch] = end_s
            starts.append(start_s)
            ends.append(end_s)
        return Played(starts, ends, free_s, busy_s)


def timeline(
    plan: Plan,
    order: Schedule,
    action_s: ActionPrice,
    transfer_s: TransferPrice = lambda source, target, rows: 0.0,
) -> Timeline:
    """Prices a schedule of a plan, as `Prices` do."""
    played = Prices(plan, action_s, transfer_s).play(order.sequence)
    busy_s = dict.fromkeys(plan.workers, 0.0)
    for tile, crew, numbers in zip(plan.tiles, crews_of(plan), crew_numbers(plan), strict=True):
        own = dict(zip(crew, (played.busy_s[number] for number in numbers), strict=True))
        busy_s |= {worker: own[worker if worker in own else crew[0]] for worker in tile.workers}
    return Timeline(order.sequence, played.starts, played.ends, max(played.ends, default=0.0), busy_s)


@once_per_plan
def crews_of(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Returns, for each tile, the workers whose clocks matter: one per TP group, if every worker is in one only."""
    groups = {tile.workers for tile in plan.tiles}
    apart = sum(map(len, groups)) > len(set(chain.from_iterable(groups)))
    return tuple(tile.workers if apart else tile.workers[:1] for tile in plan.tiles)


@once_per_plan
def crew_numbers(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Returns `crews_of` with numbers for workers, in the order of the tiles."""
    numbers: dict[str, int] = {}
    return tuple(tuple(numbers.setdefault(worker, len(numbers)) for worker in crew) for crew in crews_of(plan))
