"""What a worker's policy selector does step by step, and at a change; the process that plans ahead is a stand-in."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from elaunch.errors import StateError, UsageError
from elaunch.plan import Plan, data_parallel, even_shares, symmetric
from elaunch.plan.tiling import MicroBatch
from elaunch.policy import selector as selector_module
from elaunch.policy.cadence import EVERY, FIRST, WARM_UP
from elaunch.policy.candidates.balance import shares_by_speed
from elaunch.policy.candidates.resize import resized
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.decision import Decision, History
from elaunch.policy.dvfs import ClockRange
from elaunch.policy.estimate import estimate_step
from elaunch.policy.measure import Measured
from elaunch.policy.profile import LayerProfile, Profile, WorkerProfile
from elaunch.policy.select import Choice, SelectorSettings, choose
from elaunch.policy.selector import SETTLED, Selector, make_selector
from elaunch.policy.settings import PolicyConfig, SlowPolicy, from_environment, parse
from elaunch.policy.stragglers.track import SPAN_STEPS
from tests.helpers import scaled
from tests.unit.test_measure import Took

W = ["n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0"]
HOME = symmetric(W, 4, 12, 2, dp=2, pp=2)
LAYER = LayerProfile(0.0, 0.0, 400, 1200, 10, 50)
EVEN = Profile("even", (LayerProfile(1.0, 2.0, 400, 1200, 10, 50),) * 4, 1, 1e9, 0.0)


class Prepared:
    """Plans at once what it is asked to, or says that nothing is there yet."""

    settings = SelectorSettings()

    def __init__(self, settings: SelectorSettings) -> None:
        self.settings = settings
        self.begun: list[dict[str, Any]] = []
        self.answers = True
        self.closed = False

    def begin(
        self,
        now: Plan,
        preferred_plan: Plan,
        members: Sequence[str],
        me: str,
        profile: Profile,
        lost: Sequence[str],
        again: bool,
        without: Sequence[str],
    ) -> None:
        self.begun.append({"members": tuple(members), "me": me, "again": again, "profile": profile, "lost": lost})
        self.begun[-1]["without"] = tuple(without)

    @property
    def left(self) -> int:
        return 0 if self.answers else 1

    def find(self, now: Plan, preferred_plan: Plan, members: Sequence[str]) -> Choice | None:
        if not self.begun or not self.answers:
            return None
        return choose(now, preferred_plan, members, self.begun[-1]["profile"], self.settings)

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector_module, "Ahead", Prepared)


def crew(settings: SelectorSettings | None = None) -> dict[str, Selector]:
    found = {
        worker: Selector(worker, Measured("test", [LAYER] * 4, [100] * 4), settings or SelectorSettings())
        for worker in W
    }
    for one in found.values():
        one.entered(HOME, HOME, W, None)
    return found


def ahead(one: Selector) -> Prepared:
    return cast(Prepared, one._ahead)


def step(workers: dict[str, Selector], slow: dict[str, float] | None = None, seconds: float = 30.0) -> None:
    """A step of all, in which a layer takes a second and two for each row."""
    notes = {worker: one.note(dict) for worker, one in workers.items()}
    assert json.loads(json.dumps(notes)) == notes
    for worker, one in workers.items():
        if one.measures():
            factor = (slow or {}).get(worker, 1.0)
            layers = {index for tile in HOME.tiles_of(worker) for index in HOME.tiles[tile].layers}
            one.add([Took(index, 2, 2 * factor, 4 * factor) for index in sorted(layers)], {}, 0.1, 100)
        one.heard(notes, seconds)


def test_the_first_steps_are_measured_and_then_some() -> None:
    one = crew()[W[0]]
    measured = []
    for number in range(WARM_UP + FIRST + 3 * EVERY):
        if one.measures():
            measured.append(number)
        one.heard({}, 1.0)
    first = list(range(WARM_UP, WARM_UP + FIRST))
    assert measured == [*first, *range(WARM_UP + FIRST, WARM_UP + FIRST + 3 * EVERY, EVERY)]


def test_kept_bytes_are_counted_once() -> None:
    one = crew()[W[0]]
    assert one.meters()
    one.add([Took(0, 2, 1.0, 2.0)], {}, 0.0, 0)
    assert one.meters()
    one.add([Took(0, 2, 1.0, 2.0)], {0: 10.0}, 0.0, 0)
    assert not one.meters()


def test_a_speed_that_wavers_is_still_the_same() -> None:
    workers = crew()
    for number in range(SETTLED + 6 * EVERY):
        # 0.35 and 0.37 in turn
        step(workers, {W[1]: 2.7 + 0.15 * (number // EVERY % 2)} if number > SETTLED else None)
        if workers[W[0]].due:
            break
    else:
        pytest.fail("nobody has noticed")


def test_all_members_come_to_know_what_each_has_measured() -> None:
    workers = crew()
    for _ in range(6):
        step(workers)
    for one in workers.values():
        profile = one.profile()
        assert [layer.forward_s(2) for layer in profile.layers] == [2.0] * 4
        assert not profile.workers


def test_what_is_likely_is_planned_once_something_is_known() -> None:
    workers = crew()
    for _ in range(SETTLED - 1):
        step(workers)
    assert not ahead(workers[W[0]]).begun
    step(workers)
    for worker, one in workers.items():
        (begun,) = ahead(one).begun
        assert (begun["me"], begun["members"], begun["again"]) == (worker, tuple(W), False)


def test_a_slow_worker_makes_the_first_member_ask_for_another_plan_and_all_hear_it_at_once() -> None:
    workers = crew()
    for _ in range(SETTLED + 2):
        step(workers)
    assert not any(one.due for one in workers.values())
    for _ in range(6 * EVERY):
        step(workers, {W[1]: 3.0})
        due = {one.due for one in workers.values()}
        assert len(due) == 1
        if due == {True}:
            break
    else:
        pytest.fail("nobody has noticed")
    assert [begun["again"] for begun in ahead(workers[W[0]]).begun] == [False, True]
    assert [begun["again"] for begun in ahead(workers[W[1]]).begun] == [False]
    choice = workers[W[0]].decide(HOME, HOME, W)
    assert choice.chosen.policy in ("resize", "reparallelize")
    for one in workers.values():
        one.entered(choice.plan, choice.preferred_plan, W, None)
    # It is the same worker: nobody asks again.
    for _ in range(3 * EVERY):
        for one in workers.values():
            one.heard({worker: other.note(dict) for worker, other in workers.items()}, 30.0)
        assert not any(one.due for one in workers.values())


def test_one_slow_step_makes_nobody_ask() -> None:
    workers = crew()
    for number in range(10 * EVERY):
        step(workers, {W[1]: 3.0} if number == 4 * EVERY else None)
        assert not any(one.due for one in workers.values())


@pytest.mark.parametrize("settings", [SelectorSettings(policy="reroute"), SelectorSettings(policy="resize")])
def test_who_pins_a_policy_is_asked_for_nothing_else(settings: SelectorSettings) -> None:
    workers = crew(settings)
    for _ in range(10 * EVERY):
        step(workers, {W[1]: 3.0})
        assert not any(one.due for one in workers.values())


def test_a_plan_that_gains_nothing_is_not_asked_for() -> None:
    workers = crew()
    for _ in range(10 * EVERY):
        # As slow as its whole stage is.
        step(workers, dict.fromkeys(W, 3.0))
        assert not any(one.due for one in workers.values())


def test_what_was_planned_ahead_is_used_and_else_it_is_planned_now() -> None:
    one = crew()[W[0]]
    left = [W[0], W[2], W[3]]
    now = one.decide(HOME, HOME, left)
    assert now.plan.workers
    now.plan.validate(left)
    step({W[0]: one})
    one._plan_ahead()
    assert one.decide(HOME, HOME, left).plan == now.plan
    ahead(one).answers = False
    assert one.decide(HOME, HOME, left).plan == now.plan


def test_a_decision_is_read_as_it_was_written() -> None:
    choice = choose(HOME, HOME, [W[0], *W[2:]], EVEN)
    decision = Decision.of(choice, None, "; more")
    assert decision.event["reason"].endswith("; more")
    read = Decision.from_bytes(decision.to_bytes())
    assert (read.plan, read.preferred_plan) == (choice.plan, choice.preferred_plan)
    assert read.event["candidates"] == json.loads(json.dumps(choice.event()["candidates"]))
    given = Decision.given(HOME, "given", "the script gave the plan")
    assert Decision.from_bytes(given.to_bytes()) == given
    assert given.clock_mhz(W[0]) is None


def test_clocks_of_a_straggler_are_in_the_decision() -> None:
    workers = crew()
    one = workers[W[0]]
    assert one.clocking(HOME) is None
    clocks = ClockRange(1000, (1000, 1500, 2000))
    for _ in range(WARM_UP + 2 * FIRST + SPAN_STEPS):
        notes = {worker: other.note(dict, None, clocks) for worker, other in workers.items()}
        for worker, other in workers.items():
            factor = 2.0 if worker == W[1] else 1.0
            layers = {index for tile in HOME.tiles_of(worker) for index in HOME.tiles[tile].layers}
            other.add([Took(index, 2, 2 * factor, 4 * factor) for index in sorted(layers)], {}, 0.1, 100)
            other.heard(notes, 60.0)
    clocking = one.clocking(HOME)
    assert clocking is not None
    choice = choose(HOME, HOME, W, EVEN)
    decision = Decision.from_bytes(Decision.of(choice, clocking).to_bytes())
    assert [decision.clock_mhz(worker) for worker in W] == [None, 2000, None, None]


def test_the_history_counts_changes_and_remembers_who_was_lost_last() -> None:
    begun = History(1000.0)
    assert begun.next_s(1000.0) == 3600.0
    lost = begun.after(W, W[1:])
    assert (lost.changes, lost.last_lost) == (1, (W[0],))
    assert lost.next_s(1400.0) == 2000.0
    more = lost.after(W[1:], W[2:])
    assert (more.changes, more.last_lost) == (2, (W[1],))
    back = more.after(W[2:], [*W[2:], "n0/1#1"])
    assert (back.changes, back.last_lost) == (3, ())
    assert back.after(back.last_lost, back.last_lost) == back
    assert History.from_json(json.loads(json.dumps(vars_of(more)))) == more
    assert History.from_json(None) is None


def vars_of(history: History) -> dict[str, Any]:
    return asdict(history)


def test_who_joins_takes_over_the_history() -> None:
    one = Selector("n2/0#0", Measured("test", [LAYER] * 4, [100] * 4), SelectorSettings())
    one.entered(HOME, HOME, [*W, "n2/0#0"], History(5.0, 7))
    assert one.history == History(5.0, 7)
    one.entered(HOME, HOME, [*W[1:], "n2/0#0"], History(0.0, 100))
    assert one.history == History(5.0, 8, (W[0],))


# -- settings ---------------------------------------------------------------------------------------------------------


def test_policy_config_reach_the_workers_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    for policy_config in (
        PolicyConfig(),
        PolicyConfig("resize", "bitwise", True, file),
        PolicyConfig(dp=(1, 3), pp=(2, 2)),
        PolicyConfig(tp=(2, 4)),
    ):
        assert from_environment(policy_config.variables()) == policy_config
    with pytest.raises(UsageError, match="--policy=best: expected one of auto, reroute, resize, reparallelize"):
        parse("best", "", False, "")
    with pytest.raises(UsageError, match="ELAUNCH_CONSISTENCY=exact: expected one of bitwise, fast"):
        from_environment({"ELAUNCH_CONSISTENCY": "exact"})
    with pytest.raises(UsageError, match="--pp=3:2: expected N or MIN:MAX with 1 <= MIN <= MAX"):
        parse("", "", False, "", pp="3:2")
    with pytest.raises(UsageError, match="ELAUNCH_DP=some: expected N or MIN:MAX"):
        from_environment({"ELAUNCH_DP": "some"})
    with pytest.raises(UsageError, match="--tp=0: expected numbers of workers, 1 or more, with commas between them"):
        parse("", "", False, "", tp="2, 0")


@pytest.mark.parametrize(("dp", "pp"), [((1, 1), None), (None, (1, 1)), ((1, 2), (2, 2))])
def test_pipelines_are_made_as_the_user_wants_them(
    dp: tuple[int, int] | None, pp: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PolicyConfig("reparallelize", dp=dp, pp=pp).variables().items():
        monkeypatch.setenv(name, value)
    one = make_selector(W[0], [LAYER] * 4, [100] * 4, "test")
    for left in (W[:3], W[:2]):
        choice = one.decide(HOME, HOME, left)
        (candidate,) = [found for found in choice.candidates if found.policy == "reparallelize"]
        assert choice.chosen is candidate
        assert candidate.plan is not None
        first = [tile for tile in candidate.plan.tiles if tile.layers.start == 0]
        assert dp is None or dp[0] <= len(first) <= dp[1]
        depth = len({tile.layers for tile in candidate.plan.tiles})
        assert pp is None or pp[0] <= depth <= pp[1]


def test_a_profile_is_read_and_kept_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "job.json"
    for name, value in PolicyConfig("auto", None, False, file).variables().items():
        monkeypatch.setenv(name, value)
    one = make_selector(W[0], [LAYER] * 4, [100] * 4, "test")
    one.entered(HOME, HOME, W[:1], None)
    for _ in range(4):
        step({W[0]: one})
    written = Profile.load(file)
    assert [layer.forward_s(2) for layer in written.layers[:2]] == [2.0, 2.0]
    again = make_selector(W[0], [LAYER] * 4, [100] * 4, "test")
    assert again.profile().layers == written.layers
    with pytest.raises(StateError, match="has 4 layers and the model 3; give the file of this model"):
        make_selector(W[0], [LAYER] * 3, [100] * 3, "test")


def test_a_profile_that_cannot_be_written_stops_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = tmp_path / "no" / "such" / "job.json"
    one = Selector(W[0], Measured("test", [LAYER] * 4, [100] * 4), SelectorSettings(), gone)
    one.entered(HOME, HOME, W[:1], None)
    for _ in range(4):
        step({W[0]: one})
    assert f"--profile={gone}: No such file or directory; the profile is not written" in capsys.readouterr().err


# -- data-parallel jobs -----------------------------------------------------------------------------------------------


def test_shares_follow_the_speeds_of_members() -> None:
    now = data_parallel(16, 1, even_shares(16, W))
    members = [*W[1:], "n2/0#0"]
    profile = Profile("one", (LayerProfile(1.0, 2.0, 4, 8, 0, 0),), 1, 1e9, 0.0)
    chosen = choose(now, now, members, profile)
    assert list(shares_by_speed(chosen.plan, members, profile).items()) == list(even_shares(16, members).items())
    slow = Profile("one", profile.layers, 1, 1e9, 0.0, workers={"n0/1": WorkerProfile(0.5)})
    found = shares_by_speed(choose(now, now, members, slow).plan, members, slow)
    data_parallel(48, 3, found).validate(members)
    assert list(found) == members
    assert list(found.values()) in ([2, 5, 5, 4], [2, 5, 4, 5], [2, 4, 5, 5], [3, 5, 4, 4])


def test_members_without_a_share_stay_members() -> None:
    few = data_parallel(2, 1, even_shares(2, W))
    assert few.idle == (W[2], W[3])
    few.validate(W)


# -- what the choice keeps to -----------------------------------------------------------------------------------------


def cut_micro_batches(plan: Plan) -> list[MicroBatch]:
    size = [plan.micro_batch_size]
    return [runs for tile in plan.tiles for runs in tile.micro_batches if [len(run) for run in runs] != size]


def test_bitwise_has_no_plan_that_cuts_micro_batches() -> None:
    left = [W[0], *W[2:]]
    free, kept = (
        {one.policy: one for one in choose(HOME, HOME, left, EVEN, wanted).candidates}
        for wanted in (SelectorSettings(), SelectorSettings(consistency="bitwise"))
    )
    assert not free["resize"].rejected
    assert free["resize"].plan is not None
    assert cut_micro_batches(free["resize"].plan)
    for policy in ("reroute", "resize"):
        plan = kept[policy].plan
        assert plan is not None
        assert not kept[policy].rejected
        assert not cut_micro_batches(plan)
    asked = choose(HOME, HOME, left, EVEN, SelectorSettings("resize", consistency="bitwise"))
    assert (asked.chosen.policy, "not possible" in asked.reason) == ("resize", False)


@given(st.data())
@settings(max_examples=scaled(60, 300), deadline=None)
def test_resize_under_bitwise_shares_out_whole_micro_batches_as_evenly_as_they_can_be(data: DataObject) -> None:
    dp, pp = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    units = data.draw(st.integers(dp, 4 * dp))
    workers = [f"n{rank}/0" for rank in range(dp * pp)]
    plan = symmetric(workers, 4, 2 * units, 2, dp=dp, pp=pp)
    lost = data.draw(st.sets(st.sampled_from(workers), min_size=1, max_size=dp - 1))
    left = [worker for worker in workers if worker not in lost]
    found = resized(plan, left, EVEN, whole=True)
    assert not cut_micro_batches(found)
    for layers in {tile.layers for tile in found.tiles}:
        counts = [len(tile.micro_batches) for tile in found.tiles if tile.layers == layers]
        assert sum(counts) == units
        assert max(counts) - min(counts) <= 1
    slow = replace(EVEN, workers={left[0]: WorkerProfile(0.5)})
    aside = resized(plan, left, slow, whole=True)
    assert not cut_micro_batches(aside)


def test_with_everybody_back_and_nobody_slow_the_job_returns_to_the_preferred_plan() -> None:
    left = [W[0], *W[2:]]
    after = choose(HOME, HOME, left, EVEN)
    back = [*left, "n0/1#1"]
    again = choose(after.plan, after.preferred_plan, back, EVEN)
    assert again.plan.tiles == HOME.renamed({W[1]: "n0/1#1"}).tiles
    # A slow one is no reason to forget the plan, either.
    slow = Profile("slow", EVEN.layers, 1, 1e9, 0.0, workers={"n1/0": WorkerProfile(0.4)})
    aside = choose(HOME, HOME, W, slow)
    assert aside.plan.tiles != HOME.tiles
    assert choose(aside.plan, aside.preferred_plan, W, EVEN).plan.tiles == HOME.tiles


def test_no_plan_is_an_error_with_all_reasons() -> None:
    small = Profile("small", EVEN.layers, 1, 1e9, 0.0, memory_bytes=10)
    with pytest.raises(NotPossible, match=r"no plan for 3 members: .*may use 10"):
        choose(HOME, HOME, [W[0], *W[2:]], small)


def until_answered(workers: dict[str, Selector], slow: dict[str, float]) -> list[dict[str, Any]]:
    for _ in range(WARM_UP + FIRST + 12 * EVERY):
        step(workers, slow)
        if events := workers[W[0]].events():
            return events
    raise AssertionError("nobody has noticed")


def with_slow_policy(policy: SlowPolicy, min_nodes: int = 1) -> dict[str, Selector]:
    found = {}
    for worker in W:
        known = Measured("test", [LAYER] * 4, [100] * 4)
        found[worker] = Selector(worker, known, SelectorSettings(), slow_policy=policy, min_nodes=min_nodes)
        found[worker].entered(HOME, HOME, W, None)
    return found


def test_only_the_first_member_tells_of_who_is_slow() -> None:
    workers = crew()
    (event,) = until_answered(workers, {W[1]: 3.0})
    assert (event["worker"], event["state"], event["action"]) == (W[1], "slow", "rebalance")
    assert json.loads(json.dumps(event)) == event
    assert not any(one.events() for one in workers.values())


def test_a_profile_that_contradicts_itself_is_told_once_and_when_it_no_longer_does() -> None:
    workers = crew()
    first = workers[W[0]]

    def published(seconds: float) -> Profile:
        for _ in range(3):
            step(workers, seconds=seconds)
        first._publishing.at_once = True
        notes = {worker: one.note(dict) for worker, one in workers.items()}
        found = [one.heard(notes, seconds) for one in workers.values()]
        assert found[0] is not None
        return found[0]

    parts_s = estimate_step(HOME, published(1.0)).step_s
    (event,) = first.doubts()
    (text,) = event["contradictions"]
    assert text.startswith("step: it takes 1 s")
    assert json.loads(json.dumps(event)) == event
    assert published(1.0).contradictions == (text,)
    assert not first.doubts(), "told once"
    assert published(parts_s).contradictions == ()
    assert first.doubts() == [{"contradictions": []}]
    assert not any(one.doubts() for one in workers.values())


def test_who_only_wants_to_be_told_gets_no_other_plan() -> None:
    workers = with_slow_policy("report")
    (event,) = until_answered(workers, {W[1]: 3.0})
    assert event["action"] == "report"
    for _ in range(4 * EVERY):
        step(workers, {W[1]: 3.0})
        assert not any(one.due for one in workers.values())


def test_who_is_to_be_replaced_hears_it_with_all_others_and_no_other_plan_is_made_meanwhile() -> None:
    workers = with_slow_policy("replace")
    (event,) = until_answered(workers, {W[1]: 3.0})
    assert event["action"] == "replace"
    step(workers, {W[1]: 3.0})
    told = {worker: one.eviction() for worker, one in workers.items()}
    assert [worker for worker, eviction in told.items() if eviction is not None] == [W[1]]
    eviction = told[W[1]]
    assert eviction is not None
    assert eviction.replace
    for _ in range(4 * EVERY):
        step(workers, {W[1]: 3.0})
        assert not any(one.due or one.eviction() for one in workers.values())
    # Who joins hears of it, so that it would not be replaced again.
    history = History.from_json(json.loads(json.dumps(workers[W[2]].told_history())))
    assert history is not None
    assert history.replaced == ("n0/1",)
    assert history.factors == {"n0/1": pytest.approx(3, rel=0.1)}


def test_who_is_left_out_is_weighed_first() -> None:
    workers = with_slow_policy("exclude")
    (event,) = until_answered(workers, {W[1]: 60.0})
    assert event["action"] == "exclude", event
    begun = ahead(workers[W[0]]).begun
    assert [one["without"] for one in begun if one["without"]] == [(W[1],)]
    step(workers, {W[1]: 60.0})
    eviction = workers[W[1]].eviction()
    assert eviction is not None
    assert not eviction.replace


def test_nobody_is_left_out_where_too_few_nodes_would_be_left() -> None:
    workers = with_slow_policy("exclude", min_nodes=2)
    for _ in range(WARM_UP + FIRST + 4):
        step(workers)
    (event,) = until_answered(workers, {W[0]: 9.0, W[1]: 9.0})
    assert (event["slow_node"], event["action"]) == ("n0", "rebalance")
    assert event["reason"] == "1 of at least 2 nodes would be left"


def test_a_decision_leaves_the_collector_as_it_was() -> None:
    found = []
    try:
        for collecting in (True, False):
            (gc.enable if collecting else gc.disable)()
            choose(HOME, HOME, W, EVEN)
            with pytest.raises(NotPossible):
                choose(HOME, HOME, [], EVEN)
            found.append(gc.isenabled())
    finally:
        gc.enable()
    assert found == [True, False]


def test_the_first_member_is_prepared_to_match_the_tuples_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[int] = []
    monkeypatch.setattr(selector_module, "prepare", prepared.append)
    pairs = symmetric(W, 4, 12, 2, pp=2, tp=2)
    for worker in W:
        selector = Selector(worker, Measured("m", [LAYER] * 4, [100] * 4), SelectorSettings())
        selector.entered(pairs, pairs, W, None)
    assert prepared == [2]
