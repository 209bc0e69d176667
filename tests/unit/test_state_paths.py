"""State over native groups and NIXL: chosen alike by all members, bit for bit, and given up without harm."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.errors import CollectiveFailed, StateError, StepInterrupted, UsageError
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native import groups
from elaunch.workers.comm.native.gloo import GlooBulk
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.native.opening import EVERYONE, GroupKey
from elaunch.workers.comm.paths import StatePath
from elaunch.workers.comm.transport import Transport
from elaunch.workers.state import objects
from elaunch.workers.state.paths import nixl
from elaunch.workers.state.paths.choice import (
    LINKS,
    NATIVE,
    NIXL,
    PATH,
    PathOffer,
    choose,
    is_open_to_choice,
    parse_path,
)
from elaunch.workers.state.paths.codes import device_code
from elaunch.workers.state.paths.links import LinkPath
from elaunch.workers.state.paths.native import NativePath
from elaunch.workers.state.paths.nixl import NixlPath
from elaunch.workers.state.paths.offers import Offers
from elaunch.workers.state.reshard import SMALLEST_MESSAGE_BYTES, Moved, reshard
from elaunch.workers.state.routes import Router
from elaunch.workers.state.space import Holdings, Item
from elaunch.workers.state.staging import CopiesOnHost
from tests.helpers import wait_until
from tests.unit.comm_crew import Task, each, outcomes
from tests.unit.test_reshard import Killed, Truth, _as_process, _stopping_all, allocator, going_on, transports_of

HOST = "127.0.0.1"
WORKERS = ["a/0#0", "a/1#0", "b/0#0", "b/1#0"]
# Of an odd number of bytes, and of two types that share messages.
ITEMS = {f"w{number}": Item(f"w{number}", (63, 1021), (torch.bfloat16, torch.float32)) for number in range(3)}
ITEMS["small"] = Item("small", (7,), (torch.uint8, torch.float64))
TRUTH = Truth(ITEMS)
ALL: Holdings = {name: (tuple((0, size) for size in item.shape),) for name, item in ITEMS.items()}
COLUMNS: Holdings = {name: (((0, 63), (100, 611)),) for name in ITEMS if name != "small"}

GPUS = PathOffer(backend="nccl", host="a")


class TestChoice:
    def test_little_goes_over_links_and_much_over_the_group_that_has_to_be_opened_first(self) -> None:
        assert choose(1 << 20, True, [GPUS] * 3, False).path == LINKS
        much = choose(8 << 30, True, [GPUS] * 3, False)
        assert (much.path, set(much.seconds)) == (NATIVE, {LINKS, NATIVE})
        assert "8589.9 MB" in much.reason

    def test_a_group_that_stands_is_worth_it_for_less(self) -> None:
        assert choose(100 << 20, True, [GPUS] * 2, is_open=True).path == NATIVE
        assert choose(100 << 20, True, [GPUS] * 2, is_open=False).path == LINKS

    def test_the_slowest_member_counts_by_what_it_has_measured(self) -> None:
        slow = PathOffer(backend="nccl", host="a", native_bytes_per_s=1e9)
        assert choose(8 << 30, True, [GPUS, slow], False).path == LINKS
        late = PathOffer(backend="nccl", host="a", open_s=9.0)
        assert choose(8 << 30, True, [GPUS, late], False).path == LINKS
        far = PathOffer(backend="nccl", host="a", links_bytes_per_s=1e8)
        assert choose(300 << 20, True, [GPUS, far], False).path == NATIVE

    def test_one_that_has_never_opened_a_group_is_assumed_to_take_long(self) -> None:
        quick = PathOffer(backend="nccl", host="a", open_s=0.1)
        assert choose(1 << 30, True, [quick] * 2, False).path == NATIVE
        assert choose(1 << 30, True, [quick, GPUS], False).path == LINKS

    def test_what_is_in_host_memory_does_not_go_over_a_devices_group(self) -> None:
        assert choose(8 << 30, False, [GPUS] * 2, is_open=True).path == LINKS

    def test_gloo_is_no_quicker_than_links(self) -> None:
        assert choose(8 << 30, True, [PathOffer(backend="gloo")] * 2, is_open=True).path == LINKS

    def test_members_without_the_same_backend_have_links(self) -> None:
        assert not is_open_to_choice([GPUS, PathOffer(host="a")])
        assert not is_open_to_choice([PathOffer(backend="hccl")] * 2)
        assert is_open_to_choice([GPUS] * 2)

    def test_nixl_serves_between_hosts_with_a_fabric_and_never_on_one(self) -> None:
        there = [PathOffer(host="a", has_fabric=True), PathOffer(host="b", has_fabric=True)]
        assert choose(8 << 30, True, there, False).path == NIXL
        assert choose(8 << 30, True, [there[0]] * 2, False).path == LINKS
        asked = [PathOffer(NIXL, host="a", has_fabric=True)] * 2
        assert choose(8 << 30, True, asked, False).path == LINKS
        assert choose(8 << 30, True, [there[0], PathOffer(host="b")], False).path == LINKS

    def test_what_was_asked_for_is_taken_where_it_can_be(self) -> None:
        assert choose(1, True, [PathOffer(NATIVE, backend="gloo")] * 2, False).path == NATIVE
        assert choose(0, True, [PathOffer(NATIVE, backend="gloo")] * 2, False).path == LINKS
        assert not is_open_to_choice([PathOffer(LINKS, backend="nccl")] * 2)
        assert choose(8 << 30, True, [PathOffer(NATIVE, backend="nccl"), GPUS], True).path == LINKS

    def test_another_path_is_refused_by_name(self) -> None:
        assert parse_path("native") == NATIVE
        with pytest.raises(UsageError, match="ELAUNCH_STATE_PATH=rdma: expected auto"):
            parse_path("rdma")


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30_000), st.data())
def test_a_devices_checksum_tells_of_any_changed_bit(size: int, data: st.DataObject) -> None:
    flat = torch.arange(size).mul(2654435761).remainder(251).to(torch.uint8)
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    whole = torch.cat([flat.new_zeros(3), flat])[3:]  # it does not lie at a multiple of 8
    code = device_code(flat)
    assert torch.equal(device_code(whole), code)
    flat[at] ^= 1 << bit
    assert not torch.equal(device_code(flat), code)


def test_state_of_an_accelerator_is_received_on_that_of_this_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = {"tensors": [{"path": "o.state.0.exp_avg", "shape": [2, 3], "dtype": "torch.float32", "device": "meta"}]}
    assert objects.allocate(manifest, into={})[0].device.type == "cpu"  # it has none
    monkeypatch.setattr(objects, "accelerator_type", lambda: "meta")
    assert objects.allocate(manifest, into={})[0].device.type == "meta"
    assert objects.allocate(manifest)[0].device.type == "cpu"  # from a checkpoint


class Bulk(GlooBulk):
    """Gloo, with what a test wants to happen in it.

    Args:
        crew: of its member.
        place: of the member.
    """

    def __init__(self, crew: Crew, place: int) -> None:
        super().__init__(HOST)
        self._crew, self._member = crew, place

    def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
        self._crew.opened.append(self._member)
        if self._member in self._crew.refuses:
            raise RuntimeError("no interface that others reach")
        super().open(store, rank, size, messages)

    def exchange(self, outgoing: Any, incoming: Any) -> Any:
        crew = self._crew
        crew.exchanges[self._member] += 1
        if crew.dies == (self._member, crew.exchanges[self._member]):
            raise Killed
        if crew.damages == self._member and crew.exchanges[self._member] == 1:
            outgoing = [one.clone() for one in outgoing]
            next(one for one in outgoing if one.numel())[5] ^= 4
        return super().exchange(outgoing, incoming)


class Crew:
    """What each member may move state over, in threads of one process."""

    def __init__(self, size: int) -> None:
        self.store = dist.HashStore()
        self.natives = [NativeGroups(partial(Bulk, self, place)) for place in range(size)]
        self.offers = [Offers(native) for native in self.natives]
        self.opened: list[int] = []
        self.exchanges = [0] * size
        self.refuses: tuple[int, ...] = ()
        self.dies = (-1, 0)
        self.damages = -1

    def watch(self, transports: list[Transport]) -> None:
        for transport, native in zip(transports, self.natives, strict=True):
            transport.watch(native.poison)

    def agree(self, places: list[int]) -> None:
        facts = [self.offers[place].facts() for place in places]
        for place in places:
            self.offers[place].agreed(facts, lambda: self.store)

    def group(self, transport: Transport, members: list[str] = WORKERS, generation: int = 1) -> Group:
        group = Group(transport, generation, members)
        group.paths = self.offers[WORKERS.index(transport.worker)]
        return group

    def close(self) -> None:
        for native in self.natives:
            native.close()


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH, NATIVE)


def all_of(transports: list[Transport], work: Callable[[Transport], Any]) -> list[Any]:
    """What all return, or the error of the first that failed, who ends the others."""
    errors: list[BaseException] = []

    def noting(transport: Transport) -> Any:
        try:
            return work(transport)
        except BaseException as error:
            errors.append(error)
            raise

    found = outcomes([partial(_stopping_all, transports, noting, transport) for transport in transports])
    if errors:
        raise errors[0]
    return found


def moved_by(
    crew: Crew, before: Mapping[str, Holdings], after: Mapping[str, Holdings], bound: int | None = None
) -> list[Moved]:
    router = Router(ITEMS, before, after)

    def work(transport: Transport) -> Moved:
        state = TRUTH.state(before.get(transport.worker, {}))
        group = crew.group(transport)
        found, moved = reshard(group, router, state, allocator(ITEMS), max_extra_bytes=bound, checksum=True)
        TRUTH.check(found, after.get(transport.worker, {}))
        return moved

    with transports_of(WORKERS) as transports:
        crew.watch(transports)
        crew.agree(list(range(4)))
        try:
            return all_of(transports, work)
        finally:
            crew.close()


@pytest.mark.parametrize("bound", [None, 8 * SMALLEST_MESSAGE_BYTES + (2 << 20)])
@pytest.mark.parametrize("needed", ["all", "columns"])
@pytest.mark.usefixtures("forced")
def test_state_over_a_native_group_is_the_same_to_the_last_bit(bound: int | None, needed: str) -> None:
    crew = Crew(4)
    part = ALL if needed == "all" else COLUMNS
    moved = moved_by(crew, {"a/0#0": ALL}, {"a/0#0": ALL} | dict.fromkeys(WORKERS[1:], part), bound)
    assert {offers.last for offers in crew.offers} == {NATIVE}
    assert all(crew.exchanges)
    assert sorted(crew.opened) == [0, 1, 2, 3]  # once, for all windows
    if bound is not None:
        assert all(one.peak_extra_bytes <= bound for one in moved)


@pytest.mark.usefixtures("forced")
def test_a_native_group_carries_state_both_ways_at_once() -> None:
    crew = Crew(4)
    left, right = (dict.fromkeys(COLUMNS, (((0, 63), ends),)) for ends in ((0, 500), (500, 1021)))
    moved_by(crew, {"a/0#0": left, "b/0#0": right}, {"a/0#0": right, "b/0#0": left})
    assert crew.exchanges[0] > 0
    assert crew.exchanges[1] == 0  # who has nothing to do with it waits for nobody


@pytest.mark.usefixtures("forced")
def test_what_arrives_damaged_over_a_native_group_is_named() -> None:
    crew = Crew(4)
    crew.damages = 0
    with pytest.raises(StateError, match=r"w0 \[\(0, 63\), .* arrived damaged from a/0#0"):
        moved_by(crew, {"a/0#0": ALL}, {"b/1#0": ALL})


def test_over_gloo_links_are_taken_where_nobody_asks_for_more() -> None:
    crew = Crew(4)
    moved_by(crew, {"a/0#0": ALL}, dict.fromkeys(WORKERS, ALL))
    assert {offers.last for offers in crew.offers} == {LINKS}
    assert crew.opened == []


@pytest.mark.usefixtures("forced")
def test_a_group_that_cannot_be_opened_on_one_member_leaves_the_state_to_links(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(groups, "GIVE_UP_S", 0.5)
    crew = Crew(4)
    crew.refuses = (2,)
    moved_by(crew, {"a/0#0": ALL}, dict.fromkeys(WORKERS, ALL))
    assert {offers.last for offers in crew.offers} == {LINKS}
    assert crew.exchanges == [0] * 4
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert "the state of generation 1 moves over links, as gloo cannot be opened for it" in said[0]


@pytest.mark.parametrize("dies_at", [1, 2])
@pytest.mark.usefixtures("forced")
def test_a_worker_that_dies_in_a_move_over_a_native_group_leaves_the_others_to_begin_again(
    dies_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NativePath, "message_bytes", 64 << 10)  # several rounds
    crew, victim = Crew(4), "b/0#0"
    crew.dies = (WORKERS.index(victim), dies_at)
    quarter = {
        worker: dict.fromkeys(COLUMNS, (((0, 63), (255 * place, 255 * place + 255)),))
        for place, worker in enumerate(WORKERS)
    }
    turned = {worker: quarter[WORKERS[place - 1]] for place, worker in enumerate(WORKERS)}
    states = {worker: TRUTH.state(quarter[worker]) for worker in WORKERS}
    router = Router(ITEMS, quarter, turned)

    def first(transport: Transport) -> object:
        group = crew.group(transport)
        moved = reshard(group, router, states[transport.worker], allocator(ITEMS))
        group.barrier()
        return moved

    with transports_of(WORKERS) as transports:
        crew.watch(transports)
        crew.agree(list(range(4)))
        ends = outcomes([partial(_as_process, first, transport, transports) for transport in transports])
        for worker, end in zip(WORKERS, ends, strict=True):
            assert isinstance(end, Killed if worker == victim else StepInterrupted), (worker, end)
        left, survivors = going_on(transports, victim)
        places = [WORKERS.index(worker) for worker in survivors]
        for place in places:
            crew.natives[place].pause()
        for place in places:
            crew.natives[place].settled(())
        crew.agree(places)
        for worker in survivors:  # the old state is as it was
            TRUTH.check(states[worker], quarter[worker])
        swapped = {worker: quarter[survivors[place - 1]] for place, worker in enumerate(survivors)}
        again = Router(ITEMS, {worker: quarter[worker] for worker in survivors}, swapped)

        def second(transport: Transport) -> None:
            group = crew.group(transport, survivors, 2)
            found, _ = reshard(group, again, states[transport.worker], allocator(ITEMS))
            TRUTH.check(found, swapped[transport.worker])

        each(second, left)
        assert {crew.offers[place].last for place in places} == {NATIVE}
        crew.close()


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("needs_it", [True, False])
def test_the_group_of_a_move_stays_if_the_members_need_it_and_is_given_back_else(needs_it: bool) -> None:
    crew = Crew(4)
    key, other = GroupKey(EVERYONE, tuple(WORKERS)), GroupKey("rows", tuple(WORKERS))
    for native in crew.natives:
        native.needs = lambda members: [key] if needs_it else [other]
    router = Router(ITEMS, {"a/0#0": ALL}, dict.fromkeys(WORKERS, ALL))

    def work(transport: Transport) -> None:
        group = crew.group(transport)
        native = crew.natives[group.rank]
        state = TRUTH.state(ALL if group.rank == 0 else {})
        reshard(group, router, state, allocator(ITEMS))
        assert native.for_state(group.members) is not None
        group.barrier()
        native.state_moved()
        native.enter(1, group.members, group.rank, lambda: crew.store)
        wait_until(lambda: native.ready() == 1, 20, "a native group")
        group.barrier()
        assert native.passed((1, 1))
        # The group of a move among members that use it already needs no opening.
        assert (native.for_state(group.members) is not None) == needs_it
        assert [size for size, _ in native.openings] == ([4] if needs_it else [])

    with transports_of(WORKERS) as transports:
        crew.watch(transports)
        crew.agree(list(range(4)))
        all_of(transports, work)
        crew.close()
    assert len(crew.opened) == (4 if needs_it else 8)


# -- NIXL ----------------------------------------------------------------------------------------------------------


class Fabric:
    """Memory that is registered, by agent; all in this process."""

    def __init__(self) -> None:
        self.registered: dict[str, list[tuple[int, int]]] = {}
        self.lock = threading.Lock()
        self.reads = 0
        self.fails = False
        self.damages = False


class StandIn:
    """Behaves as `nixl_agent` of NIXL 1.5.1 where that is called: it moves registered memory alone, in a while."""

    def __init__(self, name: str, fabric: Fabric) -> None:
        self.name, self._fabric = name, fabric
        self.fabric_memory = fabric.registered.setdefault(name, [])
        self.remote: set[str] = set()
        self.handles: dict[int, tuple[list[Any], list[Any], str]] = {}
        self._numbers = itertools.count()
        self._asked: dict[int, int] = {}

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> object:
        assert kind == "DRAM"
        assert all(len(region) == 4 for region in regions)
        found = [(at, size) for at, size, _, _ in regions]
        self.fabric_memory += found
        return found

    def deregister_memory(self, regions: Any) -> None:
        for region in regions:
            self.fabric_memory.remove(region)

    def get_agent_metadata(self) -> bytes:
        return b"\x00\xff" + self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        assert metadata[:2] == b"\x00\xff"
        name = metadata[2:].decode()
        self.remote.add(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        self.remote.remove(name)

    def get_xfer_descs(self, regions: list[tuple[int, int, int]], kind: str) -> list[tuple[int, int]]:
        assert kind == "DRAM"
        assert all(type(region) is tuple and len(region) == 3 for region in regions)
        return [(at, size) for at, size, _ in regions]

    def initialize_xfer(self, operation: str, local: Any, remote: Any, name: str) -> int:
        assert operation == "READ"
        assert name in self.remote
        assert set(local) <= set(self.fabric_memory)
        assert set(remote) <= set(self._fabric.registered[name])
        handle = next(self._numbers)
        self.handles[handle] = local, remote, name
        return handle

    def transfer(self, handle: int) -> str:
        self._asked[handle] = 0
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        self._asked[handle] += 1
        if self._asked[handle] < 3:
            return "PROC"
        local, remote, name = self.handles[handle]
        if self._fabric.fails:
            return "ERR"
        for (to, size), (from_, theirs) in zip(local, remote, strict=True):
            assert size == theirs
            assert (from_, size) in self._fabric.registered[name], "it reads what is not registered any more"
            ctypes.memmove(to, from_, size)
        if self._fabric.damages:
            ctypes.memset(local[0][0], 0xA5, 1)
        self._fabric.reads += 1
        return "DONE"

    def release_xfer_handle(self, handle: int) -> None:
        del self.handles[handle]


class OverNixl:
    """Has a group move all of its state over NIXL to those on other nodes."""

    last: str | None = NIXL

    def in_step(self, group: Group, most_bytes: int, device: torch.device) -> None:
        """Returns links."""

    def __init__(self, agent: Any, batch_bytes: int) -> None:
        self._agent, self._batch_bytes = agent, batch_bytes

    def choose(self, group: Group, most_bytes: int, device: Any, is_bounded: bool) -> StatePath:
        here = group.members[group.rank][0]
        far = frozenset(rank for rank, member in enumerate(group.members) if member[0] != here)
        links = LinkPath(group, CopiesOnHost())
        return NixlPath(self._agent, group, far, torch.device("cpu"), links, self._batch_bytes)

    def took(self, path: StatePath, n_bytes: int, seconds: float) -> None:
        assert path.name == NIXL


def over_nixl(
    make: Callable[[str], Any], batch_bytes: int, before: Mapping[str, Holdings], after: Mapping[str, Holdings]
) -> None:
    router = Router(ITEMS, before, after)
    agents = {worker: make(worker) for worker in WORKERS}

    def work(transport: Transport) -> None:
        group = Group(transport, 1, WORKERS)
        group.paths = OverNixl(agents[transport.worker], batch_bytes)
        state = TRUTH.state(before.get(transport.worker, {}))
        found, _ = reshard(group, router, state, allocator(ITEMS), checksum=True)
        TRUTH.check(found, after.get(transport.worker, {}))

    with transports_of(WORKERS) as transports:
        all_of(transports, work)


@pytest.mark.parametrize("batch_bytes", [1, 200_000, 1 << 30])
@pytest.mark.parametrize("needed", ["all", "columns"])
def test_state_over_nixl_is_the_same_to_the_last_bit(batch_bytes: int, needed: str) -> None:
    fabric = Fabric()
    part = ALL if needed == "all" else COLUMNS
    over_nixl(lambda name: StandIn(name, fabric), batch_bytes, {"a/0#0": ALL}, dict.fromkeys(WORKERS, part))
    assert fabric.reads > 0
    assert not any(fabric.registered.values())  # all was given back


def test_the_members_of_one_node_do_not_use_nixl() -> None:
    fabric = Fabric()
    over_nixl(lambda name: StandIn(name, fabric), 1 << 30, {"a/0#0": ALL}, {"a/0#0": ALL, "a/1#0": ALL})
    assert fabric.reads == 0


@pytest.fixture
def nixl_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl, "_FAILED", threading.Event())


@pytest.mark.usefixtures("nixl_afresh")
def test_what_nixl_reads_damaged_is_named() -> None:
    fabric = Fabric()
    fabric.damages = True
    with pytest.raises(StateError, match=r"arrived damaged from a/0#0"):
        over_nixl(lambda name: StandIn(name, fabric), 1 << 30, {"a/0#0": ALL}, {"b/0#0": ALL})


@pytest.mark.usefixtures("nixl_afresh")
def test_a_read_that_fails_ends_the_generation_and_nixl_is_offered_no_more(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fabric = Fabric()
    fabric.fails = True
    monkeypatch.setattr(nixl, "_finds_fabric", lambda: True)
    assert nixl.has_fabric()
    with pytest.raises(CollectiveFailed, match="NIXL: a read from a/0#0 ended with ERR"):
        over_nixl(lambda name: StandIn(name, fabric), 1 << 30, {"a/0#0": ALL}, {"b/0#0": ALL})
    assert not nixl.has_fabric()
    assert "NIXL has failed, so state moves without it from now on" in capsys.readouterr().err
    assert not any(fabric.registered.values())  # nobody may read it any more


def test_a_read_ends_with_its_generation() -> None:
    fabric = Fabric()
    workers, router = ["a/0#0", "b/0#0"], Router(ITEMS, {"a/0#0": ALL}, {"b/0#0": ALL})
    reads = threading.Event()

    class Endless(StandIn):
        def check_xfer_state(self, handle: int) -> str:
            reads.set()
            return "PROC"

    agents = {worker: Endless(worker, fabric) for worker in workers}

    def work(transport: Transport) -> None:
        group = Group(transport, 1, workers)
        group.paths = OverNixl(agents[transport.worker], 1 << 30)
        reshard(group, router, TRUTH.state(ALL if group.rank == 0 else {}), allocator(ITEMS))

    with transports_of(workers) as transports:
        task = Task(lambda: outcomes([partial(work, transport) for transport in transports]))
        assert reads.wait(30)
        for transport in transports:
            transport.interrupt(2)
        assert all(isinstance(end, StepInterrupted) for end in task.result(30))  # type: ignore[attr-defined]
    assert not agents["b/0#0"].handles
    assert not any(fabric.registered.values())


def test_a_port_that_is_down_is_no_fabric(tmp_path: Path) -> None:
    assert not nixl.has_active_port(tmp_path)
    state = tmp_path / "mlx5_0" / "ports" / "1" / "state"
    state.parent.mkdir(parents=True)
    state.write_text("1: DOWN\n")
    assert not nixl.has_active_port(tmp_path)
    state.write_text("4: ACTIVE\n")
    assert nixl.has_active_port(tmp_path)


def test_real_agents_move_state_where_nixl_is_installed() -> None:
    api = pytest.importorskip("nixl", reason="NIXL is an optional extra")
    config = partial(api.nixl_agent_config, backends=["UCX"])
    over_nixl(lambda name: api.nixl_agent(name, config()), 1 << 30, {"a/0#0": ALL}, dict.fromkeys(WORKERS, ALL))
