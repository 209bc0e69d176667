"""Updates of accelerate's loaders are the same samples whatever the members are, and count the same."""

from __future__ import annotations

import math
from typing import Any

import pytest
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from elaunch.errors import UsageError
from elaunch.integrations.accelerate import GlobalBatches, dealt_out


def whole(n_samples: int, batch_size: int, drop_last: bool) -> BatchSampler:
    return BatchSampler(SequentialSampler(range(n_samples)), batch_size, drop_last)


@settings(deadline=None)
@given(
    n_samples=st.integers(1, 60),
    batch_size=st.integers(1, 4),
    world=st.integers(1, 4),
    accumulation=st.integers(1, 3),
    size=st.integers(1, 4),
    drop_last=st.booleans(),
    cut=st.booleans(),
)
def test_an_update_has_the_samples_that_accelerate_gives_the_members_of_the_start(
    n_samples: int, batch_size: int, world: int, accumulation: int, size: int, drop_last: bool, cut: bool
) -> None:
    shards = [list(BatchSamplerShard(whole(n_samples, batch_size, drop_last), world, rank)) for rank in range(world)]
    rounds = list(zip(*shards, strict=True))
    expected = [
        sorted(sample for batches in rounds[start : start + accumulation] for batch in batches for sample in batch)
        for start in range(0, len(rounds), accumulation)
    ]
    members = [
        GlobalBatches(whole(n_samples, batch_size, drop_last), world, accumulation, rank, size, cut=cut)
        for rank in range(size)
    ]
    drawn = [list(member) for member in members]
    assert {member.n_updates for member in members} == {len(expected)}
    assert [len(batches) for batches in drawn] == [len(member) for member in members]
    for update, samples in enumerate(expected):
        n_batches = members[0].n_batches(update)
        found, counted = [], 0.0
        for member, batches in zip(members, drawn, strict=True):
            own, batches[:n_batches] = batches[:n_batches], []
            weights = member.weights(update)
            assert len(own) == len(weights) == n_batches
            assert all(own)
            if cut and math.ceil(math.ceil(len(samples) / size) / batch_size) <= len(samples) // size:
                assert max(map(len, own)) <= batch_size
            found += [sample for batch in own for sample in batch]
            counted += sum(weights) / n_batches / size
            assert sorted(member.ids(update)) == samples
        assert counted == pytest.approx(1)
        if len(samples) >= size:
            assert sorted(found) == samples
        else:
            assert set(found) == set(samples)


def test_batches_without_a_size_are_refused() -> None:
    with pytest.raises(UsageError, match="list has no batch_size"):
        GlobalBatches([[0, 1], [2]], 1, 1, 0, 1)


def test_gather_for_metrics_learns_which_samples_of_the_last_update_are_new() -> None:
    data: Any = list(range(15))
    loader = prepare_data_loader(DataLoader(data, batch_size=2), num_processes=1, process_index=0, put_on_device=False)
    made, _ = dealt_out(loader, lambda batches: GlobalBatches(batches, 3, 1, 0, 2), None, 0)
    assert [len(batch) for batch in made] == [3, 3, 3]
    assert made.remainder == 15 % (2 * 3)
