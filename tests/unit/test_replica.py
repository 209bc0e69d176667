"""A node's copy of the job's documents: what each event makes known, and what the node owes in answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elaunch.errors import ProtocolError
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.membership import (
    DrainRequest,
    Generation,
    GenerationStage,
    JobSize,
    NodeDoc,
    NodeWorker,
    PlanRequest,
    Result,
    Worker,
    WorkerState,
)
from elaunch.rendezvous.node.replica import Duty, Replica
from elaunch.rendezvous.node.reporter import Reporter
from elaunch.rendezvous.node.setbacks import Setbacks
from elaunch.rendezvous.rules.edit import edit_between
from elaunch.rendezvous.store import WatchEvent
from tests.unit.documents import changed_report

TRAIN = Generation(3, GenerationStage.TRAIN, (Worker("a/0#0", "a", 0), Worker("b/0#0", "b", 0)))
MEMBER = NodeDoc("b", "host-b", 1, (NodeWorker("b/0#0", 0, WorkerState.MEMBER),))


ALL = ("",)
AFTER = replace(TRAIN, number=4, workers=(TRAIN.workers[1], Worker("c/0#3", "c", 0, "host-c:1")), cause="c joins")


class Heard:
    """A listener that keeps what it hears, in order."""

    def __init__(self) -> None:
        self.news: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.news.append((name, *values))

    def lines(self) -> list[str]:
        return [text for name, text, *_ in self.news if name == "warns"]


class Node:
    """The replica of node a, which is in the job, and a store whose revisions go up by one."""

    def __init__(self) -> None:
        self.heard = Heard()
        self.now_s = 5.0
        self.replica = Replica("job", "a", Reporter(self.heard, Setbacks(1.0)), lambda: self.now_s)
        self.replica.in_job = True
        self.revision = 0

    def event(self, name: str, document: Any) -> WatchEvent:
        self.revision += 1
        value = document if document is None or isinstance(document, bytes) else to_json(document)
        return WatchEvent(f"/elaunch/job/{name}", value, self.revision, self.revision)

    def takes(self, name: str, document: Any) -> Duty | None:
        return self.replica.take(self.event(name, document))


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.mark.parametrize(
    ("name", "document", "duty"),
    [
        ("nodes/a", NodeDoc("a", "host-a", 1), Duty.OWN_REPORT),
        ("nodes/a", b"garbage", Duty.OWN_REPORT),
        ("nodes/a", None, Duty.OWN_REPORT),
        ("nodes/b", MEMBER, None),
        ("nodes/b", None, None),
        ("generation", TRAIN, None),
        ("generation", None, Duty.GENERATION_DELETED),
        ("edit", edit_between(TRAIN, AFTER), Duty.GENERATION_UNKNOWN),
        ("edit", b"garbage", Duty.GENERATION_UNKNOWN),
        ("edit", None, None),
        ("size", JobSize("1", 1, 2, 1.0), None),
        ("size", None, Duty.SIZE_DELETED),
        ("requests/size", JobSize("1", 1, 2, 1.0), Duty.SIZE_ASKED),
        ("requests/size", b"garbage", None),
        ("requests/size", None, None),
        ("result", Result(True), None),
        ("leader", b"b", Duty.LEADER_WRITTEN),
        ("leader", b"\xff", Duty.LEADER_WRITTEN),
        ("leader", None, Duty.LEADER_DELETED),
        ("what", b"x", None),
    ],
)
def test_each_event_calls_for_its_duty_and_the_same_one_again_for_nothing(
    node: Node, name: str, document: Any, duty: Duty | None
) -> None:
    event = node.event(name, document)
    assert node.replica.take(event) is duty
    view, news = node.replica.view, list(node.heard.news)
    node.now_s = 6.0
    assert node.replica.take(event) is None
    assert (node.replica.view, node.heard.news) == (view, news)


def test_a_node_that_has_not_joined_owes_nothing_for_its_own_report(node: Node) -> None:
    node.replica.in_job = False
    assert node.takes("nodes/a", NodeDoc("a", "host-a", 1)) is None


@pytest.mark.parametrize(("deposed", "doubted_s"), [("b", 7.0), ("c", None)])
def test_a_leader_that_comes_back_shows_that_leases_of_the_living_have_ended(
    node: Node, deposed: str, doubted_s: float | None
) -> None:
    node.takes("nodes/b", MEMBER)
    node.takes("leader", deposed.encode())
    node.takes("leader", None)
    node.takes("nodes/b", None)
    assert node.replica.view.outage_end_s is None
    node.now_s = 7.0
    node.takes("nodes/b", MEMBER)
    assert node.replica.view.outage_end_s == doubted_s
    node.now_s = 8.0
    node.takes("nodes/b", MEMBER)
    assert node.replica.view.outage_end_s == doubted_s, "once"


def test_the_leader_is_known_by_name_unless_its_key_is_damaged_or_gone(node: Node) -> None:
    known = []
    for value in (b"b", b"a b", b"b", None):
        node.takes("leader", value)
        known.append((node.replica.leader, list(node.replica.intake.damaged)))
    assert known == [("b", []), (None, ["leader"]), ("b", []), (None, [])]


def test_an_older_size_than_the_known_one_is_neither_told_nor_made_to_count(node: Node) -> None:
    assert node.takes("size", JobSize("2", 1, 3, 9.0)) is None
    assert node.takes("requests/size", JobSize("1", 1, 2, 8.0)) is None
    assert node.heard.news == [("resized", 1, 3)]
    assert node.takes("requests/size", JobSize("3", 1, 4, 9.0)) is Duty.SIZE_ASKED
    assert node.replica.size == JobSize("3", 1, 4, 9.0)


def test_a_generation_is_announced_once_however_often_it_is_written(node: Node) -> None:
    node.takes("generation", TRAIN)
    node.takes("generation", TRAIN)
    assert node.heard.news == [("announced", TRAIN)]
    assert (node.replica.view.generation, node.replica.generation_revision) == (TRAIN, node.revision)


def test_an_edit_makes_the_next_generation_of_the_one_that_is_known(node: Node) -> None:
    node.takes("generation", TRAIN)
    assert node.takes("edit", edit_between(TRAIN, AFTER)) is None
    assert node.heard.news == [("announced", TRAIN), ("announced", AFTER)]
    assert node.takes("edit", edit_between(TRAIN, AFTER)) is None, "who reads the whole one has it already"
    assert node.replica.view.generation == AFTER


@pytest.mark.parametrize("known", [None, replace(TRAIN, number=2), replace(TRAIN, workers=TRAIN.workers[:1])])
def test_an_edit_of_a_generation_that_is_not_known_has_the_whole_one_read(node: Node, known: Generation | None) -> None:
    if known is not None:
        node.takes("generation", known)
    assert node.takes("edit", edit_between(TRAIN, AFTER)) is Duty.GENERATION_UNKNOWN
    assert node.replica.view.generation == known
    node.takes("generation", AFTER)
    assert node.replica.view.generation == AFTER


def test_a_reading_of_some_documents_says_nothing_of_others(node: Node) -> None:
    node.takes("generation", TRAIN)
    for name in ("nodes/b", "size"):
        node.takes(name, b"garbage")
    node.replica.begin_reading()
    node.takes("generation", TRAIN)
    node.replica.end_reading({"generation"}, node.revision, ("generation", "size"))
    assert list(node.replica.intake.damaged) == ["nodes/b"]


def test_a_generation_that_is_gone_or_damaged_stays_known(node: Node) -> None:
    node.takes("generation", TRAIN)
    node.takes("generation", b"garbage")
    assert node.replica.generation_revision == node.revision, "the leader may exchange it only by what it has seen"
    node.takes("generation", None)
    assert (node.replica.view.generation, node.replica.generation_revision) == (TRAIN, 0)


def test_the_job_has_begun_once_a_worker_of_this_attempt_is_a_member(node: Node) -> None:
    has_begun = []
    for name, document in (
        ("generation", TRAIN),
        ("nodes/b", changed_report(MEMBER, attempt=1)),
        ("nodes/b", MEMBER),
        ("generation", Generation(4, GenerationStage.ASSEMBLE, attempt=1)),
    ):
        node.takes(name, document)
        has_begun.append(node.replica.view.begun)
    assert has_begun == [False, False, True, False]


def test_what_is_read_again_is_not_asked_again(node: Node) -> None:
    event = node.event("requests/drain/a", DrainRequest("why", 1.0))
    node.replica.take(event)
    for other in (node.replica.begin_connection, node.replica.begin_reading):
        other()
        node.replica.take(event)
    assert node.heard.news == [("drains", DrainRequest("why", 1.0))]
    node.takes("requests/drain/a", DrainRequest("again", 2.0))
    node.takes("requests/drain/b", DrainRequest("of another", 2.0))
    assert len(node.heard.news) == 2


def test_after_a_reading_older_events_of_nodes_and_requests_are_no_news(node: Node) -> None:
    late = [
        node.event("nodes/c", NodeDoc("c", "host-c", 1)),
        node.event("requests/plan", PlanRequest("1", 3, "p", 1.0)),
    ]
    node.replica.begin_reading()
    node.takes("nodes/b", MEMBER)
    node.replica.end_reading({"nodes/b"}, node.revision, ALL)
    for event in late:
        node.replica.take(event)
    assert ([doc.node for doc in node.replica.view.nodes], node.replica.view.request) == (["b"], None)


def test_a_reading_shows_that_damage_has_ended_and_that_the_generation_is_gone(node: Node) -> None:
    node.takes("generation", TRAIN)
    node.takes("size", b"garbage")
    node.replica.begin_reading()
    node.replica.end_reading(set(), node.revision, ALL)
    assert not node.replica.intake.damaged
    assert node.replica.generation_revision == 0
    assert "size is in order again" in node.heard.lines()[-1]


def test_the_last_report_that_could_be_read_counts_also_when_all_is_read_anew(node: Node) -> None:
    node.takes("nodes/b", MEMBER)
    node.replica.begin_reading()
    node.takes("nodes/b", b"garbage")
    node.replica.end_reading({"nodes/b"}, node.revision, ALL)
    assert node.replica.view.nodes == (MEMBER,)
    assert list(node.replica.intake.damaged) == ["nodes/b"]


def test_a_new_connection_takes_revisions_that_were_seen_in_a_store_that_has_lost_its_data(node: Node) -> None:
    node.revision = 50
    node.takes("generation", TRAIN)
    node.replica.begin_connection()
    node.revision = 1
    later = Generation(4, GenerationStage.TRAIN, TRAIN.workers)
    node.takes("generation", later)
    assert node.replica.view.generation == later


@pytest.mark.parametrize("name", ["config", "generation", "result"])
def test_damage_keeps_a_node_from_joining_and_only_freezes_one_that_has(node: Node, name: str) -> None:
    node.replica.damage(name, 1, "why")
    assert name in node.replica.intake.damaged
    node.replica.in_job = False
    with pytest.raises(ProtocolError, match=f"/elaunch/job/{name} is damaged, so this node does not join: why"):
        node.replica.damage(name, 1, "why")


def test_the_end_is_told_once(node: Node) -> None:
    node.takes("result", Result(True, "done"))
    node.replica.end(Result(True, "done"))
    assert node.heard.news == [("ended", Result(True, "done"))]
    assert node.replica.view.result == Result(True, "done")
