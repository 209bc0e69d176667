"""The tiling of one stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.plan.shares import DataParallelPlan, micro_batches, share

PLAN = """\
batch 60 micro-batch 16
layers 0:1 slots 0:32 worker a/0#0
layers 0:1 slots 32:48 worker a/1#2
layers 0:1 slots 48:60 worker b/0#0
layers 0:1 slots 60:60 worker b/1#0"""


def plan(*units: tuple[int, int]) -> DataParallelPlan:
    return DataParallelPlan(64, 8, tuple((f"a/{slot}#0", range(*ends)) for slot, ends in enumerate(units)))


def test_micro_batches_cut_the_batch_in_order_and_the_last_may_be_shorter() -> None:
    assert micro_batches(20, 8) == (range(8), range(8, 16), range(16, 20))
    assert micro_batches(3, 8) == (range(3),)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-4, 2)])
def test_sizes_below_one_are_refused_with_their_values(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"global_batch_size {sizes[0]} and micro_batch_size {sizes[1]}"):
        micro_batches(*sizes)


@given(n_units=st.integers(0, 300), n_members=st.integers(1, 100))
def test_shares_cover_every_unit_once_in_member_order_and_differ_by_at_most_one(n_units: int, n_members: int) -> None:
    shares = [share(n_units, n_members, index) for index in range(n_members)]
    assert [unit for part in shares for unit in part] == list(range(n_units))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("index", [-1, 3])
def test_a_member_outside_the_group_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"index {index} of 3 members"):
        share(8, 3, index)


@given(batch=st.integers(1, 300), micro=st.integers(1, 40), n_workers=st.integers(1, 50))
def test_an_even_plan_is_valid_and_reads_back_from_its_text(batch: int, micro: int, n_workers: int) -> None:
    workers = [f"node-{rank}/0#{rank % 3}" for rank in range(n_workers)]
    even = DataParallelPlan.even(batch, micro, workers)
    even.validate()
    assert DataParallelPlan.parse(str(even)) == even
    assert even.workers == tuple(workers)


def test_a_plan_prints_one_line_per_tile() -> None:
    read = DataParallelPlan.parse(PLAN)
    assert str(read) == PLAN
    assert read.units_of("a/0#0") == range(2)
    assert read.units_of("b/0#0") == range(3, 4)
    read.validate()


def test_an_unknown_worker_is_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'c/0#0' is not in this plan of a/0#0, a/1#2"):
        DataParallelPlan.parse(PLAN).units_of("c/0#0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "starts with"),
        ("batch 8", "starts with"),
        ("batch 8 micro-batch 0", "micro_batch_size 0"),
        ("batch 8 micro-batch 4\nlayers 0:2 slots 0:8 worker a/0#0", "expected 'layers 0:1"),
        ("batch 8 micro-batch 4\nlayers 0:1 slots 0:6 worker a/0#0", "0:6 are not whole micro-batches of 4"),
        ("batch 8 micro-batch 4\nlayers 0:1 slots 0:12 worker a/0#0", "0:12 are not whole"),
        ("batch 8 micro-batch 4\nlayers 0:1 slots 8:4 worker a/0#0", "8:4 are not whole"),
    ],
)
def test_text_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataParallelPlan.parse(text)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan((0, 4), (5, 8)), "slots 32:40 are done by nobody"),
        (plan((1, 8)), "slots 0:8 are done by nobody"),
        (plan((0, 6)), "slots 48:64 are done by nobody"),
        (plan((0, 5), (4, 8)), "slots 32:40 are done by both a/0#0 and a/1#0"),
        (plan((0, 8), (2, 3)), "slots 16:24 are done by both a/0#0 and a/1#0"),
        (plan((0, 9)), "no run of the micro-batches 0..7"),
        (plan((-1, 8)), "no run of the micro-batches 0..7"),
        (plan(), "no workers"),
        (DataParallelPlan(8, 8, (("a/0#0", range(1)), ("a/0#0", range(1, 1)))), "a/0#0 appears twice"),
        (DataParallelPlan(8, 8, (("a b", range(1)),)), "'a b' is no worker id"),
    ],
)
def test_a_plan_that_does_not_do_each_slot_once_is_refused(wrong: DataParallelPlan, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrong.validate()


def test_the_message_about_a_wrong_plan_shows_the_rectangle() -> None:
    with pytest.raises(ValueError, match="not a plan") as caught:
        plan((0, 4), (5, 8)).validate()
    assert str(caught.value).splitlines()[1:] == [
        "      slots 0:64, 8 in a column",
        "a/0#0 ####....",
        "a/1#0 .....###",
    ]


def test_the_rectangle_of_a_large_plan_stays_readable() -> None:
    large = DataParallelPlan(100_000, 1, tuple((f"n{rank}/0#0", range(rank, rank + 1)) for rank in range(2000)))
    with pytest.raises(ValueError, match="1968 more workers") as caught:
        large.validate()
    assert max(map(len, str(caught.value).splitlines())) <= 120


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted), max_size=4))
def test_validation_agrees_with_counting_every_slot(ends: list[list[int]]) -> None:
    tried = DataParallelPlan(12, 2, tuple((f"a/{slot}#0", range(*pair)) for slot, pair in enumerate(ends)))
    counts = [sum(unit in units for _, units in tried.units) for unit in range(6)]
    if counts == [1] * 6:
        tried.validate()
    else:
        with pytest.raises(ValueError, match="not a plan"):
            tried.validate()
