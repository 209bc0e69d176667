"""Who takes over what when members are lost, and when others come."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from elaunch.workers.plan import Plan, symmetric
from elaunch.workers.policy.takeover import take_over
from tests.unit.plan_strategies import valid_plans

W = ["n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0"]
HOME = symmetric(W, 4, 12, 2, dp=2, pp=2)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whoever_is_lost_and_whoever_comes_the_plan_does_everything_once(data: DataObject) -> None:
    home = data.draw(valid_plans(tp=(1, 2)))
    left = data.draw(st.lists(st.sampled_from(home.workers), unique=True))
    come = [f"n9/{number}#0" for number in range(data.draw(st.integers(0 if left else 1, 3)))]
    members = data.draw(st.permutations([*left, *come]))
    found = take_over(home, members)
    found.plan.validate(members)
    found.home.validate()
    assert (found.plan.n_layers, found.plan.global_batch_size) == (home.n_layers, home.global_batch_size)
    if found.policy != "reparallelize":
        # Who stays keeps its layers.
        for worker in left:
            before = {(tile.layers, tile.workers.index(worker)) for tile in home.tiles if worker in tile.workers}
            now = {(tile.layers, tile.workers.index(worker)) for tile in found.plan.tiles if worker in tile.workers}
            assert now <= before or worker in home.idle


def test_same_layer_peers_take_the_micro_batches_of_a_lost_worker() -> None:
    found = take_over(HOME, [W[0], W[2], W[3]])
    assert found.policy == "reroute"
    assert found.reason == "same-layer peers do the micro-batches of n0/1#0"
    assert found.plan == Plan.parse(
        "plan layers 4 batch 12 micro-batch 2 zero interleaved\n"
        "layers 0:2 slots 0:12/2 workers n0/0#0\n"
        "layers 2:4 slots 0:6/2 workers n1/0#0\n"
        "layers 2:4 slots 6:12/2 workers n1/1#0"
    )
    assert found.home == HOME


def test_who_comes_takes_the_place_that_was_lost() -> None:
    found = take_over(HOME, [W[0], W[2], W[3], "n0/1#1"])
    assert found.policy == "stay"
    assert found.plan == found.home == HOME.renamed({**{one: one for one in W}, W[1]: "n0/1#1"})
    more = take_over(found.home, [*found.home.workers, "n2/0#0"])
    assert more.plan.idle == ("n2/0#0",)


def test_where_nobody_else_has_the_layers_one_pipeline_does_all() -> None:
    found = take_over(HOME, [W[0], W[1], "n9/0#0"])
    assert found.policy == "reroute"  # the newcomer has a place of the second stage
    found = take_over(HOME, [W[0], W[1]])
    assert found.policy == "reparallelize"
    assert [tile.workers for tile in found.plan.tiles] == [(W[0],), (W[1],)]
    # As soon as there are enough again, everybody has its place.
    assert take_over(found.home, [W[0], W[1], "x/0#0", "x/1#0"]).policy == "stay"
