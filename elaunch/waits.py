"""How whoever waits says so: after a while a line that says what for and for how long already, and then more rarely.

`Pace` says when a line is due; it is pure. `Watched` is for loops that sleep:

    watched = Watched(say)
    while not there():
        watched.tell(f"the rendezvous at {endpoint}", left_s)
        time.sleep(0.2)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from threading import Event

WAITED_S = 3.0  # what takes less is not worth a line
LONGEST_PAUSE_S = 10.0
LOOK_S = 1.0


class Pace:
    """Says when the next line about waiting is due: the first after a while, and then ever more rarely.

    It is no dataclass, since this module lies on the launch path, and `dataclasses` takes milliseconds to import.

    Attributes:
        due_s: when the next line is due.
        pause_s: how long after that the line after it would be, if this were halved.
        first_s: after what time the first line is due, in seconds.
        longest_s: the longest pause between two, in seconds.
    """

    __slots__ = ("due_s", "first_s", "longest_s", "pause_s")

    def __init__(self, due_s: float, pause_s: float, first_s: float, longest_s: float) -> None:
        self.due_s, self.pause_s, self.first_s, self.longest_s = due_s, pause_s, first_s, longest_s

    @classmethod
    def begin(cls, now_s: float, first_s: float | None = None, longest_s: float = LONGEST_PAUSE_S) -> Pace:
        """Returns the pace of a wait that begins now."""
        first_s = WAITED_S if first_s is None else first_s
        return cls(now_s + first_s, first_s, first_s, longest_s)

    @property
    def has_told(self) -> bool:
        """Returns whether a line was due since the wait began."""
        return self.pause_s != self.first_s

    def reset(self, now_s: float) -> None:
        """Notes that nothing is waited for now."""
        self.due_s, self.pause_s = now_s + self.first_s, self.first_s

    def is_due(self, now_s: float) -> bool:
        """Returns whether a line is due; if so, the next one is due after twice the time."""
        if now_s < self.due_s:
            return False
        self.pause_s = min(self.longest_s, 2 * self.pause_s)
        self.due_s = now_s + self.pause_s
        return True


class Watched:
    """A wait in a loop of the calling thread, which begins when this is made.

    Args:
        say: tells the user.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began_s = time.monotonic()
        self._pace = Pace.begin(self._began_s)

    def tell(self, what: str, left_s: float | None = None) -> None:
        """Says what is waited for, if a line is due.

        Args:
            what: is waited for.
            left_s: after which the wait ends in any case; None: it has no such end.
        """
        now_s = time.monotonic()
        if self._pace.is_due(now_s):
            left = "" if left_s is None else f", {max(0.0, left_s):.0f} s left"
            self._say(f"waiting for {now_s - self._began_s:.0f} s{left}: {what}")


def watch(
    over: Event, say: Callable[[str], None], what: str, limit_s: float | None, late: Callable[[], object] = lambda: None
) -> None:
    """Says now and then, from a thread of its own, that another one waits, until that is over or the time is up.

    Args:
        over: set when the wait is over.
        say: tells the user.
        what: is waited for.
        limit_s: how long at most, in seconds; None: the wait has no such end.
        late: called when that time is up.
    """
    watched, begin_s = Watched(say), time.monotonic()
    left_s = limit_s
    while not over.wait(LOOK_S if left_s is None else max(0.0, min(LOOK_S, left_s))):
        left_s = None if limit_s is None else begin_s + limit_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            late()
            return
        watched.tell(what, left_s)
