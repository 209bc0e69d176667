"""Clocks of devices: what sets the frequencies that `elaunch.policy.dvfs` chooses.

`Clocks` (elaunch/devices.py) is one device, NVIDIA's or a simulated one. `ClockLock` holds it at the clock that the
plan asks for and gives it back when the plan no longer does, or the process ends. A process that is killed gives
nothing back: whoever sees its end resets the device.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from dataclasses import replace

from elaunch.detect.devices import Clocks
from elaunch.detect.nvml import one_of
from elaunch.errors import ClockError, ClocksUnsupported, DeviceError
from elaunch.policy.dvfs import ClockRange, slowdown


def clock_range(clocks: Clocks, measured_mhz: int = 0) -> ClockRange:
    """Describes a device that computes and is not locked; as base it has the supported clock next to its own.

    Args:
        clocks: of the device.
        measured_mhz: as in `ClockRange`.

    Raises:
        ClockError: the device does not answer, or has no clocks to choose from.
    """
    supported, now = clocks.supported(), clocks.current()
    if not supported:
        raise ClocksUnsupported("the device has no clocks to choose from")
    return ClockRange(min(supported, key=lambda mhz: abs(mhz - now)), supported, measured_mhz)


class Governor:
    """Sets the clock of this worker's device as the plan asks for; a device that refuses is left alone, with one line.

    Args:
        clocks: of the device, or how to find it. What a process before this one has left locked is given back.
    """

    def __init__(self, clocks: Callable[[], Clocks]) -> None:
        self._lock: ClockLock | None = None
        self._range: ClockRange | None = None
        try:
            self._clocks = clocks()
            self._clocks.reset()
            self._lock = ClockLock(self._clocks)
        except DeviceError as error:
            self._give_up(error)

    def range(self) -> ClockRange | None:
        """Returns the device's clocks; the first time, it must be computing. None: its clock cannot be set."""
        if self._lock is None:
            return None
        try:
            self._range = self._range or clock_range(self._clocks)
        except DeviceError as error:
            self._give_up(error)
            return None
        return replace(self._range, measured_mhz=self._lock.held_mhz or 0)

    def hold(self, mhz: int | None) -> None:
        """Holds the device at a clock, as `ClockLock.hold` does."""
        if self._lock is not None:
            try:
                self._lock.hold(mhz)
            except DeviceError as error:
                self._give_up(error)

    def close(self) -> None:
        """Gives the device back."""
        self.hold(None)

    def _give_up(self, error: DeviceError) -> None:
        print(f"elaunch: --allow-dvfs: {error}; its clock stays as it is", file=sys.stderr)
        self._lock = None


class ClockLock:
    """Holds a device at the clock that the plan asks for; its own again at the end of the block or of the process.

    Only the process that has locked the device resets it: not what it forks.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._held_mhz: int | None = None
        self._pid = os.getpid()

    @property
    def held_mhz(self) -> int | None:
        """Returns the clock; None: the device chooses by itself."""
        return self._held_mhz

    def hold(self, mhz: int | None) -> None:
        """Locks at a clock, or with None gives the device back. Does nothing if that is so already.

        Raises:
            ClockError: it cannot be done; what was held before still is.
        """
        if mhz is None:
            self.close()
        elif mhz != self._held_mhz:
            # First, since an interrupt may come between locking and noting it.
            before, self._held_mhz, self._pid = self._held_mhz, mhz, os.getpid()
            atexit.unregister(self.close)
            atexit.register(self.close)
            try:
                self._clocks.lock(mhz)
            except ClockError:
                self._held_mhz = before
                raise

    def close(self) -> None:
        """Gives the device back; any number of times.

        Raises:
            ClockError: it cannot be done; the next call tries again.
        """
        if self._held_mhz is not None and os.getpid() == self._pid:
            self._clocks.reset()
            self._held_mhz = None
        atexit.unregister(self.close)

    def __enter__(self) -> ClockLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class SimulatedClocks:
    """A device that is no faster than its clock, for tests and emulated compute.

    Args:
        supported_mhz: ascending.
        base_mhz: at which it computes unless it is locked.
        memory_bound: the part of computing at the base that does not depend on the clock, 0..1.
    """

    def __init__(self, supported_mhz: tuple[int, ...], base_mhz: int, memory_bound: float = 0.0) -> None:
        self._range = ClockRange(base_mhz, supported_mhz)
        self._memory_bound = memory_bound
        self._mhz = base_mhz

    @property
    def speed(self) -> float:
        """Returns the speed of computing, in units of that at the base clock; 0.5 takes twice as long."""
        return 1 / slowdown(self._mhz, self._range.base_mhz, self._memory_bound)

    def supported(self) -> tuple[int, ...]:
        """Implements `Clocks.supported`."""
        return self._range.supported_mhz

    def current(self) -> int:
        """Implements `Clocks.current`."""
        return self._mhz

    def lock(self, mhz: int) -> None:
        """Implements `Clocks.lock`."""
        self._mhz = one_of(mhz, self.supported(), "the simulated device")

    def reset(self) -> None:
        """Implements `Clocks.reset`."""
        self._mhz = self._range.base_mhz
