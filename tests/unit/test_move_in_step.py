"""State that moves in the background of a step over a path that may not stand on all: who waits for what."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from elaunch.errors import CollectiveFailed, GenerationChanged
from elaunch.workers.comm.group import DIRECT_MEMBERS, Group
from elaunch.workers.comm.paths import Parcels
from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.comm.transport import Transport
from elaunch.workers.state.background import BackgroundMove, BackgroundPathMove
from elaunch.workers.state.chunks import Chunk
from elaunch.workers.state.paths.in_step import REASON_BYTES, first_reason
from elaunch.workers.state.routes import Router
from elaunch.workers.state.space import Holdings, Item
from tests.helpers import wait_until
from tests.unit.comm_crew import Task, crew, each
from tests.unit.test_reshard import Truth

ITEMS = {f"w{number}": Item(f"w{number}", (9, 101), (torch.float32,)) for number in range(3)}
ALL: Holdings = {name: (tuple((0, size) for size in item.shape),) for name, item in ITEMS.items()}
TRUTH = Truth(ITEMS)
A, B = "a/0#0", "a/1#0"


@pytest.mark.parametrize("size", [1, 2, 5, DIRECT_MEMBERS + 3])
def test_all_members_hear_of_the_same_reason(size: int) -> None:
    def work(transport: Transport, reasons: Mapping[int, str]) -> str:
        group = groups[transport.worker]
        with group.open() as traffic:
            return first_reason(group, traffic, 0, reasons.get(group.rank, ""))

    with crew(size) as transports:
        members = [transport.worker for transport in transports]
        groups = {transport.worker: Group(transport, 1, members) for transport in transports}
        last = size - 1
        for reasons, expected in (
            ({}, ""),
            ({last: "no\nroute"}, "no route"),
            ({0: "b", last: "a"}, "a"),
            ({last: 999 * "x"}, REASON_BYTES * "x"),
        ):
            assert each(partial(work, reasons=reasons), transports) == [expected] * size


def test_who_waits_for_the_reasons_of_others_is_freed_with_the_generation() -> None:
    with crew(2) as transports:
        group = Group(transports[0], 1, [one.worker for one in transports])
        traffic = group.open()
        waiting = Task(lambda: first_reason(group, traffic, 0, ""))
        wait_until(lambda: traffic._waiting == 1, 20, "the first member to wait")
        transports[0].interrupt(2)
        with pytest.raises(GenerationChanged):
            waiting.result(20)


class Scripted:
    """A path that brings messages when the test says so."""

    message_bytes = 1 << 10

    def __init__(self, stands: bool) -> None:
        self._stands = stands
        self.decided = threading.Event()
        self.next = threading.Semaphore(0)
        self.fails = self.left = False
        self.n_incoming = 0

    def start(self, run: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def stands(self, traffic: Traffic, part: int) -> bool:
        self.decided.wait(20)
        return self._stands

    def move(self, traffic: Traffic, outgoing: Parcels, incoming: Parcels, came: Callable[[int], None]) -> None:
        for rank, parcels in incoming.items():
            for parcel in parcels:
                self.next.acquire(timeout=20)
                if self.fails:
                    raise CollectiveFailed(1, "the connection has broken")
                for view in parcel.views:
                    view.fill_(1.0)
                self.n_incoming += 1
                came(rank)

    def leave(self) -> None:
        self.left = True


Moving = tuple[list[BackgroundPathMove], list[Traffic], dict[str, torch.Tensor]]


@contextmanager
def moving(paths: Sequence[Scripted]) -> Iterator[Moving]:
    """The first of two members has all, and the second gets it, by its part of the move, into these places."""
    router = Router(ITEMS, {A: ALL}, {B: ALL}, relays=False)
    held = TRUTH.state(ALL)
    places = {name: [Chunk(one.box, (torch.zeros_like(one.tensors[0]),)) for one in held[name]] for name in held}
    with crew(2) as transports:
        groups = [Group(transport, 1, [A, B]) for transport in transports]
        parts = [
            BackgroundMove(ITEMS, router.of(A), held, {}, 1),
            BackgroundMove(ITEMS, router.of(B), {}, places, 1),
        ]
        moves = [BackgroundPathMove(*one, 0) for one in zip(parts, paths, groups, strict=True)]
        yield moves, [group.open() for group in groups], {name: one[0].tensors[0] for name, one in places.items()}


def test_whoever_needs_some_items_waits_for_their_messages_alone() -> None:
    paths = [Scripted(True), Scripted(True)]
    with moving(paths) as (moves, traffics, places):
        n_messages = sum("w0" in items for items in moves[1]._items_of[A])
        assert n_messages > 1
        moves[1].begin(traffics[1])
        moves[1].wait(["another"])  # nothing of it comes
        waiting = Task(lambda: moves[1].wait(["w0"]))
        paths[1].decided.set()
        paths[1].next.release(n_messages - 1)
        wait_until(lambda: paths[1].n_incoming == n_messages - 1, 20, "all messages but one")
        assert waiting.running
        paths[1].next.release()
        waiting.result(20)
        assert bool(places["w0"].all())
        assert not places["w2"].any()
        rest = Task(moves[1].wait)
        assert rest.running
        paths[1].next.release(1000)
        rest.result(20)
        assert all(bool(place.all()) for place in places.values())
        moves[1].leave()
        assert paths[1].left


def test_whoever_waits_hears_what_has_ended_the_move() -> None:
    paths = [Scripted(True), Scripted(True)]
    with moving(paths) as (moves, traffics, _):
        moves[1].begin(traffics[1])
        waiting = Task(lambda: moves[1].wait(["w1"]))
        paths[1].decided.set()
        paths[1].fails = True
        paths[1].next.release()
        with pytest.raises(CollectiveFailed, match="the connection has broken"):
            waiting.result(20)
        with pytest.raises(CollectiveFailed):
            moves[1].wait()
        moves[1].leave()


def test_where_the_path_does_not_stand_all_comes_over_links() -> None:
    paths = [Scripted(False), Scripted(False)]
    with moving(paths) as (moves, traffics, places):
        for move, traffic in zip(moves, traffics, strict=True):
            move.begin(traffic)
        waiting = [Task(partial(move.wait, ["w0"])) for move in moves]
        for path in paths:
            path.decided.set()
        for one in waiting:
            one.result(20)
        each(lambda move: move.wait(), moves)
        for name, tensors in TRUTH.state(ALL).items():
            assert torch.equal(places[name], tensors[0].tensors[0])
