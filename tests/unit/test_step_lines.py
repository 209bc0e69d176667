from __future__ import annotations

from elaunch.agent.decisions.actions import Action, AskEnd, Record
from elaunch.agent.decisions.step_lines import HOLD_S, MOST_CHARACTERS, StepLines
from elaunch.wire import AGAIN, MOST_NAMES, THROUGH, Report

HEIR, NEXT = "b/0#0", "b/1#0"
LOST, OTHER = "a/0#0", "c/0#0"


def report(step: int, *tellers: str) -> Report:
    return Report("step", {"step": step, **({AGAIN: list(tellers)} if tellers else {})})


def steps(actions: list[Action]) -> list[tuple[int, bool]]:
    """Of the lines that are due: the step, and whether another log has it."""
    return [(one.report.fields["step"], one.is_elsewhere) for one in actions if isinstance(one, Record)]


def asked(actions: list[Action]) -> list[str]:
    return [one.worker for one in actions if isinstance(one, AskEnd)]


def test_a_line_that_no_other_log_can_have_is_written_at_once() -> None:
    lines = StepLines()
    assert steps(lines.take(HEIR, report(5), 0.0)) == [(5, False)]
    assert steps(lines.take(HEIR, Report("step", {"step": 6, AGAIN: []}), 0.0)) == [(6, False)]
    assert lines.asked == ""


def test_a_line_in_the_place_of_another_worker_waits_for_its_end_and_later_ones_with_it() -> None:
    lines = StepLines()
    held = lines.take(HEIR, report(5, LOST), 0.0)
    assert (steps(held), asked(held)) == ([], [LOST])
    assert lines.take(HEIR, report(6), 0.1) == []
    assert lines.heard_of_end(OTHER, 9, 0.2) == []
    assert lines.on_time(HOLD_S - 0.1) == []
    assert steps(lines.heard_of_end(LOST, 5, 0.3)) == [(5, False), (6, False)]
    assert steps(lines.take(HEIR, report(7), 0.4)) == [(7, False)]


def test_what_the_log_of_the_lost_one_has_is_not_written() -> None:
    lines = StepLines()
    lines.take(HEIR, report(5, LOST), 0.0)
    lines.take(HEIR, report(6), 0.0)
    assert steps(lines.heard_of_end(LOST, 6, 0.1)) == [(5, True), (6, False)]


def test_a_step_that_is_done_again_after_a_checkpoint_is_written_although_a_log_had_gone_further() -> None:
    for logged, is_elsewhere in ((5, False), (6, True), (7, True), (8, False), (51, False)):
        lines = StepLines()
        lines.take(HEIR, report(5, LOST), 0.0)
        assert steps(lines.heard_of_end(LOST, logged, 0.1)) == [(5, is_elsewhere)]


def test_a_log_may_go_on_after_a_step_that_is_told_with_those_after_it() -> None:
    for logged, is_elsewhere in ((5, False), (6, True), (9, True), (10, True), (11, False)):
        lines = StepLines()
        lines.take(HEIR, Report("step", {"step": 5, AGAIN: [LOST], THROUGH: 9}), 0.0)
        assert steps(lines.heard_of_end(LOST, logged, 0.1)) == [(5, is_elsewhere)]


def test_all_are_asked_that_may_have_reported_it() -> None:
    lines = StepLines()
    assert asked(lines.take(HEIR, report(5, LOST, OTHER), 0.0)) == [LOST]
    assert asked(lines.heard_of_end(LOST, 6, 0.1)) == [OTHER]
    assert steps(lines.heard_of_end(OTHER, 0, 0.2)) == [(5, True)]
    assert asked(lines.take(HEIR, report(6, LOST), 0.3)) == [LOST]  # its log may have grown since


def test_nobody_waits_for_ever() -> None:
    lines = StepLines()
    lines.take(HEIR, report(5, LOST), 1.0)
    due = lines.on_time(1.0 + HOLD_S)
    assert (steps(due), asked(due)) == ([(5, False)], [""])
    assert lines.heard_of_end(LOST, 6, 20.0) == []


def test_the_lines_of_a_worker_that_ends_are_written_before_its_node_says_what_its_log_has() -> None:
    lines = StepLines()
    lines.take(HEIR, report(5, LOST), 0.0)
    assert lines.end_of(NEXT, 0.1) == []
    assert steps(lines.end_of(HEIR, 0.1)) == [(5, False)]
    assert lines.asked == ""


def test_what_a_worker_of_this_node_has_reported_itself_comes_before_a_line_in_its_place() -> None:
    lines = StepLines()
    assert asked(lines.take(HEIR, report(5, NEXT), 0.0)) == [NEXT]
    assert steps(lines.take(NEXT, report(5), 0.1)) == [(5, False)]


def test_names_that_no_worker_can_have_name_nobody() -> None:
    for names in ("a/0#0", [7], ["x" * (MOST_CHARACTERS + 1)], [""], [LOST] * (MOST_NAMES + 1), {"a": 1}):
        lines = StepLines()
        assert steps(lines.take(HEIR, Report("step", {"step": 5, AGAIN: names}), 0.0)) == [(5, False)]


def test_a_step_that_is_reported_again_is_left_out_where_the_log_of_this_attempt_ends_with_it() -> None:
    lines, written = StepLines(), list[int]()

    def record(*reports: tuple[int, bool]) -> list[int]:
        written.clear()
        for step, again in reports:
            line = Record(HEIR, Report("step", {"step": step, **({AGAIN: []} if again else {})}))
            if not lines.has(line):
                written.append(step)
            lines.note(line.report)
        return written

    # It commits once more where it had committed only on workers that died.
    assert record((3, False), (4, False), (4, True), (5, True), (5, True), (6, False), (6, False)) == [3, 4, 5, 6, 6]
    assert lines.has(Record(HEIR, report(9), is_elsewhere=True))
    lines.begin_attempt()
    assert record((6, True), (6, True)) == [6]


def test_the_line_before_the_last_that_is_told_again_is_not_the_end_of_the_log() -> None:
    lines = StepLines()
    lines.take(HEIR, report(5, NEXT), 0.0)  # which has died, and its agent does not know yet
    (last,) = lines.take(NEXT, report(6), 0.1)
    assert isinstance(last, Record)
    lines.note(last.report)
    for line in lines.end_of(NEXT, 0.2):
        if isinstance(line, Record):
            lines.note(line.report)
    assert lines.in_log == 7
    (again,) = lines.take(HEIR, report(6, NEXT), 0.3)
    assert isinstance(again, Record)
    assert lines.has(again)


def test_steps_that_are_told_again_do_not_shorten_a_log_that_goes_on_after_them() -> None:
    for through, in_log in ((7, 7), (5, 4)):  # the second: it is of steps before the job went back to a checkpoint
        lines = StepLines(in_log=7)
        lines.note(Report("step", {"step": 3, AGAIN: [LOST], THROUGH: through}))
        assert lines.in_log == in_log


def test_what_is_told_of_the_log_changes_when_a_worker_ends_and_not_with_each_step() -> None:
    lines = StepLines()
    lines.note(report(5))
    lines.note(Report("step", {"step": "6"}))
    assert (lines.in_log, lines.logged) == (6, 0)
    lines.note_end()
    assert lines.logged == 6
    lines.begin_attempt()
    assert (lines.in_log, lines.logged) == (0, 0)


def test_nobody_is_asked_for_the_end_of_a_worker_of_this_node() -> None:
    """Its log is here; the store, through which others are asked, may be away."""
    for logged, is_elsewhere in ((6, True), (5, False)):
        lines = StepLines(in_log=logged)
        assert lines.end_of(NEXT, 0.0) == []
        found = lines.take(HEIR, report(5, NEXT), 0.1)
        assert (steps(found), asked(found)) == ([(5, is_elsewhere)], [])
        lines.take(HEIR, report(6, OTHER), 0.2)
        assert lines.asked == OTHER


def test_a_line_in_the_place_of_a_worker_of_this_node_waits_until_that_has_ended() -> None:
    lines = StepLines(in_log=5)
    assert steps(lines.take(HEIR, report(5, NEXT), 0.0)) == []
    lines.note(report(5))  # its own line was on its way
    found = lines.end_of(NEXT, 0.1)
    assert (steps(found), asked(found)) == ([(5, True)], [""])
    assert lines.asked == ""
