"""What this node asks other nodes to do: to leave the job, or to end a deadlock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.intake import read_reports
from elaunch.rendezvous.membership import Deadlock, DrainRequest, node_of
from elaunch.rendezvous.node.replica import Replica
from elaunch.rendezvous.node.session import Session
from elaunch.rendezvous.store import LeaseGone


class Requests:
    """Puts each request once, bound to this node's lease, and withdraws it when it no longer holds.

    Args:
        session: writes the requests.
        replica: knows the members.

    Attributes:
        told_to_drain: nodes that were asked to leave, and have not begun to.
    """

    def __init__(self, session: Session, replica: Replica) -> None:
        self._session = session
        self._replica = replica
        self.told_to_drain: frozenset[str] = frozenset()
        self._told_deadlock: Deadlock | None = None

    def begin_to_lead(self) -> None:
        """Has a deadlock that another leader may have told of told again."""
        self._told_deadlock = None

    def drain_all(self, request: DrainRequest) -> None:
        """Asks all nodes that are here, and those of all members, to leave the job at a step boundary."""
        entries, _ = self._session.range("nodes/")
        generation = self._replica.view.generation
        members = () if generation is None else generation.nodes
        for node in dict.fromkeys([*read_reports(self._replica.prefix, entries), *members]):
            self._ask("drain", node, request)

    def drain(self, nodes: Mapping[str, str]) -> None:
        """Asks these nodes to leave, each once, and no longer those that were asked before; says why."""
        for node, reason in nodes.items():
            if node not in self.told_to_drain:
                self._ask("drain", node, DrainRequest(reason, time.time()))
        for node in self.told_to_drain.difference(nodes):
            self._session.delete(f"requests/drain/{node}")  # its name is free for a later one
        self.told_to_drain = frozenset(nodes)

    def end_deadlock(self, found: Deadlock | None) -> None:
        """Asks the victim's node to take it out, as long as there is a deadlock; None: there is none."""
        told = self._told_deadlock
        if found == told:
            return
        if told is not None:
            self._session.delete(f"requests/deadlock/{node_of(told.worker)}")
        if found is not None:
            self._ask("deadlock", node_of(found.worker), found)
        self._told_deadlock = found

    def _ask(self, what: str, node: str, request: DrainRequest | Deadlock) -> None:
        with suppress(LeaseGone):  # then this node was absent itself; who leads by then asks again
            self._session.put(f"requests/{what}/{node}", to_json(request))
