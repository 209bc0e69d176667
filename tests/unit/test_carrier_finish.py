"""The end of a step whose tensors went over native groups of a device: who is waited for, and what frees the device."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elaunch.errors import CollectiveFailed
from elaunch.workers import heartbeat
from elaunch.workers.comm.native import ended
from elaunch.workers.comm.native.gloo_work import Collective, GroupEnd
from elaunch.workers.comm.native.opening import GroupKey
from elaunch.workers.layers.carry import native
from tests.unit.comm_crew import Task
from tests.unit.test_gloo_work import Endless
from tests.unit.test_native import Device


class Failing(Device):
    """Has an error at once, which does not free the device."""

    def errored(self) -> str | None:
        return "aborted" if self.poisoned else "remote error"


class Stuck:
    """The end of the device's work, which it comes to only when all groups are poisoned."""

    def __init__(self, bulks: Collection[Device], waited: list[set[str]]) -> None:
        self.bulks, self.waited, self.seen = bulks, waited, list[set[str]]()

    def query(self) -> bool:
        self.seen += self.waited
        return all(bulk.poisoned for bulk in self.bulks)


def test_an_error_of_one_group_frees_the_device_from_all_and_the_others_are_named_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[set[str]] = []

    @contextlib.contextmanager
    def waiting(peers: Collection[str] = (), generation: int = 0, operation: int = 0) -> Iterator[None]:
        waited.append(set(peers))
        yield
        waited.pop()

    groups: dict[GroupKey, Any] = {GroupKey("tp", ("a", "b")): Failing(), GroupKey("rows", ("a", "c")): Device()}
    stuck, failed = Stuck(groups.values(), waited), list[int]()
    monkeypatch.setattr(heartbeat, "waiting", waiting)
    monkeypatch.setattr(ended, "here", lambda device: stuck)
    monkeypatch.setattr(ended, "LOOK_S", 0.0)
    routes: Any = SimpleNamespace(worker="a")
    carrier = native.NativeCarrier(routes, [], groups, torch.device("meta"), 7, False, failed.append)
    with pytest.raises(CollectiveFailed, match="aborted"):
        carrier.finish()
    assert failed == [7]
    assert {frozenset(one) for one in stuck.seen} == {frozenset({"b", "c"})}


def test_a_tensor_parallel_sum_that_gloo_never_ends_does_not_outlast_its_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ended, "DROP_S", 60.0)
    end = GroupEnd(lambda: True, bool)

    class Losing(Device):
        def all_reduce(self, tensor: torch.Tensor) -> Any:
            return Collective(Endless(), end)

    failed = list[int]()
    groups: dict[GroupKey, Any] = {GroupKey("tp", ("a", "b")): Losing()}
    routes: Any = SimpleNamespace(worker="a")
    carrier = native.NativeCarrier(routes, [], groups, torch.device("cpu"), 7, False, failed.append)
    task = Task(lambda: carrier.all_reduce(("a", "b"), torch.ones(4)))
    time.sleep(0.1)
    assert task.running
    end.come()
    with pytest.raises(CollectiveFailed, match="closed"):
        task.result(10)
    assert failed == [7]
    begin_s = time.monotonic()
    carrier.drop()
    assert time.monotonic() - begin_s < ended.DROP_S / 2, "what it sums is its own, and nobody waits for that"
