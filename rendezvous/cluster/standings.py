"""Asks agents how they stand to the store, at the addresses where nothing else is served, many at once."""

from __future__ import annotations

import socket
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from elaunch.errors import ProtocolError
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.membership import split_address
from elaunch.rendezvous.rules.founding import Standing

ANSWER_S = 0.3
"""How long a machine may take to accept a connection, and its agent to answer."""

AT_ONCE = 100
MOST_BYTES = 1 << 20


@dataclass(slots=True)
class Answers:
    """What came back.

    Attributes:
        standings: of the nodes that have answered.
        ended: addresses on whose machines nobody listens there any more.
        listening: servers that accept connections.
    """

    standings: dict[str, Standing] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    listening: set[str] = field(default_factory=set)


def ask(seats: Mapping[str, str], servers: Collection[str] = ()) -> Answers:
    """Asks the agents of these nodes, by their liveness addresses, and looks whether servers of the store listen."""
    answers, count = Answers(), len(seats) + len(servers)
    if not count:
        return answers
    with ThreadPoolExecutor(min(AT_ONCE, count), "elaunch-ask") as pool:
        listen = pool.map(listens, servers)
        for (node, address), found in zip(seats.items(), pool.map(_ask, seats.values()), strict=True):
            if isinstance(found, Standing) and found.node == node:
                answers.standings[node] = found
            elif found is None:
                answers.ended.add(address)
        answers.listening = {server for server, is_there in zip(servers, listen, strict=True) if is_there}
    return answers


def answer(link: socket.socket, standing: Standing) -> None:
    """Tells whoever has connected how this node stands, and hangs up. It never waits."""
    with link:
        link.setblocking(False)
        with suppress(OSError):  # who only wanted to see that this agent lives has gone already
            link.send(to_json(standing))  # some hundred bytes to a connection that is new


def _ask(address: str) -> Standing | str | None:
    """Returns how an agent stands, or why that is not known; None where it has ended."""
    data = b""
    try:
        host, port = split_address(address)
        with socket.create_connection((host, port), ANSWER_S) as link:
            link.settimeout(ANSWER_S)
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


def listens(address: str) -> bool:
    """Returns whether somebody accepts a connection there."""
    try:
        host, port = split_address(address)
        socket.create_connection((host, port), ANSWER_S).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True
