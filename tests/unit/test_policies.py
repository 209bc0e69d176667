"""The candidates after a change: each is a valid plan for the members or says why not; and which of them is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from scipy.optimize import linear_sum_assignment

from elaunch.plan import Pipeline, Plan, Stage, Tile, n_rows, pipelines, stages, symmetric
from elaunch.plan.tiling import ORDERS
from elaunch.policy.candidates import matching
from elaunch.policy.candidates.expand import expanded
from elaunch.policy.candidates.reparallelize import Degrees, partitions, reparallelized
from elaunch.policy.candidates.reroute import rerouted
from elaunch.policy.candidates.resize import resized
from elaunch.policy.candidates.structure import NotPossible, stages_of, tp_groups_of
from elaunch.policy.estimate import estimate_step, ordered
from elaunch.policy.profile import LayerProfile, Profile, WorkerProfile
from elaunch.policy.select import Candidate, SelectorSettings, choose, fill
from tests.helpers import ROOT, scaled
from tests.unit.plan_strategies import valid_plans

LAYER = LayerProfile(1.0, 2.0, 100, 1200, 10, 50)
EVEN = Profile("even", (LAYER,) * 12, 1, 1e9, 0.0)
Policy = Callable[..., Plan]
POLICIES: dict[str, Policy] = {
    "reroute": rerouted,
    "resize": resized,
    "reparallelize": reparallelized,
    "expand": expanded,
}


def names(n: int) -> list[str]:
    return [f"n{number}/0#0" for number in range(n)]


def of(n_layers: int) -> Profile:
    return replace(EVEN, layers=(LAYER,) * n_layers)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=scaled(40, 120), deadline=None)
@given(data=st.data())
def test_a_candidate_is_a_plan_for_the_members_or_a_reason(policy: str, data: DataObject) -> None:
    plan = data.draw(valid_plans(tp=(1, 2)))
    plan = plan.renamed({worker: f"n{number // 2}/{number % 2}#0" for number, worker in enumerate(plan.workers)})
    left = data.draw(st.lists(st.sampled_from(plan.workers), unique=True))
    come = [f"n9/{number}#0" for number in range(data.draw(st.integers(0 if left else 1, 3)))]
    members = data.draw(st.permutations([*left, *come]))
    speeds = data.draw(st.dictionaries(st.sampled_from(members), st.sampled_from([0.5, 0.8, 2.0])))
    cap = data.draw(st.sampled_from([None, None, 3000]))
    profile = replace(
        of(plan.n_layers),
        memory_bytes=cap,
        workers={worker.partition("#")[0]: WorkerProfile(speed) for worker, speed in speeds.items()},
    )
    before, make = str(plan), POLICIES[policy]
    if policy in ("reparallelize", "expand"):
        make = partial(make, widths=data.draw(st.sampled_from([(), (1, 2), (2, 3)])))
    try:
        found = make(plan, members, profile)
    except NotPossible as error:
        reason = str(error)
    else:
        reason = ""
    assert str(plan) == before
    if reason:
        return
    found.validate(members)
    assert (found.n_layers, found.global_batch_size, found.micro_batch_size, found.zero) == (
        plan.n_layers,
        plan.global_batch_size,
        plan.micro_batch_size,
        plan.zero,
    )
    assert found == make(Plan.parse(before), members, profile), "not the same everywhere"
    if policy != "reroute":
        assert not estimate_step(found, profile).over(profile)


@settings(max_examples=scaled(30, 60), deadline=None)
@given(data=st.data())
def test_rerouting_moves_no_layer_and_cuts_no_micro_batch(data: DataObject) -> None:
    plan = data.draw(valid_plans())
    lost = data.draw(st.sampled_from([worker for worker in plan.workers if worker not in plan.idle]))
    members = [worker for worker in plan.workers if worker != lost]
    try:
        found = rerouted(plan, members)
    except NotPossible:
        assert (
            any(
                all(layer not in other.layers or lost in other.workers for other in plan.tiles)
                for tile in plan.tiles
                if lost in tile.workers
                for layer in tile.layers
            )
            or len(members) < 2
        )
        return
    held = {worker: {la for t in plan.tiles if worker in t.workers for la in t.layers} for worker in members}
    now = {worker: {la for t in found.tiles if worker in t.workers for la in t.layers} for worker in members}
    assert all(now[worker] <= held[worker] for worker in members)
    before = {micro_batch for tile in plan.tiles for micro_batch in tile.micro_batches}
    assert {micro_batch for tile in found.tiles for micro_batch in tile.micro_batches} <= before


def test_a_rerouted_micro_batch_is_done_when_its_pipeline_comes_to_it() -> None:
    """At the end, the first stage of the third pipeline could not feed both peers of the lost one."""
    w = names(6)
    plan = symmetric(w, 2, 3 * 6, 1, dp=3, pp=2)
    lost = next(tile for tile in plan.tiles if tile.layers.start == 1 and tile.micro_batches[0][0].start == 12)
    found = rerouted(plan, [one for one in w if one not in lost.workers])
    starts = [[runs[0].start for runs in tile.micro_batches] for tile in found.tiles if tile.layers.start == 1]
    assert sorted(starts) == [[0, 12, 1, 2, 14, 3, 4, 16, 5], [6, 7, 13, 8, 9, 15, 10, 11, 17]]
    # Half as much again as before, and what the first stage takes before and after.
    step = estimate_step(found, of(2))
    assert step.step_s <= 3 * 9 + 3 + 3


def test_a_rerouted_plan_defers_weight_gradients_if_that_is_faster_and_there_is_memory_for_it() -> None:
    workers = names(12)
    plan = symmetric(workers, 12, 3 * 8, 1, dp=3, pp=4)
    members = [worker for worker in workers if worker != workers[5]]
    fixed = SelectorSettings(policy="reroute")

    def chosen(profile: Profile) -> Candidate:
        found = choose(plan, plan, members, profile, fixed).chosen
        assert found.policy == "reroute"
        return found

    free = chosen(EVEN)
    assert free.plan is not None
    assert free.step is not None
    assert free.plan.deferred == 4, "as many as there are stages, as nobody has said what memory there is"
    whole, took = ordered(rerouted(plan, members, EVEN), EVEN)
    assert free.step.step_s < took.step_s
    assert whole.deferred == 0
    tight = chosen(replace(EVEN, memory_bytes=max(took.peak_bytes.values())))
    assert tight.plan is not None
    assert tight.step is not None
    assert tight.plan.deferred < 4
    assert max(tight.step.peak_bytes.values()) <= max(took.peak_bytes.values())
    # What is found stays in the plan's text, by which all members go on, and in a later decision.
    again = choose(Plan.parse(str(free.plan)), plan, members, EVEN, fixed)
    assert next(one for one in again.candidates if one.policy == "stay").plan == free.plan


def test_pipelines_that_cut_differently_take_over_by_layers() -> None:
    """Chameleon fig. 4: three stages and two; the third layer's holder is lost."""
    w = names(5)
    thirds = Pipeline(range(2), tuple((range(4 * n, 4 * n + 4), (w[n],)) for n in range(3)))
    halves = Pipeline(range(2, 4), ((range(6), (w[3],)), (range(6, 12), (w[4],))))
    plan = pipelines(12, 8, 2, [thirds, halves])
    found = rerouted(plan, [one for one in w if one != w[1]])
    # Layers 4:6 go to the first half's worker, 6:8 to the second's.
    assert Tile(range(4, 6), (range(2), range(2, 4)) and ((range(2),), (range(2, 4),)), (w[3],)) in found.tiles
    assert Tile(range(6, 8), ((range(2),), (range(2, 4),)), (w[4],)) in found.tiles


@pytest.mark.parametrize(("dp", "pp"), [(2, 2), (3, 2), (3, 4), (4, 3), (2, 6)])
@pytest.mark.parametrize("policy", ["reroute", "resize"])
def test_who_is_lost_never_makes_a_job_faster(policy: str, dp: int, pp: int) -> None:
    workers = names(dp * pp)
    plan = symmetric(workers, 12, 2 * 12 * dp, 2, dp=dp, pp=pp)
    before_s = estimate_step(plan, EVEN).step_s
    for lost in workers:
        found = POLICIES[policy](plan, [worker for worker in workers if worker != lost], EVEN)
        assert estimate_step(found, EVEN).step_s > before_s


def test_layers_leave_the_stage_that_lost_a_replica() -> None:
    """ElasWave 4.2: with DP 3 and PP 4, the stage with two replicas has fewer layers than the others."""
    workers = names(12)
    plan = symmetric(workers, 24, 3 * 32 * 2, 2, dp=3, pp=4)
    profile = of(24)
    members = [worker for worker in workers if worker != workers[4]]
    found = resized(plan, members, profile)
    assert [len(stage.layers) for stage in stages_of(found)] == [7, 4, 7, 6] or [
        len(stage.layers) for stage in stages_of(found)
    ] in ([6, 4, 7, 7], [7, 4, 6, 7])
    still = resized(plan, members, profile, move=False)
    assert [len(stage.layers) for stage in stages_of(still)] == [6, 6, 6, 6]
    base_s, still_s, moved_s = (estimate_step(one, profile).step_s for one in (plan, still, found))
    assert still_s / base_s > 1.4
    assert moved_s / base_s < 1.2


def test_stages_of_unequal_length_are_ordered_by_what_their_layers_take() -> None:
    """An embedding that takes no time: on clocks that only count layers the first stage seems to be the slowest."""
    profile = Profile.load(ROOT / "benchmarks/profiles/llama2-34b.json")
    workers = names(24)
    plan = symmetric(workers, 50, 3 * 96, 1, dp=3, pp=8)
    found = resized(plan, [worker for worker in workers if worker != workers[8]], profile)
    _, best = ordered(found, profile)
    blind = [estimate_step(replace(found, order=order, costs=()), profile) for order in ORDERS]
    assert best.step_s < 0.97 * min(one.step_s for one in blind)


def test_layers_move_no_further_than_they_must() -> None:
    """Of the cuts that are as fast, the one that is nearest to the present one is taken."""
    workers = names(4)
    plan = stages(8, 16, 2, [Stage(range(3), ((workers[0],),)), Stage(range(3, 8), ((workers[1],),))], idle=workers[2:])
    found = resized(plan, workers, of(8))
    assert [stage.layers for stage in stages_of(found)] == [range(4), range(4, 8)]
    assert found.idle == tuple(workers[2:])


@pytest.mark.parametrize("speed", [0.8, 0.6, 0.4])
def test_a_slow_worker_gets_fewer_rows_and_its_stage_fewer_layers(speed: float) -> None:
    """More than half of what is lost comes back (ElasWave 7.7)."""
    workers = names(8)
    plan = symmetric(workers, 24, 4 * 24, 4, dp=2, pp=4)
    slow = replace(of(24), workers={"n2/0": WorkerProfile(speed)})
    well_s, ill_s = estimate_step(plan, of(24)).step_s, estimate_step(plan, slow).step_s
    found = resized(plan, workers, slow)
    rows = {tile.workers[0]: sum(map(n_rows, tile.micro_batches)) for tile in found.tiles}
    assert rows[workers[2]] < rows[workers[3]]
    assert 1 / estimate_step(found, slow).step_s - 1 / ill_s > 0.5 * (1 / well_s - 1 / ill_s)


def test_a_stage_without_replicas_is_given_to_its_neighbours() -> None:
    workers = names(4)
    plan = symmetric(workers, 12, 16, 2, dp=1, pp=4)
    found = resized(plan, [workers[0], workers[1], workers[3]], EVEN)
    assert [stage.layers for stage in stages_of(found)] == [range(4), range(4, 8), range(8, 12)]
    with pytest.raises(NotPossible, match="nobody is left of layers 6:9"):
        resized(plan, [workers[0], workers[1], workers[3]], EVEN, move=False)


def test_memory_bounds_the_layers_of_a_stage() -> None:
    workers = names(4)
    plan = symmetric(workers, 12, 64, 2, dp=2, pp=2)
    members = workers[:3]
    free = resized(plan, members, EVEN)
    assert [len(stage.layers) for stage in stages_of(free)] == [8, 4]
    needed = estimate_step(free, EVEN).peak_bytes[workers[2]]
    tight = replace(EVEN, workers={"n2/0": WorkerProfile(memory_bytes=needed - 1)})
    found = resized(plan, members, tight)
    assert len(stages_of(found)[1].layers) < 4
    assert not estimate_step(found, tight).over(tight)
    with pytest.raises(NotPossible, match="no cut of the layers into 2 stages fits into 2,000 bytes of each worker"):
        resized(plan, members, replace(EVEN, memory_bytes=2000))


def test_pipelines_of_different_depth_use_everybody() -> None:
    """Chameleon fig. 3 and V-A: seven of eight workers are left."""
    workers = names(8)
    plan = symmetric(workers, 12, 64, 1, dp=2, pp=4)
    found = reparallelized(plan, workers[:7], EVEN)
    assert not found.idle
    assert sum(tile.layers.start == 0 for tile in found.tiles) in (1, 2, 3, 4)
    one = reparallelized(plan, workers[:7], EVEN, Degrees(dp=(2, 2)))
    assert sorted(
        sum(tile.micro_batches == first.micro_batches for tile in one.tiles)
        for first in one.tiles
        if first.layers.start == 0
    ) == [3, 4]
    with pytest.raises(NotPossible, match="no pipelines of 5 to 6 stages fit"):
        reparallelized(plan, workers[:3], EVEN, Degrees(pp=(5, 6)))


def test_stages_may_have_different_numbers_of_replicas() -> None:
    """Three members and a batch of four: two replicas of the long stage beat pipelines of one and of two stages."""
    workers = names(4)
    plan = symmetric(workers, 6, 4, 1, pp=4)
    found = reparallelized(plan, workers[1:], of(6))
    assert sorted(sum(map(bool, stage.replicas)) for stage in stages_of(found)) == [1, 2]
    one, two = (reparallelized(plan, workers[1:], of(6), Degrees(dp=(n, n))) for n in (1, 2))
    assert estimate_step(found, of(6)).step_s <= min(estimate_step(other, of(6)).step_s for other in (one, two))


def test_the_ways_to_cut_workers_into_pipelines() -> None:
    found = list(partitions(7, 3, 1, 9, 2))
    assert found == [(3, 2, 2), (3, 3, 1)]
    every = {tuple(sorted((a, b, 11 - a - b), reverse=True)) for a in range(1, 10) for b in range(1, 11 - a)}
    assert set(partitions(11, 3, 1, 99, 99)) == every
    assert list(partitions(8, 4, 2, 2, 2)) == [(2, 2, 2, 2)]
    assert not list(partitions(9, 4, 2, 2, 2))


@settings(max_examples=scaled(40, 80), deadline=None)
@given(data=st.data())
def test_workers_take_the_roles_that_need_the_fewest_bytes(data: DataObject) -> None:
    plan = data.draw(valid_plans(max_workers=5))
    tp_groups, _ = tp_groups_of(replace(plan, idle=()), plan.workers)
    ends = (
        [
            sorted(data.draw(st.lists(st.integers(0, plan.n_layers), min_size=2, max_size=2, unique=True)))
            for _ in range(data.draw(st.integers(1, len(tp_groups))))
        ]
        if plan.n_layers
        else []
    )
    roles = [range(*pair) for pair in ends]
    profile = replace(EVEN, layers=tuple(replace(LAYER, parameter_bytes=2**n) for n in range(plan.n_layers)))
    held = {one: {la for tile in plan.tiles if tile.workers == one for la in tile.layers} for one in tp_groups}

    def lacking(places: Sequence[int]) -> int:
        return sum(
            profile.layers[layer].parameter_bytes + profile.layers[layer].optimizer_bytes
            for role, place in zip(roles, places, strict=True)
            for layer in role
            if layer not in held[tp_groups[place]]
        )

    best = min(lacking(places) for places in permutations(range(len(tp_groups)), len(roles)))
    found = matching.matched(tp_groups, roles, plan, profile)
    assert len(set(found)) == len(found)
    assert lacking(found) == best
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matching, "MOST_SINGLY", 0)
        by_kind = matching.matched(tp_groups, roles, plan, profile)
    assert len(set(by_kind)) == len(by_kind)
    assert lacking(by_kind) == best


@settings(max_examples=scaled(40, 100), deadline=None)
@given(st.data())
def test_roles_are_assigned_as_scipy_does(data: DataObject) -> None:
    n_rows = data.draw(st.integers(1, 7))
    row = st.lists(st.integers(0, 9), min_size=n_rows + data.draw(st.integers(0, 4)), max_size=n_rows + 4)
    costs = data.draw(st.lists(row, min_size=n_rows, max_size=n_rows))
    width = min(map(len, costs))
    costs = [some[:width] for some in costs]
    found = matching.assigned(costs)
    assert len(set(found)) == n_rows
    rows, columns = linear_sum_assignment(np.array(costs))
    assert sum(costs[row][column] for row, column in enumerate(found)) == np.array(costs)[rows, columns].sum()


def test_newcomers_become_replicas_or_stages() -> None:
    workers = names(4)
    plan = symmetric(workers, 12, 48, 1, dp=2, pp=2)
    before_s = estimate_step(plan, EVEN).step_s
    for more in (1, 2, 4, 8):
        members = [*workers, *(f"m{number}/0#0" for number in range(more))]
        found = expanded(plan, members, EVEN)
        took_s = estimate_step(found, EVEN).step_s
        # Within a fifth of linear; a single one is hard to use.
        assert before_s / took_s > (0.8 if more > 1 else 0.7) * (4 + more) / 4
    with pytest.raises(NotPossible, match="nobody is free"):
        expanded(plan, workers, EVEN)


def test_several_predecessors_find_what_one_at_a_time_does_not() -> None:
    """Suika fig. 9."""
    took_s = {}
    for n_layers, n_stages, n_more in ((6, 2, 6), (4, 4, 4)):
        workers = names(n_stages)
        plan = symmetric(workers, n_layers, 48, 1, dp=1, pp=n_stages)
        members = [*workers, *(f"m{number}/0#0" for number in range(n_more))]
        times = (estimate_step(expanded(plan, members, of(n_layers), window=n), of(n_layers)).step_s for n in (1, 8))
        took_s[n_layers] = pytest.approx(tuple(times), rel=1e-6)
    # In parallel without any loss it would be 108.
    assert took_s == {6: (150, 117), 4: (81, 81)}  # there are no more than four stages for four layers


def test_newcomers_make_pipelines_where_gradients_travel_slowly() -> None:
    """And replicas where they do not."""
    for bandwidth, is_pipeline in ((1e9, False), (20.0, True)):
        layers = (replace(LAYER, output_bytes_per_row=1),) * 12
        profile = replace(EVEN, layers=layers, bandwidth_bytes_per_s=bandwidth)
        workers = names(4)
        found = expanded(symmetric(workers[:1], 12, 16, 1), workers, profile)
        replicas = symmetric(workers, 12, 16, 1, dp=4)
        assert (estimate_step(found, profile).step_s < estimate_step(replicas, profile).step_s) == is_pipeline
        assert (len({tile.layers for tile in found.tiles}) > 1) == is_pipeline


def tp_groups(plan: Plan) -> set[tuple[str, ...]]:
    return {tile.workers for tile in plan.tiles}


def test_partners_join_groups_on_their_node() -> None:
    workers = ["a/0#0", "b/0#0"]
    plan = symmetric(workers, 4, 1, 1, pp=2)  # one micro-batch: nothing else makes it faster
    members = [*workers, "a/1#0", "b/1#0", "c/0#0"]
    found = expanded(plan, members, of(4), widths=[2])
    assert tp_groups(found) == {("a/0#0", "a/1#0"), ("b/0#0", "b/1#0")}
    assert found.idle == ("c/0#0",)
    found.validate(members)
    assert {1} == set(map(len, tp_groups(expanded(plan, members, of(4)))))


def test_wide_groups_get_replicas_as_wide_as_they_are() -> None:
    wide = stages(4, 8, 1, [Stage(range(3), (("a/0#0", "a/1#0"),)), Stage(range(3, 4), (("a/2#0",),))])
    alone, pair = ["b/0#0"], ["b/0#0", "b/1#0"]
    for come in (alone, pair):
        found = expanded(wide, [*wide.workers, *come], of(4), widths=[2])
        found.validate([*wide.workers, *come])
        of_layer = [{len(tile.workers) for tile in found.tiles if layer in tile.layers} for layer in range(4)]
        assert all(len(widths) == 1 for widths in of_layer)
        assert ("a/0#0", "a/1#0") in tp_groups(found)
        assert tuple(come) in tp_groups(found)


def test_a_tuple_that_is_left_with_one_member_goes_on_as_that_if_it_may() -> None:
    plan = symmetric(["a/0#0", "a/1#0"], 4, 1, 1, tp=2)
    with pytest.raises(NotPossible, match="1 members make no tensor-parallel group of 2 on a node"):
        reparallelized(plan, ["a/0#0"], of(4))
    found = reparallelized(plan, ["a/0#0"], of(4), widths=[1, 2])
    assert tp_groups(found) == {("a/0#0",)}
    # Of those that are possible the fastest: a wide TP group, for a single micro-batch.
    assert tp_groups(reparallelized(plan, plan.workers, of(4), widths=[1])) == {plan.workers}
    assert tp_groups(reparallelized(found, plan.workers, of(4), widths=[2])) == {plan.workers}


def test_tuples_keep_their_width_where_no_bit_may_change() -> None:
    plan = replace(symmetric(["a/0#0"], 4, 1, 1), idle=("a/1#0",))
    members = ["a/0#0", "a/1#1"]
    for consistency, widths in (("fast", {2}), ("bitwise", {1})):
        chosen = choose(plan, plan, members, of(4), SelectorSettings("auto", consistency, widths=(2,)))  # type: ignore[arg-type]
        assert {len(workers) for workers in tp_groups(chosen.plan)} == widths


def test_the_best_candidate_is_chosen_and_the_reason_names_the_next() -> None:
    workers = names(12)
    plan = symmetric(workers, 12, 3 * 32, 1, dp=3, pp=4)
    members = [worker for worker in workers if worker != workers[5]]
    found = choose(plan, plan, members, EVEN)
    assert [one.policy for one in found.candidates if one.rejected] == ["stay", "expand"]
    scores = [one.score for one in found.candidates if not one.rejected]
    assert scores == sorted(scores, reverse=True)
    assert found.plan == found.candidates[0].plan
    assert found.reason.startswith(f"{workers[5]} left: {found.chosen.policy} is worth ")
    assert {"policy", "step_s", "transition_s", "peak_bytes", "score", "rejected"} <= set(found.chosen.event())
    found.plan.validate(members)


def test_a_plan_that_is_costly_to_reach_loses_where_changes_are_frequent() -> None:
    """Chameleon eq. 8."""
    workers = names(12)
    plan = symmetric(workers, 12, 3 * 32, 1, dp=3, pp=4)
    members = [worker for worker in workers if worker != workers[5]]
    slow_net = replace(EVEN, bandwidth_bytes_per_s=300.0, overlap=1e9)
    seldom = choose(plan, plan, members, slow_net, SelectorSettings(next_s=1e6))
    often = choose(plan, plan, members, slow_net, SelectorSettings(next_s=30.0))
    ways = [one.chosen.transition for one in (seldom, often)]
    assert ways[0] is not None
    assert ways[1] is not None
    assert ways[1].total_s < ways[0].total_s
    assert seldom.chosen.step is not None
    assert often.chosen.step is not None
    assert seldom.chosen.step.step_s < often.chosen.step.step_s


@pytest.mark.parametrize("policy", ["reroute", "resize", "reparallelize"])
def test_the_user_may_fix_the_policy(policy: str) -> None:
    workers = names(12)
    plan = symmetric(workers, 12, 3 * 32, 1, dp=3, pp=4)
    members = [worker for worker in workers if worker != workers[5]]
    found = choose(plan, plan, members, EVEN, SelectorSettings(policy=policy))  # type: ignore[arg-type]
    assert found.chosen.policy == policy


def test_a_policy_that_is_not_possible_gives_way_and_the_reason_says_so() -> None:
    workers = names(4)
    plan = symmetric(workers, 12, 16, 2, dp=1, pp=4)
    found = choose(plan, plan, workers[:3], EVEN, SelectorSettings(policy="reroute"))
    assert found.chosen.policy in ("resize", "reparallelize")
    assert "--policy=reroute is not possible here: nobody else has the layers 9:12 of n3/0#0" in found.reason


def test_no_plan_at_all_names_every_reason() -> None:
    workers = names(4)
    plan = symmetric(workers, 12, 16, 2, dp=2, pp=2)
    with pytest.raises(NotPossible) as caught:
        choose(plan, plan, workers[:3], replace(EVEN, memory_bytes=2000))
    assert str(caught.value).startswith("no plan for 3 members: ")
    for policy in ("stay", "reroute", "resize", "reparallelize", "expand"):
        assert f"{policy}: " in str(caught.value)


def test_who_returns_gets_the_place_and_the_job_its_first_plan() -> None:
    workers = names(12)
    preferred_plan = symmetric(workers, 12, 3 * 32, 1, dp=3, pp=4)
    members = [worker for worker in workers if worker != workers[5]]
    lost = choose(preferred_plan, preferred_plan, members, EVEN, SelectorSettings("resize"))
    assert lost.preferred_plan == preferred_plan
    back = choose(lost.plan, lost.preferred_plan, [*members, "n5/0#1"], EVEN, SelectorSettings("resize"))
    assert back.plan.tiles == preferred_plan.renamed({workers[5]: "n5/0#1"}).tiles
    assert back.preferred_plan.tiles == back.plan.tiles


def test_places_go_to_the_same_slot_first() -> None:
    preferred_plan = symmetric(["a/0#0", "b/0#0", "c/0#0"], 3, 3, 1, pp=3)
    found = fill(preferred_plan, ["a/0#0", "c/0#1", "d/0#0"])
    assert found.workers == ("a/0#0", "d/0#0", "c/0#1")


def test_more_workers_make_a_new_home() -> None:
    workers = names(4)
    plan = symmetric(workers, 12, 48, 1, dp=2, pp=2)
    members = [*workers, *(f"m{number}/0#0" for number in range(4))]
    found = choose(plan, plan, members, EVEN)
    assert not found.plan.idle
    assert found.preferred_plan == found.plan
    assert found.chosen.policy in ("expand", "reparallelize")
