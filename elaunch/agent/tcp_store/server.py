"""Serves a store over sockets, in a loop of one thread."""

from __future__ import annotations

import resource
import selectors
import socket
import sys
import time
from contextlib import suppress

from elaunch.accepting import Accepting
from elaunch.agent.tcp_store.conversation import Conversation
from elaunch.agent.tcp_store.data import StoreData
from elaunch.errors import ProtocolError

SERVE, EMPTY, DONE = b"s", b"e", b"d"
_CHUNK_BYTES = 1 << 18


class StoreServer:
    """Serves one store after another.

    Args:
        link: from the agent. SERVE comes with a listening socket: an empty store is served there from then on, and
            nowhere else. EMPTY: the store is emptied, and its clients are dropped. Both are answered with DONE. The end
            of the link is that of the server.
    """

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._selector = selectors.DefaultSelector()
        self._selector.register(link, selectors.EVENT_READ)
        self._data = StoreData()
        self._listening: Accepting | None = None
        self._clients: dict[Conversation, socket.socket] = {}
        self._talking: set[Conversation] = set()  # have answers that are not sent yet

    def run(self) -> None:
        """Serves until the agent's end of the link is closed."""
        allow_many_files()
        while True:
            due_s = None if self._listening is None else self._listening.due_s
            wait_s = None if due_s is None else max(0.0, due_s - time.monotonic())
            for key, mask in self._selector.select(wait_s):
                if key.fileobj is self._link:
                    if not self._obey():
                        self._close()
                        return
                elif isinstance(key.data, Conversation):
                    self._serve(key.data, mask)
                else:
                    self._accept()
            for client in list(self._talking):
                self._send(client)
            if self._listening is not None:
                self._listening.on_time(time.monotonic())

    def _obey(self) -> bool:
        try:
            order, descriptors, _, _ = socket.recv_fds(self._link, 1, 1)
        except ConnectionError:
            order = b""
        if not order:
            return False
        self._drop_all()
        self._data = StoreData()
        if order == SERVE:
            if self._listening is not None:
                self._listening.close()
            listener = socket.socket(fileno=descriptors[0])
            self._listening = Accepting(self._selector, listener, None, _complain)
        with suppress(ConnectionError):  # then its end comes next
            self._link.send(DONE)
        return True

    def _accept(self) -> None:
        accepted = self._listening.accept() if self._listening is not None else None
        if accepted is None:
            return
        accepted.setblocking(False)
        with suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = Conversation(self._data, self._talking.add)
        self._clients[client] = accepted
        self._selector.register(accepted, selectors.EVENT_READ, client)

    def _serve(self, client: Conversation, mask: int) -> None:
        """Takes what a client brings, and sends what could not be sent before."""
        if client not in self._clients:
            return  # dropped by what came before it in this turn
        if mask & selectors.EVENT_WRITE:
            self._talking.add(client)
        if not mask & selectors.EVENT_READ:
            return
        try:
            heard = self._clients[client].recv(_CHUNK_BYTES)
            if heard:
                client.hear(heard)
                return
        except BlockingIOError:
            return
        except (OSError, ProtocolError):
            pass
        self._drop(client)

    def _send(self, client: Conversation) -> None:
        self._talking.discard(client)
        link = self._clients[client]
        try:
            sent = link.send(client.answers)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._drop(client)
            return
        del client.answers[:sent]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.answers else 0)
        if self._selector.get_key(link).events != wanted:
            self._selector.modify(link, wanted, client)

    def _drop(self, client: Conversation) -> None:
        client.end()
        self._talking.discard(client)
        link = self._clients.pop(client)
        self._selector.unregister(link)
        link.close()

    def _close(self) -> None:
        self._drop_all()
        if self._listening is not None:
            self._listening.close()
        self._selector.close()

    def _drop_all(self) -> None:
        for client in list(self._clients):
            self._drop(client)


def allow_many_files() -> None:
    """Raises this process's limit of open files as far as it may: each worker of the job is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _complain(text: str) -> None:
    print(f"elaunch: the store of the workers: {text}", file=sys.stderr, flush=True)
