"""One connection to one peer: frames out, frames in.

A link is driven by whoever runs the operation (`drive`); nothing in it blocks. Between operations it remembers at most
three things: the rest of a frame that was partly sent, the rest of a body that nobody wants any more, and the header of
a frame whose operation has not been posted yet (*parked*; its body stays in the kernel, which holds the sender back).
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf

from elaunch.errors import GenerationChanged, LinkLost
from elaunch.workers.comm.connection import HANG_UP, Connection
from elaunch.workers.comm.incoming import Destination, Incoming
from elaunch.workers.comm.outgoing import Outgoing
from elaunch.workers.comm.wire import Ack

__all__ = ["Destination", "Entering", "Floors", "Link", "LinkBeside"]

BEFORE_ALL = -1
"""An operation that comes before all that a peer sends of a generation."""


class Link(Connection):
    """A connection that carries frames.

    `post_send` and `post_receive` say what an operation needs, `advance` moves what can be moved now, and `finish`
    follows however the operation ended. All but `finish` raise `LinkLost` when the connection is broken. `advance`
    raises `GenerationChanged` when the peer, which still owes a part, has gone on to a newer generation.

    Between `open` and `settle` an operation is open: parts that nobody has posted yet are accepted as well.

    Args:
        peer: whose it is.
        sock: connected.
        timeout_s: how long nothing may come on it, not even an acknowledgement, before `check` takes it for broken.
        shown: the newest generation of which the end that dialled knew then.
    """

    def __init__(self, peer: str, sock: socket.socket, timeout_s: float = inf, shown: int = 0) -> None:
        super().__init__(peer, sock, timeout_s)
        self.shown = shown
        self._outgoing = Outgoing(self)
        self._incoming = Incoming(self, self._outgoing)

    def open(self, generation: int, op: int, arrived: Callable[[int], None]) -> None:
        """Begins an open operation: the link is read from now on. `arrived` gets the number of each complete part."""
        self.ensure_works()
        self._incoming.open(generation, op, arrived)

    def settle(self) -> None:
        """Nothing more will be posted: the open operation ends like any other, with the last part posted until now."""
        self.ensure_works()
        self._incoming.settle()

    def post_send(
        self,
        generation: int,
        op: int,
        part: int,
        body: memoryview,
        left: Callable[[], None] | None = None,
        may_offer: bool = False,
    ) -> None:
        """Queues `body`, cut into frames, and calls `left` when the kernel has all of it.

        The caller leaves it unchanged until then, or until the operation has ended. With `may_offer` a peer on this
        machine may read it where it is, and `left` is called when it has: the caller waits for the peer.
        """
        self.ensure_works()
        if self._outgoing.post(generation, op, part, body, left, may_offer):
            self._incoming.expect_answers(generation, op)

    def post_receive(self, generation: int, op: int, part: int, destination: Destination) -> None:
        """Says where the bytes of this part go when they come."""
        self.ensure_works()
        self._incoming.post(generation, op, part, destination)

    def tell_entered(self, generation: int, left: Callable[[], None]) -> None:
        """Tells the peer that this worker has entered a generation; calls `left` when the kernel has it."""
        self.ensure_works()
        self._outgoing.tell_entered(generation, left)

    @property
    def receiving(self) -> bool:
        """Whether a part that was posted has not come yet."""
        return bool(self._incoming.wanted)

    @property
    def sending(self) -> bool:
        """Whether something of this operation waits to leave, or is being read by the peer."""
        return self._outgoing.awaits_answer or self._outgoing.events() != 0

    def wants(self) -> int:
        """The poll events that let this link go on; 0 when its share of the operation is done."""
        return self._incoming.events() | self._outgoing.events()

    def advance(self, events: int = 0) -> None:
        """Moves what the socket takes and gives now. `events` is what poll reported; 0 when it was not asked."""
        self.push()
        awaits = self._incoming.pull()
        if not awaits and events & HANG_UP and self.wants():
            raise self.fail("closed by the peer")
        while awaits and self.has_pending:
            awaits = self._incoming.pull()
        self.push()  # what has come may have been an offer, and somebody waits for the answer

    def push(self) -> None:
        """Moves out what the socket takes now."""
        self.ensure_works()
        self._outgoing.push()

    def finish(self) -> None:
        """Forgets the operation, keeping what the peer must still get and what it must still be relieved of."""
        self._outgoing.finish()
        self._incoming.finish()


class LinkBeside:
    """A link beside those of an operation, on the way into a generation: see `Transport.entering`.

    It tells its peer of the generation, and takes what the peer still sends for older ones, which keeps that in its own
    operation. Nobody waits for it, so that it breaks is no matter either.

    Args:
        link: the link.
        generation: that is entered.
        told: called when the peer has been told; None: it has been.
    """

    def __init__(self, link: Link, generation: int, told: Callable[[], None] | None) -> None:
        self.peer, self.socket = link.peer, link.socket
        self._link = link
        with contextlib.suppress(LinkLost):
            link.open(generation, BEFORE_ALL, lambda part: None)
            if told is not None:
                link.tell_entered(generation, told)

    def advance(self, events: int = 0) -> None:
        """Moves what the socket takes and gives now."""
        with contextlib.suppress(LinkLost):
            self._link.advance(events)

    def wants(self) -> int:
        """Returns the poll events that let it go on; 0 when there is nothing to tell and to take any more."""
        return self._link.wants() if self._link.broken is None else 0

    def check(self) -> None:
        """Does nothing."""

    def finish(self) -> None:
        """Leaves the link to the next operation."""
        self._link.finish()


NEVER = 1 << 62
"""The floor of a worker that leaves the job: above every generation's number."""


@dataclass
class Floors:
    """The generations below which workers take part in nothing any more, and what this one knows of others.

    Attributes:
        own: this worker's.
        peers: of those that have said so when they were dialled.
        heard: the newest generation that this worker knows of.
        settled: the newest in which a step has committed here. All its members have heard of it, and whoever joins
            later of a newer one; so nobody who has only heard of older ones is a member.
    """

    own: int = 0
    heard: int = 0
    settled: int = 0
    peers: dict[str, int] = field(default_factory=dict)

    def heed(self, ack: Ack, shown: int) -> bool:
        """Takes in what a peer has answered to a proof of a generation.

        Args:
            ack: the answer.
            shown: the generation.

        Returns:
            Whether the peer makes a link; if not, it will for a proof of what this worker has heard of by now.

        Raises:
            GenerationChanged: it will not: this worker has not heard of a generation that its links need.
        """
        self.peers[ack.worker] = max(ack.generation, ack.settled)
        if self.heard < ack.settled:
            raise GenerationChanged(ack.settled)
        return shown >= ack.settled


class Entering:
    """The way into a generation, of which all peers with a link are told: see `Transport.entering`.

    Args:
        generation: that is entered; 0: none is.
        links: that there are.

    Attributes:
        generation: see above.
        untold: links whose peers have not been told yet.
    """

    def __init__(self, generation: int = 0, links: Iterable[Link] = ()) -> None:
        self.generation, self.untold = generation, dict.fromkeys(links)

    def tell_over(self, links: Iterable[Link]) -> None:
        """Tells those peers among some that have not been told, over the links that an operation uses."""
        for link in [link for link in links if link in self.untold]:
            link.tell_entered(self.generation, partial(self.untold.pop, link, None))

    def beside(self, links: Iterable[Link]) -> dict[Link, LinkBeside]:
        """Returns the links that work of some others, which tell their peers beside an operation."""
        return {
            link: LinkBeside(
                link, self.generation, partial(self.untold.pop, link, None) if link in self.untold else None
            )
            for link in links
            if link.broken is None
        }
