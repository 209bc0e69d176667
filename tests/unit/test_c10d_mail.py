"""Messages that go their way while both workers do something else."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from elaunch.errors import GenerationChanged, LinkLost, StepInterrupted
from elaunch.workers.comm.c10d.mail import Channel
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.comm.transport import Transport
from tests.helpers import wait_until
from tests.unit.comm_crew import Task, crew, each, introduce_all

LARGE = 4 << 20  # elements: 16 MiB


@contextmanager
def members(size: int) -> Iterator[tuple[list[Transport], list[ElasticProcessGroup]]]:
    with crew(size) as transports:
        introduce_all(transports)
        groups = [Group(transport, 1, [one.worker for one in transports]) for transport in transports]
        yield transports, [ElasticProcessGroup(lambda group=group: group) for group in groups]  # type: ignore[misc]


def test_both_send_16_mib_before_either_receives() -> None:
    with members(2) as (_, groups):

        def run(pg: ElasticProcessGroup) -> bool:
            peer = 1 - pg.rank()
            sent = dist.isend(torch.full((LARGE,), float(pg.rank())), group=pg, group_dst=peer)
            got = torch.empty(LARGE)
            received = dist.irecv(got, group=pg, group_src=peer)
            assert sent is not None
            assert received is not None
            received.wait()
            sent.wait()
            assert sent.is_completed()
            assert received.is_success()
            return bool((got == peer).all())

        assert each(run, groups) == [True, True]


def test_a_batch_of_messages_in_a_ring() -> None:
    with members(3) as (_, groups):

        def run(pg: ElasticProcessGroup) -> float:
            right, left = (pg.rank() + 1) % 3, (pg.rank() - 1) % 3
            got = torch.empty(LARGE // 4)
            sent = torch.full((LARGE // 4,), float(pg.rank()))
            for work in (pg.send([sent], right), pg.recv([got], left)):
                work.wait()
            return got[-1].item()

        assert each(run, groups) == [2.0, 0.0, 1.0]


def test_messages_are_matched_by_tag_and_in_their_order() -> None:
    with members(2) as (_, groups):

        def run(pg: ElasticProcessGroup) -> list[float]:
            tags = [1, 2, 1, 2]
            if pg.rank() == 0:
                for number, tag in enumerate(tags):
                    dist.send(torch.tensor([number + 1.0]), group=pg, group_dst=1, tag=tag)
                return []
            got = [torch.zeros(1) for _ in tags]
            for number, tag in ((1, 2), (0, 1), (3, 2), (2, 1)):
                pg.recv([got[number]], 0, tag).wait()
            return [tensor.item() for tensor in got]

        assert each(run, groups)[1] == [1.0, 2.0, 3.0, 4.0]


def test_a_message_crosses_a_collective() -> None:
    with members(2) as (_, groups):

        def run(pg: ElasticProcessGroup) -> list[float]:
            got, total = torch.zeros(2), torch.ones(1)
            if pg.rank() == 0:
                work = dist.irecv(got, group=pg, group_src=1)
                dist.all_reduce(total, group=pg)
                assert work is not None
                work.wait()
            else:
                dist.all_reduce(total, group=pg)
                dist.send(torch.ones(2), group=pg, group_dst=0)
            return [*got.tolist(), total.item()]

        assert each(run, groups) == [[1.0, 1.0, 2.0], [0.0, 0.0, 2.0]]


def test_a_tensor_that_is_no_run_of_memory_is_filled_and_a_future_tells_of_it() -> None:
    with members(1) as (_, (pg,)):
        got = torch.zeros(2, 3).t()
        future = pg.recv([got], 0).get_future()
        assert not future.done()
        pg.send([torch.arange(6.0).view(3, 2)], 0).wait()  # to itself
        assert future.wait()[0].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        assert got.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]


@pytest.mark.parametrize("first", ["sent", "asked"])
def test_tensors_of_different_sizes_are_told_of(first: str) -> None:
    with members(2) as (transports, (one, other)):
        if first == "sent":
            one.send([torch.ones(2)], 1).wait()
            mail = transports[1].mail
            wait_until(lambda: any(box.early for box in mail._boxes.values()), 20, "the message to come")
        work = other.recv([torch.ones(3)], 0)
        if first == "asked":
            one.send([torch.ones(2)], 1).wait()
        with pytest.raises(ValueError, match="a/0#0 has sent 8 bytes where this worker receives 12"):
            work.wait()
        dist.send(torch.ones(3), group=one, group_dst=1)  # and the next one is as it should be
        other.recv([torch.ones(3)], 0).wait()


def test_a_sender_must_be_named() -> None:
    with members(1) as (_, (pg,)), pytest.raises(ValueError, match="name the sender by src or group_src"):
        pg.recv_anysource([torch.ones(1)])


def test_who_waits_is_interrupted_and_the_next_generation_has_its_own_messages() -> None:
    with members(2) as (transports, (one, other)):
        stale = one.send([torch.ones(LARGE)], 1)
        waiting = Task(one.recv([torch.ones(1)], 1).wait)
        for transport in transports:
            transport.interrupt(2)
        with pytest.raises(GenerationChanged):
            waiting.result(10)
        for pg in (one, other):
            with pytest.raises(GenerationChanged):
                pg.send([torch.ones(1)], 1 - pg.rank())
            old = pg._current()
            pg._current = lambda old=old: Group(old.transport, 2, old.members)  # type: ignore[misc]
        got = torch.zeros(2)
        dist.send(torch.full((2,), 7.0), group=one, group_dst=1)
        other.recv([got], 0).wait()
        assert got.tolist() == [7.0, 7.0]
        assert stale.is_completed()


def test_a_message_to_a_peer_whose_generation_this_worker_has_not_heard_of_ends_with_that() -> None:
    with crew(2, connected=False) as (one, other):
        introduce_all([one, other])
        one.hear(3)
        other.interrupt(4)
        other.settle(4)
        letter = one.mail.send(other.worker, Channel(3, 0, 0), memoryview(b"1234"))
        with pytest.raises(GenerationChanged) as raised:
            Task(letter.wait).result(10)
        assert raised.value.args == GenerationChanged(4).args
        one.interrupt(4)
        one.hear(4)
        got = memoryview(bytearray(4))
        sent = one.mail.send(other.worker, Channel(4, 0, 0), memoryview(b"5678"))
        other.mail.receive(one.worker, Channel(4, 0, 0), got).wait()
        sent.wait()
        assert bytes(got) == b"5678"


def test_an_owner_takes_the_interruption_of_a_message() -> None:
    taken: list[StepInterrupted] = []
    with crew(2) as transports:
        introduce_all(transports)
        group = Group(transports[0], 1, [one.worker for one in transports])
        pg = ElasticProcessGroup(lambda: group, taken.append)
        work = pg.recv([torch.ones(1)], 1)
        transports[0].interrupt(2)
        work.wait()
        assert [type(error) for error in taken] == [GenerationChanged]


def test_who_waits_for_a_peer_whose_link_breaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elaunch.workers.comm.c10d.mail.LOOK_S", 0.01)
    with members(2) as (transports, (one, _)):
        waiting = Task(one.recv([torch.ones(1)], 1).wait)
        transports[1].interrupt(1 << 60)
        transports[1].close()
        with pytest.raises(LinkLost, match="a/1#0"):
            waiting.result(10)


def test_a_message_to_somebody_unknown_or_gone_ends_in_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elaunch.workers.comm.c10d.mail.CONNECT_TIMEOUT_S", 0.1)
    with members(2) as (transports, (one, _)):
        letter = transports[0].mail.send("b/0#0", Channel(1, 0, 0), memoryview(b"x"))
        with pytest.raises(LinkLost, match="b/0#0 lost: a message did not leave: its address is not known"):
            letter.wait(10)
        transports[1].close()
        with pytest.raises(LinkLost, match="a message did not leave"):
            one.send([torch.ones(1)], 1).wait()


def test_nothing_is_left_behind() -> None:
    def count() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def swap(pg: ElasticProcessGroup) -> None:
        pg.send([torch.ones(1)], 1 - pg.rank()).wait()
        pg.recv([torch.ones(1)], 1 - pg.rank()).wait()

    with members(2) as (_, groups):
        each(swap, groups)
    before = count()
    for _ in range(5):
        with members(2) as (transports, groups):
            each(swap, groups)
            for transport in transports:
                transport.interrupt(2)
                assert not transport.mail._open
                assert not transport.mail._boxes
    fewer = lambda: all(now <= then for now, then in zip(count(), before, strict=True))  # noqa: E731
    wait_until(fewer, 20, f"{count()} threads and descriptors to become {before} again")
