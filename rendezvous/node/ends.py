"""Finds out when a worker of another node has ended. Only the leader watches what nodes report, so this asks for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from math import inf

from elaunch.errors import ProtocolError
from elaunch.rendezvous.intake import read_node
from elaunch.rendezvous.membership import NodeDoc, WorkerState, node_of
from elaunch.rendezvous.node.leader import nobody_listens
from elaunch.rendezvous.node.reporter import MembershipListener
from elaunch.rendezvous.node.session import Session

PAUSES_S = (0.01, 0.5)
"""Between two looks at first and later; each pause is half as long again as the one before."""


class WorkerEnds:
    """Reads the report of a node until a worker is not in it, or has finished.

    Args:
        session: with the store.
        listener: told of the end.
        clock: in seconds.

    Attributes:
        due_s: when there is something to do, by the clock.
    """

    def __init__(self, session: Session, listener: MembershipListener, clock: Callable[[], float]) -> None:
        self._session = session
        self._listener = listener
        self._clock = clock
        self._worker = ""
        self._pause_s = 0.0
        self.due_s = inf

    def await_end(self, worker: str) -> None:
        """Looks for the end of this worker from now on, and of no other; empty: of none."""
        self._worker, self._pause_s = worker, PAUSES_S[0]
        self.due_s = self._clock() if worker else inf

    def turn(self) -> None:
        """Looks, if that is due. An agent that is gone tells nobody any more what is in its log."""
        if self._clock() < self.due_s:
            return
        node = node_of(self._worker)
        entry = self._session.get(f"nodes/{node}")
        doc: NodeDoc | None = None
        if entry is not None:
            with suppress(ProtocolError):  # whoever has damaged it, the node writes it again
                doc = read_node(node, entry.value, entry.created)
            # One that has finished is listed even after its end, and reports nothing more.
            is_listed = doc is None or any(
                worker.id == self._worker and worker.state is not WorkerState.DONE for worker in doc.workers
            )
            if is_listed and not (doc is not None and nobody_listens(doc.liveness_address)):
                self.due_s = self._clock() + self._pause_s
                self._pause_s = min(1.5 * self._pause_s, PAUSES_S[1])
                return
        self.due_s = inf
        self._listener.worker_ended(self._worker, doc.progress.logged if doc is not None else 0)
