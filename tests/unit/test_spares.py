"""Which nodes are held ready, and how the leader puts them in the place of nodes that are lost or leave."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elaunch.rendezvous.decide import MembershipSettings, View, decide, to_leave
from elaunch.rendezvous.membership import Generation, GenerationStage, NodeDoc, Worker
from elaunch.rendezvous.rules.spares import held, n_ready, placed
from tests.unit.test_decide import (
    MEMBER,
    NOTHING,
    NOW_S,
    READY,
    STARTING,
    announced,
    ask,
    node,
    repeatable,
    train,
    view,
)

SETTINGS = MembershipSettings(min_nodes=3, max_nodes=3, spares=1, window_s=0.02, lease_s=5.0)
TWO = replace(SETTINGS, spares=2)
THREE = train("a/0#0", "a/1#0", "b/0#0", "b/1#0", "c/0#0", "c/1#0")
A, B, C = (node(name, MEMBER, MEMBER) for name in "abc")
D, E = (node(name, READY, READY) for name in "de")


def spares(generation: Generation | None, *docs: NodeDoc, settings: MembershipSettings = SETTINGS) -> tuple[str, ...]:
    return held(view(generation, *docs), settings)


class TestWhoIsHeld:
    def test_as_many_nodes_as_asked_for_beyond_those_of_the_job_in_the_order_in_which_they_came(self) -> None:
        late = node("d"), node("e"), node("f")
        assert spares(THREE, A, B, C, *late) == ("d",)
        assert spares(THREE, A, B, C, *reversed(late), settings=TWO) == ("d", "e")
        assert spares(THREE, A, B, C, *late, settings=replace(SETTINGS, spares=0)) == ()

    def test_nobody_before_the_job_trains(self) -> None:
        start = Generation(1, GenerationStage.START, THREE.workers)
        assert spares(start, A, B, C, D) == spares(None, A, B, C, D) == ()

    def test_who_holds_workers_already_goes_on_doing_so(self) -> None:
        assert spares(THREE, A, B, C, node("d"), E) == ("e",)

    def test_who_leaves_or_is_sick_is_not_held(self) -> None:
        assert spares(THREE, A, B, C, node("d", draining=True), node("e", sick="GPU"), node("f")) == ("f",)

    def test_who_has_a_place_in_the_job_is_no_spare(self) -> None:
        two = train("a/0#0", "b/0#0")
        assert spares(two, A, B, D, E) == ("e",), "d joins as soon as it can"
        assert spares(THREE, A, B, D, E) == ("d",), "until it has the place of c it is one"
        assert spares(train("a/0#0", "b/0#0", "d/0#0"), A, B, D, E) == ("e",)

    def test_those_count_as_ready_that_have_a_worker_which_can_join(self) -> None:
        assert n_ready(view(THREE, A, B, C, D, E), TWO) == 2
        assert n_ready(view(THREE, A, B, C, D, node("e", STARTING)), TWO) == 1
        assert n_ready(view(THREE, A, B, C, D), replace(SETTINGS, spares=0)) == 0


class TestWhoTakesWhosePlace:
    def test_a_spare_takes_the_places_of_a_lost_node_in_the_generation_without_it(self) -> None:
        after = announced(ask(THREE, A, C, D, settings=SETTINGS))
        assert after.ids == ("a/0#0", "a/1#0", "d/0#0", "d/1#0", "c/0#0", "c/1#0")
        assert not after.hold
        assert after.aborts_step_before == after.number
        assert after.cause == "node b was lost; d/0#0, d/1#0 joins"

    def test_two_nodes_that_are_lost_at_once_are_replaced_at_once(self) -> None:
        after = announced(ask(THREE, B, D, E, settings=TWO))
        assert after.nodes == ("d", "b", "e")

    def test_without_a_ready_spare_the_others_do_not_wait_for_one(self) -> None:
        after = announced(ask(THREE, A, C, node("d", STARTING, STARTING), settings=replace(SETTINGS, min_nodes=1)))
        assert after.nodes == ("a", "c")
        assert announced(ask(THREE, A, C, node("d", STARTING), settings=SETTINGS)).hold

    def test_a_draining_node_leaves_as_a_spare_comes(self) -> None:
        after = announced(ask(THREE, A, node("b", MEMBER, MEMBER, draining=True, joined=5), C, D, settings=SETTINGS))
        assert after.nodes == ("a", "d", "c")
        assert after.leaving == ("b/0#0", "b/1#0")
        assert after.aborts_step_before == THREE.aborts_step_before, "no step is interrupted for it"

    def test_a_lost_worker_whose_node_goes_on_is_replaced_there(self) -> None:
        after = announced(ask(THREE, A, node("b", MEMBER, None), C, D, settings=SETTINGS))
        assert after.nodes == ("a", "b", "c")
        assert len(after.ids) == 5

    def test_a_spare_that_dies_as_it_takes_a_place_makes_room_for_the_next(self) -> None:
        now = train("a/0#0", "d/0#0", "c/0#0")
        docs = node("a", MEMBER), node("c", MEMBER), node("e", READY)
        assert announced(ask(now, *docs, settings=TWO)).nodes == ("a", "e", "c")

    def test_a_job_never_has_more_nodes_for_its_spares(self) -> None:
        assert ask(THREE, A, B, C, D, settings=SETTINGS).generation is None

    def test_an_exception_of_all_members_ends_the_job_though_a_spare_waits(self) -> None:
        raised = "ValueError: x (train.py:3 in step)"
        docs = [node(name, error=f"worker {name}/0#0 raised {raised}", elastic=True) for name in "abc"]
        decision = ask(train("a/0#0", "b/0#0", "c/0#0"), *docs, node("d", READY), settings=SETTINGS)
        assert decision.result is not None, decision
        assert "every worker raised the same exception" in decision.result.message

    def test_a_sick_node_of_a_job_that_cannot_spare_it_leaves_if_a_spare_is_ready(self) -> None:
        sick = node("c", MEMBER, MEMBER, sick="GPU 3")
        assert to_leave(view(THREE, A, B, sick), SETTINGS, (), NOTHING) == {}
        assert to_leave(view(THREE, A, B, sick, node("d", STARTING)), SETTINGS, (), NOTHING) == {}
        assert to_leave(view(THREE, A, B, sick, D), SETTINGS, (), NOTHING) == {"c": "GPU 3"}

    def test_of_two_sick_nodes_one_leaves_for_each_spare(self) -> None:
        docs = A, node("b", MEMBER, MEMBER, sick="GPU 1"), node("c", MEMBER, MEMBER, sick="GPU 2")
        assert to_leave(view(THREE, *docs, D), SETTINGS, (), NOTHING) == {"c": "GPU 2"}
        assert to_leave(view(THREE, *docs, D, E), TWO, (), NOTHING).keys() == {"b", "c"}


def workers(*nodes: str, slots: int = 2) -> tuple[Worker, ...]:
    return tuple(Worker(f"{name}/{rank}#0", name, rank) for name in nodes for rank in range(slots))


class TestPlaces:
    def test_workers_take_the_places_of_their_local_rank(self) -> None:
        before = (*workers("a"), *reversed(workers("b")))
        assert placed(before, workers("a"), workers("d")) == (*workers("a"), *reversed(workers("d")))

    def test_more_workers_than_there_were_come_last(self) -> None:
        after = placed(workers("a", "b", slots=1), workers("b", slots=1), workers("d", slots=3))
        assert [one.id for one in after] == ["d/0#0", "b/0#0", "d/1#0", "d/2#0"]

    def test_a_joiner_without_a_place_comes_last(self) -> None:
        before = workers("a", "b")
        assert placed(before, before, workers("d")) == (*before, *workers("d"))
        lost = before[1:]
        back = Worker("a/0#1", "a", 0)
        assert placed(before, lost, (back,)) == (*lost, back), "its node never went"

    def test_a_node_that_is_back_takes_its_own_places(self) -> None:
        back = replace(workers("b", slots=1)[0], id="b/0#7")
        after = placed(workers("a", "b", "c", slots=1), workers("c", slots=1), (*workers("d", slots=1), back))
        assert [one.id for one in after] == ["d/0#0", "b/0#7", "c/0#0"]

    @repeatable
    @given(st.data())
    def test_nobody_is_lost_or_counted_twice_and_whole_nodes_keep_the_ranks_of_those_they_stand_in_for(
        self, data: st.DataObject
    ) -> None:
        names = [f"n{number}" for number in range(data.draw(st.integers(1, 5)))]
        slots = data.draw(st.integers(1, 3))
        before = tuple(data.draw(st.permutations(workers(*names, slots=slots))))
        gone = data.draw(st.sets(st.sampled_from(names)))
        fresh = [f"s{number}" for number in range(data.draw(st.integers(0, 4)))]
        survivors = tuple(one for one in before if one.node not in gone)
        joiners = workers(*fresh, slots=slots)
        after = placed(before, survivors, joiners)
        assert sorted(one.id for one in after) == sorted(one.id for one in (*survivors, *joiners))
        assert [one for one in after if one in survivors] == list(survivors)
        if len(fresh) == len(gone):
            moved = {place: rank for rank, place in enumerate(after)}
            assert all(moved[one] == rank for rank, one in enumerate(before) if one.node not in gone)
            heirs = {one.node: after[rank].node for rank, one in enumerate(before) if one.node in gone}
            assert sorted(heirs.values()) == fresh
            assert all(
                (after[rank].node, after[rank].local_rank) == (heirs[one.node], one.local_rank)
                for rank, one in enumerate(before)
                if one.node in gone
            )


def test_the_rule_wakes_for_a_spare_as_for_anybody() -> None:
    """Two losses within the window make one generation, which has both spares."""
    waits = decide(View((A, B, D, E), THREE, pending_s=None), NOW_S, TWO)
    assert waits.pending
    assert announced(decide(View((A, D, E), THREE, pending_s=NOW_S - 0.03), NOW_S, TWO)).nodes == ("a", "d", "e")
