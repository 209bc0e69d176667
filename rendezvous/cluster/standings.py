"""Asks agents how they stand to the store, at the addresses where nothing else is served, many at once."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from elaunch.errors import ProtocolError
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.membership import split_address
from elaunch.rendezvous.rules.founding import Standing

ANSWER_S = 0.3
"""How long a machine may take to accept a connection, and its agent to answer."""

AGAIN_S = 0.1
"""The same in the next rounds for one that has not: it may be lost, and must not hold up those that are left."""

PATIENT_EVERY = 10
"""Of so many rounds one gives everybody all the time."""

SEATS_PER_S = 500
"""So many agents a node asks each second on average: all nodes that lost the store do."""

AT_ONCE = 100
MOST_BYTES = 1 << 20


@dataclass(slots=True)
class Answers:
    """What came back.

    Attributes:
        standings: of the nodes that have answered.
        ended: addresses on whose machines nobody listens there any more.
        listening: servers that accept connections.
        silent: addresses of agents and servers that do not answer.
    """

    standings: dict[str, Standing] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    listening: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)


class Rounds:
    """Asks the same again and again, and waits less for those that did not answer the last time.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked_s = float("-inf")
        self._number = 0
        self._silent: set[str] = set()

    def begin(self) -> None:
        """Has the next round give everybody all the time."""
        self._number = 0

    def ask(self, seats: Mapping[str, str], servers: Collection[str]) -> Answers | None:
        """Asks once more; None where that is not due yet."""
        if self._clock() < self._asked_s + len(seats) / SEATS_PER_S:
            return None
        self._asked_s = self._clock()
        answers = ask(seats, servers, self._silent if self._number % PATIENT_EVERY else ())
        self._number += 1
        self._silent = answers.silent
        return answers


def ask(seats: Mapping[str, str], servers: Collection[str] = (), silent: Collection[str] = ()) -> Answers:
    """Asks agents how they stand, and looks whether servers of the store listen.

    Args:
        seats: liveness addresses of the agents, by node.
        servers: addresses of the servers.
        silent: of all these addresses, those that get less time, since they did not answer the last time.
    """
    answers, count = Answers(), len(seats) + len(servers)
    if not count:
        return answers
    within_s = dict.fromkeys(silent, AGAIN_S)
    with ThreadPoolExecutor(min(AT_ONCE, count), "elaunch-ask") as pool:
        listen = pool.map(lambda server: listens(server, within_s.get(server, ANSWER_S)), servers)
        said = pool.map(lambda address: _ask(address, within_s.get(address, ANSWER_S)), seats.values())
        for (node, address), found in zip(seats.items(), said, strict=True):
            if isinstance(found, Standing) and found.node == node:
                answers.standings[node] = found
            elif found is None:
                answers.ended.add(address)
            else:
                answers.silent.add(address)
        answers.listening = {server for server, is_there in zip(servers, listen, strict=True) if is_there}
    answers.silent.update(set(servers) - answers.listening)
    return answers


def answer(link: socket.socket, standing: Standing) -> None:
    """Tells whoever has connected how this node stands, and hangs up. It never waits."""
    with link:
        link.setblocking(False)
        with suppress(OSError):  # who only wanted to see that this agent lives has gone already
            link.send(to_json(standing))  # some hundred bytes to a connection that is new


def _ask(address: str, within_s: float) -> Standing | str | None:
    """Returns how an agent stands, or why that is not known; None where it has ended."""
    data = b""
    try:
        host, port = split_address(address)
        with socket.create_connection((host, port), within_s) as link:
            link.settimeout(within_s)
            while len(data) < MOST_BYTES and (part := link.recv(65536)):
                data += part
    except ConnectionRefusedError:
        return None
    except (OSError, ValueError, OverflowError) as error:
        return str(error)
    try:
        return from_json(Standing, data)
    except ProtocolError as error:
        return str(error)


def listens(address: str, within_s: float = ANSWER_S) -> bool:
    """Returns whether somebody accepts a connection there, within so many seconds."""
    try:
        host, port = split_address(address)
        socket.create_connection((host, port), within_s).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True
