"""Operations of a Gloo group, whose waits end with the group.

When a connection ends, Gloo tells those who wait for messages that have not begun. Of one that it was in the middle of,
in either direction, it tells nobody: whoever waits for that in torch waits for ever, and a time-out there closes all
connections of the group. So messages are waited for in threads of their own, which are left behind if need be;
collectives, whose waits may end early, in short spells.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from elaunch import threads

NO_TIMEOUT = timedelta(days=7)
"""Who is dead the membership finds out, and frees whoever waits."""

SPELL_S = 0.02
"""How long the end of its group may go unseen by whoever waits for a collective."""

CLOSED_S = 2.0
"""For Gloo to close connections that have been shut down, which takes it a millisecond."""

LOOK_S = 0.0005

THREADS = "pt_gloo_runloop"  # as torch names those that carry out collectives
ASLEEP_LOOK_S = 0.002
ASLEEP_LOOKS = 5
"""So often a thread must be seen asleep, and not awake in between, to wait for a message rather than a lock."""

LOOK_AT_CONNECTIONS_S = 1.0
"""How often whoever waits in a living group looks whether a connection has broken: all may have lost the same end."""


class Freed(RuntimeError):
    """The group is over; the operation may not be, and may use its tensors until it has been drained."""

    def __init__(self, why: str = "the group is closed") -> None:
        super().__init__(why)


class GroupEnd:
    """The end of a group, and who is told of it.

    Args:
        is_closed: returns whether all connections of the group are closed, or used up: Gloo neither reads nor writes.
        is_broken: returns whether it has closed any.

    Attributes:
        has_come: whether the group is poisoned.
    """

    def __init__(self, is_closed: Callable[[], bool], is_broken: Callable[[], bool]) -> None:
        self.is_closed, self.is_broken = is_closed, is_broken
        self.has_come = False
        self._lock = threading.Lock()
        self._told: set[Callable[[], object]] = set()

    def come(self) -> None:
        """Takes note that the group is poisoned, and tells all who wait. From any thread."""
        with self._lock:
            self.has_come = True
            told = list(self._told)
        for tell in told:
            tell()

    def add(self, tell: Callable[[], object]) -> None:
        """Has something called when the end comes; at once if it has come."""
        with self._lock:
            self._told.add(tell)
            has_come = self.has_come
        if has_come:
            tell()

    def forget(self, tell: Callable[[], object]) -> None:
        """Takes back what `add` was given: it is over."""
        with self._lock:
            self._told.discard(tell)

    @property
    def is_awaited(self) -> bool:
        """Returns whether something that was begun in the group, and is waited for, has not come to its end."""
        return bool(self._told)

    def look(self) -> None:
        """Raises `Freed` if a connection has broken."""
        if self.is_broken():
            raise Freed("a connection of the group has broken")

    def failure(self, error: RuntimeError) -> RuntimeError:
        """Returns what whoever waits is told of an error of Gloo's: where the group is over, that it comes of."""
        if not self.has_come or isinstance(error, Freed):
            return error
        freed = Freed()
        freed.__cause__ = error
        return freed

    def pass_by(self, is_over: Callable[[], bool], seconds: float) -> None:
        """Returns when something is over, all connections are closed, or the time has passed."""
        end_s = time.monotonic() + seconds
        while not is_over() and not self.is_closed() and time.monotonic() < end_s:
            time.sleep(LOOK_S)


class GlooWork(dist.Work):
    """An operation of a Gloo group, or several that were begun together."""

    def drained(self, seconds: float) -> None:
        """Returns when nothing uses the tensors any more, or the time has passed. The group is poisoned."""
        raise NotImplementedError


class Messages(GlooWork):
    """Messages that were begun together.

    Args:
        works: Gloo's.
        end: of the group.
    """

    def __init__(self, works: Sequence[dist.Work], end: GroupEnd) -> None:
        super().__init__()
        self._works, self._end = works, end
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._listens = self._over = False
        self._error = ""

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns when all have come or, if they are sent, left.

        Raises:
            Freed: the group is over, or has lost a connection, and they may not be over.
            RuntimeError: one has failed, or the time has passed, which has no effect on the group.
        """
        self._listen()
        end_s = time.monotonic() + timeout.total_seconds()
        while not self._news.wait(min(LOOK_AT_CONNECTIONS_S, max(0.0, end_s - time.monotonic()))):
            if time.monotonic() >= end_s:
                raise RuntimeError(f"a message was not over within {timeout}")
            self._end.look()
        if not self._over and not self._error:
            self._end.pass_by(lambda: self._over, CLOSED_S)
            if not self._over:
                raise Freed
        if self._error:
            raise self._end.failure(RuntimeError(self._error))
        return True

    def is_completed(self) -> bool:
        """Returns whether they are known to be over, or to have failed: not before they have been waited for."""
        return self._over or bool(self._error)

    def is_success(self) -> bool:
        """Returns whether they are over, and nothing went wrong."""
        return self._over and not self._error

    def drained(self, seconds: float) -> None:
        """Returns when they are over, or their connections are closed."""
        self._end.pass_by(lambda: self._over, seconds)

    def end(self) -> None:
        """Comes to the end of all, one after the other, which may be never; tells of the first error at once."""
        for work in self._works:
            try:
                work.wait(NO_TIMEOUT)
            except Exception as error:  # whoever waits hears of any
                if not self._error:
                    self._error = str(error) or "a message has failed"
                    self._news.set()
        self._over = True
        self._news.set()
        self._end.forget(self._news.set)

    def _listen(self) -> None:
        with self._lock:
            listens, self._listens = self._listens, True
        if not listens:
            self._end.add(self._news.set)
            _Waiter.idle().awaits(self)


class Collective(GlooWork):
    """A sum, or another operation that Gloo's own threads do.

    Args:
        work: Gloo's.
        end: of the group.
    """

    def __init__(self, work: dist.Work, end: GroupEnd) -> None:
        super().__init__()
        self._work, self._end = work, end

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Returns when it is over.

        Raises:
            Freed: the group is over, or has lost a connection, and it may not be over.
            RuntimeError: it has failed, or the time has passed, which has no effect on the group.
        """
        look_s = time.monotonic() + LOOK_AT_CONNECTIONS_S

        def look() -> None:
            nonlocal look_s
            if self._end.has_come:
                raise Freed from None
            if (now_s := time.monotonic()) >= look_s:
                look_s = now_s + LOOK_AT_CONNECTIONS_S
                self._end.look()

        try:
            return wait_in_spells(self._work.wait, self._work.is_completed, look, SPELL_S, timeout)
        except RuntimeError as error:
            failure = self._end.failure(error)
            raise failure from failure.__cause__

    def is_completed(self) -> bool:
        """Returns whether it is over."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Returns whether it is over, and nothing went wrong."""
        return self._work.is_success()

    def result(self) -> Any:
        """Returns the tensors."""
        return self._work.result()

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a future of the tensors, which raises once the group is over."""
        return _Outcome(self._work.get_future(), self._end).future

    def drained(self, seconds: float) -> None:
        """Returns when it is over, or no connection can wake the thread of Gloo's that waits in it, or time has passed.

        Whatever the connections, that thread may be computing.
        """
        end_s, before, looks = time.monotonic() + seconds, None, 0
        while not self._work.is_completed() and time.monotonic() < end_s:
            asleep = threads_asleep() if self._end.is_closed() else None
            looks = looks + 1 if asleep and asleep == before else 0
            if looks >= ASLEEP_LOOKS:
                return
            before = asleep
            time.sleep(LOOK_S if asleep is None else ASLEEP_LOOK_S)


def threads_asleep(tasks: str = "/proc/self/task") -> frozenset[tuple[str, str]] | None:
    """Returns torch's threads that carry out Gloo's collectives, each with how often it has gone to sleep.

    Args:
        tasks: folder in which the kernel shows threads.

    Returns:
        None: one of them is awake, or there are none of their name.
    """
    found = set()
    for thread in os.listdir(tasks):
        with contextlib.suppress(OSError):  # it has ended
            with open(f"{tasks}/{thread}/status") as file:
                status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
            if status.get("Name") != THREADS:
                continue
            if not status["State"].startswith("S"):
                return None
            found.add((thread, status["voluntary_ctxt_switches"]))
    return frozenset(found) or None


class _Outcome:
    """What comes first, the end of a collective or that of its group.

    Args:
        gloo: future of the collective.
        end: of the group.
    """

    def __init__(self, gloo: torch.futures.Future[Any], end: GroupEnd) -> None:
        self.future: torch.futures.Future[Any] = torch.futures.Future()
        self._end = end
        self._lock = threading.Lock()
        self._has_come = False
        end.add(self._freed)
        gloo.add_done_callback(self._done)

    def _done(self, gloo: torch.futures.Future[Any]) -> None:
        self._end.forget(self._freed)
        if self._is_first():
            try:
                value = gloo.value()
            except RuntimeError as error:
                self.future.set_exception(self._end.failure(error))
            else:
                self.future.set_result(value)

    def _freed(self) -> None:
        # What follows from it is the script's, and must not hold up whoever frees the group.
        threads.start("elaunch-gloo-freed", self._free, lambda _: None)

    def _free(self) -> None:
        self._end.pass_by(self.future.done, CLOSED_S)
        if self._is_first():
            self.future.set_exception(Freed())

    def _is_first(self) -> bool:
        with self._lock:
            has_come, self._has_come = self._has_come, True
        return not has_come


class _Waiter:
    """A thread that waits for messages. It is used again, unless Gloo never tells it of an end."""

    _IDLE: ClassVar[deque[_Waiter]] = deque()

    def __init__(self) -> None:
        self._given: SimpleQueue[Messages] = SimpleQueue()
        threads.start("elaunch-gloo-wait", self._run, lambda _: None)

    @classmethod
    def idle(cls) -> _Waiter:
        """Returns one that waits for nothing."""
        try:
            return cls._IDLE.pop()
        except IndexError:
            return cls()

    def awaits(self, messages: Messages) -> None:
        """Has the thread wait for messages."""
        self._given.put(messages)

    def _run(self) -> None:
        while True:
            self._given.get().end()
            self._IDLE.append(self)


def wait_in_spells(
    wait: Callable[..., bool],
    is_completed: Callable[[], bool],
    look: Callable[[], object],
    spell_s: float,
    timeout: timedelta = NO_TIMEOUT,
) -> bool:
    """Waits for an operation that a time-out has no effect on, over and over; returns what its wait does.

    Args:
        wait: of the operation; takes a time-out, or none for no limit.
        is_completed: returns whether the operation is over.
        look: called between two spells; what it raises ends the wait.
        spell_s: how long one is, in seconds.
        timeout: for all of it.

    Raises:
        RuntimeError: the operation has failed, its group is over, or the time has passed.
    """
    end_s = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            return wait(_spell(min(spell_s, end_s - time.monotonic())))
        except Freed:
            raise
        except RuntimeError:
            if is_completed():  # it has failed; or it came to its end as this spell did, and then there is no error
                return wait()
            look()
            if time.monotonic() >= end_s:
                raise


def _spell(seconds: float) -> timedelta:
    return timedelta(seconds=max(1e-3, seconds))  # torch takes less for no limit at all


# A forked child has none of these threads.
os.register_at_fork(after_in_child=_Waiter._IDLE.clear)
