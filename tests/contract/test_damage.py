"""A job around one store in which somebody else writes: what is not the job's, and what is and cannot be read.

The tests are those of a store of each kind; see `test_participant`.
"""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elaunch.cli.resize import drain
from elaunch.errors import LaunchError, ProtocolError, RequestRefused, StoreUnavailable
from elaunch.rendezvous.cluster.messages import message
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.membership import GenerationStage, JobConfig, JobSize, NodeDoc, Result
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.node.setbacks import FIRST_PAUSE_S
from elaunch.rendezvous.observer import Observer
from elaunch.rendezvous.store import Store
from tests.contract.test_participant import (
    CONFIG,
    LIMIT_S,
    MEMBER,
    PATIENT,
    READY,
    EtcdSite,
    Job,
    MemorySite,
    Node,
    Site,
    ids,
    site,  # noqa: F401  (a fixture)
)
from tests.helpers import wait_until
from tests.jobs.plain_etcd import etcdctl

AT = "/elaunch/job/"
RULES = replace(PATIENT, lease_s=6.0)
"""A lease that no machine is too slow for, and of which a third is not long."""

GARBAGE = [
    b"",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b'{"kind":"NodeDoc","v":1,"node":"x","host":"\\ud800","slots":1}',
    b'{"kind":"NodeDoc","v":1,"node":"x","host":"h","slots":' + b"9" * 30 + b"}",
    b'{"kind":"NodeDoc","v":99}',
    to_json(NodeDoc("b", "h", 1)),
    to_json(Result(True)),
]


@pytest.fixture
def job(site: Site) -> Iterator[Job]:  # noqa: F811
    made = Job(site, RULES)
    yield made
    made.stop()


def damage(job: Job, name: str, value: bytes = b"garbage") -> None:
    job.admin.put(AT + name, value)


def trains(job: Job) -> tuple[Node, Node, Node]:
    nodes = job.three()
    for name in "abc":
        wait_until(lambda name=name: b'"member"' in (job.read(f"nodes/{name}") or b""), LIMIT_S, "the members")  # type: ignore[misc]
    return nodes


def hears(node: Node, *parts: str) -> str:
    """Wait for a line to the user that has these parts."""
    return wait_until(
        lambda: next((line for line in list(node.warnings) if all(part in line for part in parts)), None),
        LIMIT_S,
        lambda: (
            f"a line with {parts} at {node.name}, which said {node.warnings}, refused {node.refusals}, lost the store "
            f"{node.outages}, had it back {node.returns}, hindrances {node.hindrances}, and stands at\n{stack_of(node)}"
        ),
    )


def stack_of(node: Node) -> str:
    frame = sys._current_frames().get(node.participant._thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "no line: its thread has ended"


def lines(node: Node, part: str) -> list[str]:
    return [line for line in node.warnings if part in line]


def leader_has_seen_all(job: Job, leader: Node) -> None:
    """Wait until node c's last word is in the store and the leader has had the occasion to act on it."""
    wait_until(lambda: b'"member"' not in (job.read("nodes/c") or b'"member"'), LIMIT_S, "c's report")
    for mark in ("nodes/mark1", "nodes/mark2"):  # the second is read in a pass after that which read c's report
        damage(job, mark)
        hears(leader, f"{mark} is ignored")


def loses_c_and_goes_on(nodes: tuple[Node, Node, Node]) -> None:
    """Whatever was damaged, the job changes its members again."""
    a, b, c = nodes
    c.says()
    for node in (a, b):
        node.hears(ids("a/0#0", "b/0#0"))
    for node in nodes:
        assert node.participant._thread.is_alive()
        assert (node.refusals, node.outages, node.results) == ([], [], [])


class TestStrangers:
    @pytest.mark.parametrize("value", GARBAGE)
    def test_what_stands_under_a_node_that_does_not_exist_is_ignored_with_one_line(
        self, job: Job, value: bytes
    ) -> None:
        nodes = a, _, _ = trains(job)
        damage(job, "nodes/x", value)
        hears(a, "nodes/x is ignored: ")
        loses_c_and_goes_on(nodes)
        assert len(lines(a, "nodes/x")) == 1

    @pytest.mark.parametrize("name", ["nodes/", "nodes/a/b", "requests/what", "requests/plan", "requests/drain/a"])
    def test_so_is_any_other_key(self, job: Job, name: str) -> None:
        nodes = a, _, _ = trains(job)
        damage(job, name)
        hears(a, f"{name} is ignored: ")
        loses_c_and_goes_on(nodes)

    def test_what_was_there_before_the_job_is_ignored_too(self, job: Job) -> None:
        for name in ("nodes/x", "what", "checks/x", "waiting", "profile", "requests/size", "requests/plan"):
            damage(job, name, b"\xff" + b"[" * 10_000)
        nodes = a, _, _ = trains(job)
        assert len(lines(a, "nodes/x is ignored")) == len(lines(a, "job/what is ignored")) == 1
        loses_c_and_goes_on(nodes)
        assert not lines(a, "damaged")

    def test_a_line_is_not_said_again_when_the_store_comes_back(self, job: Job) -> None:
        nodes = a, _, _ = trains(job)
        damage(job, "nodes/x")
        hears(a, "nodes/x is ignored")
        job.site.go_away()
        for node in nodes:
            wait_until(lambda node=node: node.outages, LIMIT_S, "all to notice")  # type: ignore[misc]
        job.site.come_back()
        job.admin.close()
        job.admin = job.site.open()
        for node in nodes:
            wait_until(lambda node=node: node.returns, LIMIT_S, "all to be back")  # type: ignore[misc]
        damage(job, "nodes/y")
        hears(next(node for node in nodes if node.name == job.leader().name), "nodes/y is ignored")
        assert len(lines(a, "nodes/x is ignored")) == 1

    def test_keys_that_are_no_utf_8_are_ignored(self, own_etcd: EmbeddedEtcd, tmp_path: Path) -> None:
        job = Job(EtcdSite(own_etcd, tmp_path / "etcd"), RULES)
        try:
            nodes = a, _, _ = trains(job)
            for key in (b"nodes/\xff", b"generation\xff", b"result\xfe", b"requests/\xff"):
                put_bytes(job.admin, AT.encode() + key, b"\xff")
            hears(a, r"nodes/\xff is ignored")
            damage(job, "leader", b"\xff")
            hears(a, "leader is in order again; changes of the job go on")
            assert job.read("leader") == b"a"
            seen = Observer(job.admin, "job").documents
            assert [doc.node for doc in seen.nodes] == ["a", "b", "c"]
            assert [name for name, _ in seen.unreadable] == [r"nodes/\xff"]
            loses_c_and_goes_on(nodes)
        finally:
            job.stop()

    def test_a_new_node_joins_beside_garbage(self, job: Job) -> None:
        damage(job, "nodes/x", b"[" * 100_000)
        damage(job, "config", to_json(replace(CONFIG, max_nodes=7, token="old")))
        a = job.node("a")  # nobody else is here: the settings are of a job that is over
        wait_until(lambda: a.config, LIMIT_S, "a to join")
        assert not a.refusals


class TestObservers:
    def test_an_observer_passes_over_what_it_cannot_read_and_names_it(self, job: Job) -> None:
        damage(job, "nodes/x", b"[" * 100_000)
        a, b, c = trains(job)
        observer = Observer(job.admin, "job")
        assert [doc.node for doc in observer.documents.nodes] == ["a", "b", "c"]
        ((name, why),) = observer.documents.unreadable
        assert name == "nodes/x"
        assert "nested too deeply" in why
        generation = observer.documents.generation
        end_s = time.monotonic() + LIMIT_S
        damage(job, "generation")
        damage(job, "profile", b"\xff")
        while observer.documents.profile != "\ufffd":
            assert observer.wait(end_s)
        assert observer.documents.generation == generation, "the last one counts"
        assert [name for name, _ in observer.documents.unreadable] == ["generation", "nodes/x"]
        with pytest.raises(RequestRefused, match="/elaunch/job/generation is damaged"):
            drain(job.admin, "job", ["c"], False, "test", LIMIT_S)
        job.admin.delete(AT + "generation")
        while len(observer.documents.unreadable) > 1:
            assert observer.wait(end_s)
        observer.close()
        asks = threading.Thread(target=drain, args=(job.site.open(), "job", ["c"], False, "test", LIMIT_S))
        asks.start()
        wait_until(lambda: c.drain_reasons, LIMIT_S, "c to be asked, beside the garbage")
        c.participant.stop()
        asks.join(LIMIT_S)
        assert not a.refusals + b.refusals


def put_bytes(store: Store, key: bytes, value: bytes) -> None:
    """Write a key that is no text."""
    assert isinstance(store, EtcdStore)
    store.call("put", "Put", message("PutRequest", key=key, value=value))


class TestDamage:
    @pytest.mark.parametrize("value", [b"", b"\xff", b"[" * 100_000, to_json(NodeDoc("a", "h", 1))])
    def test_a_report_that_was_overwritten_freezes_the_job_until_its_node_writes_it_again(
        self, job: Job, value: bytes
    ) -> None:
        a, b, c = trains(job)
        damage(job, "nodes/c", value)
        hears(a, "/elaunch/job/nodes/c is damaged: ", "Training goes on with the present members", "etcdctl del")
        b.says()  # nothing is made of it before c's report can be read
        hears(c, "nodes/c was overwritten by somebody else; this node writes it again")
        hears(a, "nodes/c is in order again; changes of the job go on")
        for node in (a, c):
            node.hears(ids("a/0#0", "c/0#0"))
        assert from_json(NodeDoc, job.read("nodes/c") or b"").workers == c.doc.workers
        assert not a.refusals + b.refusals + c.refusals
        assert [one.ids for one in a.generations if one.stage is GenerationStage.TRAIN][-1] == ("a/0#0", "c/0#0")

    def test_the_leader_writes_its_own_report_again_at_once(self, site: Site) -> None:  # noqa: F811
        job = Job(site, replace(RULES, lease_s=6 * LIMIT_S))  # it looks at its report when it renews that, much later
        try:
            nodes = trains(job)
            damage(job, "nodes/a")
            wait_until(lambda: b'"member"' in (job.read("nodes/a") or b""), LIMIT_S, "a's report to be back")
            loses_c_and_goes_on(nodes)
        finally:
            job.stop()

    def test_a_report_that_was_deleted_is_written_again(self, job: Job) -> None:
        _, b, _ = trains(job)
        job.admin.delete(AT + "nodes/b")
        wait_until(lambda: job.read("nodes/b"), LIMIT_S, "b's report to be back")
        assert (b.refusals, b.outages) == ([], [])

    def test_a_generation_that_is_damaged_freezes_the_job_until_it_is_deleted(self, job: Job) -> None:
        nodes = a, _, c = trains(job)
        before = job.read("generation")
        damage(job, "generation")
        for node in nodes:
            hears(node, "generation is damaged: expected a Generation document", "etcdctl del /elaunch/job/generation")
        c.says()
        leader_has_seen_all(job, a)
        assert job.read("generation") == b"garbage"
        c.says(MEMBER)
        wait_until(lambda: b'"member"' in (job.read("nodes/c") or b""), LIMIT_S, "c to be whole")
        job.admin.delete(AT + "generation")
        hears(a, "generation was deleted by somebody else; this node, which leads, writes it again")
        for node in nodes:
            hears(node, "generation is in order again; changes of the job go on")
            assert len(lines(node, "generation is damaged")) == 1
            told = lambda node=node: node.hindrances == ["damaged in the store: generation", ""]  # noqa: E731
            wait_until(told, LIMIT_S, "the agent to know that changes were not possible, and are again")
        wait_until(lambda: job.read("generation") == before, LIMIT_S, "the generation to be back")
        loses_c_and_goes_on(nodes)

    def test_a_generation_that_is_damaged_may_be_written_anew(self, job: Job) -> None:
        nodes = trains(job)
        before = job.read("generation")
        damage(job, "generation", b'{"kind":"Generation","v":1,"generation":9223372036854775807,"stage":"train"}')
        hears(nodes[0], "generation is damaged")
        damage(job, "generation", before or b"")
        loses_c_and_goes_on(nodes)

    def test_a_generation_that_is_deleted_is_written_again_also_by_the_next_leader(self, job: Job) -> None:
        nodes = a, b, c = trains(job)
        job.admin.delete(AT + "generation")
        wait_until(lambda: job.read("generation"), LIMIT_S, "the generation to be back")
        a.participant.stop()
        for node in (b, c):
            node.hears(ids("b/0#0", "c/0#0"))
        assert not any(node.refusals for node in nodes)

    @pytest.mark.parametrize("name", ["result", "size"])
    def test_a_damaged_document_freezes_the_job_until_it_is_deleted(self, job: Job, name: str) -> None:
        nodes = a, _, c = trains(job)
        damage(job, name)
        for node in nodes:
            hears(node, f"{name} is damaged")
        c.says()
        leader_has_seen_all(job, a)
        assert [len(node.generations) for node in nodes] == [2, 2, 2]
        job.admin.delete(AT + name)
        for node in nodes:
            hears(node, f"{name} is in order again; changes of the job go on")
        loses_c_and_goes_on(nodes)

    @pytest.mark.parametrize("value", [b"", b"\xff", b"ghost", b"a b"])
    def test_the_leaders_key_is_written_again_by_the_node_that_leads(self, job: Job, value: bytes) -> None:
        nodes = a, _, _ = trains(job)
        damage(job, "leader", value)
        wait_until(lambda: job.read("leader") == b"a", LIMIT_S, "the key to be back")
        hears(a, "leader is in order again; changes of the job go on")
        loses_c_and_goes_on(nodes)
        a.participant.stop()
        nodes[1].hears(ids("b/0#0"))

    def test_a_size_that_counts_is_written_again_when_it_is_deleted(self, job: Job) -> None:
        nodes = trains(job)
        damage(job, "requests/size", to_json(JobSize("7", 1, 4, time.time())))
        for node in nodes:
            wait_until(lambda node=node: node.sizes, LIMIT_S, "all to hear of it")  # type: ignore[misc]
        job.admin.delete(AT + "size")
        wait_until(lambda: job.read("size"), LIMIT_S, "the size to be back")

    def test_other_settings_end_nobody_when_the_store_comes_back(self, own_etcd: EmbeddedEtcd, tmp_path: Path) -> None:
        job = Job(EtcdSite(own_etcd, tmp_path / "etcd"), RULES)
        try:
            self.check_settings(job, to_json(JobConfig(7, 7, None, "of another")))
        finally:
            job.stop()

    @pytest.mark.parametrize("value", [b"\xff", b'{"kind":"JobConfig","v":99}'])
    def test_settings_that_are_damaged_end_nobody_when_the_store_comes_back(self, job: Job, value: bytes) -> None:
        self.check_settings(job, value)

    def check_settings(self, job: Job, value: bytes) -> None:
        nodes = trains(job)
        damage(job, "config", value)
        job.admin.put("/other", b"")  # a killed etcd before 3.5.5 may have lost the last write that it has answered
        job.site.go_away()
        for node in nodes:
            wait_until(lambda node=node: node.outages, LIMIT_S, "all to notice")  # type: ignore[misc]
        job.site.come_back()
        job.admin.close()
        job.admin = job.site.open()
        for node in nodes:
            hears(node, "config is damaged")
            wait_until(lambda node=node: node.returns, LIMIT_S, "all to be back")  # type: ignore[misc]
        job.admin.delete(AT + "config")
        for node in nodes:
            hears(node, "config is in order again; changes of the job go on")
        assert nodes[0].config is not None
        assert from_json(JobConfig, job.read("config") or b"").token == nodes[0].config.token
        nodes[2].says()
        nodes[0].hears(ids("a/0#0", "b/0#0"))
        assert not any(node.refusals for node in nodes)

    @pytest.mark.parametrize("name", ["config", "result", "generation"])
    def test_a_node_that_has_not_joined_is_refused_and_the_key_is_named(self, job: Job, name: str) -> None:
        damage(job, name, b"\xff")
        a = job.node("a")
        wait_until(lambda: a.refusals, LIMIT_S, "a to be refused")
        assert isinstance(a.refusals[0], ProtocolError)
        assert re.match(rf"/elaunch/job/{name} is damaged, so this node does not join: expected a", str(a.refusals[0]))
        wait_until(lambda: job.read("nodes/a") is None, LIMIT_S, "a to take its report back")

    def test_a_node_whose_key_is_no_report_is_refused(self, job: Job) -> None:
        damage(job, "nodes/a")
        a = job.node("a")
        wait_until(lambda: a.refusals, LIMIT_S, "a to be refused")
        assert "nodes/a is taken, and is no report of a node: delete it with" in str(a.refusals[0])


class Moody(MemoryStore):
    """A store that refuses to write some keys, as etcd does where its space is used up or a permission is taken."""

    refused: Callable[[str], bool] = staticmethod(lambda key: False)

    def session(self) -> MemoryStore:
        other = Moody()
        other._data = self._data
        return other

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        self.check(key)
        return super().put(key, value, lease)

    def replace(self, key: str, value: bytes, expected_revision: int, beside: tuple[str, bytes] | None = None) -> bool:
        self.check(key)
        return super().replace(key, value, expected_revision, beside)

    def check(self, key: str) -> None:
        if Moody.refused(key):
            raise LaunchError(f"etcd at memory: put {key!r}: etcd refused the request (no)")


class MoodySite(MemorySite):
    def _empty(self) -> MemoryStore:
        return Moody()


@pytest.fixture
def moody_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(Moody, "refused", staticmethod(lambda key: False))
    made = Job(MoodySite(), RULES)
    yield made
    made.stop()


def is_tried_ever_more_rarely(tried_s: list[float]) -> None:
    """Wait for the fourth try, and see that the pauses before it were those of `Setbacks`: 0.2, 0.4 and 0.8 s."""
    wait_until(lambda: len(tried_s) >= 4, LIMIT_S, "the fourth try")
    assert tried_s[3] - tried_s[2] >= 4 * FIRST_PAUSE_S
    assert tried_s[2] - tried_s[1] >= 2 * FIRST_PAUSE_S


class TestRefusals:
    """Of the store, while the job trains."""

    def test_training_goes_on_while_the_store_refuses_to_write(
        self, moody_job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes = a, _, c = trains(moody_job)
        monkeypatch.setattr(Moody, "refused", staticmethod(lambda key: True))
        c.says()
        hears(c, "etcd refused the request (no); training goes on with the present members, and this is tried again")
        time.sleep(RULES.lease_s / 3)
        assert len(lines(c, "etcd refused the request")) == 1
        d = moody_job.node("d")
        wait_until(lambda: d.refusals, LIMIT_S, "who has not joined to be told at once")
        monkeypatch.setattr(Moody, "refused", staticmethod(lambda key: False))
        hears(c, "the rendezvous of this node works again after")
        wait_until(lambda: c.hindrances[-1:] == [""], LIMIT_S, "the agent to know")
        assert len(c.hindrances) == 2
        a.hears(ids("a/0#0", "b/0#0"))
        assert not any(node.refusals for node in nodes)

    def test_a_generation_that_the_store_refuses_is_tried_again(
        self, moody_job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes = a, _, c = trains(moody_job)
        tried_s: list[float] = []

        def refuses(key: str) -> bool:
            tried_s.extend([time.monotonic()] if key.endswith("generation") else [])
            return key.endswith("generation")

        monkeypatch.setattr(Moody, "refused", staticmethod(refuses))
        c.says()
        hears(a, "generation': etcd refused the request")
        is_tried_ever_more_rarely(tried_s)
        monkeypatch.setattr(Moody, "refused", staticmethod(lambda key: False))
        loses_c_and_goes_on(nodes)

    def test_a_profile_that_the_store_refuses_costs_a_line(
        self, moody_job: Job, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes = a, _, _ = trains(moody_job)
        monkeypatch.setattr(Moody, "refused", staticmethod(lambda key: key.endswith("profile")))
        for _ in range(3):
            a.participant.show("profile", "large")
            time.sleep(0.05)
        hears(a, "profile': etcd refused the request (no); the profile of the job is not shown; training goes on")
        loses_c_and_goes_on(nodes)
        assert len(a.warnings) == 1

    def test_what_is_too_large_for_etcd_is_refused_with_advice(self, etcd: EmbeddedEtcd, prefix: str) -> None:
        store = EtcdStore(etcd.endpoint, timeout_s=LIMIT_S)
        try:
            with pytest.raises(LaunchError, match="larger than it takes") as caught:
                store.put(prefix + "profile", b"x" * (32 << 20))
            assert not isinstance(caught.value, StoreUnavailable)
        finally:
            store.close()

    def test_training_goes_on_when_the_space_of_etcd_is_used_up(self, own_etcd: EmbeddedEtcd, tmp_path: Path) -> None:
        job = Job(EtcdSite(own_etcd, tmp_path / "etcd"), RULES)
        try:
            nodes = a, _, c = trains(job)
            raise_alarm(job.admin)
            c.says()
            hears(c, "its space is used up; compact and defragment it, then run `etcdctl alarm disarm`")
            etcdctl(own_etcd.endpoint, "alarm", "disarm")
            hears(c, "the rendezvous of this node works again after")
            a.hears(ids("a/0#0", "b/0#0"))
            assert not any(node.refusals for node in nodes)
        finally:
            job.stop()


def raise_alarm(store: Store) -> None:
    """Have etcd say that its space is used up."""
    assert isinstance(store, EtcdStore)
    member = store.call("ask", "Status", message("StatusRequest")).header.member_id
    activate, no_space = 1, 1
    store.call("alarm", "Alarm", message("AlarmRequest", action=activate, memberID=member, alarm=no_space))


class TestDefects:
    def test_an_event_that_cannot_be_applied_is_passed_over(
        self, job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        nodes = _, b, _ = trains(job)

        def broken(min_nodes: int, max_nodes: int) -> None:
            raise KeyError("bug")

        monkeypatch.setattr(b, "resized", broken)
        damage(job, "requests/size", to_json(JobSize("7", 1, 4, time.time())))
        hears(
            b, "a defect in the rendezvous of this node: KeyError('bug'); what /elaunch/job/size holds is passed over"
        )
        loses_c_and_goes_on(nodes)
        assert capfd.readouterr().err.count("Traceback") == 1

    def test_a_defect_that_repeats_does_not_spin(
        self, job: Job, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ) -> None:
        nodes = a, _, _ = trains(job)
        calls: list[float] = []
        mended = threading.Event()
        lead = a.participant._leader.lead

        def broken() -> None:
            if mended.is_set():
                lead()
            else:
                calls.append(time.monotonic())
                raise KeyError("bug")

        monkeypatch.setattr(a.participant._leader, "lead", broken)
        hears(a, "a defect in the rendezvous of this node: KeyError('bug'); training goes on with the present members")
        is_tried_ever_more_rarely(calls)
        assert len(lines(a, "a defect")) == capfd.readouterr().err.count("Traceback") == 1
        mended.set()
        hears(a, "the rendezvous of this node works again after")
        loses_c_and_goes_on(nodes)

    def test_a_node_that_has_not_joined_is_refused(self, job: Job) -> None:
        a = Node(job.site.open, "a", CONFIG, RULES)
        a.joined = None  # type: ignore[assignment,method-assign]
        job.nodes.append(a)
        a.participant.start()
        wait_until(lambda: a.refusals, LIMIT_S, "a to be refused")
        assert "the rendezvous of this node failed: TypeError" in str(a.refusals[0])


def test_a_job_that_starts_is_not_disturbed(job: Job) -> None:
    """The twin of the others: without damage no line is said."""
    nodes = trains(job)
    loses_c_and_goes_on(nodes)
    for node in nodes:
        node.says(READY)
    assert [node.warnings for node in nodes] == [[], [], []]
