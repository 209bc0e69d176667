"""Which nodes are held ready, and how the leader puts them in the place of nodes that are lost or leave."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.decide import MembershipSettings, View, decide, to_leave
from elaunch.rendezvous.membership import Generation, GenerationStage, NodeDoc, Worker, node_of
from elaunch.rendezvous.rules.spares import all_spares, held, in_order, n_ready, placed
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

    def test_a_node_whose_workers_all_failed_keeps_no_other_from_being_a_spare(self) -> None:
        broken = node("d", failed="worker d/0#2 died")
        assert spares(THREE, A, B, C, broken, node("f")) == ("f",)
        assert spares(THREE, A, B, C, broken) == ("d",), "workers that failed as they started are tried once more"

    def test_a_node_that_has_finished_is_no_spare(self) -> None:
        """It had a place, which it lost as others still needed a generation without it."""
        assert spares(THREE, A, B, C, node("d", finished=True)) == ()

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


STATE = replace(SETTINGS, spare_state=True)
TWO_STATES = replace(TWO, spare_state=True)
D_HOLDS, E_HOLDS = (node(name, MEMBER, MEMBER) for name in "de")
FOUR = replace(train(*THREE.ids, "d/0#0", "d/1#0"), standby=("d/0#0", "d/1#0"))
FIVE = replace(train(*FOUR.ids, "e/0#0", "e/1#0"), standby=(*FOUR.standby, "e/0#0", "e/1#0"))


class TestSparesThatHoldTheState:
    def test_a_spare_joins_at_a_step_boundary_as_a_member_on_standby(self) -> None:
        after = announced(ask(THREE, A, B, C, D, settings=STATE))
        assert (after.ids, after.standby) == (FOUR.ids, FOUR.standby)
        assert after.working == THREE.ids
        assert after.aborts_step_before == THREE.aborts_step_before, "no step is interrupted for it"
        assert ask(FOUR, A, B, C, D_HOLDS, node("e", READY, READY), settings=STATE).generation is None, "one is wanted"

    def test_it_has_the_places_of_a_lost_node_in_the_generation_without_it_and_nobody_joins(self) -> None:
        after = announced(ask(FOUR, A, C, D_HOLDS, settings=STATE))
        assert after.ids == ("a/0#0", "a/1#0", "d/0#0", "d/1#0", "c/0#0", "c/1#0")
        assert (after.standby, after.hold) == ((), False)
        assert after.cause == "node b was lost; d/0#0, d/1#0 take over"

    def test_it_comes_before_one_that_joins_also_where_the_lost_node_is_back(self) -> None:
        for late in (node("e", READY, READY), node("b", READY, READY)):
            before = replace(FOUR, workers=tuple(replace(one, id=f"{one.id[:-1]}7") for one in FOUR.workers))
            before = replace(before, standby=tuple(f"{one[:-1]}7" for one in FOUR.standby))
            docs = [
                replace(doc, workers=tuple(replace(one, id=f"{one.id[:-1]}7") for one in doc.workers))
                for doc in (A, C, D_HOLDS)
            ]
            after = announced(ask(before, *docs, late, settings=STATE))
            assert after.nodes == ("a", "d", "c", late.node)
            assert {node_of(one) for one in after.standby} == {late.node}

    def test_a_node_that_drains_leaves_at_once_and_the_spare_has_its_ranks(self) -> None:
        after = announced(ask(FOUR, A, node("b", MEMBER, MEMBER, draining=True, joined=5), C, D_HOLDS, settings=STATE))
        assert (after.nodes, after.leaving, after.standby) == (("a", "d", "c"), ("b/0#0", "b/1#0"), ())
        assert after.aborts_step_before == FOUR.aborts_step_before

    def test_of_two_spares_the_first_takes_over_and_the_other_stays_the_last(self) -> None:
        after = announced(ask(FIVE, A, C, D_HOLDS, E_HOLDS, settings=TWO_STATES))
        assert (after.nodes, after.standby) == (("a", "d", "c", "e"), ("e/0#0", "e/1#0"))
        after = announced(ask(FIVE, B, D_HOLDS, E_HOLDS, settings=TWO_STATES))
        assert (after.nodes, after.standby) == (("d", "b", "e"), ())

    def test_whoever_works_keeps_rank_where_a_worker_of_the_spare_dies_and_comes_back(self) -> None:
        after = announced(ask(FOUR, A, B, C, node("d", MEMBER, None), settings=STATE))
        assert (after.working, after.standby) == (FOUR.working, ("d/0#0",))
        back = node("d", MEMBER, READY)
        again = announced(ask(after, A, B, C, back, settings=STATE))
        assert (again.working, again.standby) == (FOUR.working, FOUR.standby)

    def test_a_worker_that_comes_back_to_its_node_works_before_the_spare(self) -> None:
        without = announced(ask(FOUR, A, node("b", MEMBER, None), C, D_HOLDS, settings=STATE))
        assert without.nodes == ("a", "b", "c", "d"), "one of b works on, so the spare takes no place"
        again = announced(ask(without, A, node("b", MEMBER, READY), C, D_HOLDS, settings=STATE))
        assert again.ids == (*without.working, "b/1#0", *FOUR.standby)

    def test_after_a_resize_others_work(self) -> None:
        after = announced(ask(FOUR, A, B, C, D_HOLDS, settings=replace(STATE, max_nodes=4)))
        assert (after.ids, after.standby) == (FOUR.ids, ())
        fewer = replace(STATE, min_nodes=1, max_nodes=2)
        after = announced(ask(FOUR, A, B, C, D_HOLDS, settings=fewer))
        assert {node_of(one) for one in after.standby} == {"c", "d"}
        assert to_leave(view(after, A, B, C, D_HOLDS), fewer, (), NOTHING).keys() == {"d"}

    def test_the_spares_that_lead_the_job_first_leave_it(self) -> None:
        after = replace(train("c/0#0", "b/0#0", "a/0#0"), standby=("a/0#0",))
        docs = [node(name, MEMBER) for name in "abc"]
        fewer = replace(STATE, min_nodes=1, max_nodes=1)
        assert to_leave(view(after, *docs), fewer, (), NOTHING).keys() == {"a"}

    def test_those_on_standby_are_spares_and_make_room_for_no_more(self) -> None:
        assert all_spares(view(FOUR, A, B, C, D_HOLDS, node("e")), TWO_STATES) == ("d", "e")
        assert all_spares(view(FIVE, A, B, C, D_HOLDS, E_HOLDS, node("f")), TWO_STATES) == ("d", "e")

    def test_a_sick_node_leaves_for_a_spare_on_standby_and_a_sick_spare_itself(self) -> None:
        sick = node("c", MEMBER, MEMBER, sick="GPU 3")
        assert to_leave(view(FOUR, A, B, sick, D_HOLDS), STATE, (), NOTHING) == {"c": "GPU 3"}
        sick = node("d", MEMBER, MEMBER, sick="GPU 3")
        assert to_leave(view(FOUR, A, B, C, sick), STATE, (), NOTHING) == {"d": "GPU 3"}

    def test_documents_without_it_can_be_read(self) -> None:
        assert from_json(Generation, to_json(FOUR)) == FOUR
        assert from_json(Generation, to_json(FOUR).replace(b',"standby":["d/0#0","d/1#0"]', b"")).standby == ()

    @repeatable
    @given(st.data())
    def test_whole_nodes_are_on_standby_and_none_while_a_place_is_empty(self, data: st.DataObject) -> None:
        settings = MembershipSettings(
            max_nodes=data.draw(st.integers(1, 3)), spares=data.draw(st.integers(0, 2)), spare_state=True
        )
        n_nodes, slots = data.draw(st.integers(1, settings.most_nodes)), data.draw(st.integers(1, 2))
        names = [f"n{number}" for number in range(n_nodes)]
        before, standby = in_order(workers(*names, slots=slots), settings)
        gone = data.draw(st.sets(st.sampled_from(names)))
        fresh = [f"s{number}" for number in range(data.draw(st.integers(0, settings.most_nodes - n_nodes + len(gone))))]
        fresh += (
            sorted(gone)[: settings.most_nodes - (n_nodes - len(gone)) - len(fresh)] if data.draw(st.booleans()) else []
        )
        joiners = tuple(replace(one, id=one.id.replace("#0", "#1")) for one in workers(*fresh, slots=slots))
        survivors = tuple(one for one in before if one.node not in gone)
        after, idle = in_order(placed(before, survivors, joiners, standby), settings)
        assert sorted(one.id for one in after) == sorted(one.id for one in (*survivors, *joiners))
        assert idle == tuple(one.id for one in after)[len(after) - len(idle) :], "they are last"
        working = list(dict.fromkeys(one.node for one in after if one.id not in idle))
        assert not set(working) & {node_of(one) for one in idle}, "whole nodes"
        total = len({one.node for one in after})
        assert len(working) == min(total, settings.max_nodes), "no place is empty while somebody is on standby"
        stood_by = [node for node in dict.fromkeys(map(node_of, standby)) if node not in gone]
        waiting = {node_of(one) for one in idle}
        newly = [name for name in working if name in fresh]
        assert not newly or not waiting & set(stood_by), "who has the state comes first"
        n_lost = sum(name in gone for name in dict.fromkeys(one.node for one in before if one.id not in standby))
        if len(stood_by) >= n_lost:
            ranks = {one.id: rank for rank, one in enumerate(after)}
            assert all(
                ranks[one.id] == rank
                for rank, one in enumerate(before)
                if one.id not in standby and one.node not in gone
            ), "whoever works on keeps the rank"
        assert in_order(placed(after, after, (), idle), settings) == (after, idle), "nothing is left to change"


def test_the_rule_wakes_for_a_spare_as_for_anybody() -> None:
    """Two losses within the window make one generation, which has both spares."""
    waits = decide(View((A, B, D, E), THREE, pending_s=None), NOW_S, TWO)
    assert waits.pending
    assert announced(decide(View((A, D, E), THREE, pending_s=NOW_S - 0.03), NOW_S, TWO)).nodes == ("a", "d", "e")
