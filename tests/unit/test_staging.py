"""What is on a device goes through host memory: the next message is copied while one travels, and none too early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from elaunch.workers.state.staging import CopiesOnHost, DeviceCopies, Staging, begun_to_host, copies_of, to_host
from tests.devices import DEVICES
from tests.unit.late_copies import LateCopies


def columns(number: int) -> list[Tensor]:
    """Of one message; not a run of memory, as nothing on a device is one of the host."""
    whole = torch.arange(20, dtype=torch.float32).view(10, 2) + 100 * number
    return [whole[:, 0], whole[:, 1]]


def staging_with(copies: LateCopies | CopiesOnHost, held: list[int]) -> Staging:
    return Staging(copies, held.append)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_each_message_leaves_whole_while_the_next_is_copied(ahead: int) -> None:
    copies, held = LateCopies(ahead), list[int]()
    staging = staging_with(copies, held)
    seen = []
    for number, buffer in enumerate(staging.leaving(columns(number) for number in range(5))):
        seen.append(bytes(buffer.bytes))
        assert copies.n_done == 2 * (number + 1)
        assert copies.n_begun == 2 * min(5, number + 1 + ahead)
    expected = [torch.cat([one.contiguous() for one in columns(number)]).numpy() for number in range(5)]
    sent = [torch.frombuffer(bytearray(one), dtype=torch.float32) for one in seen]
    # Each column begins at a multiple of 16 bytes.
    assert [torch.cat([one[:10], one[12:22]]).tolist() for one in sent] == [list(one) for one in expected]
    staging.close()
    assert sum(held) == 0
    assert max(held) == 88
    assert sum(size > 0 for size in held) == 1 + ahead


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_what_has_come_reaches_its_place_though_the_next_comes_meanwhile(ahead: int) -> None:
    copies, held = LateCopies(ahead), list[int]()
    staging = staging_with(copies, held)
    sender = staging_with(CopiesOnHost(), [])
    places = [columns(0) for _ in range(5)]
    sent = sender.leaving(columns(number) for number in range(1, 6))
    for number, (views, message) in enumerate(zip(places, sent, strict=True)):
        with staging.coming(views) as buffer:
            buffer.bytes[:] = message.bytes
        assert copies.n_done == max(0, 2 * (number - ahead)), (
            "a copy was awaited too early, or its buffer used too soon"
        )
    staging.end()
    for number, views in enumerate(places, 1):
        assert all(map(torch.equal, views, columns(number)))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_on_a_device_comes_to_another_through_pinned_memory_beside_its_work(device: str) -> None:
    sent = [[one.to(device) for one in columns(number)] for number in range(1, 6)]
    places = [[torch.zeros_like(one) for one in views] for views in sent]
    copies = copies_of(torch.device(device))
    if isinstance(copies, DeviceCopies):
        assert copies.new(8).is_pinned()
        assert copies._stream.stream_id != torch.accelerator.current_stream().stream_id
    assert isinstance(copies, DeviceCopies) == (device != "cpu")
    sender, receiver = Staging(copies, list[int]().append), Staging(copies, list[int]().append)
    for views, message in zip(places, sender.leaving(iter(sent)), strict=True):
        with receiver.coming(views) as buffer:
            buffer.bytes[:] = message.bytes
    receiver.end()
    assert all(torch.equal(one, other) for pair in zip(places, sent) for one, other in zip(*pair))
    gradient = torch.ones(1 << 20, device=device).mul_(3.0)
    host = begun_to_host(gradient)()
    assert host.device.type == "cpu"
    assert host.unique().tolist() == [3.0]


def test_buffers_are_let_go_only_when_nothing_is_copied_from_them() -> None:
    copies, held = LateCopies(), list[int]()
    staging = staging_with(copies, held)
    views = columns(0)
    with staging.coming(views) as buffer:
        buffer.bytes[:] = bytes(len(buffer.bytes))
    staging.close()
    assert not copies.begun
    assert sum(held) == 0


def test_all_are_on_their_way_before_the_first_is_there() -> None:
    copies = LateCopies()
    tensors = [torch.full((size,), float(size)) for size in (3, 5, 7)]
    for number, (tensor, host) in enumerate(zip(tensors, to_host(tensors, copies), strict=True), 1):
        assert (copies.n_begun, copies.n_done) == (3, number)
        assert torch.equal(host, tensor)
        assert host.data_ptr() != tensor.data_ptr()


def test_what_is_in_host_memory_stays_where_it_is() -> None:
    tensors = [torch.zeros(3), torch.zeros(4)]
    assert [one.data_ptr() for one in to_host(tensors)] == [one.data_ptr() for one in tensors]
    assert list(to_host([])) == []
