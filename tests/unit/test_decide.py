"""The leader's rule, a sentence for each part of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elaunch.rendezvous.decide import LeaderDecision, MembershipSettings, View, decide, surplus, to_leave
from elaunch.rendezvous.membership import (
    BrokenLink,
    Cut,
    Departure,
    Generation,
    GenerationStage,
    Master,
    NodeDoc,
    NodeWorker,
    PlanRequest,
    RequestedPlan,
    Restarts,
    Result,
    Streak,
    Worker,
    WorkerState,
)
from elaunch.rendezvous.rules.attempts import RESUMES
from elaunch.rendezvous.rules.connectivity import apart
from elaunch.rendezvous.rules.sick import sick_to_leave
from elaunch.rendezvous.view import next_generation
from tests.helpers import scaled
from tests.unit.documents import changed_report

STARTING, READY, MEMBER, DONE = WorkerState
NOW_S = 1000.0
SETTINGS = MembershipSettings(
    min_nodes=1, max_nodes=2, last_call_s=2.0, join_s=600.0, window_s=0.02, attach_s=10.0, ready_s=30.0, lease_s=5.0
)

NOTHING = LeaderDecision("nothing has changed")

repeatable = settings(deadline=None, derandomize=True)


def node(name: str, *states: WorkerState | None, incarnation: int = 0, **fields: Any) -> NodeDoc:
    """A node's report; one worker for each state, None for an empty slot. Nodes are ordered by their letter."""
    workers = tuple(
        NodeWorker(f"{name}/{slot}#{incarnation}", slot, state, f"{name}:{slot}")
        for slot, state in enumerate(states)
        if state is not None
    )
    values: dict[str, Any] = {
        "port": 7,
        "order": ord(name),
        "elastic": any(states),
        "generation": 1,
        "took_part": True,
        **fields,
    }
    return changed_report(NodeDoc(name, f"host-{name}", max(1, len(states)), workers), **values)


def member(identity: str) -> Worker:
    name, _, rest = identity.partition("/")
    slot = int(rest.partition("#")[0])
    return Worker(identity, name, slot, f"{name}:{slot}")


def train(*ids: str, **fields: Any) -> Generation:
    values: dict[str, Any] = {"number": 5, "aborts_step_before": 3, "begun": True, **fields}
    return Generation(stage=GenerationStage.TRAIN, workers=tuple(member(identity) for identity in ids), **values)


def start(*nodes: str, **fields: Any) -> Generation:
    workers = tuple(Worker(f"{name}/0", name, 0) for name in nodes)
    return Generation(**{"number": 1, "stage": GenerationStage.START, "workers": workers, **fields})


def view(generation: Generation | None, *nodes: NodeDoc, **fields: Any) -> View:
    """Everything is long past, and the window for further changes has closed, unless the fields say otherwise."""
    return View(**{"nodes": nodes, "generation": generation, "pending_s": NOW_S - 1, **fields})


def ask(
    generation: Generation | None, *nodes: NodeDoc, settings: MembershipSettings = SETTINGS, **fields: Any
) -> LeaderDecision:
    return decide(view(generation, *nodes, **fields), NOW_S, settings)


def announced(decision: LeaderDecision) -> Generation:
    assert decision.generation is not None, decision.reason
    assert decision.result is None
    return decision.generation


def ended(decision: LeaderDecision) -> Result:
    assert decision.result is not None, decision.reason
    assert decision.generation is None
    return decision.result


def assert_waits(decision: LeaderDecision, until_s: float | None = None) -> None:
    assert decision.generation is None
    assert decision.result is None
    assert decision.wake_s == until_s


class TestAssembly:
    def test_the_maximum_of_nodes_starts_at_once(self) -> None:
        first = announced(ask(None, node("a", generation=0), node("b", generation=0), changed_s=NOW_S))
        assert (first.number, first.stage, first.cause, first.attempt) == (1, GenerationStage.START, "start", 0)
        assert first.ids == ("a/0", "b/0")
        assert first.master == Master("host-a", 7)

    def test_fewer_nodes_wait_for_the_last_call_and_then_start(self) -> None:
        assert_waits(ask(None, node("a"), changed_s=NOW_S - 1.5), until_s=NOW_S + 0.5)
        assert announced(ask(None, node("a"), changed_s=NOW_S - 2.0)).nodes == ("a",)

    def test_each_node_that_comes_begins_the_last_call_anew(self) -> None:
        three = replace(SETTINGS, max_nodes=3)
        assert_waits(ask(None, node("a"), node("b"), changed_s=NOW_S, settings=three), until_s=NOW_S + 2.0)

    def test_too_few_nodes_wait_for_the_join_time_and_then_fail_with_the_numbers(self) -> None:
        two = replace(SETTINGS, min_nodes=2)
        assert_waits(ask(None, node("a"), led_s=NOW_S - 599, settings=two), until_s=NOW_S + 1)
        result = ended(ask(None, node("a"), led_s=NOW_S - 600, settings=two))
        assert not result.succeeded
        assert result.message == (
            "only 1 of at least 2 nodes are here after 600 s; start more nodes, or raise --rdzv-conf join_timeout"
        )

    def test_ranks_follow_the_order_in_which_nodes_joined_then_the_slots(self) -> None:
        late = replace(node("a", None, None), order=9)
        early = replace(node("b", None, None), order=3)
        assert announced(ask(None, late, early)).ids == ("b/0", "b/1", "a/0", "a/1")

    def test_nodes_above_the_maximum_are_left_out(self) -> None:
        assert announced(ask(None, node("a"), node("b"), node("c"))).nodes == ("a", "b")

    def test_a_draining_node_is_left_out(self) -> None:
        assert announced(ask(None, node("a", draining=True), node("b"))).nodes == ("b",)

    def test_a_job_that_a_worker_has_abandoned_ends_whatever_could_be_restarted(self) -> None:
        docs = [node("a", WorkerState.MEMBER, abandoned="replicas differ", saved=40), node("b", WorkerState.MEMBER)]
        assert ended(ask(train("a/0#0", "b/0#0"), *docs)) == Result(False, "replicas differ")
        assert ended(ask(start("a", "b"), *docs)) == Result(False, "replicas differ")
        # What a worker of a former attempt said, or one of a node that is not of the job, does not count.
        assert_waits(ask(train("b/0#0"), *docs))
        assert_waits(ask(train("a/0#0", "b/0#0", attempt=1), node("a", WorkerState.MEMBER, abandoned="x"), docs[1]))

    def test_a_new_attempt_waits_until_each_node_has_ended_its_workers(self) -> None:
        again = Generation(
            4, GenerationStage.ASSEMBLE, attempt=2, restarts=Restarts(1), cause="worker x died", cause_t=8.0
        )
        assert_waits(ask(again, node("a", attempt=2), node("b", attempt=1)))
        restarted = announced(ask(again, node("a", attempt=2), node("b", attempt=2)))
        assert (restarted.number, restarted.stage, restarted.attempt) == (5, GenerationStage.START, 2)
        assert restarted.restarts == Restarts(1)
        assert (restarted.cause, restarted.cause_t) == ("worker x died", 8.0)

    def test_a_new_attempt_has_no_last_call(self) -> None:
        again = Generation(4, GenerationStage.ASSEMBLE, attempt=1)
        assert announced(ask(again, node("a", attempt=1), changed_s=NOW_S)).nodes == ("a",)


class TestPlainScripts:
    """No worker has called elaunch.init()."""

    def fail(self, restarts: int, max_restarts: int | None, **fields: Any) -> LeaderDecision:
        docs = node("a"), node("b", failed="worker b/0#0 exited with code 3", cause_t=9.0, **fields)
        settings = replace(SETTINGS, max_restarts=max_restarts)
        return ask(start("a", "b", restarts=Restarts(restarts)), *docs, settings=settings)

    def test_running_workers_are_left_alone(self) -> None:
        assert_waits(ask(start("a", "b"), node("a"), node("b")))

    def test_a_failure_restarts_the_whole_and_is_counted(self) -> None:
        again = announced(self.fail(restarts=1, max_restarts=2))
        assert (again.number, again.stage, again.attempt, again.restarts.count) == (2, GenerationStage.ASSEMBLE, 1, 2)
        assert (again.cause, again.cause_t) == ("worker b/0#0 exited with code 3", 9.0)

    def test_when_restarts_are_used_up_the_job_fails_and_says_how_many_there_were(self) -> None:
        assert ended(self.fail(2, 2)) == Result(False, "worker b/0#0 exited with code 3 (after 2 of 2 restarts)")
        assert ended(self.fail(0, None)).message.endswith("(after 0 of 0 restarts)")

    def test_the_first_of_several_failures_is_the_cause(self) -> None:
        docs = node("a", failed="late", cause_t=9.5), node("b", failed="early", cause_t=9.0)
        assert announced(ask(start("a", "b"), *docs, settings=replace(SETTINGS, max_restarts=1))).cause == "early"

    def test_a_failure_of_a_former_attempt_counts_no_more(self) -> None:
        docs = node("a", attempt=1), node("b", attempt=0, failed="old")
        assert_waits(ask(start("a", "b", attempt=1), *docs))

    def test_a_lost_node_restarts_the_whole(self) -> None:
        again = announced(ask(start("a", "b"), node("a"), settings=replace(SETTINGS, max_restarts=1)))
        assert (again.stage, again.restarts.count, again.cause) == (GenerationStage.ASSEMBLE, 1, "node b was lost")

    def test_a_new_node_restarts_the_whole_for_free_once_the_script_had_time_to_attach(self) -> None:
        docs = node("a"), node("b")
        assert_waits(ask(start("a"), *docs, generation_s=NOW_S - 9), until_s=NOW_S + 1)
        again = announced(ask(start("a", restarts=Restarts(1)), *docs, generation_s=NOW_S - 10))
        assert (again.stage, again.restarts.count, again.cause) == (GenerationStage.ASSEMBLE, 1, "node b joins")

    def test_a_new_node_waits_where_the_job_is_full_or_some_node_has_finished(self) -> None:
        assert_waits(ask(start("a"), node("a"), node("b"), settings=replace(SETTINGS, max_nodes=1)))
        two = start("a", "b")
        docs = node("a", finished=True), node("b"), node("c")
        assert_waits(ask(two, *docs, settings=replace(SETTINGS, max_nodes=3)))

    def test_a_draining_node_makes_the_others_start_again_without_it(self) -> None:
        again = announced(ask(start("a", "b"), node("a"), node("b", draining=True)))
        assert (again.stage, again.restarts.count, again.cause) == (GenerationStage.ASSEMBLE, 0, "node b leaves")

    def test_the_job_has_succeeded_when_each_node_has_finished(self) -> None:
        assert_waits(ask(start("a", "b"), node("a", finished=True), node("b")))
        assert ended(ask(start("a", "b"), node("a", finished=True), node("b", finished=True))).succeeded

    def test_nothing_is_decided_after_the_result(self) -> None:
        over = ask(start("a"), node("a", failed="x"), result=Result(True))
        assert over == LeaderDecision("the job is over")


class TestFirstStep:
    def test_all_workers_ready_begin_to_train_and_everybody_enters_at_once(self) -> None:
        first = announced(ask(start("a", "b"), node("a", READY), node("b", READY)))
        assert (first.number, first.stage, first.aborts_step_before, first.begun) == (
            2,
            GenerationStage.TRAIN,
            2,
            False,
        )
        assert first.workers == (member("a/0#0"), member("b/0#0"))

    def test_ready_workers_wait_for_those_that_start(self) -> None:
        docs = node("a", READY), node("b", STARTING)
        assert_waits(ask(start("a", "b"), *docs, changed_s=NOW_S - 29), until_s=NOW_S + 1)

    def test_and_for_nodes_that_have_not_yet_heard_of_the_start(self) -> None:
        docs = node("a", READY), node("b", generation=0)
        assert_waits(ask(start("a", "b"), *docs, changed_s=NOW_S), until_s=NOW_S + 30)

    def test_but_not_for_ever(self) -> None:
        docs = node("a", READY), node("b", STARTING)
        assert announced(ask(start("a", "b"), *docs, changed_s=NOW_S - 30)).ids == ("a/0#0",)

    def test_they_wait_for_ever_where_they_are_below_the_minimum(self) -> None:
        two = replace(SETTINGS, min_nodes=2)
        assert_waits(ask(start("a", "b"), node("a", READY), node("b", STARTING), settings=two))

    def test_a_worker_that_died_is_not_waited_for(self) -> None:
        assert announced(ask(start("a"), node("a", READY, None))).ids == ("a/0#0",)

    def test_when_every_worker_has_failed_for_good_the_job_fails_with_the_cause(self) -> None:
        result = ended(ask(start("a"), node("a", failed="worker a/0#2 died", elastic=True)))
        assert result == Result(False, "every worker failed before the first step: worker a/0#2 died")

    def test_a_failure_that_leaves_too_few_nodes_fails_the_job_instead_of_letting_the_others_wait(self) -> None:
        docs = node("a", READY), node("b", failed="worker b/0#2 died")
        result = ended(ask(start("a", "b"), *docs, settings=replace(SETTINGS, min_nodes=2)))
        assert not result.succeeded
        assert "worker b/0#2 died" in result.message

    def test_a_failure_that_leaves_enough_nodes_does_no_harm(self) -> None:
        assert announced(ask(start("a", "b"), node("a", READY), node("b", failed="x"))).ids == ("a/0#0",)

    def test_a_worker_that_is_to_be_started_again_is_waited_for(self) -> None:
        assert_waits(ask(start("a"), node("a", elastic=True), changed_s=NOW_S), until_s=NOW_S + 600)

    def test_a_node_that_came_late_replaces_a_lost_one_by_a_free_restart(self) -> None:
        two = replace(SETTINGS, min_nodes=2)
        again = announced(ask(start("a", "b"), node("a", READY), node("c"), settings=two))
        assert (again.stage, again.attempt, again.restarts.count, again.cause) == (
            GenerationStage.ASSEMBLE,
            1,
            0,
            "node c joins",
        )

    def test_too_few_nodes_fail_after_the_join_time(self) -> None:
        two = replace(SETTINGS, min_nodes=2)
        docs = node("a", READY), node("b", finished=True)
        assert_waits(ask(start("a", "b"), *docs, changed_s=NOW_S, settings=two), until_s=NOW_S + 600)
        assert not ended(ask(start("a", "b"), *docs, changed_s=NOW_S - 600, settings=two)).succeeded

    def test_workers_of_a_former_attempt_are_not_taken(self) -> None:
        docs = node("a", READY, attempt=1), node("b", READY, attempt=0)
        assert announced(ask(start("a", attempt=1), *docs)).ids == ("a/0#0",)


class TestDeaths:
    def test_a_death_waits_for_the_window_and_makes_one_urgent_generation(self) -> None:
        docs = node("a", MEMBER), node("b", None, cause="worker b/0#0 was killed by SIGKILL", cause_t=77.0)
        waits = ask(train("a/0#0", "b/0#0"), *docs, pending_s=None)
        assert_waits(waits, until_s=NOW_S + 0.02)
        assert waits.pending
        after = announced(ask(train("a/0#0", "b/0#0"), *docs, pending_s=NOW_S - 0.02))
        assert (after.number, after.aborts_step_before, after.ids) == (6, 6, ("a/0#0",))
        assert (after.cause, after.cause_t) == ("worker b/0#0 was killed by SIGKILL", 77.0)

    def test_deaths_within_one_window_make_one_generation(self) -> None:
        docs = node("a", MEMBER), node("b", None, cause="b died", cause_t=77.0), node("c", None, cause="c died")
        after = announced(ask(train("a/0#0", "b/0#0", "c/0#0"), *docs))
        assert after.ids == ("a/0#0",)
        assert after.cause == "b died; c died"

    def test_survivors_keep_their_order_and_joiners_follow(self) -> None:
        docs = (
            replace(node("a", MEMBER, READY), order=5),
            replace(node("b", None), order=1),
            replace(node("c", MEMBER), order=2),
        )
        after = announced(ask(train("c/0#0", "b/0#0", "a/0#0"), *docs))
        assert after.ids == ("c/0#0", "a/0#0", "a/1#0")

    def test_a_lost_node_takes_all_its_workers_with_it(self) -> None:
        after = announced(ask(train("a/0#0", "b/0#0", "b/1#0"), node("a", MEMBER)))
        assert (after.ids, after.aborts_step_before, after.cause) == (("a/0#0",), 6, "node b was lost")

    def test_process_groups_meet_at_a_node_that_goes_on_and_at_the_same_one_as_long_as_it_does(self) -> None:
        now = train("a/0#0", "b/0#0", "c/0#0", master=Master("host-a", 7))
        assert announced(ask(now, node("b", MEMBER), node("c", MEMBER))).master == Master("host-b", 7)
        assert announced(ask(now, node("a", MEMBER), node("c", MEMBER))).master == Master("host-a", 7)

    def test_a_worker_that_its_peers_found_dead_is_lost_although_its_node_lists_it(self) -> None:
        docs = node("a", MEMBER, unreachable=("b/0#0",)), node("b", MEMBER)
        after = announced(ask(train("a/0#0", "b/0#0"), *docs))
        assert (after.ids, after.aborts_step_before, after.cause) == (("a/0#0",), 6, "worker b/0#0 cannot be reached")

    def test_a_broken_link_between_the_living_makes_an_urgent_generation_of_the_same_members(self) -> None:
        docs = node("a", MEMBER, reset_generation=5), node("b", MEMBER)
        after = announced(ask(train("a/0#0", "b/0#0"), *docs))
        assert (after.ids, after.aborts_step_before, after.cause) == (("a/0#0", "b/0#0"), 6, "a link was made anew")

    def test_the_others_hear_which_step_the_log_of_a_dead_worker_has(self) -> None:
        now = train("a/0#0", "b/0#0")
        dead = node("a", None, cause="worker a/0#0 was killed by SIGKILL", logged=8)
        after = announced(ask(now, dead, node("b", MEMBER, logged=3)))
        assert (after.ids, after.streak.logged) == (("b/0#0",), 8)
        later = announced(ask(replace(after, number=7), node("b", MEMBER), node("c", READY)))
        assert (later.ids, later.streak.logged) == (("b/0#0", "c/0#0"), 8)

    def test_logs_of_a_former_attempt_do_not_count(self) -> None:
        now = train("a/0#0", "b/0#0", attempt=1)
        docs = node("a", None, attempt=0, logged=8), node("b", MEMBER, attempt=1, logged=3)
        assert announced(ask(now, *docs)).streak.logged == 3

    def test_an_old_request_for_a_new_link_is_done_with(self) -> None:
        now = train("a/0#0", aborts_step_before=5)
        assert_waits(ask(now, node("a", MEMBER, reset_generation=4)))

    def test_a_link_that_failed_before_a_planned_generation_is_made_anew(self) -> None:
        """Whoever lost it waits in a broken step, which a planned generation does not end."""
        now = train("a/0#0", "b/0#0", aborts_step_before=3)
        after = announced(ask(now, node("a", MEMBER, reset_generation=4), node("b", MEMBER)))
        assert (after.ids, after.aborts_step_before, after.cause) == (now.ids, 6, "a link was made anew")

    def test_a_worker_that_exits_with_0_before_the_end_is_lost_like_any_other(self) -> None:
        docs = node("a", MEMBER), node("b", None, finished=True, cause="worker b/0#0 exited with code 0", cause_t=1.0)
        after = announced(ask(train("a/0#0", "b/0#0"), *docs))
        assert (after.ids, after.aborts_step_before) == (("a/0#0",), 6)

    def test_without_changes_nothing_is_decided(self) -> None:
        assert_waits(ask(train("a/0#0", "b/0#0"), node("a", MEMBER), node("b", MEMBER)))


class TestOutages:
    def test_absence_is_in_doubt_for_the_time_of_a_lease_after_an_outage(self) -> None:
        generation = train("a/0#0", "b/0#0")
        assert_waits(ask(generation, node("a", MEMBER), outage_end_s=NOW_S - 4), until_s=NOW_S + 1)
        assert announced(ask(generation, node("a", MEMBER), outage_end_s=NOW_S - 5)).ids == ("a/0#0",)

    def test_a_death_that_its_node_reports_is_never_in_doubt(self) -> None:
        docs = node("a", MEMBER), node("b", None)
        after = announced(ask(train("a/0#0", "b/0#0", "c/0#0"), *docs, outage_end_s=NOW_S))
        assert after.ids == ("a/0#0", "c/0#0")

    def test_plain_jobs_doubt_too(self) -> None:
        assert_waits(ask(start("a", "b"), node("a"), outage_end_s=NOW_S - 1))


class TestJoins:
    def test_a_ready_worker_joins_by_a_planned_generation(self) -> None:
        after = announced(ask(train("a/0#0"), node("a", MEMBER), node("b", READY)))
        assert (after.ids, after.aborts_step_before, after.cause) == (("a/0#0", "b/0#0"), 3, "b/0#0 joins")

    def test_a_joiner_that_comes_with_a_death_makes_one_urgent_generation(self) -> None:
        after = announced(ask(train("a/0#0", "b/0#0"), node("a", MEMBER), node("b", None), node("c", READY)))
        assert (after.ids, after.aborts_step_before) == (("a/0#0", "c/0#0"), 6)

    def test_a_starting_worker_is_not_taken_in(self) -> None:
        assert_waits(ask(train("a/0#0"), node("a", MEMBER), node("b", STARTING)))

    def test_a_member_that_is_not_in_the_generation_is_never_taken_in(self) -> None:
        assert_waits(ask(train("a/0#0"), node("a", MEMBER), node("b", MEMBER)))

    def test_a_ready_worker_that_a_peer_found_dead_is_not_taken_in(self) -> None:
        assert_waits(ask(train("a/0#0"), node("a", MEMBER, unreachable=("b/0#0",)), node("b", READY)))

    def test_one_that_was_a_member_and_found_dead_comes_back_when_its_node_has_heard_of_it(self) -> None:
        """The report of an agent that was killed with it says that it is ready until the lease has run out."""
        old, late = node("b", READY, generation=5), node("b", READY, generation=6)
        after = announced(ask(train("a/0#0", "b/0#0"), node("a", MEMBER, unreachable=("b/0#0",)), old))
        assert (after.ids, after.refused) == (("a/0#0",), ("b/0#0",))
        assert_waits(ask(after, node("a", MEMBER), old))
        more = announced(ask(after, node("a", MEMBER, READY), old))
        assert (more.ids, more.refused) == (("a/0#0", "a/1#0"), ("b/0#0",))
        assert announced(ask(more, node("a", MEMBER), old)).refused == ("b/0#0",)
        assert announced(ask(more, node("a", MEMBER))).refused == (), "its report has gone"
        back = announced(ask(after, node("a", MEMBER), late))
        assert (back.ids, back.refused) == (("a/0#0", "b/0#0"), ())

    def test_the_last_holder_of_the_state_is_not_lost_by_what_a_peer_says(self) -> None:
        """A joiner that cannot reach it is of no use: the holder goes on without it."""
        now, b = train("a/0#0", "b/0#0"), node("b", READY, unreachable=("a/0#0",))
        after = announced(ask(now, node("a", MEMBER), b))
        assert (after.ids, after.aborts_step_before) == (("a/0#0",), after.number)
        assert after.cause == "worker b/0#0 cannot reach a/0#0, which alone holds the state"
        assert announced(ask(now, node("a", None), b)).ids == ("b/0#0",), "its own node says that it has ended"

    def test_nor_is_one_of_several_until_another_one_says_so_too(self) -> None:
        """Else one joiner that cannot reach anybody would have all of them killed, one after the other."""
        now, b = train("a/0#0", "b/0#0", "c/0#0"), node("b", READY, unreachable=("a/0#0",))
        after = announced(ask(now, node("a", MEMBER), b, node("c", MEMBER)))
        assert (after.ids, after.cause) == (
            ("a/0#0", "c/0#0"),
            "worker b/0#0 cannot reach a/0#0, which holds the state",
        )
        says = node("c", MEMBER, unreachable=("a/0#0",))
        assert announced(ask(now, node("a", MEMBER), b, says)).ids == ("b/0#0", "c/0#0")
        told = train("a/0#0", "d/0#0", leaving=("c/0#0",))
        assert "a/0#0" not in announced(ask(told, node("a", MEMBER), says, node("d", MEMBER))).ids, "it is to leave"

    def test_holders_that_find_each_other_dead_live_and_try_again(self) -> None:
        now = train("a/0#0", "b/0#0")
        docs = [node("a", MEMBER, unreachable=("b/0#0",), generation=5)]
        assert announced(ask(now, *docs, node("b", MEMBER))).ids == ("a/0#0",)
        docs.append(node("b", MEMBER, unreachable=("a/0#0",), generation=5))
        after = announced(ask(now, *docs))
        assert (after.ids, after.aborts_step_before) == (("a/0#0", "b/0#0"), after.number)
        assert set(after.streak.broken) == {BrokenLink("a/0#0", "b/0#0"), BrokenLink("b/0#0", "a/0#0")}
        assert_waits(ask(after, *docs))
        heard = [node("a", MEMBER, generation=6, unreachable=("b/0#0",)), docs[1]]
        assert announced(ask(after, *heard)).ids == ("a/0#0",), "what was said of the links before does not count"

    def test_of_those_the_one_goes_that_others_find_dead_too_and_one_that_says_nothing(self) -> None:
        now = train("a/0#0", "b/0#0", "c/0#0")
        a = node("a", MEMBER, unreachable=("b/0#0",), generation=5)
        b = node("b", MEMBER, unreachable=("a/0#0",), generation=5)
        joiner = node("c", READY, unreachable=("a/0#0",), generation=5)
        assert announced(ask(now, a, b, joiner)).ids == ("b/0#0", "c/0#0")
        both = changed_report(a, unreachable=("b/0#0", "c/0#0"))
        assert announced(ask(now, both, b, node("c", MEMBER, generation=5))).ids == ("a/0#0", "b/0#0")

    def test_a_node_above_the_maximum_stays_a_spare(self) -> None:
        docs = node("a", MEMBER), node("b", MEMBER), node("c", READY)
        assert_waits(ask(train("a/0#0", "b/0#0"), *docs))

    def test_a_spare_takes_the_place_of_a_lost_node(self) -> None:
        docs = node("a", MEMBER), node("c", READY)
        assert announced(ask(train("a/0#0", "b/0#0"), *docs)).ids == ("a/0#0", "c/0#0")

    def test_workers_of_a_former_attempt_do_not_join(self) -> None:
        docs = node("a", MEMBER, attempt=1), node("b", READY, attempt=0)
        assert_waits(ask(train("a/0#0", attempt=1), *docs))

    def test_that_some_worker_has_held_the_state_is_remembered(self) -> None:
        docs = node("a", READY), node("b", READY)
        fresh = train("a/0#0", begun=False)
        assert not announced(ask(fresh, *docs)).begun
        assert announced(ask(fresh, *docs, begun=True)).begun


class TestLeaving:
    def test_workers_of_a_draining_node_leave_by_a_planned_generation(self) -> None:
        docs = node("a", MEMBER), node("b", MEMBER, draining=True, joined=3)
        after = announced(ask(train("a/0#0", "b/0#0"), *docs))
        assert (after.ids, after.leaving, after.aborts_step_before) == (("a/0#0",), ("b/0#0",), 3)
        assert after.cause == "node b leaves"

    def test_not_before_they_have_entered_the_generation_in_which_a_member_was_lost(self) -> None:
        docs = node("a", MEMBER), node("b", MEMBER, draining=True, joined=2)
        assert_waits(ask(train("a/0#0", "b/0#0"), *docs))
        assert_waits(ask(train("a/0#0", "b/0#0"), docs[0], changed_report(docs[1], draining=False, evicted=("b/0#0",))))
        # Nobody enters a generation that holds.
        assert announced(ask(train("a/0#0", "b/0#0", hold=True), *docs)).ids == ("a/0#0",)

    def test_nor_while_somebody_joins(self) -> None:
        """Who joins may have what others had."""
        now, docs = train("a/0#0", "b/0#0", "c/0#0"), (node("a", MEMBER), node("b", MEMBER, draining=True, joined=4))
        three = replace(SETTINGS, max_nodes=3)
        assert_waits(ask(now, *docs, node("c", READY), settings=three))
        assert announced(ask(now, *docs, node("c", MEMBER), settings=three)).leaving == ("b/0#0",)

    @pytest.mark.parametrize("gone", [False, True])
    def test_with_a_death_they_stay_until_the_others_have_settled_it(self, gone: bool) -> None:
        now, a = train("a/0#0", "b/0#0", "c/0#0"), node("a", MEMBER, unreachable=("c/0#0",) if gone else ())
        b, c = node("b", MEMBER, draining=True, joined=5), node("c", MEMBER if gone else None)
        after = announced(ask(now, a, b, c))
        assert (after.ids, after.leaving, after.aborts_step_before) == (("a/0#0", "b/0#0"), (), 6)
        assert_waits(ask(after, a, b))
        then = announced(ask(after, a, changed_report(b, joined=6)))
        assert (then.ids, then.leaving, then.aborts_step_before) == (("a/0#0",), ("b/0#0",), 6)

    def test_at_a_death_they_are_taken_back(self) -> None:
        """They have not left the step that is interrupted; what only they have is still to move."""
        told = train("a/0#0", "c/0#0", leaving=("b/0#0", "d/0#0", "e/0#0"))
        # b is still there; nobody reaches d; e has left.
        b, d = node("b", MEMBER, draining=True, joined=5), node("d", MEMBER, draining=True, joined=5)
        docs = node("a", MEMBER, cut=(Cut("d", "host-d"),)), node("c", None), node("e", None, draining=True)
        after = announced(ask(told, *docs, b, d, settings=replace(SETTINGS, max_nodes=4)))
        assert (after.ids, after.leaving, after.aborts_step_before) == (("a/0#0", "b/0#0"), ("d/0#0",), 6)

    def test_the_last_ones_do_not_go_with_a_death_either(self) -> None:
        a, b = node("a", MEMBER, draining=True, joined=5), node("b", None, draining=True)
        after = announced(ask(train("a/0#0", "b/0#0"), a, b))
        assert (after.ids, after.leaving, after.aborts_step_before) == (("a/0#0",), (), 6)
        assert announced(ask(after, a)).leaving == ("a/0#0",), "they save what they have when they have entered it"

    def test_they_are_listed_as_leaving_until_they_have_left(self) -> None:
        docs = node("a", MEMBER), node("b", MEMBER, draining=True), node("c", READY)
        told = train("a/0#0", leaving=("b/0#0",))
        assert announced(ask(told, *docs)).leaving == ("b/0#0",)
        assert announced(ask(told, docs[0], docs[2])).leaving == ()

    def test_that_they_have_left_changes_nothing(self) -> None:
        assert_waits(ask(train("a/0#0", leaving=("b/0#0",)), node("a", MEMBER)))

    def test_one_that_dies_before_it_could_leave_makes_an_urgent_generation(self) -> None:
        after = announced(ask(train("a/0#0", leaving=("b/0#0",)), node("a", MEMBER, unreachable=("b/0#0",))))
        assert (after.ids, after.leaving, after.aborts_step_before) == (("a/0#0",), (), 6)
        assert after.cause == "worker b/0#0 died before it could leave"

    def test_one_that_dies_before_it_was_told_to_leave_is_lost(self) -> None:
        docs = node("a", MEMBER), node("b", None, draining=True)
        after = announced(ask(train("a/0#0", "b/0#0"), *docs))
        assert (after.ids, after.leaving, after.aborts_step_before) == (("a/0#0",), (), 6)

    def test_the_holders_of_the_state_stay_until_somebody_else_holds_it(self) -> None:
        leaving, fresh = node("a", MEMBER, draining=True, joined=5), node("b", READY)
        both = announced(ask(train("a/0#0"), leaving, fresh))
        assert (both.ids, both.leaving) == (("a/0#0", "b/0#0"), ())
        assert_waits(ask(both, leaving, fresh))
        after = announced(ask(both, leaving, node("b", MEMBER)))
        assert (after.ids, after.leaving) == (("b/0#0",), ("a/0#0",))

    def test_the_last_nodes_may_leave(self) -> None:
        last = announced(ask(train("a/0#0"), node("a", MEMBER, draining=True)))
        assert (last.ids, last.leaving, last.hold) == ((), ("a/0#0",), True)
        assert_waits(ask(last, node("a", None, draining=True)))

    def test_all_may_leave_once_those_that_came_last_have_entered(self) -> None:
        now = train("a/0#0", "b/0#0")
        a = node("a", MEMBER, draining=True, joined=5)
        assert_waits(ask(now, a, node("b", READY, draining=True)))
        assert announced(ask(now, a, node("b", MEMBER, draining=True, joined=5))).leaving == ("a/0#0", "b/0#0")


class TestHold:
    TWO = replace(SETTINGS, min_nodes=2)

    def test_below_the_minimum_the_survivors_are_told_to_wait(self) -> None:
        after = announced(ask(train("a/0#0", "b/0#0"), node("a", MEMBER), settings=self.TWO))
        assert (after.ids, after.hold, after.aborts_step_before) == (("a/0#0",), True, 6)

    def test_they_wait_for_the_join_time_and_then_the_job_fails(self) -> None:
        held = train("a/0#0", hold=True)
        assert_waits(
            ask(held, node("a", MEMBER), generation_s=NOW_S - 599, settings=self.TWO),
            until_s=NOW_S + 1,
        )
        result = ended(ask(held, node("a", MEMBER), generation_s=NOW_S - 600, settings=self.TWO))
        assert "only 1 of at least 2 nodes" in result.message

    def test_a_node_that_comes_ends_the_wait(self) -> None:
        held = train("a/0#0", hold=True)
        after = announced(ask(held, node("a", MEMBER), node("b", READY), settings=self.TWO))
        assert (after.ids, after.hold) == (("a/0#0", "b/0#0"), False)

    def test_a_node_that_only_starts_does_not(self) -> None:
        held = train("a/0#0", hold=True)
        decision = ask(held, node("a", MEMBER), node("b", STARTING), generation_s=NOW_S, settings=self.TWO)
        assert_waits(decision, until_s=NOW_S + 600)


class TestRequestsForAPlan:
    REQUEST = PlanRequest("r1", generation=5, plan="plan layers 4", t=77.0)
    MEMBERS = train("a/0#0", "b/0#0")
    DOCS = node("a", MEMBER), node("b", MEMBER)

    def test_one_for_these_members_makes_a_planned_generation_of_the_same_workers_at_once(self) -> None:
        after = announced(ask(self.MEMBERS, *self.DOCS, request=self.REQUEST, pending_s=None))
        assert after == replace(
            self.MEMBERS,
            number=6,
            cause="a new plan was asked for",
            cause_t=77.0,
            requested_plan=RequestedPlan("plan layers 4", "r1"),
        )

    def test_one_that_was_made_for_other_members_is_ignored(self) -> None:
        for generation in (4, 6):
            assert_waits(ask(self.MEMBERS, *self.DOCS, request=replace(self.REQUEST, generation=generation)))

    def test_one_that_is_carried_already_is_ignored(self) -> None:
        assert_waits(
            ask(replace(self.MEMBERS, requested_plan=RequestedPlan(request="r1")), *self.DOCS, request=self.REQUEST)
        )

    def test_the_next_one_takes_the_place_of_the_one_before(self) -> None:
        before = replace(self.MEMBERS, requested_plan=RequestedPlan("plan layers 2", "r0"))
        after = announced(ask(before, *self.DOCS, request=self.REQUEST))
        assert (after.plan, after.plan_request) == ("plan layers 4", "r1")

    def test_a_change_of_members_comes_first_and_the_request_is_void_then(self) -> None:
        docs = node("a", MEMBER), node("b", None, cause="b died")
        after = announced(ask(self.MEMBERS, *docs, request=self.REQUEST))
        assert (after.ids, after.aborts_step_before, after.plan_request) == (("a/0#0",), 6, "")
        assert_waits(ask(after, node("a", MEMBER), request=self.REQUEST))

    def test_later_generations_carry_it_on(self) -> None:
        carrying = replace(self.MEMBERS, requested_plan=RequestedPlan("plan layers 4", "r1"))
        docs = node("a", MEMBER, READY), node("b", None, cause="b died")
        after = announced(ask(carrying, *docs))
        assert after.ids == ("a/0#0", "a/1#0")
        assert (after.plan, after.plan_request) == ("plan layers 4", "r1")

    def test_a_restart_of_the_whole_drops_it(self) -> None:
        carrying = replace(self.MEMBERS, requested_plan=RequestedPlan("plan layers 4", "r1"))
        again = announced(ask(carrying, node("a", None), node("b", None), settings=replace(SETTINGS, max_restarts=1)))
        assert (again.stage, again.plan, again.plan_request) == (GenerationStage.ASSEMBLE, "", "")
        started = announced(ask(again, node("a", attempt=1), node("b", attempt=1)))
        assert (started.stage, started.plan, started.plan_request) == (GenerationStage.START, "", "")

    @pytest.mark.parametrize("stage", [GenerationStage.START, GenerationStage.ASSEMBLE])
    def test_a_job_that_does_not_train_takes_none(self, stage: GenerationStage) -> None:
        decision = ask(replace(self.MEMBERS, stage=stage), node("a", STARTING), request=self.REQUEST)
        assert decision == ask(replace(self.MEMBERS, stage=stage), node("a", STARTING))

    def test_nor_does_one_that_waits_for_nodes_or_is_at_its_end(self) -> None:
        held = train("a/0#0", hold=True)
        three = replace(SETTINGS, min_nodes=2)
        assert_waits(
            ask(held, node("a", MEMBER), generation_s=NOW_S, settings=three, request=self.REQUEST), until_s=NOW_S + 600
        )
        assert_waits(ask(self.MEMBERS, node("a", DONE), node("b", MEMBER), request=self.REQUEST))


class TestAllLost:
    def test_the_job_fails_with_the_cause_and_advice(self) -> None:
        result = ended(ask(train("a/0#0"), node("a", None, cause="worker a/0#0 was killed by SIGKILL")))
        assert not result.succeeded
        assert "worker a/0#0 was killed by SIGKILL" in result.message
        assert "start the job again from your last checkpoint, or give --max-restarts" in result.message

    def test_or_starts_again_where_restarts_are_left(self) -> None:
        settings = replace(SETTINGS, max_restarts=2)
        docs = node("a", None), node("b", None)
        lost = train("a/0#0", "b/0#0", restarts=Restarts(1))
        again = announced(ask(lost, *docs, settings=settings))
        assert (again.number, again.stage, again.attempt, again.restarts.count) == (6, GenerationStage.ASSEMBLE, 1, 2)
        assert not again.begun
        assert not ended(ask(replace(lost, restarts=Restarts(2)), *docs, settings=settings)).succeeded

    def test_with_a_checkpoint_it_starts_again_without_being_asked(self) -> None:
        docs = node("a", None, saved=200), node("b", None, saved=100)
        again = announced(ask(train("a/0#0", "b/0#0"), *docs))
        assert (again.stage, again.attempt, again.restarts) == (GenerationStage.ASSEMBLE, 1, Restarts(1, 200, 1))
        assert again.cause.endswith("the job goes on from its checkpoint of 200 steps")
        begun = announced(ask(again, node("a", attempt=1)))
        assert (begun.stage, begun.restarts) == (GenerationStage.START, Restarts(1, 200, 1))

    def test_but_not_for_ever_from_the_same_one(self) -> None:
        lost = train("a/0#0", restarts=Restarts(saved=200, resumes=RESUMES))
        result = ended(ask(lost, node("a", None, saved=200)))
        assert "there is a checkpoint of 200 steps, but it has gone back there 3 times" in result.message
        assert announced(ask(lost, node("a", None, saved=300))).restarts.resumes == 1

    def test_a_limit_of_restarts_counts_for_checkpoints_too(self) -> None:
        one = replace(SETTINGS, max_restarts=1)
        doc = node("a", None, saved=200)
        assert announced(ask(train("a/0#0"), doc, settings=one)).restarts.count == 1
        result = ended(ask(train("a/0#0", restarts=Restarts(1)), doc, settings=one))
        assert "but --max-restarts 1 is used up: start the job again to go on from it" in result.message

    def test_where_no_node_that_ran_it_is_left_it_begins_again_on_those_that_are_here(self) -> None:
        for former in (
            train("a/0#0", "b/0#0", restarts=Restarts(2), attempt=3),
            start("a", "b", number=5, restarts=Restarts(2), attempt=3),
        ):
            again = announced(ask(former, node("c", took_part=False)))
            assert (again.number, again.stage, again.attempt, again.restarts.count) == (
                6,
                GenerationStage.ASSEMBLE,
                4,
                0,
            )
            assert again.cause.endswith("it begins again on c")

    def test_a_new_agent_under_the_name_of_a_lost_one_is_another_node(self) -> None:
        again = announced(ask(train("a/0#0"), node("a", took_part=False)))
        assert (again.stage, again.attempt) == (GenerationStage.ASSEMBLE, 1)
        # Before it has started the workers that a start asks for, it is the one that was asked.
        assert_waits(ask(start("a"), node("a", took_part=False)))

    def test_nodes_that_only_lost_the_store_have_the_time_of_a_lease_to_come_back(self) -> None:
        docs = [node("c", took_part=False)]
        assert_waits(ask(train("a/0#0"), *docs, led_s=NOW_S - 1), until_s=NOW_S + 4)
        assert_waits(ask(train("a/0#0"), *docs, outage_end_s=NOW_S - 2), until_s=NOW_S + 3)
        assert_waits(ask(train("a/0#0"), *docs, node("a", MEMBER), led_s=NOW_S - 1))

    def test_a_joiner_without_state_cannot_save_the_job(self) -> None:
        assert not ended(ask(train("a/0#0"), node("a", None), node("b", READY))).succeeded


class TestTheEnd:
    def test_one_that_has_finished_waits_for_the_others(self) -> None:
        docs = node("a", DONE, finished=True), node("b", MEMBER)
        assert_waits(ask(train("a/0#0", "b/0#0"), *docs))

    def test_the_job_has_succeeded_when_every_node_has_finished(self) -> None:
        docs = node("a", DONE, finished=True), node("b", DONE, finished=True)
        assert ended(ask(train("a/0#0", "b/0#0"), *docs)) == Result(True, "all workers have finished")

    def test_it_waits_for_the_processes_to_end(self) -> None:
        assert_waits(ask(train("a/0#0", "b/0#0"), node("a", DONE, finished=True), node("b", DONE)))

    def test_one_that_is_lost_when_no_other_still_runs_does_no_harm(self) -> None:
        result = ended(ask(train("a/0#0", "b/0#0"), node("a", DONE, finished=True)))
        assert result == Result(True, "all workers have finished; lost after the last step: b/0#0")

    def test_one_that_is_lost_while_others_still_wait_for_it_makes_an_urgent_generation(self) -> None:
        docs = node("a", DONE), node("b", MEMBER), node("c", None)
        after = announced(ask(train("a/0#0", "b/0#0", "c/0#0"), *docs))
        assert (after.ids, after.aborts_step_before, after.hold) == (("b/0#0",), 6, False)

    def test_members_hear_that_one_has_finished(self) -> None:
        """Its part of the state went with it, but nobody needs it any more."""
        now, lost = train("a/0#0", "b/0#0", "c/0#0"), (node("b", MEMBER), node("c", None))
        assert not announced(ask(now, node("a", MEMBER), *lost)).finished
        after = announced(ask(now, node("a", DONE), *lost))
        assert after.finished
        assert announced(ask(replace(after, number=7), node("b", MEMBER, reset_generation=6))).finished

    def test_nobody_is_told_to_wait_for_nodes_once_some_have_finished(self) -> None:
        docs = node("a", DONE, finished=True), node("b", MEMBER)
        assert_waits(ask(train("b/0#0"), *docs, settings=replace(SETTINGS, min_nodes=2)))

    def test_those_that_wait_for_nodes_go_on_when_they_hear_that_others_have_finished(self) -> None:
        """Nothing was heard of the others for a while, so those that were left waited for more nodes."""
        two = replace(SETTINGS, min_nodes=2)
        held = train("b/0#0", hold=True)
        finished = node("a", DONE, finished=True)
        after = announced(ask(held, finished, node("b", MEMBER), settings=two))
        assert (after.ids, after.hold) == (("b/0#0",), False)
        assert ended(ask(train("b/0#1", hold=True), finished, node("b", READY, incarnation=1), settings=two)).succeeded
        last = announced(ask(held, finished, node("b", MEMBER, draining=True), settings=two))
        assert (last.ids, last.leaving, last.hold) == ((), ("b/0#0",), False)
        assert ended(ask(last, finished, node("b", MEMBER, draining=True), settings=two)).succeeded

    def test_the_loss_of_all_others_does_no_harm_once_one_has_finished(self) -> None:
        docs = node("a", DONE, finished=True), node("b", None)
        assert ended(ask(train("b/0#0"), *docs)).succeeded

    def test_a_member_that_still_needs_one_that_has_finished_gets_a_generation_without_it(self) -> None:
        docs = node("a", DONE, finished=True), node("b", MEMBER, unreachable=("a/0#0",))
        after = announced(ask(train("a/0#0", "b/0#0"), *docs))
        assert (after.ids, after.aborts_step_before) == (("b/0#0",), 6)

    def test_one_that_leaves_is_not_taken_back_once_one_has_finished(self) -> None:
        """Its link broke at the boundary at which it was to leave; what it would do again has committed without it."""
        now = train("a/0#0", "b/0#0", leaving=("c/0#0",))
        leaves = node("c", MEMBER, draining=True, reset_generation=5)
        after = announced(ask(now, node("a", DONE, finished=True), node("b", MEMBER), leaves))
        assert (after.ids, after.leaving, after.aborts_step_before) == (("b/0#0",), ("c/0#0",), 6)
        assert ended(ask(now, node("a", DONE, finished=True), leaves)).succeeded
        assert announced(ask(now, node("a", MEMBER), node("b", MEMBER), leaves)).leaving == ()

    def test_the_death_of_one_that_was_to_leave_is_no_failure_of_links(self) -> None:
        now = replace(train("a/0#0", "b/0#0", leaving=("c/0#0",)), streak=Streak(urgent=2, resets=2, members=3))
        docs = node("a", MEMBER, unreachable=("c/0#0",)), node("b", MEMBER)
        after = announced(ask(now, *docs))
        assert (after.ids, after.streak.resets, after.streak.urgent) == (("a/0#0", "b/0#0"), 2, 3)

    def test_a_worker_that_finished_and_then_failed_fails_the_job(self) -> None:
        docs = node("a", DONE, failed="worker a/0#0 exited with code 1"), node("b", DONE, finished=True)
        assert ended(ask(train("a/0#0", "b/0#0"), *docs)) == Result(False, "worker a/0#0 exited with code 1")

    @pytest.mark.parametrize("state", [STARTING, READY])
    def test_a_joiner_does_not_hold_up_the_end(self, state: WorkerState) -> None:
        docs = node("a", DONE, finished=True), node("b", state)
        assert ended(ask(train("a/0#0"), *docs)).succeeded

    def test_nor_does_one_that_became_a_member_as_the_others_finished(self) -> None:
        """It finds them gone, but has nothing to go on with."""
        members = train("a/0#0", "b/0#1")
        finds = node("b", READY, incarnation=1, unreachable=("a/0#0",))
        assert ended(ask(members, node("a", DONE, finished=True), finds)).succeeded
        assert_waits(ask(members, node("a", DONE), finds))
        holds = node("b", MEMBER, incarnation=1, unreachable=("a/0#0",))
        assert announced(ask(members, node("a", DONE, finished=True), holds)).ids == ("b/0#1",)

    def test_nobody_joins_at_the_end(self) -> None:
        docs = node("a", DONE), node("b", MEMBER), node("c", READY)
        three = replace(SETTINGS, max_nodes=3)
        assert_waits(ask(train("a/0#0", "b/0#0"), *docs, settings=three))


class TestEpochs:
    def test_they_grow_beyond_all_that_any_node_remembers(self) -> None:
        assert next_generation(view(None)) == 1
        assert next_generation(view(train("a/0#0"), node("a", generation=3))) == 6
        assert next_generation(view(train("a/0#0"), node("a", generation=9))) == 10

    def test_also_where_the_store_has_lost_its_data(self) -> None:
        assert announced(ask(None, node("a", generation=41), node("b", generation=7))).number == 42


def cut_from(*names: str) -> dict[str, Any]:
    return {"cut": tuple(Cut(name, f"host-{name}") for name in names)}


class TestTheCauseOfDeathsThatComeTogether:
    def test_the_first_stands_first_whichever_node_it_was_on(self) -> None:
        nodes = [
            node("a", None, cause="worker a/0#0 was killed by SIGABRT", cause_t=77.2),
            node("b", MEMBER, None, cause="worker b/1#0 exited with code 1: ValueError: no", cause_t=77.0),
            node("c", MEMBER, unreachable=("d/0#0",)),
        ]
        before = train("a/0#0", "b/0#0", "b/1#0", "c/0#0", "d/0#0", aborts_step_before=5)
        after = announced(ask(before, *nodes, settings=replace(SETTINGS, max_nodes=4), pending_s=NOW_S - 1))
        assert after.cause == (
            "worker b/1#0 exited with code 1: ValueError: no; worker a/0#0 was killed by SIGABRT; "
            "worker d/0#0 cannot be reached"
        )

    def test_of_nodes_that_all_failed_the_first_is_named(self) -> None:
        failed = [
            node("a", failed="worker a/0#2 exited with code 1", cause_t=9.0),
            node("b", failed="b did", cause_t=8.0),
        ]
        decision = ask(start("a", "b"), *failed)
        assert ended(decision) == Result(False, "b did (after 0 of 0 restarts)")
        failed = [changed_report(doc, elastic=True) for doc in failed]
        assert ended(ask(start("a", "b"), *failed)) == Result(False, "every worker failed before the first step: b did")


class TestNodesThatLoseEachOther:
    """All of them live, and reach the store."""

    three = train("a/0#0", "b/0#0", "c/0#0", aborts_step_before=5)
    settings = replace(SETTINGS, max_nodes=3, reach_s=3.0)

    def ask(self, generation: Generation, *nodes: NodeDoc, **fields: Any) -> LeaderDecision:
        return ask(generation, *nodes, settings=self.settings, **fields)

    def nodes(self, **cuts: str) -> list[NodeDoc]:
        return [node(name, MEMBER, **cut_from(*cuts.get(name, ""))) for name in "abc"]

    def test_of_two_that_both_say_so_the_later_is_left_out_at_once(self) -> None:
        nodes = self.nodes(b="c", c="b")
        assert_waits(self.ask(self.three, *nodes, pending_s=None), NOW_S + self.settings.window_s)
        after = announced(self.ask(self.three, *nodes, pending_s=NOW_S - 0.1))
        assert after.ids == ("a/0#0", "b/0#0")
        assert after.aborts_step_before == after.number
        assert after.cause == "node c is left out: nothing passes between it and b"

    def test_where_one_says_so_the_other_is_given_time_to_say_whom_it_misses(self) -> None:
        nodes = self.nodes(b="a")
        assert_waits(self.ask(self.three, *nodes, pending_s=NOW_S - 2), NOW_S + 1)
        assert announced(self.ask(self.three, *nodes, pending_s=NOW_S - 3)).nodes == ("a", "c")
        assert_waits(self.ask(self.three, *self.nodes(b="a", a="bc"), pending_s=NOW_S - 2), NOW_S + 1)
        everybody = self.nodes(b="a", a="bc", c="a")
        assert announced(self.ask(self.three, *everybody, pending_s=NOW_S - 1)).nodes == ("b", "c")

    def test_one_that_holds_the_state_stays_whatever_its_rank(self) -> None:
        nodes = [node("a", READY, **cut_from("b")), node("b", MEMBER, **cut_from("a"))]
        assert announced(self.ask(train("b/0#0", "a/0#0"), *nodes, pending_s=NOW_S - 1)).ids == ("b/0#0",)
        nodes = [
            node("a", READY, **cut_from("c")),
            node("b", READY, **cut_from("c")),
            node("c", MEMBER, **cut_from("a", "b")),
        ]
        three = train("c/0#0", "a/0#0", "b/0#0")
        assert announced(self.ask(three, *nodes, pending_s=NOW_S - 1)).ids == ("c/0#0",)

    def test_nobody_joins_whom_one_that_still_leaves_does_not_reach(self) -> None:
        leaving = node("a", MEMBER, draining=True, **cut_from("b"))
        decision = self.ask(train("a/0#0"), leaving, node("b", READY, **cut_from("a")), pending_s=NOW_S - 9)
        assert decision.generation is None or decision.generation.nodes == ()

    def test_who_was_left_out_joins_only_when_both_reach_each_other(self) -> None:
        two = train("a/0#0", "b/0#0")
        for cuts in ({"c": "b"}, {"b": "c"}):
            nodes = self.nodes(**cuts)
            nodes[2] = node("c", READY, incarnation=1, **cut_from(*cuts.get("c", "")))
            assert_waits(self.ask(two, *nodes, pending_s=NOW_S - 9))
        nodes = [*self.nodes()[:2], node("c", READY, incarnation=1)]
        assert announced(self.ask(two, *nodes, pending_s=NOW_S - 9)).ids == (*two.ids, "c/0#1")

    def test_another_node_of_the_same_name_is_not_meant(self) -> None:
        two = train("a/0#0", "b/0#0")
        nodes = [*self.nodes(b="c")[:2], node("c", READY, incarnation=1, host="another")]
        assert announced(self.ask(two, *nodes, pending_s=NOW_S - 9)).nodes == ("a", "b", "c")

    def test_with_fewer_than_there_must_be_the_others_wait(self) -> None:
        settings = replace(self.settings, min_nodes=3)
        after = announced(ask(self.three, *self.nodes(a="c", c="a"), settings=settings, pending_s=NOW_S - 1))
        assert (after.nodes, after.hold) == (("a", "b"), True)


def missing(broken: Collection[frozenset[str]]) -> dict[str, set[str]]:
    """Of pairs, by either."""
    names = {name for pair in broken for name in pair}
    return {name: {other for pair in broken if name in pair for other in pair - {name}} for name in names}


@repeatable
@example(5, [(0, 1), (1, 4), (4, 3), (3, 2)]).via("n4 is left out first, and does no harm without n1 and n3")
@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=16))
def test_nodes_that_are_left_out_are_not_too_few_and_none_is_left_out_for_nothing(
    n_nodes: int, cuts: list[tuple[int, int]]
) -> None:
    nodes = [f"n{number}" for number in range(n_nodes)]
    broken = {frozenset((nodes[a], nodes[b])) for a, b in cuts if a != b and max(a, b) < n_nodes}
    out = apart(nodes, missing(broken))
    staying = [one for one in nodes if one not in out]
    assert staying
    assert all(not pair.issubset(staying) for pair in broken)
    assert all(any(frozenset((one, other)) in broken for other in staying) for one in out)


@pytest.mark.parametrize(("some", "others"), [("a", "bcd"), ("bcd", "ae"), ("ab", "cd"), ("cd", "ab"), ("ac", "bd")])
def test_of_a_network_in_two_parts_the_greater_stays_and_of_equals_that_of_the_first(some: str, others: str) -> None:
    nodes = sorted(some + others)
    staying = min((some, others), key=lambda part: (-len(part), part))
    broken = [frozenset((one, other)) for one in some for other in others]
    assert sorted(set(nodes) - set(apart(nodes, missing(broken)))) == sorted(staying)


requests = st.none() | st.builds(
    PlanRequest, st.sampled_from(["r1", "r2"]), st.integers(4, 6), st.just("plan layers 4"), st.just(77.0)
)
states = st.sampled_from([*WorkerState, None])
docs = st.lists(
    st.builds(
        lambda states, draining, finished, generation, failed, reset, gone, cut: (
            states,
            {
                "draining": draining,
                "finished": finished,
                "generation": generation,
                "failed": failed,
                "reset_generation": reset,
                "unreachable": gone,
                "cut": tuple(Cut(name, f"host-{name}") for name in cut),
            },
        ),
        st.lists(states, min_size=1, max_size=2),
        st.booleans(),
        st.booleans(),
        st.integers(0, 9),
        st.sampled_from(["", "", "it failed"]),
        st.sampled_from([0, 0, 5]),
        st.sampled_from([(), (), ("a/0#0",), ("b/1#0",)]),
        st.sampled_from(["", "", "", "a", "b", "cd", "abcd"]),
    ),
    max_size=4,
)
identities = st.sampled_from([f"{name}/{slot}#{n}" for name in "abcd" for slot in (0, 1) for n in (0, 1)])
generations = st.none() | st.builds(
    lambda ids, leaving, hold, stage, plan_request: replace(
        train(
            *ids,
            leaving=tuple(set(leaving) - set(ids)) if stage is GenerationStage.TRAIN else (),
            hold=hold,
            requested_plan=RequestedPlan(request=plan_request),
        ),
        stage=stage,
    ),
    st.lists(identities, unique=True, max_size=5),
    st.lists(identities, unique=True, max_size=2),
    st.booleans(),
    st.sampled_from(GenerationStage),
    st.sampled_from(["", "r1"]),
)


@settings(deadline=None, derandomize=True, max_examples=scaled(100, 400))
@given(
    docs,
    generations,
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from([None, 0, 2]),
    st.sampled_from([None, NOW_S - 1, NOW_S]),
    requests,
)
def test_whatever_the_documents_say_a_generation_is_sound(
    reports: list[tuple[list[WorkerState | None], dict[str, Any]]],
    generation: Generation | None,
    low: int,
    more: int,
    max_restarts: int | None,
    since_s: float | None,
    request: PlanRequest | None,
) -> None:
    nodes = tuple(node(name, *states, **fields) for name, (states, fields) in zip("abcd", reports))
    settings = MembershipSettings(min_nodes=low, max_nodes=low + more, max_restarts=max_restarts)
    seen = view(generation, *nodes, pending_s=since_s, outage_end_s=since_s, request=request)
    decision = decide(seen, NOW_S, settings)
    assert decision == decide(seen, NOW_S, settings)
    assert decision.reason
    assert decision.generation is None or decision.result is None
    if decision.wake_s is not None:
        assert decision.wake_s > NOW_S
    if decision.generation is None:
        return
    after = decision.generation
    assert after.number > max(
        [0 if generation is None else generation.number, *(doc.progress.generation for doc in nodes)]
    )
    assert len(set(after.ids)) == len(after.ids)
    assert not set(after.ids) & set(after.leaving)
    assert after.aborts_step_before <= after.number
    if generation is None:
        return
    assert after.aborts_step_before >= generation.aborts_step_before or after.stage is not GenerationStage.TRAIN
    if generation.stage is after.stage is GenerationStage.TRAIN:
        kept = [identity for identity in after.ids if identity in generation.ids]
        assert kept == [identity for identity in generation.ids if identity in kept], "survivors keep their order"
        new = set(after.ids) - set(generation.ids)
        ready = {one.id for doc in nodes for one in doc.workers if one.state is READY}
        assert new <= ready, "only workers that are ready join"
        dropped = set(generation.ids) - set(after.ids) - set(after.leaving)
        finished = {one.id for doc in nodes for one in doc.workers if one.state is DONE}
        assert not dropped - finished or after.aborts_step_before == after.number, "a loss is urgent"
        unheard = {(doc.node, one.node) for doc in nodes for one in doc.peers.cut if one.node != doc.node}
        together = {(one, other) for one in after.nodes for other in after.nodes}
        present = {doc.node for doc in nodes}
        assert all(not present >= set(pair) for pair in unheard & together), "all members reach each other"
        if after.plan_request != generation.plan_request:
            assert request is not None
            assert (request.generation, request.id) == (generation.number, after.plan_request)
            assert (after.workers, after.aborts_step_before) == (generation.workers, generation.aborts_step_before), (
                "it changes nothing else"
            )
        else:
            assert after.plan == generation.plan
    elif after.attempt != generation.attempt:
        assert (after.plan, after.plan_request) == ("", "")


@pytest.mark.parametrize("elastic", [False, True])
def test_a_job_that_every_node_leaves_before_it_trains_is_over(elastic: bool) -> None:
    state = STARTING if elastic else None
    nodes = [node(name, state, draining=True, elastic=elastic) for name in "ab"]
    decision = ask(start("a", "b"), *nodes)
    assert decision.result == Result(False, "every node left the job before it was done; start it again")


class TestJobsThatAreTooSmallForTooLong:
    """The members keep their state and wait for more nodes, but not for ever."""

    NOW = train("a/0#0", hold=True)
    NODES = (node("a", MEMBER), node("b", draining=True))
    MESSAGE = "only 1 of at least 2 nodes are here after 600 s; start more nodes, or raise --rdzv-conf join_timeout"

    def asked(self, *nodes: NodeDoc, saves: bool) -> LeaderDecision:
        settings = replace(SETTINGS, min_nodes=2, saves=saves)
        return ask(self.NOW, *nodes, settings=settings, generation_s=NOW_S - 600.0)

    def test_without_checkpoints_the_job_fails(self) -> None:
        assert ended(self.asked(node("a", MEMBER), saves=False)) == Result(False, self.MESSAGE)

    def test_with_checkpoints_all_save_the_state_and_leave(self) -> None:
        decision = self.asked(node("a", MEMBER), saves=True)
        assert (decision.result, decision.generation, decision.all_leave) == (None, None, self.MESSAGE)
        asked = to_leave(view(self.NOW, *self.NODES), SETTINGS, (), decision)
        assert asked == {"a": self.MESSAGE}

    def test_they_leave_although_they_were_to_wait(self) -> None:
        after = announced(self.asked(node("a", MEMBER, draining=True), saves=True))
        assert (after.ids, after.leaving, after.hold) == ((), ("a/0#0",), True)


class TestLeavingWhileNodesMeet:
    """Nodes that leave a job whose nodes meet again wait for the leader's answer."""

    MEETING = Generation(7, GenerationStage.ASSEMBLE, attempt=2, cause="node a leaves", leaving=("a",))

    def test_each_is_let_go_once(self) -> None:
        settings = replace(SETTINGS, min_nodes=2)
        after = announced(ask(self.MEETING, node("b", draining=True), node("c"), settings=settings))
        assert (after.number, after.stage, after.attempt) == (8, GenerationStage.ASSEMBLE, 2)
        assert (after.leaving, after.cause) == (("b",), "node b leaves")
        then = ask(after, node("b", draining=True), node("c"), settings=settings, generation_s=NOW_S)
        assert_waits(then, until_s=NOW_S + 600)

    def test_when_all_leave_the_job_has_failed(self) -> None:
        decision = ask(self.MEETING, node("b", draining=True), node("c", draining=True))
        assert decision.result == Result(False, "every node left the job before it was done; start it again")
        assert_waits(ask(self.MEETING, node("b", draining=True), outage_end_s=NOW_S - 1.0))
        assert_waits(ask(self.MEETING, node("a", draining=True), generation_s=NOW_S), until_s=NOW_S + 600)

    def test_plain_nodes_may_end_when_the_others_start_again(self) -> None:
        after = announced(ask(start("a", "b"), node("a", draining=True), node("b")))
        assert (after.stage, after.leaving) == (GenerationStage.ASSEMBLE, ("a",))


class TestSurplus:
    """Nodes of a job that is to have fewer."""

    def test_those_that_joined_last_leave(self) -> None:
        now = train("a/0#0", "b/0#0", "c/0#0")
        docs = [node(name, MEMBER) for name in "cab"]
        assert surplus(view(now, *docs), 3) == ()
        assert surplus(view(now, *docs), 1) == ("b", "c")

    def test_the_rank_that_a_user_fixed_comes_first(self) -> None:
        docs = [node("a", MEMBER, rank=1), node("b", MEMBER, rank=0)]
        assert surplus(view(train("a/0#0", "b/0#0"), *docs), 1) == ("a",)

    def test_who_leaves_already_or_has_no_part_does_not_count(self) -> None:
        docs = [node("a", MEMBER), node("b", MEMBER, draining=True), node("c", READY)]
        assert surplus(view(train("a/0#0", "b/0#0"), *docs), 1) == ()
        assert surplus(view(None, node("a"), node("b")), 1) == ()
        assert surplus(view(train("a/0#0", "b/0#0"), *docs[:2], result=Result(True)), 0) == ()


class TestSickNodes:
    """Nodes that are about to fail ask to leave; the leader lets those go that the job can do without."""

    NOW = train("a/0#0", "b/0#0", "c/0#0")

    def asks(self, *sick: str, draining: str = "", absent: str = "") -> View:
        docs = [
            replace(
                node(name, MEMBER, draining=name in draining),
                departure=Departure(draining=name in draining, sick=f"GPU of {name}" if name in sick else ""),
            )
            for name in "abc"
            if name not in absent
        ]
        return view(self.NOW, *docs)

    def test_the_last_to_join_goes_first_and_as_many_as_the_job_can_do_without(self) -> None:
        assert sick_to_leave(self.asks("a", "b"), 1, ()) == {"b": "GPU of b", "a": "GPU of a"}
        assert sick_to_leave(self.asks("a", "b"), 2, ()) == {"b": "GPU of b"}
        assert sick_to_leave(self.asks("a", "b"), 3, ()) == {}

    def test_of_those_that_are_all_sick_one_stays(self) -> None:
        assert sick_to_leave(self.asks("a", "b", "c"), 1, ()).keys() == {"b", "c"}
        assert sick_to_leave(self.asks("a", "b", "c"), 0, ()).keys() == {"b", "c"}

    def test_who_was_asked_counts_as_gone_though_it_has_not_begun_to_leave(self) -> None:
        assert sick_to_leave(self.asks("a", "c"), 2, ["a"]) == {"a": "GPU of a"}
        assert sick_to_leave(self.asks("c"), 2, ["a"]) == {}
        assert sick_to_leave(self.asks("a", "c", draining="a"), 2, ["a"]) == {}
        assert sick_to_leave(self.asks("a", "c", absent="b"), 1, ()) == {"c": "GPU of c"}

    def test_only_members_of_a_job_that_trains_leave(self) -> None:
        docs = self.asks("a").nodes
        assert sick_to_leave(view(None, *docs), 1, ()) == {}
        assert sick_to_leave(view(start("a", "b"), *docs), 1, ()) == {}
        assert sick_to_leave(view(train("b/0#0", "c/0#0"), *docs), 1, ()) == {}
        assert sick_to_leave(view(self.NOW, *docs, result=Result(True)), 1, ()) == {}

    def test_a_job_that_is_to_shrink_loses_no_more_nodes_for_it(self) -> None:
        settings = MembershipSettings(min_nodes=2, max_nodes=2)
        assert to_leave(self.asks("a"), settings, (), NOTHING) == {"a": "GPU of a"}
        text = "the job is to have 2 nodes from now on"
        assert to_leave(self.asks(), settings, (), NOTHING) == {"c": text}
        assert to_leave(self.asks("a"), settings, ["c"], NOTHING) == {"c": text}


class TestExcusedWorkers:
    def test_the_others_go_on_without_who_is_excused_between_two_steps(self) -> None:
        now = train("a/0#0", "a/1#0", "b/0#0")
        after = announced(ask(now, node("a", MEMBER, MEMBER, evicted=("a/1#0",), joined=5), node("b", MEMBER)))
        assert (after.ids, after.leaving) == (("a/0#0", "b/0#0"), ("a/1#0",))
        assert after.aborts_step_before == now.aborts_step_before
        assert after.cause == "a/1#0 leaves"

    def test_who_alone_holds_the_state_stays(self) -> None:
        now = train("a/0#0", "b/0#0")
        assert_waits(ask(now, node("a", MEMBER, evicted=("a/0#0",)), node("b", READY)))
