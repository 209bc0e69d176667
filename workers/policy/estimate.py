"""What a plan costs: seconds of a step, memory of each worker, seconds of the way to it.

The step is played through in the very order that the executor follows (Chameleon eq. 11). Parts of the plan that have
nothing to do with each other, such as whole pipelines, are played once for all that are alike; so it takes
O(tiles x micro-batches) of those that differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from elaunch.workers.plan.parts import Part, parts
from elaunch.workers.plan.schedule import Action, schedule, timeline
from elaunch.workers.plan.tiling import Plan, n_rows
from elaunch.workers.plan.views import gradient_groups, holders
from elaunch.workers.policy.profile import LinkProfile, Profile, action_s, transfer_s


@dataclass(frozen=True)
class StepEstimate:
    """One step under a plan.

    Attributes:
        step_s: from commit to commit.
        bubble: the part of their time in which the workers with tiles wait for each other, 0..1.
        busy_s: of computing, by worker with a tile.
        peak_bytes: by worker with a tile, at the worst moment of the step.
    """

    step_s: float
    bubble: float
    busy_s: Mapping[str, float]
    peak_bytes: Mapping[str, int]

    def over(self, profile: Profile) -> dict[str, tuple[int, float]]:
        """By worker that needs more memory than it may use: what it needs, and what it may use."""
        caps = {worker: profile.cap_bytes(worker) for worker in self.peak_bytes}
        return {worker: (n, caps[worker]) for worker, n in self.peak_bytes.items() if n > caps[worker]}


@dataclass(frozen=True)
class TransitionEstimate:
    """The way from a plan to another.

    Attributes:
        change_s: agreement, plan and links, whatever moves.
        transfer_s: in which the state moves.
        stall_s: of those, in which no step is done: what does not fit beside the next step; all, if somebody is lost.
        moved_bytes: received by all workers together.
    """

    change_s: float
    transfer_s: float
    stall_s: float
    moved_bytes: int

    @property
    def total_s(self) -> float:
        """In which the job does not train."""
        return self.change_s + self.stall_s


def estimate_step(plan: Plan, profile: Profile) -> StepEstimate:
    """Play a step of a valid plan through.

    Raises:
        PlanError: the profile is for another number of layers.
    """
    profile.check(plan)
    known: dict[Hashable, _Played] = {}
    ends_s: dict[str, float] = {}
    last_s: dict[str, float] = {}
    busy_s: dict[str, float] = {}
    kept: dict[str, int] = {}
    for part in parts(plan):
        key, workers = _likeness(part, profile), part.plan.workers
        if key not in known:
            known[key] = _play(part.plan, workers, profile)
        played = known[key]
        ends_s |= zip(workers, played.ends_s)
        last_s |= zip(workers, played.last_s)
        busy_s |= zip(workers, played.busy_s)
        kept |= zip(workers, played.kept_bytes)
    makespan_s = max(ends_s.values(), default=0.0)
    bubble = 1 - sum(busy_s.values()) / (len(busy_s) * makespan_s) if makespan_s else 0.0
    reduced_s, shared_s, updated_s = _synchronised(plan, profile)
    step_s = 0.0
    for worker, end_s in ends_s.items():
        tail_s = _not_hidden(last_s[worker], reduced_s[worker], profile.overlap) + updated_s[worker]
        step_s = max(step_s, end_s + tail_s)
    step_s += max(shared_s.values(), default=0.0) + profile.step_s
    fixed = static_bytes(plan, profile)
    return StepEstimate(step_s, bubble, busy_s, {worker: fixed[worker] + n for worker, n in kept.items()})


def static_bytes(plan: Plan, profile: Profile) -> dict[str, int]:
    """By worker with a tile: parameters, their gradients, and its part of masters and optimizer states."""
    found: dict[str, float] = defaultdict(float)
    for layer, tuples in zip(profile.layers, holders(plan), strict=True):
        for workers in tuples:
            mine = 2 * layer.parameter_bytes + layer.optimizer_bytes / len(tuples)
            for worker in workers:
                found[worker] += mine / len(workers)
    return {worker: math.ceil(n) for worker, n in found.items()}


def estimate_transition(
    old: Plan, new: Plan, profile: Profile, lost: Collection[str] = (), beside_s: float = 0.0
) -> TransitionEstimate:
    """The way from one plan to another.

    A worker keeps what it has. What the optimizer keeps comes from its owner, or from the copy that a third worker has
    of what somebody lost owned; parameters come from those who hold the layer. All go at once, so it takes as long as
    the busiest worker sends or receives.

    Args:
        old: under which the state is distributed now; valid.
        new: valid, for the same model.
        profile: of the model.
        lost: workers of the old plan that are gone.
        beside_s: of a step, in which the state can move if nobody is lost (ElasWave 6.2).
    """
    gone = set(lost)
    into: dict[str, float] = defaultdict(float)
    out: dict[str, float] = defaultdict(float)
    for layer, before, after in zip(profile.layers, holders(old), holders(new), strict=True):
        if before == after and gone.isdisjoint(worker for workers in before for worker in workers):
            continue
        had = {workers for workers in before if gone.isdisjoint(workers)}
        sources = sorted(had) or [before[0]]
        for place, workers in enumerate(workers for workers in after if workers not in had):
            for worker in workers:
                into[worker] += layer.parameter_bytes / len(workers)
            for worker in sources[place % len(sources)]:
                out[worker] += layer.parameter_bytes / len(workers)
        for giver, taker, part in _handed(before, after):
            for worker in taker:
                into[worker] += part * layer.optimizer_bytes / len(taker)
            for worker in giver:
                out[worker] += part * layer.optimizer_bytes / len(taker)
    # What is lost has a copy somewhere else: nobody in particular sends it.
    busiest = max([*into.values(), *(n for worker, n in out.items() if worker not in gone)], default=0.0)
    transfer_s = profile.link("", "").seconds(busiest) if busiest else 0.0
    return TransitionEstimate(
        profile.change_s,
        transfer_s,
        transfer_s if gone & set(old.workers) else max(0.0, transfer_s - beside_s),
        math.ceil(sum(into.values())),
    )


def pipeline_s(forward_s: Sequence[float], backward_s: Sequence[float], n: int) -> float:
    """Seconds of `n` micro-batches through one pipeline by 1F1B, whose stages may differ (Chameleon eq. 11).

    Args:
        forward_s: of each stage, for a micro-batch.
        backward_s: likewise.
        n: micro-batches.
    """
    depth = len(forward_s)
    ahead = [min(depth - stage, n) for stage in range(depth)]
    free = [0.0] * depth
    forwards = [[0.0] * n for _ in range(depth)]
    # In turn t a stage does its forward number t + ahead - 1 after its backward number t - 1.
    for stage in range(depth):
        for number in range(ahead[stage]):
            ready = forwards[stage - 1][number] if stage else 0.0
            # Of the stages before, later ones are not known yet: they come with the turns.
            free[stage] = forwards[stage][number] = max(free[stage], ready) + forward_s[stage]
    for turn in range(n):
        arrived = 0.0
        for stage in range(depth - 1, -1, -1):
            free[stage] = arrived = max(free[stage], arrived) + backward_s[stage]
        for stage in range(depth):
            number = turn + ahead[stage]
            if number < n:
                ready = forwards[stage - 1][number] if stage else 0.0
                free[stage] = forwards[stage][number] = max(free[stage], ready) + forward_s[stage]
    return max(free)


def long_pipeline_s(forward_s: Sequence[float], backward_s: Sequence[float], n: int) -> float:
    """As `pipeline_s`; once it has filled, each further micro-batch takes as long as the one before."""
    short = 3 * len(forward_s)
    if n <= short + 2:
        return pipeline_s(forward_s, backward_s, n)
    begin_s, end_s = (pipeline_s(forward_s, backward_s, some) for some in (short, short + 2))
    return begin_s + (n - short) * (end_s - begin_s) / 2


# -- the parts of a plan ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Played:
    """Of the workers of a part, in their order: end of their actions, length of the last, computing, activations."""

    ends_s: tuple[float, ...]
    last_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    kept_bytes: tuple[int, ...]


def _likeness(part: Part, profile: Profile) -> Hashable:
    """Parts with equal ones take as long."""
    if not profile.workers and not profile.links:
        return part.shape
    speeds = tuple(profile.tile_speed(tile) for tile in part.plan.tiles)
    links: tuple[LinkProfile, ...] = ()
    if profile.links:
        heads = list(dict.fromkeys(tile.workers[0] for tile in part.plan.tiles))
        links = tuple(profile.link(one, other) for one in heads for other in heads if one != other)
    return part.shape, speeds, links


def _play(part: Plan, workers: Sequence[str], profile: Profile) -> _Played:
    order = schedule(part)
    price = action_s(profile, part)
    played = timeline(part, order, price, transfer_s(profile, part))
    activations = list(accumulate((layer.activation_bytes_per_row for layer in profile.layers), initial=0))
    rows = [[n_rows(runs) for runs in tile.micro_batches] for tile in part.tiles]
    kept: dict[Action, float] = {}
    for index, tile in enumerate(part.tiles):
        per_row = activations[tile.layers.stop] - activations[tile.layers.start]
        for number, n in enumerate(rows[index]):
            kept[Action("F", index, number)] = n * per_row / len(tile.workers)
            kept[Action("B", index, number)] = -n * per_row / len(tile.workers)
    known: dict[int, tuple[float, float, int]] = {}
    for worker in workers:
        # The members of a tuple have one order.
        mine = order.by_worker[worker]
        if id(mine) not in known:
            most = math.ceil(max(accumulate(kept[action] for action in mine)))
            known[id(mine)] = played.ends_s[mine[-1]], price(mine[-1]), most
    found = [known[id(order.by_worker[worker])] for worker in workers]
    return _Played(
        tuple(end_s for end_s, _, _ in found),
        tuple(last_s for _, last_s, _ in found),
        tuple(played.busy_s[worker] for worker in workers),
        tuple(most for _, _, most in found),
    )


# -- after the last backward --------------------------------------------------------------------------------------


def _synchronised(plan: Plan, profile: Profile) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """By worker, the seconds of reducing gradients, of sharing new values and of the optimizer's step."""
    reduced: dict[str, float] = defaultdict(float)
    shared: dict[str, float] = defaultdict(float)
    updated: dict[str, float] = defaultdict(float)
    for group in gradient_groups(plan):
        n = len(group.replicas)
        n_bytes = sum(profile.layers[layer].parameter_bytes for layer in group.layers)
        update_s = sum(profile.layers[layer].update_s for layer in group.layers) / n
        seconds = 0.0
        if n > 1:
            heads = [workers[0] for workers in group.replicas]
            ring = pairwise([*heads, heads[0]]) if profile.links else [(heads[0], heads[1])]
            slowest = min((profile.link(*pair) for pair in ring), key=lambda link: link.bandwidth_bytes_per_s)
            seconds = slowest.seconds(n_bytes * (n - 1) / n)
        for workers in group.replicas:
            for worker in workers:
                reduced[worker] += seconds / len(workers)
                shared[worker] += seconds / len(workers)
                updated[worker] += update_s / len(workers) / profile.speed(worker)
    return reduced, shared, updated


def _not_hidden(computing_s: float, telling_s: float, overlap: float) -> float:
    """What remains of `telling_s` beside `computing_s` (Suika A.2, with the exponent 1/k)."""
    longer, shorter = max(computing_s, telling_s), min(computing_s, telling_s)
    if not longer or math.isinf(overlap):
        return longer - computing_s
    return float(longer * (1 + (shorter / longer) ** overlap) ** (1 / overlap) - computing_s)


_Holders = Sequence[tuple[str, ...]]


def _handed(before: _Holders, after: _Holders) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], float]]:
    """Who gives whom which part of a layer's optimizer state, if each replica owns an even cut (ElasWave 6.3)."""
    place = 0
    for new, taker in enumerate(after):
        place = new * len(before) // len(after)
        while place < len(before) and place * len(after) < (new + 1) * len(before):
            start = max(place / len(before), new / len(after))
            stop = min((place + 1) / len(before), (new + 1) / len(after))
            if before[place] != taker and stop > start:
                yield before[place], taker, stop - start
            place += 1
