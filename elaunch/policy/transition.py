"""What the way from one plan to another costs: the bytes that move, and the seconds in which the job does not train."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from elaunch.plan.tiling import Plan
from elaunch.plan.views import holders
from elaunch.policy.profile import Profile


@dataclass(frozen=True)
class TransitionEstimate:
    """The cost of going from one plan to another.

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
        """Returns the seconds in which the job does not train."""
        return self.change_s + self.stall_s


def estimate_transition(
    old: Plan, new: Plan, profile: Profile, lost: Collection[str] = (), beside_s: float = 0.0
) -> TransitionEstimate:
    """Estimates the cost of going from one plan to another.

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
    for before, after, parameter_bytes, optimizer_bytes in _held_alike(old, new, profile):
        if before == after and gone.isdisjoint(worker for workers in before for worker in workers):
            continue
        had = {workers for workers in before if gone.isdisjoint(workers)}
        sources = sorted(had) or [before[0]]
        for place, workers in enumerate(workers for workers in after if workers not in had):
            for worker in workers:
                into[worker] += parameter_bytes / len(workers)
            for worker in sources[place % len(sources)]:
                out[worker] += parameter_bytes / len(workers)
        for giver, taker, part in _handed(before, after):
            for worker in taker:
                into[worker] += part * optimizer_bytes / len(taker)
            for worker in giver:
                out[worker] += part * optimizer_bytes / len(taker)
    # What is lost has a copy somewhere else: nobody in particular sends it.
    busiest = max([*into.values(), *(n for worker, n in out.items() if worker not in gone)], default=0.0)
    transfer_s = profile.link("", "").seconds(busiest) if busiest else 0.0
    return TransitionEstimate(
        profile.change_s,
        transfer_s,
        transfer_s if gone & set(old.workers) else max(0.0, transfer_s - beside_s),
        math.ceil(sum(into.values())),
    )


_Holders = tuple[tuple[str, ...], ...]


def _held_alike(old: Plan, new: Plan, profile: Profile) -> Iterator[tuple[_Holders, _Holders, int, int]]:
    """Yields who held and who holds some layers, and the bytes of their parameters and of what the optimizer keeps."""
    found: dict[tuple[_Holders, _Holders], list[int]] = {}
    for layer, before, after in zip(profile.layers, holders(old), holders(new), strict=True):
        n_bytes = found.setdefault((before, after), [0, 0])
        n_bytes[0] += layer.parameter_bytes
        n_bytes[1] += layer.optimizer_bytes
    for (before, after), (parameter_bytes, optimizer_bytes) in found.items():
        yield before, after, parameter_bytes, optimizer_bytes


def _handed(before: _Holders, after: _Holders) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], float]]:
    """Yields who gives whom which part of a layer's optimizer state, each replica owning an even cut (ElasWave 6.3)."""
    place = 0
    for new, taker in enumerate(after):
        place = new * len(before) // len(after)
        while place < len(before) and place * len(after) < (new + 1) * len(before):
            start = max(place / len(before), new / len(after))
            stop = min((place + 1) / len(before), (new + 1) / len(after))
            if before[place] != taker and stop > start:
                yield before[place], taker, stop - start
            place += 1
