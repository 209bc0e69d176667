"""Traces of jobs, from their event logs: what they show, and that Perfetto can read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elaunch.cli import run
from elaunch.plan.schedule import schedule
from elaunch.plan.tiling import Plan
from elaunch.telemetry.log import read_events
from elaunch.telemetry.trace import JOB, RECOVERIES, STEPS, trace_of

LOG = Path(__file__).parent.parent / "data" / "kill.jsonl"

Trace = dict[str, Any]


def check_format(trace: Trace) -> None:
    """The rules of the trace event format, for the kinds of parts that are used here."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    names: dict[tuple[int, int], str] = {}
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], list[Trace]] = {}
    for one in trace["traceEvents"]:
        assert one["ph"] in {"X", "i", "C", "M"}
        assert isinstance(one["name"], str)
        assert one["name"]
        assert all(type(one[field]) is int and one[field] >= 0 for field in ("pid", "tid", "ts"))
        assert isinstance(one["args"], dict)
        track = one["pid"], one["tid"]
        match one["ph"]:
            case "X":
                assert type(one["dur"]) is int
                assert one["dur"] >= 0
                tracks.setdefault(track, []).append(one)
            case "i":
                assert one["s"] == "t"
                tracks.setdefault(track, [])
            case "C":
                assert all(isinstance(value, int | float) for value in one["args"].values())
            case "M" if one["name"] == "process_name":
                processes[one["pid"]] = one["args"]["name"]
            case "M":
                names[track] = one["args"]["name"]
    assert tracks.keys() <= names.keys()
    assert {pid for pid, _ in tracks} <= processes.keys()
    for track, spans in tracks.items():
        around: list[Trace] = []
        for span in sorted(spans, key=lambda one: (one["ts"], -one["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= span["ts"]:
                around.pop()
            assert not around or span["ts"] + span["dur"] <= around[-1]["ts"] + around[-1]["dur"], (names[track], span)
            around.append(span)


def spans(trace: Trace, pid: int, tid: int) -> list[Trace]:
    return [one for one in trace["traceEvents"] if (one["ph"], one["pid"], one["tid"]) == ("X", pid, tid)]


def named(trace: Trace, kind: str) -> dict[str, tuple[int, int]]:
    """Pid and tid by the name of a process or a track."""
    found = [one for one in trace["traceEvents"] if one["ph"] == "M" and one["name"] == kind]
    return {one["args"]["name"]: (one["pid"], one["tid"]) for one in found}


@pytest.fixture(scope="module")
def events() -> list[Trace]:
    return read_events([str(LOG)])


@pytest.fixture(scope="module")
def trace(events: list[Trace]) -> Trace:
    return trace_of(events)


def test_the_trace_of_a_job_with_a_kill_has_the_format_that_perfetto_reads(trace: Trace) -> None:
    check_format(trace)


def test_each_step_is_drawn_once_for_as_long_as_it_took(events: list[Trace], trace: Trace) -> None:
    steps = [event for event in events if event["kind"] == "step"]
    drawn = spans(trace, JOB, STEPS)
    assert [one["name"] for one in drawn] == [f"step {event['step']}" for event in steps]
    # A line may be written a few milliseconds late; then the next step is drawn from there on.
    assert all(one["dur"] / 1e6 <= event["seconds"] + 1e-5 for one, event in zip(drawn, steps))
    assert sum(one["dur"] / 1e6 for one in drawn) == pytest.approx(sum(event["seconds"] for event in steps), rel=0.03)


def test_a_recovery_is_drawn_with_its_phases_for_the_job_and_on_every_member(events: list[Trace], trace: Trace) -> None:
    (recovery,) = [event for event in events if event["kind"] == "transition" and event["interrupted"]]
    (outer,) = [one for one in spans(trace, JOB, RECOVERIES) if one["name"].startswith("recovery: ")]
    assert outer["name"] == "recovery: worker node0/1#0 was killed by SIGKILL"
    assert outer["dur"] / 1e6 == pytest.approx(recovery["total_s"], abs=1e-5)
    inner = [one for one in spans(trace, JOB, RECOVERIES) if outer["ts"] <= one["ts"] < outer["ts"] + outer["dur"]]
    assert {one["name"]: pytest.approx(one["dur"] / 1e6, abs=1e-5) for one in inner if one is not outer} == {
        name.removesuffix("_s"): took_s for name, took_s in recovery["phases"].items() if took_s
    }
    tracks = named(trace, "thread_name")
    for slot in ("node0/0", "node0/2", "node0/3"):
        assert "recovery" in [one["name"] for one in spans(trace, *tracks[slot])]
    killed = [one["name"] for one in spans(trace, *tracks["node0/1"])]
    assert killed.count("node0/1#0") == killed.count("node0/1#1") == 1
    assert "recovery" not in killed
    assert {"detect", "agree", "transfer", "resume"} <= {one["name"] for one in spans(trace, *tracks["node0/0"])}


def test_the_schedule_of_each_plan_is_drawn_over_one_of_its_steps(events: list[Trace], trace: Trace) -> None:
    decisions = [event for event in events if event["kind"] == "decision"]
    processes = {name: pid for name, (pid, _) in named(trace, "process_name").items() if name.startswith("planned")}
    assert len(processes) == len(decisions) == 3
    for (name, pid), decision in zip(processes.items(), decisions):
        assert name.startswith(f"planned schedule of generation {decision['generation']}, scaled to step ")
        plan = Plan.parse(decision["plan"])
        actions = schedule(plan).by_worker
        for tid, worker in enumerate(plan.workers, start=1):
            assert [one["name"] for one in spans(trace, pid, tid)] == [str(action) for action in actions[worker]]
        (step,) = [one for one in spans(trace, JOB, STEPS) if one["name"] == name.rpartition("scaled to ")[2]]
        drawn = [one for one in trace["traceEvents"] if one["pid"] == pid and one["ph"] == "X"]
        assert min(one["ts"] for one in drawn) == pytest.approx(step["ts"], abs=50_000)
        assert max(one["ts"] + one["dur"] for one in drawn) == pytest.approx(step["ts"] + step["dur"], abs=50_000)


def test_logs_of_several_nodes_that_began_late_or_were_cut_off_are_one_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = LOG.read_text().splitlines()
    late = [line.replace('"node":"node0"', '"node":"b"') for line in lines if "generation" in line][40:]
    (tmp_path / "a").write_text("\n".join(lines[:60]) + "\n" + lines[60][:20])
    (tmp_path / "b").write_text("\n".join(late) + "\n\n")
    target = tmp_path / "trace.json"
    assert run.main(["trace", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(target)]) == 0
    made = json.loads(target.read_text())
    check_format(made)
    assert {"job", "node node0", "node b"} <= named(made, "process_name").keys()
    assert "open it at https://ui.perfetto.dev" in capsys.readouterr().err
    (tmp_path / "empty").touch()
    assert run.main(["trace", str(tmp_path / "empty")]) == 0
    assert json.loads(capsys.readouterr().out)["traceEvents"] == []


@pytest.mark.parametrize("text", ["{}\n", "x\n", '{"kind":"step","node":"a","t":"soon"}\n', "[1]\n"])
def test_what_is_no_event_log_is_refused_with_its_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_text(LOG.read_text() + text)
    n_lines = len(LOG.read_text().splitlines()) + 1
    assert run.main(["trace", str(path)]) == 2
    assert f"{path}:{n_lines} is no event; `--events` writes the logs" in capsys.readouterr().err
    assert run.main(["trace", str(tmp_path / "none")]) == 2
    assert run.main(["trace", str(LOG), "-o", str(tmp_path / "none" / "trace")]) == 1
