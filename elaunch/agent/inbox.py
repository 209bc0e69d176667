"""What reaches the agent's loop from elsewhere: what threads have heard, and signals. Either wakes the loop."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
from collections import deque
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from elaunch.agent.decisions.actions import Action
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.rendezvous.membership import Generation

Decide = Callable[[Lifecycle], list[Action]]
"""Lets something happen to the lifecycle; returns what is to be done about it."""


class Inbox:
    """Keeps news and signals until the loop takes them.

    Args:
        selector: of the loop; the end of a pipe that wakes it is registered there, with the inbox as data.

    Attributes:
        news: what has happened, the oldest first; where it is a generation that was announced, with that.
        signals: numbers of those that came, the oldest first.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self.news: deque[tuple[Decide, Generation | None]] = deque()
        self.signals: deque[int] = deque()
        self._read_fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._handlers: dict[int, Any] = {}
        self._former_wakeup_fd = -1
        selector.register(self._read_fd, selectors.EVENT_READ, self)

    def post(self, decide: Decide, generation: Generation | None = None) -> None:
        """Lets the loop apply news; may be called from any thread."""
        self.news.append((decide, generation))
        with contextlib.suppress(BlockingIOError):
            os.write(self._write_fd, b"\0")

    def receive(self) -> None:
        """Empties the pipe, which has woken the loop."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._read_fd, 4096)

    def take_signals(self, numbers: Iterable[int]) -> None:
        """Has these signals come here, until `leave_signals`."""
        self._handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
        self._former_wakeup_fd = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)

    def leave_signals(self) -> None:
        """Gives signals back to whom they went before."""
        signal.set_wakeup_fd(self._former_wakeup_fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals.append(number)
