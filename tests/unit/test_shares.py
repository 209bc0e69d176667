"""Shares of a batch: plans of one stage, of which every worker does a run of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.plan import Plan, PlanError, data_parallel, even_shares, n_rows, share, shares_of, units_of

PLAN = """\
plan layers 1 batch 60 micro-batch 16 zero interleaved
layers 0:1 samples 0:32/16 workers a/0#0
layers 0:1 samples 32:48 workers a/1#2
layers 0:1 samples 48:60 workers b/0#0
idle b/1#0"""
SHARES = {"a/0#0": 2, "a/1#2": 1, "b/0#0": 1, "b/1#0": 0}


def plan(*samples: str) -> Plan:
    """Of a batch of 64 in micro-batches of 8; each text is what one worker does."""
    lines = [f"layers 0:1 samples {text} workers a/{number}#0" for number, text in enumerate(samples)]
    return Plan.parse("\n".join(["plan layers 1 batch 64 micro-batch 8 zero interleaved", *lines]))


@given(n_units=st.integers(0, 300), n_members=st.integers(1, 100))
def test_shares_cover_every_unit_once_in_member_order_and_differ_by_at_most_one(n_units: int, n_members: int) -> None:
    shares = [share(n_units, n_members, index) for index in range(n_members)]
    assert [unit for part in shares for unit in part] == list(range(n_units))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    names = [str(member) for member in range(n_members)]
    assert list(even_shares(n_units, names).items()) == list(zip(names, map(len, shares)))


@pytest.mark.parametrize("index", [-1, 3])
def test_a_member_outside_the_group_is_refused(index: int) -> None:
    with pytest.raises(ValueError, match=f"index {index} of 3 members"):
        share(8, 3, index)


def test_micro_batches_cut_the_batch_in_order_and_the_last_may_be_shorter() -> None:
    (tile,) = data_parallel(20, 8, {"a": 3}).tiles
    assert tile.micro_batches == ((range(8),), (range(8, 16),), (range(16, 20),))
    (tile,) = data_parallel(3, 8, {"a": 1}).tiles
    assert tile.micro_batches == ((range(3),),)


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (-4, 2)])
def test_sizes_below_one_are_refused_with_their_values(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"global_batch_size {sizes[0]} and micro_batch_size {sizes[1]}"):
        data_parallel(*sizes, {"a": 1})


@given(batch=st.integers(1, 300), micro=st.integers(1, 40), n_workers=st.integers(1, 50), whole=st.booleans())
def test_a_plan_of_even_shares_is_valid_and_reads_back_from_its_text(
    batch: int, micro: int, n_workers: int, whole: bool
) -> None:
    workers = [f"node-{rank}/0#{rank % 3}" for rank in range(n_workers)]
    n_units = -(-batch // micro)
    even = data_parallel(batch, micro, even_shares(n_units, workers), whole_shares=whole)
    even.validate(workers)
    assert Plan.parse(str(even)) == even
    assert even.workers == tuple(workers)
    assert even.n_units == n_units
    assert shares_of(even) == even_shares(n_units, workers)
    for rank, worker in enumerate(workers):
        assert list(units_of(even, worker)) == list(share(n_units, n_workers, rank))


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 5), min_size=1), st.integers(1, 4), st.booleans())
def test_each_sample_is_done_once_whatever_the_shares(shares: dict[str, int], micro: int, whole: bool) -> None:
    n_units = sum(shares.values())
    for left_over in range(micro if n_units else 0):
        batch = n_units * micro - left_over
        made = data_parallel(batch, micro, shares, whole_shares=whole)
        runs = [run for tile in made.tiles for (run,) in tile.micro_batches]
        assert [sample for run in runs for sample in run] == list(range(batch))
        assert {worker: len(units_of(made, worker)) for worker in shares} == shares_of(made) == shares
        assert all(len(tile.micro_batches) == (1 if whole else shares[tile.workers[0]]) for tile in made.tiles)
        assert Plan.parse(str(made)) == made


def test_a_plan_prints_one_line_per_worker_with_a_share() -> None:
    read = Plan.parse(PLAN)
    assert str(read) == PLAN
    assert read == data_parallel(60, 16, SHARES)
    assert (read.n_units, read.unit(0), read.unit(3)) == (4, range(16), range(48, 60))
    assert units_of(read, "a/0#0") == range(2)
    assert units_of(read, "b/0#0") == range(3, 4)
    assert units_of(read, "b/1#0") == range(0)
    read.validate(SHARES)


def test_a_whole_share_is_one_micro_batch_of_many_units() -> None:
    large = data_parallel(65_536, 1, even_shares(65_536, ["a", "b", "c"]), whole_shares=True)
    assert [tile.micro_batches for tile in large.tiles] == [
        ((range(21_846),),),
        ((range(21_846, 43_691),),),
        ((range(43_691, 65_536),),),
    ]
    assert str(large).splitlines()[1] == "layers 0:1 samples 0:21846 workers a"
    assert shares_of(large) == {"a": 21_846, "b": 21_845, "c": 21_845}


def test_an_unknown_worker_is_named_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"'c/0#0' is not in this plan of a/0#0, a/1#2"):
        units_of(Plan.parse(PLAN), "c/0#0")


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ("0:6 6:64", ""),
        ("0:6", "0:6 of a/0#0 are not whole micro-batches of 8 in a batch of 64"),
        ("4:16", "4:16 of a/0#0 are not whole micro-batches of 8"),
        ("0:8 16:24", "the samples 0:8, 16:24 of a/0#0 are not one run"),
        ("8:16 0:8", "the samples 8:16, 0:8 of a/0#0 are not one run"),
    ],
)
def test_what_is_no_run_of_whole_micro_batches_is_no_share(samples: str, message: str) -> None:
    if not message:
        assert units_of(plan(samples), "a/0#0") == range(8)
        return
    with pytest.raises(PlanError, match=message):
        units_of(plan(samples), "a/0#0")


@pytest.mark.parametrize("shares", [{}, {"a": 7}, {"a": 9}, {"a": 9, "b": -1}])
def test_shares_of_another_number_of_micro_batches_are_refused(shares: Mapping[str, int]) -> None:
    with pytest.raises(PlanError, match=r"a step has 8 micro-batches of 8, but the shares are \{.*\}"):
        data_parallel(64, 8, shares)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan("0:32/8", "40:64/8"), "samples 32:40 are done by nobody"),
        (plan("8:64/8"), "samples 0:8 are done by nobody"),
        (plan("0:48/8"), "samples 48:64 are done by nobody"),
        (plan("0:40/8", "32:64/8"), r"samples 32:40 are done by both tile 0 \(a/0#0\) and tile 1 \(a/1#0\)"),
        (plan("0:64/8", "16:24"), r"samples 16:24 are done by both tile 0 \(a/0#0\) and tile 1 \(a/1#0\)"),
        (plan("0:72/8"), "no run of the samples 0:64"),
        (plan("0:64/8", "8:4"), r"tile 1 \(a/1#0\) has range\(8, 4\), which is no run of the samples"),
        (plan(), "layers 0:1 samples 0:64 are done by nobody"),
        (Plan.parse(f"{PLAN},a/0#0"), r"idle worker a/0#0 has tile 0 \(a/0#0\)"),
        (Plan.parse(f"{PLAN},b/1#0"), r"idle worker b/1#0 is named twice"),
    ],
)
def test_a_plan_that_does_not_do_each_slot_once_is_refused(wrong: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        wrong.validate()


def test_names_that_are_no_workers_are_refused() -> None:
    with pytest.raises(PlanError, match="'a b' is no worker id"):
        data_parallel(8, 8, {"a b": 1})


def test_the_message_about_a_wrong_plan_shows_the_rectangle() -> None:
    with pytest.raises(PlanError, match="not a plan") as caught:
        plan("0:32/8", "40:64/8").validate()
    assert str(caught.value).splitlines()[1:] == [
        "layer  samples 0:64, 1 in a column",
        f"    0  {'A' * 32}{'.' * 8}{'B' * 24}",
        "    A  a/0#0",
        "    B  a/1#0",
        "    .  nobody",
    ]


def test_the_rectangle_of_a_large_plan_stays_readable() -> None:
    lines = [f"layers 0:1 samples {rank}:{rank + 1} workers n{rank}/0#0" for rank in range(2000)]
    large = Plan.parse("\n".join(["plan layers 1 batch 100000 micro-batch 1 zero interleaved", *lines]))
    with pytest.raises(PlanError, match="1938 more") as caught:
        large.validate()
    assert max(map(len, str(caught.value).splitlines())) <= 120


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)).map(sorted), max_size=4))
def test_validation_agrees_with_counting_every_slot(ends: list[list[int]]) -> None:
    busy = [(f"a/{sample}#0", range(*pair)) for sample, pair in enumerate(ends) if pair[0] < pair[1]]
    lines = [f"layers 0:1 samples {2 * units.start}:{2 * units.stop}/2 workers {worker}" for worker, units in busy]
    tried = Plan.parse("\n".join(["plan layers 1 batch 12 micro-batch 2 zero interleaved", *lines]))
    if all(sum(unit in units for _, units in busy) == 1 for unit in range(6)):
        tried.validate()
        assert {worker: units_of(tried, worker) for worker, _ in busy} == dict(busy)
        assert sum(n_rows(rows) for tile in tried.tiles for rows in tile.micro_batches) == 12
    else:
        with pytest.raises(PlanError, match="not a plan"):
            tried.validate()
