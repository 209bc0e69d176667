"""Several nodes of a job around one store: who leads, what all hear, and what an outage or a stranger does."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest

from elaunch.cli.request_plan import change_plan
from elaunch.errors import ElaunchError, LaunchError, ProtocolError, SettingsMismatch, StoreUnavailable
from elaunch.plan import Plan, symmetric
from elaunch.rendezvous.cluster.servers import EtcdServers
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.decide import MembershipSettings
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.membership import (
    Deadlock,
    DrainRequest,
    Generation,
    GenerationStage,
    JobConfig,
    JobSize,
    NodeDoc,
    NodeWorker,
    PlanRequest,
    RequestedPlan,
    Restarts,
    Result,
    Stalled,
    Worker,
    WorkerState,
)
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.node.founder import FoundingSettings
from elaunch.rendezvous.observer import Observer
from elaunch.rendezvous.participant import Participant
from elaunch.rendezvous.rules.founding import Absent
from elaunch.rendezvous.rules.spares import HeldSpares
from elaunch.rendezvous.store import Store
from tests.contract.conftest import READY_S
from tests.helpers import find_free_port, wait_until
from tests.unit.documents import changed_report

LIMIT_S = 60.0
CONFIG = JobConfig(1, 3, None)
SETTINGS = MembershipSettings(min_nodes=1, max_nodes=3, last_call_s=30.0, lease_s=1.0, window_s=0.01)
PATIENT = replace(SETTINGS, lease_s=20.0)
"""For tests in which nothing runs out: on a busy machine a node may be silent for a second."""

READY, MEMBER = WorkerState.READY, WorkerState.MEMBER


class Site(Protocol):
    """A store that can go away."""

    def open(self) -> Store: ...
    def go_away(self) -> None: ...
    def come_back(self) -> None: ...
    def lose_data(self) -> None:
        """While it is away."""


class MemorySite:
    """While it is away, all leases run out."""

    def __init__(self) -> None:
        self._advance_s = 0.0
        self._root = self._empty()
        self._down = False
        self._sessions: list[MemoryStore] = []

    def _empty(self) -> MemoryStore:
        return MemoryStore(lambda: time.monotonic() + self._advance_s)

    def open(self) -> Store:
        session = self._root.session()
        session.down = self._down
        self._sessions.append(session)
        return session

    def go_away(self) -> None:
        self._down = True
        self._advance_s += 100.0
        for session in self._sessions:
            session.down = True

    def come_back(self) -> None:
        self._down = False

    def lose_data(self) -> None:
        self._root = self._empty()


class EtcdSite:
    """A real etcd, which is killed."""

    def __init__(self, etcd: EmbeddedEtcd, folder: Path) -> None:
        self._etcd = etcd
        self._folder = folder

    def open(self) -> Store:
        return EtcdStore(self._etcd.endpoint, timeout_s=5.0)  # the machine may stand still for a second

    def go_away(self) -> None:
        pid = self._etcd.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self._etcd.pid is None, LIMIT_S, "etcd to end")

    def come_back(self) -> None:
        self._etcd.start_again()
        self._etcd.wait_ready(READY_S)

    def lose_data(self) -> None:
        shutil.rmtree(self._folder / "data")


@pytest.fixture(params=["memory", "etcd"])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    if request.param == "memory":
        return MemorySite()
    return EtcdSite(request.getfixturevalue("own_etcd"), tmp_path / "etcd")


class Node:
    """A participant, and all that it was told."""

    def __init__(
        self,
        open_store: Callable[[], Store],
        name: str,
        config: JobConfig,
        rules: MembershipSettings = SETTINGS,
        **settings: Any,
    ) -> None:
        self.name = name
        self.doc = NodeDoc(name, f"host-{name}", 1, liveness_address=f"127.0.0.{ord(name[0])}:1")
        self.config: JobConfig | None = None
        self.generations: list[Generation] = []
        self.results: list[Result] = []
        self.sizes: list[tuple[int, int]] = []
        self.spares: list[tuple[str, ...]] = []
        self.drain_reasons: list[str] = []
        self.deadlocks: list[Deadlock] = []
        self.waiting: list[str] = []
        self.outages: list[str] = []
        self.hindrances: list[str] = []
        self.returns: list[float] = []
        self.absences: list[str] = []
        self.refusals: list[ElaunchError] = []
        self.warnings: list[str] = []
        self.participant = Participant(open_store, "job", config, rules, self.doc, self, **settings)

    def joined(self, config: JobConfig) -> None:
        self.config = config

    def announced(self, generation: Generation) -> None:
        self.generations.append(generation)

    def resized(self, min_nodes: int, max_nodes: int) -> None:
        self.sizes.append((min_nodes, max_nodes))

    def spared(self, nodes: tuple[str, ...]) -> None:
        self.spares.append(nodes)

    def drains(self, request: DrainRequest) -> None:
        self.drain_reasons.append(request.reason)

    def deadlocked(self, found: Deadlock) -> None:
        self.deadlocks.append(found)

    def served(self, servers: EtcdServers) -> None:
        self.servers = servers

    def ended(self, result: Result) -> None:
        self.results.append(result)

    def waits(self, text: str) -> None:
        self.waiting.append(text)

    def outage(self, why: str) -> None:
        self.outages.append(why)

    def back(self, away_s: float) -> None:
        self.returns.append(away_s)

    def worker_ended(self, worker: str, logged: int) -> None:
        raise AssertionError("nobody awaits the end of a worker here")

    def hindered(self, why: str) -> None:
        self.hindrances.append(why)

    def absent(self, text: str) -> None:
        self.absences.append(text)

    def warns(self, text: str) -> None:
        self.warnings.append(text)

    def refused(self, error: ElaunchError) -> None:
        self.refusals.append(error)

    def says(self, *states: WorkerState, **fields: Any) -> None:
        """Publish a report with a worker for each state, and the newest generation."""
        workers = tuple(
            NodeWorker(f"{self.name}/{slot}#0", slot, state, f"{self.name}:{slot}") for slot, state in enumerate(states)
        )
        generation = self.generations[-1].number if self.generations else 0
        self.doc = changed_report(
            self.doc, workers=workers, elastic=True, takes_plans=True, generation=generation, took_part=True, **fields
        )
        self.participant.publish(self.doc)

    def hears(self, what: Callable[[Generation], bool]) -> Generation:
        """Wait for a generation."""
        return wait_until(
            lambda: next((one for one in list(self.generations) if what(one)), None),
            LIMIT_S,
            lambda: f"a generation at {self.name}, which heard {self.generations}, refused: {self.refusals}",
        )


class Job:
    """The nodes of one test."""

    def __init__(self, site: Site, rules: MembershipSettings = SETTINGS) -> None:
        self.site = site
        self.rules = rules
        self.admin = site.open()
        self.nodes: list[Node] = []

    def node(self, name: str, config: JobConfig = CONFIG, **settings: Any) -> Node:
        node = Node(self.site.open, name, config, self.rules, **settings)
        self.nodes.append(node)
        node.participant.start()
        return node

    def three(self, config: JobConfig = CONFIG, **settings: Any) -> tuple[Node, Node, Node]:
        """Nodes a, b and c, joined in this order, whose workers train together; a leads."""
        nodes = []
        for name in "abc":
            node = self.node(name, config, **settings)
            wait_until(lambda name=name: self.read(f"nodes/{name}"), LIMIT_S, f"{name} to join")  # type: ignore[misc]
            wait_until(lambda: self.read("leader"), LIMIT_S, "a to lead")
            nodes.append(node)
        for node in nodes:
            node.hears(lambda one: one.stage is GenerationStage.START)
            node.says(READY)
        for node in nodes:
            node.hears(lambda one: one.stage is GenerationStage.TRAIN)
            node.says(MEMBER)
        wait_until(lambda: b'"begun":true' in (self.read("generation") or b""), LIMIT_S, "the leader to see members")
        a, b, c = nodes
        return a, b, c

    def read(self, key: str) -> bytes | None:
        try:
            entry = self.admin.get(f"/elaunch/job/{key}")
        except StoreUnavailable:
            return None
        return entry.value if entry else None

    def leader(self, other_than: str = "") -> Node:
        def find() -> Node | None:
            name = (self.read("leader") or b"").decode()
            return next((node for node in self.nodes if node.name == name != other_than), None)

        return wait_until(find, LIMIT_S, "a node to lead")

    def stop(self) -> None:
        for node in self.nodes:
            node.participant.stop()
        self.admin.close()


@pytest.fixture
def job(site: Site) -> Iterator[Job]:
    made = Job(site, PATIENT)
    yield made
    made.stop()


@pytest.fixture
def hasty_job(site: Site) -> Iterator[Job]:
    """For tests that wait for what comes one or two leases later."""
    made = Job(site, replace(SETTINGS, lease_s=2.0))
    yield made
    made.stop()


def ids(*expected: str) -> Callable[[Generation], bool]:
    return lambda one: one.stage is GenerationStage.TRAIN and one.ids == expected


class TestJoining:
    def test_all_nodes_hear_the_same_generations_in_the_order_in_which_nodes_joined(self, job: Job) -> None:
        a, b, c = job.three()
        assert a.generations == b.generations == c.generations
        assert [one.stage for one in a.generations] == [GenerationStage.START, GenerationStage.TRAIN]
        assert [one.ids for one in a.generations] == [("a/0", "b/0", "c/0"), ("a/0#0", "b/0#0", "c/0#0")]
        assert a.generations[0].master.addr == "host-a"

    def test_a_node_that_does_not_lead_has_nothing_to_do_between_its_renewals(self) -> None:
        job = Job(MemorySite(), PATIENT)
        try:
            a, b, _ = job.three()
            wait_until(lambda: b.participant._wait_s() > 1.0, LIMIT_S, "b to have written all")
            assert a.participant._wait_s() <= 1.0
            b.participant._setbacks.meet(time.monotonic())
            assert b.participant._wait_s() <= 1.0
        finally:
            job.stop()

    def test_a_node_that_waits_is_awake_for_its_next_line(self) -> None:
        job = Job(MemorySite(), PATIENT)
        try:
            job.node("a")
            wait_until(lambda: job.read("nodes/a"), LIMIT_S, "a to join")
            b = job.node("b")  # a third one is waited for
            wait_until(lambda: job.read("nodes/b"), LIMIT_S, "b to join")
            now_s = time.monotonic()
            assert b.participant._wait_s() <= max(0.0, b.participant._pace.due_s - now_s)
        finally:
            job.stop()

    def test_nodes_that_wait_are_told_for_whom(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("elaunch.waits.WAITED_S", 0.05)
        a = job.node("a")
        wait_until(lambda: job.read("nodes/a"), LIMIT_S, "a to join")
        b = job.node("b")  # a third one is waited for
        both = re.compile(r"waiting: last call: 2 of 3 nodes are here \(here: a, b, \d+ s left\)")
        for node in (a, b):
            wait_until(lambda node=node: any(map(both.fullmatch, node.waiting)), LIMIT_S, "both to be named")  # type: ignore[misc]

    def test_the_node_that_leads_goes_on_leading_when_others_join(self, job: Job) -> None:
        job.node("a")
        assert job.leader().name == "a"
        for node in [job.node("b"), job.node("c")]:
            node.hears(lambda one: one.stage is GenerationStage.START)
        assert job.leader().name == "a"

    def test_all_nodes_have_the_same_secret(self, job: Job) -> None:
        tokens = {node.config.token for node in job.three() if node.config}
        assert len(tokens) == 1
        assert len(tokens.pop()) == 32

    def test_a_death_makes_one_generation_that_all_hear(self, job: Job) -> None:
        a, b, c = job.three()
        b.says(cause="worker b/0#0 was killed by SIGKILL", cause_t=9.0)
        after = [node.hears(ids("a/0#0", "c/0#0")) for node in (a, b, c)]
        assert after[0] == after[1] == after[2]
        assert (after[0].number, after[0].aborts_step_before, after[0].cause_t) == (3, 3, 9.0)

    def test_a_node_that_stops_is_gone_at_once(self, job: Job) -> None:
        a, b, c = job.three()
        b.participant.stop()
        assert a.hears(ids("a/0#0", "c/0#0")).cause == "node b was lost"
        assert job.read("nodes/b") is None
        assert not c.outages

    def test_when_all_wait_for_each_other_one_node_is_asked_to_end_it(self, job: Job) -> None:
        a, b, c = job.three()

        def waits(node: Node, peer: str) -> tuple[Stalled, ...]:
            return (Stalled(f"{node.name}/0#0", 7, "in step 7", 2, 40, (peer,)),)

        a.says(MEMBER, stalled=waits(a, "b/0#0"))
        c.says(MEMBER, stalled=waits(c, "b/0#0"))
        wait_until(lambda: b"in step 7" in (job.read("nodes/c") or b""), LIMIT_S, "c to have said so")
        assert job.read("requests/deadlock/c") is None, "b may go on"
        b.says(MEMBER, stalled=waits(b, "a/0#0"))
        (found,) = wait_until(lambda: c.deadlocks, LIMIT_S, "the node of the victim to be asked")
        assert (found.worker, found.members, len(found.waits)) == ("c/0#0", 3, 3)
        c.says(MEMBER, stalled=())
        wait_until(lambda: job.read("requests/deadlock/c") is None, LIMIT_S, "the request to be withdrawn")
        c.says(MEMBER, stalled=waits(c, "b/0#0"))
        wait_until(lambda: len(c.deadlocks) == 2, LIMIT_S, "it to be asked again")
        assert not a.deadlocks + b.deadlocks

    def test_who_leads_by_then_asks_again(self, job: Job) -> None:
        a, b, c = job.three()
        for node in (a, b, c):
            node.says(MEMBER, stalled=(Stalled(f"{node.name}/0#0", 7, "in step 7", 2, 40),))
        wait_until(lambda: len(c.deadlocks) == 1, LIMIT_S, "the node of the victim to be asked")
        a.participant.stop()
        for node in (b, c):
            node.hears(ids("b/0#0", "c/0#0"))
            node.says(MEMBER, stalled=(Stalled(f"{node.name}/0#0", 7, "in step 7", 3, 40),))
        wait_until(lambda: len(c.deadlocks) == 2, LIMIT_S, "it to be asked again")
        assert c.deadlocks[1].members == 2

    def test_the_result_is_told_once(self, job: Job) -> None:
        nodes = job.three()
        for node in nodes:
            node.says(WorkerState.DONE, finished=True)
        for node in nodes:
            wait_until(lambda node=node: node.results, LIMIT_S, f"the result at {node.name}")  # type: ignore[misc]
            assert node.results == [Result(True, "all workers have finished")]


class TestSize:
    """Nodes that are asked to leave, and another number of nodes."""

    def ask(self, job: Job, least: int, most: int) -> None:
        size = JobSize("7", least, most, time.time())
        job.admin.put("/elaunch/job/requests/size", to_json(size), job.admin.grant(30.0))

    def test_a_node_hears_that_it_is_to_leave_and_no_other_does(self, job: Job) -> None:
        a, b, c = job.three()
        request = DrainRequest("elaunch ctl drain", time.time())
        job.admin.put("/elaunch/job/requests/drain/b", to_json(request), job.admin.grant(30.0))
        wait_until(lambda: b.drain_reasons == ["elaunch ctl drain"], LIMIT_S, "b to hear of it")
        b.says(MEMBER, draining=True, joined=b.generations[-1].number)
        assert a.hears(ids("a/0#0", "c/0#0")).leaving == ("b/0#0",)
        assert not a.drain_reasons + c.drain_reasons

    def test_all_nodes_can_be_asked_by_one(self, job: Job) -> None:
        nodes = job.three()
        nodes[1].participant.drain_all("SIGUSR2 to node b")
        for node in nodes:
            wait_until(lambda node=node: node.drain_reasons, LIMIT_S, "all to hear of it")  # type: ignore[misc]
            assert node.drain_reasons == ["SIGUSR2 to node b"]

    def test_the_nodes_too_many_are_told_to_leave_once(self, job: Job) -> None:
        a, b, c = job.three()
        self.ask(job, 1, 2)
        wait_until(lambda: c.drain_reasons, LIMIT_S, "the last node to be told")
        for node in (a, b, c):
            wait_until(lambda node=node: node.sizes, LIMIT_S, "all to hear of the size")  # type: ignore[misc]
        c.says(MEMBER, draining=True, joined=c.generations[-1].number)
        a.hears(ids("a/0#0", "b/0#0"))
        c.participant.stop()
        wait_until(lambda: job.read("requests/drain/c") is None, LIMIT_S, "the name c to be free again")
        assert c.drain_reasons == ["the job is to have 2 nodes from now on"]
        assert not a.drain_reasons + b.drain_reasons
        assert [node.sizes for node in (a, b, c)] == [[(1, 2)]] * 3

    def test_a_size_outlives_who_asked_and_who_led(self, job: Job) -> None:
        a, b, c = job.three()
        self.ask(job, 1, 3)
        for node in (a, b, c):
            wait_until(lambda node=node: node.sizes, LIMIT_S, "all to hear of it")  # type: ignore[misc]
        a.participant.stop()
        b.hears(ids("b/0#0", "c/0#0"))
        d = job.node("d")
        wait_until(lambda: d.sizes == [(1, 3)], LIMIT_S, "d to hear of the size")


class TestSpares:
    """Nodes beyond the maximum are told to hold workers ready, and hear it again from another leader."""

    def test_who_is_held_ready_is_heard_by_all_and_takes_the_place_of_a_lost_node(self, site: Site) -> None:
        config, rules = replace(CONFIG, spares=1), replace(PATIENT, spares=1, lease_s=2.0)
        job = Job(site, rules)
        try:
            a, b, c = job.three(config)
            d = job.node("d", config)
            for node in (a, b, c, d):
                wait_until(lambda node=node: node.spares[-1:] == [("d",)], LIMIT_S, "d to be held ready")  # type: ignore[misc]
            d.hears(lambda one: one.stage is GenerationStage.TRAIN)
            d.says(READY)
            wait_until(lambda: b'"state":"ready"' in (job.read("nodes/d") or b""), LIMIT_S, "d to be known as ready")
            job.node("e", config)
            wait_until(lambda: job.read("nodes/e"), LIMIT_S, "e to join")
            leader = job.leader()
            leader.participant.stop()
            left = [node for node in (a, b, c) if node is not leader]
            names = [d.name if node is leader else node.name for node in (a, b, c)]
            for node in (*left, d):
                node.hears(ids(*(f"{name}/0#0" for name in names)))
                wait_until(lambda node=node: node.spares[-1] == ("e",), LIMIT_S, "e to be held in its turn")  # type: ignore[misc]
            assert from_json(HeldSpares, job.read("spares") or b"").nodes == ("e",)
        finally:
            job.stop()

    def test_a_job_without_spares_has_no_document_of_them(self, job: Job) -> None:
        a, _, _ = job.three()
        job.node("d")
        wait_until(lambda: job.read("nodes/d"), LIMIT_S, "d to join")
        assert job.read("spares") is None
        assert a.spares == []

    def test_a_node_with_another_number_of_spares_is_refused(self, job: Job) -> None:
        job.node("a")
        wait_until(lambda: job.read("nodes/a"), LIMIT_S, "a to join")
        b = job.node("b", replace(CONFIG, spares=2))
        wait_until(lambda: b.refusals, LIMIT_S, "b to be refused")
        assert "runs with no --spares, this node was started with --spares=2" in str(b.refusals[0])


class TestLeading:
    def test_when_the_leader_stops_another_node_leads(self, job: Job) -> None:
        a, b, c = job.three()
        a.participant.stop()
        b.hears(ids("b/0#0", "c/0#0"))
        assert job.leader(other_than="a").name in "bc"
        c.says()
        b.hears(ids("b/0#0"))

    def test_when_the_leaders_lease_is_lost_another_leads_and_the_node_joins_again(self, job: Job) -> None:
        a, _, c = job.three()
        lease = a.participant._session.lease.id
        assert lease is not None
        job.admin.revoke(lease)
        wait_until(lambda: job.read("leader"), LIMIT_S, "a node to lead")
        wait_until(lambda: job.read("nodes/a"), LIMIT_S, "a to join again")
        a.says(READY)
        # Whether a was missed or not, the job goes on and hears of what comes.
        c.says(draining=True)
        a.hears(lambda one: "c/0#0" not in one.ids and one.stage is GenerationStage.TRAIN)
        assert not a.refusals
        (said,) = a.absences
        assert re.fullmatch(
            r"this node was absent for the others: its lease of 20 s had ended, renewed \d\.\d\d s before"
            r"(; renewing came \d\.\d\d s late, and took the store \d\.\d\d s)?; "
            r"--rdzv-conf lease_ttl=SECONDS gives it more time",
            said,
        )
        assert not a.outages, "the store was there all the time"
        assert not c.absences

    def test_a_leader_that_hears_of_its_end_before_it_renews_its_lease_joins_again_and_leads(self, site: Site) -> None:
        job = Job(site, replace(PATIENT, max_nodes=1))
        try:
            a = job.node("a", JobConfig(1, 1, None))
            a.hears(lambda one: one.stage is GenerationStage.START)
            assert a.participant._session.lease.id is not None
            job.admin.revoke(a.participant._session.lease.id)
            for key in ("nodes/a", "leader"):
                wait_until(lambda key=key: job.read(key), LIMIT_S, f"{key} to be back")  # type: ignore[misc]
            a.says(READY)
            a.hears(lambda one: one.stage is GenerationStage.TRAIN)
            assert (len(a.absences), a.outages, a.refusals) == (1, [], [])
        finally:
            job.stop()

    def test_a_leader_whose_own_report_is_gone_decides_nothing_until_it_is_back(self, site: Site) -> None:
        job = Job(site, replace(PATIENT, max_nodes=1))
        try:
            a = job.node("a", JobConfig(1, 1, None))
            a.hears(lambda one: one.stage is GenerationStage.START)
            assert job.admin.delete("/elaunch/job/nodes/a")
            wait_until(lambda: job.read("nodes/a"), LIMIT_S, "the report to be back")
            a.says(READY)
            a.hears(lambda one: one.stage is GenerationStage.TRAIN)
            assert (a.absences, a.results, a.refusals) == ([], [], [])
        finally:
            job.stop()

    def test_a_node_that_learns_from_a_write_that_its_lease_has_ended_writes_all_again(self, job: Job) -> None:
        a = job.node("a")
        wait_until(lambda: job.read("nodes/a"), LIMIT_S, "a to join")
        b = job.node("b", figures="of b's check")
        wait_until(lambda: job.read("checks/b"), LIMIT_S, "b to join")
        assert b.participant._session.lease.id is not None
        job.admin.revoke(b.participant._session.lease.id)
        assert job.read("checks/b") is None
        b.says(READY)
        wait_until(lambda: job.read("checks/b"), LIMIT_S, "b's figures to be back")
        assert b'"ready"' in (job.read("nodes/b") or b"")
        assert [(len(node.absences), node.outages) for node in (a, b)] == [(0, []), (1, [])]

    def test_a_leader_that_learns_from_a_write_that_its_lease_has_ended_leads_no_more(self) -> None:
        site = MemorySite()
        job = Job(site, replace(PATIENT, max_nodes=1))
        try:
            a = job.node("a", JobConfig(1, 1, None))
            a.hears(lambda one: one.stage is GenerationStage.START)
            lease = a.participant._session.lease.id
            assert lease is not None
            with site._root._data.lock:
                job.admin.revoke(lease)
                assert job.admin.create("/elaunch/job/leader", b"b", job.admin.grant(LIMIT_S))
            a.says(READY)
            wait_until(lambda: job.read("nodes/a"), LIMIT_S, "a to join again")
            assert not a.participant._leader.leads
            assert job.read("leader") == b"b"
            job.admin.delete("/elaunch/job/leader")
            a.hears(lambda one: one.stage is GenerationStage.TRAIN)
            assert (len(a.absences), a.outages, a.refusals) == (1, [], [])
        finally:
            job.stop()

    def test_a_node_that_leads_no_more_rests_between_its_renewals(self) -> None:
        job = Job(MemorySite(), replace(PATIENT, max_nodes=1))
        try:
            a = job.node("a", JobConfig(1, 1, None))
            a.hears(lambda one: one.stage is GenerationStage.START)
            job.admin.put("/elaunch/job/nodes/b", to_json(NodeDoc("b", "host-b", 1)))
            job.admin.put("/elaunch/job/leader", b"b")
            wait_until(lambda: not a.participant._leader.leads, LIMIT_S, "a to give way")
            due_s = a.participant._leader._wake_s
            wait_until(lambda: time.monotonic() > due_s, LIMIT_S, "the time at which a was to lead next")
            assert a.participant._wait_s() > 0
            assert (a.absences, a.refusals) == ([], [])
        finally:
            job.stop()

    def test_generations_grow_whoever_leads(self, job: Job) -> None:
        a, b, c = job.three()
        a.participant.stop()
        b.hears(ids("b/0#0", "c/0#0"))
        job.leader(other_than="a").participant.stop()
        left = c if b.participant._thread.is_alive() is False else b
        left.hears(ids(f"{left.name}/0#0"))
        generations = [one.number for one in left.generations]
        assert generations == sorted(set(generations))


class TestRequests:
    def ask(self, job: Job, generation: int, plan: str = "plan layers 4") -> None:
        request = PlanRequest(f"for {generation}", generation, plan, 9.0)
        job.admin.put("/elaunch/job/requests/plan", to_json(request))

    def test_a_request_wakes_the_leader_and_all_hear_of_the_plan(self, job: Job) -> None:
        a, b, c = job.three()
        self.ask(job, 2)
        after = [node.hears(lambda one: one.plan_request == "for 2") for node in (a, b, c)]
        assert after[0] == after[1] == after[2]
        before = a.generations[1]
        assert after[0] == replace(
            before,
            number=3,
            cause="a new plan was asked for",
            cause_t=9.0,
            begun=after[0].begun,
            requested_plan=RequestedPlan("plan layers 4", "for 2"),
        )

    def test_the_next_leader_knows_what_was_asked_before_it_led(self, job: Job) -> None:
        a, b, c = job.three()
        self.ask(job, 3)  # for members that there will be when the leader has gone
        a.participant.stop()
        for node in (b, c):
            assert node.hears(lambda one: one.plan_request == "for 3").ids == ("b/0#0", "c/0#0")

    def test_one_that_cannot_be_read_or_is_withdrawn_does_no_harm(self, job: Job) -> None:
        a, _, _ = job.three()
        job.admin.put("/elaunch/job/requests/plan", b'{"kind":"PlanRequest","v":99}')
        self.ask(job, 3)
        job.admin.delete("/elaunch/job/requests/plan")
        self.ask(job, 2)
        assert a.hears(lambda one: one.plan_request == "for 2").number == 3
        job.admin.delete("/elaunch/job/requests/plan")
        a.says()
        assert a.hears(ids("b/0#0", "c/0#0")).plan_request == "for 2"
        assert not a.refusals

    def test_who_asks_hears_when_all_nodes_have_settled(self, job: Job) -> None:
        nodes = job.three()
        for name in "abc":
            wait_until(lambda name=name: b'"member"' in (job.read(f"nodes/{name}") or b""), LIMIT_S, "the members")  # type: ignore[misc]
        told: list[str] = []
        store = job.site.open()
        plan = symmetric(["x", "y", "z"], 3, 6, 2, dp=1, pp=3)
        asks = threading.Thread(target=lambda: told.append(change_plan(store, "job", plan, LIMIT_S)))
        asks.start()
        for node in nodes:
            after = node.hears(lambda one: one.plan_request != "")
            assert Plan.parse(after.plan) == plan.renamed({"x": "a/0#0", "y": "b/0#0", "z": "c/0#0"})
            assert not told
            node.says(MEMBER, plan_request=after.plan_request)
        asks.join(LIMIT_S)
        assert [line.partition(",")[0] for line in told] == ["generation 3: all 3 members have changed over"]
        wait_until(lambda: job.read("requests/plan") is None, LIMIT_S, "the request to go")
        store.close()

    def test_an_observer_follows_the_documents(self, job: Job) -> None:
        a, b, c = job.three()
        observer = Observer(job.admin, "job")
        assert [doc.node for doc in observer.documents.nodes] == ["a", "b", "c"]
        assert observer.documents.generation == replace(a.generations[-1], begun=True)
        end_s = time.monotonic() + LIMIT_S
        c.participant.stop()
        without_c = a.hears(lambda one: one.number == 3)
        while "c" in [doc.node for doc in observer.documents.nodes] or observer.documents.generation != without_c:
            assert observer.wait(end_s), "nothing changed"
        for node in (a, b):
            node.says(WorkerState.DONE, finished=True)
        while observer.documents.result is None:
            assert observer.wait(end_s), "no result"
        observer.close()

    def test_an_observer_in_vain_says_how_long_it_still_waits(self, job: Job) -> None:
        observer, left = Observer(job.admin, "job"), list[float]()
        assert not observer.wait(time.monotonic() + 1.5, left.append)
        assert [round(left_s, 1) for left_s in left] == [1.5]
        observer.close()

    def test_an_observer_is_told_that_the_store_has_gone(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("elaunch.rendezvous.observer.BACK_S", 0.0)
        observer = Observer(job.admin, "job")
        job.site.go_away()
        with pytest.raises(StoreUnavailable):
            observer.wait(time.monotonic() + LIMIT_S)


class TestOutages:
    def test_nobody_is_expelled_and_news_of_the_outage_is_written_after_it(self, job: Job) -> None:
        a, b, c = job.three()
        job.site.go_away()
        for node in (a, b, c):
            wait_until(lambda node=node: node.outages, LIMIT_S, f"{node.name} to notice")  # type: ignore[misc]
        b.says(cause="worker b/0#0 died", cause_t=9.0)
        b.says(cause="worker b/0#0 died", cause_t=9.0, reset_generation=1)
        job.site.come_back()
        job.admin = job.site.open()
        after = a.hears(lambda one: one.number == 3)
        assert (after.ids, after.cause) == (("a/0#0", "c/0#0"), "worker b/0#0 died")
        for node in (a, b, c):
            node.hears(lambda one: one == after)
            assert (len(node.outages), len(node.returns)) == (1, 1)
            assert not node.refusals
            assert not node.hindrances, "the outage says enough"

    @pytest.mark.parametrize("of", ["abc", "b"])
    def test_nobody_is_expelled_whose_lease_has_ended_while_the_store_stood_still(self, of: str) -> None:
        site = MemorySite()
        job = Job(site, replace(SETTINGS, lease_s=6.0))
        try:
            nodes = a, b, c = job.three()

            def absent(text: str) -> None:
                b.absences.append(text)
                time.sleep(0.3)  # it comes after the others

            b.absent = absent  # type: ignore[method-assign]
            for node in nodes:
                wait_until(lambda node=node: b'"member"' in (job.read(f"nodes/{node.name}") or b""), LIMIT_S, "members")  # type: ignore[misc]
            with site._root._data.lock:
                a.says(MEMBER, saved=1)
                time.sleep(job.rules.lease_s / 3 + 0.1)
                for node in nodes:
                    if node.name in of:
                        assert node.participant._session.lease.id is not None
                        job.admin.revoke(node.participant._session.lease.id)
            for node in nodes:
                wait_until(lambda node=node: job.read(f"nodes/{node.name}"), LIMIT_S, f"{node.name} to be back")  # type: ignore[misc]
            c.says(cause="worker c/0#0 died", cause_t=9.0)
            for node in nodes:
                after = node.hears(lambda one: one.number == 3)
                assert (after.ids, after.cause) == (("a/0#0", "b/0#0"), "worker c/0#0 died")
                assert (len(node.absences), node.outages, node.refusals) == (int(node.name in of), [], [])
        finally:
            job.stop()

    def test_a_node_that_could_not_hear_is_told_the_newest_generation_when_it_can(self) -> None:
        site = MemorySite()
        own: list[MemoryStore] = []
        cut_off = False

        def open_for_b() -> Store:
            own.append(site._root.session())
            own[-1].down = cut_off
            return own[-1]

        job = Job(site)
        try:
            a = job.node("a")
            b = Node(open_for_b, "b", CONFIG)
            c = job.node("c")
            job.nodes.append(b)
            b.participant.start()
            for node in (a, b, c):
                node.hears(lambda one: one.stage is GenerationStage.START)
                node.says(READY)
            for node in (a, b, c):
                node.hears(lambda one: one.stage is GenerationStage.TRAIN)
                node.says(MEMBER)
            cut_off = True
            for session in own:
                session.down = True
            wait_until(lambda: b.outages, LIMIT_S, "b to notice")
            c.says()
            a.hears(lambda one: one.number == 3)
            assert b.generations[-1].number == 2
            wait_until(lambda: job.read("nodes/b") is None, LIMIT_S, "b to be missed")
            assert not b.absences
            cut_off = False
            b.hears(lambda one: one.number >= 3)
            assert [len(node.absences) for node in (a, b, c)] == [0, 1, 0]
        finally:
            job.stop()

    def test_a_store_that_has_lost_everything_is_filled_again_and_generations_go_on(self, job: Job) -> None:
        nodes = job.three()
        for node in nodes:
            node.says(MEMBER)
            wait_until(
                lambda node=node: b'"generation":2' in (job.read(f"nodes/{node.name}") or b""),  # type: ignore[misc]
                LIMIT_S,
                "the generation to be remembered",
            )
        job.site.go_away()
        job.site.lose_data()
        job.site.come_back()
        job.admin.close()
        job.admin = job.site.open()
        for node in nodes:
            wait_until(lambda node=node: job.read(f"nodes/{node.name}"), LIMIT_S, f"{node.name} to be back")  # type: ignore[misc]
        wait_until(lambda: job.read("generation"), LIMIT_S, "the generation to be back")
        a, b, c = nodes
        b.says()
        after = a.hears(ids("a/0#0", "c/0#0"))
        assert after.number > 2
        c.hears(ids("a/0#0", "c/0#0"))
        written = from_json(JobConfig, job.read("config") or b"")
        assert not a.absences + b.absences + c.absences, "nobody was missed"
        assert a.config is not None
        assert written.token == a.config.token, "nodes that join now can link with the others"

    def test_nobody_is_lost_where_the_store_ends_leases_of_the_living(self) -> None:
        """As an etcd before 3.5.11 does whose leading server has stood still (issue 15247), here those of a and c."""
        job = Job(MemorySite(), replace(PATIENT, lease_s=6 * LIMIT_S, window_s=1.0))
        try:
            a, b, c = job.three()
            c.participant._leader._campaign = lambda: None  # type: ignore[method-assign]  # it comes too late for that
            for node in (c, a):
                lease = node.participant._session.lease.id
                assert lease is not None
                job.admin.revoke(lease)
            for node in (a, c):  # neither waits until it is to renew its lease
                wait_until(lambda node=node: node.absences, LIMIT_S, f"{node.name} to notice")  # type: ignore[misc]
                wait_until(lambda node=node: job.read(f"nodes/{node.name}"), LIMIT_S, f"{node.name} to be back")  # type: ignore[misc]
            c.says()
            for node in (a, b, c):
                assert node.hears(ids("a/0#0", "b/0#0")).number == 3
        finally:
            job.stop()

    def test_a_store_that_has_lost_its_last_writes_gets_the_generation_back(self) -> None:
        """Such as an etcd of one member before 3.5.5 that was killed: what is left there is the generation before."""
        site = MemorySite()
        job = Job(site, PATIENT)
        try:
            a, b, c = nodes = job.three()
            site.go_away()
            for node in nodes:
                wait_until(lambda node=node: node.outages, LIMIT_S, "all to notice")  # type: ignore[misc]
            site._root.put("/elaunch/job/generation", to_json(a.generations[0]), None)
            site.come_back()
            for node in nodes:
                wait_until(lambda node=node: node.returns, LIMIT_S, "all to be back")  # type: ignore[misc]
            b.says()
            for node in nodes:
                assert node.hears(ids("a/0#0", "c/0#0")).number == 3
            assert [one.number for one in c.generations] == [1, 2, 3]
        finally:
            job.stop()

    def test_a_node_that_is_there_before_the_others_are_back_takes_over_their_token(self) -> None:
        """As that of a machine whose agent starts an etcd anew: its settings are the first, and of no use."""
        site = MemorySite()
        job = Job(site, PATIENT)

        def start() -> str:
            raise LaunchError("no etcd here")

        founding = FoundingSettings(lambda: ("a:1",), print, start, lambda: False, lambda: None, print)
        try:
            nodes = job.three(replace(CONFIG, max_nodes=4), founding=founding)
            token = nodes[0].config and nodes[0].config.token
            assert token
            site.go_away()
            for node in nodes:
                wait_until(lambda node=node: node.outages, LIMIT_S, "all to notice")  # type: ignore[misc]
            site.lose_data()
            first = Node(lambda: site._root.session(), "d", replace(CONFIG, max_nodes=4), PATIENT, founding=founding)
            job.nodes.append(first)
            first.participant.start()
            wait_until(lambda: first.config, LIMIT_S, "d to join")
            assert first.config is not None
            assert first.config.token != token
            site.come_back()
            job.admin.close()
            job.admin = site.open()
            first.hears(lambda one: one.number >= 2)
            assert first.config.token == token, "before its workers are told which"
            for node in nodes:
                wait_until(lambda node=node: job.read(f"nodes/{node.name}"), LIMIT_S, f"{node.name} to be back")  # type: ignore[misc]
            written = from_json(JobConfig, job.read("config") or b"")
            assert {written.token, *(node.config.token for node in nodes if node.config is not None)} == {token}
            assert not any(node.absences for node in nodes)
        finally:
            job.stop()

    def test_all_hear_which_nodes_a_store_has_lost_that_they_cannot_do_without(self) -> None:
        """They may have founded another one with others, so their end would prove nothing."""
        job = Job(MemorySite(), replace(PATIENT, founds=True))
        founding = FoundingSettings(lambda: (), print, lambda: "", lambda: False, lambda: None, print)
        try:
            a, b, c = job.three(founding=founding)
            assert job.read("absent") is None
            for node in (a, b):
                session = node.participant._session
                session._entrant = replace(session._entrant, founds=False)  # their leases end, and nobody says why
                node.participant.stop()

            def absent(*names: str) -> Callable[[], bool]:
                agents = Absent(tuple(sorted(f"127.0.0.{ord(name)}:1" for name in names)))
                return lambda: job.read("absent") == to_json(agents)

            wait_until(absent("a", "b"), LIMIT_S, "c, which leads, to miss the others")
            replica = c.participant._replica
            wait_until(lambda: len(replica.absent) == 2, LIMIT_S, "c to hear of it")
            known: list[int] = []
            take = replica.take
            replica.take = lambda event: (take(event), known.append(len(replica.absent)))[0]  # type: ignore[method-assign,func-returns-value]
            job.admin.delete("/elaunch/job/absent")  # as at the end of a leader
            wait_until(lambda: known, LIMIT_S, "c to hear of that")
            assert known[0] == 2, "that a leader ends makes nobody present"
            job.node("a", founding=founding)
            wait_until(absent(), LIMIT_S, "c to see that it can go on with a")
            wait_until(lambda: not replica.absent, LIMIT_S, "c to hear of it")
        finally:
            job.stop()

    def test_a_node_that_joins_after_the_loss_hears_of_the_generation(self, job: Job) -> None:
        a = job.node("a", replace(CONFIG, max_nodes=3))
        b = job.node("b")
        c = job.node("c")
        for node in (a, b, c):
            node.hears(lambda one: one.stage is GenerationStage.START)
        job.site.go_away()
        job.site.lose_data()
        job.site.come_back()
        job.admin.close()
        job.admin = job.site.open()
        for name in "abc":
            wait_until(lambda name=name: job.read(f"nodes/{name}"), LIMIT_S, f"{name} to be back")  # type: ignore[misc]
        assert job.node("d").hears(lambda one: one.stage is GenerationStage.START).number == 1


class TestStrangers:
    def test_a_node_with_other_settings_is_refused_and_told_both(self, job: Job) -> None:
        job.node("a")
        wait_until(lambda: job.read("nodes/a"), LIMIT_S, "a to join")
        b = job.node("b", JobConfig(2, 4, 7))
        wait_until(lambda: b.refusals, LIMIT_S, "b to be refused")
        assert isinstance(b.refusals[0], SettingsMismatch)
        text = str(b.refusals[0])
        assert "job 'job' runs with --nnodes=1:3 and no --max-restarts, this node" in text
        assert "this node was started with --nnodes=2:4 and --max-restarts=7: start it with the same" in text
        assert b.config is None
        wait_until(lambda: not b.participant._thread.is_alive(), LIMIT_S, "b to give up")
        assert job.read("nodes/b") is None

    def test_a_node_whose_scripts_would_be_told_otherwise_is_refused_and_told_what_differs(self, job: Job) -> None:
        job.node("a", replace(CONFIG, training=(("--consistency", "bitwise"), ("--policy", "auto"))))
        wait_until(lambda: job.read("nodes/a"), LIMIT_S, "a to join")
        b = job.node("b", replace(CONFIG, training=(("--dp", "1:2"), ("--policy", "auto"))))
        wait_until(lambda: b.refusals, LIMIT_S, "b to be refused")
        text = "job 'job' runs with --consistency=bitwise and no --dp, this node was started with no --consistency and "
        assert str(b.refusals[0]).startswith(f"{text}--dp=1:2: start it with the same values")

    def test_a_node_that_names_another_folder_joins_and_is_asked_whether_it_is_another(self, job: Job) -> None:
        job.node("a", replace(CONFIG, training=(("--checkpoint-dir", "/shared/run"),)))
        wait_until(lambda: job.read("nodes/a"), LIMIT_S, "a to join")
        b = job.node("b", replace(CONFIG, training=(("--checkpoint-dir", "/mnt/run"),)))
        wait_until(lambda: job.read("nodes/b"), LIMIT_S, "b to join")
        assert not b.refusals
        text = "the job runs with --checkpoint-dir=/shared/run, this node was started with --checkpoint-dir=/mnt/run"
        assert any(text in one for one in b.warnings)

    def test_a_second_live_node_of_the_same_name_is_refused(
        self, hasty_job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("elaunch.waits.WAITED_S", 0.5)
        first = hasty_job.node("a")
        wait_until(lambda: hasty_job.read("nodes/a"), LIMIT_S, "a to join")
        second = hasty_job.node("a")
        wait_until(lambda: second.refusals, LIMIT_S, "the second to be refused")
        assert str(second.refusals[0]) == (
            "job 'job' already has a live node named 'a': give this one another --node-name"
        )
        assert "s left: the name a to be free: a node that has it may have been killed" in second.waiting[-1]
        assert not first.refusals
        assert not first.outages
        assert hasty_job.read("nodes/a"), "the first stays"

    def test_the_name_of_a_killed_agent_is_free_once_its_lease_has_run_out(self, job: Job) -> None:
        lease = job.admin.grant(1.0)
        job.admin.create("/elaunch/job/nodes/a", to_json(NodeDoc("a", "old", 1)), lease)
        a = job.node("a")
        wait_until(lambda: b'"host":"host-a"' in (job.read("nodes/a") or b""), LIMIT_S, "a to join")
        assert not a.refusals

    def test_what_a_run_of_this_name_left_behind_when_all_its_nodes_were_lost_binds_nobody(
        self, hasty_job: Job
    ) -> None:
        worker = Worker("x/0#0", "x", 0, "x:0")
        old = Generation(7, GenerationStage.TRAIN, (worker,), attempt=1, restarts=Restarts(3), begun=True)
        hasty_job.admin.put("/elaunch/job/config", to_json(JobConfig(2, 4, 7, "old")))
        hasty_job.admin.put("/elaunch/job/generation", to_json(old))
        a, b = hasty_job.node("a"), hasty_job.node("b")
        for node in (a, b):
            again = node.hears(lambda one: one.stage is GenerationStage.ASSEMBLE)
            assert (again.number, again.attempt, again.restarts.count) == (8, 2, 0)
            assert not node.refusals
        wait_until(lambda: a.config == b.config is not None, LIMIT_S, "both to agree")
        assert a.config is not None
        assert a.config.token != "old"

    def test_settings_of_another_version_are_refused_with_advice(self, job: Job) -> None:
        job.admin.put("/elaunch/job/config", b'{"kind":"JobConfig","v":99}')
        a = job.node("a")
        wait_until(lambda: a.refusals, LIMIT_S, "a to be refused")
        assert isinstance(a.refusals[0], ProtocolError)
        assert "all nodes of a job must run the same version of elaunch" in str(a.refusals[0])


def test_a_store_that_cannot_be_reached_is_named_after_the_time_to_connect() -> None:
    endpoint = f"127.0.0.1:{find_free_port()}"
    node = Node(lambda: EtcdStore(endpoint, timeout_s=0.1), "a", CONFIG, connect_s=0.3)
    node.participant.start()
    try:
        wait_until(lambda: node.refusals, LIMIT_S, "the refusal")
        assert isinstance(node.refusals[0], StoreUnavailable)
        assert endpoint in str(node.refusals[0])
        assert "gave up after 0.3 s (--rdzv-conf connect_timeout=" in str(node.refusals[0])
        assert str(node.refusals[0]).endswith("is an etcd v3 server running there, and reachable from this machine?")
        assert node.config is None
        assert not node.outages
    finally:
        node.participant.stop()


def test_a_node_that_finds_no_host_hears_soon_that_the_job_may_have_ended_and_how_long_it_tries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("elaunch.waits.WAITED_S", 0.01)
    endpoint = f"127.0.0.1:{find_free_port()}"
    node = Node(lambda: EtcdStore(endpoint, timeout_s=0.1), "b", CONFIG, connect_s=0.5, hosted=True)
    node.participant.start()
    try:
        wait_until(lambda: node.refusals, LIMIT_S, "the refusal")
        why = "has not started it yet or cannot be reached from here, or the job has ended, and its rendezvous with it"
        assert re.match(rf"waiting for the rendezvous, \d s left: etcd at {endpoint}.*{why}$", node.waiting[0])
        assert str(node.refusals[0]).endswith(why)
        assert "gave up after 0.5 s (--rdzv-conf connect_timeout=SECONDS gives it more time)" in str(node.refusals[0])
    finally:
        node.participant.stop()


def test_the_node_that_hosts_the_store_stays_for_a_while_and_nodes_that_come_late_hear_the_end(job: Job) -> None:
    ahead_s = 0.0
    host = job.node("a", hosted=True, clock=lambda: time.monotonic() + ahead_s)
    wait_until(lambda: job.read("nodes/a"), LIMIT_S, "a to join")
    job.admin.put("/elaunch/job/result", to_json(Result(False, "the script has a bug")))
    wait_until(lambda: host.results, LIMIT_S, "the end")
    leaving = threading.Thread(target=lambda: host.participant.stop(last=True, late_s=1000.0))
    leaving.start()
    wait_until(lambda: not job.read("nodes/a"), LIMIT_S, "a to have left")
    late = job.node("b", hosted=True)
    wait_until(lambda: late.refusals, LIMIT_S, "the refusal")
    assert "job 'job' has ended with a failure (the script has a bug), and takes no more nodes" in str(late.refusals[0])
    assert str(late.refusals[0]).endswith("or this one again when the node that hosts it has left")
    assert leaving.is_alive()
    ahead_s = 1000.0
    leaving.join(LIMIT_S)
    assert not leaving.is_alive()


def test_a_store_that_comes_late_is_waited_for() -> None:
    site = MemorySite()
    site.go_away()
    job = Job(site)
    try:
        a = job.node("a")
        assert a.config is None
        site.come_back()
        wait_until(lambda: a.config, LIMIT_S, "a to join")
        assert not a.refusals
    finally:
        job.stop()
