"""Simulated processes: the training thread of each is a greenlet, which runs until it waits for something."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import greenlet


class Clock(Protocol):
    """Simulated time."""

    now_s: float

    def at(self, delay_s: float, act: Callable[[], None]) -> None: ...


class Process:
    """A process that calls `main`, then `ended` with its exit code.

    Everything else that happens in the job happens in the greenlet that made the process.

    Attributes:
        alive: whether it has not ended.
        threads: its threads beside the training thread, which end and stop with it.
        stopped_until_s: until then it does nothing, as after SIGSTOP.
    """

    def __init__(self, clock: Clock, main: Callable[[], None], ended: Callable[[int], None]) -> None:
        self._clock, self._main, self._ended = clock, main, ended
        self._thread = greenlet.greenlet(self._run)
        self._waits_for: object = None
        self._wait = 0
        self.alive = True
        self.threads: list[Process] = []
        self.stopped_until_s = 0.0

    def start(self) -> None:
        """Runs the training thread until it waits for the first time."""
        self._thread.switch()

    def kill(self) -> None:
        """Ends it at once, wherever it is."""
        self.alive = False
        self._wait += 1
        for thread in self.threads:
            thread.kill()
        if self._thread and greenlet.getcurrent() is self._thread.parent:
            self._thread.throw()
        elif self._thread and greenlet.getcurrent() is not self._thread:
            self._clock.at(0.0, self._thread.throw)

    def wait(self, what: object, timeout_s: float | None = None) -> bool:
        """Waits, in the training thread, for `wake(what)`; returns whether it came before `timeout_s` seconds."""
        self._wait += 1
        self._waits_for = what
        if timeout_s is not None:
            self._clock.at(timeout_s, partial(self._go_on, self._wait, False))
        came = bool(self._thread.parent.switch())
        self._waits_for = None
        return came

    def sleep(self, seconds: float) -> None:
        """Lets time pass in the training thread."""
        self.wait(self, seconds)

    def wake(self, what: object, delay_s: float = 0.0) -> None:
        """Ends a wait for `what`, if it still goes on in `delay_s` seconds."""
        if self._waits_for is what and self.alive:
            self._clock.at(delay_s, partial(self._go_on, self._wait, True))

    def when_running(self, act: Callable[[], None]) -> None:
        """Does something in another thread of it: now, or when it is not stopped any more, or never if it ends."""
        if self.alive:
            late_s = self.stopped_until_s - self._clock.now_s
            if late_s > 0:
                self._clock.at(late_s, partial(self.when_running, act))
            else:
                act()

    def _go_on(self, wait: int, came: bool) -> None:
        if wait != self._wait or not self.alive:
            return
        late_s = self.stopped_until_s - self._clock.now_s
        if late_s > 0:
            self._clock.at(late_s, partial(self._go_on, wait, came))
            return
        self._wait += 1
        self._thread.switch(came)

    def _run(self) -> None:
        code = 0
        try:
            self._main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        if self.alive:
            self._ended(code)
