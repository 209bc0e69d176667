"""The order of the samples, and batches."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from elaunch.workers.data import SampleOrder, count_samples, digest, load, to_device

Pair = namedtuple("Pair", ["x", "y"])


class Squares(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        return index * index


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@given(n=st.integers(1, 40), seed=st.integers(0, 2**70), number=st.integers(0, 5))
def test_a_pass_holds_every_sample_exactly_once(n: int, seed: int, number: int) -> None:
    assert sorted(SampleOrder(n, seed).ids(number * n, n)) == list(range(n))


@given(st.lists(st.integers(0, 9), max_size=12), st.booleans(), st.integers(1, 17))
def test_the_stream_is_the_same_however_it_is_cut(counts: list[int], shuffle: bool, n: int) -> None:
    pieces, at = SampleOrder(n, 3, shuffle), 0
    found: list[int] = []
    for count in counts:
        found += pieces.ids(at, count)
        at += count
    assert found == SampleOrder(n, 3, shuffle).ids(0, at)


def test_going_back_to_an_earlier_step_gives_the_same_samples() -> None:
    order = SampleOrder(7, 1)
    forward = [order.ids(start, 3) for start in range(0, 60, 3)]
    back = [order.ids(start, 3) for start in reversed(range(0, 60, 3))]
    assert back[::-1] == forward


def test_passes_and_seeds_differ() -> None:
    order = SampleOrder(1000, 5)
    assert order.ids(0, 1000) != order.ids(1000, 1000)
    assert order.ids(0, 1000) != SampleOrder(1000, 6).ids(0, 1000)


def test_the_order_is_pinned_so_that_versions_of_this_package_agree() -> None:
    assert SampleOrder(10, 0).ids(0, 20) == [4, 9, 8, 7, 5, 3, 0, 1, 2, 6, 3, 8, 9, 4, 6, 7, 2, 0, 1, 5]


def test_without_shuffling_the_passes_repeat_the_data_set() -> None:
    assert SampleOrder(3, 0, shuffle=False).ids(1, 7) == [1, 2, 0, 1, 2, 0, 1]


def test_at_most_two_passes_are_kept_in_memory() -> None:
    order = SampleOrder(4, 0)
    for start in (0, 4, 8, 40, 0, 39, 2, 20):
        order.ids(start, 6)
        assert len(order._permutations) <= 2


@pytest.mark.parametrize(
    ("n", "seed", "message"), [(0, 0, "at least one sample, got 0"), (5, -1, "seed must be 0 or more, got -1")]
)
def test_an_empty_data_set_and_a_negative_seed_are_refused(n: int, seed: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SampleOrder(n, seed)


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (0, -2)])
def test_positions_before_the_stream_are_refused(start: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"start {start} and count {count}"):
        SampleOrder(5, 0).ids(start, count)


def test_a_digest_names_the_set_of_ids_whatever_their_order() -> None:
    assert digest([3, 1, 2]) == digest(iter([2, 3, 1]))
    assert digest([1, 2]) != digest([1, 2, 2])
    assert digest([]) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_batch_holds_the_samples_in_the_order_of_the_ids() -> None:
    assert load(Squares(), [3, 0, 2]).tolist() == [9, 0, 4]
    assert load([torch.tensor(1), torch.tensor(5)], [1, 0]).tolist() == [5, 1]


def test_a_data_set_that_fetches_many_samples_at_once_is_asked_once() -> None:
    asked = []

    class Batched(Squares):
        def __getitems__(self, ids: list[int]) -> list[int]:
            asked.append(ids)
            return [index + 100 for index in ids]

    assert load(Batched(), range(2, 4)).tolist() == [102, 103]
    assert asked == [[2, 3]]
    assert load(Subset(Batched(), [7, 8, 9]), [0, 2]).tolist() == [107, 109]


def test_a_collate_of_the_users_makes_the_batch() -> None:
    assert load(Squares(), [1, 2], collate=tuple) == (1, 4)


@pytest.mark.parametrize("dataset", [Stream(), iter([1]), TensorDataset(torch.zeros(2)).__getitem__, {1, 2}])
def test_a_data_set_that_is_not_map_style_gives_one_clear_error(dataset: Any) -> None:
    with pytest.raises(TypeError, match=rf"{type(dataset).__name__} is not a map-style data set"):
        count_samples(dataset)


def test_the_size_of_a_map_style_data_set_is_its_length() -> None:
    assert count_samples(Squares()) == 10
    assert count_samples([5, 6]) == 2


def test_every_tensor_of_a_nested_batch_moves_and_the_structure_stays() -> None:
    batch: dict[str, Any] = {
        "pair": Pair(torch.zeros(2), [torch.ones(1), "text"]),
        "tuple": (torch.zeros(1), None, 3),
        "ordered": OrderedDict(a=torch.zeros(3)),
        "user": UserDict(a=torch.zeros(3)),
    }
    moved = to_device(batch, "meta")
    assert isinstance(moved["pair"], Pair)
    assert isinstance(moved["ordered"], OrderedDict)
    assert moved["pair"].y[1] == "text"
    assert moved["tuple"][1:] == (None, 3)
    tensors = [moved["pair"].x, moved["pair"].y[0], moved["tuple"][0], moved["ordered"]["a"], moved["user"]["a"]]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert batch["tuple"][0].device.type == "cpu"


def test_a_batch_that_can_move_itself_is_asked_to() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert to_device(packed, "meta").data.device.type == "meta"
