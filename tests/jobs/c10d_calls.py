"""Each call of torch.distributed that frameworks make, in a job of four workers, and of three when one has died.

    elaunch --standalone --nproc-per-node=4 --max-restarts=0 tests/jobs/c10d_calls.py links|native

They compute on their GPU if they have one, else on the CPU. Each call that gave what it should is told of: "calls SIZE
CARRIER NAME ...".
"""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import _coalescing_manager, _get_default_store
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import elaunch
from benchmarks.one_device import device_of
from elaunch.errors import StateError
from elaunch.workers.comm.c10d.works import NativeWork
from tests.jobs import come_late, say
from tests.jobs.stateless import Stateless

HERE = device_of(int(os.environ.get("LOCAL_RANK", "0")))
LARGE = 4 << 20  # elements: 16 MiB
WARMS_UP = 3
PAUSE_S = {"cpu": 0.0, "cuda": 0.01}
"""After a step, by type of the device: a group takes longer to open there."""

LONGEST = 2000
"""Steps until the native group stands, at most."""


class Calls:
    """The calls, by name; each raises if it does not give what it should."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.all = list(range(size))

    def run(self) -> list[str]:
        names = [name for name in vars(Calls) if name.startswith("call_")]
        for name in names:
            try:
                getattr(self, name)()
            except (AssertionError, TypeError, ValueError, AttributeError, StateError) as error:
                raise SystemExit(f"{name} of {self.size}: {error!r}") from error
        return [name.removeprefix("call_") for name in names]

    def call_all_reduce(self) -> None:
        for op, expected in ((dist.ReduceOp.SUM, sum(self.all)), (dist.ReduceOp.MAX, self.size - 1)):
            tensor = torch.full((5, 3), float(self.rank), device=HERE).t()
            work = dist.all_reduce(tensor, op, async_op=True)
            assert work is not None
            work.wait()
            assert tensor.unique().tolist() == [expected]
        future = dist.all_reduce(torch.ones(3, device=HERE), dist.ReduceOp.AVG, async_op=True).get_future()
        assert future.then(lambda done: done.value()[0].tolist()).wait() == [1.0] * 3

    def call_rooted(self) -> None:
        tensor = torch.full((2,), float(self.rank), device=HERE)
        dist.broadcast(tensor, 1)
        assert tensor.tolist() == [1.0, 1.0]
        total = torch.ones(2, device=HERE)
        dist.reduce(total, 1)
        assert self.rank != 1 or total.tolist() == [float(self.size)] * 2
        parts = [torch.empty(1, device=HERE) for _ in self.all] if self.rank == 0 else None
        dist.gather(torch.tensor([float(self.rank)], device=HERE), parts, 0)
        assert parts is None or torch.cat(parts).tolist() == self.all
        mine = torch.empty(1, device=HERE)
        dist.scatter(
            mine, [torch.tensor([10.0 + rank], device=HERE) for rank in self.all] if self.rank == 0 else None, 0
        )
        assert mine.item() == 10 + self.rank

    def call_gathers(self) -> None:
        parts = [torch.empty(2, device=HERE) for _ in self.all]
        dist.all_gather(parts, torch.full((2,), float(self.rank), device=HERE))
        assert torch.cat(parts).tolist() == [rank for rank in self.all for _ in range(2)]
        whole = torch.empty(self.size, device=HERE)
        dist.all_gather_into_tensor(whole, torch.tensor([float(self.rank)], device=HERE))
        assert whole.tolist() == self.all

    def call_scatters(self) -> None:
        expected = float(sum(self.all) + self.size * self.rank)
        own = torch.empty(1, device=HERE)
        dist.reduce_scatter(own, [torch.tensor([float(self.rank + rank)], device=HERE) for rank in self.all])
        assert own.item() == expected
        dist.reduce_scatter_tensor(own, torch.tensor([float(self.rank + rank) for rank in self.all], device=HERE))
        assert own.item() == expected
        exchanged = torch.empty(self.size, device=HERE)
        dist.all_to_all_single(
            exchanged, torch.tensor([float(10 * self.rank + rank) for rank in self.all], device=HERE)
        )
        assert exchanged.tolist() == [10 * rank + self.rank for rank in self.all]
        outputs = [torch.empty(1, device=HERE) for _ in self.all]
        dist.all_to_all(outputs, [torch.tensor([float(10 * self.rank + rank)], device=HERE) for rank in self.all])
        assert torch.cat(outputs).tolist() == [10 * rank + self.rank for rank in self.all]

    def call_coalesced(self) -> None:
        tensors = [torch.ones(2, device=HERE), torch.ones(3, device=HERE)]
        with _coalescing_manager(async_ops=True) as works:
            for tensor in tensors:
                dist.all_reduce(tensor)
        works.wait()
        assert torch.cat(tensors).tolist() == [self.size] * 5
        outputs = [torch.empty(self.size, device=HERE), torch.empty(self.size, device=HERE)]
        with _coalescing_manager():
            for number, output in enumerate(outputs):
                dist.all_gather_into_tensor(output, torch.tensor([float(self.rank + number)], device=HERE))
        assert [output.tolist() for output in outputs] == [self.all, [rank + 1 for rank in self.all]]
        owns = [torch.empty(1, device=HERE), torch.empty(1, device=HERE)]
        with _coalescing_manager():
            for own in owns:
                dist.reduce_scatter_tensor(own, torch.ones(self.size, device=HERE))
        assert torch.cat(owns).tolist() == [self.size] * 2

    def call_objects(self) -> None:
        found: list[object] = [None] * self.size
        dist.all_gather_object(found, {"rank": self.rank})
        assert found == [{"rank": rank} for rank in self.all]
        told: list[object] = [f"of {self.rank}"]
        dist.broadcast_object_list(told, 1)
        assert told == ["of 1"]
        mine: list[object] = [None]
        dist.scatter_object_list(mine, [str(rank) for rank in self.all] if self.rank == 0 else None, 0)
        assert mine == [str(self.rank)]

    def call_messages(self) -> None:
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sent, got = torch.full((LARGE,), float(self.rank), device=HERE), torch.empty(LARGE, device=HERE)
        works: list[dist.Work | None] = []
        sends, receives = partial(dist.isend, sent, right, tag=3), partial(dist.irecv, got, left, tag=3)
        # A device does one after the other, so somebody receives first.
        for begin in (sends, receives) if self.rank else (receives, sends):
            works.append(begin())
        for work in works:
            assert work is not None
            work.wait()
        assert got.unique().tolist() == [left]
        got.zero_()
        batch = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, got, left)]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert got.unique().tolist() == [left]

    def call_barriers(self) -> None:
        dist.barrier()
        dist.monitored_barrier()

    def call_ranks_and_names(self) -> None:
        assert dist.get_process_group_ranks(None) == self.all
        assert (dist.get_rank(), dist.get_world_size()) == (self.rank, self.size)
        assert dist.group.WORLD is not None
        assert dist.get_global_rank(dist.group.WORLD, self.rank) == self.rank
        assert dist.get_backend() == "elaunch"

    def call_store(self) -> None:
        store = _get_default_store()
        store.set(f"calls/{self.rank}", str(self.rank))
        assert [store.get(f"calls/{rank}") for rank in self.all] == [str(rank).encode() for rank in self.all]
        prefixed = dist.PrefixStore("of a framework", store)
        assert prefixed.add(f"mine/{self.rank}", 1) >= 1
        assert prefixed.check([f"mine/{self.rank}"])

    def call_init_process_group_again(self) -> None:
        dist.init_process_group()
        dist.init_process_group("gloo", rank=self.rank, world_size=self.size)
        other = "nccl" if HERE.type == "cpu" else "hccl"
        with pytest.raises(ValueError, match=rf"backend='{other}'.* compute on {HERE.type}"):
            dist.init_process_group(other)
        with pytest.raises(ValueError, match=f"world_size={self.size + 1}.* where it is {self.size}"):
            dist.init_process_group(world_size=self.size + 1)

    def call_new_groups(self) -> None:
        ends, inner = dist.new_group([0, self.size - 1]), dist.new_group(range(1, self.size), backend="gloo")
        total = torch.ones(1, device=HERE)
        if self.rank in (0, self.size - 1):
            dist.all_reduce(total, group=ends)
            assert total.item() == 2
            assert dist.get_process_group_ranks(ends) == [0, self.size - 1]
            assert dist.get_group_rank(ends, self.rank) == (0 if self.rank == 0 else 1)
        if self.rank >= 1:
            found: list[object] = [None] * (self.size - 1)
            dist.all_gather_object(found, self.rank, group=inner)
            assert found == list(range(1, self.size))
            dist.monitored_barrier(inner)
        if self.rank == 0:
            dist.destroy_process_group(ends)

    def call_groups_by_enumeration(self) -> None:
        own, _ = dist.new_subgroups_by_enumeration([[0, 1], list(range(2, self.size))])
        assert dist.get_process_group_ranks(own) == ([0, 1] if self.rank < 2 else list(range(2, self.size)))
        total = torch.ones(1, device=HERE)
        dist.all_reduce(total, group=own)
        assert total.item() == dist.get_world_size(own)

    def call_split_group(self) -> None:
        own = dist.split_group(split_ranks=[[0, 1], list(range(2, self.size))])
        total = torch.tensor([float(self.rank)], device=HERE)
        dist.all_reduce(total, group=own)
        assert total.item() == (1 if self.rank < 2 else sum(range(2, self.size)))

    def call_device_meshes(self) -> None:
        shapes: dict[int, list[tuple[int, ...]]] = {4: [(4,), (2, 2), (2, 1, 2)], 3: [(3,), (3, 1), (1, 3, 1)]}
        for shape in shapes[self.size]:
            mesh = init_device_mesh(HERE.type, shape, mesh_dim_names=("dp", "tp", "pp")[: len(shape)])
            value = torch.arange(12.0, device=HERE).view(6, 2)
            placements: list[Placement] = [Shard(0), *[Replicate()] * (len(shape) - 1)]
            spread = distribute_tensor(value, mesh, placements)
            assert torch.equal(spread.full_tensor(), value)
            doubled = spread * 2
            assert isinstance(doubled, DTensor)
            whole = doubled.redistribute(mesh, [Replicate()] * len(shape))
            assert torch.equal(whole.to_local(), 2 * value)
            along = torch.ones(1, device=HERE)
            dist.all_reduce(along, group=mesh.get_group("dp"))
            assert along.item() == shape[0]

    def call_ddp(self) -> None:
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Linear(2, 1, bias=False, device=HERE))
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 2), self.rank + 1.0, device=HERE)).sum().backward()
            gradient = next(model.parameters()).grad
            assert gradient is not None
            assert torch.allclose(
                gradient, torch.full((1, 2), sum(rank + 1.0 for rank in self.all) / self.size, device=HERE)
            )

    def call_fsdp2(self) -> None:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 7, device=HERE), nn.Tanh(), nn.Linear(7, 1, device=HERE))
        whole = nn.Sequential(nn.Linear(4, 7, device=HERE), nn.Tanh(), nn.Linear(7, 1, device=HERE))
        whole.load_state_dict(model.state_dict())
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        inputs = torch.randn(self.size, 4, device=HERE)
        whole(inputs).mean().backward()
        model(inputs[self.rank : self.rank + 1]).mean().backward()
        for sharded, parameter in zip(model.parameters(), whole.parameters(), strict=True):
            assert isinstance(sharded.grad, DTensor)
            assert parameter.grad is not None
            assert torch.allclose(sharded.grad.full_tensor(), parameter.grad, atol=1e-6)

    def call_functional(self) -> None:
        world = dist.group.WORLD
        assert world is not None
        name = world.group_name
        total = functional.all_reduce(torch.ones(3, device=HERE), "sum", name)
        assert total.tolist() == [self.size] * 3
        gathered = functional.all_gather_tensor(torch.tensor([float(self.rank)], device=HERE), 0, world)
        assert gathered.tolist() == self.all
        scattered = functional.reduce_scatter_tensor(torch.ones(self.size, device=HERE), "sum", 0, world)
        assert scattered.tolist() == [self.size]

    def call_compiled(self) -> None:
        world = dist.group.WORLD
        assert world is not None

        def mean(tensor: torch.Tensor) -> torch.Tensor:
            total: torch.Tensor = functional.all_reduce(tensor * 2, "sum", world)
            return total / dist.get_world_size()

        torch._dynamo.reset()
        compiled = torch.compile(mean, backend="aot_eager", fullgraph=True)
        assert compiled(torch.ones(3, device=HERE)).tolist() == [2.0] * 3


class Runtime(Stateless):
    """A framework whose state is the number of its step."""

    def __init__(self, carrier: str) -> None:
        self.member, self.carrier = elaunch.attach(self), carrier
        super().__init__()
        self.done: set[int] = set()
        self.of_all: dist.ProcessGroup | None = None
        self.of_two: dist.ProcessGroup | None = None

    def train(self) -> None:
        self.member.join()
        while not self.is_over() or not self.member.finish(self.is_over):
            with self.member.attempt():
                size = self.member.size
                is_due = self.is_due()
                if is_due:
                    self.calls(size)
                self.member.commit()
                self.step += 1
                self.member.report(self.step - 1)
                time.sleep(PAUSE_S[HERE.type])
                if is_due:
                    self.done.add(size)

    def is_over(self) -> bool:
        return 3 in self.done or self.step >= LONGEST

    def is_due(self) -> bool:
        native = self.member.native.backend is not None
        return self.member.size not in self.done and self.step >= WARMS_UP and native == (self.carrier == "native")

    def calls(self, size: int) -> None:
        assert self.member.process_group is dist.group.WORLD
        if size == 3:
            self.outlives()
        names = Calls(self.member.rank, size).run()
        say(f"calls {size} {self.member.native.backend or 'links'} {' '.join(names)}")
        if size == 4:
            self.of_all, self.of_two = dist.new_group([0, 1, 2, 3]), dist.new_group([1, 2])
            self.until_native(self.of_all)
            dist.barrier()  # all have come so far
            if self.member.worker.startswith("node0/3#"):
                self.dies()
            # One waits in the group of all members, the others in a subgroup.
            dist.all_reduce(torch.ones(LARGE, device=HERE), group=self.of_all if self.member.rank else None)
            self.member.commit()  # a device goes on, and finds out here
            raise SystemExit("a collective ended without one of its members")

    def dies(self) -> None:
        """The others wait for this worker in a collective, and do the step again without it."""
        os.kill(os.getpid(), signal.SIGKILL)

    def outlives(self) -> None:
        """Groups from before the death: one is as it was, the other is refused, and says whom it has lost."""
        if self.of_all is None or self.of_two is None:
            raise SystemExit("the groups of four members were not made")
        with pytest.raises(StateError, match=r"node0/3#0 left the job: make another one"):
            dist.all_reduce(torch.ones(1, device=HERE), group=self.of_all)
        assert dist.get_process_group_ranks(self.of_all) == [0, 1, 2]
        if self.member.rank in (1, 2):
            total = torch.ones(1, device=HERE)
            dist.all_reduce(total, group=self.of_two)
            assert total.item() == 2
            self.until_native(self.of_two)

    def until_native(self, group: Any) -> None:
        """Sums until the members of a subgroup use a native group of their own, where they have native groups."""
        for number in range(1, LONGEST):
            total = torch.ones(1, device=HERE)
            work = dist.all_reduce(total, group=group, async_op=True)
            assert work is not None
            work.wait()
            assert total.item() == dist.get_world_size(group)
            if isinstance(work, NativeWork) or (self.carrier != "native" and number == 8):
                assert isinstance(work, NativeWork) == (self.carrier == "native")
                return
            time.sleep(0.005)
        raise SystemExit("the members of a subgroup have no native group")


def main(carrier: str) -> None:
    torch.set_num_threads(1)
    runtime = Runtime(carrier)
    runtime.train()
    dist.destroy_process_group()
    assert not dist.is_initialized()
    say(f"ended {runtime.member.worker} {sorted(runtime.done)}")


if __name__ == "__main__":
    come_late()
    main(*sys.argv[1:])
