"""One node's part in the rendezvous: join, renew, watch, and lead when it is this node's turn.

A single thread talks to the store; the agent only leaves its newest report (`publish`) and gets call-backs. When the
store is away, the thread keeps trying: the agent, and so training, goes on with the membership it has.
Traffic is O(nodes) for each change: every node watches the generation, only the leader watches the nodes and what is
asked of the job.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar

from elaunch.errors import ElaunchError, JobFailed, LaunchError, ProtocolError, SettingsMismatch, StoreUnavailable
from elaunch.rendezvous import deadlock
from elaunch.rendezvous.decide import Decision, Settings, View, decide, surplus
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
    Document,
    DrainRequest,
    Generation,
    JobConfig,
    JobSize,
    NodeDoc,
    PlanRequest,
    Result,
    Stage,
    WorkerState,
    from_json,
    job_prefix,
    names_text,
    node_of,
    to_json,
)
from elaunch.rendezvous.setbacks import Setbacks
from elaunch.rendezvous.store import Entry, Event, LeaseGone, Store, Watch

T = TypeVar("T")

RETRY_S = 0.2
RESULT_TTL_S = 600.0
PROBE_S = 0.5
WAITED_S = 3.0  # what takes less is not worth a line


class Listener(Protocol):
    """What the agent wants to hear. Called from the participant's thread; must return at once."""

    def joined(self, config: JobConfig) -> None: ...
    def announced(self, generation: Generation) -> None: ...
    def resized(self, min_nodes: int, max_nodes: int) -> None: ...
    def drains(self, request: DrainRequest) -> None: ...
    def deadlocked(self, found: Deadlock) -> None: ...
    def ended(self, result: Result) -> None: ...
    def waits(self, text: str) -> None: ...
    def outage(self, why: str) -> None: ...
    def back(self, away_s: float) -> None: ...
    def absent(self, text: str) -> None: ...
    def warns(self, text: str) -> None: ...
    def refused(self, error: ElaunchError) -> None: ...


class Participant:
    """Keeps this node's report in the store and tells the agent what the job has agreed on.

    Args:
        open_store: connects to the store; called again after each loss of the connection.
        job: name of the job.
        config: what this node was told; a running job with other settings refuses it.
        settings: limits for the times at which this node leads.
        doc: the first report.
        listener: gets the news.
        connect_s: how long to try before the store is called unreachable at the start, in seconds.
        clock: in seconds.
        figures: of this node's check, by which nodes that come later are judged; they stand as long as this node does.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        job: str,
        config: JobConfig,
        settings: Settings,
        doc: NodeDoc,
        listener: Listener,
        connect_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        figures: str = "",
    ) -> None:
        self._open_store = open_store
        self._prefix = job_prefix(job)
        self._job = job
        self._config = config
        self._settings = settings
        self._listener = listener
        self._clock = clock
        self._node = doc.node
        self._wake = threading.Condition()
        self._doc = doc
        self._inbox: deque[list[Event] | StoreUnavailable] = deque()
        self._profile: bytes | None = None
        self._drain_all: DrainRequest | None = None
        self._figures = figures.encode()
        self._stopping = False
        self._wait_for_others = False
        self._thread = threading.Thread(target=self._run, name="elaunch-participant", daemon=True)
        # What follows belongs to the thread alone.
        self._store: Store | None = None
        self._lease: int | None = None
        self._figures_lease: int | None = None
        self._written: NodeDoc | None = None
        self._watches: list[Watch] = []
        self._leading = False
        self._view = View()
        self._nodes: dict[str, NodeDoc] = {}
        self._all_read = 0  # the revision at which all nodes, and what is asked of the job, were read
        self._node_revisions: dict[str, int] = {}
        self._request_revision = 0
        self._asked_revisions: dict[str, int] = {}
        self._size: JobSize | None = None
        self._told_to_drain: set[str] = set()
        self._told_deadlock: Deadlock | None = None
        self._token = ""
        self._generation_revision = 0
        self._generation_gone = False
        self._revisions: dict[str, int] = {}  # of what was last seen of `leader`, `size` and `result`
        self._former: dict[str, NodeDoc] = {}  # the reports that were known before all are read anew
        self._own_revision = 0  # of this node's report, as it was written last
        self._sees_nodes = False
        self._in_job = False  # once it is, nothing that stands in the store, or not, ends it
        self._intake = Intake(self._prefix)
        self._setbacks = Setbacks(settings.lease_s / 3)
        self._wake_s: float | None = None
        self._renew_s = 0.0
        self._renewed_s = 0.0
        self._connect_s = connect_s
        self._started_s = clock()
        self._joined = False
        self._present = False
        self._lead_due = False
        self._suspecting = False
        self._away_since_s: float | None = None
        self._told_epoch = 0
        self._told_result = False
        self._wait_told_s = self._started_s + WAITED_S  # when a line about waiting is due next
        self._wait_pause_s = WAITED_S
        self._wait_nodes: set[str] = set()
        self._wait_for: tuple[str, float | None] = ("", None)  # what the leader's rule waits for, and until when

    def start(self) -> None:
        self._thread.start()

    def publish(self, doc: NodeDoc) -> None:
        """Leave the node's newest report; the thread writes it at once, or when the store is back."""
        with self._wake:
            self._doc = doc
            self._wake.notify()

    def leave_profile(self, text: str) -> None:
        """Leave what the job has measured for who looks at it; it stands as long as this node does."""
        with self._wake:
            self._profile = text.encode()
            self._wake.notify()

    def drain_all(self, reason: str) -> None:
        """Have all nodes that are here now leave the job at a step boundary, this one too."""
        with self._wake:
            self._drain_all = DrainRequest(reason, time.time())
            self._wake.notify()

    def suspect_leader(self) -> None:
        """A peer was found dead: if the leading node died with it, lead in its stead before its lease has run out."""
        with self._wake:
            self._suspecting = True
            self._wake.notify()

    def stop(self, timeout_s: float = 2.0, *, last: bool = False) -> None:
        """Leave the job: the report and the lease go.

        Args:
            timeout_s: how long to try.
            last: the store goes when this returns, so wait until the other nodes have left, or their leases run out.
        """
        with self._wake:
            self._stopping = True
            self._wait_for_others = last
            self._wake.notify()
        self._thread.join(timeout_s + (2 * self._settings.lease_s if last else 0.0))

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping:
            try:
                if self._store is None:
                    self._connect()
                self._turn()
            except StoreUnavailable as error:
                self._lost_store(error)
            except Exception as error:  # the store refuses something, or it is a defect
                if not self._in_job:
                    self._refuse(error)
                    break
                self._set_back(error)
        self._leave()

    def _refuse(self, error: Exception) -> None:
        if not isinstance(error, ElaunchError):  # a defect; without this thread the agent would wait for ever
            traceback.print_exception(error)
            error = LaunchError(f"the rendezvous of this node failed: {error!r}")
        self._listener.refused(error)

    def _set_back(self, error: Exception) -> None:
        """Go on without the store for a while: this node may hold healthy state, whatever the store refuses."""
        pause_s = self._setbacks.meet(self._clock())
        self._tell_setback(error, "training goes on with the present members, and this is tried again")
        self._drop_connection()
        end_s = self._clock() + pause_s
        with self._wake:
            self._inbox.clear()
            while not self._stopping and (left_s := end_s - self._clock()) > 0:
                self._wake.wait(left_s)

    def _tell_setback(self, error: Exception, then: str) -> None:
        is_defect = not isinstance(error, ElaunchError)
        text = f"a defect in the rendezvous of this node: {error!r}" if is_defect else str(error)
        if self._setbacks.is_new(text):
            if is_defect:
                traceback.print_exception(error)
            self._warn(f"{text}; {then}")

    def _warn(self, text: str) -> None:
        """Tell the user; an empty text says that there is nothing new."""
        if text:
            try:
                self._listener.warns(text)
            except Exception:  # it is told on the way out of another error, and must not be one
                traceback.print_exc()

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        now_s = self._clock()
        with self._wake:
            left = self._profile is not None or self._drain_all is not None
            busy = self._inbox or self._stopping or self._suspecting or left
            if not busy and self._doc == self._written:
                due_s = self._renew_s if self._wake_s is None else min(self._renew_s, self._wake_s)
                self._wake.wait(max(0.0, min(due_s - now_s, 1.0)))
            news = list(self._inbox)
            self._inbox.clear()
            doc, profile, self._profile = self._doc, self._profile, None
            drain_all = self._drain_all
        if self._stopping:
            return
        begin_s = self._clock()
        for item in news:
            if isinstance(item, StoreUnavailable):
                raise item
            self._take(item)
        if doc != self._written:
            self._write(doc)
        if profile is not None:
            self._write_profile(profile)
        if drain_all is not None:
            self._ask_all(drain_all)
            with self._wake:
                self._drain_all = None if self._drain_all is drain_all else self._drain_all
        if self._clock() >= self._renew_s:
            self._renew()
        if self._suspecting:
            self._suspecting = False
            self._replace_dead_leader()
        if self._lead_due:
            self._lead_due = False
            self._try_to_lead()
        if self._leading and (news or self._wake_s is None or self._clock() >= self._wake_s):
            self._lead()
        self._tell_waiting()
        if (lasted_s := self._setbacks.end(self._clock())) is not None:
            self._doubt_absences()
            self._warn(f"the rendezvous of this node works again after {lasted_s:.1f} s")
        if self._clock() > begin_s + self._settings.lease_s / 3:
            self._doubt_absences()

    def _doubt_absences(self) -> None:
        """The store was away or has stood still: the leases of nodes that are alive may have ended by that."""
        self._view = replace(self._view, outage_end_s=self._clock())

    def _tell_waiting(self) -> None:
        """While the job waits for nodes, say who is there, who is missing and how long still, ever more rarely.

        The leader knows, and leaves it in the store; so this costs each node one read now and then.
        """
        assert self._store is not None
        generation = self._view.generation
        if generation is not None and generation.stage is not Stage.ASSEMBLE and not generation.hold:
            self._wait_told_s, self._wait_pause_s = self._clock() + WAITED_S, WAITED_S
            return
        told_before = self._wait_pause_s > WAITED_S
        if self._leading and told_before and self._nodes.keys() != self._wait_nodes:
            self._leave_waiting_text()  # for the next time that another node looks
        if not self._is_time_to_tell():
            return
        if self._leading:
            text = self._leave_waiting_text()
        else:
            entry = self._store.get(self._prefix + "waiting")
            text = read_text(entry.value) if entry is not None else ""
        if text:
            self._listener.waits(text)

    def _is_time_to_tell(self) -> bool:
        """Whether a line about waiting is due; then the next one is due after twice the time."""
        if self._clock() < self._wait_told_s:
            return False
        self._wait_pause_s = min(60.0, 2 * self._wait_pause_s)
        self._wait_told_s = self._clock() + self._wait_pause_s
        return True

    def _leave_waiting_text(self) -> str:
        assert self._store is not None
        text, self._wait_nodes = self._waiting_text(*self._wait_for), set(self._nodes)
        with suppress(LeaseGone):  # then another node leads by now
            self._store.put(self._prefix + "waiting", text.encode(), self._lease)
        return text

    def _waiting_text(self, reason: str, wake_s: float | None) -> str:
        nodes = sorted(self._view.nodes, key=lambda doc: (doc.rank, doc.order))
        names = names_text([doc.node for doc in nodes])
        missing = self._now().min_nodes - len(nodes)
        lack = f", at least {missing} missing" if missing > 0 else ""
        left = f", {max(0.0, wake_s - self._clock()):.0f} s left" if wake_s is not None else ""
        return f"waiting: {reason} (here: {names}{lack}{left})"

    def _connect(self) -> None:
        self._store = store = self._open_store()
        self._revisions.clear()
        result = self._result(store.get(self._prefix + "result"))
        if result is not None:
            self._meet_end(result)
            return
        self._enter_job(store)
        self._keep_or_drop_lease(store)
        if not self._present:
            self._claim_name(store)
            self._enter_job(store)  # until then, a node of other settings could take this for a name that is free
        self._write(self._doc)
        entries, revision = store.range(self._prefix)
        self._leading = False
        self._generation_revision = 0
        if self._away_since_s is not None:
            self._doubt_absences()
            self._listener.back(self._clock() - self._away_since_s)
            self._away_since_s = None
        self._read(entries, revision)
        leader = next((entry for entry in entries if entry.key == self._prefix + "leader"), None)
        asked = [f"requests/{what}/{self._node}" for what in ("drain", "deadlock")]
        for name in ("generation", "result", "leader", "size", *asked):
            self._watch(self._prefix + name, revision + 1)
        if leader is None:
            self._try_to_lead()
        elif leader.value == self._node.encode():
            self._start_to_lead()
        elif "leader" not in self._intake.damaged:
            name = read_name(leader.value)
            if f"{self._prefix}nodes/{name}" not in {entry.key for entry in entries}:
                self._damaged("leader", leader.revision, f"it names {name}, which is no node of this job")
        self._renew_s = self._clock() + self._settings.lease_s / 3
        self._in_job = True

    def _result(self, entry: Entry | None) -> Result | None:
        """The result that stands in the store, if it is one."""
        if entry is None:
            return None
        return self._readable("result", entry.revision, lambda value: from_json(Result, value), entry.value)

    def _meet_end(self, result: Result) -> None:
        """The job is over: news for a node that took part in it, a refusal for one that comes too late."""
        if not self._joined:
            how = "successfully" if result.succeeded else f"with a failure ({result.message})"
            raise JobFailed(
                f"job {self._job!r} has ended {how}, and takes no more nodes: use another --rdzv-id, or this one again "
                f"{RESULT_TTL_S:g} s after its end"
            )
        self._view = replace(self._view, result=result)
        if not self._told_result:
            self._told_result = True
            self._listener.ended(result)
        self._renew_s = self._clock() + self._settings.lease_s

    def _keep_or_drop_lease(self, store: Store) -> None:
        """A short outage leaves the lease valid; then this node was never absent, and may still lead."""
        if self._lease is None or self._keep_alive(store, self._lease):
            return
        # A lease that had time left was lost with the store's data: then no node was missed.
        if self._present and self._clock() > self._renewed_s + self._settings.lease_s:
            self._tell_absent()
        self._lease = None

    def _grant(self, store: Store) -> int:
        self._renewed_s = self._clock()
        return store.grant(self._settings.lease_s)

    def _keep_alive(self, store: Store, lease: int) -> bool:
        begin_s = self._clock()
        alive = store.keep_alive(lease)
        if alive:
            self._renewed_s = begin_s
        return alive

    def _claim_name(self, store: Store) -> None:
        """Two agents of one name would overwrite each other; one that was killed frees its name with its lease."""
        key = f"{self._prefix}nodes/{self._node}"
        end_s = self._clock() + 2 * self._settings.lease_s
        while True:
            if self._lease is None:
                self._lease = self._grant(store)
            with suppress(LeaseGone):  # then the next one may claim it
                if store.create(key, to_json(self._doc), self._lease):
                    self._present = True
                    return
            entry = store.get(key)
            if entry is not None and not self._reports([entry]):
                raise ProtocolError(
                    f"{key} is taken, and is no report of a node: delete it with `etcdctl del {key}`, or give this "
                    "node another --node-name"
                )
            if self._clock() > end_s:
                raise SettingsMismatch(
                    f"job {self._job!r} already has a live node named {self._node!r}: give this one another --node-name"
                )
            with self._wake:
                if self._stopping:
                    raise StoreUnavailable("this node leaves")
                self._wake.wait(RETRY_S)
            self._keep_or_drop_lease(store)

    def _enter_job(self, store: Store) -> None:
        """Agree on the job's fixed settings; the first node writes them."""
        key = self._prefix + "config"
        mine = replace(self._config, token=self._token or secrets.token_hex(16))
        entry = store.get(key)
        if entry is None:
            store.create(key, to_json(mine))
            entry = store.get(key)
        if entry is None:
            raise StoreUnavailable(f"{store.endpoint}: {key} disappeared while this node joined")
        try:
            config = from_json(JobConfig, entry.value)
        except ProtocolError as error:
            self._damaged("config", entry.revision, str(error))
            return
        if replace(config, token="") != self._config:
            freed = self._nobody_is_here(store) and store.replace(key, to_json(mine), entry.revision)
            newest = store.get(key)
            if freed or newest is None or newest.revision != entry.revision:
                self._enter_job(store)  # this node, or another that came at the same moment, has written new settings
                return
            if self._in_job:
                self._damaged("config", entry.revision, f"it holds other settings: {_settings_text(config)}")
                return
            raise SettingsMismatch(
                f"job {self._job!r} runs with {_settings_text(config)}, this node was started with "
                f"{_settings_text(self._config)}: start it with the same values, or use another --rdzv-id"
            )
        self._warn(self._intake.accept("config"))
        self._token = config.token
        if not self._joined:
            self._joined = True
            self._listener.joined(config)

    def _nobody_is_here(self, store: Store) -> bool:
        """Whether an earlier run of this name ended without a word, as when all its machines were lost at once."""
        entries, _ = store.range(self._prefix)
        if any(entry.key == self._prefix + "leader" for entry in entries):
            return False
        return not self._reports(entries).keys() - {self._node}

    def _reports(self, entries: Iterable[Entry]) -> dict[str, NodeDoc]:
        """The reports of nodes among some entries, without what a stranger has put there."""
        found, folder = {}, self._prefix + "nodes/"
        for entry in entries:
            if entry.key.startswith(folder):
                node = entry.key.removeprefix(folder)
                with suppress(ProtocolError):
                    found[node] = read_node(node, entry.value, entry.created)
        return found

    def _write(self, doc: NodeDoc) -> None:
        assert self._store is not None
        key = f"{self._prefix}nodes/{self._node}"
        for _ in range(2):
            if self._lease is None:
                self._lease = self._grant(self._store)
            try:
                self._own_revision = self._store.put(key, to_json(doc), self._lease)
            except LeaseGone:
                self._lose_lease()
                continue
            self._written = doc
            self._write_figures()
            return
        raise StoreUnavailable(f"{self._store.endpoint}: a new lease was gone at once")

    def _write_profile(self, text: bytes) -> None:
        assert self._store is not None
        try:
            self._store.put(self._prefix + "profile", text, self._lease)
        except LeaseGone:
            pass  # the next one comes
        except StoreUnavailable:
            raise
        except LaunchError as error:
            self._tell_setback(error, "what the job has measured is not shown; training goes on")

    def _write_figures(self) -> None:
        """Write what the node's check has shown, once for each lease."""
        assert self._store is not None
        if self._figures and self._figures_lease != self._lease:
            with suppress(LeaseGone):  # then they come with the next lease
                self._store.put(f"{self._prefix}checks/{self._node}", self._figures, self._lease)
                self._figures_lease = self._lease

    def _renew(self) -> None:
        assert self._store is not None
        begin_s, due_s = self._clock(), self._renew_s
        self._renew_s = begin_s + self._settings.lease_s / 3
        if self._lease is None or self._keep_alive(self._store, self._lease):
            self._look_again()
            return
        took_s = self._clock() - begin_s
        self._join_again(f"; renewing came {begin_s - due_s:.2f} s late, and took the store {took_s:.2f} s")

    def _look_again(self) -> None:
        """Notice what no watch of this node tells: that its own report is another's, and that damage has ended."""
        if self._view.result is not None or self._store is None or not self._in_job:
            return
        key = f"{self._prefix}nodes/{self._node}"
        entry = self._store.get(key)
        if self._written is not None and (entry is None or entry.revision != self._own_revision):
            what = "deleted" if entry is None else "overwritten"
            self._warn(f"{key} was {what} by somebody else; this node writes it again")
            self._written = None
        for name in list(self._intake.damaged):
            if name == "config":
                self._enter_job(self._store)
            elif name.startswith("nodes/") and not self._sees_nodes:
                entry = self._store.get(self._prefix + name)
                if entry is None:
                    self._nodes.pop(name.removeprefix("nodes/"), None)
                    self._warn(self._intake.accept(name))
                else:
                    self._take([Event(entry.key, entry.value, entry.revision, entry.created)])

    def _join_again(self, why: str = "") -> None:
        self._lose_lease(why)
        self._write(self._doc)

    def _lose_lease(self, why: str = "") -> None:
        """The lease has ended, and so this node was absent for the others: it leads no more."""
        self._tell_absent(why)
        self._doubt_absences()  # what has ended this lease may have ended others
        self._lease = None
        self._leading = False
        self._lead_due = True

    def _tell_absent(self, why: str = "") -> None:
        self._listener.absent(
            f"this node was absent for the others: its lease of {self._settings.lease_s:g} s had ended, renewed "
            f"{self._clock() - self._renewed_s:.2f} s before{why}; --rdzv-conf lease_ttl=SECONDS gives it more time"
        )

    def _ask_all(self, request: DrainRequest) -> None:
        assert self._store is not None
        entries, _ = self._store.range(self._prefix + "nodes/")
        generation = self._view.generation
        members = () if generation is None else generation.nodes
        for node in dict.fromkeys([*self._reports(entries), *members]):
            self._ask("drain", node, request)

    def _ask(self, what: str, node: str, request: DrainRequest | Deadlock) -> None:
        assert self._store is not None
        with suppress(LeaseGone):  # then this node was absent itself; who leads by then asks again
            self._store.put(f"{self._prefix}requests/{what}/{node}", to_json(request), self._lease)

    def _watch(self, prefix: str, revision: int) -> None:
        assert self._store is not None

        def put(item: list[Event] | StoreUnavailable) -> None:
            with self._wake:
                self._inbox.append(item)
                self._wake.notify()

        self._watches.append(self._store.watch(prefix, revision, put, put))

    def _take(self, events: list[Event]) -> None:
        for event in events:
            try:
                self._take_one(event)
            except ElaunchError:
                raise
            except Exception as error:
                if not self._in_job:
                    raise
                self._tell_setback(error, f"what {event.key} holds is passed over; training goes on")

    def _take_one(self, event: Event) -> None:
        name = event.key.removeprefix(self._prefix)
        if name.startswith("nodes/"):
            self._take_node(name.removeprefix("nodes/"), event)
        elif name == "generation":
            self._take_generation(event)
        elif name == "requests/plan":
            self._take_request(event)
        elif name in ("size", "requests/size"):
            self._take_size(event, asked=name != "size")
        elif name == f"requests/drain/{self._node}":
            if (request := self._asked(DrainRequest, event)) is not None:
                self._listener.drains(request)
        elif name == f"requests/deadlock/{self._node}":
            if (found := self._asked(Deadlock, event)) is not None:
                self._listener.deadlocked(found)
        elif name == "result":
            self._take_result(event)
        elif name == "leader":
            self._take_leader(event)
        elif event.value is not None and not is_known(name):
            self._warn(self._intake.ignore(name, event.revision, "elaunch writes no such key"))

    def _is_old(self, name: str, event: Event) -> bool:
        """Whether this was seen before: the leader reads all while older events are still on their way."""
        if event.revision <= self._revisions.get(name, 0):
            return True
        self._revisions[name] = event.revision
        return False

    def _readable(self, name: str, revision: int, read: Callable[[bytes], T], value: bytes) -> T | None:
        """Read a document of the job; None, and a line for the user, where it is damaged."""
        try:
            document = read(value)
        except ProtocolError as error:
            self._damaged(name, revision, str(error))
            return None
        self._warn(self._intake.accept(name))
        return document

    def _damaged(self, name: str, revision: int, why: str) -> None:
        """Freeze the job's changes, and go on training; a node that has not joined does not do so now."""
        if not self._in_job and name in ("config", "generation", "result"):
            key = self._prefix + name
            raise ProtocolError(
                f"{key} is damaged, so this node does not join: {why}. Where no job of this name runs, delete it with "
                f"`etcdctl del {key}`"
            )
        self._warn(self._intake.freeze(name, revision, why))

    def _take_generation(self, event: Event) -> None:
        if event.revision <= self._generation_revision:
            return
        self._generation_revision = event.revision
        self._generation_gone = event.value is None
        if event.value is None:
            self._warn(self._intake.accept("generation"))
            if self._leading and self._result_is_open():
                self._warn(f"{event.key} was deleted by somebody else; this node, which leads, writes it again")
                self._put_last_generation()
            return
        generation = self._readable("generation", event.revision, read_generation, event.value)
        if generation is None:
            return
        former = self._view.generation
        begun = self._view.begun and former is not None and former.attempt == generation.attempt
        self._view = replace(self._view, generation=generation, generation_s=self._clock(), pending_s=None, begun=begun)
        if generation.epoch > self._told_epoch:
            self._told_epoch = generation.epoch
            self._listener.announced(generation)

    def _result_is_open(self) -> bool:
        assert self._store is not None
        return self._view.result is None and self._store.get(self._prefix + "result") is None

    def _take_result(self, event: Event) -> None:
        if self._is_old("result", event):
            return
        if event.value is None:
            self._warn(self._intake.accept("result"))
            return
        result = self._result(Entry(event.key, event.value, event.revision, event.created))
        if result is not None:
            self._view = replace(self._view, result=result)
            if not self._told_result:
                self._told_result = True
                self._listener.ended(result)

    def _take_leader(self, event: Event) -> None:
        assert self._store is not None
        if self._is_old("leader", event):
            return
        if event.value is None:
            self._warn(self._intake.accept("leader"))
            self._lead_due = True
            return
        leader = self._readable("leader", event.revision, read_name, event.value)
        if not self._leading or leader == self._node:
            return
        if leader is not None:
            if self._store.get(f"{self._prefix}nodes/{leader}") is not None:
                self._leading = False
                return
            self._damaged("leader", event.revision, f"it names {leader}, which is no node of this job")
        if self._lease is None or not self._keep_alive(self._store, self._lease):
            self._join_again()
        else:
            self._take_key_of_leader(event.revision)

    def _take_key_of_leader(self, revision: int) -> bool:
        """Exchange the leader's key, as it was at a revision, for one of this node and bound to its lease."""
        assert self._store is not None
        key = self._prefix + "leader"
        # Whoever wins the exchange has the key to itself; then the key goes over to the winner's own lease.
        if not self._store.replace(key, self._node.encode(), revision):
            return False
        try:
            self._store.put(key, self._node.encode(), self._lease)
        except LeaseGone:
            self._join_again()  # and the key goes with the lease that it was bound to
            return False
        return True

    def _asked(self, kind: type[Document], event: Event) -> Document | None:
        """What is asked of this node, once: who leads hears of it twice."""
        if event.revision <= self._asked_revisions.get(event.key, 0):
            return None
        self._asked_revisions[event.key] = event.revision
        if event.value is not None:
            try:
                return from_json(kind, event.value)
            except ProtocolError as error:  # who has written it waits in vain
                self._ignore(event, error)
        return None

    def _ignore(self, event: Event, error: ProtocolError) -> None:
        self._warn(self._intake.ignore(event.key.removeprefix(self._prefix), event.revision, str(error)))

    def _read(self, entries: list[Entry], revision: int) -> None:
        """Take all documents of the job as they stand at a revision."""
        self._former = dict(self._nodes)
        self._nodes.clear()
        self._node_revisions.clear()
        self._view = replace(self._view, request=None)
        self._request_revision = self._all_read = 0
        # The size first: by it this node knows whether a generation has a place for it.
        entries = sorted(entries, key=lambda entry: entry.key != self._prefix + "size")
        self._take([Event(entry.key, entry.value, entry.revision, entry.created) for entry in entries])
        self._all_read = revision
        names = {entry.key.removeprefix(self._prefix) for entry in entries}
        self._generation_gone = "generation" not in names
        for name in self._intake.damaged.keys() - names:
            self._warn(self._intake.accept(name))
        self._view = replace(self._view, nodes=tuple(self._nodes.values()))

    def _take_node(self, node: str, event: Event) -> None:
        if event.revision <= max(self._all_read, self._node_revisions.get(node, 0)):
            return  # from a watch of an earlier time as leader
        self._node_revisions[node] = event.revision
        name = f"nodes/{node}"
        if node == self._node and self._in_job and event.revision > self._own_revision:
            self._written = None  # it is not what this node has written: write it again
        if event.value is None:
            self._nodes.pop(node, None)
            self._warn(self._intake.accept(name))
        else:
            try:
                doc = read_node(node, event.value, event.created)
            except ProtocolError as error:
                self._take_unreadable(name, event, error)
                return
            self._nodes[node] = doc
            self._warn(self._intake.accept(name))
            generation = self._view.generation
            current = generation is None or doc.attempt == generation.attempt
            if current and any(worker.state is WorkerState.MEMBER for worker in doc.workers):
                self._view = replace(self._view, begun=True)
        self._view = replace(self._view, nodes=tuple(self._nodes.values()), changed_s=self._clock())

    def _take_unreadable(self, name: str, event: Event, error: ProtocolError) -> None:
        """Of a node of the job, the last report that could be read counts; what a stranger has written does not."""
        if is_ours(name, self._node, self._nodes.keys() | self._former.keys(), self._view.generation):
            node = name.removeprefix("nodes/")
            if node not in self._nodes and node in self._former:
                self._nodes[node] = self._former[node]
            self._damaged(name, event.revision, str(error))
        else:
            self._ignore(event, error)

    def _take_request(self, event: Event) -> None:
        if event.revision <= max(self._all_read, self._request_revision):
            return
        self._request_revision = event.revision
        request = None
        if event.value is not None:
            try:
                request = from_json(PlanRequest, event.value)
            except ProtocolError as error:  # who has written it waits in vain
                self._ignore(event, error)
        self._view = replace(self._view, request=request)

    def _take_size(self, event: Event, asked: bool) -> None:
        """Take a size that counts; the leader makes one that was asked for count. It stays when its writer goes."""
        if not asked and self._is_old("size", event):
            return
        if event.value is None:
            if not asked:
                self._warn(self._intake.accept("size"))
                if self._leading and self._size is not None and self._result_is_open():
                    self._put_size()
            return
        if asked:
            try:
                size = read_size(event.value)
            except ProtocolError as error:  # as above
                self._ignore(event, error)
                return
        else:
            found = self._readable("size", event.revision, read_size, event.value)
            if found is None:
                return
            size = found
        if self._size is None or (size.t, size.id) > (self._size.t, self._size.id):
            self._size = size
            self._listener.resized(size.min_nodes, size.max_nodes)
            if asked and self._leading:
                self._put_size()

    def _put_size(self) -> None:
        if self._size is not None and self._store is not None:
            with suppress(LeaseGone):  # then another node leads by now, and puts it
                self._store.put(self._prefix + "size", to_json(self._size), self._lease)

    def _now(self) -> Settings:
        """The settings, with the size that was asked for."""
        if self._size is None:
            return self._settings
        return replace(self._settings, min_nodes=self._size.min_nodes, max_nodes=self._size.max_nodes)

    def _try_to_lead(self) -> None:
        assert self._store is not None
        try:
            created = self._store.create(self._prefix + "leader", self._node.encode(), self._lease)
        except LeaseGone:
            self._join_again()  # this node heard that nobody leads before it was to renew its lease
            return
        if created:
            self._start_to_lead()

    def _replace_dead_leader(self) -> None:
        assert self._store is not None
        key = self._prefix + "leader"
        entry = self._store.get(key)
        if entry is None or "leader" in self._intake.damaged:
            return
        leader = self._readable("leader", entry.revision, read_name, entry.value)
        if leader is None or leader == self._node:
            return
        report = self._store.get(f"{self._prefix}nodes/{leader}")
        doc = self._reports([report]).get(leader) if report is not None else None
        if doc is not None and _nobody_listens(doc.door) and self._take_key_of_leader(entry.revision):
            self._start_to_lead()

    def _start_to_lead(self) -> None:
        assert self._store is not None
        entries, revision = self._store.range(self._prefix)
        self._read(entries, revision)
        if not self._sees_nodes:
            for name in ("nodes/", "requests/"):
                self._watch(self._prefix + name, revision + 1)
            self._sees_nodes = True
        self._view = replace(self._view, led_s=self._clock(), pending_s=None)
        self._told_deadlock = None
        self._leading = True
        if self._generation_gone and self._view.result is None:
            # The store has lost its data. Nodes that join now must hear of the generation that the others are in.
            self._put_last_generation()
        if "size" not in self._intake.damaged:
            self._put_size()
        self._lead()

    def _lead(self) -> None:
        """Apply the leader's rule, and write what it says."""
        assert self._store is not None
        if self._node not in self._nodes:
            # Its lease has ended: it decides nothing about a job that it is not in. Writing its report shows it.
            self._written = None
            self._wake_s = self._clock() + 1.0
            return
        if self._intake.damaged:
            self._wait_for = f"damaged in the store: {', '.join(self._intake.damaged)}", None
            self._wake_s = self._clock() + 1.0
            return
        settings = self._now()
        decision = decide(self._view, self._clock(), settings)
        self._wait_for = decision.reason, decision.wake_s
        self._wake_s = decision.wake_s if decision.wake_s is not None else self._clock() + 1.0
        if decision.pending:
            if self._view.pending_s is None:
                self._view = replace(self._view, pending_s=self._clock())
        elif self._view.pending_s is not None:
            self._view = replace(self._view, pending_s=None)
        too_many = surplus(self._view, settings.max_nodes)
        for node in too_many:
            if node not in self._told_to_drain:
                self._ask("drain", node, DrainRequest(_resized_text(settings), time.time()))
        for node in self._told_to_drain.difference(too_many):
            self._store.delete(f"{self._prefix}requests/drain/{node}")  # its name is free for a later one
        self._told_to_drain = set(too_many)
        if decision.generation is not None:
            self._announce(decision)
        self._tell_of_deadlock()
        if decision.result is not None:
            self._end_job(decision.result)

    def _tell_of_deadlock(self) -> None:
        """Ask the victim's node to end it, for as long as all members say that they wait for each other."""
        assert self._store is not None
        found, told = deadlock.find(self._view), self._told_deadlock
        if found == told:
            return
        if told is not None:
            self._store.delete(f"{self._prefix}requests/deadlock/{node_of(told.worker)}")
        if found is not None:
            self._ask("deadlock", node_of(found.worker), found)
        self._told_deadlock = found

    def _announce(self, decision: Decision) -> None:
        assert decision.generation is not None
        if self._put_generation(decision.generation):
            self._wake_s = self._clock()

    def _put_last_generation(self) -> None:
        if self._view.generation is not None:
            self._put_generation(self._view.generation)

    def _put_generation(self, generation: Generation) -> bool:
        assert self._store is not None
        key = self._prefix + "generation"
        expected = 0 if self._generation_gone else self._generation_revision
        written = self._store.replace(key, to_json(generation), expected)
        if written:
            # The watch will say so too; until then the rule must not see the old generation again.
            entry = self._store.get(key)
            if entry is not None:
                self._take([Event(entry.key, entry.value, entry.revision, entry.created)])
        return written

    def _end_job(self, result: Result) -> None:
        """Write the result, which turns late nodes away for a while; then the job's name is free again."""
        assert self._store is not None
        if self._store.create(self._prefix + "result", to_json(result), self._store.grant(RESULT_TTL_S)):
            self._view = replace(self._view, result=result)  # what is deleted now is not put back
            self._store.delete(self._prefix + "generation")
            self._store.delete(self._prefix + "config")
            self._store.delete(self._prefix + "size")

    def _lost_store(self, error: StoreUnavailable) -> None:
        if not self._joined and self._clock() > self._started_s + self._connect_s:
            self._listener.refused(
                StoreUnavailable(
                    f"{error}; gave up after {self._connect_s:g} s: is an etcd v3 server running there, and reachable "
                    "from this machine?"
                )
            )
            self._stopping = True
            return
        if not self._joined and self._is_time_to_tell():
            left_s = self._started_s + self._connect_s - self._clock()
            self._listener.waits(f"waiting for the rendezvous, {left_s:.0f} s left: {error}")
        if self._away_since_s is None and self._joined and not self._told_result:
            self._away_since_s = self._clock()
            self._listener.outage(str(error))
        self._drop_connection()
        with self._wake:
            self._inbox.clear()
            if not self._stopping:
                self._wake.wait(RETRY_S)

    def _drop_connection(self) -> None:
        for watch in self._watches:
            watch.cancel()
        self._watches.clear()
        self._leading = self._sees_nodes = False
        self._written = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def _leave(self) -> None:
        if self._store is not None:
            try:
                if self._lease is not None:
                    self._store.revoke(self._lease)
                end_s = self._clock() + 2 * self._settings.lease_s
                while self._wait_for_others and self._clock() < end_s:
                    if not self._reports(self._store.range(self._prefix + "nodes/")[0]):
                        break
                    time.sleep(0.02)
            except ElaunchError:
                pass  # the lease runs out by itself
        self._drop_connection()


def _resized_text(settings: Settings) -> str:
    return f"the job is to have {settings.max_nodes} node{'' if settings.max_nodes == 1 else 's'} from now on"


def _settings_text(config: JobConfig) -> str:
    restarts = "unset" if config.max_restarts is None else config.max_restarts
    text = f"--nnodes={config.min_nodes}:{config.max_nodes} and --max-restarts {restarts}"
    return f"{text} and --checkpoint-every {config.checkpoint_every}" if config.checkpoint_every else text


def _nobody_listens(door: str) -> bool:
    """Whether the machine of this address answers, and says that nobody listens there."""
    host, _, port = door.rpartition(":")
    if not host:
        return False
    try:
        socket.create_connection((host, int(port)), PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return False
