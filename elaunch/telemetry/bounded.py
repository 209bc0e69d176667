"""What serves HTTP for people and monitoring: in threads of its own, of which there are few.

Anybody may connect. Whatever a connection sends, or does not send, ends that connection at most.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http.server import HTTPServer
from socketserver import BaseRequestHandler, ThreadingMixIn
from typing import Any

from elaunch import threads
from elaunch.errors import LaunchError
from elaunch.rendezvous.conf import join_endpoint

MOST_CONNECTIONS = 16
"""That are served at a time; one more is closed."""

SILENT_S = 10.0
"""How long a connection may send nothing, or take nothing."""


class BoundedServer(ThreadingMixIn, HTTPServer):
    """Listens at an address; closes connections beyond `MOST_CONNECTIONS`."""

    daemon_threads = True

    def __init__(self, address: str, port: int, handler: type[BaseRequestHandler]) -> None:
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.address_family = found[0]
        super().__init__((str(found[4][0]), port), handler)

    def server_bind(self) -> None:
        """Binds the socket, without asking for the name of this host: that may take seconds."""
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

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


class HttpListener:
    """A server that answers until it is closed.

    Args:
        make: makes the server at an address and a port.
        address, port: where it listens; port 0: a free one.
        flag: that said so.
        thread: name of its thread.

    Attributes:
        port: where it listens.
        url: of its root, as other machines reach it if it listens at all addresses.

    Raises:
        LaunchError: it cannot listen there.
    """

    def __init__(
        self, make: Callable[[str, int], BoundedServer], address: str, port: int, flag: str, thread: str
    ) -> None:
        try:
            self._server = make(address, port)
        except OSError as error:
            raise LaunchError(f"{flag}: cannot listen at port {port} of {address}: {error}") from error
        self.port = self._server.server_port
        host = socket.gethostname() if address in ("0.0.0.0", "::") else address
        self.url = f"http://{join_endpoint(host, self.port)}/"
        self._thread = threads.start(thread, self._server.serve_forever, lambda error: None)

    def wait(self) -> None:
        """Returns when it listens no more."""
        self._thread.join()

    def close(self) -> None:
        """Stops listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
