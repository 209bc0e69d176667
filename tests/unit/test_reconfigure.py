"""Groups that torch connects anew among other members: by a stand-in, and by torch's own where it can do so."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elaunch.workers.comm.native import nccl2, reconfigure
from elaunch.workers.comm.native.choice import maker
from elaunch.workers.comm.native.nccl import NcclBulk, refuse_torch
from elaunch.workers.comm.native.nccl2 import Nccl2Bulk, is_chosen
from elaunch.workers.comm.native.reconfigure import LeftGroups, place_of
from tests.unit.comm_crew import Task, each, outcomes

HOST, CUDA = "127.0.0.1", torch.device("cuda", 0)


class StandIn:
    """A group with torch's rules: it is in the list of handles, its number is new, and all come to the same keys."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.store, self.first_rank = store, rank
        self.members: list[str] = []
        self.position = -1
        self.numbers: list[int] = []
        self.aborts = 0
        self.fails = False
        self.ends = threading.Event()
        self.ends.set()

    def get_reconfigure_handle(self) -> str:
        return f"stand-in:{self.first_rank}:{self.numbers[-1] if self.numbers else -1}:{id(self)}"

    def reconfigure(self, options: Any) -> Any:
        handle = self.get_reconfigure_handle()
        if self.fails or handle not in options.handles:
            raise RuntimeError("no way")
        if options.handles[0] == handle and self.store.add(f"{options.uuid}/used", 1) > 1:
            raise RuntimeError(f"number {options.uuid} was used already")
        if self.store.add(f"{options.uuid}/here", 1) == len(options.handles):
            self.store.set(f"{options.uuid}/all", "1")
        self.store.wait([f"{options.uuid}/all"], options.timeout)
        self.members = options.handles
        self.position = options.handles.index(handle)
        self.numbers.append(options.uuid)
        return SimpleNamespace(wait=lambda: True)

    def rank(self) -> int:
        return self.position

    def size(self) -> int:
        return len(self.members)

    def abort(self) -> None:
        self.aborts += 1
        self.ends.wait(20)


def torchs(store: dist.Store, rank: int, size: int) -> Any:
    """A group of torch's own, over Gloo."""
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
    options.enable_reconfigure = True
    return dist.ProcessGroupGloo(store, rank, size, options)


MAKES = [StandIn, torchs] if reconfigure.OPTIONS is not None else [StandIn]


@pytest.fixture(autouse=True)
def a_torch_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if reconfigure.OPTIONS is None:
        monkeypatch.setattr(reconfigure, "OPTIONS", SimpleNamespace)


class Member:
    """A worker of several generations."""

    def __init__(self, make: Callable[[dist.Store, int, int], Any]) -> None:
        self.make, self.left, self.made = make, LeftGroups(), 0

    def enter(self, store: dist.Store, rank: int, size: int) -> tuple[Any, bool]:
        def new(root: dist.Store) -> Any:
            self.made += 1
            return self.make(root, rank, size)

        return reconfigure.connect(store, rank, size, self.left, new, lambda: False)


def generation(number: int, store: dist.Store, members: list[Member]) -> list[tuple[Any, bool]]:
    place, size = dist.PrefixStore(f"native/{number}", store), len(members)
    return each(lambda member, rank: member.enter(place, rank, size), members, range(size))


def leave(store: dist.Store, members: list[Member], groups: list[Any]) -> None:
    for member, group in zip(members, groups, strict=True):
        member.left.leave(place_of(store), group)


@pytest.mark.parametrize("make", MAKES)
def test_members_connect_what_they_have_left_with_those_that_come(make: Callable[..., Any]) -> None:
    store = dist.HashStore()
    a, b, c, d, e = (Member(make) for _ in range(5))
    first = generation(1, store, [a, b, c])
    assert [was_left for _, was_left in first] == [False] * 3
    leave(store, [a, b, c], [group for group, _ in first])
    # The first one is gone, two come, and the others have changed places.
    second = generation(2, store, [d, c, e, b])
    assert [was_left for _, was_left in second] == [False, True, False, True]
    assert [group for group, was_left in second if was_left] == [first[2][0], first[1][0]]
    assert [(group.rank(), group.size()) for group, _ in second] == [(rank, 4) for rank in range(4)]
    assert [member.made for member in (a, b, c, d, e)] == [1] * 5


@pytest.mark.skipif(len(MAKES) == 1, reason="torch before 2.14 connects no group anew; the stand-in is tested")
def test_torchs_own_groups_sum_in_each_generation() -> None:
    def total(group: Any, value: float) -> float:
        tensor = torch.full((1000,), value)
        group.allreduce([tensor]).wait()
        return float(tensor[0])

    store, members = dist.HashStore(), [Member(torchs) for _ in range(4)]
    for number, present in enumerate((members, members[1:], [members[3], members[1]], members), 1):
        groups = [group for group, _ in generation(number, store, present)]
        values = [2.0**rank for rank in range(len(present))]
        assert each(total, groups, values) == [sum(values)] * len(present)
        leave(store, present, groups)
    assert [member.made for member in members] == [1] * 4


def test_no_number_serves_twice() -> None:
    store, members = dist.HashStore(), [Member(StandIn), Member(StandIn)]
    for number in range(1, 6):
        groups = [group for group, _ in generation(number, store, members)]
        leave(store, members, groups)
    assert groups[0].numbers == groups[1].numbers
    assert len(set(groups[0].numbers)) == 5


def test_when_it_fails_for_one_member_all_take_new_groups() -> None:
    store, members = dist.HashStore(), [Member(StandIn) for _ in range(3)]
    groups = [group for group, _ in generation(1, store, members)]
    groups[1].reconfigure = fails_after_all_have_come = fail_late(groups[1])
    leave(store, members, groups)
    again = generation(2, store, members)
    assert fails_after_all_have_come.calls == 1
    assert [was_left for _, was_left in again] == [False] * 3
    assert [group.rank() for group, _ in again] == [0, 1, 2]
    leave(store, members, [group for group, _ in again])
    assert [group for group, _ in generation(3, store, members)] == [group for group, _ in again]


def fail_late(group: StandIn) -> Any:
    """Takes part in a group's connection, and says then that it has failed."""

    def fail(options: Any) -> Any:
        fail.calls += 1  # type: ignore[attr-defined]
        StandIn.reconfigure(group, options)
        raise RuntimeError("no memory")

    fail.calls = 0  # type: ignore[attr-defined]
    return fail


def test_what_fails_with_new_groups_too_is_told_on_all_members() -> None:
    def broken(store: dist.Store, rank: int, size: int) -> StandIn:
        group = StandIn(store, rank, size)
        if rank == 1:
            group.reconfigure = fail_late(group)  # type: ignore[method-assign]
        return group

    store, members = dist.HashStore(), [Member(broken), Member(broken)]
    found = outcomes([lambda m=member, r=rank: m.enter(store, r, 2) for rank, member in enumerate(members)])  # type: ignore[misc]
    assert [str(error) for error in found] == ["rank 1: no memory"] * 2
    assert all(isinstance(error, RuntimeError) for error in found)


def test_a_group_made_with_another_store_is_not_taken() -> None:
    stores, members = [dist.HashStore(), dist.HashStore()], [Member(StandIn), Member(StandIn)]
    old = [group for group, _ in generation(1, stores[0], members)]
    leave(stores[0], members, old)
    assert [was_left for _, was_left in generation(2, stores[1], members)] == [False, False]
    assert [group for group, _ in generation(3, stores[0], members)] == old


def test_a_place_is_a_server_whatever_the_client() -> None:
    server = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore(HOST, server.port, is_master=False)
    assert place_of(dist.PrefixStore("b", dist.PrefixStore("a", client))) == place_of(server) == f"{HOST}:{server.port}"
    assert place_of(dist.HashStore()) != place_of(server)


def test_an_opening_that_is_over_connects_nothing() -> None:
    make: Any = lambda root: pytest.fail("a group is made")  # noqa: E731
    with pytest.raises(RuntimeError, match="the members have changed"):
        reconfigure.connect(dist.HashStore(), 0, 2, LeftGroups(), make, lambda: True)


def test_nobody_waits_for_one_who_never_comes() -> None:
    over = threading.Event()
    task = Task(
        lambda: reconfigure.connect(dist.HashStore(), 0, 2, LeftGroups(), lambda root: StandIn(root, 0, 2), over.is_set)
    )
    assert task.running
    over.set()
    with pytest.raises(RuntimeError, match="the members have changed"):
        task.result(20)


class TestNccl2:
    """The group of NCCL, without a device: what surrounds its calls."""

    @pytest.fixture(autouse=True)
    def stand_ins(self, monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
        made: list[StandIn] = []

        def new(store: dist.Store, rank: int, size: int) -> StandIn:
            made.append(StandIn(store, rank, size))
            return made[-1]

        monkeypatch.setattr(nccl2, "_new", new)
        return made

    def test_who_is_freed_connects_the_same_object_in_the_next_generation(self, stand_ins: list[StandIn]) -> None:
        store, lefts = dist.HashStore(), [LeftGroups(), LeftGroups()]
        for number in range(1, 4):
            place = dist.PrefixStore(f"native/{number}", store)
            bulks = [Nccl2Bulk(CUDA, left) for left in lefts]
            each(lambda bulk, rank, at=place: bulk._connect(at, rank, 2), bulks, range(2))
            for bulk in bulks:
                bulk.poison()
                bulk.poison()
                assert bulk.errored() == "aborted"
                bulk.close()
            assert [(one.aborts, len(one.numbers)) for one in stand_ins] == [(number, number)] * 2

    def test_a_group_whose_generation_ends_while_it_connects_is_revoked_and_left(
        self, stand_ins: list[StandIn]
    ) -> None:
        left, store = LeftGroups(), dist.HashStore()
        bulk = Nccl2Bulk(CUDA, left)
        bulk._hold = lambda group: (bulk.poison(), NcclBulk._hold(bulk, group))  # type: ignore[method-assign, assignment, func-returns-value]
        with pytest.raises(RuntimeError, match="the members have changed"):
            bulk._connect(store, 0, 1)
        bulk.close()
        assert stand_ins[0].aborts == 1
        assert left.take(place_of(store)) is stand_ins[0]
        assert left.take(place_of(store)) is None

    def test_a_group_that_is_not_revoked_yet_is_left_to_nobody(
        self, stand_ins: list[StandIn], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        left, store = LeftGroups(), dist.HashStore()
        bulk = Nccl2Bulk(CUDA, left)
        bulk._connect(store, 0, 1)
        stand_ins[0].ends.clear()
        closing = Task(bulk.close)
        assert closing.running
        stand_ins[0].ends.set()
        closing.result(20)
        assert left.take(place_of(store)) is stand_ins[0]
        monkeypatch.setattr(nccl2, "REVOKED_S", 0.0)
        bulk = Nccl2Bulk(CUDA, left)
        bulk._connect(store, 0, 1)
        stand_ins[1].ends.clear()
        bulk.close()
        assert left.take(place_of(store)) is None
        stand_ins[1].ends.set()


def test_which_backend_of_nccl_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    newer, older = SimpleNamespace(ProcessGroupNCCL2=object), SimpleNamespace()
    assert is_chosen({}, newer)
    assert is_chosen({"TORCH_DIST_USE_NCCL2": "1"}, newer)
    assert not is_chosen({"TORCH_DIST_USE_NCCL2": "0"}, newer)
    assert not is_chosen({}, older)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    for name, kind in (("ProcessGroupNCCL2", Nccl2Bulk), ("ProcessGroupNCCL", NcclBulk)):
        monkeypatch.setattr("elaunch.workers.comm.native.choice.is_chosen", lambda *_, to=name: to.endswith("2"))
        made = maker(HOST, CUDA)
        assert made is not None
        assert type(made()) is kind
    monkeypatch.setattr(reconfigure, "OPTIONS", None)
    assert not is_chosen({}, newer)


def test_a_torch_whose_nccl_group_is_another_is_refused_by_name() -> None:
    whole = dict.fromkeys(("_set_default_timeout", "abort", "allreduce", "eager_connect_single_device", "get_error"))
    refuse_torch(type("ProcessGroupNCCL", (), dict(whole)))
    whole.pop("eager_connect_single_device")
    what = rf"torch {re.escape(torch.__version__)} lacks eager_connect_single_device: install torch 2\.11 to 2\.15, or"
    with pytest.raises(RuntimeError, match=what):
        refuse_torch(type("ProcessGroupNCCL", (), dict(whole)))


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_this_torch_has_what_is_called_of_nccl() -> None:
    refuse_torch(dist.ProcessGroupNCCL)
    if hasattr(dist, "ProcessGroupNCCL2"):
        missing = {"abort", "allreduce", "get_error", "get_reconfigure_handle", "reconfigure", "supports_reconfigure"}
        assert not missing - set(dir(dist.ProcessGroupNCCL2))
        options: Any = dist.ProcessGroupNCCL.Options()
        options.config.blocking = 0
        options.enable_reconfigure = True
