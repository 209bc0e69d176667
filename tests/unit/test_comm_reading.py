"""What moves in bulk between workers of one machine is read where the sender has it, or sent where that is refused."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from elaunch.errors import GenerationChanged, LinkLost
from elaunch.workers.comm import here, incoming, wire
from elaunch.workers.comm.connection import MEASURED_BYTES
from elaunch.workers.comm.here import OFFERED_BYTES, OfferMark, address_of, fetch, let_read
from elaunch.workers.comm.link import Link
from elaunch.workers.comm.transport import Transport
from tests.unit.comm_crew import Task, crew, together

Fetch = Callable[[int, wire.Offer, memoryview], Any]


def offer_of(data: bytearray, mark: OfferMark, number: int = 1) -> wire.Offer:
    return wire.Offer(address_of(memoryview(data)), len(data), mark.address, mark.secret, number)


def messages(chance: random.Random, most: int = 6) -> list[bytearray]:
    sizes = [1, 1000, OFFERED_BYTES - 1, OFFERED_BYTES, OFFERED_BYTES + 1, wire.SEGMENT_BYTES + 7]
    return [bytearray(chance.randbytes(chance.choice(sizes))) for _ in range(chance.randint(0, most))]


def stream_both_ways(a: Transport, b: Transport, seed: int, generation: int = 1, op: int = 1) -> None:
    """Moves random messages in both directions at once and compares what has come."""
    chance = random.Random(seed)
    sent = {a: messages(chance), b: messages(chance)}
    came = {a: [bytearray(len(one)) for one in sent[b]], b: [bytearray(len(one)) for one in sent[a]]}

    def one_end(here_: Transport, there: Transport) -> None:
        here_.stream(
            generation,
            op,
            {there.worker: map(memoryview, sent[here_])},
            {there.worker: map(memoryview, came[here_])},
        )

    together([lambda: one_end(a, b), lambda: one_end(b, a)])
    assert came == {a: sent[b], b: sent[a]}


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, instead: Fetch | None = None) -> Iterator[list[int]]:
    """Sizes of what is fetched; `instead` fetches in the place of the kernel."""
    sizes: list[int] = []

    def counting(process: int, offer: wire.Offer, target: memoryview) -> Any:
        sizes.append(offer.nbytes)
        return (instead or fetch)(process, offer, target)

    with monkeypatch.context() as patched:
        patched.setattr(incoming, "fetch", counting)
        yield sizes


def refusing(kernel_error: int) -> Callable[..., int]:
    return lambda *_: kernel_error


# -- one process reads another ----------------------------------------------------------------------------------------


def test_what_was_offered_is_read() -> None:
    data, into, mark = bytearray(os.urandom(100_000)), bytearray(100_000), OfferMark()
    assert fetch(os.getpid(), offer_of(data, mark), memoryview(into)) == "fetched"
    assert into == data


def test_an_offer_that_was_withdrawn_is_not_taken_for_one_that_holds() -> None:
    data, into, mark = bytearray(100), bytearray(100), OfferMark()
    mark.withdraw(3)
    assert fetch(os.getpid(), offer_of(data, mark, 2), memoryview(into)) == "withdrawn"
    assert fetch(os.getpid(), offer_of(data, mark, 3), memoryview(into)) == "fetched"


def test_a_process_that_has_the_number_of_a_dead_one_is_not_read() -> None:
    data, into, mark = bytearray(100), bytearray(100), OfferMark()
    offer = offer_of(data, mark)._replace(secret=mark.secret ^ 1)
    assert fetch(os.getpid(), offer, memoryview(into)) == "gone"


def test_a_process_that_has_ended_is_gone() -> None:
    with subprocess.Popen(["true"]) as child:
        pass
    data, into, mark = bytearray(100), bytearray(100), OfferMark()
    assert fetch(child.pid, offer_of(data, mark), memoryview(into)) == "gone"


def test_memory_that_the_kernel_does_not_give_is_refused() -> None:
    data, into, mark = bytearray(100), bytearray(100), OfferMark()
    assert fetch(os.getpid(), offer_of(data, mark)._replace(address=8), memoryview(into)) == "refused"


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOSYS])
def test_a_kernel_that_forbids_it_refuses(error: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "_read", refusing(error))
    data, into, mark = bytearray(100), bytearray(100), OfferMark()
    assert fetch(os.getpid(), offer_of(data, mark), memoryview(into)) == "refused"


def test_the_agents_other_workers_may_read_where_only_parents_could(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Kernel:
        def prctl(self, option: int, process: ctypes.c_ulong, *rest: int) -> None:
            calls.append((option, process.value, *rest))

    monkeypatch.setattr(here, "_LIBC", Kernel())
    let_read(4711)
    let_read(0)  # it is in another container
    let_read(None)  # it is another user's
    assert calls == [(0x59616D61, 4711, 0, 0, 0)]


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_long_messages_are_fetched_and_short_ones_sent(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with crew(2) as (a, b), counted(monkeypatch) as sizes:
        for op in range(1, 4):
            stream_both_ways(a, b, 10 * seed + op, op=op)
        assert sizes
        assert min(sizes) >= 7  # the end of a message of one segment and a bit


def test_how_fast_a_link_is_shows_to_who_has_read_enough() -> None:
    body, got = bytearray(2 * MEASURED_BYTES), bytearray(2 * MEASURED_BYTES)
    with crew(2) as (a, b):
        together(
            [
                lambda: a.stream(1, 1, {b.worker: iter([memoryview(body)])}, {}),
                lambda: b.stream(1, 1, {}, {a.worker: iter([memoryview(got)])}),
            ]
        )
        rate, _ = b.rates()["a/0"]
        assert 1e7 < rate < 1e12


def test_workers_that_use_tcp_fetch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(here.LINKS, "tcp")
    with crew(2) as (a, b), counted(monkeypatch) as sizes:
        stream_both_ways(a, b, 1)
        assert not sizes


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("good", [0, 1, 3])
def test_what_is_refused_is_sent(seed: int, good: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or after some were permitted; nothing more is offered then."""
    left = {"n": good}

    def sometimes(process: int, offer: wire.Offer, target: memoryview) -> Any:
        left["n"] -= 1
        return fetch(process, offer, target) if left["n"] >= 0 else "refused"

    with crew(2) as (a, b), counted(monkeypatch, sometimes) as sizes:
        for op in range(1, 4):
            stream_both_ways(a, b, 10 * seed + op, op=op)
        assert len(sizes) <= good + 2  # each end finds out once


def test_a_body_of_several_segments_of_which_one_is_refused_comes_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its segments have been offered when the answer to the second comes."""
    n_read = 0

    def second_is_refused(process: int, offer: wire.Offer, target: memoryview) -> Any:
        nonlocal n_read
        n_read += 1
        return "refused" if n_read == 2 else fetch(process, offer, target)

    body = bytearray(os.urandom(4 * wire.SEGMENT_BYTES + 5))
    got = bytearray()
    arrived: list[int] = []
    left: list[int] = []
    with link_pair() as (sender, receiver), counted(monkeypatch, second_is_refused) as sizes:
        receiver.open(1, 1, arrived.append)
        sender.post_send(1, 1, 9, memoryview(body), lambda: left.append(9), may_offer=True)
        sender.advance()
        receiver.post_receive(1, 1, 9, got)
        receiver.settle()
        while receiver.wants() or sender.wants():
            sender.advance()
            receiver.advance()
        assert (left, arrived) == ([9], [9])
        assert got == body
        assert len(sizes) == 2


@contextmanager
def link_pair() -> Iterator[tuple[Link, Link]]:
    near, far = socket.socketpair(socket.AF_UNIX)
    links = Link("far", near), Link("near", far)
    try:
        yield links
    finally:
        for link in links:
            link.close()


def test_memory_is_the_senders_again_only_when_it_was_read() -> None:
    body, got = bytearray(os.urandom(OFFERED_BYTES)), bytearray(OFFERED_BYTES)
    left: list[int] = []
    with link_pair() as (sender, receiver):
        sender.post_send(1, 1, 0, memoryview(body), lambda: left.append(0), may_offer=True)
        for _ in range(10):
            sender.advance()
        assert sender.sending
        assert not left
        receiver.post_receive(1, 1, 0, memoryview(got))
        while receiver.wants():
            receiver.advance()
        sender.advance()
        assert (left, sender.sending, got) == ([0], False, body)


def test_what_was_given_up_while_it_was_read_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender is interrupted, and uses its memory for something else, just when the receiver reads it."""
    body, got = bytearray(b"\1" * OFFERED_BYTES), bytearray(OFFERED_BYTES)
    with link_pair() as (sender, receiver):

        def overtaken(process: int, offer: wire.Offer, target: memoryview) -> Any:
            sender.finish()
            body[:] = b"\2" * OFFERED_BYTES
            return fetch(process, offer, target)

        with counted(monkeypatch, overtaken):
            sender.post_send(1, 1, 0, memoryview(body), may_offer=True)
            sender.advance()
            receiver.post_receive(1, 1, 0, memoryview(got))
            for _ in range(5):
                receiver.advance()
        assert receiver.receiving, "garbage was taken for what the peer sent"
        receiver.finish()
        # Both ends go on with the next generation.
        body[:], got[:] = b"\3" * OFFERED_BYTES, bytes(OFFERED_BYTES)
        sender.post_send(2, 1, 0, memoryview(body), may_offer=True)
        receiver.post_receive(2, 1, 0, memoryview(got))
        while receiver.wants() or sender.wants():
            sender.advance()
            receiver.advance()
        assert got == body


def test_an_answer_that_comes_too_late_is_nothing_to_the_next_operation() -> None:
    body, got = bytearray(os.urandom(OFFERED_BYTES)), bytearray(OFFERED_BYTES)
    with link_pair() as (sender, receiver):
        sender.post_send(1, 1, 0, memoryview(body), may_offer=True)
        sender.advance()
        receiver.post_receive(1, 1, 0, memoryview(got))
        while receiver.wants():
            receiver.advance()
        sender.finish()  # before it has seen the answer
        left: list[int] = []
        sender.post_send(2, 1, 0, memoryview(body), lambda: left.append(0), may_offer=True)
        for _ in range(5):
            sender.advance()
        assert not left, "the answer to the offer before was taken for one to this"
        receiver.post_receive(2, 1, 0, memoryview(got))
        while receiver.wants() or sender.wants():
            sender.advance()
            receiver.advance()
        assert left == [0]


def test_interrupted_streams_leave_links_that_work(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()

    def slow(process: int, offer: wire.Offer, target: memoryview) -> Any:
        reading.set()
        assert go_on.wait(30)
        return fetch(process, offer, target)

    with crew(2) as (a, b):
        with counted(monkeypatch, slow):
            body, got = bytearray(2 * OFFERED_BYTES), bytearray(2 * OFFERED_BYTES)
            sending = Task(lambda: a.stream(1, 1, {b.worker: iter([memoryview(body)])}, {}))
            receiving = Task(lambda: b.stream(1, 1, {}, {a.worker: iter([memoryview(got)])}))
            assert reading.wait(30)
            a.interrupt(2)
            with pytest.raises(GenerationChanged):
                sending.result()
            go_on.set()
            b.interrupt(2)
            with pytest.raises(GenerationChanged):
                receiving.result()
        stream_both_ways(a, b, 3, generation=2)


def advance_for_ever(link: Link) -> None:
    while True:
        link.advance()


OFFERS_AND_WAITS = """
import socket, sys
from elaunch.workers.comm.here import OFFERED_BYTES
from elaunch.workers.comm.link import Link

sock = socket.socket(socket.AF_UNIX)
sock.connect(sys.argv[1])
link = Link("near", sock)
link.post_send(1, 1, 0, memoryview(bytearray(OFFERED_BYTES)), may_offer=True)
link.advance()
print("offered", flush=True)
sys.stdin.read()
"""


def test_a_peer_that_is_killed_before_it_is_read_is_lost(tmp_path: Path) -> None:
    """Its process is no more, and a part that it has offered never comes."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "near"))
        server.listen()
        command = [sys.executable, "-c", OFFERS_AND_WAITS, str(tmp_path / "near")]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
            assert peer.stdout is not None
            assert peer.stdout.readline() == b"offered\n"
            link = Link("far", server.accept()[0])
            assert link.process == peer.pid
            peer.kill()
        try:
            link.post_receive(1, 1, 0, memoryview(bytearray(OFFERED_BYTES)))
            with pytest.raises(LinkLost, match="its process has ended"):
                advance_for_ever(link)
        finally:
            link.close()
