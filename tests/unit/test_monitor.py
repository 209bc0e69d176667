"""The threads that look after a node: what they find is reported, and a defect or a hang of one is its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import pytest

from elaunch.agent.config import HealthSettings
from elaunch.agent.watch import monitor
from elaunch.agent.watch.monitor import Monitor, Running
from elaunch.detect import host
from elaunch.detect.devices import Cpu, MemoryErrors, Reading, Xid
from elaunch.detect.health import Finding
from elaunch.detect.host import Files, Memory
from tests.helpers import wait_until

WELL = Reading(memory_errors=MemoryErrors(uncorrectable=0))


class Devices(Cpu):
    """GPUs of a test."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.says = {0: WELL, 1: WELL}
        self.reported: list[Xid] = []
        self.hangs = threading.Event()
        self.reads = 0

    def names(self) -> dict[int, str]:
        return {local_rank: f"GPU {local_rank + 4}" for local_rank in self.says}

    def read(self) -> dict[int, Reading]:
        self.reads += 1
        if self.hangs.is_set():
            self._closed.wait(60)
            self.hangs.wait(60)
        return dict(self.says)

    def wait(self, timeout_s: float) -> list[Xid]:
        if self.reported:
            return [self.reported.pop(0)]
        return super().wait(min(timeout_s, 0.01))


class Watched:
    """A monitor, and what it has reported."""

    def __init__(self, policy: str = "drain") -> None:
        self.found: list[Finding] = []
        self.said: list[str] = []
        self.monitor = Monitor(
            HealthSettings(policy, 0.01), "a", 2, {}, ["/"], self.running, self.found.extend, self.said.append
        )

    def running(self) -> Sequence[Running]:
        return [Running(0, "a/0#0", 4711)]

    def whats(self) -> set[str]:
        return {found.what for found in list(self.found)}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    plenty = Memory("this machine", 1 << 40, 1 << 30)
    monkeypatch.setattr(monitor, "find_accelerators", lambda slots, environment: devices)
    monkeypatch.setattr(host, "read_memory", lambda: plenty)
    monkeypatch.setattr(host, "read_files", lambda pid: Files(1, 100))
    monkeypatch.setattr(host, "read_disks", lambda folders: {})
    return devices


@pytest.fixture
def watched(devices: Devices) -> Iterator[Watched]:
    watched = Watched()
    watched.monitor.start()
    yield watched
    devices.hangs.set()  # whoever waits goes on
    watched.monitor.stop()


def test_readings_and_errors_of_devices_are_reported_for_their_slot(devices: Devices, watched: Watched) -> None:
    wait_until(lambda: devices.reads > 1, 30, "a look at the devices")
    devices.says = {0: WELL, 1: Reading(memory_errors=MemoryErrors(uncorrectable=3))}
    devices.reported.append(Xid(0, 79))
    wait_until(lambda: watched.whats() == {"xid 79", "ecc uncorrectable"}, 30, "both findings")
    subjects: Mapping[str, tuple[str, int | None]] = {one.what: (one.subject, one.local_rank) for one in watched.found}
    assert subjects == {"xid 79": ("GPU 4", 0), "ecc uncorrectable": ("GPU 5", 1)}


def test_memory_is_looked_at_while_a_driver_hangs(
    devices: Devices, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = devices.reads
    devices.hangs.set()
    wait_until(lambda: devices.reads > reads, 30, "the look that hangs")
    monkeypatch.setattr(host, "read_memory", lambda: Memory("this machine", 1 << 40, 1 << 40))
    wait_until(lambda: "memory" in watched.whats(), 30, "the finding of the memory")


def test_the_descriptors_of_workers_and_of_the_agent_are_looked_at(
    devices: Devices, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "read_files", lambda pid: Files(99, 100))
    wait_until(lambda: len(watched.found) >= 2, 30, "both findings")
    assert {found.subject for found in watched.found} == {"the agent", "worker a/0#0"}


def test_a_defect_is_told_of_and_the_others_go_on(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Memory:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(host, "read_memory", broken)
    watched = Watched()
    watched.monitor.start()
    try:
        wait_until(lambda: watched.said, 30, "a line")
        assert watched.said == [
            "the health of its memory cannot be looked at, again in 60 s: ZeroDivisionError('a defect')"
        ]
        devices.reported.append(Xid(0, 79))
        wait_until(lambda: watched.whats() == {"xid 79"}, 30, "what another thread finds")
    finally:
        watched.monitor.stop()


def test_with_the_policy_off_nobody_looks(devices: Devices) -> None:
    before = threading.active_count()
    watched = Watched("off")
    watched.monitor.start()
    assert threading.active_count() == before
    watched.monitor.stop()
    assert devices.reads == 0


def test_what_fails_for_a_moment_is_looked_at_again(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    def short() -> Memory:
        raise OSError("too many open files")

    monkeypatch.setattr(monitor, "AGAIN_S", 0.01)
    monkeypatch.setattr(host, "read_memory", short)
    watched = Watched()
    watched.monitor.start()
    try:
        wait_until(lambda: watched.said, 30, "a line")
        monkeypatch.setattr(host, "read_memory", lambda: Memory("this machine", 1 << 40, 1 << 40))
        wait_until(lambda: "memory" in watched.whats(), 30, "the finding of the memory")
        assert len(watched.said) == 1
    finally:
        watched.monitor.stop()
