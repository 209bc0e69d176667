"""Estimates of steps, memory and transitions, against closed forms and against playing the whole plan at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from operator import mul

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.plan import Pipeline, Plan, PlanError, Stage, pipelines, stages, symmetric
from elaunch.plan.schedule import schedule, sequence
from elaunch.plan.tiling import ORDERS, Order
from elaunch.plan.timeline import Action, timeline
from elaunch.plan.views import holders
from elaunch.policy import estimate
from elaunch.policy.estimate import estimate_step, long_pipeline_s, ordered, pipeline_s
from elaunch.policy.profile import LayerProfile, LinkProfile, Profile, WorkerProfile, action_s, transfer_s
from elaunch.policy.transition import estimate_transition
from tests.helpers import scaled
from tests.unit.plan_strategies import valid_plans

LAYER = LayerProfile(1.0, 2.0, 100, 1200, 10, 50)
FREE = Profile("free", (LAYER,) * 8, 1, math.inf, 0.0)
"""Messages take no time."""


def names(n: int) -> list[str]:
    return [f"n{number}/0#0" for number in range(n)]


def of_layers(profile: Profile, n_layers: int) -> Profile:
    return replace(profile, layers=(LAYER,) * n_layers)


@pytest.mark.parametrize(("dp", "pp", "units"), [(1, 1, 3), (1, 4, 6), (2, 2, 8), (3, 4, 12), (2, 8, 6)])
def test_a_symmetric_plan_takes_what_the_closed_form_says(dp: int, pp: int, units: int) -> None:
    """Chameleon eq. 9."""
    plan = symmetric(names(dp * pp), 8, 2 * units, 2, dp=dp, pp=pp)
    per_stage_s = 2 * (8 // pp) * (1.0 + 2.0)
    found = estimate_step(plan, FREE)
    assert found.step_s == pytest.approx((pp + units // dp - 1) * per_stage_s)
    assert found.bubble == pytest.approx((pp - 1) / (pp - 1 + units // dp))


@pytest.mark.parametrize("units", [1, 2, 9])
def test_the_peak_of_a_stage_is_its_state_and_the_activations_in_flight(units: int) -> None:
    """Chameleon eq. 14 with the minimum of docs/papers.md, error 3; Suika A.3."""
    workers = names(4)
    found = estimate_step(symmetric(workers, 8, 2 * units, 2, pp=4), FREE)
    for stage, worker in enumerate(workers):
        in_flight = min(4 - stage, units)
        assert found.peak_bytes[worker] == 2 * (2 * 100 + 1200) + in_flight * 2 * 2 * 10


def test_replicas_and_tensor_parallel_partners_share_the_state() -> None:
    plan = symmetric(names(8), 8, 8, 2, dp=2, pp=2, tp=2)
    found = estimate_step(plan, replace(FREE, width=2))
    assert set(found.peak_bytes.values()) == {4 * (2 * 100 + 1200 // 2) // 2 + n * 4 * 2 * 10 // 2 for n in (1, 2)}


COUNTED = replace(FREE, layers=(replace(LAYER, gradient_bytes=200, summed_in_tree=True),) * 8)


def partial_sums(units: range, n_units: int) -> Iterator[tuple[int, int]]:
    """Yields, for each unit that comes, how many additions it brings, and how many partial sums there are then.

    Those are summed that are together all of the units in a block of 2, 4, 8, ….
    """
    blocks = [
        frozenset(range(n_units)) & frozenset(range(start, start + size))
        for size in (1 << level for level in range(n_units.bit_length() + 1))
        for start in range(0, n_units, size)
    ]
    sums: set[frozenset[int]] = set()
    for unit in units:
        n_before = len(sums)
        sums.add(frozenset([unit]))
        while pair := next((two for two in combinations(sums, 2) if two[0] | two[1] in blocks), None):
            sums = (sums - set(pair)) | {pair[0] | pair[1]}
        yield n_before + 1 - len(sums), len(sums)


def most_bytes(units: range, n_units: int, layers: Sequence[LayerProfile], rows: int) -> int:
    """What a worker keeps for backward and of sums of gradients at the worst moment, tensor by tensor."""
    kept = [rows * layer.activation_bytes_per_row for layer in layers]
    gradients = [layer.gradient_bytes or 0 for layer in layers]
    sums = [0] * len(layers)
    most = 0
    for additions, n_sums in partial_sums(units, n_units):
        if not layers[0].summed_in_tree:
            additions, n_sums = min(sums[0], 1), 1
        left = list(kept)
        for index in reversed(range(len(layers))):
            there = sum(left) + sum(map(mul, sums, gradients)) + gradients[index]
            most = max(most, there + (gradients[index] if additions else 0))
            sums[index], left[index] = n_sums, 0
            most = max(most, sum(left) + sum(map(mul, sums, gradients)))
    return most


@given(
    st.integers(0, 9),
    st.integers(1, 12),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), min_size=1, max_size=6),
    st.booleans(),
)
def test_gradients_come_layer_by_layer_and_partial_sums_depend_on_which_micro_batches_are_a_workers(
    first: int, rest: int, sizes: list[tuple[int, int]], in_tree: bool
) -> None:
    layers = tuple(
        replace(
            LAYER, parameter_bytes=0, gradient_bytes=gradient, activation_bytes_per_row=kept, summed_in_tree=in_tree
        )
        for gradient, kept in sizes
    )
    every, n_units = range(len(layers)), first + rest
    parts = [range(first), range(first, n_units)] if first else [range(n_units)]
    plan = pipelines(
        len(layers),
        2 * n_units,
        2,
        [Pipeline(part, ((every, (worker,)),)) for part, worker in zip(parts, names(2), strict=False)],
    )
    found = estimate_step(plan, replace(FREE, layers=layers)).peak_bytes
    sent = [[n for _, n in partial_sums(part, n_units)][-1] if in_tree else 1 for part in parts]
    for number, part in enumerate(parts):
        come = sum(sent) - sent[number]
        arriving = sum(math.ceil((layer.gradient_bytes or 0) * come / len(parts)) for layer in layers)
        at_the_end = sum(layer.gradient_bytes or 0 for layer in layers)
        most = max(most_bytes(part, n_units, layers, 2) + arriving, at_the_end)
        assert found[names(2)[number]] == 1200 * len(layers) // len(parts) + most


@pytest.mark.parametrize(("units", "sums"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 3), (9, 3), (16, 4)])
def test_as_many_partial_sums_are_kept_as_the_micro_batches_before_have_ones_in_binary(units: int, sums: int) -> None:
    """Where activations are small beside them."""
    plan = symmetric(names(1), 8, 2 * units, 2)
    layers = (replace(COUNTED.layers[0], parameter_bytes=0, activation_bytes_per_row=0),) * 8
    (found,) = estimate_step(plan, replace(COUNTED, layers=layers)).peak_bytes.values()
    # Where the last ones are added to those of before, one layer's come, and their sum with these.
    assert 8 * 1200 + sums * 8 * 200 <= found <= 8 * 1200 + sums * 8 * 200 + 2 * 200


def test_replicas_have_room_for_the_gradients_that_the_others_send() -> None:
    plan = symmetric(names(4), 8, 8, 2, dp=4)
    found = set(estimate_step(plan, COUNTED).peak_bytes.values())
    kept = 8 * 200 + 2 * 10  # of one micro-batch, when the first layer's have come and its activations are still there
    assert found == {8 * (100 + 1200 // 4) + kept + 8 * 200 * 3 // 4}


def test_at_the_end_of_a_step_new_values_are_beside_the_old_ones() -> None:
    bare = replace(COUNTED, layers=tuple(replace(layer, activation_bytes_per_row=0) for layer in COUNTED.layers))
    heavy = replace(bare, layers=tuple(replace(layer, parameter_bytes=10_000) for layer in bare.layers))
    alone, pair = (estimate_step(symmetric(names(n), 8, 8, 2, dp=n), heavy).peak_bytes["n0/0#0"] for n in (1, 2))
    # What nobody else needs is made for one layer after the other.
    assert alone == 8 * (10_000 + 1200) + 8 * 200 + 8 * 10_000 + 10_000
    assert pair == 8 * (10_000 + 600) + 8 * 200 + 8 * 10_000 + 8 * 5_000


def test_without_the_size_of_gradients_the_formula_of_the_papers_holds() -> None:
    plan = symmetric(names(2), 8, 16, 2, dp=2)
    (found,) = set(estimate_step(plan, FREE).peak_bytes.values())
    assert found == 8 * (2 * 100 + 600) + 8 * 2 * 10


profiles = st.builds(
    lambda layer, latency, speeds: replace(
        FREE,
        layers=(layer,) * 6,
        latency_s=latency,
        bandwidth_bytes_per_s=100.0,
        workers={f"w{number}": WorkerProfile(speed) for number, speed in enumerate(speeds)},
    ),
    st.builds(
        LayerProfile,
        st.integers(1, 3),
        st.integers(1, 5),
        st.just(0),
        st.just(0),
        st.integers(0, 9),
        st.integers(0, 50),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    st.integers(0, 2),
    st.lists(st.sampled_from([0.5, 1.0]), max_size=3),
)


@settings(max_examples=scaled(50, 150), deadline=None)
@given(plan=valid_plans(max_layers=6, tp=(1, 2)), profile=profiles)
def test_parts_of_a_plan_take_as_long_as_the_whole(plan: Plan, profile: Profile) -> None:
    profile = replace(profile, layers=profile.layers[:1] * plan.n_layers)
    plan = plan.renamed({worker: f"w{number}#0" for number, worker in enumerate(plan.workers)})
    found = estimate_step(plan, profile)
    whole = timeline(plan, schedule(plan), action_s(profile, plan), transfer_s(profile, plan))
    # The latency of gradient reduction and parameters comes on top, where a layer has several holders.
    several = any(len(tp_groups) > 1 for tp_groups in holders(plan))
    most_s = 2 * plan.n_layers * len(plan.tiles) * profile.latency_s if several else 0.0
    assert whole.step_s - 1e-9 <= found.step_s <= whole.step_s + 1e-9 + most_s
    for worker, busy_s in found.busy_s.items():
        assert busy_s == pytest.approx(whole.busy_s[worker])


def test_equal_pipelines_are_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Plan] = []

    def noted(part: Plan, costs: Sequence[int], order: Order, deferred: int) -> tuple[Action, ...]:
        played.append(part)
        return sequence(part, costs, order, deferred)

    monkeypatch.setattr(estimate, "sequence", noted)
    plan = symmetric(names(32), 8, 64, 1, dp=8, pp=4)
    estimate_step(plan, FREE)
    assert len(played) == 1
    estimate_step(plan, replace(FREE, workers={"n9/0": WorkerProfile(0.5)}))
    assert len(played) == 3


@settings(max_examples=scaled(40, 100), deadline=None)
@given(plan=valid_plans(max_layers=6, tp=(1, 2)), profile=profiles, data=st.data())
def test_an_ordered_plan_is_as_fast_as_with_any_order(plan: Plan, profile: Profile, data: st.DataObject) -> None:
    layers = [layer.scaled(data.draw(st.sampled_from([0.0, 0.4, 1.0]))) for layer in profile.layers[: plan.n_layers]]
    profile = replace(profile, layers=tuple(layers))
    plan = plan.renamed({worker: f"w{number}#0" for number, worker in enumerate(plan.workers)})
    found, step = ordered(plan, profile, (plan.deferred,))
    found.validate(plan.workers)
    assert found.tiles == plan.tiles
    assert estimate_step(found, profile) == step
    assert step.step_s <= ordered(plan, profile)[1].step_s + 1e-9, "never slower than without deferral"
    for order, costs in product(ORDERS, ((), profile.costs)):
        other_s = estimate_step(replace(plan, order=order, costs=costs, deferred=0), profile).step_s
        assert step.step_s <= other_s + 1e-9
        if (order, costs) == ("auto", ()) and round(other_s, 9) == round(step.step_s, 9):
            assert (found.deferred, found.order, found.costs) == (0, "auto", ()), "what is unsaid is enough"


def test_an_order_that_fits_in_memory_comes_before_a_faster_one() -> None:
    a, b, c, d, e, f, g, h = ((name,) for name in names(8))
    cut = [Stage(range(4), (a, b, ())), Stage(range(4, 5), (c, d, e)), Stage(range(5, 6), (f, g, h))]
    plan, profile = stages(6, 24, 1, cut), of_layers(FREE, 6)
    fast, step = ordered(plan, profile)
    backward = estimate_step(replace(plan, order="backward"), profile)
    assert backward.step_s > step.step_s
    cap = max(step.peak_bytes.values()) - 1
    assert max(backward.peak_bytes.values()) <= cap
    found, slower = ordered(fast, replace(profile, memory_bytes=cap))
    assert found.order == "backward"
    assert slower == backward


def test_deferred_weight_gradients_keep_activations_and_output_gradients() -> None:
    """The last stage of two, by hand: F I F I F W ..., so two of three micro-batches wait for weight gradients."""
    profile = replace(FREE, layers=(replace(LAYER, weight_bytes_per_row=3),) * 8)
    plan = replace(symmetric(names(2), 8, 8, 2, pp=2), deferred=2)
    step = estimate_step(plan, profile)
    static = 4 * (2 * 100 + 1200)
    assert step.step_s == 2 * 4 * (3 * 4 + 1)
    assert step.peak_bytes["n1/0#0"] == static + 2 * 4 * (3 * 10 + 2 * 3)
    untold = replace(FREE, layers=(LAYER,) * 8)
    assert estimate_step(plan, untold).peak_bytes["n1/0#0"] == static + 2 * 4 * (3 * 10 + 2 * 10)
    # A bound that forbids it: the same plan, whole backwards.
    tight = replace(profile, memory_bytes=static + 2 * 4 * 2 * 10)
    found, whole = ordered(plan, tight, (2,))
    assert (found.deferred, whole.step_s) == (0, 2 * 4 * 3 * 5)
    assert ordered(plan, profile, (2,))[0].deferred == 2


def test_a_layer_whose_backward_is_not_split_gains_nothing_by_deferral() -> None:
    whole = replace(FREE, layers=(replace(LAYER, weight_share=0.0),) * 8)
    plan = symmetric(names(4), 8, 16, 2, pp=4)
    found, step = ordered(plan, whole, (4,))
    assert (found.deferred, step) == (0, estimate_step(plan, whole))
    assert ordered(plan, FREE, (4,))[1].step_s < step.step_s


def test_the_costs_of_layers_are_coarse() -> None:
    noisy = [LAYER.scaled(factor) for factor in (0.97, 1.0, 1.03, 1.0)]
    assert replace(FREE, layers=tuple(noisy)).costs == ()
    assert replace(FREE, layers=(LAYER.scaled(0), *noisy, LAYER.scaled(0.4))).costs == (0, 8, 8, 8, 8, 3)
    assert replace(FREE, layers=(LAYER.scaled(0),) * 3).costs == ()


def test_a_slow_worker_is_a_factor() -> None:
    plan = symmetric(names(2), 8, 8, 2, dp=2)
    slow = replace(FREE, workers={"n1/0": WorkerProfile(0.5)})
    assert estimate_step(plan, slow).step_s == 2 * estimate_step(plan, FREE).step_s
    assert estimate_step(plan, slow).busy_s == {"n0/0#0": 96.0, "n1/0#0": 192.0}


def test_gradients_hide_behind_the_last_backward_as_the_overlap_says() -> None:
    plan = symmetric(names(2), 8, 2, 1, dp=2)
    alone = estimate_step(plan, FREE).step_s
    told = replace(FREE, bandwidth_bytes_per_s=100.0)  # reduction and sharing take 8 * 100 / 2 / 100 = 4 s each
    assert estimate_step(plan, told).step_s == pytest.approx(alone + 4 + 4)
    assert estimate_step(plan, replace(told, overlap=math.inf)).step_s == pytest.approx(alone + 4)
    half = (16**2 + 4**2) ** 0.5 - 16  # beside the 16 s of the backward
    assert estimate_step(plan, replace(told, overlap=2.0)).step_s == pytest.approx(alone + half + 4)


def test_fixed_seconds_and_the_optimizer_count() -> None:
    plan = symmetric(names(2), 8, 2, 1, dp=2)
    profile = replace(FREE, step_s=3.0, layers=(replace(LAYER, update_s=1.0),) * 8)
    assert estimate_step(plan, profile).step_s == pytest.approx(estimate_step(plan, FREE).step_s + 3 + 8 / 2)


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(PlanError, match="the profile free has 8 layers and the plan 4; give the profile of the model"):
        estimate_step(symmetric(names(1), 4, 2, 1), FREE)


def test_measured_links_count_by_pair_then_by_node_then_as_any() -> None:
    fast, slow = LinkProfile(1e3, 0.0), LinkProfile(10.0, 1.0)
    profile = replace(FREE, links={("a/0", "a/1"): fast, ("a/0", "b/0"): slow, ("a/0", "b/1"): fast})
    assert profile.link("a/0#7", "a/1#2") == fast
    assert profile.link("a/1#0", "a/0#0") == fast  # another pair on that node
    assert profile.link("a/3#0", "b/5#0") == LinkProfile((1e3 + 10) / 2, 0.5)
    assert profile.link("c/0#0", "a/0#0") == LinkProfile(math.inf, 0.0)


def test_a_transition_counts_what_is_received_and_waits_for_it_only_if_somebody_is_lost() -> None:
    profile = replace(FREE, bandwidth_bytes_per_s=100.0, change_s=0.5)
    old = symmetric(names(2), 8, 8, 2, pp=2)
    new = symmetric(names(1), 8, 8, 2)
    lost = estimate_transition(old, new, profile, ["n1/0#0"])
    # The first worker receives the four layers of the second: parameters and all the optimizer keeps.
    assert lost.moved_bytes == 4 * (100 + 1200)
    assert lost.transfer_s == lost.stall_s == pytest.approx(4 * 1300 / 100)
    assert lost.total_s == pytest.approx(52.5)
    back = estimate_transition(new, old, profile)
    assert back.moved_bytes == 4 * 1300
    assert back.stall_s == back.transfer_s
    assert estimate_transition(new, old, profile, beside_s=50.0).stall_s == pytest.approx(2.0)
    nothing = estimate_transition(old, old, profile)
    assert (nothing.moved_bytes, nothing.total_s) == (0, 0.5)


@settings(max_examples=scaled(40, 100), deadline=None)
@given(old=valid_plans(max_layers=4, exact=True), new=valid_plans(max_layers=4, exact=True))
def test_moved_optimizer_states_are_what_the_owners_lack(old: Plan, new: Plan) -> None:
    """Against owners of 2520 equal pieces of each layer."""
    profile = replace(FREE, layers=(LayerProfile(0, 0, 0, 2520, 0, 0),) * 4)
    moved = 0
    for before, after in zip(holders(old), holders(new), strict=True):
        for piece in range(2520):
            was, now = (tp_groups[(2 * piece + 1) * len(tp_groups) // 5040] for tp_groups in (before, after))
            moved += was != now
    assert estimate_transition(old, new, profile).moved_bytes == pytest.approx(moved, abs=1)


def played(forward_s: list[int], backward_s: list[int], n: int) -> float:
    """The twin: each stage's order by the definition of 1F1B, each action as soon as it can be."""
    depth = len(forward_s)
    orders = []
    for stage in range(depth):
        ahead = min(depth - stage, n)
        order = [("F", number) for number in range(ahead)]
        for number in range(n):
            order += [("B", number), *([("F", number + ahead)] if number + ahead < n else [])]
        orders.append(order)
    ends: dict[tuple[str, int, int], float] = {}
    free, place = [0.0] * depth, [0] * depth
    while any(place[stage] < len(orders[stage]) for stage in range(depth)):
        for stage in range(depth):
            while place[stage] < len(orders[stage]):
                kind, number = orders[stage][place[stage]]
                near = stage - 1 if kind == "F" else stage + 1
                if 0 <= near < depth and (kind, near, number) not in ends:
                    break
                begin = max(free[stage], ends.get((kind, near, number), 0.0))
                free[stage] = begin + (forward_s if kind == "F" else backward_s)[stage]
                ends[kind, stage, number] = free[stage]
                place[stage] += 1
    return max(free)


@settings(max_examples=scaled(50, 150), deadline=None)
@given(stages=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=5), n=st.integers(1, 14))
def test_a_pipeline_of_unequal_stages_takes_as_long_as_when_it_is_played(stages: list[tuple[int, int]], n: int) -> None:
    forward_s, backward_s = [one for one, _ in stages], [one for _, one in stages]
    assert pipeline_s(forward_s, backward_s, n) == played(forward_s, backward_s, n)


def test_a_long_pipeline_is_priced_by_its_beginning() -> None:
    forward_s, backward_s = [3.0, 4.0, 2.0, 3.0], [6.0, 8.0, 4.0, 6.0]
    assert long_pipeline_s(forward_s, backward_s, 500) == pytest.approx(pipeline_s(forward_s, backward_s, 500))
    assert long_pipeline_s(forward_s, backward_s, 5) == pipeline_s(forward_s, backward_s, 5)
