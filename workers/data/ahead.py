"""Which micro-batches to ask for ahead of their turn, and what becomes of them when samples are dealt anew; pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Place:
    """A micro-batch: the step, and its samples by their places in the step."""

    step: int
    start: int
    stop: int


class LoadedAhead:
    """The micro-batches of one worker that are on their way, or here before their turn.

    They are asked for in the order in which they will be used, as if the worker did the same part of every step. When
    it does another part, or a step again, what is still its own is kept, and the rest is dropped when it arrives.
    So each micro-batch is used as often as it is taken, whatever was asked for.

    Args:
        steps: of the job; none is asked for beyond.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._n_asked = 0
        self._coming: dict[int, Place | None] = {}  # by the number of the request; None: to be dropped
        self._here: dict[Place, Any] = {}
        self._rest: Iterator[Place] = iter(())
        self._share: tuple[range, ...] = ()
        self._untaken: set[Place] = set()
        self._step = -1

    def begin(self, step: int, share: tuple[range, ...]) -> list[int]:
        """Begins a step, of which this worker does `share`; returns the numbers of requests that are not wanted now."""
        as_expected = not self._untaken and (step, share) == (self._step + 1, self._share)
        self._step, self._share = step, share
        self._untaken = {Place(step, one.start, one.stop) for one in share}
        if as_expected:
            return []
        known = [place for place in self._coming.values() if place is not None]
        last = max((place.step for place in (*known, *self._here)), default=step)
        wanted = set(self._places(step, min(last + 1, self._steps)))
        dropped = [number for number, place in self._coming.items() if place is not None and place not in wanted]
        self._coming |= dict.fromkeys(dropped, None)
        self._here = {place: batch for place, batch in self._here.items() if place in wanted}
        kept = {*self._coming.values(), *self._here}
        self._rest = (place for place in self._places(step, self._steps) if place not in kept)
        return dropped

    def _places(self, first: int, end: int) -> Iterator[Place]:
        share = self._share
        return (Place(step, one.start, one.stop) for step in range(first, end) for one in share)

    def ask(self) -> tuple[int, Place | None]:
        """Returns the number of the next request, and the micro-batch to ask for; None: there are no more steps."""
        self._n_asked += 1
        self._coming[self._n_asked] = place = next(self._rest, None)
        return self._n_asked, place

    def arrived(self, number: int, batch: Any) -> None:
        """Takes in what a request has brought."""
        place = self._coming.pop(number)
        if place is not None:
            self._here[place] = batch

    def has(self, place: Place) -> bool:
        """Returns whether a micro-batch is here."""
        return place in self._here

    def take(self, place: Place) -> Any:
        """Returns a micro-batch that is here, and forgets it."""
        self._untaken.discard(place)
        return self._here.pop(place)

    @property
    def coming(self) -> list[int]:
        """The numbers of the requests on their way."""
        return list(self._coming)
