"""Resize: the rows of who is lost are cut over the same-layer peers, and layers move until no stage is slower than
another (ElasWave 4.1 and 4.2).

Peers of different speed get rows by their speed; so slow workers are balanced by the same policy (ElasWave 7.7).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from elaunch.plan.build import Stage, stages
from elaunch.plan.tiling import Plan, PlanError
from elaunch.policy.candidates.partition import Partition, minimax
from elaunch.policy.candidates.structure import NotPossible, stages_of
from elaunch.policy.estimate import estimate_step, long_pipeline_s
from elaunch.policy.memory import stage_bytes
from elaunch.policy.profile import Profile

WEIGHT = 1000
"""Of a replica of speed 1 in an uneven distribution of rows."""

PERIOD = 12
"""Turns after which odd rows have gone to 2, 3, 4, 6 or 12 replicas equally often."""

MOST_PLAYED = 3
"""Cuts that are played through as they are; fewer, if that would be more than MOST_ACTIONS."""

MOST_ACTIONS = 20_000

MOST_REFUSED = 12
"""Cuts that are looked at until one fits in memory."""

SLACK = 1e-3
"""Layers do not move for less than this part of a stage's time."""


def resized(plan: Plan, members: Sequence[str], profile: Profile, *, move: bool = True, whole: bool = False) -> Plan:
    """Returns the plan for the members among those that `plan` is for.

    Args:
        plan: valid.
        members: who is left, and who has come and stays idle.
        profile: of the model.
        move: whether layers may move between stages.
        whole: whether micro-batches go whole to the peers, so that no bit of the result changes.

    Raises:
        NotPossible: says why.
    """
    here = set(members)
    found = stages_of(plan, [worker for worker in plan.workers if worker not in here])
    left = [stage for stage in found if any(stage.replicas)]
    if not left:
        raise NotPossible("nobody of its tiles is left")
    if len(left) < len(found) and not move:
        gone = next(stage for stage in found if not any(stage.replicas))
        raise NotPossible(f"nobody is left of layers {gone.layers.start}:{gone.layers.stop}")
    dp_size = max(sum(map(bool, stage.replicas)) for stage in left)
    left = [with_rows(_narrowed(stage, dp_size), profile) for stage in left]
    if not move:
        return made(plan, left, members, whole)
    return balanced(plan, left, members, profile, whole=whole)


def balanced(
    plan: Plan,
    given: Sequence[Stage],
    members: Sequence[str],
    profile: Profile,
    most_played: int = MOST_PLAYED,
    whole: bool = False,
) -> Plan:
    """Returns the plan of these stages whose layers are cut so that a step is fastest and fits in memory.

    Cuts are ranked by a single pipeline whose stages last as long as the replicas' average turn; the best few are
    played through as they are.

    Raises:
        NotPossible: no cut fits.
    """
    if len(given) > plan.n_layers:
        raise NotPossible(f"there are {plan.n_layers} layers for {len(given)} stages")
    dp_size = len(given[0].replicas)
    turns = math.ceil(plan.n_units / dp_size)
    prices = _Prices(plan, given, profile, turns)
    tried: dict[tuple[int, ...], float] = {}

    def value(bounds: tuple[int, ...]) -> float:
        if bounds not in tried:
            tried[bounds] = prices.step_s(bounds)
        return tried[bounds]

    for partition in prices.partitions():
        _improve(partition.bounds, value)
    ranked = sorted((bounds for bounds in tried if value(bounds) < math.inf), key=value)
    length = min(turns, 2 * len(given) + PERIOD)
    most = max(1, min(most_played, MOST_ACTIONS // (2 * dp_size * len(given) * length)))
    bounded = profile.least_cap_bytes(members) < math.inf
    best: tuple[float, tuple[int, ...], Plan | None] | None = None
    for number, bounds in enumerate(ranked[:MOST_REFUSED]):
        if best is not None and number >= most:
            break
        step_s, played = value(bounds), None
        if most > 1 or bounded:
            # The beginning of a long step tells which cut is better, and what memory it takes.
            short = made(_of_length(plan, length * dp_size), _with_bounds(given, bounds), members, whole)
            short = replace(short, costs=profile.costs)
            found = estimate_step(short, profile)
            if found.over(profile):
                continue
            step_s = found.step_s if most > 1 else step_s
            played = short if short.global_batch_size == plan.global_batch_size else None
        if best is None or (step_s, bounds) < best[:2]:
            best = step_s, bounds, played
    if best is None:
        raise NotPossible(_does_not_fit(given, profile))
    # What was played through in full keeps what was derived of it.
    return best[2] or replace(made(plan, _with_bounds(given, best[1]), members, whole), costs=profile.costs)


def _with_bounds(given: Sequence[Stage], bounds: tuple[int, ...]) -> list[Stage]:
    return [replace(stage, layers=range(*ends)) for stage, ends in zip(given, pairwise(bounds), strict=True)]


def _of_length(plan: Plan, n_units: int) -> Plan:
    """Returns the same sizes with another number of units."""
    return replace(plan, global_batch_size=n_units * plan.micro_batch_size)


def _improve(best: tuple[int, ...], value: Callable[[tuple[int, ...]], float]) -> None:
    """Moves one boundary by one layer as long as that makes the step faster."""
    while True:
        other = min(_neighbours(best), key=value, default=best)
        if not value(other) < value(best):
            return
        best = other


def _neighbours(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for place in range(1, len(bounds) - 1):
        for change in (-1, 1):
            at = bounds[place] + change
            if bounds[place - 1] < at < bounds[place + 1]:
                yield (*bounds[:place], at, *bounds[place + 1 :])


def made(plan: Plan, given: Sequence[Stage], members: Sequence[str], whole: bool = False) -> Plan:
    """Returns the plan of these stages, which cut no micro-batch if it is to be `whole`; all other members are idle.

    Raises:
        NotPossible: there are fewer micro-batches than replicas.
    """
    busy = {worker for stage in given for workers in stage.replicas for worker in workers}
    idle = [member for member in members if member not in busy]
    sizes = plan.n_layers, plan.global_batch_size, plan.micro_batch_size
    try:
        return stages(*sizes, given, zero=plan.zero, idle=idle, whole=whole)
    except PlanError as error:
        raise NotPossible(str(error)) from error


def with_rows(stage: Stage, profile: Profile) -> Stage:
    """Returns the same stage with its rows distributed by the speed of its replicas; evenly if they are alike."""
    speeds = [profile.slowest(workers) if workers else 0.0 for workers in stage.replicas]
    if len({speed for speed in speeds if speed}) <= 1:
        return replace(stage, shares=None)
    return replace(stage, shares=tuple(round(WEIGHT * speed) for speed in speeds))


def pace(stage: Stage, profile: Profile, rows: int, rounded: Callable[[float], float] = float) -> float:
    """Returns the factor from the seconds of a row to those of `rows` rows over the replicas of a stage.

    Args:
        stage: with its rows distributed.
        profile: of the model.
        rows: of a turn.
        rounded: of a replica's part of them; `math.ceil` for the turn in which it has the most.
    """
    speeds = [profile.slowest(workers) for workers in stage.replicas if workers]
    if stage.shares is None:
        return rounded(rows / len(speeds)) / min(speeds)
    weights = [weight for weight in stage.shares if weight]
    return max(rounded(rows * weight / sum(weights)) / speed for weight, speed in zip(weights, speeds, strict=True))


def _narrowed(stage: Stage, dp_size: int) -> Stage:
    """Returns the stage without DP ranks that no stage needs."""
    replicas = list(stage.replicas)
    while len(replicas) > dp_size:
        replicas.remove(())
    return replace(stage, replicas=tuple(replicas))


_Price = Callable[[range, float, int], float]


class _Prices:
    """The costs of cuts of the layers into these stages."""

    def __init__(self, plan: Plan, given: Sequence[Stage], profile: Profile, turns: int) -> None:
        rows = plan.micro_batch_size * len(given[0].replicas)
        self._given, self._profile, self._turns, self._n_layers = given, profile, turns, plan.n_layers
        self._widths = [len(next(filter(None, stage.replicas))) for stage in given]
        self._paces = [pace(stage, profile, rows) for stage in given]
        self._most = [pace(stage, profile, rows, math.ceil) for stage in given]
        workers = [[worker for some in stage.replicas for worker in some] for stage in given]
        self._slowest = [profile.slowest(some) for some in workers]
        self._caps = [profile.least_cap_bytes(some) for some in workers]
        self._replicas = [sum(map(bool, stage.replicas)) for stage in given]
        self._bytes = {
            n: list(accumulate((la.optimizer_bytes + n * la.parameter_bytes for la in profile.layers), initial=0))
            for n in set(self._replicas)
        }

        @cache
        def turn(width: int, start: int, stop: int) -> tuple[float, float]:
            """Seconds of some layers, whatever the rows, and for each row."""
            fixed_s, one_s = (profile.turn_s(range(start, stop), rows, width) for rows in (0, 1))
            return fixed_s, one_s - fixed_s

        self._turn = turn

    def step_s(self, bounds: tuple[int, ...]) -> float:
        """Returns the seconds of a single pipeline; infinite if a stage does not fit."""
        spans = list(enumerate(pairwise(bounds)))
        if not all(self._fits(stage, *span) for stage, span in spans):
            return math.inf
        forward = [self._seconds(self._profile.forward_s, self._paces, stage, *span) for stage, span in spans]
        backward = [self._seconds(self._profile.backward_s, self._paces, stage, *span) for stage, span in spans]
        return long_pipeline_s(forward, backward, self._turns)

    def partitions(self) -> Iterator[Partition]:
        """Yields cuts that may be the best, for the average rows of a turn and for the most."""
        for paces in dict.fromkeys((tuple(self._paces), tuple(self._most))):
            turn_s = self._turn_prices(paces)
            found = minimax(self._n_layers, len(self._given), turn_s, self._fits, self._moved, SLACK)
            if found is not None:
                yield found

    def _turn_prices(self, paces: Sequence[float]) -> Callable[[int, int, int], float]:
        """Returns the seconds of a turn by stage and layers. Stages of a kind have them in common."""
        known: dict[tuple[int, float, float], dict[tuple[int, int], float]] = {}
        kinds = list(zip(self._widths, self._slowest, paces, strict=True))
        of_stage = [known.setdefault(kind, {}) for kind in kinds]

        def turn_s(stage: int, start: int, stop: int) -> float:
            prices, layers = of_stage[stage], (start, stop)
            if layers not in prices:
                width, slowest, pace = kinds[stage]
                fixed, per_row = self._turn(width, start, stop)
                prices[layers] = fixed / slowest + pace * per_row
            return prices[layers]

        return turn_s

    def _seconds(self, price: _Price, paces: Sequence[float], stage: int, start: int, stop: int) -> float:
        layers, width = range(start, stop), self._widths[stage]
        fixed = price(layers, 0, width)
        return fixed / self._slowest[stage] + paces[stage] * (price(layers, 1, width) - fixed)

    def _fits(self, stage: int, start: int, stop: int) -> bool:
        if math.isinf(self._caps[stage]):
            return True
        in_flight = min(len(self._given) - stage, self._turns)
        kept_rows = in_flight * self._most[stage] * self._slowest[stage]
        needed = stage_bytes(self._profile, range(start, stop), self._replicas[stage], kept_rows)
        return needed / self._widths[stage] <= self._caps[stage]

    def _moved(self, stage: int, start: int, stop: int) -> float:
        layers, n_bytes = self._given[stage].layers, self._bytes[self._replicas[stage]]
        low = min(max(start, layers.start), stop)
        high = max(low, min(stop, layers.stop))
        return n_bytes[stop] - n_bytes[high] + n_bytes[low] - n_bytes[start]


def _does_not_fit(given: Sequence[Stage], profile: Profile) -> str:
    caps = {profile.cap_bytes(worker) for stage in given for workers in stage.replicas for worker in workers}
    return f"no cut of the layers into {len(given)} stages fits into {min(caps):,.0f} bytes of each worker"
