"""Subgroups of torch.distributed over native groups of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from elaunch.errors import StepInterrupted
from elaunch.workers.comm.c10d.native import NativeWorks
from elaunch.workers.comm.c10d.works import MessageWork, NativeWork
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.gloo import GlooBulk
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.process_group import ElasticProcessGroup, Subgroup
from elaunch.workers.comm.transport import Transport
from tests.helpers import wait_until
from tests.unit.comm_crew import PATIENCE_S, Task, addresses, crew, each, introduce_all

HOST = "127.0.0.1"
PAIR = [0, 2]


class Refusing(GlooBulk):
    """Cannot be opened."""

    def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
        raise RuntimeError("no such device")


class One:
    """A member of a job, with its default group; the members meet in `store`."""

    def __init__(self, transport: Transport, members: list[str], store: dist.Store, kind: type[GlooBulk]) -> None:
        self.transport, self.members, self.store = transport, members, store
        self.made: list[GlooBulk] = []

        def make() -> GlooBulk:
            self.made.append(kind(HOST))
            return self.made[-1]

        self.natives = NativeGroups(make)
        # That of all members is another matter.
        self.natives.needs = lambda _: []
        self.works = NativeWorks(lambda: None, "cpu", self.natives.failed, self.natives)
        self.enter(1)
        self.pg = ElasticProcessGroup(lambda: self.group, None, self.works)

    def enter(self, generation: int) -> None:
        self.group = Group(self.transport, generation, self.members)
        self.natives.enter(generation, tuple(self.members), self.group.rank, lambda: self.store)

    def leave(self, generation: int) -> None:
        self.natives.poison(generation)
        self.works.drop()
        self.natives.pause()
        self.natives.settled(())

    def subgroup(self) -> Subgroup:
        found = self.pg.new_group(PAIR, group_name="pair")
        assert isinstance(found, Subgroup)
        return found


@contextmanager
def job(refusing: int | None = None) -> Iterator[list[One]]:
    """Three members of generation 1; `refusing`: one of them cannot open native groups."""
    store = dist.HashStore()
    with crew(3) as transports:
        introduce_all(transports)
        members = [one.worker for one in transports]
        kinds = [Refusing if place == refusing else GlooBulk for place in range(3)]
        ones = [One(transport, members, store, kind) for transport, kind in zip(transports, kinds, strict=True)]
        try:
            yield ones
        finally:
            for one in ones:
                one.natives.close()


def summed(pg: Subgroup, count: int) -> list[bool]:
    """Sums so often, right each time; returns for each whether it went over a native group."""
    found = []
    for number in range(count):
        tensor = torch.full((100,), number + pg.rank() + 1.0)
        work = pg.allreduce([tensor], dist.AllreduceOptions())
        work.wait()
        assert tensor.tolist() == [2 * number + 3.0] * 100
        found.append(isinstance(work, NativeWork))
    return found


def until_native(ones: list[One], pairs: list[Subgroup]) -> None:
    """Has a pair sum once, waits until its group is open on both, and has it agree."""
    assert each(lambda pg: summed(pg, 1), pairs)[0] == [False]
    for one in ones:
        wait_until(lambda one=one: bool(one.natives._newest.is_open), 30, "the group to open")  # type: ignore[misc]
    first, second = each(lambda pg: summed(pg, 3), pairs)
    assert first == second, "one is in the native group, the other is not"
    assert first == [True] * 3, "the second operation asks"


def test_a_subgroup_sums_over_a_native_group_of_its_own_once_all_its_members_have_it() -> None:
    with job() as ones:
        here = [ones[place] for place in PAIR]
        pairs = [one.subgroup() for one in here]
        assert ones[1].pg.new_group(PAIR, group_name="pair") is None
        until_native(here, pairs)
        assert [len(one.made) for one in ones] == [1, 0, 1]
        for one in here:
            one.works.finish()
        assert ones[1].natives.ready() == 0, "a group of others is none of its matter"


def test_subgroups_of_the_same_members_have_groups_of_their_own() -> None:
    with job() as ones:
        here = [ones[place] for place in PAIR]
        first, second = [one.subgroup() for one in here], [one.subgroup() for one in here]
        until_native(here, first)
        # In another order than the other member: neither waits for the other's opening.
        each(lambda pg: summed(pg, 1), second)
        for one in here:
            wait_until(lambda one=one: len(one.natives._newest.is_open) == 2, 30, "both")  # type: ignore[misc]
        assert each(lambda pg: summed(pg, 2), second) == [[True, True]] * 2
        assert [len(one.made) for one in here] == [2, 2]


def test_the_next_generation_has_a_new_group_and_the_old_one_is_closed() -> None:
    with job() as ones:
        here = [ones[place] for place in PAIR]
        pairs = [one.subgroup() for one in here]
        until_native(here, pairs)
        for one in ones:
            one.transport.interrupt(2)
            one.leave(2)
        transports = [one.transport for one in ones]
        each(lambda one: one.transport.connect(addresses(transports), generation=2, timeout_s=PATIENCE_S), ones)
        for one in ones:
            one.enter(2)
        until_native(here, pairs)
        for one in here:
            old, new = one.made
            assert old._end.has_come
            assert not new._end.has_come
            with pytest.raises(RuntimeError, match="closed"):
                old.backend_group()


def test_who_waits_in_the_group_of_a_subgroup_is_freed_with_the_generation() -> None:
    with job() as ones:
        here = [ones[place] for place in PAIR]
        pairs = [one.subgroup() for one in here]
        until_native(here, pairs)
        work = pairs[0].allreduce([torch.ones(10)], dist.AllreduceOptions())
        task = Task(here[0].works.finish)
        for one in ones:
            one.natives.poison(2)
        with pytest.raises(StepInterrupted):
            task.result(10)
        assert isinstance(work, NativeWork)
        here[0].works.drop()


def test_where_one_member_cannot_open_it_all_stay_with_links() -> None:
    with job(refusing=2) as ones:
        pairs = [ones[place].subgroup() for place in PAIR]
        assert each(lambda pg: summed(pg, 9), pairs) == [[False] * 9] * 2


def test_messages_of_a_subgroup_stay_with_links() -> None:
    with job() as ones:
        here = [ones[place] for place in PAIR]
        pairs = [one.subgroup() for one in here]
        until_native(here, pairs)

        def talk(pg: Subgroup) -> float:
            tensor = torch.full((3,), float(pg.rank()))
            work = pg.send([tensor], 1, 0) if pg.rank() == 0 else pg.recv([tensor], 0, 0)
            assert isinstance(work, MessageWork)
            work.wait()
            return float(tensor[0])

        assert each(talk, pairs) == [0.0, 0.0]
