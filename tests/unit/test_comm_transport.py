"""Links: who gets one, what survives an interruption, and how a break shows."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from elaunch.errors import GenerationChanged, LinkLost, ProtocolError
from elaunch.rendezvous.membership import split_address
from elaunch.workers import fatal
from elaunch.workers.comm import listener, transport, wire
from elaunch.workers.comm.here import LINKS
from elaunch.workers.comm.link import NEVER
from elaunch.workers.comm.transport import Transport
from tests.helpers import Spawner, find_free_port, mute_address, scaled, wait_until
from tests.unit.comm_crew import (
    PATIENCE_S,
    Task,
    addresses,
    connect_all,
    crew,
    each,
    encrypted,
    introduce_all,
    make_transport,
    outcomes,
    together,
)

BIG_BYTES = 24 << 20
MORE_BYTES = 96 << 20  # than kernels hold for one who does not read: 32 MiB in places


@pytest.fixture(autouse=True, params=["unix", "tcp", "tls"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Workers of one machine, which meet on Unix sockets, those that only have TCP, and those that encrypt it."""
    if request.param == "tls":
        with encrypted(monkeypatch):
            yield request.param
        return
    monkeypatch.setenv(LINKS, request.param if request.param == "tcp" else "")
    yield request.param


def test_two_workers_exchange_parts_of_any_size() -> None:
    sizes = [0, 1, 31, 32, 33, 4096, wire.SEGMENT_BYTES, wire.SEGMENT_BYTES + 1, BIG_BYTES]
    with crew(2) as (a, b):
        bodies = [random.Random(size).randbytes(size) for size in sizes]
        got = [bytearray(size) for size in sizes]
        together(
            [
                lambda: a.exchange(1, 1, sends=[(b.worker, i, memoryview(body)) for i, body in enumerate(bodies)]),
                lambda: b.exchange(1, 1, receives=[(a.worker, i, memoryview(one)) for i, one in enumerate(got)]),
            ]
        )
        assert got == bodies


def test_a_bytearray_grows_to_whatever_comes() -> None:
    with crew(2) as (a, b):
        body, got = os.urandom(wire.SEGMENT_BYTES * 2 + 5), bytearray(b"before ")
        together(
            [
                lambda: a.exchange(1, 1, sends=[(b.worker, 0, memoryview(body))]),
                lambda: b.exchange(1, 1, receives=[(a.worker, 0, got)]),
            ]
        )
        assert bytes(got) == b"before " + body


def test_every_worker_gets_a_link_to_every_other() -> None:
    with crew(6) as transports:
        for transport in transports:
            assert set(transport.peers) == {other.worker for other in transports} - {transport.worker}


def test_connect_raises_for_an_address_where_nobody_listens() -> None:
    with crew(1) as (a,):
        with socket.create_server(("127.0.0.1", 0)) as gone:
            address = f"127.0.0.1:{gone.getsockname()[1]}"
        with pytest.raises(LinkLost, match=r"gone/0#0.*refused"):
            a.connect({"gone/0#0": address, a.worker: a.address}, generation=1, timeout_s=PATIENCE_S)


def test_a_machine_that_does_not_answer_is_not_waited_for_like_a_worker_that_comes_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "ANSWER_TIMEOUT_S", 0.1)
    with crew(1) as (a,), mute_address() as address, pytest.raises(LinkLost, match="did not answer in time"):
        a.connect({"far/0#0": address, a.worker: a.address}, generation=1, timeout_s=PATIENCE_S)


def test_connect_raises_for_a_member_that_does_not_dial_in() -> None:
    with crew(1) as (a,), pytest.raises(LinkLost, match="no connection"):
        a.connect({a.worker: a.address, "late/0#0": "127.0.0.1:1"}, generation=1, timeout_s=0.01)


def test_connect_is_interrupted_by_a_newer_generation() -> None:
    with crew(1) as (a,):
        members = {a.worker: a.address, "late/0#0": "127.0.0.1:1"}
        task = Task(lambda: a.connect(members, generation=1, timeout_s=PATIENCE_S))
        a.interrupt(2)
        with pytest.raises(GenerationChanged) as caught:
            task.result()
        assert caught.value.generation == 2


def test_connect_refuses_a_worker_that_answers_under_another_name() -> None:
    with crew(2, connected=False) as (a, b), pytest.raises(LinkLost, match="answered at this address"):
        b.connect({"other/0#0": a.address, b.worker: b.address}, generation=1, timeout_s=PATIENCE_S)


def test_a_wrong_token_is_refused_with_a_reason() -> None:
    with crew(1) as (a,):
        stranger = make_transport("b/0#0", "guess")
        try:
            with pytest.raises(LinkLost, match="wrong token"):
                stranger.connect(addresses([a, stranger]), generation=1, timeout_s=PATIENCE_S)
            assert a.peers == ()
        finally:
            stranger.close()


SPOKEN = b"elaunch/%d " % wire.VERSION
PROOF = SPOKEN + f"3 {wire.derive_proof('secret', 3)} ".encode()
"""What a line begins with that is read to its end."""

HOSTILE = [
    b"GET / HTTP/1.1\r\n",
    b"[]\n",
    b"x" * 5000,
    b"[" * 4000 + b"\n",
    b'{"elaunch": 99}\n',
    b'{"elaunch":1,"token":"\\ud800","from":"a","for":"link"}\n',
    SPOKEN + b"wrong {}\n",
    SPOKEN + b"9" * 4000 + b" {}\n",
    SPOKEN + b"4 " + PROOF.split()[2] + b" {}\n",
    SPOKEN + b"-3 " + PROOF.split()[2] + b" {}\n",
    SPOKEN + b"3 secret {}\n",
    PROOF + b"[" * 4000 + b"\n",
    PROOF + b'{"from": "\\ud800", "for": "link"}\n',
    PROOF + b'{"from": 7, "for": "link"}\n',
    PROOF + b'{"from": "a", "for": "link"}\n' + b"[" * 4000 + b"\n",
    PROOF + b'{"from": "a", "for": "link"}\n{"go": 1}\n',
]


def say_to(address: str, line: bytes, patience_s: float = PATIENCE_S) -> bytes:
    """What a stranger hears that says this and no more, until the connection ends or it has no patience left."""
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection(split_address(address), patience_s) as stranger:
        stranger.sendall(line)
        stranger.shutdown(socket.SHUT_WR)
        while more := stranger.recv(4096):
            heard += more
    return heard


@pytest.mark.parametrize("line", HOSTILE)
def test_the_listener_survives_strangers(line: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with crew(2, connected=False) as (a, b):
        say_to(a.address, line)
        connect_all([a, b])
        assert a.peers == (b.worker,)
    assert "defect" not in capfd.readouterr().err


def test_the_token_is_compared_before_anything_else_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[object] = []
    monkeypatch.setattr("elaunch.workers.comm.wire.json.loads", read.append)
    for line in HOSTILE[:11]:
        with pytest.raises(ProtocolError):
            wire.read_hello(line, "secret")
    assert read == []


@contextmanager
def one_behind() -> Iterator[tuple[Transport, Transport, list[str]]]:
    """Two workers, of which the second has committed in generation 4 and the first has heard of generation 3; and who
    has greeted the second one.
    """
    with crew(2, connected=False) as (a, b), pytest.MonkeyPatch.context() as patch:
        for generation in (1, 4):
            b.hear(generation)
        b.interrupt(4)
        b.settle(4)
        a.hear(3)
        greeted: list[str] = []
        read = wire.read_hello

        def notes(line: bytes, token: str) -> wire.Hello:
            greeted.append((hello := read(line, token)).worker)
            return hello

        patch.setattr(wire, "read_hello", notes)
        yield a, b, greeted


def test_who_has_heard_of_no_generation_in_which_all_have_committed_hears_how_far_they_are_and_gets_no_link() -> None:
    with one_behind() as (a, b, greeted):
        members = addresses((b, a))  # the last one dials
        added: list[str] = []
        a._add = lambda link: added.append(link.peer)  # type: ignore[method-assign]
        with pytest.raises(GenerationChanged) as raised:
            a.connect(members, generation=3, timeout_s=PATIENCE_S)
        assert raised.value.args == GenerationChanged(4).args
        wait_until(lambda: not b.peers and not b._listener._handshakes, PATIENCE_S, "b to have dropped it")
        time.sleep(5 * listener.REDIAL_S)
        assert (greeted, a._failures, added) == ([a.worker], {}, []), "it was dialled again, or gave a link"
        del a._add
        probe = socket.create_connection(split_address(b.address))
        assert a._listener.ask_name(probe, time.monotonic() + PATIENCE_S) == b.worker
        a.interrupt(4)
        connect_all([a, b], generation=4)
        assert (a.peers, b.peers) == ((b.worker,), (a.worker,))


def test_who_hears_of_the_generation_while_it_dials_dials_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with one_behind() as (a, b, greeted):
        read = wire.read_ack

        def hears_first(line: bytes) -> wire.Ack:
            a.hear(4)
            return read(line)

        monkeypatch.setattr(wire, "read_ack", hears_first)
        a.prepare(addresses((b, a)))
        wait_until(lambda: b.peers == (a.worker,), PATIENCE_S, "the link")
        assert (a.peers, greeted) == ((b.worker,), [a.worker, a.worker])


def test_who_has_heard_of_a_newer_generation_than_others_gets_its_links() -> None:
    with crew(2, connected=False) as (a, b):
        b.settle(4)
        a.hear(1_000_005)
        a.prepare({each.worker: each.address for each in (b, a)})  # the last one dials
        wait_until(lambda: b.peers == (a.worker,), PATIENCE_S, "the link")


@pytest.mark.parametrize("links", ["unix", "tcp"], indirect=True)
def test_a_defect_in_a_handshake_ends_that_connection_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    original = wire.read_hello

    def fails_for_strangers(line: bytes, token: str) -> wire.Hello:
        if b"stranger" in line:
            raise MemoryError("a defect")
        return original(line, token)

    monkeypatch.setattr(wire, "read_hello", fails_for_strangers)
    with crew(2, connected=False) as (a, b):
        for _ in range(3):
            assert say_to(a.address, b"stranger\n") == b""
        connect_all([a, b])
    assert capfd.readouterr().err.count("Traceback") == 1


def test_a_listener_that_dies_all_the_same_ends_its_worker(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[tuple[str, BaseException]] = []
    monkeypatch.setattr(fatal, "end_process", lambda what, error: ended.append((what, error)))
    monkeypatch.setattr(listener.Listener, "_take_orders", lambda _: 1 // 0)
    with crew(1) as (a,):
        a.prepare({"b/0#0": a.address, a.worker: a.address})
        wait_until(lambda: ended, PATIENCE_S, "the end of the listener")
    assert ended[0][0] == "thread that makes its links"
    assert isinstance(ended[0][1], ZeroDivisionError)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_of_connections_that_say_nothing_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "most_strangers", lambda _: 8)
    with crew(2, connected=False) as (a, b), contextlib.ExitStack() as stack:
        where = split_address(a.address)
        silent = [stack.enter_context(socket.create_connection(where, PATIENCE_S)) for _ in range(40)]
        for stranger in silent[:32]:
            assert stranger.recv(1) == b""
        connect_all([a, b])
        for stranger in silent[-5:]:
            stranger.settimeout(0.01)
            with pytest.raises(TimeoutError):
                stranger.recv(1)
        swap(a, b, 1, 1)


@pytest.mark.parametrize("links", ["unix", "tcp"], indirect=True)
def test_peers_get_their_links_while_strangers_keep_coming(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dial that was dropped for a stranger's is repeated, and no live worker counts as dead by that."""
    monkeypatch.setattr(listener, "most_strangers", lambda _: 1)
    with crew(4, connected=False) as transports, contextlib.ExitStack() as stack:
        stop = threading.Event()
        stack.callback(stop.set)
        answers: list[str] = []
        silent: deque[socket.socket] = deque()

        def flood() -> None:
            while not stop.is_set():
                for transport in transports:
                    with contextlib.suppress(OSError):
                        silent.append(socket.create_connection(split_address(transport.address), PATIENCE_S))
                while len(silent) > 100:
                    silent.popleft().close()
                if len(answers) < 20:
                    answers.append(transports[0].probe(transports[1].address, PATIENCE_S, transports[1].worker))
                time.sleep(1e-3)

        flooding = Task(flood)
        for generation in range(1, 11):
            connect_all(transports, generation=generation)
            for transport in transports:
                assert len(transport.peers) == 3
                transport.retain(())
        stop.set()
        flooding.result()
        for stranger in silent:
            stranger.close()
    assert set(answers) == {"alive"}


def test_a_worker_out_of_descriptors_pauses_and_then_goes_on(spawn: Spawner) -> None:
    """Its listener stays readable all the time; the thread must neither spin nor die."""
    done = spawn.python("-m", "tests.jobs.out_of_files", name="out_of_files")
    assert done.wait(60) == 0, done.tail()
    assert "new connections wait: Too many open files; this process may have 64 open files" in done.text()


def test_a_silent_stranger_delays_nobody() -> None:
    with crew(2, connected=False) as (a, b):
        host, port = a.address.split(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
            stranger.sendall(b'{"elaunch"')
            connect_all([a, b])
            assert b.peers == (a.worker,)


def test_workers_that_dial_each_other_end_up_with_one_working_link() -> None:
    for _ in range(20):
        with crew(2, connected=False) as (a, b):
            # Each is the later one in the order that it was told.
            orders = {a: addresses([b, a]), b: addresses([a, b])}
            for transport, members in orders.items():
                transport.prepare(members)
            each(lambda f, m: f.connect(m, generation=1, timeout_s=PATIENCE_S), list(orders), list(orders.values()))
            swap(a, b, 1, 1)


def swap(a: Transport, b: Transport, generation: int, op: int, size: int = 100_000) -> None:
    """Both send to each other at once, and each gets the other's bytes."""
    bodies, got = [os.urandom(size), os.urandom(size)], [bytearray(size), bytearray(size)]
    pair = ((a, b), (b, a))

    def half(i: int) -> None:
        me, peer = pair[i]
        me.exchange(generation, op, [(peer.worker, 0, memoryview(bodies[i]))], [(peer.worker, 0, memoryview(got[i]))])

    together([lambda: half(0), lambda: half(1)])
    assert [bytes(got[1]), bytes(got[0])] == bodies


def test_probe_tells_the_living_from_the_dead_and_the_silent() -> None:
    with crew(2) as (a, b), socket.create_server(("127.0.0.1", 0)) as mute:
        assert a.probe(b.address, PATIENCE_S) == "alive"
        assert a.probe(b.address, PATIENCE_S, b.worker) == "alive"
        assert a.probe(b.address, PATIENCE_S, "b/9#9") == "refused"
        assert a.probe(f"127.0.0.1:{mute.getsockname()[1]}", 0.01) == "busy"
        address = b.address
        b.close()
        assert a.probe(address, PATIENCE_S) == "refused"
        assert a.peers == (b.worker,)


def test_who_asks_a_machine_that_does_not_answer_stops_once_the_answer_is_of_no_use() -> None:
    asked: list[int] = []

    def is_over() -> bool:
        asked.append(len(asked))
        return len(asked) == 3

    with crew(1) as (a,), mute_address() as address:
        assert a.probe(address, 0.05) == "silent"
        assert a.probe(address, PATIENCE_S, None, is_over) == "busy"
        assert asked == [0, 1, 2]
        assert a.probe(address, PATIENCE_S, None, lambda: True) == "busy"


def test_a_worker_whose_machine_has_a_name_is_asked_at_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    with crew(2) as (a, b):
        here = split_address(b.address)
        nobody = (*here[:1], find_free_port())
        kinds = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*kinds, nobody), (*kinds, here)])
        assert a.probe("worker-1:4711", PATIENCE_S, b.worker) == "alive"
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*kinds, nobody)])
        assert a.probe("worker-1:4711", PATIENCE_S, b.worker) == "refused"


def test_retain_closes_the_links_to_all_others() -> None:
    with crew(3) as (a, b, c):
        a.retain([c.worker])
        assert a.peers == (c.worker,)
        with pytest.raises(LinkLost, match="closed by the peer"):
            b.exchange(1, 1, receives=[(a.worker, 0, bytearray())])


def test_an_exchange_with_a_worker_without_a_link_is_lost() -> None:
    with crew(1) as (a,), pytest.raises(LinkLost, match="no link"):
        a.exchange(1, 1, receives=[("z/0#0", 0, bytearray())])


def test_interrupt_wakes_an_operation_of_an_older_generation() -> None:
    with crew(2) as (a, b):
        task = Task(lambda: a.exchange(1, 1, receives=[(b.worker, 0, bytearray())]))
        a.interrupt(5)
        with pytest.raises(GenerationChanged) as caught:
            task.result()
        assert caught.value.generation == 5


def test_interrupt_stops_operations_of_older_generations_that_start_later() -> None:
    with crew(2) as (a, b):
        a.interrupt(2)
        with pytest.raises(GenerationChanged):
            a.exchange(1, 1, sends=[(b.worker, 0, memoryview(b"x"))])


def test_interrupt_never_touches_the_announced_generation() -> None:
    with crew(2) as (a, b):
        got = bytearray()
        task = Task(lambda: a.exchange(3, 1, receives=[(b.worker, 0, got)]))
        for generation in (1, 2, 3):
            a.interrupt(generation)
        b.exchange(3, 1, sends=[(a.worker, 0, memoryview(b"still there"))])
        task.result()
        assert got == b"still there"


def test_a_deadline_ends_the_wait_for_a_silent_peer() -> None:
    with crew(2) as (a, b), pytest.raises(LinkLost, match=f"{b.worker}.*deadline"):
        a.exchange(1, 1, receives=[(b.worker, 0, bytearray())], deadline_s=0.0)


def test_frames_of_later_operations_and_generations_wait_until_they_are_wanted() -> None:
    with crew(2) as (a, b):
        for generation, op in ((1, 7), (2, 1)):
            b.exchange(generation, op, sends=[(a.worker, 0, memoryview(f"{generation}.{op}".encode()))])
        task = Task(lambda: a.exchange(1, 6, receives=[(b.worker, 0, bytearray())], deadline_s=0.0))
        with pytest.raises(LinkLost, match="deadline"):
            task.result()
        for generation, op in ((1, 7), (2, 1)):
            got = bytearray()
            a.exchange(generation, op, receives=[(b.worker, 0, got)])
            assert got == f"{generation}.{op}".encode()


def test_a_wait_on_a_parked_frame_ends_with_an_interruption() -> None:
    with crew(2) as (a, b):
        b.exchange(2, 1, sends=[(a.worker, 0, memoryview(b"new"))])
        task = Task(lambda: a.exchange(1, 1, receives=[(b.worker, 0, bytearray())]))
        a.interrupt(2)
        with pytest.raises(GenerationChanged):
            task.result()
        got = bytearray()
        a.exchange(2, 1, receives=[(b.worker, 0, got)])
        assert got == b"new"


def test_frames_of_older_generations_are_discarded() -> None:
    with crew(2) as (a, b):
        b.exchange(1, 1, sends=[(a.worker, 0, memoryview(bytes(50_000)))])
        b.exchange(2, 1, sends=[(a.worker, 0, memoryview(b"wanted"))])
        got = bytearray()
        a.exchange(2, 1, receives=[(b.worker, 0, got)])
        assert got == b"wanted"


@pytest.mark.parametrize(("op", "part", "size"), [(1, 0, 4), (2, 1, 4), (2, 0, 3), (2, 0, 5)])
def test_a_frame_nobody_can_expect_breaks_the_link(op: int, part: int, size: int) -> None:
    with crew(2) as (a, b):
        b.exchange(1, op, sends=[(a.worker, part, memoryview(bytes(size)))])
        with pytest.raises(LinkLost, match="protocol"):
            a.exchange(1, 2, receives=[(b.worker, 0, memoryview(bytearray(4)))])


def test_the_end_of_a_peer_is_seen_while_waiting_for_it() -> None:
    with crew(3) as (a, b, c):
        task = Task(lambda: a.exchange(1, 1, receives=[(b.worker, 0, bytearray()), (c.worker, 0, bytearray())]))
        c.close()
        with pytest.raises(LinkLost, match=c.worker):
            task.result()


def test_the_end_of_a_peer_is_seen_while_sending_to_it() -> None:
    with crew(2) as (a, b):
        task = Task(lambda: a.exchange(1, 1, sends=[(b.worker, 0, memoryview(bytes(MORE_BYTES)))]))
        b.close()
        with pytest.raises(LinkLost, match=b.worker):
            task.result()


def test_what_a_peer_sent_before_it_left_still_arrives() -> None:
    with crew(2) as (a, b):
        a.exchange(1, 1, sends=[(b.worker, 0, memoryview(b"never read"))])
        b.exchange(1, 1, sends=[(a.worker, 0, memoryview(b"last words"))])
        b.close()
        got = bytearray()
        a.exchange(1, 1, receives=[(b.worker, 0, got)])
        assert got == b"last words"


def test_a_link_that_was_reset_is_made_again() -> None:
    with crew(2) as (a, b):
        swap(a, b, 1, 1)
        a.retain([])
        wait_until(lambda: b._links[a.worker].hung_up(), PATIENCE_S, "the end of the old link")
        connect_all([a, b], generation=2)
        swap(a, b, 2, 1)


def test_the_link_of_a_joiner_stays_on_the_way_through_a_generation_that_it_is_not_in() -> None:
    """It has entered the next one, of which the others may not know yet, and may have begun to send there."""
    with crew(2) as (a, b):
        joiner = make_transport("b/0#0")
        try:
            joiner.hear(3)
            joiner.prepare(addresses([a, b, joiner]))
            wait_until(lambda: all(joiner.worker in one.peers for one in (a, b)), PATIENCE_S, "the links of the joiner")
            a.retain([b.worker], 2)
            swap(a, joiner, 3, 1)
            a.retain([b.worker], 3)
            wait_until(lambda: joiner._links[a.worker].hung_up(), PATIENCE_S, "the end of the link")
            b.retain([a.worker])
            wait_until(lambda: joiner._links[b.worker].hung_up(), PATIENCE_S, "the end of the other link")
        finally:
            joiner.close()


def test_a_joiner_is_linked_in_the_background_while_the_others_work() -> None:
    with crew(3) as transports:
        joiner = make_transport("b/0#0")
        try:
            members = addresses([*transports, joiner])
            joiner.prepare(members)
            for transport in transports:
                transport.prepare(members)
            op = 0
            while len(joiner.peers) < 3 or any(joiner.worker not in transport.peers for transport in transports):
                op += 1
                swap(transports[0], transports[1], 1, op)
            swap(transports[0], joiner, 2, 1)
        finally:
            joiner.close()


def test_prepare_does_not_raise_for_a_dead_joiner() -> None:
    with crew(2) as (a, b):
        b.prepare({"dead/0#0": "127.0.0.1:1", b.worker: b.address})
        wait_until(lambda: "dead/0#0" in b._failures, PATIENCE_S, "the dial to fail")
        swap(a, b, 1, 1)


def test_a_forked_child_does_not_keep_links_alive() -> None:
    read, write = os.pipe()
    with crew(2) as (a, b):
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            os._exit(0)
        try:
            b.close()
            with pytest.raises(LinkLost, match="closed by the peer"):
                a.exchange(1, 1, receives=[(b.worker, 0, bytearray())])
            assert a.probe(b.address, PATIENCE_S) == "refused"
        finally:
            os.write(write, b"x")
            os.waitpid(child, 0)
            os.close(read)
            os.close(write)


def test_links_stay_usable_however_an_operation_was_interrupted() -> None:
    chance, generations = random.Random(11), scaled(150, 300)
    with crew(3) as transports:
        checked = 0
        for generation in range(1, generations + 1):
            size = chance.choice([100, 70_000, 1_000_000, wire.SEGMENT_BYTES + 3])
            absent = chance.choice([None, *transports])
            bodies = {transport.worker: chance.randbytes(size) for transport in transports}
            tasks = [Task(partial(all_to_all, f, generation, bodies)) for f in transports if f is not absent]
            interrupted = absent is not None or chance.random() < 0.5
            if interrupted:
                for _ in range(chance.randrange(4000)):
                    pass
                for transport in chance.sample(transports, 3):
                    transport.interrupt(generation + 1)
            for task in tasks:
                try:
                    assert task.result() == [body for _, body in sorted(bodies.items())]
                    checked += 1
                except GenerationChanged:
                    assert interrupted
        assert checked > generations / 3


def all_to_all(me: Transport, generation: int, bodies: dict[str, bytes]) -> list[bytes]:
    """Everybody's body, in the order of the names, as they came to `me`."""
    got = {name: bytearray(len(body)) for name, body in bodies.items() if name != me.worker}
    sends = [(peer, 0, memoryview(bodies[me.worker])) for peer in got]
    me.exchange(generation, 1, sends, [(peer, 0, memoryview(into)) for peer, into in got.items()])
    arrived = {name: bytes(into) for name, into in got.items()}
    return [body for _, body in sorted({**arrived, me.worker: bodies[me.worker]}.items())]


def test_handshake_lines_are_checked() -> None:
    for generation in (0, 3, 1_000_003):
        hello = wire.Hello("a/0#0", "probe", generation)
        line = wire.hello_line("secret", hello)
        assert wire.read_hello(line, "secret") == hello
        assert b"secret" not in line
    for rest in (b"null\n", b"\xff\n", b'{"from": "a"}\n', b"\n"):
        with pytest.raises(ProtocolError, match=r"hello|line"):
            wire.read_hello(PROOF + rest, "secret")
    with pytest.raises(ProtocolError, match="not a worker"):
        wire.read_hello(b"{}\n", "secret")
    with pytest.raises(ProtocolError, match="no room"):
        wire.read_ack(wire.refusal_line("no room"))
    with pytest.raises(ProtocolError):
        wire.unpack_header(bytes(wire.HEADER_BYTES))


def test_errors_of_several_workers_name_the_one_that_left() -> None:
    with crew(4) as transports:
        *rest, leaver = transports
        calls = [lambda f=f: f.exchange(1, 1, receives=[(leaver.worker, 0, bytearray())]) for f in rest]
        leaver.close()
        assert [getattr(error, "peer", error) for error in outcomes(calls)] == [leaver.worker] * 3


def test_neither_an_idle_link_nor_one_whose_peer_takes_nothing_is_silent() -> None:
    """The kernel at the other end answers, whatever the process there does."""
    with crew(3) as (a, b, c):
        idle, full = b._links[c.worker], a._links[b.worker]
        body, got = memoryview(bytes(BIG_BYTES)), bytearray(BIG_BYTES)
        task = Task(lambda: a.exchange(1, 1, sends=[(b.worker, 0, body)]))
        silences = []
        for _ in range(12):
            time.sleep(0.25)
            silences += [idle.silent_s(), full.silent_s()]
        assert max(silences) < 2.0, silences
        b.exchange(1, 1, receives=[(a.worker, 0, memoryview(got))])
        task.result()


@pytest.mark.parametrize("waits", [0, 1])
def test_who_needs_a_link_to_one_that_has_gone_on_hears_of_that(waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes to no exchange of the older generation any more; the later of two dials at once, the other one waits."""
    monkeypatch.setattr(transport, "ASK_S", 0.05)
    with crew(2, connected=False) as transports:
        introduce_all(transports)
        here, gone = transports[waits], transports[1 - waits]
        gone.interrupt(2)
        with pytest.raises(GenerationChanged) as changed:
            here.exchange(1, 1, receives=[(gone.worker, 0, bytearray())])
        assert changed.value.generation == 2


@pytest.mark.parametrize("dials", [0, 1])
def test_who_connects_to_one_that_leaves_the_job_waits_for_the_next_generation(
    dials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still answers, as long as something holds it up in its end; no generation is above what it has answered."""
    monkeypatch.setattr(transport, "ASK_S", 0.05)
    with crew(2, connected=False) as transports:
        here, leaving = transports[dials], transports[1 - dials]
        leaving.interrupt(NEVER)
        with pytest.raises(GenerationChanged) as changed:
            here.connect(addresses(transports), generation=7, timeout_s=PATIENCE_S)
        assert changed.value.generation == 8


def test_a_link_that_is_made_while_a_generation_is_entered_tells_of_it_too() -> None:
    with crew(3, connected=False) as (a, b, c):
        introduce_all((a, b, c))
        connect_all((a, b))
        with a.entering(2):
            enters = Task(lambda: a.exchange(2, 1, receives=[(b.worker, 0, bytearray())]))
            wait_until(lambda: a._entering.generation == 2 and not a._entering.untold, PATIENCE_S, "b is told")
            c.connect(addresses((a, c)), generation=1, timeout_s=PATIENCE_S)
            with pytest.raises(GenerationChanged) as changed:
                c.exchange(1, 1, receives=[(a.worker, 0, bytearray())])
            assert changed.value.generation == 2
            b.exchange(2, 1, sends=[(a.worker, 0, memoryview(b"all"))])
            enters.result()


def test_a_link_that_broke_is_not_made_anew_with_those_that_are_missing() -> None:
    """What its peer has sent in this generation would be lost with it, and nothing would show that."""
    with crew(3, connected=False) as (a, b, c):
        introduce_all((a, b, c))
        connect_all((a, b))
        a.exchange(1, 1, sends=[(b.worker, 0, memoryview(b"all"))])
        a.retain(())
        wait_until(lambda: b.hung_up([a.worker]) != (), PATIENCE_S, "b's link breaks")
        sends = Task(lambda: c.exchange(1, 1, sends=[(b.worker, 0, memoryview(b"too"))]))
        got, too = bytearray(3), bytearray(3)
        receives = [(a.worker, 0, memoryview(got)), (c.worker, 0, memoryview(too))]
        b.exchange(1, 1, receives=receives, deadline_s=time.monotonic() + PATIENCE_S)
        assert (bytes(got), bytes(too)) == (b"all", b"too")
        sends.result()
        with pytest.raises(LinkLost):
            b.exchange(1, 2, receives=[(a.worker, 0, memoryview(got))])
