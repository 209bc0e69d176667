"""The tiling: text form, coverage, validation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.plan import Plan, PlanError, Tile, n_rows, share, stages, symmetric
from elaunch.plan.build import Stage
from elaunch.plan.coverage import bands
from tests.unit.plan_strategies import valid_plans, well_formed_plans

repeatable = settings(deadline=None, derandomize=True)

PLAN = """\
plan layers 8 batch 16 micro-batch 2 zero interleaved
layers 0:4 samples 0:8/2 workers n0/0#0,n0/1#0
layers 0:4 samples 8:10+14:15 10:12+15:16 12:14 workers n0/2#0
layers 4:8 samples 0:16/4 workers n0/3#0
idle n0/4#0,n0/5#1"""


def cells(plan: Plan) -> dict[tuple[int, int], list[int]]:
    """For each (layer, sample) of the rectangle the tiles on it."""
    found: dict[tuple[int, int], list[int]] = {
        (layer, sample): [] for layer in range(plan.n_layers) for sample in range(plan.global_batch_size)
    }
    for index, tile in enumerate(plan.tiles):
        for layer in tile.layers:
            for sample in (sample for micro_batch in tile.micro_batches for run in micro_batch for sample in run):
                if (layer, sample) in found:
                    found[layer, sample].append(index)
    return found


def test_a_plan_reads_back_from_its_text() -> None:
    plan = Plan.parse(PLAN)
    assert str(plan) == PLAN
    assert plan.tiles[0].micro_batches == ((range(2),), (range(2, 4),), (range(4, 6),), (range(6, 8),))
    assert plan.tiles[1].micro_batches[0] == (range(8, 10), range(14, 15))
    assert plan.n_units == 8
    assert plan.workers == ("n0/0#0", "n0/1#0", "n0/2#0", "n0/3#0", "n0/4#0", "n0/5#1")
    plan.validate(plan.workers)


@repeatable
@given(st.one_of(valid_plans(tp=(1, 2)), well_formed_plans()))
def test_text_and_plan_are_inverse_to_each_other_whether_or_not_the_plan_is_valid(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan


def test_the_order_and_the_costs_have_a_text_and_what_is_as_usual_is_left_out() -> None:
    header, tiles = PLAN.split("\n", 1)
    plan = replace(Plan.parse(PLAN), order="forward", costs=(0, 8, 8, 8, 8, 8, 8, 3))
    text = f"{header} order forward\ncosts 0 6*8 3\n{tiles}"
    assert str(plan) == text
    assert Plan.parse(text) == plan
    assert Plan.parse(text.replace("6*8", "8 8 2*8 8\ncosts 8")) == plan
    assert str(replace(plan, order="auto", costs=())) == PLAN
    plan.validate()
    assert plan.renamed({"n0/3#0": "x"}).order == "forward"


def test_blank_lines_and_any_white_space_are_read() -> None:
    spread = PLAN.replace("\n", "\n \n\t").replace(" samples ", "\t samples   ")
    assert Plan.parse(f"\n{spread}\n") == Plan.parse(PLAN)


def test_equal_micro_batches_may_be_written_one_by_one() -> None:
    assert Plan.parse(PLAN.replace("0:8/2", "0:2 2:6/2 6:8")) == Plan.parse(PLAN)


def test_only_equal_micro_batches_that_follow_each_other_are_abbreviated() -> None:
    runs = [(range(2),), (range(2, 4),), (range(4, 5),), (range(6, 7),), (range(7, 8), range(5, 6)), (range(8, 9),)]
    tile = Tile(range(3), tuple(runs), ("a",))
    assert str(tile) == "layers 0:3 samples 0:4/2 4:5 6:7 7:8+5:6 8:9 workers a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 of the plan: expected 'plan layers L batch B"),
        ("\nplan layers 8", "line 2 of the plan: expected 'plan layers L batch B"),
        (PLAN.replace("interleaved", "striped"), "line 1 of the plan: expected 'plan layers L"),
        (PLAN.replace("layers 4:8", "layers 4-8"), "line 4 of the plan: expected 'layers LO:HI samples"),
        (
            PLAN.replace("0:8/2", "0:8/3"),
            "line 2 of the plan: expected START:STOP/SIZE with whole steps .* got '0:8/3'",
        ),
        (PLAN.replace("0:8/2", "0:8/0"), "whole steps of SIZE"),
        (PLAN.replace("0:8/2", "8:0/2"), "whole steps of SIZE"),
        (PLAN.replace("12:14", "12+14"), r"line 3 .* expected START:STOP, .* got '12\+14'"),
        (PLAN.replace("12:14", "-2:14"), "line 3 .* expected START:STOP"),
        (PLAN + "\n# a comment", "line 6 .* expected 'layers LO:HI samples .* or 'idle"),
        (PLAN + " n0/6#0", "line 5 .* expected"),
        (PLAN.replace("interleaved", "interleaved order sideways"), r"line 1 .* \[order backward|forward\]"),
        (PLAN + "\ncosts 1 0*2", r"line 6 .* 'costs COST N\*COST ...' or 'idle"),
    ],
)
def test_text_that_is_no_plan_is_refused_with_the_line_and_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.parse(text)


@repeatable
@given(st.one_of(valid_plans(tp=(1, 2)), well_formed_plans()))
def test_bands_and_patches_say_of_each_cell_which_tiles_are_on_it(plan: Plan) -> None:
    found = {
        (layer, sample): list(patch.tiles)
        for layers, patches in bands(plan)
        for layer in layers
        for patch in patches
        for sample in range(patch.start, patch.stop)
    }
    assert found == cells(plan)
    for _, patches in bands(plan):
        assert all(one.tiles != other.tiles for one, other in pairwise(patches))


@repeatable
@given(plan=valid_plans(), data=st.data())
def test_validation_agrees_with_counting_every_cell(plan: Plan, data: st.DataObject) -> None:
    which = data.draw(st.integers(0, len(plan.tiles) - 1))
    tile = plan.tiles[which]
    first = data.draw(st.integers(0, plan.n_layers - 1))
    layers = range(first, data.draw(st.integers(first + 1, plan.n_layers)))
    number = data.draw(st.integers(0, len(tile.micro_batches) - 1))
    start = data.draw(st.integers(0, plan.global_batch_size - 1))
    run = range(start, data.draw(st.integers(start + 1, plan.global_batch_size)))
    others = (*tile.micro_batches[:number], *tile.micro_batches[number + 1 :])
    changed = data.draw(
        st.sampled_from(
            [
                (replace(tile, layers=layers),),
                (replace(tile, micro_batches=(*others, (run,))),),
                (tile, replace(tile, layers=layers)),
                (),
            ]
        )
    )
    busy = {worker for other in (*plan.tiles[:which], *plan.tiles[which + 1 :], *changed) for worker in other.workers}
    idle = tuple(worker for worker in plan.workers if worker not in busy)
    tried = replace(plan, tiles=(*plan.tiles[:which], *changed, *plan.tiles[which + 1 :]), idle=idle)
    if set(map(len, cells(tried).values())) == {1}:
        tried.validate()
    else:
        with pytest.raises(PlanError, match=r"are done by (nobody|both|tile \d+ \(.*\) (and|more than once))"):
            tried.validate()


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (lambda text: text.replace("4:8", "5:8"), ["layers 4:5 samples 0:16 are done by nobody"]),
        (lambda text: text.replace("12:14", "13:14"), ["layers 0:4 samples 12:13 are done by nobody"]),
        (
            lambda text: text.replace("layers 4:8", "layers 3:8"),
            [
                r"layers 3:4 samples 0:8 are done by both tile 0 \(n0/0#0,n0/1#0\) and tile 2 \(n0/3#0\)",
                r"layers 3:4 samples 8:16 are done by both tile 1 \(n0/2#0\) and tile 2",
            ],
        ),
        (
            lambda text: text.replace("12:14", "12:14 12:13"),
            [r"samples 12:13 are done by tile 1 \(n0/2#0\) more than once"],
        ),
        (
            lambda text: text.replace("0:16/4", "0:16/4 16:18"),
            [r"tile 2 .* range\(16, 18\), which is no run of the samples"],
        ),
        (lambda text: text.replace("4:8", "4:9"), [r"range\(4, 9\), which is no run of the layers 0:8"]),
        (lambda text: text.replace("12:14", "12:14 3:3"), [r"range\(3, 3\), which is no run of the samples 0:16"]),
        (
            lambda text: text.replace("0:16/4", ""),
            [r"tile 2 \(n0/3#0\) has no micro-batch", "samples 0:16 are done by no"],
        ),
        (lambda text: text.replace("n0/1#0", "n0/0#0"), [r"tile 0 \(n0/0#0,n0/0#0\) has worker n0/0#0 twice"]),
        (lambda text: text.replace("n0/1#0", ""), ["'' is no worker id"]),
        (lambda text: text.replace("n0/5#1", "n0/4#0"), ["idle worker n0/4#0 is named twice"]),
        (lambda text: text.replace("n0/5#1", "n0/3#0"), [r"idle worker n0/3#0 has tile 2 \(n0/3#0\)"]),
        (
            lambda text: text.replace("batch 16", "batch 0"),
            ["1 or more, got global_batch_size 0 and micro_batch_size 2"],
        ),
        (lambda text: text.replace("layers 8", "layers 0"), ["n_layers must be 1 or more, got 0"]),
        (
            lambda text: text.replace("micro-batch 2", "micro-batch 0"),
            ["1 or more, got global_batch_size 16 and micro_batch_size 0"],
        ),
    ],
)
def test_what_is_wrong_with_a_plan_is_said(change: Callable[[str], str], messages: list[str]) -> None:
    plan = Plan.parse(change(PLAN))
    with pytest.raises(PlanError, match="not a plan: ") as caught:
        plan.validate()
    for message in messages:
        assert caught.match(message)


@pytest.mark.parametrize(("size", "units"), [(5, [5, 5, 5, 1]), (6, [6, 6, 4]), (16, [16]), (32, [16])])
def test_the_last_micro_batch_may_be_shorter(size: int, units: list[int]) -> None:
    plan = Plan.parse(PLAN.replace("micro-batch 2", f"micro-batch {size}"))
    plan.validate()
    assert [len(plan.unit(number)) for number in range(plan.n_units)] == units
    whole = symmetric(["a"], 8, 16, size)
    assert [n_rows(micro_batch) for micro_batch in whole.tiles[0].micro_batches] == units
    assert Plan.parse(str(whole)) == whole


def test_all_that_is_wrong_is_said_at_once_with_the_rectangle() -> None:
    wrong = PLAN.replace("4:8", "5:8").replace("12:14", "10:14").replace("n0/5#1", "n0/4#0")
    with pytest.raises(PlanError) as caught:
        Plan.parse(wrong).validate()
    first, *drawing = str(caught.value).splitlines()
    assert first == (
        "not a plan: idle worker n0/4#0 is named twice; layers 0:4 samples 10:12 are done by tile 1 (n0/2#0) more than "
        "once; layers 4:5 samples 0:16 are done by nobody"
    )
    assert drawing == [
        "layer  samples 0:16, 1 in a column",
        "    0  AAAAAAAABB!!BBBB",
        "    1  AAAAAAAABB!!BBBB",
        "    2  AAAAAAAABB!!BBBB",
        "    3  AAAAAAAABB!!BBBB",
        "    4  ................",
        "    5  CCCCCCCCCCCCCCCC",
        "    6  CCCCCCCCCCCCCCCC",
        "    7  CCCCCCCCCCCCCCCC",
        "    A  n0/0#0,n0/1#0",
        "    B  n0/2#0",
        "    C  n0/3#0",
        "    .  nobody",
        "    !  more than one",
    ]


def test_values_that_have_no_text_form_are_refused_too() -> None:
    tiles = (Tile(range(2), ((), (range(0, 4, 2),)), ()), Tile(range(1, -1, -1), ((range(4),),), ("a b",)))
    with pytest.raises(PlanError) as caught:
        Plan(2, 4, 2, tiles, zero="striped", order="sideways", costs=(1, 1, -1)).validate()  # type: ignore[arg-type]
    for message in (
        "zero must be interleaved or contiguous, got 'striped'",
        "order must be auto or backward or forward, got 'sideways'",
        r"costs must be 2 numbers of 0 or more, one per layer, got 2\*1 -1",
        "tile 0 has no workers",
        r"tile 0 \(\) has an empty micro-batch",
        r"range\(0, 4, 2\), which is no run of the samples 0:4",
        r"range\(1, -1, -1\), which is no run of the layers 0:2",
        "'a b' is no worker id",
    ):
        assert caught.match(message)


def test_a_long_list_of_findings_is_cut() -> None:
    tiles = tuple(Tile(range(1), ((range(sample, sample + 1),),), ("a",)) for sample in range(0, 100, 2))
    with pytest.raises(PlanError) as caught:
        Plan(1, 100, 1, tiles).validate()
    first = str(caught.value).splitlines()[0]
    assert first.count("nobody") == 12
    assert first.endswith("; and 38 more")


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("a,b", "a,b", None),
        ("a,b", "c,d", None),
        ("a,b", "b", None),
        ("a", "a", None),
        ("a,b", "b,a", r"tile 0 \(a,b\) and tile 1 \(b,a\) share workers: two tensor-parallel groups must be the same"),
        ("a,b", "b,c", r"tile 0 \(a,b\) and tile 1 \(b,c\) share workers"),
        ("a,b", "a,b,c", r"tile 0 \(a,b\) and tile 1 \(a,b,c\) share workers"),
    ],
)
def test_tensor_parallel_tuples_are_equal_or_disjoint_or_of_one_worker(
    one: str, other: str, message: str | None
) -> None:
    tiles = f"layers 0:1 samples 0:2 workers {one}\nlayers 1:2 samples 0:2 workers {other}"
    plan = Plan.parse(f"plan layers 2 batch 2 micro-batch 2 zero interleaved\n{tiles}")
    if message is None:
        plan.validate()
    else:
        with pytest.raises(PlanError, match=message):
            plan.validate()


def test_the_workers_of_a_plan_must_be_the_members_of_the_job() -> None:
    plan = Plan.parse(PLAN)
    members = [worker for worker in plan.workers if worker not in ("n0/1#0", "n0/5#1")] + ["n1/0#0"]
    with pytest.raises(PlanError) as caught:
        plan.validate(members)
    assert caught.match("n0/1#0, n0/5#1 must be left out: no members of the job")
    assert caught.match("n1/0#0 must have a tile or be idle: members of the job")


@repeatable
@given(valid_plans(tp=(1, 2)))
def test_the_tiles_of_each_worker_are_known(plan: Plan) -> None:
    for worker in plan.workers:
        assert plan.tiles_of(worker) == tuple(i for i, tile in enumerate(plan.tiles) if worker in tile.workers)
    assert plan.tiles_of("nobody") == ()
    assert max(Counter(plan.workers).values()) == 1


def test_a_plan_for_a_thousand_workers_is_validated_and_drawn_in_a_small_space() -> None:
    names = [f"node-{index // 8}/{index % 8}#0" for index in range(1024)]
    symmetric(names, 100, 4096, 4, dp=64, pp=16).validate(names)
    replicas = [[(name,) for name in names[stage * 64 : (stage + 1) * 64]] for stage in range(16)]
    without_one_each = [
        Stage(share(100, 16, stage), tuple(() if dp_rank == stage else workers for dp_rank, workers in enumerate(at)))
        for stage, at in enumerate(replicas)
    ]
    resized = stages(100, 4096, 4, without_one_each)
    assert sum(n_rows(micro_batch) for tile in resized.tiles for micro_batch in tile.micro_batches) == 16 * 4096
    tile = replace(resized.tiles[0], layers=range(1))
    with pytest.raises(PlanError) as caught:
        replace(resized, tiles=(tile, *resized.tiles[1:])).validate()
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120
