"""Moments in what a worker computes, by its device: on an accelerator the host marks them, and waits for nothing.

The host is ahead of a device: what it is told now, it does later. So a moment is a mark in the device's work, with a
time once the device has come to it; what lies between two of them is read afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Timing(Protocol):
    """Takes moments."""

    def now(self) -> Any:
        """Returns this moment."""

    def are_over(self, moments: Iterable[Any]) -> bool:
        """Returns whether it is known when some moments were. It waits for nothing."""

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds from one moment to another, both of which are over."""


class HostTiming:
    """Takes the moments of a worker that computes on the host."""

    def now(self) -> float:
        """Returns the time."""
        return time.perf_counter()

    def are_over(self, moments: Iterable[float]) -> bool:
        """Returns that they are."""
        return True

    def seconds(self, begin: float, end: float) -> float:
        """Returns the seconds from one to the other."""
        return end - begin


class DeviceTiming:
    """Takes the moments of an accelerator, where its present stream comes to them.

    Nobody waits for them in the driver, from where an abort of a native group could not bring him back: who reads them
    asks whether they are over, and comes again.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.Event:
        """Returns the place that the present stream has come to with all that it was given until now."""
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def are_over(self, moments: Iterable[torch.Event]) -> bool:
        """Returns whether the device has come to all of them."""
        return all(moment.query() for moment in moments)

    def seconds(self, begin: torch.Event, end: torch.Event) -> float:
        """Returns the seconds of the device from one to the other."""
        return float(begin.elapsed_time(end)) / 1e3


def timing_of(device: torch.device) -> Timing:
    """Returns what takes the moments of a worker that computes on a device."""
    return HostTiming() if device.type == "cpu" else DeviceTiming(device)


class TimedWork:
    """A context that takes the time of what is done in it.

    Args:
        timing: of the device.

    Attributes:
        host_s: seconds of the host; where it is ahead of the device, of giving it orders.
        moments: when the device began and ended it; None: it was not done yet.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._begin: Any = None
        self._begin_s = self.host_s = 0.0
        self.moments: tuple[Any, Any] | None = None

    def __enter__(self) -> None:
        self._begin_s, self._begin = time.perf_counter(), self._timing.now()

    def __exit__(self, *error: object) -> None:
        self.host_s, self.moments = time.perf_counter() - self._begin_s, (self._begin, self._timing.now())


def host_clock_t() -> float:
    """Returns the Unix time, in seconds, at which `time.perf_counter` of this host was 0.

    Of a few readings the one counts in which the least time passed between the two clocks: another process may have the
    processor meanwhile.
    """
    readings = [(time.perf_counter(), time.time(), time.perf_counter()) for _ in range(5)]
    before_s, unix_t, after_s = min(readings, key=lambda one: one[2] - one[0])
    return unix_t - (before_s + after_s) / 2


class OwnTime:
    """The time in which a worker works on a step: it stands while the worker waits for others.

    On an accelerator that is what its stream has to do: a sum of gradients has a stream of its own, for which the
    present one waits where the sums are joined. It does not wait for what the host does ahead of it.

    Args:
        timing: of its device.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._spans: list[tuple[Any, Any]] = []
        self._since: Any = None
        self._ended = False

    def start(self) -> None:
        """Has it run, unless it has ended."""
        if self._since is None and not self._ended:
            self._since = self._timing.now()

    def stop(self) -> None:
        """Has it stand still."""
        if self._since is not None:
            self._spans.append((self._since, self._timing.now()))
            self._since = None

    def end(self) -> None:
        """Has it stand still from now on."""
        self.stop()
        self._ended = True

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Has it stand still while the worker waits for others."""
        runs = self._since is not None
        self.stop()
        yield
        if runs:
            self.start()

    def read_s(self) -> float | None:
        """Returns its seconds; None: the device has not come to its end yet."""
        if not self._timing.are_over(moment for span in self._spans for moment in span):
            return None
        return sum(self._timing.seconds(*span) for span in self._spans)
