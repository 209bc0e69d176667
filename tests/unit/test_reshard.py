"""State moved between any two layouts over real links, one thread for each worker."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from elaunch.errors import StateError, StepInterrupted
from elaunch.plan import Plan, symmetric
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.stream import Messages
from elaunch.workers.comm.transport import Transport
from elaunch.workers.state import reshard as reshard_module
from elaunch.workers.state import routes as routes_module
from elaunch.workers.state.boxes import Box, n_elements
from elaunch.workers.state.chunks import Chunk, holdings_of
from elaunch.workers.state.reshard import (
    SMALLEST_MESSAGE_BYTES,
    Moved,
    TensorChunk,
    messages_of,
    plan_stages,
    reshard,
    view_of,
)
from elaunch.workers.state.routes import CUT_BYTES, HOPS, Router
from elaunch.workers.state.space import OPTIMIZER, Holdings, Item, holdings_of_plan, items_of_layers
from elaunch.workers.state.staging import Buffer, Scratch
from tests.helpers import scaled
from tests.unit.comm_crew import addresses, connect_all, each, outcomes, together
from tests.unit.late_copies import LateCopies
from tests.unit.plan_strategies import valid_plans
from tests.unit.test_routes import specs

Chunks = dict[str, list[Chunk]]


@contextmanager
def transports_of(workers: list[str]) -> Iterator[list[Transport]]:
    transports = [Transport(worker, "secret") for worker in workers]
    try:
        connect_all(transports)
        yield transports
    finally:
        for transport in transports:
            transport.interrupt(1 << 60)
            transport.close()


class Truth:
    """The whole state: each tensor of an item has other numbers in it."""

    def __init__(self, items: Mapping[str, Item]) -> None:
        self.tensors = {}
        for number, item in enumerate(items.values()):
            size = torch.Size(item.shape)
            self.tensors[item.name] = tuple(
                (torch.arange(size.numel()) * 7 + 13 * number + which).remainder(251).to(dtype).view(size)
                for which, dtype in enumerate(item.dtypes)
            )

    def state(self, held: Holdings) -> Chunks:
        """Chunks of their own memory."""
        return {
            name: [
                Chunk(box, tuple(one[tuple(slice(*ends) for ends in box)].clone() for one in self.tensors[name]))
                for box in boxes
            ]
            for name, boxes in held.items()
        }

    def check(self, state: Chunks, held: Holdings) -> None:
        """That a state is what these boxes have, bit for bit."""
        assert {name: sorted(boxes) for name, boxes in holdings_of(state).items()} == {
            name: sorted(boxes) for name, boxes in held.items() if boxes
        }
        for name, chunks in state.items():
            for chunk in chunks:
                for mine, whole in zip(chunk.tensors, self.tensors[name], strict=True):
                    assert torch.equal(mine, whole[tuple(slice(*ends) for ends in chunk.box)]), f"{name} {chunk.box}"


def allocator(items: Mapping[str, Item]) -> Any:
    def allocate(name: str, box: Box) -> tuple[Tensor, ...]:
        shape = tuple(stop - start for start, stop in box)
        return tuple(torch.full(shape, -1).to(dtype) for dtype in items[name].dtypes)

    return allocate


def ring_snapshots(held: Mapping[str, Holdings]) -> dict[str, Holdings]:
    """Each keeps in host memory what the one before it has of the optimizer's state."""
    ring = list(held)
    return {
        worker: {name: boxes for name, boxes in held[ring[place - 1]].items() if name.endswith(OPTIMIZER)}
        for place, worker in enumerate(ring)
    }


LAYERS = specs(4)
ITEMS = items_of_layers(LAYERS)
TRUTH = Truth(ITEMS)
plans = valid_plans(4, 4, 8, tp=(1, 2, 4)).filter(lambda plan: plan.n_layers == 4)


@settings(max_examples=scaled(20, 40), deadline=None)
@given(st.data())
def test_any_change_of_plan_gives_each_worker_exactly_what_the_new_plan_asks_for(data: DataObject) -> None:
    old, new = data.draw(plans), data.draw(plans)
    held, needed = holdings_of_plan(old, LAYERS), holdings_of_plan(new, LAYERS)
    kept = ring_snapshots(held)
    dead = data.draw(st.sets(st.sampled_from(list(held)), max_size=1))
    before = {worker: what for worker, what in held.items() if worker not in dead}
    hosts = {worker: what for worker, what in kept.items() if worker not in dead}
    after = {worker: what for worker, what in needed.items() if worker not in dead}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes_module, "CUT_BYTES", data.draw(st.sampled_from([16, CUT_BYTES])))
        router = Router(ITEMS, before, after, hosts)
        if router.missing():
            return
    bound = data.draw(st.sampled_from([None, 4 * SMALLEST_MESSAGE_BYTES, 1 << 20]))
    checksum = data.draw(st.booleans())
    late = data.draw(st.sampled_from([None, 0, 1]))
    members = list(dict.fromkeys((*before, *after)))

    def work(transport: Transport) -> Moved:
        worker = transport.worker
        group = Group(transport, 1, members)
        state = TRUTH.state(before.get(worker, {}))
        snapshots = TRUTH.state(hosts.get(worker, {}))
        found, moved = reshard(
            group,
            router,
            state,
            allocator(ITEMS),
            snapshots=snapshots,
            max_extra_bytes=bound,
            checksum=checksum,
        )
        TRUTH.check(found, after.get(worker, {}))
        if bound is None:
            TRUTH.check(state, before.get(worker, {}))
        return moved

    with pytest.MonkeyPatch.context() as patch, transports_of(members) as transports:
        if late is not None:
            patch.setattr(reshard_module, "copies_of", lambda _, bounded: LateCopies(0 if bounded else late))
        moved = each(partial(_stopping_all, transports, work), transports)
    routes = [router.of(worker) for worker in members]
    for one, mine in zip(moved, routes, strict=True):
        net = sum(n_elements(piece.box) * ITEMS[piece.item].element_bytes for piece in mine.receive)
        assert net <= one.received_bytes <= net + 16 * 3 * len(mine.receive)
        if bound is not None:
            assert one.peak_extra_bytes <= bound


def going_on(transports: list[Transport], victim: str) -> tuple[list[Transport], list[str]]:
    """All but the victim, with new links in generation 2, and their names."""
    left = [transport for transport in transports if transport.worker != victim]
    survivors = [transport.worker for transport in left]
    for transport in left:
        transport.interrupt(2)
        transport.retain(survivors)
    each(lambda f: f.connect(addresses(left), generation=2, timeout_s=20), left)
    return left, survivors


def _stopping_all(transports: list[Transport], work: Any, transport: Transport) -> Any:
    """An error of one ends all, who would wait for it."""
    try:
        return work(transport)
    except BaseException:
        for one in transports:
            one.interrupt(1 << 60)
        raise


class Killed(Exception):
    """Instead of a process that dies."""


@pytest.mark.parametrize("bound", [None, 4 * SMALLEST_MESSAGE_BYTES])
def test_a_worker_that_dies_half_way_leaves_the_others_with_a_whole_state(bound: int | None) -> None:
    workers = ["a/0#0", "a/1#0", "b/0#0", "b/1#0"]
    items = {f"w{number}": Item(f"w{number}", (64, 512), (torch.float32,) * 2) for number in range(6)}
    truth = Truth(items)
    # Each has a quarter of each item, and a snapshot of what the one before it has; after the change, of the columns.
    rows = {w: dict.fromkeys(items, (((16 * place, 16 * place + 16), (0, 512)),)) for place, w in enumerate(workers)}
    hosts = {worker: rows[workers[place - 1]] for place, worker in enumerate(workers)}
    columns = {
        w: dict.fromkeys(items, (((0, 64), (128 * place, 128 * place + 128)),)) for place, w in enumerate(workers)
    }
    states = {worker: truth.state(rows[worker]) for worker in workers}
    snapshots = {worker: truth.state(hosts[worker]) for worker in workers}
    router = Router(items, rows, columns, hosts)
    victim = "b/0#0"

    def first(transport: Transport) -> object:
        group = Group(transport, 1, workers)
        if transport.worker == victim:
            _die_in_message(group, 1 if bound is None else 4)
        moved = reshard(
            group,
            router,
            states[transport.worker],
            allocator(items),
            snapshots=snapshots[transport.worker],
            max_extra_bytes=bound,
        )
        group.barrier()
        return moved

    with transports_of(workers) as transports:
        ends = outcomes([partial(_as_process, first, transport, transports) for transport in transports])
        assert isinstance(ends[2], Killed)
        assert all(isinstance(end, StepInterrupted) for place, end in enumerate(ends) if place != 2), ends
        left, survivors = going_on(transports, victim)
        # What each has now is what the next attempt starts from. The thirds are new boxes for everybody.
        before = {worker: holdings_of(states[worker]) for worker in survivors}
        layouts = {
            worker: [boxes == columns[worker][name] for name, boxes in before[worker].items()] for worker in before
        }
        assert all(any(columned) == (bound is not None) and not all(columned) for columned in layouts.values()), layouts
        thirds = {
            worker: dict.fromkeys(items, (((0, 64), (512 * place // 3, 512 * (place + 1) // 3)),))
            for place, worker in enumerate(survivors)
        }
        again = Router(items, before, thirds, {worker: holdings_of(snapshots[worker]) for worker in survivors})

        def second(transport: Transport) -> None:
            found, _ = reshard(
                Group(transport, 2, survivors),
                again,
                states[transport.worker],
                allocator(items),
                snapshots=snapshots[transport.worker],
                max_extra_bytes=bound,
            )
            truth.check(found, thirds[transport.worker])

        each(second, left)


ONE_TO_MANY = ["a/0#0", "a/1#0", "b/0#0", "b/1#0", "c/0#0", "c/1#0"]
WIDE = {f"w{number}": Item(f"w{number}", (96, 2048), (torch.bfloat16, torch.float32)) for number in range(4)}
ALL_OF_WIDE: dict[str, tuple[Box, ...]] = dict.fromkeys(WIDE, (((0, 96), (0, 2048)),))
WIDE_BYTES = sum(96 * 2048 * item.element_bytes for item in WIDE.values())


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "CUT_BYTES", 16 << 10)


@pytest.mark.parametrize("bound", [None, 5 << 20])
@pytest.mark.parametrize("needed", ["whole", "columns"])
@pytest.mark.usefixtures("small_slabs")
def test_what_many_need_leaves_who_has_it_once_and_goes_on_from_there(bound: int | None, needed: str) -> None:
    truth = Truth(WIDE)
    # Columns are not one run of memory, neither where they are nor where they go.
    box = ((0, 96), (0, 2048)) if needed == "whole" else ((0, 96), (512, 1536))
    part = dict.fromkeys(WIDE, (box,))
    router = Router(WIDE, {"a/0#0": ALL_OF_WIDE}, {"a/0#0": ALL_OF_WIDE} | dict.fromkeys(ONE_TO_MANY[1:], part))

    def work(transport: Transport) -> Moved:
        state = truth.state(ALL_OF_WIDE if transport.worker == "a/0#0" else {})
        group = Group(transport, 1, ONE_TO_MANY)
        found, moved = reshard(group, router, state, allocator(WIDE), max_extra_bytes=bound, checksum=True)
        truth.check(found, ALL_OF_WIDE if transport.worker == "a/0#0" else part)
        return moved

    with transports_of(ONE_TO_MANY) as transports:
        first, near, *far = each(partial(_stopping_all, transports, work), transports)
    share = WIDE_BYTES * n_elements(box) // (96 * 2048)
    # Once to its own node, and once to the four workers of the others.
    assert first.sent_bytes == pytest.approx(2 * share, rel=0.01)
    assert near.sent_bytes == 0
    assert all(one.sent_bytes == pytest.approx(0.75 * share, rel=0.01) for one in far)
    assert all(one.received_bytes == pytest.approx(share, rel=0.01) for one in (near, *far))
    if bound is not None:
        assert all(one.peak_extra_bytes <= bound for one in (first, near, *far))


@pytest.mark.parametrize("hop", range(1, HOPS))
@pytest.mark.parametrize("bound", [None, 4 << 20])
@pytest.mark.usefixtures("small_slabs")
def test_a_worker_that_dies_while_it_passes_on_leaves_the_others_with_a_whole_state(
    bound: int | None, hop: int
) -> None:
    """Of the one worker that had everything, who leaves with this change, and those who take over."""
    truth, workers, victim = Truth(WIDE), [worker for worker in ONE_TO_MANY if worker != "a/1#0"], "b/0#0"
    router = Router(WIDE, {"a/0#0": ALL_OF_WIDE}, dict.fromkeys(workers[1:], ALL_OF_WIDE))
    states = {worker: truth.state(ALL_OF_WIDE if worker == "a/0#0" else {}) for worker in workers}
    snapshots: dict[str, Chunks] = {worker: {} for worker in workers}

    def first(transport: Transport) -> object:
        group = Group(transport, 1, workers)
        if transport.worker == victim:
            # In the second window, if there are several: a stream for each hop of each.
            _die_in_stream(group, hop if bound is None else HOPS + hop)
        moved = reshard(
            group,
            router,
            states[transport.worker],
            allocator(WIDE),
            snapshots=snapshots[transport.worker],
            max_extra_bytes=bound,
        )
        group.barrier()
        return moved

    with transports_of(workers) as transports:
        ends = outcomes([partial(_as_process, first, transport, transports) for transport in transports])
        for worker, end in zip(workers, ends, strict=True):
            assert isinstance(end, Killed if worker == victim else StepInterrupted), (worker, end)
        left, survivors = going_on(transports, victim)
        before = {worker: holdings_of(states[worker]) for worker in survivors}
        for worker in survivors:
            truth.check(states[worker], before[worker])
        # Others have what the first window brought, as far as they came in it; who had everything has let go of it
        # once some have it.
        some = set().union(*(before[worker] for worker in survivors[1:]))
        assert len(some) == (bound is not None), before
        assert all(before[worker].keys() <= some for worker in survivors[1:]), before
        assert before["a/0#0"].keys() == WIDE.keys() - some
        hosts = {worker: holdings_of(snapshots[worker]) for worker in survivors}
        again = Router(WIDE, before, dict.fromkeys(survivors[1:], ALL_OF_WIDE), hosts)

        def second(transport: Transport) -> None:
            found, _ = reshard(
                Group(transport, 2, survivors),
                again,
                states[transport.worker],
                allocator(WIDE),
                snapshots=snapshots[transport.worker],
                max_extra_bytes=bound,
            )
            truth.check(found, ALL_OF_WIDE if transport.worker != "a/0#0" else {})

        each(second, left)


def _die_in_stream(group: Group, number: int) -> None:
    """At the first message of a stream; 0 is the first stream in which the group takes part."""
    stream, begun = group.stream, itertools.count()

    def dying(messages: Messages) -> Messages:
        for _ in messages:
            raise Killed
        yield from messages

    def streamed(outgoing: Mapping[int, Messages], incoming: Mapping[int, Messages]) -> None:
        if next(begun) == number:
            assert outgoing, "it has nothing to send"
            outgoing = {peer: dying(messages) for peer, messages in outgoing.items()}
        stream(outgoing, incoming)

    group.stream = streamed  # type: ignore[method-assign]


def _as_process(work: Any, transport: Transport, transports: list[Transport]) -> object:
    try:
        return work(transport)
    except Killed:
        transport.close()
        raise
    except StepInterrupted:
        # As the agents do when the news goes round.
        for one in transports:
            one.interrupt(2)
        raise


def _die_in_message(group: Group, number: int) -> None:
    stream = group.stream
    left = [number]

    def dying(messages: Messages) -> Messages:
        for message in messages:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            yield message

    def streamed(outgoing: Mapping[int, Messages], incoming: Mapping[int, Messages]) -> None:
        stream({peer: dying(messages) for peer, messages in outgoing.items()}, incoming)

    group.stream = streamed  # type: ignore[method-assign]


def test_what_arrives_damaged_is_named() -> None:
    workers = ["a/0#0", "a/1#0"]
    items = {"w": Item("w", (4, 8), (torch.float32,))}
    truth = Truth(items)
    before = {"a/0#0": {"w": (((0, 4), (0, 8)),)}}
    after = {"a/1#0": {"w": (((0, 4), (0, 8)),)}}
    router = Router(items, before, after)

    def damaging(messages: Messages) -> Messages:
        for message in messages:
            yield memoryview(bytes(message[:5]) + bytes([message[5] ^ 4]) + bytes(message[6:]))
            break
        yield from messages

    def work(transport: Transport) -> object:
        group = Group(transport, 1, workers)
        if group.rank == 0:
            stream = group.stream
            group.stream = lambda outgoing, incoming: stream(  # type: ignore[method-assign]
                {peer: damaging(messages) for peer, messages in outgoing.items()}, incoming
            )
        return reshard(group, router, truth.state(before.get(transport.worker, {})), allocator(items), checksum=True)

    with transports_of(workers) as transports:
        ends = outcomes([partial(work, transport) for transport in transports])
    assert isinstance(ends[1], StateError)
    assert "w [(0, 4), (0, 8)] arrived damaged from a/0#0" in str(ends[1])


@pytest.mark.parametrize("members", [2, 3, 5, 12, 16, 96])
@pytest.mark.parametrize("buffers", [None, 2 * SMALLEST_MESSAGE_BYTES, 1 << 20, 1 << 30])
def test_the_stages_pair_all_workers_once_and_fit_the_bound(members: int, buffers: int | None) -> None:
    stages = plan_stages(members, buffers)
    pairs = [
        frozenset((i, i ^ s)) for stage in stages for s in stage.steps for i in range(members) if i < i ^ s < members
    ]
    assert len(pairs) == len(set(pairs)) == members * (members - 1) // 2
    if buffers is not None:
        assert all(2 * len(stage.steps) * stage.message_bytes <= buffers for stage in stages)


def test_messages_are_bounded_and_small_parts_travel_together() -> None:
    layers = specs(2)
    old = symmetric(["a", "b"], 2, 4, 1, pp=2)
    items = items_of_layers(layers)
    held = holdings_of_plan(old, layers)
    routes = Router(items, held, {"b": held["a"]}).of("a")
    (whole,) = messages_of(routes.send, items, 1 << 20)
    assert len(whole) == 4 * len(routes.send) // 2
    for message in messages_of(routes.send, items, 256):
        size = sum(n_elements(part.box) * items[part.item].dtypes[part.tensor].itemsize for part in message)
        assert size <= 256
    assert isinstance(old, Plan)


def test_nothing_is_moved_where_nothing_changes() -> None:
    plan = symmetric(["a/0#0", "a/1#0"], 4, 8, 2, dp=2)
    held = holdings_of_plan(plan, LAYERS)
    router = Router(ITEMS, held, held)

    def work(transport: Transport) -> None:
        state = TRUTH.state(held[transport.worker])
        found, moved = reshard(Group(transport, 1, plan.workers), router, state, allocator(ITEMS))
        assert moved.received_bytes == moved.peak_extra_bytes == 0
        assert all(mine is before for name in found for mine, before in zip(found[name], state[name], strict=True))

    with transports_of(list(plan.workers)) as transports:
        together([partial(work, transport) for transport in transports])


def kinds_of_memory() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(3, 5),
        torch.tensor(7),
        torch.randn(4).to(torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(10)[3:7],
        torch.zeros(4, 4)[:, :2],
        torch.randn(2, dtype=torch.complex64),
    ]


@settings(max_examples=scaled(20, 40), deadline=None)
@given(st.lists(st.integers(0, len(kinds_of_memory()) - 1), min_size=1, max_size=6))
def test_what_one_message_takes_in_another_of_any_memory_gives_out(places: list[int]) -> None:
    views = [kinds_of_memory()[place] for place in places]
    sent = Buffer(views)
    sent.pack(views)
    dense = [torch.zeros_like(view, memory_format=torch.contiguous_format) for view in views]
    wide = [torch.zeros(*view.shape, 2, dtype=view.dtype)[..., 0] for view in views]
    for into in (dense, wide):
        received = Buffer(into)
        assert len(received.bytes) == len(sent.bytes)
        received.bytes[:] = sent.bytes
        received.unpack(into)
        assert all(map(torch.equal, into, views))


def test_the_bytes_of_one_run_of_memory_are_that_memory() -> None:
    tensor = torch.tensor([1, 2], dtype=torch.int16)
    scratch = Scratch()
    buffer = Buffer([tensor], scratch)
    assert bytes(buffer.bytes) == bytes([1, 0, 2, 0])
    assert scratch.n_bytes == 0
    buffer.bytes[:] = bytes(4)
    assert not tensor.any()


def test_a_message_outlives_its_tensor() -> None:
    buffer = Buffer([torch.full((1000,), 1.5)])
    torch.zeros(1000)
    assert bytes(buffer.bytes) == torch.full((1000,), 1.5).numpy().tobytes()


def test_what_is_on_a_device_travels_through_host_memory() -> None:
    scratch = Scratch()
    buffer = Buffer([torch.zeros(2, device="meta")], scratch)
    assert (len(buffer.bytes), scratch.n_bytes) == (8, 8)


def test_one_message_after_the_other_is_packed_in_the_same_memory() -> None:
    scratch = Scratch()
    for length in (5, 3, 5):
        columns = torch.arange(2 * length).view(length, 2).unbind(1)
        buffer = Buffer(columns, scratch)
        buffer.pack(columns)
        into = [torch.empty_like(one) for one in columns]
        buffer.unpack(into)
        assert all(map(torch.equal, into, columns))
    assert scratch.n_bytes == 48 + 40


@pytest.mark.parametrize("ends", [(-1, 3), (0, 9), (7, 9)])
def test_a_part_beyond_what_a_worker_has_is_refused(ends: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="is not within one of"):
        view_of([Chunk(((0, 8),), (torch.zeros(8),))], TensorChunk("w", (ends,), 0, False, 0))
