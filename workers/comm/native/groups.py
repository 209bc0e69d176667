"""The native group of this worker: opened in the background, taken into use by all members at once, freed, closed."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch.distributed as dist

from elaunch import threads
from elaunch.workers.comm.native.bulk import Bulk

MEET_TIMEOUT_S = 120.0
"""For the members to come to the opening; a slow one loads its state meanwhile."""

FIRST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.1
END_S = 10.0
"""For a backend to end what it is about when this worker leaves."""

MOST_FAILURES = 2
"""With the same members; then they stay with the links."""

Connect = Callable[[], dist.Store]


@dataclass(eq=False)
class _Opening:
    """A native group of one generation.

    Attributes:
        is_open: it stands here; whether it does elsewhere, the commit barrier says.
        in_use: all members have it, and use it.
        poisoned: the generation is over.
        seconds: that its opening took.
    """

    generation: int
    bulk: Bulk
    is_open: bool = False
    in_use: bool = False
    poisoned: bool = False
    seconds: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)


class NativeGroups:
    """The native groups of one worker, one generation after the other.

    Opening, using and closing belong to the training thread; `poison` may be called by any.

    Args:
        make: returns a new native group that is not open yet; None: everything goes over links.
    """

    def __init__(self, make: Callable[[], Bulk] | None) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._floor = 0
        self._newest: _Opening | None = None
        self._left: list[_Opening] = []
        self._threads: list[threading.Thread] = []
        self._members: tuple[str, ...] = ()
        self._failures = 0

    @property
    def current(self) -> Bulk | None:
        """The group that all members use from the step on that begins now; None: there is none, and links serve."""
        newest = self._newest
        return newest.bulk if newest is not None and newest.in_use else None

    @property
    def backend(self) -> str | None:
        """Name of the backend in use."""
        bulk = self.current
        return bulk.backend if bulk is not None else None

    @property
    def opened_s(self) -> float:
        """Seconds that the opening of the newest group took here."""
        return self._newest.seconds if self._newest is not None else 0.0

    def ready(self) -> int:
        """Returns the number of the generation whose group is open here, for the commit barrier; 0: of none."""
        newest = self._newest
        return newest.generation if newest is not None and newest.is_open and not newest.poisoned else 0

    def enter(self, generation: int, members: tuple[str, ...], rank: int, connect: Connect) -> None:
        """Begins to open the group of a generation in the background; one that there is already stays.

        Of a generation that is over already none is opened.

        Args:
            generation: its number.
            members: in their order.
            rank: of this one.
            connect: returns a client of the job's store, for the thread that opens the group.
        """
        if self._make is None or len(members) == 1 or generation < self._floor:
            return
        if self._newest is not None and self._newest.generation == generation:
            return
        assert self._newest is None, f"generation {generation} begins before {self._newest} has been left"
        self._failures = self._failures if members == self._members else 0
        self._members = members
        if self._failures >= MOST_FAILURES:
            return
        opening = _Opening(generation, self._make())
        with self._lock:
            self._newest = opening
        self._start("elaunch-native-open", lambda: self._open(opening, rank, len(members), connect))

    def passed(self, ready: tuple[int, int]) -> bool:
        """Takes note of what all members brought to a commit barrier; returns whether they use the group from now on.

        Args:
            ready: the least and the greatest of what `ready` returned on the members.
        """
        newest = self._newest
        if newest is None or newest.in_use or ready != (newest.generation, newest.generation):
            return False
        newest.in_use = True
        return True

    def failed(self, generation: int) -> None:
        """Takes note that an operation failed though nobody was known to have left."""
        self._failures += 1
        if self._failures == MOST_FAILURES and self._newest is not None:
            _say(
                f"{self._newest.bulk.backend} has failed {MOST_FAILURES} times between the same members, the last time "
                f"in generation {generation}: they go on over links"
            )

    def poison(self, below: int) -> None:
        """Frees whoever waits in a group of a generation below this one. From any thread."""
        with self._lock:
            self._floor = max(self._floor, below)
            newest = self._newest
            if newest is None or newest.generation >= below or newest.poisoned:
                return
            newest.poisoned = True
        newest.over.set()
        newest.bulk.poison()

    def pause(self) -> None:
        """Leaves the group of the generation that is over: nothing is issued in it any more."""
        newest = self._newest
        if newest is not None:
            self.poison(newest.generation + 1)
            newest.bulk.leave()
            self._left.append(newest)
            self._newest = None

    def settled(self, others_in: Collection[int]) -> None:
        """Closes the groups that have been left. All survivors have left theirs: it comes after their votes.

        Args:
            others_in: numbers of generations whose groups some member still may use, as the votes say.
        """
        left, self._left = self._left, []
        for opening in left:
            assert opening.poisoned, "a group is closed before it was poisoned"
            assert opening.generation not in others_in, f"a member still is in the group of {opening.generation}"
            if opening.is_open:
                self._start("elaunch-native-close", opening.bulk.close)

    def close(self) -> None:
        """Leaves the job. A thread still in a backend when the interpreter ends would end the process by an abort."""
        self.pause()
        self.settled(())
        for thread in self._threads:
            thread.join(END_S)

    def _start(self, name: str, run: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threads.start(name, run, lambda _: None))

    def _open(self, opening: _Opening, rank: int, size: int, connect: Connect) -> None:
        begin_s = time.monotonic()
        try:
            store = dist.PrefixStore(f"native/{opening.generation}", connect())
            meet(store, size, opening.over)
            opening.bulk.open(store, rank, size)
        except RuntimeError as error:  # of torch's stores and groups
            if not opening.poisoned:
                _say(f"{opening.bulk.backend} cannot be used in generation {opening.generation}; links serve: {error}")
        else:
            opening.seconds = time.monotonic() - begin_s
            with self._lock:
                opening.is_open = not opening.poisoned
        if not opening.is_open:
            opening.bulk.poison()  # whoever poisons it may not have come to it yet
            opening.bulk.close()


def meet(store: dist.Store, size: int, over: threading.Event, timeout_s: float = MEET_TIMEOUT_S) -> None:
    """Returns when all members have come, so that nobody waits in a backend's opening for one that is dead.

    Raises:
        RuntimeError: the generation is over, or not all have come in time.
    """
    if store.add("here", 1) == size:
        store.set("all", "1")
    deadline_s, look_s = time.monotonic() + timeout_s, FIRST_LOOK_S
    while not store.check(["all"]):
        if over.wait(look_s):
            raise RuntimeError("the members have changed")
        if time.monotonic() >= deadline_s:
            raise RuntimeError(f"not all {size} members have come to its opening within {timeout_s:.0f} s")
        look_s = min(2 * look_s, LONGEST_LOOK_S)


def _say(line: str) -> None:
    print(f"[elaunch] {' '.join(line.split())}", file=sys.stderr, flush=True)
