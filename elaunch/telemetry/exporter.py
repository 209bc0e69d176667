"""Serves Prometheus metrics of one agent over HTTP, in threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from elaunch.errors import LaunchError
from elaunch.telemetry.events import Event
from elaunch.telemetry.metrics import metrics_of
from elaunch.telemetry.node_view import NodeView
from elaunch.telemetry.tally import Tally
from elaunch.telemetry.timed_store import StoreTimes


class MetricsExporter(Collector):
    """Counts events, and answers Prometheus.

    Args:
        job: its name.
        node: name of this node.
        address, port: where it listens; port 0: a free one.

    Attributes:
        port: where it listens.
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
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise LaunchError(f"--metrics-port: cannot listen at port {port} of {address}: {error}") from error
        self.port = int(self._server.server_port)

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
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
