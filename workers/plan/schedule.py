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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate
from typing import Literal, NamedTuple

from elaunch.workers.plan.parts import parts
from elaunch.workers.plan.tiling import Order, Plan, n_rows
from elaunch.workers.plan.views import inputs, once_per_plan, outputs

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
    """The actions of each worker, in order, and a global sequence that all of them are parts of."""

    sequence: tuple[Action, ...]
    by_worker: Mapping[str, tuple[Action, ...]]

    def __str__(self) -> str:
        return "\n".join(f"{worker} {' '.join(map(str, actions))}" for worker, actions in self.by_worker.items())


@once_per_plan
def in_flight_limits(plan: Plan) -> tuple[int, ...]:
    """How many micro-batches each tile may have done forward but not yet backward.

    1 for the last stage, and one more per stage before it, as in 1F1B. Where micro-batches of neighbouring tiles differ
    in number, a tile needs as many more as make up one of its consumer's.
    """
    feeds, limits = outputs(plan), [1] * len(plan.tiles)
    for tile in sorted(range(len(plan.tiles)), key=lambda tile: -plan.tiles[tile].layers.stop):
        pairs = {(feed.tile, here, feed.micro_batch) for here, takers in enumerate(feeds[tile]) for feed in takers}
        for consumer in {pair[0] for pair in pairs}:
            mine = {pair[1] for pair in pairs if pair[0] == consumer}
            theirs = {pair[2] for pair in pairs if pair[0] == consumer}
            # To have n in flight for this consumer, n times as many as it takes, and those for others between them.
            rate = Fraction(len(mine), len(theirs)) * Fraction(len(feeds[tile]), len(mine))
            limits[tile] = max(limits[tile], 1 + math.ceil(limits[consumer] * rate))
    return tuple(limits)


@dataclass(slots=True)
class _TileState:
    """What can be done in a tile now."""

    forward: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    missing: dict[int, int] = field(default_factory=dict)
    owed: dict[int, int] = field(default_factory=dict)


class _Run:
    """One play-through on clocks that count layer-rows at these costs, with this kind of action before the other."""

    def __init__(self, plan: Plan, first: Kind, costs: Sequence[int] = ()) -> None:
        self.plan, self.first, self.crews = plan, first, _crews(plan)
        self.row_costs = _row_costs(plan, costs)
        self.in_crews = any(len(crew) > 1 for crew in self.crews)
        self.feeds, self.consumers = inputs(plan), outputs(plan)
        self.lane_of = _lanes(plan)
        lanes = range(max(self.lane_of, default=-1) + 1)
        self.in_flight = [0 for _ in lanes]
        self.lane_limit = [0 for _ in lanes]
        for lane, limit in zip(self.lane_of, in_flight_limits(plan), strict=True):
            self.lane_limit[lane] = max(self.lane_limit[lane], limit)
        self.tiles_of: dict[str, list[int]] = {}
        for index, crew in enumerate(self.crews):
            for worker in crew:
                self.tiles_of.setdefault(worker, []).append(index)
        self.free = dict.fromkeys(self.tiles_of, True)
        self.states = [_TileState() for _ in plan.tiles]
        self.under_way: list[tuple[int, int, Action]] = []
        self.sequence: list[Action] = []
        for index, state in enumerate(self.states):
            for micro_batch, sources in enumerate(self.feeds[index]):
                state.missing[micro_batch] = len(sources)
                # The loss of the last layer stands for a consumer whose gradient comes with the forward.
                state.owed[micro_batch] = len(self.consumers[index][micro_batch])
                if not sources:
                    heapq.heappush(state.forward, micro_batch)

    def play(self) -> tuple[int, tuple[Action, ...]]:
        """When the last action ends, and all in the order in which they start."""
        now = 0
        self._start(tuple(self.tiles_of), now)
        total = 2 * sum(len(tile.micro_batches) for tile in self.plan.tiles)
        while len(self.sequence) < total or self.under_way:
            if not self.under_way:
                self._force(now)
            now = self.under_way[0][0]
            touched: dict[str, None] = {}
            while self.under_way and self.under_way[0][0] == now:
                touched |= self._finish(heapq.heappop(self.under_way)[2])
            self._start(tuple(touched), now)
        return now, tuple(self.sequence)

    def _start(self, workers: Sequence[str], now: int) -> None:
        for worker in workers:
            if self.free[worker]:
                action = self._choose(worker)
                if action is not None:
                    self._begin(action, now)

    def _choose(self, worker: str) -> Action | None:
        """One of the first kind before others; of several, that nearest to the end of the model, of the first slots."""
        best: tuple[bool, int, int, Action] | None = None
        for tile in self.tiles_of[worker]:
            if self.in_crews and not all(self.free[member] for member in self.crews[tile]):
                continue
            state, lane = self.states[tile], self.lane_of[tile]
            can_forward = state.forward and self.in_flight[lane] < self.lane_limit[lane]
            if state.backward and not (can_forward and self.first == "F"):
                action = Action("B", tile, state.backward[0])
            elif can_forward:
                action = Action("F", tile, state.forward[0])
            else:
                continue
            here = self.plan.tiles[tile]
            first_slot = here.micro_batches[action.micro_batch][0].start
            rank = (action.kind != self.first, -here.layers.start, first_slot, action)
            best = rank if best is None else min(best, rank)
        return None if best is None else best[3]

    def _begin(self, action: Action, now: int) -> None:
        tile, state = self.plan.tiles[action.tile], self.states[action.tile]
        heapq.heappop(state.backward if action.kind == "B" else state.forward)
        for worker in self.crews[action.tile]:
            self.free[worker] = False
        rows = n_rows(tile.micro_batches[action.micro_batch])
        work = rows * self.row_costs[action.tile] * (2 if action.kind == "B" else 1)
        if action.kind == "F":
            self.in_flight[self.lane_of[action.tile]] += 1
        heapq.heappush(self.under_way, (now + work, len(self.sequence), action))
        self.sequence.append(action)

    def _finish(self, action: Action) -> dict[str, None]:
        """Tell who may have something to do now."""
        tile, micro_batch = action.tile, action.micro_batch
        touched = dict.fromkeys(self.crews[tile])
        for worker in touched:
            self.free[worker] = True
        if action.kind == "F":
            if not self.consumers[tile][micro_batch]:
                heapq.heappush(self.states[tile].backward, micro_batch)
            for feed in self.consumers[tile][micro_batch]:
                state = self.states[feed.tile]
                state.missing[feed.micro_batch] -= 1
                if not state.missing[feed.micro_batch]:
                    heapq.heappush(state.forward, feed.micro_batch)
                    touched |= dict.fromkeys(self.crews[feed.tile])
        else:
            self.in_flight[self.lane_of[tile]] -= 1
            for feed in self.feeds[tile][micro_batch]:
                state = self.states[feed.tile]
                state.owed[feed.micro_batch] -= 1
                if not state.owed[feed.micro_batch]:
                    heapq.heappush(state.backward, feed.micro_batch)
                    touched |= dict.fromkeys(self.crews[feed.tile])
        # Somebody else's tensor-parallel partner may have waited for this worker.
        for worker in tuple(touched) if self.in_crews else ():
            for other in self.tiles_of[worker]:
                touched |= dict.fromkeys(self.crews[other])
        return touched

    def _force(self, now: int) -> None:
        """Nothing runs, so a limit holds back all that is ready: lift it once, for what is nearest to the end."""
        ready = [index for index, state in enumerate(self.states) if state.forward]
        assert ready, "an unfinished step in which nothing is ready: the tiles feed each other in a circle"
        tile = max(ready, key=lambda index: (self.plan.tiles[index].layers.start, -index))
        self._begin(Action("F", tile, self.states[tile].forward[0]), now)


@once_per_plan
def _crews(plan: Plan) -> tuple[tuple[str, ...], ...]:
    """Of each tile those whose time has to be watched: of tuples that do nothing apart, the first member."""
    tuples: dict[str, set[tuple[str, ...]]] = {}
    for tile in plan.tiles:
        for worker in tile.workers:
            tuples.setdefault(worker, set()).add(tile.workers)
    apart = any(len(some) > 1 for some in tuples.values())
    return tuple(tile.workers if apart else tile.workers[:1] for tile in plan.tiles)


def _lanes(plan: Plan) -> list[int]:
    """Which tiles share their in-flight limit: those of the same workers that have a layer in common."""
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
    """Order the actions of a step; the same on every worker. O(actions x log actions) for few tiles per worker.

    Each part of the plan by itself; those that are alike have the same order.
    """
    known: dict[Hashable, tuple[Action, ...]] = {}
    sequence: list[Action] = []
    for part in parts(plan):
        if part.shape not in known:
            known[part.shape] = _sequence(part.plan)
        sequence += (Action(kind, part.tiles[tile], number) for kind, tile, number in known[part.shape])
    return by_workers(plan, sequence)


def by_workers(plan: Plan, sequence: Sequence[Action]) -> Schedule:
    """The schedule of a sequence of all actions of a step."""
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


def sequences(part: Plan, costs: Sequence[int]) -> dict[Order, tuple[Action, ...]]:
    """For each order the actions of a part of a plan, on clocks with these costs."""
    backward_end, backward = _Run(part, "B", costs).play()
    forward_end, forward = _Run(part, "F", costs).play() if _differ(part, costs) else (backward_end, backward)
    return {"auto": forward if forward_end < backward_end else backward, "backward": backward, "forward": forward}


def _sequence(part: Plan) -> tuple[Action, ...]:
    """Of a part, in the order that the plan asks for; no other is played then."""
    if part.order == "auto" or not _differ(part, part.costs):
        return sequences(part, part.costs)[part.order]
    return _Run(part, "F" if part.order == "forward" else "B", part.costs).play()[1]


def _differ(plan: Plan, costs: Sequence[int]) -> bool:
    """Whether orders can differ: not if all actions of a kind take as long."""
    rows = zip(_row_costs(plan, costs), plan.tiles, strict=True)
    return len({cost * n_rows(runs) for cost, tile in rows for runs in tile.micro_batches}) > 1


def _row_costs(plan: Plan, costs: Sequence[int]) -> list[int]:
    """Of each tile the cost of a row."""
    before = list(accumulate(costs or [1] * plan.n_layers, initial=0))
    return [before[tile.layers.stop] - before[tile.layers.start] for tile in plan.tiles]


@dataclass(frozen=True)
class Timeline:
    """When each action of a schedule starts and ends, in seconds from the start of the step."""

    starts_s: Mapping[Action, float]
    ends_s: Mapping[Action, float]
    step_s: float
    busy_s: Mapping[str, float]

    @property
    def bubble(self) -> float:
        """The part of all workers' time in which they wait, 0..1."""
        if not self.busy_s or not self.step_s:
            return 0.0
        return 1 - sum(self.busy_s.values()) / (len(self.busy_s) * self.step_s)


def timeline(
    plan: Plan,
    order: Schedule,
    action_s: Callable[[Action], float],
    transfer_s: Callable[[Action, Action], float] = lambda source, target: 0.0,
) -> Timeline:
    """Price a schedule: its critical path through computation and transfers (Chameleon eq. 11 by playing it through).

    Args:
        plan: whose tiles the actions name.
        order: of the actions.
        action_s: seconds of an action on its workers.
        transfer_s: seconds from the end of one action to the moment at which another that needs it may start.
    """
    feeds, consumers = inputs(plan), outputs(plan)
    starts_s: dict[Action, float] = {}
    ends_s: dict[Action, float] = {}
    crews = _crews(plan)
    free_s = dict.fromkeys(order.by_worker, 0.0)
    busy_s = dict.fromkeys(order.by_worker, 0.0)
    for action in order.sequence:
        workers = crews[action.tile]
        if action.kind == "F":
            needs = [Action("F", feed.tile, feed.micro_batch) for feed in feeds[action.tile][action.micro_batch]]
        else:
            needs = [Action("B", feed.tile, feed.micro_batch) for feed in consumers[action.tile][action.micro_batch]]
        ready_s = max((ends_s[need] + transfer_s(need, action) for need in needs), default=0.0)
        start_s = max(ready_s, *(free_s[worker] for worker in workers))
        seconds = action_s(action)
        starts_s[action], ends_s[action] = start_s, start_s + seconds
        for worker in workers:
            free_s[worker] = start_s + seconds
            busy_s[worker] += seconds
    for tile, crew in zip(plan.tiles, crews, strict=True):
        busy_s |= {worker: busy_s[crew[0]] for worker in tile.workers if worker not in crew}
    return Timeline(starts_s, ends_s, max(ends_s.values(), default=0.0), busy_s)
