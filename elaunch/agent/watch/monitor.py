"""The threads of an agent that look after its devices and its machine; what they find goes to the agent's loop.

Each may block on its own: a driver that hangs, a network file system that is away. None holds up the others, the agent
or its end.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from elaunch import threads
from elaunch.agent.config import HealthSettings
from elaunch.detect import host
from elaunch.detect.devices import Accelerators, find_accelerators
from elaunch.detect.health import DeviceHealth, Finding
from elaunch.detect.host import HostHealth

# How often each is looked at, in intervals: a look at memory costs microseconds, one at a GPU milliseconds, and
# npu-smi takes seconds.
EVERY = {"cuda": 5, "npu": 30}
DISKS_EVERY = 10
AGAIN_S = 60.0  # after a look that failed: whatever it lacked, descriptors or a mount, may be back
HURRY = 10  # so many times as often, where memory may be full within seconds
JOIN_S = 0.3


class Running(NamedTuple):
    """A worker that runs: its slot, identity and process."""

    local_rank: int
    worker: str
    pid: int


class Monitor:
    """Looks after the health of one node.

    Args:
        settings: what the user wants; with the policy "off" nothing is looked at.
        node: its name.
        slots: how many workers it has.
        environment: theirs.
        folders: to which the job writes.
        running: the workers that run; called from the threads.
        report: takes what is news; called from the threads.
        say: takes a line for the user; likewise.
    """

    def __init__(
        self,
        settings: HealthSettings,
        node: str,
        slots: int,
        environment: Mapping[str, str],
        folders: Sequence[str],
        running: Callable[[], Sequence[Running]],
        report: Callable[[list[Finding]], None],
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._slots = slots
        self._environment = dict(environment)
        self._folders = tuple(folders)
        self._running = running
        self._report = report
        self._say = say
        self._health = HostHealth(node)
        self._stopping = threading.Event()
        self._accelerators: Accelerators | None = None
        looks = {"devices": self._watch_devices, "memory": self._watch_memory, "disks": self._watch_disks}
        self._threads = [
            threads.prepare(f"elaunch-{what}", partial(self._guarded, what, look), partial(self._died, what))
            for what, look in looks.items()
            if settings.policy != "off"
        ]

    def start(self) -> None:
        """Starts the threads that watch devices, memory and disks; none under the policy `off`."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends the threads; one that is blocked is left."""
        self._stopping.set()
        if self._accelerators is not None:
            self._accelerators.close()
        end_s = time.monotonic() + JOIN_S
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end_s - time.monotonic()))

    def _guarded(self, what: str, look: Callable[[], None]) -> None:
        """Looks; after what goes wrong, which must not end the job nor pass in silence, again."""
        told = ""
        while True:
            try:
                look()
                return
            except Exception as error:
                if self._stopping.is_set():
                    return
                if told != repr(error):
                    told = repr(error)
                    traceback.print_exc()
                    self._say(f"the health of its {what} cannot be looked at, again in {AGAIN_S:g} s: {told}")
            if self._stopping.wait(AGAIN_S):
                return

    def _died(self, what: str, error: BaseException) -> None:
        self._say(f"the health of its {what} is no longer looked at: {error!r}")

    def _found(self, findings: list[Finding]) -> None:
        if findings and not self._stopping.is_set():
            self._report(findings)

    def _watch_devices(self) -> None:
        if self._accelerators is not None:  # of a look that failed
            self._accelerators.close()
        accelerators = self._accelerators = find_accelerators(self._slots, self._environment)
        devices = {local_rank: DeviceHealth(local_rank, name) for local_rank, name in accelerators.names().items()}
        if not devices:
            return
        every_s = EVERY[accelerators.kind] * self._settings.interval_s
        next_s = time.monotonic()
        while not self._stopping.is_set():
            if time.monotonic() >= next_s:
                for local_rank, reading in accelerators.read().items():
                    self._found(devices[local_rank].on_reading(time.monotonic(), reading))
                next_s = time.monotonic() + every_s
            for xid in accelerators.wait(max(0.0, next_s - time.monotonic())):
                self._found(devices[xid.local_rank].on_xid(time.monotonic(), xid))
                next_s = time.monotonic()  # there may be more to read by now

    def _watch_memory(self) -> None:
        while not self._stopping.wait(self._settings.interval_s / (HURRY if self._health.hurries else 1)):
            memory = host.read_memory()
            workers = {running.worker: host.read_own_bytes(running.pid) for running in self._running()}
            self._found(self._health.on_memory(time.monotonic(), memory, workers))

    def _watch_disks(self) -> None:
        while not self._stopping.wait(DISKS_EVERY * self._settings.interval_s):
            files = {"the agent": host.read_files(os.getpid())}
            files |= {f"worker {running.worker}": host.read_files(running.pid) for running in self._running()}
            known = {who: one for who, one in files.items() if one is not None}
            self._found(self._health.on_files(time.monotonic(), known))
            self._found(self._health.on_disks(time.monotonic(), host.read_disks(self._folders)))
