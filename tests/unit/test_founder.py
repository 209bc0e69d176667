"""When a node that has lost the store tells the others, asks them, and asks again."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.cluster.servers import EtcdServers
from elaunch.rendezvous.cluster.standings import ANSWER_S, Answers, Rounds
from elaunch.rendezvous.node.founder import ROUND_S, SERVER_S, Founder, FoundingSettings
from elaunch.rendezvous.participant import Participant
from elaunch.rendezvous.rules.founding import Founding, Standing

LEASE_S = 5.0
SEATS = (("a", "10.0.0.1:1"), ("b", "10.0.0.2:1"), ("c", "10.0.0.3:1"))


class Place:
    """A founder `b` at a time that the test sets; the others answer what `answers` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.heard: list[Standing] = []
        self.answers = Answers()
        self.moved: list[str] = []
        self.warned: list[str] = []
        generation = SimpleNamespace(number=3, seats=SEATS, former_seats=())
        replica: Any = SimpleNamespace(
            view=SimpleNamespace(generation=generation, result=None),
            founding=None,
            servers=EtcdServers(),
            absent=frozenset(),
            entered=True,
        )
        replica.begin_store = lambda: setattr(replica, "entered", False)
        doc: Any = SimpleNamespace()
        session: Any = SimpleNamespace(
            lease=SimpleNamespace(renewed_s=0.0),
            told=None,
            is_open=False,
            joined=True,
            token="token",
            move=lambda: None,
        )
        mail: Any = SimpleNamespace(doc=doc)
        settings = FoundingSettings(
            servers=lambda: ("10.0.0.1:29400",),
            move=self.moved.append,
            start=lambda: "10.0.0.2:29400",
            serves=lambda: False,
            leave=lambda: None,
            leave_word=lambda key, unless: None,
        )
        reporter: Any = SimpleNamespace(warn=self.warned.append)
        clock = lambda: self.now_s  # noqa: E731
        self.founder = Founder(session, replica, mail, settings, "b", LEASE_S, reporter, clock)
        monkeypatch.setattr("elaunch.rendezvous.node.founder.has_say", lambda told, generation: True)
        monkeypatch.setattr(Rounds, "ask", self._ask)
        monkeypatch.setattr(
            "elaunch.rendezvous.node.founder.ask", lambda seats, token, servers=(), tls=None: self.answers
        )

    def _ask(self, seats: object, token: object, servers: object) -> Answers:
        self.heard.append(self.founder.standing)
        return self.answers


def test_who_asks_this_node_in_its_first_round_hears_that_it_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    place.founder.connected()
    assert place.founder.standing.away is False
    assert place.founder.seek() is None
    assert [one.away for one in place.heard] == [True]


def test_both_nodes_that_lost_the_store_at_once_need_one_round_once_their_leases_have_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place(monkeypatch)
    place.answers.standings["c"] = Standing("c", store="10.0.0.1:29400", generation=3, away=True, votes=True)
    assert place.founder.seek() is None
    assert place.moved == [], "its lease may be renewed by somebody who can reach the store"
    place.now_s = LEASE_S + 0.01
    assert place.founder.seek() is None
    assert place.moved == ["10.0.0.2:29400"]


def test_a_node_that_never_came_into_the_store_that_it_went_over_to_goes_where_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place(monkeypatch)
    new = Standing("c", epoch=1, newest=1, store="10.0.0.3:29400", generation=3)
    place.answers.standings["c"] = new
    assert place.founder.seek() == 0.0
    assert place.moved == ["10.0.0.3:29400"]
    old = Standing("a", store="10.0.0.1:29400", generation=3, serves=True)
    place.answers.standings = {"a": old, "c": replace(new, epoch=0, store="10.0.0.1:29400")}
    place.founder._settings = replace(place.founder._settings, servers=lambda: ("10.0.0.3:29400",))
    assert place.founder.seek() == 0.0
    assert place.moved == ["10.0.0.3:29400", "10.0.0.1:29400"]
    place.founder._replica.entered = True
    place.founder._settings = replace(place.founder._settings, servers=lambda: ("10.0.0.2:29400",))
    assert place.founder.seek() is None, "one that it has been in it waits for"


def test_the_leader_leaves_word_of_a_store_that_nobody_had_to_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its servers, none may be where the job began."""
    place, told = Place(monkeypatch), list[tuple[str, str]]()
    keys = lambda key, unless: told.append((key, unless))  # noqa: E731
    place.founder._settings = replace(place.founder._settings, leave_word=keys)
    place.founder._replica.prefix = "/elaunch/job/"
    place.founder.leave_word()
    assert place.founder._word is not None
    place.founder._word.join(10)
    assert told == [("/elaunch/job/moved", "/elaunch/job/generation")]


def test_a_node_that_did_not_answer_just_now_is_not_lost_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its members would lose their processes, though it may answer in a moment (seen in tests.soak)."""
    place = Place(monkeypatch)
    place.now_s = LEASE_S + 0.01
    place.answers.ended.add("10.0.0.1:1")
    place.answers.standings["d"] = Standing("d", store="10.0.0.1:29400", generation=3, away=True, votes=True)
    generation: Any = place.founder._replica.view.generation
    generation.seats = (*SEATS, ("d", "10.0.0.4:1"), ("e", "10.0.0.5:1"))
    monkeypatch.setattr("elaunch.rendezvous.rules.founding.may_go_on", lambda group, ended, generation: True)
    place.answers.silent |= {"10.0.0.3:1", "10.0.0.5:1"}
    place.answers.paused.add("10.0.0.3:1")
    assert place.founder.seek() is None
    assert place.founder._founding is not None
    assert place.founder._founding.gone == ("a", "e"), "a has ended, and e been silent for long"


def test_a_silent_machine_is_lost_with_the_store_on_it_once_a_lease_has_run_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place(monkeypatch)
    place.now_s = LEASE_S + 0.01
    place.answers.standings["c"] = Standing("c", store="10.0.0.1:29400", generation=3, away=True, votes=True)
    place.answers.paused.add("10.0.0.1:1")
    assert place.founder.seek() is None
    assert place.founder._founding is not None
    assert place.founder._founding.gone == ("a",)


def test_the_end_of_an_agent_that_its_store_had_lost_before_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have founded another one with others."""
    place = Place(monkeypatch)
    place.answers.ended |= {"10.0.0.1:1", "10.0.0.3:1"}
    place.founder._replica.absent = frozenset({"10.0.0.3:1"})
    assert place.founder.seek() is None
    assert place.founder.standing.ended == ("10.0.0.1:1",)
    assert place.moved == [], "c may have gone on"
    place.founder._replica.absent = frozenset()
    assert place.founder.seek() is None
    assert place.moved == ["10.0.0.2:29400"]


def test_the_user_is_told_once_of_a_stranger_that_answers_in_the_place_of_an_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = Place(monkeypatch)
    place.answers.strangers["c"] = "10.0.0.3:1"
    for _ in range(3):
        assert place.founder.seek() is None
        place.founder.look_for_better({"c": "10.0.0.3:1"})
    (line,) = place.warned
    assert line.startswith("what answers at 10.0.0.3:1, the address of node c's agent, does not prove that it is of")
    assert place.moved == [], "it counts for nothing"


def test_it_asks_again_soon_and_sooner_while_its_own_server_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(monkeypatch)
    assert place.founder.turn_s == ROUND_S
    place.founder._founding = Founding(1, "b")
    assert place.founder.turn_s == SERVER_S < ROUND_S


def test_a_round_that_waited_for_a_silent_machine_is_followed_by_the_next_at_once() -> None:
    now_s, begun_s, paused_s = 0.0, list[float](), list[float]()

    def seek() -> float | None:
        nonlocal now_s
        begun_s.append(now_s)
        now_s += ANSWER_S if len(begun_s) == 1 else 0.01
        return 0.0 if len(begun_s) == 4 else None

    def pause(end_s: float, clock: object) -> None:
        nonlocal now_s
        paused_s.append(end_s)
        now_s = max(now_s, end_s)

    node: Any = SimpleNamespace(
        _founder=SimpleNamespace(seek=seek, turn_s=ROUND_S),
        _session=SimpleNamespace(joined=True, close=lambda: None),
        _mail=SimpleNamespace(is_stopping=False, discard_news=lambda: None, pause=pause, wait_once=None),
        _clock=lambda: now_s,
        _away_since_s=0.0,
        _replica=SimpleNamespace(end_told=False),
    )
    Participant._lost_store(node, StoreUnavailable("gone"))
    assert begun_s == pytest.approx([0.0, ANSWER_S, ANSWER_S + ROUND_S, ANSWER_S + 2 * ROUND_S])
