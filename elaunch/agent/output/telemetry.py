"""What this agent shows to monitoring: nothing, unless the settings ask for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from elaunch.errors import LaunchError
from elaunch.telemetry.events import EventListener
from elaunch.telemetry.extras import is_missing

if TYPE_CHECKING:
    from elaunch.agent.config import AgentConfig
    from elaunch.rendezvous.store import Store
    from elaunch.telemetry.exporter import MetricsExporter
    from elaunch.telemetry.node_view import NodeView
    from elaunch.telemetry.spans import SpanSender
    from elaunch.telemetry.ui.server import JobPage, UiListener

METRICS_MISSING = "--metrics-port needs the package prometheus-client: pip install 'elaunch[metrics]'"
SPANS_MISSING = "OTEL_* asks for spans, which need packages that are not there: pip install 'elaunch[otel]'"

UI_HOLD_S = 0.5
"""The page is made anew so often at most, however many look: that takes the agent some milliseconds."""


def asks_for_spans(environ: Mapping[str, str]) -> bool:
    """Returns whether the variables of OpenTelemetry ask for traces to be exported by OTLP."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporters:
        return "otlp" in [name.strip() for name in exporters.split(",")]
    return bool(environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"))


class Telemetry:
    """The metrics, the page and the spans of an agent.

    It starts threads: make it when everything that forks has been forked.

    Args:
        config: the settings.
        say: tells the user.

    Raises:
        LaunchError: what the settings ask for cannot be had.
    """

    def __init__(self, config: AgentConfig, say: Callable[[str], None]) -> None:
        self._metrics: MetricsExporter | None = None
        self._spans: SpanSender | None = None
        self._page: JobPage | None = None
        self._ui: UiListener | None = None
        if config.output.metrics is not None:
            try:
                from elaunch.telemetry.exporter import MetricsExporter
            except ModuleNotFoundError as error:
                if not is_missing("prometheus_client", error):
                    raise
                raise LaunchError(METRICS_MISSING) from error
            self._metrics = MetricsExporter(config.job, config.node, *config.output.metrics)
            say(f"metrics: {self._metrics.url}")

        if config.output.ui is not None:
            from elaunch.telemetry.ui.history import JobHistory
            from elaunch.telemetry.ui.server import JobPage, UiListener

            self._page = JobPage(JobHistory(config.job, "agent"), hold_s=UI_HOLD_S)
            self._ui = UiListener(self._page, *config.output.ui, "--ui-port")
            say(f"ui: {self._ui.url}")

        if asks_for_spans(os.environ):
            try:
                from elaunch.telemetry.spans import export_spans

                self._spans = export_spans(config.job, config.node)
            except ModuleNotFoundError as error:
                if not is_missing("opentelemetry", error):
                    raise
                say(SPANS_MISSING)  # the variables may be meant for the script

    @property
    def listeners(self) -> list[EventListener]:
        """Returns what is to be given each event."""
        return [one.take for one in (self._metrics, self._page, self._spans) if one is not None]

    def timed(self, store: Store) -> Store:
        """Returns the store with its requests timed, if somebody wants to know."""
        if self._metrics is None:
            return store
        from elaunch.telemetry.timed_store import TimedStore

        return TimedStore(store, self._metrics.times)

    def follow(self, view: Callable[[], NodeView]) -> None:
        """Shows the state of the node, which `view` returns in any thread."""
        if self._metrics is not None:
            self._metrics.follow(view)

    def close(self) -> None:
        """Ends what listens, and sends the last spans."""
        if self._spans is not None:
            self._spans.close()
        for server in (self._metrics, self._ui):
            if server is not None:
                with contextlib.suppress(OSError):
                    server.close()
