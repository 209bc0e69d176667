"""The store of a job, as `torch.distributed` wants one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from elaunch.rendezvous.membership import Generation

TIMEOUT = timedelta(seconds=30)


def store_of(generation: Generation) -> dist.Store:
    """Returns a client of the store that the agent of the generation's first node serves.

    torchrun's outlives an attempt, in the next of which the numbers of generations begin anew.
    """
    master = generation.master
    store = dist.TCPStore(master.addr, master.port, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
    return dist.PrefixStore(f"elaunch/{generation.attempt}", store)


class JobStore(dist.Store):
    """What the members of one generation tell each other; empty again in the next one, which another node may serve.

    Each thread has a client of its own, as a client does one thing at a time. A worker alone has it in memory.

    Args:
        generation: returns the generation of this moment.
    """

    def __init__(self, generation: Callable[[], Generation]) -> None:
        super().__init__()
        self._generation = generation
        self._timeout = timedelta(minutes=5)
        self._of_thread = threading.local()
        self._in_memory = dist.HashStore()

    def _client(self) -> dist.Store:
        generation = self._generation()
        if not generation.master.addr:
            return self._in_memory
        known: tuple[int, dist.Store] | None = getattr(self._of_thread, "known", None)
        if known is None or known[0] != generation.number:
            known = generation.number, dist.PrefixStore(f"torch/{generation.number}", store_of(generation))
            self._of_thread.known = known
        known[1].set_timeout(self._timeout)
        return known[1]

    def set(self, key: str, value: str) -> None:
        """Gives a key a value."""
        self._client().set(key, value)

    def get(self, key: str) -> bytes:
        """Returns the value of a key, as soon as it has one."""
        return self._client().get(key)

    def add(self, key: str, value: int) -> int:
        """Adds to the number that a key has, which is 0 at first; returns the sum."""
        return self._client().add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Returns whether all keys have values."""
        return self._client().check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns as soon as all keys have values."""
        self._client().wait(keys, timeout or self._timeout)

    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes:
        """Changes a value that is the expected one; returns what it is then."""
        return self._client().compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        """Takes a key's value away; returns whether it had one."""
        return self._client().delete_key(key)

    def num_keys(self) -> int:
        """Returns how many keys have values."""
        return self._client().num_keys()

    def set_timeout(self, timeout: timedelta) -> None:
        """Sets how long `get` and `wait` wait."""
        self._timeout = timeout

    def clone(self) -> JobStore:
        """Returns another one with the same contents."""
        return JobStore(self._generation)

    # torch calls these names from C++.
    deleteKey = delete_key
    getNumKeys = num_keys
