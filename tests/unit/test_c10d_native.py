"""Operations of torch.distributed in the native group of the members."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elaunch
from elaunch.errors import CollectiveFailed, LinkLost, StepInterrupted
from elaunch.hooks import Generation, Verdict, Vote
from elaunch.workers.comm.c10d.native import NativeWorks
from elaunch.workers.comm.c10d.works import NativeWork
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native import ended
from elaunch.workers.comm.native.gloo import GlooBulk
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.data_parallel.reducer import NativeSums
from tests.devices import needs_gpu
from tests.unit.comm_crew import Task, crew, each
from tests.unit.test_native import Device, gloo


class Crew:
    """Members whose operations go over Gloo: their groups, what each has under way, and what has failed."""

    def __init__(self, groups: list[Group], bulks: list[GlooBulk], takes: list[StepInterrupted] | None) -> None:
        self.bulks, self.failed = bulks, []  # type: list[GlooBulk], list[int]
        self.works = [NativeWorks(lambda bulk=bulk: bulk, "cpu", self.failed.append) for bulk in bulks]  # type: ignore[misc]
        take = takes.append if takes is not None else None
        self.members = [
            ElasticProcessGroup(lambda group=group: group, take, works)  # type: ignore[misc]
            for group, works in zip(groups, self.works, strict=True)
        ]


@contextmanager
def natively(size: int, takes: list[StepInterrupted] | None = None) -> Iterator[Crew]:
    with crew(size) as transports, gloo(size) as bulks:
        groups = [Group(transport, 1, [one.worker for one in transports]) for transport in transports]
        yield Crew(groups, bulks, takes)


def test_a_collective_returns_the_work_of_the_native_group() -> None:
    with natively(3) as crew_of_3:

        def run(pg: ElasticProcessGroup) -> list[float]:
            tensor = torch.full((4, 3), pg.rank() + 1.0).t()
            work = dist.all_reduce(tensor, group=pg, async_op=True)
            assert isinstance(work, NativeWork)
            work.wait()
            assert work.is_completed()
            assert work.is_success()
            return list(tensor.unique().tolist())

        assert each(run, crew_of_3.members) == [[6.0]] * 3
        assert not any(works._begun for works in crew_of_3.works), "what has been waited for is forgotten"


def test_a_future_has_the_tensors() -> None:
    with natively(2) as crew_of_2:

        def run(pg: ElasticProcessGroup) -> list[float]:
            future = pg.allreduce([torch.ones(2)], dist.AllreduceOptions()).get_future()
            return future.then(lambda done: (done.value()[0] / 2).tolist()).wait()  # type: ignore[no-any-return]

        assert each(run, crew_of_2.members) == [[1.0, 1.0]] * 2


def test_a_type_that_the_backend_does_not_know_goes_over_links() -> None:
    with natively(2) as crew_of_2:

        def run(pg: ElasticProcessGroup) -> list[int]:
            tensor = torch.tensor([pg.rank() + 1], dtype=torch.int16)
            dist.all_reduce(tensor, group=pg)
            return list(tensor.tolist())

        assert each(run, crew_of_2.members) == [[3]] * 2


def test_where_sums_have_a_fixed_order_what_combines_tensors_goes_over_links_and_the_rest_does_not() -> None:
    with natively(3) as crew_of_3:
        for works in crew_of_3.works:
            works._sums = False

        def run(pg: ElasticProcessGroup) -> tuple[list[float], list[float], list[float]]:
            total, part, whole = torch.full((3,), pg.rank() + 1.0), torch.zeros(1), torch.zeros(3)
            work = dist.all_reduce(total, group=pg, async_op=True)
            assert not isinstance(work, NativeWork)
            dist.reduce_scatter(part, list(torch.arange(3.0).split(1)), group=pg)
            gathered = dist.all_gather(list(whole.split(1)), part, group=pg, async_op=True)
            assert isinstance(gathered, NativeWork)
            gathered.wait()
            return total.tolist(), part.tolist(), whole.tolist()

        found = each(run, crew_of_3.members)
        assert found == [([6.0] * 3, [3.0 * rank], [0.0, 3.0, 6.0]) for rank in range(3)]


def test_sparse_tensors_are_refused_as_they_are_over_links() -> None:
    with natively(2) as crew_of_2, pytest.raises(ValueError, match=r"hand over tensor.to_dense\(\)"):
        dist.all_reduce(torch.eye(2).to_sparse(), group=crew_of_2.members[0])


@pytest.mark.parametrize("how", ["wait", "receive", "finish"])
def test_who_waits_for_a_silent_member_is_freed_by_the_interruption(how: str) -> None:
    with natively(2) as crew_of_2:
        pg, works = crew_of_2.members[0], crew_of_2.works[0]
        if how == "receive":
            task = Task(lambda: dist.recv(torch.ones(1 << 20), group=pg, group_src=1))
        else:
            work = dist.all_reduce(torch.ones(1000), group=pg, async_op=True)
            assert work is not None
            task = Task(works.finish if how == "finish" else work.wait)
        crew_of_2.bulks[0].poison()
        with pytest.raises(CollectiveFailed, match="a collective of generation 1 failed"):
            task.result(10)
        with pytest.raises(CollectiveFailed):
            dist.all_reduce(torch.ones(1), group=pg)
        assert crew_of_2.failed == [1], "it is told of once"
        with pytest.raises(CollectiveFailed):
            works.finish()
        works.drop()
        works.finish()


def test_who_waits_for_a_peer_whose_link_breaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not every backend sees that a machine is gone; the links do."""
    monkeypatch.setattr("elaunch.workers.comm.native.ended.LINKS_S", 0.01)
    with natively(2) as crew_of_2:
        pg, works = crew_of_2.members[0], crew_of_2.works[0]
        work = dist.all_reduce(torch.ones(1000), group=pg, async_op=True)
        assert work is not None
        waiting = Task(work.wait)
        link = pg._current().transport._links["a/1#0"]
        link.fail("no answer")
        with pytest.raises(LinkLost, match="a/1#0 lost: no answer"):
            waiting.result(10)
        with pytest.raises(LinkLost):
            works.finish()
        crew_of_2.bulks[0].poison()
        works.drop()
        assert work.is_completed()


def test_an_owner_that_takes_interruptions_gets_them_from_each_way_to_wait() -> None:
    taken: list[StepInterrupted] = []
    with natively(2, taken) as crew_of_2:
        pg = crew_of_2.members[0]
        first = dist.all_reduce(torch.ones(10), group=pg, async_op=True)
        second = pg.allreduce([torch.ones(10)], dist.AllreduceOptions()).get_future()
        crew_of_2.bulks[0].poison()
        assert first is not None
        first.wait()
        assert second.wait()[0].shape == (10,)
        dist.all_reduce(torch.ones(10), group=pg)
        assert len(taken) == 3
        assert all(isinstance(error, CollectiveFailed) for error in taken)
        with pytest.raises(CollectiveFailed):
            crew_of_2.works[0].finish()


def test_what_torch_raises_for_a_failed_future_is_known_as_the_interruption() -> None:
    with natively(2) as crew_of_2:
        pg, works = crew_of_2.members[0], crew_of_2.works[0]
        wrapped = DistributedDataParallel(nn.Linear(2, 1), process_group=pg, init_sync=False)
        loss = wrapped(torch.ones(1, 2)).sum()
        backward = Task(loss.backward)
        crew_of_2.bulks[0].poison()
        with pytest.raises((RuntimeError, StepInterrupted)) as raised:
            backward.result(10)
        assert isinstance(works.interruption(raised.value), CollectiveFailed)
        with pytest.raises(RuntimeError, match="of the script's own"):
            NativeWorks(lambda: None, "cpu").interruption(RuntimeError("of the script's own"))


def test_the_gradients_of_torchs_own_wrapper_are_right_and_stay_so_in_another_native_group() -> None:
    with natively(3) as crew_of_3:
        models = [nn.Linear(2, 1, bias=False) for _ in range(3)]
        wrapped = [
            DistributedDataParallel(model, process_group=pg, init_sync=False)
            for model, pg in zip(models, crew_of_3.members, strict=True)
        ]

        def backward(member: int) -> list[float]:
            models[member].zero_grad()
            wrapped[member](torch.full((1, 2), member + 1.0)).sum().backward()
            gradient = models[member].weight.grad
            assert gradient is not None
            return [round(value, 5) for value in gradient[0].tolist()]

        assert each(backward, range(3)) == [[2.0, 2.0]] * 3
        survivors = crew_of_3.members[:2]
        with gloo(2) as bulks:
            for pg, works, bulk in zip(survivors, crew_of_3.works[:2], bulks, strict=True):
                old = pg._current()
                left = Group(old.transport, 2, old.members[:2])
                pg._current = lambda left=left: left  # type: ignore[misc]
                works._current = lambda bulk=bulk: bulk  # type: ignore[misc]
            for _ in range(2):
                assert each(backward, range(2)) == [[1.5, 1.5]] * 2


def test_an_error_that_comes_late_is_found_before_the_commit() -> None:
    """A work that ends with garbage, as one of a device does after an abort, and says nothing."""
    device = Device()
    with crew(2) as transports:
        group = Group(transports[0], 1, [one.worker for one in transports])
        works = NativeWorks(lambda: device, "meta")
        pg = ElasticProcessGroup(lambda: group, None, works)
        device.poisoned = True
        dist.all_reduce(torch.ones(1, device="meta"), group=pg)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("elaunch.workers.comm.native.ended.here", lambda device: SimpleNamespace(query=lambda: True))
            with pytest.raises(CollectiveFailed, match="aborted"):
                works.finish()
        works.drop()
        works.finish()


class Framework:
    """Hooks of a framework that has nothing to do."""

    def vote(self) -> Vote:
        return Vote(holds=True)

    def pause(self) -> None:
        pass

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        pass

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, object]:
        return {}

    def transfer(self, group: Group, verdict: Verdict) -> int:
        return 0

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        pass


def test_a_member_does_not_commit_a_step_in_which_an_operation_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    member = elaunch.attach(Framework())
    try:
        member.join()
        works = member.torch_groups.works
        works.error = failed = CollectiveFailed(1, "aborted")
        with pytest.raises(CollectiveFailed):
            member.commit()
        agreed: list[StepInterrupted | None] = []
        monkeypatch.setattr(member, "agree", agreed.append)

        def fails(words: str) -> None:
            with member.attempt():
                raise RuntimeError(words)

        fails("torch's words for it")
        assert agreed == [failed]
        member._hooks.pause()
        works.finish()
        member.commit()
        with pytest.raises(RuntimeError, match="of the script's own"):
            fails("of the script's own")
    finally:
        member.close()


def test_a_device_that_is_told_to_wait_shows_that_in_the_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a script that asks it for a value does not look as if it hung by itself."""
    shown: list[tuple[str, str]] = []
    places = iter("abcdefgh")
    monkeypatch.setattr("elaunch.workers.comm.native.ended.here", lambda device: next(places))
    monkeypatch.setattr("elaunch.workers.heartbeat.is_shown", lambda: True)
    monkeypatch.setattr("elaunch.workers.heartbeat.on_device", lambda before, after: shown.append((before, after)))
    with crew(2) as transports:
        group = Group(transports[0], 1, [one.worker for one in transports])
        pg = ElasticProcessGroup(lambda: group, None, NativeWorks(lambda: Device(), "meta"))
        work = dist.all_reduce(torch.ones(1, device="meta"), group=pg, async_op=True)
        assert work is not None
        assert shown == [], "the stream goes on"
        work.wait()
        assert shown == [("a", "b")]
        dist.all_reduce(torch.ones(1, device="meta"), group=pg)
        assert shown[1:] == [("c", "d"), ("e", "f")], "the stream waits as soon as it is called"
        sums = NativeSums(Device())
        sums.add(torch.ones(1, device="meta"))
        sums.join(lambda: None)
        assert shown[3:] == [("g", "h")]


class Runtime:
    """CUDA's, as far as recording graphs goes: while one is recorded, only a thread that stands aside may look."""

    def __init__(self) -> None:
        self.aside: set[int] = set()
        self.calls = 0

    def set_mode(self, mode: Any) -> int:
        assert mode._obj.value == 2, "relaxed"
        self.calls += 1
        self.aside.add(threading.get_ident())
        return 0

    def query(self) -> bool:
        assert threading.get_ident() in self.aside, "the recording is spoiled"
        return True


def test_another_thread_that_looks_at_a_device_does_not_spoil_a_graph_that_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, shown = Runtime(), list[Any]()
    monkeypatch.setattr("elaunch.workers.comm.native.ended.here", lambda device: runtime)
    monkeypatch.setattr("elaunch.workers.heartbeat.is_shown", lambda: True)
    monkeypatch.setattr("elaunch.workers.heartbeat.on_device", lambda *marks: shown.extend(marks))
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    monkeypatch.setattr("elaunch.workers.comm.native.ended._capture_mode_setter", lambda: runtime.set_mode)
    with ended.shown(torch.device("cuda")):
        pass
    found: list[bool] = []
    looking = threading.Thread(target=lambda: found.extend(mark.query() for mark in shown * 2))
    looking.start()
    looking.join()
    assert found == [True] * 4
    assert runtime.calls == 1, "a thread says it once"


@pytest.mark.parametrize(("records", "has_setter"), [(True, True), (False, False)])
def test_nobody_is_to_look_at_what_a_graph_records_or_where_that_would_spoil_one(
    records: bool, has_setter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaunch.workers.heartbeat.is_shown", lambda: True)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: records)
    monkeypatch.setattr(
        "elaunch.workers.comm.native.ended._capture_mode_setter", lambda: Runtime().set_mode if has_setter else None
    )
    with ended.shown(torch.device("cuda")):  # this torch has no event for such a device
        pass


@needs_gpu
def test_a_cuda_graph_is_recorded_while_another_thread_looks_at_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device, shown = torch.device("cuda", torch.cuda.current_device()), list[Any]()
    monkeypatch.setattr("elaunch.workers.heartbeat.is_shown", lambda: True)
    monkeypatch.setattr("elaunch.workers.heartbeat.on_device", lambda *marks: shown.extend(marks))
    with ended.shown(device):
        torch.ones(8, device=device).sum()
    torch.cuda.synchronize()
    x, graph, found = torch.ones(8, device=device), torch.cuda.CUDAGraph(), list[bool]()
    with torch.cuda.graph(graph):
        y = x * 2
        looking = threading.Thread(target=lambda: found.extend(mark.query() for mark in shown))
        looking.start()
        looking.join()
    assert found == [True, True]
    graph.replay()
    assert y.sum().item() == 16


class Over(dist.Work):
    """An operation that has ended; to wait for it is what a test may not do."""

    def __init__(self, is_right: bool) -> None:
        super().__init__()
        self._is_right, self.waits = is_right, 0

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return self._is_right

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        raise RuntimeError("it has failed")


@pytest.mark.parametrize("is_right", [True, False])
def test_what_has_ended_well_is_not_waited_for(is_right: bool) -> None:
    """Before each commit that is most of a step's operations; what has failed is still told."""
    over, errors, ended = Over(is_right), list[Exception](), list[NativeWork]()
    work = NativeWork(over, ["b"], 1, lambda: None, errors.append, ended.append, None, torch.device("cpu"))
    for _ in range(2):
        assert work.wait()
    assert ended == [work]
    assert [str(error) for error in errors] == ([] if is_right else ["it has failed"])
    assert (over.waits == 0) is is_right
