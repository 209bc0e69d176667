"""OpenTelemetry spans of each transition: one span from its cause to the next commit, and one of each phase in it."""

from __future__ import annotations

import importlib
import os
from collections import deque
from collections.abc import Mapping

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, Tracer, set_span_in_context

from elaunch import __version__, threads
from elaunch.telemetry.events import Event, count, phases_of, seconds

MOST_NOTES = 256
"""Events that one span has at most; the oldest go first."""

NOTED = ("worker_exited", "decision", "hang", "health", "cut", "resume", "restored", "checkpoint_damaged")
"""Kinds of events that stand in the span of the transition that follows them."""

END_S = 2.0
"""How long an agent that ends waits until its last spans have been sent."""


def export_spans(job: str, node: str) -> SpanSender:
    """Makes spans of events, and sends them as the variables OTEL_* say.

    Args:
        job: its name.
        node: name of this node.

    Raises:
        ModuleNotFoundError: the exporter for OTEL_EXPORTER_OTLP_PROTOCOL is not there.
    """
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next((value for name in names if (value := os.environ.get(name))), "http/protobuf")
    library = f"opentelemetry.exporter.otlp.proto.{'grpc' if protocol == 'grpc' else 'http'}.trace_exporter"
    exporter: SpanExporter = importlib.import_module(library).OTLPSpanExporter()
    given = {"service.name": os.environ.get("OTEL_SERVICE_NAME") or "elaunch", "service.version": __version__}
    resource = Resource.create(given | {"elaunch.rdzv_id": job, "elaunch.node": node})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return SpanSender(provider)


class RecoverySpans:
    """Makes spans of events, by a tracer."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._notes: deque[Event] = deque(maxlen=MOST_NOTES)
        self._members = 0

    def take(self, event: Event) -> None:
        """Takes an event; a transition makes spans, with what was noted since the one before."""
        kind = event.get("kind")
        if kind == "generation":
            workers = event.get("workers")
            self._members = len(workers) if isinstance(workers, list) else 0
        elif kind in NOTED:
            self._notes.append(event)
        elif kind == "transition":
            self._make(event)
            self._notes.clear()

    def _make(self, event: Event) -> None:
        end_t, interrupted = seconds(event.get("t")), event.get("interrupted") is True
        begin_t = end_t - seconds(event.get("total_s"))
        whole = self._tracer.start_span(
            "recovery" if interrupted else "change",
            start_time=_ns(begin_t),
            attributes={
                "elaunch.cause": str(event.get("cause")),
                "elaunch.interrupted": interrupted,
                "elaunch.generation": count(event.get("generation")),
                "elaunch.members": self._members,
                "elaunch.moved_bytes": count(event.get("bytes_moved")),
                "elaunch.moved_over": str(event.get("moved_over") or "links"),
            },
        )
        for note in self._notes:
            whole.add_event(str(note["kind"]), _attributes(note), _ns(seconds(note.get("t"))))
        self._make_phases(whole, event, begin_t)
        whole.end(_ns(end_t))

    def _make_phases(self, whole: Span, event: Event, begin_t: float) -> None:
        within, at_t = set_span_in_context(whole), begin_t
        for phase, took_s in phases_of(event).items():
            if took_s:
                span = self._tracer.start_span(phase, context=within, start_time=_ns(at_t))
                at_t += took_s
                span.end(_ns(at_t))


class SpanSender(RecoverySpans):
    """Makes spans, and has a provider send them in a thread of its own."""

    def __init__(self, provider: TracerProvider) -> None:
        super().__init__(provider.get_tracer("elaunch", __version__))
        self._provider = provider

    def close(self) -> None:
        """Sends what has not been sent, for a moment: who collects it may be away."""
        ending = threads.start("elaunch-spans", self._provider.shutdown, lambda error: None)
        ending.join(END_S)


def _attributes(event: Event) -> Mapping[str, str | bool | int | float]:
    """Returns the fields of an event that a span can have."""
    return {
        f"elaunch.{name}": value
        for name, value in event.items()
        if name not in ("v", "t", "kind", "generation") and isinstance(value, str | bool | int | float)
    }


def _ns(t: float) -> int:
    return int(t * 1e9)
