"""Batches of messages of torch.distributed in a native group whose operations run one after the other, as NCCL's do."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elaunch import threads
from elaunch.errors import CollectiveFailed, StepInterrupted
from elaunch.workers.comm.c10d import tables
from elaunch.workers.comm.c10d.native import NativeWorks
from elaunch.workers.comm.c10d.works import MessageWork, NativeWork
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.nccl import NcclBulk
from elaunch.workers.comm.process_group import ElasticProcessGroup
from tests.unit.comm_crew import Task, crew, each, introduce_all
from tests.unit.test_native import gloo

SHORT_S = 0.3
"""For what is to wait for ever to be seen to do so."""


class Wire:
    """Where the ends of messages meet: a send is over when its peer receives, and a receive when its peer sends."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: dict[tuple[bool, int, int], list[tuple[torch.Tensor, threading.Event]]] = {}
        self.is_over = False

    def come(self, sends: bool, source: int, target: int, tensor: torch.Tensor) -> threading.Event:
        """Brings one end of a message; the event is set when the other is there, too."""
        done = threading.Event()
        with self._changed:
            others = self._waiting.setdefault((not sends, source, target), [])
            if others:
                other, event = others.pop(0)
                (other if sends else tensor).copy_(tensor if sends else other)
                event.set()
                done.set()
            else:
                self._waiting.setdefault((sends, source, target), []).append((tensor, done))
        return done

    def free(self) -> None:
        """Ends all messages, with garbage."""
        self.is_over = True
        with self._changed:
            for waiting in self._waiting.values():
                for _, event in waiting:
                    event.set()


class StreamWork(dist.Work):
    """What has been given to a stream."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.over, self._wire = threading.Event(), wire

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.over.wait(timeout.total_seconds() if timeout else None):
            raise RuntimeError("time-out")
        if self._wire.is_over:
            raise RuntimeError("aborted")
        return True

    def is_completed(self) -> bool:
        return self.over.is_set()

    def is_success(self) -> bool:
        return self.over.is_set()


Step = Callable[[], threading.Event]


class StandIn:
    """A group like torch's of NCCL: one stream, on which an operation begins when the one before it is over.

    What is called between `_start_coalescing` and `_end_coalescing` begins together, and returns no work of its own.
    """

    supports_coalescing = True

    def __init__(self, rank: int, wire: Wire) -> None:
        self.rank, self.wire = rank, wire
        self.open: list[Step] | None = None
        self.calls: list[str] = []
        self._given: queue.SimpleQueue[tuple[Sequence[Step], StreamWork] | None] = queue.SimpleQueue()
        self._thread = threads.start("stream", self._run, lambda _: None)

    def _run(self) -> None:
        while (one := self._given.get()) is not None:
            steps, work = one
            for event in [step() for step in steps]:
                while not self.wire.is_over and not event.wait(0.01):
                    pass
            work.over.set()

    def _begin(self, steps: Sequence[Step]) -> StreamWork:
        work = StreamWork(self.wire)
        self._given.put((steps, work))
        return work

    def _issue(self, step: Step) -> StreamWork | None:
        if self.wire.is_over:
            raise RuntimeError("the communicator is aborted")
        if self.open is None:
            return self._begin([step])
        self.open.append(step)
        return None

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> StreamWork | None:
        kept = tensors[0].clone()
        self.calls.append("send")
        return self._issue(lambda: self.wire.come(True, self.rank, to, kept))

    def recv(self, tensors: list[torch.Tensor], from_: int, tag: int) -> StreamWork | None:
        self.calls.append("recv")
        return self._issue(lambda: self.wire.come(False, from_, self.rank, tensors[0]))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> StreamWork | None:
        tensors[0].fill_(42.0)
        done = threading.Event()
        done.set()
        work = self._issue(lambda: done)
        return work if opts is None or opts.asyncOp else None

    def _start_coalescing(self) -> None:
        assert self.open is None, "a group of NCCL was left open"
        self.open = []
        self.calls.append("(")

    def _end_coalescing(self) -> StreamWork | None:
        assert self.open is not None, "there is no group of NCCL"
        steps, self.open = self.open, None
        self.calls.append(")")
        return self._begin(steps) if steps else None

    def abort(self) -> None:
        self.calls.append("abort")
        self.wire.free()

    def get_error(self) -> Any:
        return SimpleNamespace(name="SUCCESS")

    def end(self) -> None:
        self.wire.free()
        self._given.put(None)
        self._thread.join()


class Ring:
    """Members whose native group is a stand-in."""

    def __init__(self, groups: Sequence[Group], takes: list[StepInterrupted] | None = None) -> None:
        wire = Wire()
        self.stand_ins = [StandIn(rank, wire) for rank in range(len(groups))]
        self.bulks = [NcclBulk(torch.device("cpu")) for _ in groups]
        for bulk, stand_in in zip(self.bulks, self.stand_ins, strict=True):
            bulk._hold(stand_in)
        self.works = [NativeWorks(lambda bulk=bulk: bulk, "cpu") for bulk in self.bulks]  # type: ignore[misc]
        take = takes.append if takes is not None else None
        self.members = [
            ElasticProcessGroup(lambda group=group: group, take, works)  # type: ignore[misc]
            for group, works in zip(groups, self.works, strict=True)
        ]

    def poison(self) -> None:
        for bulk in self.bulks:
            bulk.poison()


@contextmanager
def ring(size: int, takes: list[StepInterrupted] | None = None) -> Iterator[Ring]:
    with crew(size) as transports:
        introduce_all(transports)
        groups = [Group(transport, 1, [one.worker for one in transports]) for transport in transports]
        made = Ring(groups, takes)
        made.members[0].register()
        for member in made.members[1:]:
            distributed_c10d._world.pg_group_ranks[member] = member.ranks
        try:
            yield made
        finally:
            for one in made.stand_ins:
                one.end()
            dist.destroy_process_group()


def messages(pg: ElasticProcessGroup, out: torch.Tensor, came: torch.Tensor, first: str) -> list[dist.P2POp]:
    """A message to the right and one from the left."""
    left, right = (pg.rank() - 1) % pg.size(), (pg.rank() + 1) % pg.size()
    send = dist.P2POp(dist.isend, out, group=pg, group_peer=right)
    receive = dist.P2POp(dist.irecv, came, group=pg, group_peer=left)
    return [send, receive] if first == "send" else [receive, send]


def begin(pg: ElasticProcessGroup, one: dist.P2POp) -> dist.Work:
    """Begins one message by itself."""
    call = pg.send if one.op is dist.isend else pg.recv
    return call([one.tensor], one.group_peer, 0)


def test_a_ring_in_which_all_send_first_ends_as_one_work_each() -> None:
    with ring(3) as ring_of_3:

        def run(pg: ElasticProcessGroup) -> list[float]:
            came = torch.zeros(1000)
            works = dist.batch_isend_irecv(messages(pg, torch.full((1000,), pg.rank() + 1.0), came, "send"))
            assert [type(work) for work in works] == [NativeWork]
            assert works[0].wait(timedelta(seconds=20))
            return list(came.unique().tolist())

        assert each(run, ring_of_3.members) == [[3.0], [1.0], [2.0]]
        assert [one.calls for one in ring_of_3.stand_ins] == [["(", "send", "recv", ")"]] * 3
        for works in ring_of_3.works:
            works.finish()


def test_what_would_happen_without_a_batch() -> None:
    """The stand-in has NCCL's manners: all send first, one after the other, and none comes to receive."""
    with ring(2) as ring_of_2:
        came = [torch.zeros(10) for _ in range(2)]

        def run(pg: ElasticProcessGroup) -> list[dist.Work]:
            return [begin(pg, one) for one in messages(pg, torch.ones(10), came[pg.rank()], "send")]

        (send, _), _ = each(run, ring_of_2.members)
        with pytest.raises(RuntimeError, match="time-out"):
            send.wait(timedelta(seconds=SHORT_S))
        ring_of_2.poison()


def test_several_messages_with_one_peer_come_in_their_order() -> None:
    with ring(2) as ring_of_2:

        def run(pg: ElasticProcessGroup) -> list[float]:
            came = [torch.zeros(4) for _ in range(3)]
            sent = [torch.full((4,), 10.0 * pg.rank() + number) for number in range(3)]
            operations = [dist.P2POp(dist.isend, one, group=pg, group_peer=1 - pg.rank()) for one in sent]
            operations += [dist.P2POp(dist.irecv, one, group=pg, group_peer=1 - pg.rank()) for one in came]
            (work,) = dist.batch_isend_irecv(operations)
            work.wait(timedelta(seconds=20))
            return [one[0].item() for one in came]

        assert each(run, ring_of_2.members) == [[10.0, 11.0, 12.0], [0.0, 1.0, 2.0]]


def test_where_messages_go_over_links_or_gloo_each_has_its_own_work() -> None:
    def run(pg: ElasticProcessGroup) -> list[type]:
        came = torch.zeros(10)
        works = dist.batch_isend_irecv(messages(pg, torch.ones(10), came, "send"))
        for work in works:
            work.wait()
        assert came.tolist() == [1.0] * 10
        return [type(work) for work in works]

    with ring(2) as ring_of_2:
        for works in ring_of_2.works:
            works._device_type = "cuda"  # so the tensors are in host memory, and not those of the native group
        assert each(run, ring_of_2.members) == [[MessageWork] * 2] * 2
        assert [one.calls for one in ring_of_2.stand_ins] == [[], []]
        with gloo(2) as bulks:
            for works, bulk in zip(ring_of_2.works, bulks, strict=True):
                works._device_type, works._current = "cpu", lambda bulk=bulk: bulk  # type: ignore[misc]
            assert each(run, ring_of_2.members) == [[NativeWork] * 2] * 2


def test_collectives_in_torchs_coalescing_manager_begin_together_and_are_awaited_before_the_commit() -> None:
    with ring(2) as ring_of_2:
        pg, works = ring_of_2.members[0], ring_of_2.works[0]
        tensors = [torch.zeros(3), torch.zeros(3)]
        with distributed_c10d._coalescing_manager(pg, torch.device("cpu"), async_ops=True) as manager:
            for tensor in tensors:
                pg.allreduce([tensor], dist.AllreduceOptions()).wait()  # no wait: the batch is not over
        assert ring_of_2.stand_ins[0].calls == ["(", ")"]
        assert len(works._begun) == 1
        works.finish()
        assert all(work.is_completed() for work in manager.works)
        assert [tensor.tolist() for tensor in tensors] == [[42.0] * 3] * 2


def test_who_waits_for_a_batch_is_freed_by_the_interruption() -> None:
    with ring(2) as ring_of_2:
        pg, works = ring_of_2.members[0], ring_of_2.works[0]
        (work,) = dist.batch_isend_irecv(messages(pg, torch.ones(10), torch.zeros(10), "send"))
        waiting = Task(work.wait)
        ring_of_2.poison()
        with pytest.raises(CollectiveFailed, match="a collective of generation 1 failed"):
            waiting.result(20)
        with pytest.raises(CollectiveFailed):
            works.finish()
        works.drop()
        works.finish()


class Error(Exception):
    pass


@pytest.mark.parametrize("when", ["before", "within", "by the script"])
def test_a_batch_that_is_interrupted_leaves_no_group_open(when: str) -> None:
    """What came after it on this thread would never begin, and torch would take each sum for one of the batch."""
    with ring(2) as ring_of_2:
        pg, works, stand_in = ring_of_2.members[0], ring_of_2.works[0], ring_of_2.stand_ins[0]
        operations = messages(pg, torch.ones(10), torch.zeros(10), "send")

        def run() -> None:
            with distributed_c10d._coalescing_manager(pg, torch.device("cpu"), async_ops=True):
                for one in operations:
                    begin(pg, one)
                    if when == "within":
                        ring_of_2.bulks[0].poison()
                    elif when == "by the script":
                        raise Error

        if when == "before":
            ring_of_2.bulks[0].poison()
        with pytest.raises(Error if when == "by the script" else CollectiveFailed):
            run()
        assert stand_in.open is None
        assert pg not in distributed_c10d._world.pg_coalesce_state
        assert works._batch is None
        assert pg._coalesced is None


def test_an_abort_waits_until_what_is_put_together_is_given_to_the_device() -> None:
    """It frees the communicator that the operations of an open group of NCCL name."""
    with ring(2) as ring_of_2:
        bulk, stand_in = ring_of_2.bulks[0], ring_of_2.stand_ins[0]
        assert bulk.start_batch()
        bulk.backend_group().send([torch.ones(1)], 1, 0)
        bulk.poison()
        with pytest.raises(RuntimeError, match="the group is closed"):
            bulk.backend_group()
        assert bulk.end_batch() is not None
        assert bulk._abort is not None
        bulk._abort.join(20)
        assert stand_in.calls == ["(", "send", ")", "abort"]


def test_an_abort_does_not_wait_long_for_a_thread_that_does_not_come_back() -> None:
    with ring(2) as ring_of_2:
        bulk = ring_of_2.bulks[0]
        assert bulk.start_batch()
        bulk.poison()
        assert bulk._abort is not None
        bulk._abort.join(20)
        assert ring_of_2.stand_ins[0].calls == ["(", "abort"]
        bulk.end_batch()


def test_a_step_that_is_dropped_ends_its_batch() -> None:
    with ring(2) as ring_of_2:
        pg, works = ring_of_2.members[0], ring_of_2.works[0]
        assert pg._start_coalescing(torch.device("cpu"))
        ring_of_2.poison()
        works.drop()
        assert ring_of_2.stand_ins[0].open is None


def test_an_owner_that_takes_interruptions_gets_those_of_a_batch() -> None:
    taken: list[StepInterrupted] = []
    with ring(2, taken) as ring_of_2:
        pg = ring_of_2.members[0]
        ring_of_2.stand_ins[0]._end_coalescing = lambda: pytest.fail("not called")  # type: ignore[method-assign]

        def fails() -> None:
            ring_of_2.stand_ins[0].open = None
            raise RuntimeError("the communicator is aborted")

        ring_of_2.stand_ins[0]._end_coalescing = fails  # type: ignore[method-assign]
        for work in dist.batch_isend_irecv(messages(pg, torch.ones(10), torch.zeros(10), "send")):
            work.wait()
        assert [type(error) for error in taken] == [CollectiveFailed]
        with pytest.raises(CollectiveFailed):
            ring_of_2.works[0].finish()


def test_an_operation_that_is_over_at_once_on_the_callers_stream_has_a_work_although_nccl_returns_none() -> None:
    with ring(2) as ring_of_2:
        tensor = torch.zeros(3)
        dist.all_reduce(tensor, group=ring_of_2.members[0])
        assert tensor.tolist() == [42.0] * 3
        ring_of_2.works[0].finish()
        assert not ring_of_2.works[0]._begun


def test_torch_has_its_own_functions_again() -> None:
    own = dist.batch_isend_irecv, distributed_c10d._coalescing_manager
    with ring(2):
        assert dist.batch_isend_irecv is not own[0]
    assert (dist.batch_isend_irecv, distributed_c10d._coalescing_manager) == own
    assert not tables._TORCHS
