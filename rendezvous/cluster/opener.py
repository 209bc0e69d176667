"""Opens the store at the servers that the job has now, not at those that it had when this node was started."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from elaunch.errors import ElaunchError
from elaunch.rendezvous.cluster.standings import listens

if TYPE_CHECKING:
    from elaunch.rendezvous.etcd import EtcdStore
    from elaunch.rendezvous.store import Store

SHORT_S = 20.0
"""A connection that lasts less long was of no use: to enter the job takes ten requests."""

MOST_PATIENCE = 8

AGAIN_S = 10.0
"""Until a store of a job that has begun is looked at again."""


class StoreOpener:
    """Opens the store, again and again; used by one thread.

    Where many nodes want it at once, it may not answer all within the usual time. Were they to begin anew after that,
    each time with all its requests, it never would. So after each connection that was of no use the next one is given
    twice the time.

    Args:
        endpoint: where it was at the start.
        open_at: opens it at an endpoint, with requests that are given so many times the usual time.
        clock: in seconds.

    Attributes:
        dress: makes of a connection what those who ask are given.
    """

    def __init__(
        self, endpoint: str, open_at: Callable[[str, int], EtcdStore], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._begun_at = endpoint
        self._endpoint = endpoint
        self._open_at = open_at
        self._clock = clock
        self._opened_s: float | None = None
        self._patience = 1
        self._servers = ""
        self._store: EtcdStore | None = None
        self._not_before_s: dict[str, float] = {}
        self.dress: Callable[[Store], Store] = lambda store: store

    def __call__(self) -> Store:
        """Returns a new connection."""
        before_s, self._opened_s = self._opened_s, self._clock()
        if before_s is not None and self._opened_s - before_s < SHORT_S * self._patience:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        else:
            self._patience = 1
        self._store = self._open_at(self._servers or self._endpoint, self._patience)
        if self._servers:
            self._store.use(self._servers)
        return self.dress(self._store)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Returns where the servers are."""
        return tuple(part.strip() for part in (self._servers or self._endpoint).split(","))

    @property
    def store(self) -> EtcdStore:
        """Returns the connection that was opened last."""
        assert self._store is not None
        return self._store

    def use(self, clients: Sequence[str]) -> None:
        """Takes the addresses of the servers as they are now; the connection that was opened last goes over to them."""
        self._servers = ",".join(clients)
        if self._store is not None and not self._store.is_closed():
            self._store.use(self._servers)

    def move(self, endpoint: str) -> None:
        """Opens another store from now on, which has been founded in the stead of the one that was lost."""
        self._endpoint, self._servers = endpoint, ""

    def leave_word(self, key: str, unless: str) -> None:
        """Writes where the store is now into any other that has come up where the job began.

        Args:
            key: under which it is written.
            unless: a key that this store has. One that has it as well is the same by another address, or that of a job
                that has begun: it is not looked at again for a while.
        """
        for address in (part.strip() for part in self._begun_at.split(",")):
            if (
                address in self.addresses
                or self._clock() < self._not_before_s.get(address, 0.0)
                or not listens(address)
            ):
                continue
            store = self._open_at(address, 1)
            try:
                with suppress(ElaunchError):  # it is tried again
                    if store.get(unless) is not None:
                        self._not_before_s[address] = self._clock() + AGAIN_S
                    else:
                        store.create(key, ",".join(self.addresses).encode())
            finally:
                store.close()
