"""Messages inside one operation: posted over time by the threads that compute, moved by a thread that does not.

    with fabric.open(epoch=1, op=4, peers=["a/1#0"]) as traffic:
        traffic.post("a/1#0", 7, writable)      # its part 7 goes here, whether it has come already or not
        traffic.send("a/1#0", 3, view)          # on its way; nothing waits
        ...                                     # compute
        traffic.wait("a/1#0", 7)

Users write orders, and the driving thread alone touches the links: it takes the orders whenever it is woken.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial

from elaunch.workers.comm.drive import drive
from elaunch.workers.comm.link import Link

PARTS = 1 << 32
"""A part's number, which is all that tells the messages between two workers apart, is below this."""

Order = Callable[[Link], None]


class Traffic:
    """An open operation: (`epoch`, `op`) on some links of a fabric. Made by `Fabric.open` and `Group.open`.

    A part is named by a number below 2**32, used once per peer and direction. Sending and posting may happen in any
    order, before or after the bytes come: a part that comes before it was posted is kept in memory of its own and
    copied when it is. Parts to one peer leave in the order in which they were sent.

    The first broken link, and `Fabric.interrupt`, end the traffic as a whole: from then on everything but `arrived`
    raises that `LinkLost` or `GenerationChanged`, and what waits wakes up with it. The links that still work stay
    usable, for the next epoch. All methods may be called from any thread.
    """

    def __init__(
        self,
        epoch: int,
        op: int,
        links: Collection[Link],
        find: Callable[[str], Link],
        wake: int,
        check: Callable[[], object],
    ) -> None:
        self._epoch, self._op = epoch, op
        self._find, self._wake, self._check = find, wake, check
        # Under this condition: what was ordered, and how it ended.
        self._changed = threading.Condition(threading.Lock())
        self._orders: deque[tuple[Link, Order]] = deque()
        self._posted: set[tuple[str, int]] = set()
        self._sent: set[tuple[str, int]] = set()
        self._waiting = 0
        self._closing = False
        self._abandoned = False
        self._ended = False
        self._failure: BaseException | None = None
        # Written by the driving thread only.
        self._links = {link.peer: link for link in links}
        self._open = True
        self._arrived: set[tuple[str, int]] = set()
        self._left = 0

    def post(self, peer: str, part: int, destination: memoryview) -> None:
        """Says where the bytes of `part` from `peer` go; there must be exactly as many. Returns at once.

        Raises `LinkLost` when there is no link to `peer`, `ValueError` when this part has been posted before.
        """
        self._order(self._posted, peer, part, lambda link: link.post_receive(self._epoch, self._op, part, destination))

    def send(self, peer: str, part: int, body: memoryview, keep: object = None) -> None:
        """Sends `body` to `peer` as `part`. Returns at once; `body` must stay unchanged until it has left.

        `keep` is any object to which a reference is held until then. Raises `LinkLost` when there is no link to `peer`,
        `ValueError` when this part has been sent before.
        """
        left = partial(self._has_left, keep)
        self._order(self._sent, peer, part, lambda link: link.post_send(self._epoch, self._op, part, body, left))

    def wait(self, peer: str, part: int) -> None:
        """Returns when `part` from `peer`, which has been posted, is complete."""
        key = (peer, part)
        if key in self._arrived and self._failure is None:
            return
        if key not in self._posted and self._failure is None:
            raise ValueError(f"part {part} from {peer} is awaited but was never posted: post it first")
        self._until(lambda: key in self._arrived)

    def arrived(self, peer: str, part: int) -> bool:
        """Whether `part` from `peer` has been posted and is complete; never raises."""
        return (peer, part) in self._arrived

    def flush(self) -> None:
        """Returns when all that was sent has left for the kernel."""
        self._until(lambda: self._left == len(self._sent))

    def close(self) -> None:
        """Returns when all that was sent has left and all that was posted has come; then the operation is over.

        Raises what ended the traffic before that, and `LinkLost` when a part came that was never posted. Closing again
        does nothing.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._call()
        try:
            self._until(lambda: False)
        except BaseException:
            self._abandon()
            raise

    def __enter__(self) -> Traffic:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Closes; after an error it gives up what is still under way, like an exchange that failed."""
        if error is None:
            self.close()
        else:
            self._abandon()

    def run(self) -> None:
        """Drives the links until the traffic is closed or fails; the fabric's thread calls it, once."""
        failure: BaseException | None = None
        try:
            for link in self._links.values():
                self._admit(link)
            drive(self._links.values(), self._wake, self._take, lambda: self._open)
        except BaseException as error:
            failure = error
        finally:
            for link in self._links.values():
                link.finish()
            with self._changed:
                self._failure, self._ended = failure, True
                self._orders.clear()
                self._changed.notify_all()

    def _order(self, tags: set[tuple[str, int]], peer: str, part: int, order: Order) -> None:
        if not 0 <= part < PARTS:
            raise ValueError(f"part {part} to or from {peer} is not a number from 0 to {PARTS - 1}")
        with self._changed:
            if self._failure is not None:
                raise self._failure.with_traceback(None)
            if self._closing:
                raise RuntimeError(f"operation {self._op} of epoch {self._epoch} is closed: open another one")
            if (peer, part) in tags:
                done = "sent to" if tags is self._sent else "posted from"
                raise ValueError(f"part {part} is {done} {peer} twice: give each message of a traffic its own number")
            link = self._links.get(peer) or self._find(peer)
            tags.add((peer, part))
            self._orders.append((link, order))
            self._call()

    def _call(self) -> None:
        """Makes the driving thread look; under the condition, since the eventfd may be gone after the end."""
        if not self._ended:
            os.eventfd_write(self._wake, 1)

    def _until(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: self._ended or reached())
            finally:
                self._waiting -= 1
            if self._failure is not None:
                raise self._failure.with_traceback(None)

    def _abandon(self) -> None:
        with self._changed:
            self._closing = self._abandoned = True
            self._call()
            self._changed.wait_for(lambda: self._ended)

    # From here on: in the driving thread.

    def _take(self) -> Collection[Link]:
        """What `drive` calls when it was woken."""
        self._check()
        if self._abandoned:
            raise RuntimeError(f"operation {self._op} of epoch {self._epoch} was given up after an error")
        # Asked before the orders are taken: none follows it.
        closing = self._closing and self._open
        changed: dict[Link, None] = {}
        while self._orders:
            link, order = self._orders.popleft()
            if link.peer not in self._links:
                self._links[link.peer] = link
                self._admit(link)
            order(link)
            changed[link] = None
        if closing:
            self._open = False
            for link in self._links.values():
                link.settle()
            return self._links.values()
        return changed.keys()

    def _admit(self, link: Link) -> None:
        link.open(self._epoch, self._op, partial(self._has_arrived, link.peer))

    def _has_arrived(self, peer: str, part: int) -> None:
        self._arrived.add((peer, part))
        self._notify()

    def _has_left(self, keep: object) -> None:
        self._left += 1
        self._notify()

    def _notify(self) -> None:
        # Whoever waits has counted itself before it looked, so an unlocked look is enough when nobody does.
        if self._waiting:
            with self._changed:
                self._changed.notify_all()
