"""Long transfers over a link: one message after the other, each made when its turn comes.

    def outgoing():                    def incoming():
        for part in parts:                 for part in parts:
            pack(part, buffer)                 yield memoryview(buffer)     # resumed when it is full
            yield memoryview(buffer)           unpack(buffer, part)
            # resumed when it has left

At any moment a link has one message of each direction under way, so what a transfer needs beside the data itself is two
buffers a link. A receiver that is behind does not read, and the kernel holds the sender back. On one machine the
receiver reads a message where the sender has it (`elaunch.workers.comm.here`).
"""

from __future__ import annotations

from collections.abc import Iterator

from elaunch.workers.comm.link import Link

Messages = Iterator[memoryview]
"""Bytes to send, or places to fill; resumed when they have left or are full. None of them is empty."""


class Flow:
    """What a link carries in a transfer: see `drive`."""

    def __init__(self, link: Link, generation: int, op: int, outgoing: Messages, incoming: Messages) -> None:
        self.peer, self.socket = link.peer, link.socket
        self._link, self._generation, self._op = link, generation, op
        self._outgoing: Messages | None = outgoing
        self._incoming: Messages | None = incoming
        self._sent = self._received = 0
        self._sending = False

    def advance(self, events: int = 0) -> None:
        """Moves what the link takes and gives now; when a message is through, the next one of its direction begins."""
        self._link.advance(events)
        self._send_next()
        while self._post_next() and self._link.has_pending:
            self._link.advance()
            self._send_next()

    def _send_next(self) -> None:
        while self._outgoing is not None and not self._sending:
            body = next(self._outgoing, None)
            if body is None:
                self._outgoing = None
            else:
                self._sending = True
                self._link.post_send(self._generation, self._op, self._sent, body, self._has_left, may_offer=True)
                self._sent += 1
                self._link.push()

    def _post_next(self) -> bool:
        """Returns whether there is a place for the next message that was not there before."""
        if self._incoming is None or self._link.receiving:
            return False
        place = next(self._incoming, None)
        if place is None:
            self._incoming = None
            return False
        self._link.post_receive(self._generation, self._op, self._received, place)
        self._received += 1
        return True

    def wants(self) -> int:
        """Returns the poll events that let the link go on; 0 when both directions are done."""
        return self._link.wants()

    def check(self) -> None:
        """Raises `LinkLost` when the link has been silent for too long."""
        self._link.check()

    def finish(self) -> None:
        """Makes the link forget the transfer, keeping what the peer must still get."""
        self._link.finish()

    def _has_left(self) -> None:
        self._sending = False
