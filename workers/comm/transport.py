"""All links of one worker, and the operations on them.

    transport = Transport("a/0#0", token)
    transport.connect({"a/0#0": transport.address, "a/1#0": "127.0.0.1:4711"}, generation=1, timeout_s=10)
    transport.exchange(1, 0, sends=[("a/1#0", 0, view)], receives=[("a/1#0", 0, writable)])
    with transport.open(1, 1, peers=["a/1#0"]) as traffic:    # messages posted over time
        traffic.send("a/1#0", 7, view)
    transport.interrupt(2)      # from any thread: whatever runs for a generation below 2 raises GenerationChanged(2)
    transport.retain(survivors)

Links belong to workers, not to generations: an interrupted operation leaves them usable, so that a generation change
costs only the links it adds. Between workers that were introduced to each other an `exchange` makes the links it lacks.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from typing import Literal

from elaunch import threads
from elaunch.errors import GenerationChanged, LinkLost, ProtocolError
from elaunch.rendezvous.membership import split_address
from elaunch.wire import LINK_TIMEOUT
from elaunch.workers import fatal, heartbeat
from elaunch.workers.comm.c10d.mail import Letters
from elaunch.workers.comm.connection import connect_unless
from elaunch.workers.comm.drive import drive
from elaunch.workers.comm.link import NEVER, Destination, Entering, Floors, Link, LinkBeside
from elaunch.workers.comm.listener import REDIAL_S, HungUp, Listener
from elaunch.workers.comm.secure.security import LinkSecurity
from elaunch.workers.comm.stream import Flow, Messages
from elaunch.workers.comm.traffic import Traffic

PREPARE_TIMEOUT_S = 10.0
PATIENCE_S = 1e6
"""For a peer that has yet to come to the exchange that needs the link: who is dead, the membership finds out."""

ASK_S = 1.0
"""How long a worker waits for a peer that is to dial before it does so itself."""

Send = tuple[str, int, memoryview]
"""Peer, part, bytes."""

Receive = tuple[str, int, Destination]
"""Peer, part, where the bytes go: a view that is filled exactly, or a bytearray that grows to whatever comes."""


class Transport:
    """The links of the worker `worker`, keyed by the peer's identity.

    `exchange` and `open` may be called from any thread; one operation runs at a time, an open one until it is closed or
    fails, and the others wait for it. `token` is the job's secret: a peer without it
    gets no link. `host` is the address that peers dial; the port is free and found in `address`. `security` says which
    links are encrypted; None: none is.
    """

    def __init__(self, worker: str, token: str, host: str = "127.0.0.1", security: LinkSecurity | None = None) -> None:
        self.worker = worker
        # Without an agent there is nobody who could do without a silent worker.
        self._timeout_s = float(os.environ.get(LINK_TIMEOUT, inf))
        self._links: dict[str, Link] = {}
        self._replaced: list[Link] = []
        self._failures: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._floors = Floors()
        self._entering = Entering()
        self.mail = Letters(
            worker, token, self._known_address, lambda peer: self.check((peer,)), security, self._floors
        )
        self._watchers: list[Callable[[int], None]] = [self.mail.interrupt]
        self._closing = False
        self._closed = False
        self._changed = threading.Condition()
        self._running = threading.Lock()
        self._opened: queue.SimpleQueue[Traffic | None] = queue.SimpleQueue()
        self._driver: threading.Thread | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        makers = self._has, self._joined, self._failed
        self._listener = Listener(
            worker, token, host, *makers, mail=self.mail.accept, floors=self._floors, security=security
        )
        self.address = self._listener.address
        _FABRICS.add(self)

    @property
    def peers(self) -> tuple[str, ...]:
        """Returns the identities this worker has a link to, sorted."""
        with self._changed:
            return tuple(sorted(peer for peer, link in self._links.items() if link.broken is None))

    def rates(self) -> dict[str, tuple[float, float]]:
        """Returns (bytes per second, seconds) that the kernel saw of links that carried enough, by the peer's slot."""
        with self._changed:
            links = [(peer, link) for peer, link in self._links.items() if link.broken is None]
        found = {peer.partition("#")[0]: link.rate() for peer, link in links}
        return {slot: rate for slot, rate in found.items() if rate is not None}

    def carried(self) -> dict[str, tuple[int, float, float]]:
        """Returns what the links have carried since they were made, by the peer's slot; see `Link.carried`."""
        with self._changed:
            links = [(peer, link) for peer, link in self._links.items() if link.broken is None]
        found = {peer.partition("#")[0]: link.carried() for peer, link in links}
        return {slot: carried for slot, carried in found.items() if carried is not None}

    def connect(self, members: Mapping[str, str], *, generation: int, timeout_s: float) -> None:
        """Returns once there is a working link to every member.

        `members` maps identities to addresses in the order of the generation, this worker included. Of two workers
        the later one in that order dials; the other one does it as well, if nothing has come for `ASK_S`: its peer may
        have gone on to a newer generation. Raises `LinkLost` for the first member that refuses or does not come within
        `timeout_s`, and `GenerationChanged` when `interrupt` announces a generation above `generation`, or a member
        answers that it is in one.
        """
        self.hear(generation)
        begin_s = time.monotonic()
        deadline_s, ask_s = begin_s + timeout_s, begin_s + ASK_S
        with heartbeat.waiting(sorted(members.keys() - {self.worker}), generation), self._changed:
            if self._closing:
                raise RuntimeError(f"the transport of {self.worker} is closed")
            for link in self._links.values():
                if link.peer in members and link.hung_up():
                    link.fail("closed by the peer")
            self._dial_missing(members, timeout_s)
            while True:
                if self._floors.own > generation:
                    raise GenerationChanged(self._floors.own)
                gone = max((self._floors.peers.get(peer, 0) for peer in members), default=0)
                if gone > generation:
                    # Who leaves the job is in none, and the next one is without it.
                    raise GenerationChanged(gone if gone < NEVER else generation + 1)
                missing = [peer for peer in members if peer != self.worker and not self._has(peer)]
                if not missing:
                    return
                for peer in missing:
                    if peer in self._failures:
                        raise LinkLost(peer, f"cannot connect to {members[peer]}: {self._failures.pop(peer)}")
                now_s = time.monotonic()
                if now_s >= deadline_s:
                    raise LinkLost(missing[0], f"no connection with {members[missing[0]]} within {timeout_s} s")
                if now_s >= ask_s:
                    ask_s = inf
                    for peer in missing:
                        self._listener.dial(peer, members[peer], deadline_s - now_s)
                self._changed.wait(min(ask_s, deadline_s) - now_s)

    def introduce(self, members: Mapping[str, str]) -> None:
        """Addresses of all members, in the order of their generation: where an `exchange` may need links to."""
        with self._changed:
            self._known = dict(members)

    def hung_up(self, peers: Collection[str]) -> tuple[str, ...]:
        """Returns those of `peers` whose link to this worker has broken; in their order."""
        with self._changed:
            links = [self._links[peer] for peer in peers if peer in self._links]
        return tuple(link.peer for link in links if link.hung_up())

    def check(self, peers: Collection[str], generation: int | None = None) -> None:
        """Looks at the links to `peers`, for whoever waits for them by other ways.

        Args:
            peers: identities.
            generation: for which the caller waits, if an interruption is to end the wait.

        Raises:
            LinkLost: one has broken, or is silent.
            GenerationChanged: the generation is over.
        """
        if generation is not None:
            self._check(generation)
        with self._changed:
            links = [self._links[peer] for peer in peers if peer in self._links]
        for link in links:
            if link.hung_up():
                raise link.fail("closed by the peer")
            link.check()

    def prepare(self, members: Mapping[str, str], timeout_s: float = PREPARE_TIMEOUT_S) -> None:
        """Connects as `connect` does, but in the background: it neither waits nor raises."""
        with self._changed:
            if not self._closing:
                self._dial_missing(members, timeout_s)

    def retain(self, workers: Collection[str], generation: float = inf) -> None:
        """Closes the links to everybody but `workers`, if not made for a newer generation. Waits for the operation."""
        with self._running:
            with self._changed:
                over = [peer for peer, one in self._links.items() if peer not in workers and one.shown <= generation]
                closing, self._replaced = [*map(self._links.pop, over), *self._replaced], []
            for link in closing:
                link.close()

    def hear(self, generation: int) -> None:
        """Notes that this worker knows of a generation: links to its members need a proof of that. Any thread may."""
        with self._changed:
            self._floors.heard = max(self._floors.heard, generation)

    def settle(self, generation: int) -> None:
        """Notes that a step has committed in a generation: who has only heard of older ones gets no link any more."""
        with self._changed:
            self._floors.settled = max(self._floors.settled, generation)

    def interrupt(self, generation: int) -> None:
        """Makes operations of older generations, now and later, raise `GenerationChanged`. Any thread may call it."""
        with self._changed:
            if generation <= self._floors.own or self._closed:
                return
            self._floors.own = generation
            self._changed.notify_all()
            self._rouse()
        for watcher in self._watchers:
            watcher(generation)

    @contextlib.contextmanager
    def entering(self, generation: int) -> Iterator[None]:
        """Returns a context for exchanges with which this worker enters a generation: all peers with a link hear of it.

        Whoever waits for this worker in an older generation waits in vain, but hears of that only by what comes from
        here for a newer one: which nothing might, where a tree brings everything to few. And whoever is to send
        something here would not be rid of it. So while an exchange waits, the other links tell their peers, and take
        what comes for older generations.
        """
        with self._changed:
            self._entering = Entering(generation, self._links.values())
        try:
            yield
        finally:
            with self._changed:
                self._entering = Entering()

    def watch(self, watcher: Callable[[int], None]) -> None:
        """Has a function called with the generation of each interruption, in the thread that interrupts."""
        self._watchers.append(watcher)

    def exchange(
        self,
        generation: int,
        op: int,
        sends: Sequence[Send] = (),
        receives: Sequence[Receive] = (),
        deadline_s: float | None = None,
    ) -> None:
        """Moves all parts and returns when the last byte has left for, or arrived from, the kernel.

        A peer's part is matched by (generation, op, part). What it sends for older generations is discarded, what it
        sends for later operations waits. `deadline_s` is a time of `time.monotonic`. Raises `GenerationChanged` when
        interrupted, `LinkLost` when a link that has something left to do breaks, cannot be made or passes the deadline.
        """
        self.link_up({peer for peer, _, _ in (*sends, *receives)}, generation)
        with heartbeat.waiting([peer for peer, _, _ in receives or sends], generation, op), self._running:
            self._begin(generation)
            links: dict[str, Link] = {}
            try:
                for peer, part, body in sends:
                    self._link(peer, links).post_send(generation, op, part, body)
                for peer, part, destination in receives:
                    self._link(peer, links).post_receive(generation, op, part, destination)
                self._drive(links.values(), generation, deadline_s)
            finally:
                for link in links.values():
                    link.finish()

    def stream(
        self, generation: int, op: int, outgoing: Mapping[str, Messages], incoming: Mapping[str, Messages]
    ) -> None:
        """Moves long sequences of messages, by peer, each made and taken in when its turn comes.

        Both ends of a link must agree on the sizes of its messages. Returns when the last one has left or come; raises
        like `exchange`.
        """
        peers = list(dict.fromkeys((*outgoing, *incoming)))
        self.link_up(set(peers), generation)
        with heartbeat.waiting(peers, generation, op), self._running:
            self._begin(generation)
            flows: list[Flow] = []
            try:
                for peer in peers:
                    ends = outgoing.get(peer, iter(())), incoming.get(peer, iter(()))
                    flows.append(Flow(self._find(peer), generation, op, *ends))
                drive(flows, self._wake, lambda: self._check(generation))
            finally:
                for flow in flows:
                    flow.finish()

    def open(self, generation: int, op: int, peers: Collection[str] = ()) -> Traffic:
        """Begins an operation to which parts are added while it runs; a thread of the transport drives it.

        It ends when the traffic is closed or fails; until then every `exchange` waits, also one of the same thread.
        The links to those of `peers` that there are take part from the start: what they send is read, and their end is
        seen at once. Other links do when the first part is sent or posted. No other operation of this generation on
        these links may have the number `op`: what comes for it is accepted whether anything was posted or not.
        Raises `GenerationChanged` when interrupted before.
        """
        with heartbeat.waiting(peers, generation, op):
            self._running.acquire()
        try:
            self._begin(generation)
            with self._changed:
                links = [self._links[peer] for peer in peers if peer in self._links]
            if self._driver is None:
                self._driver = threads.start("elaunch-traffic", self._drive_traffic, _end_worker)
            traffic = Traffic(generation, op, links, self._find, self._wake, lambda: self._check(generation))
        except BaseException:
            self._running.release()
            raise
        self._opened.put(traffic)
        return traffic

    def probe(
        self, address: str, timeout_s: float, peer: str | None = None, is_over: Callable[[], bool] = lambda: False
    ) -> Literal["alive", "refused", "busy", "silent"]:
        """Returns whether a worker of this job answers at `address` (and is `peer`, if given).

        "refused": nobody listens there, or somebody else does. "busy": its machine answers within `timeout_s`, and it
        does not; its process is stopped or swamped. "silent": nothing answers, so its machine or the network is down.
        Once `is_over` says that the answer is of no use, a machine that has not answered is "busy".
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                where = split_address(address)
                sock = connect_unless(is_over, where, deadline_s)
            except (ConnectionError, ValueError, OverflowError):
                return "refused"
            except OSError:
                return "silent"
            if sock is None:
                return "busy"
            try:
                found = self._listener.ask_name(sock, deadline_s)
                return "alive" if peer is None or found == peer else "refused"
            except (ConnectionError, HungUp):
                # It has just ended, and then it refuses the next one; or it has no place for this one.
                if time.monotonic() + REDIAL_S >= deadline_s:
                    return "busy"
                time.sleep(REDIAL_S)
            except ProtocolError:
                return "refused"
            except OSError:
                return "busy"

    def close(self) -> None:
        """Closes listener and links, in order: peers still get all that was sent. Waits until no operation runs."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._listener.close()
        self.mail.close()
        self.retain(())
        with self._running, self._changed:
            self._closed = True
            os.close(self._wake)
        self._opened.put(None)
        if self._driver is not None:
            self._driver.join()

    def _begin(self, generation: int) -> None:
        if self._closed:
            raise RuntimeError(f"the transport of {self.worker} is closed")
        self._rest()
        self._check(generation)

    # What depends on the kernel; the simulation of workers (tests/simulation) has other ones.

    def _rouse(self) -> None:
        """Wakes the operation that runs."""
        os.eventfd_write(self._wake, 1)

    def _rest(self) -> None:
        """Forgets that something was to be woken."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _drive(self, links: Collection[Link], generation: int, deadline_s: float | None) -> None:
        """Returns when all has moved that the links were given."""
        check, entering, beside = partial(self._check, generation), self._entering, dict[Link, LinkBeside]()
        if generation != entering.generation:
            drive(links, self._wake, check, deadline_s=deadline_s)
            return

        def begin_beside() -> Collection[LinkBeside]:
            with self._changed:
                new = [link for link in self._links.values() if link not in links and link not in beside]
            begun = entering.beside(new)
            beside.update(begun)
            return begun.values()

        try:
            entering.tell_over(links)
            drive(links, self._wake, check, deadline_s=deadline_s, beside=begin_beside)
        finally:
            for line in beside.values():
                line.finish()

    def _check(self, generation: int) -> Collection[Link]:
        """Raises when interrupted; the links that got something to do by that: none."""
        if self._floors.own > generation:
            raise GenerationChanged(self._floors.own)
        return ()

    def link_up(self, peers: Collection[str], generation: int) -> None:
        """Makes links to those introduced peers that have none. Of two, the later one dials when it comes here.

        One that has broken is not made anew: something of this generation may have been sent over it, and is lost.
        """
        self._check(generation)
        missing = {peer for peer in peers if peer not in self._links and peer in self._known}
        if missing:
            members = {who: where for who, where in self._known.items() if who in missing or who == self.worker}
            self.connect(members, generation=generation, timeout_s=PATIENCE_S)

    def _link(self, peer: str, links: dict[str, Link]) -> Link:
        link = links.get(peer)
        if link is None:
            link = links[peer] = self._find(peer)
        return link

    def _find(self, peer: str) -> Link:
        link = self._links.get(peer)
        if link is None:
            raise LinkLost(peer, "there is no link to this worker; connect() makes it")
        return link

    def _drive_traffic(self) -> None:
        while (traffic := self._opened.get()) is not None:
            traffic.run()
            self._running.release()

    def _known_address(self, peer: str) -> str | None:
        return self._known.get(peer)

    def _has(self, peer: str) -> bool:
        link = self._links.get(peer)
        return link is not None and link.broken is None

    def _dial_missing(self, members: Mapping[str, str], timeout_s: float) -> None:
        order = list(members)
        if self.worker not in members:
            raise ValueError(f"{self.worker} is not among the members {order}")
        me = order.index(self.worker)
        for place, peer in enumerate(order):
            # A later member dials by itself, unless its link broke: then it may be dead, and only dialling shows that.
            if place != me and not self._has(peer) and (place < me or peer in self._links):
                self._failures.pop(peer, None)
                self._listener.dial(peer, members[peer], timeout_s)

    def _joined(self, peer: str, sock: socket.socket, shown: int) -> None:
        self._add(Link(peer, sock, self._timeout_s, shown))

    def _add(self, link: Link) -> None:
        with self._changed:
            old = self._links.get(link.peer)
            if old is not None:
                # Whoever runs an exchange may hold the old one, so closing it is left to `retain`.
                old.fail("replaced by a newer connection")
                self._replaced.append(old)
            self._links[link.peer] = link
            if self._entering.generation:
                self._entering.untold[link] = None
                self._rouse()
            self._changed.notify_all()

    def _failed(self, peer: str, why: str | None) -> None:
        with self._changed:
            if why is not None:
                self._failures[peer] = why
            self._changed.notify_all()

    def _close_in_child(self) -> None:
        self._listener.close_in_child()
        self.mail.close_in_child()
        for link in (*self._links.values(), *self._replaced):
            link.socket.close()


def _end_worker(error: BaseException) -> None:
    fatal.end_process("thread that drives its links", error)


_FABRICS: weakref.WeakSet[Transport] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for transport in list(_FABRICS):
        transport._close_in_child()


# A forked child (a data loader's worker, say) would keep the connections open after its parent was killed, and peers
# would not see the death.
os.register_at_fork(after_in_child=_close_all_in_child)
