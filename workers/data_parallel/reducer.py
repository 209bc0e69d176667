"""All-reduces that run while backward goes on: one thread, in the order in which they are launched."""

from __future__ import annotations

import threading
from collections import deque

import torch

from elaunch import threads
from elaunch.errors import StepInterrupted
from elaunch.workers import heartbeat
from elaunch.workers.comm.group import Group


class Reducer:
    """Runs a step's all-reduces in the background.

    The first error of a step is kept, and what is launched after it is ignored: a script's backward never fails because
    a peer did. Whoever waits helps, so that the last all-reduce of a step needs no change of threads.
    """

    def __init__(self) -> None:
        self._waiting: deque[torch.Tensor] = deque()
        self._arrived = threading.Condition()
        self._running = threading.Lock()
        self._group: Group | None = None
        self._scale = 1.0
        self._closed = False
        self._thread: threading.Thread | None = None
        self.error: StepInterrupted | None = None
        self._failure: BaseException | None = None

    def begin(self, group: Group, scale: float) -> None:
        """Starts a step: sums of this group, each multiplied by `scale`."""
        assert not self._waiting, "a step begins while all-reduces of another are under way"
        self._group, self._scale, self.error = group, scale, None

    def launch(self, flat: torch.Tensor) -> None:
        """Reduce a 1-D tensor in place. It is complete when `wait` has returned and `error` is None."""
        if self._group is None or self.error is not None:
            return
        if self._thread is None and self._group.size > 1:
            self._thread = threads.start("elaunch-reducer", self._run, self._died)
        with self._arrived:
            self._waiting.append(flat)
            self._arrived.notify()

    def wait(self) -> None:
        """Returns when nothing is under way any more."""
        with heartbeat.waiting():
            while self._run_next():
                pass

    def raise_error(self) -> None:
        """Raises what went wrong in this step.

        Raises:
            StepInterrupted: a link broke, or the generation changed.
        """
        if self._failure is not None:
            raise self._failure
        if self.error is not None:
            raise self.error

    def interrupt(self, error: StepInterrupted) -> None:
        """The step was interrupted elsewhere: what is launched from now on is ignored."""
        if self.error is None:
            self.error = error

    def cancel(self) -> None:
        """Forget the step. The group's operations have been interrupted before, so this does not wait for peers."""
        with self._arrived:
            self._waiting.clear()
            self._group = None
        with self._running:
            self.error = None

    def close(self) -> None:
        """Ends the thread."""
        with self._arrived:
            self._closed = True
            self._arrived.notify_all()

    def _died(self, error: BaseException) -> None:
        # Whoever waits runs what is left, so nobody hangs; and the script hears of it.
        if self._failure is None:
            self._failure = error

    def _run(self) -> None:
        heartbeat.in_background()
        while True:
            with self._arrived:
                self._arrived.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
            self._run_next()

    def _run_next(self) -> bool:
        """Runs the next all-reduce after those under way; tells whether there was one."""
        with self._running:
            try:
                flat, group = self._waiting.popleft(), self._group
            except IndexError:
                return False
            if group is not None and self.error is None and self._failure is None:
                try:
                    group.all_reduce(flat, scale=self._scale)
                except StepInterrupted as error:
                    self.error = error
                except BaseException as failure:  # raised where the script can see it
                    self._failure = failure
            return True
