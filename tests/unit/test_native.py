"""Native groups: opened in the background, used by all members at once, left without waiting for the dead."""

from __future__ import annotations

import gc
import inspect
import os
import socket
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elaunch.errors import CollectiveFailed, LinkLost, UsageError
from elaunch.policy.collectives import parse, uses_native
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native import bulk as bulk_module
from elaunch.workers.comm.native import gloo as gloo_module
from elaunch.workers.comm.native import groups as groups_module
from elaunch.workers.comm.native import sockets
from elaunch.workers.comm.native.choice import maker
from elaunch.workers.comm.native.ended import FREED_S, reach
from elaunch.workers.comm.native.gloo import GlooBulk
from elaunch.workers.comm.native.groups import MOST_FAILURES, NativeGroups, meet
from elaunch.workers.comm.native.nccl import NcclBulk, refuse_version
from elaunch.workers.comm.native.opening import Begun, GroupKey
from elaunch.workers.comm.transport import Transport
from elaunch.workers.data_parallel.reducer import NativeSums, Reducer
from tests.helpers import scaled, wait_until
from tests.unit.comm_crew import Task, crew, each, outcomes, together

HOST = "127.0.0.1"


@contextmanager
def gloo(size: int) -> Iterator[list[GlooBulk]]:
    """A Gloo group, all of whose members are threads of this process."""
    store = dist.HashStore()
    bulks = [GlooBulk(HOST) for _ in range(size)]
    together([lambda bulk=bulk, rank=rank: bulk.open(store, rank, size) for rank, bulk in enumerate(bulks)])  # type: ignore[misc]
    try:
        yield bulks
    finally:
        for bulk in bulks:
            bulk.poison()
            bulk.close()


def sum_of(bulk: GlooBulk, value: float, length: int = 1000) -> torch.Tensor:
    tensor = torch.full((length,), value)
    bulk.all_reduce(tensor).wait()
    return tensor


def test_gloo_sums_over_the_members() -> None:
    with gloo(3) as bulks:
        for total in each(sum_of, bulks, [1.0, 2.0, 4.0]):
            assert total.tolist() == [7.0] * 1000


def test_gloo_matches_messages_between_two_members_in_order() -> None:
    def work(bulk: GlooBulk, rank: int) -> list[float]:
        out, found = [torch.full((3,), 10.0 * rank + number) for number in range(2)], torch.zeros(2, 3)
        works = [bulk.receive(one, 1 - rank) for one in found]
        works += [bulk.send(one, 1 - rank) for one in out]
        for one in [*works, *works]:  # to wait for one again does no harm
            one.wait()
        return found[:, 0].tolist()

    with gloo(2) as bulks:
        assert each(work, bulks, [0, 1]) == [[10.0, 11.0], [0.0, 1.0]]


def test_gloo_exchanges_tensors_of_any_length_between_the_members() -> None:
    def work(bulk: GlooBulk, rank: int) -> list[list[float]]:
        """Sends `to` so many elements, and nothing to the first."""
        out = [torch.full((to if to != rank else 0,), float(rank)) for to in range(3)]
        found = [torch.zeros(rank if from_ != rank else 0) for from_ in range(3)]
        for one in bulk.exchange(out, found):
            one.wait()
        return [one.tolist() for one in found]

    with gloo(3) as bulks:
        assert each(work, bulks, [0, 1, 2]) == [[[], [], []], [[0.0], [], [2.0]], [[0.0, 0.0], [1.0, 1.0], []]]


@pytest.mark.parametrize("sends", [True, False])
def test_who_waits_for_a_message_of_a_gloo_group_is_freed(sends: bool) -> None:
    with gloo(2) as bulks:
        work = bulks[0].send(torch.ones(1 << 20), 1) if sends else bulks[0].receive(torch.ones(3), 1)
        waiting = Task(work.wait)
        assert waiting.running
        bulks[0].poison()
        with pytest.raises(RuntimeError):
            waiting.result(10)
        with pytest.raises(RuntimeError, match="closed"):
            bulks[0].send(torch.ones(1), 1)


@pytest.mark.parametrize("silent", [0, 1, 2, 3])
def test_who_waits_for_a_silent_member_of_a_gloo_group_is_freed(silent: int) -> None:
    with gloo(4) as bulks:
        begun = [bulk.all_reduce(torch.ones(1000)) for number, bulk in enumerate(bulks) if number != silent]
        waiting = [Task(work.wait) for work in begun]
        assert all(task.running for task in waiting)
        for number, bulk in enumerate(bulks):
            if number != silent:
                bulk.poison()
        for task in waiting:
            with pytest.raises(RuntimeError):
                task.result(10)
        with pytest.raises(RuntimeError, match="closed"):
            bulks[silent - 1].all_reduce(torch.ones(1))


def test_a_gloo_group_that_is_closed_with_a_thread_in_it_ends_when_that_comes_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its connections are open, as if the thread waited for a message whose end Gloo has lost."""
    monkeypatch.setattr(gloo_module, "LONGEST", timedelta(seconds=3))
    before, kept = threads_of_gloo(), list(bulk_module._KEPT)  # what other tests have left

    def is_kept() -> bool:
        return any(one not in kept for one in bulk_module._KEPT)

    with gloo(2) as bulks:
        work = bulks[0].all_reduce(torch.ones(1000))
        bulks[0].close()
        assert not work.is_completed()
        assert is_kept()
        wait_until(work.is_completed, 20, "the thread to come out")
    assert not is_kept()
    del work
    wait_until(lambda: threads_of_gloo() <= before, 20, "the threads to end")


def threads_of_gloo() -> int:
    names = [(task / "comm").read_text() for task in Path("/proc/self/task").iterdir()]
    return sum("gloo" in name for name in names)


def test_a_forked_child_does_not_keep_the_connections_open() -> None:
    with gloo(2) as bulks:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            mine = {one._inode for bulk in bulks for one in bulk._connections}
            os.write(write, b"y" if mine & sockets.inodes() else b"n")
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 1) == b"n"
        os.close(read)
        os.close(write)
        each(sum_of, bulks, [1.0, 2.0])  # and the parent's are as they were


def test_a_connection_that_one_thread_has_given_back_is_freed_by_another() -> None:
    server = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(server.getsockname())
    theirs, _ = server.accept()
    with server, ours, theirs:
        known = sockets.Socket(ours.fileno(), os.fstat(ours.fileno()).st_ino, ours.dup())
        ours.sendall(b"x")
        known.close()
        assert known.count_unsent() == 0
        known.end_reading()
        known.drain()
        known.shut_down()
        known.close()
        theirs.sendall(b"y")  # and its own one is as it was
        assert ours.recv(1) == b"y"


def test_nobody_waits_in_the_opening_for_one_who_never_comes() -> None:
    store, over = dist.HashStore(), threading.Event()
    task = Task(lambda: meet(store, 2, over))
    over.set()
    with pytest.raises(RuntimeError, match="members have changed"):
        task.result(10)
    with pytest.raises(RuntimeError, match="not all 3 members have come"):
        meet(dist.HashStore(), 3, threading.Event(), timeout_s=0.0)


def test_who_opens_a_gloo_group_is_freed_though_a_member_died_on_the_way() -> None:
    store, bulk = dist.HashStore(), GlooBulk(HOST)
    task = Task(lambda: bulk.open(store, 0, 2))
    wait_until(lambda: store.check(["ports/0"]), 20, "it to wait for the other one")
    assert task.running
    bulk.poison()
    with pytest.raises(RuntimeError, match="members have changed"):
        task.result(5)  # much less than its time-out
    bulk.close()


class Device:
    """A native group with the manners of a device's: its work ends with garbage, and the error comes late."""

    backend = "device"

    def __init__(self) -> None:
        self.opens = threading.Event()
        self.opened = self.poisoned = self.closed = False
        self.left_by: list[threading.Thread] = []

    def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
        self.opens.wait(20)
        if self.poisoned:
            raise RuntimeError("the members have changed while it was opened")
        self.opened = True

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        tensor.fill_(float("nan") if self.poisoned else 42.0)
        return type("Done", (), {"wait": lambda self, timeout=None: True})()

    def allreduce(self, tensors: list[torch.Tensor], opts: object = None) -> Any:
        return self.all_reduce(tensors[0])

    def backend_group(self) -> Any:
        return self

    def wrap(self, work: Any, is_message: bool) -> Any:
        return work

    def start_batch(self) -> bool:
        return False

    def end_batch(self) -> None:
        pass

    def send(self, tensor: torch.Tensor, to: int) -> Any:
        return self.all_reduce(torch.empty_like(tensor))

    def receive(self, tensor: torch.Tensor, from_: int) -> Any:
        return self.all_reduce(tensor)

    def exchange(self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]) -> Any:
        return [self.all_reduce(tensor) for tensor in incoming]

    def poison(self) -> None:
        self.poisoned = True
        self.opens.set()

    def leave(self) -> None:
        assert self.poisoned
        self.left_by.append(threading.current_thread())

    def errored(self) -> str | None:
        return "aborted" if self.poisoned else None

    def close(self) -> None:
        self.closed = True


def entered(devices: Sequence[Device], members: Sequence[str] = ("a", "b")) -> NativeGroups:
    """The groups of a worker that has entered generation 1."""
    left = iter(devices)
    groups = NativeGroups(lambda: next(left))
    groups.enter(1, tuple(members), 0, alone(members))
    return groups


def using(groups: NativeGroups) -> object:
    return groups.current


def opening(groups: NativeGroups) -> bool:
    return groups._newest is not None


def alone(members: Sequence[str]) -> Callable[[], dist.Store]:
    """Connects to a store to which all others have come before."""

    def connect() -> dist.Store:
        store = dist.HashStore()
        for generation in range(1, 9):
            store.add(f"native/{generation}/here", len(members) - 1)
        return store

    return connect


def test_a_group_is_used_from_the_barrier_on_at_which_all_have_it() -> None:
    device = Device()
    groups = entered([device])
    assert groups.ready() == 0
    assert not groups.passed((0, 0))
    device.opens.set()
    wait_until(lambda: groups.ready() == 1, 20, "the group to open")
    assert using(groups) is None
    assert not groups.passed((0, 1)), "another member has none yet"
    assert using(groups) is None
    assert groups.passed((1, 1))
    assert using(groups) is device
    assert groups.backend == "device"
    assert not groups.passed((1, 1)), "it is in use already"
    groups.enter(1, ("a", "b"), 0, alone("ab"))  # another plan for the same members
    assert using(groups) is device


def test_a_group_is_poisoned_at_once_and_closed_when_all_have_left_it() -> None:
    device, next_one = Device(), Device()
    device.opens.set()
    groups = entered([device, next_one])
    wait_until(lambda: groups.ready() == 1, 20, "the group to open")
    groups.passed((1, 1))
    groups.poison(1)
    assert device.errored() is None, "its own generation begins"
    groups.poison(2)
    assert device.errored() is not None
    assert device.left_by == [], "only the training thread leaves it"
    groups.pause()
    assert device.left_by == [threading.current_thread()]
    assert using(groups) is None
    assert groups.ready() == 0
    assert not device.closed
    groups.settled([0, 0])
    wait_until(lambda: device.closed, 20, "the group to be closed")
    groups.enter(2, ("a", "c"), 0, alone("ac"))
    next_one.opens.set()
    wait_until(lambda: groups.ready() == 2, 20, "the next group to open")
    groups.close()
    assert next_one.poisoned
    wait_until(lambda: next_one.closed, 20, "the group to be closed")


def opening_in_step(monkeypatch: pytest.MonkeyPatch) -> tuple[NativeGroups, Begun, Device, Device]:
    """The groups of a worker with one for the state of a step that begins, which is open, and one that it needs."""
    monkeypatch.setattr(groups_module, "meet", lambda *arguments: None)
    moving, device = Device(), Device()
    moving.opens.set()
    device.opens.set()
    left = iter([moving, device])
    groups = NativeGroups(lambda: next(left))
    begun = groups.open_in_step(1, ("a", "b"), 0, dist.HashStore)
    assert begun is not None
    groups.enter(1, ("a", "b"), 0, dist.HashStore)
    return groups, begun, moving, device


def test_no_other_group_is_opened_while_state_moves_in_one_during_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, begun, moving, device = opening_in_step(monkeypatch)
    assert groups.await_begun(begun, lambda: None) == (moving, "")
    time.sleep(0.2)
    assert not device.opened
    assert not groups.passed((0, 0))  # the step commits
    wait_until(lambda: groups.ready() == 1, 20, "the group to open")
    wait_until(lambda: moving.closed, 20, "the group of the step to be closed")
    assert moving.left_by == [threading.current_thread()]
    assert groups.await_begun(begun, lambda: None) == (None, "the members have changed")
    groups.close()


def test_the_group_of_a_step_is_poisoned_and_closed_with_its_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, begun, moving, device = opening_in_step(monkeypatch)
    assert groups.await_begun(begun, lambda: None) == (moving, "")
    groups.poison(2)
    assert moving.poisoned
    groups.pause()
    groups.settled([0])
    wait_until(lambda: moving.closed and device.closed, 20, "both groups to be given back")
    assert not device.opened


def test_who_waits_for_the_group_of_a_step_looks_at_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups_module, "meet", lambda *arguments: None)
    moving = Device()
    groups = NativeGroups(lambda: moving)
    begun = groups.open_in_step(1, ("a", "b"), 0, dist.HashStore)
    assert begun is not None

    def look() -> None:
        raise LinkLost("b", "closed by the peer")

    with pytest.raises(LinkLost):
        groups.await_begun(begun, look)
    groups.close()


def as_it_is() -> Callable[..., None]:
    return NativeGroups.settled


def without_assertions() -> Callable[..., None]:
    """`NativeGroups.settled` as `python -O` compiles it."""
    names = dict(vars(groups_module))
    code = compile(textwrap.dedent(inspect.getsource(NativeGroups.settled)), "groups.py", "exec", optimize=1)
    exec(code, names)
    return names["settled"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("settled", [as_it_is, without_assertions])
@pytest.mark.parametrize("wrong", ["a member still is in them", "this worker has not poisoned them"])
def test_no_group_is_closed_before_all_have_left_it(settled: Callable[[], Callable[..., None]], wrong: str) -> None:
    device, settle = Device(), settled()
    device.opens.set()
    groups = entered([device])
    wait_until(lambda: groups.ready() == 1, 20, "the group to open")
    groups.pause()
    groups._left[0].poisoned = "poisoned" not in wrong
    with pytest.raises(RuntimeError, match=f"of generation 1 are not closed: {wrong}"):
        settle(groups, [0, 1] if groups._left[0].poisoned else [0, 0])
    assert [one.generation for one in groups._left] == [1], "it is known still"
    groups._left[0].poisoned = True
    settle(groups, [0, 0])
    wait_until(lambda: device.closed, 20, "the group to be closed")


def test_a_generation_that_ends_while_its_group_opens_has_none() -> None:
    device = Device()
    groups = entered([device])
    groups.poison(2)
    groups.pause()
    groups.settled([0])
    wait_until(lambda: device.closed, 20, "what was made to be given back")
    assert not device.opened
    groups.enter(1, ("a", "b"), 0, alone("ab"))  # an activation that comes late
    assert groups.ready() == 0
    assert using(groups) is None


def test_an_opening_is_given_up_in_silence_once_no_step_comes(capsys: pytest.CaptureFixture[str]) -> None:
    opens, used = Device(), Device()
    groups = entered([opens])
    groups.give_up()
    groups.close()
    assert not opens.opened
    assert opens.closed
    groups = entered([used])
    used.opens.set()
    wait_until(lambda: groups.passed((groups.ready(), 1)), 20, "the group to be used")
    groups.give_up()
    assert using(groups) is used
    assert not used.poisoned
    groups.close()
    assert capsys.readouterr().err == ""


def test_who_leaves_waits_for_what_is_being_opened() -> None:
    class Slow(Device):
        def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
            inside.set()
            super().open(store, rank, size, messages)

        def poison(self) -> None:
            self.poisoned = True  # and nobody in it is freed

    device, inside = Slow(), threading.Event()
    groups = entered([device])
    assert inside.wait(20)
    leaving = Task(groups.close)
    wait_until(lambda: device.poisoned, 20, "the group to be left")
    assert leaving.running
    device.opens.set()
    leaving.result(20)
    assert device.closed


def test_the_groups_that_members_need_are_opened_in_one_order_and_stay_when_others_come_to_them() -> None:
    first, second, third = GroupKey("rows", ("a", "b")), GroupKey("rows", ("b", "c")), GroupKey("tp", ("a", "b", "c"))
    made: list[Device] = []

    def make() -> Device:
        made.append(Device())
        return made[-1]

    store, members = dist.HashStore(), ("a", "b", "c")
    for key in (first, second, third):
        dist.PrefixStore(key.place, dist.PrefixStore("native/1", store)).add("here", len(key.members) - 1)
    groups = NativeGroups(make)
    groups.needs = lambda all_of_them: [first, second]
    groups.enter(1, members, 0, lambda: store)
    assert len(made) == 1, "it is no member of the second one"
    made[0].opens.set()
    wait_until(lambda: groups.ready() == 1, 20, "the first group to open")
    assert groups.passed((1, 1))
    assert groups.in_use == {first: made[0]}
    assert groups.serves([first, second])
    assert not groups.serves([first])
    assert using(groups) is None, "there is none of all members"
    groups.needs = lambda all_of_them: [first, third]
    groups.enter(1, members, 0, lambda: store)
    assert not groups.in_use, "links serve until all have what they need"
    assert groups.ready() == 0
    assert not groups.passed((0, 1))
    made[1].opens.set()
    wait_until(lambda: groups.ready() == 1, 20, "the other group to open")
    assert groups.passed((1, 1))
    assert groups.in_use == {first: made[0], third: made[1]}
    groups.poison(2)
    assert all(device.poisoned for device in made)
    groups.pause()
    groups.settled([0])
    wait_until(lambda: all(device.closed for device in made), 20, "all groups to be closed")


def test_who_needs_no_group_is_ready_for_those_of_the_others() -> None:
    groups = NativeGroups(Device)
    groups.needs = lambda members: [GroupKey("rows", ("b", "c"))]
    groups.enter(1, ("a", "b", "c"), 0, dist.HashStore)
    assert groups.ready() == 1
    assert groups.passed((1, 1))
    assert groups.backend is None
    groups.close()
    groups = NativeGroups(Device)
    groups.needs = lambda members: ()
    groups.enter(1, ("a", "b"), 0, dist.HashStore)
    assert groups.ready() == 0, "nobody needs any"


def test_one_member_alone_has_no_native_group() -> None:
    groups = NativeGroups(lambda: pytest.fail("a group is made"))
    groups.enter(1, ("a",), 0, alone("a"))
    assert groups.ready() == 0
    assert not groups.passed((0, 0))
    NativeGroups(None).enter(1, ("a", "b"), 0, alone("ab"))


def test_members_between_whom_it_fails_again_and_again_stay_with_links(capsys: pytest.CaptureFixture[str]) -> None:
    devices = [Device() for _ in range(MOST_FAILURES + 1)]
    groups = entered(devices)
    for generation in range(1, MOST_FAILURES + 1):
        groups.failed(generation)
        groups.poison(generation + 1)
        groups.pause()
        groups.settled([0])
        groups.enter(generation + 1, ("a", "b"), 0, alone("ab"))
    assert f"device has failed {MOST_FAILURES} times between the same members" in capsys.readouterr().err
    assert not opening(groups)
    groups.enter(9, ("a", "c"), 0, alone("ac"))  # others: it is tried again
    assert opening(groups)
    groups.close()


def test_what_fails_since_the_generation_is_over_does_not_count() -> None:
    groups = entered([Device() for _ in range(MOST_FAILURES + 1)])
    for generation in range(1, MOST_FAILURES + 1):
        groups.poison(generation + 1)
        groups.failed(generation)
        groups.pause()
        groups.settled([0])
        groups.enter(generation + 1, ("a", "b"), 0, alone("ab"))
    assert opening(groups), "a link that breaks again and again is not the backend's fault"
    groups.close()


def test_a_group_that_does_not_open_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    class Refused(Device):
        def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
            raise RuntimeError("no route\nto host")

    device = Refused()
    groups = entered([device])
    wait_until(lambda: device.closed, 20, "it to be given back")
    assert "[elaunch] device cannot be used in generation 1; links serve: no route to host" in capsys.readouterr().err
    assert groups.ready() == 0
    groups.close()


def test_a_step_that_a_device_ended_with_garbage_does_not_count() -> None:
    with crew(2) as transports:
        failed: list[int] = []
        reducer, device = Reducer(failed.append), Device()
        reducer.begin(Group(transports[0], 1, ["a/0#0", "a/1#0"]), 0.5, device)
        total = torch.ones(3)
        reducer.launch(total)
        reducer.join()
        reducer.wait()
        reducer.raise_error()
        assert total.tolist() == [42.0] * 3
        device.poisoned = True
        reducer.begin(Group(transports[0], 1, ["a/0#0", "a/1#0"]), 0.5, device)
        reducer.launch(total)
        reducer.join()
        reducer.raise_error()  # nothing is known yet
        reducer.wait()
        with pytest.raises(CollectiveFailed, match="generation 1 failed: aborted"):
            reducer.raise_error()
        assert failed == [1]
        reducer.cancel()
        reducer.close()


class Mark:
    """A place in the work of a device that takes no time by the clock: each look at it takes a second."""

    def __init__(self, reached_after: float) -> None:
        self.now_s, self.reached_after = 0.0, reached_after

    def query(self) -> bool:
        self.now_s += 1.0
        return self.now_s >= self.reached_after

    def clock(self) -> float:
        return self.now_s


def test_a_worker_whose_device_never_comes_to_the_end_of_poisoned_sums_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(what: str, error: BaseException) -> None:
        raise SystemExit(f"{what}: {error}")

    monkeypatch.setattr("elaunch.workers.comm.native.ended.end_process", end)
    monkeypatch.setattr("elaunch.workers.comm.native.ended.POLL_S", 0.0)
    device = Device()
    slow, meta, looks = Mark(5000), torch.device("meta"), list[None]()
    reach(meta, slow, device.errored, slow.clock, lambda: looks.append(None))
    assert slow.now_s == 5000, "as long as the members are the same, the hang detector judges"
    assert len(looks) > 1000, "links are looked at meanwhile"
    device.poisoned = True
    freed, stuck = Mark(100), Mark(float("inf"))
    reach(meta, freed, device.errored, freed.clock)
    with pytest.raises(SystemExit) as ended:
        reach(meta, stuck, device.errored, stuck.clock)
    assert str(ended.value) == "native group: meta was not done with its sums 120 s after their end (aborted)"
    assert FREED_S <= stuck.now_s <= FREED_S + 2


def nothing() -> None:
    pass


def test_a_device_whose_group_has_failed_is_freed_before_anybody_is_known_to_have_left() -> None:
    class Hanging(Device):
        """Its error does not free the device."""

        def errored(self) -> str | None:
            return "aborted" if self.poisoned else "remote error"

    class Freed(Mark):
        def query(self) -> bool:
            super().query()
            return device.poisoned

    device = Hanging()
    mark = Freed(0)
    reach(torch.device("meta"), mark, device.errored, mark.clock, failed=device.poison)
    assert device.poisoned
    assert mark.now_s < FREED_S


@pytest.mark.parametrize("kind", ["host", "device"])
def test_who_waits_natively_for_a_peer_whose_link_breaks_goes_to_the_agreement(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may wait for ever for a peer that is gone, and Gloo for one whose machine is."""
    monkeypatch.setattr("elaunch.workers.comm.native.ended.LINKS_S", 0.01)

    class Silent(Device):
        def all_reduce(self, tensor: torch.Tensor) -> Any:
            class Work:
                def wait(self, timeout: timedelta | None = None) -> None:
                    if kind == "host" and timeout is not None:
                        raise RuntimeError("Operation timed out!")

                def is_completed(self) -> bool:
                    return False

            return Work()

    if kind == "device":
        never = Mark(float("inf"))
        monkeypatch.setattr(NativeSums, "_mark", lambda sums: never)
    with crew(2) as transports:
        failed: list[int] = []
        reducer = Reducer(failed.append)
        reducer.begin(Group(transports[0], 1, ["a/0#0", "a/1#0"]), 0.5, Silent())
        reducer.launch(torch.ones(3))
        waiting = Task(reducer.wait)
        wait_until(lambda: waiting.running, 20, "it to wait")
        assert reducer.error is None
        transports[1].close()
        waiting.result(20)
        with pytest.raises(LinkLost, match="a/1#0"):
            reducer.raise_error()
        assert not failed, "the backend is not to blame"
        reducer.wait()  # at the barrier: it waits no more
        reducer.cancel()
        reducer.close()


def test_a_sum_that_gloo_never_ends_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elaunch.workers.comm.native.ended.DROP_S", 0.01)

    class Lost(Device):
        def all_reduce(self, tensor: torch.Tensor) -> Any:
            return lost

    class Work:
        def wait(self, timeout: timedelta | None = None) -> None:
            assert timeout is not None, "it waits for ever"
            raise RuntimeError("Operation timed out!")

    lost = Work()
    sums = NativeSums(Lost())
    sums.add(torch.ones(1))
    sums.add(torch.ones(1))
    sums.drop()


def test_who_waits_for_native_sums_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    named: list[tuple[str, ...]] = []

    @contextmanager
    def waiting(peers: Sequence[str], generation: int) -> Iterator[None]:
        named.append(tuple(peers))
        yield

    with crew(2) as transports:
        monkeypatch.setattr("elaunch.workers.data_parallel.reducer.heartbeat.waiting", waiting)
        reducer = Reducer()
        reducer.begin(Group(transports[0], 1, ["a/0#0", "a/1#0"]), 0.5, Device())
        reducer.launch(torch.ones(3))
        reducer.wait()
        monkeypatch.undo()
        reducer.cancel()
        reducer.close()
    assert set(named) == {("a/1#0",)}


def test_a_reducer_sums_over_gloo_and_is_freed() -> None:
    members = ["a/0#0", "a/1#0"]
    with crew(2) as transports, gloo(2) as bulks:
        reducers = [Reducer(), Reducer()]
        for reducer, transport, bulk in zip(reducers, transports, bulks, strict=True):
            reducer.begin(Group(transport, 1, members), 0.25, bulk)
        tensors = [torch.full((5,), 4.0), torch.full((5,), 8.0)]

        def step(reducer: Reducer, tensor: torch.Tensor) -> None:
            reducer.launch(tensor)
            reducer.wait()
            reducer.raise_error()

        each(step, reducers, tensors)
        assert [tensor.tolist() for tensor in tensors] == [[3.0] * 5] * 2
        first = Task(lambda: step(reducers[0], tensors[0]))
        bulks[0].poison()
        with pytest.raises(CollectiveFailed):
            first.result(10)
        assert outcomes([lambda: step(reducers[1], tensors[1])])[0].__class__ is CollectiveFailed
        for reducer in reducers:
            reducer.cancel()
            reducer.close()


def test_who_has_native_groups(capsys: pytest.CaptureFixture[str]) -> None:
    cpu, cuda, other = torch.device("cpu"), torch.device("cuda", 0), torch.device("xpu", 0)
    assert not uses_native({}, "cpu")
    assert uses_native({}, "cuda")
    assert uses_native({"ELAUNCH_CONSISTENCY": "bitwise"}, "cuda")
    assert uses_native({}, "npu")
    assert not uses_native({"ELAUNCH_CONSISTENCY": "bitwise"}, "npu")
    assert not uses_native({"ELAUNCH_COLLECTIVES": "links"}, "cuda")
    assert uses_native({"ELAUNCH_COLLECTIVES": "native"}, "cpu")
    made = maker(HOST, cpu)
    assert made is not None
    assert isinstance(made(), GlooBulk)
    assert maker(HOST, other) is None
    assert "no backend for native collectives on xpu" in capsys.readouterr().err
    if dist.is_nccl_available():
        made = maker(HOST, cuda)
        assert made is not None
        assert isinstance(made(), NcclBulk)
    both = {"ELAUNCH_COLLECTIVES": "native", "ELAUNCH_CONSISTENCY": "bitwise"}
    assert uses_native(both, "cpu")
    assert uses_native(both, "cuda")
    with pytest.raises(UsageError, match=r"--collectives=native .*--consistency=bitwise .*npu.*--collectives=links"):
        uses_native(both, "npu")
    with pytest.raises(UsageError, match=r"--collectives=fast: expected auto .*, native .* or links"):
        parse("fast", "--collectives")


@pytest.mark.parametrize(
    ("version", "fine"), [((2, 28, 3), False), ((2, 28, 8), False), ((2, 28, 9), True), ((2, 27, 5), True)]
)
def test_versions_of_nccl_that_crash_in_an_abort_are_refused(version: tuple[int, ...], fine: bool) -> None:
    if fine:
        refuse_version(version)
    else:
        with pytest.raises(RuntimeError, match=r"NCCL 2.28.\d may crash .* 2.28.3 to 2.28.8"):
            refuse_version(version)


def test_a_version_of_nccl_that_crashes_in_an_abort_is_named_once_and_links_serve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 5))
    make = maker(HOST, torch.device("cuda", 0))
    assert make is None
    groups = NativeGroups(make)
    for generation in (1, 2, 3):
        groups.enter(generation, ("a", "b"), 0, alone("ab"))
        assert groups.ready() == 0
        groups.poison(generation + 1)
        groups.pause()
    (line,) = capsys.readouterr().err.splitlines()
    assert "NCCL 2.28.5 may crash when a member dies" in line
    assert "tensors on cuda go over links" in line
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert maker(HOST, torch.device("cuda", 0)) is not None


class Survivor:
    """A member that goes through one generation after the other."""

    def __init__(self, rank: int, transport: Transport, store: dist.Store) -> None:
        self.rank, self.transport, self.store = rank, transport, store
        self.groups = NativeGroups(lambda: GlooBulk(HOST))
        self.reducer = Reducer(self.groups.failed)

    def enter(self, generation: int) -> None:
        self.groups.enter(generation, ("a", "b", f"c#{generation}"), self.rank, lambda: self.store)

    def sum(self, generation: int) -> None:
        self.groups.passed((generation, generation))
        group = Group(self.transport, 1, ["a/0#0", "a/1#0"])
        self.reducer.begin(group, 1.0, self.groups.current)
        self.reducer.launch(torch.ones(1000))
        self.reducer.wait()

    def leave(self) -> None:
        self.groups.pause()
        self.reducer.cancel()
        self.groups.settled([0])


def all_have(members: Sequence[Survivor], generation: int) -> bool:
    return all(one.groups.ready() == generation for one in members)


def held() -> tuple[int, int, int]:
    """Threads, descriptors and MiB of this process."""
    gc.collect()
    mib = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") >> 20
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), mib


@pytest.mark.timeout(600)
def test_nothing_grows_however_many_members_die() -> None:
    """Every third one dies while the group opens, the others in a sum."""
    n_faults, measured = scaled(60, 1000), list[tuple[int, int, int]]()
    store = dist.HashStore()
    with crew(2) as transports:
        members = [Survivor(rank, transports[rank % 2], store) for rank in range(3)]
        *survivors, victim = members
        for generation in range(1, n_faults + 1):
            opens = generation % 3 > 0
            for one in members if opens else survivors:
                one.enter(generation)
            if opens:
                wait_until(partial(all_have, members, generation), 20, "the group to open")
                waiting = [Task(partial(one.sum, generation)) for one in survivors]
                victim.groups.poison(generation + 1)  # as the kernel does: its sockets are closed
            for one in survivors:
                one.groups.poison(generation + 1)
            if opens:
                for task in waiting:
                    task.result(20)
                assert all(one.reducer.error is not None for one in survivors)
            for one in members:
                one.leave()
            if generation in (n_faults // 3, n_faults):
                calm = lambda: all(not thread.is_alive() for one in members for thread in one.groups._threads)  # noqa: E731
                wait_until(calm, 20, "groups to be closed")
                measured.append(held())
        for one in members:
            one.reducer.close()
    (threads, descriptors, mib), after = measured
    # A thread of Gloo's may be on its way out.
    assert after[0] <= threads + 2, measured
    assert after[1] <= descriptors, measured
    assert after[2] <= mib + scaled(4, 8), measured
