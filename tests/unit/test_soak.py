"""What tests/soak decides and finds: which faults come, and whether a process has grown."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.soak.growth import ALLOWED, LOOKS, MB, Look, grown
from tests.soak.rig import Event, Unmet
from tests.soak.run import check_steps
from tests.soak.schedule import KINDS, SETTINGS, make_round, possible

SMALL = Look(40 * MB, 20, 5)


def test_a_seed_and_a_number_name_a_job() -> None:
    assert make_round(3, 17, 12) == make_round(3, 17, 12)
    assert make_round(3, 17, 12) != make_round(4, 17, 12)


def test_each_setting_comes_as_often_as_the_others_and_each_fault_some_time() -> None:
    rounds = [make_round(0, number, 12) for number in range(90)]
    assert set(Counter(round_.setting for round_ in rounds).values()) == {90 // len(SETTINGS)}
    assert {fault.kind for round_ in rounds for fault in round_.faults} == set(KINDS)
    for round_ in rounds:
        assert {fault.kind for fault in round_.faults} <= set(possible(round_.setting, round_.has_clocks))


def test_a_job_that_can_meet_none_of_what_is_asked_for_is_refused() -> None:
    with pytest.raises(ValueError, match="a job of 'attach' meets none of disk full"):
        make_round(0, 0, 5, ["attach"], ["disk full"])


def test_what_stays_within_its_bounds_has_not_grown() -> None:
    looks = [Look(SMALL.memory + (number % 3) * MB, 20 + number % 2, 5) for number in range(20)]
    assert grown("agent a", looks, ALLOWED["agent"]) == ""
    # Nor has what was large at first.
    assert grown("agent a", [Look(90 * MB, 50, 9), *looks], ALLOWED["agent"]) == ""


@pytest.mark.parametrize(
    ("last", "what"),
    [
        (Look(47 * MB, 20, 5), "memory 40000000 -> 47000000"),
        (Look(40 * MB, 25, 5), "files 20 -> 25"),
        (Look(40 * MB, 20, 14), "threads 5 -> 14"),
    ],
)
def test_what_has_grown_is_told_with_its_figures(last: Look, what: str) -> None:
    looks = [SMALL] * 6 + [last] * 4
    assert grown("agent a", looks, ALLOWED["agent"]) == f"agent a grows in {len(looks)} looks: {what}"


def test_a_process_that_was_seen_a_few_times_only_is_not_judged() -> None:
    assert grown("worker a/0#0", [SMALL] * 3 + [Look(400 * MB, 90, 50)] * (LOOKS - 4), ALLOWED["worker"]) == ""


def step(number: int, loss: float = 2.0, digest: str = "a") -> Event:
    return {"kind": "step", "step": number, "loss": loss, "digest": digest}


UNDISTURBED = {0: ("a", 2.0), 1: ("a", 2.0)}
OTHER_SUM = 2.0 + 1e-15


@pytest.mark.parametrize("went_back", [set[int](), {1}])
def test_a_job_that_did_each_step_as_one_that_was_left_alone_has_passed(went_back: set[int]) -> None:
    check_steps([step(0), {"kind": "generation"}, step(1, OTHER_SUM), step(0)], went_back, UNDISTURBED)


def test_a_step_to_which_the_job_went_back_was_done_twice() -> None:
    check_steps([step(0), step(1), step(1, OTHER_SUM)], {1}, UNDISTURBED)


@pytest.mark.parametrize(
    ("events", "what"),
    [
        ([step(0), step(0, OTHER_SUM), step(1)], "step 0 was done twice"),
        ([step(0), step(0, digest="b"), step(1)], "step 0 was done twice"),
        ([step(0), step(1), step(1, 2.1)], "step 1 has the loss 2.1"),
        ([step(0), step(1), step(1, digest="b")], "step 1 was done with other samples"),
        ([step(0), step(1, 2.1)], "step 1 has the loss 2.1"),
        ([step(0)], r"too many: \[1\]"),
        ([step(0), step(1), step(2)], r"too many: \[2\]"),
    ],
)
def test_a_job_that_did_a_step_otherwise_has_not_passed(events: list[Event], what: str) -> None:
    with pytest.raises(Unmet, match=what):
        check_steps(events, {1}, UNDISTURBED)
