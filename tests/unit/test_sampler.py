"""Whoever the members are, and however few samples are left: a step is the mean over its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import arange
from torch.utils.data import DataLoader, TensorDataset

from elaunch.workers.reentry.sampler import StepSampler, deal_samples


@given(
    values=st.lists(st.integers(-100, 100), min_size=1, max_size=40),
    size=st.integers(1, 9),
    wanted=st.integers(1, 4),
    interleaved=st.booleans(),
)
def test_the_weighted_mean_of_all_batches_is_that_of_the_samples(
    values: list[int], size: int, wanted: int, interleaved: bool
) -> None:
    n_batches = max(1, min(wanted, len(values) // size))
    dealt = [deal_samples(range(len(values)), rank, size, n_batches, interleaved=interleaved) for rank in range(size)]
    assert {len(batches) for batches in dealt} == {n_batches}
    everything = [batch for batches in dealt for batch in batches]
    used = Counter(sample for batch in everything if batch.weight for sample in batch.ids)
    assert used == Counter(range(len(values)))
    means = [batch.weight * sum(values[one] for one in batch.ids) / len(batch.ids) for batch in everything]
    assert sum(means) / len(means) == pytest.approx(sum(values) / len(values), abs=1e-9)


class Pairs(StepSampler):
    """Steps of four samples and a last one of a single sample."""

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        yield 4, [0, 1, 2, 3]
        yield 8, [4, 5, 6, 7]
        yield 9, [8]


@pytest.mark.parametrize("n_processes", [0, 1])
def test_batches_are_beside_their_content_however_far_a_loader_reads_ahead(n_processes: int) -> None:
    sampler = Pairs(1, 2, interleaved=True)
    loader = DataLoader(TensorDataset(arange(9)), batch_sampler=sampler, num_workers=n_processes)
    for _ in range(2):
        found = [(number, batch, content[0].tolist()) for number, batch, content in sampler.beside(loader)]
        assert [(number, content) for number, _, content in found] == [(4, [1, 3]), (8, [5, 7]), (9, [8])]
        assert [list(batch.ids) for _, batch, _ in found] == [[1, 3], [5, 7], [8]]
        assert [batch.weight for _, batch, _ in found] == [1.0, 1.0, 0.0]
    next(iter(sampler.beside(loader)))  # given up, with steps drawn that nobody took
    assert [number for number, _, _ in sampler.beside(loader)] == [4, 8, 9]
