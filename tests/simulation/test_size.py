"""What the messages of a job of 4,096 workers come to: those of its nodes through the store, and those of a barrier.

Nothing is timed. The figures are those of "Size" in docs/architecture.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import pytest

from elaunch.rendezvous.membership import Generation, GenerationStage, JobConfig, NodeDoc, NodeWorker, WorkerState
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.node.replica import Replica
from elaunch.rendezvous.participant import Participant
from elaunch.rendezvous.store import Prefixes, WatchEvent
from elaunch.rendezvous.view import MembershipSettings
from elaunch.workers.barrier import StepRecord
from elaunch.workers.comm.group import Group, neighbours
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Vote
from tests.helpers import wait_until
from tests.unit.documents import changed_report

WORKERS, NODES = 4096, 64
LIMIT_S = 60.0
LEASE_S = 10 * LIMIT_S


class Counted(MemoryStore):
    """A store that counts what one client asks for and is told.

    Attributes:
        requests: how often each kind of request was made.
        told: events that its watches have brought, by the last part of the key.
        told_bytes: their values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self.told_bytes = 0

    def session(self) -> Counted:
        other = Counted()
        other._data = self._data
        return other

    def _open(self, what: str) -> Any:
        self.requests[what.split()[0]] += 1
        return super()._open(what)

    def watch(
        self,
        prefix: Prefixes,
        from_revision: int,
        on_events: Callable[[list[WatchEvent]], None],
        on_error: Callable[[Any], None],
    ) -> Any:
        def count(events: list[WatchEvent]) -> None:
            for event in events:
                self.told[event.key.removeprefix("/elaunch/job/").partition("/")[0]] += 1
                self.told_bytes += len(event.value or b"")
            on_events(events)

        return super().watch(prefix, from_revision, count, on_error)


class Node:
    """A node of the job, whose workers are only reported.

    Attributes:
        generations: of which it has heard.
        told: what else it was told since it joined.
    """

    def __init__(self, store: MemoryStore, number: int, clock: Callable[[], float]) -> None:
        self.name = f"node{number:04d}"
        self.store = cast(Counted, store.session())
        self.generations: list[Generation] = []
        self.told: list[tuple[str, object]] = []
        self.doc = NodeDoc(self.name, "10.0.0.1", WORKERS // NODES)
        rules = MembershipSettings(NODES // 2, NODES, last_call_s=LIMIT_S, lease_s=LEASE_S)
        config = JobConfig(NODES // 2, NODES, None)
        self.participant = Participant(lambda: self.store, "job", config, rules, self.doc, cast(Any, self), clock=clock)

    def announced(self, generation: Generation) -> None:
        self.generations.append(generation)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *news: self.told.append((name, news))

    def says(self, state: WorkerState, lost: int = 0, **fields: Any) -> None:
        """Publishes the report, without so many of its first workers."""
        workers = tuple(
            NodeWorker(f"{self.name}/{rank}#0", rank, state, f"10.0.0.1:{40000 + rank}")
            for rank in range(lost, self.doc.slots)
        )
        number = self.generations[-1].number
        self.doc = changed_report(self.doc, workers=workers, elastic=True, took_part=True, generation=number, **fields)
        self.participant.publish(self.doc)


@dataclass
class Traffic:
    """What all nodes have asked for and were told in a time, beside what the one that leads was."""

    requests: Counter[str]
    told: Counter[str]
    leader_told: Counter[str]
    told_bytes: int
    most_bytes: int


class Job:
    """All nodes of one job; the first one leads."""

    def __init__(self) -> None:
        self.store = Counted()
        self.later_s = 0.0
        self.nodes = [Node(self.store, number, self.now_s) for number in range(NODES)]
        self.nodes[0].participant.start()
        wait_until(lambda: self.store.get("/elaunch/job/leader"), LIMIT_S, "the first node to lead")
        for node in self.nodes[1:]:
            node.participant.start()

    def now_s(self) -> float:
        return time.monotonic() + self.later_s

    def let_a_third_of_the_lease_pass(self) -> None:
        self.later_s += LEASE_S / 3
        for node in self.nodes:
            node.participant.await_end("")  # wakes it, and costs nothing

    def begin(self) -> None:
        """Has all nodes join and train; keeps what that has cost those that do not lead."""
        self.all_hear(lambda one: one.stage is GenerationStage.START)
        for node in self.nodes:
            node.says(WorkerState.READY)
        self.all_hear(lambda one: one.stage is GenerationStage.TRAIN)
        for node in self.nodes:
            node.says(WorkerState.MEMBER)
        replicas = [node.participant._replica for node in self.nodes]
        wait_until(lambda: all(_has_begun(one) for one in replicas), LIMIT_S, "all nodes to hear that it has begun")
        self.settle()
        self.sizes = {len(one.generations[-1].workers) for one in self.nodes}
        self.joining = [(Counter(one.store.requests), Counter(one.store.told)) for one in self.nodes[1:]]

    @property
    def workers(self) -> int:
        """How many there are now."""
        return len(self.nodes[0].generations[-1].workers)

    def all_hear(self, what: Callable[[Generation], bool]) -> None:
        def heard() -> bool:
            return all(one.generations and what(one.generations[-1]) for one in self.nodes)

        wait_until(heard, LIMIT_S, lambda: f"all nodes to hear of a generation: {self.tell()}")

    def tell(self) -> str:
        """Says how far the nodes are, what each was told first since it joined, and what else runs in this process."""
        leader = self.nodes[0].participant._leader
        heard = Counter(
            (one.number, one.stage.value, len(one.workers)) for node in self.nodes for one in node.generations[-1:]
        )
        told = {node.name: node.told[1:4] for node in self.nodes if node.told[1:]}
        threads = Counter(one.name.partition(" ")[0] for one in threading.enumerate())
        return f"{heard} were heard of; the leader waits ({leader._wait}); {told}; threads: {threads}"

    def count(self, act: Callable[[], None], workers: int) -> Traffic:
        """Returns what passes until all have heard of a generation of so many workers, and nothing more comes."""
        self.settle()
        before = [(Counter(one.store.requests), Counter(one.store.told), one.store.told_bytes) for one in self.nodes]
        act()
        self.all_hear(lambda one: len(one.workers) == workers)
        self.settle()
        found = [
            (one.store.requests - asked, one.store.told - told, one.store.told_bytes - size)
            for one, (asked, told, size) in zip(self.nodes, before, strict=True)
        ]
        requests: Counter[str] = sum((asked for asked, _, _ in found), Counter())
        told: Counter[str] = sum((events for _, events, _ in found), Counter())
        sizes = [size for _, _, size in found]
        return Traffic(requests, told, found[0][1], sum(sizes), max(sizes[1:]))

    def settle(self) -> None:
        """Waits until the store has been left alone for a while."""
        last, quiet = -1, 0
        while quiet < 5:
            threading.Event().wait(0.05)
            now = sum(sum(one.store.requests.values()) for one in self.nodes)
            last, quiet = now, quiet + 1 if now == last else 0

    def close(self) -> None:
        for node in self.nodes:
            node.participant._mail.stop()
        for node in self.nodes:
            node.participant.stop()


def _has_begun(replica: Replica) -> bool:
    return replica.view.generation is not None and replica.view.generation.begun


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    try:
        made.begin()
        yield made
    finally:
        made.close()


class TestTheStore:
    def test_to_join_costs_each_node_the_same_few_requests(self, job: Job) -> None:
        assert job.sizes == {WORKERS}
        joined = [sum(requests.values()) for requests, _ in job.joining]
        assert max(joined) <= 14, Counter(joined)
        assert {requests["range"] for requests, _ in job.joining} == {1}, "nobody but the leader reads all reports"
        assert {told["nodes"] for _, told in job.joining} == {0}
        assert {told["edit"] for _, told in job.joining} == {3}, "`start`, `train`, and that it has begun"

    def test_a_job_to_which_nothing_happens_costs_each_node_two_requests_in_each_third_of_its_lease(
        self, job: Job
    ) -> None:
        seen = job.count(job.let_a_third_of_the_lease_pass, job.workers)
        assert seen.requests == {"keep": NODES, "get": NODES}
        assert not seen.told

    def test_a_death_costs_one_write_of_its_node_one_of_the_leader_and_one_short_event_for_each_node(
        self, job: Job
    ) -> None:
        seen = job.count(
            lambda: job.nodes[5].says(WorkerState.MEMBER, lost=1, cause="it died", cause_t=1.0), job.workers - 1
        )
        assert seen.requests == {"put": 1, "replace": 1, "get": 1}
        assert seen.told == {"edit": NODES, "nodes": 1, "generation": 1}
        assert seen.leader_told == {"edit": 1, "nodes": 1, "generation": 1}
        assert seen.most_bytes < 1000, "however many workers there are"

    def test_a_tenth_of_the_nodes_that_leaves_at_once_is_few_generations(self, job: Job) -> None:
        leaving = job.nodes[-(NODES // 10) :]
        before = job.nodes[0].generations[-1].number

        def leave() -> None:
            for node in leaving:
                node.says(WorkerState.MEMBER, draining=True, joined=before)

        seen = job.count(leave, job.workers - len(leaving) * WORKERS // NODES)
        generations = job.nodes[0].generations[-1].number - before
        assert seen.requests["put"] == len(leaving)
        assert seen.told["edit"] == generations * NODES
        assert generations <= len(leaving), "at worst each is on its own"
        assert seen.requests["replace"] == generations
        assert seen.most_bytes < 1000 * generations + 25 * len(leaving) * WORKERS // NODES


class NotYet(Exception):
    """What a member waits for has not come."""


class Wire:
    """Carries messages between members, and counts them.

    Attributes:
        sent: each message by sender, receiver and part: how many others have brought it about, one by one, and it.
    """

    def __init__(self) -> None:
        self.sent: dict[tuple[str, str, int], tuple[int, bytes]] = {}


class Carrier:
    """The part of a member's `Transport` that a collective uses; who would wait begins anew later."""

    def __init__(self, wire: Wire, worker: str) -> None:
        self.worker = worker
        self._wire = wire
        self._hops = 0

    def exchange(self, generation: int, op: int, sends: Sequence[Any], receives: Sequence[Any]) -> None:
        for peer, part, body in sends:
            self._wire.sent.setdefault((self.worker, peer, part), (self._hops + 1, bytes(body)))
        for peer, part, buffer in receives:
            if (peer, self.worker, part) not in self._wire.sent:
                raise NotYet
            hops, body = self._wire.sent[peer, self.worker, part]
            buffer += body
            self._hops = max(self._hops, hops)


@pytest.mark.parametrize(("workers", "hops"), [(64, 4), (585, 6), (WORKERS, 8)])
def test_a_barrier_of_many_workers_is_few_hops_and_few_bytes_for_each(workers: int, hops: int) -> None:
    wire, members = Wire(), tuple(f"w{number}" for number in range(workers))
    groups = [Group(cast(Transport, Carrier(wire, worker)), 1, members) for worker in members]
    record = StepRecord((5, 5), (3, 3)).pack()
    for group in reversed(groups[1:]):
        with pytest.raises(NotYet):  # its parent is not there yet
            group.reduce_bytes(record, lambda parts: parts[0])
    assert {group.reduce_bytes(record, lambda parts: parts[0]) for group in groups} == {record}
    assert max(hop for hop, _ in wire.sent.values()) == hops
    assert len(wire.sent) == 2 * (workers - 1)
    by_sender = Counter(sender for sender, _, _ in wire.sent)
    assert max(by_sender.values()) == 9, "one to its parent, and one to each of eight children"
    assert {len(body) for _, body in wire.sent.values()} == {688}, "as docs/architecture.md has it"
    assert max(len(neighbours(members, members[number])) for number in (0, 1, workers - 1)) <= 11


@pytest.mark.parametrize("workers", [64, 585])
def test_the_votes_of_a_recovery_are_as_many_bytes_for_each_worker_as_there_are_workers_times_a_vote(
    workers: int,
) -> None:
    wire, members = Wire(), tuple(f"w{number}" for number in range(workers))
    groups = [Group(cast(Transport, Carrier(wire, worker)), 1, members) for worker in members]
    vote = asdict(Vote(step=123456, entered=True, holds=True, freed_s=0.000123))
    for group in reversed(groups[1:]):
        with pytest.raises(NotYet):
            group.all_gather_json(vote)
    assert all(group.all_gather_json(vote) == [vote | {"unsettled": []}] * workers for group in groups)
    vote_bytes = len(json.dumps(vote))
    assert 160 <= vote_bytes <= 180, "as docs/architecture.md has it"
    down = {len(body) for (_, _, part), (_, body) in wire.sent.items() if part == 1}
    assert len(down) == 1
    assert vote_bytes * workers <= max(down) <= (vote_bytes + 10) * workers
    sent = Counter[str]()
    for (sender, _, part), (_, body) in wire.sent.items():
        sent[sender] += len(body) if part == 1 else 0
    assert max(sent.values()) == 8 * max(down), "one within the tree sends all to each of eight"
