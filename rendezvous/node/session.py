"""This node's connection to the store: how it joins the job, its lease, and its own report.

A session outlives its connections. The node is present as long as its lease is renewed; the report, the figures of its
check and, where it leads, the leader's key are bound to that lease and go with it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf

from elaunch.errors import ElaunchError, JobFailed, LaunchError, ProtocolError, SettingsMismatch, StoreUnavailable
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.intake import read_reports, read_text
from elaunch.rendezvous.membership import Generation, JobConfig, NodeDoc, Result, job_prefix, names_text
from elaunch.rendezvous.node.held import HeldLease, Leadership
from elaunch.rendezvous.node.mailbox import Mailbox
from elaunch.rendezvous.node.replica import Replica
from elaunch.rendezvous.node.reporter import Reporter
from elaunch.rendezvous.rules.edit import edit_between
from elaunch.rendezvous.rules.same_settings import Differences, differences
from elaunch.rendezvous.store import Entry, LeaseGone, Store, Watch
from elaunch.waits import Pace

GENERATION, EDIT = "generation", "edit"
RETRY_S = 0.2
LINGER_S = 0.2
LEAST_RENEWAL_S = 1.0  # an election among servers takes most of it
RESULT_TTL_S = 600.0


class StoreMoved(StoreUnavailable):
    """The job has its store at another address by now, which is all that the message says."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """What this node brings to the job.

    Attributes:
        job: name of the job.
        node: name of the node.
        config: what it was told; a running job with other settings refuses it.
        figures: of its check, by which nodes that come later are judged.
        lease_s: how long it counts as present without a word, in seconds.
        hosted: whether the store is one that a node of the job hosts, and that ends with it.
        founds: whether nodes that lose the store may found another one.
    """

    job: str
    node: str
    config: JobConfig
    figures: bytes
    lease_s: float
    hosted: bool = False
    founds: bool = False


class Session:
    """Joins the job, keeps the node present, and reads and writes documents by their names.

    All methods but `close` raise `StoreUnavailable` where the store does not answer.

    Args:
        open_store: connects to the store; called again after each loss of the connection.
        entrant: what this node brings.
        mail: has the newest report, and takes what watches deliver.
        replica: of the job's documents.
        reporter: for the listener and lines to the user.
        clock: in seconds.
        followed: names of the documents that every node watches; the edit stands for the generation, which it reads.

    Attributes:
        lease: the node's lease.
        leadership: whether it leads.
        written: the report as it stands in the store; None: it is to be written.
        told: the report that was written last, or that may have been.
        joined: whether the listener was told that the node has joined.
        token: of the job, newest that was read; empty: none yet. Other threads read it.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        entrant: Entrant,
        mail: Mailbox,
        replica: Replica,
        reporter: Reporter,
        clock: Callable[[], float],
        followed: tuple[str, ...],
    ) -> None:
        self.followed = followed
        self.lease = HeldLease()
        self.leadership = Leadership()
        self.written: NodeDoc | None = None
        self.told: NodeDoc | None = None
        self.joined = False
        self.token = ""
        self._open_store = open_store
        self._entrant = entrant
        self._prefix = job_prefix(entrant.job)
        self._own_key = f"{self._prefix}nodes/{entrant.node}"
        self._mail = mail
        self._replica = replica
        self._reporter = reporter
        self._clock = clock
        self._store: Store | None = None
        self._watches: dict[tuple[str, ...], Watch] = {}
        self._written_revision = 0
        self._settings_revision = 0
        self._is_present = False

    # -- documents by name ----------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Returns whether there is a connection."""
        return self._store is not None

    @property
    def store(self) -> Store:
        """Returns the store, while there is a connection."""
        assert self._store is not None
        return self._store

    def get(self, name: str) -> Entry | None:
        """Returns a document as it stands."""
        return self.store.get(self._prefix + name)

    def range(self, *folders: str) -> tuple[list[Entry], int]:
        """Returns the documents whose names begin so, without any all of the job, and the revision of the store."""
        return self.store.range(tuple(self._prefix + folder for folder in folders) or self._prefix)

    def put(self, name: str, value: bytes) -> None:
        """Writes a document, bound to this node's lease; raises `LeaseGone`."""
        self.store.put(self._prefix + name, value, self.lease.id)

    def create(self, name: str, value: bytes, lease: int | None) -> bool:
        """Writes a document if there is none, bound to a lease; returns whether it was; raises `LeaseGone`."""
        return self.store.create(self._prefix + name, value, lease)

    def replace(self, name: str, value: bytes, expected_revision: int, beside: tuple[str, bytes] | None = None) -> bool:
        """Exchanges a document whose last change was this one (0: there is none); returns whether it was.

        `beside`, another document, is written with it.
        """
        other = None if beside is None else (self._prefix + beside[0], beside[1])
        return self.store.replace(self._prefix + name, value, expected_revision, other)

    def has_node(self, node: str, address: str) -> bool:
        """Returns whether the report of the agent with this liveness address stands in the store."""
        entry = self.get(f"nodes/{node}")
        doc = read_reports(self._prefix, [entry]).get(node) if entry is not None else None
        return doc is not None and doc.liveness_address == address

    def delete(self, name: str) -> None:
        """Deletes a document."""
        self.store.delete(self._prefix + name)

    def watch(self, names: tuple[str, ...], from_revision: int) -> None:
        """Has all changes of documents whose names begin so delivered to the mailbox."""
        deliver, prefixes = self._mail.deliver, tuple(self._prefix + name for name in names)
        self._watches[names] = self.store.watch(prefixes, from_revision, deliver, deliver)

    def watches(self, names: tuple[str, ...]) -> bool:
        """Returns whether `watch` was called with these names since the connection was made."""
        return names in self._watches

    # -- the connection -------------------------------------------------------------------------------------------

    def connect(self) -> tuple[list[Entry], int] | None:
        """Connects to the store, joins the job and writes the report.

        Returns:
            the documents that every node follows, and the revision at which they were read; None: the job is over.

        Raises:
            ElaunchError: the job takes no more nodes, runs with other settings, has a node of this name, or is damaged.
        """
        self._store = self._open_store()
        self._replica.begin_connection()
        entry = self.get("result")
        result = self._replica.read_result(entry.revision, entry.value) if entry is not None else None
        if result is not None:
            self._meet_end(result)
            return None
        if self._entrant.founds and not self.joined and (entry := self.get("moved")) is not None:
            raise StoreMoved(read_text(entry.value))
        self.enter_job()
        self._bring_generation()
        self._keep_or_drop_lease()
        if not self._is_present:
            self._claim_name()
            self.enter_job()  # until then, a node of other settings could take this for a name that is free
        self.write(self._mail.doc)
        return self.range(GENERATION, *self.followed)

    def move(self) -> None:
        """Has the next connection lead to another store, in which this node has neither lease nor report."""
        self.lease.id = self.lease.figures_id = None
        self.lease.renewed_s = -inf
        self._is_present = False

    def close(self) -> None:
        """Drops the connection. The lease goes on until it ends by itself."""
        for watch in self._watches.values():
            watch.cancel()
        self._watches.clear()
        self.leadership.leads = False
        self.written = None
        if self._store is not None:
            self._store.close()
            self._store = None

    def leave(self) -> None:
        """Leaves the job: the lease ends, and all that is bound to it goes."""
        if self._store is not None:
            try:
                if self.lease.id is not None:
                    if self._entrant.founds and self._mail.doc.liveness_address:
                        address, lease = self._mail.doc.liveness_address, self._store.grant(RESULT_TTL_S)
                        self._store.put(f"{self._prefix}left/{self._entrant.node}", address.encode(), lease)
                    self._store.revoke(self.lease.id)
                began_s = self._clock()
                pace, end_s = Pace.begin(began_s), began_s + max(self._mail.late_s, 2 * self._entrant.lease_s)
                while self._mail.waits_for_others and (now_s := self._clock()) < end_s:
                    others = read_reports(self._prefix, self.range("nodes/")[0])
                    if not others and now_s >= began_s + self._mail.late_s:
                        break
                    if others and pace.is_due(now_s):
                        names = names_text(sorted(others))
                        self._tell_wait(f"{names} to leave the job, whose rendezvous is here", end_s - now_s)
                    time.sleep(0.02)
                if self._mail.waits_for_others and self._replica.servers.servers:
                    time.sleep(LINGER_S)  # others that serve the store with this node look whether all have left, too
            except ElaunchError:
                pass  # the lease runs out by itself
        self.close()

    def _tell_wait(self, what: str, left_s: float) -> None:
        self._reporter.listener.waits(f"waiting, {max(0.0, left_s):.0f} s left: {what}")

    def _meet_end(self, result: Result) -> None:
        """Takes the job's end: news for a node that took part in it, a refusal for one that comes too late."""
        if not self.joined:
            how = "successfully" if result.succeeded else f"with a failure ({result.message})"
            late = f"{RESULT_TTL_S:g} s after its end"
            again = "when the node that hosts it has left" if self._entrant.hosted else late
            raise JobFailed(
                f"job {self._entrant.job!r} has ended {how}, and takes no more nodes: use another --rdzv-id, or this "
                f"one again {again}"
            )
        self._replica.end(result)
        self.lease.due_s = self._clock() + self._entrant.lease_s

    # -- joining --------------------------------------------------------------------------------------------------

    def enter_job(self) -> None:
        """Agrees on the job's fixed settings; the first node writes them."""
        key = self._prefix + "config"
        offered = to_json(replace(self._entrant.config, token=self.token or secrets.token_hex(16)))
        entry = self.store.get(key)
        if entry is None:
            self.store.create(key, offered)
            entry = self.store.get(key)
        if entry is None:
            raise StoreUnavailable(f"{self.store.endpoint}: {key} disappeared while this node joined")
        try:
            config = from_json(JobConfig, entry.value)
        except ProtocolError as error:
            self._replica.damage("config", entry.revision, str(error))
            return
        found = differences(config, self._entrant.config)
        if found.are_refused:
            is_free = self._nobody_is_here() and self.store.replace(key, offered, entry.revision)
            newest = self.store.get(key)
            if is_free or newest is None or newest.revision != entry.revision:
                self.enter_job()  # this node, or another that came at the same moment, has written new settings
                return
            self._refuse_settings(found, entry.revision)
            return
        if found.found and not self.joined:
            self._reporter.warn(
                f"the job runs with {found.theirs()}, this node was started with {found.ours()}: is that the same "
                "folder? If not, no checkpoint will be complete"
            )
        if self.token not in ("", config.token) and self._is_ahead():
            self.store.replace(key, offered, entry.revision)
            self.enter_job()
            return
        self._replica.accept("config")
        self._settings_revision = entry.revision
        if not self.joined or config.token != self.token:
            self.joined, self.token = True, config.token
            self._reporter.listener.joined(config)

    def note_settings(self, revision: int) -> None:
        """Takes the job's settings anew if others have written them: a job that runs has come to this node's store.

        Args:
            revision: of the change.
        """
        if self.joined and self._replica.view.generation is None and revision > self._settings_revision:
            self.enter_job()

    def _is_ahead(self) -> bool:
        """Returns whether this node knows a generation that the store does not: that has lost its data.

        Whoever has come to it since has settings of its own, with another token, by which workers would not know each
        other.
        """
        known, there = self._replica.view.generation, _number(self.get(GENERATION))
        return known is not None and there is not None and there < known.number

    def _bring_generation(self) -> None:
        """Writes the newest generation that this node knows, if the store has an older one, before the node counts."""
        known = self._replica.view.generation
        if known is None:
            return
        entry = self.get(GENERATION)
        if (there := _number(entry)) is not None and there < known.number:
            edit = EDIT, to_json(edit_between(None, known))
            self.replace(GENERATION, to_json(known), entry.revision if entry is not None else 0, edit)

    def _refuse_settings(self, found: Differences, revision: int) -> None:
        """Takes other settings than this node's for damage once it is in the job, and else for a refusal."""
        if self._replica.in_job:
            self._replica.damage("config", revision, f"it holds other settings: {found.theirs()}")
            return
        raise SettingsMismatch(
            f"job {self._entrant.job!r} runs with {found.theirs()}, this node was started with {found.ours()}: start "
            "it with the same values, or use another --rdzv-id"
        )

    def _nobody_is_here(self) -> bool:
        """Returns whether an earlier run of this name ended without a word, as when all its machines were lost."""
        entries, _ = self.range()
        if any(entry.key == self._prefix + "leader" for entry in entries):
            return False
        return not read_reports(self._prefix, entries).keys() - {self._entrant.node}

    def _claim_name(self) -> None:
        """Waits until the node's name is free: an agent that was killed frees it with its lease.

        Raises:
            SettingsMismatch: a live node has it. Two agents of one name would overwrite each other.
            ProtocolError: what stands there is no report.
        """
        pace, end_s = Pace.begin(self._clock()), self._clock() + 2 * self._entrant.lease_s
        while True:
            if self.lease.id is None:
                self._grant()
            with suppress(LeaseGone):  # then the next one may claim it
                self.told = self._mail.doc
                if self.store.create(self._own_key, to_json(self.told), self.lease.id):
                    self._is_present = True
                    return
            entry = self.store.get(self._own_key)
            if entry is not None and not read_reports(self._prefix, [entry]):
                raise ProtocolError(
                    f"{self._own_key} is taken, and is no report of a node: delete it with `etcdctl del "
                    f"{self._own_key}`, or give this node another --node-name"
                )
            if self._clock() > end_s:
                raise SettingsMismatch(
                    f"job {self._entrant.job!r} already has a live node named {self._entrant.node!r}: give this one "
                    "another --node-name"
                )
            if pace.is_due(self._clock()):
                what = f"the name {self._entrant.node} to be free: a node that has it may have been killed"
                self._tell_wait(what, end_s - self._clock())
            if not self._mail.wait_once(RETRY_S):
                raise StoreUnavailable("this node leaves")
            self._keep_or_drop_lease()

    # -- the lease ------------------------------------------------------------------------------------------------

    def plan_renewal(self) -> None:
        """Has the lease renewed after a third of its time."""
        self.lease.due_s = self._clock() + self._entrant.lease_s / 3

    def renew(self) -> bool:
        """Renews the lease; returns False where it had ended and the node has joined again with a new one."""
        begin_s, due_s = self._clock(), self.lease.due_s
        self.lease.due_s = begin_s + self._entrant.lease_s / 3
        if self.lease.id is None or self._keep_alive(self.lease.id):
            return True
        took_s = self._clock() - begin_s
        self.join_again(f"; renewing came {begin_s - due_s:.2f} s late, and took the store {took_s:.2f} s")
        return False

    def is_present(self) -> bool:
        """Gives the lease its full time again; returns whether there is one that had not ended."""
        return self.lease.id is not None and self._keep_alive(self.lease.id)

    def join_again(self, why: str = "") -> None:
        """Gets a new lease for the one that has ended, and writes the report under it."""
        self._lose_lease(why)
        self.write(self._mail.doc)

    def _grant(self) -> None:
        self.lease.renewed_s = self._clock()
        self.lease.id = self.store.grant(self._entrant.lease_s)

    def _keep_alive(self, lease: int) -> bool:
        begin_s, within_s = self._clock(), None
        if self._entrant.founds:  # once it has run out, the others may have gone over to another store
            within_s = max(LEAST_RENEWAL_S, self.lease.renewed_s + self._entrant.lease_s - begin_s)
        is_alive = self.store.keep_alive(lease, within_s)
        if is_alive:
            self.lease.renewed_s = begin_s
        return is_alive

    def _keep_or_drop_lease(self) -> None:
        """Keeps a lease that a short outage has left valid: then this node was never absent, and may still lead."""
        if self.lease.id is None or self._keep_alive(self.lease.id):
            return
        # A lease that had time left was lost with the store's data: then no node was missed.
        if self._is_present and self._clock() > self.lease.renewed_s + self._entrant.lease_s:
            self._tell_absent()
        self.lease.id = None

    def _lose_lease(self, why: str = "") -> None:
        """Notes that the lease has ended, and so this node was absent for the others: it leads no more."""
        self._tell_absent(why)
        self._replica.doubt_absences()  # what has ended this lease may have ended others
        self.lease.id = None
        self.leadership.leads = False
        self.leadership.is_due = True

    def _tell_absent(self, why: str = "") -> None:
        self._reporter.listener.absent(
            f"this node was absent for the others: its lease of {self._entrant.lease_s:g} s had ended, "
            f"renewed {self._clock() - self.lease.renewed_s:.2f} s before{why}; "
            "--rdzv-conf lease_ttl=SECONDS gives it more time"
        )

    # -- what this node writes of itself --------------------------------------------------------------------------

    def write(self, doc: NodeDoc) -> None:
        """Writes the node's report, under a new lease where the present one turns out to have ended."""
        for _ in range(2):
            if self.lease.id is None:
                self._grant()
            try:
                self.told = doc
                self._written_revision = self.store.put(self._own_key, to_json(doc), self.lease.id)
            except LeaseGone:
                self._lose_lease()
                continue
            self.written = doc
            self._write_figures()
            return
        raise StoreUnavailable(f"{self.store.endpoint}: a new lease was gone at once")

    def write_shown(self, name: str, document: bytes) -> None:
        """Writes what is only looked at. Nothing depends on it, so a store that refuses it costs a line."""
        try:
            self.put(name, document)
        except LeaseGone:
            pass  # the next one comes
        except StoreUnavailable:
            raise
        except LaunchError as error:
            self._reporter.tell_setback(error, f"the {name} of the job is not shown; training goes on")

    def note_report(self, revision: int) -> None:
        """Has the report written again if a change of it that was seen is not this node's own."""
        if revision > self._written_revision:
            self.written = None

    def check_report(self) -> None:
        """Notices that somebody else has changed this node's report, which only the leader's watch tells."""
        entry = self.store.get(self._own_key)
        if self.written is not None and (entry is None or entry.revision != self._written_revision):
            what = "deleted" if entry is None else "overwritten"
            self._reporter.warn(f"{self._own_key} was {what} by somebody else; this node writes it again")
            self.written = None

    def _write_figures(self) -> None:
        """Writes what the node's check has shown, once for each lease."""
        if self._entrant.figures and self.lease.figures_id != self.lease.id:
            with suppress(LeaseGone):  # then they come with the next lease
                self.put(f"checks/{self._entrant.node}", self._entrant.figures)
                self.lease.figures_id = self.lease.id


def _number(entry: Entry | None) -> int | None:
    """Returns the number of a generation as it stands in the store, 0 where there is none; None: it cannot be read."""
    try:
        return from_json(Generation, entry.value).number if entry is not None else 0
    except ProtocolError:
        return None  # it is told when it is read
