"""The agent's decisions, a sentence for each transition."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest

from elaunch.agent.decisions.actions import Account, Action, Exit, Log, Say, Signal, Start, Tell, Warm
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.agent.decisions.local_workers import BACKOFF_S, HINT, LAST_REFUSED_S, LATE_S, REFUSED_S
from elaunch.agent.decisions.node_state import NodeSettings
from elaunch.agent.decisions.slots import FRUITLESS_LIMIT, SlotState
from elaunch.agent.messages import note_lost_link
from elaunch.rendezvous.membership import (
    BrokenLink,
    Cut,
    Departure,
    Generation,
    GenerationStage,
    RequestedPlan,
    Restarts,
    Result,
    Stalled,
    Streak,
    Worker,
    WorkerState,
)
from elaunch.wire import Report, Unreachable

A = TypeVar("A", bound=Action)
NOW_S = 50.0
T = 1700000000.0  # Unix time at which the kernel reported a death


class Node:
    """A lifecycle, and the words in which the tests drive it."""

    def __init__(
        self, slots: int = 1, max_nodes: int = 2, max_restarts: int | None = None, warm_start: bool = False
    ) -> None:
        settings = NodeSettings("a", "host-a", slots, 1, max_nodes, max_restarts, 30.0, warm_start=warm_start)
        self.life = Lifecycle(settings, port=4000)
        self.number = 0
        self.actions: list[Action] = []
        self.now_s = NOW_S

    def generation(self, stage: GenerationStage, *ids: str, **fields: Any) -> list[Action]:
        self.number = fields.pop("generation", self.number + 1)
        workers = tuple(
            Worker(identity, identity.partition("/")[0], int(identity.partition("/")[2].partition("#")[0]))
            for identity in ids
        )
        values: dict[str, Any] = {"attempt": self.life.wanted_attempt, "cause": "start", **fields}
        news = Generation(self.number, stage, workers, **values)
        return self.does(self.life.on_generation(news, self.now_s))

    def start(self, *places: str, **fields: Any) -> list[Action]:
        """The job starts on these slots; by default on all of this node."""
        mine = [f"a/{slot.local_rank}" for slot in self.life.slots]
        return self.generation(GenerationStage.START, *(places or mine), **fields)

    def train(self, *ids: str, **fields: Any) -> list[Action]:
        return self.generation(GenerationStage.TRAIN, *ids, **fields)

    def does(self, actions: list[Action]) -> list[Action]:
        self.actions = actions
        return actions

    def ready(self, *workers: str) -> None:
        for worker in workers:
            self.life.on_started(worker, 100)
            self.life.on_attach(worker)
            self.life.on_ready(worker, "host-a:9")

    def settled(self, *workers: str) -> None:
        for worker in workers:
            self.life.on_joined(worker, self.number)

    def dies(self, worker: str, number: int = signal.SIGKILL, after_s: float = 0.0) -> list[Action]:
        self.now_s += after_s
        return self.does(self.life.on_exit(worker, None, number, T, self.now_s))

    def exits(self, worker: str, code: int) -> list[Action]:
        return self.does(self.life.on_exit(worker, code, None, T, self.now_s))

    def later(self, seconds: float) -> list[Action]:
        self.now_s += seconds
        return self.does(self.life.on_time(self.now_s))

    def states(self) -> dict[str, WorkerState]:
        return {worker.id: worker.state for worker in self.life.doc().workers}


def only(kind: type[A], actions: list[Action]) -> list[A]:
    return [action for action in actions if isinstance(action, kind)]


def started(actions: list[Action]) -> list[str]:
    return [action.worker for action in only(Start, actions)]


def signalled(actions: list[Action]) -> list[tuple[str, int]]:
    return [(action.worker, action.number) for action in only(Signal, actions)]


def said(actions: list[Action]) -> str:
    return "\n".join(action.text for action in only(Say, actions))


def member_node(slots: int = 1, others: tuple[str, ...] = ("b/0#0",), **settings: Any) -> Node:
    """A node whose workers are settled members of generation 2, together with others."""
    node = Node(slots, **settings)
    node.start(*(f"a/{slot}" for slot in range(slots)), *(other.partition("#")[0] for other in others))
    mine = [f"a/{slot}#0" for slot in range(slots)]
    node.ready(*mine)
    node.train(*mine, *others, aborts_step_before=2)
    node.settled(*mine)
    return node


class TestLog:
    """What the report says of the event log."""

    def test_it_changes_when_a_worker_ends_and_not_with_each_step(self) -> None:
        node = member_node(slots=2)
        for step in (4, 5):
            node.life.workers.lines.note(Report("step", {"step": step}))
        assert node.life.doc().progress.logged == 0
        node.dies("a/0#0")
        node.life.workers.lines.note(Report("step", {"step": 6}))
        assert node.life.doc().progress.logged == 6

    def test_another_attempt_begins_it_anew(self) -> None:
        node = member_node()
        node.life.workers.lines.note(Report("step", {"step": 4}))
        node.dies("a/0#0")
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        assert node.life.doc().progress.logged == 0


class TestEarlyFailures:
    """What happens before a step has committed."""

    ERROR = "ValueError: no (train.py:3 in main)"

    def raises(self, node: Node, worker: str, reason: str = ERROR) -> list[Action]:
        return node.does(node.life.on_exit(worker, 1, None, T, node.now_s, Account(reason)))

    def test_the_same_exception_in_all_slots_is_reported_and_shown_whoever_was_replaced(self) -> None:
        node = member_node(slots=2)
        self.raises(node, "a/0#0")
        assert started(node.later(BACKOFF_S[1])) == ["a/0#1"]
        assert node.life.doc().summary.error == ""
        self.raises(node, "a/1#0")
        assert node.life.doc().summary.error == self.ERROR
        assert [one.worker for one in node.life.workers.failures] == ["a/0#0", "a/1#0"]
        node.does(node.life.on_result(Result(False, "over"), node.now_s))
        node.dies("a/0#1", signal.SIGTERM)
        assert next((one.worker, one.own) for one in node.life.workers.failures) == ("a/0#0", True)

    def test_after_a_commit_it_is_not(self) -> None:
        node = member_node(slots=2)
        node.life.on_progress("a/1#0", 2)
        for worker in ("a/0#0", "a/1#0"):
            self.raises(node, worker)
        assert node.life.doc().summary.error == ""

    def test_a_death_before_anybody_here_has_registered_is_reported_once(self) -> None:
        node = Node(slots=2)
        node.start()
        node.life.on_attach("a/0#0")
        node.life.on_attach("a/1#0")
        node.dies("a/0#0")
        node.dies("a/1#0")
        assert node.life.doc().summary.early_death == "worker a/0#0 was killed by SIGKILL"
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        for worker in ("a/0#1", "a/1#1"):
            node.dies(worker)
        assert node.life.doc().summary.early_death == ""

    def test_a_death_beside_one_that_has_registered_is_not(self) -> None:
        node = Node(slots=2)
        node.start()
        node.ready("a/0#0")
        node.life.on_attach("a/1#0")
        node.dies("a/1#0")
        assert node.life.doc().summary.early_death == ""

    def test_a_worker_that_does_not_register_is_told_of_and_then_ended(self) -> None:
        node = member_node(slots=2)
        node.dies("a/0#0")
        node.later(BACKOFF_S[1])
        node.later(0.0)
        limit_s = node.life.settings.register_s
        assert node.life.due_s() == node.now_s + LATE_S
        told = said(node.later(LATE_S))
        assert "worker a/0#1 has not called elaunch.init() for 60 s" in told
        assert "init_process_group()" in told
        assert node.life.due_s() == node.now_s - LATE_S + limit_s
        assert node.later(1.0) == []
        node.life.on_attach("a/0#1")
        actions = node.later(limit_s - LATE_S)
        assert "has not called register()" in said(actions)
        assert "register_timeout" in said(actions)
        assert signalled(actions) == [("a/0#1", signal.SIGKILL)]

    def test_a_worker_that_registers_is_not(self) -> None:
        node = member_node(slots=2)
        node.dies("a/0#0")
        node.later(BACKOFF_S[1])
        node.later(0.0)
        node.ready("a/0#1")
        assert node.later(1000.0) == []

    def test_a_script_without_elaunch_that_dies_is_told_of_it_once(self) -> None:
        node = Node()
        node.start()
        node.exits("a/0#0", 3)
        text = "worker a/0#0 exited with code 3"
        actions = node.generation(GenerationStage.ASSEMBLE, attempt=1, cause=text, restarts=Restarts(1))
        assert HINT in said(actions)
        node.start(attempt=1, restarts=Restarts(1))
        node.exits("a/0#1", 3)
        assert HINT not in said(node.does(node.life.on_result(Result(False, f"{text} (after 1)"), node.now_s)))

    def test_only_the_node_that_failed_tells_it_and_not_of_a_script_with_elaunch(self) -> None:
        for text, attaches, told in [
            ("worker a/0#0 exited", False, True),
            ("worker b/", False, False),
            ("worker a", True, False),
        ]:
            node = Node()
            node.start()
            if attaches:
                node.life.on_attach("a/0#0")
            node.exits("a/0#0", 3)
            message = f"{text} with code 3 (after 0 of 0 restarts)"
            assert (HINT in said(node.does(node.life.on_result(Result(False, message), node.now_s)))) == told


class TestStart:
    def test_a_node_of_the_generation_starts_a_worker_in_each_slot(self) -> None:
        node = Node(slots=2)
        starts = only(Start, node.start("a/0", "a/1", "b/0"))
        assert [(one.local_rank, one.worker, one.warm) for one in starts] == [(0, "a/0#0", False), (1, "a/1#0", False)]
        assert starts[0].generation.ids == ("a/0", "a/1", "b/0")
        assert node.states() == {"a/0#0": WorkerState.STARTING, "a/1#0": WorkerState.STARTING}

    def test_with_a_warm_start_the_first_workers_are_forks_of_the_warm_parent(self) -> None:
        node = Node(slots=2, warm_start=True)
        actions = node.start("a/0", "a/1")
        assert [type(action) for action in actions] == [Warm, Start, Start]
        assert all(one.warm for one in only(Start, actions))
        node.ready("a/0#0", "a/1#0")
        assert only(Warm, node.train("a/0#0", "a/1#0")) == []

    def test_a_spare_node_starts_nothing_and_says_why(self) -> None:
        node = Node()
        assert started(node.start("b/0", "c/0")) == []
        assert said(node.actions) == "this node waits as a spare: the job has its 2 nodes"

    def test_a_node_that_came_too_late_for_the_start_does_not_call_itself_a_spare(self) -> None:
        node = Node()
        assert started(node.start("b/0")) == []
        assert said(node.actions) == "this node waits: the job has just started without it"

    def test_an_old_generation_is_ignored(self) -> None:
        node = member_node()
        assert node.train("b/0#0", generation=2) == []
        assert node.train("b/0#0", generation=1) == []
        assert node.life.generation is not None
        assert node.life.generation.number == 2

    def test_the_first_report_names_the_node(self) -> None:
        doc = Node(slots=2).life.doc()
        assert (doc.node, doc.host, doc.slots, doc.port, doc.workers) == ("a", "host-a", 2, 4000, ())
        assert doc.progress.generation == 0
        assert not doc.summary.elastic
        assert not doc.summary.finished


class TestCheckpoints:
    def test_the_report_names_the_newest_one_that_a_worker_told_of(self) -> None:
        life = Node().life
        assert life.doc().progress.saved is None
        life.on_saved(100)
        life.on_saved(200)
        assert life.doc().progress.saved == 200


class TestProgressOfAWorker:
    def test_from_starting_over_ready_and_member_to_done(self) -> None:
        node = Node()
        life = node.life
        node.start()
        found = [node.states()["a/0#0"]]
        life.on_attach("a/0#0")
        assert life.doc().summary.elastic
        found.append(node.states()["a/0#0"])
        life.on_ready("a/0#0", "host-a:9")
        assert life.doc().workers[0].address == "host-a:9"
        found.append(node.states()["a/0#0"])
        node.train("a/0#0")
        node.settled("a/0#0")
        found.append(node.states()["a/0#0"])
        life.on_finished("a/0#0")
        found.append(node.states()["a/0#0"])
        assert found == [
            WorkerState.STARTING,
            WorkerState.STARTING,
            WorkerState.READY,
            WorkerState.MEMBER,
            WorkerState.DONE,
        ]

    def test_a_script_that_never_attaches_is_not_elastic(self) -> None:
        node = Node()
        node.start()
        assert not node.life.doc().summary.elastic

    def test_steps_out_of_order_are_ignored(self) -> None:
        node = Node()
        node.start()
        node.life.on_ready("a/0#0", "x")
        node.settled("a/0#0")
        assert node.states() == {"a/0#0": WorkerState.STARTING}

    def test_a_node_says_when_all_its_members_have_settled_what_was_asked_for(self) -> None:
        node = member_node(slots=2)
        asked = {"requested_plan": RequestedPlan("plan layers 4", "r1")}
        node.train("a/0#0", "a/1#0", cause="a new plan was asked for", **asked)
        assert node.life.doc().progress.plan_request == ""
        node.settled("a/0#0")
        assert node.life.doc().progress.plan_request == ""
        node.settled("a/1#0")
        assert node.life.doc().progress.plan_request == "r1"
        # Another change does not take it back; another request does.
        node.train("a/0#0", "a/1#0", "b/0#0", cause="b/0#0 joins", **asked)
        assert node.life.doc().progress.plan_request == "r1"
        node.train("a/0#0", "a/1#0", "b/0#0", requested_plan=RequestedPlan("plan layers 2", "r2"))
        assert node.life.doc().progress.plan_request == ""

    def test_to_settle_an_older_generation_does_not_count(self) -> None:
        node = member_node()
        node.train("a/0#0", requested_plan=RequestedPlan("plan layers 4", "r1"))
        node.life.on_joined("a/0#0", node.number - 1)
        assert node.life.doc().progress.plan_request == ""
        # The next generation carries the request on, and is the one that is settled.
        node.train("a/0#0", requested_plan=RequestedPlan("plan layers 4", "r1"))
        node.settled("a/0#0")
        assert node.life.doc().progress.plan_request == "r1"

    def test_a_node_without_members_says_nothing_of_a_plan(self) -> None:
        node = Node()
        node.train("b/0#0", requested_plan=RequestedPlan("plan layers 4", "r1"))
        assert node.life.doc().progress.plan_request == ""

    def test_messages_of_workers_that_are_gone_are_ignored(self) -> None:
        node = member_node()
        before = node.life.doc()
        progress = partial(node.life.on_progress, number=2)
        for report in (node.settled, progress, node.life.on_finished, node.life.on_leaving):
            report("a/0#9")
        node.life.on_ready("a/0#9", "x")
        assert node.life.on_attach("a/0#9") == []
        assert node.exits("a/0#9", 0) == []
        assert node.life.doc() == before

    def test_attached_workers_are_told_each_training_generation(self) -> None:
        node = member_node()
        tells = only(Tell, node.train("a/0#0", "b/0#0", "c/0#3", cause="c/0#3 joins"))
        assert [(tell.worker, tell.generation.number) for tell in tells] == [("a/0#0", 3)]
        assert said(node.actions) == "c/0#3 joins; 3 workers go on"

    def test_one_that_attaches_later_is_told_the_present_one(self) -> None:
        node = member_node()
        node.life.on_progress("a/0#0", 2)
        node.dies("a/0#0")
        tells = only(Tell, node.life.on_attach("a/0#1"))
        assert [(tell.worker, tell.generation.number) for tell in tells] == [("a/0#1", 2)]

    def test_a_worker_that_has_not_attached_is_told_nothing(self) -> None:
        node = member_node()
        node.life.on_progress("a/0#0", 2)
        node.dies("a/0#0")
        assert only(Tell, node.train("b/0#0")) == []

    def test_a_warm_parent_is_asked_for_once_a_worker_is_a_member(self) -> None:
        node = Node()
        node.start()
        node.ready("a/0#0")
        assert only(Warm, node.train("a/0#0")) == [Warm()]
        assert only(Warm, node.train("a/0#0")) == []

    def test_a_hold_is_explained_with_the_numbers(self) -> None:
        node = Node()
        node.start()
        node.ready("a/0#0")
        assert "1 of at least 1 nodes are left: the workers keep their state" in said(node.train("a/0#0", hold=True))


class TestAbandoned:
    def test_the_report_says_why_until_all_start_again(self) -> None:
        node = member_node()
        node.life.workers.abandon("b/0#0", "not one of ours")
        assert node.life.doc().summary.abandoned == ""
        node.life.workers.abandon("a/0#0", "replicas differ")
        node.life.workers.abandon("a/0#0", "and then something else")
        assert node.life.doc().summary.abandoned == "replicas differ"


class TestReplacement:
    def test_a_member_that_dies_is_replaced_by_a_new_incarnation_from_the_warm_parent(self) -> None:
        node = member_node()
        node.life.on_progress("a/0#0", 2)
        starts = only(Start, node.dies("a/0#0"))
        assert [(one.local_rank, one.worker, one.warm) for one in starts] == [(0, "a/0#1", True)]
        assert said(node.actions) == "worker a/0#0 was killed by SIGKILL; a replacement starts"
        doc = node.life.doc()
        assert (doc.cause, doc.cause_t) == ("worker a/0#0 was killed by SIGKILL", T)
        assert node.states() == {"a/0#1": WorkerState.STARTING}

    def test_one_that_never_saw_a_step_commit_is_replaced_after_a_pause(self) -> None:
        node = member_node()
        assert started(node.dies("a/0#0")) == []
        assert node.states() == {}
        assert node.life.due_s() == node.now_s + BACKOFF_S[1]
        assert started(node.later(BACKOFF_S[1] / 2)) == []
        assert started(node.later(BACKOFF_S[1] / 2)) == ["a/0#1"]
        assert node.life.due_s() is None

    def test_a_slot_is_given_up_after_several_fruitless_deaths_in_a_row(self) -> None:
        node = member_node()
        for incarnation in range(FRUITLESS_LIMIT - 1):
            node.dies(f"a/0#{incarnation}")
            assert started(node.later(10)) == [f"a/0#{incarnation + 1}"]
        node.exits(f"a/0#{FRUITLESS_LIMIT - 1}", 1)
        assert "it is not replaced: 3 workers in a row died here before they saw a step commit" in said(node.actions)
        assert started(node.later(1000)) == []
        assert node.life.doc().summary.failed == f"worker a/0#{FRUITLESS_LIMIT - 1} exited with code 1"
        assert node.life.due_s() is None

    def test_a_committed_step_makes_the_count_start_anew(self) -> None:
        node = member_node()
        for incarnation in range(3 * FRUITLESS_LIMIT):
            node.ready(f"a/0#{incarnation}")
            node.life.on_progress(f"a/0#{incarnation}", 2)
            assert started(node.dies(f"a/0#{incarnation}")) == [f"a/0#{incarnation + 1}"]

    def test_max_restarts_bounds_the_replacements_of_the_node(self) -> None:
        node = member_node(slots=2, max_restarts=1)
        for worker in ("a/0#0", "a/1#0"):
            node.life.on_progress(worker, 2)
        assert started(node.dies("a/0#0")) == ["a/0#1"]
        assert started(node.dies("a/1#0")) == []
        assert "it is not replaced: --max-restarts 1 is used up" in said(node.actions)
        assert node.life.doc().summary.failed == "", "the other slot still runs"
        node.dies("a/0#1")
        assert node.life.doc().summary.failed == "worker a/0#1 was killed by SIGKILL"

    def test_max_restarts_0_means_no_replacement(self) -> None:
        node = member_node(max_restarts=0)
        assert started(node.dies("a/0#0")) == []
        assert node.life.doc().summary.failed

    def test_a_worker_that_exits_with_0_before_the_end_is_not_replaced(self) -> None:
        node = member_node()
        assert started(node.exits("a/0#0", 0)) == []
        assert said(node.actions) == "worker a/0#0 exited with code 0 before the job's end"
        assert started(node.train("b/0#0")) == []
        doc = node.life.doc()
        assert (doc.workers, doc.summary.failed) == ((), "")
        assert doc.cause == "worker a/0#0 exited with code 0 before the job's end"

    def test_nothing_is_started_where_a_worker_of_the_node_has_finished(self) -> None:
        node = member_node(slots=2)
        node.life.on_progress("a/1#0", 2)
        node.life.on_finished("a/0#0")
        assert started(node.dies("a/1#0")) == []
        assert node.life.due_s() is None

    def test_a_node_that_comes_to_a_training_job_fills_its_slots(self) -> None:
        node = Node(slots=2)
        starts = only(Start, node.train("b/0#0", generation=9))
        assert [(one.worker, one.warm) for one in starts] == [("a/0#8", True), ("a/1#8", True)]

    def test_with_a_warm_start_these_are_forks_of_the_warm_parent_too(self) -> None:
        node = Node(slots=2, warm_start=True)
        actions = node.train("b/0#0", generation=9)
        assert [type(action) for action in actions if isinstance(action, (Warm, Start))] == [Warm, Start, Start]
        assert only(Warm, node.train("b/0#0", generation=10)) == []

    def test_so_are_those_of_a_spare_for_which_the_job_becomes_larger(self) -> None:
        node = Node(max_nodes=1, warm_start=True)
        assert only(Warm, node.train("b/0#0")) == []
        actions = node.does(node.life.on_resized(1, 2, NOW_S))
        assert [type(action) for action in actions] == [Warm, Start]

    def test_unless_the_job_has_all_its_nodes(self) -> None:
        node = Node()
        assert started(node.train("b/0#0", "c/0#0")) == []
        assert started(node.train("b/0#0")) == ["a/0#1"]

    def test_a_spare_with_a_replacement_due_is_not_woken_for_it(self) -> None:
        node = member_node()
        node.dies("a/0#0")
        node.train("b/0#0", "c/0#0")
        assert started(node.later(100)) == []
        assert node.life.due_s() is None
        assert started(node.train("b/0#0")) == ["a/0#1"]

    def test_a_spare_that_is_to_be_held_ready_starts_its_workers_once_the_job_trains(self) -> None:
        node = Node(slots=2, max_nodes=1)
        node.generation(GenerationStage.START, "b/0")
        assert node.does(node.life.on_spares(("a",), NOW_S))[0] == Log("spares", ("a",))
        assert "this node is a spare: its workers start, register, and wait" in said(node.actions)
        assert started(node.actions) == [], "the script may be a plain one"
        assert started(node.train("b/0#0")) == ["a/0#1", "a/1#1"]
        node.ready("a/0#1", "a/1#1")
        assert set(node.states().values()) == {WorkerState.READY}
        assert node.life.on_spares(("a",), NOW_S) == [], "nothing is new"
        assert [type(one) for one in node.train("a/0#1", "a/1#1")].count(Tell) == 2

    def test_a_spare_with_the_state_takes_part_and_the_line_on_a_change_counts_it_apart(self) -> None:
        node = Node(max_nodes=1)
        node.life.settings = replace(node.life.settings, spare_state=True)
        node.train("b/0#0")
        (worker,) = started(node.does(node.life.on_spares(("a",), NOW_S)))
        assert "this node is a spare: its workers start, register, and follow each step until" in said(node.actions)
        node.ready(worker)
        node.train("b/0#0", worker, standby=(worker,), cause="it joins")
        assert said(node.actions) == "it joins; 1 worker goes on, and 1 of spares with it"
        node.train(worker, cause="b was lost")
        assert said(node.actions) == "b was lost; 1 worker goes on"

    def test_so_does_one_that_hears_of_it_later_and_it_starts_them_again_when_they_die(self) -> None:
        node = Node(max_nodes=1)
        assert said(node.train("b/0#0")) == "this node waits as a spare: the job has its 1 node"
        assert started(node.does(node.life.on_spares(("c",), NOW_S))) == []
        (first,) = started(node.does(node.life.on_spares(("a",), NOW_S)))
        node.ready(first)
        node.dies(first)
        (second,) = started(node.later(BACKOFF_S[1]))  # one that dies is replaced, as a member is
        node.life.on_spares((), NOW_S)
        node.dies(second)
        assert started([*node.actions, *node.later(100)]) == [], "it is held no more"

    def test_incarnations_are_never_used_again(self) -> None:
        node = member_node(slots=2)
        seen = {"a/0#0", "a/1#0"}
        for _ in range(30):
            for slot in node.life.slots:
                node.ready(slot.worker)
                node.life.on_progress(slot.worker, 2)
                for worker in started(node.dies(slot.worker)):
                    assert worker not in seen
                    seen.add(worker)
        assert len(seen) == 62

    def test_an_agent_started_again_does_not_use_the_names_of_its_predecessors_members(self) -> None:
        first = member_node()
        first.life.on_progress("a/0#0", 2)
        assert started(first.dies("a/0#0")) == ["a/0#1"]
        # The death, the join of a/0#1 and its loss with the first agent are a generation each.
        assert started(Node().train("b/0#0", generation=5)) == ["a/0#4"]


class TestBeforeTheFirstStep:
    def test_a_worker_that_has_attached_is_replaced(self) -> None:
        node = Node()
        node.start()
        node.life.on_attach("a/0#0")
        node.exits("a/0#0", 1)
        assert node.life.doc().summary.failed == ""
        assert node.life.due_s() == node.now_s + BACKOFF_S[1]
        assert started(node.later(BACKOFF_S[1])) == ["a/0#1"]

    def test_until_that_is_hopeless(self) -> None:
        node = Node()
        node.start()
        for incarnation in range(FRUITLESS_LIMIT):
            node.life.on_attach(f"a/0#{incarnation}")
            node.exits(f"a/0#{incarnation}", 1)
            node.later(100)
        assert node.life.doc().summary.failed == "worker a/0#2 exited with code 1"
        assert node.life.due_s() is None

    def test_a_worker_that_has_not_attached_is_left_to_the_job(self) -> None:
        node = Node()
        node.start()
        assert started(node.exits("a/0#0", 3)) == []
        doc = node.life.doc()
        assert (doc.summary.failed, doc.cause_t, doc.workers) == ("worker a/0#0 exited with code 3", T, ())
        assert started(node.later(1000)) == []

    def test_it_is_replaced_once_the_job_is_known_to_use_elaunch_and_then_nothing_has_failed(self) -> None:
        node = Node(slots=2)
        node.start()
        node.ready("a/1#0")
        node.exits("a/0#0", 3)
        assert started(node.train("a/1#0")) == ["a/0#1"]
        assert node.life.doc().summary.failed == ""

    def test_a_node_fails_when_nothing_of_it_runs_or_will(self) -> None:
        node = Node(slots=2, max_restarts=0)
        node.start()
        node.life.on_attach("a/1#0")
        node.exits("a/0#0", 3)
        node.exits("a/1#0", 4)
        assert node.life.doc().summary.failed == "worker a/1#0 exited with code 4"


class TestPlainScripts:
    def test_a_node_has_finished_when_each_worker_has_ended_with_0(self) -> None:
        node = Node(slots=2)
        node.start()
        assert node.exits("a/0#0", 0) == []
        assert not node.life.doc().summary.finished
        assert node.exits("a/1#0", 0) == []
        assert node.life.doc().summary.finished

    def test_a_node_with_a_failure_has_not_finished(self) -> None:
        node = Node(slots=2)
        node.start()
        node.exits("a/0#0", 0)
        node.exits("a/1#0", 1)
        assert not node.life.doc().summary.finished

    def test_a_death_by_an_unknown_signal_is_told_by_number(self) -> None:
        node = Node()
        node.start()
        node.dies("a/0#0", number=63)
        assert node.life.doc().summary.failed == "worker a/0#0 was killed by signal 63"


class TestAttempts:
    def test_a_new_attempt_ends_all_workers_before_the_report_says_so(self) -> None:
        node = Node(slots=2, max_restarts=3)
        node.start()
        node.exits("a/0#0", 1)
        actions = node.generation(GenerationStage.ASSEMBLE, attempt=1, cause="worker a/0#0 exited with code 1")
        assert signalled(actions) == [("a/1#0", signal.SIGTERM)]
        assert said(actions) == "worker a/0#0 exited with code 1: all workers are started again (attempt 1)"
        assert node.life.doc().progress.attempt == 0
        assert started(node.dies("a/1#0", signal.SIGTERM)) == []
        doc = node.life.doc()
        assert (doc.progress.attempt, doc.summary.failed, doc.workers) == (1, "", ())

    def test_then_all_start_with_new_names(self) -> None:
        node = Node(slots=2)
        node.start()
        node.exits("a/0#0", 1)
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        node.dies("a/1#0", signal.SIGTERM)
        assert started(node.start()) == ["a/0#1", "a/1#1"]

    def test_workers_that_ignore_sigterm_are_killed_after_the_shutdown_time(self) -> None:
        node = Node()
        node.start()
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        assert node.life.due_s() == NOW_S + 30
        assert signalled(node.later(30)) == [("a/0#0", signal.SIGKILL)]
        assert signalled(node.later(30)) == []

    def test_workers_of_the_new_attempt_are_not_killed_for_those_of_the_old(self) -> None:
        node = Node()
        node.start()
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        node.dies("a/0#0", signal.SIGTERM)
        node.start()
        assert node.life.due_s() is None
        assert node.later(1000) == []

    def test_a_node_without_workers_is_at_once_ready_for_the_attempt(self) -> None:
        node = Node()
        # It has nothing to stop; its user still learns what it waits for.
        assert said(node.generation(GenerationStage.ASSEMBLE, attempt=1, cause="it begins again")) == "it begins again"
        assert node.life.doc().progress.attempt == 1
        assert not node.life.doc().summary.took_part

    def test_a_node_that_was_absent_meanwhile_ends_its_old_workers_too(self) -> None:
        node = Node()
        node.start()
        assert signalled(node.start("b/0", attempt=1)) == [("a/0#0", signal.SIGTERM)]
        assert node.life.doc().progress.attempt == 0
        node.dies("a/0#0", signal.SIGTERM)
        assert node.life.doc().progress.attempt == 1

    def test_an_agent_that_follows_a_lost_one_of_the_same_name_never_uses_its_workers_names(self) -> None:
        node = Node()
        actions = node.train("a/0#8", "b/0#0", generation=5)
        assert [action.worker for action in actions if isinstance(action, Start)] == ["a/0#9"]
        assert not node.life.doc().summary.took_part

    def test_and_joins_again_with_new_ones(self) -> None:
        node = member_node()
        actions = node.train("b/0#5", attempt=1)
        assert ("a/0#0", signal.SIGKILL) in signalled(actions)
        assert started(node.later(1)) == [], "not before the old one has ended"
        node.dies("a/0#0")
        assert started(node.later(0)) == ["a/0#1"]

    def test_a_node_that_is_new_takes_the_attempt_of_the_job(self) -> None:
        node = Node()
        node.train("b/0#5", attempt=3)
        assert node.life.doc().progress.attempt == 3

    def test_slots_that_were_given_up_are_tried_again(self) -> None:
        node = member_node()
        for incarnation in range(FRUITLESS_LIMIT):
            node.dies(f"a/0#{incarnation}")
            node.later(100)
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        assert node.life.doc().summary.failed == ""
        assert started(node.start()) == ["a/0#3"]


class TestGivenUpByPeers:
    def test_a_member_that_the_others_go_on_without_is_killed(self) -> None:
        node = member_node()
        actions = node.train("b/0#0")
        assert signalled(actions) == [("a/0#0", signal.SIGKILL)]
        assert only(Tell, actions) == []
        assert "worker a/0#0 was given up by its peers" in said(actions)

    def test_one_that_is_to_leave_is_told_so_instead(self) -> None:
        node = member_node()
        actions = node.train("b/0#0", leaving=("a/0#0",))
        assert signalled(actions) == []
        assert [tell.worker for tell in only(Tell, actions)] == ["a/0#0"]

    def test_one_that_had_not_entered_is_not_reported_as_ready_while_it_is_killed(self) -> None:
        """The leader would take it in again, and with its end the membership would change once more."""
        node = member_node()
        node.life.on_progress("a/0#0", 2)
        node.dies("a/0#0")
        node.ready("a/0#1")
        node.train("b/0#0", "a/0#1")
        assert signalled(node.train("b/0#0")) == [("a/0#1", signal.SIGKILL)]
        assert node.life.doc().workers == ()
        node.dies("a/0#1")
        node.later(100)
        node.ready("a/0#2")
        assert [worker.state for worker in node.life.doc().workers] == [WorkerState.READY]

    def test_one_that_was_replaced_before_its_agent_heard_of_a_generation_with_it_is_killed(self) -> None:
        """No generation would take it in again, and nobody else ends it."""
        node = Node()
        node.start("a/0", "b/0")
        node.ready("a/0#0")
        actions = node.train("b/0#0", generation=5, streak=Streak(3, 3, 3, replaced=("a/0#0",)))
        assert signalled(actions) == [("a/0#0", signal.SIGKILL)]
        assert node.life.doc().workers == ()
        node.dies("a/0#0")
        assert started(node.later(100)) == ["a/0#1"]

    def test_one_that_waits_to_join_is_not(self) -> None:
        node = member_node()
        node.life.on_progress("a/0#0", 2)
        node.dies("a/0#0")
        node.ready("a/0#1")
        actions = node.train("b/0#0")
        assert signalled(actions) == []
        assert [tell.worker for tell in only(Tell, actions)] == ["a/0#1"]


class TestUnreachablePeers:
    def test_a_dead_peer_is_reported_until_it_is_no_member(self) -> None:
        node = member_node()
        node.life.on_unreachable(2, "b/0#0", refused=True, now_s=0.0)
        node.life.on_unreachable(2, "b/0#0", refused=True, now_s=0.0)
        assert node.life.doc().peers.unreachable == ("b/0#0",)
        node.train("a/0#0")
        assert node.life.doc().peers.unreachable == ()

    def test_a_broken_link_to_a_living_one_asks_for_a_new_link(self) -> None:
        node = member_node()
        node.life.on_unreachable(2, "b/0#0", refused=False, now_s=0.0)
        doc = node.life.doc()
        assert (doc.peers.unreachable, doc.peers.reset_generation) == ((), 2)

    def test_reports_that_an_urgent_generation_has_settled_are_ignored(self) -> None:
        node = member_node(others=("b/0#0", "c/0#0"), max_nodes=3)
        node.train("a/0#0", "b/0#0", aborts_step_before=3)
        node.life.on_unreachable(2, "b/0#0", refused=True, now_s=0.0)
        node.life.on_unreachable(2, "b/0#0", refused=False, now_s=0.0)
        doc = node.life.doc()
        assert (doc.peers.unreachable, doc.peers.reset_generation) == ((), 0)

    def test_reports_of_an_older_generation_count_while_changes_are_planned(self) -> None:
        node = member_node()
        node.train("a/0#0", "b/0#0", "c/0#2", aborts_step_before=2)
        node.life.on_unreachable(2, "b/0#0", refused=True, now_s=0.0)
        assert node.life.doc().peers.unreachable == ("b/0#0",)

    def test_a_dead_peer_that_a_planned_generation_forgot_ends_the_step_all_the_same(self) -> None:
        """It died before it could leave, its node went, and a leader that knew nothing of either went on."""
        node = member_node()
        node.life.on_unreachable(2, "b/0#0", refused=True, now_s=0.0)
        node.train("a/0#0", "c/0#2", aborts_step_before=2)
        doc = node.life.doc()
        assert (doc.peers.unreachable, doc.peers.reset_generation) == ((), 3)
        node.train("a/0#0", "c/0#2", aborts_step_before=2)
        node.life.on_unreachable(2, "b/0#0", refused=True, now_s=0.0)
        assert node.life.doc().peers.reset_generation == 4

    def test_whether_a_worker_of_this_node_lives_the_agent_knows_best(self) -> None:
        node = member_node(slots=2)
        node.life.on_unreachable(2, "a/1#0", refused=True, now_s=0.0)
        assert node.life.doc().peers.unreachable == ()

    def test_the_last_holder_of_the_state_may_refuse_its_peers_for_long(self) -> None:
        """Its peer died, and the replacement cannot get the state from anybody else."""
        node = member_node(2)
        node.dies("a/0#0")
        node.later(1.0)
        node.train("a/1#0", "a/0#1")
        node.life.on_unreachable(node.number, "a/1#0", refused=True, now_s=node.now_s)
        due_s = node.life.due_s()
        assert due_s is not None
        assert due_s > node.now_s + LAST_REFUSED_S
        assert signalled(node.later(LAST_REFUSED_S)) == []
        assert signalled(node.later(REFUSED_S)) == [("a/1#0", signal.SIGKILL)]

    def test_a_live_worker_that_refuses_its_peers_is_ended_after_a_while_and_replaced(self) -> None:
        node = member_node(slots=2)
        node.life.on_progress("a/1#0", 2)
        node.life.on_unreachable(2, "a/1#0", refused=True, now_s=node.now_s)
        assert signalled(node.later(REFUSED_S - 0.1)) == []
        assert node.life.due_s() == pytest.approx(node.now_s + 0.1)
        actions = node.later(0.1)
        assert signalled(actions) == [("a/1#0", signal.SIGKILL)]
        assert "a/1#0 runs, but refuses the connections of its peers" in said(actions)
        assert signalled(node.later(10.0)) == []
        assert started(node.dies("a/1#0")) == ["a/1#1"]

    @pytest.mark.parametrize("end", ["finished", "left", "ended"])
    def test_one_that_ends_in_order_may_refuse_its_peers(self, end: str) -> None:
        node = member_node(slots=2)
        node.life.on_unreachable(2, "a/1#0", refused=True, now_s=node.now_s)
        if end == "finished":
            node.life.on_finished("a/1#0")
        elif end == "left":
            node.life.on_leaving("a/1#0")
        else:
            node.dies("a/1#0")
        assert signalled(node.later(2 * REFUSED_S)) == []

    def test_what_one_that_has_ended_may_have_said_of_another_counts_no_more(self) -> None:
        """Nobody listened at its own address, and it found the other dead; by then that one alone held the state."""
        node = member_node(slots=2)
        node.life.on_unreachable(2, "a/0#0", refused=True, now_s=node.now_s)
        node.dies("a/1#0")
        assert signalled(node.later(LAST_REFUSED_S + 2 * REFUSED_S)) == []
        node.life.on_unreachable(2, "a/0#0", refused=True, now_s=node.now_s)  # another one finds it so
        assert signalled(node.later(LAST_REFUSED_S + 2 * REFUSED_S)) == [("a/0#0", signal.SIGKILL)]

    def test_the_links_that_broke_are_told_until_the_next_generation(self) -> None:
        node = member_node(slots=2)
        for worker, peer in (("a/0#0", "b/0#0"), ("a/1#0", "b/0#0"), ("a/0#0", "b/0#0"), ("a/0#0", "c/9#9")):
            node.life.on_broken(2, worker, peer)
        node.life.on_broken(1, "a/1#0", "a/0#0")
        assert node.life.doc().peers.broken == (BrokenLink("a/0#0", "b/0#0"), BrokenLink("a/1#0", "b/0#0"))
        node.train("a/0#0", "a/1#0", "b/0#0", aborts_step_before=3)
        assert node.life.doc().peers.broken == ()

    def test_commits_are_told_by_the_first_member_while_a_streak_lasts(self) -> None:
        node = member_node(slots=2)
        node.life.on_progress("a/0#0", 2)
        assert node.life.doc().progress.committed == 0
        node.train("a/0#0", "a/1#0", aborts_step_before=3, streak=Streak(1))
        node.life.on_progress("a/1#0", 3)
        assert node.life.doc().progress.committed == 0
        node.life.on_progress("a/0#0", 3)
        assert node.life.doc().progress.committed == 3

    def test_one_that_finished_and_ended_here_is_gone_for_a_peer_that_still_needs_it(self) -> None:
        node = member_node(slots=2)
        node.life.on_finished("a/1#0")
        node.exits("a/1#0", 0)
        node.life.on_unreachable(2, "a/1#0", refused=True, now_s=0.0)
        assert node.life.doc().peers.unreachable == ("a/1#0",)


class TestWhatIsNamedAsTheCause:
    def test_the_first_of_deaths_that_come_together_and_not_what_follows_from_it(self) -> None:
        node = member_node(slots=3)
        node.life.on_exit("a/1#0", 1, None, T, NOW_S, Account("ValueError: no (train.py:3 in main)"))
        node.life.on_exit("a/0#0", None, signal.SIGABRT, T + 0.3, NOW_S)
        first = "worker a/1#0 exited with code 1: ValueError: no (train.py:3 in main)"
        assert (node.life.doc().cause, node.life.doc().cause_t) == (first, T)
        node.life.on_exit("a/2#0", None, signal.SIGKILL, T + 5, NOW_S)
        assert node.life.doc().cause == "worker a/2#0 was killed by SIGKILL"

    def test_a_death_after_the_generation_that_answers_the_first_is_a_cause_of_its_own(self) -> None:
        node = member_node(slots=3)
        node.life.on_exit("a/1#0", None, signal.SIGKILL, T, NOW_S)
        node.train("a/0#0", "a/2#0", cause="worker a/1#0 was killed by SIGKILL", aborts_step_before=node.number + 1)
        node.life.on_exit("a/2#0", None, signal.SIGKILL, T + 0.9, NOW_S)
        second = "worker a/2#0 was killed by SIGKILL"
        assert (node.life.doc().cause, node.life.doc().cause_t) == (second, T + 0.9)
        node.life.on_exit("a/0#0", None, signal.SIGABRT, T + 1.0, NOW_S)
        assert node.life.doc().cause == second

    def test_of_a_plain_script_too(self) -> None:
        node = Node(slots=2)
        node.start()
        for worker, t in (("a/1#0", T), ("a/0#0", T + 0.1)):
            node.life.on_exit(worker, 1, None, t, NOW_S)
        assert (node.life.doc().summary.failed, node.life.doc().cause_t) == ("worker a/1#0 exited with code 1", T)


def test_what_is_said_of_workers_that_wait_is_of_one_generation() -> None:
    node = member_node()
    node.life.on_stalled(stalled := (Stalled("a/0#0", 7, "in step 7", 2, 40),))
    assert node.life.doc().peers.stalled == stalled
    node.train("a/0#0", "b/0#0")
    assert node.life.doc().peers.stalled == (), "the new one may be what they waited for"


class TestNodesOutOfReach:
    def test_they_are_reported_and_told_of_once_each_way(self) -> None:
        node = member_node()
        cut = (Cut("b", "10.0.0.2"),)
        (say,) = only(Say, node.life.on_reach(cut, frozenset()))
        assert say.text == "nothing comes from b (10.0.0.2) any more: the network from here to there is cut"
        assert node.life.doc().peers.cut == cut
        assert node.life.on_reach(cut, frozenset()) == []
        (say,) = only(Say, node.life.on_reach((), frozenset()))
        assert say.text == "b (10.0.0.2) can be reached again from here"
        assert (node.life.doc().peers.cut, node.life.doc().peers.reset_generation) == ((), 0)

    def test_one_that_answers_after_all_needs_a_new_link(self) -> None:
        node = member_node()
        note_lost_link(node.life, "a/0#0", Unreachable(2, "b/0#0", refused=False, silent=True), node.now_s)
        assert node.life.on_reach((), frozenset({"b"})) == []
        assert node.life.doc().peers.reset_generation == 2

    def test_but_not_if_the_step_has_begun_again_since(self) -> None:
        """A machine that was lost and is back answers, too: those that go on without it have new links."""
        node = member_node()
        note_lost_link(node.life, "a/0#0", Unreachable(2, "b/0#0", refused=False, silent=True), node.now_s)
        node.train("a/0#0", "c/0#0", aborts_step_before=node.number + 1)
        assert node.life.on_reach((), frozenset({"b"})) == []
        assert node.life.doc().peers.reset_generation == 0

    def test_a_silent_peer_that_is_to_leave_counts_as_dead(self) -> None:
        """It is no member of the newest generation, so nobody else finds out whether it can be reached."""
        node = member_node()
        node.train("a/0#0", leaving=("b/0#0",))
        found = Unreachable(2, "b/0#0", refused=False, silent=True)
        assert not note_lost_link(node.life, "a/0#0", found, node.now_s)
        assert node.life.doc().peers.unreachable == ("b/0#0",)

    def test_for_a_silent_peer_whose_node_was_lost_as_it_left_the_step_begins_again(self) -> None:
        """The newest generation does not name it any more, and interrupts no step: the worker would wait for ever."""
        node = member_node()
        node.train("a/0#0", leaving=("b/0#0",))
        node.train("a/0#0", "c/0#0")
        found = Unreachable(2, "b/0#0", refused=False, silent=True)
        assert not note_lost_link(node.life, "a/0#0", found, node.now_s)
        assert node.life.generation is not None
        assert node.life.doc().peers.reset_generation == node.life.generation.number
        assert node.life.doc().peers.unreachable == ()

    def test_but_not_if_it_has_begun_again_without_that_peer(self) -> None:
        node = member_node()
        node.train("a/0#0", "c/0#0", aborts_step_before=node.number + 1)
        assert not note_lost_link(node.life, "a/0#0", Unreachable(2, "b/0#0", refused=False, silent=True), node.now_s)
        assert node.life.doc().peers.reset_generation == 0

    def test_other_nodes_are_asked_about_a_silent_member(self) -> None:
        node = member_node()
        assert note_lost_link(node.life, "a/0#0", Unreachable(2, "b/0#0", refused=False, silent=True), node.now_s)
        assert node.life.doc().peers.broken == (BrokenLink("a/0#0", "b/0#0"),)
        assert node.life.doc().peers.unreachable == ()

    def test_a_worker_that_is_to_leave_and_finds_a_member_silent_has_the_step_begun_again(self) -> None:
        """A decision on its node changes no member, and the others would wait for what it does not send any more."""
        node = member_node()
        node.train("b/0#0", leaving=("a/0#0",))
        assert note_lost_link(node.life, "a/0#0", Unreachable(2, "b/0#0", refused=False, silent=True), node.now_s)
        assert node.life.generation is not None
        assert node.life.doc().peers.reset_generation == node.life.generation.number
        assert node.life.doc().peers.unreachable == ()

    def test_links_that_a_cut_broke_are_made_anew_when_it_is_over(self) -> None:
        """The leader may have been out of reach for as long as it lasted."""
        node = member_node()
        node.life.on_broken(2, "a/0#0", "b/0#0")
        node.life.on_reach((Cut("b", "10.0.0.2"),), frozenset())
        assert node.life.doc().peers.reset_generation == 0
        node.life.on_reach((), frozenset())
        assert node.life.doc().peers.reset_generation == 2

    @pytest.mark.parametrize("settled", [False, True])
    def test_a_worker_whom_the_others_left_out_is_ended_and_another_takes_its_place(self, settled: bool) -> None:
        node = member_node()
        if not settled:
            node.life.find("a/0#0").state = SlotState.JOINING  # type: ignore[union-attr]
        (killed,) = only(Signal, node.train("b/0#0"))
        assert (killed.worker, killed.number) == ("a/0#0", signal.SIGKILL)
        node.dies("a/0#0")
        assert started(node.later(1)) == ["a/0#1"]


class TestTheEnd:
    def test_done_workers_that_end_with_0_make_the_node_finished(self) -> None:
        node = member_node(slots=2)
        for worker in ("a/0#0", "a/1#0"):
            node.life.on_finished(worker)
            assert not node.life.doc().summary.finished
            node.exits(worker, 0)
        assert node.life.doc().summary.finished
        assert set(node.states().values()) == {WorkerState.DONE}

    def test_a_worker_that_has_not_joined_does_not_keep_the_node_from_finishing(self) -> None:
        node = member_node(slots=2)
        node.life.on_progress("a/1#0", 2)
        node.dies("a/1#0")
        node.life.on_finished("a/0#0")
        node.exits("a/0#0", 0)
        assert node.states()["a/1#1"] is WorkerState.STARTING
        assert node.life.doc().summary.finished

    def test_an_exit_code_after_the_last_step_is_a_failure_and_nothing_is_replaced(self) -> None:
        node = member_node()
        node.life.on_finished("a/0#0")
        assert started(node.exits("a/0#0", 4)) == []
        doc = node.life.doc()
        assert (doc.summary.failed, doc.summary.finished) == ("worker a/0#0 exited with code 4", False)

    def test_success_ends_the_agent_with_0_once_its_workers_have_ended(self) -> None:
        node = member_node()
        node.life.on_finished("a/0#0")
        assert node.does(node.life.on_result(Result(True, "all workers have finished"), NOW_S)) == []
        assert node.exits("a/0#0", 0) == [Exit(0)]

    def test_success_kills_what_has_not_joined_and_starts_nothing_more(self) -> None:
        node = member_node(slots=2)
        node.life.on_progress("a/1#0", 2)
        node.dies("a/1#0")
        node.life.on_finished("a/0#0")
        node.exits("a/0#0", 0)
        assert signalled(node.life.on_result(Result(True), NOW_S)) == [("a/1#1", signal.SIGKILL)]
        assert node.dies("a/1#1") == [Exit(0)]

    def test_a_late_node_starts_nothing_more_after_success(self) -> None:
        node = Node()
        assert started(node.train("b/0#0")) == ["a/0#0"]
        node.life.on_result(Result(True), NOW_S)
        assert node.dies("a/0#0") == [Exit(0)]

    def test_failure_stops_the_workers_and_ends_with_1_and_the_message(self) -> None:
        node = member_node()
        assert signalled(node.life.on_result(Result(False, "all were lost"), NOW_S)) == [("a/0#0", signal.SIGTERM)]
        assert signalled(node.later(30)) == [("a/0#0", signal.SIGKILL)]
        assert node.dies("a/0#0") == [Exit(1, "all were lost")]

    @pytest.mark.parametrize(("succeeded", "code"), [(True, 0), (False, 1)])
    def test_an_agent_without_workers_ends_at_once(self, succeeded: bool, code: int) -> None:
        (end,) = Node().life.on_result(Result(succeeded, "why"), NOW_S)
        assert isinstance(end, Exit)
        assert (end.code, bool(end.text)) == (code, not succeeded)

    def test_a_refused_node_ends_with_1_and_the_reason(self) -> None:
        assert Node().life.on_refused("other settings", NOW_S) == [Exit(1, "other settings")]
        node = member_node()
        assert signalled(node.life.on_refused("other settings", NOW_S)) == [("a/0#0", signal.SIGTERM)]


class TestSignals:
    def test_sigterm_lets_the_members_of_a_training_node_leave(self) -> None:
        node = member_node()
        actions = node.does(node.life.on_signal(signal.SIGTERM, NOW_S))
        assert signalled(actions) == []
        assert "leave at the next step boundary; the others go on" in said(actions)
        assert node.life.doc().draining
        node.train("b/0#0", leaving=("a/0#0",))
        node.life.on_leaving("a/0#0")
        assert node.exits("a/0#0", 0) == [Exit(0)]
        assert node.life.doc().peers.unreachable == ()

    @pytest.mark.parametrize(("over", "code"), [(False, 143), (True, 0)])
    def test_a_node_that_has_left_ends_with_the_code_for_it_unless_the_job_is_done(self, over: bool, code: int) -> None:
        node = member_node()
        node.life.settings = replace(node.life.settings, left_code=143)
        node.does(node.life.on_signal(signal.SIGTERM, NOW_S))
        node.train("b/0#0", leaving=("a/0#0",))
        node.life.on_leaving("a/0#0")
        if over:
            node.does(node.life.on_result(Result(True), NOW_S))
        assert node.exits("a/0#0", 0) == [Exit(code)]

    def test_the_last_node_says_that_nobody_goes_on_and_ends_with_1(self) -> None:
        node = member_node(others=())
        assert "no other node is left to go on" in said(node.life.on_signal(signal.SIGTERM, NOW_S))
        node.life.on_leaving("a/0#0")
        assert node.exits("a/0#0", 0) == [Exit(1, "stopped by SIGTERM; the state in memory is gone")]

    def test_draining_ends_workers_that_have_not_joined_and_replaces_nothing(self) -> None:
        node = member_node(slots=2)
        node.life.on_progress("a/1#0", 2)
        node.dies("a/1#0")
        assert signalled(node.life.on_signal(signal.SIGTERM, NOW_S)) == [("a/1#1", signal.SIGTERM)]
        assert node.dies("a/1#1", signal.SIGTERM) == []
        assert started(node.later(1)) == []
        assert node.life.doc().peers.unreachable == ()

    @pytest.mark.parametrize("code", [0, 1])
    def test_a_worker_that_ends_before_it_could_leave_is_reported_as_gone(self, code: int) -> None:
        node = member_node(slots=2)
        node.life.on_signal(signal.SIGTERM, NOW_S)
        node.exits("a/0#0", code)
        doc = node.life.doc()
        assert doc.peers.unreachable == ("a/0#0",)
        assert doc.cause == f"worker a/0#0 exited with code {code} before the step boundary at which it was to leave"
        assert said(node.actions) == doc.cause

    def test_what_has_not_left_in_the_shutdown_time_is_killed(self) -> None:
        node = member_node()
        node.life.on_signal(signal.SIGTERM, NOW_S)
        assert node.life.due_s() == NOW_S + 30
        assert signalled(node.later(30)) == [("a/0#0", signal.SIGKILL)]

    @pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
    def test_a_second_signal_kills(self, second: signal.Signals) -> None:
        node = member_node()
        node.life.on_signal(signal.SIGTERM, NOW_S)
        assert signalled(node.life.on_signal(second, NOW_S)) == [("a/0#0", signal.SIGKILL)]

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
    def test_other_signals_stop_a_training_node_too(self, number: signal.Signals) -> None:
        node = member_node()
        assert signalled(node.life.on_signal(number, NOW_S)) == [("a/0#0", number)]
        assert node.dies("a/0#0", signal.SIGTERM) == [Exit(1, f"stopped by {number.name}")]

    def test_a_worker_that_was_told_to_end_has_failed_by_itself_only_where_it_says_so(self) -> None:
        node = member_node(slots=3)
        node.exits("a/0#0", 3)
        node.life.on_signal(signal.SIGINT, NOW_S)
        node.dies("a/1#0", signal.SIGINT)
        node.life.on_exit("a/2#0", 1, None, T, NOW_S, Account("ValueError: no such split"))
        failures = node.life.workers.blame.failures
        assert {rank: one.own for rank, one in failures.items()} == {0: True, 1: False, 2: True}

    def test_sigterm_stops_a_plain_job(self) -> None:
        node = Node()
        node.start()
        assert signalled(node.life.on_signal(signal.SIGTERM, NOW_S)) == [("a/0#0", signal.SIGTERM)]
        assert signalled(node.later(29)) == []
        assert signalled(node.later(1)) == [("a/0#0", signal.SIGKILL)]
        assert node.dies("a/0#0") == [Exit(1, "stopped by SIGTERM")]

    def test_a_node_that_waits_ends_at_once(self) -> None:
        assert Node().life.on_signal(signal.SIGTERM, NOW_S) == [Exit(1, "stopped by SIGTERM")]

    def test_a_stopping_node_reacts_to_nothing_but_its_workers_ends(self) -> None:
        node = member_node()
        node.life.on_signal(signal.SIGINT, NOW_S)
        assert node.train("b/0#0") == []
        assert node.life.on_result(Result(True), NOW_S) == []
        assert node.later(1) == []
        assert node.dies("a/0#0") == [Exit(1, "stopped by SIGINT")]

    def test_a_sick_node_leaves_when_the_leader_has_it_leave(self) -> None:
        node = member_node()
        assert node.life.on_sick("GPU 3: XID 79") == []
        assert node.life.doc().departure == Departure(sick="GPU 3: XID 79")
        assert node.life.on_sick("GPU 4: XID 48") == []
        node.train("a/0#0", "b/0#0", "c/0#0")
        assert not node.life.doc().draining
        actions = node.life.drain(node.life.doc().departure.sick, NOW_S)
        assert "GPU 3: XID 79: the workers of this node leave at the next step boundary" in said(actions)
        assert node.life.doc().draining
        node.train("b/0#0", "c/0#0", leaving=("a/0#0",))
        node.life.on_leaving("a/0#0")
        assert node.exits("a/0#0", 0) == [Exit(0)]

    def test_a_sick_node_for_which_a_spare_is_held_does_not_say_that_it_stays(self) -> None:
        node = member_node(others=())
        node.life.on_spares(("z",), NOW_S)
        assert node.life.on_sick("GPU 3: XID 95") == []

    def test_a_sick_node_that_the_job_cannot_spare_says_once_that_it_stays(self) -> None:
        node = member_node(others=())
        assert "would have no other node without it; it leaves when others have come" in said(
            node.life.on_sick("GPU 3: XID 79")
        )
        assert node.life.on_sick("GPU 3: XID 79") == []
        assert node.later(1) == []
        assert node.life.doc().departure.sick == "GPU 3: XID 79"

    def test_a_sick_node_counts_the_minimum(self) -> None:
        node = member_node()
        node.life.settings = replace(node.life.settings, min_nodes=2, max_nodes=3)
        assert "would have 1 of at least 2 nodes without it" in said(node.life.on_sick("GPU 3: XID 79"))

    def test_a_node_that_was_sick_before_it_trained_says_so_when_it_does(self) -> None:
        node = Node()
        node.start()
        assert node.life.on_sick("GPU 3: XID 79") == []
        node.ready("a/0#0")
        assert "would have no other node without it" in said(node.train("a/0#0"))

    def test_sigterm_to_a_node_that_leaves_by_itself_changes_nothing_and_a_second_one_kills(self) -> None:
        node = member_node()
        node.life.drain("GPU 3: XID 79", NOW_S)
        assert "leave already" in said(node.life.on_signal(signal.SIGTERM, NOW_S))
        assert signalled(node.life.on_signal(signal.SIGTERM, NOW_S)) == [("a/0#0", signal.SIGKILL)]
        node = member_node()
        node.life.drain("GPU 3: XID 79", NOW_S)
        assert signalled(node.life.on_signal(signal.SIGINT, NOW_S)) == [("a/0#0", signal.SIGKILL)]

    def test_what_leaves_ends_by_itself_also_where_the_job_succeeds_meanwhile(self) -> None:
        node = member_node(slots=2)
        node.life.on_signal(signal.SIGTERM, NOW_S)
        node.life.on_leaving("a/0#0")
        assert signalled(node.life.on_result(Result(True), NOW_S)) == []
        node.exits("a/0#0", 0)
        node.life.on_leaving("a/1#0")
        assert signalled(node.later(30)) == [("a/1#0", signal.SIGKILL)]
        assert node.dies("a/1#0") == [Exit(0)]

    def test_a_member_that_waits_in_vain_to_leave_a_job_that_has_succeeded_is_killed(self) -> None:
        node = member_node(slots=2)
        assert "the workers of this node leave" in said(node.life.drain("the job is to have fewer nodes", NOW_S))
        assert node.life.on_result(Result(True), NOW_S) == []
        node.life.on_leaving("a/0#0")
        assert node.exits("a/0#0", 0) == []
        assert signalled(node.later(29)) == []
        assert signalled(node.later(2)) == [("a/1#0", signal.SIGKILL)]
        assert node.dies("a/1#0")[-1] == Exit(0)

    def test_a_result_ends_a_draining_node(self) -> None:
        node = member_node()
        node.life.on_signal(signal.SIGTERM, NOW_S)
        assert signalled(node.life.on_result(Result(False, "lost"), NOW_S)) == [("a/0#0", signal.SIGTERM)]


class TestDraining:
    """A node that is asked to leave."""

    def test_a_node_tells_what_its_members_have_entered_only_while_some_of_them_are_to_leave(self) -> None:
        node = member_node(slots=2)
        assert node.life.doc().departure.joined == 0
        node.life.drain("x", NOW_S)
        entered = node.number
        assert node.life.doc().departure.joined == entered
        node.train("a/0#0", "a/1#0", "b/0#0", aborts_step_before=entered + 1)
        node.settled("a/0#0")
        assert node.life.doc().departure.joined == entered
        node.settled("a/1#0")
        assert node.life.doc().departure.joined == entered + 1

    def test_so_does_one_with_a_worker_that_is_excused(self) -> None:
        node = member_node(slots=2)
        node.life.evict("a/1#0", replace=False, why="x")
        assert node.life.doc().departure.joined == node.number

    def test_its_workers_leave_at_a_boundary_and_nothing_hurries_them(self) -> None:
        node = member_node()
        text = said(node.does(node.life.drain("elaunch ctl drain", NOW_S)))
        assert text == "elaunch ctl drain: the workers of this node leave at the next step boundary; the others go on"
        assert node.life.doc().draining
        assert node.life.due_s() is None
        assert node.life.drain("again", NOW_S) == []
        node.life.on_leaving("a/0#0")
        assert node.exits("a/0#0", 0) == [Exit(0)]

    def test_within_the_time_that_is_left(self) -> None:
        node = member_node()
        node.life.drain("aws", NOW_S, 20.0)
        assert node.life.due_s() == NOW_S + 20.0
        assert signalled(node.later(20.0)) == [("a/0#0", signal.SIGKILL)]

    @pytest.mark.parametrize(
        ("saved", "rest"),
        [
            (None, "the state in memory is gone"),
            (0, "the state in memory is gone"),  # no checkpoint can be read
            (40, "there is a checkpoint of 40 steps, from which the job goes on when it is started again"),
        ],
    )
    def test_the_last_one_says_what_is_left_of_the_state(self, saved: int | None, rest: str) -> None:
        node = member_node(others=())
        node.life.drain("SIGUSR1", NOW_S)
        if saved is not None:
            node.life.on_saved(saved)
        node.life.on_leaving("a/0#0")
        assert node.exits("a/0#0", 0) == [Exit(1, f"stopped by SIGUSR1; {rest}")]

    def test_a_node_without_a_part_in_the_job_goes_at_once(self) -> None:
        waiting = Node()
        waiting.start("b/0")
        text = "SIGUSR1: this node leaves; it had no part in the job yet"
        assert waiting.life.drain("SIGUSR1", NOW_S) == [Say(text), Exit(0)]

    @pytest.mark.parametrize("elastic", [False, True])
    def test_before_it_trains_its_workers_end_and_the_others_start_without_it(self, elastic: bool) -> None:
        node = Node()
        node.start("a/0", "b/0")
        node.life.on_started("a/0#0", 100)
        assert said(node.does(node.life.drain("SIGUSR1", NOW_S))) == "SIGUSR1: this node leaves; the others go on"
        assert node.life.doc().draining
        # Not before the others know of it.
        assert signalled(node.actions) == []
        if elastic:
            node.train("b/0#0")
        else:
            node.generation(GenerationStage.ASSEMBLE, attempt=1, leaving=("a",))
        assert signalled(node.actions) == [("a/0#0", signal.SIGTERM)]
        assert node.dies("a/0#0", signal.SIGTERM)[-1] == Exit(0)

    def test_who_leaves_while_others_do_waits_until_the_leader_has_heard_of_it(self) -> None:
        node = Node()
        node.start("a/0", "b/0")
        node.life.on_started("a/0#0", 100)
        node.life.drain("x", NOW_S)
        node.generation(GenerationStage.ASSEMBLE, attempt=1, leaving=("b",))
        assert not [one for one in node.dies("a/0#0", signal.SIGTERM) if isinstance(one, Exit)]
        assert node.later(100) == []
        assert node.life.on_result(Result(False, "every node left"), NOW_S) == [Exit(1, "every node left")]

    def test_while_nodes_meet_again_one_leaves_when_the_leader_lets_it_go(self) -> None:
        node = Node()
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        assert node.life.drain("x", NOW_S) == [Say("x: this node leaves")]
        assert node.life.doc().draining
        assert node.later(1) == []
        assert node.start("a/0", "b/0") == [], "it was counted, and does not start any more"
        node.generation(GenerationStage.ASSEMBLE, attempt=2, leaving=("a",))
        assert node.later(0) == [Exit(0)]

    def test_but_not_after_the_time_that_is_left(self) -> None:
        node = Node()
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        node.life.drain("aws", NOW_S, 20.0)
        assert node.life.due_s() == NOW_S + 20.0
        assert node.later(20) == [Exit(0)]

    def test_a_job_that_may_have_more_nodes_has_a_place_for_one_that_waits(self) -> None:
        node = Node(max_nodes=1)
        assert started(node.train("b/0#0")) == []
        assert started(node.does(node.life.on_resized(1, 2, NOW_S))) == ["a/0#0"]


def test_the_report_carries_the_generation_that_the_node_remembers() -> None:
    node = member_node()
    node.train("a/0#0", "b/0#0", generation=17)
    assert node.life.doc().progress.generation == 17


def test_a_report_stays_the_same_while_nothing_happens() -> None:
    node = member_node()
    before = replace(node.life.doc())
    node.later(1000)
    assert node.life.doc() == before


class TestExcused:
    def test_a_member_that_is_excused_stays_one_until_the_job_goes_on_without_it(self) -> None:
        node = member_node(slots=2)
        assert "a/0#0 leaves at the next step boundary" in said(node.does(node.life.evict("a/0#0", True, "it is slow")))
        assert node.life.doc().departure.evicted == ("a/0#0",)
        assert node.states() == {"a/0#0": WorkerState.MEMBER, "a/1#0": WorkerState.MEMBER}
        assert node.life.evict("a/0#0", True, "it is slow") == []
        node.train("a/1#0", "b/0#0", leaving=("a/0#0",))
        assert [told.worker for told in only(Tell, node.actions)] == ["a/0#0", "a/1#0"]
        assert signalled(node.actions) == []

    @pytest.mark.parametrize("code", [0, 1])
    def test_another_process_takes_its_place_however_it_ended(self, code: int) -> None:
        node = member_node(slots=2, max_restarts=0)
        node.life.evict("a/0#0", True, "it is slow")
        node.train("a/1#0", "b/0#0", leaving=("a/0#0",))
        node.life.on_leaving("a/0#0")
        assert started(node.exits("a/0#0", code)) == ["a/0#1"]
        assert node.life.doc().departure.evicted == ()

    def test_or_nobody_does_until_all_are_started_again(self) -> None:
        node = member_node(slots=2)
        node.life.evict("a/0#0", False, "it is slow")
        node.train("a/1#0", "b/0#0", leaving=("a/0#0",))
        node.life.on_leaving("a/0#0")
        assert started(node.exits("a/0#0", 0)) == []
        assert started(node.later(100.0)) == []
        assert started(node.train("a/1#0", "b/0#0")) == []
        assert not node.life.doc().summary.finished

    def test_a_node_of_which_nobody_is_used_any_more_waits_for_the_end_of_the_job(self) -> None:
        node = member_node(slots=1)
        node.life.evict("a/0#0", False, "it is slow")
        node.train("b/0#0", leaving=("a/0#0",))
        node.exits("a/0#0", 0)
        assert "no slot of this node is used any more" in said(node.actions)
        assert only(Exit, node.actions) == []
        (end,) = only(Exit, node.does(node.life.on_result(Result(True), node.now_s)))
        assert end.code == 0

    def test_who_is_no_member_or_is_to_leave_anyway_is_not_excused(self) -> None:
        node = member_node(slots=1)
        assert node.life.evict("a/0#7", False, "it is slow") == []
        node.life.on_signal(signal.SIGTERM, node.now_s)
        assert node.life.evict("a/0#0", False, "it is slow") == []
        assert node.life.doc().departure.evicted == ()

    @pytest.mark.parametrize("replace", [False, True])
    def test_who_finishes_before_it_leaves_is_not_evicted_any_more(self, replace: bool) -> None:
        node = member_node(slots=2)
        node.life.evict("a/0#0", replace, "it is slow")
        node.life.on_finished("a/0#0")
        assert (node.life.doc().departure.evicted, node.life.doc().departure.joined) == ((), 0)
        node.exits("a/0#0", 1)
        assert node.life.doc().summary.failed == "worker a/0#0 exited with code 1"

    def test_an_eviction_does_not_outlive_its_attempt(self) -> None:
        node = member_node(slots=2)
        node.life.evict("a/0#0", True, "it is slow")
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        node.dies("a/0#0", signal.SIGTERM)
        assert (node.life.doc().departure.evicted, node.life.doc().departure.joined) == ((), 0)


class TestLeavers:
    """A worker that has told that it leaves, though neither its node drains nor it was evicted."""

    def test_one_that_dies_on_its_way_out_is_replaced(self) -> None:
        node = member_node()
        node.life.on_progress("a/0#0", 2)
        node.life.on_leaving("a/0#0")
        assert started(node.exits("a/0#0", 1)) == ["a/0#1"]
        assert node.life.due_s() is None

    def test_it_has_left_in_order_also_where_a_new_attempt_begins_meanwhile(self) -> None:
        node = member_node()
        node.life.on_leaving("a/0#0")
        node.life.drain("x", NOW_S)
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        assert node.exits("a/0#0", 0) == []
        node.generation(GenerationStage.ASSEMBLE, attempt=1, leaving=("a",))
        assert node.later(0) == [Exit(0)]
        assert node.life.doc().peers.unreachable == ()

    def test_its_slot_is_used_in_the_next_attempt_also_where_that_trains_already(self) -> None:
        node = member_node()
        node.generation(GenerationStage.ASSEMBLE, attempt=1)
        node.life.on_leaving("a/0#0")
        node.exits("a/0#0", 0)
        assert started(node.train("b/0#5")) == ["a/0#1"]


def test_a_slot_that_was_given_up_is_used_as_any_other_once_the_job_starts_anew() -> None:
    node = member_node(max_restarts=0)
    node.dies("a/0#0")
    assert started(node.start()) == ["a/0#1"]
    node.life.workers.max_restarts = None
    node.ready("a/0#1")
    node.train("a/0#1")
    node.life.on_progress("a/0#1", node.number)
    assert started(node.dies("a/0#1")) == ["a/0#2"]


def test_a_worker_that_has_ended_is_told_nothing() -> None:
    node = member_node(slots=2)
    node.life.on_finished("a/0#0")
    node.exits("a/0#0", 0)
    assert [tell.worker for tell in only(Tell, node.train("a/1#0", "b/0#0", aborts_step_before=3))] == ["a/1#0"]


def test_who_has_no_part_in_the_job_neither_finishes_nor_leaves_it() -> None:
    node = Node()
    node.start()
    node.ready("a/0#0")
    before = node.life.doc()
    node.life.on_finished("a/0#0")
    node.life.on_leaving("a/0#0")
    assert node.life.doc() == before
