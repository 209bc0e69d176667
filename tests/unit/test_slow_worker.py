"""A worker that becomes slow is noticed by what the workers tell each other, although no two steps are alike."""

from __future__ import annotations

import random
from typing import Any

import pytest

from elaunch.plan import Plan, symmetric
from elaunch.policy.ahead import Ahead
from elaunch.policy.measure import Measured
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.policy.sample import MeasuredStep
from elaunch.policy.select import SelectorSettings
from elaunch.policy.selector import Selector

WORKERS = [f"n{number // 2}/{number % 2}#0" for number in range(6)]
LAYERS = 6
PLAN = symmetric(WORKERS, LAYERS, 16, 1, dp=2, pp=3)
SLOW_FROM = 20


def steps_until_noticed(monkeypatch: pytest.MonkeyPatch, factor: float, noise: float, seed: int) -> int | None:
    """Steps from the first slow one until the first member wants another plan; None if it never does.

    The steps of each worker differ by up to `noise`.
    """
    asked: list[dict[str, float]] = []

    def begin(
        self: Ahead,
        now: Plan,
        preferred_plan: Plan,
        members: Any,
        me: str,
        profile: Profile,
        *more: Any,
        again: bool,
        **_: Any,
    ) -> None:
        if again:
            asked.append({slot: one.speed for slot, one in profile.workers.items()})

    monkeypatch.setattr(Ahead, "begin", begin)
    layer = LayerProfile(0, 0, 10, 30, 10, 10)
    of = {name: Selector(name, Measured("m", [layer] * LAYERS, [10] * LAYERS), SelectorSettings()) for name in WORKERS}
    for one in of.values():
        one.entered(PLAN, PLAN, WORKERS, None)
    draw = random.Random(seed)
    for step in range(100):
        notes = {name: one.note(dict) for name, one in of.items()}
        for one in of.values():
            one.heard(notes, 1.0)
        if asked:
            assert asked[0] == pytest.approx({"n1/0": 1 / factor}, rel=0.1)
            return step - SLOW_FROM
        for name, one in of.items():
            took_s = (factor if name == "n1/0#0" and step >= SLOW_FROM else 1.0) * (1 + noise * draw.random())
            if one.measures():
                layers = [layer for tile in PLAN.tiles_of(name) for layer in PLAN.tiles[tile].layers]
                one.add([MeasuredStep(layer, 1, 1, took_s, 2 * took_s, 0.0) for layer in layers], {}, 0.1, 10)
    return None


@pytest.mark.parametrize("noise", [0.03, 0.1])
@pytest.mark.parametrize("factor", [1.2, 1.4])
def test_a_slow_worker_is_noticed_soon(monkeypatch: pytest.MonkeyPatch, factor: float, noise: float) -> None:
    for seed in range(12):
        found = steps_until_noticed(monkeypatch, factor, noise, seed)
        assert found is not None
        assert found < 20


@pytest.mark.parametrize("noise", [0.0, 0.03, 0.08])
def test_nobody_is_slow_by_chance(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    for seed in range(8):
        assert steps_until_noticed(monkeypatch, 1.0, noise, seed) is None


@pytest.mark.parametrize(
    ("speeds", "looks"),
    [
        ([0.81, 0.79, 0.80], 2),
        ([0.95, 0.80, 0.80], 3),
        ([0.81, 0.79, 0.60, 0.60], 2),
        ([0.90, 0.80, 0.70, 0.60], None),
    ],
)
def test_speeds_that_hardly_differ_are_the_same(
    monkeypatch: pytest.MonkeyPatch, speeds: list[float], looks: int | None
) -> None:
    """`looks`: at the speeds, until a plan is asked for."""
    asked: list[int] = []
    one = Selector(
        WORKERS[0], Measured("m", [LayerProfile(0, 0, 10, 30, 10, 10)] * LAYERS, [10] * LAYERS), SelectorSettings()
    )
    one.entered(PLAN, PLAN, WORKERS, None)
    monkeypatch.setattr(Ahead, "begin", lambda *_, again, **__: asked.append(again))
    for number, speed in enumerate(speeds, 1):
        monkeypatch.setattr(one.measured, "speeds", lambda: {"n1/0": speed})  # noqa: B023
        one.heard({WORKERS[0]: {"pace": 1.0}}, 1.0)
        if any(asked):
            assert number == looks
            return
    assert looks is None
