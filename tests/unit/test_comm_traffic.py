"""Traffic: messages inside one operation, whatever the order, and what ends it."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.errors import GenerationChanged, LinkLost
from elaunch.workers.comm import wire
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.link import Link
from elaunch.workers.comm.traffic import PARTS, Traffic
from elaunch.workers.comm.transport import Transport
from tests.helpers import scaled, wait_until
from tests.unit.comm_crew import PATIENCE_S, Task, crew, each, together

BIG_BYTES = 24 << 20
"""More than the kernel holds of an unread message."""

SIZES = [0, 1, 100, 70_000, wire.SEGMENT_BYTES, wire.SEGMENT_BYTES * 2 + 5]

Message = tuple[int, int, int, bytes]
"""Sender, receiver, part, body."""


def open_all(transports: list[Transport]) -> list[Traffic]:
    """One operation opened on all. Where a test does not close it, the crew's end interrupts it."""
    names = [transport.worker for transport in transports]
    return [transport.open(1, 1, names) for transport in transports]


def take_part(transport: Transport, op: int, names: list[str], messages: list[Message], chance: random.Random) -> None:
    """Sends and receives this worker's share of the messages in a random order, in one operation."""
    me = names.index(transport.worker)
    bodies = {(names[sender], part): body for sender, receiver, part, body in messages if receiver == me}
    got = {key: memoryview(bytearray(len(body))) for key, body in bodies.items()}
    with transport.open(1, op, chance.sample(names, chance.randrange(len(names) + 1))) as traffic:
        own = [(names[receiver], part, body) for sender, receiver, part, body in messages if sender == me]
        sends = [partial(traffic.send, peer, part, memoryview(body)) for peer, part, body in own]
        posts = [partial(traffic.post, peer, part, into) for (peer, part), into in got.items()]
        actions = [*sends, *posts]
        for action in chance.sample(actions, len(actions)):
            action()
        for peer, part in chance.sample(list(got), len(got)):
            traffic.wait(peer, part)
            assert traffic.arrived(peer, part)
            assert got[peer, part] == bodies[peer, part]


@settings(max_examples=scaled(10, 20), deadline=None)
@given(st.data())
def test_messages_arrive_intact_in_whatever_order_they_are_sent_and_posted(data: st.DataObject) -> None:
    size = data.draw(st.integers(2, 5))
    chance = random.Random(data.draw(st.integers(0, 1 << 30)))
    with crew(size) as transports:
        names = [transport.worker for transport in transports]
        for op in (2, 4):
            ends = st.tuples(st.integers(0, size - 1), st.integers(1, size - 1), st.sampled_from(SIZES))
            drawn = data.draw(st.lists(ends, max_size=12))
            parts = chance.sample(range(PARTS), len(drawn))
            messages = [
                (sender, (sender + distance) % size, part, chance.randbytes(body_bytes))
                for (sender, distance, body_bytes), part in zip(drawn, parts, strict=True)
            ]
            seeds = [random.Random(chance.randrange(1 << 30)) for _ in transports]
            each(take_part, transports, [op] * size, [names] * size, [messages] * size, seeds)


def test_what_is_fed_leaves_when_nothing_else_waits() -> None:
    made: list[int] = []

    def parts() -> Iterator[tuple[int, memoryview]]:
        for number in range(12):
            made.append(number)
            yield 10 + number, memoryview(bytes([number]) * BIG_BYTES)

    with crew(2) as (a, b):
        at_a, at_b = open_all([a, b])
        at_a.feed(b.worker, parts())
        wait_until(lambda: made, PATIENCE_S, "the first part to be asked for")
        at_a.send(b.worker, 1, memoryview(b"urgent"))
        urgent = bytearray(6)
        got = [bytearray(BIG_BYTES) for _ in range(12)]
        at_b.post(a.worker, 1, memoryview(urgent))
        for number, into in enumerate(got):
            at_b.post(a.worker, 10 + number, memoryview(into))
        at_b.wait(a.worker, 1)
        assert urgent == b"urgent"
        assert len(made) < 12, "it did not wait for all that is fed"
        together([at_a.close, at_b.close])
        assert made == list(range(12))
        assert all(into == bytes([number]) * BIG_BYTES for number, into in enumerate(got))


def test_an_error_of_what_is_fed_ends_the_traffic() -> None:
    def parts() -> Iterator[tuple[int, memoryview]]:
        yield 1, memoryview(b"first")
        raise RuntimeError("no second")

    with crew(2) as (a, b):
        at_a, _ = open_all([a, b])
        at_a.feed(b.worker, parts())
        with pytest.raises(RuntimeError, match="no second"):
            at_a.close()


def test_a_part_that_came_early_is_handed_over_when_it_is_posted() -> None:
    with crew(2) as (a, b):
        at_a, at_b = open_all([a, b])
        bodies = [os.urandom(size) for size in SIZES]
        for part, body in enumerate(bodies):
            at_a.send(b.worker, part, memoryview(body))
        last = len(bodies) - 1
        came = b._links[a.worker]._incoming
        wait_until(lambda: last in came.early and last not in came.wanted, PATIENCE_S, "all parts")
        assert not at_b.arrived(a.worker, 0)
        got = [bytearray(len(body)) for body in bodies]
        for part, into in enumerate(got):
            at_b.post(a.worker, part, memoryview(into))
            at_b.wait(a.worker, part)
        assert got == bodies
        together([at_a.close, at_b.close])


@contextmanager
def link_pair() -> Iterator[tuple[Link, Link]]:
    """The two ends of a connection, driven by the test."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    links = Link("far", near), Link("near", far)
    try:
        yield links
    finally:
        for link in links:
            link.close()


def test_a_part_may_be_posted_while_it_comes() -> None:
    body = os.urandom(wire.SEGMENT_BYTES * 2 + 5)
    got = bytearray(len(body))
    arrived: list[int] = []
    left: list[int] = []
    with link_pair() as (sender, receiver):
        receiver.open(1, 1, arrived.append)
        sender.post_send(1, 1, 9, memoryview(body), lambda: left.append(9))
        while not receiver._incoming.early:
            sender.advance()
            receiver.advance()
        assert not left
        receiver.post_receive(1, 1, 9, memoryview(got))
        receiver.settle()
        while receiver.wants():
            assert not arrived
            sender.advance()
            receiver.advance()
        assert (left, arrived) == ([9], [9])
        assert got == body


def test_what_fits_leaves_without_the_driving_thread() -> None:
    with link_pair() as (sender, receiver):
        wake = os.eventfd(0, os.EFD_NONBLOCK)
        try:
            traffic = Traffic(1, 1, [sender], lambda peer: sender, wake, lambda: None)
            got = bytearray(100)
            receiver.open(1, 1, lambda part: None)
            receiver.post_receive(1, 1, 9, memoryview(got))
            receiver.settle()
            body = os.urandom(100)
            traffic.send("far", 9, memoryview(body))  # nobody drives it
            deadline_s = time.monotonic() + PATIENCE_S
            while receiver.wants():
                assert time.monotonic() < deadline_s
                receiver.advance()
            assert got == body
            with pytest.raises(BlockingIOError):
                os.eventfd_read(wake)
        finally:
            os.close(wake)


def test_many_threads_send_and_post_at_once() -> None:
    n_threads, n_parts = 4, 25
    chance = random.Random(5)
    with crew(2) as transports:
        bodies = [chance.randbytes(chance.choice([10, 70_000, 600_000])) for _ in range(n_threads * n_parts)]
        got = [[bytearray(len(body)) for body in bodies] for _ in transports]
        traffics = open_all(transports)

        def work(me: int, thread: int) -> None:
            peer = transports[1 - me].worker
            parts = range(thread, len(bodies), n_threads)
            for part in parts:
                traffics[me].send(peer, part, memoryview(bodies[part]))
                traffics[me].post(peer, part, memoryview(got[me][part]))
            for part in parts:
                traffics[me].wait(peer, part)

        together([partial(work, me, thread) for me in range(2) for thread in range(n_threads)])
        together([traffic.close for traffic in traffics])
        assert got == [bodies, bodies]


def test_flush_does_not_need_the_peer_to_post() -> None:
    with crew(2) as transports:
        traffics = open_all(transports)
        a, b = transports
        body = os.urandom(BIG_BYTES)
        for traffic, peer in zip(traffics, (b, a), strict=True):
            traffic.send(peer.worker, 0, memoryview(body))
        together([traffic.flush for traffic in traffics])
        for traffic, peer in zip(traffics, (b, a), strict=True):
            got = bytearray(len(body))
            traffic.post(peer.worker, 0, memoryview(got))
            traffic.wait(peer.worker, 0)
            assert got == body
        together([traffic.close for traffic in traffics])


def test_close_waits_for_what_was_posted() -> None:
    with crew(2) as (a, b):
        at_a, at_b = open_all([a, b])
        got = bytearray(3)
        at_b.post(a.worker, 0, memoryview(got))
        task = Task(at_b.close)
        at_a.send(b.worker, 0, memoryview(b"yes"))
        at_a.close()
        task.result()
        assert got == b"yes"
        at_b.wait(a.worker, 0)


def test_what_was_sent_is_let_go_when_it_has_left() -> None:
    class Owner:
        pass

    with crew(2) as (a, b):
        at_a, _ = open_all([a, b])
        owner = Owner()
        gone = weakref.ref(owner)
        at_a.send(b.worker, 0, memoryview(bytes(10)), keep=owner)
        del owner
        at_a.flush()
        gc.collect()
        wait_until(lambda: gone() is None, PATIENCE_S, "the release of what was kept")


def test_a_collective_works_after_the_traffic_is_closed() -> None:
    with crew(3) as transports:
        names = [transport.worker for transport in transports]

        def steps(transport: Transport) -> list[float]:
            group = Group(transport, 1, names)
            after, before = names[(group.rank + 1) % 3], names[group.rank - 1]
            for number in range(1, 6):
                got, own = bytearray(100_000), bytes([number]) * 100_000
                with group.open() as traffic:
                    traffic.send(after, number, memoryview(own))
                    traffic.post(before, number, memoryview(got))
                    traffic.wait(before, number)
                assert got == own
                total = torch.full((5,), float(group.rank + number))
                group.all_reduce(total)
            group.barrier()
            return list(total)

        assert each(steps, transports) == [[18.0] * 5] * 3


def test_a_fast_member_goes_on_while_a_slow_one_is_in_the_traffic_before() -> None:
    with crew(3) as (a, b, c):
        names = [a.worker, b.worker, c.worker]
        slow = b.open(1, 2, names)
        for op in (2, 4, 6):
            with a.open(1, op, names) as fast:
                fast.send(b.worker, 0, memoryview(bytes([op])))
        wait_until(lambda: b._links[a.worker]._incoming.parked, PATIENCE_S, "a frame of the next operation")
        for op in (2, 4, 6):
            got = [bytearray(1), bytearray(1)]
            for peer, into in zip((a, c), got, strict=True):
                slow.post(peer.worker, 0, memoryview(into))
            with c.open(1, op, names) as late:
                late.send(b.worker, 0, memoryview(bytes([op])))
            slow.close()
            assert got == [bytes([op]), bytes([op])]
            slow = b.open(1, op + 2, names)


def test_what_other_groups_do_next_is_not_mistaken_for_messages() -> None:
    with crew(3) as transports:
        names = [transport.worker for transport in transports]
        a, b, c = (Group(transport, 1, names) for transport in transports)
        sub_a, sub_b = (Group(transport, 1, names[:2]) for transport in transports[:2])
        slow = b.open()
        a.open().close()
        tensor = torch.ones(4)
        reduction = Task(lambda: sub_a.all_reduce(tensor))
        wait_until(lambda: transports[1]._links[names[0]]._incoming.parked, PATIENCE_S, "the other group's frame")
        with c.open() as late:
            late.send(names[1], 0, memoryview(b"late"))
        got = bytearray(4)
        slow.post(names[2], 0, memoryview(got))
        slow.close()
        sub_b.all_reduce(torch.ones(4))
        reduction.result()
        assert got == b"late"
        assert tensor.tolist() == [2.0] * 4


def test_a_group_of_one_and_a_traffic_without_messages_open_and_close() -> None:
    with crew(2) as transports:
        for _ in range(3):
            with Group(transports[0], 1, [transports[0].worker]).open() as traffic:
                traffic.flush()
        each(lambda transport: transport.open(1, 1).close(), transports)


def test_an_exchange_waits_until_the_traffic_is_closed() -> None:
    with crew(2) as (a, b):
        traffic = a.open(1, 1, [b.worker])
        got = bytearray()
        task = Task(lambda: a.exchange(1, 2, receives=[(b.worker, 0, got)]))
        b.exchange(1, 2, sends=[(a.worker, 0, memoryview(b"after"))])
        wait_until(lambda: a._links[b.worker]._incoming.parked, PATIENCE_S, "the exchange's frame")
        assert task.running
        traffic.close()
        traffic.close()
        task.result()
        assert got == b"after"


@pytest.mark.parametrize("blocked", ["wait", "flush", "close"])
def test_an_interruption_wakes_whoever_waits_and_fails_what_follows(blocked: str) -> None:
    with crew(2) as (a, b):
        traffic = a.open(1, 1, [b.worker])
        traffic.post(b.worker, 0, memoryview(bytearray(1)))
        traffic.send(b.worker, 0, memoryview(bytes(BIG_BYTES)))
        calls: dict[str, Callable[[], None]] = {
            "wait": partial(traffic.wait, b.worker, 0),
            "flush": traffic.flush,
            "close": traffic.close,
        }
        task = Task(calls[blocked])
        wait_until(lambda: traffic._waiting == 1, PATIENCE_S, "somebody to wait")
        a.interrupt(2)
        with pytest.raises(GenerationChanged) as caught:
            task.result()
        assert caught.value.generation == 2
        for call in (
            partial(traffic.wait, b.worker, 0),
            partial(traffic.post, b.worker, 1, memoryview(bytearray(1))),
            partial(traffic.send, b.worker, 1, memoryview(b"x")),
            traffic.flush,
            traffic.check,
        ):
            with pytest.raises(GenerationChanged):
                call()
        if blocked != "close":
            with pytest.raises(GenerationChanged):
                traffic.close()
        with pytest.raises(GenerationChanged):
            a.open(1, 2)


def test_a_peer_of_a_newer_generation_ends_the_traffic() -> None:
    with crew(2) as (a, b):
        traffic = a.open(1, 1, [b.worker])
        traffic.post(b.worker, 0, memoryview(bytearray(1)))
        b.exchange(7, 1, sends=[(a.worker, 0, memoryview(b"new"))])
        with pytest.raises(GenerationChanged) as caught:
            traffic.wait(b.worker, 0)
        assert caught.value.generation == 7
        got = bytearray()
        a.exchange(7, 1, receives=[(b.worker, 0, got)])
        assert got == b"new"


def test_the_death_of_a_peer_wakes_a_wait_for_another() -> None:
    with crew(3) as transports:
        traffics = open_all(transports)
        a, b, c = transports
        waiting = traffics[:2]
        for traffic, peer in zip(waiting, (b, a), strict=True):
            traffic.post(peer.worker, 0, memoryview(bytearray(1)))
        tasks = [Task(partial(traffic.wait, p.worker, 0)) for traffic, p in zip(waiting, (b, a), strict=True)]
        for link in c._links.values():
            link.socket.shutdown(socket.SHUT_RDWR)
        for task in tasks:
            with pytest.raises(LinkLost) as caught:
                task.result()
            assert caught.value.peer == c.worker
        wait_until(lambda: traffics[2]._ended, PATIENCE_S, "the end, though it owes and awaits nothing")
        with pytest.raises(LinkLost):
            traffics[2].close()


def test_a_transport_that_closes_wakes_those_who_wait_for_it() -> None:
    with crew(2) as (a, b):
        traffic = a.open(1, 1, [b.worker])
        traffic.post(b.worker, 0, memoryview(bytearray(1)))
        task = Task(lambda: traffic.wait(b.worker, 0))
        b.close()
        with pytest.raises(LinkLost, match="closed by the peer"):
            task.result()


def test_an_error_inside_gives_up_what_is_under_way() -> None:
    with crew(2) as (a, b):
        traffic = a.open(1, 1, [b.worker])
        traffic.post(b.worker, 0, memoryview(bytearray(1)))
        traffic.send(b.worker, 0, memoryview(bytes(BIG_BYTES)))
        with pytest.raises(ZeroDivisionError), traffic:
            raise ZeroDivisionError
        with pytest.raises(RuntimeError, match="given up"):
            traffic.wait(b.worker, 0)
        with pytest.raises(RuntimeError, match="given up"):
            traffic.send(b.worker, 1, memoryview(b"x"))
        got = bytearray()
        task = Task(lambda: a.exchange(2, 1, sends=[(b.worker, 0, memoryview(b"next"))]))
        b.exchange(2, 1, receives=[(a.worker, 0, got)])
        task.result()
        assert got == b"next"


def test_links_stay_usable_however_a_traffic_was_interrupted() -> None:
    chance, generations = random.Random(12), scaled(75, 150)
    with crew(3) as transports:
        checked = 0
        for generation in range(1, generations + 1):
            body = chance.randbytes(chance.choice([100, 70_000, 1_000_000, wire.SEGMENT_BYTES + 3]))
            absent = chance.choice([None, *transports])
            tasks = [Task(partial(to_all, f, generation, body, transports)) for f in transports if f is not absent]
            interrupted = absent is not None or chance.random() < 0.5
            if interrupted:
                for _ in range(chance.randrange(4000)):
                    pass
                for transport in chance.sample(transports, 3):
                    transport.interrupt(generation + 1)
            for task in tasks:
                try:
                    task.result()
                    checked += 1
                except GenerationChanged:
                    assert interrupted
        assert checked > generations / 3


def to_all(me: Transport, generation: int, body: bytes, transports: list[Transport]) -> None:
    """Sends the body to everybody and gets it from everybody, before and after posting."""
    others = [transport.worker for transport in transports if transport is not me]
    got = {(peer, part): bytearray(len(body)) for peer in others for part in range(3)}
    with me.open(generation, 1, others) as traffic:
        for index, ((peer, part), into) in enumerate(got.items()):
            traffic.send(peer, part, memoryview(body))
            if index:
                traffic.post(peer, part, memoryview(into))
        traffic.post(others[0], 0, memoryview(got[others[0], 0]))
        for peer, part in got:
            traffic.wait(peer, part)
    assert all(into == body for into in got.values())


def test_misuse_is_refused_where_it_happens() -> None:
    with crew(2) as (a, b):
        with a.open(1, 1, [b.worker]) as traffic, b.open(1, 1, [a.worker]) as other:
            traffic.send(b.worker, 3, memoryview(b"x"))
            other.post(a.worker, 3, memoryview(bytearray(1)))
            with pytest.raises(ValueError, match=f"part 3 is sent to {b.worker} twice"):
                traffic.send(b.worker, 3, memoryview(b"y"))
            with pytest.raises(ValueError, match=f"part 3 is posted from {a.worker} twice"):
                other.post(a.worker, 3, memoryview(bytearray(1)))
            with pytest.raises(ValueError, match="post it first"):
                traffic.wait(b.worker, 3)
            for part in (-1, PARTS):
                with pytest.raises(ValueError, match=str(part)):
                    traffic.send(b.worker, part, memoryview(b"x"))
            for call in (traffic.send, traffic.post):
                with pytest.raises(LinkLost, match=r"z/0#0.*no link"):
                    call("z/0#0", 0, memoryview(bytearray(1)))
        with pytest.raises(RuntimeError, match="is closed"):
            traffic.send(b.worker, 4, memoryview(b"x"))


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("size", [3, 5])
def test_a_part_of_another_size_breaks_the_link(size: int, early: bool) -> None:
    with crew(2) as (a, b):
        at_a, at_b = open_all([a, b])
        if not early:
            at_b.post(a.worker, 0, memoryview(bytearray(4)))
        at_a.send(b.worker, 0, memoryview(bytes(size)))
        if early:
            wait_until(lambda: 0 in b._links[a.worker]._incoming.early, PATIENCE_S, "the part")
            at_b.post(a.worker, 0, memoryview(bytearray(4)))
        with pytest.raises(LinkLost, match=f"protocol: part 0 .*{size} bytes came, 4 expected"):
            at_b.wait(a.worker, 0)


def test_a_part_that_was_never_posted_breaks_the_link_in_the_end() -> None:
    with crew(2) as (a, b):
        at_a, at_b = open_all([a, b])
        at_a.send(b.worker, 8, memoryview(b"what for?"))
        wait_until(lambda: 8 in b._links[a.worker]._incoming.early, PATIENCE_S, "the part")
        with pytest.raises(LinkLost, match=r"parts \[8\] .* never posted"):
            at_b.close()


def test_the_thread_of_a_transport_serves_all_its_traffics_and_ends_with_it() -> None:
    with crew(2) as (a, b):
        before = threading.active_count()
        for op in range(1, 50):
            together([a.open(1, op, [b.worker]).close, b.open(1, op, [a.worker]).close])
        assert threading.active_count() <= before + 2
        drivers = [transport._driver for transport in (a, b)]
    assert not any(driver is None or driver.is_alive() for driver in drivers)
