"""What follows from the votes of the members where none, or not all, hold the state."""

from __future__ import annotations

import pytest

from elaunch.errors import StateError
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.recovery import agree

NONE = Vote()


def test_before_the_job_has_begun_the_first_member_counts() -> None:
    assert agree([NONE, NONE], begun=False) == Verdict(0, (), (0,), (1,), fresh=True, facts=({}, {}))


def test_a_job_that_has_begun_and_that_nobody_holds_is_lost() -> None:
    with pytest.raises(StateError, match="start it again from the last checkpoint"):
        agree([NONE, NONE], begun=True)


@pytest.mark.parametrize("begun", [False, True])
def test_unless_the_first_member_sees_a_checkpoint(begun: bool) -> None:
    verdict = agree([Vote(saved=200, every=100), Vote(saved=100, every=100), Vote(every=100)], begun)
    assert (verdict.fresh, verdict.saved) == (True, 200)


def test_where_somebody_holds_the_state_the_checkpoint_is_for_what_is_missing() -> None:
    verdict = agree([Vote(saved=200), Vote(step=250, holds=True, saved=200)], begun=True)
    assert (verdict.fresh, verdict.step, verdict.saved) == (False, 250, 200)
    assert (verdict.sources, verdict.receivers) == ((1,), (0,))


def test_all_save_the_state_after_the_same_number_of_steps() -> None:
    with pytest.raises(StateError, match="the members save the state every 0 or 100 steps"):
        agree([Vote(every=100), Vote()], begun=False)


@pytest.mark.parametrize("late", [Vote(step=6, holds=True), Vote(step=5, entered=True, holds=True)])
def test_a_holder_that_is_behind_must_have_entered_the_one_step_that_it_lacks(late: Vote) -> None:
    with pytest.raises(StateError, match=f"member 1 is at step {late.step}, the others committed 7"):
        agree([Vote(step=7, holds=True), late], begun=True)


def test_a_holder_one_step_behind_that_has_entered_it_commits_it() -> None:
    verdict = agree([Vote(step=6, entered=True, holds=True), Vote(step=7, holds=True), Vote(step=7)], begun=True)
    assert (verdict.step, verdict.committing, verdict.sources, verdict.receivers) == (7, (0,), (0, 1), (2,))
    assert verdict.passed == 1


def test_what_all_holders_have_ready_commits_although_nobody_has_passed_its_barrier() -> None:
    ready = Vote(step=6, entered=True, holds=True, ready=7)
    verdict = agree([ready, Vote(step=2), ready], begun=True)
    assert (verdict.step, verdict.committing, verdict.sources, verdict.receivers) == (7, (0, 2), (0, 2), (1,))
    assert verdict.passed == 0
    assert agree([ready, Vote(step=6, holds=True)], begun=True).step == 6
    assert agree([ready, Vote(step=7, holds=True)], begun=True).committing == (0,)
