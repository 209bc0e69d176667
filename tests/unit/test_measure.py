"""The profile of a job from what its workers measure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.plan import Stage, stages, symmetric
from elaunch.policy.estimate import estimate_step
from elaunch.policy.measure import LONGEST_HOP_S, RECENT, Measured, Recorder
from elaunch.policy.profile import LayerProfile, LinkProfile, Profile, WorkerProfile
from elaunch.policy.sample import Overheads, Sample

KNOWN = LayerProfile(0.0, 0.0, 400, 1200, 10, 50)
W = ["a/0#0", "a/1#0", "b/0#0", "b/1#0"]


@dataclass(frozen=True)
class Took:
    """A turn."""

    layer: int
    rows: int
    forward_s: float
    backward_s: float
    waited_s: float = 0.0
    width: int = 1


def measured(n_layers: int = 2, prior: Profile | None = None) -> Measured:
    return Measured("test", [KNOWN] * n_layers, [100] * n_layers, prior)


def told(*turns: Took, times: int = 1, **more: object) -> Sample:
    spent = {
        (one.layer, one.rows, one.width): (times * one.forward_s, times * one.backward_s, one.waited_s) for one in turns
    }
    return Sample(spent, **more)  # type: ignore[arg-type]


def tell(known: Measured, samples: dict[str, Sample], times: int = RECENT) -> None:
    known.keep([f"{slot}#0" for slot in samples])
    for _ in range(times):
        for slot, sample in samples.items():
            known.take(slot, sample)


def look(known: Measured, paces: dict[str, float], times: int = 20, since: int = 0) -> None:
    """So many looks, at every step of a second, at workers that take so long beside what they told last."""
    for step in range(since, since + times):
        known.look(step, float(step), paces, {})


def test_seconds_of_layers_are_told_by_those_who_have_them() -> None:
    known = measured()
    tell(known, {"a/0": told(Took(0, 2, 1.0, 3.0)), "a/1": told(Took(1, 2, 2.0, 5.0), kept_bytes={1: 77.4})})
    profile = known.profile()
    assert [layer.forward_s(2) for layer in profile.layers] == [1.0, 2.0]
    assert [layer.backward_s(2) for layer in profile.layers] == [3.0, 5.0]
    assert [layer.activation_bytes_per_row for layer in profile.layers] == [10, 77]
    assert not profile.workers


def test_two_sizes_of_micro_batches_tell_what_is_fixed() -> None:
    known = measured(1)
    tell(known, {"a/0": told(Took(0, 1, 1.5, 2.5), Took(0, 4, 3.0, 7.0))})
    layer = known.profile().layers[0]
    assert (layer.fixed_forward_s, layer.forward_s_per_row) == pytest.approx((1.0, 0.5))
    assert (layer.fixed_backward_s, layer.backward_s_per_row) == pytest.approx((1.0, 1.5))


@given(st.dictionaries(st.integers(1, 50), st.floats(1e-6, 1e3), min_size=1, max_size=4))
def test_no_figure_is_below_zero(points: dict[int, float]) -> None:
    known = measured(1)
    tell(known, {"a/0": told(*(Took(0, rows, seconds, seconds) for rows, seconds in points.items()))})
    layer = known.profile().layers[0]
    assert layer.fixed_forward_s >= 0
    assert layer.forward_s_per_row >= 0
    assert layer.forward_s(1) > 0


def test_a_worker_that_is_slower_than_its_peers_has_a_lower_speed() -> None:
    known = measured(1)
    fast, slow = told(Took(0, 2, 1.0, 2.0)), told(Took(0, 2, 2.0, 4.0))
    tell(known, {"a/0": fast, "a/1": slow, "b/0": fast})
    assert known.speeds() == {}
    look(known, dict.fromkeys(("a/0", "a/1", "b/0"), 1.0))
    profile = known.profile()
    assert profile.workers == {"a/1": WorkerProfile(0.5)}
    assert profile.layers[0].forward_s(2) == 1.0
    assert profile.speed("a/1#7") == 0.5


def test_a_little_noise_makes_nobody_slow() -> None:
    known = measured(1)
    slots = {f"a/{number}": told(Took(0, 2, 1 + number / 60, 2)) for number in range(4)}
    tell(known, slots)
    look(known, dict.fromkeys(slots, 1.0))
    assert known.speeds() == {}


def test_the_only_one_with_a_layer_is_compared_with_what_it_took_before() -> None:
    known = measured(3)
    usual = {f"a/{number}": told(Took(number, 1, 1.0, 2.0)) for number in range(3)}
    tell(known, usual)
    look(known, dict.fromkeys(usual, 1.0))
    look(known, dict.fromkeys(usual, 1.0) | {"a/1": 2.0}, since=20)
    assert known.speeds() == {"a/1": 0.5}
    # What it tells anew of its layer is nobody's news but its own.
    known.take("a/1", told(Took(1, 1, 1.0, 2.0), times=2))
    look(known, dict.fromkeys(usual, 1.0), since=40)
    assert known.speeds() == {"a/1": 0.5}
    assert known.profile().layers[1].forward_s(1) == pytest.approx(1.0)
    known.take("a/1", usual["a/1"])
    look(known, dict.fromkeys(usual, 1.0), since=60)
    assert known.speeds() == {}


def test_where_all_become_slower_nobody_is_slow() -> None:
    known = measured(3)
    usual = {f"a/{number}": told(Took(number, 1, 1.0, 2.0)) for number in range(3)}
    tell(known, usual)
    look(known, dict.fromkeys(usual, 1.0))
    look(known, dict.fromkeys(usual, 2.0), since=20)
    assert known.speeds() == {}
    assert known.profile().layers[0].forward_s(1) == pytest.approx(2.0)


def test_one_that_becomes_slow_little_by_little_shows() -> None:
    known = measured(3)
    usual = {f"a/{number}": told(Took(number, 1, 1.0, 2.0)) for number in range(3)}
    tell(known, usual)
    look(known, dict.fromkeys(usual, 1.0))
    for percent in range(100, 200, 5):
        known.take("a/1", told(Took(1, 1, percent / 100, percent / 50)))
        look(known, dict.fromkeys(usual, 1.0), times=4, since=20 + percent)
    look(known, dict.fromkeys(usual, 1.0), since=300)
    assert known.speeds() == {"a/1": pytest.approx(1 / 1.95, abs=0.01)}


def test_who_waits_in_a_tuple_is_not_who_is_slow() -> None:
    known = measured(1)
    tell(known, {"a/0": told(Took(0, 1, 2.0, 4.0, 3.2)), "a/1": told(Took(0, 1, 2.0, 4.0, 0.2))})
    look(known, {"a/0": 1.0, "a/1": 1.0})
    assert known.speeds() == {"a/1": pytest.approx(2.8 / 5.8, abs=0.01)}
    # The last one of a TP group waits for nobody: what it waits is what telling takes.
    layer = known.profile().layers[0]
    assert layer.forward_s(1) + layer.backward_s(1) == pytest.approx(3.0)


def test_the_figures_of_layers_are_for_tuples_as_wide_as_those_that_were_measured() -> None:
    known = measured(1)
    sample = told(Took(0, 1, 2.0, 4.0, width=2))
    tell(known, {"a/0": sample, "a/1": sample})
    plan = symmetric(W[:2], 1, 8, 1, tp=2)
    found = known.profile(plan)
    assert (found.width, found.tensor_parallel) == (2, 2)
    assert found.forward_s(range(1), 1, 2) == 2.0


def test_layers_of_different_width_are_each_measured_on_their_own() -> None:
    known = measured(3)
    wide, lone = Took(0, 2, 2.0, 4.0, width=2), Took(1, 2, 1.0, 2.0)
    tell(known, {"a/0": told(wide), "a/1": told(wide), "b/0": told(lone, replace(lone, layer=2))})
    given = [Stage(range(1), ((W[0], W[1]),)), Stage(range(1, 2), ((W[2],),)), Stage(range(2, 3), ((W[3],),))]
    found = known.profile(stages(3, 8, 2, given))
    assert found.width == 1
    assert not found.workers, "who has half of a layer is not twice as fast"
    for layer, width, seconds in ((0, 2, 2.0), (1, 1, 1.0), (2, 1, 1.0)):
        assert found.forward_s(range(layer, layer + 1), 2, width) == pytest.approx(seconds)
        assert found.backward_s(range(layer, layer + 1), 2, width) == pytest.approx(2 * seconds)
    assert found.forward_s(range(1), 2, 1) == pytest.approx(4.0, rel=1e-5)
    # What was measured before the TP group was made counts until the TP group has told.
    tell(known, {"a/0": told(Took(0, 2, 5.0, 10.0))})
    assert known.profile(stages(3, 8, 2, given)).forward_s(range(1), 2, 2) == pytest.approx(2.0)


def test_speeds_are_kept_for_who_comes_back() -> None:
    known = measured(1)
    fast = told(Took(0, 2, 1.0, 2.0))
    slots = {"a/0": fast, "a/1": told(Took(0, 2, 2.0, 4.0)), "b/0": fast}
    tell(known, slots)
    look(known, dict.fromkeys(slots, 1.0))
    known.keep({"a/0#0", "b/0#0"})
    assert known.profile().speed("a/1#1") == 0.5


def test_layers_that_nobody_has_measured_are_guessed_by_their_size_or_by_an_earlier_run() -> None:
    nothing = measured().profile()
    assert all(layer.forward_s(1) > 0 for layer in nothing.layers)
    assert nothing.layers[0].backward_s(1) == 2 * nothing.layers[0].forward_s(1)
    known = Measured("test", [KNOWN] * 2, [100, 300])
    tell(known, {"a/0": told(Took(0, 1, 1.0, 2.0))})
    assert known.profile().layers[1].forward_s(1) == pytest.approx(3.0)
    before = Profile("before", (LayerProfile(5.0, 6.0, 1, 1, 1, 1),) * 2, 1, 1e8, 1e-3)
    known = measured(prior=before)
    tell(known, {"a/0": told(Took(0, 1, 1.0, 2.0))})
    found = known.profile()
    assert [layer.forward_s(1) for layer in found.layers] == [1.0, 5.0]
    assert (found.bandwidth_bytes_per_s, found.latency_s) == (1e8, 1e-3)


def test_what_a_step_takes_besides_its_layers_is_of_every_step() -> None:
    known = measured(2)
    plan = symmetric(W, 2, 8, 1, dp=2, pp=2)
    sample = {0: told(Took(0, 1, 1.0, 2.0)), 1: told(Took(1, 1, 1.0, 2.0))}
    tell(known, {"a/0": sample[0], "a/1": sample[0], "b/0": sample[1], "b/1": sample[1]})
    parts_s = estimate_step(plan, known.profile()).step_s
    for seconds in (parts_s + 0.4, parts_s + 0.5, parts_s + 3.0):
        known.step_took(seconds)
    found = known.profile(plan)
    assert found.step_s == pytest.approx(0.5)
    assert estimate_step(plan, found).step_s == pytest.approx(parts_s + 0.5)
    known.plan_changed()
    assert known.profile(plan).step_s == 0.0
    for seconds in (0.02, 0.5, 0.03):
        known.change_took(seconds)
    assert known.profile(plan).change_s == 0.03


def test_links_and_memory_are_those_of_the_workers() -> None:
    known = measured(1)
    links = {"b/0": (2e9, 1e-5)}
    tell(known, {"a/0": told(Took(0, 1, 1.0, 1.0), links=links, memory_bytes=80), "b/0": told(memory_bytes=80)})
    known.take("b/1", told(memory_bytes=40))
    found = known.profile()
    assert found.link("a/0#0", "b/0#3") == LinkProfile(2e9, 1e-5)
    assert found.bandwidth_bytes_per_s == 2e9
    assert [found.cap_bytes(worker) for worker in ("a/0#0", "b/1#0")] == [80, 40]


def test_figures_are_unstable_until_nobody_tells_another_one() -> None:
    known = measured(2)
    for _ in range(RECENT):
        known.step_took(1.0)
    assert known.profile().unstable == ("layers[0]", "layers[1]")
    tell(known, {"a/0": told(Took(0, 1, 1.0, 2.0), Took(1, 1, 1.0, 2.0))})
    assert known.profile().unstable == ("layers[0]", "layers[1]")
    for _ in range(20):
        known.step_took(1.0)
    assert known.profile().unstable == ()
    known.take("a/0", told(Took(0, 1, 1.0, 2.0), Took(1, 1, 1.2, 2.4)))
    known.step_took(2.0)
    assert known.profile().unstable == ("layers[1]", "step_s")


def test_a_recorder_tells_the_first_figures_and_then_what_has_changed() -> None:
    recorder = Recorder()

    def news(anew: bool = False) -> Sample | None:
        return recorder.news(lambda: {"b/0": (1e9, 1e-6)}, anew=anew)

    def step(seconds: float) -> None:
        recorder.add([Took(0, 1, seconds, 2 * seconds)], {0: 12.0}, 0.5, 100)

    assert news() is None
    step(1.0)
    assert news() is None  # once may be anything
    for _ in range(RECENT):
        step(1.0)
        sample = news()
        assert sample is not None
        assert sample.turns == {(0, 1, 1): (1.0, 2.0, 0.0)}
        assert (sample.kept_bytes, sample.update_s, dict(sample.links)) == ({0: 12.0}, 0.005, {"b/0": (1e9, 1e-6)})
        assert news() is None
    step(1.01)
    assert news() is None
    assert news(anew=True) is not None
    step(2.0)
    step(2.0)
    sample = news()
    assert sample is not None
    assert sample.turns == {(0, 1, 1): (2.0, 4.0, 0.0)}
    for _ in range(2):
        recorder.add([Took(3, 1, 1.0, 1.0)], {}, 0.0, 0)
    sample = news()
    assert sample is not None
    assert list(sample.turns) == [(3, 1, 1)]


def test_a_pace_is_of_the_last_step_beside_what_was_told_without_waiting_and_told_once() -> None:
    recorder = Recorder()
    told_s = [0.0]

    def step(seconds: float, waited_s: float = 0.0, layer: int = 0) -> float | None:
        """What the others make of what they are told."""
        recorder.add([Took(layer, 1, seconds, 2 * seconds + waited_s, waited_s)], {}, 0.0, 0)
        sample = recorder.news(dict)
        if sample is not None:
            ((forward_s, backward_s, wait_s),) = sample.turns.values()
            told_s[0] = forward_s + backward_s - wait_s
        pace = recorder.pace()
        return None if pace is None else round(pace * told_s[0], 9)

    assert recorder.pace() is None
    assert step(1.0) is None  # nothing was told yet
    assert step(1.0) == 3.0
    assert recorder.pace() is None
    assert step(1.5) == 4.5
    # Who waits for others takes no longer.
    assert step(1.0, waited_s=7.0) == 3.0
    # Of other layers nothing was told.
    assert step(1.0, layer=1) is None


def test_a_sample_is_read_as_it_was_written() -> None:
    sample = told(Took(3, 2, 0.125, 0.25, 0.0625), kept_bytes={3: 7}, links={"a/0": (5, 0.5)}, memory_bytes=9)
    assert Sample.from_json(sample.to_json()) == sample
    for overheads in (Overheads(0.5, 0.25, 0.125, None), Overheads(0.5, 0.25, 0.125, 2.0)):
        assert Sample.from_json(replace(sample, overheads=overheads).to_json()).overheads == overheads


def of_two_stages(end_s: float = 0.1) -> dict[str, Sample]:
    overheads = Overheads(0.2, 0.1, 0.05, end_s)
    return {
        "a/0": told(Took(0, 1, 1.0, 2.0), overheads=overheads),
        "a/1": told(Took(1, 1, 1.0, 2.0), overheads=replace(overheads, end_s=3.0)),
    }


def test_what_is_spent_beside_layers_counts_in_every_action_of_any_plan() -> None:
    known = measured(2)
    tell(known, of_two_stages())
    found = known.profile()
    assert (found.action_s, found.send_s, found.load_s_per_row) == (0.2, 0.1, 0.05)
    bare = replace(found, action_s=0.0, send_s=0.0, load_s_per_row=0.0)
    one, two = symmetric(W[:1], 2, 4, 1), symmetric(W[:2], 2, 4, 1, pp=2)
    # Nothing is sent where all layers are: four micro-batches of a forward and a backward, and their samples.
    alone_s = estimate_step(one, found).step_s - estimate_step(one, bare).step_s
    assert alone_s == pytest.approx(4 * (2 * 0.2 + 0.05))
    # In each of two stages half the layers cost as much beside them as all do in one.
    assert found.forward_s(range(1), 1) == pytest.approx(1.0 + 0.2 + 0.05 + 0.1)
    assert found.backward_s(range(1), 1) == pytest.approx(2.0 + 0.2)
    assert found.backward_s(range(1, 2), 1) == pytest.approx(2.0 + 0.2 + 0.1)
    # Fill and drain of a pipeline have such actions, too.
    more_s = estimate_step(two, found).step_s - estimate_step(two, bare).step_s
    assert more_s == pytest.approx(5 * (2 * 0.2 + 0.1 + 0.05))


def test_what_a_pipeline_takes_longer_than_its_parts_is_of_its_messages() -> None:
    known = measured(2)
    tell(known, of_two_stages())
    plan = symmetric(W[:2], 2, 8, 1, pp=2)
    true = replace(known.profile(), hop_s=0.0004, step_s=0.1)
    known.step_took(estimate_step(plan, true).step_s)
    found = known.profile(plan)
    assert found.step_s == pytest.approx(0.1), "the end of a step, by who comes last to it"
    assert found.hop_s == pytest.approx(0.0004, rel=0.05)
    for other in (symmetric(W, 2, 8, 1, dp=2, pp=2), symmetric(W[:2], 2, 2, 1, pp=2), symmetric(W[:1], 2, 8, 1)):
        assert estimate_step(other, found).step_s == pytest.approx(estimate_step(other, true).step_s, rel=0.001)


def test_without_messages_between_stages_all_that_is_left_is_of_every_step() -> None:
    known = measured(2)
    sample = told(Took(0, 1, 1.0, 2.0), Took(1, 1, 1.0, 2.0), overheads=Overheads(0.0, 0.0, 0.0, 0.1))
    tell(known, {"a/0": sample, "a/1": sample})
    plan = symmetric(W[:2], 2, 8, 1, dp=2)
    known.step_took(estimate_step(plan, known.profile()).step_s + 0.5)
    found = known.profile(plan)
    assert found.step_s == pytest.approx(0.5)
    assert found.hop_s == 0.0


def test_a_hop_that_is_known_stays_known_under_a_plan_without_any() -> None:
    known = measured(2)
    tell(known, of_two_stages())
    plan = symmetric(W[:2], 2, 8, 1, pp=2)
    known.step_took(estimate_step(plan, replace(known.profile(), hop_s=0.0004, step_s=0.1)).step_s)
    known.profile(plan)
    known.plan_changed()
    assert known.profile(symmetric(W[:2], 2, 8, 1, dp=2)).hop_s == pytest.approx(0.0004, rel=0.05)


def test_a_profile_that_contradicts_its_step_is_told_once_the_step_is_stable() -> None:
    known = measured(2)
    tell(known, of_two_stages())
    plan = symmetric(W[:2], 2, 8, 1, pp=2)
    parts_s = estimate_step(plan, known.profile()).step_s
    known.step_took(parts_s / 2)
    assert known.contradictions(known.profile(plan)) == []
    for _ in range(RECENT - 1):
        known.step_took(parts_s / 2)
    (found,) = known.contradictions(known.profile(plan))
    assert found.kind == "step"
    known.plan_changed()
    assert known.contradictions(known.profile(plan)) == []


def test_what_is_spent_beside_layers_is_told_anew_if_it_changes_what_an_action_takes() -> None:
    def after(first: Overheads, then: Overheads) -> bool:
        turn = Took(0, 2, 1.0, 2.0)
        return told(turn, overheads=then).differs(told(turn, overheads=first))

    assert not after(Overheads(0.001), Overheads(0.02))
    assert after(Overheads(0.001), Overheads(0.2))
    assert after(Overheads(0.001, 0.0), Overheads(0.001, 0.2))


def test_what_waits_for_a_busy_machine_is_of_the_step_and_not_of_messages() -> None:
    known = measured(2)
    tell(known, of_two_stages())
    plan = symmetric(W[:2], 2, 8, 1, pp=2)
    bare = known.profile()
    step_s = estimate_step(plan, bare).step_s + 5.0
    known.step_took(step_s)
    found = known.profile(plan)
    assert found.hop_s == LONGEST_HOP_S
    assert estimate_step(plan, found).step_s == pytest.approx(step_s)
