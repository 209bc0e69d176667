"""Routes between any two plans, played through on arrays; and which source is taken."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from elaunch.errors import StateError
from elaunch.plan import Plan, symmetric
from elaunch.workers.random.trace import RandomTrace
from elaunch.workers.state import routes as routes_module
from elaunch.workers.state.boxes import Box, n_elements
from elaunch.workers.state.layout import LayerSpec
from elaunch.workers.state.routes import CUT_BYTES, HOPS, ChunkTransfer, Router, Routes, n_bytes
from elaunch.workers.state.space import OPTIMIZER, Holdings, Item, holdings_of_plan, items_of_layers
from tests.helpers import scaled
from tests.unit.plan_strategies import valid_plans

SHAPES = {"rows": (8, 12), "columns": (6, 8), "bias": (8,), "norm": (70,), "scale": ()}
CUTS = {"rows": 0, "columns": 1, "bias": 0}

Held = Mapping[str, Holdings]


def specs(n_layers: int) -> list[LayerSpec]:
    """Layers with parameters of every kind; only those with an odd number have all of them."""
    return [
        LayerSpec(
            index,
            f"layer {index}",
            {name: torch.Size(shape) for name, shape in SHAPES.items() if name != "columns" or index % 2},
            dict.fromkeys(SHAPES, torch.bfloat16),
            CUTS,
            (torch.Size([8]), torch.float32),
            RandomTrace((), 2),
        )
        for index in range(n_layers)
    ]


def at(array: np.ndarray, box: Box) -> np.ndarray:
    """A view of the box of an array."""
    index: Any = (*(slice(start, stop) for start, stop in box), ...)
    view: np.ndarray = array[index]
    return view


class Played:
    """The state of all workers as arrays: the number of the element where it is held, else -1."""

    def __init__(self, items: Mapping[str, Item]) -> None:
        self.items = items
        self.truth = {
            name: np.arange(np.prod(item.shape, dtype=int)).reshape(item.shape) for name, item in items.items()
        }

    def filled(self, held: Holdings) -> dict[str, np.ndarray]:
        found = {name: np.full(self.items[name].shape, -1) for name in self.items}
        for name, boxes in held.items():
            for box in boxes:
                at(found[name], box)[...] = at(self.truth[name], box)
        return found


def play(items: Mapping[str, Item], before: Held, after: Held, snapshots: Held, routes: Mapping[str, Routes]) -> None:
    """Carry the routes out and check what comes of them."""
    played = Played(items)
    devices = {worker: played.filled(before.get(worker, {})) for worker in {*before, *after}}
    hosts = {worker: played.filled(snapshots.get(worker, {})) for worker in {*before, *after}}
    sent: dict[tuple[str, str], list[ChunkTransfer]] = {
        (piece.source, piece.to): [] for one in routes.values() for piece in one.send
    }
    for one in routes.values():
        for piece in one.send:
            sent[piece.source, piece.to].append(piece)
    found = {to: played.filled({}) for to in after}
    for hop in range(HOPS):
        # What is passed on has come by an earlier hop.
        arrived = []
        for to in after:
            for piece in (*routes[to].retain, *routes[to].receive):
                assert piece.to == to
                assert n_elements(piece.box)
                assert piece.hop < HOPS
                if piece.hop == hop:
                    there = (found if hop else hosts if piece.snapshot else devices)[piece.source][piece.item]
                    assert (at(there, piece.box) >= 0).all(), f"{piece} is not there"
                    arrived.append((piece, at(there, piece.box).copy()))
        for piece, values in arrived:
            place = at(found[piece.to][piece.item], piece.box)
            assert (place == -1).all(), f"{piece} comes twice"
            place[...] = values
    for to, needed in after.items():
        expected = played.filled(needed)
        for name in items:
            assert np.array_equal(found[to][name], expected[name]), f"{name} of {to}"
        # Each stays where it was if it can, and both ends of a link know of the same pieces in the same order.
        for piece in routes[to].receive:
            assert piece.source != to
            assert (at(devices[to][piece.item], piece.box) == -1).all(), f"{to} has {piece} already"
        for source in {piece.source for piece in routes[to].receive}:
            assert [piece for piece in routes[to].receive if piece.source == source] == sent.pop((source, to))
    assert not sent, "something is sent to somebody who does not expect it"


@settings(max_examples=scaled(20, 40), deadline=None)
@given(st.data())
def test_after_the_routes_everybody_has_what_the_new_plan_asks_for(data: DataObject) -> None:
    layers = specs(4)
    plans = valid_plans(4, 4, 8, tp=(1, 2, 4)).filter(lambda plan: plan.n_layers == 4)
    old, new = data.draw(plans), data.draw(plans)
    items = items_of_layers(layers)
    held, needed = holdings_of_plan(old, layers), holdings_of_plan(new, layers)
    # Each keeps in host memory what the one before it has of the optimizer's state.
    ring = list(held)
    snapshots = {
        worker: {name: boxes for name, boxes in held[ring[place - 1]].items() if name.endswith(OPTIMIZER)}
        for place, worker in enumerate(ring)
    }
    dead = data.draw(st.sets(st.sampled_from(ring), max_size=2))
    before = {worker: held[worker] for worker in ring if worker not in dead}
    hosts = {worker: snapshots[worker] for worker in ring if worker not in dead}
    after = {worker: what for worker, what in needed.items() if worker not in dead or data.draw(st.booleans())}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes_module, "CUT_BYTES", data.draw(st.sampled_from([16, CUT_BYTES])))
        router = Router(items, before, after, hosts)
        missing = router.missing()
    played = Played(items)
    lacking = set()
    for name in items:
        there = [filled[name] for table in (before, hosts) for filled in map(played.filled, table.values())]
        union = np.max([np.full(items[name].shape, -1), *there], axis=0)
        wanted = np.max([np.full(items[name].shape, -1), *(played.filled(w)[name] for w in after.values())], axis=0)
        if (union < wanted).any():
            lacking.add(name)
    assert {one.item for one in missing} == lacking
    if lacking:
        with pytest.raises(StateError, match=r"no surviving worker has all of layers\."):
            router.of(next(iter(after)))
        return
    play(items, before, after, hosts, {worker: router.of(worker) for worker in {**before, **after}})


def test_the_same_plan_moves_nothing() -> None:
    layers = specs(4)
    held = holdings_of_plan(symmetric(list("abcdefgh"), 4, 8, 2, dp=2, pp=2, tp=2), layers)
    router = Router(items_of_layers(layers), held, held)
    for worker in held:
        routes = router.of(worker)
        assert not routes.send
        assert not routes.receive


def one_item(kib: int) -> dict[str, Item]:
    return {"w": Item("w", (kib, 256), (torch.float32,))}


BIG = one_item(64 * CUT_BYTES >> 10)
ALL = {"w": [((0, BIG["w"].shape[0]), (0, 256))]}


def test_a_joiner_gets_even_parts_from_all_who_have_them() -> None:
    before = {f"n{node}/0#0": ALL for node in range(4)}
    router = Router(BIG, before, {**before, "n9/0#0": ALL})
    sizes = [n_bytes(BIG, router.of(worker).send) for worker in before]
    assert sizes == [n_bytes(BIG, [ChunkTransfer("w", ALL["w"][0], "", "")]) // 4] * 4


def test_what_the_own_node_has_comes_from_there() -> None:
    before = {f"n{node}/{sample}#0": ALL for node, sample in product(range(3), range(2))}
    router = Router(BIG, before, {"n1/5#0": ALL})
    assert {piece.source for piece in router.of("n1/5#0").receive} == {"n1/0#0", "n1/1#0"}


def test_small_pieces_come_from_the_sources_in_turn() -> None:
    items = {f"w{number}": Item(f"w{number}", (4, 4), (torch.float32,)) for number in range(12)}
    held = {name: [((0, 4), (0, 4))] for name in items}
    before = {f"n{node}/0#0": held for node in range(3)}
    router = Router(items, before, {"n7/0#0": held, "n8/0#0": held})
    counts = [len(router.of(worker).send) for worker in before]
    assert counts == [8, 8, 8]
    assert all(piece.box == ((0, 4), (0, 4)) for piece in router.of("n7/0#0").receive)


class Sent:
    """Copies of an item that the workers send: each one, and from node to node."""

    def __init__(self, holders: Sequence[str], receivers: Sequence[str]) -> None:
        items = {"w": Item("w", (720, 2), (torch.float32,))}
        held = {"w": [((0, 720), (0, 2))]}
        before, after = dict.fromkeys(holders, held), dict.fromkeys((*holders, *receivers), held)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(routes_module, "CUT_BYTES", 8)
            router = Router(items, before, after)
            routes = {worker: router.of(worker) for worker in after}
        play(items, before, after, {}, routes)
        one = 720 * 2 * 4
        self.by = {worker: n_bytes(items, mine.send) / one for worker, mine in routes.items()}
        self.into: dict[str, float] = {}
        self.out_of: dict[str, float] = {}
        for piece in (piece for mine in routes.values() for piece in mine.send):
            source, to = piece.source.partition("/")[0], piece.to.partition("/")[0]
            if source != to:
                self.into[to] = self.into.get(to, 0) + n_bytes(items, [piece]) / one
                self.out_of[source] = self.out_of.get(source, 0) + n_bytes(items, [piece]) / one


@pytest.mark.parametrize(("n_holders", "n_receivers"), [(1, 2), (1, 8), (1, 32), (2, 6), (3, 7)])
def test_who_has_a_box_sends_it_once_however_many_need_it(n_holders: int, n_receivers: int) -> None:
    holders = [f"h{node}/0#0" for node in range(n_holders)]
    receivers = [f"r{node}/0#0" for node in range(n_receivers)]
    sent = Sent(holders, receivers).by
    assert sum(sent[worker] for worker in holders) == pytest.approx(1)
    assert max(sent[worker] for worker in holders) <= 1 / n_holders + 1 / n_receivers
    assert max(sent[worker] for worker in receivers) <= 1


@settings(max_examples=scaled(30, 60), deadline=None)
@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=2, max_size=18), st.data())
def test_a_box_comes_to_each_node_without_it_once_and_to_the_others_never(
    places: set[tuple[int, int]], data: DataObject
) -> None:
    workers = data.draw(st.permutations([f"n{node}/{sample}#0" for node, sample in sorted(places)]))
    n_holders = data.draw(st.integers(1, len(workers) - 1))
    holders, receivers = workers[:n_holders], workers[n_holders:]
    sent = Sent(holders, receivers)
    nodes = {worker.partition("/")[0] for worker in receivers}
    with_it = {worker.partition("/")[0] for worker in holders}
    lacking = nodes - with_it
    assert sent.into.keys() == lacking
    assert all(copies == pytest.approx(1) for copies in sent.into.values())
    if len(lacking) > len(holders):
        assert sum(sent.out_of[node] for node in with_it & sent.out_of.keys()) == pytest.approx(1)
    assert max(sent.by[worker] for worker in receivers) < 2


def test_a_node_that_has_a_box_serves_its_own_workers() -> None:
    sent = Sent(["n0/0#0"], [f"n{node}/{sample}#0" for node, sample in product(range(4), range(8)) if node or sample])
    # One copy to its own node, one to all others together.
    assert sent.by["n0/0#0"] == pytest.approx(2)
    assert sent.out_of["n0"] == pytest.approx(1)


def test_what_is_too_small_to_be_cut_comes_straight_from_who_has_it() -> None:
    items = one_item((CUT_BYTES >> 10) - 1)
    held = {"w": [((0, items["w"].shape[0]), (0, 256))]}
    receivers = {f"n{node}/0#0": held for node in range(1, 6)}
    router = Router(items, {"n0/0#0": held}, {"n0/0#0": held, **receivers})
    assert [piece.box for piece in router.of("n0/0#0").send] == held["w"] * 5


def test_what_is_too_small_for_two_slabs_goes_from_receiver_to_receiver_whole() -> None:
    items = one_item(2 * (CUT_BYTES >> 10) - 1)
    held = {"w": [((0, items["w"].shape[0]), (0, 256))]}
    receivers = {f"n{node}/0#0": held for node in range(1, 6)}
    router = Router(items, {"n0/0#0": held}, {"n0/0#0": held, **receivers})
    assert [piece.box for piece in router.of("n0/0#0").send] == held["w"]
    assert [piece.box for piece in router.of("n1/0#0").send] == held["w"] * 4


@given(st.integers(1, 20), st.integers(1, 12))
def test_those_who_have_a_box_send_even_parts_of_it(n_holders: int, n_receivers: int) -> None:
    sent = Sent([f"h{node}/0#0" for node in range(n_holders)], [f"r{node}/0#0" for node in range(n_receivers)]).by
    parts = [sent[f"h{node}/0#0"] for node in range(n_holders)]
    assert sum(parts) == pytest.approx(1 if n_receivers > n_holders else n_receivers)
    # Few slabs for very many would be more even, but not worth as many messages.
    slack = 1 if math.lcm(n_holders, n_receivers) <= 4 * max(n_holders, n_receivers) else 1.5
    assert max(parts) <= slack * min(parts) + 0.02


def test_receivers_pass_on_in_turn() -> None:
    two = n_elements(ALL["w"][0]) * 2 // 64
    items = {f"w{number}": Item(f"w{number}", (two // 256, 256), (torch.float32,)) for number in range(6)}
    held = {name: [((0, two // 256), (0, 256))] for name in items}
    receivers = {f"n{node}/0#0": held for node in range(1, 7)}
    router = Router(items, {"n0/0#0": held}, receivers)
    # Of the two slabs of each item.
    assert [len(router.of(worker).send) for worker in receivers] == [10] * 6
    assert len(router.of("n0/0#0").send) == 12


def test_a_snapshot_is_passed_on_like_any_other_source() -> None:
    receivers = [f"n{node}/0#0" for node in range(1, 5)]
    items = one_item(4 * CUT_BYTES >> 10)
    held = {"w": [((0, items["w"].shape[0]), (0, 256))]}
    before: Held = {"n0/0#0": {}}
    after = dict.fromkeys(receivers, held)
    router = Router(items, before, after, {"n0/0#0": held})
    play(items, before, after, {"n0/0#0": held}, {worker: router.of(worker) for worker in ("n0/0#0", *receivers)})
    assert [(piece.snapshot, piece.hop) for piece in router.of("n0/0#0").send] == [(True, 0)] * 4
    assert {(piece.snapshot, piece.hop) for piece in router.of(receivers[0]).send} == {(False, 1)}


def test_without_relays_all_comes_straight_from_who_has_it() -> None:
    receivers = [f"n{node}/0#0" for node in range(1, 5)]
    router = Router(BIG, {"n0/0#0": ALL}, dict.fromkeys(receivers, ALL), relays=False)
    assert [piece.box for piece in router.of("n0/0#0").send] == ALL["w"] * 4


def test_a_snapshot_is_used_where_no_device_has_it_and_the_own_one_before_peers() -> None:
    half, rest = [((0, 8), (0, 256))], [((8, 16), (0, 256))]
    items = one_item(16)
    router = Router(items, {"a/0": {"w": half}}, {"a/0": {"w": [((0, 16), (0, 256))]}}, {"b/0": {"w": half + rest}})
    (piece,) = router.of("a/0").receive
    assert (piece.box, piece.source, piece.snapshot) == (rest[0], "b/0", True)
    own = Router(items, {"a/0": {}, "b/0": {"w": rest}}, {"a/0": {"w": rest}}, {"a/0": {"w": rest}}).of("a/0")
    assert [piece.snapshot for piece in own.retain] == [True]
    assert not own.receive


def test_what_nobody_has_is_named() -> None:
    items = {f"w{number}": Item(f"w{number}", (4,), (torch.float32,)) for number in range(11)}
    needed = {name: [((0, 4),)] for name in items}
    router = Router(items, {"a/0": {"w0": [((0, 4),)], "w1": [((0, 3),)]}}, {"a/0": needed})
    assert router.missing()[0].boxes == (((3, 4),),)
    with pytest.raises(StateError, match=r"has all of w1, w2, w3, w4, w5, w6, w7, w8 and 2 more; go on from the last"):
        router.of("a/0")


def test_what_is_outside_the_space_is_refused() -> None:
    with pytest.raises(StateError, match="a/0 has v, which is not in the space of 1 items"):
        Router(BIG, {"a/0": {"v": []}}, {})


def plan_kinds() -> list[Plan]:
    workers = [f"n{number // 2}/{number % 2}#0" for number in range(8)]
    return [
        symmetric(workers, 4, 16, 2, dp=8),
        symmetric(workers, 4, 16, 2, dp=2, pp=2, tp=2),
        symmetric(workers, 4, 16, 2, dp=4, tp=2, zero="contiguous"),
        symmetric(workers[:6], 4, 18, 2, dp=3, pp=2),
        symmetric(workers, 4, 16, 2, pp=4, tp=2),
    ]


@pytest.mark.parametrize("new", range(5))
@pytest.mark.parametrize("old", range(5))
def test_hybrid_changes(old: int, new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes_module, "CUT_BYTES", 16)
    layers = specs(4)
    items = items_of_layers(layers)
    before, after = (holdings_of_plan(plan_kinds()[number], layers) for number in (old, new))
    router = Router(items, before, after)
    play(items, before, after, {}, {worker: router.of(worker) for worker in {**before, **after}})
