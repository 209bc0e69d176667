"""Messages inside one operation: posted over time by the threads that compute, moved by a thread that does not.

    with transport.open(generation=1, op=4, peers=["a/1#0"]) as traffic:
        traffic.post("a/1#0", 7, writable)      # its part 7 goes here, whether it has come already or not
        traffic.send("a/1#0", 3, view)          # on its way; nothing waits
        traffic.feed("a/1#0", parts)            # an iterator: each leaves when nothing else does
        ...                                     # compute
        traffic.wait("a/1#0", 7)

Whoever sends gives the kernel what it takes at once, so that a message does not wait for another thread to be woken,
and leaves the rest to the driving thread, which also reads. The two take turns at each link (`_Line`).
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import partial

from elaunch.errors import LinkLost
from elaunch.workers import heartbeat
from elaunch.workers.comm.drive import drive
from elaunch.workers.comm.link import Link

PARTS = 1 << 32
"""A part's number, which is all that tells the messages between two workers apart, is below this."""


class _Line:
    """A link during one traffic, which the driving thread and those that send and post use in turns.

    No other lock is taken while its own is held: `news`, which tells of parts that came or left, is called without.
    """

    def __init__(self, link: Link, generation: int, op: int, news: Callable[[], None]) -> None:
        self.peer, self.socket = link.peer, link.socket
        self.arrived: set[int] = set()
        self.n_left = 0
        self._link, self._generation, self._op, self._news = link, generation, op, news
        self._lock = threading.Lock()
        self._background: deque[Iterator[tuple[int, memoryview]]] = deque()
        self._moved = False
        self._admitted = False
        self._over = False

    def post(self, part: int, destination: memoryview) -> None:
        with self._lock:
            self._link.post_receive(self._generation, self._op, part, destination)

    def queue(self, part: int, body: memoryview, keep: object) -> None:
        with self._lock:
            self._link.post_send(self._generation, self._op, part, body, partial(self._has_left, keep))

    def feed(self, parts: Iterator[tuple[int, memoryview]]) -> None:
        with self._lock:
            self._background.append(parts)

    def push(self) -> bool:
        """Gives the kernel what it takes of all that is queued; returns whether some is left."""
        with self._lock:
            # The traffic may have ended meanwhile, and another operation use the link.
            if self._over:
                return False
            self._link.push()
            left = self._link.wants() & select.POLLOUT != 0
        self.tell()
        return left

    def tell(self) -> None:
        if self._moved:
            self._moved = False
            self._news()

    # From here on: in the driving thread.

    def admit(self) -> None:
        """Reads the link from now on; once."""
        with self._lock:
            if not self._admitted:
                self._admitted = True
                self._link.open(self._generation, self._op, self._has_arrived)

    def advance(self, events: int = 0) -> None:
        with self._lock:
            self._refill()
            self._link.advance(events)
        self.tell()

    def wants(self) -> int:
        with self._lock:
            return self._link.wants() | (select.POLLOUT | select.POLLRDHUP if self._background else 0)

    def check(self) -> None:
        with self._lock:
            self._link.check()

    def settle(self) -> None:
        with self._lock:
            self._link.settle()

    def finish(self) -> None:
        with self._lock:
            self._over = True
            self._background.clear()
            self._link.finish()

    def _refill(self) -> None:
        """Takes one part from the background, if nothing else waits to leave; so what comes next waits for one."""
        while self._background and not self._link.sending:
            found = next(self._background[0], None)
            if found is None:
                self._background.popleft()
            else:
                self._link.post_send(self._generation, self._op, *found, may_offer=True)

    def _has_arrived(self, part: int) -> None:
        self.arrived.add(part)
        self._moved = True

    def _has_left(self, keep: object) -> None:
        self.n_left += 1
        self._moved = True


class Traffic:
    """An open operation: (`generation`, `op`) on some links of a transport. Made by `Transport.open` and `Group.open`.

    A part is named by a number below 2**32, used once per peer and direction. Sending and posting may happen in any
    order, before or after the bytes come: a part that comes before it was posted is kept in memory of its own and
    copied when it is. Parts to one peer leave in the order in which they were sent.

    The first broken link, and `Transport.interrupt`, end the traffic as a whole: from then on everything but `arrived`
    raises that `LinkLost` or `GenerationChanged`, and what waits wakes up with it. The links that still work stay
    usable, for the next generation. All methods may be called from any thread.
    """

    def __init__(
        self,
        generation: int,
        op: int,
        links: Collection[Link],
        find: Callable[[str], Link],
        wake: int,
        check: Callable[[], object],
    ) -> None:
        self._generation, self._op = generation, op
        self._find, self._wake, self._check = find, wake, check
        # Under this condition: what was sent and posted, where the driving thread has to look, and how it ended.
        self._changed = threading.Condition(threading.Lock())
        self._lines = {link.peer: self._line(link) for link in links}
        self._touched: dict[_Line, None] = {}
        self._posted: set[tuple[str, int]] = set()
        self._sent: set[tuple[str, int]] = set()
        self._waiting = 0
        self._closing = False
        self._abandoned = False
        self._ended = False
        self._failure: BaseException | None = None
        # The driving thread's own.
        self._open = True

    def post(self, peer: str, part: int, destination: memoryview) -> None:
        """Says where the bytes of `part` from `peer` go; there must be exactly as many. Returns at once.

        Raises `LinkLost` when there is no link to `peer`, `ValueError` when this part has been posted before.
        """
        self._take_on(self._posted, peer, part, lambda line: line.post(part, destination)).tell()

    def send(self, peer: str, part: int, body: memoryview, keep: object = None) -> None:
        """Sends `body` to `peer` as `part`. Returns at once; `body` must stay unchanged until it has left.

        `keep` is any object to which a reference is held until then. Raises `LinkLost` when there is no link to `peer`,
        `ValueError` when this part has been sent before.
        """
        line = self._take_on(self._sent, peer, part, lambda line: line.queue(part, body, keep))
        try:
            left = line.push()
        except LinkLost:
            left = True
        if left:
            with self._changed:
                self._look_at(line)

    def feed(self, peer: str, parts: Iterator[tuple[int, memoryview]]) -> None:
        """Sends pairs (part, body) to `peer`, one at a time, whenever nothing else waits to leave. Returns at once.

        The driving thread asks for each when its turn comes; a body must stay unchanged until the next is asked for.
        Raises `LinkLost` when there is no link to `peer`. What the iterator raises ends the traffic.
        """
        with self._changed:
            line = self._line_to(peer)
            line.feed(parts)
            self._look_at(line)

    def wait(self, peer: str, part: int) -> None:
        """Returns when `part` from `peer`, which has been posted, is complete."""
        if self._failure is None:
            if self.arrived(peer, part):
                return
            if (peer, part) not in self._posted:
                raise ValueError(f"part {part} from {peer} is awaited but was never posted: post it first")
        self._until(lambda: self.arrived(peer, part), (peer,))

    def arrived(self, peer: str, part: int) -> bool:
        """Returns whether `part` from `peer` has been posted and is complete; never raises."""
        line = self._lines.get(peer)
        return line is not None and part in line.arrived

    def check(self) -> None:
        """Raises what has ended the traffic, if it has failed; for whoever waits for its members by other ways."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)

    def flush(self) -> None:
        """Returns when all that was sent has left for the kernel."""
        self._until(lambda: sum(line.n_left for line in self._lines.values()) == len(self._sent))

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
        """Drives the links until the traffic is closed or fails; the transport's thread calls it, once."""
        failure: BaseException | None = None
        try:
            lines = self._all()
            for line in lines:
                line.admit()
            drive(lines, self._wake, self._woken, lambda: self._open)
        except BaseException as error:
            failure = error
        finally:
            with self._changed:
                self._failure = failure
            # Nothing is sent or posted any more.
            for line in self._all():
                line.finish()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _line(self, link: Link) -> _Line:
        return _Line(link, self._generation, self._op, self._news)

    def _all(self) -> list[_Line]:
        with self._changed:
            return list(self._lines.values())

    def _take_on(self, tags: set[tuple[str, int]], peer: str, part: int, order: Callable[[_Line], None]) -> _Line:
        if not 0 <= part < PARTS:
            raise ValueError(f"part {part} to or from {peer} is not a number from 0 to {PARTS - 1}")
        with self._changed:
            if (peer, part) in tags:
                done = "sent to" if tags is self._sent else "posted from"
                raise ValueError(f"part {part} is {done} {peer} twice: give each message of a traffic its own number")
            line = self._line_to(peer)
            tags.add((peer, part))
            try:
                order(line)
            except LinkLost:
                # The driving thread finds the same, and ends the traffic by it.
                self._look_at(line)
        return line

    def _line_to(self, peer: str) -> _Line:
        """Under the condition."""
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._closing:
            raise RuntimeError(f"operation {self._op} of generation {self._generation} is closed: open another one")
        line = self._lines.get(peer)
        if line is None:
            line = self._lines[peer] = self._line(self._find(peer))
            self._look_at(line)
        return line

    def _look_at(self, line: _Line) -> None:
        """Makes the driving thread see to a link; under the condition."""
        self._touched[line] = None
        self._call()

    def _call(self) -> None:
        """Makes the driving thread look; under the condition, since the eventfd may be gone after the end."""
        if not self._ended:
            os.eventfd_write(self._wake, 1)

    def _until(self, reached: Callable[[], bool], peers: Collection[str] | None = None) -> None:
        """Waits; `peers` are those for whom, all that take part if not given."""
        with heartbeat.waiting(self._lines if peers is None else peers, self._generation, self._op), self._changed:
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

    def _news(self) -> None:
        # Whoever waits has counted itself before it looked, so an unlocked look is enough when nobody does.
        if self._waiting:
            with self._changed:
                self._changed.notify_all()

    def _woken(self) -> Collection[_Line]:
        """In the driving thread: what `drive` calls when it was woken."""
        self._check()
        with self._changed:
            if self._abandoned:
                raise RuntimeError(f"operation {self._op} of generation {self._generation} was given up after an error")
            touched, self._touched = self._touched, {}
            closing = self._closing and self._open
        for line in touched:
            line.admit()
        if not closing:
            return touched.keys()
        self._open = False
        lines = self._all()
        for line in lines:
            line.settle()
        return lines
