"""This node's copy of the job's documents, as reads and watches of the store have shown them.

An event goes in; the listener hears what is news, and what the node owes in answer comes out as a `Duty`, which
`leader` acts on. Of a damaged document the last version that could be read stays. Nothing here touches the store.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import TypeVar

from elaunch.errors import ProtocolError
from elaunch.rendezvous.cluster.servers import EtcdServers
from elaunch.rendezvous.codec import Document, from_json
from elaunch.rendezvous.intake import (
    Intake,
    is_known,
    is_ours,
    read_generation,
    read_name,
    read_node,
    read_size,
    read_text,
)
from elaunch.rendezvous.membership import (
    Deadlock,
    DrainRequest,
    Generation,
    JobSize,
    NodeDoc,
    PlanRequest,
    Result,
    WorkerState,
    job_prefix,
)
from elaunch.rendezvous.node.reporter import Reporter
from elaunch.rendezvous.rules.edit import GenerationEdit, follow
from elaunch.rendezvous.rules.founding import Absent, Founding
from elaunch.rendezvous.rules.quorum import NUMBERS
from elaunch.rendezvous.rules.spares import HeldSpares
from elaunch.rendezvous.store import WatchEvent
from elaunch.rendezvous.view import View

T = TypeVar("T")


class Duty(enum.Enum):
    """What an event calls for besides being kept."""

    GENERATION_UNKNOWN = "there is a newer generation, which has to be read as a whole"
    OWN_REPORT = "this node's report was written, maybe by somebody else, or is gone"
    GENERATION_DELETED = "the generation was deleted"
    SETTINGS_WRITTEN = "somebody has written the settings of the job"
    SIZE_ASKED = "a newer size was asked for"
    SIZE_DELETED = "the size that counts was deleted"
    LEADER_DELETED = "nobody leads"
    LEADER_WRITTEN = "the leader's key was written; `Replica.leader` has the name"


@dataclass(slots=True)
class Revisions:
    """Which changes were taken already: what is read is seen again by watches, and by a node that leads twice.

    Attributes:
        all_read: the revision of the store at which all documents were read; 0 while that is going on.
        since_read: of the documents of which a reading shows all, by name; each reading begins it anew.
        since_connect: of those that every node watches, by name; each connection begins it anew.
        asked: of what was asked of this node, by name; it is asked once, however often it is read.
    """

    all_read: int = 0
    since_read: dict[str, int] = field(default_factory=dict)
    since_connect: dict[str, int] = field(default_factory=dict)
    asked: dict[str, int] = field(default_factory=dict)


class Replica:
    """Keeps the newest version of each document that could be read.

    Args:
        job: name of the job.
        node: name of this node.
        reporter: for the listener and lines to the user.
        clock: in seconds.

    Attributes:
        view: what the leader's rule is applied to.
        nodes: reports by node, as long as all nodes are watched.
        size: the newest size that counts or was asked for.
        servers: of the store, as the leader has written them down; those of a store that has one server may be in no
            document.
        founding: how this store was founded; None: it is the one that the job began with.
        absent: liveness addresses of agents that this store has lost, and misses.
        moved: where the job has its store by now, as another one of the same job has told this one; empty: here.
        entered: whether this node has been in the store to which it went over last.
        intake: which documents are damaged.
        in_job: once it is set, nothing that stands in the store, or does not, ends this node.
        end_told: whether the listener knows the job's result.
    """

    def __init__(self, job: str, node: str, reporter: Reporter, clock: Callable[[], float]) -> None:
        self.prefix = job_prefix(job)
        self.view = View()
        self.nodes: dict[str, NodeDoc] = {}
        self.size: JobSize | None = None
        self.servers = EtcdServers()
        self.founding: Founding | None = None
        self.absent: frozenset[str] = frozenset()
        self.moved = ""
        self.entered = False
        self._leaders: tuple[str | None, str | None] = (None, None)  # this one, and the last whose key went
        self.intake = Intake(self.prefix)
        self.in_job = False
        self.end_told = False
        self._node = node
        self._reporter = reporter
        self._clock = clock
        self._revisions = Revisions()
        self._former: dict[str, NodeDoc] = {}  # the reports that were known before all are read anew
        self._has_generation = True
        self._told_generation = 0

    @property
    def leader(self) -> str | None:
        """Returns the name that stands in the leader's key, as this node heard last; None where it is none."""
        return self._leaders[0]

    @property
    def generation_revision(self) -> int:
        """Returns the revision at which the generation may be exchanged; 0: there is none in the store."""
        return self._revisions.since_connect.get("generation", 0) if self._has_generation else 0

    # -- what others note -----------------------------------------------------------------------------------------

    def begin_store(self) -> None:
        """Forgets what another store said of itself and of its nodes: this node goes over to a new one."""
        self.servers, self.founding, self.absent, self.moved = EtcdServers(), None, frozenset(), ""
        self.entered = False
        self.view = replace(self.view, ended=frozenset(), gone=frozenset(), floor=0)

    def found(self, founding: Founding) -> None:
        """Takes how this store was founded."""
        self.founding = founding
        ended, gone = self.view.ended.union(founding.ended), frozenset(founding.gone)
        self.view = replace(self.view, ended=ended, gone=gone, floor=founding.epoch * NUMBERS)

    def note_ended(self, address: str) -> None:
        """Notes that the agent with this liveness address has ended."""
        self.view = replace(self.view, ended=self.view.ended | {address})

    def begin_connection(self) -> None:
        """Forgets which revisions were seen: the store may have lost its data, and count from one again."""
        self._revisions.since_connect.clear()

    def begin_reading(self) -> None:
        """Forgets the reports: documents are about to be taken as they stand, of a node that leads all."""
        self._former = dict(self.nodes)
        self.nodes.clear()
        self._revisions.since_read.clear()
        self._revisions.all_read = 0
        self.view = replace(self.view, request=None)

    def end_reading(self, names: Collection[str], revision: int, asked: tuple[str, ...]) -> None:
        """Notes that documents were taken.

        Args:
            names: of the documents that there are.
            revision: of the store.
            asked: what the names of all that were read begin with.
        """
        self._revisions.all_read = revision
        self._has_generation = "generation" in names
        for name in self.intake.damaged.keys() - names:
            if name.startswith(asked):
                self.accept(name)
        self.view = replace(self.view, nodes=tuple(self.nodes.values()))

    def begin_to_lead(self) -> None:
        """Notes that this node leads from now on."""
        self.view = replace(self.view, led_s=self._clock(), pending_s=None)

    def note_pending(self, pending: bool) -> None:
        """Notes since when the leader's rule waits for more changes, if it does."""
        if not pending:
            if self.view.pending_s is not None:
                self.view = replace(self.view, pending_s=None)
        elif self.view.pending_s is None:
            self.view = replace(self.view, pending_s=self._clock())

    def note_result(self, result: Result) -> None:
        """Notes that the job is over, without telling the listener yet."""
        self.view = replace(self.view, result=result)

    def doubt_absences(self) -> None:
        """Notes that the store was away or has stood still: that may have ended leases of nodes that are alive."""
        self.view = replace(self.view, outage_end_s=self._clock())

    def end(self, result: Result) -> None:
        """Notes that the job is over; the listener hears it once."""
        self.note_result(result)
        if not self.end_told:
            self.end_told = True
            self._reporter.listener.ended(result)

    # -- damage ---------------------------------------------------------------------------------------------------

    def read(self, name: str, revision: int, parse: Callable[[bytes], T], value: bytes) -> T | None:
        """Returns a document of the job; None, and a line for the user, where it is damaged."""
        try:
            document = parse(value)
        except ProtocolError as error:
            self.damage(name, revision, str(error))
            return None
        self.accept(name)
        return document

    def read_result(self, revision: int, value: bytes) -> Result | None:
        """Returns the job's result; None, and a line for the user, where it is damaged."""
        return self.read("result", revision, lambda data: from_json(Result, data), value)

    def damage(self, name: str, revision: int, why: str) -> None:
        """Freezes the job's changes while training goes on.

        Raises:
            ProtocolError: this node has not joined yet, and does not do so now.
        """
        if not self.in_job and name in ("config", "generation", "result"):
            key = self.prefix + name
            raise ProtocolError(
                f"{key} is damaged, so this node does not join: {why}. Where no job of this name runs, delete it with "
                f"`etcdctl del {key}`"
            )
        self._reporter.warn(self.intake.freeze(name, revision, why))

    def accept(self, name: str) -> None:
        """Notes that a document is in order, or is gone."""
        self._reporter.warn(self.intake.accept(name))

    def forget_node(self, node: str) -> None:
        """Drops the report of a node that is gone; the leader's rule sees it at the next change."""
        self.nodes.pop(node, None)
        self.accept(f"nodes/{node}")

    def _ignore(self, event: WatchEvent, why: str) -> None:
        self._reporter.warn(self.intake.ignore(event.key.removeprefix(self.prefix), event.revision, why))

    # -- events ---------------------------------------------------------------------------------------------------

    def take(self, event: WatchEvent) -> Duty | None:
        """Takes one change of one document; returns what it calls for, if anything."""
        name = event.key.removeprefix(self.prefix)
        if name.startswith("nodes/"):
            return self._take_node(name.removeprefix("nodes/"), event)
        if name == "generation":
            return self._take_generation(event)
        if name == "edit":
            return self._take_edit(event)
        if name == "size":
            return self._take_size(event)
        if name == "requests/size":
            return self._take_size_request(event)
        if name == "result":
            return self._take_result(event)
        if name == "leader":
            return self._take_leader(event)
        if name == "config":
            return Duty.SETTINGS_WRITTEN if event.value is not None else None
        if name == "servers":
            self._take_servers(event)
        elif name == "spares":
            self._take_spares(event)
        elif name == "founding":
            if (founding := self._parse_request(Founding, event)) is not None:
                self.found(founding)
        elif name == "absent":
            # It goes with the leader that has written it: the next one writes it again, or that nobody is absent.
            if not self._is_old("absent", event) and (absent := self._parse_request(Absent, event)) is not None:
                self.absent = frozenset(absent.addresses)
        elif name == "moved":
            self.moved = read_text(event.value) if event.value is not None else ""
        elif name.startswith("left/"):
            if event.value is not None:
                self.note_ended(event.value[:256].decode(errors="replace"))
        elif name == "requests/plan":
            self._take_plan_request(event)
        elif name == f"requests/drain/{self._node}":
            if (request := self._take_request_once(DrainRequest, event)) is not None:
                self._reporter.listener.drains(request)
        elif name == f"requests/deadlock/{self._node}":
            if (found := self._take_request_once(Deadlock, event)) is not None:
                self._reporter.listener.deadlocked(found)
        elif event.value is not None and not is_known(name):
            self._ignore(event, "elaunch writes no such key")
        return None

    def _is_old(self, name: str, event: WatchEvent) -> bool:
        """Returns whether this was seen before: the leader reads all while older events are still on their way."""
        return _is_seen(self._revisions.since_connect, name, event.revision)

    def _take_node(self, node: str, event: WatchEvent) -> Duty | None:
        name = f"nodes/{node}"
        if _is_seen(self._revisions.since_read, name, event.revision, self._revisions.all_read):
            return None  # from a watch of an earlier time as leader
        duty = Duty.OWN_REPORT if node == self._node and self.in_job else None
        if event.value is None:
            self.forget_node(node)
        else:
            try:
                doc = read_node(node, event.value, event.created)
            except ProtocolError as error:
                self._take_unreadable(name, event, error)
                return duty
            self.nodes[node] = doc
            self.accept(name)
            if node == self._leaders[1]:
                # Its lease ended though it lives, and so may others: etcd issue 15247, of a server that stood still.
                self._leaders = self.leader, None
                self.doubt_absences()
            generation = self.view.generation
            current = generation is None or doc.progress.attempt == generation.attempt
            if current and any(worker.state is WorkerState.MEMBER for worker in doc.workers):
                self.view = replace(self.view, begun=True)
        self.view = replace(self.view, nodes=tuple(self.nodes.values()), changed_s=self._clock())
        return duty

    def _take_unreadable(self, name: str, event: WatchEvent, error: ProtocolError) -> None:
        """Keeps the last report of a node of the job that could be read; leaves out what a stranger has written."""
        if is_ours(name, self._node, self.nodes.keys() | self._former.keys(), self.view.generation):
            node = name.removeprefix("nodes/")
            if node not in self.nodes and node in self._former:
                self.nodes[node] = self._former[node]
            self.damage(name, event.revision, str(error))
        else:
            self._ignore(event, str(error))

    def _take_generation(self, event: WatchEvent) -> Duty | None:
        if self._is_old("generation", event):
            return None
        self._has_generation = event.value is not None
        if event.value is None:
            self.accept("generation")
            return Duty.GENERATION_DELETED
        generation = self.read("generation", event.revision, read_generation, event.value)
        if generation is not None:
            self._enter(generation)
        return None

    def _take_edit(self, event: WatchEvent) -> Duty | None:
        """Takes what has changed since the generation before; one that cannot be used is made good by the whole."""
        if event.value is None or self._is_old("edit", event):
            return None
        former = self.view.generation
        try:
            edit = from_json(GenerationEdit, event.value)
        except ProtocolError:
            return Duty.GENERATION_UNKNOWN
        if former is not None and edit.former and edit.after.number <= former.number != edit.former:
            return None
        generation = follow(former, edit)
        if generation is None:
            return Duty.GENERATION_UNKNOWN
        self.accept("generation")
        self._enter(generation)
        return None

    def _enter(self, generation: Generation) -> None:
        former = self.view.generation
        if generation == former:
            return
        begun = self.view.begun and former is not None and former.attempt == generation.attempt
        if former is not None and former.number == generation.number:  # it was only settled, or is brought here anew
            self.view = replace(self.view, generation=generation)
            return
        self.view = replace(self.view, generation=generation, generation_s=self._clock(), pending_s=None, begun=begun)
        if generation.number > self._told_generation:
            self._told_generation = generation.number
            self._reporter.listener.announced(generation)

    def _take_size(self, event: WatchEvent) -> Duty | None:
        """Takes the size that counts. It stays when its writer goes."""
        if self._is_old("size", event):
            return None
        if event.value is None:
            self.accept("size")
            return Duty.SIZE_DELETED
        size = self.read("size", event.revision, read_size, event.value)
        if size is not None:
            self._keep_size(size)
        return None

    def _take_size_request(self, event: WatchEvent) -> Duty | None:
        """Takes a size that was asked for; the leader makes it count."""
        if event.value is None:
            return None
        try:
            size = read_size(event.value)
        except ProtocolError as error:  # who has written it waits in vain
            self._ignore(event, str(error))
            return None
        return Duty.SIZE_ASKED if self._keep_size(size) else None

    def _keep_size(self, size: JobSize) -> bool:
        """Keeps a size if it is newer than the one that is known; returns whether it is."""
        if self.size is not None and (size.t, size.id) <= (self.size.t, self.size.id):
            return False
        self.size = size
        self._reporter.listener.resized(size.min_nodes, size.max_nodes)
        return True

    def _take_servers(self, event: WatchEvent) -> None:
        """Takes which nodes serve the store. The leader writes it again at the next change if it is gone or damaged."""
        if event.value is None or self._is_old("servers", event):
            return
        try:
            servers = from_json(EtcdServers, event.value)
        except ProtocolError as error:
            self._ignore(event, str(error))
            return
        if servers != self.servers and servers.clients:
            self.servers = servers
            self._reporter.listener.served(servers)

    def _take_spares(self, event: WatchEvent) -> None:
        """Takes which nodes hold workers ready. They do so on where the writer has gone: the next leader writes it."""
        if event.value is None or self._is_old("spares", event):
            return
        try:
            self._reporter.listener.spared(from_json(HeldSpares, event.value).nodes)
        except ProtocolError as error:
            self._ignore(event, str(error))

    def _take_plan_request(self, event: WatchEvent) -> None:
        if _is_seen(self._revisions.since_read, "requests/plan", event.revision, self._revisions.all_read):
            return
        self.view = replace(self.view, request=self._parse_request(PlanRequest, event))

    def _take_request_once(self, kind: type[Document], event: WatchEvent) -> Document | None:
        """Returns what is asked of this node, once: who leads hears of it twice."""
        if _is_seen(self._revisions.asked, event.key, event.revision):
            return None
        return self._parse_request(kind, event)

    def _parse_request(self, kind: type[Document], event: WatchEvent) -> Document | None:
        if event.value is None:
            return None
        try:
            return from_json(kind, event.value)
        except ProtocolError as error:  # who has written it waits in vain
            self._ignore(event, str(error))
            return None

    def _take_result(self, event: WatchEvent) -> Duty | None:
        if self._is_old("result", event):
            return None
        if event.value is None:
            self.accept("result")
            return None
        result = self.read_result(event.revision, event.value)
        if result is not None:
            self.end(result)
        return None

    def _take_leader(self, event: WatchEvent) -> Duty | None:
        if self._is_old("leader", event):
            return None
        if event.value is None:
            self.accept("leader")
            self._leaders = None, self.leader
            return Duty.LEADER_DELETED
        self._leaders = self.read("leader", event.revision, read_name, event.value), self._leaders[1]
        return Duty.LEADER_WRITTEN


def _is_seen(seen: dict[str, int], name: str, revision: int, least: int = 0) -> bool:
    """Returns whether a revision of a document, or a later one, was taken before; else notes it."""
    if revision <= max(least, seen.get(name, 0)):
        return True
    seen[name] = revision
    return False
