"""A list of tensors as one byte string."""

from __future__ import annotations

import itertools
import json
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elaunch.workers.state import allocate, checksum, cut, describe, restore, stage, total_bytes, windows


def assorted() -> list[torch.Tensor]:
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
    ]


TOTAL = total_bytes(assorted())


def join(views: list[memoryview]) -> bytes:
    return b"".join(views)


@given(st.integers(0, 10**12), st.integers(1, 50))
def test_the_intervals_of_the_sources_cover_everything_once_and_evenly(total: int, n_sources: int) -> None:
    sources = [f"a/{index}#0" for index in range(n_sources)]
    parts = cut(total, sources)
    edges = [0, *(stop for _, _, stop in parts)]
    assert [start for _, start, _ in parts] == edges[:-1]
    assert edges[-1] == total
    assert [source for source, _, _ in parts] == sources[: len(parts)]
    lengths = [stop - start for _, start, stop in parts]
    assert all(lengths)
    assert not lengths or max(lengths) - min(lengths) <= 1


def test_without_sources_nothing_can_be_cut() -> None:
    with pytest.raises(ValueError, match="no source for 5 bytes"):
        cut(5, [])


@given(st.tuples(st.integers(0, TOTAL), st.integers(0, TOTAL)).map(sorted))
def test_an_interval_is_a_part_of_the_whole(ends: list[int]) -> None:
    tensors = assorted()
    whole = join(windows(tensors, 0, TOTAL))
    assert len(whole) == TOTAL
    views = windows(tensors, *ends)
    assert join(views) == whole[slice(*ends)]
    assert all(len(view) for view in views)


def test_the_bytes_of_a_tensor_are_those_of_its_memory() -> None:
    tensors = [torch.tensor([1, 2], dtype=torch.int16), torch.tensor(3, dtype=torch.uint8)]
    assert join(windows(tensors, 0, 5)) == bytes([1, 0, 2, 0, 3])


def test_what_is_written_to_a_window_is_in_the_tensor() -> None:
    tensors = assorted()
    for view in windows(tensors, 0, TOTAL):
        view[:] = bytes(len(view))
    assert all(not tensor.detach().any() for tensor in tensors)


def test_a_window_outlives_its_tensor() -> None:
    views = windows([torch.full((1000,), 1.5)], 0, 4000)
    torch.zeros(1000)
    assert join(views) == torch.full((1000,), 1.5).numpy().tobytes()


@pytest.mark.parametrize("ends", [(-1, 3), (2, 1), (0, TOTAL + 1)])
def test_an_interval_outside_the_string_is_refused(ends: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{ends[0]}:{ends[1]} is not within 0:{TOTAL}"):
        windows(assorted(), *ends)


def test_a_tensor_with_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="not dense"):
        windows([torch.zeros(4, 4)[:, :2]], 0, 8)


def test_a_device_tensor_must_be_staged_first() -> None:
    with pytest.raises(ValueError, match="stage it first"):
        windows([torch.zeros(2, device="meta")], 0, 8)


def test_staging_leaves_host_tensors_and_those_outside_the_interval_as_they_are() -> None:
    tensors = [torch.zeros(2), torch.zeros(2, device="meta"), torch.zeros(2)]
    assert all(a is b for a, b in zip(stage(tensors, 0, 8), tensors))
    assert all(a is b for a, b in zip(stage(tensors, 16, 24), tensors))


@given(st.lists(st.integers(0, TOTAL), max_size=4).map(sorted))
def test_a_checksum_does_not_depend_on_the_cuts(edges: list[int]) -> None:
    tensors = assorted()
    bounds = [0, *edges, TOTAL]
    pieces = [view for start, stop in itertools.pairwise(bounds) for view in windows(tensors, start, stop)]
    assert checksum(pieces) == zlib.crc32(join(windows(tensors, 0, TOTAL)))
    assert checksum([]) == 0


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


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_joiner_receives_from_several_sources_what_they_have(seed: int, in_place: bool) -> None:
    peers = [Trained(0, 3) for _ in range(3)]
    joiner = Trained(seed, 0)
    manifest = json.loads(json.dumps(describe(peers[0].parts())[0]))
    received = allocate(manifest, joiner.parts() if in_place else None)
    for peer, (_, start, stop) in zip(peers, cut(total_bytes(received), ["a", "b", "c"])):
        sent = windows(stage(describe(peer.parts())[1], start, stop), start, stop)
        data = memoryview(join(sent))
        for view in windows(received, start, stop):
            view[:] = data[: len(view)]
            data = data[len(view) :]
        assert checksum(windows(received, start, stop)) == checksum(sent)
    restore(joiner.parts(), manifest, received)
    for part, thing in joiner.parts().items():
        for mine, wanted in zip(describe({"it": thing})[1], describe({"it": peers[0].parts()[part]})[1]):
            assert torch.equal(mine, wanted)


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
    class Holder:
        def state_dict(self) -> Any:
            return assorted()

        def load_state_dict(self, state: Any) -> None: ...

    manifest, tensors = describe({"it": Holder()})
    assert [t.stride() for t in allocate(manifest)] == [t.stride() for t in tensors]
