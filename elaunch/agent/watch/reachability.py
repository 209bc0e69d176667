"""Which other nodes this one cannot reach: asked when a worker finds a link silent, and again until they answer."""

from __future__ import annotations

import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any

from elaunch import threads
from elaunch.rendezvous.membership import Cut, split_address

ANSWER_S = 1.0
"""How long a machine may take to answer."""

DIAL_S = 0.25
"""How long after the first one it is asked once more, and again: a network that has come back is noticed so soon."""

AT_ONCE = 100
"""So many are asked at a time: each takes two file descriptors."""

AGAIN_S = 1.0
"""From one round of asking those that did not answer to the next."""

_ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)

END_S = 2 * ANSWER_S
"""How long the end waits for a round; one that asks a name server may take longer, and is left."""


class CutNodes:
    """What follows from the answers: the nodes that cannot be reached. Pure.

    Args:
        well_s: how long a machine must have answered again to count as reachable, since a link that flaps is none.
    """

    def __init__(self, well_s: float) -> None:
        self._well_s = well_s
        self._since: dict[str, float | None] = {}  # since when it answers again

    @property
    def nodes(self) -> frozenset[str]:
        """Returns the nodes that cannot be reached, or have answered again for less than `well_s` seconds."""
        return frozenset(self._since)

    def take(self, asked: Collection[str], silent: Collection[str], now_s: float) -> bool:
        """Takes one round of answers; returns whether other nodes are cut off now.

        Args:
            asked: nodes.
            silent: those of them that did not answer.
            now_s: of any clock.
        """
        before = self.nodes
        for node in asked:
            if node in silent:
                self._since[node] = None
            elif node in self._since:
                since_s = self._since[node]
                if since_s is None:
                    self._since[node] = now_s
                elif now_s - since_s >= self._well_s:
                    del self._since[node]
        return self.nodes != before


class Reach:
    """Asks in a thread of its own, which runs only while there is something to ask.

    Args:
        found: called from that thread with the nodes that are cut off, by name, whenever they are others than before,
            and after each `check`; and with the names of those that a worker has taken for cut off and that answer.
        well_s: as for `CutNodes`.
        ask: as `unanswered`.
    """

    def __init__(
        self,
        found: Callable[[tuple[Cut, ...], frozenset[str]], None],
        well_s: float,
        ask: Callable[[Mapping[str, str]], set[str]] | None = None,
    ) -> None:
        self._found = found
        self._ask = ask or unanswered
        self._changed = threading.Condition()
        self._addresses: dict[str, str] = {}
        self._suspects: set[str] = set()
        self._cut = CutNodes(well_s)
        self._closed = False
        self._thread: threading.Thread | None = None
        self._told = ""

    def check(self, addresses: Mapping[str, str], suspect: str) -> None:
        """Asks all these nodes whether they can be reached.

        Args:
            addresses: host:port, by node. What is no address says nothing of its node, and is not asked.
            suspect: the one that a worker cannot reach.
        """
        with self._changed:
            self._addresses.update({node: address for node, address in addresses.items() if _is_address(address)})
            self._suspects.add(suspect)
            if not self._closed and (self._thread is None or not self._thread.is_alive()):
                self._thread = threads.start("elaunch-reach", self._run, self._died)
            self._changed.notify()

    def close(self) -> None:
        """Ends the thread after the round under way, which it waits for END_S seconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(END_S)

    def _died(self, error: BaseException) -> None:
        """The next check starts another thread, which asks all nodes."""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._suspects, AGAIN_S if self._cut.nodes else None)
                if self._closed:
                    return
                suspects, self._suspects = self._suspects, set()
                asked = {node: self._addresses[node] for node in (self._addresses if suspects else self._cut.nodes)}
            try:
                self._round(asked, suspects)
            except Exception as error:  # whatever is short now, descriptors for one, may not be short for ever
                if self._told != (told := threads.describe(error)):
                    self._told = told
                    threads.tell(f"other nodes cannot be asked now, and are asked again: {told}", error)
                with self._changed:
                    self._suspects |= suspects
                    self._changed.wait_for(lambda: self._closed, AGAIN_S)

    def _round(self, asked: Mapping[str, str], suspects: set[str]) -> None:
        """Asks these nodes once."""
        silent = self._ask(asked)
        changed = self._cut.take(asked, silent, time.monotonic())
        if changed or suspects:
            cut = self._cut.nodes
            cuts = tuple(Cut(node, split_address(self._addresses[node])[0]) for node in sorted(cut))
            self._found(cuts, frozenset(suspects & asked.keys() - cut))


def _is_address(address: str) -> bool:
    try:
        return 0 < split_address(address)[1] < 1 << 16
    except ValueError:
        return False


def unanswered(addresses: Mapping[str, str], timeout_s: float = ANSWER_S) -> set[str]:
    """Asks machines for a TCP connection, many at once; returns those that do not answer. A refusal is an answer.

    Args:
        addresses: host:port, by whatever names them.
        timeout_s: how long they may take.

    Raises:
        OSError: this process has no descriptors left to ask with.
        ValueError: one of them is no address.
    """
    names, silent = list(addresses), set[str]()
    for begin in range(0, len(names), AT_ONCE):
        silent |= _unanswered({name: addresses[name] for name in names[begin : begin + AT_ONCE]}, timeout_s)
    return silent


def _unanswered(addresses: Mapping[str, str], timeout_s: float) -> set[str]:
    """Asks anew every `DIAL_S`: what was lost in the network is sent again after a second only, when all is over."""
    targets = {name: found for name, address in addresses.items() if (found := _target(address)) is not None}
    silent, begin_s, turns, is_over = set(addresses), time.monotonic(), 0, False
    poll, dials = select.poll(), dict[int, tuple[str, socket.socket, bool]]()
    with ExitStack() as stack:

        def drop(descriptor: int) -> None:
            poll.unregister(descriptor)
            dials.pop(descriptor)[1].close()

        while not is_over and not silent.isdisjoint(targets):
            passed_s = time.monotonic() - begin_s
            is_over = turns > 0 and passed_s >= timeout_s  # what has come meanwhile still counts
            if not is_over and passed_s >= turns * DIAL_S:
                for descriptor in [one for one, (_, _, is_first) in dials.items() if not is_first]:
                    drop(descriptor)
                for name in silent & targets.keys():
                    family, where = targets[name]
                    sock = stack.enter_context(socket.socket(family))
                    sock.setblocking(False)
                    error = sock.connect_ex(where)
                    if error in _ANSWERS:
                        silent.discard(name)
                    elif error == errno.EINPROGRESS:
                        dials[sock.fileno()] = name, sock, turns == 0
                        poll.register(sock, select.POLLOUT)
                turns = int(passed_s / DIAL_S) + 1
            wait_s = min(turns * DIAL_S, timeout_s) - passed_s
            for descriptor, _ in poll.poll(max(0.0, wait_s) * 1000):
                name, sock, _ = dials[descriptor]
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWERS:
                    silent.discard(name)
                drop(descriptor)
    return silent


def _target(address: str) -> tuple[int, Any] | None:
    """Returns the family and the address of a socket; None where the host's name is none, or not known any more."""
    host, port = split_address(address)
    try:
        # As bytes, since for a str Python loads tables of Unicode, a megabyte.
        found = socket.getaddrinfo(host.encode() if host.isascii() else host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    return found[0][0], found[0][4]
