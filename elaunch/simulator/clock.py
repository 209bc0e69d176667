"""The simulated clock: events in the order of their time, and of equal times in the order in which they were made."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

E = TypeVar("E")


class EventQueue(Generic[E]):
    """Events that are still to come. The clock stands at the last one that was taken out, and never goes back."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, E]] = []
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, at_s: float, event: E) -> None:
        """Adds an event; one that is due is taken out next, after those of its time."""
        assert at_s >= self.now_s, f"an event at {at_s} s, and it is {self.now_s} s"
        heapq.heappush(self._heap, (at_s, self._count, event))
        self._count += 1

    @property
    def next_s(self) -> float:
        """Returns the time of the next event; infinity if there is none."""
        return self._heap[0][0] if self._heap else float("inf")

    def take(self) -> E:
        """Takes the next event out and sets the clock to its time."""
        self.now_s, _, event = heapq.heappop(self._heap)
        return event

    def take_all(self) -> list[E]:
        """Takes out all events of the next time."""
        found = [self.take()]
        while self.next_s == self.now_s:
            found.append(self.take())
        return found
