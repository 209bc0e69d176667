"""How far the training is, as an agent makes it of what its workers report."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elaunch.agent.output.status import MAX_CAUSE, PERIOD_S, STEPS, StatusBoard
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.status import LastRecovery, TrainingStatus
from elaunch.telemetry.events import PHASES
from elaunch.wire import Report


def step(number: int, **fields: Any) -> Report:
    given = {"generation": 2, "step": number, "loss": 2.5, "members": 4, "seconds": 0.5}
    return Report("step", given | fields)


def transition(**fields: Any) -> Report:
    phases = {"agree_s": 0.25, "resume_s": 0.5}
    given = {"cause": "a/0#0 died", "interrupted": True, "total_s": 0.75, "phases": phases}
    return Report("transition", given | fields)


@pytest.fixture
def board() -> StatusBoard:
    return StatusBoard()


def newest(board: StatusBoard) -> TrainingStatus:
    status = board.due(math.inf)
    assert status is not None
    return status


def test_nothing_is_shown_before_a_step(board: StatusBoard) -> None:
    board.take(transition(), 10.0)
    board.take(Report("decision", {}), 10.0)
    assert board.due(5.0) is None


def test_the_last_step_is_shown_at_once_and_then_every_few_seconds(board: StatusBoard) -> None:
    board.take(step(0), 10.0)
    assert board.due(5.0) == TrainingStatus(2, 0, 10.0, members=4, steps_per_s=2.0, loss=2.5)
    board.take(step(1), 10.5)
    board.take(step(2), 11.0)
    assert board.due(5.0 + PERIOD_S - 0.1) is None
    shown = board.due(5.0 + PERIOD_S)
    assert shown is not None
    assert (shown.step, shown.t) == (2, 11.0)
    assert board.due(100.0) is None, "nothing is new"


def test_it_shows_how_far_copies_of_the_state_are_behind(board: StatusBoard) -> None:
    board.take(Report("step", step(0).fields | {"copy_lag": 3}), 10.0)
    assert newest(board).copy_lag == 3
    board.take(step(1), 10.0)
    assert newest(board).copy_lag is None, "there are none"


def test_the_rate_is_that_of_the_last_steps(board: StatusBoard) -> None:
    board.take(step(0, seconds=1000.0), 10.0)
    for number in range(1, STEPS + 1):
        board.take(step(number, seconds=0.25), 10.0)
    assert newest(board).steps_per_s == 4.0


def test_a_recovery_is_shown_at_once_and_stays(board: StatusBoard) -> None:
    board.take(step(0), 10.0)
    assert board.due(5.0) is not None
    board.take(step(1, seconds=9.0), 20.0)
    board.take(transition(cause="worker a/0#0\nwas killed " + "x" * 500), 20.0)
    shown = board.due(5.1)
    assert shown is not None
    assert shown.recovery is not None
    assert (shown.step, shown.recovery.t, shown.recovery.seconds) == (1, 20.0, 0.75)
    assert shown.recovery.cause.startswith("worker a/0#0 was killed x")
    assert len(shown.recovery.cause) == MAX_CAUSE
    assert dict(shown.recovery.phases) == dict.fromkeys(PHASES, 0.0) | {"agree": 0.25, "resume": 0.5}
    board.take(transition(cause="b joins", interrupted=False), 30.0)
    board.take(step(2), 30.0)
    assert newest(board).recovery == shown.recovery, "a planned change is no recovery"
    assert newest_rate(board) == 2.0, "the step that was repeated does not count"


def newest_rate(board: StatusBoard) -> float:
    board.take(step(3), 40.0)
    return newest(board).steps_per_s


def test_a_job_that_goes_back_to_a_checkpoint_has_recovered(board: StatusBoard) -> None:
    board.take(Report("resume", {"step": 400, "seconds": 1.5}), 10.0)
    board.take(step(400), 11.0)
    assert newest(board).recovery == LastRecovery("resumed from the checkpoint after 400 steps", 10.0, 1.5)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_finite_number_is_told(board: StatusBoard, loss: float) -> None:
    board.take(step(0, loss=loss), 10.0)
    status = newest(board)
    assert (status.loss, status.has_diverged) == (None, True)
    assert from_json(TrainingStatus, to_json(status)) == status


@pytest.mark.parametrize("odd", [None, "x", True, [1], {}, 10**400, -5, 1 << 63, math.nan])
def test_whatever_a_worker_reports_can_be_read_again(board: StatusBoard, odd: object) -> None:
    board.take(step(0, **dict.fromkeys(("generation", "step", "loss", "members", "seconds"), odd)), 10.0)
    board.take(transition(cause=odd, total_s=odd, phases={"plan_s": odd} if type(odd) is not dict else odd), 11.0)
    status = newest(board)
    assert from_json(TrainingStatus, to_json(status)) == status
