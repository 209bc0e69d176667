"""Clocks of devices are set, and given back whatever happens; each implementation of `Clocks` is held to the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from elaunch.detect.devices import Clocks
from elaunch.detect.nvml import NvmlClocks
from elaunch.errors import ClockError, ClocksDenied, ClocksUnsupported, DeviceError, DeviceNotFound, NvmlNotFound
from elaunch.policy.dvfs import ClockRange
from elaunch.workers.clocks import ClockLock, SimulatedClocks, clock_range
from tests.helpers import child_environment, wait_until

MAY_SET = "ELAUNCH_TEST_SET_CLOCKS"
"""The environment variable with which a user lets the tests lock the clock of GPU 0 for a moment."""

SUPPORTED = tuple(range(1000, 1651, 50))


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class FakeNvml(SimpleNamespace):
    """The part of the module pynvml that is used, for one GPU that computes; `fails` has the errors of functions."""

    NVML_ERROR_INVALID_ARGUMENT, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_NO_PERMISSION = 2, 3, 4
    NVML_ERROR_NOT_FOUND, NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_FUNCTION_NOT_FOUND = 6, 9, 13
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_CLOCK_GRAPHICS, NVML_CLOCK_MEM = 0, 2
    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__()
        self.fails: dict[str, int] = {}
        self.locked: int | None = None
        self.resets = 0

    def _begin(self, name: str, handle: object = "handle") -> None:
        assert handle == "handle"
        if name in self.fails:
            raise NVMLError(self.fails[name])

    def nvmlInit(self) -> None:
        self._begin("nvmlInit")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index:
            raise NVMLError(self.NVML_ERROR_INVALID_ARGUMENT)
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-aa":
            raise NVMLError(self.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetSupportedMemoryClocks(self, handle: str) -> list[int]:
        self._begin("nvmlDeviceGetSupportedMemoryClocks", handle)
        return [2600, 1500]

    def nvmlDeviceGetSupportedGraphicsClocks(self, handle: str, memory_mhz: int) -> list[int]:
        self._begin("nvmlDeviceGetSupportedGraphicsClocks", handle)
        return list(reversed(SUPPORTED)) if memory_mhz == 2600 else [1000]

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        self._begin("nvmlDeviceGetClockInfo", handle)
        assert kind == self.NVML_CLOCK_GRAPHICS
        return self.locked or 1400

    def nvmlDeviceSetGpuLockedClocks(self, handle: str, min_mhz: int, max_mhz: int) -> None:
        self._begin("nvmlDeviceSetGpuLockedClocks", handle)
        assert min_mhz == max_mhz
        self.locked = min_mhz

    def nvmlDeviceResetGpuLockedClocks(self, handle: str) -> None:
        self._begin("nvmlDeviceResetGpuLockedClocks", handle)
        self.locked = None
        self.resets += 1


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture(params=["simulated", "nvml"])
def clocks(request: pytest.FixtureRequest, nvml: FakeNvml) -> Clocks:
    return NvmlClocks(0) if request.param == "nvml" else SimulatedClocks(SUPPORTED, 1400)


def test_a_device_computes_at_the_clock_that_it_is_locked_at_until_it_is_reset(clocks: Clocks) -> None:
    assert clocks.supported() == SUPPORTED
    assert clocks.current() == 1400
    for mhz in (1650, 1000):
        clocks.lock(mhz)
        assert clocks.current() == mhz
    clocks.reset()
    clocks.reset()
    assert clocks.current() == 1400


@pytest.mark.parametrize("mhz", [0, 999, 1001, 1651])
def test_a_clock_that_is_not_supported_is_refused_and_changes_nothing(clocks: Clocks, mhz: int) -> None:
    clocks.lock(1500)
    with pytest.raises(ClocksUnsupported, match=rf"cannot be locked at {mhz} MHz; it supports 1000\.\.1650 MHz"):
        clocks.lock(mhz)
    assert clocks.current() == 1500


def test_a_range_is_read_of_a_device_that_computes(clocks: Clocks) -> None:
    assert clock_range(clocks) == ClockRange(1400, SUPPORTED)
    assert clock_range(clocks, 1600) == ClockRange(1400, SUPPORTED, 1600)


def test_a_simulated_device_is_as_fast_as_its_clock() -> None:
    linear, half = SimulatedClocks(SUPPORTED, 1400), SimulatedClocks(SUPPORTED, 1000, memory_bound=0.5)
    assert linear.speed == half.speed == 1.0
    linear.lock(1050)
    half.lock(1250)
    assert linear.speed == pytest.approx(0.75)
    assert half.speed == pytest.approx(1 / 0.9)


# -- NVML ---------------------------------------------------------------------------------------------------------


def test_without_pynvml_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(
        NvmlNotFound, match=r"^NVIDIA GPUs are read with pynvml: install nvidia-ml-py, or elaunch\[cuda\]$"
    ):
        NvmlClocks(0)


@pytest.mark.parametrize("device", [1, "GPU-bb"])
def test_a_device_that_is_not_there_is_named(nvml: FakeNvml, device: int | str) -> None:
    with pytest.raises(DeviceNotFound, match=rf"^NVML finds no GPU {device} \(error \d\): look at `nvidia-smi -L`$"):
        NvmlClocks(device)
    assert NvmlClocks("GPU-aa").supported() == SUPPORTED


def test_without_a_driver_there_is_no_device(nvml: FakeNvml) -> None:
    nvml.fails["nvmlInit"] = nvml.NVML_ERROR_DRIVER_NOT_LOADED
    with pytest.raises(DeviceNotFound, match=r"^NVML cannot be used \(error 9\): is NVIDIA's driver loaded\?$"):
        NvmlClocks(0)


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        (FakeNvml.NVML_ERROR_NO_PERMISSION, ClocksDenied, "{} of GPU 0 needs root: run as root, or without DVFS"),
        (FakeNvml.NVML_ERROR_NOT_SUPPORTED, ClocksUnsupported, "GPU 0 or its driver does not have {}"),
        (FakeNvml.NVML_ERROR_FUNCTION_NOT_FOUND, ClocksUnsupported, "GPU 0 or its driver does not have {}"),
        (FakeNvml.NVML_ERROR_GPU_IS_LOST, ClockError, "{} of GPU 0 failed: error 15"),
    ],
)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("nvmlDeviceGetSupportedGraphicsClocks", lambda clocks: clocks.supported()),
        ("nvmlDeviceGetClockInfo", lambda clocks: clocks.current()),
        ("nvmlDeviceSetGpuLockedClocks", lambda clocks: clocks.lock(1500)),
        ("nvmlDeviceResetGpuLockedClocks", lambda clocks: clocks.reset()),
    ],
)
def test_what_nvml_refuses_is_one_line_that_says_why(
    nvml: FakeNvml, name: str, call: Callable[[Clocks], object], code: int, kind: type[ClockError], message: str
) -> None:
    clocks = NvmlClocks(0)
    nvml.fails[name] = code
    with pytest.raises(ClockError, match=f"^{re.escape(message.format(name))}$") as error:
        call(clocks)
    assert type(error.value) is kind


# -- giving back --------------------------------------------------------------------------------------------------


def test_a_lock_follows_the_plan_and_gives_the_device_back_once(nvml: FakeNvml) -> None:
    with ClockLock(NvmlClocks(0)) as lock:
        for mhz in (None, 1500, 1500, 1650):
            lock.hold(mhz)
            assert lock.held_mhz == nvml.locked == mhz
        assert nvml.resets == 0
        lock.hold(None)
        assert (lock.held_mhz, nvml.locked, nvml.resets) == (None, None, 1)
        lock.hold(1600)
    lock.close()
    assert (lock.held_mhz, nvml.locked, nvml.resets) == (None, None, 2)


def test_an_exception_in_the_block_gives_the_device_back(nvml: FakeNvml) -> None:
    with pytest.raises(KeyboardInterrupt), ClockLock(NvmlClocks(0)) as lock:  # noqa: PT012
        lock.hold(1500)
        raise KeyboardInterrupt
    assert nvml.locked is None


def test_a_lock_that_is_refused_leaves_what_was_held(nvml: FakeNvml) -> None:
    with ClockLock(NvmlClocks(0)) as lock:
        nvml.fails["nvmlDeviceSetGpuLockedClocks"] = nvml.NVML_ERROR_NO_PERMISSION
        with pytest.raises(ClocksDenied):
            lock.hold(1500)
        assert (lock.held_mhz, nvml.locked) == (None, None)
        nvml.fails.clear()
        lock.hold(1500)
        with pytest.raises(ClocksUnsupported):
            lock.hold(1501)
        assert lock.held_mhz == nvml.locked == 1500
    assert nvml.resets == 1


def test_a_reset_that_fails_is_tried_again(nvml: FakeNvml) -> None:
    lock = ClockLock(NvmlClocks(0))
    lock.hold(1500)
    nvml.fails["nvmlDeviceResetGpuLockedClocks"] = nvml.NVML_ERROR_GPU_IS_LOST
    with pytest.raises(ClockError, match="failed"):
        lock.close()
    assert lock.held_mhz == 1500
    nvml.fails.clear()
    lock.close()
    assert nvml.locked is None


# What is registered first is called last.
AT_EXIT = """
import atexit, os, sys
from elaunch.workers.clocks import ClockLock, SimulatedClocks
clocks = SimulatedClocks((1400, 1500), 1400)
atexit.register(lambda: print(role, clocks.current(), flush=True))
role = "worker"
lock = ClockLock(clocks)
lock.hold(1500)
print("locked", clocks.current(), flush=True)
"""


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("", ["worker 1400"]),
        ("sys.exit(3)", ["worker 1400"]),
        ("raise RuntimeError('of a script')", ["worker 1400"]),
        ("lock.close()", ["worker 1400"]),
        # A child does not give back what it did not lock, nor does its end.
        ("child = os.fork()\nif child: os.waitpid(child, 0)\nelse: role = 'child'", ["child 1500", "worker 1400"]),
    ],
    ids=["end", "exit", "exception", "closed before", "fork"],
)
def test_the_end_of_the_process_gives_the_device_back(end: str, expected: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"{AT_EXIT}{end}\n"], env=child_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["locked 1500", *expected], done.stderr


# -- a real device ------------------------------------------------------------------------------------------------


@pytest.fixture
def gpu() -> NvmlClocks:
    try:
        clocks = NvmlClocks(0)
        clocks.supported()
    except DeviceError as error:
        pytest.skip(str(error))
    return clocks


@pytest.mark.gpu
def test_a_gpu_tells_its_clocks(gpu: NvmlClocks) -> None:
    supported = gpu.supported()
    assert list(supported) == sorted(set(supported))
    assert 0 < gpu.current() <= supported[-1]
    assert clock_range(gpu).supported_mhz == supported


@pytest.mark.gpu
@pytest.mark.skipif(not os.environ.get(MAY_SET), reason=f"changes the clock of GPU 0 for a moment: set {MAY_SET}=1")
def test_a_gpu_is_locked_and_given_back(gpu: NvmlClocks) -> None:
    mhz = gpu.supported()[len(gpu.supported()) // 2]
    with ClockLock(gpu) as lock:
        try:
            lock.hold(mhz)
        except (ClocksDenied, ClocksUnsupported) as error:
            pytest.skip(str(error))
        # An idle GPU may be below.
        wait_until(lambda: gpu.current() <= mhz, 10, f"GPU 0 to be at {mhz} MHz")
    assert lock.held_mhz is None
