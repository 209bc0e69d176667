"""What a node does because it leads, or because it may have to: it campaigns, applies the leader's rule, and writes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf

from elaunch.errors import ElaunchError
from elaunch.rendezvous.cluster.standings import AT_ONCE
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.decide import decide, to_leave
from elaunch.rendezvous.intake import read_name, read_reports
from elaunch.rendezvous.membership import Generation, JobSize, Result
from elaunch.rendezvous.node.replica import Duty, Replica
from elaunch.rendezvous.node.reporter import Reporter
from elaunch.rendezvous.node.requests import Requests
from elaunch.rendezvous.node.session import EDIT, GENERATION, RESULT_TTL_S, Session
from elaunch.rendezvous.node.waiting import waiting_text
from elaunch.rendezvous.rules import deadlock, quorum
from elaunch.rendezvous.rules.edit import edit_between
from elaunch.rendezvous.rules.founding import Absent, absent_agents
from elaunch.rendezvous.rules.spares import HeldSpares, all_spares
from elaunch.rendezvous.store import Entry, LeaseGone, WatchEvent
from elaunch.rendezvous.view import MembershipSettings, View

PROBE_S = 0.5
ASK_S = 0.5
FOLDERS_OF_LEADER = ("nodes/", "requests/", "left/", GENERATION)
"""What only the leader watches."""


@dataclass(slots=True)
class Wait:
    """What the leader's rule waits for.

    Attributes:
        reason: as it says.
        until_s: when it decides otherwise, whatever happens; None: only a change ends it.
        nodes: those that were named when other nodes were last told of it.
    """

    reason: str = ""
    until_s: float | None = None
    nodes: set[str] = field(default_factory=set)


class Leader:
    """Takes the job's documents as they change, and does what this node owes in answer while it leads.

    Args:
        session: reads and writes.
        replica: of the documents.
        requests: to other nodes.
        settings: of the job, as it was started.
        node: name of this node.
        reporter: for lines to the user.
        clock: in seconds.
        look_for_better: asks the nodes without which this store has too few of the job's.
    """

    def __init__(
        self,
        session: Session,
        replica: Replica,
        requests: Requests,
        settings: MembershipSettings,
        node: str,
        reporter: Reporter,
        clock: Callable[[], float],
        look_for_better: Callable[[Mapping[str, str]], None] = lambda seats: None,
    ) -> None:
        self._session = session
        self._replica = replica
        self._requests = requests
        self._settings = settings
        self._node = node
        self._reporter = reporter
        self._clock = clock
        self._look_for_better = look_for_better
        self._asked_s = -inf
        self._ask_next = 0
        self._wait = Wait()
        self._has_shown_damage = False
        self._decided_by: tuple[View | None, JobSize | None, tuple[str, ...]] = (None, None, ())
        self._wake_s = 0.0  # when to apply the rule next at the latest
        self._spares: tuple[str, ...] | None = None  # as this leader has written them; None: not yet
        self._absent: frozenset[str] | None = None  # the same

    @property
    def leads(self) -> bool:
        """Returns whether this node leads."""
        return self._session.leadership.leads

    @property
    def due_s(self) -> float:
        """Returns when the rule is to be applied next at the latest; infinite while this node does not lead."""
        return self._wake_s if self.leads else inf

    # -- documents ------------------------------------------------------------------------------------------------

    def follow(self, entries: list[Entry], revision: int) -> None:
        """Takes what every node follows as it stands on a new connection, watches it, and leads if nobody else does."""
        self._read(entries, revision, (GENERATION, *self._session.followed))
        leader = next((entry for entry in entries if entry.key == self._replica.prefix + "leader"), None)
        self._session.watch(self._session.followed, revision + 1)
        if leader is None:
            self._campaign()
        elif leader.value == self._node.encode():
            self._begin_to_lead()
        elif "leader" not in self._replica.intake.damaged:
            name = read_name(leader.value)
            if self._session.get(f"nodes/{name}") is None:
                self._replica.damage("leader", leader.revision, _no_node_text(name))

    def take(self, events: Iterable[WatchEvent]) -> None:
        """Takes changes of documents. One that meets a defect is passed over: training goes on."""
        for event in events:
            try:
                duty = self._replica.take(event)
                if duty is not None:
                    self._answer(duty, event)
            except ElaunchError:
                raise
            except Exception as error:
                if not self._replica.in_job:
                    raise
                self._reporter.tell_setback(error, f"what {event.key} holds is passed over; training goes on")

    def check_damaged(self) -> None:
        """Looks again at damaged documents of which no watch of this node tells when they are in order."""
        for name in list(self._replica.intake.damaged):
            if name == "config":
                self._session.enter_job()
            elif name.startswith(("nodes/", GENERATION)) and not self._watches_all():
                entry = self._session.get(name)
                if entry is not None:
                    self.take([entry.as_event()])
                elif name == GENERATION:
                    self._replica.accept(name)
                else:
                    self._replica.forget_node(name.removeprefix("nodes/"))

    def _read(self, entries: list[Entry], revision: int, names: tuple[str, ...] = ("",)) -> None:
        """Takes documents of the job as they stand at a revision: those whose names begin so, by default all."""
        self._replica.begin_reading()
        # The size first: by it this node knows whether a generation has a place for it.
        entries = sorted(entries, key=lambda entry: entry.key != self._replica.prefix + "size")
        self.take([entry.as_event() for entry in entries])
        found = {entry.key.removeprefix(self._replica.prefix) for entry in entries}
        self._replica.end_reading(found, revision, names)

    def _watches_all(self) -> bool:
        return self._session.watches(FOLDERS_OF_LEADER)

    def _answer(self, duty: Duty, event: WatchEvent) -> None:
        """Does what an event calls for."""
        match duty:
            case Duty.GENERATION_UNKNOWN:
                entry = self._session.get(GENERATION)
                if entry is not None:
                    self.take([entry.as_event()])
            case Duty.OWN_REPORT:
                self._session.note_report(event.revision)
            case Duty.GENERATION_DELETED:
                if self.leads and self._result_is_open():
                    self._reporter.warn(
                        f"{event.key} was deleted by somebody else; this node, which leads, writes it again"
                    )
                    self._put_last_generation()
            case Duty.SETTINGS_WRITTEN:
                self._session.note_settings(event.revision)
            case Duty.SIZE_ASKED:
                if self.leads:
                    self._put_size()
            case Duty.SIZE_DELETED:
                if self.leads and self._replica.size is not None and self._result_is_open():
                    self._put_size()
            case Duty.LEADER_DELETED:
                self._session.leadership.is_due = True
            case Duty.LEADER_WRITTEN:
                if self.leads and self._replica.leader != self._node:
                    self._defend(event.revision)

    # -- campaigning ----------------------------------------------------------------------------------------------

    def replace_dead_leader(self) -> None:
        """Leads in the leader's stead if its agent is dead, before its lease has run out."""
        entry = self._session.get("leader")
        if entry is None or "leader" in self._replica.intake.damaged:
            return
        leader = self._replica.read("leader", entry.revision, read_name, entry.value)
        if leader is None or leader == self._node:
            return
        report = self._session.get(f"nodes/{leader}")
        doc = read_reports(self._replica.prefix, [report]).get(leader) if report is not None else None
        if doc is not None and nobody_listens(doc.liveness_address) and self._take_key(entry.revision):
            self._begin_to_lead()

    def _campaign(self) -> None:
        """Leads if nobody else does."""
        try:
            is_created = self._session.create("leader", self._node.encode(), self._session.lease.id)
        except LeaseGone:
            self._session.join_again()  # this node heard that nobody leads before it was to renew its lease
            return
        if is_created:
            self._begin_to_lead()

    def _defend(self, revision: int) -> None:
        """Gives way to the node that has taken the lead at a revision, or takes the key back from a stranger."""
        other = self._replica.leader
        if other is not None:
            if self._session.get(f"nodes/{other}") is not None:
                self._session.leadership.leads = False
                return
            self._replica.damage("leader", revision, _no_node_text(other))
        if self._session.is_present():
            self._take_key(revision)
        else:
            self._session.join_again()

    def _take_key(self, revision: int) -> bool:
        """Exchanges the leader's key, as it was at a revision, for one of this node and bound to its lease."""
        # Whoever wins the exchange has the key to itself; then the key goes over to the winner's own lease.
        if not self._session.replace("leader", self._node.encode(), revision):
            return False
        try:
            self._session.put("leader", self._node.encode())
        except LeaseGone:
            self._session.join_again()  # and the key goes with the lease that it was bound to
            return False
        return True

    def _begin_to_lead(self) -> None:
        entries, revision = self._session.range()
        self._read(entries, revision)
        if not self._watches_all():
            self._session.watch(FOLDERS_OF_LEADER, revision + 1)
        self._replica.begin_to_lead()
        self._requests.begin_to_lead()
        self._session.leadership.leads = True
        self._spares = self._absent = None
        if not self._replica.generation_revision and self._replica.view.result is None:
            # The store has lost its data. Nodes that join now must hear of the generation that the others are in.
            self._put_last_generation()
        if "size" not in self._replica.intake.damaged:
            self._put_size()
        self.lead()

    # -- leading --------------------------------------------------------------------------------------------------

    def turn(self, has_news: bool) -> None:
        """Leads if nobody else may be leading, and applies the rule if there are news or it is time to."""
        if self._session.leadership.is_due:
            self._session.leadership.is_due = False
            self._session.lease.due_s = self._clock()  # what has ended the leader's lease may have ended this node's
            self._campaign()
        if self.leads and (self._clock() >= self._wake_s or (has_news and not self._is_decided())):
            self.lead()

    def lead(self) -> None:
        """Applies the leader's rule, and writes what it says."""
        self._apply_rule()
        self._decided_by = self._replica.view, self._replica.size, tuple(self._replica.intake.damaged)

    def _is_decided(self) -> bool:
        """Returns whether what is known is still what the rule was applied to: much news is an echo of own writes."""
        view, size, damaged = self._decided_by
        replica = self._replica
        return replica.view is view and replica.size == size and tuple(replica.intake.damaged) == damaged

    def _apply_rule(self) -> None:
        if self._node not in self._replica.nodes:
            # Its lease has ended: it decides nothing about a job that it is not in. Writing its report shows it.
            self._session.written = None
            self._wake_s = self._clock() + 1.0
            return
        damaged = self._replica.intake.damaged
        if (GENERATION in damaged) != self._has_shown_damage:
            self._show_damage()
        if damaged:
            self._wait.reason, self._wait.until_s = f"damaged in the store: {', '.join(damaged)}", None
            self._wake_s = self._clock() + 1.0
            return
        settings = self._settings_now()
        decision = decide(self._replica.view, self._clock(), settings)
        self._wait.reason, self._wait.until_s = decision.reason, decision.wake_s
        self._wake_s = decision.wake_s if decision.wake_s is not None else self._clock() + 1.0
        self._replica.note_pending(decision.pending)
        self._requests.drain(to_leave(self._replica.view, settings, self._requests.told_to_drain, decision))
        if decision.generation is not None and self._put_generation(decision.generation):
            self._wake_s = self._clock()
        elif (settled := quorum.settle(self._replica.view)) is not None:
            self._put_generation(settled)
        if settings.spares:
            self._put_spares(all_spares(self._replica.view, settings))
        self._requests.end_deadlock(deadlock.find(self._replica.view))
        self._put_absent(decision.asks)
        if decision.asks and self._clock() >= self._asked_s + ASK_S:
            self._ask(decision.asks)
        if decision.result is not None:
            self._end_job(decision.result)

    def _put_absent(self, missing: Sequence[str]) -> None:
        """Tells all nodes which of those that are missing are not in this store."""
        absent = absent_agents(self._replica.view, missing)
        is_known = self._absent is None and not absent and not self._replica.absent
        if absent != self._absent and not is_known:
            with suppress(LeaseGone):  # then another node leads by now, and tells them
                self._session.put("absent", to_json(Absent(tuple(sorted(absent)))))
                self._absent = absent

    def _ask(self, nodes: Sequence[str]) -> None:
        """Asks nodes that are missing whether they have gone on elsewhere, or have ended."""
        view = self._replica.view
        assert view.generation is not None
        seats = dict((*view.generation.former_seats, *view.generation.seats))
        begin = self._ask_next % len(nodes)
        turn = (*nodes[begin:], *nodes[:begin])[:AT_ONCE]  # silence takes time, in which nothing else is done
        self._ask_next += len(turn)
        self._look_for_better({node: seats[node] for node in turn})
        self._asked_s = self._clock()
        if self._replica.view.ended != view.ended:
            self._wake_s = self._asked_s

    def _show_damage(self) -> None:
        """Has all nodes read the generation, which only this one watches: it is damaged, or in order again."""
        newest = self._replica.view.generation
        with suppress(LeaseGone):  # then another node leads by now
            if newest is not None:
                self._session.put(EDIT, to_json(edit_between(None, newest)))
            self._has_shown_damage = not self._has_shown_damage

    def tell_waiting(self, has_told: bool, is_due: Callable[[], bool]) -> None:
        """Tells the user what the rule waits for when that is due; other nodes read it in the store.

        Args:
            has_told: whether nodes were told of this wait before.
            is_due: returns whether a line is due; asked once.
        """
        if has_told and self._replica.nodes.keys() != self._wait.nodes:
            self._put_waiting_text()  # for the next time that another node looks
        if is_due():
            self._reporter.listener.waits(self._put_waiting_text())

    def _settings_now(self) -> MembershipSettings:
        """Returns the settings, with the size that was asked for."""
        size = self._replica.size
        if size is None:
            return self._settings
        return replace(self._settings, min_nodes=size.min_nodes, max_nodes=size.max_nodes)

    def _put_waiting_text(self) -> str:
        self._wait.nodes = set(self._replica.nodes)
        left_s = None if self._wait.until_s is None else self._wait.until_s - self._clock()
        text = waiting_text(self._replica.view, self._wait.reason, self._settings_now().min_nodes, left_s)
        with suppress(LeaseGone):  # then another node leads by now
            self._session.put("waiting", text.encode())
        return text

    def _put_size(self) -> None:
        if self._replica.size is not None:
            with suppress(LeaseGone):  # then another node leads by now, and puts it
                self._session.put("size", to_json(self._replica.size))

    def _put_spares(self, nodes: tuple[str, ...]) -> None:
        if nodes != self._spares:
            with suppress(LeaseGone):  # then another node leads by now, and puts them
                self._session.put("spares", to_json(HeldSpares(nodes)))
                self._spares = nodes

    def _put_last_generation(self) -> None:
        if self._replica.view.generation is not None:
            self._put_generation(self._replica.view.generation)

    def _put_generation(self, generation: Generation) -> bool:
        """Exchanges the generation, unless it has changed since it was seen last; returns whether it did."""
        edit = to_json(edit_between(self._replica.view.generation, generation))
        revision = self._replica.generation_revision
        is_written = self._session.replace(GENERATION, to_json(generation), revision, (EDIT, edit))
        if is_written:
            # The watch will say so too; until then the rule must not see the old generation again.
            entry = self._session.get(GENERATION)
            if entry is not None:
                self.take([entry.as_event()])
        return is_written

    def _result_is_open(self) -> bool:
        return self._replica.view.result is None and self._session.get("result") is None

    def _end_job(self, result: Result) -> None:
        """Writes the result, which turns late nodes away for a while; then the job's name is free again."""
        if self._session.create("result", to_json(result), self._session.store.grant(RESULT_TTL_S)):
            self._replica.note_result(result)  # what is deleted now is not put back
            for name in (GENERATION, EDIT, "config", "size", *(("spares",) if self._settings.spares else ())):
                self._session.delete(name)


def _no_node_text(name: str) -> str:
    return f"it names {name}, which is no node of this job"


def nobody_listens(address: str) -> bool:
    """Returns whether the machine of this address answers, and says that nobody listens there."""
    host, _, port = address.rpartition(":")
    if not host:
        return False
    try:
        socket.create_connection((host, int(port)), PROBE_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, OverflowError):
        return False
    return False
