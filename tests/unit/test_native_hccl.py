"""Native groups over HCCL, on made-up NPUs that fail as torch_npu does: it has not been tried on a device."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elaunch.errors import CollectiveFailed
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.choice import maker
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.native.hccl import HcclBulk, Npu
from elaunch.workers.comm.transport import Transport
from elaunch.workers.data_parallel.reducer import Reducer
from tests.helpers import wait_until
from tests.unit.comm_crew import Task, crew, each
from tests.unit.npu_stub import GARBAGE, Fabric, StubNpu

MEMBERS = ("a/0#0", "a/1#0", "a/2#0")


class Worker:
    """One worker with its NPU; its training thread is whichever calls."""

    def __init__(self, stub: StubNpu, transport: Transport, store: dist.Store) -> None:
        self.stub, self.transport, self.store = stub, transport, store
        npu = Npu(stub.device, stub.torch_npu)
        self.bulks: list[HcclBulk] = []
        self.groups = NativeGroups(lambda: self.made(HcclBulk(npu)))
        self.failures: list[int] = []
        self.reducer = Reducer(self.failures.append)
        self.parameter = 0.0

    def made(self, bulk: HcclBulk) -> HcclBulk:
        self.bulks.append(bulk)
        return bulk

    def enter(self, generation: int, members: tuple[str, ...] = MEMBERS) -> None:
        self.groups.enter(generation, members, members.index(self.transport.worker), lambda: self.store)

    def use(self, generation: int) -> None:
        wait_until(lambda: self.groups.ready() == generation, 20, f"the group of generation {generation} to open")
        assert self.groups.passed((generation, generation))

    def begin(self, generation: int, value: float, members: tuple[str, ...] = MEMBERS) -> torch.Tensor:
        """Launches the sum of a step."""
        total = torch.full((3,), value)
        self.reducer.begin(Group(self.transport, generation, list(members)), 0.5, self.groups.current)
        self.reducer.launch(total)
        return total

    def step(self, generation: int, value: float, members: tuple[str, ...] = MEMBERS) -> list[float]:
        """Sums as a step does, whose update the device has still under way when this returns."""
        total = self.begin(generation, value, members)
        self.reducer.wait()
        self.reducer.raise_error()
        self.stub.run(lambda: self.update(total), looks=3)
        return total.tolist()

    def update(self, total: torch.Tensor) -> None:
        self.parameter += total[0].item()

    def leave(self) -> None:
        """The generation is over, as a recovery tells it to its parts."""
        self.groups.pause()
        self.reducer.cancel()
        self.groups.settled([0])


def is_aborted(worker: Worker) -> Callable[[], bool]:
    """Whether the communicator of its first group is given back."""
    return lambda: worker.stub.groups[0].is_aborted


@pytest.fixture
def fabric(monkeypatch: pytest.MonkeyPatch) -> Fabric:
    made = Fabric(3)
    monkeypatch.setattr("elaunch.workers.comm.native.ended.here", lambda device: made.npus[device.index].mark())
    return made


@pytest.fixture
def workers(fabric: Fabric) -> Iterator[list[Worker]]:
    store = dist.HashStore()
    with crew(3) as transports:
        made = [Worker(stub, transport, store) for stub, transport in zip(fabric.npus, transports, strict=True)]
        yield made
        for worker in made:
            worker.groups.close()
            worker.reducer.close()


@pytest.fixture
def trained(workers: list[Worker]) -> list[Worker]:
    """They have trained a step in generation 1."""
    for worker in workers:
        worker.enter(1)
    each(lambda worker: worker.use(1), workers)
    assert each(lambda worker, value: worker.step(1, value), workers, [1.0, 2.0, 5.0]) == [[4.0] * 3] * 3
    return workers


def test_survivors_are_freed_and_the_next_group_works(trained: list[Worker]) -> None:
    survivors, members = trained[:2], MEMBERS[:2]
    begun = [worker.begin(1, 1.0) for worker in survivors]
    waiting = [Task(worker.reducer.wait) for worker in survivors]
    assert all(task.running for task in waiting)
    for worker in survivors:
        worker.groups.poison(2)
    for task, worker in zip(waiting, survivors, strict=True):
        task.result(10)
        with pytest.raises(CollectiveFailed, match="the members have changed"):
            worker.reducer.raise_error()
        worker.stub.run(lambda: None)  # as the script may do: only the training thread stops the device
        assert worker.stub.stops == 0
        assert worker.parameter == 0.0
        worker.leave()
        assert worker.parameter == 4.0, "the update of the step before comes to its end"
        assert (worker.stub.stops, worker.stub.restarts) == (1, 1)
        assert worker.stub.stopped_by is threading.current_thread()
    assert [total.tolist() for total in begun] == [[0.5] * 3] * 2, "memory is as it was"
    for worker in survivors:
        wait_until(is_aborted(worker), 20, "the communicator to be given back")
        assert not worker.stub.groups[0].torn
        worker.enter(2, members)
    each(lambda worker: worker.use(2), survivors)
    assert each(lambda worker, value: worker.step(2, value, members), survivors, [1.0, 2.0]) == [[1.5] * 3] * 2
    for worker in survivors:
        worker.leave()
        wait_until(worker.stub.mark().query, 20, "the update")
        assert worker.parameter == 5.5
        assert worker.stub.stops == 1, "nothing was under way"


def test_a_step_of_a_communicator_with_an_error_is_refused(trained: list[Worker], fabric: Fabric) -> None:
    worker = trained[0]
    total = worker.begin(1, 1.0)
    list(fabric.operations.values())[-1].fail()
    worker.reducer.wait()
    assert total.tolist() == [GARBAGE] * 3
    with pytest.raises(CollectiveFailed, match="generation 1 failed: an operation has failed"):
        worker.reducer.raise_error()
    assert worker.failures == [1]
    worker.leave()
    assert worker.stub.stops == 1, "what has failed may hang on"


def test_an_error_that_comes_after_the_sums_refuses_the_step(trained: list[Worker], fabric: Fabric) -> None:
    def join(worker: Worker) -> None:
        worker.begin(1, 1.0)
        worker.reducer.join()
        worker.reducer.raise_error()

    each(join, trained)
    list(fabric.operations.values())[-1].fail()
    trained[0].reducer.wait()
    with pytest.raises(CollectiveFailed, match="an operation has failed"):
        trained[0].reducer.raise_error()


def test_no_stream_waits_for_a_member_that_may_be_dead(trained: list[Worker]) -> None:
    worker = trained[0]
    worker.begin(1, 1.0)
    joining = Task(worker.reducer.join)  # a script that clips gradients goes on when it is over
    worker.stub.run(lambda: None)
    mark = worker.stub.mark()
    wait_until(mark.query, 20, "the script's own work")
    assert joining.running
    worker.groups.poison(2)
    joining.result(10)
    worker.leave()


def test_a_first_sum_that_hangs_is_ended_by_the_training_thread(workers: list[Worker]) -> None:
    def connects_and_dies(tensors: list[torch.Tensor]) -> Any:
        group = dead.stub.groups[-1]
        group._connect()
        raise RuntimeError("killed")

    dead = workers[2]
    hccl = dead.stub.torch_npu._C._distributed_c10d.ProcessGroupHCCL
    hccl.allreduce = lambda self, tensors: connects_and_dies(tensors)
    for one in workers:
        one.enter(1)
    for one in workers[:2]:
        wait_until(one.bulks[0].is_busy, 20, "the first sum")
        one.groups.poison(2)
        group = one.stub.groups[0]
        assert not group.is_aborted
        one.leave()
        assert (one.stub.stops, one.stub.restarts) == (1, 1)
        wait_until(is_aborted(one), 20, "the communicator to be given back")
        assert not group.torn


def test_a_device_that_cannot_be_stopped_ends_the_process(
    trained: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(what: str, error: BaseException) -> None:
        raise SystemExit(f"{what}: {error}")

    monkeypatch.setattr("elaunch.workers.comm.native.hccl.end_process", end)
    worker = trained[0]
    worker.begin(1, 1.0)
    worker.stub.stops_well = False
    with pytest.raises(SystemExit, match="native group: meta:0 could not be stopped"):
        worker.groups.pause()
    worker.stub.stops_well = True


def test_what_the_stand_in_does_to_those_who_stop_a_device_otherwise(fabric: Fabric) -> None:
    """As torch_npu: a watchdog that is not told has the next operation raise, and a stopped device refuses all."""
    stub = fabric.npus[0]
    group = stub.torch_npu._C._distributed_c10d.ProcessGroupHCCL
    options = type("Options", (), {"global_ranks_in_group": [0, 1], "group_id": "g"})
    one = group(dist.HashStore(), 0, 2, options)
    one._connect = lambda: None
    one.allreduce([torch.ones(1)])
    stub.stop_device(0)
    refused: list[Callable[[], object]] = [
        lambda: one.allreduce([torch.ones(1)]),
        lambda: stub.run(lambda: None),
        stub.mark,
    ]
    for call in refused:
        with pytest.raises(RuntimeError, match="FORCE STOP"):
            call()
    stub.restart_device(0)
    with pytest.raises(RuntimeError, match="FORCE STOP"):
        one.allreduce([torch.ones(1)])


@pytest.mark.parametrize("there", [True, False])
def test_who_has_groups_over_hccl(
    there: bool, fabric: Fabric, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", fabric.npus[0].torch_npu if there else None)
    device: Any = type("Device", (), {"type": "npu", "index": 0})()
    made = maker("127.0.0.1", device)
    if there:
        assert made is not None
        assert isinstance(made(), HcclBulk)
        del fabric.npus[0].torch_npu.npu.stop_device  # an old one
    assert maker("127.0.0.1", device) is None
    assert "no backend for native collectives on npu" in capsys.readouterr().err
