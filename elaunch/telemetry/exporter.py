"""Serves Prometheus metrics of one agent over HTTP, in threads of their own.

Anybody may connect. Whatever a connection sends, or does not send, ends that connection at most.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from elaunch import threads
from elaunch.errors import LaunchError
from elaunch.telemetry.events import Event
from elaunch.telemetry.metrics import metrics_of
from elaunch.telemetry.node_view import NodeView
from elaunch.telemetry.tally import Tally
from elaunch.telemetry.timed_store import StoreTimes

MOST_CONNECTIONS = 16
"""That are served at a time; one more is closed."""

SILENT_S = 10.0
"""How long a connection may send nothing, or take nothing."""


class MetricsRequest(WSGIRequestHandler):
    """One connection."""

    timeout = SILENT_S

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: Prometheus asks every few seconds."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Listens at an address; closes connections beyond `MOST_CONNECTIONS`."""

    daemon_threads = True

    def __init__(self, address: str, port: int) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = found[0]
        super().__init__((str(found[4][0]), port), MetricsRequest)

    def server_bind(self) -> None:
        """Binds the socket, without asking for the name of this host: that may take seconds."""
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serves a connection in a thread, if there is room."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system gives this process no more threads
            self._free.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serves a connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of connections that break off or are silent."""


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
            self._server = MetricsServer(address, port)
        except OSError as error:
            raise LaunchError(f"--metrics-port: cannot listen at port {port} of {address}: {error}") from error
        self._server.set_app(make_wsgi_app(registry))
        self.port = self._server.server_port
        self._thread = threads.start("elaunch-metrics", self._server.serve_forever, lambda error: None)

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
