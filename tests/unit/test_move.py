"""The whole state of a data-parallel job sent to those who need it, over real links, one thread for each worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.errors import StateError, StepInterrupted
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Verdict
from elaunch.workers.state.move import move_state
from elaunch.workers.state.transfer import CHUNK_BYTES
from tests.unit.comm_crew import crew, each, outcomes

Exchange = Callable[[Sequence[tuple[int, Any]], Sequence[tuple[int, Any]]], None]

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
    """Counts the bytes that it sends to each member."""

    def __init__(self, transport: Transport, n_members: int) -> None:
        super().__init__(transport, 1, [f"a/{member}#0" for member in range(n_members)])
        self.sent_bytes = [0] * n_members

    def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> None:
        for to, view in sends:
            self.sent_bytes[to] += len(view)
        super().exchange(sends, receives)


def moved(n_sources: int, n_receivers: int, rows: int = WEIGHT[0]) -> list[list[int]]:
    """The bytes that each member sent to each."""
    size = n_sources + n_receivers
    verdict = Verdict(7, (), tuple(range(n_sources)), tuple(range(n_sources, size)))
    expected = Model(0, rows).state_dict()

    def work(transport: Transport) -> list[int]:
        group = Counted(transport, size)
        model = Model(int(group.rank >= n_sources), rows)
        received_bytes, step = move_state(group, verdict, {"model": model}, 7 if group.rank < n_sources else 0)
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


def test_with_few_chunks_some_pass_on_and_all_receive() -> None:
    first, *others = moved(1, 5)
    assert sum(first) == pytest.approx(STATE_BYTES, rel=0.01)
    assert [sum(one) > 0 for one in others] == [True, True, False, False, False]


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
        def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> None:
            if self.rank == 1 and sends:
                to, view = sends[0]
                sends = [(to, memoryview(bytes(view[:9]) + bytes([view[9] ^ 1]) + bytes(view[10:]))), *sends[1:]]
            super().exchange(sends, receives)

    def work(transport: Transport) -> object:
        group = Damaging(transport, 3)
        return move_state(group, verdict, {"model": Model(group.rank, WEIGHT[0])}, 7)

    with crew(3) as transports:
        ends = outcomes([partial(work, transport) for transport in transports])
    assert isinstance(ends[2], StateError)
    assert "part of the state that a/0#0 has arrived damaged" in str(ends[2])


def test_a_receiver_that_is_lost_while_it_passes_on_interrupts_the_others() -> None:
    verdict = Verdict(7, (), (0,), (1, 2))

    class Dying(Counted):
        def exchange(self, sends: Sequence[tuple[int, Any]], receives: Sequence[tuple[int, Any]]) -> None:
            if self.rank == 1 and sends:
                self.transport.close()
            super().exchange(sends, receives)

    def work(transport: Transport) -> object:
        group = Dying(transport, 3)
        return move_state(group, verdict, {"model": Model(group.rank, WEIGHT[0])}, 7)

    with crew(3) as transports:
        ends = outcomes([partial(work, transport) for transport in transports])
    assert ends[0] == (0, 7)
    assert isinstance(ends[2], StepInterrupted)


def test_no_chunk_is_smaller_than_what_a_link_is_worth() -> None:
    assert 2 * CHUNK_BYTES < STATE_BYTES < 3 * CHUNK_BYTES
