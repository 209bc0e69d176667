"""A watch of etcd: a stream, the thread that reads it, and how it goes on at another server of the cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.cluster.calls import Call, ChannelClosed, Metadata, RpcError
from elaunch.rendezvous.cluster.connection import ServerConnection, read
from elaunch.rendezvous.cluster.messages import DELETE, message
from elaunch.rendezvous.etcd_trouble import is_about_login
from elaunch.rendezvous.store import Entry, Prefixes, WatchEvent, as_tuple

if TYPE_CHECKING:
    from elaunch.rendezvous.etcd import EtcdStore

LOGIN_ATTEMPTS = 3
RETRY_PAUSE_S = 0.02

# Asks etcd to end a watch on a member that has lost its quorum, instead of leaving it silent.
_REQUIRE_LEADER = ("hasleader", "true")


class EtcdWatch:
    """One watch of one prefix or several: a stream of its own and the daemon thread that reads it."""

    def __init__(
        self,
        store: EtcdStore,
        prefix: Prefixes,
        from_revision: int,
        on_events: Callable[[list[WatchEvent]], None],
        on_error: Callable[[StoreUnavailable], None],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._next = dict.fromkeys(as_tuple(prefix), from_revision)  # revisions, by prefix
        self._on_events = on_events
        self._on_error = on_error
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._call: Call | None = None
        self._server: ServerConnection | None = None
        self._heard_s: float | None = None  # since when no server has delivered
        self._is_compacted = False
        self._thread = threading.Thread(target=self._run, name=f"elaunch-watch {as_tuple(prefix)[0]}", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def cancel(self) -> None:
        """Ends the watch; nothing is delivered any more."""
        with self._lock:
            self._cancelled.set()
            call = self._call
        if call is not None:
            call.cancel()

    def join(self, timeout_s: float) -> None:
        """Waits for the end of the thread."""
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout_s)

    def leave(self, server: ServerConnection) -> None:
        """Ends the stream if it comes from this server; it goes on at another one."""
        with self._lock:
            call = self._call if self._server is server else None
        if call is not None:
            call.cancel()

    def _run(self) -> None:
        try:
            problem = self._follow()
        except Exception as error:
            # Without this the owner would wait for events that never come.
            self._fail(f"the callback raised {error!r}")
            raise
        finally:
            self._store.discard(self)
        self._fail(problem)

    def _follow(self) -> str:
        """Delivers events from one server after the other; returns why none can go on.

        All servers of a cluster give an event the same revision, so nothing is lost or told twice in between.
        """
        while True:
            problem = self._read()
            server = self._server
            is_over = self._cancelled.is_set() or self._store.is_closed() or self._is_compacted
            if is_over or server is None or not self._store.follows:
                return problem
            if self._heard_s is None:
                self._heard_s = time.monotonic()
            elif time.monotonic() > self._heard_s + self._store.timeout_s:
                return problem
            self._store.move_on(server)
            self._cancelled.wait(RETRY_PAUSE_S)

    def _fail(self, problem: str) -> None:
        if not self._cancelled.is_set() and not self._store.is_closed():
            self._on_error(StoreUnavailable(f"etcd at {self._store.endpoint}: watch {self._prefix!r} ended: {problem}"))

    def _read(self) -> str:
        """Delivers events until the stream ends; returns why it did."""
        for _ in range(LOGIN_ATTEMPTS):
            login: Metadata = ()
            try:
                login = self._store.login(self._store.server, self._store.timeout_s)
                problem = self._deliver_all(self._open((*login, _REQUIRE_LEADER)))
            except RpcError as error:
                problem = error.text
            except ChannelClosed:
                return "the store is closed" if self._store.is_closed() else "the server has left the cluster"
            # For a watch, etcd calls a login that has ended "permission denied" too.
            ended_login = is_about_login(problem) or "permission denied" in problem
            if not ended_login or not self._store.can_login():
                return problem
            self._store.forget_login(login)
        return problem

    def _open(self, metadata: Metadata) -> Call:
        """Begins the stream, whose requests make a watch for each prefix; our half of it stays open until it ends."""
        server = self._store.server
        call = server.open("Watch", self._store.timeout_s, metadata)
        with self._lock:
            # Read again, so that who leaves it later finds the call.
            is_left = self._cancelled.is_set() or self._store.server is not server
            self._server, self._call = server, call
        if is_left:
            call.cancel()
        for prefix, revision in self._next.items():
            first, end = prefix_range(prefix)
            create = message("WatchCreateRequest", key=first, range_end=end, start_revision=revision)
            call.send(message("WatchRequest", create_request=create).to_bytes())
        return call

    def _deliver_all(self, call: Call) -> str:
        new = iter(self._next)
        prefixes: dict[int, str] = {}  # by the number of the watch, which etcd answers in the order of the requests
        for data in call:
            answer = read("Watch", data)
            if self._cancelled.is_set():
                return "cancelled"
            if answer.created:
                prefixes[answer.watch_id] = next(new)
            if answer.compact_revision:
                self._is_compacted = True
                revision = self._next[prefixes[answer.watch_id]]
                return f"revision {revision} was compacted (at {answer.compact_revision}); read again"
            if answer.canceled:
                return str(answer.cancel_reason) or "etcd cancelled it"
            self._heard_s = None
            events = [_event(event) for event in answer.events]
            if events:
                self._next[prefixes[answer.watch_id]] = events[-1].revision + 1
                self._on_events(events)
        return "etcd ended the stream"


def entry_of(kv: Any) -> Entry:
    """Returns a key and its value as etcd has them."""
    return Entry(_key(kv.key), kv.value, kv.mod_revision, kv.create_revision)


def _event(event: Any) -> WatchEvent:
    kv = event.kv
    deleted = event.type == DELETE
    return WatchEvent(
        _key(kv.key), None if deleted else kv.value, kv.mod_revision, 0 if deleted else kv.create_revision
    )


def _key(key: bytes) -> str:
    """Returns a key as text. A stranger's may be no UTF-8: odd bytes are shown, as \\xff, and never written back."""
    return key.decode(errors="backslashreplace")


def prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """Returns etcd's half-open range of the keys that start with `prefix` (UTF-8 has no 0xff: adding 1 is safe)."""
    first = prefix.encode()
    return (first, first[:-1] + bytes((first[-1] + 1,))) if first else (b"\0", b"\0")
