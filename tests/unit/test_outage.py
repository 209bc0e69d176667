"""A node that needs the store while that is away: what it waits for, what it says, and how it ends."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from elaunch.agent.decisions.actions import Exit, Say, Tell
from elaunch.agent.decisions.outage import Patience, awaited
from elaunch.rendezvous.membership import Cut, Generation, GenerationStage
from tests.unit.test_lifecycle import Node, only, said, signalled

LIMIT_S = 60.0


class Alone(Node):
    """Node a of a job with node b; its store goes away."""

    def __init__(self, saves: bool = False, slots: int = 1) -> None:
        super().__init__(slots, 2, None)
        self.patience = Patience(self.life, LIMIT_S, saves)

    def trains(self, *others: str) -> None:
        mine = [f"a/{slot.local_rank}#0" for slot in self.life.slots]
        self.start()
        self.ready(*mine)
        self.train(*mine, *others)
        self.settled(*mine)

    def waits_for(self) -> str:
        life = self.life
        return awaited(life.settings.node, life.generation, life.workers, life.ending.draining)

    def loses_store(self) -> None:
        self.does(self.patience.begin("connection refused", self.now_s))

    def later(self, seconds: float) -> list[Any]:
        self.now_s += seconds
        return self.does([*self.life.on_time(self.now_s), *self.patience.on_time(self.now_s)])

    def lasts(self, seconds: float) -> list[Any]:
        """All that is done until then, at the times that are asked for."""
        end_s, done = self.now_s + seconds, self.later(0.0)
        while self.now_s < end_s:
            dues = [due_s for due_s in (self.patience.due_s(), self.life.due_s()) if due_s is not None]
            done += self.later(max(0.0, min([*dues, end_s]) - self.now_s))
        return done


class TestWhatIsAwaited:
    def test_training_needs_nobody(self) -> None:
        node = Alone()
        node.trains("b/0#0")
        assert node.waits_for() == ""

    def test_nor_does_a_plain_script_that_runs(self) -> None:
        node = Alone()
        node.start()
        assert node.waits_for() == ""

    def test_the_start_of_the_job_comes_from_others(self) -> None:
        assert Alone().waits_for() == "the start of the job"

    def test_so_does_the_first_step(self) -> None:
        node = Alone()
        node.start()
        node.ready("a/0#0")
        assert node.waits_for() == "the first step: workers here are ready"

    def test_a_worker_of_a_plain_script_that_has_failed(self) -> None:
        node = Alone(slots=2)
        node.start()
        node.exits("a/0#0", 1)
        assert node.waits_for() == "what becomes of the job after the end of a/0#0"

    def test_a_member_of_this_node_that_has_died(self) -> None:
        node = Alone(slots=2)
        node.trains()
        node.dies("a/1#0")
        assert node.waits_for() == "the job to go on without a/1#0"

    def test_also_when_its_replacement_is_ready(self) -> None:
        node = Alone(slots=2)
        node.trains()
        node.dies("a/1#0")
        node.ready("a/1#1")
        assert node.waits_for() == "the job to go on without a/1#0"

    def test_a_replacement_that_waits_hinders_nobody(self) -> None:
        node = Alone(slots=2)
        node.trains()
        node.dies("a/1#0")
        node.train("a/0#0")
        node.ready("a/1#1")
        assert node.waits_for() == ""

    def test_a_peer_that_is_dead(self) -> None:
        node = Alone()
        node.trains("b/0#0")
        node.life.on_unreachable(node.number, "b/0#0", True, node.now_s)
        assert node.waits_for() == "the job to go on without b/0#0"

    def test_a_link_that_broke(self) -> None:
        node = Alone()
        node.trains("b/0#0")
        node.life.on_broken(node.number, "a/0#0", "b/0#0")
        assert node.waits_for() == "new links to b/0#0"

    def test_a_node_that_cannot_be_reached(self) -> None:
        node = Alone()
        node.trains("b/0#0")
        node.life.on_reach((Cut("b", "host-b"),), frozenset())
        assert node.waits_for() == "a decision on b, which cannot be reached"

    def test_more_nodes(self) -> None:
        node = Alone()
        node.trains("b/0#0")
        node.train("a/0#0", hold=True)
        assert node.waits_for() == "more nodes"

    def test_a_place_in_the_job(self) -> None:
        node = Alone()
        node.train("b/0#0", "c/0#0")
        assert node.waits_for() == "a place in the job"

    def test_the_end_of_a_job_whose_workers_here_have_ended(self) -> None:
        node = Alone(slots=2)
        node.trains()
        for worker in ("a/0#0", "a/1#0"):
            node.life.on_finished(worker)
        node.exits("a/0#0", 0)
        assert node.waits_for() == ""
        node.exits("a/1#0", 0)
        assert node.waits_for() == "the end of the job"

    def test_leave_to_leave(self) -> None:
        node = Alone()
        node.trains("b/0#0")
        node.life.drain("SIGTERM", node.now_s)
        assert node.waits_for() == "the others to go on without it"


class TestPatience:
    def test_who_needs_nobody_trains_on_for_ever_and_says_nothing(self) -> None:
        node = Alone()
        node.trains("b/0#0")
        node.loses_store()
        assert node.patience.due_s() is None
        assert node.later(100 * LIMIT_S) == []

    def test_who_waits_says_so_at_growing_intervals_of_at_most_ten_seconds_and_then_ends(self) -> None:
        node = Alone(slots=2)
        node.trains("b/0#0")
        node.loses_store()
        node.later(20.0)
        node.dies("a/1#0")
        node.later(0.0)
        begin_s, told_s = node.now_s, []
        while not only(Exit, node.actions):
            due_s = node.patience.due_s()
            assert due_s is not None
            node.later(due_s - node.now_s)
            if only(Say, node.actions):
                told_s.append(node.now_s - begin_s)
            for worker, _ in signalled(node.actions):
                node.exits(worker, 1)
        assert told_s[:4] == [3.0, 9.0, 19.0, 29.0]
        assert node.now_s - begin_s == LIMIT_S
        (end,) = only(Exit, node.actions)
        assert end.code == 1
        assert end.text == (
            "the rendezvous store was of no use for 60 s while this node waited for the job to go on without a/1#0: "
            "connection refused (--rdzv-conf store_timeout=SECONDS gives it more time)"
        )

    def test_the_line_says_what_for_and_how_long_still(self) -> None:
        node = Alone(slots=2)
        node.trains("b/0#0")
        node.loses_store()
        node.later(20.0)
        node.dies("a/1#0")
        assert said(node.lasts(4.0)) == (
            "this node has waited 3 s for the job to go on without a/1#0; the rendezvous store has been of no use for "
            "23 s. If that lasts, this node ends in 57 s"
        )

    def test_while_the_store_can_be_used_a_wait_has_a_line_now_and_then_and_no_end(self) -> None:
        node = Alone()
        node.train("b/0#0", "c/0#0")
        lines = said(node.lasts(600.0)).splitlines()
        assert lines[0] == "this node has waited 10 s for a place in the job"
        assert [int(line.split()[4]) for line in lines] == [10, 30, 70, 150, 310]
        assert not node.life.ending.under_way

    @pytest.mark.parametrize("away", [False, True])
    def test_workers_that_were_told_to_end_are_named_until_they_have(self, away: bool) -> None:
        node = Alone()
        node.trains("b/0#0")
        if away:
            node.loses_store()
        node.does(node.life.on_signal(signal.SIGINT, node.now_s))
        lines = said(node.lasts(100.0)).splitlines()
        assert lines == [
            "this node has waited 10 s for a/0#0 to end; SIGKILL is sent in 20 s",
            "this node has waited 30 s for a/0#0 to end; SIGKILL was sent",
            "this node has waited 70 s for a/0#0 to end; SIGKILL was sent",
        ]

    @pytest.mark.parametrize("hold", [False, True])
    def test_of_what_the_leader_tells_it_says_nothing(self, hold: bool) -> None:
        node = Alone()
        if hold:
            node.trains("b/0#0")
            node.train("a/0#0", hold=True)
        assert node.waits_for()
        assert node.lasts(600.0) == []

    def test_a_store_that_comes_back_ends_the_wait(self) -> None:
        node = Alone(slots=2)
        node.trains("b/0#0")
        node.dies("a/1#0")
        for _ in range(5):
            node.loses_store()
            node.lasts(LIMIT_S - 1.0)
            node.does(node.patience.end())
            node.lasts(LIMIT_S)
        assert not only(Exit, node.actions)
        assert not node.life.ending.under_way

    def test_so_does_a_change_after_which_nobody_is_needed(self) -> None:
        node = Alone(slots=2)
        node.trains("b/0#0")
        node.loses_store()
        node.dies("a/1#0")
        node.lasts(LIMIT_S - 1.0)
        node.train("a/0#0", "b/0#0")
        node.ready("a/1#1")  # the replacement; all that it needs of the store is its place among the members
        assert node.lasts(10 * LIMIT_S) == []

    def test_a_node_that_has_no_part_in_the_job_yet_ends_too(self) -> None:
        node = Alone()
        node.loses_store()
        (end,) = only(Exit, node.lasts(LIMIT_S))
        assert "while this node waited for the start of the job" in end.text


class TestSaving:
    def lose_peers(self, node: Alone) -> list[Any]:
        node.loses_store()
        for worker in ("b/0#0", "b/1#0"):
            node.life.on_unreachable(node.number, worker, True, node.now_s)
        return node.lasts(LIMIT_S)

    def test_the_members_that_are_left_settle_the_step_and_leave_with_their_state_saved(self) -> None:
        node = Alone(saves=True)
        node.trains("b/0#0", "b/1#0", "c/0#0")
        number = node.number
        told = [tell.generation for tell in only(Tell, self.lose_peers(node))]
        assert [(one.number, one.ids, one.leaving, one.aborts_step_before) for one in told] == [
            (number + 1, ("a/0#0", "c/0#0"), (), number + 1),
            (number + 2, (), ("a/0#0", "c/0#0"), number + 1),
        ]
        assert "the workers of this node save the state and leave, within 60 s" in said(node.actions)
        node.life.on_joined("a/0#0", number + 1)
        node.life.on_saved(412)
        node.life.on_leaving("a/0#0")
        (end,) = only(Exit, node.exits("a/0#0", 0))
        assert end.code == 1
        assert end.text.startswith("stopped by a wait without end: the rendezvous store was of no use for 60 s")
        assert end.text.endswith(
            "; there is a checkpoint of 412 steps, from which the job goes on when it is started again"
        )

    def test_what_the_store_brings_later_changes_nothing(self) -> None:
        node = Alone(saves=True)
        node.trains("b/0#0", "b/1#0")
        self.lose_peers(node)
        assert node.train("a/0#0", generation=node.number + 9) == []

    def test_saving_has_a_limit(self) -> None:
        node = Alone(saves=True)
        node.trains("b/0#0", "b/1#0")
        self.lose_peers(node)
        assert signalled(node.lasts(LIMIT_S + 1.0)) == [("a/0#0", 9)]

    @pytest.mark.parametrize("stage", [GenerationStage.START, GenerationStage.ASSEMBLE])
    def test_workers_that_hold_no_state_are_told_to_end(self, stage: GenerationStage) -> None:
        node = Alone(saves=True)
        node.start()
        node.ready("a/0#0")
        if stage is GenerationStage.ASSEMBLE:
            node.does(node.life.on_generation(Generation(9, stage, attempt=0, cause="x"), node.now_s))
        node.loses_store()
        done = node.lasts(LIMIT_S)
        assert only(Tell, done) == []
        assert signalled(done) == [("a/0#0", 15)]
