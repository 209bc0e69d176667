"""What the event of a transition says."""

from __future__ import annotations

import pytest

from elaunch.workers.member.transition_times import TransitionTimes


def test_the_phases_add_up_to_the_whole() -> None:
    times = TransitionTimes("worker a/0#0 was killed by SIGKILL", 10.0, 10.25, interrupted=True)
    times.phases |= {"connect_s": 0.5, "agree_s": 1.0, "plan_s": 0.25, "transfer_s": 2.0}
    event = times.event(15.0)
    assert event["total_s"] == 5.0
    assert event["phases"]["detect_s"] == 0.25
    assert event["phases"]["resume_s"] == 1.0
    assert sum(event["phases"].values()) == pytest.approx(event["total_s"])
    assert times.fixed_s == 1.0
    assert "moved_over" not in event
    assert "freed_s" not in event, "nobody has told of it"


def test_clocks_that_differ_make_nothing_shorter() -> None:
    times = TransitionTimes("a/0#0 was killed", 11.0, 10.0)
    times.phases |= {"connect_s": 0.5}
    assert times.fixed_s == 0.5


def test_the_path_is_told_of_where_something_has_moved() -> None:
    times = TransitionTimes("b joins", moved_over="native")
    assert "moved_over" not in times.event(1.0)
    times.bytes_moved = 7
    assert times.event(1.0)["moved_over"] == "native"


def test_of_the_members_that_were_freed_the_last_one_counts() -> None:
    times = TransitionTimes()
    times.freed([None, None])
    assert times.freed_s is None
    times.freed([0.0, None])
    assert times.event(1.0)["freed_s"] == 0.0
    times.freed([0.004, 0.02, 0.0])
    times.freed([0.01])
    assert times.event(1.0)["freed_s"] == 0.02


def test_what_carried_the_first_step_is_told_where_there_was_an_estimate() -> None:
    times = TransitionTimes()
    assert "first_step" not in times.event(1.0)
    times.first_step = {"over": "native", "waited_s": 0.25, "open_s": 0.25, "links_s": 2.0, "native_s": 1.0}
    assert times.event(1.0)["first_step"] == times.first_step
