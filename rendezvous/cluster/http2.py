"""One connection of HTTP/2 to a gRPC server: it is dialled once, carries calls, and ends.

The frames are those of `h2`, and the protocol is https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md, as far
as etcd needs it. Who calls writes; a thread of the connection's own reads. Both hold its lock, and neither waits for
the network with it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from elaunch.rendezvous.cluster.calls import HUNG_UP, Call, RpcError
from elaunch.rendezvous.membership import split_address

DIAL_S = 2.0
"""How long one attempt to connect may take, with its TLS handshake and the first word of the server."""

SILENCE_S = 6.0
"""After so long without a word it is asked for one, as long as a call is open; etcd by default forbids every 5 s."""

PONG_S = 3.0
"""So long it may take for one, and as long for what was sent to be acknowledged by its machine."""

WINDOW = 2**24
"""Bytes that may be on their way to this side, for each call and in all."""

_READ = 2**16


class _Frames(h2.connection.H2Connection):
    MAX_CLOSED_STREAMS = 256  # that are remembered: by default so many that a year of renewals takes 10 MB


class Http2Connection:
    """One connection and the thread that makes and reads it.

    Attributes:
        is_ready: set once the server has said its first word, and where it never does.
        was_ready: whether it has.
        problem: why it has ended, once it has.
        ended_s: when it did.
    """

    def __init__(self, address: str, context: ssl.SSLContext | None, name: str, dial_s: float) -> None:
        self._address, self._context = address, context
        self._name = name or split_address(address)[0]
        self.is_ready = threading.Event()
        self.was_ready = False
        self.problem: RpcError | None = None
        self.ended_s = 0.0
        self._dial_s = dial_s
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._frames = _Frames(
            h2.config.H2Configuration(
                client_side=True,
                header_encoding=None,
                validate_inbound_headers=False,
                normalize_inbound_headers=False,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
            )
        )
        self._calls: dict[int, Call] = {}
        self._unsent: deque[tuple[Call, bytes, bool]] = deque()  # what the server does not take yet
        self._out = bytearray()
        self._read_s = time.monotonic()
        self._asked_s: float | None = None  # when it was asked for a word
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        try:
            threading.Thread(target=self._run, name=f"elaunch-etcd {address}", daemon=True).start()
        except RuntimeError:
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            raise

    # -- for those who call -----------------------------------------------------------------------------------------

    def begin(self, headers: Sequence[tuple[bytes, bytes]]) -> Call:
        """Begins a call. Raises `RpcError`."""
        call = Call(self)
        with self._lock:
            if self.problem is not None:
                raise self.problem.unsent()
            try:
                call.stream = self._frames.get_next_available_stream_id()
                self._frames.send_headers(call.stream, headers)
            except h2.exceptions.ProtocolError as error:
                raise RpcError("UNAVAILABLE", f"no more calls are possible: {error}", is_sent=False) from error
            self._calls[call.stream] = call
        return call  # what it sends first takes the headers along

    def send(self, call: Call, data: bytes, is_last: bool) -> None:
        """Sends bytes of a call, as soon as the server takes them."""
        with self._lock:
            if self.problem is None and not call.is_over:
                self._unsent.append((call, data, is_last))
                self._push()

    def cancel(self, call: Call) -> None:
        """Ends a call on this side, unless it has ended."""
        with self._lock:
            if call.is_over:
                return
            call.end(RpcError("CANCELLED", "it was cancelled"))
            self._calls.pop(call.stream, None)
            if self.problem is None:
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    self._frames.reset_stream(call.stream, h2.errors.ErrorCodes.CANCEL)
                self._push()

    def close(self) -> None:
        """Hangs up; what is under way fails."""
        with self._lock:
            self._end(RpcError("CANCELLED", "the channel was closed"))
            self._wake()

    # -- the lock is held -------------------------------------------------------------------------------------------

    def _push(self) -> None:
        """Sends what the server takes now."""
        for _ in range(len(self._unsent)):
            call, data, is_last = self._unsent.popleft()
            if not call.is_over:
                self._push_data(call, data, is_last)
        self._out += self._frames.data_to_send()
        self._write()

    def _push_data(self, call: Call, data: bytes, is_last: bool) -> None:
        while True:
            most = min(self._frames.local_flow_control_window(call.stream), self._frames.max_outbound_frame_size)
            part, data = data[:most], data[most:]
            if part or not data:
                self._frames.send_data(call.stream, part, end_stream=is_last and not data)
            if not data:
                call.has_said_all = is_last
                return
            if most <= 0:
                self._unsent.append((call, data, is_last))
                return

    def _write(self) -> None:
        assert self._socket is not None
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            self._wake()  # the thread goes on as soon as there is room
        except OSError:
            self._out.clear()  # the thread, which reads what the server has said last, finds out why

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"\0")

    def _end(self, problem: RpcError) -> None:
        if self.problem is None:
            self.problem, self.ended_s = problem, time.monotonic()
            self.is_ready.set()
            for call in self._calls.values():
                call.end(problem)
            self._calls.clear()
            self._unsent.clear()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._dial(time.monotonic() + self._dial_s)
            while self.problem is None:
                self._read()
        except ssl.SSLError as error:
            # A server that ends in the middle is no other party to TLS than was expected.
            is_tls = not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError | ssl.SSLSyscallError)
            self._lose(f"TLS handshake failed: {_reason(error)}" if is_tls else HUNG_UP, is_tls)
        except h2.exceptions.ProtocolError as error:
            self._lose(f"what the server answers is no HTTP/2: {error}")
        except (OSError, ValueError) as error:  # the latter for a name that can be none
            self._lose(_reason(error))
        finally:
            self._lose("its thread has ended")
            with self._lock:
                if self._socket is not None:
                    self._socket.close()
                os.close(self._wake_reader)
                os.close(self._wake_writer)
                self._wake_writer = -1

    def _lose(self, text: str, is_tls: bool = False) -> None:
        with self._lock:
            self._end(RpcError("UNAVAILABLE", text, is_sent=self.was_ready, is_tls=is_tls and not self.was_ready))

    def _dial(self, deadline_s: float) -> None:
        """Connects to the first address of the host that answers, and says the first word."""
        host, port = split_address(self._address)
        try:
            # As bytes, since for a str Python loads tables of Unicode, a megabyte.
            found = socket.getaddrinfo(host.encode() if host.isascii() else host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise OSError(None, f"DNS resolution failed for {host}: {_reason(error)}") from error
        for index, (family, kind, protocol, _, address) in enumerate(found):
            self._socket = one = socket.socket(family, kind, protocol)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(PONG_S * 1000))
            try:
                self._knock(address, deadline_s)
                break
            except OSError:
                one.close()
                if index == len(found) - 1 or self.problem is not None:
                    raise
        if self._context is not None:
            self._shake_hands(self._context, deadline_s)
        with self._lock:
            self._frames.local_settings = h2.settings.Settings(
                client=True,
                initial_values={
                    h2.settings.SettingCodes.ENABLE_PUSH: 0,
                    h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW,
                },
            )
            self._frames.initiate_connection()
            self._frames.increment_flow_control_window(WINDOW)
            self._push()
        while True:
            is_late = time.monotonic() >= deadline_s  # a process that had no processor reads what has come meanwhile
            self._read(deadline_s)
            if self.is_ready.is_set():
                return
            if is_late:
                raise OSError(errno.ETIMEDOUT, "the server accepts connections and says nothing")

    def _knock(self, address: Any, deadline_s: float) -> None:
        assert self._socket is not None
        self._socket.setblocking(False)
        code = self._socket.connect_ex(address)
        if code == errno.EINPROGRESS:
            self._wait(select.POLLOUT, deadline_s)
            code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def _shake_hands(self, context: ssl.SSLContext, deadline_s: float) -> None:
        assert self._socket is not None
        self._socket = secured = context.wrap_socket(
            self._socket, do_handshake_on_connect=False, server_hostname=self._name
        )
        while True:
            try:
                secured.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN, deadline_s)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT, deadline_s)

    def _wait(self, events: int, deadline_s: float) -> None:
        """Waits for the socket; raises `OSError` at the deadline, or when the channel is closed."""
        if not self._poll(events, max(0.0, deadline_s - time.monotonic())) and self.problem is None:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        if self.problem is not None:
            raise OSError(errno.ECANCELED, "the channel was closed")

    def _poll(self, events: int, timeout_s: float) -> bool:
        """Waits for the socket, and returns whether something came of it; less long where it is woken."""
        assert self._socket is not None
        poll = select.poll()
        poll.register(self._wake_reader, select.POLLIN)
        poll.register(self._socket, events)
        found = poll.poll(timeout_s * 1000 + 1)
        if any(fd == self._wake_reader for fd, _ in found):
            os.read(self._wake_reader, 4096)
        return bool(found)

    def _read(self, deadline_s: float | None = None) -> None:
        """Waits for what comes, and takes it."""
        now_s = time.monotonic()
        wake_s = self._look_for_silence(now_s)
        if deadline_s is not None:
            wake_s = min(wake_s, deadline_s)
        self._poll(select.POLLIN | (select.POLLOUT if self._out else 0), max(0.0, wake_s - now_s))
        with self._lock:
            if self.problem is not None:
                return
            assert self._socket is not None
            if self._out:
                self._write()
            with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
                while True:
                    data = self._socket.recv(_READ)
                    if not data:
                        raise OSError(errno.ECONNRESET, HUNG_UP)
                    self._read_s, self._asked_s = time.monotonic(), None
                    for event in self._frames.receive_data(data):
                        self._take(event)
            if self._asked_s is not None and now_s >= self._asked_s + PONG_S:
                raise OSError(errno.ETIMEDOUT, "the server has gone silent")
            self._push()

    def _look_for_silence(self, now_s: float) -> float:
        """Asks a silent server for a word, and returns until when to wait for one."""
        with self._lock:
            if not self._calls:
                return now_s + SILENCE_S
            if self._asked_s is not None:
                return self._asked_s + PONG_S
            if now_s < self._read_s + SILENCE_S:
                return self._read_s + SILENCE_S
            self._asked_s = now_s
            self._frames.ping(b"elaunch?")
            self._push()
            return now_s + PONG_S

    def _take(self, event: h2.events.Event) -> None:
        match event:
            case h2.events.RemoteSettingsChanged():
                self.was_ready = True
                self.is_ready.set()
            case h2.events.ResponseReceived() | h2.events.TrailersReceived():
                if (call := self._calls.get(event.stream_id)) is not None:
                    call.take_headers(event.headers)
            case h2.events.DataReceived():
                self._frames.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                if (call := self._calls.get(event.stream_id)) is not None:
                    call.take_data(event.data)
            case h2.events.StreamEnded():
                if (call := self._calls.pop(event.stream_id, None)) is not None:
                    call.finish()
                    if not call.has_said_all:
                        self._frames.reset_stream(event.stream_id)  # else this side of it would stay open
            case h2.events.StreamReset():
                if (call := self._calls.pop(event.stream_id, None)) is not None:
                    is_sent = event.error_code != h2.errors.ErrorCodes.REFUSED_STREAM
                    call.end(RpcError("UNAVAILABLE", f"the server has broken off (error {event.error_code})", is_sent))
            case h2.events.ConnectionTerminated():
                last = event.last_stream_id
                text = "the server ends the connection"
                for stream, call in self._calls.items():
                    if last is not None and stream > last:
                        call.end(RpcError("UNAVAILABLE", text, is_sent=False))
                self._end(RpcError("UNAVAILABLE", text))
            case _:
                pass


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
