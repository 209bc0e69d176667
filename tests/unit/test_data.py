"""The order of the samples, and batches."""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from collections import Counter, OrderedDict, UserDict, namedtuple
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from elaunch.workers.data.batches import count_samples, load, to_device
from elaunch.workers.data.order import ORDER_VERSION, Permutation, SampleOrder, digest
from tests.helpers import soak

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
    assert SampleOrder(10, 0).ids(0, 20) == [1, 7, 2, 3, 4, 5, 9, 0, 6, 8, 0, 4, 1, 7, 3, 5, 8, 9, 6, 2]
    assert SampleOrder(2**62, 3).ids(5 * 2**62 - 1, 3) == [4585481086193951979, 1139252227400933033, 507729814184754161]
    assert ORDER_VERSION == 2, "another order needs another version: checkpoints record it"


class SlowPermutation:
    """`Permutation` one index at a time, in Python's integers, and its inverse."""

    def __init__(self, n: int, key: tuple[int, ...]) -> None:
        self.n, bits = n, max(1, (n - 1).bit_length())
        self.sizes = bits // 2, bits - bits // 2
        stream = hashlib.shake_128(repr(key).encode()).digest(8 * 24)
        keys = [int.from_bytes(stream[at : at + 8], "little") for at in range(0, len(stream), 8)]
        self.keys = keys if n <= 65536 else keys[:8]

    def forward(self, index: int) -> int:
        return self.walk(index, range(len(self.keys)))

    def back(self, value: int) -> int:
        return self.walk(value, range(len(self.keys) - 1, -1, -1))

    def walk(self, value: int, rounds: range) -> int:
        while True:
            halves = [value >> self.sizes[1], value % (1 << self.sizes[1])]
            for turn in rounds:
                changed = turn % 2
                halves[changed] ^= self.mixed(halves[1 - changed] + self.keys[turn]) % (1 << self.sizes[changed])
            value = halves[0] << self.sizes[1] | halves[1]
            if value < self.n:
                return value

    def mixed(self, z: int) -> int:
        z %= 1 << 64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
        z = (z ^ z >> 27) * 0x94D049BB133111EB % (1 << 64)
        return z ^ z >> 31


@given(st.integers(1, 2**62), st.integers(0, 2**64), st.lists(st.integers(0, 2**62), min_size=1, max_size=5))
@example(1, 0, [0])
@example(2**62, 0, [0, 2**62 - 1])
@example(2**62 - 1, 5, [2**62 - 2])
@example(65537, 0, [65536])
def test_each_index_has_a_value_of_its_own_from_which_it_can_be_found_again(n: int, key: int, some: list[int]) -> None:
    indices = [one % n for one in some]
    slow = SlowPermutation(n, (key, 3))
    values = Permutation(n, (key, 3)).of(np.array(indices, dtype=np.uint64)).tolist()
    assert values == [slow.forward(index) for index in indices]
    assert all(0 <= value < n for value in values)
    assert [slow.back(value) for value in values] == indices


@pytest.mark.parametrize("n", [4, *map(soak, (3, 5, 6))])
def test_all_orders_of_a_few_samples_are_equally_likely(n: int) -> None:
    counts = Counter(tuple(SampleOrder(n, seed).ids(0, n)) for seed in range(8000))
    orders = math.factorial(n)
    assert len(counts) == orders
    assert chi_square(counts.values(), 8000 / orders) < likely(orders - 1)


@pytest.mark.parametrize("n", [1000, soak(70_000), 2**40 + 1])
def test_wherever_a_sample_stands_any_may_stand_there_and_next_to_it(n: int) -> None:
    some = np.linspace(0, n - 2, 8, dtype=np.uint64)
    first, second = (
        np.concatenate([Permutation(n, (seed,)).of(some + np.uint64(after)) for seed in range(1000)])
        for after in (0, 1)
    )
    tenths = first // np.uint64(n // 10 + 1), second // np.uint64(n // 10 + 1)
    for pairs, kinds in ((tenths[0], 10), (tenths[0] * np.uint64(10) + tenths[1], 100)):
        counts = np.bincount(pairs.astype(np.int64), minlength=kinds)
        assert chi_square(counts.tolist(), 8000 / kinds) < likely(kinds - 1)


def chi_square(counts: Iterable[int], expected: float) -> float:
    return sum((count - expected) ** 2 / expected for count in counts)


def likely(freedom: int) -> float:
    """A chi-square of this many degrees of freedom is above it once in 30,000 times."""
    return freedom + 4 * math.sqrt(2 * freedom) + 8


def test_without_shuffling_the_passes_repeat_the_data_set() -> None:
    assert SampleOrder(3, 0, shuffle=False).ids(1, 7) == [1, 2, 0, 1, 2, 0, 1]


def test_an_order_of_any_length_takes_the_same_memory() -> None:
    order = SampleOrder(2**62, 0)
    tracemalloc.start()
    try:
        for start in (0, 4, 8000, 2**62 - 10, 3 * 2**61, 2, 2**70):
            order.ids(start, 5000)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 200_000


def test_a_shuffled_order_tells_a_checkpoint_its_version_and_an_unshuffled_one_has_none() -> None:
    assert SampleOrder(5, 2).described() == {
        "samples in the data set": 5,
        "seed": 2,
        "shuffle": True,
        "version of the shuffled order": ORDER_VERSION,
    }
    assert "version of the shuffled order" not in SampleOrder(5, 2, shuffle=False).described()


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
