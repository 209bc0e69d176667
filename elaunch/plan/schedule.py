"""The order in which each worker does its part of a step: 1F1B, generalised to tilings.

`schedule` plays the step through on clocks that count layer-rows, each layer by the cost that the plan gives it: a
worker that is free starts a backward if one is ready, else a forward if few enough of its micro-batches are in flight.
On a symmetric plan this gives exactly the 1F1B of pipelines; elsewhere what 1F1B would do if it knew of rows and of
several tiles. Where stages take different times, a backward that never waits lets the pipeline run dry, and it is often
faster to start forwards first, as long as they are few enough; so both are played, unless the plan asks for one, and
the faster one counts. The executor follows this order and `timeline` prices it, so what is estimated is what runs.

No order made here can deadlock. The run on simulated clocks puts all actions of all workers into one sequence in which
each action comes after those it needs, and each worker's order is a part of that sequence. A worker that waits for a
message therefore waits for an action that is earlier in the sequence, and the earliest unfinished action of all never
waits, provided that sending waits for nobody (see `elaunch.workers.comm.traffic`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from elaunch.plan.components import components
from elaunch.plan.tiling import Order, Plan
from elaunch.plan.views import once_per_plan, rows_of, sources, takers

Kind = Literal["F", "B"]


class Action(NamedTuple):
    """One micro-batch of one tile, forward or backward; prints as F3.0: tile 3, micro-batch 0."""

    kind: Kind
    tile: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.tile}.{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """The actions of each worker, in order, and the global sequence of which each of these orders is a part."""

    sequence: tuple[Action, ...]
    by_worker: Mapping[str, tuple[Action, ...]]

    def __str__(self) -> str:
        return "\n".join(f"{worker} {' '.join(map(str, actions))}" for worker, actions in self.by_worker.items())


@once_per_plan
def in_flight_limits(plan: Plan) -> tuple[int, ...]:
    """Returns, for each tile, how many micro-batches may have done forward but not yet backward.

    1 for the last stage, and one more per stage before it, as in 1F1B. Where micro-batches of neighbouring tiles differ
    in number, a tile needs as many more as make up one of its consumer's.
    """
    taken, limits = takers(plan), [1] * len(plan.tiles)
    for tile in sorted(range(len(plan.tiles)), key=lambda tile: -plan.tiles[tile].layers.stop):
        pairs = {(other, here, number) for here, ends in enumerate(taken[tile]) for other, number, _ in ends}
        for consumer in {pair[0] for pair in pairs}:
            own = {pair[1] for pair in pairs if pair[0] == consumer}
            theirs = {pair[2] for pair in pairs if pair[0] == consumer}
            # To have n in flight for this consumer, n times as many as it takes, and those for others between them.
            rate = Fraction(len(own), len(theirs)) * Fraction(len(taken[tile]), len(own))
            limits[tile] = max(limits[tile], 1 + math.ceil(limits[consumer] * rate))
    return tuple(limits)


@dataclass(slots=True)
class _TileState:
    """The actions that a tile can do now, as heaps, and how many inputs each micro-batch still waits for."""

    forward: list[int]
    backward: list[int]
    missing: list[int]
    owed: list[int]


class _Run:
    """One play-through on clocks that count layer-rows at these costs; it prefers actions of one kind.

    Workers are numbers here, in the order of the tiles.
    """

    def __init__(self, plan: Plan, first: Kind, costs: Sequence[int] = ()) -> None:
        self.plan, self.first = plan, first
        numbers: dict[str, int] = {}
        self.crews = [[numbers.setdefault(worker, len(numbers)) for worker in crew] for crew in _crews(plan)]
        row_costs = zip(_row_costs(plan, costs), rows_of(plan), strict=True)
        self.work = [[cost * n for n in rows] for cost, rows in row_costs]
        self.in_crews = any(len(crew) > 1 for crew in self.crews)
        self.sources, self.takers = sources(plan), takers(plan)
        self.lane_of = _lanes(plan)
        lanes = range(max(self.lane_of, default=-1) + 1)
        self.in_flight = [0 for _ in lanes]
        self.lane_limit = [0 for _ in lanes]
        for lane, limit in zip(self.lane_of, in_flight_limits(plan), strict=True):
            self.lane_limit[lane] = max(self.lane_limit[lane], limit)
        self.tiles_of: list[list[int]] = [[] for _ in numbers]
        for index, crew in enumerate(self.crews):
            for worker in crew:
                self.tiles_of[worker].append(index)
        self.free = [True for _ in numbers]
        # The loss of the last layer stands for a consumer whose gradient comes with the forward.
        self.states = [
            _TileState(
                [number for number, some in enumerate(given) if not some],
                [],
                [len(some) for some in given],
                [len(some) for some in taken],
            )
            for given, taken in zip(self.sources, self.takers, strict=True)
        ]
        self.under_way: list[tuple[int, int, Action]] = []
        self.sequence: list[Action] = []

    def play(self) -> tuple[int, tuple[Action, ...]]:
        """Returns when the last action ends, and all actions in the order in which they start."""
        now = 0
        self._start(range(len(self.tiles_of)), now)
        total = 2 * sum(map(len, self.work))
        while len(self.sequence) < total or self.under_way:
            if not self.under_way:
                self._force(now)
            now = self.under_way[0][0]
            touched: dict[int, None] = {}
            while self.under_way and self.under_way[0][0] == now:
                self._finish(heapq.heappop(self.under_way)[2], touched)
            self._start(touched, now)
        return now, tuple(self.sequence)

    def _start(self, workers: Iterable[int], now: int) -> None:
        for worker in workers:
            if self.free[worker]:
                tiles = self.tiles_of[worker]
                action = self._next(tiles[0]) if len(tiles) == 1 else self._best(tiles)
                if action is not None:
                    self._begin(action, now)

    def _next(self, tile: int) -> Action | None:
        """Returns the tile's next action, preferring the first kind; None if it has none."""
        if self.in_crews and not all(self.free[member] for member in self.crews[tile]):
            return None
        state, lane = self.states[tile], self.lane_of[tile]
        can_forward = state.forward and self.in_flight[lane] < self.lane_limit[lane]
        if state.backward and not (can_forward and self.first == "F"):
            return Action("B", tile, state.backward[0])
        return Action("F", tile, state.forward[0]) if can_forward else None

    def _best(self, tiles: Sequence[int]) -> Action | None:
        """Returns the best next action of these tiles: first kind, then nearest to the end, then first sample."""
        best: tuple[bool, int, int, Action] | None = None
        for tile in tiles:
            action = self._next(tile)
            if action is None:
                continue
            here = self.plan.tiles[tile]
            first_sample = here.micro_batches[action.micro_batch][0].start
            rank = (action.kind != self.first, -here.layers.start, first_sample, action)
            best = rank if best is None else min(best, rank)
        return None if best is None else best[3]

    def _begin(self, action: Action, now: int) -> None:
        kind, tile, micro_batch = action
        state, work = self.states[tile], self.work[tile][micro_batch]
        if kind == "F":
            heapq.heappop(state.forward)
            self.in_flight[self.lane_of[tile]] += 1
        else:
            heapq.heappop(state.backward)
            work *= 2
        for worker in self.crews[tile]:
            self.free[worker] = False
        heapq.heappush(self.under_way, (now + work, len(self.sequence), action))
        self.sequence.append(action)

    def _finish(self, action: Action, touched: dict[int, None]) -> None:
        """Ends an action and adds the tiles that may have something to do now."""
        kind, tile, micro_batch = action
        here = list(self.crews[tile])
        for worker in here:
            self.free[worker] = True
        forward = kind == "F"
        waiting = (self.takers if forward else self.sources)[tile][micro_batch]
        if not forward:
            self.in_flight[self.lane_of[tile]] -= 1
        elif not waiting:
            heapq.heappush(self.states[tile].backward, micro_batch)
        for other, number, _ in waiting:
            state = self.states[other]
            left, ready = (state.missing, state.forward) if forward else (state.owed, state.backward)
            left[number] -= 1
            if not left[number]:
                heapq.heappush(ready, number)
                here += self.crews[other]
        if self.in_crews:
            # Somebody else's tensor-parallel partner may have waited for this worker.
            here += [member for worker in here for other in self.tiles_of[worker] for member in self.crews[other]]
        touched |= dict.fromkeys(here)

    def _force(self, now: int) -> None:
        """Lifts one limit once, for the action nearest to the end: nothing runs, so limits hold all of it back."""
        ready = [index for index, state in enumerate(self.states) if state.forward]
        assert ready, "an unfinished step in which nothing is ready: the tiles feed each other in a circle"
        tile = max(ready, key=lambda index: (self.plan.tiles[index].layers.start, -index))
        self._begin(Action("F", tile, self.states[tile].forward[0]), now)


@once_per_plan
def _crews(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Returns, for each tile, the workers whose clocks matter: one per TP group, if every worker is in one only."""
    tp_groups: dict[str, set[tuple[str, ...]]] = {}
    for tile in plan.tiles:
        for worker in tile.workers:
            tp_groups.setdefault(worker, set()).add(tile.workers)
    apart = any(len(some) > 1 for some in tp_groups.values())
    return tuple(tile.workers if apart else tile.workers[:1] for tile in plan.tiles)


def _lanes(plan: Plan) -> list[int]:
    """Returns which tiles share their in-flight limit: those of the same workers that have a layer in common."""
    lanes: list[int] = []
    spans: list[tuple[tuple[str, ...], int, int]] = []
    for tile in plan.tiles:
        found = [
            lane
            for lane, (workers, lo, hi) in enumerate(spans)
            if workers == tile.workers and lo < tile.layers.stop and tile.layers.start < hi
        ]
        if not found:
            spans.append((tile.workers, tile.layers.start, tile.layers.stop))
            lanes.append(len(spans) - 1)
            continue
        keep = found[0]
        lo = min(tile.layers.start, *(spans[lane][1] for lane in found))
        hi = max(tile.layers.stop, *(spans[lane][2] for lane in found))
        spans[keep] = (tile.workers, lo, hi)
        for lane in found[1:]:
            spans[lane] = ((), 0, 0)
            lanes = [keep if other == lane else other for other in lanes]
        lanes.append(keep)
    numbers = {lane: number for number, lane in enumerate(dict.fromkeys(lanes))}
    return [numbers[lane] for lane in lanes]


@once_per_plan
def schedule(plan: Plan) -> Schedule:
    """Orders the actions of a step, alike on every worker. O(actions x log actions) for few tiles per worker.

    Each component of the plan by itself; those that are alike have the same order.
    """
    known: dict[Hashable, tuple[Action, ...]] = {}
    sequence: list[Action] = []
    for component in components(plan):
        if component.shape not in known:
            known[component.shape] = _sequence(component.plan)
        sequence += (Action(kind, component.tiles[tile], number) for kind, tile, number in known[component.shape])
    return by_workers(plan, sequence)


def by_workers(plan: Plan, sequence: Sequence[Action]) -> Schedule:
    """Returns the schedule that follows from a sequence of all actions of a step."""
    crews = _crews(plan)
    found: dict[str, list[Action]] = {}
    for action in sequence:
        for worker in crews[action.tile]:
            found.setdefault(worker, []).append(action)
    orders = {worker: tuple(actions) for worker, actions in found.items()}
    by_worker = dict.fromkeys(plan.workers, tuple[Action, ...]())
    for tile, crew in zip(plan.tiles, crews, strict=True):
        by_worker |= {worker: orders[worker if worker in crew else crew[0]] for worker in tile.workers}
    return Schedule(tuple(sequence), by_worker)


def sequences(component: Plan, costs: Sequence[int]) -> dict[Order, tuple[Action, ...]]:
    """Returns, for each order, the actions of a component of a plan, on clocks with these costs."""
    backward_end, backward = _played(component, "B", costs)
    forward_end, forward = _played(component, "F", costs) if _differ(component, costs) else (backward_end, backward)
    return {"auto": forward if forward_end < backward_end else backward, "backward": backward, "forward": forward}


def _sequence(component: Plan) -> tuple[Action, ...]:
    """Returns the actions of a component in the order that the plan asks for; no other order is played then."""
    if component.order == "auto" or not _differ(component, component.costs):
        return sequences(component, component.costs)[component.order]
    return _played(component, "F" if component.order == "forward" else "B", component.costs)[1]


def _played(component: Plan, first: Kind, costs: Sequence[int]) -> tuple[int, tuple[Action, ...]]:
    """Returns what `_Run.play` does, played once for each component."""
    known = _known_runs(component)
    key = first, tuple(costs)
    if key not in known:
        known[key] = _Run(component, first, costs).play()
    return known[key]


@once_per_plan
def _known_runs(component: Plan) -> dict[tuple[Kind, tuple[int, ...]], tuple[int, tuple[Action, ...]]]:
    """Returns the runs of a component that were played so far, by first kind and costs."""
    return {}


def _differ(plan: Plan, costs: Sequence[int]) -> bool:
    """Returns whether orders can differ: where actions of a kind take unequally long, or a worker has several tiles."""
    tiles_of = Counter(worker for crew in _crews(plan) for worker in crew)
    if any(count > 1 for count in tiles_of.values()):
        return True
    rows = zip(_row_costs(plan, costs), rows_of(plan), strict=True)
    return len({cost * n for cost, here in rows for n in set(here)}) > 1


def _row_costs(plan: Plan, costs: Sequence[int]) -> list[int]:
    """Returns the cost of a row in each tile."""
    before = list(accumulate(costs or [1] * plan.n_layers, initial=0))
    return [before[tile.layers.stop] - before[tile.layers.start] for tile in plan.tiles]


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
    needs_of = {"F": sources(plan), "B": takers(plan)}
    done_of = {kind: [[0.0] * len(tile.micro_batches) for tile in plan.tiles] for kind in needs_of}
    rows, crews = rows_of(plan), _crews(plan)
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
