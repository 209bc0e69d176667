"""The event log: JSON lines that are appended whole."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from elaunch.agent.output.events import EventLog
from elaunch.agent.output.journal import Journal
from elaunch.wire import AGAIN, THROUGH, Report


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_has_the_common_fields_and_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), "a")
    log.write("generation", 3, 12.5, workers=["a/0#0"], cause="start")
    log.close()
    assert read(path) == [
        {"v": 2, "t": 12.5, "kind": "generation", "node": "a", "generation": 3, "workers": ["a/0#0"], "cause": "start"}
    ]


def test_without_a_time_it_is_now_in_unix_seconds(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), "a")
    before = time.time()
    log.write("step", 1)
    after = time.time()
    log.close()
    assert before <= read(path)[0]["t"] <= after


def test_the_name_of_the_node_may_stand_in_the_path(tmp_path: Path) -> None:
    for node in ("a", "b"):
        log = EventLog(str(tmp_path / "events-%n.jsonl"), node)
        log.write("step", 1)
        log.close()
    assert [event["node"] for event in read(tmp_path / "events-b.jsonl")] == ["b"]


def test_an_existing_log_is_continued_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    logs = [EventLog(str(path), node) for node in "ab"]
    for number in range(20):
        logs[number % 2].write("step", 1, step=number)
    for log in logs:
        log.close()
    assert [event["step"] for event in read(path)] == list(range(20))


def test_a_line_is_readable_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), "a")
    log.write("step", 1)
    assert len(read(path)) == 1
    log.close()


@pytest.mark.parametrize("path", [None, ""])
def test_without_a_path_nothing_is_written(path: str | None) -> None:
    log = EventLog(path, "a")
    log.write("step", 1)
    log.close()


def test_nothing_is_written_after_close(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(str(path), "a")
    log.close()
    log.close()
    log.write("step", 1)
    assert read(path) == []


def test_a_file_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        EventLog(str(tmp_path / "none" / "events.jsonl"), "a")


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path / "events"), "a")
    log.write("step", 1, loss=float("nan"), phases={"detect_s": float("inf")}, seconds=1.5)
    log.close()
    event = json.loads((tmp_path / "events").read_text(), parse_constant=pytest.fail)
    assert event["loss"] is None
    assert event["phases"] == {"detect_s": None}
    assert event["seconds"] == 1.5


def test_a_full_disk_ends_the_log_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog("/dev/full", "a")
    log.write("step", 1, loss=1.0)
    log.write("step", 1, loss=1.0)
    assert capsys.readouterr().err == "[elaunch a] the event log ends here: No space left on device\n"


def test_on_request_events_go_to_standard_error_with_or_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(None, "a", console=True)
    log.write("slow", 3, 1.5, worker="a/0#0")
    log.close()
    written = capsys.readouterr().err
    assert json.loads(written) == {"v": 2, "t": 1.5, "kind": "slow", "node": "a", "generation": 3, "worker": "a/0#0"}
    assert written.endswith("}\n")


def test_an_event_does_not_say_who_else_may_have_reported_a_step(tmp_path: Path) -> None:
    path = tmp_path / "events"
    journal = Journal("a", EventLog(str(path), "a"), lambda: 2)
    journal.forward(Report("step", {"step": 3, AGAIN: ["b/0#0"], THROUGH: 5}))
    journal.close()
    (event,) = read(path)
    assert event["step"] == 3
    assert not {AGAIN, THROUGH} & event.keys()
