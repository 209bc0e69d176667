"""torch.distributed over a group whose members change."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from elaunch.errors import GenerationChanged
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.process_group import ElasticProcessGroup
from tests.unit.comm_crew import crew, each, introduce_all


def elastic(groups: list[Group]) -> list[ElasticProcessGroup]:
    return [ElasticProcessGroup(partial(lambda group: group, group)) for group in groups]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, 6.0),
        (dist.ReduceOp.AVG, 2.0),
        (dist.ReduceOp.MAX, 3.0),
        (dist.ReduceOp.MIN, 1.0),
        (dist.ReduceOp.PRODUCT, 6.0),
    ],
)
def test_all_reduce_of_any_shape(op: dist.ReduceOp.RedOpType, expected: float) -> None:
    with crew(3) as transports:
        groups = [Group(transport, 1, [one.worker for one in transports]) for transport in transports]
        tensors = [torch.full((4, 3), member + 1.0).t() for member in range(3)]
        each(lambda pg, t: dist.all_reduce(t, op=op, group=pg), elastic(groups), tensors)
        assert all(bool((tensor == expected).all()) for tensor in tensors)


def test_unknown_reductions_are_refused() -> None:
    with crew(1) as (transport,):
        pg = ElasticProcessGroup(lambda: Group(transport, 1, [transport.worker]))
        with pytest.raises(ValueError, match="not supported"):
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BXOR, group=pg)


def test_sparse_tensors_are_refused_with_the_cure() -> None:
    with crew(1) as (transport,):
        pg = ElasticProcessGroup(lambda: Group(transport, 1, [transport.worker]))
        with pytest.raises(
            ValueError, match=r"a torch.sparse_coo tensor cannot be sent: hand over tensor.to_dense\(\)"
        ):
            dist.all_reduce(torch.eye(2).to_sparse(), group=pg)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_collectives_of_torch_distributed() -> None:
    with crew(3) as transports:
        groups = [Group(transport, 1, [one.worker for one in transports]) for transport in transports]

        def run(pg: ElasticProcessGroup) -> dict[str, list[float]]:
            me = float(pg.rank())
            found: dict[str, Tensor] = {}
            found["broadcast"] = torch.full((2,), me)
            dist.broadcast(found["broadcast"], group=pg, group_src=2)
            parts = [torch.empty(2) for _ in range(3)]
            dist.all_gather(parts, torch.full((2,), me), group=pg)
            found["all_gather"] = torch.cat(parts)
            found["into_tensor"] = torch.empty(3)
            dist.all_gather_into_tensor(found["into_tensor"], torch.full((1,), me), group=pg)
            found["reduce_scatter"] = torch.empty(1)
            dist.reduce_scatter(found["reduce_scatter"], [torch.full((1,), me + j) for j in range(3)], group=pg)
            found["scatter_tensor"] = torch.empty(1)
            dist.reduce_scatter_tensor(found["scatter_tensor"], torch.arange(3.0) + me, group=pg)
            found["all_to_all"] = torch.empty(3)
            dist.all_to_all_single(found["all_to_all"], torch.arange(3.0) + 10 * me, group=pg)
            dist.barrier(group=pg)
            return {name: tensor.tolist() for name, tensor in found.items()}

        for me, found in enumerate(each(run, elastic(groups))):
            assert found == {
                "broadcast": [2.0, 2.0],
                "all_gather": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0],
                "into_tensor": [0.0, 1.0, 2.0],
                "reduce_scatter": [3.0 + 3 * me],
                "scatter_tensor": [3.0 + 3 * me],
                "all_to_all": [me, 10.0 + me, 20.0 + me],
            }


def test_messages_between_two_members() -> None:
    with crew(2) as transports:
        groups = [Group(transport, 1, [one.worker for one in transports]) for transport in transports]
        introduce_all(transports)
        got = torch.zeros(3, 2)

        def run(pg: ElasticProcessGroup) -> None:
            if pg.rank() == 0:
                dist.send(torch.ones(3, 2), group=pg, group_dst=1)
            else:
                pg.recv([got], 0).wait()

        each(run, elastic(groups))
        assert got.tolist() == [[1.0, 1.0]] * 3


def test_data_parallel_training_goes_on_after_a_member_has_left() -> None:
    with crew(3) as transports:
        current = {
            transport.worker: Group(transport, 1, [one.worker for one in transports]) for transport in transports
        }
        adapters = [ElasticProcessGroup(partial(current.__getitem__, transport.worker)) for transport in transports]
        models = [nn.Linear(2, 1, bias=False) for _ in transports]
        wrapped = [
            DistributedDataParallel(model, process_group=pg, init_sync=False)
            for model, pg in zip(models, adapters, strict=True)
        ]

        def backward(member: int) -> list[float]:
            models[member].zero_grad()
            wrapped[member](torch.full((1, 2), member + 1.0)).sum().backward()
            gradient = models[member].weight.grad
            assert gradient is not None
            return [round(value, 5) for value in gradient[0].tolist()]

        assert each(backward, range(3)) == [[2.0, 2.0]] * 3

        transports[0].interrupt(2)
        with pytest.raises(GenerationChanged):
            backward(0)

        survivors = transports[:2]
        for transport in survivors:
            current[transport.worker] = Group(transport, 2, [one.worker for one in survivors])
        assert adapters[0].size() == 2
        for _ in range(2):
            assert each(backward, range(2)) == [[1.5, 1.5]] * 2


def test_as_the_default_group_it_serves_calls_that_name_none() -> None:
    torchs = dist.init_process_group
    with crew(1) as (transport,):
        current = Group(transport, 1, [transport.worker])
        pg = ElasticProcessGroup(lambda: current)
        pg.register()
        kept = dist.init_process_group
        try:
            kept()
            with pytest.raises(RuntimeError, match="initialized already"):
                pg.register()
            tensor = torch.ones(2, 2)
            dist.all_reduce(tensor)
            dist.broadcast(tensor, 0)
            dist.reduce(tensor, 0)
            gathered = [torch.empty(2, 2)]
            dist.gather(tensor, gathered, 0)
            scattered = torch.empty(2, 2)
            dist.scatter(scattered, gathered, 0)
            objects: list[object] = [None]
            dist.all_gather_object(objects, {"a": 1})
            assert objects == [{"a": 1}]
            assert torch.equal(scattered, torch.ones(2, 2))
            assert (dist.get_world_size(), dist.get_rank(), dist.get_backend()) == (1, 0, "elaunch")
            assert dist.get_process_group_ranks(None) == [0]
            functional = torch.ops._c10d_functional.all_reduce(tensor, "sum", pg.group_name)
            assert torch.equal(torch.ops._c10d_functional.wait_tensor(functional), tensor)
        finally:
            dist.destroy_process_group()
        assert not dist.is_initialized()
        assert dist.init_process_group is torchs
        kept("gloo", store=dist.HashStore(), rank=0, world_size=1)  # whoever has imported it gets torch's own
        assert dist.get_backend() == "gloo"
        dist.destroy_process_group()
