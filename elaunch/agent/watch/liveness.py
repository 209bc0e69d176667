"""The port that is there as long as an agent lives, and at which it tells others of the job how it stands.

Others see by it that the agent has ended: its machine then refuses connections. Whoever proves to know the job's token,
from another machine also by a certificate, gets one answer (`rendezvous.cluster.inquiry`); strangers get none, and are
limited in time, size and number.
"""

from __future__ import annotations

import resource
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from elaunch.accepting import Accepting, most_strangers
from elaunch.errors import ProtocolError
from elaunch.rendezvous.cluster.inquiry import QUESTION_BYTES, answer_line, read_question
from elaunch.rendezvous.rules.founding import Standing
from elaunch.rendezvous.security.contexts import explain, secure

ASK_S = 2.0
"""How long somebody may take to ask, and to take the answer."""


class LivenessPort:
    """Accepts whoever connects, and answers those who prove to be of the job. It never waits.

    Args:
        selector: of the agent's loop, in which connections are registered; their data there, and this, have `serve`.
        listening: the socket; closed with this.
        address: at which others ask this agent.
        tell: returns how this node stands and the job's token, which is empty before this node has joined.
        say: tells the user.
        tls: returns the context of connections; None: they are plain. Raises `OSError` where there is no certificate.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        listening: socket.socket,
        address: str,
        tell: Callable[[], tuple[Standing, str]],
        say: Callable[[str], None],
        tls: Callable[[], ssl.SSLContext | None] = lambda: None,
    ) -> None:
        self._selector = selector
        self._accepting = Accepting(selector, listening, self, say)
        self._address = address
        self._tell = tell
        self._say = say
        self._tls = tls
        self._complained = False
        self._most = most_strangers(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._askers: dict[Asker, None] = {}  # the oldest first

    @property
    def due_s(self) -> float | None:
        """Returns when `on_time` has something to do, by `time.monotonic`; None: never."""
        oldest = [asker.deadline_s for asker in islice(self._askers, 1)]
        return min((*oldest, *filter(None, [self._accepting.due_s])), default=None)

    def on_time(self, now_s: float) -> None:
        """Accepts again after a pause, and hangs up on those that have taken too long."""
        self._accepting.on_time(now_s)
        while self._askers and (oldest := next(iter(self._askers))).deadline_s <= now_s:
            self.drop(oldest)

    def serve(self) -> None:
        """Accepts a connection; where there are too many, the oldest goes."""
        link = self._accepting.accept()
        if link is None:
            return
        link.setblocking(False)
        try:
            if (context := self._tls()) is not None:
                link = secure(link, context, is_server=True)
        except OSError:  # it has gone already, or this node has not joined: who asks takes it for silent
            link.close()
            return
        if len(self._askers) >= self._most:
            self.drop(next(iter(self._askers)))
        asker = Asker(self, link, time.monotonic() + ASK_S)
        self._askers[asker] = None
        self._selector.register(link, selectors.EVENT_READ, asker)
        asker.serve()  # most have asked by now

    def answer(self, question: bytes, link: socket.socket) -> bytes:
        """Returns what to say to a question; nothing to a stranger."""
        standing, token = self._tell()
        if not token:
            return b""
        try:
            challenge = read_question(question, token, self._address)
        except ProtocolError as error:
            self.complain(link, str(error))
            return b""
        return answer_line(token, self._address, challenge, standing)

    def await_socket(self, asker: Asker, event: int) -> None:
        """Has an asker served when its socket can be read from, or written to."""
        self._selector.modify(asker.link, event, asker)

    def drop(self, asker: Asker) -> None:
        """Hangs up."""
        if asker in self._askers:
            del self._askers[asker]
            self._selector.unregister(asker.link)
            asker.link.close()

    def close(self) -> None:
        """Closes the port and all connections."""
        for asker in list(self._askers):
            self.drop(asker)
        self._accepting.close()

    def complain(self, link: socket.socket, why: str) -> None:
        """Tells the user of the first stranger."""
        if not self._complained:
            self._complained = True
            host = "somebody"
            with suppress(OSError):  # it has gone already
                host = link.getpeername()[0]
            self._say(
                f"{host} asked this agent, at {self._address}, how it stands, and was told nothing: {why}; this is "
                "said once"
            )


class Asker:
    """A connection of somebody of whom nothing is known until the question has come.

    Attributes:
        link: the connection.
        deadline_s: when it is dropped, by `time.monotonic`.
    """

    def __init__(self, port: LivenessPort, link: socket.socket, deadline_s: float) -> None:
        self._port = port
        self.link = link
        self.deadline_s = deadline_s
        self._question = b""
        self._answer = b""

    def serve(self) -> None:
        """Takes what has come of the question, or sends what the socket takes of the answer."""
        try:
            if isinstance(self.link, ssl.SSLSocket):
                self.link.do_handshake()  # once it is over that does nothing
            if not self._answer:
                self._take()
            while self._answer:
                self._answer = self._answer[self.link.send(self._answer) :]
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as wants:
            writes = isinstance(wants, ssl.SSLWantWriteError) or bool(self._answer)
            self._port.await_socket(self, selectors.EVENT_WRITE if writes else selectors.EVENT_READ)
            return
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            pass
        except ssl.SSLError as error:
            self._port.complain(self.link, explain(error))
        except OSError:
            pass  # who only wanted to see that this agent lives has gone already
        self._port.drop(self)

    def _take(self) -> None:
        """Takes all of the question, as far as it has come."""
        while len(self._question) < QUESTION_BYTES:
            part = self.link.recv(QUESTION_BYTES - len(self._question))
            if not part:
                return
            self._question += part
        self._answer = self._port.answer(self._question, self.link)
