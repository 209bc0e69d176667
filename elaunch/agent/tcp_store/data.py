"""What a store holds, and who waits for what: the rules of torch's LibUVStoreDaemon."""

from __future__ import annotations

from collections import deque
from typing import Protocol


class Waiter(Protocol):
    """A client that can wait for keys."""

    def wake(self) -> None:
        """Tells the client that all keys for which it waited are there."""


class StoreData:
    """Values and queues by key, and the clients that wait for keys to come."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, dict[Waiter, None]] = {}  # in the order in which they came
        self._awaited: dict[Waiter, set[bytes]] = {}

    def put(self, key: bytes, value: bytes) -> None:
        """Sets a value, and wakes those that wait for it."""
        self.values[key] = value
        self._came(key)

    def get(self, key: bytes) -> bytes:
        """Returns a value; an empty one where there is none."""
        return self.values.get(key, b"")

    def compare_set(self, key: bytes, expected: bytes, value: bytes) -> bytes:
        """Sets a value if the present one is `expected`, or if there is none and that is empty.

        Returns:
            The value from now on; where there is none, `expected`, as torch has it.
        """
        present = self.values.get(key)
        if present is None and expected:
            return expected
        if present is None or present == expected:
            self.values[key] = value
        self._came(key)
        return self.values[key]

    def add(self, key: bytes, number: int) -> int:
        """Adds to the number that is written as a value, 0 where there is none, and returns the sum.

        Raises:
            ValueError: the value is no number.
        """
        total = int(self.values.get(key, b"0")) + number
        self.put(key, str(total).encode())
        return total

    def append(self, key: bytes, value: bytes) -> None:
        """Appends to a value."""
        self.put(key, self.values.get(key, b"") + value)

    def delete(self, key: bytes) -> int:
        """Removes a value, and returns how many there were."""
        return 0 if self.values.pop(key, None) is None else 1

    def has(self, keys: list[bytes]) -> bool:
        """Returns whether each key has a value, or a queue that is not empty."""
        return all(key in self.values or self._queues.get(key) for key in keys)

    def wait(self, keys: list[bytes], waiter: Waiter) -> bool:
        """Returns whether all keys are there; if not, the client is woken once they are."""
        if self.has(keys):
            return True
        self._wait(waiter, {key for key in keys if not self.has([key])})
        return False

    def barrier(self, key: bytes, size: int, waiter: Waiter) -> bool:
        """Counts a client that has come; returns whether it is the last, which wakes the others.

        Raises:
            ValueError: the value is no number.
        """
        count = int(self.values.get(key, b"0")) + 1
        self.values[key] = str(count).encode()
        if count >= size:
            self._came(key)
            return True
        self._wait(waiter, {key})
        return False

    def cancel(self, waiter: Waiter) -> None:
        """Lets a client wait no more."""
        for key in self._awaited.pop(waiter, ()):
            self._stop_waiting(waiter, key)

    def push(self, key: bytes, value: bytes) -> None:
        """Appends to a queue, and wakes one of those that wait for it."""
        self._queues.setdefault(key, deque()).append(value)
        if key in self._waiting:
            first = next(iter(self._waiting[key]))
            self._stop_waiting(first, key)
            self._one_less(first, key)

    def pop(self, key: bytes) -> tuple[int, bytes]:
        """Returns the length of a queue, and its first value, which leaves it; an empty one where the length is 0."""
        queue = self._queues.get(key)
        if not queue:
            return 0, b""
        length, value = len(queue), queue.popleft()
        if not queue:
            del self._queues[key]
        return length, value

    def length(self, key: bytes) -> int:
        """Returns the length of a queue."""
        return len(self._queues.get(key, ()))

    def _wait(self, waiter: Waiter, keys: set[bytes]) -> None:
        self.cancel(waiter)
        self._awaited[waiter] = keys
        for key in keys:
            self._waiting.setdefault(key, {})[waiter] = None

    def _stop_waiting(self, waiter: Waiter, key: bytes) -> None:
        waiting = self._waiting[key]
        del waiting[waiter]
        if not waiting:
            del self._waiting[key]

    def _came(self, key: bytes) -> None:
        for waiter in self._waiting.pop(key, ()):
            self._one_less(waiter, key)

    def _one_less(self, waiter: Waiter, key: bytes) -> None:
        awaited = self._awaited[waiter]
        awaited.discard(key)
        if not awaited:
            del self._awaited[waiter]
            waiter.wake()
