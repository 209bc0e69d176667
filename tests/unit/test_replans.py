"""Calls for another plan: which one counts, for whom it is over, and for which members it is fitted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from elaunch.errors import StateError, WentBack
from elaunch.plan import symmetric
from elaunch.rendezvous.membership import Generation, GenerationStage, RequestedPlan, Worker
from elaunch.workers.hooks import Verdict
from elaunch.workers.member.planner import Planner
from elaunch.workers.member.replans import REPLAN, ReplanCall, Replans, asked, fitted
from tests.helpers import scaled

NAMES = ("a/0#0", "a/1#0", "a/2#0")
TRAIN, GENERATE = symmetric(["x", "y", "z"], 3, 9, 3, pp=3), symmetric(["x", "y", "z"], 3, 9, 3, dp=3)

NOTHING = RequestedPlan()


def generation(number: int = 4, names: Sequence[str] = NAMES, request: RequestedPlan = NOTHING) -> Generation:
    workers = tuple(Worker(name, "a", 0) for name in names)
    return Generation(number, GenerationStage.TRAIN, workers, requested_plan=request)


def verdict(told: Sequence[dict[str, Any]], step: int = 7) -> Verdict:
    members = tuple(range(len(told)))
    return Verdict(step, (), members, (), facts=tuple({REPLAN: one} for one in told))


def fact(call: ReplanCall | None, settled: int = 4, done: int = 0) -> dict[str, Any]:
    told = None if call is None else asdict(call)
    return {"step": 7, "done": done, "settled": settled, "call": told, "standing": None}


CALL = ReplanCall(7, 1, str(GENERATE), weights_only=True)
NEXT = ReplanCall(7, 2, str(TRAIN))


def test_a_call_counts_when_all_members_are_in_one_and_settled_in_this_generation() -> None:
    assert asked(verdict([fact(CALL)] * 3), generation()) == CALL
    assert asked(verdict([fact(CALL), fact(CALL), fact(None)]), generation()) is None
    assert asked(verdict([fact(CALL), fact(CALL, settled=3), fact(CALL)]), generation()) is None
    assert asked(verdict([fact(CALL)] * 3), generation(5)) is None


def test_the_last_call_counts_where_some_are_further() -> None:
    assert asked(verdict([fact(CALL), fact(NEXT), fact(CALL)]), generation()) == NEXT


def test_different_plans_in_the_same_call_are_refused_with_both() -> None:
    other = ReplanCall(7, 1, str(TRAIN))
    text = r"replan\(\) number 1 at step 7: a/0#0 asked for 'plan .*', for the weights only, and a/2#0 for 'plan "
    with pytest.raises(StateError, match=text):
        asked(verdict([fact(CALL), fact(CALL), fact(other)]), generation())


def test_workers_become_members_by_rank_the_rest_is_idle_and_empty_places_have_the_names_of_the_lost() -> None:
    plan = fitted(GENERATE, ("p", "q", "r", "s"), ())
    assert plan is not None
    assert plan.workers == ("p", "q", "r", "s")
    assert plan.idle == ("s",)
    short = fitted(GENERATE, ("p", "q"), ("gone", "more"))
    assert short is not None
    assert short.workers == ("p", "q", "gone")
    assert fitted(GENERATE, ("p", "q"), ()) is None


def test_a_framework_sees_the_plan_in_every_later_generation_until_a_newer_one_is_asked_for() -> None:
    replans, first = Replans(), RequestedPlan("an older plan", "ctl 1")
    shown = replans.planned(generation(request=first), verdict([fact(NEXT)] * 3))
    expected = fitted(TRAIN, NAMES, ())
    assert (shown.plan, shown.plan_request) == (str(expected), "replan 7.2")
    assert replans.planned(generation(5, NAMES[:2], first), verdict([fact(None)] * 2)).plan_request == "replan 7.2"
    joiner = Replans()
    joiner.agreed(verdict([replans.facts(), fact(None)]))
    assert joiner.planned(generation(5, request=first), verdict([fact(None)] * 2)).plan == str(expected)
    newer = generation(6, request=RequestedPlan("a newer plan", "ctl 2"))
    assert replans.planned(newer, verdict([fact(None)] * 3)) == newer


def test_a_job_that_went_back_to_its_checkpoint_says_so() -> None:
    replans = Replans()
    call = replans.begin(7, TRAIN, False)

    def goes_back(_: str) -> None:
        replans.went_back()
        replans.agreed(verdict([fact(None)] * 3, step=4))

    with pytest.raises(WentBack, match="back from 7 committed steps to its checkpoint after 4"):
        replans.carry_out(call, lambda: None, goes_back, lambda: None)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (symmetric(["x"], 3, 9, 1), r"\(3, 9, 1\), and the job has \(3, 9, 3\); give a plan for these"),
        (
            symmetric([*"uvwxyz"], 3, 9, 3, dp=3, pp=2),
            r"is for 6 workers, and the job is for 3 \(a/0#0, a/1#0 are there\); give a plan for at most 3",
        ),
    ],
)
def test_a_plan_of_another_size_is_refused_with_both_sizes(plan: Any, text: str) -> None:
    with pytest.raises(StateError, match=text):
        Planner(TRAIN, None, lambda: None).check(plan, NAMES[:2])


@dataclass
class Toy:
    """A member of a toy job: its script makes these calls at a step, and then does the step."""

    name: str
    replans: Replans = field(default_factory=Replans)
    left: list[tuple[Any, bool]] = field(default_factory=lambda: [(GENERATE, True), (TRAIN, False), (GENERATE, False)])
    call: ReplanCall | None = None

    def go_on(self) -> None:
        """Runs the script until a call is to be carried out, or the step is reached."""
        while self.left and (self.call is None or self.replans.is_over(self.call)):
            if self.call is not None:
                self.left.pop(0)
                self.call = None
            if self.left:
                self.call = self.replans.begin(7, *self.left[0])
        if self.call is not None and self.replans.is_over(self.call):
            self.call = None


@pytest.mark.parametrize("seed", range(scaled(60, 2000)))
def test_whoever_dies_and_joins_all_come_to_the_step_together_by_the_same_plan(seed: int) -> None:
    """Some go on from a change before it is interrupted for the others; some are lost, and others join."""
    drawn = random.Random(seed)
    members, number, born = [Toy(f"a/{place}#0") for place in range(3)], 1, 0
    for one in members:
        one.replans.resumed(number)
        one.replans.agreed(verdict([fact(None)] * 3))
    plans: list[str] = []
    while any(one.left for one in members):
        for one in members:
            one.go_on()
        assert len({bool(one.call) for one in members}) == 1, "some are at the step, and others in a call"
        if members[0].call is None:
            break
        here = generation(number, [one.name for one in members])
        for one in members:
            one.replans._pending = one.call
        votes = verdict([one.replans.facts() for one in members])
        for one in members:
            one.replans.agreed(votes)
            one.replans.planned(here, votes)
        counted = asked(votes, here)
        for one in members:
            one.replans._pending = None
        assert counted is not None
        fails = drawn.random() < 0.5
        through = drawn.sample(members, drawn.randint(0, len(members))) if fails else members
        for one in through:
            one.replans.resumed(number)
            plans.append(counted.plan)
        if fails:
            number += 1
            if len(members) > 1 and drawn.random() < 0.7:
                members.remove(drawn.choice(members))
            if drawn.random() < 0.5:
                born += 1
                members.append(Toy(f"a/9#{born}"))
            after = verdict([one.replans.facts() for one in members])
            for one in members:
                one.replans.agreed(after)
                one.replans.planned(generation(number, [two.name for two in members]), after)
                one.replans.resumed(number)
    assert all(not one.left for one in members)
    assert len({one.replans._done for one in members}) == 1
