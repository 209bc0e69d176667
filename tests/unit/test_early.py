"""Failures before the first step has committed: who starts again, and when the job ends at once."""

from __future__ import annotations

from typing import Any

import pytest

from elaunch.rendezvous.decide import decide
from elaunch.rendezvous.membership import Generation, GenerationStage, NodeDoc, Restarts, WorkerState
from elaunch.rendezvous.rules.early import RESTARTS, TOGETHER_S, common_error, origin
from elaunch.rendezvous.view import LeaderDecision, MembershipSettings
from tests.unit.test_decide import MEMBER, NOW_S, READY, node, start, train, view

RAISED = "ValueError: no such split: trian (train.py:31 in main)"
SAME = "ValueError: no such split: tset (train.py:31 in main)"
STARTING = WorkerState.STARTING


def ask(generation: Generation, *docs: NodeDoc, max_restarts: int | None = None, **fields: Any) -> LeaderDecision:
    settings = MembershipSettings(min_nodes=1, max_nodes=4, max_restarts=max_restarts)
    return decide(view(generation, *docs, **fields), NOW_S, settings)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (RAISED, "ValueError at train.py:31"),
        (f"worker a/0#0 exited with code 1: {RAISED}", "ValueError at train.py:31"),
        ("torch.OutOfMemoryError: CUDA out of memory (model.py:7 in forward)", "torch.OutOfMemoryError at model.py:7"),
        ("KeyError (a.py:1 in <module>)", "KeyError at a.py:1"),
        ("worker a/0#0 was killed by SIGKILL", ""),
        ("worker a/0#0 exited with code 3", ""),
        ("", ""),
    ],
)
def test_the_origin_of_a_failure_is_the_exception_and_its_line(reason: str, expected: str) -> None:
    assert origin(reason) == expected


def test_the_same_exception_may_have_other_words() -> None:
    assert common_error([RAISED, SAME]) == RAISED
    assert common_error([RAISED, SAME.replace(":31", ":32")]) == ""
    assert common_error([RAISED, SAME.replace("ValueError", "KeyError")]) == ""
    assert common_error([RAISED, ""]) == ""
    assert common_error(["", ""]) == ""
    assert common_error([]) == ""


class TestTheSameExceptionEverywhere:
    @pytest.mark.parametrize("generation", [start("a", "b"), train("a/0#0", "b/0#0")])
    def test_it_ends_the_job_at_once(self, generation: Generation) -> None:
        result = ask(generation, node("a", STARTING, error=RAISED), node("b", None, error=SAME)).result
        assert result is not None
        assert not result.succeeded
        assert result.message == f"every worker raised the same exception before the first step committed: {RAISED}"

    @pytest.mark.parametrize(
        "other",
        [
            {},
            {"error": SAME.replace(":31", ":32")},
            {"error": SAME, "attempt": 3},
        ],
    )
    def test_it_does_not_while_a_node_has_another_story(self, other: dict[str, Any]) -> None:
        assert ask(train("a/0#0", "b/0#0"), node("a", MEMBER, error=RAISED), node("b", MEMBER, **other)).result is None

    def test_a_node_that_has_replaced_its_worker_counts_though_the_generation_is_without_it(self) -> None:
        docs = node("a", STARTING, incarnation=1), node("b", MEMBER, error=RAISED)
        assert ask(train("b/0#0"), *docs).result is None

    def test_a_spare_node_does_not_count(self) -> None:
        assert ask(train("a/0#0"), node("a", None, error=RAISED), node("b")).result is not None

    def test_a_job_that_goes_on_from_a_checkpoint_tries_again(self) -> None:
        generation = train("a/0#0", restarts=Restarts(1, 400, 1), attempt=1)
        decision = ask(generation, node("a", STARTING, error=RAISED, attempt=1, saved=400))
        assert decision.result is None


class TestADeathBeforeAnybodyHasRegistered:
    KILLED = "worker a/0#0 was killed by SIGKILL"

    def test_all_workers_start_again_as_often_as_max_restarts_says(self) -> None:
        docs = node("a", STARTING, early_death=self.KILLED), node("b", STARTING)
        generation = ask(start("a", "b"), *docs, max_restarts=1).generation
        assert generation is not None
        assert (generation.stage, generation.attempt) == (GenerationStage.ASSEMBLE, 1)
        assert (generation.restarts.count, generation.cause) == (1, self.KILLED)
        result = ask(start("a", "b", restarts=Restarts(1)), *docs, max_restarts=1).result
        assert result is not None
        assert result.message == f"{self.KILLED} (no worker had called register() yet; after 1 of 1 restarts)"

    def test_where_that_is_not_given_they_do_so_twice_and_then_only_its_slot_does(self) -> None:
        docs = node("a", STARTING, early_death=self.KILLED), node("b", STARTING)
        for count in range(RESTARTS):
            assert ask(start("a", "b", restarts=Restarts(count)), *docs).generation is not None
        after = ask(start("a", "b", restarts=Restarts(RESTARTS)), *docs)
        assert (after.generation, after.result) == (None, None)

    def test_once_somebody_has_registered_only_its_slot_does(self) -> None:
        docs = node("a", STARTING, early_death=self.KILLED), node("b", READY)
        decision = ask(start("a", "b"), *docs, changed_s=NOW_S)
        assert (decision.generation, decision.result) == (None, None)

    def test_an_exception_waits_a_moment_for_the_same_one_in_the_others(self) -> None:
        docs = node("a", STARTING, early_death=f"worker a/0#0 exited with code 1: {RAISED}"), node("b", STARTING)
        decision = ask(start("a", "b"), *docs, changed_s=NOW_S)
        assert (decision.generation, decision.wake_s) == (None, NOW_S + TOGETHER_S)
        assert ask(start("a", "b"), *docs, changed_s=NOW_S - TOGETHER_S).generation is not None
