"""How the participant's thread tells its agent what is new."""

from __future__ import annotations

import traceback
from typing import Protocol

from elaunch.errors import ElaunchError
from elaunch.rendezvous.cluster.servers import EtcdServers
from elaunch.rendezvous.membership import Deadlock, DrainRequest, Generation, JobConfig, Result
from elaunch.rendezvous.node.setbacks import Setbacks


class MembershipListener(Protocol):
    """What the agent wants to hear. Called from the participant's thread; must return at once."""

    def joined(self, config: JobConfig) -> None:
        """Takes what the job is agreed to be, once this node belongs to it."""

    def announced(self, generation: Generation) -> None:
        """Takes a new generation, admitting or training, that this node has to act on."""

    def resized(self, min_nodes: int, max_nodes: int) -> None:
        """Takes the new limits of the number of nodes, set while the job runs."""

    def spared(self, nodes: tuple[str, ...]) -> None:
        """Takes which nodes are to hold workers ready, although the job has no place for them."""

    def drains(self, request: DrainRequest) -> None:
        """Takes a request that this node leave the job."""

    def deadlocked(self, found: Deadlock) -> None:
        """Takes a deadlock in which a worker of this node is to be killed."""

    def served(self, servers: EtcdServers) -> None:
        """Takes which nodes serve the store."""

    def ended(self, result: Result) -> None:
        """Takes the result of the job."""

    def worker_ended(self, worker: str, logged: int) -> None:
        """Learns that a worker of another node whose end was awaited has ended; so many steps are in that node's log.

        0: it has none, or the node is gone.
        """

    def waits(self, text: str) -> None:
        """Takes a line that says what the job, or this node, waits for."""

    def outage(self, why: str) -> None:
        """Learns that the store is away, and why. Training goes on."""

    def back(self, away_s: float) -> None:
        """Learns that the store is back after `away_s` seconds."""

    def hindered(self, why: str) -> None:
        """Learns why no change of the members can be agreed on at present; empty: now it can. The user knows it."""

    def absent(self, text: str) -> None:
        """Takes a line that says that this node had dropped out of the job without its doing."""

    def warns(self, text: str) -> None:
        """Takes a line about something that failed and does not end this node."""

    def refused(self, error: ElaunchError) -> None:
        """Learns that this node cannot take part, and why; the participant has ended."""


class Reporter:
    """Gives the parts of a participant their listener, and tells the user of what goes wrong without failing itself.

    Args:
        listener: the agent's.
        setbacks: says which failures were told already.
    """

    def __init__(self, listener: MembershipListener, setbacks: Setbacks) -> None:
        self.listener = listener
        self._setbacks = setbacks

    def warn(self, text: str) -> None:
        """Tells the user; an empty text says that there is nothing new."""
        if text:
            try:
                self.listener.warns(text)
            except Exception:  # it is told on the way out of another error, and must not be one
                traceback.print_exc()

    def tell_setback(self, error: Exception, then: str) -> None:
        """Tells the user, once, what has failed and what happens now; shows where, if it is a defect."""
        is_defect = not isinstance(error, ElaunchError)
        text = f"a defect in the rendezvous of this node: {error!r}" if is_defect else str(error)
        if self._setbacks.is_new(text):
            if is_defect:
                traceback.print_exception(error)
            self.warn(f"{text}; {then}")
