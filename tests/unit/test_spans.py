"""Spans of recoveries, from the events of a real job, and when they are asked for."""

from __future__ import annotations

from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from elaunch.agent.output.telemetry import asks_for_spans
from elaunch.telemetry.events import PHASES
from elaunch.telemetry.spans import MOST_NOTES, RecoverySpans
from tests.unit.test_metrics import logged


def spans_of(events: list[dict[str, Any]]) -> tuple[ReadableSpan, ...]:
    memory, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(memory))
    spans = RecoverySpans(provider.get_tracer("test"))
    for event in events:
        spans.take(event)
    provider.shutdown()
    return memory.get_finished_spans()


def test_a_recovery_is_a_span_from_its_cause_to_the_commit_with_its_phases_and_what_led_to_it() -> None:
    events = logged()
    (recovery,) = [event for event in events if event["kind"] == "transition" and event["interrupted"]]
    spans = spans_of(events)
    (whole,) = [span for span in spans if span.name == "recovery"]
    assert len([span for span in spans if span.name == "change"]) == 2
    assert whole.parent is None
    assert whole.end_time is not None
    assert whole.start_time is not None
    assert whole.context is not None
    assert whole.end_time / 1e9 == pytest.approx(recovery["t"], abs=1e-6)
    assert (whole.end_time - whole.start_time) / 1e9 == pytest.approx(recovery["total_s"], abs=1e-6)
    assert whole.attributes == {
        "elaunch.cause": "worker node0/1#0 was killed by SIGKILL",
        "elaunch.interrupted": True,
        "elaunch.generation": 3,
        "elaunch.members": 3,
        "elaunch.moved_bytes": recovery["bytes_moved"],
        "elaunch.moved_over": "links",
    }
    assert [note.name for note in whole.events] == ["worker_exited", "decision"]
    died, chose = (dict(note.attributes or {}) for note in whole.events)
    assert (died["elaunch.worker"], died["elaunch.signal"]) == ("node0/1#0", 9)
    assert chose["elaunch.policy"] == "reparallelize"

    phases = [span for span in spans if span.parent is not None and span.parent.span_id == whole.context.span_id]
    assert [span.name for span in phases] == [name for name in PHASES if recovery["phases"][f"{name}_s"] > 0]
    assert all(span.context and span.context.trace_id == whole.context.trace_id for span in phases)
    at_ns = whole.start_time
    for span in phases:
        assert span.start_time is not None
        assert span.end_time is not None
        assert abs(span.start_time - at_ns) < 1000
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(recovery["phases"][f"{span.name}_s"], abs=1e-6)
        at_ns = span.end_time
    assert at_ns <= whole.end_time + 10_000


def test_odd_reports_make_spans_too_and_notes_have_a_bound() -> None:
    noise: list[dict[str, Any]] = [{"kind": "health", "t": 1.0, "verdict": "report", "evidence": {}}] * (MOST_NOTES + 9)
    odd = {"kind": "transition", "t": None, "total_s": "x", "phases": 3, "cause": None, "bytes_moved": -1}
    (span,) = spans_of([*noise, odd])
    assert span.name == "change"
    assert len(span.events) <= MOST_NOTES


@pytest.mark.parametrize(
    "variables, asked",
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "console,otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
        ({"OTEL_SDK_DISABLED": "TRUE", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_the_variables_of_opentelemetry_say_whether_spans_are_sent(variables: dict[str, str], asked: bool) -> None:
    assert asks_for_spans(variables) is asked
