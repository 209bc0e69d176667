"""DVFS: stragglers get the lowest clocks at which nobody waits for them; or it says why clocks do not help."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from statistics import median_low

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from elaunch.errors import ClockError
from elaunch.plan import Plan, stages, symmetric
from elaunch.plan.build import Stage
from elaunch.policy.candidates.resize import resized
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.dvfs import (
    LEAST_GAIN,
    ROUNDING,
    TOLERANCE,
    Clocking,
    ClockRange,
    clocked,
    slowdown,
    upclocked,
)
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import LayerProfile, Profile, WorkerProfile
from elaunch.rendezvous.membership import slot_of
from tests.helpers import scaled
from tests.unit.plan_strategies import valid_plans

LAYER = LayerProfile(1.0, 2.0, 100, 1200, 10, 50)
NPU = ClockRange(1400, tuple(range(1000, 1651, 25)))
"""As in ElasWave 7.1: 1,400 MHz at first, at most 1,650."""


def of(n_layers: int, **speeds: float) -> Profile:
    """Of devices whose speed is 1 unless it is given by the number of the node: n3=0.5."""
    workers = {f"{node}/0": WorkerProfile(speed) for node, speed in speeds.items()}
    return Profile("even", (LAYER,) * n_layers, 1, 1e9, 0.0, workers=workers)


def names(n: int) -> list[str]:
    return [f"n{number}/0#0" for number in range(n)]


def all_have(plan: Plan, device: ClockRange) -> dict[str, ClockRange]:
    return {slot_of(worker): device for worker in plan.workers}


def scanned(plan: Plan, profile: Profile, devices: Mapping[str, ClockRange]) -> dict[str, int] | None:
    """The twin: tries every level at which a clock changes, the highest first, and every clock, the lowest first.

    None where clocks do not help.
    """
    base = clocked(profile, {}, devices)
    before = estimate_step(plan, base)
    busy_s = {slot_of(worker): seconds for worker, seconds in before.busy_s.items()}
    most_s = max(busy_s.values())
    peers_s = median_low(busy_s.values())
    if peers_s * (1 + TOLERANCE) >= most_s:
        peers_s = max((one for one in busy_s.values() if one * (1 + TOLERANCE) < most_s), default=0.0)
    stragglers = {slot: seconds for slot, seconds in busy_s.items() if seconds > peers_s * (1 + TOLERANCE)}
    able = {slot: seconds for slot, seconds in stragglers.items() if slot in devices}
    if not peers_s or not able:
        return None

    def factor(slot: str, mhz: int) -> float:
        return slowdown(mhz, devices[slot].base_mhz, profile.memory_bound)

    def clocks(level_s: float) -> dict[str, int]:
        found = {}
        for slot, seconds in able.items():
            higher = [mhz for mhz in devices[slot].supported_mhz if mhz > devices[slot].base_mhz]
            if seconds > level_s * (1 + ROUNDING) and higher:
                enough = [mhz for mhz in higher if seconds * factor(slot, mhz) <= level_s * (1 + ROUNDING)]
                found[slot] = enough[0] if enough else higher[-1]
        return found

    def step_s(level_s: float) -> float:
        return estimate_step(plan, clocked(profile, clocks(level_s), devices)).step_s

    aligned = {
        slot: WorkerProfile(base.speed(slot) * seconds / peers_s) if (seconds := stragglers.get(slot)) else worker
        for slot, worker in {**dict.fromkeys(stragglers, WorkerProfile()), **base.workers}.items()
    }
    target_s, best_s = estimate_step(plan, replace(base, workers=aligned)).step_s, step_s(peers_s)
    if best_s > (1 - LEAST_GAIN) * before.step_s:
        return None
    goal_s = (1 + TOLERANCE) * (target_s if best_s <= (1 + TOLERANCE) * target_s else best_s)
    levels = {seconds * factor(slot, mhz) for slot, seconds in able.items() for mhz in devices[slot].supported_mhz}
    for level_s in sorted({peers_s, *levels}, reverse=True):
        if level_s <= peers_s or step_s(level_s) <= goal_s:
            return clocks(max(level_s, peers_s))
    raise AssertionError("the last level is that of the peers or below")


ranges = st.lists(st.integers(10, 40), min_size=1, max_size=12, unique=True).flatmap(
    lambda some: st.sampled_from(some).map(lambda base: ClockRange(base, tuple(sorted(some))))
)


@settings(max_examples=scaled(50, 150), deadline=None)
@given(data=st.data())
def test_bisection_finds_the_clocks_that_trying_all_of_them_finds(data: DataObject) -> None:
    plan = data.draw(valid_plans())
    slots = [slot_of(worker) for worker in plan.workers]
    speeds = data.draw(st.dictionaries(st.sampled_from(slots), st.sampled_from([0.5, 0.8, 0.9, 1.25])))
    profile = replace(
        of(plan.n_layers),
        memory_bound=data.draw(st.sampled_from([0.0, 0.0, 0.25])),
        latency_s=data.draw(st.sampled_from([0.0, 0.5])),
        workers={slot: WorkerProfile(speed) for slot, speed in speeds.items()},
    )
    if data.draw(st.booleans()):
        devices = all_have(plan, data.draw(ranges))
    else:
        devices = data.draw(st.dictionaries(st.sampled_from(slots), ranges))
    expected = scanned(plan, profile, devices)
    try:
        found = upclocked(plan, profile, devices)
    except NotPossible:
        assert expected is None
        return
    assert found.clocks_mhz == expected
    for slot, mhz in found.clocks_mhz.items():
        assert mhz in devices[slot].supported_mhz
        assert devices[slot].base_mhz < mhz <= devices[slot].max_mhz
    assert found.before_s == estimate_step(plan, profile).step_s
    assert found.after_s == estimate_step(plan, clocked(profile, found.clocks_mhz, devices)).step_s
    assert found.after_s < found.before_s


def test_a_straggler_stays_at_its_own_clock_while_the_step_waits_for_slower_ones() -> None:
    plan = symmetric(names(6), 4, 2, 1, dp=2, pp=3)
    profile = of(4, n0=0.5, n1=1.25, n2=0.5)
    busy_s = estimate_step(plan, profile).busy_s
    assert [busy_s[worker] for worker in names(6)] == pytest.approx([12, 4.8, 6, 3, 3, 3])
    found = upclocked(plan, profile, all_have(plan, ClockRange(10, (10, 11, 12, 13))))
    assert found.clocks_mhz == {"n0/0": 13, "n2/0": 13}


@settings(max_examples=scaled(20, 40), deadline=None)
@given(
    slow=st.floats(0.7, 0.98),
    clocks=st.lists(st.integers(1401, 2000), min_size=1, max_size=12, unique=True).map(sorted),
)
def test_a_single_straggler_gets_the_lowest_clock_that_meets_the_target(slow: float, clocks: list[int]) -> None:
    plan = symmetric(names(4), 8, 32, 2, dp=2, pp=2)
    profile, device = of(8, n2=slow), ClockRange(1400, (1400, *clocks))
    at_s = {mhz: estimate_step(plan, clocked(profile, {"n2/0": mhz}, {"n2/0": device})).step_s for mhz in clocks}
    meets = [mhz for mhz in clocks if at_s[mhz] <= estimate_step(plan, of(8)).step_s * (1 + TOLERANCE)]
    if not meets and at_s[clocks[-1]] > (1 - LEAST_GAIN) * estimate_step(plan, profile).step_s:
        with pytest.raises(NotPossible, match="not their computing"):
            upclocked(plan, profile, {"n2/0": device})
        return
    found = upclocked(plan, profile, {"n2/0": device})
    near = [mhz for mhz in clocks if at_s[mhz] <= at_s[clocks[-1]] * (1 + TOLERANCE)]
    assert found.clocks_mhz == {"n2/0": meets[0] if meets else near[0]}
    assert found.reached == bool(meets)


def test_the_stage_that_lost_a_replica_is_clocked_until_its_peers_need_not_wait() -> None:
    """ElasWave fig. 4: a layer is too coarse for what remains after they have moved."""
    workers = names(12)
    profile = of(24)
    plan = resized(symmetric(workers, 24, 3 * 32 * 2, 2, dp=3, pp=4), workers[:4] + workers[5:], profile)
    found = upclocked(plan, profile, all_have(plan, replace(NPU, supported_mhz=tuple(range(1000, 2001, 25)))))
    assert found.reached
    assert found.before_s > 1.02 * found.after_s
    assert 0 < len(found.clocks_mhz) < 11
    assert re.fullmatch(
        r"n\d+/0.* \(\d+ of 11\) at \d+(\.\.\d+)? MHz: a step takes [\d.]+ s instead of [\d.]+ s, "
        "as long as their peers allow",
        found.reason,
    )


def test_what_cannot_be_reached_is_approached_and_no_other_clock_is_raised_further_than_that_helps() -> None:
    plan = symmetric(names(5), 8, 40, 2, dp=5)
    # 1,650 MHz make 0.5 to 0.59; for that 0.56 needs 1,475 MHz.
    found = upclocked(plan, of(8, n1=0.5, n3=0.56), all_have(plan, NPU))
    assert found.clocks_mhz == {"n1/0": 1650, "n3/0": 1475}
    assert not found.reached
    assert found.after_s == pytest.approx(found.before_s * 1400 / 1650)
    assert found.reason.endswith(f"where their peers would allow {found.target_s:.4g} s")


def test_where_most_are_equally_slow_the_busiest_of_the_others_are_their_peers() -> None:
    plan = symmetric(names(4), 8, 32, 2, dp=4)
    found = upclocked(plan, of(8, n0=1.12, n1=1.4), all_have(plan, NPU))
    assert found.clocks_mhz == {"n2/0": 1575, "n3/0": 1575}


def test_what_waits_for_memory_needs_a_higher_clock() -> None:
    plan = symmetric(names(3), 8, 24, 2, dp=3)
    profile = of(8, n0=0.95)
    assert upclocked(plan, profile, all_have(plan, NPU)).clocks_mhz == {"n0/0": 1475}
    half = replace(profile, memory_bound=0.5)
    assert upclocked(plan, half, all_have(plan, NPU)).clocks_mhz == {"n0/0": 1575}
    with pytest.raises(NotPossible, match=r"n0/0 at higher clocks a step would take 202\.1 s instead of 202\.1 s: it"):
        upclocked(plan, replace(profile, memory_bound=1.0), all_have(plan, NPU))


def test_only_the_slow_partner_of_a_tuple_is_clocked() -> None:
    plan = symmetric(names(4), 8, 16, 2, dp=2, tp=2)
    found = upclocked(plan, replace(of(8, n3=0.9), width=2), all_have(plan, NPU))
    assert found.clocks_mhz == {"n3/0": 1575}
    assert found.clock_mhz("n3/0#7") == 1575
    assert found.clock_mhz("n2/0#0") is None


def test_clocks_that_were_raised_before_are_not_taken_for_the_speed_of_the_device() -> None:
    plan = symmetric(names(3), 8, 24, 2, dp=3)
    devices = all_have(plan, NPU)
    first = upclocked(plan, of(8, n0=0.9), devices)
    measured = clocked(of(8, n0=0.9), first.clocks_mhz, devices)
    devices["n0/0"] = replace(NPU, measured_mhz=first.clocks_mhz["n0/0"])
    again = upclocked(plan, measured, devices)
    assert again.clocks_mhz == first.clocks_mhz
    assert again.before_s == pytest.approx(first.before_s)
    # With nobody slow any more, nothing is to be locked.
    devices["n0/0"] = NPU
    with pytest.raises(NotPossible, match="nobody waits for a straggler"):
        upclocked(plan, of(8), devices)


@pytest.mark.parametrize(
    "devices",
    [{}, {"n1/0": NPU, "n2/0": NPU}, {"n0/0": ClockRange(1650, NPU.supported_mhz)}, {"n9/9": NPU}],
    ids=["none", "not of the straggler", "at its highest already", "of nobody"],
)
def test_a_straggler_whose_clock_cannot_be_raised_is_named(devices: Mapping[str, ClockRange]) -> None:
    plan = symmetric(names(3), 8, 24, 2, dp=3)
    with pytest.raises(NotPossible, match="the clocks of n0/0, for whom the others wait, cannot be raised"):
        upclocked(plan, of(8, n0=0.9), devices)


def test_a_straggler_that_cannot_be_clocked_holds_the_others_clocks_down() -> None:
    plan = symmetric(names(5), 8, 40, 2, dp=5)
    found = upclocked(plan, of(8, n0=0.8, n1=0.9), {"n0/0": NPU})
    assert found.clocks_mhz == {"n0/0": 1575}
    assert not found.reached


def test_a_job_of_one_worker_has_no_straggler() -> None:
    plan = stages(4, 8, 2, [Stage(range(4), (("n0/0#0",),))], idle=["n1/0#0"])
    with pytest.raises(NotPossible, match="nobody waits"):
        upclocked(plan, of(4), all_have(plan, NPU))


def test_seconds_follow_the_clock_except_for_what_waits_for_memory() -> None:
    assert slowdown(1400, 1400) == slowdown(1400, 1400, 0.25) == 1.0
    assert slowdown(2800, 1400) == 0.5
    assert slowdown(2800, 1400, 0.5) == 0.75
    assert slowdown(700, 1400, 1.0) == 1.0


@pytest.mark.parametrize(
    ("clocks", "base", "measured", "message"),
    [
        ((), 5, 0, "must be above 0 and ascend, got none"),
        ((0, 5), 5, 0, "must be above 0 and ascend, got 0..5 MHz"),
        ((5, 4), 5, 0, "must be above 0 and ascend, got 5..4 MHz"),
        ((4, 4), 4, 0, "must be above 0 and ascend, got 4..4 MHz"),
        ((4, 6), 3, 0, "the base clock must be within the supported 4..6 MHz, got 3 MHz"),
        ((4, 6), 5, 7, "the measured clock must be within the supported 4..6 MHz, got 7 MHz"),
    ],
)
def test_a_range_that_is_none_is_refused(clocks: tuple[int, ...], base: int, measured: int, message: str) -> None:
    with pytest.raises(ClockError, match=re.escape(message)):
        ClockRange(base, clocks, measured)


def test_a_clocking_is_reached_within_the_tolerance() -> None:
    assert Clocking({}, 2.0, 1.0005, 1.0, "").reached
    assert not Clocking({}, 2.0, 1.002, 1.0, "").reached
