"""Links that are encrypted: what comes is what was sent, and nobody else reads, changes or joins them."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elaunch.errors import LinkLost, ProtocolError
from elaunch.rendezvous.membership import split_address
from elaunch.rendezvous.security.contexts import Contexts
from elaunch.rendezvous.security.identity import NODE, NodeIdentity
from elaunch.workers.comm import wire
from elaunch.workers.comm.secure.security import LinkSecurity
from elaunch.workers.comm.secure.sockets import CHUNK_BYTES, RECORD_BYTES, SecureSocket
from elaunch.workers.comm.transport import Transport
from tests.helpers import scaled
from tests.unit.comm_crew import PATIENCE_S, addresses, connect_all, crew, each, encrypted, together
from tests.unit.test_comm_reading import stream_both_ways
from tests.unit.test_comm_transport import say_to

TENSOR = b"the bytes of a tensor; " * 1000


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeIdentity]:
    with encrypted(monkeypatch) as made:
        yield made


@contextlib.contextmanager
def ends(node: NodeIdentity) -> Iterator[tuple[SecureSocket, SecureSocket]]:
    """Two ends of a connection that do not block, whose buffers are small."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    security = LinkSecurity(node.folder)
    made = [security.wrap(ours, False), security.wrap(theirs, True)]
    together([one.do_handshake for one in made])
    for one in made:
        one.setblocking(False)
    with made[0], made[1]:
        yield made[0], made[1]


@given(st.lists(st.sampled_from([0, 1, 32, RECORD_BYTES - 1, RECORD_BYTES, CHUNK_BYTES + 7, 300_000]), max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_bytes_come_in_order_whatever_the_kernel_takes(node: NodeIdentity, sizes: list[int]) -> None:
    chance = random.Random(len(sizes))
    sent = [chance.randbytes(size) for size in sizes]
    came = bytearray()
    with ends(node) as (writer, reader):
        left: list[bytes | memoryview] = [memoryview(one) for one in sent]
        place = memoryview(bytearray(50_000))
        while sum(map(len, left)) or writer.has_unsent or len(came) < sum(sizes):
            taken = writer.take(left)
            while left and taken >= len(left[0]):
                taken -= len(left.pop(0))
            if left:
                left[0] = memoryview(left[0])[taken:]
            writer.flush()
            with contextlib.suppress(BlockingIOError):
                came += place[: reader.fill(place)]
        writer.shutdown(socket.SHUT_WR)
        reader.await_input()
        assert reader.fill(place) == 0
    assert came == b"".join(sent)


def test_what_was_taken_may_be_changed_at_once(node: NodeIdentity) -> None:
    with ends(node) as (writer, reader):
        data = bytearray(b"a" * 10_000_000)
        taken = writer.take([memoryview(data)])
        assert writer.has_unsent
        data[:] = b"b" * len(data)
        came, place = bytearray(), memoryview(bytearray(1 << 16))
        while len(came) < taken:
            writer.flush()
            with contextlib.suppress(BlockingIOError):
                came += place[: reader.fill(place)]
        assert came == b"a" * taken


def test_a_byte_that_is_changed_on_the_way_ends_the_connection(node: NodeIdentity) -> None:
    with ends(node) as (writer, reader):
        raw = socket.socket(fileno=writer.fileno())
        try:
            raw.send(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record of the right form
            reader.await_input()
            with pytest.raises(ssl.SSLError):
                reader.fill(memoryview(bytearray(10)))
        finally:
            raw.detach()


def test_a_connection_that_was_reset_before_it_is_encrypted_is_closed(node: NodeIdentity) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # so that its end is a reset
    theirs.close()
    number = ours.fileno()
    with pytest.raises(ConnectionResetError, match="before the handshake"):
        LinkSecurity(node.folder).wrap(ours, is_server=False)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_ending_a_connection_from_another_thread_never_reads_plain_text(node: NodeIdentity) -> None:
    with ends(node) as (writer, reader):
        writer.take([TENSOR])
        reader.await_input()
        reader.shutdown(socket.SHUT_RDWR)
        came, place = bytearray(), memoryview(bytearray(1 << 16))
        with contextlib.suppress(OSError):
            while got := reader.fill(place):
                came += place[:got]
        assert TENSOR.startswith(bytes(came))


@pytest.mark.parametrize("seed", range(scaled(8, 60)))
def test_long_transfers_arrive(seed: int) -> None:
    with crew(2) as (a, b):
        assert all(isinstance(one._links[other.worker].socket, SecureSocket) for one, other in ((a, b), (b, a)))
        for op in range(1, 4):
            stream_both_ways(a, b, seed * 10 + op, op=op)


@contextlib.contextmanager
def overheard(address: str) -> Iterator[tuple[str, bytearray]]:
    """An address that leads to another one, and all that comes by."""
    heard, opened = bytearray(), list[socket.socket]()
    server = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                heard.extend(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                near = server.accept()[0]
                far = socket.create_connection(split_address(address))
                opened.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=carry, args=pair, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}", heard
    finally:
        server.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)
        for sock in (server, *opened):
            sock.close()


def test_who_listens_on_the_way_learns_neither_the_token_nor_a_name_nor_a_byte() -> None:
    with crew(2, connected=False) as (a, b), overheard(a.address) as (way, heard):
        members = {a.worker: way, b.worker: b.address}
        each(lambda one: one.connect(members, generation=1, timeout_s=PATIENCE_S), [a, b])
        place = bytearray(len(TENSOR))
        together(
            [
                lambda: b.exchange(1, 1, sends=[(a.worker, 0, memoryview(TENSOR))]),
                lambda: a.exchange(1, 1, receives=[(b.worker, 0, memoryview(place))]),
            ]
        )
        assert place == TENSOR
        assert len(heard) > len(TENSOR)
        for word in (b"secret", b"a/0#0", b"a/1#0", b"tensor"):
            assert word not in heard


def test_a_worker_of_another_secret_is_told_and_gets_no_link(monkeypatch: pytest.MonkeyPatch) -> None:
    with crew(1) as (a,), encrypted(monkeypatch, b"quite another secret") as other:
        stranger = Transport("b/0#0", "secret", security=LinkSecurity(other.folder, always=True))
        try:
            with pytest.raises(LinkLost, match=r"its certificate is not of this job .* the same secret"):
                stranger.connect(addresses([a, stranger]), generation=1, timeout_s=PATIENCE_S)
            assert a.peers == ()
            assert stranger.probe(a.address, PATIENCE_S) == "refused"
        finally:
            stranger.close()


def test_a_worker_that_does_not_encrypt_is_told_and_gets_no_link() -> None:
    with crew(1) as (a,):
        plain = Transport("b/0#0", "secret")
        try:
            with pytest.raises(LinkLost, match="this worker wants encrypted links: --link-encryption"):
                plain.connect(addresses([a, plain]), generation=1, timeout_s=PATIENCE_S)
            with pytest.raises(LinkLost, match="it does not encrypt: --link-encryption"):
                a.connect({plain.worker: plain.address, a.worker: a.address}, generation=1, timeout_s=PATIENCE_S)
        finally:
            plain.close()


@contextlib.contextmanager
def dial(target: Transport, context: ssl.SSLContext) -> Iterator[ssl.SSLSocket]:
    with socket.create_connection(split_address(target.address), PATIENCE_S) as sock, context.wrap_socket(sock) as end:
        yield end


def test_without_a_certificate_even_the_right_token_is_not_read(node: NodeIdentity) -> None:
    hello = wire.hello_line("secret", wire.Hello("b/0#0", "probe"))
    with crew(1) as (a,):
        assert b"wants encrypted links" in say_to(a.address, hello)
        bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
        with dial(a, bare) as end, pytest.raises(ssl.SSLError, match="certificate required"):
            end.recv(100)
        answer = b""
        with dial(a, bare) as end, contextlib.suppress(OSError):  # it closes as soon as it has seen no certificate
            end.sendall(hello)
            answer = end.recv(1000)
        assert answer == b""
        with dial(a, Contexts(node.folder).get(is_server=False)) as end:
            end.sendall(hello)
            assert wire.read_ack(end.recv(1000)).worker == a.worker


@pytest.mark.parametrize(
    "line",
    [
        b"\x16",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"\x15\x03\x03\x00\x02\x02\x00",
    ],
)
def test_the_listener_survives_strangers_that_begin_as_tls_does(line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with crew(2, connected=False) as (a, b):
        say_to(a.address, line)
        connect_all([a, b])
        assert a.peers == (b.worker,)
    assert "defect" not in capfd.readouterr().err


def test_many_that_begin_and_say_no_more_keep_nobody_out() -> None:
    with crew(2, connected=False) as (a, b), contextlib.ExitStack() as stack:
        for _ in range(300):
            stranger = stack.enter_context(socket.create_connection(split_address(a.address), PATIENCE_S))
            with contextlib.suppress(OSError):  # the oldest are dropped
                stranger.sendall(b"\x16\x03\x01\x02\x00")
        connect_all([a, b])
        assert len(a._listener._strangers) <= a._listener._most_strangers


def test_a_certificate_that_is_gone_ends_a_dial_and_nothing_else(node: NodeIdentity) -> None:
    with crew(2, connected=False) as (a, b):
        path = Path(node.folder) / NODE
        content = path.read_bytes()
        path.unlink()
        with pytest.raises(LinkLost, match="this worker's certificate cannot be read"):
            b.connect(addresses([a, b]), generation=1, timeout_s=PATIENCE_S)
        path.write_bytes(content)
        connect_all([a, b])


def test_a_probe_finds_the_worker_that_is_there(node: NodeIdentity) -> None:
    with crew(2, connected=False) as (a, b):
        assert b.probe(a.address, PATIENCE_S, a.worker) == "alive"
        assert b.probe(a.address, PATIENCE_S, "another") == "refused"
        begin_s = time.monotonic()
        with socket.create_server(("127.0.0.1", 0)) as mute:
            assert b.probe(f"127.0.0.1:{mute.getsockname()[1]}", 0.3) == "busy"
        assert time.monotonic() - begin_s < PATIENCE_S
    with pytest.raises(ProtocolError):
        wire.read_ack(wire.refusal_line("no"))
