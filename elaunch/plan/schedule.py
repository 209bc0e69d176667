"""The order in which each worker does its part of a step: 1F1B, generalised to tilings.

`schedule` plays the step through on clocks that count layer-rows, each layer by the cost that the plan gives it: a
worker that is free starts a backward if one is ready, else a forward if few enough of its micro-batches are in flight.
On a symmetric plan this gives exactly the 1F1B of pipelines; elsewhere what 1F1B would do if it knew of rows and of
several tiles. Where stages take different times, a backward that never waits lets the pipeline run dry, and it is often
faster to start forwards first, as long as they are few enough; so both are played, unless the plan asks for one, and
the faster one counts. The executor follows this order and `timeline` prices it, so what is estimated is what runs.

Where a plan defers weight gradients, the backward is split (ReCycle's decoupled backward, zero-bubble's B and W): the
input gradient, which others wait for, comes as soon as it can, and the weight gradient when the worker has nothing else
to do. What nobody waits for, the backward of the first layers, is done whole, and then too. A tile then has, at any
moment, the activations of `in_flight_limits` micro-batches and those of `Plan.deferred` more, at most; what keeps these
alive is an input activation and an output gradient for each of their operations. So is played as well what the plan
would do without: each backward in its place, in two parts. The fastest counts, so no clock shows a plan to be slower
for it.

No order made here can deadlock. The run on simulated clocks puts all actions of all workers into one sequence in which
each action comes after those it needs, and each worker's order is a part of that sequence. A worker that waits for a
message therefore waits for an action that is earlier in the sequence, and the earliest unfinished action of all never
waits, provided that sending waits for nobody (see `elaunch.workers.comm.traffic`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from elaunch.plan.components import components
from elaunch.plan.tiling import Order, Plan, Tile
from elaunch.plan.timeline import Action, Kind, Schedule, by_workers, crews_of, timeline
from elaunch.plan.views import once_per_plan, rows_of, sources, takers


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
    """The actions that a tile can do now, as heaps, and how many inputs each micro-batch still waits for.

    `deferred` are micro-batches whose weight gradients can be computed, in the order in which they came to that.
    """

    forward: list[int]
    backward: list[int]
    missing: list[int]
    owed: list[int]
    deferred: deque[int]


class _Run:
    """One play-through on clocks that count layer-rows at these costs; it prefers actions of one kind.

    Workers are numbers here, in the order of the tiles.
    """

    def __init__(self, plan: Plan, first: Kind, costs: Sequence[int] = (), deferred: int = 0) -> None:
        self.plan, self.first, self.most_deferred = plan, first, deferred
        numbers: dict[str, int] = {}
        self.crews = [[numbers.setdefault(worker, len(numbers)) for worker in crew] for crew in crews_of(plan)]
        row_costs = zip(_row_costs(plan, costs), rows_of(plan), strict=True)
        self.work = [[cost * n for n in rows] for cost, rows in row_costs]
        self.increws_of = any(len(crew) > 1 for crew in self.crews)
        self.sources, self.takers = sources(plan), takers(plan)
        self.lane_of = _lanes(plan)
        lanes = range(max(self.lane_of, default=-1) + 1)
        self.in_flight = [0 for _ in lanes]
        self.n_deferred = [0 for _ in lanes]
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
                deque(),
            )
            for given, taken in zip(self.sources, self.takers, strict=True)
        ]
        self.under_way: list[tuple[int, int, Action]] = []
        self.sequence: list[Action] = []

    def play(self) -> tuple[int, tuple[Action, ...]]:
        """Returns when the last action ends, and all actions in the order in which they start."""
        now = 0
        self._start(range(len(self.tiles_of)), now)
        # Of three parts where the backward is split, of two where it is not.
        total = sum((2 if self._is_whole(tile) else 3) * len(tile.micro_batches) for tile in self.plan.tiles)
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
        if self.increws_of and not all(self.free[member] for member in self.crews[tile]):
            return None
        state, lane = self.states[tile], self.lane_of[tile]
        here, waiting, limit = self.in_flight[lane], self.n_deferred[lane], self.lane_limit[lane]
        most = self.most_deferred
        can_forward = state.forward and here < limit and here + waiting < limit + most
        if state.backward and not (can_forward and self.first == "F"):
            if not most:
                return Action("B", tile, state.backward[0])
            if waiting < most:
                return Action("I", tile, state.backward[0])
            can_forward = False  # first one of those that wait, so that this one can
        if can_forward:
            return Action("F", tile, state.forward[0])
        if state.deferred:
            return Action("B" if self._is_whole(self.plan.tiles[tile]) else "W", tile, state.deferred[0])
        return None

    def _is_whole(self, tile: Tile) -> bool:
        """Returns whether the backward of a tile is not split: nobody waits for the gradient of the first input."""
        return not self.most_deferred or not tile.layers.start

    def _best(self, tiles: Sequence[int]) -> Action | None:
        """Returns the best next action of these tiles: first kind, then nearest to the end, then first sample."""
        best: tuple[int, int, int, Action] | None = None
        for tile in tiles:
            action = self._next(tile)
            if action is None:
                continue
            here = self.plan.tiles[tile]
            first_sample = here.micro_batches[action.micro_batch][0].start
            rank = (self._rank(tile, action.kind), -here.layers.start, first_sample, action)
            best = rank if best is None else min(best, rank)
        return None if best is None else best[3]

    def _rank(self, tile: int, kind: Kind) -> int:
        """Returns 0 for what is preferred, 2 for what can wait."""
        if kind == "W" or (kind == "B" and self.most_deferred):
            return 2
        return int((kind == "F") != (self.first == "F"))

    def _begin(self, action: Action, now: int) -> None:
        kind, tile, micro_batch = action
        state, work = self.states[tile], self.work[tile][micro_batch]
        if kind == "F":
            heapq.heappop(state.forward)
            self.in_flight[self.lane_of[tile]] += 1
        elif kind == "I" or not self.most_deferred:
            heapq.heappop(state.backward)
        else:
            state.deferred.popleft()
        if kind == "B":
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
        lane = self.lane_of[tile]
        if kind == "F":
            waiting = self.takers[tile][micro_batch]
            if not waiting:
                self._is_ready(tile, micro_batch)
        elif kind == "W" or (kind == "B" and self.most_deferred):
            waiting = ()
            self.n_deferred[lane] -= 1
        else:
            waiting = self.sources[tile][micro_batch]
            self.in_flight[lane] -= 1
            if kind == "I":
                self._defer(tile, micro_batch)
        for other, number, _ in waiting:
            state = self.states[other]
            left = state.missing if kind == "F" else state.owed
            left[number] -= 1
            if not left[number]:
                if kind == "F":
                    heapq.heappush(state.forward, number)
                else:
                    self._is_ready(other, number)
                here += self.crews[other]
        if self.increws_of:
            # Somebody else's tensor-parallel partner may have waited for this worker.
            here += [member for worker in here for other in self.tiles_of[worker] for member in self.crews[other]]
        touched |= dict.fromkeys(here)

    def _is_ready(self, tile: int, micro_batch: int) -> None:
        """Takes note that a backward has all it needs."""
        if self.most_deferred and self._is_whole(self.plan.tiles[tile]):
            self.in_flight[self.lane_of[tile]] -= 1
            self._defer(tile, micro_batch)
        else:
            heapq.heappush(self.states[tile].backward, micro_batch)

    def _defer(self, tile: int, micro_batch: int) -> None:
        self.states[tile].deferred.append(micro_batch)
        self.n_deferred[self.lane_of[tile]] += 1

    def _force(self, now: int) -> None:
        """Lifts one limit once, for the action nearest to the end: nothing runs, so limits hold all of it back."""
        ready = [index for index, state in enumerate(self.states) if state.forward]
        assert ready, "an unfinished step in which nothing is ready: the tiles feed each other in a circle"
        tile = max(ready, key=lambda index: (self.plan.tiles[index].layers.start, -index))
        self._begin(Action("F", tile, self.states[tile].forward[0]), now)


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
    found: list[Action] = []
    for component in components(plan):
        if component.shape not in known:
            known[component.shape] = sequence(component.plan, plan.costs, plan.order, plan.deferred)
        found += (Action(kind, component.tiles[tile], number) for kind, tile, number in known[component.shape])
    return by_workers(plan, found)


def sequence(component: Plan, costs: Sequence[int], order: Order, deferred: int = 0) -> tuple[Action, ...]:
    """Returns the actions of a component of a plan in an order; no other one is played than it takes.

    Args:
        component: of a plan.
        costs: of a row in each layer, on the clocks.
        order: see `Plan.order`.
        deferred: see `Plan.deferred`.
    """
    differ = _differ(component, costs)
    if order != "auto":
        return _played(component, "F" if order == "forward" and differ else "B", costs, deferred)[1]
    end, found = _played(component, "B", costs, deferred)
    if differ:
        other_end, other = _played(component, "F", costs, deferred)
        if other_end < end:
            end, found = other_end, other
    if deferred:
        whole = in_parts(component, sequence(component, costs, "auto"))
        if _end(component, whole, costs) <= end:
            return whole
    return found


def in_parts(component: Plan, sequence: Sequence[Action]) -> tuple[Action, ...]:
    """Returns a sequence with each whole backward in two parts, one right after the other.

    Whatever actions cost, nothing ends later than it did.
    """
    found: list[Action] = []
    for action in sequence:
        if action.kind == "B" and component.tiles[action.tile].layers.start:
            found += [action._replace(kind="I"), action._replace(kind="W")]
        else:
            found.append(action)
    return tuple(found)


def _end(component: Plan, sequence: Sequence[Action], costs: Sequence[int]) -> float:
    """Returns when the last action of a sequence ends on the clocks."""
    per_row = _row_costs(component, costs)

    def clock(kind: Kind, tile: int, rows: int) -> float:
        return (2 if kind == "B" else 1) * per_row[tile] * rows

    return timeline(component, by_workers(component, sequence), clock).step_s


def _played(component: Plan, first: Kind, costs: Sequence[int], deferred: int) -> tuple[int, tuple[Action, ...]]:
    """Returns what `_Run.play` does, played once for each component."""
    known = _known_runs(component)
    key = first, tuple(costs), deferred
    if key not in known:
        known[key] = _Run(component, first, costs, deferred).play()
    return known[key]


@once_per_plan
def _known_runs(component: Plan) -> dict[tuple[Kind, tuple[int, ...], int], tuple[int, tuple[Action, ...]]]:
    """Returns the runs of a component that were played so far, by first kind, costs and deferral."""
    return {}


def _differ(plan: Plan, costs: Sequence[int]) -> bool:
    """Returns whether orders can differ: where actions of a kind take unequally long, or a worker has several tiles."""
    tiles_of = Counter(worker for crew in crews_of(plan) for worker in crew)
    if any(count > 1 for count in tiles_of.values()):
        return True
    rows = zip(_row_costs(plan, costs), rows_of(plan), strict=True)
    return len({cost * n for cost, here in rows for n in set(here)}) > 1


def _row_costs(plan: Plan, costs: Sequence[int]) -> list[int]:
    """Returns the cost of a row in each tile."""
    before = list(accumulate(costs or [1] * plan.n_layers, initial=0))
    return [before[tile.layers.stop] - before[tile.layers.start] for tile in plan.tiles]
