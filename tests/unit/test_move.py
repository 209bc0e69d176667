"""The whole state of a data-parallel job sent to those who need it, over real links, one thread for each worker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaunch.errors import StateError, StepInterrupted
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.stream import Messages
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Verdict
from elaunch.workers.state.codec import describe, restore
from elaunch.workers.state.objects import allocate, move_objects
from elaunch.workers.state.routes import CUT_BYTES
from tests.unit.comm_crew import addresses, crew, each, outcomes

Flows = Mapping[int, Messages]

WEIGHT = (600, 1000)
STATE_BYTES = 4 * (600 * 1000 + 600 + 3)


class Model(nn.Module):
    def __init__(self, seed: int, rows: int) -> None:
        super().__init__()
        noise = torch.Generator().manual_seed(seed)
        self.odd = nn.Parameter(torch.randn(3, generator=noise))
        self.weight = nn.Parameter(torch.randn(rows, WEIGHT[1], generator=noise))
        self.bias = nn.Parameter(torch.randn(WEIGHT[0], generator=noise))


class Counted(Group):
    """Counts the bytes of tensors that it sends to each member."""

    def __init__(self, transport: Transport, n_members: int) -> None:
        super().__init__(transport, 1, [f"a/{member}#0" for member in range(n_members)])
        self.sent_bytes = [0] * n_members

    def stream(self, outgoing: Flows, incoming: Flows) -> None:
        super().stream({to: self._counted(to, messages) for to, messages in outgoing.items()}, incoming)

    def _counted(self, to: int, messages: Messages) -> Messages:
        for message in messages:
            self.sent_bytes[to] += len(message)
            yield message


def moved(n_sources: int, n_receivers: int, rows: int = WEIGHT[0]) -> list[list[int]]:
    """The bytes that each member sent to each."""
    size = n_sources + n_receivers
    verdict = Verdict(7, (), tuple(range(n_sources)), tuple(range(n_sources, size)))
    expected = Model(0, rows).state_dict()

    def work(transport: Transport) -> list[int]:
        group = Counted(transport, size)
        model = Model(int(group.rank >= n_sources), rows)
        received_bytes, step = move_objects(group, verdict, {"model": model}, 7 if group.rank < n_sources else 0)
        assert step == 7
        assert received_bytes == (sum(one.nbytes for one in expected.values()) if group.rank >= n_sources else 0)
        assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
        return group.sent_bytes

    with crew(size) as transports:
        return each(work, transports)


def test_who_has_the_state_sends_it_once_and_those_who_come_pass_it_on() -> None:
    first, *others = moved(1, 2)
    assert sum(first) == pytest.approx(STATE_BYTES, rel=0.01)
    assert all(sum(one) == pytest.approx(STATE_BYTES / 2, rel=0.01) for one in others)


def test_with_few_slabs_some_pass_on_and_all_receive() -> None:
    rows = 2 * CUT_BYTES // (4 * WEIGHT[1]) + 1
    first, *others = moved(1, 5, rows)
    # The two small tensors come straight to each.
    assert sum(first) == pytest.approx(4 * rows * WEIGHT[1] + 5 * 4 * (600 + 3), rel=0.01)
    assert sorted(sum(one) > 0 for one in others) == [False, False, False, True, True]


def test_several_sources_send_a_part_each_once() -> None:
    rows = 4 * 600
    sent = moved(2, 3, rows)
    total = 4 * (rows * 1000 + 600 + 3)
    assert all(sum(one) == pytest.approx(total / 2, rel=0.01) for one in sent[:2])
    assert all(sum(one) == pytest.approx(total * 2 / 3, rel=0.01) for one in sent[2:])


@pytest.mark.parametrize(("n_sources", "n_receivers", "rows"), [(1, 3, 10), (2, 2, 600), (3, 1, 600)])
def test_small_states_and_few_receivers_are_served_straight(n_sources: int, n_receivers: int, rows: int) -> None:
    sent = moved(n_sources, n_receivers, rows)
    assert not any(map(sum, sent[n_sources:]))


def test_what_is_damaged_where_it_is_passed_on_is_noticed() -> None:
    verdict = Verdict(7, (), (0,), (1, 2))

    class Damaging(Counted):
        def stream(self, outgoing: Flows, incoming: Flows) -> None:
            if self.rank == 1:
                outgoing = {to: self._damaged(messages) for to, messages in outgoing.items()}
            super().stream(outgoing, incoming)

        def _damaged(self, messages: Messages) -> Messages:
            for view in messages:
                yield memoryview(bytes(view[:9]) + bytes([view[9] ^ 1]) + bytes(view[10:]))
                break
            yield from messages

    def work(transport: Transport) -> object:
        group = Damaging(transport, 3)
        try:
            return move_objects(group, verdict, {"model": Model(group.rank, WEIGHT[0])}, 7)
        except StateError:
            transport.close()  # as the worker ends: the others wait for it
            raise

    with crew(3) as transports:
        ends = outcomes([partial(work, transport) for transport in transports])
    assert isinstance(ends[2], StateError)
    assert "tensors of shape [600, 1000] [(300, 600), (0, 1000)] arrived damaged from a/1#0" in str(ends[2])


def test_a_receiver_that_is_lost_while_it_passes_on_interrupts_the_others_who_then_begin_again() -> None:
    verdict = Verdict(7, (), (0,), (1, 2))
    models = [Model(place, WEIGHT[0]) for place in range(3)]

    class Dying(Counted):
        def stream(self, outgoing: Flows, incoming: Flows) -> None:
            if self.rank == 1 and outgoing:
                self.transport.close()
            super().stream(outgoing, incoming)

    def work(transport: Transport) -> object:
        group = Dying(transport, 3)
        return move_objects(group, verdict, {"model": models[group.rank]}, 7)

    def again(transport: Transport) -> object:
        group = Group(transport, 2, ["a/0#0", "a/2#0"])
        return move_objects(group, Verdict(7, (), (0,), (1,)), {"model": models[2 * group.rank]}, 7)

    with crew(3) as transports:
        ends = outcomes([partial(work, transport) for transport in transports])
        assert ends[0] == (0, 7)
        assert isinstance(ends[2], StepInterrupted)
        expected = Model(0, WEIGHT[0]).state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in models[0].state_dict().items())
        left = [transports[0], transports[2]]
        for transport in left:
            transport.interrupt(2)
            transport.retain([one.worker for one in left])
        each(lambda transport: transport.connect(addresses(left), generation=2, timeout_s=20), left)
        assert each(again, left) == [(0, 7), (STATE_BYTES, 7)]
    assert all(torch.equal(value, expected[name]) for name, value in models[2].state_dict().items())


@pytest.mark.parametrize("odd", ["step", "shape", "dtype"])
def test_sources_that_differ_are_refused_by_all(odd: str) -> None:
    verdict = Verdict(7, (), (0, 1), (2,))

    def work(transport: Transport) -> object:
        group = Counted(transport, 3)
        differs = group.rank == 1
        model = Model(0, WEIGHT[0] + 1 if odd == "shape" and differs else WEIGHT[0])
        if odd == "dtype" and differs:
            model.half()
        return move_objects(group, verdict, {"model": model}, 6 if odd == "step" and differs else 7)

    with crew(3) as transports:
        for end in outcomes([partial(work, transport) for transport in transports]):
            assert isinstance(end, StateError)
            assert "the members that hold the state differ in it" in str(end)


def test_no_slab_is_smaller_than_what_a_link_is_worth() -> None:
    assert 2 * CUT_BYTES < STATE_BYTES
    sent = moved(1, 3, CUT_BYTES // (4 * WEIGHT[1]) - 1)
    assert not any(map(sum, sent[1:]))


class Holder:
    """Anything with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def assorted() -> list[Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(3, 5),
        torch.tensor(7),
        torch.empty(0, 4),
        torch.randn(4).to(torch.bfloat16),
        torch.tensor([True, False, True]),
        torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
        torch.randn(4, 6).t(),
        torch.randn(10)[3:7],
        nn.Parameter(torch.randn(2)).detach().requires_grad_(),
        torch.randn(2, dtype=torch.complex64),
        torch.randn(600, 1000).t(),
        torch.tensor(True),
    ]


@pytest.mark.parametrize(("n_sources", "n_receivers"), [(1, 1), (1, 3), (2, 1), (2, 3)])
def test_tensors_of_any_kind_come_as_they_are(n_sources: int, n_receivers: int) -> None:
    size = n_sources + n_receivers
    verdict = Verdict(3, (), tuple(range(n_sources)), tuple(range(n_sources, size)))
    expected = assorted()

    def work(transport: Transport) -> None:
        group = Counted(transport, size)
        holder = Holder({"tensors": expected, "more": {"lr": 0.5}} if group.rank < n_sources else None)
        move_objects(group, verdict, {"it": holder}, 3)
        assert holder.state["more"] == {"lr": 0.5}
        for mine, wanted in zip(holder.state["tensors"], expected, strict=True):
            assert mine.dtype == wanted.dtype
            assert mine.stride() == torch.empty_like(wanted).stride()
            assert torch.equal(mine, wanted)

    with crew(size) as transports:
        each(work, transports)


class Trained:
    """A model and its optimizer after some steps."""

    def __init__(self, seed: int, steps: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Flatten(), nn.Linear(12, 2))
        if seed == 0:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        for _ in range(steps):
            self.model(torch.randn(4, 2, 3, 3)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def check(self, peer: Trained) -> None:
        for part, thing in self.parts().items():
            for mine, wanted in zip(describe({"it": thing})[1], describe({"it": peer.parts()[part]})[1], strict=True):
                assert torch.equal(mine, wanted)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_joiner_receives_from_several_sources_what_they_have_whatever_its_order_in_memory(seed: int) -> None:
    workers = [Trained(0, 3), Trained(0, 3), Trained(0, 3), Trained(seed, 0)]
    # One of the sources has it in another order in memory, as one that has joined before.
    restore(other := Trained(1, 0).parts(), *describe(Trained(0, 3).parts()))
    objects = [workers[0].parts(), other, workers[2].parts(), workers[3].parts()]

    def work(transport: Transport) -> None:
        group = Counted(transport, 4)
        move_objects(group, Verdict(3, (), (0, 1, 2), (3,)), objects[group.rank], 3)

    with crew(4) as transports:
        each(work, transports)
    workers[3].check(Trained(0, 3))


@pytest.mark.parametrize("seed", [0, 1])
def test_what_is_received_into_memory_of_its_own_is_restored_as_well(seed: int) -> None:
    peer, joiner = Trained(0, 3), Trained(seed, 0)
    manifest, tensors = describe(peer.parts())
    received = allocate(json.loads(json.dumps(manifest)))
    for mine, theirs in zip(received, tensors, strict=True):
        mine.copy_(theirs)
    restore(joiner.parts(), manifest, received)
    joiner.check(peer)


def test_parameters_are_received_into_place_and_the_rest_into_fresh_memory() -> None:
    peer, joiner = Trained(0, 2), Trained(0, 0)
    manifest, _ = describe(peer.parts())
    received = allocate(manifest, joiner.parts())
    own = {parameter.data_ptr() for parameter in joiner.model.parameters()}
    assert {tensor.data_ptr() for tensor in received if tensor.data_ptr() in own} == own
    assert len({tensor.data_ptr() for tensor in received}) == len(received)


def test_memory_of_another_form_is_not_used() -> None:
    manifest, tensors = describe({"model": nn.Linear(3, 2)})
    mine = nn.Linear(3, 4).double()
    received = allocate(manifest, {"model": mine})
    assert [(t.shape, t.dtype) for t in received] == [(t.shape, t.dtype) for t in tensors]
    assert not {t.data_ptr() for t in received} & {p.data_ptr() for p in mine.parameters()}


def test_allocated_tensors_have_the_order_in_memory_of_the_described_ones() -> None:
    manifest, tensors = describe({"it": Holder(assorted())})
    assert [t.stride() for t in allocate(manifest)] == [t.stride() for t in tensors]
