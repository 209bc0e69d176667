"""Serves Prometheus metrics of one agent over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from elaunch.telemetry.bounded import SILENT_S, BoundedServer, HttpListener
from elaunch.telemetry.events import Event
from elaunch.telemetry.metrics import metrics_of
from elaunch.telemetry.node_view import NodeView
from elaunch.telemetry.tally import Tally
from elaunch.telemetry.timed_store import StoreTimes


class MetricsRequest(WSGIRequestHandler):
    """One connection."""

    timeout = SILENT_S

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: Prometheus asks every few seconds."""


class MetricsServer(BoundedServer, WSGIServer):
    """Listens at an address for Prometheus."""

    def __init__(self, registry: CollectorRegistry, address: str, port: int) -> None:
        super().__init__(address, port, MetricsRequest)
        self.setup_environ()
        self.set_app(make_wsgi_app(registry))


class MetricsExporter(Collector):
    """Counts events, and answers Prometheus.

    Args:
        job: its name.
        node: name of this node.
        address, port: where it listens; port 0: a free one.

    Attributes:
        port: where it listens.
        url: of the metrics.
        times: of the store; to be given to what makes its requests.

    Raises:
        LaunchError: it cannot listen there.
    """

    def __init__(self, job: str, node: str, address: str, port: int) -> None:
        self.times = StoreTimes()
        self._job, self._node = job, node
        self._tally = Tally()
        self._lock = threading.Lock()
        self._view: Callable[[], NodeView] = NodeView
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        make = partial(MetricsServer, registry)
        self._listener = HttpListener(make, address, port, "--metrics-port", "elaunch-metrics")
        self.port, self.url = self._listener.port, f"{self._listener.url}metrics"

    def take(self, event: Event) -> None:
        """Counts an event."""
        with self._lock:
            self._tally.take(event)

    def follow(self, view: Callable[[], NodeView]) -> None:
        """From now on the node's state is what `view` returns, in another thread."""
        self._view = view

    def collect(self) -> Iterator[Metric]:
        """Returns the metrics, as Prometheus's library asks for them."""
        with self._lock:
            return iter(list(metrics_of(self._job, self._node, self._tally, self._view(), self.times)))

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()
