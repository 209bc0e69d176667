"""A job whose membership changes again and again without a step: who is replaced, and when the job ends."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.rendezvous.decide import LeaderDecision, MembershipSettings, View, decide
from elaunch.rendezvous.membership import (
    BrokenLink,
    Generation,
    GenerationStage,
    NodeDoc,
    NodeWorker,
    Streak,
    Worker,
    WorkerState,
    node_of,
)
from elaunch.rendezvous.rules.escalate import (
    DEATHS_OF_A_SLOT,
    GIVE_UP_AFTER,
    LINKS_KEPT,
    REPLACE_AFTER,
    follow,
    suspect,
    why_given_up,
)
from tests.helpers import scaled
from tests.simulation.control_world import World
from tests.simulation.test_control_simulation import make_case, simulate
from tests.unit.documents import changed_report

MEMBERS = ("a/0#0", "a/1#0", "b/0#0", "b/1#0")


def generation(*ids: str, **fields: object) -> Generation:
    workers = tuple(Worker(one, node_of(one), 0) for one in ids or MEMBERS)
    return replace(Generation(5, GenerationStage.TRAIN, workers, aborts_step_before=5, begun=True), **fields)  # type: ignore[arg-type]


def links(*pairs: str) -> tuple[BrokenLink, ...]:
    return tuple(BrokenLink(*pair.split()) for pair in pairs)


def doc(name: str, *workers: str, state: WorkerState = WorkerState.MEMBER, **fields: object) -> NodeDoc:
    listed = tuple(NodeWorker(one, slot, state, "h:1") for slot, one in enumerate(workers))
    made = NodeDoc(name, name, 2, listed, order=ord(name))
    return changed_report(made, **{"elastic": True, "took_part": True, "generation": 5, **fields})


def decided(present: Generation, *docs: NodeDoc, min_nodes: int = 1) -> LeaderDecision:
    return decide(View(docs, present, pending_s=0.0), 100.0, MembershipSettings(min_nodes, 2))


class TestTheCount:
    def test_it_grows_with_each_urgent_generation_and_begins_anew_after_a_commit(self) -> None:
        streak = follow(generation(), [], reset=True)
        assert streak == Streak(1, 1, 4)
        streak = follow(generation(streak=streak), [doc("a", committed=4)], reset=False)
        assert streak == Streak(2, 1, 4)
        assert follow(generation(streak=streak), [doc("a", committed=5)], reset=True) == Streak(1, 1, 4)

    def test_a_commit_counts_in_planned_generations_after_the_urgent_one_too(self) -> None:
        later = generation(number=7, streak=Streak(3, 3))
        assert follow(later, [doc("a", committed=6)], reset=True).urgent == 1

    def test_while_the_job_holds_nothing_could_commit(self) -> None:
        assert follow(generation(hold=True, streak=Streak(2, 1)), [], reset=True) == Streak(2, 1)

    def test_links_are_remembered_over_generations_once_each_and_not_without_bound(self) -> None:
        streak = follow(generation(), [doc("a", broken=links("a/0#0 b/0#0", "a/0#0 x/0#0"))], reset=True)
        again = follow(generation(streak=streak), [doc("b", broken=links("b/0#0 a/1#0", "a/0#0 b/0#0"))], reset=True)
        assert again.broken == links("a/0#0 b/0#0", "b/0#0 a/1#0")
        many = tuple(BrokenLink(f"n/{n}#0", "a/0#0") for n in range(2 * LINKS_KEPT))
        assert len(follow(generation(streak=Streak(broken=many)), [], reset=True).broken) == LINKS_KEPT


class TestWhoIsReplaced:
    def test_the_worker_to_which_links_from_most_others_fail(self) -> None:
        broken = links("a/1#0 a/0#0", "b/0#0 a/0#0", "a/0#0 b/1#0", "b/0#0 b/1#0")
        assert suspect(Streak(3, REPLACE_AFTER, 4, broken), MEMBERS, MEMBERS) == "a/0#0"

    def test_the_former_incarnations_of_a_peer_count_against_the_one_that_stayed(self) -> None:
        broken = links("a/0#0 b/0#0", "a/0#0 b/0#1")
        assert suspect(Streak(6, 2 * REPLACE_AFTER, 4, broken), ("a/0#0", "a/1#0", "b/0#1"), ("a/1#0",)) == "a/0#0"

    def test_of_equals_the_last(self) -> None:
        assert suspect(Streak(3, REPLACE_AFTER, 4, links("b/0#0 a/0#0")), MEMBERS, MEMBERS) == "b/0#0"

    def test_of_equals_one_whose_node_is_silent(self) -> None:
        """The links of its peers fail to each other, too, while they cannot reach it."""
        members = ("a/0#0", "b/0#0", "c/0#0")
        broken = links("b/0#0 a/0#0", "c/0#0 a/0#0", "c/0#0 b/0#0")
        assert suspect(Streak(3, REPLACE_AFTER, 3, broken), members, members[1:], ("c/0#0",)) == "a/0#0"

    @pytest.mark.parametrize("resets", [0, 1, REPLACE_AFTER - 1, REPLACE_AFTER + 1])
    def test_nobody_at_other_times(self, resets: int) -> None:
        assert suspect(Streak(9, resets, 4, links("b/0#0 a/0#0")), MEMBERS, MEMBERS) == ""

    def test_never_the_only_holder_of_the_state(self) -> None:
        broken = links("a/0#0 b/0#0", "a/0#0 b/1#0", "a/0#0 a/1#0")
        assert suspect(Streak(3, REPLACE_AFTER, 4, broken), MEMBERS, ("a/0#0",)) == "b/1#0"
        assert suspect(Streak(3, REPLACE_AFTER, 1, broken), ("a/0#0",), ("a/0#0",)) == ""

    def test_nor_the_only_holder_of_whom_anything_was_heard_lately_where_somebody_else_could_go(self) -> None:
        """The machine of the other one may be lost, and its lease has not run out yet."""
        members, holders = ("a/0#0", "c/0#0", "b/0#1"), ("a/0#0", "c/0#0")
        streak = Streak(6, 2 * REPLACE_AFTER, 4, links("a/0#0 b/0#0", "a/0#0 b/0#1"))
        assert suspect(streak, members, holders, ("a/0#0",)) == "b/0#1"
        assert suspect(streak, members, holders, holders) == "a/0#0"
        assert suspect(streak, members[:2], holders, ("a/0#0",)) == "a/0#0", "only its links have failed"

    @settings(deadline=None, derandomize=True)
    @given(
        st.lists(st.tuples(st.sampled_from(MEMBERS), st.sampled_from(MEMBERS)), max_size=8),
        st.sets(st.sampled_from(MEMBERS)),
    )
    def test_whoever_goes_a_holder_stays_and_its_links_had_failed(
        self, pairs: list[tuple[str, str]], holders: set[str]
    ) -> None:
        streak = Streak(3, REPLACE_AFTER, 4, tuple(BrokenLink(*pair) for pair in pairs))
        gone = suspect(streak, MEMBERS, holders)
        if gone:
            assert (holders or set(MEMBERS)) - {gone}
            assert any(gone in pair for pair in pairs)


class TestTheLeadersRule:
    def docs(self, **fields: object) -> tuple[NodeDoc, NodeDoc]:
        first = doc("a", *MEMBERS[:2], reset_generation=5, broken=links("a/1#0 a/0#0"))
        return changed_report(first, **fields), doc("b", *MEMBERS[2:])

    def test_the_third_reset_in_a_row_goes_on_without_the_suspect(self) -> None:
        present = generation(streak=Streak(2, 2, 4, links("b/0#0 a/0#0")))
        after = decided(present, *self.docs()).generation
        assert after is not None
        assert after.ids == MEMBERS[1:]
        assert after.aborts_step_before == after.number
        assert after.streak.replaced == ("a/0#0",)
        assert after.cause == (
            "links to worker a/0#0 failed 3 times in a row, and no step has committed: it is replaced"
        )

    def test_nobody_is_replaced_once_some_have_finished(self) -> None:
        """All steps have committed, and the links to those that have finished end with them."""
        present = generation(streak=Streak(2, 2, 4, links("b/0#0 a/0#0")))
        first, second = self.docs()
        done = replace(second.workers[1], state=WorkerState.DONE)
        after = decided(present, first, replace(second, workers=(second.workers[0], done))).generation
        assert after is not None
        assert set(MEMBERS[:3]) <= set(after.ids)
        assert after.streak.replaced == ()

    @pytest.mark.parametrize(("heard", "gone"), [(4, "b/0#1"), (5, "a/0#0")])
    def test_a_holder_that_has_not_heard_of_the_links_may_be_lost(self, heard: int, gone: str) -> None:
        failed = links("a/0#0 b/0#0", "a/0#0 b/0#1")
        present = generation("a/0#0", "c/0#0", "b/0#1", streak=Streak(5, 5, 4, failed))
        joiner = doc("b", "b/0#1", state=WorkerState.READY, reset_generation=5, broken=failed[1:])
        after = decided(present, doc("a", "a/0#0"), joiner, doc("c", "c/0#0", generation=heard)).generation
        assert after is not None
        assert after.streak.replaced == (gone,)

    def test_a_commit_in_between_makes_it_the_first_again(self) -> None:
        present = generation(streak=Streak(2, 2, 4, links("b/0#0 a/0#0")))
        after = decided(present, *self.docs(committed=5)).generation
        assert after is not None
        assert (after.ids, after.streak.resets) == (MEMBERS, 1)

    def test_the_replaced_worker_does_not_join_again_while_its_agent_has_still_to_end_it(self) -> None:
        ready = NodeWorker("a/0#0", 0, WorkerState.READY, "h:1")
        node = doc("a", "a/1#0", workers=(ready, NodeWorker("a/1#0", 1, WorkerState.MEMBER, "h:2")))
        present = generation("a/1#0", streak=Streak(3, 3, 2, (), ("a/0#0",)))
        assert decided(present, node).generation is None

    def test_without_the_suspect_the_job_may_have_to_wait_for_nodes(self) -> None:
        present = generation("a/0#0", "b/0#0", streak=Streak(2, 2, 2))
        docs = doc("a", "a/0#0", reset_generation=5, broken=links("a/0#0 b/0#0")), doc("b", "b/0#0")
        after = decided(present, *docs, min_nodes=2).generation
        assert after is not None
        assert (after.ids, after.hold) == (("a/0#0",), True)

    @pytest.mark.parametrize("saved", [None, 300])
    def test_the_job_ends_at_last_and_says_what_was_tried(self, saved: int | None) -> None:
        present = generation(streak=Streak(12, GIVE_UP_AFTER, 4, links("b/0#0 a/0#0"), ("c/0#0", "c/0#1")))
        result = decided(present, *self.docs(saved=saved)).result
        assert result is not None
        assert not result.succeeded
        assert "no step has committed in 13 changes" in result.message
        assert "made anew 11 times (they failed between a/0#0 and b/0#0, a/0#0 and a/1#0)" in result.message
        assert "c/0#0, c/0#1 replaced in vain" in result.message
        advice = "from your last checkpoint" if saved is None else "a checkpoint of 300 steps: start the job again"
        assert advice in result.message

    def test_workers_that_die_one_after_the_other_end_no_job_that_has_many(self) -> None:
        assert why_given_up(Streak(GIVE_UP_AFTER + DEATHS_OF_A_SLOT * 100, 0, 100), None) == ""
        assert why_given_up(Streak(GIVE_UP_AFTER + DEATHS_OF_A_SLOT * 100 + 1, 0, 100), None) != ""


def cursed(kind: str, seed: int) -> World:
    """A job of four workers in which links to one of them, or between two slots, fail from some time on for ever."""
    case = replace(make_case(seed), nodes=2, slots=2, min_nodes=1, max_nodes=2, max_restarts=None, elastic=True)

    def curse(world: World) -> None:
        members = sorted(worker.id for worker in world.workers.values() if worker.alive)
        if kind == "pair":
            world.cursed.add(frozenset(world.rng.sample(["n0/0", "n0/1", "n1/0", "n1/1"], 2)))
        else:
            {"sick": world.sick, "deaf": world.deaf}[kind].add(world.rng.choice(members))
        world.linked.clear()
        for worker in world.workers.values():
            worker.broken_links.update(frozenset((worker.id, one)) for one in members if kind == "deaf")
        world.look_around_all()

    return simulate(replace(case, faults=0, steps=1000), curse)


@pytest.mark.parametrize("kind", ["sick", "deaf", "pair"])
def test_links_that_fail_for_ever_stop_a_job_for_a_bounded_time(kind: str) -> None:
    for seed in range(scaled(15, 30)):
        world = cursed(kind, seed)
        assert world.store.result is None
        assert max(one.streak.resets for one in world.store.announced) <= 2 * REPLACE_AFTER
