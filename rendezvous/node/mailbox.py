"""What other threads leave for the participant: the agent its newest report and wishes, the store's watches events."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.membership import DrainRequest, NodeDoc
from elaunch.rendezvous.store import WatchEvent

News = list[WatchEvent] | StoreUnavailable
"""What a watch delivers: events, or at last why it has ended."""


@dataclass(frozen=True, slots=True)
class Mail:
    """What was there when the mailbox was emptied.

    Attributes:
        news: what the watches have delivered, in order.
        doc: the node's newest report.
        shown: documents that are only looked at, such as the profile, by name: those that are new.
        drain_all: the request that all nodes leave; it stands until `Mailbox.drained_all`.
        awaited: the worker for whose end to look from now on; empty: for none; None: nothing new.
    """

    news: tuple[News, ...]
    doc: NodeDoc
    shown: Mapping[str, bytes]
    drain_all: DrainRequest | None
    awaited: str | None


class Mailbox:
    """Holds what is to be done until the thread comes for it, and wakes the thread.

    Args:
        doc: the first report.
    """

    def __init__(self, doc: NodeDoc) -> None:
        self._wake = threading.Condition()
        self._news: deque[News] = deque()
        self._doc = doc
        self._shown: dict[str, bytes] = {}
        self._drain_all: DrainRequest | None = None
        self._awaited: str | None = None
        self._suspects_leader = False
        self._is_stopping = False
        self._waits_for_others = False
        self._late_s = 0.0

    @property
    def doc(self) -> NodeDoc:
        """Returns the node's newest report."""
        return self._doc

    @property
    def is_stopping(self) -> bool:
        """Returns whether the node is to leave the job."""
        return self._is_stopping

    @property
    def waits_for_others(self) -> bool:
        """Returns whether the node, when it leaves, waits until all other nodes have left."""
        return self._waits_for_others

    @property
    def late_s(self) -> float:
        """Returns for how long such a node stays in any case, in seconds, so that nodes that come late hear the end."""
        return self._late_s

    # -- for other threads ----------------------------------------------------------------------------------------

    def deliver(self, item: News) -> None:
        """Adds what a watch has brought."""
        with self._wake:
            self._news.append(item)
            self._wake.notify()

    def publish(self, doc: NodeDoc) -> None:
        """Replaces the node's report; the same one again, as an agent that looks at its workers has, is nothing."""
        with self._wake:
            if doc != self._doc:
                self._doc = doc
                self._wake.notify()

    def show(self, name: str, document: bytes) -> None:
        """Leaves a document to be written; a newer one replaces one that was not written yet."""
        with self._wake:
            self._shown[name] = document
            self._wake.notify()

    def drain_all(self, request: DrainRequest) -> None:
        """Leaves the request that all nodes leave the job."""
        with self._wake:
            self._drain_all = request
            self._wake.notify()

    def await_end(self, worker: str) -> None:
        """Asks the thread to look for the end of this worker, and of no other; empty: of none."""
        with self._wake:
            self._awaited = worker
            self._wake.notify()

    def suspect_leader(self) -> None:
        """Asks the thread to look whether the leading node is dead."""
        with self._wake:
            self._suspects_leader = True
            self._wake.notify()

    def stop(self, wait_for_others: bool = False, late_s: float = 0.0) -> None:
        """Ends the thread's loop."""
        with self._wake:
            self._late_s = max(self._late_s, late_s)
            self._is_stopping = True
            self._waits_for_others = self._waits_for_others or wait_for_others
            self._wake.notify()

    def hurry(self) -> None:
        """Has the node stay for no node that may still come."""
        with self._wake:
            self._late_s = 0.0

    # -- for the participant's thread -----------------------------------------------------------------------------

    def collect(self, written: NodeDoc | None, wait_s: Callable[[], float]) -> Mail:
        """Waits until there is something to do, and empties the box.

        Args:
            written: the report as it stands in the store; news in the one in the box are something to do.
            wait_s: how long to wait at most, in seconds; asked only where there is nothing to do yet.
        """
        with self._wake:
            is_asked = self._drain_all is not None or self._awaited is not None
            has_wishes = self._shown or is_asked or self._suspects_leader
            is_busy = self._news or self._is_stopping or has_wishes
            if not is_busy and not is_news(self._doc, written):
                self._wake.wait(wait_s())
            mail = Mail(tuple(self._news), self._doc, self._shown, self._drain_all, self._awaited)
            self._news.clear()
            self._shown, self._awaited = {}, None
        return mail

    def drained_all(self, request: DrainRequest) -> None:
        """Drops the request that all nodes leave, once all were asked; a newer one stays."""
        with self._wake:
            self._drain_all = None if self._drain_all is request else self._drain_all

    def take_suspicion(self) -> bool:
        """Returns whether the leading node was suspected since the last call."""
        with self._wake:
            suspects, self._suspects_leader = self._suspects_leader, False
        return suspects

    def wait_once(self, longest_s: float) -> bool:
        """Waits until anything comes, at most so many seconds; returns False, at once, where the node is to leave."""
        with self._wake:
            if self._is_stopping:
                return False
            self._wake.wait(longest_s)
        return True

    def pause(self, end_s: float, clock: Callable[[], float]) -> None:
        """Waits until a time of the clock, whatever comes; only `stop` ends this early."""
        with self._wake:
            while not self._is_stopping and (left_s := end_s - clock()) > 0:
                self._wake.wait(left_s)

    def discard_news(self) -> None:
        """Forgets what the watches of a connection that was lost have delivered."""
        with self._wake:
            self._news.clear()


def is_news(doc: NodeDoc, written: NodeDoc | None) -> bool:
    """Returns whether a report is to be written at once. That a generation was heard of can wait: all heard of it."""
    if written is None or doc is written:
        return written is None
    return replace(doc, progress=replace(doc.progress, generation=written.progress.generation)) != written
