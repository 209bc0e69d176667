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

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate

from elaunch.plan.components import components
from elaunch.plan.tiling import Order, Plan
from elaunch.plan.timeline import Action, Kind, Prices, Schedule, by_workers, crew_numbers, crews_of
from elaunch.plan.views import Ends, once_per_plan, rows_of, sources, takers


@once_per_plan
def in_flight_limits(plan: Plan) -> tuple[int, ...]:
    """Returns, for each tile, how many micro-batches may have done forward but not yet backward.

    1 for the last stage, and one more per stage before it, as in 1F1B. Where micro-batches of neighbouring tiles differ
    in number, a tile needs as many more as make up one of its consumer's.
    """
    taken, limits = takers(plan), [1] * len(plan.tiles)
    for tile in sorted(range(len(plan.tiles)), key=lambda tile: -plan.tiles[tile].layers.stop):
        theirs: dict[int, set[int]] = {}
        for ends in taken[tile]:
            for consumer, number, _ in ends:
                theirs.setdefault(consumer, set()).add(number)
        for consumer, fed in theirs.items():
            # To have n in flight for this consumer, n times as many as it takes, and those for others between them.
            limits[tile] = max(limits[tile], 1 - (-limits[consumer] * len(taken[tile]) // len(fed)))
    return tuple(limits)


_Numbers = tuple[tuple[tuple[tuple[int, int], ...], ...], ...]
"""For [tile][micro-batch] the (tile, micro-batch) pairs at the other ends."""


@dataclass(frozen=True)
class _Board:
    """What is the same in all runs of a plan. Workers and lanes are numbers here, in the order of the tiles.

    Attributes:
        crews: of each tile.
        shared: whether some tile has a crew of several.
        tiles_of: of each worker.
        alone: whether each tile has one worker, which has no other tile.
        fed_by: who gives the rows of a micro-batch.
        feeds: who takes them.
        lane_of: of each tile; those of a lane share their limit of micro-batches in flight.
        limits: of each lane.
        actions: by kind, for [tile][micro-batch]; the same objects in all runs. Made by `_actions`.
    """

    crews: tuple[tuple[int, ...], ...]
    shared: bool
    tiles_of: tuple[tuple[int, ...], ...]
    alone: bool
    fed_by: _Numbers
    feeds: _Numbers
    lane_of: tuple[int, ...]
    limits: tuple[int, ...]
    actions: dict[Kind, Sequence[Sequence[Action]]]


@once_per_plan
def _board(plan: Plan) -> _Board:
    crews = crew_numbers(plan)
    tiles_of: list[list[int]] = [[] for _ in range(max(map(max, crews), default=-1) + 1)]
    for index, crew in enumerate(crews):
        for worker in crew:
            tiles_of[worker].append(index)
    lane_of = _lanes(plan)
    limits = [0] * (max(lane_of, default=-1) + 1)
    for lane, limit in zip(lane_of, in_flight_limits(plan), strict=True):
        limits[lane] = max(limits[lane], limit)
    return _Board(
        crews,
        any(len(crew) > 1 for crew in crews),
        tuple(map(tuple, tiles_of)),
        all(len(crew) == 1 for crew in crews) and len(tiles_of) == len(crews),
        _without_rows(sources(plan)),
        _without_rows(takers(plan)),
        tuple(lane_of),
        tuple(limits),
        {},
    )


def _actions(plan: Plan, kind: Kind) -> Sequence[Sequence[Action]]:
    """Returns all actions of a kind, for [tile][micro-batch]."""
    known = _board(plan).actions
    if kind not in known:
        known[kind] = [
            [Action(kind, tile, number) for number in range(len(some))] for tile, some in enumerate(rows_of(plan))
        ]
    return known[kind]


def _without_rows(ends: Ends) -> _Numbers:
    return tuple(tuple(tuple((tile, number) for tile, number, _ in some) for some in here) for here in ends)


class _Run:
    """One play-through on clocks that count layer-rows at these costs; it prefers actions of one kind.

    For each tile there are heaps of the forwards and the backwards that it can do now, how many inputs each
    micro-batch still waits for, and the micro-batches whose weight gradients can be computed, in the order in which
    they came to that.
    """

    def __init__(self, plan: Plan, first: Kind, costs: Sequence[int] = (), deferred: int = 0) -> None:
        self.plan, self.first, self.most_deferred, self.board = plan, first, deferred, _board(plan)
        fed_by, feeds = self.board.fed_by, self.board.feeds
        row_costs = zip(_row_costs(plan, costs), rows_of(plan), strict=True)
        self.work = [[cost * n for n in rows] for cost, rows in row_costs]
        # Nobody waits for the gradient of the first input: no backward is split there.
        self.whole = [not deferred or not tile.layers.start for tile in plan.tiles]
        self.in_flight = [0] * len(self.board.limits)
        self.n_deferred = [0] * len(self.board.limits)
        self.free = [True] * len(self.board.tiles_of)
        # The loss of the last layer stands for a consumer whose gradient comes with the forward.
        self.forward = [[number for number, some in enumerate(given) if not some] for given in fed_by]
        self.backward: list[list[int]] = [[] for _ in fed_by]
        self.missing = [list(map(len, given)) for given in fed_by]
        self.owed = [list(map(len, taken)) for taken in feeds]
        self.deferred: list[deque[int]] = [deque() for _ in fed_by]
        self.under_way: dict[int, list[Action]] = {}
        self.times: list[int] = []
        self.sequence: list[Action] = []

    def play(self) -> tuple[int, tuple[Action, ...]]:
        """Returns when the last action ends, and all actions in the order in which they start."""
        # Of three parts where the backward is split, of two where it is not.
        total = sum((2 if whole else 3) * len(some) for whole, some in zip(self.whole, self.missing, strict=True))
        touched: Iterable[int] = range(len(self.free))
        now = 0
        while True:
            self._start(touched, now)
            if not self.times:
                if len(self.sequence) == total:
                    return now, tuple(self.sequence)
                self.force(now)
            now = heappop(self.times)
            touched = self._finish(self.under_way.pop(now))

    def _start(self, workers: Iterable[int], now: int) -> None:
        """Begins the best next action of each of these workers that is free: of the first kind, then nearest to the
        end, then of the first sample.
        """
        board, free, forward, backward, deferred = self.board, self.free, self.forward, self.backward, self.deferred
        in_flight, n_deferred, limits, lane_of = self.in_flight, self.n_deferred, board.limits, board.lane_of
        most, forwards_first = self.most_deferred, self.first == "F"
        for worker in workers:
            if not free[worker]:
                continue
            best: tuple[Kind, int] | None = None
            for tile in board.tiles_of[worker]:
                if board.shared and not all(free[member] for member in board.crews[tile]):
                    continue
                lane = lane_of[tile]
                here, limit = in_flight[lane], limits[lane]
                can_forward = forward[tile] and here < limit
                if can_forward and most:
                    can_forward = here + n_deferred[lane] < limit + most
                kind: Kind
                if backward[tile] and not (forwards_first and can_forward):
                    if not most:
                        kind = "B"
                    elif n_deferred[lane] < most:
                        kind = "I"
                    elif deferred[tile]:  # first one of those that wait, so that this one can
                        kind = "B" if self.whole[tile] else "W"
                    else:
                        continue
                elif can_forward:
                    kind = "F"
                elif most and deferred[tile]:
                    kind = "B" if self.whole[tile] else "W"
                else:
                    continue
                best = (kind, tile) if best is None else min(best, (kind, tile), key=self._rank)
            if best is not None:
                self._begin(*best, now)

    def _rank(self, next_one: tuple[Kind, int]) -> tuple[int, int, int, Kind, int]:
        """Returns what is least for what is preferred; it begins with 2 for what can wait."""
        kind, tile = next_one
        here = self.plan.tiles[tile]
        first_sample = here.micro_batches[self._micro_batch(kind, tile)][0].start
        if kind == "W" or (kind == "B" and self.most_deferred):
            rank = 2
        else:
            rank = int((kind == "F") != (self.first == "F"))
        return rank, -here.layers.start, first_sample, kind, tile

    def _micro_batch(self, kind: Kind, tile: int) -> int:
        """Returns the one that the tile's next action of a kind is for."""
        if kind == "F":
            return self.forward[tile][0]
        return self.backward[tile][0] if kind == "I" or not self.most_deferred else self.deferred[tile][0]

    def _begin(self, kind: Kind, tile: int, now: int) -> None:
        board, under_way = self.board, self.under_way
        if kind == "F":
            micro_batch = heappop(self.forward[tile])
            self.in_flight[board.lane_of[tile]] += 1
        elif kind == "I" or not self.most_deferred:
            micro_batch = heappop(self.backward[tile])
        else:
            micro_batch = self.deferred[tile].popleft()
        work = self.work[tile][micro_batch]
        end = now + (2 * work if kind == "B" else work)
        for worker in board.crews[tile]:
            self.free[worker] = False
        action = _actions(self.plan, kind)[tile][micro_batch]
        if end in under_way:
            under_way[end].append(action)
        else:
            under_way[end] = [action]
            heappush(self.times, end)
        self.sequence.append(action)

    def _finish(self, actions: Sequence[Action]) -> dict[int, None]:
        """Ends actions and returns the workers that may have something to do now."""
        board, free, most, forward = self.board, self.free, self.most_deferred, self.forward
        crews, lane_of = board.crews, board.lane_of
        touched: dict[int, None] = {}
        for kind, tile, micro_batch in actions:
            here = list(crews[tile])
            for worker in here:
                free[worker] = True
            if kind == "F":
                taken = board.feeds[tile][micro_batch]
                if not taken:
                    self._is_ready(tile, micro_batch)
                for other, number in taken:
                    left = self.missing[other]
                    left[number] -= 1
                    if not left[number]:
                        heappush(forward[other], number)
                        here += crews[other]
            elif kind == "W" or (kind == "B" and most):
                self.n_deferred[lane_of[tile]] -= 1
            else:
                self.in_flight[lane_of[tile]] -= 1
                if kind == "I":
                    self._defer(tile, micro_batch)
                for other, number in board.fed_by[tile][micro_batch]:
                    left = self.owed[other]
                    left[number] -= 1
                    if not left[number]:
                        self._is_ready(other, number)
                        here += crews[other]
            if board.shared:
                # Somebody else's tensor-parallel partner may have waited for this worker.
                here += [member for worker in here for other in board.tiles_of[worker] for member in crews[other]]
            for worker in here:
                touched[worker] = None
        return touched

    def _is_ready(self, tile: int, micro_batch: int) -> None:
        """Takes note that a backward has all it needs."""
        if self.most_deferred and self.whole[tile]:
            self.in_flight[self.board.lane_of[tile]] -= 1
            self._defer(tile, micro_batch)
        else:
            heappush(self.backward[tile], micro_batch)

    def _defer(self, tile: int, micro_batch: int) -> None:
        self.deferred[tile].append(micro_batch)
        self.n_deferred[self.board.lane_of[tile]] += 1

    def force(self, now: int) -> None:
        """Lifts one limit once, for the action nearest to the end: nothing runs, so limits hold all of it back."""
        ready = [index for index, some in enumerate(self.forward) if some]
        assert ready, "an unfinished step in which nothing is ready: the tiles feed each other in a circle"
        self._begin("F", max(ready, key=lambda index: (self.plan.tiles[index].layers.start, -index)), now)


def _played_alone(plan: Plan, first: Kind, costs: Sequence[int]) -> tuple[int, tuple[Action, ...]]:
    """Does what `_Run.play` does, in a third of the time, where each tile has a worker of its own and no weight
    gradients are deferred, as in nearly all large plans. Tiles, workers and lanes then have the same numbers.
    """
    run, board = _Run(plan, first, costs), _board(plan)
    forward, backward, in_flight, limits, work = run.forward, run.backward, run.in_flight, board.limits, run.work
    free, under_way, times, sequence = run.free, run.under_way, run.times, run.sequence
    forwards, backwards = _actions(plan, "F"), _actions(plan, "B")
    forwards_first = first == "F"
    touched: Iterable[int] = range(len(free))
    now = 0
    while True:
        for tile in touched:
            if not free[tile]:
                continue
            can_forward = forward[tile] and in_flight[tile] < limits[tile]
            if backward[tile] and not (forwards_first and can_forward):
                micro_batch = heappop(backward[tile])
                action, end = backwards[tile][micro_batch], now + 2 * work[tile][micro_batch]
            elif can_forward:
                micro_batch = heappop(forward[tile])
                in_flight[tile] += 1
                action, end = forwards[tile][micro_batch], now + work[tile][micro_batch]
            else:
                continue
            free[tile] = False
            if end in under_way:
                under_way[end].append(action)
            else:
                under_way[end] = [action]
                heappush(times, end)
            sequence.append(action)
        if not times:
            if not any(forward):
                return now, tuple(sequence)
            run.force(now)
        now = heappop(times)
        reached: dict[int, None] = {}
        for kind, tile, micro_batch in under_way.pop(now):
            free[tile] = True
            reached[tile] = None
            if kind == "F":
                waiting, left_of, ready = board.feeds[tile][micro_batch], run.missing, forward
                if not waiting:
                    heappush(backward[tile], micro_batch)
            else:
                waiting, left_of, ready = board.fed_by[tile][micro_batch], run.owed, backward
                in_flight[tile] -= 1
            for other, number in waiting:
                left = left_of[other]
                left[number] -= 1
                if not left[number]:
                    heappush(ready[other], number)
                    reached[other] = None
        touched = reached


def _lanes(plan: Plan) -> list[int]:
    """Returns which tiles share their in-flight limit: those of the same workers that have a layer in common."""
    lanes: list[int] = []
    n_lanes = 0
    spans_of: dict[tuple[str, ...], dict[int, tuple[int, int]]] = {}
    for tile in plan.tiles:
        spans = spans_of.setdefault(tile.workers, {})
        found = [lane for lane, (lo, hi) in spans.items() if lo < tile.layers.stop and tile.layers.start < hi]
        if not found:
            spans[n_lanes] = tile.layers.start, tile.layers.stop
            lanes.append(n_lanes)
            n_lanes += 1
            continue
        keep = found[0]
        lo = min(tile.layers.start, *(spans[lane][0] for lane in found))
        hi = max(tile.layers.stop, *(spans[lane][1] for lane in found))
        spans[keep] = (lo, hi)
        for lane in found[1:]:
            del spans[lane]
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

    return max(Prices(component, clock).play(sequence).ends, default=0.0)


def _played(component: Plan, first: Kind, costs: Sequence[int], deferred: int) -> tuple[int, tuple[Action, ...]]:
    """Returns what `_Run.play` does, played once for each component."""
    known = _known_runs(component)
    key = first, tuple(costs), deferred
    if key not in known:
        if not deferred and _board(component).alone:
            known[key] = _played_alone(component, first, costs)
        else:
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
