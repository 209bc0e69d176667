"""Calls of gRPC over one connection, with a server of HTTP/2 that does as a test wants."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elaunch.rendezvous.cluster import channel as channels
from elaunch.rendezvous.cluster import http2
from elaunch.rendezvous.cluster.calls import HUNG_UP, NO_ANSWER, ChannelClosed, RpcError
from elaunch.rendezvous.cluster.channel import GrpcChannel
from tests.helpers import find_free_port, wait_until

LIMIT_S = 20.0
SHORT_S = 0.2
HEADERS = [(":status", "200"), ("content-type", "application/grpc")]
WELL = [("grpc-status", "0")]


def framed(message: bytes) -> bytes:
    return struct.pack(">BI", 0, len(message)) + message


class Server:
    """Serves one connection after the other, each until it ends; `react` is given each event of one."""

    def __init__(self, react: Callable[[Server, h2.connection.H2Connection, Any], None], window: int = 65535) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._react, self._window = react, window
        self.received: dict[int, bytes] = {}
        self.connections = 0
        self.cancelled: list[int] = []
        self._socket: socket.socket | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._socket, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            with self._socket, contextlib.suppress(OSError):
                self._serve(self._socket)

    def _serve(self, end: socket.socket) -> None:
        frames = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        frames.local_settings = h2.settings.Settings(
            client=False, initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: self._window}
        )
        frames.initiate_connection()
        end.sendall(frames.data_to_send())
        while data := end.recv(65536):
            for event in frames.receive_data(data):
                if isinstance(event, h2.events.DataReceived):
                    self.received[event.stream_id] = self.received.get(event.stream_id, b"") + event.data
                    frames.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                elif isinstance(event, h2.events.StreamReset):
                    self.cancelled.append(event.stream_id)
                self._react(self, frames, event)
            if out := frames.data_to_send():
                end.sendall(out)

    def send(self, data: bytes) -> None:
        assert self._socket is not None
        self._socket.sendall(data)

    def hang_up(self) -> None:
        assert self._socket is not None
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def echo(server: Server, frames: h2.connection.H2Connection, event: Any) -> None:
    """Answers with the request."""
    if isinstance(event, h2.events.StreamEnded):
        frames.send_headers(event.stream_id, HEADERS)
        rest = server.received.pop(event.stream_id)
        while rest:
            most = min(frames.local_flow_control_window(event.stream_id), frames.max_outbound_frame_size)
            assert most, "the client grants enough for whatever etcd sends"
            frames.send_data(event.stream_id, rest[:most])
            rest = rest[most:]
        frames.send_headers(event.stream_id, WELL, end_stream=True)


Serve = Callable[..., tuple[Server, GrpcChannel]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    made: list[Any] = []

    def one(react: Callable[..., None] = echo, window: int = 65535) -> tuple[Server, GrpcChannel]:
        server = Server(react, window)
        channel = GrpcChannel(server.address)
        made.extend((channel, server))
        return server, channel

    yield one
    for each in made:
        each.close()


@pytest.mark.parametrize("size", [0, 1, 16384, 3_000_000])
@pytest.mark.parametrize("window", [10, 65535])
def test_messages_of_any_size_come_through_windows_of_any_size(serve: Serve, size: int, window: int) -> None:
    _, channel = serve(window=window)
    message = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    if window == 10:
        message = message[:5000]  # ten bytes a round
    assert channel.ask("/a/B", message, LIMIT_S) == message


def test_calls_of_many_threads_share_one_connection(serve: Serve) -> None:
    server, channel = serve()
    wrong: list[bytes] = []

    def call(name: bytes) -> None:
        for turn in range(50):
            message = name * (1 + turn * 200)
            if channel.ask("/a/B", message, LIMIT_S) != message:
                wrong.append(name)

    threads = [threading.Thread(target=call, args=(b"%d" % number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert (wrong, server.connections) == ([], 1)


def test_what_ended_calls_leave_does_not_grow(serve: Serve) -> None:
    _, channel = serve()
    for _ in range(1000):
        channel.ask("/a/B", b"x", LIMIT_S)
    connection = channel._connection
    assert connection is not None
    assert not connection._calls
    assert len(connection._frames._closed_streams) <= 256
    assert len(connection._frames.streams) <= 2


def test_an_error_of_the_server_is_told_with_its_text(serve: Serve) -> None:
    def refuse(_: Server, frames: h2.connection.H2Connection, event: Any) -> None:
        if isinstance(event, h2.events.StreamEnded):
            said = [("grpc-status", "7"), ("grpc-message", "permission%20denied%3A %C3%A4")]
            frames.send_headers(event.stream_id, [*HEADERS, *said], end_stream=True)

    _, channel = serve(refuse)
    with pytest.raises(RpcError) as raised:
        channel.ask("/a/B", b"x", LIMIT_S)
    assert (raised.value.status, raised.value.text) == ("PERMISSION_DENIED", "permission denied: ä")
    assert raised.value.is_sent


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        ([(":status", "404")], "it answers with HTTP status 404"),
        ([(":status", "200")], "it answers with HTTP status 200"),
        ([(":status", "200"), ("grpc-status", "99")], "it answers with HTTP status 200"),
        ([(":status", "200"), ("grpc-status", "0")], "the server has ended the call without an answer"),
    ],
)
def test_an_answer_that_is_none_of_grpc_is_told(serve: Serve, headers: list[tuple[str, str]], says: str) -> None:
    def answer(_: Server, frames: h2.connection.H2Connection, event: Any) -> None:
        if isinstance(event, h2.events.StreamEnded):
            frames.send_headers(event.stream_id, headers, end_stream=True)

    _, channel = serve(answer)
    with pytest.raises(RpcError, match=says) as raised:
        channel.ask("/a/B", b"x", LIMIT_S)
    assert raised.value.status == "UNKNOWN"


def test_an_answer_may_not_be_compressed(serve: Serve) -> None:
    def answer(_: Server, frames: h2.connection.H2Connection, event: Any) -> None:
        if isinstance(event, h2.events.StreamEnded):
            frames.send_headers(event.stream_id, HEADERS)
            frames.send_data(event.stream_id, b"\1\0\0\0\1x")

    _, channel = serve(answer)
    with pytest.raises(RpcError, match="compressed"):
        channel.ask("/a/B", b"x", LIMIT_S)


def test_a_call_without_an_answer_is_cancelled_and_the_next_one_goes_well(serve: Serve) -> None:
    first: list[int] = []

    def ignore_the_first(server: Server, frames: h2.connection.H2Connection, event: Any) -> None:
        if isinstance(event, h2.events.StreamEnded) and not first:
            first.append(event.stream_id)
        else:
            echo(server, frames, event)

    server, channel = serve(ignore_the_first)
    with pytest.raises(RpcError, match=NO_ANSWER) as raised:
        channel.ask("/a/B", b"x", SHORT_S)
    assert (raised.value.status, raised.value.is_sent) == ("DEADLINE_EXCEEDED", True)
    assert channel.ask("/a/B", b"y", LIMIT_S) == b"y"
    wait_until(lambda: server.cancelled == first, LIMIT_S, "the server to hear of it")
    assert server.connections == 1


def test_whoever_waits_on_a_connection_that_ends_is_told_and_the_next_call_makes_another(serve: Serve) -> None:
    def hang_up_once(server: Server, frames: h2.connection.H2Connection, event: Any) -> None:
        if isinstance(event, h2.events.StreamEnded) and server.connections == 1:
            server.hang_up()
        else:
            echo(server, frames, event)

    server, channel = serve(hang_up_once)
    with pytest.raises(RpcError, match=HUNG_UP) as raised:
        channel.ask("/a/B", b"x", LIMIT_S)
    assert (raised.value.status, raised.value.is_sent) == ("UNAVAILABLE", True)
    wait_until(lambda: not channel.is_connected, LIMIT_S, "the end to be noticed")
    assert channel.ask("/a/B", b"y", LIMIT_S) == b"y"
    assert server.connections == 2


@pytest.mark.parametrize("how", ["refused", "goes away"])
def test_a_call_that_the_server_has_not_looked_at_may_be_sent_again(serve: Serve, how: str) -> None:
    def answer(server: Server, frames: h2.connection.H2Connection, event: Any) -> None:
        if isinstance(event, h2.events.StreamEnded) and how == "refused":
            frames.reset_stream(event.stream_id, h2.errors.ErrorCodes.REFUSED_STREAM)
        elif isinstance(event, h2.events.RequestReceived) and how == "goes away":
            frames.close_connection(last_stream_id=0)

    _, channel = serve(answer)
    with pytest.raises(RpcError) as raised:
        channel.ask("/a/B", b"x", LIMIT_S)
    assert (raised.value.status, raised.value.is_sent) == ("UNAVAILABLE", False)


def test_a_stream_is_answered_until_it_is_cancelled(serve: Serve) -> None:
    def answer(_: Server, frames: h2.connection.H2Connection, event: Any) -> None:
        if isinstance(event, h2.events.RequestReceived):
            frames.send_headers(event.stream_id, HEADERS)
        if isinstance(event, h2.events.DataReceived):
            whole = framed(b"one") + framed(b"two")
            frames.send_data(event.stream_id, whole[:11])
            frames.send_data(event.stream_id, whole[11:])

    server, channel = serve(answer)
    call = channel.open("/a/B", LIMIT_S, (("token", "secret"),))
    call.send(b"begin")
    assert [call.take(LIMIT_S), call.take(LIMIT_S)] == [b"one", b"two"]
    threading.Timer(SHORT_S, call.cancel).start()
    with pytest.raises(RpcError) as raised:
        list(call)
    assert raised.value.status == "CANCELLED"
    wait_until(lambda: server.cancelled, LIMIT_S, "the server to hear of it")


def test_a_stream_that_the_server_ends_leaves_nothing_behind(serve: Serve) -> None:
    def answer(_: Server, frames: h2.connection.H2Connection, event: Any) -> None:
        if isinstance(event, h2.events.DataReceived):
            frames.send_headers(event.stream_id, [*HEADERS, ("grpc-status", "11")], end_stream=True)

    _, channel = serve(answer)
    for _ in range(20):
        call = channel.open("/a/B", LIMIT_S)
        call.send(b"begin")
        with pytest.raises(RpcError, match="OUT_OF_RANGE"):
            call.take(LIMIT_S)
    connection = channel._connection
    assert connection is not None
    assert connection._frames.open_outbound_streams <= 1


def test_a_server_that_goes_silent_is_noticed_while_a_call_is_open(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2, "SILENCE_S", 0.3)
    monkeypatch.setattr(http2, "PONG_S", 0.2)
    stands = threading.Event()

    def stand(_: Server, __: h2.connection.H2Connection, event: Any) -> None:
        if isinstance(event, h2.events.DataReceived):
            stands.wait(LIMIT_S)

    _, channel = serve(stand)
    call = channel.open("/a/B", LIMIT_S)
    call.send(b"begin")
    with pytest.raises(RpcError, match="silent"):
        call.take(LIMIT_S)
    stands.set()


def test_a_server_that_answers_pings_is_not_taken_for_silent(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "SILENCE_S", 0.1)
    _, channel = serve(lambda *_: None)
    call = channel.open("/a/B", LIMIT_S)
    call.send(b"begin")
    with pytest.raises(RpcError, match=NO_ANSWER):
        call.take(1.0)
    assert channel.is_connected


def test_nobody_listens() -> None:
    channel = GrpcChannel(f"127.0.0.1:{find_free_port()}")
    for _ in range(2):
        with pytest.raises(RpcError, match="Connection refused") as raised:
            channel.ask("/a/B", b"x", LIMIT_S)
        assert (raised.value.status, raised.value.is_sent) == ("UNAVAILABLE", False)
    channel.close()
    with pytest.raises(ChannelClosed):
        channel.ask("/a/B", b"x", LIMIT_S)


@pytest.mark.parametrize("lacks", ["descriptors", "threads"])
def test_a_process_that_gets_no_more_of_the_system_may_try_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files") if lacks == "descriptors" else RuntimeError("can't start new thread")

    _, channel = serve()
    monkeypatch.setattr("os.pipe" if lacks == "descriptors" else "threading.Thread.start", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RpcError, match="no connection can be made") as raised:
        channel.ask("/a/B", b"x", LIMIT_S)
    assert not raised.value.is_sent
    assert len(os.listdir("/proc/self/fd")) == before
    monkeypatch.undo()
    assert channel.ask("/a/B", b"x", LIMIT_S) == b"x"


def test_a_name_that_nobody_knows_is_told() -> None:
    channel = GrpcChannel("nobody.invalid:2379")
    with pytest.raises(RpcError, match=r"DNS resolution failed for nobody\.invalid") as raised:
        channel.ask("/a/B", b"x", LIMIT_S)
    assert not raised.value.is_sent
    channel.close()


def test_a_server_that_has_answered_meanwhile_is_not_given_up_by_a_process_that_had_no_processor(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: http2.Http2Connection, events: int, timeout_s: float) -> bool:
        time.sleep(2 * SHORT_S)
        return poll(self, events, timeout_s)

    server, _ = serve()
    poll = http2.Http2Connection._poll
    monkeypatch.setattr(http2.Http2Connection, "_poll", slow)
    channel = GrpcChannel(server.address, dial_s=SHORT_S)
    assert channel.ask("/a/B", b"x", LIMIT_S) == b"x"
    assert server.connections == 1
    channel.close()


def test_a_server_that_says_nothing_is_given_the_time_that_the_channel_has(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = GrpcChannel(f"127.0.0.1:{listener.getsockname()[1]}", dial_s=SHORT_S)
        with pytest.raises(RpcError, match="accepts connections and says nothing"):
            channel.ask("/a/B", b"x", LIMIT_S)
        channel.close()


def test_attempts_to_connect_come_ever_more_rarely_and_at_once_again_after_one_that_went_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port = find_free_port()
    channel = GrpcChannel(f"127.0.0.1:{port}")
    dialled: list[float] = []
    dial = http2.Http2Connection._dial

    def count(self: http2.Http2Connection, deadline_s: float) -> None:
        dialled.append(time.monotonic())
        dial(self, deadline_s)

    monkeypatch.setattr(http2.Http2Connection, "_dial", count)
    end_s = time.monotonic() + 1.5
    while time.monotonic() < end_s:
        with pytest.raises(RpcError):
            channel.ask("/a/B", b"x", LIMIT_S)
        time.sleep(0.01)
    pauses = [after - before for before, after in itertools.pairwise(dialled)]
    assert 2 <= len(pauses) <= 5
    least = [channels.FIRST_PAUSE_S, 2 * channels.FIRST_PAUSE_S, 4 * channels.FIRST_PAUSE_S]
    assert all(pause >= bound - 0.01 for pause, bound in zip(pauses, least, strict=False))
    channel.close()


@pytest.mark.parametrize(
    "says", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x15\x03\x01\x00\x02\x02\x16", b"\0" * 99]
)
def test_who_speaks_another_language_is_no_server(says: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def speak() -> None:
            with listener.accept()[0] as end:
                end.sendall(says)

        threading.Thread(target=speak, daemon=True).start()
        channel = GrpcChannel(f"127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(RpcError) as raised:
            channel.ask("/a/B", b"x", LIMIT_S)
        channel.close()
    assert (raised.value.status, raised.value.is_sent) == ("UNAVAILABLE", False)


def test_closing_frees_whoever_waits(serve: Serve) -> None:
    _, channel = serve(lambda *_: None)
    call = channel.open("/a/B", LIMIT_S)
    call.send(b"begin")
    threading.Timer(SHORT_S, channel.close).start()
    with pytest.raises(RpcError, match="closed"):
        call.take(LIMIT_S)


def test_closing_frees_whoever_waits_for_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = GrpcChannel(f"127.0.0.1:{silent.getsockname()[1]}")
        threading.Timer(SHORT_S, channel.close).start()
        with pytest.raises(RpcError, match="closed"):
            channel.ask("/a/B", b"x", LIMIT_S)
        wait_until(
            lambda: not [one for one in threading.enumerate() if one.name == f"elaunch-etcd {channel.address}"],
            LIMIT_S,
            "its thread to end",
        )


@given(st.lists(st.binary(min_size=1, max_size=60), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_a_server_sends_a_call_ends(garbage: list[bytes]) -> None:
    """After it has shown itself as one of HTTP/2."""

    def answer(server: Server, _: h2.connection.H2Connection, event: Any) -> None:
        if isinstance(event, h2.events.StreamEnded):
            for part in garbage:
                server.send(part)
            server.hang_up()

    server = Server(answer)
    channel = GrpcChannel(server.address)
    try:
        with pytest.raises(RpcError):
            channel.ask("/a/B", b"x", LIMIT_S)
    finally:
        channel.close()
        server.close()
