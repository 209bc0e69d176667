"""The rendezvous store: keys and values with leases, compare-and-swap and watches (the part of etcd v3 needed here).

`etcd.EtcdStore` is the real one, `memory.MemoryStore` the fake for tests; one contract suite covers both. Keys are
plain strings; values are bytes. Revisions are those of the whole store: each change takes the next one, so they also
order events.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

from elaunch.errors import StoreUnavailable


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """One key as it stands: `revision` is that of its last change, `created` that of its creation."""

    key: str
    value: bytes
    revision: int
    created: int

    def as_event(self) -> WatchEvent:
        """Returns the change by which the key came to stand so."""
        return WatchEvent(self.key, self.value, self.revision, self.created)


@dataclasses.dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change of one key: `value` None means that it was deleted or that its lease ended (`created` is 0 then)."""

    key: str
    value: bytes | None
    revision: int
    created: int


class LeaseGone(StoreUnavailable):
    """The lease ran out or was revoked: what was bound to it is deleted, and a new one must be granted."""


Prefixes = str | tuple[str, ...]
"""What the keys begin with, as `str.startswith` takes it. Several must not overlap."""


def as_tuple(prefix: Prefixes) -> tuple[str, ...]:
    """Returns the prefixes, also where there is one."""
    return (prefix,) if isinstance(prefix, str) else prefix


class Watch(Protocol):
    """A running watch."""

    def cancel(self) -> None:
        """Ends the watch without calling `on_error`. A delivery under way in another thread may still finish."""


class Store(Protocol):
    """What the rendezvous needs from a store. All methods may be called from any thread.

    Every call returns or raises within the time-out that the store was made with. It raises `StoreUnavailable` when
    there was no answer in time (a change may then have been made or not: read before trying again), and plain
    `LaunchError` where trying again cannot help (wrong password, wrong certificate, no permission).
    """

    @property
    def endpoint(self) -> str:
        """Returns where the store is, as messages name it."""

    def get(self, key: str) -> Entry | None:
        """Returns the entry, or None where the key is absent."""

    def range(self, prefix: Prefixes) -> tuple[list[Entry], int]:
        """Returns all entries under `prefix`, sorted by key, and the revision of the store at which they were read.

        Those of several prefixes come in the order of the prefixes, and are read at one revision.

        A watch from that revision + 1 sees every later change and no earlier one.
        """

    def next_key(self, prefix: str, start: str) -> str | None:
        """Returns the first key under `prefix` that does not sort before `start`, or None where there is none."""

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        """Writes the key, bound to `lease` or to none, and returns the revision. Raises `LeaseGone`."""

    def create(self, key: str, value: bytes, lease: int | None = None) -> bool:
        """Writes the key if it is absent; returns whether it was. Raises `LeaseGone`."""

    def replace(self, key: str, value: bytes, expected_revision: int, beside: tuple[str, bytes] | None = None) -> bool:
        """Writes the key if its last change was `expected_revision` (0: it is absent); returns whether it was.

        The key stays bound to the lease that it is bound to. `beside`, another key and its value, is written in the
        same revision, bound to no lease.
        """

    def delete(self, key: str) -> bool:
        """Deletes the key; returns whether it was there."""

    def grant(self, ttl_s: float) -> int:
        """Returns a new lease; it ends `ttl_s`, rounded up to whole seconds and at least 1, after its last renewal."""

    def keep_alive(self, lease: int, within_s: float | None = None) -> bool:
        """Gives the lease its full time again. False: it is gone, and everything bound to it too.

        `within_s` is another time-out for this call.
        """

    def revoke(self, lease: int) -> None:
        """Ends the lease and deletes what is bound to it. A lease that is gone already is no error."""

    def watch(
        self,
        prefix: Prefixes,
        from_revision: int,
        on_events: Callable[[list[WatchEvent]], None],
        on_error: Callable[[StoreUnavailable], None],
    ) -> Watch:
        """Delivers every event under `prefix` from `from_revision` (>= 1) on, in order, in the batches of the server.

        Of several prefixes, the order is that of each.

        `on_error` is called at most once, and nothing comes after it: the connection or the server was lost, or the
        events are too old to be replayed. The caller then reads with `range` and watches again. The callbacks come
        from another thread and must be quick.
        """

    def close(self) -> None:
        """Ends all watches without calling `on_error`. Every later call raises `StoreUnavailable`."""
