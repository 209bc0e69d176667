"""Asks agents how they stand to the store, at the addresses where nothing else is served, many at once."""

from __future__ import annotations

import enum
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from elaunch.errors import ProtocolError
from elaunch.rendezvous.cluster.inquiry import ANSWER_BYTES, is_cut_off, new_challenge, question_line, read_answer
from elaunch.rendezvous.membership import split_address
from elaunch.rendezvous.rules.founding import Standing
from elaunch.rendezvous.security.contexts import explain, secure

ANSWER_S = 0.3
"""How long a machine may take to accept a connection, and its agent to answer."""

AGAIN_S = 0.1
"""The same in the next rounds for one that has not: it may be lost, and must not hold up those that are left."""

LOST_S = 1.0
"""An agent that has been silent in all rounds for so long counts as lost; before, it may only have paused."""

PATIENT_EVERY = 10
"""Of so many rounds one gives everybody all the time."""

SEATS_PER_S = 500
"""So many agents a node asks each second on average: all nodes that lost the store do."""

AT_ONCE = 100

Tls = Callable[[str], ssl.SSLContext | None]
"""Returns the context for the agent at an address; None: plain. It raises `OSError` where there is no certificate."""


def plain(address: str) -> None:
    """The agents' connections are not encrypted."""


class NoAnswer(enum.Enum):
    """Why it is not known how an agent stands.

    An agent has ended only where its machine refuses the connection. Whatever a stranger says in its place, it is never
    that, nor an answer.
    """

    ENDED = "nobody listens there any more"
    SILENT = "nothing came in time, or the agent did not take the question for one of its job"
    UNPROVEN = "what came has no proof of the job's token"


@dataclass(slots=True)
class Answers:
    """What came back.

    Attributes:
        standings: of the nodes that have answered.
        ended: addresses on whose machines nobody listens there any more.
        listening: servers that accept connections.
        silent: addresses of agents and servers that do not answer.
        paused: of the silent ones, those that are not known to be lost: they have not been silent for long.
        strangers: of the silent ones, those where somebody answers without a proof of the job's token, by node.
    """

    standings: dict[str, Standing] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)
    listening: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)
    strangers: dict[str, str] = field(default_factory=dict)


class Rounds:
    """Asks the same again and again, and waits less for those that did not answer the last time.

    Args:
        clock: in seconds.
        tls: for the agents.
    """

    def __init__(self, clock: Callable[[], float], tls: Tls = plain) -> None:
        self._clock = clock
        self._tls = tls
        self._asked_s = float("-inf")
        self._number = 0
        self._silent_since_s: dict[str, float] = {}

    def begin(self) -> None:
        """Has the next round give everybody all the time, as if nobody had been silent."""
        self._number = 0
        self._silent_since_s.clear()

    def ask(self, seats: Mapping[str, str], token: str, servers: Collection[str]) -> Answers | None:
        """Asks once more; None where that is not due yet."""
        if self._clock() < self._asked_s + len(seats) / SEATS_PER_S:
            return None
        self._asked_s = self._clock()
        silent = self._silent_since_s if self._number % PATIENT_EVERY else ()
        answers = ask(seats, token, servers, silent, self._tls)
        self._number += 1
        since_s = self._silent_since_s
        self._silent_since_s = {address: since_s.get(address, self._asked_s) for address in answers.silent}
        lost_s = self._clock() - LOST_S
        answers.paused = {address for address, silent_s in self._silent_since_s.items() if silent_s > lost_s}
        return answers


def ask(
    seats: Mapping[str, str],
    token: str,
    servers: Collection[str] = (),
    silent: Collection[str] = (),
    tls: Tls = plain,
) -> Answers:
    """Asks agents how they stand, and looks whether servers of the store listen.

    Args:
        seats: liveness addresses of the agents, by node.
        token: of the job, by which both sides of each question know each other.
        servers: addresses of the servers.
        silent: of all these addresses, those that get less time, since they did not answer the last time.
        tls: for the agents.
    """
    answers, count = Answers(), len(seats) + len(servers)
    if not count:
        return answers
    within_s = dict.fromkeys(silent, AGAIN_S)
    with ThreadPoolExecutor(min(AT_ONCE, count), "elaunch-ask") as pool:
        listen = pool.map(lambda server: listens(server, within_s.get(server, ANSWER_S)), servers)
        said = pool.map(lambda seat: _ask(seat[0], seat[1], token, within_s.get(seat[1], ANSWER_S), tls), seats.items())
        for (node, address), found in zip(seats.items(), said, strict=True):
            if isinstance(found, Standing):
                answers.standings[node] = found
                continue
            if found is NoAnswer.ENDED:
                answers.ended.add(address)
                continue
            answers.silent.add(address)
            if found is NoAnswer.UNPROVEN:
                answers.strangers[node] = address
        answers.listening = {server for server, is_there in zip(servers, listen, strict=True) if is_there}
    answers.silent.update(set(servers) - answers.listening)
    return answers


def _ask(node: str, address: str, token: str, within_s: float, tls: Tls) -> Standing | NoAnswer:
    """Returns how the node stands whose agent is at an address, or why that is not known."""
    challenge, line = new_challenge(), bytearray()
    try:
        with socket.create_connection(split_address(address), within_s) as dialled:
            if not token:
                return NoAnswer.SILENT  # whoever it is cannot prove anything
            end_s = time.monotonic() + within_s
            with _secured(dialled, tls(address)) as link:
                link.sendall(question_line(token, address, challenge))
                while len(line) < ANSWER_BYTES and (left_s := end_s - time.monotonic()) > 0:
                    link.settimeout(left_s)  # of all parts together: a stranger may send one byte at a time
                    part = link.recv(65536)
                    line += part
                    if not part or part.endswith(b"\n"):
                        break
    except ConnectionRefusedError:
        return NoAnswer.ENDED
    except ProtocolError:
        return NoAnswer.UNPROVEN
    except (OSError, ValueError, OverflowError):
        pass  # what has come is looked at all the same
    if is_cut_off(bytes(line)):
        return NoAnswer.SILENT
    try:
        standing = read_answer(bytes(line), token, address, challenge)
    except ProtocolError:
        return NoAnswer.UNPROVEN
    return standing if standing.node == node else NoAnswer.SILENT


def _secured(link: socket.socket, context: ssl.SSLContext | None) -> socket.socket:
    """Returns the connection, encrypted if it must be.

    Raises:
        ProtocolError: who answers there does not prove that it is of this job.
        OSError: it hung up, or did not answer in time.
    """
    if context is None:
        return link
    secured = secure(link, context, is_server=False)
    try:
        secured.do_handshake()
    except BaseException as error:
        secured.close()
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            raise ProtocolError(explain(error)) from error
        raise
    return secured


def listens(address: str, within_s: float = ANSWER_S) -> bool:
    """Returns whether somebody accepts a connection there, within so many seconds."""
    try:
        host, port = split_address(address)
        socket.create_connection((host, port), within_s).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True
