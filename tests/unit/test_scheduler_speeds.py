"""How fast jobs are on what they might get, and what it costs to get there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.errors import UsageError
from elaunch.plan.build import symmetric
from elaunch.policy.candidates.expand import expanded
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import LayerProfile, LinkProfile, Profile
from elaunch.policy.transition import estimate_transition
from elaunch.scheduler.model import Node
from elaunch.scheduler.plan_speed import PLAN_FAMILIES, DefaultPlan, Distances, PlanFamily, PlanSpeed, kind_speeds
from elaunch.scheduler.speeds import MoveCost, RestartCost, TableSpeed
from tests.helpers import scaled

LAYER = LayerProfile(0.1, 0.2, 100, 1200, 10, 50)
PROFILE = Profile("even", (LAYER,) * 8, 1, 1e4, 1e-6, change_s=2.0)
NODES = [Node(f"n{place}", 4, "new" if place < 4 else "old", f"r{place % 2}") for place in range(8)]
DEFAULT = DefaultPlan(pp=2, dp=1, tp=1, global_batch_size=16, micro_batch_size=1)

allocations = st.dictionaries(st.sampled_from([node.name for node in NODES]), st.integers(1, 4), max_size=3)


def test_a_table_is_interpolated_and_ends_at_both_ends() -> None:
    speed = TableSpeed({2: 10.0, 4: 16.0, 8: 20.0})
    rates = [speed.rate({"a": n} if n else {}) for n in (0, 1, 2, 3, 4, 5, 8, 9)]
    assert rates == [0.0, 0.0, 10.0, 13.0, 16.0, 17.0, 20.0, 20.0]
    assert replace(speed, weights={"slow": 0.5}).rate({"fast": 2, "slow": 2}) == 13.0


def test_moving_costs_the_share_of_newcomers_and_restarting_the_whole_state_twice() -> None:
    move, restart = MoveCost(1.0, 1000.0, 100.0), RestartCost(30.0, 1000.0, 100.0)
    assert move.seconds({"a": 2}, {"a": 2, "b": 2}) == 1.0 + 2.5
    assert move.seconds({"a": 2, "b": 2}, {"a": 2}) == 1.0
    assert restart.seconds({"a": 2, "b": 2}, {"a": 2}) == 50.0
    for cost in (move, restart):
        assert cost.seconds({"a": 2}, {"a": 2}) == cost.seconds({}, {"a": 2}) == cost.seconds({"a": 2}, {}) == 0.0


def test_the_rate_is_that_of_the_default_plan_to_which_the_others_are_added() -> None:
    speed = PlanSpeed(PROFILE, DEFAULT, NODES)
    base = symmetric(["r0n0/0", "r0n0/1"], 8, 16, 1, pp=2)
    assert speed.rate({"n3": 2}) == pytest.approx(16 / estimate_step(base, PROFILE).step_s)
    members = [f"r0n0/{rank}" for rank in range(4)] + ["r0n1/0", "r0n1/1"]
    grown = expanded(base, members, PROFILE)
    assert speed.rate({"n3": 4, "n2": 2}) == pytest.approx(16 / estimate_step(grown, PROFILE).step_s)
    assert speed.rate({"n3": 4, "n2": 2}) > 1.5 * speed.rate({"n3": 2})


@settings(max_examples=scaled(6, 200))
@given(allocations, st.permutations(range(8)), st.sampled_from(PLAN_FAMILIES))
def test_only_the_shape_of_an_allocation_counts(
    allocation: dict[str, int], order: list[int], family: PlanFamily
) -> None:
    """Nodes of one kind and rack stand for each other, and racks of the same nodes."""
    names = {f"n{place}": f"n{place ^ 1 if order[0] % 2 else place}" for place in range(8)}
    if order[1] % 2:
        names = {name: f"n{int(to[1:]) ^ 2}" for name, to in names.items()}
    other = {names[name]: n for name, n in reversed(allocation.items())}
    given_ = {"kinds": {"new": 1.0, "old": 0.5}, "distances": Distances(LinkProfile(1e5, 1e-6), LinkProfile(1e4, 1e-5))}
    speed = PlanSpeed(PROFILE, DEFAULT, NODES, family=family, **given_)  # type: ignore[arg-type]
    assert speed.rate(allocation) == speed.rate(other)
    # The same, asked in the other order.
    fresh = PlanSpeed(PROFILE, DEFAULT, NODES, family=family, **given_)  # type: ignore[arg-type]
    assert fresh.rate(other) == speed.rate(other)
    assert (speed.rate(allocation) > 0) or sum(allocation.values()) < 2


def test_a_way_there_costs_what_the_transition_between_the_plans_does() -> None:
    speed = PlanSpeed(PROFILE, DEFAULT, NODES)
    old = symmetric(["r0n0/0", "r0n0/1"], 8, 16, 1, pp=2)
    new = expanded(old, [f"r0n0/{rank}" for rank in range(4)], PROFILE)
    way = estimate_transition(old, new, PROFILE, (), estimate_step(new, PROFILE).step_s / 2)
    assert way.moved_bytes > 0
    assert speed.change_s({"n0": 2}, {"n0": 4}) == pytest.approx(way.total_s)
    # Everything moves when nobody stays.
    away_s = speed.change_s({"n0": 2}, {"n1": 2})
    assert away_s == pytest.approx(2.0 + 8 * (100 + 1200) / 2 / 1e4)
    assert speed.change_s({"n0": 2}, {"n0": 2}) == speed.change_s({}, {"n0": 2}) == 0.0
    assert speed.change_s({"n0": 4}, {"n0": 2}) >= 2.0
    restarting = PlanSpeed(PROFILE, DEFAULT, NODES, cost=RestartCost(60.0))
    assert restarting.change_s({"n0": 2}, {"n0": 4}) == 60.0


def test_a_table_has_the_rates_of_the_fewest_nodes_and_what_is_between_them() -> None:
    speed = PlanSpeed(PROFILE, DEFAULT)
    table = speed.table(per_node=4, most=9)
    assert sorted(table.rates) == [2, 3, 4, 5, 7, 9]
    assert table.rates[7] == speed.rate({"a": 4, "b": 3})
    assert table.rate({"a": 4, "b": 2}) == pytest.approx((table.rates[5] + table.rates[7]) / 2)
    assert table.rate({"a": 1}) == 0.0
    assert table.change_s({"a": 2}, {"b": 2}) == speed.move_cost().seconds({"a": 2}, {"b": 2}) > 0


def test_families_of_plans_differ_in_what_they_can_use() -> None:
    """Pipelines of two stages cannot use an odd device; equal parts of five devices are five."""
    by_family: dict[str, PlanSpeed] = {}
    families: tuple[PlanFamily, ...] = ("asymmetric", "symmetric", "data-parallel")
    for family in families:
        by_family[family] = PlanSpeed(PROFILE, DEFAULT, NODES, family=family)
    dp = by_family["data-parallel"]
    assert dp.rate({"n0": 4, "n1": 1}) == dp.rate({"n0": 4})
    plan = by_family["symmetric"].plan({"n0": 4, "n1": 1})
    assert plan is not None
    assert len({len([t for t in plan.tiles if t.layers == tile.layers]) for tile in plan.tiles}) == 1
    assert dp.rate({"n0": 1}) == 0
    assert by_family["asymmetric"].rate({"n0": 4, "n1": 1}) > dp.rate({"n0": 4})
    with pytest.raises(UsageError, match="got 'other'"):
        PlanSpeed(PROFILE, DEFAULT, family="other")  # type: ignore[arg-type]


def test_what_does_not_fit_in_memory_has_no_rate() -> None:
    small = replace(PROFILE, memory_bytes=6500)
    for profile, fits in ((PROFILE, True), (small, False)):
        speed = PlanSpeed(profile, DEFAULT, NODES)
        assert speed.rate({"n0": 2}) > 0.0
        assert (speed.rate({"n0": 1}) > 0.0) == fits


def test_kinds_that_were_not_measured_are_scaled_by_their_tflops() -> None:
    slower = PROFILE.scaled(4.0)
    assert kind_speeds({"new": PROFILE}, {"new": 300.0, "old": 100.0}) == {"new": 1.0, "old": pytest.approx(1 / 3)}
    measured = kind_speeds({"new": PROFILE, "old": slower}, {"new": 300.0, "old": 100.0, "older": 30.0})
    assert measured == {"new": 1.0, "old": pytest.approx(0.25), "older": pytest.approx(0.1)}
    assert kind_speeds({"new": PROFILE}, {"old": 100.0}) == {"new": 1.0}
    speed = PlanSpeed(PROFILE, DEFAULT, NODES, kinds={"new": 1.0, "old": 0.5})
    assert speed.rate({"n4": 2}) == pytest.approx(speed.rate({"n0": 2}) / 2, rel=0.02)
