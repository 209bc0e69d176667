"""What follows from a plan, against twins that look at every row, worker or element."""

from __future__ import annotations

from itertools import chain, combinations, pairwise, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elaunch.plan import (
    Feed,
    GradientGroup,
    Plan,
    PlanError,
    ShardRange,
    gradient_groups,
    holders,
    inputs,
    n_rows,
    optimizer_shards,
    outputs,
    rounds,
    rows_by_unit,
    symmetric,
    unit_of,
)
from elaunch.plan.views import Ends, Feeds, sources, takers
from tests.unit.plan_strategies import valid_plans

repeatable = settings(deadline=None, derandomize=True)

CUT = Plan.parse("""\
plan layers 4 batch 8 micro-batch 4 zero interleaved
layers 0:2 samples 0:4 4:8 workers a
layers 2:4 samples 2:6 6:8+0:2 workers b
""")


def slots_of(plan: Plan, tile: int, micro_batch: int) -> list[int]:
    return list(chain(*plan.tiles[tile].micro_batches[micro_batch]))


def micro_batches(plan: Plan) -> list[tuple[int, int]]:
    return [(i, number) for i, tile in enumerate(plan.tiles) for number in range(len(tile.micro_batches))]


def test_feeds_name_the_source_and_its_rows_in_row_order() -> None:
    assert inputs(CUT) == (
        ((), ()),
        (
            (Feed(0, 0, ((2, 0, 2),)), Feed(0, 1, ((0, 2, 2),))),
            (Feed(0, 1, ((2, 0, 2),)), Feed(0, 0, ((0, 2, 2),))),
        ),
    )
    assert outputs(CUT) == (
        (
            (Feed(1, 1, ((0, 2, 2),)), Feed(1, 0, ((2, 0, 2),))),
            (Feed(1, 0, ((0, 2, 2),)), Feed(1, 1, ((2, 0, 2),))),
        ),
        ((), ()),
    )


def test_adjacent_rows_of_a_feed_are_one_run_and_others_are_not() -> None:
    plan = Plan.parse("""\
        plan layers 2 batch 6 micro-batch 6 zero interleaved
        layers 0:1 samples 0:2+2:4+5:6+4:5 workers a
        layers 1:2 samples 0:3+3:6 workers b""")
    assert inputs(plan)[1] == ((Feed(0, 0, ((0, 0, 4), (5, 4, 1), (4, 5, 1))),),)


@repeatable
@given(valid_plans(tp=(1, 2)))
def test_every_input_row_comes_from_the_row_of_the_same_slot_one_layer_before(plan: Plan) -> None:
    for tile, number in micro_batches(plan):
        wanted = slots_of(plan, tile, number) if plan.tiles[tile].layers.start else []
        fed: list[int] = []
        for feed in inputs(plan)[tile][number]:
            assert plan.tiles[tile].layers.start - 1 in plan.tiles[feed.tile].layers
            source = slots_of(plan, feed.tile, feed.micro_batch)
            for there, here, rows in feed.runs:
                assert source[there : there + rows] == wanted[here : here + rows]
                fed += range(here, here + rows)
            for (there, here, rows), (next_there, next_here, _) in pairwise(feed.runs):
                assert (there + rows, here + rows) != (next_there, next_here)
        assert sorted(fed) == list(range(len(wanted)))
        firsts = [feed.runs[0][1] for feed in inputs(plan)[tile][number]]
        assert firsts == sorted(firsts)


@repeatable
@given(valid_plans(tp=(1, 2)))
def test_outputs_are_the_inputs_seen_from_the_other_end(plan: Plan) -> None:
    taken = {
        (tile, number, feed.tile, feed.micro_batch, feed.runs)
        for tile, number in micro_batches(plan)
        for feed in inputs(plan)[tile][number]
    }
    given_ = [
        (feed.tile, feed.micro_batch, tile, number, feed.runs)
        for tile, number in micro_batches(plan)
        for feed in outputs(plan)[tile][number]
    ]
    assert set(given_) == taken
    assert len(given_) == len(taken)


@repeatable
def ends_of(feeds: Feeds) -> Ends:
    return tuple(tuple(tuple((one.tile, one.micro_batch, one.n_rows) for one in some) for some in of) for of in feeds)


@repeatable
@given(valid_plans(tp=(1, 2)))
@example(symmetric("abcdefgh", 4, 16, 2, dp=2, pp=2, tp=2))  # whose stages share their micro-batches
@example(CUT)
def test_sources_and_takers_are_the_feeds_without_the_places_of_the_rows(plan: Plan) -> None:
    assert sources(plan) == ends_of(inputs(plan))
    assert takers(plan) == ends_of(outputs(plan))


@given(valid_plans(tp=(1, 2)))
def test_every_output_row_is_taken_once_by_the_next_layer(plan: Plan) -> None:
    for tile, number in micro_batches(plan):
        rows = [range(run[0], run[0] + run[2]) for feed in outputs(plan)[tile][number] for run in feed.runs]
        ends = plan.tiles[tile].layers.stop == plan.n_layers
        assert sorted(chain(*rows)) == ([] if ends else list(range(n_rows(plan.tiles[tile].micro_batches[number]))))


@repeatable
@given(valid_plans(tp=(1, 2)))
def test_the_holders_of_a_layer_are_those_met_on_a_walk_along_its_slots(plan: Plan) -> None:
    for layer in range(plan.n_layers):
        met: dict[tuple[str, ...], None] = {}
        for sample in range(plan.global_batch_size):
            for tile in plan.tiles:
                if layer in tile.layers and any(sample in run for run in chain(*tile.micro_batches)):
                    met[tile.workers] = None
        assert holders(plan)[layer] == tuple(met)


@repeatable
@given(valid_plans(tp=(1, 2)))
def test_gradient_groups_hold_every_layer_once_and_are_as_few_as_there_are_kinds_of_holders(plan: Plan) -> None:
    groups = gradient_groups(plan)
    assert sorted(chain(*(group.layers for group in groups))) == list(range(plan.n_layers))
    assert all(holders(plan)[layer] == group.replicas for group in groups for layer in group.layers)
    assert len(groups) == len(set(holders(plan)))
    assert [group.layers[0] for group in groups] == sorted(group.layers[0] for group in groups)


def shares_worker(one: GradientGroup, other: GradientGroup) -> bool:
    return not set(chain(*one.replicas)).isdisjoint(chain(*other.replicas))


@repeatable
@given(st.lists(st.lists(st.tuples(st.sampled_from("abcdefgh")), min_size=1, max_size=3, unique=True), max_size=6))
def test_rounds_keep_workers_apart_and_are_few(members: list[list[tuple[str]]]) -> None:
    groups = [GradientGroup((layer,), tuple(replicas)) for layer, replicas in enumerate(members)]
    found = rounds(groups)
    real = [index for index, group in enumerate(groups) if len(group.replicas) > 1]
    assert sorted(chain(*found)) == real
    for together in found:
        assert not any(shares_worker(groups[one], groups[other]) for one, other in combinations(together, 2))
    most = max((sum(shares_worker(groups[one], groups[other]) for other in real) for one in real), default=0)
    assert len(found) <= most  # each shares workers with itself, too

    clashes = [(a, b) for a, b in combinations(real, 2) if shares_worker(groups[a], groups[b])]

    def can_do(n_rounds: int) -> bool:
        colourings = (dict(zip(real, colours)) for colours in product(range(n_rounds), repeat=len(real)))
        return any(all(colours[a] != colours[b] for a, b in clashes) for colours in colourings)

    fewest = next(n_rounds for n_rounds in range(len(real) + 1) if can_do(n_rounds))
    assert fewest <= len(found)
    # Every round's groups could not have been done earlier.
    for number, together in enumerate(found):
        for index in together:
            assert all(any(shares_worker(groups[index], groups[o]) for o in before) for before in found[:number])


@repeatable
@given(plan=valid_plans(tp=(1, 2)), data=st.data(), align=st.integers(1, 5))
def test_shards_cover_every_layer_once_at_aligned_points(plan: Plan, data: st.DataObject, align: int) -> None:
    elements = data.draw(st.lists(st.integers(0, 40), min_size=plan.n_layers, max_size=plan.n_layers))
    shards = optimizer_shards(plan, elements, align)
    for layer, owned in enumerate(shards):
        edges = [0, *(shard.stop for shard in owned)]
        assert [shard.start for shard in owned] == edges[:-1]
        assert edges[-1] == elements[layer]
        assert all(one < other for one, other in pairwise(edges))
        assert all(edge % align == 0 for edge in edges[:-1])
        assert all(one.replica < other.replica for one, other in pairwise(owned))
        assert all(0 <= shard.replica < len(holders(plan)[layer]) for shard in owned)
    for group in gradient_groups(plan):
        together = [group.layers] if plan.zero == "contiguous" else [(layer,) for layer in group.layers]
        for layers in together:
            blocks = [0] * len(group.replicas)
            for shard in chain(*(shards[layer] for layer in layers)):
                blocks[shard.replica] += -(-(shard.stop - shard.start) // align)
            assert max(blocks) - min(blocks) <= 1


def test_interleaved_cuts_each_layer_and_contiguous_the_layers_of_a_group() -> None:
    text = """\
        plan layers 3 batch 2 micro-batch 1 zero {}
        layers 0:3 samples 0:1 workers a
        layers 0:3 samples 1:2 workers b"""
    elements = [256, 130, 100]
    assert optimizer_shards(Plan.parse(text.format("interleaved")), elements) == (
        (ShardRange(0, 0, 128), ShardRange(1, 128, 256)),
        (ShardRange(0, 0, 64), ShardRange(1, 64, 130)),
        (ShardRange(0, 0, 64), ShardRange(1, 64, 100)),
    )
    assert optimizer_shards(Plan.parse(text.format("contiguous")), elements) == (
        (ShardRange(0, 0, 256),),
        (ShardRange(1, 0, 130),),
        (ShardRange(1, 0, 100),),
    )


@pytest.mark.parametrize(("elements", "align"), [([1, 2, 3], 64), ([1, 2, 3, -1], 64), ([1, 2, 3, 4], 0)])
def test_lengths_that_do_not_fit_are_refused(elements: list[int], align: int) -> None:
    with pytest.raises(PlanError, match=f"expected 4 lengths of 0 or more, .* align {align}"):
        optimizer_shards(CUT, elements, align)


def test_parts_of_units_are_found_in_row_order() -> None:
    assert rows_by_unit(CUT, (range(2, 6),)) == ((0, range(2, 4), 0), (1, range(2), 2))
    assert rows_by_unit(CUT, (range(6, 8), range(3), range(3, 4))) == ((1, range(2, 4), 0), (0, range(4), 2))
    assert rows_by_unit(CUT, (range(8),)) == ((0, range(4), 0), (1, range(4), 4))


@pytest.mark.parametrize(
    ("micro_batch", "unit"),
    [
        ((range(4, 8),), 1),
        ((range(2), range(2, 4)), 0),
        ((range(2, 4), range(2)), None),
        ((range(3),), None),
        ((range(8),), None),
        ((range(2, 6),), None),
    ],
)
def test_a_micro_batch_is_a_unit_only_if_it_has_all_of_its_rows_in_order(
    micro_batch: tuple[range, ...], unit: int | None
) -> None:
    assert unit_of(CUT, micro_batch) == unit


@repeatable
@given(valid_plans())
def test_parts_of_units_say_of_each_row_which_unit_it_is_of(plan: Plan) -> None:
    size = plan.micro_batch_size
    for tile, number in micro_batches(plan):
        micro_batch = plan.tiles[tile].micro_batches[number]
        samples = slots_of(plan, tile, number)
        parts = rows_by_unit(plan, micro_batch)
        assert [unit * size + row for unit, rows, _ in parts for row in rows] == samples
        assert [first for _, _, first in parts] == [
            sum(len(rows) for _, rows, _ in parts[:i]) for i in range(len(parts))
        ]
        ends = [*range(0, plan.global_batch_size, size), plan.global_batch_size]
        whole = [unit for unit, pair in enumerate(pairwise(ends)) if samples == list(range(*pair))]
        assert unit_of(plan, micro_batch) == (whole[0] if whole else None)


def test_a_view_is_computed_once_per_plan() -> None:
    plan = Plan.parse(str(CUT))
    assert inputs(plan) is inputs(plan)
    assert inputs(plan) == inputs(CUT)
    assert plan == CUT
