"""Who may go on with a job whose store may be founded anew, and what nodes do that have lost it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.rendezvous.decide import LeaderDecision, MembershipSettings, View, decide
from elaunch.rendezvous.membership import (
    Generation,
    GenerationStage,
    NodeDoc,
    NodeWorker,
    Worker,
    WorkerState,
)
from elaunch.rendezvous.rules.founding import (
    Founding,
    FoundStore,
    GoOver,
    Loss,
    Move,
    Standing,
    Stay,
    absent_agents,
    may_have_paused,
    next_move,
)
from elaunch.rendezvous.rules.quorum import NUMBERS, has_say, is_majority, settle
from tests.unit.documents import changed_report

NOW_S = 1000.0
SETTINGS = MembershipSettings(min_nodes=1, max_nodes=5, join_s=600.0, window_s=0.0, founds=True)
NAMES = "abcde"


def seats(names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, f"{name}:1") for name in names)


def train(names: str, former: str = "", number: int = 5) -> Generation:
    workers = tuple(Worker(f"{name}/0#0", name, 0) for name in names)
    return Generation(
        number, GenerationStage.TRAIN, workers, begun=True, seats=seats(names), former_seats=seats(former)
    )


def node(name: str, *, has_member: bool = True, **fields: Any) -> NodeDoc:
    workers = (NodeWorker(f"{name}/0#0", 0, WorkerState.MEMBER),) if has_member else ()
    values: dict[str, Any] = {"took_part": True, "elastic": True, "generation": 5, **fields}
    return changed_report(NodeDoc(name, name, 1, workers, liveness_address=f"{name}:1"), **values)


def ask(generation: Generation, *nodes: NodeDoc, now_s: float = NOW_S, **fields: Any) -> LeaderDecision:
    seen = View(**{"nodes": nodes, "generation": generation, "pending_s": NOW_S - 1, "changed_s": NOW_S, **fields})
    return decide(seen, now_s, SETTINGS)


@given(st.integers(1, 7), st.data())
@settings(deadline=None, derandomize=True)
def test_of_two_groups_that_share_no_node_one_at_most_is_a_majority(count: int, data: st.DataObject) -> None:
    all_seats = seats("abcdefg"[:count])
    sides = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    groups = [{name for (name, _), its in zip(all_seats, sides, strict=True) if its == side} for side in (0, 1)]
    assert sum(is_majority(group, all_seats) for group in groups) <= 1
    everybody = {name for name, _ in all_seats}
    group = groups[0]
    assert is_majority(group, all_seats) != is_majority(everybody - group, all_seats)  # and of two halves, one


class TestTheLeader:
    @pytest.mark.parametrize(
        ("all_nodes", "here", "ended", "goes_on"),
        [
            ("abc", "ab", "", True),
            ("abc", "a", "", False),
            ("abc", "a", "b", False),
            ("abc", "a", "bc", True),
            ("ab", "a", "", True),
            ("ab", "b", "", False),
            ("ab", "b", "a", True),
            ("abcd", "ab", "", True),
            ("abcd", "cd", "", False),
            ("abcd", "cd", "ab", True),
        ],
    )
    def test_goes_on_with_a_majority_or_with_all_whose_agents_have_not_ended(
        self, all_nodes: str, here: str, ended: str, goes_on: bool
    ) -> None:
        found = ask(train(all_nodes), *map(node, here), ended=frozenset(f"{name}:1" for name in ended))
        assert (found.generation is not None) == goes_on, found.reason
        if found.generation is not None:
            assert found.generation.seats == seats(here)
            assert found.generation.former_seats == seats(all_nodes)
        else:
            assert set(found.asks) == set(all_nodes) - set(here) - set(ended)
            assert "are no majority, and those may have gone on" in found.reason

    def test_says_so_when_that_takes_too_long(self) -> None:
        found = ask(train("ab"), node("b"), changed_s=NOW_S - 600.0)
        assert found.result is not None
        assert "without a the nodes that are here are no majority" in found.result.message

    def test_goes_on_without_workers_whose_nodes_are_there_whoever_they_are(self) -> None:
        """They hold no state: without it they cannot go on elsewhere."""
        found = ask(train("abc"), node("a", has_member=False), node("b", has_member=False), node("c"))
        assert found.generation is not None
        assert found.generation.nodes == ("c",)

    def test_does_not_count_on_a_node_that_is_only_believed_to_come_back(self) -> None:
        docs = node("a", unreachable=("b/0#0",)), node("b", generation=4)
        found = ask(train("abcd"), docs[0], outage_end_s=NOW_S)
        assert found.generation is None
        assert set(found.asks) == {"b", "c", "d"}

    def test_has_to_suit_the_nodes_before_until_all_have_heard_of_the_present_ones(self) -> None:
        now = train("abc", former="abcde")
        found = ask(now, node("a"), node("b"))
        assert found.generation is None, "c may have gone on with d and e"
        assert set(found.asks) == {"c", "d", "e"}
        heard = [node(name) for name in "abc"]
        assert settle(View(nodes=tuple(heard), generation=now)) == replace(now, former_seats=())
        assert settle(View(nodes=(*heard[:2], node("c", generation=4)), generation=now)) is None
        assert ask(replace(now, former_seats=()), node("a"), node("b")).generation is not None

    def test_tells_the_next_leader_that_there_was_state_before_all_who_held_some_are_gone(self) -> None:
        first = replace(train("ab"), begun=False)
        here = [node(name) for name in "ab"]
        assert settle(View(nodes=tuple(here), generation=first)) is None, "nobody was seen to hold any"
        written = settle(View(nodes=tuple(here), generation=first, begun=True))
        assert written is not None
        assert written.begun
        assert settle(View(nodes=tuple(here), generation=written, begun=True)) is None
        late = replace(here[1], workers=(NodeWorker("b/0#0", 0, WorkerState.READY),))  # a/0#0 has died
        for generation, begun in ((first, False), (written, True)):
            found = ask(generation, node("a", has_member=False), late)
            assert found.generation is not None
            assert found.generation.begun is begun
        starts = replace(first, stage=GenerationStage.START)
        assert settle(View(nodes=tuple(here), generation=starts, begun=True)) is None, "plain scripts hold no state"

    def test_waits_for_a_node_that_was_left_out_to_hear_of_it(self) -> None:
        now, heard = train("ab", former="abc"), [node("a"), node("b")]
        assert settle(View(nodes=(*heard, node("c", generation=4)), generation=now)) is None
        assert settle(View(nodes=(*heard, node("c")), generation=now)) is not None
        assert settle(View(nodes=tuple(heard), generation=now)) is not None, "its lease has run out"

    def test_counts_on_those_that_it_has_left_out_once_they_have_heard_of_it(self) -> None:
        """Until then they may found another store with the node that is lost here."""
        now = train("ac", former="abcd")
        unheard = ask(now, node("a"), node("b", generation=4), node("d", generation=4))
        assert unheard.generation is None
        assert unheard.asks == ("b", "c", "d")
        heard = ask(now, node("a"), node("b"), node("d"))
        assert heard.generation is not None
        assert heard.generation.nodes == ("a",)
        ended = [node(name, has_member=False, generation=4) for name in "bd"]
        assert ask(now, node("a"), *ended).generation is not None, "their workers have ended: they can begin nothing"

    def test_puts_the_nodes_that_serve_the_store_first(self) -> None:
        found = ask(train("abc"), node("a", has_member=False), node("b"), replace(node("c"), serves=True))
        assert found.generation is not None
        assert [name for name, _ in found.generation.seats] == ["c", "b"]


def test_a_node_without_a_member_or_that_leaves_has_no_say() -> None:
    now = train("ab")
    assert has_say(node("a"), now)
    assert not has_say(node("a", has_member=False), now)
    assert not has_say(node("a", draining=True), now)
    assert not has_say(node("c"), now)
    start = Generation(1, GenerationStage.START, (Worker("a/0", "a", 0),))
    assert has_say(node("a"), start), "it may begin to train with others"
    assert not has_say(node("a", has_member=False), start)
    assert has_say(node("a", has_member=False, elastic=False), start), "a plain script is started again"


def stands(name: str, **fields: Any) -> Standing:
    values: dict[str, Any] = {"store": "old", "generation": 5, "away": True, "votes": True, "founds": True, **fields}
    return Standing(name, **values)


def moves(names: str, *others: Standing, own: Standing | None = None, entered: bool = True, **loss: Any) -> Move:
    """What node b of a job whose store was on node a does."""
    own = own or stands("b")
    answers: dict[str, Standing | None] = dict.fromkeys(set(names) - {"b"})
    answers |= {one.node: one for one in others}
    seen = Loss(**{"servers": 1, "listening": 0, "ended": 0, "lapsed": False, **loss})
    return next_move(own, train(names), answers, seen, entered=entered)


def test_those_are_absent_that_are_missed_and_not_in_the_store() -> None:
    seen = View(nodes=(node("c"),), generation=train("abc", former="bcd"))
    assert absent_agents(seen, ()) == frozenset()
    assert absent_agents(seen, ("a", "d")) == {"a:1", "d:1"}
    assert absent_agents(seen, ("a", "c")) == {"a:1"}
    anew = replace(node("b"), liveness_address="b:2")
    assert absent_agents(replace(seen, nodes=(anew,)), ("b",)) == {"b:1"}, "another agent is there"


def test_a_machine_of_which_nothing_was_heard_for_a_lease_has_not_only_paused() -> None:
    assert may_have_paused("10.0.0.1:4711", (), lapsed=True)
    assert may_have_paused("10.0.0.1:4711", ("10.0.0.2:29400",), lapsed=True)
    assert may_have_paused("10.0.0.1:4711", ("10.0.0.1:29400",), lapsed=False)
    assert not may_have_paused("10.0.0.1:4711", ("10.0.0.2:29400", "10.0.0.1:29400"), lapsed=True)


class TestNodesThatLostTheStore:
    def test_the_last_one_founds_another_when_all_others_have_ended(self) -> None:
        found = moves("ab", own=stands("b", ended=("a:1",)), ended=1)
        assert found == FoundStore(Founding(1, "b", ("a:1",), ("a",)))

    def test_it_waits_for_one_that_is_silent(self) -> None:
        found = moves("ab", lapsed=True)
        assert isinstance(found, Stay)
        assert found.is_news
        assert "without a the nodes that are left are no majority" in found.why

    def test_most_of_them_found_another_when_their_leases_have_run_out(self) -> None:
        assert isinstance(moves("abc", stands("c")), Stay)
        assert moves("abc", stands("c"), lapsed=True) == FoundStore(Founding(1, "b", (), ("a",)))

    def test_an_end_counts_only_where_all_of_them_have_seen_it(self) -> None:
        own = stands("b", ended=("a:1", "d:1"))
        loss: dict[str, Any] = {"servers": 1, "ended": 1}
        one_saw = moves("abcd", stands("c", ended=("a:1",)), own=own, **loss)
        assert isinstance(one_saw, Stay)
        both_saw = moves("abcd", stands("c", ended=("a:1", "d:1")), own=own, **loss)
        assert both_saw == FoundStore(Founding(1, "b", ("a:1", "d:1"), ("a", "d")))

    def test_nobody_founds_one_while_the_old_one_may_be_used(self) -> None:
        assert isinstance(moves("abc", stands("c", away=False), lapsed=True), Stay)
        assert isinstance(moves("abc", stands("c"), lapsed=True, listening=1), Stay)
        assert isinstance(moves("abc", stands("a", serves=True), stands("c"), lapsed=True), Stay)

    def test_one_of_two_servers_is_not_waited_for_if_the_other_one_will_not_come_back(self) -> None:
        own = stands("b", ended=("a:1",), serves=True)
        loss: dict[str, Any] = {"servers": 2, "listening": 1, "ended": 1}
        found = moves("abc", stands("c", ended=("a:1",)), own=own, **loss)
        assert found == FoundStore(Founding(1, "b", ("a:1",), ("a",)))
        both = moves("abc", stands("a", serves=True), stands("c"), own=own, servers=2, listening=1, lapsed=True)
        assert isinstance(both, Stay), "an agent starts the other one again"

    def test_a_server_that_may_wait_for_a_learner_that_has_ended_is_not_waited_for_for_ever(self) -> None:
        """It was given a vote, and ended before anybody heard of that."""
        loss: dict[str, Any] = {"servers": 1, "listening": 1, "learners": 1}
        assert isinstance(moves("abc", stands("c"), **loss), Stay), "it may serve again soon"
        assert moves("abc", stands("c"), lapsed=True, **loss) == FoundStore(Founding(1, "b", (), ("a",)))
        serves = stands("c", serves=True)
        assert isinstance(moves("abc", serves, **loss), Stay)
        assert moves("abc", serves, lapsed=True, **loss) == FoundStore(Founding(1, "b", (), ("a",)))
        assert isinstance(moves("abc", stands("c", away=False), lapsed=True, **loss), Stay)
        both: dict[str, Any] = {"servers": 2, "listening": 2, "learners": 1}
        assert isinstance(moves("abc", stands("c"), lapsed=True, **both), Stay), "they are enough even so"

    def test_the_first_that_knows_the_newest_generation_founds_it(self) -> None:
        waits = moves("abc", stands("c", generation=6), lapsed=True)
        assert waits == Stay("c founds another one")
        assert moves("abc", stands("c", founds=False), lapsed=True) == FoundStore(Founding(1, "b", (), ("a",)))

    def test_who_has_no_say_founds_nothing(self) -> None:
        assert isinstance(moves("abc", stands("c"), own=stands("b", votes=False), lapsed=True), Stay)
        assert isinstance(moves("abc", stands("c", votes=False), lapsed=True), Stay)

    def test_the_others_go_over_to_it(self) -> None:
        assert moves("abc", stands("c", epoch=1, newest=1, store="new", away=False)) == GoOver("new", 1)

    def test_the_next_one_has_a_higher_epoch_than_any_that_they_know(self) -> None:
        found = moves("abc", stands("c", newest=3), lapsed=True)
        assert isinstance(found, FoundStore)
        assert found.founding.epoch == 4

    def test_they_return_from_a_store_in_which_nothing_was_decided(self) -> None:
        own = stands("b", epoch=1, newest=1, store="new", founder="b")
        assert moves("abc", stands("a", away=False), own=own) == GoOver("old", 0)
        decided = replace(own, generation=NUMBERS)
        assert isinstance(moves("abc", stands("a", away=False), own=decided), Stay)

    def test_who_is_on_the_way_to_one_that_was_given_up_goes_to_those_that_have_one(self) -> None:
        """Its founder had returned to the old one, which could be reached again (seed 807 of the simulation)."""
        own, back = stands("b", newest=1, store="new"), stands("a", away=False, serves=True)
        on_the_way = stands("c", newest=1, store="new")
        assert moves("abc", back, on_the_way, own=own, entered=False) == GoOver("old", 0)
        starts = replace(on_the_way, serves=True)
        assert isinstance(moves("abc", back, starts, own=own, entered=False), Stay), "c starts it"
        assert isinstance(moves("abc", replace(back, away=True), on_the_way, own=own, entered=False), Stay)
        assert isinstance(moves("abc", back, on_the_way, own=own), Stay), "it has been there"
