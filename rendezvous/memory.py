"""An in-process store for tests, with the semantics of etcd and a clock that the test sets."""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.store import Entry, LeaseGone, Prefixes, WatchEvent, as_tuple


@dataclasses.dataclass(frozen=True, slots=True)
class _Lease:
    ttl_s: int
    ends_s: float


class _Watch:
    """One subscriber: it gets events from `next_revision` on until it is ended."""

    def __init__(
        self,
        session: MemoryStore,
        prefix: Prefixes,
        from_revision: int,
        on_events: Callable[[list[WatchEvent]], None],
        on_error: Callable[[StoreUnavailable], None],
    ) -> None:
        self.session = session
        self.active = True
        self._prefix = prefix
        self._next_revision = from_revision
        self._on_events = on_events
        self._on_error = on_error

    def deliver(self, batch: Iterable[WatchEvent]) -> None:
        events = [e for e in batch if e.revision >= self._next_revision and e.key.startswith(self._prefix)]
        if self.active and events:
            self._next_revision = events[-1].revision + 1
            try:
                self._on_events(events)
            except Exception as error:  # is the subscriber's, not that of who writes
                self.fail(StoreUnavailable(f"{self.session.endpoint}: the callback raised {error!r}"))

    def fail(self, error: StoreUnavailable) -> None:
        if self.active:
            self.active = False
            self._on_error(error)

    def cancel(self) -> None:
        self.active = False


class _Data:
    """What all sessions of one store share. Every access holds `lock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.revision = 1
        self.compacted = 0
        self.entries: dict[str, Entry] = {}
        self.bound: dict[str, int] = {}
        self.leases: dict[int, _Lease] = {}
        self.last_lease = 0
        self.history: list[WatchEvent] = []
        self.watches: list[_Watch] = []
        self._undelivered: deque[list[WatchEvent]] = deque()
        self._delivering = False

    def write(self, key: str, value: bytes, lease: int | None) -> int:
        if lease is not None and lease not in self.leases:
            raise LeaseGone(f"put {key!r}: lease {lease} is gone; join again with a new one")
        return self.write_all([(key, value, lease)])

    def write_all(self, changes: list[tuple[str, bytes, int | None]]) -> int:
        """Writes keys in one revision."""
        self.revision += 1
        for key, value, lease in changes:
            old = self.entries.get(key)
            self.entries[key] = Entry(key, value, self.revision, old.created if old else self.revision)
            self.bound.pop(key, None)
            if lease is not None:
                self.bound[key] = lease
        self._publish([self.entries[key].as_event() for key, _, _ in changes])
        return self.revision

    def remove(self, keys: Iterable[str]) -> None:
        """Deletes `keys` in one revision, as etcd does when a lease ends."""
        present = sorted(key for key in keys if key in self.entries)
        if not present:
            return
        self.revision += 1
        for key in present:
            del self.entries[key]
            self.bound.pop(key, None)
        self._publish([WatchEvent(key, None, self.revision, 0) for key in present])

    def end_lease(self, lease: int) -> None:
        if self.leases.pop(lease, None) is not None:
            self.remove([key for key, owner in self.bound.items() if owner == lease])

    def expire(self) -> None:
        now_s = self.clock()
        for lease in [number for number, state in self.leases.items() if state.ends_s <= now_s]:
            self.end_lease(lease)

    def _publish(self, batch: list[WatchEvent]) -> None:
        self.history += batch
        self._undelivered.append(batch)
        if self._delivering:
            # A callback changed the store: its change is delivered after the batch in hand, so that all see one order.
            return
        self._delivering = True
        try:
            while self._undelivered:
                events = self._undelivered.popleft()
                self.watches = [watch for watch in self.watches if watch.active]
                for watch in list(self.watches):
                    watch.deliver(events)
        finally:
            self._delivering = False


class MemoryStore:
    """The fake store. Leases end by `clock` (seconds), watches are delivered in the thread that makes the change.

    What is due is expired at the start of every call, and by `expire()`. Setting `down` makes every call of this object
    raise `StoreUnavailable` and ends its watches. Nodes of a test share one object, or have a `session()` each, with a
    `down` and a `close` of its own over the same data.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoint = "memory"
        self._data = _Data(clock)
        self._down = False
        self._closed = False

    def session(self) -> MemoryStore:
        """Returns another client of the same data."""
        other = MemoryStore()
        other._data = self._data
        return other

    @property
    def down(self) -> bool:
        """Returns whether the store cannot be reached through this object."""
        return self._down

    @down.setter
    def down(self, value: bool) -> None:
        with self._data.lock:
            self._down = value
            if value:
                for watch in self._take_watches():
                    watch.fail(StoreUnavailable(f"{self.endpoint}: the watch ended because the store went away"))

    def expire(self) -> None:
        """Ends the leases that are due by the clock."""
        with self._data.lock:
            self._data.expire()

    def compact(self, revision: int) -> None:
        """Forgets the events before `revision`: a watch from further back fails."""
        with self._data.lock:
            self._data.compacted = max(self._data.compacted, revision)
            self._data.history = [e for e in self._data.history if e.revision >= self._data.compacted]

    def get(self, key: str) -> Entry | None:
        """Returns the entry, or None where the key is absent."""
        with self._data.lock:
            return self._open(f"get {key!r}").entries.get(key)

    def range(self, prefix: Prefixes) -> tuple[list[Entry], int]:
        """Returns all entries under `prefix`, sorted by key, and the revision of the store."""
        with self._data.lock:
            data = self._open(f"range {prefix!r}")
            keys, prefixes = sorted(data.entries), as_tuple(prefix)
            return [data.entries[key] for one in prefixes for key in keys if key.startswith(one)], data.revision

    def next_key(self, prefix: str, start: str) -> str | None:
        """Returns the first key under `prefix` that does not sort before `start`, or None where there is none."""
        with self._data.lock:
            keys = self._open(f"range {prefix!r}").entries
            return min((key for key in keys if key.startswith(prefix) and key >= start), default=None)

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        """Writes the key, bound to `lease` or to none, and returns the revision. Raises `LeaseGone`."""
        with self._data.lock:
            return self._open(f"put {key!r}").write(key, value, lease)

    def create(self, key: str, value: bytes, lease: int | None = None) -> bool:
        """Writes the key if it is absent; returns whether it was. Raises `LeaseGone`."""
        with self._data.lock:
            data = self._open(f"create {key!r}")
            if key in data.entries:
                return False
            data.write(key, value, lease)
            return True

    def replace(self, key: str, value: bytes, expected_revision: int, beside: tuple[str, bytes] | None = None) -> bool:
        """Writes the key if its last change was `expected_revision` (0: it is absent); returns whether it was."""
        with self._data.lock:
            data = self._open(f"replace {key!r}")
            entry = data.entries.get(key)
            if (entry.revision if entry else 0) != expected_revision:
                return False
            others = [] if beside is None else [(*beside, None)]
            data.write_all([(key, value, data.bound.get(key)), *others])
            return True

    def delete(self, key: str) -> bool:
        """Deletes the key; returns whether it was there."""
        with self._data.lock:
            data = self._open(f"delete {key!r}")
            present = key in data.entries
            data.remove([key])
            return present

    def grant(self, ttl_s: float) -> int:
        """Returns a new lease of `ttl_s`, rounded up to whole seconds, at least 1."""
        with self._data.lock:
            data = self._open("grant a lease")
            data.last_lease += 1
            ttl = max(1, math.ceil(ttl_s))
            data.leases[data.last_lease] = _Lease(ttl, data.clock() + ttl)
            return data.last_lease

    def keep_alive(self, lease: int, within_s: float | None = None) -> bool:
        """Renews the lease; returns whether it still existed."""
        with self._data.lock:
            data = self._open(f"keep lease {lease} alive")
            state = data.leases.get(lease)
            if state is None:
                return False
            data.leases[lease] = _Lease(state.ttl_s, data.clock() + state.ttl_s)
            return True

    def revoke(self, lease: int) -> None:
        """Ends the lease and deletes what is bound to it. A lease that is gone already is no error."""
        with self._data.lock:
            self._open(f"revoke lease {lease}").end_lease(lease)

    def watch(
        self,
        prefix: Prefixes,
        from_revision: int,
        on_events: Callable[[list[WatchEvent]], None],
        on_error: Callable[[StoreUnavailable], None],
    ) -> _Watch:
        """Delivers every event under `prefix` from `from_revision` on: past ones at once, later ones with the change.

        Raises:
            ValueError: `from_revision` is below 1.
        """
        if from_revision < 1:
            raise ValueError(f"from_revision is {from_revision}; the first revision is 1")
        with self._data.lock:
            data = self._open(f"watch {prefix!r}")
            watch = _Watch(self, prefix, from_revision, on_events, on_error)
            if from_revision < data.compacted:
                watch.fail(StoreUnavailable(f"{self.endpoint}: revision {from_revision} was compacted; read again"))
                return watch
            data.watches.append(watch)
            watch.deliver(list(data.history))
            return watch

    def close(self) -> None:
        """Ends this object's watches without calling `on_error`. Later calls raise `StoreUnavailable`."""
        with self._data.lock:
            self._closed = True
            for watch in self._take_watches():
                watch.cancel()

    def _open(self, what: str) -> _Data:
        """Returns the data for one call, or raises where this object cannot reach it."""
        if self._closed or self._down:
            state = "closed" if self._closed else "down"
            raise StoreUnavailable(f"{self.endpoint}: {what} failed because the store is {state}")
        self._data.expire()
        return self._data

    def _take_watches(self) -> list[_Watch]:
        own = [watch for watch in self._data.watches if watch.session is self]
        self._data.watches = [watch for watch in self._data.watches if watch.session is not self]
        return own
