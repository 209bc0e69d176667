"""The chosen plan against the best of all plans, where these can all be tried."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from benchmarks.planning import every_plan
from elaunch.plan import symmetric
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import LayerProfile, Profile, WorkerProfile
from elaunch.policy.select import choose
from tests.helpers import soak

BLOCK = LayerProfile(1.0, 2.0, 100, 1200, 10, 50)
HEAD = replace(BLOCK, forward_s_per_row=1.5, backward_s_per_row=3.0)

EVEN: Mapping[int, float] = {}
ONE_SLOW = {1: 0.5}
TWO_SLOW = {1: 0.5, 2: 0.8}
ROOMY, TIGHT = None, 0.62
"""Memory of a worker: no bound, or this part of what the whole model needs."""


def best_s(n_layers: int, units: int, members: Sequence[str], profile: Profile) -> float:
    """The step of the best plan of stages or pipelines, with the members in any places."""
    found: list[float] = []
    seen: set[tuple[float, ...]] = set()
    for order in itertools.permutations(members):
        speeds = tuple(map(profile.speed, order))
        if speeds in seen:
            continue
        seen.add(speeds)
        for plan in every_plan(n_layers, units, order):
            step = estimate_step(plan, profile)
            if not step.over(profile):
                found.append(step.step_s)
    return min(found)


@pytest.mark.parametrize(
    ("sizes", "n_lost"),
    [
        ((2, 2, 4, 6), 1),
        ((3, 1, 4, 6), 1),
        soak((2, 2, 5, 6), 1),
        soak((1, 4, 5, 4), 1),
        soak((2, 2, 6, 4), 1),
        soak((5, 1, 3, 6), 1),
        soak((2, 3, 4, 4), 2),
        soak((3, 2, 4, 4), 2),
    ],
)
@pytest.mark.parametrize("memory", [ROOMY, TIGHT])
@pytest.mark.parametrize("slow", [EVEN, ONE_SLOW, TWO_SLOW], ids=["even", "one slow", "two slow"])
@pytest.mark.timeout(600)
def test_the_chosen_plan_takes_at_most_a_hundredth_more_than_the_best_of_all(
    sizes: tuple[int, int, int, int], n_lost: int, memory: float | None, slow: Mapping[int, float]
) -> None:
    dp, pp, n_layers, units = sizes
    workers = [f"n{number}/0#0" for number in range(dp * pp)]
    profile = Profile(
        "small",
        (*[BLOCK] * (n_layers - 1), HEAD),
        1,
        1e9,
        0.0,
        memory_bytes=None if memory is None else int(memory * n_layers * (2 * 100 + 1200)),
        workers={f"n{number}/0": WorkerProfile(speed) for number, speed in slow.items()},
    )
    plan = symmetric(workers, n_layers, units, 1, dp=dp, pp=pp)
    for members in (workers[n_lost:], workers[:-n_lost]):
        chosen = choose(plan, plan, members, profile).chosen.step
        assert chosen is not None
        assert chosen.step_s <= 1.01 * best_s(n_layers, units, members, profile)
