"""Sums in native groups have the bits that sums over links have, whatever the backend's own order."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

from elaunch.errors import CollectiveFailed
from elaunch.workers.comm import group as group_module
from elaunch.workers.comm.group import SMALL_BYTES, Group
from elaunch.workers.data_parallel.reducer import Reducer
from tests.unit.comm_crew import Task, crew, each
from tests.unit.test_native import gloo

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
LENGTHS = (1, 3, SMALL_BYTES // 8 + 5, SMALL_BYTES + 7)


def summands(size: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Numbers of very different sizes, so that another order gives other bits."""
    generator = torch.Generator().manual_seed(size * 1_000_003 + length)
    numbers = torch.randn(size, length, generator=generator, dtype=torch.float64)
    return list((numbers * 10 ** torch.randint(-3, 4, (size, 1), generator=generator)).to(dtype))


def step(reducer: Reducer, tensors: list[torch.Tensor]) -> None:
    """A step with several sums under way."""
    for tensor in tensors:
        reducer.launch(tensor)
    reducer.wait()
    reducer.raise_error()


@pytest.mark.parametrize("direct_members", [0, 16], ids=["ring", "direct"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_sums_over_gloo_have_the_bits_of_those_over_links(
    size: int, direct_members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "DIRECT_MEMBERS", direct_members)
    with crew(size) as transports, gloo(size) as bulks:
        members = [one.worker for one in transports]
        of_all = [summands(size, length, dtype) for length, dtype in itertools.product(LENGTHS, DTYPES)]
        over_links = [[tensor.clone() for tensor in member] for member in zip(*of_all, strict=True)]
        natively = [[tensor.clone() for tensor in member] for member in over_links]
        reducers = [Reducer(in_order=True) for _ in members]
        for reducer, transport in zip(reducers, transports, strict=True):
            reducer.begin(Group(transport, 1, members), 0.3)
        each(step, reducers, over_links)
        for reducer, transport, bulk in zip(reducers, transports, bulks, strict=True):
            reducer.begin(Group(transport, 2, members), 0.3, bulk)
        each(step, reducers, natively)
        for reducer in reducers:
            reducer.cancel()
            reducer.close()
        for linked, native in zip(over_links, natively, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(linked, native, strict=True))
        if size > 2:
            backwards = [sum(reversed(one[1:]), one[0].clone()).mul_(0.3) for one in of_all]
            assert any(not torch.equal(one, other) for one, other in zip(natively[0], backwards, strict=True)), (
                "the order shows in the bits"
            )


def test_who_waits_for_the_summands_of_a_member_that_never_sends_them_is_freed() -> None:
    with crew(3) as transports, gloo(3) as bulks:
        members = [one.worker for one in transports]
        failed: list[int] = []
        reducers = [Reducer(failed.append, in_order=True) for _ in members]
        for reducer, transport, bulk in zip(reducers, transports, bulks, strict=True):
            reducer.begin(Group(transport, 1, members), 1.0, bulk)
        waiting = [Task(partial(step, one, [torch.ones(SMALL_BYTES)])) for one in reducers[:2]]
        for bulk in bulks:
            bulk.poison()
        for task in waiting:
            with pytest.raises(CollectiveFailed):
                task.result(10)
        for reducer in reducers:
            reducer.cancel()
        tensors = [[torch.full((SMALL_BYTES,), float(rank))] for rank in range(3)]
        for reducer, transport in zip(reducers, transports, strict=True):
            reducer.begin(Group(transport, 2, members), 1.0)
        each(step, reducers, tensors)
        assert {float(tensor[0]) for (tensor,) in tensors} == {3.0}
        assert failed == [1, 1]
        for reducer in reducers:
            reducer.cancel()
            reducer.close()
