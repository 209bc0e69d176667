"""The native groups of this worker: opened in the background, taken into use by all members at once, freed, closed."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
import torch.distributed as dist

from elaunch import threads
from elaunch.workers.comm.native.bulk import Bulk
from elaunch.workers.comm.native.opening import (
    EVERYONE,
    STATE,
    STEP_STATE,
    Begun,
    Connect,
    GroupKey,
    Needs,
    Opening,
)
from elaunch.workers.comm.native.warm_up import WarmUp

MEET_TIMEOUT_S = 120.0
"""For the members to come to the opening; a slow one loads its state meanwhile."""

FIRST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.1
LOOK_S = 0.02
"""From one look at the links to the next, while the training thread waits for an opening."""

END_S = 10.0
"""For a backend to end what it is about when this worker leaves."""

MOST_FAILURES = 2
"""With the same members; then they stay with the links."""

GIVE_UP_S = 10.0
"""For a group in which state is to move to stand here; then links are quicker."""

MOST_OPENINGS = 4
"""Of which what they took is remembered."""


class NativeGroups:
    """The native groups of one worker, one generation after the other.

    Opening, using and closing belong to the training thread; `poison` may be called by any.

    Args:
        make: returns a new native group that is not open yet; None: everything goes over links.
        messages: whether members send to each other in the group of all of them, not only in others.

    Attributes:
        needs: returns what the members of a generation need, when it or another plan begins; by default the group of
            all of them.
    """

    def __init__(self, make: Callable[[], Bulk] | None, messages: bool = False) -> None:
        self._make, self._messages = make, messages
        self._lock = threading.Lock()
        self._floor = 0
        self._newest: Opening | None = None
        self._left: list[Opening] = []
        self._threads: list[threading.Thread] = []
        self._members: tuple[str, ...] = ()
        self._failures = 0
        self._warm_up: WarmUp | None = None
        self._openings: deque[tuple[int, float]] = deque(maxlen=MOST_OPENINGS)
        self.needs: Callable[[tuple[str, ...]], Needs] = lambda members: [GroupKey(EVERYONE, members)]

    @property
    def current(self) -> Bulk | None:
        """The group of all that they use from the step on that begins now; None: there is none, and links serve."""
        newest = self._newest
        return self.in_use.get(GroupKey(EVERYONE, newest.members)) if newest is not None else None

    @property
    def in_use(self) -> Mapping[GroupKey, Bulk]:
        """The groups of this worker that are used from the step on that begins now; empty: links serve."""
        newest = self._newest
        return newest.bulks if newest is not None and newest.in_use else {}

    @property
    def are_used(self) -> bool:
        """Whether the members use their groups, alike on all, of which this worker may have none."""
        return self._newest is not None and self._newest.in_use

    def serves(self, needs: Needs) -> bool:
        """Returns whether the groups are in use, alike on all members, and are those of these needs."""
        newest = self._newest
        return newest is not None and newest.in_use and newest.needs == tuple(needs)

    @property
    def backend(self) -> str | None:
        """Name of the backend in use."""
        return next((bulk.backend for bulk in self.in_use.values()), None)

    @property
    def opened_s(self) -> float:
        """Seconds that the opening of the newest groups took here."""
        return self._newest.seconds if self._newest is not None else 0.0

    @property
    def openings(self) -> tuple[tuple[int, float], ...]:
        """Members and seconds of the newest openings of a group of all members alone, the newest last."""
        with self._lock:
            return tuple(self._openings)

    def await_open(self, longest_s: float, look: Callable[[], object]) -> None:
        """Waits until what is being opened is open here or cannot be, or the generation is over.

        Args:
            longest_s: seconds after which it returns anyway.
            look: called every 0.02 s meanwhile; what it raises ends the wait.
        """
        newest = self._newest
        if newest is not None:
            _await(newest, newest.last, longest_s, look)

    def ready(self) -> int:
        """Returns the number of the generation whose groups are open here, for the commit barrier; 0: of none."""
        newest = self._newest
        return newest.generation if newest is not None and newest.needs and newest.is_ready() else 0

    def enter(self, generation: int, members: tuple[str, ...], rank: int, connect: Connect) -> None:
        """Begins to open the groups of a generation in the background; those that there are already stay.

        Of a generation that is over already none is opened. All members call it with the same arguments, also when
        what they need changes within a generation: then links serve until all have the new groups.

        Args:
            generation: its number.
            members: in their order.
            rank: of this one.
            connect: returns a client of the job's store, for the thread that opens the groups.
        """
        newest, needs = self._of(generation, members, rank, connect), tuple(self.needs(members))
        if newest is None or (newest is self._newest and newest.needs == needs):
            return
        new = [key for key in needs if members[rank] in key.members and key not in newest.bulks]
        if self._add(newest, new, newest.bulks):
            newest.needs, newest.in_use = needs, False
            self._open_later(newest, new)

    def ask_for(self, generation: int, key: GroupKey) -> None:
        """Begins to open one more group of a generation in the background; all its members ask for it.

        It is none of the needs of all members, so the others neither wait for it nor know of it.
        """
        newest = self._newest
        if self._make is None or newest is None or newest.generation != generation or key in newest.more:
            return
        bulk = self._make()
        with self._lock:
            if newest.poisoned:
                return
            newest.more[key] = bulk
        # In a thread of its own: members may ask for several in different orders.
        self.start("elaunch-native-open", lambda: self._open(newest, [key], None))

    def opened(self, generation: int, key: GroupKey) -> Bulk | None:
        """Returns a group that was asked for, if it is open here; whether it is elsewhere its members must find out."""
        newest = self._newest
        if newest is None or newest.generation != generation or newest.poisoned or key not in newest.is_open:
            return None
        return newest.more.get(key)

    @property
    def offered(self) -> str:
        """Name of the backend of the groups that this worker can make; "": of none."""
        return self._make().backend if self._make is not None else ""

    def load(self, device: torch.device) -> None:
        """Begins to load, in the background, what a device and the backend load in the first steps of a worker."""
        self._warm_up = WarmUp(device, self.offered)

    def await_load(self) -> None:
        """Returns when it is loaded.

        Raises:
            Exception: what loading has failed with.
        """
        if self._warm_up is not None:
            self._warm_up.wait()

    def open_for_state(
        self, generation: int, members: tuple[str, ...], rank: int, connect: Connect, look: Callable[[], object]
    ) -> str:
        """Opens a group of all members before the generation begins, for state to move in.

        All members call it with the same arguments, and tell each other what came of it before any uses the group.

        Args:
            generation, members, rank, connect: as for `enter`.
            look: called every 0.02 s while this worker waits; what it raises ends the wait.

        Returns:
            Why it does not stand here; "": it does.
        """
        newest = self._of(generation, members, rank, connect)
        if newest is None:
            return f"there are no native groups in generation {generation}"
        newest.for_state[STATE] += 1
        key = newest.state_key
        if not self._add(newest, [key], newest.bulks):
            return "the members have changed"
        return _await_open(newest, key, self._open_later(newest, [key]), look)

    def open_in_step(self, generation: int, members: tuple[str, ...], rank: int, connect: Connect) -> Begun | None:
        """Begins to open, in the background, a group of all members in which state moves during the step that comes.

        All members call it with the same arguments, before they enter the generation or change its plan. No other group
        of this worker is opened or used on its device until that step commits: operations of two groups that wait for
        each other's place on a device could wait for ever. Returns None where there are no native groups.
        """
        newest = self._of(generation, members, rank, connect)
        if newest is None:
            return None
        self._end_in_step(newest)
        newest.for_state[STEP_STATE] += 1
        key = GroupKey(f"{STEP_STATE}{newest.for_state[STEP_STATE]}", members)
        if not self._add(newest, [key], newest.more):
            return None
        return Begun(generation, key, self._open_later(newest, [key]))

    def await_begun(self, begun: Begun, look: Callable[[], object]) -> tuple[Bulk | None, str]:
        """Returns a group once it is open, or None and why it does not stand here; from any thread.

        Args:
            begun: its opening.
            look: as for `open_for_state`.
        """
        newest = self._newest
        if newest is None or newest.generation != begun.generation or begun.key not in newest.more:
            return None, "the members have changed"
        bulk = newest.more[begun.key]
        wrong = _await_open(newest, begun.key, begun.thread, look)
        return (None, wrong) if wrong else (bulk, "")

    def for_state(self, members: tuple[str, ...]) -> Bulk | None:
        """Returns a group of all members in which state may move: one that they use, or that was opened for it."""
        newest = self._newest
        if newest is None or newest.members != members:
            return None
        key = newest.state_key
        return newest.bulks[key] if key in newest.is_open else self.in_use.get(GroupKey(EVERYONE, members))

    def state_moved(self, stands: bool = True) -> None:
        """Keeps the group that was opened for state if it is one that the members need, and gives it back else.

        Args:
            stands: whether it does on all members, which are out of it; False: on some it could not be opened.
        """
        newest = self._newest
        key = newest.state_key if newest is not None else None
        if newest is None or key not in newest.bulks:
            return
        everyone, is_open = GroupKey(EVERYONE, newest.members), key in newest.is_open
        keeps = stands and everyone in self.needs(newest.members) and everyone not in newest.bulks
        with self._lock:
            bulk = newest.bulks.pop(key)
            newest.is_open.discard(key)
            if keeps:
                newest.bulks[everyone] = bulk
                newest.is_open.add(everyone)
                self._openings.append((len(newest.members), newest.seconds))
        if not keeps:
            self._drop(bulk, is_open)

    def _end_in_step(self, opening: Opening) -> None:
        """Gives back the group in which state has moved during a step: all members are out of it."""
        key = opening.in_step
        if key is None:
            return
        with self._lock:
            bulk, is_open = opening.more.pop(key), key in opening.is_open
            opening.is_open.discard(key)
        self._drop(bulk, is_open)

    def _drop(self, bulk: Bulk, is_open: bool) -> None:
        bulk.poison()
        bulk.leave()
        if is_open:
            self.start("elaunch-native-close", bulk.close)

    def _of(self, generation: int, members: tuple[str, ...], rank: int, connect: Connect) -> Opening | None:
        """The groups of a generation, which may be none yet; None: it is over, or has links alone."""
        if self._make is None or len(members) == 1 or generation < self._floor:
            return None
        newest = self._newest
        if newest is not None and newest.generation == generation:
            return newest
        assert newest is None, f"generation {generation} begins before {newest} has been left"
        self._failures = self._failures if members == self._members else 0
        self._members = members
        return Opening(generation, members, rank, connect) if self._failures < MOST_FAILURES else None

    def _add(self, opening: Opening, keys: Sequence[GroupKey], to: dict[GroupKey, Bulk]) -> bool:
        """Makes groups that `poison` knows of before they open; returns False if the generation is over."""
        assert self._make is not None
        made = {key: self._make() for key in keys}
        with self._lock:
            if opening.generation < self._floor:
                return False
            to |= made
            self._newest = opening
        return True

    def _open_later(self, opening: Opening, keys: Sequence[GroupKey]) -> threading.Thread | None:
        before = opening.last
        if keys:
            opening.last = self.start("elaunch-native-open", lambda: self._open(opening, keys, before))
        return opening.last

    def passed(self, ready: tuple[int, int]) -> bool:
        """Takes note of what all members brought to a commit barrier; returns whether they use the groups from now on.

        Args:
            ready: the least and the greatest of what `ready` returned on the members.
        """
        newest = self._newest
        if newest is not None:
            self._end_in_step(newest)
        if newest is None or newest.in_use or ready != (newest.generation, newest.generation):
            return False
        newest.in_use = True
        return True

    def failed(self, generation: int) -> None:
        """Takes note that an operation failed; where the generation is over, as was to be expected."""
        if self._newest is None or self._newest.poisoned:
            return
        self._failures += 1
        if self._failures == MOST_FAILURES:
            name = next((bulk.backend for bulk in self._newest.bulks.values()), "a native group")
            _say(
                f"{name} has failed {MOST_FAILURES} times between the same members, the last time in generation "
                f"{generation}: they go on over links"
            )

    def poison(self, below: int) -> None:
        """Frees whoever waits in a group of a generation below this one. From any thread."""
        with self._lock:
            self._floor = max(self._floor, below)
            newest = self._newest
            if newest is None or newest.generation >= below or newest.poisoned:
                return
            newest.poisoned = True
            bulks = list(newest.all.values())
        newest.over.set()
        for bulk in bulks:
            bulk.poison()

    def give_up(self) -> None:
        """Ends an opening: no step of this generation comes that would use the groups."""
        if self._newest is not None and not self._newest.in_use:
            self.poison(self._newest.generation + 1)

    def pause(self) -> None:
        """Leaves the groups of the generation that is over: nothing is issued in them any more."""
        newest = self._newest
        if newest is not None:
            self.poison(newest.generation + 1)
            for bulk in newest.all.values():
                bulk.leave()
            self._left.append(newest)
            self._newest = None

    def settled(self, others_in: Collection[int]) -> None:
        """Closes the groups that have been left. All survivors have left theirs: it comes after their votes.

        Args:
            others_in: numbers of generations whose groups some member still may use, as the votes say.

        Raises:
            RuntimeError: a group is not poisoned here, or a member still may use it. None is closed.
        """
        for opening in self._left:
            if not opening.poisoned or opening.generation in others_in:
                why = "a member still is in them" if opening.poisoned else "this worker has not poisoned them"
                raise RuntimeError(
                    f"the native groups of generation {opening.generation} are not closed: {why}, and may yet use what "
                    "that gives back"
                )
        left, self._left = self._left, []
        for opening in left:
            for key in opening.is_open:
                self.start("elaunch-native-close", opening.all[key].close)

    def close(self) -> None:
        """Leaves the job. A thread still in a backend when the interpreter ends would end the process by an abort."""
        self.pause()
        self.settled(())
        if self._warm_up is not None:
            self._warm_up.end()
        for thread in self._threads:
            thread.join(END_S)

    def start(self, name: str, run: Callable[[], None]) -> threading.Thread:
        """Starts a thread for whose end this worker waits when it leaves the job."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threads.start(name, run, lambda _: None))
        return self._threads[-1]

    def _open(self, opening: Opening, keys: Sequence[GroupKey], before: threading.Thread | None) -> None:
        """Opens groups in the order of all members, so that none waits for one that waits for it."""
        bulks = {key: opening.all[key] for key in keys}
        if before is not None:
            before.join()
        while opening.in_step is not None and opening.in_step not in bulks and not opening.over.wait(LONGEST_LOOK_S):
            pass
        begin_s = time.monotonic()
        try:
            store = dist.PrefixStore(f"native/{opening.generation}", opening.connect())
        except RuntimeError as error:
            self._refused(opening, bulks, error)
            return
        for key, bulk in bulks.items():
            me = opening.members[opening.rank]
            messages = self._messages or key.purpose != EVERYONE
            try:
                place = dist.PrefixStore(key.place, store) if key.place else store
                meet(place, len(key.members), opening.over)
                bulk.open(place, key.members.index(me), len(key.members), messages=messages)
            except RuntimeError as error:  # of torch's stores and groups
                self._refused(opening, {key: bulk}, error)
                continue
            with self._lock:
                if not opening.poisoned and key in opening.all:  # one for state may have been given up
                    opening.is_open.add(key)
            if key not in opening.is_open:
                _give_back(bulk)
        seconds, everyone = time.monotonic() - begin_s, GroupKey(EVERYONE, opening.members)
        opening.seconds += seconds
        with self._lock:
            if keys == [everyone] and everyone in opening.is_open:
                self._openings.append((len(opening.members), seconds))

    def _refused(self, opening: Opening, bulks: Mapping[GroupKey, Bulk], error: RuntimeError) -> None:
        key, bulk = next(iter(bulks.items()))
        if key.purpose.startswith(STATE):
            opening.refused[key] = str(error)
        elif not opening.poisoned:
            _say(f"{bulk.backend} cannot be used in generation {opening.generation}; links serve: {error}")
        for each in bulks.values():
            _give_back(each)


def _await(opening: Opening, thread: threading.Thread | None, longest_s: float, look: Callable[[], object]) -> None:
    """Waits until a thread that opens groups has ended, the generation is over, or it has taken too long."""
    end_s = time.monotonic() + longest_s
    while thread is not None and thread.is_alive() and not opening.poisoned:
        if (left_s := end_s - time.monotonic()) <= 0:
            return
        thread.join(min(left_s, LOOK_S))
        look()


def _await_open(opening: Opening, key: GroupKey, thread: threading.Thread | None, look: Callable[[], object]) -> str:
    """Waits for a group in which state is to move; returns why it does not stand here, "" if it does."""
    bulk = opening.all[key]
    _await(opening, thread, GIVE_UP_S, look)
    if key in opening.is_open:
        return ""
    bulk.poison()
    return opening.refused.get(key, f"it did not stand within {GIVE_UP_S:g} s")


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


def _give_back(bulk: Bulk) -> None:
    bulk.poison()  # whoever poisons it may not have come to it yet
    bulk.close()


def _say(line: str) -> None:
    print(f"[elaunch] {' '.join(line.split())}", file=sys.stderr, flush=True)
