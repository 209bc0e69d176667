"""What a worker tells of a step as executed: the fields of the event, their bounds, and how a trace draws it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elaunch.cli import run
from elaunch.plan.build import symmetric
from elaunch.plan.executed import (
    MOST_ACTIONS,
    MOST_PHASES,
    ExecutedAction,
    ExecutedPhase,
    ExecutedStep,
    digest_of_plan,
)
from elaunch.plan.schedule import schedule
from elaunch.plan.tiling import Plan
from elaunch.plan.timeline import Action
from elaunch.telemetry.trace import JOB, NOTES, trace_of
from elaunch.telemetry.ui.history import JobHistory
from tests.unit.test_trace import check_format, named, spans

MOST_BYTES = 40 << 10
BEGIN_T = 1_795_205_943.5
PLAN = symmetric(["a/0#0", "b/0#0"], 4, 8, 2, pp=2)


def executed(plan: Plan, worker: str, step: int = 7, begin_t: float = BEGIN_T, left_out: int = 0) -> ExecutedStep:
    """A worker that waits for 1 ms, then computes for 4 ms, of which the last one sends, in each of its actions."""
    actions = [
        ExecutedAction(action, *(place * 5e-3 + moment_s for moment_s in (0.0, 1e-3, 4e-3, 5e-3, 5e-3)))
        for place, action in enumerate(schedule(plan).by_worker[worker])
    ]
    phases = [ExecutedPhase("sums", actions[-1].ends_s, actions[-1].ends_s + 2e-3)]
    return ExecutedStep(worker, step, digest_of_plan(plan), begin_t, actions, phases, left_out)


def event_of(kind: str, t: float, generation: int = 3, **fields: Any) -> dict[str, Any]:
    return {"v": 2, "t": t, "kind": kind, "node": "a", "generation": generation, **fields}


def log_of(plan: Plan, told: Sequence[ExecutedStep], generation: int = 3) -> list[dict[str, Any]]:
    """A decision, what workers have told of the step after it, and three steps."""
    decision = event_of("decision", BEGIN_T - 1, generation, policy="given", plan=str(plan))
    steps = [event_of("step", BEGIN_T + n, generation, step=6 + n, seconds=1.0, samples=8) for n in (1, 2, 3)]
    actions = [event_of("actions", BEGIN_T + 1, generation, **json.loads(json.dumps(one.fields()))) for one in told]
    return sorted([decision, *actions, *steps], key=lambda event: float(event["t"]))


class TestFields:
    def test_what_is_told_is_read_again_to_the_microsecond(self) -> None:
        told = executed(PLAN, "b/0#0")
        fields = json.loads(json.dumps(told.fields()))
        assert fields["actions_us"][1] == [str(told.actions[1].action), 5000, 6000, 9000, 10000, 10000]
        assert fields["phases_us"] == [["sums", 40000, 42000]]
        found = ExecutedStep.from_fields(fields)
        assert found is not None
        assert found.fields() == told.fields()
        assert [one.action for one in found.actions] == list(schedule(PLAN).by_worker["b/0#0"])

    def test_moments_count_from_the_first_one_whatever_clock_they_are_of(self) -> None:
        moments = 50.0, 51.0, 52.0, 52.5, 53.0
        actions, phases = [ExecutedAction(Action("F", 0, 0), *moments)], [ExecutedPhase("sums", 53.0, 54.0)]
        told = ExecutedStep.of("a/0#0", 1, "", actions, phases, 1000.0)
        assert told.begin_t == 1050.0
        assert told.actions[0][1:] == (0.0, 1.0, 2.0, 2.5, 3.0)
        assert told.phases == [ExecutedPhase("sums", 3.0, 4.0)]
        assert ExecutedStep.of("a/0#0", 1, "", [], phases, 1000.0).begin_t == 1053.0  # idle under the plan

    def test_an_event_is_bounded_whatever_a_worker_did(self) -> None:
        late_s = 1e30
        action = ExecutedAction(Action("F", 4095, 999_999), *[late_s] * 5)
        phase = ExecutedPhase("p" * 10_000, late_s, late_s)
        told = ExecutedStep("n" * 100 + "/7#3", 1 << 40, "0" * 8, BEGIN_T, [action] * 100_000, [phase] * 1000)
        fields = told.fields()
        assert len(json.dumps(fields)) < MOST_BYTES
        assert len(fields["actions_us"]) == MOST_ACTIONS
        assert fields["left_out"] == 100_000 - MOST_ACTIONS
        assert len(fields["phases_us"]) == MOST_PHASES
        found = ExecutedStep.from_fields(fields)
        assert found is not None
        assert found.fields() == fields

    def test_plans_are_told_apart_by_what_a_log_has_of_them(self) -> None:
        other = symmetric(PLAN.workers, 4, 8, 2, dp=2)
        assert digest_of_plan(PLAN) != digest_of_plan(other)
        assert digest_of_plan(Plan.parse(str(PLAN))) == digest_of_plan(PLAN)

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("worker", 3),
            ("plan", None),
            ("step", -1),
            ("step", "7"),
            ("begin_t", "soon"),
            ("begin_t", -1.0),
            ("begin_t", 1e300),
            ("left_out", True),
            ("actions_us", [["F0.0", 0, 1, 2, 3]]),
            ("actions_us", [["F0.0", 0, 1, 2, 3, 2]]),
            ("actions_us", [["F0.0", -1, 1, 2, 3, 4]]),
            ("actions_us", [["F0.0", 0.0, 1, 2, 3, 4]]),
            ("actions_us", [["X0.0", 0, 1, 2, 3, 4]]),
            ("actions_us", [["F0", 0, 1, 2, 3, 4]]),
            ("actions_us", ["F0.0"]),
            ("phases_us", [["sums", 0]]),
            ("phases_us", [["", 0, 1]]),
            ("phases_us", [["sums", 2, 1]]),
            ("phases_us", [{}]),
        ],
    )
    def test_what_no_worker_tells_is_none(self, field: str, value: object) -> None:
        fields = executed(PLAN, "a/0#0").fields()
        assert ExecutedStep.from_fields(fields) is not None
        assert ExecutedStep.from_fields({**fields, field: value}) is None


class TestTrace:
    def test_actions_are_drawn_as_executed_with_what_each_worker_waited_for_and_sent(self) -> None:
        trace = trace_of(log_of(PLAN, [executed(PLAN, worker) for worker in PLAN.workers]))
        check_format(trace)
        pid, _ = named(trace, "process_name")["executed schedule of generation 3, step 7"]
        assert not [name for name in named(trace, "process_name") if name.startswith("planned")]
        for tid, worker in enumerate(PLAN.workers, start=1):
            drawn = spans(trace, pid, tid)
            order = schedule(PLAN).by_worker[worker]
            names = [name for one in order for name in (f"receive for {one}", str(one), f"send of {one}")]
            assert [one["name"] for one in drawn] == [*names, "sums"]
            assert [one["dur"] for one in drawn[:3]] == [1000, 4000, 1000]
            assert drawn[0]["ts"] == round((BEGIN_T - trace["otherData"]["begin"]) * 1e6)
            assert drawn[3]["args"] == {
                "node": worker[0],
                "step": 7,
                "tile": order[1].tile,
                "micro_batch": order[1].micro_batch,
            }
        assert not [one for one in trace["traceEvents"] if one["name"].startswith("actions on")]
        assert [one for one in trace["traceEvents"] if (one["pid"], one["tid"]) == (JOB, NOTES)]  # the decision

    def test_the_trace_begins_with_what_was_done_first(self) -> None:
        (decision, *_), told = log_of(PLAN, []), executed(PLAN, "a/0#0", begin_t=BEGIN_T - 5).fields()
        trace = trace_of([decision, event_of("actions", BEGIN_T, **told)])
        assert trace["otherData"]["begin"] == BEGIN_T - 5

    def test_a_plan_of_which_the_log_has_no_step_as_executed_is_drawn_as_planned(self) -> None:
        other = symmetric(PLAN.workers, 4, 8, 2, dp=2)
        told = [executed(PLAN, worker) for worker in PLAN.workers]
        events = [*log_of(PLAN, told), event_of("decision", BEGIN_T, plan=str(other)), *log_of(PLAN, [], generation=4)]
        trace = trace_of(sorted(events, key=lambda event: float(event["t"])))
        check_format(trace)
        assert {name for name in named(trace, "process_name") if "schedule" in name} == {
            "executed schedule of generation 3, step 7",
            "planned schedule of generation 3, scaled to step 8",
            "planned schedule of generation 4, scaled to step 8",
        }

    @pytest.mark.parametrize(
        ("nodes", "some", "tracks"),
        [
            ("ab", "", {"a/0#0": 1, "b/0#0": 2}),
            ("a", ", 1 of 2 workers", {"a/0#0": 1}),
            ("b", ", 1 of ? workers", {"b/0#0": 1}),  # the decision is in the other log
        ],
    )
    def test_each_log_has_the_workers_of_its_node(
        self, nodes: str, some: str, tracks: dict[str, int], tmp_path: Path
    ) -> None:
        told = [executed(PLAN, worker, begin_t=BEGIN_T + place) for place, worker in enumerate(PLAN.workers)]
        for node in nodes:
            lines = [
                {**event, "node": node}
                for event in log_of(PLAN, told)
                if (event["worker"][0] == node if event["kind"] == "actions" else node == "a")
            ]
            (tmp_path / node).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        target = tmp_path / "trace.json"
        assert run.main(["trace", *(str(tmp_path / node) for node in nodes), "-o", str(target)]) == 0
        trace = json.loads(target.read_text())
        check_format(trace)
        ((name, (pid, _)),) = [one for one in named(trace, "process_name").items() if "schedule" in one[0]]
        assert name == f"executed schedule of generation 3, step 7{some}"
        found = {name: track for name, track in named(trace, "thread_name").items() if track[0] == pid}
        assert found == {worker: (pid, tid) for worker, tid in tracks.items()}
        begins = [spans(trace, pid, tid)[0]["ts"] / 1e6 for tid in tracks.values()]
        assert max(begins) - min(begins) == pytest.approx(len(nodes) - 1)  # by the clock of each host

    def test_the_step_that_most_workers_have_told_of_is_drawn(self) -> None:
        told = [executed(PLAN, "b/0#0", step=7), *(executed(PLAN, worker, step=8) for worker in PLAN.workers)]
        names = named(trace_of(log_of(PLAN, told)), "process_name")
        assert "executed schedule of generation 3, step 8" in names

    def test_that_actions_are_missing_is_said_behind_the_last_one(self) -> None:
        trace = trace_of(log_of(PLAN, [executed(PLAN, "a/0#0", left_out=12)]))
        check_format(trace)
        (note,) = [one for one in trace["traceEvents"] if one["name"] == "12 more actions are not in the log"]
        last = max((one for one in spans(trace, note["pid"], 1) if one["name"] != "sums"), key=lambda one: one["ts"])
        assert note["ts"] == last["ts"] + last["dur"]

    def test_what_is_no_step_of_a_worker_is_passed_over(self) -> None:
        fields = {**executed(PLAN, "a/0#0").fields(), "actions_us": [["F0.0", 3, 2, 1, 0, 0]]}
        trace = trace_of([*log_of(PLAN, []), event_of("actions", BEGIN_T + 9, **fields)])
        assert "planned schedule of generation 3, scaled to step 8" in named(trace, "process_name")


def test_the_page_of_a_job_makes_no_notes_of_them() -> None:
    history = JobHistory("run-17")
    for event in log_of(PLAN, [executed(PLAN, worker) for worker in PLAN.workers]):
        history.take(event)
    assert history.document()["notes"] == []
