"""Device meshes over links, as one worker sees them; examples/train_dtensor.py uses them between processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from elaunch.errors import GenerationChanged, MeshError
from elaunch.workers.comm import mesh
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.mesh import Meshes, in_backward
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.comm.transport import Transport
from tests.devices import DEVICES
from tests.helpers import ROOT
from tests.unit.comm_crew import crew


class World:
    """The default group of torch, over the group of the time."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.group = Group(transport, 1, [transport.worker])
        self.meshes = Meshes()
        ElasticProcessGroup(lambda: self.group).register()

    def mesh(self, generation: int = 1) -> DeviceMesh:
        if generation != self.group.generation:
            self.group = Group(self.transport, generation, [self.transport.worker])
        mesh = self.meshes.make(self.group, "cpu", (1, 1), ("dp", "tp"))
        assert mesh is not None
        return mesh


@pytest.fixture
def world() -> Iterator[World]:
    with crew(1) as (transport,):
        yield World(transport)
        dist.destroy_process_group()


def product(mesh: DeviceMesh) -> DTensor:
    weight = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, (Replicate(), Shard(0)), src_data_rank=None)
    found = weight @ weight.t()
    assert isinstance(found, DTensor)
    return found


def test_dtensor_computes_and_is_gathered_over_it(world: World) -> None:
    expected = torch.arange(6.0).view(2, 3) @ torch.arange(6.0).view(2, 3).t()
    assert torch.equal(product(world.mesh()).full_tensor(), expected)
    along = world.mesh()["tp"]
    summed = torch.ones(2)
    dist.all_reduce(summed, group=along.get_group())
    assert summed.tolist() == [1.0, 1.0]


def test_the_mesh_of_a_generation_is_not_taken_for_one_of_the_same_shape_before_it(world: World) -> None:
    before = world.mesh()
    assert product(before).device_mesh is before
    after = world.mesh(generation=2)
    assert product(after).device_mesh is after
    assert torch.equal(product(after).full_tensor(), product(after).to_local())


def test_the_groups_of_older_generations_leave_the_tables_of_torch(world: World) -> None:
    known = dist.distributed_c10d._world.pg_map
    world.mesh()
    world.mesh()
    assert len(known) == 5
    old = world.mesh().get_group("tp")
    world.mesh(generation=2)
    assert len(known) == 3
    assert old not in known


def test_an_interruption_comes_out_of_the_operation(world: World) -> None:
    mesh = world.mesh()
    world.transport.interrupt(2)
    with pytest.raises(GenerationChanged):
        dist.barrier(group=mesh.get_group("tp"))


def test_what_is_no_mesh_of_these_members_is_refused(world: World) -> None:
    for shape, names in (((2,), ("tp",)), ((1,), ("dp", "tp")), ((), ())):
        with pytest.raises(MeshError, match=r"cannot be made of 1 members \(a/0#0\)"):
            world.meshes.make(world.group, "cpu", shape, names)


def test_they_are_imported_without_dynamo() -> None:
    code = "import sys, elaunch.workers.comm.mesh; print('torch._dynamo' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize("surroundings", [torch.no_grad, torch.inference_mode, nullcontext])
def test_something_is_done_while_torch_goes_backward(surroundings: Callable[[], AbstractContextManager[None]]) -> None:
    done: list[int] = []
    with surroundings():
        in_backward(torch.device("cpu"), lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()], "the backward of the CPU runs in the thread that asks for it"


def test_equal_meshes_are_forgotten_in_the_thread_of_a_devices_backward_too(monkeypatch: pytest.MonkeyPatch) -> None:
    where: list[str] = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(mesh, "in_backward", lambda device, do: where.append(device.type))
    mesh.forget_equal_meshes()
    assert where == ["meta"]


@pytest.mark.parametrize("device", DEVICES)
def test_what_dtensor_knew_of_a_mesh_is_forgotten_where_torch_goes_backward(world: World, device: str) -> None:
    found: list[tuple[int, int]] = []
    one = world.mesh()

    def compute() -> None:
        _, before = torch._C._get_DTensor_sharding_propagator_cache_stats()
        product(one)
        _, misses = torch._C._get_DTensor_sharding_propagator_cache_stats()
        found.append((threading.get_ident(), misses - before))

    there = torch.device(device, 0)
    in_backward(there, compute)
    in_backward(there, compute)
    mesh.forget_equal_meshes()
    in_backward(there, compute)
    assert len({thread for thread, _ in found}) == 1
    assert (found[0][0] == threading.get_ident()) == (device == "cpu"), "an accelerator's backward has its own thread"
    assert found[1][1] == 0 < found[2][1], "known, and then worked out anew"
