"""What the policies are compared with: whatever is lost, a valid plan for those who are left, or a reason."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from elaunch.plan import n_rows, symmetric
from elaunch.policy.candidates.structure import NotPossible, stages_of
from elaunch.policy.estimate import estimate_step
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.simulator.baselines import depths_of, drop_replica, sums, template_switch
from tests.helpers import scaled

LAYER = LayerProfile(1.0, 2.0, 100, 1200, 10, 50)
HEAD = replace(LAYER, forward_s_per_row=1.5, backward_s_per_row=3.0)
PROFILE = Profile("even", (*[LAYER] * 15, HEAD), 1, 1e9, 0.0)


@settings(max_examples=scaled(40, 120), deadline=None)
@given(data=st.data())
def test_after_any_loss_a_baseline_is_a_plan_for_those_who_are_left(data: DataObject) -> None:
    dp, pp, tp = (data.draw(st.integers(1, most)) for most in (4, 5, 2))
    workers = [f"n{number // 2}/{number % 2}#0" for number in range(dp * pp * tp)]
    plan = symmetric(workers, 16, 24, 2, dp=dp, pp=pp, tp=tp)
    lost = set(data.draw(st.lists(st.sampled_from(workers), unique=True, max_size=len(workers) - 1)))
    members = [worker for worker in workers if worker not in lost]
    whole = [
        dp_rank
        for dp_rank in range(dp)
        if lost.isdisjoint(worker for stage in stages_of(plan) for worker in stage.replicas[dp_rank])
    ]
    if whole:
        dropped = drop_replica(plan, members)
        dropped.validate(members)
        assert len(dropped.workers) - len(dropped.idle) == len(whole) * pp * tp
        assert [stage.layers for stage in stages_of(dropped)] == [stage.layers for stage in stages_of(plan)]
    else:
        with pytest.raises(NotPossible):
            drop_replica(plan, members)
    try:
        switched = template_switch(plan, members, PROFILE, depths_of(pp))
    except NotPossible:
        return
    switched.validate(members)
    assert {n_rows(runs) for tile in switched.tiles for runs in tile.micro_batches} == {2}
    assert len(switched.idle) < tp * len({worker.split("/")[0] for worker in members})


@pytest.mark.parametrize("depth", [2, 3, 6, 8])
def test_templates_cover_any_number_of_workers_that_is_not_too_small(depth: int) -> None:
    depths = depths_of(depth)
    assert depth in depths
    for total in range(depths.start, 40):
        found = list(sums(total, depths))
        assert found
        assert all(sum(some) == total for some in found)
        assert len(set(found)) == len(found)
        every = (combinations_with_replacement(depths, n) for n in range(1, total + 1)) if total < 16 else ()
        assert not every or set(found) == {some for sized in every for some in sized if sum(some) == total}


def test_a_dropped_replica_costs_its_whole_part() -> None:
    workers = [f"n{number}/0#0" for number in range(12)]
    plan = symmetric(workers, 16, 3 * 40, 1, dp=3, pp=4)
    base_s, dropped_s, switched_s = (
        estimate_step(one, PROFILE).step_s
        for one in (plan, drop_replica(plan, workers[1:]), template_switch(plan, workers[1:], PROFILE, depths_of(4)))
    )
    assert dropped_s / base_s == pytest.approx(1.5, rel=0.05)
    assert 1 < switched_s / base_s < 1.3
