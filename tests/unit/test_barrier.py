"""The record of the commit barrier: sums without rounding, and the same whole whatever the tree."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elaunch.workers import barrier, exact_sum
from elaunch.workers.barrier import UNSAID, DifferentSettings, StepRecord, coverage_of
from elaunch.workers.comm import group as group_module
from elaunch.workers.comm.group import Group
from elaunch.workers.exact_sum import NOTHING, ExactSum
from tests.unit.comm_crew import crew, together

NUMBERS = st.lists(st.floats(width=64, allow_nan=False, allow_infinity=False), max_size=30)


class TestExactSum:
    @given(NUMBERS)
    def test_it_is_the_rounded_sum_of_fractions(self, terms: list[float]) -> None:
        exact = sum(map(Fraction, terms), Fraction())
        try:
            expected = float(exact)
        except OverflowError:
            expected = math.inf if exact > 0 else -math.inf
        assert ExactSum.of(terms).value == expected

    @given(NUMBERS, st.randoms(use_true_random=False))
    def test_order_and_grouping_change_nothing(self, terms: list[float], shuffler: random.Random) -> None:
        whole = ExactSum.of(terms)
        shuffler.shuffle(terms)
        at = shuffler.randint(0, len(terms))
        assert ExactSum.of(terms[:at]) + ExactSum.of(terms[at:]) == whole

    @given(NUMBERS)
    def test_a_tensor_is_summed_as_its_numbers_are(self, terms: list[float]) -> None:
        assert ExactSum.of_tensor(torch.tensor(terms, dtype=torch.float64)) == ExactSum.of(terms)

    @given(NUMBERS)
    def test_packed_it_has_one_size(self, terms: list[float]) -> None:
        whole = ExactSum.of(terms)
        assert len(whole.pack()) == exact_sum.N_BYTES
        assert ExactSum.unpack(whole.pack()) == whole

    @pytest.mark.parametrize(
        ("terms", "expected"),
        [
            ([math.inf, 1.0], math.inf),
            ([1.0, -math.inf], -math.inf),
            ([math.inf, -math.inf], math.nan),
            ([math.nan, 5.0], math.nan),
            ([1e308] * 10, math.inf),
            ([-1e308] * 10, -math.inf),
            ([1e308] * 10 + [-1e308] * 10, 0.0),
        ],
    )
    def test_what_is_not_finite_comes_out_as_floats_have_it(self, terms: list[float], expected: float) -> None:
        for found in (ExactSum.of(terms), ExactSum.of_tensor(torch.tensor(terms, dtype=torch.float64))):
            assert math.isnan(found.value) if math.isnan(expected) else found.value == expected
            again = ExactSum.unpack(found.pack())
            assert repr(again.value) == repr(found.value)


def record(rank: int, note: bytes = b"") -> StepRecord:
    return StepRecord(
        (40 + rank, 40 + rank),
        (7, 7),
        (99, 99),
        UNSAID if rank == 1 else (rank, rank),
        (40 + rank, 40 + rank),
        UNSAID if rank == 2 else (7 - rank % 3, 7 - rank % 3),
        rank % 2,
        3 * rank,
        coverage_of(range(3 * rank, 3 * rank + 3)),
        rank + 1,
        ExactSum.of([0.1 * rank]),
        ExactSum.of([1e-300 * rank, 1e300]),
        {rank: note} if note else {},
    )


def test_a_record_comes_out_of_its_bytes_as_it_was() -> None:
    whole = StepRecord.of_all([record(0), record(1, b"one"), record(2, b"two")])
    assert StepRecord.unpack(whole.pack()) == whole


def test_without_notes_the_whole_is_as_large_as_a_part() -> None:
    records = [record(rank) for rank in range(100)]
    assert len(StepRecord.of_all(records).pack()) == len(records[0].pack())


@given(st.permutations(range(9)), st.integers(1, 8))
def test_no_grouping_changes_the_whole(order: list[int], at: int) -> None:
    records = [record(rank, bytes([rank]) * rank) for rank in range(9)]
    mixed = [records[rank] for rank in order]
    parts = [StepRecord.of_all(mixed[:at]), StepRecord.of_all(mixed[at:])]
    assert StepRecord.of_all(parts) == StepRecord.of_all(records)


def test_a_piece_that_is_missing_or_there_twice_changes_the_coverage() -> None:
    whole = coverage_of(range(64))
    assert coverage_of(range(40)) + coverage_of(range(40, 64)) & (1 << 64) - 1 == whole
    wrong = [[*range(63)], [*range(64), 5], [*range(1, 65)], [0, 0, *range(2, 64)], []]
    assert all(coverage_of(pieces) != whole for pieces in wrong)


@pytest.mark.parametrize("direct_members", [16, 0])
@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_members_get_the_same_whole_over_links(size: int, direct_members: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "DIRECT_MEMBERS", direct_members)
    with crew(size) as transports:
        names = [transport.worker for transport in transports]
        expected = StepRecord.of_all([record(rank, b"n" * (rank % 3)) for rank in range(size)])

        def work(rank: int) -> list[StepRecord]:
            group = Group(transports[rank], 1, names)
            return [barrier.reduce(group, record(rank, b"n" * (rank % 3))) for _ in range(3)]

        for found in together([lambda rank=rank: work(rank) for rank in range(size)]):  # type: ignore[misc]
            assert found == [expected] * 3


def test_members_with_different_settings_are_told_so_on_all() -> None:
    with crew(3) as transports:
        names = [transport.worker for transport in transports]

        def work(rank: int) -> str:
            mine = replace(record(rank), settings=(rank // 2, rank // 2))
            with pytest.raises(DifferentSettings):
                barrier.reduce(Group(transports[rank], 1, names), mine)
            return "refused"

        assert together([lambda rank=rank: work(rank) for rank in range(3)]) == ["refused"] * 3  # type: ignore[misc]


def test_no_numbers_make_nothing() -> None:
    assert (NOTHING.value, NOTHING) == (0.0, ExactSum.of([]))
