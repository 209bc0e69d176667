"""The last member that holds the state is waited for: who counts as a holder, and how long each is spared."""

from __future__ import annotations

import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.agent.decisions.state_holders import StateHolders
from elaunch.agent.watch.hang_watch import HangWatch, thread_state
from elaunch.detect.hang import HangTimeout
from elaunch.rendezvous.membership import Generation, GenerationStage, Worker, node_of
from elaunch.rendezvous.rules.holders import KEEPER_S, LAST_S, grace_s, may_go
from tests.helpers import Spawner, wait_until


def train(number: int, *ids: str) -> Generation:
    return Generation(number, GenerationStage.TRAIN, tuple(Worker(id, node_of(id), 0) for id in ids))


class TestGrace:
    def test_the_last_holder_is_waited_for_although_others_are_being_filled(self) -> None:
        assert grace_s("a/0#0", ["a/0#0"], {"a/1#1"}) == LAST_S
        assert not may_go("a/0#0", ["a/0#0"])

    def test_one_that_is_being_filled_may_go(self) -> None:
        assert grace_s("a/1#1", ["a/0#0"], set()) == 0
        assert may_go("a/1#1", ["a/0#0"])

    def test_one_beside_another_that_goes_on_may_go(self) -> None:
        assert grace_s("a/0#0", ["a/0#0", "a/1#0"], {"a/1#0"}) == 0
        assert may_go("a/0#0", ["a/0#0", "a/1#0"])

    def test_of_several_nodes_the_first_members_comes_last(self) -> None:
        assert grace_s("a/0#0", ["a/0#0", "b/0#0"], set()) == KEEPER_S
        assert grace_s("b/0#0", ["a/0#0", "b/0#0"], set()) == 0

    @given(
        workers=st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), min_size=1, max_size=7),
    )
    def test_whatever_all_agents_do_at_the_same_moment_somebody_holds_the_state(
        self, workers: list[tuple[str, bool, bool]]
    ) -> None:
        """Each knows the same generation, and nothing yet of what the others do; one that goes on is not killed."""
        ids = {f"{node}/{slot}#0": (holds, goes_on) for slot, (node, holds, goes_on) in enumerate(workers)}
        holders = [worker for worker, (holds, _) in ids.items() if holds]
        killed: set[str] = set()
        for node in "abc":
            left = list(holders)
            sound = {worker for worker, (_, goes_on) in ids.items() if goes_on and node_of(worker) == node}
            for worker in ids:
                if node_of(worker) == node and worker not in sound and grace_s(worker, left, sound) == 0:
                    killed.add(worker)
                    left = [one for one in left if one != worker]
        assert not holders or set(holders) - killed


class TestStateHolders:
    def test_all_members_hold_it_once_one_of_this_node_has_entered(self) -> None:
        holders = StateHolders()
        holders.enter(train(2, "a/0#0", "b/0#0"))
        assert list(holders.ids) == []
        holders.note_joined(2)
        assert list(holders.ids) == ["a/0#0", "b/0#0"]

    def test_a_replacement_holds_nothing_before_it_has_been_filled(self) -> None:
        holders = StateHolders()
        holders.enter(train(2, "a/0#0", "b/0#0"))
        holders.note_joined(2)
        holders.enter(train(3, "a/0#0"))
        holders.enter(train(4, "a/0#0", "b/0#1"))
        assert list(holders.ids) == ["a/0#0"]
        holders.note_joined(3)
        assert list(holders.ids) == ["a/0#0"]
        holders.note_joined(4)
        assert list(holders.ids) == ["a/0#0", "b/0#1"]

    def test_what_is_heard_late_counts_for_those_that_are_still_there(self) -> None:
        holders = StateHolders()
        holders.enter(train(2, "a/0#0", "a/1#0", "b/0#0"))
        holders.enter(train(3, "a/0#0", "a/1#0"))
        holders.note_end("a/1#0")
        holders.note_joined(2)
        assert list(holders.ids) == ["a/0#0"]

    def test_one_that_has_ended_stays_so(self) -> None:
        holders = StateHolders()
        holders.enter(train(2, "a/0#0", "a/1#0"))
        holders.note_end("a/1#0")
        holders.note_joined(2)
        holders.note_joined(2)
        assert list(holders.ids) == ["a/0#0"]

    def test_in_a_new_attempt_nobody_holds_anything(self) -> None:
        holders = StateHolders()
        holders.enter(train(2, "a/0#0"))
        holders.note_joined(2)
        holders.enter(Generation(3, GenerationStage.ASSEMBLE))
        assert list(holders.ids) == []
        holders.note_joined(2)
        assert list(holders.ids) == []


@pytest.mark.parametrize(("n_holders", "n_killed"), [(3, 2), (1, 2), (0, 3)])
def test_of_workers_that_are_all_stopped_the_last_holder_is_left(spawn: Spawner, n_holders: int, n_killed: int) -> None:
    watch = HangWatch(HangTimeout(), {"T": 0.01}, lambda found: None)
    processes = [spawn.python("-c", "import time; time.sleep(60)", name=f"w{slot}") for slot in range(3)]
    running = [(f"a/{slot}#0", process.pid) for slot, process in enumerate(processes)]
    members = [worker for worker, _ in running]
    for process in processes:
        process.signal(signal.SIGSTOP)
    # Who is found is told of again if it is not killed: all must be stopped at the first look.
    wait_until(lambda: {thread_state(process.pid) for process in processes} == {"T"}, 20, "all to be stopped")
    found: list[str] = []

    def look() -> bool:
        left = [worker for worker in members[:n_holders] if worker not in found]
        found.extend(one.worker for one in watch.look(running, 2, members, left, lambda worker: ""))
        return len(found) >= n_killed

    # The first member is killed later than the others, which are on its node here and so are known to be stopped.
    wait_until(look, 30, "those that may go to be found")
    look()
    assert len(found) == n_killed
    assert n_holders == 0 or set(members[:n_holders]) - set(found)
