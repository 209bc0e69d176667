"""A store whose requests are timed, for metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from elaunch.errors import ElaunchError, StoreUnavailable
from elaunch.rendezvous.store import Entry, Prefixes, Store, Watch, WatchEvent
from elaunch.telemetry.tally import Distribution

Answer = TypeVar("Answer")


class StoreTimes:
    """What requests to the store took, in whichever thread they were made.

    Attributes:
        took: by operation; of those that were answered.
        failures: how many were not, by operation.
        answers: whether the last request was answered; None before the first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.took: dict[str, Distribution] = {}
        self.failures: dict[str, int] = {}
        self.answers: bool | None = None

    def call(self, operation: str, request: Callable[[], Answer]) -> Answer:
        """Makes a request, and counts it."""
        begin_s = time.monotonic()
        try:
            answer = request()
        except ElaunchError:
            with self._lock:
                self.failures[operation] = self.failures.get(operation, 0) + 1
                self.answers = False
            raise
        with self._lock:
            self.took.setdefault(operation, Distribution()).add(time.monotonic() - begin_s)
            self.answers = True
        return answer


class TimedStore:
    """Another store, with its requests timed; a watch is none, for it waits for others."""

    def __init__(self, store: Store, times: StoreTimes) -> None:
        self._times = times
        self._store = store

    @property
    def endpoint(self) -> str:
        """Returns where the store is."""
        return self._store.endpoint

    def get(self, key: str) -> Entry | None:
        """See Store."""
        return self._times.call("get", lambda: self._store.get(key))

    def range(self, prefix: Prefixes) -> tuple[list[Entry], int]:
        """See Store."""
        return self._times.call("range", lambda: self._store.range(prefix))

    def next_key(self, prefix: str, start: str) -> str | None:
        """See Store."""
        return self._times.call("range", lambda: self._store.next_key(prefix, start))

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        """See Store."""
        return self._times.call("put", lambda: self._store.put(key, value, lease))

    def create(self, key: str, value: bytes, lease: int | None = None) -> bool:
        """See Store."""
        return self._times.call("txn", lambda: self._store.create(key, value, lease))

    def replace(self, key: str, value: bytes, expected_revision: int, beside: tuple[str, bytes] | None = None) -> bool:
        """See Store."""
        return self._times.call("txn", lambda: self._store.replace(key, value, expected_revision, beside))

    def delete(self, key: str) -> bool:
        """See Store."""
        return self._times.call("delete", lambda: self._store.delete(key))

    def grant(self, ttl_s: float) -> int:
        """See Store."""
        return self._times.call("lease_grant", lambda: self._store.grant(ttl_s))

    def keep_alive(self, lease: int, within_s: float | None = None) -> bool:
        """See Store."""
        return self._times.call("lease_keep_alive", lambda: self._store.keep_alive(lease, within_s))

    def revoke(self, lease: int) -> None:
        """See Store."""
        self._times.call("lease_revoke", lambda: self._store.revoke(lease))

    def watch(
        self,
        prefix: Prefixes,
        from_revision: int,
        on_events: Callable[[list[WatchEvent]], None],
        on_error: Callable[[StoreUnavailable], None],
    ) -> Watch:
        """See Store."""
        return self._store.watch(prefix, from_revision, on_events, on_error)

    def close(self) -> None:
        """See Store."""
        self._store.close()
