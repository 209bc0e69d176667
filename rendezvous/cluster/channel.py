"""A channel to a gRPC server: its connection is made when it is needed, and made anew where it has ended.

grpcio is not used: a client that does nothing costs it 10 MiB, which agents beside training have better uses for, and
20 wake-ups a second; it forks badly; and what it says of a failure does not tell whether the server has seen the
request.
"""

from __future__ import annotations

import ssl
import threading
import time

from elaunch.rendezvous.cluster.calls import NO_ANSWER, Call, ChannelClosed, Metadata, RpcError
from elaunch.rendezvous.cluster.http2 import DIAL_S, Http2Connection

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 0.5
"""Pauses between two attempts; each is twice as long as the one before."""


class GrpcChannel:
    """The connection to one server, which is made anew where it has ended, with the next call.

    Args:
        address: `host:port`.
        context: of TLS; None: none is used.
        name: that the server's certificate is to have; empty: its host's.
        dial_s: how long one attempt to connect may take, in seconds.
    """

    def __init__(
        self, address: str, context: ssl.SSLContext | None = None, name: str = "", dial_s: float = DIAL_S
    ) -> None:
        self.address = address
        self._context, self._name, self._dial_s = context, name, dial_s
        self._headers = (  # those of HTTP/2 itself come first
            (b":method", b"POST"),
            (b":scheme", b"http" if context is None else b"https"),
            (b":authority", address.encode()),
            (b"te", b"trailers"),
            (b"content-type", b"application/grpc"),
            (b"user-agent", b"elaunch"),
        )
        self._lock = threading.Lock()
        self._connection: Http2Connection | None = None
        self._is_closed = False
        self._pause_s, self._next_dial_s = FIRST_PAUSE_S, 0.0

    @property
    def is_connected(self) -> bool:
        """Returns whether there is a connection that is not known to have ended."""
        connection = self._connection
        return connection is not None and connection.is_ready.is_set() and connection.problem is None

    def ask(self, path: str, request: bytes, timeout_s: float, metadata: Metadata = ()) -> bytes:
        """Sends one request and returns its answer. Raises `RpcError` and `ChannelClosed`."""
        deadline_s = time.monotonic() + timeout_s
        call = self.open(path, timeout_s, metadata)
        try:
            call.send(request, is_last=True)
            answer = None
            while (found := call.take(max(0.0, deadline_s - time.monotonic()))) is not None:
                answer = found
        finally:
            call.cancel()
        if answer is None:
            raise RpcError("UNKNOWN", "the server has ended the call without an answer")
        return answer

    def open(self, path: str, connect_s: float, metadata: Metadata = ()) -> Call:
        """Begins a call.

        Args:
            path: of the method, from its `/` on.
            connect_s: how long it may wait for a connection.
            metadata: sent with the call; names in lower case.

        Raises:
            RpcError: there is no connection.
            ChannelClosed: `close` was called.
        """
        connection = self._connect()
        if not connection.is_ready.wait(connect_s):
            raise RpcError("DEADLINE_EXCEEDED", NO_ANSWER, is_sent=False)
        if connection.problem is not None:
            self._note_failed(connection)
            raise connection.problem.unsent()
        self._pause_s, self._next_dial_s = FIRST_PAUSE_S, 0.0
        own = ((name.encode(), value.encode()) for name, value in metadata)
        # The server is not told for how long this side waits: each call would have a header of its own.
        return connection.begin([(b":path", path.encode()), *self._headers, *own])

    def close(self) -> None:
        """Hangs up; what is under way fails."""
        with self._lock:
            self._is_closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self) -> Http2Connection:
        """Returns the connection, which may still be in the making."""
        with self._lock:
            if self._is_closed:
                raise ChannelClosed(f"the channel to {self.address} is closed")
            now_s = time.monotonic()
            if self._connection is not None:
                problem = self._connection.problem
                if problem is None:
                    return self._connection
                if now_s < self._next_dial_s:
                    raise problem.unsent()
            try:
                self._connection = Http2Connection(self.address, self._context, self._name, self._dial_s)
            except (OSError, RuntimeError) as error:  # the system gives this process no more descriptors, or no thread
                raise RpcError("UNAVAILABLE", f"no connection can be made: {error}", is_sent=False) from error
            return self._connection

    def _note_failed(self, connection: Http2Connection) -> None:
        """The next attempt comes after a pause."""
        with self._lock:
            if self._connection is connection and not connection.was_ready and connection.ended_s > self._next_dial_s:
                self._next_dial_s = connection.ended_s + self._pause_s
                self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
