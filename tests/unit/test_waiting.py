"""Lines about workers that wait, and the pace of all such lines."""

from __future__ import annotations

import itertools

import pytest

from elaunch.detect.heartbeat import Awaited, HeartbeatReading, Phase, Still
from elaunch.detect.waiting import LONGEST_PAUSE_S, WorkerWaits
from elaunch.waits import LONGEST_PAUSE_S as LONGEST
from elaunch.waits import WAITED_S, Pace, Watched

BEGIN_S = 100.0


def reading(phase: Phase = Phase.STEP, waits: bool = True, operation: int = 129, others: int = 0) -> HeartbeatReading:
    awaited = Awaited(("a/0#0",), others, 3, operation)
    return HeartbeatReading(7, 7, 7, 8, 0.0, Still.MOVES, 0.0, 25, 0.0, 9, phase, 0.0, waits, awaited)


def lines(waits: WorkerWaits, seconds: float, *readings: HeartbeatReading) -> list[tuple[float, str]]:
    """What is said if workers show this for a while, which is looked at four times a second."""
    found = []
    for tick in range(int(4 * seconds) + 1):
        line = waits.look(BEGIN_S + tick / 4, {f"b/{rank}#0": one for rank, one in enumerate(readings)})
        if line:
            found.append((tick / 4, line))
    return found


class TestWorkers:
    def test_a_wait_is_told_after_ten_seconds_and_then_ever_more_rarely(self) -> None:
        told = lines(WorkerWaits(), 400.0, reading())
        assert told[0] == (10.0, "worker b/0#0 has waited 10 s for a/0#0, in step 25, operation 129")
        times = [moment for moment, _ in told]
        assert times[1:4] == [30.0, 70.0, 130.0]
        assert max(after - before for before, after in itertools.pairwise(times)) == LONGEST_PAUSE_S

    def test_a_wait_that_ends_before_is_not(self) -> None:
        waits = WorkerWaits()
        for tick in range(400):
            assert waits.look(BEGIN_S + tick / 4, {"b/0#0": reading(operation=tick // 39)}) == ""

    def test_workers_that_compute_are_not_told_of(self) -> None:
        assert lines(WorkerWaits(), 100.0, reading(waits=False), reading(Phase.ENDED)) == []

    def test_the_next_wait_is_told_of_as_soon_as_the_first(self) -> None:
        waits = WorkerWaits()
        lines(waits, 100.0, reading())
        lines(waits, 1.0, reading(waits=False))
        assert [moment for moment, _ in lines(waits, 15.0, reading(operation=130))] == [10.0]

    def test_one_line_tells_of_all_workers_of_a_node(self) -> None:
        ((_, line),) = lines(WorkerWaits(), 12.0, reading(others=4), reading(), reading(Phase.AGREEING))
        assert line == (
            "worker b/0#0 has waited 10 s for a/0#0 and 4 more, in step 25, operation 129; so have 2 more of this "
            "node, for this or another reason"
        )

    def test_in_first_steps_the_line_says_when_that_ends_and_by_which_setting(self) -> None:
        waits = WorkerWaits()
        told = [waits.look(BEGIN_S + second, {"b/0#0": reading()}, 1800.0) for second in range(11)]
        assert told[-1] == (
            "worker b/0#0 has waited 10 s for a/0#0, in step 25, operation 129; in the first 10 steps, whoever makes "
            "no progress is killed after 1800 s (--rdzv-conf first_steps_timeout=SECONDS)"
        )
        waits = WorkerWaits()
        told = [waits.look(BEGIN_S + second, {"b/0#0": reading(Phase.AGREEING, False)}, 1800.0) for second in range(11)]
        assert told[-1].endswith("for the job to agree on its members"), "it waits for no worker"

    @pytest.mark.parametrize(
        ("phase", "waits", "text"),
        [
            (Phase.AGREEING, False, "for the job to agree on its members"),
            (Phase.LOADING, True, "for a/0#0, before its first step, operation 129"),
            (Phase.CHANGING, True, "for a/0#0, in a change of members or plan, operation 129"),
            (Phase.SAVING, True, "for a/0#0, which save the state, too, after 25 steps"),
            (Phase.SAVING, False, "for its own checkpoint to be on the disk, after 25 steps"),
        ],
    )
    def test_the_line_says_in_what(self, phase: Phase, waits: bool, text: str) -> None:
        ((_, line),) = lines(WorkerWaits(), 12.0, reading(phase, waits))
        assert line == f"worker b/0#0 has waited 10 s {text}"


class TestPace:
    def test_pauses_double_up_to_the_longest(self) -> None:
        pace = Pace.begin(BEGIN_S)
        told = [second for second in range(60) if pace.is_due(BEGIN_S + second)]
        assert told == [3, 9, 19, 29, 39, 49, 59]
        assert WAITED_S < LONGEST == 10.0

    def test_a_wait_that_begins_anew_has_its_first_line_as_late_as_the_first(self) -> None:
        pace = Pace.begin(BEGIN_S, 5.0, 100.0)
        told = [(second, pace.has_told) for second in range(20) if pace.is_due(BEGIN_S + second)]
        assert told == [(5, True), (15, True)]
        pace.reset(BEGIN_S + 20)
        assert [second for second in range(20, 40) if pace.is_due(BEGIN_S + second)] == [25, 35]

    def test_a_loop_that_sleeps_says_what_it_waits_for_and_how_long_still(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        said: list[str] = []
        now_s = BEGIN_S
        monkeypatch.setattr("elaunch.waits.time.monotonic", lambda: now_s)
        watched = Watched(said.append)
        for _ in range(10):
            watched.tell("the rendezvous", BEGIN_S + 60.0 - now_s)
            now_s += 1.0
        watched.tell("the rendezvous")
        assert said == ["waiting for 3 s, 57 s left: the rendezvous", "waiting for 9 s, 51 s left: the rendezvous"]
